"""What a framework's adapter provides so that the conformance scenarios can play on it.

A scenario describes agents without any framework: a script in place of the model, plain functions as tools. A
``Harness`` builds them with the real framework and a scripted model of the framework's own base class.
"""

import asyncio
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from runguard.engine.guard import Controls

MODEL = "scripted-1"  # the name that scripted models report


@dataclass(slots=True)
class Reply:
    """One answer of a scripted model. Either a text, tool calls, an error to raise, or a hand-off."""

    text: str = ""
    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    error: Exception | None = None
    hand_off: str = ""  # the agent that goes on
    waits: bool = False  # the call does not come back before it is cancelled
    cut: bool = False  # a streamed answer breaks off with an error after its first piece
    input_tokens: int = 1_000
    output_tokens: int = 100


# (number of this model's call, from 1; the newest text that the model sees: a notice, an answer or the user's message)
Script = Callable[[int, str], Reply]


@dataclass(slots=True)
class AgentSpec:
    """An agent, as a scenario describes it."""

    script: Script
    name: str = "agent"
    tools: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # their arguments are keywords
    agents: Sequence["AgentSpec"] = ()  # agents that it can call as tools named after them, with an argument "request"
    hand_offs: Sequence["AgentSpec"] = ()  # agents that it can hand off to; each can hand back
    structured: bool = False  # its result is the object {"answer": int}


@dataclass(slots=True)
class TurnResult:
    """What one user turn left behind."""

    text: str = ""  # the final answer, "" if there is none
    error: BaseException | None = None  # what the framework raised
    events: list[tuple[str, str, str]] = field(default_factory=list)  # ("call" or "answer" or "text", tool, content)
    open_calls: list[str] = field(default_factory=list)  # ids of tool calls without an answer in the stored history


class Session(ABC):
    """A conversation with one agent. Its history is stored as the framework stores it."""

    @property
    @abstractmethod
    def model_calls(self) -> int:
        """Calls that reached any scripted model of this session's harness, in all turns."""

    @abstractmethod
    async def turn(self, message: str, *, stream: bool = False) -> TurnResult:
        """One user turn. An exception of the framework is kept in the result; cancellation is raised."""


class Harness(ABC):
    """Builds sessions of one framework."""

    name: ClassVar[str]
    # Scenarios that the framework makes impossible, each with the reason that the documentation shows.
    impossible: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def guard(self, **settings: Any) -> Controls:
        """A guard of this adapter: a plugin, a middleware, a capability. ``app``, ``user`` as in ``RunInfo``.

        ``termination_condition``: ends the runs of sessions with this guard.
        """

    @abstractmethod
    def session(self, agent: AgentSpec, guard: Controls | None) -> Session:
        """A new conversation, guarded by ``guard`` or by nothing."""


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
