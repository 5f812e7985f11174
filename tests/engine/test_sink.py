"""Decisions and trips leave the guard through one sink, one module writes ``stopped``, and features subscribe to it."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest

from runguard.core.decision import Action
from runguard.core.events import ROOT_LANE, ModelCall, Outcome, RunInfo
from runguard.engine.charges import Charge, Denied
from runguard.engine.decide import Decided, Moment
from runguard.engine.guard import Guard
from runguard.engine.runs import Run
from runguard.ledger.ledger import Stop
from runguard.policy import Policy
from runguard.pricing.rates import Usage
from tests.kit.driver import Driver

RULES: dict[str, Any] = {"rules": {"repetition": {"nudge": 2, "block": 4, "stop": 5}}}
LOOP = ["nudge", "block", "stop"]


def play_a_loop(driver: Driver, times: int = 6) -> None:
    for _ in range(times):
        driver.tool("parse", {"page": 1}, "the same")


def test_a_subscriber_receives_every_decision_once_with_its_event_and_lane() -> None:
    driver = Driver(**RULES)
    made: list[Any] = []
    driver.guard.sink.on_decided("the test", made.append)
    play_a_loop(driver)
    assert [each.decision.action.word for each in made] == LOOP
    assert [each.finding.rule for each in made] == ["repetition"] * 3
    assert {(each.run.info.run, each.lane.key, each.event.agent) for each in made} == {("run", "", "agent")}


def test_a_trip_arrives_before_the_decision_that_carries_it() -> None:
    driver = Driver(**RULES)
    order: list[Any] = []
    driver.guard.sink.on_trip("the test", lambda trip, finding: order.append((trip.id, finding.rule)))
    driver.guard.sink.on_decided("the test", lambda made: order.append(made.decision.trip and made.decision.trip.id))
    play_a_loop(driver)
    assert order == [None, None, (driver.guard.trips[0].id, "repetition"), driver.guard.trips[0].id]


def test_findings_that_decide_nothing_can_be_watched() -> None:
    driver = Driver(**RULES, max_nudges=0)
    seen: list[Any] = []
    made: list[Any] = []
    driver.guard.sink.on_found("the test", lambda finding, event: seen.append((finding.action, finding.rule)))
    driver.guard.sink.on_decided("the test", made.append)
    play_a_loop(driver, 2)
    assert seen == [(Action.NUDGE, "repetition")]
    assert made == []


@pytest.mark.parametrize("topic", ["on_decided", "on_trip", "on_found"])
def test_a_subscriber_that_raises_is_a_counted_fault_and_prevents_nothing(topic: str, caplog: Any) -> None:
    def broken(*facts: Any) -> None:
        raise ValueError("a bug")

    driver = Driver(**RULES)
    decisions: list[Decided] = []
    trips: list[Any] = []
    found: list[Any] = []
    sink = driver.guard.sink
    getattr(sink, topic)("a broken subscriber", broken)
    sink.on_decided("the test", decisions.append)
    sink.on_trip("the test", lambda trip, finding: trips.append(trip))
    sink.on_found("the test", lambda finding, event: found.append(finding))
    with caplog.at_level(logging.ERROR, "runguard"):
        play_a_loop(driver)
    assert [each.decision.action.word for each in decisions] == LOOP
    assert trips == list(driver.guard.trips)
    assert driver.guard.runs["run"].stopped == trips[0]
    assert driver.guard.guard_errors == len({"on_decided": decisions, "on_trip": trips, "on_found": found}[topic]) > 0
    assert "a broken subscriber failed with ValueError" in caplog.text


def test_a_guard_that_does_not_report_still_publishes(caplog: Any) -> None:
    made: list[Any] = []
    called: list[Any] = []
    policy = Policy.validated(
        {**RULES, "on_trip": called.append, "on_decision": called.append, "clock": lambda: 0.0}, "keywords"
    )
    driver = Driver()
    driver.guard = guard = Guard(policy, reports=False)
    guard.sink.on_decided("the test", made.append)
    driver.start("run")
    with caplog.at_level(logging.INFO, "runguard"):
        play_a_loop(driver)
    assert guard.flush(5)
    assert [each.decision.action.word for each in made] == LOOP
    assert [trip.rule for trip in guard.trips] == ["repetition"]
    assert (called, caplog.records) == ([], [])


# ---- no method is replaced ------------------------------------------------------------------------------------------


class Timer:
    """Takes the place of telemetry."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.took = self.seconds.append


def test_the_guard_times_as_many_calls_as_telemetry_asks_for() -> None:
    driver, timer = Driver(**RULES), Timer()
    driver.guard.telemetry = timer  # type: ignore[assignment]
    driver.guard.time_next(3)
    play_a_loop(driver, 4)
    assert len(timer.seconds) == 3
    driver.guard.time_next(2)
    driver.model()
    assert len(timer.seconds) == 4
    assert all(seconds >= 0 for seconds in timer.seconds)


# ---- What an optional feature of a guard may do: subscribe to moments of the sink, and be a gate before a
# reservation


PRICES = {"m": {"input": 1, "output": 4}}


class OneGate:
    """Lets calls through, refuses them, stops their run or fails, and notes which have left it."""

    def __init__(self, guard: Guard, answer: Callable[[Run, ModelCall], Denied | None]) -> None:
        self.busy, self.left, self._answer = True, [], answer  # type: ignore[var-annotated]
        guard.gates.append(self)

    async def enter(self, run: Run, event: ModelCall, stopped: Callable[[], bool]) -> Denied | None:
        return self._answer(run, event)

    def leave(self, event: ModelCall, charge: Charge | None) -> None:
        self.left.append(charge)


def begun(**policy: Any) -> tuple[Guard, ModelCall]:
    guard = Guard(Policy.validated({"prices": PRICES, "max_usd": 1, "clock": lambda: 1.0, **policy}, "keywords"))
    guard.start(RunInfo("run", at=1.0))
    event = ModelCall("run", ROOT_LANE, "agent", 1.0, "m", 100, max_output_tokens=100)
    guard.check(event)
    return guard, event


def refusal(run: Run, event: ModelCall) -> Denied:
    return Denied(stop=Stop("all", "ops", "", 0.0))


async def test_a_gate_refuses_a_call_and_holds_nothing() -> None:
    guard, event = begun()
    gate = OneGate(guard, refusal)
    run = guard.runs["run"]
    decision = await guard.reserve(event)
    assert (decision.action, decision.enforced) == (Action.STOP, True)
    assert (gate.left, event.charge) == ([None], None)
    assert (run.slots.busy(), run.spend.model_calls, guard.accounts.spend()["reserved_usd"]) == (0, 0, 0)


async def test_after_a_refusal_no_further_gate_is_entered() -> None:
    guard, event = begun()
    OneGate(guard, refusal)
    later = OneGate(guard, lambda run, event: pytest.fail("entered"))
    assert await guard.reserve(event)
    assert later.left == []


async def test_a_stop_at_a_gate_ends_the_call() -> None:
    guard, event = begun()

    def stop(run: Run, event: ModelCall) -> None:
        guard.fail("run", "guard_error", "while it waited")

    gate = OneGate(guard, stop)
    decision = await guard.reserve(event)
    assert decision.action is Action.STOP
    assert gate.left == [None]
    assert guard.runs["run"].slots.busy() == 0


async def test_a_gate_that_fails_leaves_nothing_behind() -> None:
    guard, event = begun()

    def broken(run: Run, event: ModelCall) -> None:
        raise LookupError("a bug")

    gate = OneGate(guard, broken)
    with pytest.raises(LookupError):
        await guard.reserve(event)
    run = guard.runs["run"]
    assert (gate.left, run.slots.busy(), run.waiting, run.spend.model_calls) == ([None], 0, 0, 0)


async def test_in_shadow_mode_a_refusal_of_a_gate_is_only_told() -> None:
    guard, event = begun(mode="shadow")
    OneGate(guard, refusal)
    decision = await guard.reserve(event)
    assert (decision.action, decision.enforced) == (Action.STOP, False)
    assert event.charge is not None


async def test_every_moment_of_a_run_is_told() -> None:
    driver = Driver(prices=PRICES)
    guard = driver.guard
    told: list[str] = []

    def note(moment: str, *about: Any) -> dict[str, Any]:
        told.append(moment)
        return {}

    for moment in get_args(Moment):
        guard.sink.on(moment, "the test", partial(note, moment))
    guard.start(RunInfo("other", at=driver.now))
    driver.tool("look", {}, outcome=Outcome.ERROR)
    event = ModelCall("other", ROOT_LANE, "agent", driver.now, "m", 100)
    guard.check(event)
    assert not await guard.reserve(event)
    guard.settle(event.charge, Usage(input=100, output=10, cached=50), "m")
    guard.snapshot()
    guard.pauses.keep("other", waits=False)
    guard.pauses.discard(RunInfo("other"))
    guard.end("run")
    assert {"run started", "tools failed", "cached", "settled", "run paused", "run dropped", "run ended"} <= set(told)
    assert {"run facts", "run outlook", "guard facts"} <= set(told)


async def test_once_a_run_reads_from_a_cache_every_reported_call_is_told() -> None:
    guard, _ = begun()
    seen: list[int] = []
    guard.sink.on("cached", "the test", lambda run, charge, usage, model: seen.append(usage.cached))
    for cached in (0, 50, 0):
        call = ModelCall("run", ROOT_LANE, "agent", 1.0, "m", 100, max_output_tokens=100)
        guard.check(call)
        assert not await guard.reserve(call)
        guard.settle(call.charge, Usage(input=100, output=10, cached=cached), "m")
        guard.free_slot("run")
    assert seen == [50, 0]
    call = ModelCall("run", ROOT_LANE, "agent", 1.0, "m", 100, max_output_tokens=100)
    guard.check(call)
    assert not await guard.reserve(call)
    guard.abandon(call.charge)
    assert seen == [50, 0], "an estimate says nothing of a cache"
