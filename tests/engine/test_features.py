"""What an optional feature of a guard may do: subscribe to moments of the sink, and be a gate before a reservation."""

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest

from runguard.core.decision import Action
from runguard.core.events import ROOT_LANE, ModelCall, Outcome, RunInfo
from runguard.engine.charges import Charge, Denied
from runguard.engine.decide import Moment
from runguard.engine.guard import Guard
from runguard.engine.runs import Run
from runguard.ledger.ledger import Stop
from runguard.policy import Policy
from runguard.pricing.rates import Usage
from tests.kit.driver import Driver

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
