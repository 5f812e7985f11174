"""What the conformance scenarios check more than once."""

import asyncio
import gc
from typing import Any

from runguard.testing.harness import AgentSpec, Harness, Session, TurnResult


async def stopped(guard: Any, result: TurnResult, rules: set[str]) -> None:
    trips = guard.trips
    assert len(trips) == 1, f"expected one trip, got {[trip.rule for trip in trips]}"
    assert trips[0].rule in rules, f"stopped by {trips[0].rule}, expected one of {sorted(rules)}"
    assert result.error is None, f"the stop raised {result.error!r}"
    assert result.text == guard.guard.stop_text(trips[0]), f"the run ended with '{result.text}'"
    assert not result.open_calls, f"tool calls without an answer in the history: {result.open_calls}"
    await nothing_left(guard)


async def begun(session: Session) -> None:
    """Wait until a model was called."""
    for _ in range(10_000):
        if session.model_calls:
            return
        await asyncio.sleep(0.001)
    raise AssertionError("no model was called")


async def untouched(harness: Harness, spec: AgentSpec) -> None:
    guard = harness.guard()
    bare, guarded = [await harness.session(spec, one).turn("go") for one in (None, guard)]
    assert bare.error is None, f"the scenario fails without a guard: {bare.error!r}"
    assert bare.events == guarded.events, "the guard changed a healthy run"
    assert not guard.trips, f"a healthy run was stopped by {guard.trips[0].rule}"


async def nothing_left(guard: Any) -> None:
    """Nothing stays reserved, and no run stays open. A run that failed may end with the last reference to it."""
    for _ in range(100):
        if not guard.guard.runs:
            break
        gc.collect()
        await asyncio.sleep(0.01)
    reserved = guard.spend()["reserved_usd"]
    assert not reserved, f"{reserved} dollars stay reserved"
    assert not guard.guard.runs, "a run was not ended"
