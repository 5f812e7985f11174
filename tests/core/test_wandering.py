"""Answers to the same calls that differ in their numbers alone."""

from random import Random

import pytest

from runguard.core.decision import Rungs
from runguard.core.rules.repetition import SameCall
from tests.kit.detectors import answer, results
from tests.kit.driver import Driver

MANY = {"max_nudges": 100}


def wander(n: int) -> float:
    return round(2.3 + Random(n).random(), 4)


def test_one_call_whose_numbers_wander_is_nudged_and_much_later_stopped(drive: type[Driver]) -> None:
    d = drive(**MANY)
    words = [d.tool("validate", says=f"done, score {wander(n)}, loss {wander(n + 99)}").word for n in range(70)]
    assert words.index("nudge") in (5, 6, 7)
    assert 58 < words.index("stop") < 66


def test_one_long_call_whose_numbers_wander_is_stopped_soon(drive: type[Driver]) -> None:
    d = drive(**MANY)
    words = [d.tool("edit", {"text": "x" * 300}, says=f"lines {17 * n % 29} to {31 * n % 23}").word for n in range(20)]
    assert 10 < words.index("stop") < 15


@pytest.mark.parametrize(
    "says",
    [
        pytest.param(lambda n: f"{n} percent, load {wander(n)}", id="a percentage grows"),
        pytest.param(lambda n: {"left": 99 - n, "node": n % 3}, id="a rest falls"),
        pytest.param(lambda n: f"score {wander(n)} of model {'abcdefghijklmnop'[n]}", id="the words are new"),
        pytest.param(lambda n: [wander(k) for k in range(n)], id="a list grows"),
    ],
)
def test_an_answer_that_moves_on_is_left_alone(drive: type[Driver], says: object) -> None:
    d = drive(**MANY)
    assert {d.tool("look", {"text": "x" * 300}, says=says(n)).word for n in range(16)} == {"allow"}  # type: ignore[operator]


def test_six_calls_in_turn_whose_numbers_wander_are_nudged(drive: type[Driver]) -> None:
    d = drive(**MANY)
    words = [d.tool("abcdef"[n % 6], says=f"done, value {wander(n)}").word for n in range(40)]
    assert 20 < words.index("nudge") < 36
    assert "stop" not in words


def test_a_new_call_within_the_circle_starts_anew(drive: type[Driver]) -> None:
    d = drive(**MANY)
    for n in range(40):
        assert d.tool("measure", says=f"value {wander(n)}").word == "allow"
        assert d.tool("adjust", {"by": n}, says="adjusted").word == "allow"


def test_explicit_rungs_of_same_call_are_all_there_is(drive: type[Driver]) -> None:
    d = drive(**MANY, rules={"same_call": {"stop": 30}})
    words = [d.tool("validate", says=f"done, score {wander(n)}").word for n in range(30)]
    assert words == [*["allow"] * 19, "nudge", *["allow"] * 9, "stop"]


def test_memory_is_bounded() -> None:
    rule = SameCall(Rungs(stop=9), wandering=Rungs(nudge=6, block=12, stop=60))
    for n in range(2_000):
        rule.observe(results(answer(f"call {n}", f"{n}"), news=True))
    assert len(rule._said) <= 6
