"""Two answers are compared by masking only what differs. The result is that of masking both texts whole."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runguard.core import identity as masking
from runguard.core.identity import AnswerBook, are_alike, mask
from tests.kit.examples import examples

VOLATILE = [
    "2026-11-15T09:30:00Z",
    "2026-11-15 09:31:07.5",
    "09:30:00",
    "11:02:59",
    "123e4567-e89b-12d3-a456-426614174000",
    "0x7f3a9c",
    "0xdeadbeef",
    "4f2a9c0d1e8b",
    "9b1c7de0a3f5",
    "1763199000",
    "1763199060",
    "5 ms",
    "17ms",
    "3 seconds",
    "request id abc-1",
    "request_id=x7",
    'trace_id: "q9"',
    "req id: <a@b>",
    "elapsed=12",
    "took: 9ms",
    "created_at: 5",
    '"updated_at":"x"',
]
PLAIN = [
    "request",
    "req",
    "id",
    "trace",
    "span",
    "left",
    "remaining",
    "to",
    "go",
    "up",
    "until",
    "eta",
    "lag",
    "progress",
    "position",
    "through",
    "event",
    "call",
    "message",
    "msg",
    "session",
    "correlation",
    "took",
    "elapsed",
    "pid",
    "uptime",
    "ms",
    "s",
    "sec",
    "min",
    "abc",
    "deadbeef",
    "a",
    "b",
    "job",
    "done",
    "1",
    "2",
    "17",
    "4%",
    "exit",
    "ok",
    "_at",
    "x_at",
    "ſession",
]
BETWEEN = [
    " ",
    "  ",
    "\n",
    "\\n",
    "\\t",
    "\\",
    "",
    "",
    ", ",
    ": ",
    "=",
    ' "',
    '":"',
    "; ",
    "{",
    "}",
    "[",
    "](",
    "/",
    "<",
    ">",
]
BETWEEN += ["-", "_", ".", "|", "!", "#", "~", "é", "\u2003"]
piece = st.sampled_from(VOLATILE + PLAIN + BETWEEN)
texts = st.lists(piece, max_size=24).map("".join)


@st.composite
def versions(draw: st.DrawFn) -> tuple[str, str]:
    """One text, and the same text with a few pieces replaced, added or dropped."""
    words = draw(st.lists(st.tuples(piece, st.sampled_from([" ", " ", "\n", ", ", "; ", ""])), min_size=1, max_size=40))
    one = [part for pair in words for part in pair]
    other = list(one)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(len(other) - 1, 0)))
        other[at : at + draw(st.integers(0, 2))] = draw(st.lists(piece, max_size=2))
    return "".join(one), "".join(other)


@given(versions())
@examples(1_500)
@example(("took 5 s left", "took 7 s left"))
@example(("job abc request id 17", "job abc request id 18"))
@example(("a b 5 ms", "a b 5 msg"))
def test_the_result_is_that_of_masking_both_texts(pair: tuple[str, str]) -> None:
    one, other = pair
    assert are_alike(one, other) == (mask(one) == mask(other))


@given(texts, texts, texts, texts)
@examples(500)
def test_the_result_is_that_of_masking_both_texts_around_a_change(
    before: str, one: str, other: str, after: str
) -> None:
    left, right = before + one + after, before + other + after
    assert are_alike(left, right) == (mask(left) == mask(right))


def test_only_the_part_that_differs_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"2026-11-15 09:30:{n % 60:02} INFO worker finished job number {n}; ok" for n in range(1_000)]
    one = "\n".join(lines)
    other = one.replace(
        "09:30:42 INFO worker finished job number 522;", "09:31:43 INFO worker finished job number 522;"
    )
    assert one != other
    masked: list[str] = []
    real = masking._mask_parts
    monkeypatch.setattr(masking, "_mask_parts", lambda text: masked.append(text) or real(text))  # type: ignore[func-returns-value]
    assert are_alike(one, other)
    assert 0 < sum(map(len, masked)) < 400


def test_a_text_that_differs_everywhere_is_still_compared() -> None:
    def report(hour: int) -> str:
        return "\n".join(
            f"2026-11-15 {hour:02}:30:{n % 60:02} INFO worker finished job number {n};" for n in range(500)
        )

    assert are_alike(report(9), report(11))
    assert not are_alike(report(9), report(11) + " and one more")


# ---- the book of answers --------------------------------------------------------------------------------------------


def long_answer(state: str, minute: int) -> dict[str, str]:
    page = "the quick brown fox jumps over the lazy dog; " * 650
    return {"result": f"{page} state {state} at 2026-11-15T09:{minute:02}:00Z {page}"}


def test_a_long_answer_with_another_time_is_no_news_at_its_first_repetition() -> None:
    book = AnswerBook()
    assert [book.name(b"call", long_answer("idle", n))[1] for n in range(4)] == [True, False, False, False]


def test_a_long_answer_with_another_state_is_news() -> None:
    book = AnswerBook()
    assert [book.name(b"call", long_answer(f"step {n}", n))[1] for n in range(9)] == [True] * 9


def test_answers_that_take_turns_are_recognised() -> None:
    book = AnswerBook()
    states = ["idle", "busy", "full", "shut"]
    news = [book.name(b"call", long_answer(states[n % 4], n))[1] for n in range(12)]
    assert news == [True] * 4 + [False] * 8


HIDDEN = [part for part in VOLATILE if mask(f"x {part} y") == "x ~ y"]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from(HIDDEN)), max_size=30))
def test_the_names_are_those_of_whole_masks(steps: list[tuple[int, int, str]]) -> None:
    """Up to as many different answers of a call as the book keeps."""
    book = AnswerBook()
    seen: dict[tuple[int, str], int] = {}
    for call, state, volatile in steps:
        text = f"state {state} of the job, {volatile} and nothing else"
        name, new = book.name(b"%d" % call, text)
        key = (call, mask(text))
        assert new == (key not in seen)
        assert seen.setdefault(key, name) == name
