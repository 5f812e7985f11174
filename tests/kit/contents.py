"""What ADK's events and requests contain."""

from google.genai.types import Content, Part


def parts(content: Content | None) -> list[Part]:
    """The parts of a content. Fails the test when there are none."""
    assert content is not None
    assert content.parts is not None
    return content.parts
