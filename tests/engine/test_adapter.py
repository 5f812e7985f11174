"""The interface for adapters is what the guard's class shows: methods that can be read there, each with a docstring."""

import inspect
import re
from typing import Any

from runguard.core.events import ROOT_LANE, ModelCall, RunInfo
from runguard.engine.guard import Guard
from runguard.policy import Policy
from tests.kit.tables import each_row

METHODS = [name for name, _ in inspect.getmembers(Guard, inspect.isfunction) if not name.startswith("_")]


def conductor(**policy: Any) -> Guard:
    return Guard(Policy.validated({"clock": lambda: 0.0, **policy}, "keywords"))


def test_the_order_of_the_calls_names_methods_that_the_class_has() -> None:
    named = set(re.findall(r"guard\.(\w+)\(", Guard.__doc__ or ""))
    assert {"start", "check", "reserve", "settle", "after", "open_lane", "close_lane", "end"} <= named
    assert named - {"clock"} <= set(METHODS)


@each_row("name", METHODS)
def test_every_method_says_what_it_does(name: str) -> None:
    assert inspect.getdoc(getattr(Guard, name))


def test_a_guard_lends_itself_no_method_of_another_object() -> None:
    guard = conductor(max_usd=1, final_answer=True)
    assert [name for name, value in vars(guard).items() if inspect.ismethod(value)] == []


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
