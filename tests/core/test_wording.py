"""Counts in the text of a trip agree with their noun."""

from runguard.core.decision import _counted
from tests.kit.examples import each_row


@each_row(
    ("number", "unit", "text"),
    [
        (1, "re-entries", "1 re-entry"),
        (2, "re-entries", "2 re-entries"),
        (1, "model calls", "1 model call"),
        (1, "USD", "1 USD"),
    ],
)
def test_a_count_agrees_with_its_noun(number: int, unit: str, text: str) -> None:
    assert _counted(number, unit) == text
