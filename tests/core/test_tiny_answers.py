"""The shortest answers are short ones: a size below zero means an answer that is too large to be copied."""

from typing import Any

from runguard.core.identity import AnswerBook
from tests.kit.examples import each_row


@each_row("value", [[], {}, "", 0, 1, True, None, 0.5, "a"])
def test_a_tiny_answer_has_a_size(value: Any) -> None:
    book = AnswerBook()
    book.name(b"call", value)
    assert 0 <= book.size < 10
