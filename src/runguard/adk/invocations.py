"""Who called whom: what the hooks of one invocation have to know of each other, on every path ADK takes.

Three facts of ADK 2.x shape this file. A transfer is not nested and the transferring agent's after-hook never fires, so
nothing here counts enters and leaves. Each tool call runs in a task of its own, so a context variable set before it
cannot leak, and is how an AgentTool's nested run or a single-turn agent finds its caller. Events arrive in the runner's
task where that variable is not visible, so calls are also kept by their id. ``lanes`` finds the lane of a hook.
"""

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from runguard.accounting.charges import Charge
from runguard.adk.estimate import Projection, Prompt
from runguard.conductor.guard import Guard
from runguard.conductor.runs import Run
from runguard.core.decision import Trip
from runguard.core.events import ROOT_LANE, Outcome
from runguard.providers.call_usage import CallUsage

if TYPE_CHECKING:
    from runguard.adk.lanes import Task
    from runguard.adk.plugin import RunGuardPlugin

_CALLS_KEPT: Final = 4_096
_FLIGHTS_KEPT: Final = 64
_PROMPTS_KEPT: Final = 1_024
_START_S: Final = 1.0  # from a function call's event to its start; a paused task's delegation never starts
# from a model's answer to its event; an agent that keeps the event to itself must not hold us for ever
_DELIVERY_S: Final = 0.25


@dataclass(slots=True)
class Call:
    """A function call from the model's response until its answer."""

    tool: str
    args: Any
    lane: str
    batch: str
    fingerprint: bytes = b""
    once: bytes = b""
    refused: bool = False
    cut: bool = False  # a model call inside of it was refused
    outcome: Outcome | None = None
    verdict: Outcome | None = None  # what the app's own classifier says about its answer
    error: str = ""
    running: bool = False
    task: "asyncio.Task[Any] | None" = None  # the task that runs it: each call has its own
    deadline: float = 0.0  # by the guard's clock; 0 without one
    asked_at: float = 0.0  # when the model asked, by the monotonic clock; 0 where nothing has to follow soon
    agent: str = ""  # whose model asked


def _no_request() -> None:
    return None


@dataclass(slots=True)
class ModelInFlight:
    """A model call between its before-hook and its answer."""

    agent: str
    branch: str | None
    lane: str
    answered: bool = False  # by the model or by somebody else
    done_at: float = 0.0  # when its last chunk came, by the monotonic clock
    delivered: bool = False  # its event has passed the runner
    charge: Charge | None = None
    left: bool = False  # it reached the model's border
    request: Callable[[], Any] = _no_request  # the request that was let go, while it lives
    projection: Projection | None = None
    usage: CallUsage = field(default_factory=CallUsage)  # what the model reported
    judged: bool = False  # its result was told to the detectors
    said: int = 0
    is_cut: bool = False  # it hit its output limit
    streamed: bool = False  # pieces of it came before

    def is_over(self, task: "asyncio.Task[Any] | None", now: float) -> bool:
        if self.done_at and not self.delivered:
            return now - self.done_at > _DELIVERY_S
        return self.delivered or (task is not None and task.done())


@dataclass(slots=True)
class Invocation:
    """One Runner invocation: the root of a run, or nested in a tool call of one."""

    id: str
    run: Run
    manager: Any  # the runner's plugin manager: tells runners apart
    session: str
    root_agent: str
    lane: str = ROOT_LANE
    depth: int = 0
    live: bool = False
    nested: bool = False
    batches: dict[str, str] = field(default_factory=dict)  # lane -> the model response whose calls run now
    calls: OrderedDict[str, Call] = field(default_factory=OrderedDict)
    flights: dict[asyncio.Task[Any] | None, ModelInFlight] = field(default_factory=dict)
    # by call, branch and isolation scope
    lanes: dict[tuple[str, str | None, str | None], str] = field(default_factory=dict)
    tasks: "dict[str, Task]" = field(default_factory=dict)  # by the id of the delegating call
    # lane -> depth of the delegated agent, and models above it in the tree
    delegates: dict[str, tuple[int, int]] = field(default_factory=dict)
    depths: dict[str, int] = field(default_factory=dict)  # lane -> depth of the agent at work in it
    prompts: dict[tuple[str, str], Prompt] = field(default_factory=dict)  # by lane and agent
    # live: by lane, what came since the last report, and that report's prompt
    heard: dict[str, tuple[CallUsage, int]] = field(default_factory=dict)
    streamed: bool = False  # the runner's wrapper sees its end
    finished: bool = False  # its agents are done; a compaction may follow
    resumable: bool = False  # its app lets callers resume it, whatever ended it
    asked: bool = False  # it has asked somebody outside something, so that an answer may resume it at any time
    questions: set[str] = field(default_factory=set)  # those without an answer
    entered: int = 1  # streams that run it: the same invocation may be resumed twice at once
    stop_stored: str = ""  # live: the trip whose stop event is in the session

    def learn_prompt(self, flight: ModelInFlight, tokens: int) -> None:
        """The model has counted the prompt."""
        if flight.projection is not None and tokens > 0:
            if len(self.prompts) >= _PROMPTS_KEPT:
                self.prompts.clear()
            self.prompts[flight.lane, flight.agent] = flight.projection.learned(tokens)

    def remember(self, call_id: str, call: Call) -> None:
        self.calls[call_id] = call
        if len(self.calls) > _CALLS_KEPT:  # long-running calls that ADK never answers
            self.calls.popitem(last=False)

    def ask(self, call_ids: Iterable[str]) -> None:
        """Somebody outside has to answer these calls: the invocation pauses for them."""
        self.questions.update(call_ids)
        self.asked = self.asked or bool(self.questions)

    def rest(self) -> None:
        """The run pauses. What the next stream of this invocation needs stays with the run, without what belongs to
        this stream.
        """
        for call in self.calls.values():
            call.running, call.task = False, None
        self.run.memo = (self.calls, self.prompts)

    def go_on(self) -> None:
        """The run was resumed."""
        if self.run.memo is not None:
            self.calls, self.prompts = self.run.memo
            self.run.memo = None

    def is_quiet(self) -> bool:
        """Nothing paid is in flight and no call is waiting for its answer: ending now throws nothing away."""
        now = time.monotonic()
        busy = any(call.running or (call.asked_at and now - call.asked_at < _START_S) for call in self.calls.values())
        return not busy and not self.in_flight() and not self.run.slots.has_waiting()

    def is_idle(self, beside: str) -> bool:
        """No call runs and no model is asked, the calls aside that lane ``beside`` stands in: they wait for it."""
        running = (
            call_id
            for call_id, call in self.calls.items()
            if call.running and call.task is not None and not call.task.done()
        )
        return all(f"@{call_id}" in beside for call_id in running) and not self.in_flight()

    def in_flight(self) -> int:
        """Model calls whose answer has not passed the runner yet."""
        now = time.monotonic()
        return sum(1 for task, flight in self.flights.items() if not flight.is_over(task, now))

    def begin_flight(self, task: "asyncio.Task[Any] | None", flight: ModelInFlight) -> list[ModelInFlight]:
        """Returns flights that are over and forgotten now: a long run of many agents has a task for each."""
        self.flights[task] = flight
        if len(self.flights) <= _FLIGHTS_KEPT:
            return []
        now = time.monotonic()
        return [self.flights.pop(done) for done in [t for t, f in self.flights.items() if f.is_over(t, now)]]


@dataclass(slots=True)
class Frame:
    """The tool call we are inside of. Never changed once made."""

    guard: Guard
    invocation: Invocation
    call_id: str
    tool: str
    lane: str
    depth: int
    path: tuple[str, ...]
    outer: "Frame | None" = None  # the frame around it: another guard's, or that of the caller
    stream: "Stream | None" = None  # the runner whose tool call it is


FRAME: Final[ContextVar[Frame | None]] = ContextVar("runguard_frame", default=None)


@dataclass(slots=True)
class Stream:
    """A runner at work: whose guard it has, and the invocations it began."""

    plugin: "RunGuardPlugin | None"
    outer: "Stream | None" = None  # the runner inside of which this one works
    app: str = ""
    user: str = ""
    session: str = ""
    guarded: dict[Any, Any] = field(default_factory=dict)  # what guarded models know of this run
    ends: list[tuple[Guard, str, Callable[[], None]]] = field(default_factory=list)  # runs that end with it, and how
    fault: Exception | None = None  # of ours, before the run began
    invocations: list[str] = field(default_factory=list)
    halted: tuple[str, Trip, str] | None = None  # the invocation that a Halt ends, why, and the words for the user
    number: int = field(default_factory=itertools.count(1).__next__)
    context: Any = None  # ADK's context of the invocation, where this ADK tells it
    agent: str = ""  # the runner's root agent


STREAM: Final[ContextVar[Stream | None]] = ContextVar("runguard_stream", default=None)


@dataclass(slots=True)
class Layer:
    """A guarded model around the one that is called."""

    guard: Guard
    invocation: Invocation
    lane: str
    agent: str


LAYERS: Final[ContextVar[tuple[Layer, ...]]] = ContextVar("runguard_layers", default=())
# Conditions that may end what is at work here, from the outermost to the innermost.
TERMINATIONS: Final[ContextVar[tuple[Any, ...]]] = ContextVar("runguard_terminations", default=())
# Model calls that were given leave in this task and have not reached the model yet, one per guard.
FLIGHTS: Final[ContextVar[tuple[tuple[Guard, Invocation, ModelInFlight], ...]]] = ContextVar(
    "runguard_flights", default=()
)


def enclosing_frame(guard: Guard) -> Frame | None:
    """The frame of a guarded tool call that is still open, or None: a frame of an ended run says nothing."""
    frame = FRAME.get()
    while frame is not None and frame.guard is not guard:
        frame = frame.outer
    if frame is None or guard.runs.get(frame.invocation.run.info.run) is not frame.invocation.run:
        return None
    return frame


def runners_inside(frame: Frame) -> int:
    """How many Runners without a guard are at work inside a tool call, one inside the other.

    The tool started the outermost of them.
    """
    inside, stream = 0, STREAM.get()
    while stream is not None and stream is not frame.stream:
        inside, stream = inside + 1, stream.outer
    return inside if stream is frame.stream else 0


def stop_in_force(invocation: Invocation, lane: str) -> Trip | None:
    """Why a strand of an invocation is stopped, by itself, by one around it, or with the whole run."""
    strand = invocation.run.lanes.get(lane)
    return invocation.run.stopped or (strand.stop_in_force() if strand is not None else None)
