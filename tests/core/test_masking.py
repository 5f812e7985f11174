"""Ids and times are masked; answers get names."""

from collections import deque
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runguard.core import identity as masking
from runguard.core.identity import AnswerBook, are_alike, mask
from tests.kit.examples import each_row, examples
from tests.kit.fingerprints import GENEROUS_S, cpu_seconds

# ---- masking --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param("at 2026-11-15T09:30:00Z done", "at 2026-11-15T09:31:12Z done", id="ISO time"),
        pytest.param(
            "at 2026-11-15 09:30:00.123+02:00", "at 2026-11-15 09:30:07.001+02:00", id="ISO time with zone and fraction"
        ),
        pytest.param("[09:30:00] queued", "[11:02:59] queued", id="clock time"),
        pytest.param('{"now":1763199000}', '{"now":1763199060}', id="epoch seconds"),
        pytest.param("1763199000123", "1763199000999", id="epoch milliseconds"),
        pytest.param("1763199000.123", "1763199001.5", id="epoch with fraction"),
        pytest.param("job 123e4567-e89b-12d3-a456-426614174000", "job 00000000-e89b-12d3-a456-42661417400f", id="UUID"),
        pytest.param("commit 4f2a9c0d1e8b4f2a9c0d", "commit 9b1c7de0a3f59b1c7de0", id="long hex"),
        pytest.param("ETag 4F2A9C0D1E8B4F2A", "ETag 9B1C7DE0A3F59B1C", id="long hex in capitals"),
        pytest.param("<Foo at 0x7f3a2c10>", "<Foo at 0x7f3a9d44>", id="address"),
        pytest.param('{"request_id":"req-a1"}', '{"request_id":"req-b2"}', id="request id"),
        pytest.param("requestId=abc", "requestId=def", id="camel-case id"),
        pytest.param("trace-id: t1", "trace-id: t2", id="trace id"),
        pytest.param(
            "Access denied (Request ID: K2X9PQ7T)", "Access denied (Request ID: ZZ81MMN4)", id="request id in prose"
        ),
        pytest.param("done in 12 ms", "done in 15.3 ms", id="milliseconds"),
        pytest.param("took 3s", "took 41s", id="seconds"),
        pytest.param("waited 1 second", "waited 2 seconds", id="one second, two seconds"),
        pytest.param("started 1 minute ago", "started 5 minutes ago", id="one minute, five minutes"),
        pytest.param('{"duration_ms": 12}', '{"duration_ms": 99}', id="duration field"),
        pytest.param('{"created_at": "yesterday"}', '{"created_at": "today"}', id="time field"),
        pytest.param("elapsed: 0.31", "elapsed: 4.02", id="elapsed"),
        pytest.param(
            '{"rows":[],"execution_time_ms":11.7}', '{"rows":[],"execution_time_ms":13.2}', id="execution time"
        ),
        pytest.param(
            '{"sent":true,"messageId":"<a1@mail>"}', '{"sent":true,"messageId":"<b2@mail>"}', id="message id of a mail"
        ),
        pytest.param(
            '{"request_id":"123e4567-e89b-12d3-a456-426614174000"}',
            '{"request_id":"00000000-e89b-12d3-a456-42661417400f"}',
            id="a request id alone",
        ),
        pytest.param('{"result":"2026-11-15T09:30:00Z"}', '{"result":"2026-11-15T09:30:07Z"}', id="a clock alone"),
        pytest.param(
            '{"valid_until":"2026-11-15T09:30:00Z"}', '{"valid_until":"2026-11-15T09:30:07Z"}', id="a date to wait for"
        ),
        pytest.param(
            '{"order_id":"123e4567-e89b-12d3-a456-426614174000"}',
            '{"order_id":"00000000-e89b-12d3-a456-42661417400f"}',
            id="what was made again",
        ),
    ],
)
def test_what_differs_between_two_tellings_is_masked(one: str, other: str) -> None:
    assert mask(one) == mask(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param("12 rows", "13 rows", id="count"),
        pytest.param("progress 40%", "progress 48%", id="percentage"),
        pytest.param("exit code 1", "exit code 2", id="exit code"),
        pytest.param("main.py, line 41", "main.py, line 42", id="line number"),
        pytest.param("main.py:41: error", "main.py:42: error", id="line number after a colon"),
        pytest.param('{"status":"RUNNING","progress":8}', '{"status":"RUNNING","progress":16}', id="progress"),
        pytest.param("step 3 of 10", "step 4 of 10", id="step"),
        pytest.param("page 1", "page 2", id="page"),
        pytest.param("HTTP 404", "HTTP 500", id="HTTP status"),
        pytest.param("price 19.99", "price 20.99", id="price"),
        pytest.param("3 tests failed", "2 tests failed", id="tests"),
        pytest.param("deadbeef", "cafebabe", id="short hex word"),
        pytest.param("facade", "decade", id="words of hex letters"),
        pytest.param("order 100234", "order 100235", id="order number"),
        pytest.param("took the bus", "took the train", id="a word that names a duration elsewhere"),
        pytest.param('{"state":"running","eta":"00:12:00"}', '{"state":"running","eta":"00:10:00"}', id="time left"),
        pytest.param("copying, 5 minutes remaining", "copying, 4 minutes remaining", id="time left in words"),
        pytest.param(
            "replayed up to 2026-11-15T09:30:00Z", "replayed up to 2026-11-15T10:30:00Z", id="how far it has come"
        ),
        pytest.param('{"lag_seconds":"40 s"}', '{"lag_seconds":"12 s"}', id="lag"),
        pytest.param(
            '{"result":"123e4567-e89b-12d3-a456-426614174000"}',
            '{"result":"00000000-e89b-12d3-a456-42661417400f"}',
            id="nothing but an id",
        ),
        pytest.param("12.4 ms", "15.1 ms", id="nothing but a measurement"),
    ],
)
def test_what_tells_progress_is_kept(one: str, other: str) -> None:
    assert mask(one) != mask(other)


@each_row(
    "text",
    [
        "a" * 65_536,
        "1" * 65_536,
        "a1" * 32_000,
        "request_id " * 6_000,
        "a_" * 32_000,
        "2026-11-15T09:30:0" * 3_600,
        "1400000000" * 6_500,
        "duration" * 8_000,
        " " * 65_536,
    ],
)
def test_masking_the_longest_text_is_linear(text: str) -> None:
    assert cpu_seconds(lambda: mask(text)) < 10 * GENEROUS_S


# ---- the names of answers -------------------------------------------------------------------------------------------


CALL = b"call"


def test_the_same_answer_to_the_same_call_is_no_news() -> None:
    book = AnswerBook()
    (first, new), (again, new_again) = book.name(CALL, {"a": [1]}), book.name(CALL, {"a": [1]})
    assert first == again
    assert (new, new_again) == (True, False)


def test_an_answer_that_is_changed_in_place_has_changed() -> None:
    book, answer = AnswerBook(), {"lines": ["one"]}
    first, _ = book.name(CALL, answer)
    answer["lines"].append("two")
    second, new = book.name(CALL, answer)
    assert new
    assert second != first


def test_the_same_answer_to_another_call_is_news() -> None:
    book = AnswerBook()
    book.name(b"one", "x")
    assert book.name(b"two", "x")[1] is True


def test_a_changed_answer_is_news() -> None:
    book = AnswerBook()
    first, _ = book.name(CALL, "progress 8")
    second, new = book.name(CALL, "progress 16")
    assert new
    assert second != first


def test_what_one_agent_knows_is_news_to_another() -> None:
    book = AnswerBook()
    news = [book.name(CALL, "x", agent) for agent in ("writer", "reviewer", "writer", "reviewer")]
    assert [new for _, new in news] == [True, True, False, False]
    assert len({name for name, _ in news}) == 1


def test_an_answer_that_comes_back_is_no_news() -> None:
    book = AnswerBook()
    assert [book.name(CALL, text)[1] for text in ("on", "off", "on", "off")] == [True, True, False, False]


def test_two_answers_with_volatile_parts_that_alternate_are_soon_no_news() -> None:
    book = AnswerBook()
    news = [book.name(CALL, f"{'on' if n % 2 else 'off'} at 2026-11-15T09:{10 + n}:00Z")[1] for n in range(12)]
    assert news[:2] == [True, True]
    assert not any(news[4:])


def test_nothing_is_masked_until_a_call_repeats_with_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    masked: list[str] = []

    def mask(text: str) -> str:
        masked.append(text)
        return text

    monkeypatch.setattr(masking, "_mask_parts", mask)
    book = AnswerBook()
    for n in range(100):
        book.name(b"%d" % n, f"answer {n}")
        book.name(b"%d" % n, f"answer {n}")
    assert masked == []
    book.name(b"99", "answer 100")
    assert masked == ["answer 99", "answer 100"]


def test_a_change_of_the_world_makes_old_answers_news_again() -> None:
    book = AnswerBook()
    book.name(CALL, "x")
    book.forget_pairs()
    assert book.name(CALL, "x")[1] is True


def kept(book: AnswerBook) -> list[Any]:
    """Everything that a book holds, taken apart."""
    seen: dict[int, Any] = {}
    pending: list[Any] = [getattr(book, name) for name in AnswerBook.__slots__]
    while pending:
        item = pending.pop()
        if id(item) not in seen:
            seen[id(item)] = item
            if isinstance(item, dict):
                pending += [*item, *item.values()]
            elif isinstance(item, list | tuple | set | frozenset | deque):
                pending += item
            else:
                pending += [getattr(item, name) for name in getattr(type(item), "__slots__", ())]
    return list(seen.values())


def test_the_book_is_bounded() -> None:
    book = AnswerBook()
    sizes = []
    for start in (0, 6_000):
        for n in range(start, start + 6_000):
            book.name(b"%d" % (n % 3_000), f"{'y' * 100} {n}")
            book.name(b"often", f"answer {n}")
        sizes.append(len(kept(book)))
    assert sizes[1] < 1.1 * sizes[0]
    assert sizes[1] < 20 * AnswerBook.CALLS


@each_row("period", [1, 2, 5, 40, 200])
def test_a_circle_of_calls_with_volatile_answers_is_no_news_from_its_third_round(period: int) -> None:
    book = AnswerBook()
    news = [
        book.name(b"%d" % (n % period), f"result {n % period} at 2026-11-15T09:30:{n % 60:02}Z")[1]
        for n in range(period * 4)
    ]
    assert all(news[:period])
    assert not any(news[period * 2 :])


# ---- Two answers are compared by masking only what differs. The result is that of masking both texts whole


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
