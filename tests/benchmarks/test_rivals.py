"""Every rival acts where its product says it does, and one step earlier it does not."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from replays import by_rival
from rivals import RIVALS
from shapes import turn, user, work
from tests.kit.examples import each_row

Steps = Iterator[dict[str, Any]]
CALL = ("look", {"at": "it"}, "seen")


def equal(times: int, *, answers: bool = True, text: str = "") -> Steps:
    """The same call; with ``answers`` the same answer too, else a new one each time."""
    for n in range(times):
        yield from turn(("look", {"at": "it"}, "seen" if answers else f"seen {n}"), text=text)


def raised(times: int) -> Steps:
    for n in range(times):
        yield from turn(("look", {"at": n}, "broken"), raised=True)


def in_turn(rounds: int, length: int = 2) -> Steps:
    for n in range(rounds * length):
        yield from turn(("look", {"at": n % length}, f"seen {n % length}"))


def said(*words: str) -> Steps:
    for text in words:
        yield from turn(text=text)


def letter(name: str, steps: Steps) -> str:
    return by_rival(RIVALS[name](), {"steps": list(steps)}).letter


# rival, what makes it act, what it does, and the same one step short of it
CASES: list[tuple[str, Callable[[], Steps], str, Callable[[], Steps]]] = [
    ("Gemini CLI", lambda: equal(5), "n", lambda: equal(4)),
    ("Gemini CLI", lambda: equal(6), "S", lambda: equal(5)),
    ("Gemini CLI", lambda: in_turn(5, 5), "n", lambda: in_turn(4, 5)),
    (
        "Gemini CLI",
        lambda: said("I am still working on the very same thing as before. " * 20),
        "n",
        lambda: said("I am still working on this. " * 5),
    ),
    ("Gemini CLI before 2026-07", lambda: equal(6), "S", lambda: in_turn(9)),
    (
        "Gemini CLI, patterns repaired",
        lambda: equal(6),
        "S",
        lambda: said("- the same item in a list that goes on and on\n" * 20),
    ),
    ("OpenHands SDK", lambda: equal(4), "S", lambda: equal(4, answers=False)),
    ("OpenHands SDK", lambda: in_turn(3), "S", lambda: in_turn(2)),
    ("OpenHands SDK", lambda: said("a", "b", "c", ""), "S", lambda: said("a", "b", "")),
    ("OpenHands SDK, thoughts aside", lambda: equal(4, text="hm"), "S", lambda: equal(3)),
    ("OpenHands V0, headless", lambda: equal(4), "S", lambda: equal(3)),
    ("OpenHands V0, headless", lambda: said("a", "a", "a", "b"), "S", lambda: said("a", "b", "c", "d")),
    ("OpenHands V0, interactive", lambda: equal(4), "S", lambda: iter([*equal(3), user("go on"), *equal(3)])),
    ("goose, limit 3", lambda: equal(4), "b", lambda: equal(3)),
    ("goose, limit 5", lambda: equal(6, answers=False), "b", lambda: equal(5)),
    ("Roo Code", lambda: raised(4), "S", lambda: raised(3)),
    ("Roo Code", lambda: said("a", "b", "c", "d", "e"), "S", lambda: said("a", "b", "c", "d")),
    ("Roo Code, repetition only", lambda: equal(4), "S", lambda: iter([*equal(3), *raised(9)])),
    ("opencode, as shipped", lambda: turn(CALL, CALL, CALL), "S", lambda: equal(9)),
    ("opencode, as documented", lambda: equal(3), "S", lambda: iter([*equal(2), user("go on"), *equal(2)])),
    ("Cline", lambda: equal(3), "n", lambda: equal(2)),
    ("Cline", lambda: equal(5, answers=False), "S", lambda: raised(6)),
    ("Cline CLI", lambda: iter([*raised(3), *work(1)]), "S", lambda: raised(3)),
    ("Cline, change 12543", lambda: equal(20, answers=False), "S", lambda: equal(2)),
    ("Crush", lambda: iter([*equal(10), *said("")]), "S", lambda: iter([*equal(9), *said("")])),
    ("Crush", lambda: iter([*work(4), *equal(6), *said("")]), "S", lambda: iter([*work(5), *equal(5), *said("")])),
    ("OpenClaw, enabled", lambda: equal(11), "n", lambda: equal(10)),
    ("OpenClaw, enabled", lambda: in_turn(10), "b", lambda: in_turn(4)),
    ("OpenClaw, enabled", lambda: equal(31), "S", lambda: in_turn(4)),
    ("Qwen Code", lambda: equal(5), "S", lambda: in_turn(40)),
    ("Qwen Code", lambda: in_turn(51), "S", lambda: in_turn(50)),
    ("Qwen Code, heuristics on", lambda: work(8), "S", lambda: work(7)),
    ("stella", lambda: equal(3), "n", lambda: equal(9, answers=False)),
    ("stella", lambda: equal(4), "S", lambda: equal(2)),
    ("crewAI", lambda: equal(2), "b", lambda: in_turn(3)),
    ("crewAI", lambda: work(26), "S", lambda: work(25)),
    ("crewAI, no step cap", lambda: equal(2), "b", lambda: work(99)),
    ("browser-use", lambda: equal(5), "n", lambda: equal(4)),
    (
        "browser-use, actions only",
        lambda: in_turn(5),
        "n",
        lambda: (step for n in range(9) for step in turn(("look", {"at": n}, "seen"))),
    ),
]


@each_row(
    ("name", "acts", "does", "short_of_it"),
    CASES,
)
def test_a_rival_acts_at_its_threshold_and_not_before(
    name: str, acts: Callable[[], Steps], does: str, short_of_it: Callable[[], Steps]
) -> None:
    assert letter(name, acts()) == does
    assert letter(name, short_of_it()) not in ("S", "b", does)


@pytest.mark.parametrize("name", ["goose, as shipped", "OpenClaw, as shipped"])
def test_a_rival_that_ships_without_its_guard_does_nothing(name: str) -> None:
    assert letter(name, equal(99)) == "."


def test_no_rival_minds_work_that_brings_news() -> None:
    seven = {name: letter(name, work(7)) for name in RIVALS}
    assert set(seven.values()) == {"."}, seven
