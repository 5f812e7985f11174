"""The state of one invocation of a Runner: its open tool calls, its model calls in flight, its lanes.

Three facts of ADK 2.x shape it. A transfer is not nested and the transferring agent's after-hook never fires, so
nothing counts enters and leaves. Each tool call runs in a task of its own, so a context variable set before it reaches
an AgentTool's nested run or a single-turn agent and cannot leak (``context``). Events arrive in the Runner's task,
where that variable is not visible, so calls are also kept by their id.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from runguard.adk.estimate import PromptProjection
from runguard.core.decision import Trip
from runguard.core.events import ROOT_LANE, Outcome
from runguard.engine.charges import Charge
from runguard.engine.runs import Run
from runguard.providers.usage import CallUsage

if TYPE_CHECKING:
    from runguard.adk.lanes import Task

_CALLS_KEPT: Final = 4_096
FLIGHTS_KEPT: Final = 64
_PROMPTS_KEPT: Final = 1_024
_START_S: Final = 1.0  # from a function call's event to its start; a paused task's delegation never starts
# From a model's answer to its event. An agent that never yields the event must not block us for ever.
DELIVERY_S: Final = 0.25


@dataclass(slots=True)
class OpenToolCall:
    """A function call from the model's response until its answer."""

    tool: str
    args: Any
    lane: str
    batch: str
    fingerprint: bytes = b""
    once: bytes = b""
    refused: bool = False
    interrupted: bool = False  # a model call inside of it was refused
    outcome: Outcome | None = None
    verdict: Outcome | None = None  # of the app's own classifier on its answer
    error: str = ""
    executed: bool = False  # of a tool with a price: it was called, and not answered by a callback
    running: bool = False
    task: "asyncio.Task[Any] | None" = None  # the task that runs it: each call has its own
    deadline: float = 0.0  # by the guard's clock; 0 without one
    asked_at: float = 0.0  # when the model asked, by the monotonic clock; 0 where nothing has to follow soon
    agent: str = ""  # the agent whose model asked


def _no_request() -> None:
    return None


@dataclass(slots=True)
class ModelInFlight:
    """A model call between its before-hook and its answer."""

    agent: str
    branch: str | None
    lane: str
    answered: bool = False  # by the model, a callback or another plugin
    done_at: float = 0.0  # when its last chunk came, by the monotonic clock
    delivered: bool = False  # its event has passed the Runner
    charge: Charge | None = None
    left: bool = False  # it reached the model
    request: Callable[[], Any] = _no_request  # a weak reference to the admitted request
    projection: PromptProjection | None = None
    usage: CallUsage = field(default_factory=CallUsage)  # what the model reported
    judged: bool = False  # the detectors have seen its result
    text: str | None = None  # that ends the work of the agent
    is_cut: bool = False  # it hit its output limit
    streamed: bool = False  # chunks of it came before
    last_after: Trip | None = None  # the stop after which it gives the last answer

    def is_over(self, task: "asyncio.Task[Any] | None", now: float) -> bool:
        if self.done_at and not self.delivered:
            return now - self.done_at > DELIVERY_S
        return self.delivered or (task is not None and task.done())


@dataclass(slots=True)
class Invocation:
    """One invocation of a Runner: the root of a run, or nested in a tool call of one."""

    id: str
    run: Run
    manager: Any  # the Runner's plugin manager: distinguishes Runners
    session: str
    root_agent: str
    lane: str = ROOT_LANE
    depth: int = 0
    live: bool = False
    nested: bool = False
    batches: dict[str, str] = field(default_factory=dict)  # lane -> the model response whose calls run now
    calls: OrderedDict[str, OpenToolCall] = field(default_factory=OrderedDict)
    flights: dict[asyncio.Task[Any] | None, ModelInFlight] = field(default_factory=dict)
    # by call, branch and isolation scope
    lanes: dict[tuple[str, str | None, str | None], str] = field(default_factory=dict)
    tasks: "dict[str, Task]" = field(default_factory=dict)  # by the id of the delegating call
    # lane -> depth of the delegated agent, and models above it in the tree
    delegates: dict[str, tuple[int, int]] = field(default_factory=dict)
    depths: dict[str, int] = field(default_factory=dict)  # lane -> depth of the agent at work in it
    prompts: dict[tuple[str, str], PromptProjection] = field(default_factory=dict)  # by lane and agent
    context_limits: dict[str, int | None] = field(default_factory=dict)  # by model
    # live: by lane, usage since the last report, and that report's prompt
    live_usage: dict[str, tuple[CallUsage, int]] = field(default_factory=dict)
    streamed: bool = False  # the wrapper on the Runner sees its end
    finished: bool = False  # its agents are done; a compaction may follow
    resumable: bool = False  # its app lets callers resume it, whatever ended it
    asked: bool = False  # it has asked for input from outside, so that an answer may resume it at any time
    questions: set[str] = field(default_factory=set)  # calls that wait for input from outside
    entered: int = 1  # streams that run it: the same invocation may be resumed twice at once
    at_end: dict[object, Callable[[], None]] = field(default_factory=dict)  # what to close when it is over
    stop_stored: str = ""  # live: the trip whose stop event is in the session

    def learn_prompt(self, flight: ModelInFlight, tokens: int) -> None:
        """The model has counted the prompt."""
        prompt = flight.projection
        if prompt is not None and tokens > 0:
            if len(self.prompts) >= _PROMPTS_KEPT:
                self.prompts.clear()
            prompt.tokens = tokens
            self.prompts[flight.lane, flight.agent] = prompt

    def remember(self, call_id: str, call: OpenToolCall) -> None:
        self.calls[call_id] = call
        if len(self.calls) > _CALLS_KEPT:  # long-running calls that ADK never answers
            self.calls.popitem(last=False)

    def ask(self, call_ids: Iterable[str]) -> None:
        """These calls need an answer from outside. The invocation pauses for them."""
        self.questions.update(call_ids)
        self.asked = self.asked or bool(self.questions)

    def rest(self) -> None:
        """The run pauses. Keep on the run what the next stream of this invocation needs, without references to this
        stream.
        """
        for call in self.calls.values():
            call.running, call.task = False, None
        self.run.memo = (self.calls, self.prompts)

    def go_on(self) -> None:
        """The run was resumed."""
        if self.run.memo is not None:
            self.calls, self.prompts = self.run.memo
            self.run.memo = None

    def stop_in(self, lane: str) -> Trip | None:
        """Why a lane is stopped: by itself, by a lane around it, or with the whole run."""
        found = self.run.lanes.get(lane)
        return self.run.stopped or (found.stop_in_force() if found is not None else None)

    def is_quiet(self) -> bool:
        """No paid call is in flight and no call waits for its answer: ending now loses no paid work."""
        now = time.monotonic()
        busy = any(call.running or (call.asked_at and now - call.asked_at < _START_S) for call in self.calls.values())
        return not busy and not self.in_flight() and not self.run.slots.has_waiting()

    def is_idle(self, beside: str) -> bool:
        """No tool call and no model call runs, except the tool calls around lane ``beside``, which wait for it."""
        running = (
            call_id
            for call_id, call in self.calls.items()
            if call.running and call.task is not None and not call.task.done()
        )
        return all(f"@{call_id}" in beside for call_id in running) and not self.in_flight()

    def in_flight(self) -> int:
        """Model calls whose answer has not passed the Runner yet."""
        now = time.monotonic()
        return sum(1 for task, flight in self.flights.items() if not flight.is_over(task, now))

    def drop_flights(self) -> list[ModelInFlight]:
        """Returns flights that are over, which it forgets: a long run of many agents has a task for each."""
        now = time.monotonic()
        return [self.flights.pop(done) for done in [t for t, f in self.flights.items() if f.is_over(t, now)]]
