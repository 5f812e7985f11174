"""Runs inside runs: a tool of one agent may start another agent, of the same framework or of another one.

The inner agent belongs to the outer run. Its calls are judged and billed there first, in a lane of their own, and then
under the settings of the inner adapter. So one limit holds for the whole tree, and every call is counted once per
guard.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from runguard.engine.charges import OWNERS
from runguard.engine.guard import Guard
from runguard.engine.runs import Run
from runguard.functions.run_context import SURROUNDINGS


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
    conditions: tuple[Any, ...] = ()  # termination conditions of the runs around


OUTERMOST: Final = Place((), "", 0)
# Frameworks that keep their own record of the current tool call, such as ADK, register a function that reads it.
_readers: Final[list[Callable[[], Place | None]]] = []


def register(reader: Callable[[], Place | None]) -> None:
    """Add a function that says in which tool call of another framework the current code runs."""
    _readers.append(reader)


def current_place() -> Place:
    """The tool calls around this code, or ``OUTERMOST``. A run that has ended is around nothing."""
    own = SURROUNDINGS.get().place
    places = [own] if isinstance(own, Place) else []
    places += [place for reader in _readers if (place := reader()) is not None]
    layers: dict[Guard, Layer] = {}
    call, depth = "", 0
    conditions: tuple[Any, ...] = ()
    for place in places:
        alive = [one for one in place.layers if one.guard.runs.get(one.run.info.run) is one.run]
        if alive:
            layers |= {one.guard: one for one in alive}
            call, depth, conditions = place.call, max(depth, place.depth), (*conditions, *place.conditions)
    return Place(tuple(layers.values()), call, depth, conditions) if layers else OUTERMOST


def is_inside_tool() -> bool:
    """Whether this code runs inside a tool call that an adapter of this package has opened."""
    return isinstance(SURROUNDINGS.get().place, Place)


class InsideTool:
    """``with InsideTool(place):`` code in this block runs inside a tool call."""

    __slots__ = ("_place", "_token")

    def __init__(self, place: Place) -> None:
        self._place = place

    def __enter__(self) -> None:
        self._token = SURROUNDINGS.set(SURROUNDINGS.get()._replace(place=self._place))

    def __exit__(self, *_: object) -> None:
        SURROUNDINGS.reset(self._token)


def end_layers(layers: tuple[Layer, ...], owns: bool) -> None:
    """End the last layer's run if it began with this agent, and close the agent's lanes in the runs around."""
    for guard, run, lane in layers[:-1] if owns else layers:
        guard.faults.attempt("adapter", guard.close_lane, run, lane)
    if not owns:
        return
    guard, run, _ = layers[-1]
    if guard.runs.get(run.info.run) is run:
        guard.faults.attempt("adapter", guard.end, run.info.run)


def child_layer(layer: Layer, place: Place, agent: str) -> Layer:
    """A lane for an agent that a tool call of this layer has started."""
    guard, run, lane = layer
    key = f"{lane}/{place.call}"
    if key not in run.lanes:
        guard.open_lane(run, key, lane, concurrent=False, delegate=agent)
    return Layer(guard, run, key)


def notice_kept(layer: Layer) -> str:
    """A nudge of a threshold, kept for the next request."""
    lane = layer.run.lanes.get(layer.lane)
    if lane is None or not lane.notice:
        return ""
    notice, lane.notice = lane.notice, ""
    return notice


@contextmanager
def paid_around(block: InsideTool, layers: tuple[Layer, ...], key: str) -> Iterator[None]:
    """``block``, whose calls do not wait for what is held for the tool call ``key`` itself."""
    charges = [guard.tool_prices.charge_of(run, key) for guard, run, _ in layers]
    held = tuple(charge for charge in charges if charge is not None)
    token = OWNERS.set((*OWNERS.get(), *held)) if held else None
    try:
        with block:
            yield
    finally:
        if token is not None:
            OWNERS.reset(token)
