"""A model call or a tool call of an agent, from its permission to its bill, on every guard around it.

``calls/run`` creates a ``Permission`` for each model call and an ``OpenCall`` for each tool call. The adapters for
LangChain, OpenAI Agents and Pydantic AI, and ``adk/model_calls``, settle permissions. ``adk/plugin`` registers how the
tool call around the current code is found in ADK.
"""

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from runguard.calls.function_state import SURROUNDINGS
from runguard.core.decision import Action, Finding, Trip, text_for_model
from runguard.core.events import Answer, ModelCall, ModelResult, Outcome
from runguard.core.identity import size_of, words_name
from runguard.core.money import shown
from runguard.engine.charges import OWNERS, Charge
from runguard.engine.guard import Guard
from runguard.engine.runs import Run
from runguard.pricing.rates import Usage
from runguard.providers.errors import was_unbilled
from runguard.providers.messages import arguments
from runguard.providers.usage import LIKELY, UPPER, checked_usage, measure, tokens_in
from runguard.termination.conditions import Ended

if TYPE_CHECKING:
    from runguard.calls.run import AgentRun

# ---- Runs inside runs: a tool of one agent may start another agent, of the same framework or of another one.
# The inner agent belongs to the outer run. Its calls are judged and billed there first, in a lane of their own. After
# that they are judged under the settings of the inner adapter. So one limit holds for the whole tree.


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


# ---- Tool calls, from the check to the answer that the rules see.

NOT_EXECUTED: Final = "Not executed: this turn was stopped."


class ToolUse(NamedTuple):
    """A tool call that a model asked for."""

    id: str
    tool: str
    args: Any = None


@dataclass(slots=True)
class OpenCall:
    """One call, until the answers of its batch are reported."""

    use: ToolUse
    batch: str
    seen: list[tuple[Layer, bytes, bytes]] = field(default_factory=list)  # layer, fingerprint, identity of its effect
    value: object = None
    outcome: Outcome | None = None
    is_over: bool = False

    @property
    def key(self) -> str:
        """Unique within a run: frameworks may number the calls of each response from zero."""
        return f"{self.batch}.{self.use.id}"

    def answer(self, value: object, outcome: Outcome | None = None) -> None:
        self.value, self.outcome, self.is_over = as_data(value), outcome, True

    def refuse(self) -> None:
        """The tool was not executed."""
        self.outcome, self.is_over = Outcome.REFUSED, True

    def answer_in(self, layer: Layer) -> Answer | None:
        """The answer as one layer sees it. None: the layer was not asked about the call."""
        for seen, fingerprint, once in self.seen:
            if seen is layer:
                use = self.use
                return Answer(use.tool, fingerprint, self.value, self.key, self.outcome, args=use.args, once=once)
        return None


def left_out(layers: Sequence[Layer], use: ToolUse, value: object) -> str | None:
    """The note in place of an answer beyond ``max_tool_result_chars``. ``guard.after`` reports it with the others."""
    for guard, _, _ in layers:
        limit, rule = guard.policy.max_tool_result_chars, guard.tools.rule(use.tool)
        if not limit or guard.policy.mode != "enforce" or (rule is not None and rule.exempt):
            continue
        chars = size_of(as_data(value), 2 * limit)
        if chars > limit:
            return text_for_model(Finding("result_size", Action.BLOCK, chars, limit, "characters", tool=use.tool))
    return None


def as_data(value: object) -> object:
    """Frameworks pass tool answers on as text. Text that is JSON becomes data again, within bounds."""
    if type(value) is str and value.lstrip()[:1] in ("{", "["):
        return arguments(value)
    return value


# ---- Model calls.

_T = TypeVar("_T")
_log: Final = logging.getLogger("runguard")
_INSTRUCTION_TOKENS: Final = 64  # what a framework adds around the instruction


@dataclass(frozen=True, slots=True)
class ModelSwitch:
    """What an adapter says about sending a request to another model."""

    has_open_call: Callable[[], bool]
    obstacle: Callable[[str], str]  # why the request cannot go to a model; "" where it can


@dataclass(slots=True)
class ModelRequest:
    """What is known of a model call before it is made."""

    model: str = ""
    input_tokens: int = 0  # an upper estimate, for what is reserved
    likely_tokens: int = 0  # the likely size, for the context window
    max_output_tokens: int | None = None  # None: as much as the model can
    audio_tokens: int = 0
    instead_of: str = ""  # the model that was asked for, where a threshold chose a cheaper one
    switch: ModelSwitch | None = None  # where the adapter can send the request to another model

    @classmethod
    def of(cls, model: str, prompt: Any, max_output_tokens: int | None = None, around: int = 0) -> "ModelRequest":
        """``prompt``: messages, instructions and tool declarations, as plain data or objects.

        ``around``: bytes beside them, such as what separates messages in the request.
        """
        size, audio = measure(prompt)
        size += around
        return cls(model, -(-size // UPPER), -(-size // LIKELY), max_output_tokens, audio)


_COUNT_S: Final = 5.0  # a slower counter would delay the call that it protects
_warned: Final[deque[Any]] = deque(maxlen=64)  # counters whose failure is in the log


async def count_tokens(counter: Callable[..., Any], request: Any) -> int | None:
    """Call the user's own counter, sync or async. When it fails, the request is estimated and a warning logged once.

    0 is a failure too: every request has tokens, and a call that reserves nothing for its prompt overspends.
    """
    try:
        counted = counter(request)
        if inspect.isawaitable(counted):
            async with asyncio.timeout(_COUNT_S):
                counted = await counted
        if type(counted) is int and counted > 0:
            return counted
        problem = f"gave {shown(counted)}, not a number of tokens"
    except Exception as error:
        problem = f"raised {type(error).__name__}"
    if counter not in _warned:
        _warned.append(counter)
        _log.warning("runguard.counter_failed: tokens= %s; requests are estimated instead", problem)
    return None


class Permission:
    """Permission for one model call. One of ``settle``, ``fail`` and ``release`` ends it; a second one is ignored."""

    __slots__ = ("_charged", "_is_over", "_run", "interrupted", "last_after", "notice", "request", "task")

    def __init__(self, run: "AgentRun", task: "asyncio.Task[Any] | None") -> None:
        self._run, self.task = run, task
        self._charged: list[tuple[Layer, ModelCall]] = []
        self._is_over = False
        self.request = ModelRequest()
        self.notice = ""  # for the model, to be added to this request
        self.interrupted: Trip | Ended | None = None  # what has ended the call in flight
        self.last_after: Trip | None = None  # the stop after which this is the last call: it must have no tools

    def add(self, layer: Layer, event: ModelCall) -> None:
        """The guard of ``layer`` lets the call through."""
        self._charged.append((layer, event))

    @property
    def charges(self) -> list[Charge]:
        """What the layers have opened for the call."""
        return [event.charge for _, event in self._charged if event.charge is not None]

    @property
    def max_output_tokens(self) -> int | None:
        """The output limit that the request must carry, because a budget cannot pay for more. None: no change."""
        lowest = None
        for _, event in self._charged:
            charge = event.charge
            if charge is not None and charge.lowered and (lowest is None or charge.max_output < lowest):
                lowest = charge.max_output
        return lowest

    @property
    def model(self) -> str:
        """The cheaper model that the request must go to, "" for its own."""
        for _, event in self._charged:
            if event.instead_of:
                return event.model
        return ""

    @property
    def stopped(self) -> Trip | Ended | None:
        """A stop or an end since the call began, such as the kill switch: end the stream."""
        trip = self._run.stopped
        return self._run.ending.ended if trip is None or trip is self.last_after else trip

    def _heed(self, end: Callable[[], None]) -> Callable[[], None] | None:
        """From now on the kill switch, or a condition that time or a signal has met, calls ``end``.

        Returns what ``_ignore`` needs.
        """
        for layer, _ in self._charged:
            layer.run.in_flight.add(end)
        ending = self._run.ending
        if not ending.all:
            return None
        silence: Callable[[], None] | None = self._run.guard.faults.attempt("adapter", ending.listen, end)
        return silence

    def _ignore(self, end: Callable[[], None], silence: Callable[[], None] | None) -> None:
        if silence is not None:
            self._run.guard.faults.attempt("adapter", silence)
        for layer, _ in self._charged:
            layer.run.in_flight.discard(end)

    @contextmanager
    def being_made(self) -> Iterator[None]:
        """Guards inside the model call that have the same store do not book it again."""
        token = OWNERS.set((*OWNERS.get(), *self.charges))
        try:
            yield
        finally:
            with suppress(ValueError):  # a coroutine that is thrown away ends in another context
                OWNERS.reset(token)

    async def during(self, call: Awaitable[_T]) -> _T:
        """Await the model call. The kill switch ends it: then ``interrupted`` holds the trip.

        The call runs in the task of its caller, as without a guard: a task of its own would cost another round of the
        event loop.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        is_cut = is_over = False

        def cut() -> None:
            nonlocal is_cut
            if task is not None and not is_cut and not is_over:
                is_cut = task.cancel()

        def end() -> None:
            loop.call_soon_threadsafe(cut)

        silence = self._heed(end)
        is_ours = False
        try:
            with self.being_made():
                return await call
        except asyncio.CancelledError:
            is_ours = is_cut
            raise
        finally:
            is_over = True
            self._ignore(end, silence)
            # Another cancellation counts too: then the task ends, whatever the guard says.
            if is_cut and task is not None and task.uncancel() == 0 and is_ours:
                self.interrupted = self.stopped

    async def pieces(self, stream: AsyncIterable[_T]) -> AsyncGenerator[_T, None]:
        """The pieces of a streamed answer.

        The kill switch ends the wait for a piece: then ``interrupted`` holds the trip, and the stream is over.
        """
        loop, pieces = asyncio.get_running_loop(), aiter(stream)
        waiting: asyncio.Task[Any] | None = None
        is_cut = False

        def cut() -> None:
            nonlocal is_cut
            if waiting is not None and not is_cut:
                is_cut = waiting.cancel()

        def end() -> None:
            loop.call_soon_threadsafe(cut)

        silence = self._heed(end)
        try:
            while (trip := self.stopped) is None:
                waiting = asyncio.current_task()
                try:
                    with self.being_made():
                        piece = await anext(pieces)
                except StopAsyncIteration:
                    return
                except asyncio.CancelledError:
                    if is_cut and waiting is not None and waiting.uncancel() == 0:
                        break
                    raise
                finally:
                    waiting = None
                yield piece
            self.interrupted = trip or self.stopped
        finally:
            self._ignore(end, silence)
            if (close := getattr(pieces, "aclose", None)) is not None:
                await close()

    def pieces_now(self, stream: Iterable[_T]) -> Iterator[_T]:
        """The pieces of a streamed answer, for synchronous callers."""
        pieces = iter(stream)
        while True:
            with self.being_made():
                try:
                    piece = next(pieces)
                except StopIteration:
                    return
            yield piece

    def read(self, settle: Callable[["Permission", Any], None], response: Any) -> None:
        """Let the adapter read the answer and settle. A fault there books an estimate, and the answer is kept."""
        try:
            settle(self, response)
        except Exception as error:
            self._run.fault(error)
            self.fail(None)

    def changed(self, change: Callable[["Permission", _T], _T], request: _T) -> _T:
        """The request with this permission's notice and output limit. A fault there leaves the request as it is."""
        if not self.notice and self.max_output_tokens is None and not self.model:
            return request
        try:
            return change(self, request)
        except Exception as error:
            self._run.fault(error)
            return request

    def settle(
        self, usage: Usage | None, *, model: str = "", calls: Sequence[ToolUse] = (), text: str = "", size: int = 0
    ) -> None:
        """The model answered. ``usage`` None: not reported, so ``size`` bytes of answer are booked as an estimate."""
        if self._close():
            return
        usage = checked_usage(usage)
        for layer, event in self._charged:  # a fault in one layer does not prevent the others
            if event.charge is not None:
                layer.guard.faults.attempt("adapter", _book, layer, event, usage, model, size)
            layer.guard.faults.attempt("adapter", _learn, layer, event, usage, model, "" if calls else text)
        self._run.tools.asked_for(calls)
        if self._run.ending.all:
            used, _ = _completed(usage, self.request.input_tokens, size)
            at = (self._run.agent, used, model or self.request.model)
            self._run.guard.faults.attempt("adapter", self._run.ending.answered, *at, calls, text)

    def fail(self, error: BaseException | None, streamed: int = 0, *, streaming: bool = False) -> None:
        """The call raised, was cancelled, or its stream was cut after ``streamed`` bytes: booked as an estimate."""
        if self._close():
            return
        if isinstance(error, Exception):
            self.interrupted = self.interrupted or self.last_after  # the run ends with its stop
        for layer, event in self._charged:
            if event.charge is not None:
                layer.guard.faults.attempt("adapter", _abandon, layer, event, error, streamed, streaming)

    def release(self) -> None:
        """The call was not made."""
        if self._close():
            return
        for layer, event in self._charged:
            if event.charge is not None and not event.charge.over:
                layer.guard.release(event.charge)
                layer.guard.faults.attempt("adapter", layer.guard.unspent, event.run, event)

    def _close(self) -> bool:
        over, self._is_over = self._is_over, True
        if not over and self.task is not None:
            for layer, _ in self._charged:
                layer.guard.faults.attempt("adapter", layer.run.slots.give_back, self.task)
        return over


Reply = Permission | Trip | Ended  # to the question for a model call


def _book(layer: Layer, event: ModelCall, usage: Usage | None, model: str, size: int) -> None:
    booked, estimated = _completed(usage, event.input_tokens, size)
    layer.guard.settle(event.charge, booked, model or event.model, estimated=estimated)


def _completed(usage: Usage | None, input_tokens: int, size: int) -> tuple[Usage, bool]:
    """The usage with an estimate of what was not reported, and whether there is one."""
    if usage is None:
        return Usage(input_tokens, tokens_in(size)), True
    return (usage, False) if usage.input else (replace(usage, input=input_tokens), True)


def _learn(layer: Layer, event: ModelCall, usage: Usage | None, model: str, text: str) -> None:
    guard, run, lane = layer
    result = ModelResult(run.info.run, lane, event.agent, guard.clock(), model=model or event.model)
    if usage is not None:
        result.prompt_tokens, result.output_tokens = usage.input or None, usage.output
    result.text_id = words_name(text) if text else 0
    guard.after(result)


def _abandon(layer: Layer, event: ModelCall, error: BaseException | None, streamed: int, streaming: bool) -> None:
    refused = was_unbilled(error)
    layer.guard.abandon(event.charge, tokens_in(streamed), streaming=streaming, refused=refused, error=error)


# ---- Model calls that the guard chooses: a cheaper model, and the last answer of a stopped run.


def cheaper_request(run: "AgentRun", request: ModelRequest, *, no_loop: bool) -> ModelRequest:
    """The request, to a cheaper model where a threshold of the run's own guard says so."""
    chosen: Any = run.guard.faults.attempt("adapter", _choose, run, request, no_loop)
    if chosen is None or not chosen.instead_of:
        return request
    return replace(request, model=chosen.model, instead_of=chosen.instead_of, input_tokens=chosen.input_tokens)


def _choose(run: "AgentRun", request: ModelRequest, no_loop: bool) -> ModelCall | None:
    guard, switch = run.guard, request.switch
    layer = next((one for one in reversed(run.layers) if one.guard is guard), None)
    if layer is None or switch is None or guard.downgrades is None:
        return None
    event = run.model_call(layer, request, no_loop=no_loop)
    guard.downgrades.choose(layer.run, event, switch.has_open_call, switch.obstacle)
    return event


async def last_permission(
    run: "AgentRun", request: ModelRequest, trip: Trip, task: "asyncio.Task[Any] | None"
) -> Permission | None:
    """Permission for the last call of a run that was stopped. None: the run ends with the stop.

    Runs around this one have not allowed the call, and an error in place of the stop would hide the answer.
    """
    if len(run.layers) != 1:  # none: the run could not be started
        return None
    layer = run.layers[0]
    guard, state, lane = layer
    last = guard.last_answers
    if last is None or guard.policy.on_stop == "raise":
        return None
    event = run.model_call(layer, request, no_loop=task is None)
    event.input_tokens += -(-len(last.instruction.encode()) // UPPER) + _INSTRUCTION_TOKENS
    if not last.may_answer(state, state.lane(lane), event, trip):
        return None
    if await last.take(state, event) is None:
        return None
    permission = Permission(run, task)
    permission.add(layer, event)
    permission.notice, permission.last_after = last.instruction, trip
    return permission
