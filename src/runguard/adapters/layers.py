"""Runs inside runs: a tool of one agent may start another agent, of the same framework or of another one.

The inner agent belongs to the outer run. Its calls are judged and billed there first, in a lane of their own, and then
under the settings of the inner adapter. So one limit holds for the whole tree, and every call is counted once per
guard.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, NamedTuple

from runguard.conductor.guard import Guard
from runguard.conductor.runs import Run


class Layer(NamedTuple):
    """One guard's view of an agent at work."""

    guard: Guard
    run: Run
    lane: str


class Place(NamedTuple):
    """Where an agent would start now: inside a tool call of these layers."""

    layers: tuple[Layer, ...]
    call: str  # tool and id of the call, unique within the lane
    depth: int  # agents above


OUTERMOST: Final = Place((), "", 0)
_PLACE: Final[ContextVar[Place]] = ContextVar("runguard_place", default=OUTERMOST)
# Frameworks that keep their own record of the current call, such as ADK, register a function that reads it.
_OTHERS: Final[list[Callable[[], Place | None]]] = []


def register(reader: Callable[[], Place | None]) -> None:
    """Add a function that tells in which tool call of another framework the current code runs."""
    _OTHERS.append(reader)


def current_place() -> Place:
    """The innermost tool call around this code, or ``OUTERMOST``. A run that has ended is around nothing."""
    place = _PLACE.get()
    layers = tuple(layer for layer in place.layers if layer.guard.runs.get(layer.run.info.run) is layer.run)
    if layers:
        return place._replace(layers=layers)
    for reader in _OTHERS:
        if (found := reader()) is not None:
            return found
    return OUTERMOST


@contextmanager
def inside(place: Place) -> Iterator[None]:
    """Code in this block runs inside a tool call."""
    token = _PLACE.set(place)
    try:
        yield
    finally:
        _PLACE.reset(token)
