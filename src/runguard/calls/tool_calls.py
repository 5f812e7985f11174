"""The tool calls of an agent: where they run, whether they may, what they cost and what the rules see of them.

``calls/run`` gives each ``AgentRun`` its ``RunTools``. Agents that a tool starts find the runs around them with
``current_place``. ``adk/plugin`` registers how the tool call around the current code is found in ADK.
"""

import asyncio
import inspect
import itertools
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from runguard.calls.ending import EndingConditions
from runguard.calls.surroundings import SURROUNDINGS, drive
from runguard.core.decision import ALLOW, Action, Decision, Finding, Trip, text_for_model
from runguard.core.events import Answer, Outcome, ToolCall
from runguard.core.identity import size_of
from runguard.engine.charges import OWNERS, Charge
from runguard.engine.guard import Guard
from runguard.engine.runs import Run
from runguard.providers.messages import arguments

_T = TypeVar("_T")
batches: Final = itertools.count(1)  # numbers of model responses
_LIMITS_OF_TOOLS: Final = frozenset({"tool_calls", "tool_limit"})

# ---- Runs inside runs: a tool of one agent may start another agent, of the same framework or of another one.
# The inner agent belongs to the outer run. Its calls are judged and billed there first, in a lane of their own. After
# that they are judged under the settings of the inner adapter. So one limit holds for the whole tree.


class Layer(NamedTuple):
    """One guard's view of an agent at work."""

    guard: Guard
    run: Run
    lane: str

    @property
    def is_alive(self) -> bool:
        """Whether the run goes on."""
        return self.guard.runs.get(self.run.info.run) is self.run


class Place(NamedTuple):
    """Where an agent would start now: inside a tool call of these layers."""

    layers: tuple[Layer, ...]
    call: str  # tool and id of the call, unique within the lane
    depth: int  # agents above
    conditions: tuple[Any, ...] = ()  # termination conditions of the runs around
    is_beside: bool = False  # the model has asked for other calls, too: a stop of one leaves them alone

    def without(self, guards: Collection[Guard], conditions: Collection[Any]) -> "Place":
        """Return the place without what these guards and conditions see of it."""
        if not (guards or conditions):
            return self
        layers = tuple([layer for layer in self.layers if layer.guard not in guards])
        return self._replace(layers=layers, conditions=tuple([one for one in self.conditions if one not in conditions]))


OUTERMOST: Final = Place((), "", 0)
# Frameworks that keep their own record of the current tool call, such as ADK, register a function that reads it.
_readers: Final[list[Callable[[], Place | None]]] = []


def register(reader: Callable[[], Place | None]) -> None:
    """Register a function that says in which tool call of another framework the current code runs."""
    _readers.append(reader)


def current_place() -> Place:
    """Return the place inside the tool calls around this code, or ``OUTERMOST``. Runs that have ended do not count."""
    own = SURROUNDINGS.get().place
    places = [own] if isinstance(own, Place) else []
    places += [place for reader in _readers if (place := reader()) is not None]
    layers: dict[Guard, Layer] = {}
    call, depth, is_beside = "", 0, False
    conditions: tuple[Any, ...] = ()
    for place in places:
        alive = [one for one in place.layers if one.is_alive]
        if alive:
            layers |= {one.guard: one for one in alive}
            call, depth, conditions = place.call, max(depth, place.depth), (*conditions, *place.conditions)
            is_beside = is_beside or place.is_beside
    return Place(tuple(layers.values()), call, depth, conditions, is_beside) if layers else OUTERMOST


class InsideTool:
    """``with InsideTool(place, held):`` code in this block runs inside a tool call.

    ``held``: what is held for the call itself. Model calls inside do not wait for it.
    """

    __slots__ = ("_held", "_owners", "_place", "_token")

    def __init__(self, place: Place, held: tuple[Charge, ...]) -> None:
        self._place, self._held = place, held

    def __enter__(self) -> None:
        before = SURROUNDINGS.get()
        place = self._place if before.place is None else _joined(before.place, self._place)
        self._token = SURROUNDINGS.set(before._replace(place=place))
        self._owners = OWNERS.set((*OWNERS.get(), *self._held)) if self._held else None

    def __exit__(self, *_: object) -> None:
        try:  # by hand: three Python calls less for each tool call
            SURROUNDINGS.reset(self._token)
            if self._owners is not None:
                OWNERS.reset(self._owners)
        except ValueError:  # a coroutine that is thrown away ends in another context
            pass


def _joined(around: Any, place: Place) -> Place:
    """Return a place with all layers around it: another guard of the same agent may have let its tool call in."""
    layers = {one.guard: one for one in (*around.layers, *place.layers)}
    conditions = dict.fromkeys((*around.conditions, *place.conditions))
    return place._replace(layers=tuple(layers.values()), conditions=tuple(conditions))


def _has_let_in(around: Any, use: "ToolUse", layers: Collection[Layer]) -> bool:
    """Return whether the place around is this tool call, which these layers have admitted."""
    return around is not None and around.call == f"{use.tool}@{use.id}" and all(one in around.layers for one in layers)


def child_layer(layer: Layer, place: Place, agent: str) -> Layer:
    """Return the layer, with a lane of its own, of an agent that a tool call of this layer has started."""
    guard, run, lane = layer
    key = f"{lane}/{place.call}"
    if key not in run.lanes:
        guard.open_lane(run, key, lane, concurrent=place.is_beside, delegate=agent)
    return Layer(guard, run, key)


def notice_kept(layer: Layer) -> str:
    """Return and forget the nudge of a threshold that waits for the next request; "" without one."""
    lane = layer.run.lanes.get(layer.lane)
    if lane is None or not lane.notice:
        return ""
    notice, lane.notice = lane.notice, ""
    return notice


# ---- Tool calls, from the check to the answer that the rules see.

NOT_EXECUTED: Final = "Not executed: this turn was stopped."


class ToolUse(NamedTuple):
    """A tool call that a model asked for."""

    id: str
    tool: str
    args: Any = None
    received: frozenset[str] | None = None  # the arguments that the tool takes, where it never sees any other


@dataclass(slots=True)
class OpenCall:
    """One call, until the answers of its batch are reported."""

    use: ToolUse
    batch: str
    seen: list[tuple[Layer, bytes, bytes]] = field(default_factory=list)  # layer, fingerprint, identity of its effect
    passed: list[tuple[Layer, ToolCall]] = field(default_factory=list)  # layers that have judged it
    value: object = None
    outcome: Outcome | None = None
    is_over: bool = False
    is_elsewhere: bool = False  # another ``RunTools`` has asked the same guard about it, and reports its answer

    @property
    def key(self) -> str:
        """Unique within a run: frameworks may number the calls of each response from zero."""
        return f"{self.batch}.{self.use.id}"

    def answer(self, value: object, outcome: Outcome | None = None) -> None:
        self.value, self.outcome, self.is_over = as_data(value), outcome, True

    def refuse(self) -> None:
        """Mark the call as over and not executed."""
        self.outcome, self.is_over = Outcome.REFUSED, True

    def answer_in(self, layer: Layer) -> Answer | None:
        """Return the answer as one layer sees it, or None if the layer was not asked about the call."""
        for seen, fingerprint, once in self.seen:
            if seen is layer:
                use = self.use
                return Answer(use.tool, fingerprint, self.value, self.key, self.outcome, args=use.args, once=once)
        return None


def left_out(layers: Sequence[Layer], use: ToolUse, value: object) -> str | None:
    """Return the note that replaces an answer beyond ``max_tool_result_chars``, or None for a shorter one.

    ``guard.after`` reports the long answer later, with the others of its batch.
    """
    for guard, _, _ in layers:
        limit, rule = guard.policy.max_tool_result_chars, guard.tools.rule(use.tool)
        if not limit or guard.policy.mode != "enforce" or (rule is not None and rule.exempt):
            continue
        chars = size_of(as_data(value), 2 * limit)
        if chars > limit:
            return text_for_model(Finding("result_size", Action.BLOCK, chars, limit, "characters", tool=use.tool))
    return None


def as_data(value: object) -> object:
    """Turn text that is JSON back into data, within bounds. Frameworks pass tool answers on as text."""
    if type(value) is str and value.lstrip()[:1] in ("{", "["):
        return arguments(value)
    return value


# ---- The tool calls of an agent.


class RunTools:
    """The tool calls of one ``AgentRun``: checked before they run, paid for, and shown to the rules batch by batch."""

    def __init__(
        self, guard: Guard, layers: tuple[Layer, ...], agent: str, depth: int, ending: EndingConditions, refused: bool
    ) -> None:
        """``refused``: no tool of the run may be executed."""
        self._guard, self.layers, self.agent, self._depth = guard, layers, agent, depth
        self._ending, self._refused = ending, refused
        self.lock = threading.RLock()
        self._open: dict[str, OpenCall] = {}
        self._batch = ""
        self.is_second = False  # as in ``AgentRun``
        self.leave_ended: Callable[[], Callable[[], None] | None] = lambda: None  # that of the ``AgentRun``

    def asked_for(self, calls: Sequence[ToolUse]) -> None:
        """Begin a batch with all tool calls of the newest model response."""
        with self.lock:
            self._batch = str(next(batches))
            self._open = {use.id: OpenCall(use, self._batch) for use in calls}

    @property
    def has_calls(self) -> bool:
        """Whether the newest model response has asked for tools."""
        return bool(self._open)

    @property
    def unchecked(self) -> dict[str, ToolUse]:
        """The calls of the newest model response that neither ``check`` nor ``saw`` has met, by their ids."""
        return {name: use for name, (use, is_checked) in self.waiting.items() if not is_checked}

    @property
    def asked(self) -> list[str]:
        """Return the ids of the calls of the newest response."""
        return list(self._open)

    @property
    def waiting(self) -> dict[str, tuple[ToolUse, bool]]:
        """Return the calls of the newest response that nothing has answered, by id, and whether each was checked."""
        with self.lock:
            return {name: (call.use, bool(call.seen)) for name, call in self._open.items() if not call.is_over}

    def take_answered(self) -> list[OpenCall]:
        """Return the calls that have ended since the last model call, and forget all calls: each is reported once."""
        calls, self._open = [call for call in self._open.values() if call.is_over], {}
        return calls

    # ---- before a call ----------------------------------------------------------------------------------------------

    async def check(self, use: ToolUse) -> str | None:
        """Ask every layer for a tool call. Return None to execute it, or what the model gets instead of an answer."""
        try:
            return await self._check(use, no_loop=False)
        except Exception as error:
            return self._unchecked(error)

    def check_now(self, use: ToolUse) -> str | None:
        """Do what ``check`` does, for callers without an event loop."""
        make = partial(self._check, use, no_loop=True)
        try:
            return drive_layers(self.layers, self._ending, make, lambda _: self._not_executed(self._call(use)))
        except Exception as error:
            return self._unchecked(error)

    def _unchecked(self, error: Exception) -> str | None:
        """Answer for a call that a fault has left unchecked: execute it, unless ``on_guard_error`` says otherwise."""
        run = self.layers[-1].run.info.run if self.layers else ""
        return None if self._guard.give_up("adapter", error, run, self.agent) is None else NOT_EXECUTED

    async def _check(self, use: ToolUse, *, no_loop: bool) -> str | None:
        call = self._call(use)
        if self._refused:
            call.refuse()
            return NOT_EXECUTED
        if self.is_second and _has_let_in(SURROUNDINGS.get().place, use, self.layers):
            call.is_elsewhere = True
            return None
        for guard, run, _ in self.layers:
            if guard.runs.get(run.info.run) is not run and (leave_ended := self.leave_ended()) is not None:
                leave_ended()
                break
        for layer in self.layers:
            guard, run, lane = layer
            try:
                once = guard.tools.once_identity(use.tool, use.args)
                if once or guard.breakers.get(use.tool) is not None:
                    await guard.prepare_tool(run, use.tool, once, call.key)
                fingerprint = guard.tools.fingerprint(use.tool, use.args, use.received)
                call.seen.append((layer, fingerprint, once))
                at = (run.info.run, lane, self.agent, guard.clock())
                event = ToolCall(*at, use.tool, fingerprint, call.batch, call.key, once=once)
                with self.lock:
                    decision = guard.check(event)
                call.passed.append((layer, event))
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
                return decision.for_model or NOT_EXECUTED
        return None

    def _not_executed(self, call: OpenCall) -> None:
        """Take back a call that was refused or abandoned: no layer pays, and its side effect may be tried again."""
        call.refuse()
        for guard, run, _ in self.layers:
            if run.bills:
                guard.faults.attempt("adapter", guard.release_tool, run, call.key)
        for (guard, run, _), event in call.passed:
            guard.faults.attempt("adapter", guard.tool_gate.give_up, run, event)

    def deferred(self, use: ToolUse) -> None:
        """Take back a call that was not executed because it waits for an approval or for an answer from outside.

        It is checked again before it is executed. Until then it costs nothing, counts for no limit and is no answer.
        """
        with self.lock:
            call = self._open.get(use.id)
        if call is None:
            return
        self._not_executed(call)
        for (guard, run, _), event in call.passed:
            guard.faults.attempt("adapter", guard.tool_gate.unspent, run, event)
        call.seen, call.passed, call.outcome, call.is_over = [], [], None, False

    def skipped(self, use: ToolUse) -> None:
        """Take back a call that was not executed because something else answered it, such as another guard."""
        self._guard.faults.attempt("adapter", lambda: self._not_executed(self._call(use)))

    def inside(self, use: ToolUse) -> InsideTool:
        """Return the context manager in which the tool must run, so that agents that it starts join this run."""
        held: tuple[Charge, ...] = self._guard.faults.attempt("adapter", self._held, use) or ()
        is_beside = len(self._open) > 1
        name = f"{use.tool}@{use.id}"
        return InsideTool(Place(self.layers, name, self._depth + 1, self._ending.all, is_beside), held)

    def around(self, name: str) -> InsideTool:
        """Return the context manager for code of the agent that is no tool: agents that it starts join this run."""
        return InsideTool(Place(self.layers, f"{name}#{next(batches)}", self._depth + 1, self._ending.all), ())

    def _held(self, use: ToolUse) -> tuple[Charge, ...]:
        held = []
        for guard, run, _ in self.layers:
            if run.bills and (charge := guard.tool_prices.charge_of(run, self._call(use).key)) is not None:
                held.append(charge)
        return tuple(held)

    # ---- after a call -----------------------------------------------------------------------------------------------

    def answered(self, use: ToolUse, value: object, outcome: Outcome | None = None) -> str | None:
        """Record the answer of a tool, and pay for the call. Return the text that replaces an answer that is too large.

        ``value``: data, or text that may be JSON. ``outcome``: how the call ended, where the framework says so.
        """
        self._guard.faults.attempt("adapter", self._answered, use, value, outcome)
        note: str | None = self._guard.faults.attempt("adapter", left_out, self.layers, use, value)
        return note

    def _answered(self, use: ToolUse, value: object, outcome: Outcome | None) -> None:
        call = self._call(use)
        call.answer(value, outcome)
        if not call.is_elsewhere:
            self._pay(call, call.value)

    def _pay(self, call: OpenCall, answer: object) -> None:
        billed = [layer for layer in reversed(self.layers) if layer.run.bills]
        if not billed:
            return
        with ExitStack() as paying:  # each layer pays, also when a price function of another one ends the program
            for guard, run, _ in billed:
                paying.callback(
                    guard.faults.attempt, "adapter", guard.settle_tool, run, call.key, call.use.args, answer
                )

    def saw(self, use: ToolUse, value: object, outcome: Outcome | None = None, *, executed: bool = True) -> None:
        """Record the answer to a call that was never checked: the framework refused it, or shows tools only afterwards.

        ``outcome``: how it ended, where the framework says so. ``executed=False``: the tool has not run, so
        that it costs nothing. A call beyond a limit on tool calls stops the run: nothing else is left to refuse.
        """
        self._guard.faults.attempt("adapter", self._saw, use, value, outcome, executed)

    def _saw(self, use: ToolUse, value: object, outcome: Outcome | None, executed: bool) -> None:
        call = self._call(use)
        for layer in self.layers:
            fingerprint = layer.guard.tools.fingerprint(use.tool, use.args, use.received)
            call.seen.append((layer, fingerprint, b""))
            layer.guard.faults.attempt("adapter", self._count_seen, layer, call, fingerprint)
        call.answer(value, outcome)
        for layer in self.layers if executed else ():
            guard, run, lane = layer
            if guard.tools.has_prices and (answer := call.answer_in(layer)) is not None:
                guard.faults.attempt("adapter", guard.tool_prices.book_unseen, run, lane, self.agent, answer)

    def _count_seen(self, layer: Layer, call: OpenCall, fingerprint: bytes) -> None:
        guard, run, lane = layer
        event = ToolCall(
            run.info.run, lane, self.agent, guard.clock(), call.use.tool, fingerprint, call.batch, call.key
        )
        with self.lock:
            run.spend.tool_calls += 1  # it was executed, and a stop that follows tells of it
            decision = guard.check(event)
            if decision.action < Action.BLOCK or not decision.enforced:
                run.spend.tool_calls -= 1  # which the guard has counted, too
            finding = decision.finding
            if decision.action is Action.BLOCK and finding is not None and finding.rule in _LIMITS_OF_TOOLS:
                guard.found(event, replace(finding, action=Action.STOP))

    def raised(self, use: ToolUse, error: BaseException) -> None:
        """Record an error of a tool. A failure counts for its breaker in all runs; a cancelled call proves nothing."""
        self._guard.faults.attempt("adapter", self._raised, use, error)

    def _raised(self, use: ToolUse, error: BaseException) -> None:
        call = self._call(use)
        if call.is_elsewhere:
            call.refuse()
            return
        if not isinstance(error, Exception):
            call.refuse()
            for guard, run, _ in self.layers:  # the tool has run, but how it ended is unknown
                if run.bills:
                    guard.faults.attempt("adapter", guard.tool_prices.settle_unknown, run, call.key)
            return
        self._pay(call, error)
        outcome = Outcome.TIMEOUT if isinstance(error, TimeoutError) else Outcome.ERROR
        call.answer(f"{type(error).__name__}: {error}"[:2_000], outcome)
        for guard, run, _ in self.layers:
            guard.faults.attempt("adapter", guard.report_failure, run, use.tool, call.key)

    def _call(self, use: ToolUse) -> OpenCall:
        with self.lock:
            call = self._open.get(use.id)
            if call is None:
                self._batch = self._batch or str(next(batches))
                call = self._open[use.id] = OpenCall(use, self._batch)
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
    ending: EndingConditions,
    make: Callable[[], Coroutine[Any, Any, _T]],
    lost: Callable[[_T], None],
) -> _T:
    """Run the coroutine that ``make`` makes to its end, and return its result.

    ``lost`` takes a result that came after its caller was interrupted.
    """
    waits = any(layer.guard.shares_store or inspect.iscoroutinefunction(layer.guard.policy.tokens) for layer in layers)
    return drive(make, waits or ending.needs_await, lost)
