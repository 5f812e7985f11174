"""The interface for adapters is what the guard has, name for name and argument for argument."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from runguard.core.events import ROOT_LANE, ModelCall, RunInfo
from runguard.engine.guard import Conductor, Guard
from runguard.policy import Policy

METHODS = [name for name, member in vars(Conductor).items() if inspect.isfunction(member) and not name.startswith("_")]
PROPERTIES = [name for name, member in vars(Conductor).items() if isinstance(member, property)]


def conductor(**policy: Any) -> Conductor:
    return Guard(Policy.validated({"clock": lambda: 0.0, **policy}, "keywords"))


def shape(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(each.name, each.default) for each in parameters if each.name != "self"]


@pytest.mark.parametrize("name", METHODS)
def test_the_guard_takes_what_the_interface_says(name: str) -> None:
    promised, given = getattr(Conductor, name), getattr(conductor(), name)
    assert shape(given) == shape(promised)
    assert inspect.iscoroutinefunction(given) == inspect.iscoroutinefunction(promised)
    assert inspect.getdoc(promised)


def test_the_interface_is_small_and_complete() -> None:
    assert {"start", "check", "reserve", "settle", "release", "abandon", "after", "end"} <= set(METHODS)
    assert {"open_lane", "close_lane"} <= set(METHODS)
    assert len(METHODS) + len(PROPERTIES) <= 30
    assert all(hasattr(conductor(), name) for name in PROPERTIES)


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
