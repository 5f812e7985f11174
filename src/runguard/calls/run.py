"""One agent at work in a framework that shows its model calls, its tool calls and their answers.

The adapters for LangChain, OpenAI Agents and Pydantic AI create an ``AgentRun`` when an agent starts, and so does
``adk/model_calls`` for model calls past ADK's hooks. An adapter then calls, in this order:

1. ``ask`` (``ask_now`` without an event loop) before each model call. It returns a ``Permission``, the ``Trip`` that
   stops the run, or ``Ended`` by a termination condition. A permission may carry a notice for the model and a lower
   output limit. Where ``last_after`` is set, the request must have no tools: its answer is the last one of the run.
2. Exactly one of ``Permission.settle`` (the model answered), ``Permission.fail`` (the call raised, or its stream was
   cut) and ``Permission.release`` (the call was not made).
3. ``tools.check`` (``tools.check_now``) before each tool call that the answer asks for. It returns the text that the
   model gets instead of an answer, or None to execute the tool. The tool runs inside ``with run.tools.inside(use)``, so
   that agents that it starts join this run.
4. ``tools.answered`` or ``tools.raised`` for each tool call. The rules see all answers to one model response together,
   at the next ``ask``.
5. ``end`` once, when the agent has finished or failed.

A fault of the guard raises nothing here: ``on_guard_error`` decides whether the call is made.
"""

import asyncio
import itertools
import logging
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from runguard.background import FINALIZED
from runguard.calls.function_state import drive
from runguard.calls.model_calls import (
    NOT_EXECUTED,
    OUTERMOST,
    InsideTool,
    Layer,
    ModelRequest,
    OpenCall,
    Permission,
    Place,
    Reply,
    ToolUse,
    cheaper_request,
    child_layer,
    current_place,
    end_layers,
    last_permission,
    left_out,
    notice_kept,
    paid_around,
)
from runguard.core.decision import ALLOW, Action, Decision, Trip
from runguard.core.errors import PolicyError, RunGuardError, RunStoppedError
from runguard.core.events import ROOT_LANE, AgentEntered, HandOff, ModelCall, Outcome, RunInfo, ToolCall, ToolResults
from runguard.core.money import Per
from runguard.engine.charges import OWNERS, Charge
from runguard.engine.guard import Guard
from runguard.pricing.rates import Usage
from runguard.termination.conditions import (
    Ended,
    HandoffTermination,
    StateTermination,
    TerminatedError,
    TerminationCondition,
    checked,
)
from runguard.termination.usage import RuleTermination

_T = TypeVar("_T")
_log: Final = logging.getLogger("runguard")
_batches: Final = itertools.count(1)  # numbers of model responses


class AgentRun:
    """One agent in one run. Its layers are the outer runs that it belongs to, and then its own."""

    def __init__(
        self,
        guard: Guard,
        layers: tuple[Layer, ...],
        agent: str,
        depth: int = 0,
        *,
        owns: bool = False,
        refused: Trip | None = None,
        ending: "EndingConditions | None" = None,
    ) -> None:
        """``refused``: the guard could not begin the run, and its settings say that then no call is made."""
        self.guard, self.layers, self.agent, self.depth = guard, layers, agent, depth
        self._owns = owns  # the run of the last layer began with this agent
        self._refused = refused
        self.ending = ending or EndingConditions()
        self.tools = RunTools(guard, layers, agent, depth, self.ending, refused is not None)
        self._lock, self._ended = self.tools.lock, False
        # Where a framework calls no hook after an error, the run ends soon after the last reference to it is gone.
        FINALIZED.ready()
        self._finalizer = weakref.finalize(self, FINALIZED.put, partial(end_layers, layers, owns))
        self._finalizer.atexit = False

    @classmethod
    def start(
        cls, guard: Guard, agent: str, *, condition: TerminationCondition | None = None, **whom: Any
    ) -> "AgentRun":
        """Begin a run, or join the run in whose tool call this code is executed.

        ``whom``: the app, user and session that budgets are for. ``condition`` ends a run that begins here. A run
        that cannot begin refuses every call where it has a budget; else ``on_guard_error`` decides. A budget per user
        or session that is not named raises ``PolicyError``.
        """
        layers: list[Layer] = []
        place, owns, refused = OUTERMOST, False, None
        try:
            place = current_place()
        except Exception as error:
            refused = guard.give_up("adapter", error, "", agent)
        for outer in place.layers:
            try:
                layers.append(child_layer(outer, place, agent))
            except Exception as error:
                refused = refused or outer.guard.give_up("adapter", error, outer.run.info.run, agent)
                layers.append(outer)  # without a lane of its own
        if all(outer.guard is not guard for outer in place.layers):
            check_named(guard, **whom)
            try:
                info = RunInfo(secrets.token_hex(8), at=guard.clock(), **whom)
                layers.append(Layer(guard, guard.start(info), ROOT_LANE))
                owns = True
            except Exception as error:
                refused = refused or guard.give_up_call("adapter", error, "", agent)
        ending = EndingConditions(place.conditions, condition if owns else None)
        return cls(guard, tuple(layers), agent, place.depth, owns=owns, refused=refused, ending=ending)

    @classmethod
    def join(cls, agent: str, handled: Collection[Guard]) -> "AgentRun | None":
        """A part of the runs around this code, without those of guards that are ``handled`` elsewhere; or None."""
        place = current_place()
        outer = [layer for layer in place.layers if layer.guard not in handled]
        if not outer:
            return None
        place = place._replace(call=f"{place.call}#{next(_batches)}")  # calls at the same time have their own lanes
        layers, ending = tuple(child_layer(one, place, agent) for one in outer), EndingConditions(place.conditions)
        return cls(outer[-1].guard, layers, agent, place.depth, ending=ending)

    @property
    def stopped(self) -> Trip | None:
        """The trip that has stopped this run, or a run around it."""
        if self._refused is not None:
            return self._refused
        for guard, run, lane in self.layers:
            trip = run.stopped or (run.lanes[lane].stop_in_force() if lane in run.lanes else None)
            if trip is not None and guard.policy.mode == "enforce":
                return trip
        return None

    def enter(self) -> Trip | None:
        """The agent begins to work. A trip: it is nested too deep or was started too often."""
        for layer in self.layers:
            decision = self._decide(layer, layer.guard.check, partial(AgentEntered, depth=self.depth))
            if (trip := self.stop_of(decision)) is not None:
                return trip
        return self._refused

    def hand_off(self, target: str) -> Trip | None:
        """The agent passes the conversation to another one, which goes on in the same lane."""
        trip = None
        for layer in self.layers:
            trip = trip or self.stop_of(self._decide(layer, layer.guard.check, partial(HandOff, target=target)))
        self.guard.faults.attempt("adapter", self.ending.handed_off, self.agent, target)
        self.agent = self.tools.agent = target
        return trip

    # ---- model calls ------------------------------------------------------------------------------------------------

    async def ask(self, read: Callable[[], ModelRequest]) -> Reply:
        """Ask for one model call. Waits while calls in flight hold the rest of a budget.

        ``read`` describes the request. A request that it cannot read is refused where it would get past a budget.
        """
        return await self._ask(read, asyncio.current_task())

    def ask_now(self, read: Callable[[], ModelRequest]) -> Reply:
        """``ask`` for callers without an event loop."""
        make = partial(self._ask, read, None)
        return drive_layers(
            self.layers, self.ending, make, lambda lost: lost.release() if isinstance(lost, Permission) else None
        )

    async def _ask(self, read: Callable[[], ModelRequest], task: "asyncio.Task[Any] | None") -> Reply:
        permission, owners = Permission(self, task), OWNERS.get()
        try:
            request = read()
        except Exception as error:
            for guard, run, _ in self.layers:
                if (trip := guard.give_up_call("adapter", error, run.info.run, self.agent)) is not None:
                    return trip
            request = ModelRequest()
        permission.request = request
        try:
            notices: list[str] = self.guard.faults.attempt("adapter", self._report_answers) or []
            if (trip := self.stopped) is not None:
                return await self._last(request, trip, task)
            if self.ending.all and (ended := await self.ending.ask()) is not None:
                return ended
            if self.guard.downgrades is not None:
                permission.request = request = cheaper_request(self, request, no_loop=task is None)
            for layer in self.layers:
                try:
                    decision = await self._reserve(layer, request, permission, owners)
                except Exception as error:
                    decision = await self._recover(layer, request, permission, error)
                if (trip := self.stop_of(decision)) is not None:
                    permission.release()
                    return await self._last(request, trip, task)
                if decision.action is Action.NUDGE and decision.enforced:
                    notices.append(decision.for_model)
                notices.append(layer.guard.faults.attempt("adapter", notice_kept, layer) or "")
        except BaseException:
            permission.release()
            raise
        permission.notice = next((notice for notice in notices if notice), "")
        return permission

    async def _last(self, request: ModelRequest, trip: Trip, task: "asyncio.Task[Any] | None") -> Permission | Trip:
        """The permission for the last answer of a run that ``trip`` has stopped, or the trip."""
        try:
            return await last_permission(self, request, trip, task) or trip
        except Exception as error:
            self.guard.faults.note("adapter", error)
            return trip

    async def _reserve(
        self, layer: Layer, request: ModelRequest, permission: Permission, owners: tuple[Charge, ...]
    ) -> Decision:
        """Ask the guard of one layer. ``owners``: the charges around the call, so that one store holds it once."""
        guard, event = layer.guard, self.model_call(layer, request, no_loop=permission.task is None)
        # an argument and not a context variable: what has to wait goes on in another thread
        event.around = (*owners, *permission.charges)
        with self._lock:
            decision = guard.check(event)
        if self.stop_of(decision) is not None:
            return decision
        reserved = await guard.reserve(event, slot=not event.no_loop)
        permission.add(layer, event)
        return reserved if reserved.action > decision.action else decision

    async def _recover(self, layer: Layer, request: ModelRequest, permission: Permission, error: Exception) -> Decision:
        """Ask the ledger of one layer alone, after a fault of its guard."""
        guard, run, lane = layer

        def describe(at: float) -> ModelCall:
            sized = (request.model, request.input_tokens, request.audio_tokens, request.max_output_tokens)
            return ModelCall(run.info.run, lane, self.agent, at, *sized)

        decision, event = await guard.recover("adapter", error, run.info.run, self.agent, describe)
        if event is not None:
            permission.add(layer, event)
        return decision

    def model_call(self, layer: Layer, request: ModelRequest, *, no_loop: bool) -> ModelCall:
        guard, run, lane = layer
        event = ModelCall(run.info.run, lane, self.agent, guard.clock(), request.model, request.input_tokens)
        event.audio_tokens, event.max_output_tokens = request.audio_tokens, request.max_output_tokens
        event.no_loop, event.no_wait = no_loop, no_loop and in_event_loop()
        event.projected_tokens, event.instead_of = request.likely_tokens or None, request.instead_of
        event.context_limit = guard.context_limit(request.model)
        return event

    def _report_answers(self) -> list[str]:
        """Show the rules the answers since the last model call. Returns notices for the model."""
        with self._lock:
            calls = self.tools.take_answered()
            if not calls:
                return []
            self.guard.faults.attempt("adapter", self.ending.executed, self.agent, calls)
            notices = []
            for layer in self.layers:
                answers = [answer for call in calls if (answer := call.answer_in(layer)) is not None]
                results = partial(ToolResults, batch=calls[0].batch, answers=answers)
                decision = self._decide(layer, layer.guard.after, results)
                if decision.action is Action.NUDGE and decision.enforced:
                    notices.append(decision.for_model)
            return notices

    # ---- the end ----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """The agent has finished. Safe to call twice."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._finalizer.detach()
            self.guard.faults.attempt("adapter", self._report_answers)
        end_layers(self.layers, self._owns)

    def fault(self, error: Exception) -> None:
        """A fault of the adapter. Where the settings say so, it stops the run."""
        self.guard.fault("adapter", error, self._name, self.agent)

    @property
    def _name(self) -> str:
        return self.layers[-1].run.info.run if self.layers else ""

    def stop_of(self, decision: Decision) -> Trip | None:
        return decision.trip if decision.action is Action.STOP and decision.enforced else None

    def _decide(self, layer: Layer, question: Callable[[Any], Decision], make: Callable[..., Any]) -> Decision:
        """Ask about the event that ``make`` builds from a run, a lane, an agent and a time."""
        guard, run, lane = layer
        try:
            with self._lock:
                return question(make(run.info.run, lane, self.agent, at=guard.clock()))
        except Exception as error:
            trip = guard.give_up("adapter", error, run.info.run, self.agent)
            return ALLOW if trip is None else Decision(Action.STOP, None, trip)


# ---- Whom budgets are for.

_unnamed: Final[weakref.WeakSet[Guard]] = weakref.WeakSet()  # guards in shadow mode that have warned


def check_named(guard: Guard, *, user: str = "", session: str = "", **_: Any) -> None:
    """Reject a budget per user or session where none is named: all users would share one account."""
    if (user and session) or guard.policy.mode == "off":
        return
    kinds = {"user": user, "session": session}
    for budget in guard.policy.budgets:
        kind = next((kind for kind, _ in Per.parse(budget.per).parts if not kinds.get(kind, kind)), "")
        if not kind:
            continue
        text = f"a Budget with per = '{budget.per}' needs a {kind}: without one, all share an account; {_HOW[kind]}"
        if guard.policy.mode == "enforce":
            raise PolicyError(text)
        if guard not in _unnamed:
            _unnamed.add(guard)
            _log.warning("runguard.unnamed: %s", text)
        return


_HOW: Final = {
    "user": "give user= to the guard, or count per='app'",
    "session": "give session= to the guard (LangChain: a thread_id in the config), or count per='app'",
}


# ---- The tool calls of an agent.


class RunTools:
    """The tool calls of one ``AgentRun``: checked before they run, paid for, and shown to the rules batch by batch."""

    def __init__(
        self, guard: Guard, layers: tuple[Layer, ...], agent: str, depth: int, ending: "EndingConditions", refused: bool
    ) -> None:
        """``refused``: no tool of the run may be executed."""
        self._guard, self._layers, self.agent, self._depth = guard, layers, agent, depth
        self._ending, self._refused = ending, refused
        self.lock = threading.RLock()
        self._open: dict[str, OpenCall] = {}
        self._batch = ""

    def asked_for(self, calls: Sequence[ToolUse]) -> None:
        """The tool calls of the newest model response: one batch, however many there are."""
        with self.lock:
            self._batch = str(next(_batches))
            self._open = {use.id: OpenCall(use, self._batch) for use in calls}

    def take_answered(self) -> list[OpenCall]:
        """The calls that have ended since the last model call. They are reported once; the others are forgotten."""
        calls, self._open = [call for call in self._open.values() if call.is_over], {}
        return calls

    # ---- before a call ----------------------------------------------------------------------------------------------

    async def check(self, use: ToolUse) -> str | None:
        """May this tool be executed? None, or what the model gets instead of an answer."""
        return await self._check(use, no_loop=False)

    def check_now(self, use: ToolUse) -> str | None:
        """``check`` for callers without an event loop."""
        make = partial(self._check, use, no_loop=True)
        return drive_layers(self._layers, self._ending, make, lambda _: self._not_executed(self._call(use)))

    async def _check(self, use: ToolUse, *, no_loop: bool) -> str | None:
        call = self._call(use)
        if self._refused:
            call.refuse()
            return NOT_EXECUTED
        passed: list[tuple[Layer, ToolCall]] = []  # layers that have allowed the call
        for layer in self._layers:
            guard, run, lane = layer
            try:
                once = guard.tools.once_identity(use.tool, use.args)
                if once or guard.breakers.get(use.tool) is not None:
                    await guard.prepare_tool(run, use.tool, once, call.key)
                fingerprint = guard.fingerprint(use.tool, use.args)
                call.seen.append((layer, fingerprint, once))
                at = (run.info.run, lane, self.agent, guard.clock())
                event = ToolCall(*at, use.tool, fingerprint, call.batch, call.key, once=once)
                with self.lock:
                    decision = guard.check(event)
                passed.append((layer, event))
                if guard.tools.has_prices and (decision.action < Action.BLOCK or not decision.enforced):
                    no_wait = no_loop and in_event_loop()
                    decision = await guard.reserve_tool(run, event, use.args, no_loop=no_loop, no_wait=no_wait)
            except Exception as error:
                trip: Trip | None = guard.give_up("adapter", error, run.info.run, self.agent)
                decision = ALLOW if trip is None else Decision(Action.STOP, None, trip, NOT_EXECUTED)
            except BaseException:
                self._not_executed(call)
                raise
            if decision.action >= Action.BLOCK and decision.enforced:
                self._not_executed(call)
                for (outer, of_run, _), allowed in passed:
                    outer.faults.attempt("adapter", outer.tool_gate.give_up, of_run, allowed)
                return decision.for_model or NOT_EXECUTED
        return None

    def _not_executed(self, call: OpenCall) -> None:
        """A call was refused or given up: no layer pays for it."""
        call.refuse()
        for guard, run, _ in self._layers:
            if run.bills is not None:
                guard.faults.attempt("adapter", guard.release_tool, run, call.key)

    def inside(self, use: ToolUse) -> AbstractContextManager[None]:
        """The tool runs in this block. An agent that it starts joins this run."""
        block = InsideTool(Place(self._layers, f"{use.tool}@{use.id}", self._depth + 1, self._ending.all))
        for _, run, _ in self._layers:
            if run.bills is not None:
                return paid_around(block, self._layers, self._call(use).key)
        return block

    # ---- after a call -----------------------------------------------------------------------------------------------

    def answered(self, use: ToolUse, value: object) -> str | None:
        """The tool returned ``value``: data, or text that may be JSON.

        Returns what the model must see instead of an answer that is too large.
        """
        self._guard.faults.attempt("adapter", self._answered, use, value)
        note: str | None = self._guard.faults.attempt("adapter", left_out, self._layers, use, value)
        return note

    def _answered(self, use: ToolUse, value: object) -> None:
        call = self._call(use)
        call.answer(value)
        self._pay(call, call.value)

    def _pay(self, call: OpenCall, answer: object) -> None:
        with ExitStack() as paying:  # each layer pays, also when a price function of another one ends the program
            for guard, run, _ in reversed(self._layers):
                if run.bills is not None:
                    paying.callback(
                        guard.faults.attempt, "adapter", guard.settle_tool, run, call.key, call.use.args, answer
                    )

    def saw(self, use: ToolUse, value: object) -> None:
        """The answer to a call that was never checked: the adapter sees tools only in the next request."""
        self._guard.faults.attempt("adapter", self._saw, use, value)

    def _saw(self, use: ToolUse, value: object) -> None:
        call = self._call(use)
        for layer in self._layers:
            call.seen.append((layer, layer.guard.fingerprint(use.tool, use.args), b""))
        call.answer(value)
        for layer in self._layers:
            guard, run, lane = layer
            if guard.tools.has_prices and (answer := call.answer_in(layer)) is not None:
                guard.faults.attempt("adapter", guard.tool_prices.book_unseen, run, lane, self.agent, answer)

    def raised(self, use: ToolUse, error: BaseException) -> None:
        """The tool raised. A failure opens its breaker for all runs; a cancelled call proves nothing."""
        self._guard.faults.attempt("adapter", self._raised, use, error)

    def _raised(self, use: ToolUse, error: BaseException) -> None:
        call = self._call(use)
        if not isinstance(error, Exception):
            call.refuse()
            for guard, run, _ in self._layers:  # it was executed, and its answer is not known
                if run.bills is not None:
                    guard.faults.attempt("adapter", guard.tool_prices.settle_unknown, run, call.key)
            return
        self._pay(call, error)
        call.answer(f"{type(error).__name__}: {error}"[:2_000], Outcome.ERROR)
        for guard, run, _ in self._layers:
            guard.faults.attempt("adapter", guard.report_failure, run, use.tool, call.key)

    def _call(self, use: ToolUse) -> OpenCall:
        with self.lock:
            call = self._open.get(use.id)
            if call is None:
                call = self._open[use.id] = OpenCall(use, self._batch or str(next(_batches)))
            return call


# ---- Callers without an event loop.


def in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def drive_layers(
    layers: tuple[Layer, ...],
    ending: "EndingConditions",
    make: Callable[[], Coroutine[Any, Any, _T]],
    lost: Callable[[_T], None],
) -> _T:
    """Run what ``make`` gives to its end. ``lost`` takes a result that came after its caller was interrupted."""
    waits = any(layer.guard.accounts.ledger.is_shared for layer in layers)
    return drive(make, waits or ending.needs_await, lost)


# ---- Termination conditions on frameworks other than ADK: what they see of a run, and how they end it.

_REPR_CHARS: Final = 500
_SOONEST_S: Final = 0.02


def error_of(end: Trip | Ended) -> RunGuardError:
    """What is raised where no text can end a run, such as with structured output."""
    return RunStoppedError.of(end) if isinstance(end, Trip) else TerminatedError(end.reason)


def fitting(condition: object, framework: str, *, has_hand_offs: bool) -> TerminationCondition | None:
    """The condition, if the framework can show what it looks for. Else it would never fire, and is rejected."""
    if condition is None:
        return None
    found = checked(condition)
    for leaf in found.leaves():
        is_hand_off = isinstance(leaf, HandoffTermination)
        is_hand_off = is_hand_off or (isinstance(leaf, RuleTermination) and leaf.settings()["rule"] == "handoff")
        if isinstance(leaf, StateTermination):
            raise PolicyError(
                f"termination_condition = {leaf!r}: only ADK has a session state; use a function of yours"
            )
        if is_hand_off and not has_hand_offs:
            raise PolicyError(f"termination_condition = {leaf!r}: {framework} has no hand-offs, so it would never fire")
    return found


# ---- events, with the fields of ADK's that conditions read ----------------------------------------------------------


class _FunctionCall(NamedTuple):
    id: str
    name: str
    args: Any


class _FunctionResponse(NamedTuple):
    id: str
    name: str
    response: Any


class _Part(NamedTuple):
    text: str | None = None
    function_call: _FunctionCall | None = None
    function_response: _FunctionResponse | None = None


class _Content(NamedTuple):
    parts: Sequence[_Part] = ()


class _Actions(NamedTuple):
    transfer_to_agent: str | None = None


@dataclass(slots=True)
class RunEvent:
    """What an agent said, called, got or handed over."""

    author: str
    content: _Content
    actions: _Actions = field(default_factory=_Actions)
    id: str = ""
    model_version: str = ""

    def is_final_response(self) -> bool:
        return bool(self.content.parts) and all(part.text is not None for part in self.content.parts)


# ---- conditions at work ---------------------------------------------------------------------------------------------


class RunCondition:
    """One condition at work in one run. Safe to use from the tasks and threads of that run."""

    def __init__(self, condition: TerminationCondition) -> None:
        self._condition = condition.for_run(time.monotonic())
        self._name = repr(condition)[:_REPR_CHARS]
        self._events: list[RunEvent] = []
        self._lock = threading.Lock()

    def see(self, event: RunEvent) -> None:
        with self._lock:
            self._events.append(event)

    def count(self, usage: Usage, model: str) -> None:
        with self._lock:
            self._condition.count(usage.input, usage.output, model=model, usage=usage)

    @property
    def needs_await(self) -> bool:
        return self._condition.needs_await

    @property
    def ended(self) -> Ended | None:
        return Ended(self._condition.reason or "", self._name) if self._condition.terminated else None

    async def ask(self) -> Ended | None:
        """Pass on what has happened since the last time."""
        with self._lock:
            events, self._events = self._events, []
        if not self._condition.terminated and (events or self._condition.knows_early):
            try:
                if self._condition.needs_await:
                    await self._condition(events)
                else:
                    with self._lock:
                        self._condition.check(events)
            except TerminatedError:  # by another task at the same time
                pass
            except Exception:  # a user's condition: its failure does not end the run
                _log.exception("runguard.termination_failed: %s raised; it counts as not fired", self._name)
        return self.ended

    def look(self) -> Ended | None:
        """What is known without an event: time, usage, signals."""
        with self._lock:
            for leaf in self._condition.leaves():
                if leaf.knows_early and not leaf.terminated and not leaf.needs_await:
                    leaf.check([])
        return self.ended

    def listen(self, end: Callable[[], None]) -> Callable[[], None]:
        """Call ``end`` when time or a signal ends the run. Returns how to stop listening."""
        loop, timer, is_listening = asyncio.get_running_loop(), None, True

        def look() -> None:
            nonlocal timer
            if not is_listening:
                return
            if self.look() is not None:
                end()
            elif (wake := self._condition.wake_at()) is not None:
                timer = loop.call_later(max(wake - time.monotonic(), _SOONEST_S), look)

        unsubscribe = self._condition.on_set(lambda: loop.call_soon_threadsafe(look))
        look()

        def stop() -> None:
            nonlocal is_listening
            is_listening = False
            unsubscribe()
            if timer is not None:
                timer.cancel()

        return stop


class EndingConditions:
    """The conditions around one agent: those of the runs around its own, and the one of its own run.

    A condition belongs to the run of the agent that it was given to. It sees what that agent says, calls and hands
    over. Agents that its tools start are runs of their own inside of it: their tokens, cost and time count, their texts
    do not. It is asked before every model call. Time and signals also end an asynchronous call in flight.
    """

    def __init__(self, around: Sequence[RunCondition] = (), own: TerminationCondition | None = None) -> None:
        self._own = None if own is None else RunCondition(own)
        self.all: tuple[RunCondition, ...] = (*around, *(() if self._own is None else (self._own,)))

    @property
    def ended(self) -> Ended | None:
        return next((ended for one in self.all if (ended := one.ended) is not None), None)

    @property
    def needs_await(self) -> bool:
        return any(one.needs_await for one in self.all)

    async def ask(self) -> Ended | None:
        for one in self.all:
            if (ended := await one.ask()) is not None:
                return ended
        return None

    def listen(self, end: Callable[[], None]) -> Callable[[], None]:
        """Call ``end`` when time or a signal ends a run that the agent is part of."""
        stops = [one.listen(end) for one in self.all]

        def stop() -> None:
            for one in stops:
                one()

        return stop

    def answered(self, agent: str, usage: Usage, model: str, calls: Sequence[ToolUse], text: str) -> None:
        """A model answered."""
        for one in self.all:
            one.count(usage, model)
        if self._own is not None:
            parts = [_Part(text)] if text else []
            parts += [_Part(function_call=_FunctionCall(use.id, use.tool, use.args)) for use in calls]
            self._own.see(RunEvent(agent, _Content(parts), model_version=model))

    def executed(self, agent: str, calls: Iterable[OpenCall]) -> None:
        """Tools answered."""
        if self._own is not None:
            answers = [_FunctionResponse(call.use.id, call.use.tool, call.value) for call in calls]
            self._own.see(RunEvent(agent, _Content([_Part(function_response=answer) for answer in answers])))

    def handed_off(self, agent: str, target: str) -> None:
        if self._own is not None:
            self._own.see(RunEvent(agent, _Content(), _Actions(target)))
