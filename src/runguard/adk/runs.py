"""What RunGuard knows of the invocations of a Runner while they run. All other modules of ``adk`` use it.

An ``Invocation`` holds the state of one invocation, and ``Invocations`` those of one guard. ``HERE`` says which tool
call, Runner and model call the running code works for. ``lane_of`` and ``enter`` find the lane and the depth of an
agent, and ``project`` the size of the next request.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

from google.adk.agents import BaseAgent, LlmAgent, LoopAgent
from google.adk.agents.invocation_context import InvocationContext
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types

from runguard.core.decision import Trip
from runguard.core.errors import RunStoppedError
from runguard.core.events import ROOT_LANE, ModelResult, Outcome
from runguard.core.identity import LruDict, size_of_copy
from runguard.engine.guard import Guard
from runguard.engine.runs import Run
from runguard.providers.errors import was_unbilled
from runguard.providers.usage import IMAGE_TOKENS, LIKELY, UPPER, CallBill, CallUsage, media_tokens, text_size
from runguard.termination.conditions import branch_lane, parallel_part

_log: Final = logging.getLogger("runguard")

# ---- The state of one invocation

_KEPT: Final = 4_096  # calls, lanes and tasks
FLIGHTS_KEPT: Final = 64
_PROMPTS_KEPT: Final = 1_024
_START_S: Final = 1.0  # from a function call's event to its start; a paused task's delegation never starts
# From a model's answer to its event. An agent that never yields the event must not block a stop for ever.
DELIVERY_S: Final = 0.25

Classifier = Callable[..., Any]  # the app's own verdict on the answer of a tool


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


@dataclass(slots=True)
class ModelInFlight:
    """One guard's account of one model call: from its hook, or from the model where no hook saw it, to its bill."""

    guard: Guard
    invocation: "Invocation | None"  # None: not known, after a fault
    lane: str
    agent: str
    branch: str | None = None
    tool: str = ""  # the tool call that makes it, where no hook saw it
    charge: Any = None  # once it is reserved
    projection: "PromptProjection | None" = None
    usage: CallUsage = field(default_factory=CallUsage)  # what the model reported
    left: bool = False  # it reached the model
    answered: bool = False  # by the model, a callback or another plugin
    done_at: float = 0.0  # when its last chunk came, by the monotonic clock
    delivered: bool = False  # its event has passed the Runner
    streamed: bool = False  # chunks of it came before
    last_after: Trip | None = None  # the stop after which it gives the last answer
    is_layer: bool = False  # of a guarded model: no hook sees its answer, so the detectors see it here
    delegated: bool = False  # other models do the work: they are billed instead
    whole: "ModelInFlight | None" = None  # the call of which this is an attempt: a model asks other models
    holder: "asyncio.Task[Any] | None" = None  # the task that holds a slot for the call
    model: str = ""  # that answered
    settled: tuple[CallBill, str] | None = None

    def is_over(self, task: "asyncio.Task[Any] | None", now: float) -> bool:
        if self.done_at and not self.delivered:
            return now - self.done_at > DELIVERY_S
        return self.delivered or (task is not None and task.done())

    @property
    def run(self) -> Run | None:
        return self.guard.runs.get(self.charge.run_costs.info.run)

    def saw(self, response: LlmResponse) -> None:
        """Read a chunk or the whole answer.

        Settle the charge when the answer is complete, and again when a later report changes the usage.
        """
        charge, usage = self.charge, self.usage
        if charge.on_over is not None:  # the provider answers: do not wait for the end of the stream
            charge.on_over(charge, True)
        is_new = usage.add(response)
        self.model = response.model_version or self.model
        if is_new:
            whole = self.whole or self
            whole.usage, projection = usage, whole.projection
            if projection is not None and self.invocation is not None and usage.prompt:
                projection.tokens = usage.prompt  # the model has counted the prompt
                self.invocation.prompts[whole.lane, whole.agent] = projection
        if charge.over or not response.partial:
            self.settle()

    def settle(self) -> None:
        """Book what is known of the usage, where it differs from what was booked."""
        charge = self.charge
        bill = self.usage.bill(charge.input, charge.audio)
        if self.settled != (bill, self.model):
            self.guard.settle(charge, bill.usage, self.model, estimated=bill.estimated)
            self.settled = bill, self.model

    def called_off(self) -> None:
        """Release the reservation of a call that will not be sent."""
        self._give_back()
        if not self.charge.over:
            self.guard.release(self.charge)
            self.guard.unspent(self.charge.run_costs.info.run)

    def _give_back(self) -> None:
        run, holder, self.holder = self.run, self.holder, None
        if run is not None and holder is not None:
            run.slots.give_back(holder)

    def ended(self, error: BaseException | None, streaming: bool) -> None:
        """Close the account of a call that was sent."""
        if self.holder is not None:
            self._give_back()
        charge, usage = self.charge, self.usage
        if self.is_layer and error is None and not self.delegated:
            output = usage.reported.output if usage.reported is not None else None
            run, now = charge.run_costs.info.run, self.guard.clock()
            self.guard.after(ModelResult(run, charge.lane, charge.agent, now, usage.prompt, output))
        if self.delegated or charge.over:
            return
        if usage.reported is not None:
            self.settle()
            return
        received = usage.text_tokens
        if isinstance(error, RunStoppedError) and not received:  # a guard further in refused it, so it was never sent
            self.called_off()
            return
        self.guard.abandon(charge, received, streaming=streaming, refused=was_unbilled(error), error=error)


@dataclass(slots=True)
class Invocation:
    """One invocation of a Runner: the root of a run, or nested in a tool call of one.

    Nothing counts how often agents are entered and left: ADK calls no hook when an agent that transfers leaves. Calls
    are kept by their id, because events arrive in the Runner's task, where the ``HERE`` of a tool call is not visible.
    """

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
    # by id; of long-running calls that ADK never answers, the latest
    calls: "LruDict[str, OpenToolCall]" = field(default_factory=lambda: LruDict(_KEPT))
    flights: dict[asyncio.Task[Any] | None, ModelInFlight] = field(default_factory=dict)
    # by call, branch and isolation scope
    lanes: dict[tuple[str, str | None, str | None], str] = field(default_factory=dict)
    tasks: "LruDict[str, Task]" = field(default_factory=lambda: LruDict(_KEPT))  # by the id of the delegating call
    # lane -> depth of the delegated agent, and models above it in the tree
    delegates: "LruDict[str, tuple[int, int]]" = field(default_factory=lambda: LruDict(_KEPT))
    # lane -> depth of the agent at work in it
    depths: "LruDict[str, int]" = field(default_factory=lambda: LruDict(_KEPT))
    # by lane and agent
    prompts: "LruDict[tuple[str, str], PromptProjection]" = field(default_factory=lambda: LruDict(_PROMPTS_KEPT))
    context_limits: dict[str, int | None] = field(default_factory=dict)  # by model
    classifiers: "tuple[Classifier, ...] | None" = None  # of the app; None before its first tool call
    # live: by lane, usage since the last report, and that report's prompt
    live_usage: dict[str, tuple[CallUsage, int]] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)  # lane -> what a code executor runs, where its results count
    streamed: bool = False  # the wrapper on the Runner sees its end
    finished: bool = False  # its agents are done; a compaction may follow
    resumable: bool = False  # its app lets callers resume it, whatever ended it
    asked: bool = False  # it has asked for input from outside, so that an answer may resume it at any time
    questions: set[str] = field(default_factory=set)  # calls that wait for input from outside
    entered: int = 1  # streams that run it: the same invocation may be resumed twice at once
    at_end: dict[object, Callable[[], None]] = field(default_factory=dict)  # what to close when it is over
    stop_stored: str = ""  # live: the trip whose stop event is in the session

    def ask(self, call_ids: Iterable[str]) -> None:
        """Note calls that need an answer from outside, for which the invocation pauses."""
        self.questions.update(call_ids)
        self.asked = self.asked or bool(self.questions)

    def rest(self) -> None:
        """Keep on the paused run what the next stream of this invocation needs, without references to this stream."""
        for call in self.calls.values():
            call.running, call.task = False, None
        self.run.memo = (self.calls, self.prompts)

    def go_on(self) -> None:
        """Take over what ``rest`` has kept on a run that is resumed."""
        if self.run.memo is not None:
            self.calls, self.prompts = self.run.memo
            self.run.memo = None

    def stop_in(self, lane: str) -> Trip | None:
        """Return the trip that stops a lane: its own, that of a lane around it, or that of the whole run."""
        found = self.run.lanes.get(lane)
        return self.run.stopped or (found.stop_in_force() if found is not None else None)

    def is_quiet(self) -> bool:
        """Return whether no paid call is in flight and none waits for its answer: ending now loses no paid work."""
        now = time.monotonic()
        busy = any(call.running or (call.asked_at and now - call.asked_at < _START_S) for call in self.calls.values())
        return not busy and not self.in_flight() and not self.run.slots.waiting

    def is_idle(self, beside: str) -> bool:
        """Return whether no call runs, except the tool calls around lane ``beside``, which wait for it."""
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
        """Forget and return the flights that are over: a long run of many agents has a task for each."""
        now = time.monotonic()
        return [self.flights.pop(done) for done in [t for t, f in self.flights.items() if f.is_over(t, now)]]


# ---- The invocations of one guard

_INVOCATIONS_KEPT: Final = 10_000
_GAVE_UP_KEPT: Final = 1_000
_WRITE_S: Final = 1.0

# agent and branch -> times skipped since the last model call, and how many model calls had been made then
Skips = dict[tuple[str, str | None], tuple[int, int]]


class Invocations:
    """The registry of one guard: invocations by ADK's id.

    ``gave_up``, ``skips`` and ``failed_stops`` belong to ``stops``. They are kept here, by invocation, because they end
    with it.
    """

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.known: dict[str, Invocation] = {}
        # The guard itself failed, and its policy says stop: hooks do not ask it again.
        self.gave_up = LruDict[str, Trip](_GAVE_UP_KEPT)
        self.skips: dict[str, Skips] = {}
        self.failed_stops: dict[str, int] = {}  # stops that could not be carried out as they should be
        self.writing: dict[str, Future[None]] = {}  # records of paused runs on their way to the store
        self.find: Callable[[str], Invocation | None] = self.known.get

    def find_current(self, invocation_id: str) -> Invocation | None:
        """Find an invocation. None also where the run around it has ended: it is a run of its own from now on."""
        found = self.known.get(invocation_id)
        if found is not None and found.nested and self.guard.runs.get(found.run.info.run) is not found.run:
            return None
        return found

    def stop_of(self, invocation_id: str) -> Trip | None:
        """Return the trip that stops the whole run of an invocation, or None."""
        invocation = self.known.get(invocation_id)
        return self.gave_up.get(invocation_id) or (invocation.run.stopped if invocation is not None else None)

    def is_idle(self, run: Run, beside: str) -> bool:
        """Return whether no call of a run is in progress, except the calls around lane ``beside``."""
        return all(invocation.is_idle(beside) for invocation in list(self.known.values()) if invocation.run is run)

    def register(self, ic: InvocationContext, invocation: Invocation) -> Invocation:
        invocation.live = ic.live_request_queue is not None
        self.known[ic.invocation_id] = invocation
        stream = HERE.get().stream
        if stream is not None:
            stream.invocation_ids.append(ic.invocation_id)
            invocation.streamed = True
        if len(self.known) > _INVOCATIONS_KEPT:
            self.forget(next(iter(self.known)))
        if stream is not None and stream.fault is not None and not invocation.nested:
            fault, stream.fault = stream.fault, None
            self.guard.faults.stop_after("runner", fault, invocation.run.info.run)
        return invocation

    def forget(self, invocation_id: str) -> Trip | None:
        """Forget an invocation whose stream is over, however it ended. Return its last trip, or None.

        While another stream runs the same invocation, it is only counted down.
        """
        invocation = self.known.get(invocation_id)
        if invocation is not None and invocation.entered > 1:
            invocation.entered -= 1
            return invocation.run.trips[-1] if invocation.run.trips else None
        self.known.pop(invocation_id, None)
        trip = self.gave_up.pop(invocation_id, None)
        self.skips.pop(invocation_id, None)
        self.failed_stops.pop(invocation_id, None)
        if invocation is None:
            return trip
        attempt = self.guard.faults.attempt  # a fault in one step does not prevent the others
        for task, flight in invocation.flights.items():
            attempt("end of run", self.close_flight, flight)
            if task is not None:
                attempt("end of run", invocation.run.slots.give_back, task)
        invocation.flights.clear()  # each refers to the invocation
        for close in list(invocation.at_end.values()):
            attempt("end of run", close)
        if not invocation.nested:
            attempt("end of run", self._end_run, invocation)
        return invocation.run.trips[-1] if invocation.run.trips else trip

    def _end_run(self, invocation: Invocation) -> None:
        """End a run that is over, or keep it with its counts if it can be resumed."""
        run = invocation.run
        may_resume = invocation.asked or invocation.resumable or run.stopped is not None
        if not may_resume or invocation.live or run.unsure:
            self.guard.end(run.info.run)
            return
        try:
            invocation.rest()
            written = self.guard.pauses.keep(run.info.run, waits=bool(invocation.questions) and run.stopped is None)
            if written is not None:
                writing, name = self.writing, invocation.id
                writing[name] = written
                written.add_done_callback(lambda _: writing.pop(name, None))
        except Exception as error:
            self.guard.faults.note("pause", error)
            self.guard.end(run.info.run)

    async def written(self, invocation_ids: Iterable[str]) -> None:
        """Wait, bounded, until the store has the records of paused runs.

        Another worker may resume them as soon as their streams have ended. While the store is away, do not wait: every
        refused run would end a second later.
        """
        futures = [
            asyncio.wrap_future(future) for one in invocation_ids if (future := self.writing.get(one)) is not None
        ]
        if futures and not self.guard.accounts.ledger.is_away:
            await asyncio.wait(futures, timeout=_WRITE_S)

    def close_flight(self, flight: ModelInFlight) -> None:
        """Close the charge of a call that is over: release it if the call never left, book an estimate if it did."""
        charge = flight.charge
        if charge is None or charge.over:
            return
        if flight.left:
            self.guard.abandon(charge)
        else:
            self.guard.release(charge)


# ---- Where running code is


class EnclosingTool(NamedTuple):
    """The tool call that the running code is inside of."""

    guard: Guard
    invocation: Invocation
    call_id: str
    name: str
    lane: str
    depth: int
    path: tuple[str, ...]
    outer: "EnclosingTool | None" = None  # the tool call around it: of another guard, or of the caller
    stream: "RunnerStream | None" = None  # the Runner that made the call


@dataclass(slots=True)
class RunnerStream:
    """A Runner at work: the registry of its guard, and the invocations that it started."""

    registry: "Invocations | None"
    outer: "RunnerStream | None" = None  # the Runner inside of which this one works
    app: str = ""
    user: str = ""
    session: str = ""
    guarded: dict[Any, Any] = field(default_factory=dict)  # what each guarded model and budget knows of this run
    ends: list[tuple[Guard, str, Callable[[], None]]] = field(default_factory=list)  # runs that end with it, and how
    fault: Exception | None = None  # a failure of RunGuard before the run started
    invocation_ids: list[str] = field(default_factory=list)
    halted: tuple[str, Trip, str] | None = None  # the invocation that a Halt ends, its trip, the text for the user
    number: int = field(default_factory=itertools.count(1).__next__)
    context: Any = None  # ADK's context of the invocation, where this version of ADK offers it
    agent: str = ""  # the Runner's root agent
    is_open: bool = True  # a task that a tool left running may outlive it


@dataclass(slots=True)
class ModelLayer:
    """A guarded model around the model that is called."""

    guard: Guard
    invocation: Invocation
    lane: str
    agent: str


SessionKey = tuple[str, str, str]  # app, user, session


class Here(NamedTuple):
    """What is around the running code, innermost only.

    ADK gives its hooks a context object, but not the calls that it makes past the hooks: an AgentTool's own Runner, a
    tool that calls a model, a compaction. Context variables connect those. asyncio copies them when a task starts, so
    what a task sets reaches the work inside it and nothing else. ``docs/contributing/architecture.md`` lists all.

    An async generator runs in the context of the code that iterates over it. So a generator sets a field for each step,
    and undoes it before it yields. It restores that one field, because the step may have changed others.
    ``within`` does this. The generators of every run and of every model call do it
    themselves: each layer of calls counts there.
    """

    tool: EnclosingTool | None = None
    stream: RunnerStream | None = None
    layers: tuple[ModelLayer, ...] = ()
    conditions: tuple[Any, ...] = ()  # termination conditions, from the outermost to the innermost
    model_call: Any = None  # the call that passes through ``model_calls`` now
    # app, user and session of the Runner that is at work, or whose events the running code reads
    session: SessionKey | None = None


# Make a record from a tuple of all fields. Every step makes some, and the class itself and ``_replace`` are slower.
here_of: Final[Callable[[tuple[Any, ...]], Here]] = partial(tuple.__new__, Here)
enclosing_of: Final[Callable[[tuple[Any, ...]], EnclosingTool]] = partial(tuple.__new__, EnclosingTool)

HERE: Final[ContextVar[Here]] = ContextVar("runguard_here", default=Here())  # noqa: B039 - immutable
# Model calls that a hook admitted and that have not reached their model yet. One entry per guard.
ANNOUNCED: Final[ContextVar[tuple[ModelInFlight, ...]]] = ContextVar("runguard_announced", default=())


@contextmanager
def within(**fields: Any) -> Iterator[None]:
    """Set fields of ``HERE`` for a block, and restore them behind it. Other fields stay as the block has left them."""
    token = HERE.set(HERE.get()._replace(**fields))
    try:
        yield
    finally:
        now = HERE.get()
        HERE.reset(token)  # first: it raises in a foreign context, where there is nothing to undo
        before = HERE.get()._asdict()
        HERE.set(now._replace(**{name: before[name] for name in fields}))


def adopt(context: Context) -> None:
    """Take RunGuard's variables from another context: a thread does not inherit them from the code that starts it."""
    for variable, value in context.items():
        if variable.name.startswith("runguard_"):
            variable.set(value)


def enclosing_tool(guard: Guard) -> EnclosingTool | None:
    """Return the innermost tool call of this guard around the running code; None without one, or after its run."""
    tool = HERE.get().tool
    while tool is not None and tool.guard is not guard:
        tool = tool.outer
    if tool is None or guard.runs.get(tool.invocation.run.info.run) is not tool.invocation.run:
        return None
    return tool


def runners_inside(tool: EnclosingTool) -> list[str]:
    """Return the root agents of the Runners without a guard that work inside a tool call, the outermost first."""
    agents: list[str] = []
    stream = HERE.get().stream
    while stream is not None and stream is not tool.stream:
        agents.append(stream.agent)
        stream = stream.outer
    return agents[::-1] if stream is tool.stream else []


# ---- Lanes


@dataclass(slots=True)
class Task:
    """A task that a model has delegated.

    ``starts``: the branches in which ADK has started it, each inside the one before.
    """

    id: str  # of the delegating call
    agent: str
    lane: str
    caller_lane: str
    caller_path: tuple[str, ...]
    # of its agent; -1 where the delegation was made in an earlier turn: then the depth of the agent in the tree
    depth: int
    starts: list[str] = field(default_factory=list)

    def follow(self, branch: str | None) -> int:
        """Follow the task to a branch in which an agent begins to work. Return the depth of the start around it."""
        if branch:
            while self.starts and self.starts[-1].startswith(f"{branch}."):
                self.starts.pop()  # the inner start is over, and the agent that made it continues
            if branch.endswith(f"@{self.id}") and branch not in self.starts:
                self.starts.append(branch)
        return self.depth + max(len(self.starts) - 1, 0)


def child_lane(tool: EnclosingTool) -> str:
    return f"{tool.lane}/{tool.name}@{tool.call_id}"


def open_child(guard: Guard, tool: EnclosingTool) -> str:
    """Return the lane of an agent called as a tool. Open a new one, as parallel if the response made other calls."""
    key = child_lane(tool)
    run = tool.invocation.run
    if key not in run.lanes:
        guard.open_lane(run, key, tool.lane, concurrent=is_beside(tool), path=tool.path, delegate=tool.name)
    return key


def is_beside(tool: EnclosingTool) -> bool:
    """Return whether the response that asked for a tool call made other calls."""
    calls = tool.invocation.calls
    mine = calls.get(tool.call_id)
    batch = mine.batch if mine is not None else ""
    return sum(1 for c in calls.values() if (c.batch == batch if batch else c.running and c.lane == tool.lane)) > 1


def lane_of(guard: Guard, invocation: Invocation, branch: str | None, scope: str | None) -> str:
    """Return the lane that a hook or an event of this invocation belongs to. ``scope``: its isolation scope.

    A model delegates in three ways. A transfer stays in its lane. An agent called as a tool (``AgentTool``,
    ``mode="single_turn"``) gets a lane of its own: its hooks see the tool call around it. So does a task
    (``mode="task"``): its hooks see the id of the delegating call as isolation scope. ADK gives a task a new branch at
    each transfer inside of it, and may start it again inside of itself. All of that is the task's one lane. Elsewhere a
    branch is parallel work.
    """
    tool = _tool_in(guard, invocation) if HERE.get().tool is not None else None
    place = (tool.call_id if tool is not None else "", branch, scope)
    cached = invocation.lanes.get(place)
    if cached is not None and cached in invocation.run.lanes:
        return cached
    task = _task_of(invocation, branch, scope) if scope else None
    if task is not None and (tool is None or task.lane.startswith(f"{child_lane(tool)}/")):
        key = _task_lane(guard, invocation, task, branch)
    elif tool is not None:
        key = open_child(guard, tool)
    elif branch:
        key = branch_lane(guard, invocation.run, branch, invocation.lane, invocation.calls)
    else:
        key = invocation.lane
    if len(invocation.lanes) < _KEPT:
        invocation.lanes[place] = key
    return key


def _tool_in(guard: Guard, invocation: Invocation) -> EnclosingTool | None:
    """Return the tool call of this invocation that the running code is inside of, or None."""
    tool = HERE.get().tool
    while tool is not None and tool.guard is not guard:
        tool = tool.outer
    return tool if tool is not None and tool.invocation is invocation else None


def _task_of(invocation: Invocation, branch: str | None, scope: str) -> Task | None:
    """Return the task with this id, or None when the scope is not that of a delegated task."""
    task = invocation.tasks.get(scope)
    if task is not None:
        return task
    call = invocation.calls.get(scope)
    if call is not None:
        depth = invocation.depths.get(call.lane, invocation.depth)
        lane = invocation.run.lanes.get(call.lane)
        path = (*lane.path, call.agent) if lane is not None else (call.agent,)
        task = Task(scope, call.tool, f"{call.lane}/{call.tool}@{scope}", call.lane, path, depth + 1)
    elif branch and f"@{scope}" in branch:  # an earlier turn has delegated it, and this one resumes it
        agent = branch.partition(f"@{scope}")[0].rpartition(".")[2]
        task = Task(scope, agent, f"{invocation.lane}/{agent}@{scope}", invocation.lane, (), -1)
    else:
        return None
    invocation.tasks[scope] = task
    return task


def _task_lane(guard: Guard, invocation: Invocation, task: Task, branch: str | None) -> str:
    run = invocation.run
    if task.lane not in run.lanes:
        guard.open_lane(run, task.lane, task.caller_lane, concurrent=False, path=task.caller_path, delegate=task.agent)
    parallel = parallel_part(branch) if branch else ""
    if not parallel:
        return task.lane
    key = branch_lane(guard, run, parallel, task.lane, invocation.calls)
    if task.lane in invocation.delegates:
        invocation.delegates.setdefault(key, invocation.delegates[task.lane])
    return key


# ---- The agents above an agent: bounded loops, and delegations


def is_bounded(agent: BaseAgent) -> bool:
    """Return whether an agent works in a ``LoopAgent`` whose number of rounds is set."""
    above = agent.parent_agent
    while above is not None:
        if isinstance(above, LoopAgent) and above.max_iterations is not None:
            return True
        above = above.parent_agent
    return False


def enter(
    guard: Guard, invocation: Invocation, agent: BaseAgent, lane: str, branch: str | None, scope: str | None
) -> int:
    """Note that an agent begins to work in a lane. Return the number of delegations above it."""
    task = invocation.tasks.get(scope) if scope else None
    known = invocation.delegates.get(lane)
    if task is not None and task.lane == lane:
        if task.depth < 0:
            task.depth = _levels(agent, invocation)
        invocation.delegates[lane] = (
            task.follow(branch),
            known[1] if known is not None else _levels(agent, invocation),
        )
    elif known is None and (tool := _tool_in(guard, invocation)) is not None and child_lane(tool) == lane:
        invocation.delegates[lane] = (tool.depth + 1, _levels(agent, invocation))
    depth = invocation.depths[lane] = depth_of(agent, invocation, lane)
    return depth


def depth_of(agent: BaseAgent, invocation: Invocation, lane: str) -> int:
    """Return the number of delegations above an agent in a lane, each made by a model. Containers do not count.

    In the tree of agents these are the models above it that could have sent the work down. In the lane of a delegated
    agent they are those above the delegate, and those between the delegate and an agent below it: a transfer back up to
    the caller goes no less deep.
    """
    if agent.parent_agent is None and not invocation.delegates:
        return invocation.depth  # most agents
    levels = _levels(agent, invocation)
    delegate = invocation.delegates.get(lane)
    return levels if delegate is None else delegate[0] + max(levels - delegate[1], 0)


def _levels(agent: BaseAgent, invocation: Invocation) -> int:
    """Count the models above an agent in the tree, down from the agent that the invocation began with."""
    depth = invocation.depth
    current, above = agent, agent.parent_agent
    while above is not None and current.name != invocation.root_agent:
        depth += isinstance(above, LlmAgent)
        current, above = above, above.parent_agent
    return depth


# ---- The size of the next request

_PART: Final = 12  # bytes of every part beside its text
_ENOUGH: Final = 64_000_000
LARGE: Final = 4_096  # bytes: a larger answer is not copied a second time
_FEW: Final = 4  # fields that are looked at
_LEVELS: Final = 4  # of a value, whose lengths are looked at
_WIDTH: Final = 16  # entries of each level

Look = tuple[str | None, int, int]  # how a content is recognised at little cost: role, number of parts, lengths
_EMPTY: Final[Look] = (None, 0, 0)
AnswerSizes = dict[tuple[str | None, int], int]  # by tool and lengths: ADK removes the ids of calls from a request


@dataclass(slots=True)
class PromptProjection:
    """One request of an agent in a lane, and once a model has answered it, how many tokens it really was."""

    upper: int  # tokens, for reserving
    likely: int  # tokens, for the context window
    audio: int  # tokens of it
    size: int
    contents: int
    tail: Look  # of its last content
    tokens: int = 0  # as counted by the model
    answers: AnswerSizes | None = None  # of the large answers that came since

    def know(self, tool: str, answer: Any, size: int) -> None:
        """Remember the size of a large answer, which the next request will bring."""
        key = tool, lengths_of(answer)
        self.answers = self.answers or {}
        self.answers[key] = max(size, self.answers.get(key, 0))


def project(request: LlmRequest, known: PromptProjection | None) -> PromptProjection:
    """Return the size of a request, based on the request before it. Each content is measured once.

    The first request of an agent is measured whole. Its answer says how many tokens it was, so of later requests only
    what was added is measured. ADK copies all contents for every request, so an old content is recognised by its
    position. The last old one is looked at again: where it has changed (compaction, another history), the whole request
    is measured and scaled by what was learned.
    """
    contents = request.contents
    count = len(contents)
    if known is not None and 0 < known.contents <= count and _look(contents[known.contents - 1]) == known.tail:
        added, audio, tail = _measure(contents[known.contents :], known.answers)
        upper, likely = known.tokens - (-added // UPPER), known.tokens + added // LIKELY
        return PromptProjection(upper, likely, audio, known.size + added, count, tail or known.tail)
    added, audio, look = _measure(contents)
    size, tail = _overhead(request) + added, look or _EMPTY
    if known is not None and known.size:
        likely = size * known.tokens // known.size
        return PromptProjection(likely + likely // 8, likely, audio, size, count, tail)
    return PromptProjection(-(-size // UPPER), size // LIKELY, audio, size, count, tail)


# Fields of pydantic's objects are slow to read, so code of every step that needs several takes their ``__dict__``.


def _look(content: types.Content) -> Look:
    lengths, of = 0, content.__dict__
    parts = of["parts"] or ()
    for part in parts:
        held = part.__dict__
        if held["text"] is not None:
            lengths += len(held["text"])
        elif held["function_call"] is not None:
            lengths += lengths_of(held["function_call"].args)
        elif held["function_response"] is not None:
            lengths += lengths_of(held["function_response"].response)
        elif held["inline_data"] is not None:
            lengths += len(held["inline_data"].data or b"")
    return of["role"], len(parts), lengths


def lengths_of(value: Any) -> int:
    """Return the sum of the lengths of the texts, lists and dicts in the upper part of a value."""
    total = 0
    level: Any = (value,)
    for _ in range(_LEVELS):
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is str:
                total += len(item)
            elif kind is dict:
                total += len(item)
                if len(below) < _WIDTH:
                    below += itertools.islice(item.values(), _WIDTH)
            elif kind is list or kind is tuple:
                total += len(item)
                if len(below) < _WIDTH:
                    below += item[:_WIDTH]
        if not below:
            break
        level = below
    return total


def _measure(contents: list[types.Content], answers: AnswerSizes | None = None) -> tuple[int, int, Look | None]:
    """Return the bytes of contents, their audio tokens, and a look at the last one.

    Media count as much as text with as many tokens. ``answers``: the known sizes of large answers. One that has changed
    since is measured.
    """
    size = audio = 0
    for content in contents:
        for part in content.parts or ():
            held = part.__dict__
            size += _PART
            text: str | None = held["text"]
            if text is not None:
                size += len(text) if text.isascii() else text_size(text)
            elif (call := held["function_call"]) is not None or held["function_response"] is not None:
                known = None
                if call is not None:
                    name, value = call.name, call.args
                else:
                    answer = held["function_response"]
                    name, value = answer.name, answer.response
                    if answers is not None:
                        known = answers.get((name, lengths_of(value)))
                if known is None:
                    known = size_of_copy(value, _ENOUGH)
                for entry in value.values() if type(value) is dict and len(value) <= _FEW else ():
                    if type(entry) is str and 2 * len(entry) > known:
                        break  # a single text is most of the answer
                else:
                    known += known // 2  # fields have 2.4 bytes per token where text has 3.2
                size += len(name or "") + known
            elif (media := held["inline_data"]) is not None:
                tokens, sound = media_tokens(media.mime_type or "", len(media.data or b""))
                size, audio = size + tokens * UPPER, audio + sound
            elif held["file_data"] is not None:
                size += IMAGE_TOKENS * UPPER  # its length is unknown
    return size, audio, _look(contents[-1]) if contents else None


def _overhead(request: LlmRequest) -> int:
    """Return the bytes of the instruction and the tool declarations, which every request carries."""
    config = request.config
    size = _instruction_size(config.system_instruction) if config.system_instruction else 0
    for tool in config.tools or ():
        for declaration in getattr(tool, "function_declarations", None) or ():
            size += size_of_copy(declaration.model_dump(exclude_none=True, mode="json"), _ENOUGH) + _PART
    return size


def _instruction_size(value: Any) -> int:
    if isinstance(value, str):
        return text_size(value)
    if isinstance(value, types.Content):
        return _measure([value])[0]
    if isinstance(value, list):
        return sum(_instruction_size(item) for item in value)
    return len(value.text) if isinstance(value, types.Part) and value.text else 0
