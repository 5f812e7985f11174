"""A message that a program wrote starts no count anew; a message of a person does."""

from typing import Any

import pytest

from runguard.engine.runs import LastRuns
from tests.kit.driver import Driver

PROCEED = "Please proceed to the next step on your own. Do not ask for help."
FORMAT = "Your last message held no call of a tool. Every message must hold exactly one call; call finish when done."


def turns(d: Driver, count: int, message: Any, **info: Any) -> list[str]:
    """What is said about one call in each of so many turns of a session."""
    words = []
    for n in range(count):
        said = message(n) if callable(message) else message
        d.start(f"run {n}", app="app", user="u", session="s", message=said, **info)
        words.append(d.tool("parse", {"n": n}, says={"status": "partial_parse_error"}, run=f"run {n}").word)
        d.guard.end(f"run {n}")
    return words


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(PROCEED, id="go on"),
        pytest.param(FORMAT, id="a long complaint"),
        pytest.param(lambda n: f"Continue. You have {50 - n} steps left.", id="with a counter"),
        pytest.param(lambda n: ("Go on.", "Please continue.", "Keep going!")[n % 3], id="in other words"),
    ],
)
def test_a_loop_goes_on_counting_under_an_automatic_user(message: Any) -> None:
    words = turns(Driver(), 9, message)
    assert "nudge" in words
    assert words[-1] == "stop"


@pytest.mark.parametrize(
    "message",
    [
        pytest.param("any news?", id="the same short question"),
        pytest.param("yes", id="a word"),
        pytest.param("please make an exception", id="an insisting user"),
        pytest.param(lambda n: f"question {'abcdefghi'[n] * 3} about {'jklmnopqr'[n] * 4}", id="other words"),
        pytest.param(lambda n: f"please continue with {'abcdefghi'[n] * 3} and {'jklmnopqr'[n] * 4}", id="other work"),
        pytest.param("please", id="a polite word"),
        pytest.param("", id="no text"),
    ],
)
def test_a_person_starts_every_count_anew(message: Any) -> None:
    assert set(turns(Driver(), 9, message)) == {"allow"}


def test_an_app_can_mark_messages_as_automatic() -> None:
    words = turns(Driver(), 9, lambda n: f"text {'abcdefghi'[n] * 4}", is_automatic=True)
    assert words[-1] == "stop"


def test_a_person_among_automatic_messages_starts_anew() -> None:
    words = turns(Driver(), 12, lambda n: PROCEED if n % 4 else f"what about {'abcdefghijkl'[n] * 3} then?")
    assert "stop" not in words


def test_new_work_under_an_automatic_user_is_left_alone() -> None:
    d = Driver()
    for n in range(30):
        d.start(f"run {n}", app="app", user="u", session="s", message=PROCEED)
        assert d.tool("read", {"n": n}, says=f"content {n}", run=f"run {n}").word == "allow"
        d.guard.end(f"run {n}")


def test_of_a_persons_run_only_the_words_of_the_message_are_kept() -> None:
    d, last = Driver(), LastRuns()
    for n in range(200):
        d.start("run", app="app", user="u", session=f"s{n}", message=f"question {n}")
        last.note(d.guard.runs["run"])
    assert len(last._last) == 64
    assert all(one.book is None and not one.detectors for one in last._last.values())
