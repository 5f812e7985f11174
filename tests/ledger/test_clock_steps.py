"""A clock that is set back opens no window again: neither one that is over, nor a fresh one."""

import logging
from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runguard import BudgetExceededError, guard, run
from runguard.core.money import Window
from runguard.ledger.memory import MemoryLedger
from tests.kit.examples import each_row, examples

CAP = 5
HOUR = 3_600.0
START = 1_000_000 * HOUR


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


class Counted:
    """Calls behind a guard with a budget per hour.

    Counts those that went through by the latest time that a call was ever made at.
    """

    def __init__(self, window: str = "per_hour") -> None:
        self.clock, self.latest = Clock(), 0.0
        self.by_period: Counter[str] = Counter()
        self._hour = Window.parse("1h")
        self.call = guard(self._model, budget={window: {"max_calls": CAP}}, clock=self.clock)

    def _model(self) -> dict[str, Any]:
        self.by_period[self._hour.period(self.latest)[0]] += 1
        return {"usd": 0}

    def step(self, seconds: float) -> None:
        self.clock.now += seconds

    def ask(self, times: int) -> int:
        """How many of them were refused."""
        self.latest, refused = max(self.latest, self.clock.now), 0
        for _ in range(times):
            try:
                with run():  # each in a run of its own, which looks its accounts up
                    self.call()
            except BudgetExceededError:
                refused += 1
        return refused


def test_a_step_back_over_the_end_of_a_window_does_not_open_the_old_one_again() -> None:
    counted = Counted()
    assert counted.ask(7) == 2
    counted.step(HOUR)
    counted.ask(1)  # the new window is open, the old one is forgotten
    counted.step(-HOUR)
    assert counted.ask(10) == 6, "four are left of the new window, and nothing of the old one"
    counted.step(HOUR)
    assert counted.ask(5) == 5


def test_the_next_window_begins_when_the_clock_has_caught_up() -> None:
    counted = Counted()
    assert counted.ask(7) == 2
    counted.step(-HOUR / 2)
    assert counted.ask(7) == 7
    counted.step(HOUR)
    assert counted.ask(7) == 7, "still the window in which it was set back"
    counted.step(HOUR / 2)
    assert counted.ask(7) == 2


@examples(100)
@given(st.lists(st.tuples(st.integers(-4 * 3_600, 4 * 3_600), st.integers(1, 7)), max_size=20))
@example([(0, 5), (3_600, 1), (-3_600, 7), (3_600, 7)])
@example([(0, 5), (-7_200, 7), (7_200, 7)])
def test_however_the_clock_is_set_no_window_gets_more_than_its_cap(steps: list[tuple[int, int]]) -> None:
    counted = Counted()
    for seconds, calls in steps:
        counted.step(seconds)
        counted.ask(calls)
    assert all(made <= CAP for made in counted.by_period.values()), counted.by_period


@examples(50)
@given(st.lists(st.tuples(st.integers(0, 2 * 3_600), st.integers(1, 7)), max_size=20))
def test_a_clock_that_only_goes_forward_gets_every_window_in_full(steps: list[tuple[int, int]]) -> None:
    counted, asked = Counted(), Counter[str]()
    for seconds, calls in steps:
        counted.step(seconds)
        asked[counted._hour.period(counted.clock.now)[0]] += calls
        counted.ask(calls)
    assert {period: min(CAP, calls) for period, calls in asked.items()} == dict(counted.by_period)


@each_row("odd", [float("nan"), float("inf"), 1e300, -float("inf")])
def test_a_clock_that_says_nonsense_once_does_not_stay(odd: float) -> None:
    ledger = MemoryLedger()
    assert ledger.period_time(START) == START
    ledger.period_time(odd)
    assert ledger.period_time(START + 1) == START + 1


def test_a_clock_set_back_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    ledger = MemoryLedger()
    with caplog.at_level(logging.WARNING, "runguard"):
        for at in (START, START - 0.5, START - 2 * HOUR, START - HOUR):
            assert ledger.period_time(at) == START
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["runguard.clock_back"]
