"""Fields have more tokens than text of the same length, and an answer that is one text is text."""

from google.adk.models.llm_request import LlmRequest
from google.genai import types

from runguard.adk.runs import project


def _tokens(response: dict[str, object]) -> int:
    part = types.Part(function_response=types.FunctionResponse(name="look", response=response))
    return project(LlmRequest(contents=[types.Content(role="user", parts=[part])]), None).upper


def test_an_answer_with_fields_is_estimated_higher_than_its_length_in_text() -> None:
    rows = [{"sku": number, "stock": 7, "city": "Bonn"} for number in range(200)]
    assert _tokens({"rows": rows}) > 1.1 * _tokens({"result": str(rows)})


def test_an_answer_that_is_one_long_text_is_text() -> None:
    text = "nothing has changed since " * 200
    assert len(text) / 3 < _tokens({"result": text, "status": "ok"}) < len(text) / 3 * 1.05
