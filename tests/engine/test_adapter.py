"""The interface for adapters is what the guard's class shows: methods that can be read there, each with a docstring."""

from typing import Any

from runguard.core.events import ROOT_LANE, ModelCall, RunInfo
from runguard.engine.guard import Guard
from runguard.policy import Policy


def conductor(**policy: Any) -> Guard:
    return Guard(Policy.validated({"clock": lambda: 0.0, **policy}, "keywords"))


async def test_a_slot_is_held_until_it_is_given_back() -> None:
    guard = conductor()
    run, event = guard.start(RunInfo("run")), ModelCall("run", ROOT_LANE, "agent", 0.0)
    guard.check(event)
    assert not await guard.reserve(event)
    guard.release(event.charge)
    assert run.slots.busy() == 1
    guard.free_slot("run")
    assert run.slots.busy() == 0
    guard.free_slot("run")
    guard.free_slot("no such run")
