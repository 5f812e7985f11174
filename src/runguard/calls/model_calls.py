"""A model call of an agent, from its permission to its bill, on every guard around it.

``calls/run`` creates a ``Permission`` for each model call. The adapters for LangChain, OpenAI Agents and Pydantic AI,
and ``adk/model_calls``, settle it.
"""

import asyncio
import inspect
import logging
import threading
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

from runguard.calls.tool_calls import Layer, ToolUse
from runguard.core.decision import Trip
from runguard.core.errors import RunGuardError
from runguard.core.events import ModelCall, ModelResult
from runguard.core.identity import LruDict, words_name
from runguard.core.money import shown
from runguard.engine.charges import OWNERS, Charge
from runguard.engine.guard import Guard
from runguard.engine.money import ASSUMED_OUTPUT
from runguard.pricing.rates import Rates, Usage
from runguard.providers.errors import was_unbilled
from runguard.providers.messages import read_options
from runguard.providers.usage import LIKELY, UPPER, checked_usage, measure, tokens_in
from runguard.termination.conditions import Ended

if TYPE_CHECKING:
    from runguard.calls.run import AgentRun

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
    fixed_output: bool = False  # the adapter cannot send a lower output limit
    counts: object = None  # the framework's request, which the user's own ``tokens=`` counts
    others: Sequence[str] = ()  # models that may answer, or be paid, in place of ``model``
    tools: Sequence[str] = ()  # names of those that the model is offered, where the adapter can leave some of them out
    hidden: int = 0  # tokens of these that the provider adds by itself, such as a conversation that it stores
    candidates: int = 1  # answers asked for: each may have ``max_output_tokens``
    sent: int = 0  # likely tokens of the messages, of ``likely_tokens``
    kept: str = ""  # the name under which the provider keeps what is hidden
    conversation: str = ""  # the same, where it adds this request and its answer

    @classmethod
    def of(
        cls,
        model: str,
        prompt: Any,
        max_output_tokens: int | None = None,
        around: int = 0,
        *,
        hidden: int = 0,
        counts: object = None,
        others: Sequence[str] = (),
        measured: tuple[int, int] = (0, 0),
        options: Mapping[str, Any] | None = None,
        tools: Sequence[str] = (),
    ) -> "ModelRequest":
        """Describe a request by the size of its prompt: messages, instructions and tool declarations, data or objects.

        ``around``: bytes beside them, such as what separates messages in the request. ``hidden``: tokens that the
        provider adds by itself, such as a conversation that it stores. ``others``: the models that a fallback may
        choose instead. ``measured``: size and audio tokens of what is not in ``prompt``, such as the messages that
        ``AgentRun.prompts`` has measured. ``options``: what the framework passes on to the provider as it is, such as
        ``extra_body``. It wins over ``model`` and ``max_output_tokens``, and names what the provider has stored.
        """
        size, audio = measure(prompt)
        said = read_options(options) if options else None
        if said is not None and said.kept:  # what is sent again is not stored
            hidden = max(hidden, _KEPT.get(said.conversation or said.kept, 0) - size // LIKELY)
        size, audio = size + measured[0] + around, audio + measured[1]
        upper, likely = -(-size // UPPER) + hidden, -(-size // LIKELY) + hidden
        made = cls(
            model, upper, likely, max_output_tokens, audio, counts=counts, others=others, hidden=hidden, tools=tools
        )
        if said is not None:
            made.model, made.candidates = said.model or model, said.candidates
            made.sent, made.kept, made.conversation = measured[0] // LIKELY, said.kept, said.conversation
            if said.limit is not None:  # a lower limit beside it would not be heeded
                made.max_output_tokens, made.fixed_output = said.limit, True
        return made

    def learn(self, usage: Usage, answer: str) -> None:
        """Remember what the provider will add to a request that goes on from this one, or from its ``answer``."""
        whole = usage.input + usage.output
        known = {self.kept: max(usage.input - self.sent, 0), self.conversation: whole, answer: whole}
        with _KEEPING:
            _KEPT.update({name: tokens for name, tokens in known.items() if name})


_KEPT: Final = LruDict[str, int](8_192)  # tokens of stored conversations, responses and caches, by name
_KEEPING: Final = threading.Lock()

_COUNT_S: Final = 5.0  # a slower counter would delay the call that it protects
_warned: Final[deque[Any]] = deque(maxlen=64)  # counters whose failure is in the log


async def count_tokens(counter: Callable[..., Any], request: Any) -> int | None:
    """Return what the user's own counter says, sync or async; None when it fails, which is logged once.

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


@dataclass(slots=True, eq=False)
class Interruption:
    """Ends the wait of a task from any thread, and tells that cancellation from one by other code."""

    task: "asyncio.Task[Any] | None" = None  # that waits now
    is_sent: bool = False
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def __call__(self) -> None:
        """End the wait. Safe to call from any thread, and again."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._send)

    def _send(self) -> None:
        if self.task is not None and not self.is_sent:
            self.is_sent = self.task.cancel()

    def undone(self) -> bool:
        """Take the cancellation back. Return False where there is none, or where other code has cancelled, too."""
        task = asyncio.current_task()
        return self.is_sent and task is not None and task.uncancel() == 0


_Given = ParamSpec("_Given")


def _ending(
    close: "Callable[Concatenate[Permission, _Given], None]",
) -> "Callable[Concatenate[Permission, _Given], None]":
    """Let a method end its permission: once, and with an estimate for what is still held after a fault in it."""

    @wraps(close)
    def end(self: "Permission", *args: _Given.args, **kwargs: _Given.kwargs) -> None:
        if self.is_over:
            return
        self.is_over = True
        try:
            if self.task is not None:
                for layer, _ in self.charged:
                    layer.run.slots.give_back(self.task)
            close(self, *args, **kwargs)
        except Exception as fault:
            self.write_off(fault)

    return end  # type: ignore[return-value]


class Permission:
    """Permission for one model call. One of ``settle``, ``fail`` and ``release`` ends it; a second one is ignored."""

    __slots__ = ("_run", "charged", "interrupted", "is_over", "last_after", "measured", "notice", "request", "task")

    def __init__(self, run: "AgentRun", task: "asyncio.Task[Any] | None") -> None:
        self._run, self.task, self.is_over = run, task, False
        # layers whose guard lets the call through, each with the event that has its charge
        self.charged: list[tuple[Layer, ModelCall]] = []
        self.measured = self.request = ModelRequest()  # as the adapter has measured it, and as it was asked for
        self.notice = ""  # for the model, to be added to this request
        self.interrupted: Trip | Ended | None = None  # what has ended the call in flight
        self.last_after: Trip | None = None  # the stop after which this is the last call: it must have no tools

    @property
    def charges(self) -> list[Charge]:
        """What the layers have opened for the call."""
        return [event.charge for _, event in self.charged if event.charge is not None]

    @property
    def max_output_tokens(self) -> int | None:
        """The output limit that the request must carry, because a budget cannot pay for more. None: no change."""
        lowest = None
        for _, event in self.charged:
            charge = event.charge
            if charge is not None and charge.lowered and (lowest is None or charge.max_output < lowest):
                lowest = charge.max_output
        return lowest

    @property
    def model(self) -> str:
        """The cheaper model that the request must go to, "" for its own."""
        for _, event in self.charged:
            if event.instead_of:
                return event.model
        return ""

    @property
    def withheld(self) -> frozenset[str]:
        """The tools that the request must not offer."""
        found = frozenset[str]()
        for (_, run, lane), _ in self.charged:
            if lane in run.lanes and run.lanes[lane].withheld:
                found = found.union(run.lanes[lane].withheld)
        return found

    def left(self, tools: Sequence[_T], name: Callable[[_T], str], choice: object = None) -> list[_T]:
        """Return the tools that the request may offer.

        These are all of them where no other is left, since some providers reject a history of calls without tools, and
        where ``choice`` demands one that is withheld.
        """
        withheld = self.withheld
        others = [tool for tool in tools if name(tool) not in withheld]
        return others if others and not _mentions(choice, withheld) else [*tools]

    @property
    def stopped(self) -> Trip | Ended | None:
        """A stop or an end since the call began, such as the kill switch: end the stream."""
        end: Trip | Ended | None = self._run.guard.faults.attempt("adapter", self._stopped)
        return end

    def _stopped(self) -> Trip | Ended | None:
        trip = self._run.find_stop()
        return self._run.ending.ended if trip is None or trip is self.last_after else trip

    def being_made(self) -> "CallMark":
        """Mark a block as the model call, so that guards inside it that share the store do not book it again."""
        return CallMark(self.charges)

    async def during(self, call: Awaitable[_T]) -> _T:
        """Await the model call. The kill switch ends it: then ``interrupted`` holds the trip.

        The call runs in the task of its caller, as without a guard: a task of its own would cost another round of the
        event loop.
        """
        with self.in_flight():
            return await call

    def in_flight(self) -> "_InFlight":
        """Do what ``during`` does, as a block for the task that makes the call."""
        return _InFlight(self, self._run.guard.faults.attempt)

    def heed(self, end: Callable[[], None], undo: list[Callable[[], None]]) -> None:
        """Let the kill switch, and conditions on time and signals, call ``end``. Add what undoes that to ``undo``."""
        for layer, _ in self.charged:
            layer.run.in_flight.add(end)
            undo.append(partial(layer.run.in_flight.discard, end))
        if self._run.ending.all:
            undo.append(self._run.ending.listen(end))

    async def pieces(self, stream: AsyncIterable[_T], mark: "CallMark | None" = None) -> AsyncGenerator[_T, None]:
        """Yield the pieces of a streamed answer.

        The kill switch ends the wait for a piece: then ``interrupted`` holds the trip, and the stream is over.
        ``mark``: each piece is made inside of it. Between two of them, the reader of the stream is at work.
        """
        pieces, cut, undo = aiter(stream), Interruption(), list[Callable[[], None]]()
        mark, attempt = mark or self.being_made(), self._run.guard.faults.attempt
        attempt("adapter", self.heed, cut, undo)
        try:
            while (trip := self.stopped) is None:
                cut.task = asyncio.current_task()
                try:
                    with mark:
                        piece = await anext(pieces)
                except StopAsyncIteration:
                    return
                except asyncio.CancelledError:
                    if cut.undone():
                        break
                    raise
                finally:
                    cut.task = None
                yield piece
            self.interrupted = trip or self.stopped
        finally:
            for one in undo:
                attempt("adapter", one)
            if (close := getattr(pieces, "aclose", None)) is not None:
                await close()

    def pieces_now(self, stream: Iterable[_T], mark: "CallMark | None" = None) -> Iterator[_T]:
        """Do what ``pieces`` does for a synchronous caller. The kill switch cannot end its waits."""
        pieces, mark = iter(stream), mark or self.being_made()
        while True:
            with mark:
                try:
                    piece = next(pieces)
                except StopIteration:
                    return
            yield piece

    def read(self, settle: Callable[["Permission", Any], None], response: Any) -> None:
        """Let the adapter read the answer and settle. When that fails, book an estimate: the answer is kept."""
        try:
            settle(self, response)
        except Exception as error:
            self._run.fault(error)
            self.fail(None)

    def changed(self, change: Callable[["Permission", _T], _T], request: _T) -> _T:
        """Return the request with this permission's notice, output limit, model and tools, by the adapter's ``change``.

        A fault in ``change`` leaves the request as it is.
        """
        try:
            return request if self._is_plain() else change(self, request)
        except Exception as error:
            self._run.fault(error)
            return request

    def _is_plain(self) -> bool:
        """Return whether the request may be sent as it is."""
        for (_, run, lane), event in self.charged:
            if event.instead_of or (event.charge is not None and event.charge.lowered):
                return False
            if lane in run.lanes and run.lanes[lane].withheld:
                return False
        return not self.notice

    @_ending
    def settle(
        self,
        usage: Usage | None,
        *,
        model: str = "",
        calls: Sequence[ToolUse] = (),
        text: str = "",
        size: int | Callable[[], int] = 0,
        estimated: bool = False,
        answer: str = "",
    ) -> None:
        """Book the usage of a call that the model answered, and show the rules its text and tool calls.

        ``usage`` None, or without output: not reported, so the ``size`` of the answer in bytes is booked as an
        estimate; a function measures it only then. ``estimated``: a part of the usage was not reported. ``answer``: the
        name under which the provider may have stored the answer.
        """
        run, attempt = self._run, self._run.guard.faults.attempt  # a fault in one step does not prevent the others
        attempt("adapter", run.tools.asked_for, calls)
        usage = checked_usage(usage)
        if callable(size):
            size = size() if usage is None or not usage.output else 0
        self._close_charges(partial(_book, usage=usage, model=model, size=size, estimated=estimated))
        for layer, event in self.charged:
            layer.guard.faults.attempt("adapter", _learn, layer, event, usage, model, "" if calls else text)
        attempt("adapter", run.reported, self.measured, usage)
        if usage is not None and usage.input and (answer or self.measured.kept):
            attempt("adapter", self.measured.learn, usage, answer)
        if run.ending.all:
            used, _ = _completed(usage, self.request.input_tokens, size)
            attempt("adapter", run.ending.answered, run.agent, used, model or self.request.model, calls, text)

    @_ending
    def fail(
        self,
        error: BaseException | None,
        streamed: int = 0,
        *,
        streaming: bool = False,
        usage: Usage | None = None,
        model: str = "",
    ) -> None:
        """Book an estimate for a call that raised, was cancelled, or whose stream was cut after ``streamed`` bytes.

        Nothing is booked where ``error`` shows that the provider has billed nothing. ``usage``: what the provider had
        reported until then; it is the least that the call cost.
        """
        if isinstance(error, Exception):
            self.interrupted = self.interrupted or self.last_after  # the run ends with its stop
        if (reported := checked_usage(usage)) is not None:
            self._close_charges(partial(_book, usage=reported, model=model, size=streamed, estimated=True))
        elif isinstance(error, RunGuardError) and error.__context__ is None and not streamed:
            self._close_charges(_release)  # a guard inside of the model has refused the call: nothing was sent
        else:
            self._close_charges(partial(_abandon, error=error, streamed=streamed, streaming=streaming))

    @_ending
    def release(self) -> None:
        """Release the reservations of a call that was not made."""
        self._close_charges(_release)

    def correct(self, usage: Usage | None, *, model: str = "") -> None:
        """Book the reported usage of a call in place of the estimate. None: its provider billed nothing."""
        try:
            usage = checked_usage(usage)
            self._close_charges(_book_nothing if usage is None else partial(_book, usage=usage, model=model, size=0))
        except Exception as fault:
            self._run.fault(fault)

    def _close_charges(self, close: Callable[[Guard, ModelCall], None]) -> None:
        """Close the charge of each layer. A fault in one layer does not prevent the others."""
        for layer, event in self.charged:
            if event.charge is not None:
                try:
                    close(layer.guard, event)
                except Exception as fault:
                    write_off(layer.guard, event.charge, "adapter", fault)

    def write_off(self, fault: Exception) -> None:
        """Book an estimate for every layer that still holds something, after a fault."""
        self._run.fault(fault)
        for layer, event in self.charged:
            if event.charge is not None and not event.charge.over:
                write_off(layer.guard, event.charge, "adapter", fault)


class CallMark:
    """Marks a block as the model call that these charges are for. It may be entered again after its end."""

    __slots__ = ("_charges", "_token")

    def __init__(self, charges: list[Charge]) -> None:
        self._charges = charges

    def __enter__(self) -> None:
        self._token = OWNERS.set((*OWNERS.get(), *self._charges))

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        try:  # noqa: SIM105 - three Python calls less for each piece of a stream
            OWNERS.reset(self._token)
        except ValueError:  # a coroutine that is thrown away ends in another context
            pass


class _InFlight(CallMark):
    """A block in which the task around makes the model call. The kill switch ends it."""

    __slots__ = ("_attempt", "_cut", "_permission", "_undo")

    def __init__(self, permission: Permission, attempt: Callable[..., Any]) -> None:
        CallMark.__init__(self, permission.charges)
        self._permission, self._attempt, self._undo = permission, attempt, list[Callable[[], None]]()

    def __enter__(self) -> None:
        self._cut = Interruption(asyncio.current_task())
        self._attempt("adapter", self._permission.heed, self._cut, self._undo)
        CallMark.__enter__(self)

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        CallMark.__exit__(self)
        cut, permission = self._cut, self._permission
        is_ours = cut.is_sent and kind is not None and issubclass(kind, asyncio.CancelledError)
        cut.task = None
        for one in self._undo:
            self._attempt("adapter", one)
        # A cancellation by somebody else wins: then the task ends, whatever the guard says.
        if cut.is_sent and cut.undone() and is_ours:
            permission.interrupted = permission.stopped


def _mentions(choice: Any, names: Collection[str]) -> bool:
    """Return whether a choice of tools names one of these: a name, or mappings and lists around it."""
    if isinstance(choice, Mapping):
        choice = list(choice.values())
    if isinstance(choice, list | tuple):
        return any(_mentions(one, names) for one in choice)
    return isinstance(choice, str) and choice in names


def dearest(guard: Guard, request: ModelRequest) -> str:
    """Return the most expensive of the models that may answer a request.

    A model without a price ranks highest where the policy refuses it, and lowest where it does not.
    """
    most, found = -2, request.model
    for model in (request.model, *request.others) if request.others else ():
        rates = guard.accounts.pricing.rates(model, guard.clock())
        if isinstance(rates, Rates):
            output = request.max_output_tokens or guard.accounts.pricing.limits(model)[1] or ASSUMED_OUTPUT
            cost = rates.worst(request.input_tokens, output, request.audio_tokens)
        elif guard.policy.on_unpriced == "refuse":
            return model
        else:
            cost = -1
        if cost > most:
            most, found = cost, model
    return found


Reply = Permission | Trip | Ended  # of ``AgentRun.ask``


def write_off(guard: Guard, charge: Charge, where: str, error: BaseException) -> None:
    """Book an estimate for a call that a fault has left without its bill, so that no other call waits for its hold.

    Only an ``Exception`` is a fault of the guard. User code may also end the program in the middle of a bill.
    """
    if isinstance(error, Exception):
        guard.fault(where, error, charge.run_costs.info.run)
    try:
        guard.abandon(charge)
    except Exception as second:
        guard.close(charge, second)


def _book(guard: Guard, event: ModelCall, usage: Usage | None, model: str, size: int, estimated: bool = False) -> None:
    booked, is_guess = _completed(usage, event.input_tokens, size)
    guard.settle(event.charge, booked, model or event.model, estimated=estimated or is_guess)


def _release(guard: Guard, event: ModelCall) -> None:
    if not event.charge.over:
        guard.release(event.charge)
        guard.faults.attempt("adapter", guard.unspent, event.run, event)


def _book_nothing(guard: Guard, event: ModelCall) -> None:
    guard.settle(event.charge, Usage(), free=True)


def _completed(usage: Usage | None, input_tokens: int, size: int) -> tuple[Usage, bool]:
    """Return the usage with estimates for what was not reported, and whether there are any."""
    if usage is None:
        return Usage(input_tokens, tokens_in(size)), True
    if usage.input and (usage.output or not size):
        return usage, False
    return replace(usage, input=usage.input or input_tokens, output=usage.output or tokens_in(size)), True


def _learn(layer: Layer, event: ModelCall, usage: Usage | None, model: str, text: str) -> None:
    guard, run, lane = layer
    result = ModelResult(run.info.run, lane, event.agent, guard.clock(), model=model or event.model)
    if usage is not None:
        result.prompt_tokens, result.output_tokens = usage.input or None, usage.output
    result.text_id = words_name(text) if text else 0
    guard.after(result)


def _abandon(guard: Guard, event: ModelCall, error: BaseException | None, streamed: int, streaming: bool) -> None:
    refused = was_unbilled(error)
    guard.abandon(event.charge, tokens_in(streamed), streaming=streaming, refused=refused, error=error)


# ---- Model calls that the guard chooses: a cheaper model, and the last answer of a stopped run.


def cheaper_request(run: "AgentRun", request: ModelRequest, *, no_loop: bool) -> ModelRequest:
    """Return the request, changed to a cheaper model where a threshold of the run's own guard says so."""
    chosen: Any = run.guard.faults.attempt("adapter", _choose, run, request, no_loop)
    if chosen is None or not chosen.instead_of:
        return request
    return replace(request, model=chosen.model, instead_of=chosen.instead_of, input_tokens=chosen.input_tokens)


def _choose(run: "AgentRun", request: ModelRequest, no_loop: bool) -> ModelCall | None:
    guard, switch = run.guard, request.switch
    layer = next((one for one in reversed(run.layers) if one.guard is guard), None)
    if layer is None or switch is None or guard.model_choice is None:
        return None
    event = run.model_call(layer, request, no_loop=no_loop)
    guard.model_choice.choose(layer.run, event, switch.has_open_call, switch.obstacle)
    return event


async def last_permission(
    run: "AgentRun", request: ModelRequest, trip: Trip, task: "asyncio.Task[Any] | None"
) -> Permission | None:
    """Return the permission for the last call of a run that was stopped, or None: then the run ends with the stop.

    None inside other runs, which have not allowed the call, and for ``on_stop="raise"``, whose error would hide the
    answer.
    """
    if len(run.layers) != 1:  # none: the run could not be started
        return None
    layer = run.layers[0]
    guard, state, lane = layer
    last = guard.last_call
    if last is None or guard.policy.on_stop == "raise":
        return None
    event = run.model_call(layer, request, no_loop=task is None)
    event.input_tokens += -(-len(last.instruction.encode()) // UPPER) + _INSTRUCTION_TOKENS
    if not last.may_answer(state, state.lane(lane), event, trip):
        return None
    if await last.take(state, event) is None:
        return None
    permission = Permission(run, task)
    permission.charged.append((layer, event))
    permission.notice, permission.last_after = last.instruction, trip
    return permission
