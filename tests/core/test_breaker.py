"""The breaker against a simple model, over any order of calls, reports and times; and under real threads."""

import threading
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from runguard.core.breaker import Breaker, BreakerState, Permit

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


class BreakerAgainstItsModel(RuleBasedStateMachine):
    """The model keeps the plain facts: the failures in a row since the last change, when it opened,
    which probe is out.
    """

    permits = Bundle("permits")

    @initialize(threshold=st.integers(1, 4), min_runs=st.integers(1, 3), reset_after=st.sampled_from([1.0, 10.0]))
    def begin(self, threshold: int, min_runs: int, reset_after: float) -> None:
        self.breaker = Breaker(threshold=threshold, min_runs=min_runs, reset_after_s=reset_after)
        self.threshold, self.min_runs, self.reset_after = threshold, min_runs, reset_after
        self.now = 0.0
        self.state = CLOSED
        self.failed_runs: list[str] = []
        self.current: set[int] = set()  # permits whose report still counts
        self.opened_at = 0.0
        self.probe: tuple[int, float] | None = None

    def change(self, state: BreakerState) -> None:
        self.state = state
        self.failed_runs, self.current, self.probe = [], set(), None
        if state is OPEN:
            self.opened_at = self.now

    def expected_state(self) -> BreakerState:
        if self.state is OPEN and self.now - self.opened_at >= self.reset_after:
            return HALF_OPEN
        return self.state

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 5.0, 10.0, 1e6]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(target=permits)
    def admit(self) -> Any:
        permit = self.breaker.admit(self.now)
        state = self.expected_state()
        if state is CLOSED:
            assert permit is not None
            assert not permit.probe
        elif state is HALF_OPEN and (self.probe is None or self.now - self.probe[1] >= self.reset_after):
            assert permit is not None
            assert permit.probe
            self.probe, self.current = (id(permit), self.now), set()
        else:
            assert permit is None
            return multiple()
        self.current.add(id(permit))
        return permit

    @rule(permit=consumes(permits), ok=st.booleans(), run=st.sampled_from(["r1", "r2", "r3"]))
    def report(self, permit: Permit, ok: bool, run: str) -> None:
        self.breaker.report(permit, ok, self.now, run)
        if id(permit) not in self.current:
            return  # late: whatever it says changes nothing
        self.current.discard(id(permit))
        if permit.probe:
            self.change(CLOSED if ok else OPEN)
        elif ok:
            self.failed_runs = []
        else:
            self.failed_runs.append(run)
            if len(self.failed_runs) >= self.threshold and len(set(self.failed_runs)) >= self.min_runs:
                self.change(OPEN)

    @rule(permit=consumes(permits))
    def release(self, permit: Permit) -> None:
        self.breaker.release(permit)
        if self.probe is not None and self.probe[0] == id(permit):
            self.probe, self.current = None, set()

    @invariant()
    def the_state_is_the_models(self) -> None:
        if hasattr(self, "breaker"):
            assert self.breaker.state(self.now) is self.expected_state()

    @invariant()
    def the_wait_is_told(self) -> None:
        if hasattr(self, "breaker"):
            wait = self.breaker.retry_after(self.now)
            if self.expected_state() is OPEN:
                assert wait == pytest.approx(self.opened_at + self.reset_after - self.now)
            elif self.state is CLOSED:
                assert wait == 0


BreakerAgainstItsModel.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestBreaker = BreakerAgainstItsModel.TestCase


def opened(at: float = 0.0, **options: Any) -> Breaker:
    breaker = Breaker(**{"threshold": 2, "min_runs": 2, "reset_after_s": 60.0, **options})
    for run in ("r1", "r2"):
        permit = breaker.admit(at)
        assert permit is not None
        breaker.report(permit, False, at, run)
    assert breaker.state(at) is OPEN
    return breaker


def admitted(breaker: Breaker, at: float) -> Permit:
    permit = breaker.admit(at)
    assert permit is not None
    return permit


def test_one_run_alone_never_opens_it() -> None:
    breaker = Breaker(threshold=3, min_runs=2)
    for _ in range(1_000):
        breaker.report(admitted(breaker, 0.0), False, 0.0, "r1")
    assert breaker.state(0.0) is CLOSED


def test_a_success_starts_the_row_anew() -> None:
    breaker = Breaker(threshold=3, min_runs=2)
    for n in range(100):
        breaker.report(admitted(breaker, 0.0), n % 3 == 2, 0.0, f"r{n}")
    assert breaker.state(0.0) is CLOSED


def test_an_open_breaker_lets_nobody_through_before_its_time() -> None:
    breaker = opened(at=100.0)
    assert breaker.admit(159.9) is None
    assert admitted(breaker, 160.0).probe


def test_the_probe_decides() -> None:
    breaker = opened()
    breaker.report(admitted(breaker, 60.0), True, 61.0, "r3")
    assert breaker.state(61.0) is CLOSED
    breaker = opened()
    breaker.report(admitted(breaker, 60.0), False, 61.0, "r3")
    assert breaker.state(120.9) is OPEN
    assert breaker.state(121.0) is HALF_OPEN


def test_a_released_probe_goes_to_the_next_caller() -> None:
    breaker = opened()
    probe = admitted(breaker, 60.0)
    assert breaker.admit(60.0) is None
    breaker.release(probe)
    assert admitted(breaker, 60.0).probe


def test_a_probe_nobody_reports_expires() -> None:
    breaker = opened()
    lost = admitted(breaker, 60.0)
    assert breaker.admit(119.9) is None
    second = admitted(breaker, 120.0)
    breaker.report(lost, True, 121.0)
    assert breaker.state(121.0) is HALF_OPEN  # the lost one's late success is nobody's
    breaker.report(second, False, 121.0)
    assert breaker.state(121.0) is OPEN


def test_a_call_admitted_before_the_opening_cannot_close_it() -> None:
    breaker = Breaker(threshold=2, min_runs=2)
    early = admitted(breaker, 0.0)
    for run in ("r1", "r2"):
        breaker.report(admitted(breaker, 0.0), False, 0.0, run)
    breaker.report(early, True, 1.0, "r0")
    assert breaker.state(1.0) is OPEN


@pytest.mark.parametrize("zero", [-1e9, 0.0, 1.7e9])
def test_time_is_whatever_it_is_told(zero: float) -> None:
    breaker = opened(at=zero)
    assert breaker.state(zero + 59) is OPEN
    assert breaker.state(zero + 60) is HALF_OPEN


def test_failures_of_a_million_runs_keep_it_small() -> None:
    breaker = Breaker(threshold=10**9)
    for n in range(10_000):
        breaker.report(admitted(breaker, 0.0), False, 0.0, f"run {n}")
    assert len(breaker._runs) <= 64


@pytest.mark.parametrize("threads", [2, 16])
def test_exactly_one_probe_whatever_the_threads(threads: int) -> None:
    for turn in range(40):
        breaker = opened()
        start = threading.Barrier(threads)
        permits: list[Permit | None] = []

        def caller(
            breaker: Breaker = breaker, start: threading.Barrier = start, permits: list[Permit | None] = permits
        ) -> None:
            start.wait()
            permits.append(breaker.admit(60.0))

        callers = [threading.Thread(target=caller) for _ in range(threads)]
        for thread in callers:
            thread.start()
        for thread in callers:
            thread.join()
        assert len(permits) == threads
        assert len([permit for permit in permits if permit is not None]) == 1, turn


def test_reports_from_many_threads_lose_no_failure() -> None:
    breaker = Breaker(threshold=800, min_runs=2)

    def failing(run: str) -> None:
        for _ in range(100):
            breaker.report(admitted(breaker, 0.0), False, 0.0, run)

    threads = [threading.Thread(target=failing, args=(f"r{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert breaker.state(0.0) is OPEN
