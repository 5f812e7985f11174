"""The model's border: every call that reaches a model passes here, whether or not a hook announced it.

A call that a hook announced brings its reservation along. One that no hook saw (a compaction's summary, an agent that
runs without plugins inside a tool, a tool that consults a model, a custom agent's own call) is asked for here. A model
that calls other models (a fallback) is no call itself: each of its attempts is. Whatever then happens to the call, its
account is closed here.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, nullcontext, suppress
from contextvars import ContextVar
from functools import wraps
from typing import Any, Final

from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types

from runguard.accounting.charges import OWNERS, Charge
from runguard.adk.estimate import count_tokens, project
from runguard.adk.invocations import (
    FLIGHTS,
    FRAME,
    LAYERS,
    STREAM,
    TERMINATIONS,
    Invocation,
    ModelInFlight,
    enclosing_frame,
    runners_inside,
)
from runguard.adk.stop_events import Halt, refused_response, stop_response
from runguard.conductor.guard import Guard
from runguard.conductor.runs import Run
from runguard.core.decision import STOP_CODE, Action, Trip, text_for_user
from runguard.core.events import AgentEntered, ModelCall, ModelResult
from runguard.core.exceptions import RunStoppedError
from runguard.providers.call_usage import Bill, CallUsage
from runguard.providers.failures import was_unbilled

_log: Final = logging.getLogger("runguard")
_BLOCK: Final = Action.BLOCK
_METHOD: Final = "generate_content_async"
DIRECT: Final = "(direct)"  # who makes a call that no agent's hook announced
# rounds that a stopped run may ask at the border before it is ended: a long list of documents is no endless loop
_SPINS: Final = 1_000
_LAYER_MODULE: Final = "runguard.adk.guarded_llm"  # its model is no model: the one inside is
_BORN: Final = "__pydantic_init_subclass__"
# why a call is not made: a stop, or the words to answer with where only this call is refused; None: aside of a run
Stop = tuple[Trip | str | None, Guard]
_AGENT_LABEL: Final = "adk_agent_name"


class Toll:
    """One guard's account of one call at the border."""

    __slots__ = (
        "_flight",
        "_invocation",
        "_model",
        "_settled",
        "_usage",
        "charge",
        "delegated",
        "guard",
        "holder",
        "is_layer",
    )

    def __init__(
        self,
        guard: Guard,
        charge: Charge,
        invocation: Invocation | None = None,
        flight: ModelInFlight | None = None,
        *,
        is_layer: bool = False,
    ) -> None:
        """``is_layer``: of a guarded model. No hook sees the answer, so that the rules learn of it here."""
        self.guard, self.charge, self._invocation, self._flight, self.is_layer = (
            guard,
            charge,
            invocation,
            flight,
            is_layer,
        )
        self._usage = CallUsage()
        self._settled: tuple[Bill, str] | None = None
        self._model = ""
        self.holder: asyncio.Task[Any] | None = None  # the task that holds a place among the calls in flight for it
        self.delegated = False  # other models do the work: they are billed instead

    @property
    def run(self) -> Run | None:
        return self.guard.runs.get(self.charge.purse.info.run)

    @property
    def place(self) -> tuple[Invocation | None, ModelInFlight | None]:
        return self._invocation, self._flight

    def saw(self, response: LlmResponse) -> None:
        """A chunk or the whole answer.

        The account is settled when the answer is there, and again when a later report says more.
        """
        is_new = self._usage.add(response)
        self._model = response.model_version or self._model
        if is_new and self._flight is not None and self._invocation is not None:
            self._flight.usage = self._usage
            self._invocation.learn_prompt(self._flight, self._usage.prompt or 0)
        if response.partial and not self.charge.over:
            return
        self._settle(self._usage.bill(self.charge.input, self.charge.audio))

    def _settle(self, bill: Bill) -> None:
        if self._settled != (bill, self._model):
            self.guard.settle(self.charge, bill.usage, self._model, estimated=bill.estimated)
            self._settled = bill, self._model

    def called_off(self) -> None:
        """The call is not made after all."""
        self._give_back()
        if not self.charge.over:
            self.guard.release(self.charge)
            self.guard.unspent(self.charge.purse.info.run)

    def _give_back(self) -> None:
        run, holder, self.holder = self.run, self.holder, None
        if run is not None and holder is not None:
            run.slots.give_back(holder)

    def ended(self, error: BaseException | None, streaming: bool) -> None:
        self._give_back()
        if self.is_layer and error is None and not self.delegated:
            charge, usage = self.charge, self._usage
            output = usage.reported.output if usage.reported is not None else None
            self.guard.after(
                ModelResult(charge.purse.info.run, charge.lane, charge.agent, self.guard.clock(), usage.prompt, output)
            )
        if self.delegated or self.charge.over:
            return
        if self._usage.reported is not None:
            self._settle(self._usage.bill(self.charge.input, self.charge.audio))
            return
        heard = self._usage.heard
        if isinstance(error, RunStoppedError) and not heard:  # a guard further in refused it: it never left
            self.called_off()
            return
        self.guard.abandon(self.charge, heard, streaming=streaming, refused=was_unbilled(error))


class Ended:
    """How the kill switch ends a call at a model: its task is cancelled, and the cancellation becomes a stop here."""

    __slots__ = ("_loop", "_task", "_thrown", "_tolls")

    def __init__(self, tolls: list[Toll]) -> None:
        self._tolls, self._thrown = tolls, False
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def listen(self) -> None:
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        for toll in self._tolls:
            run = toll.run
            if run is not None:
                run.in_flight.add(self._throw)
                if run.stopped is not None and run.stopped.rule == "kill_switch":
                    self._throw()

    def deaf(self) -> None:
        self._task = None
        for toll in self._tolls:
            if toll.run is not None:
                toll.run.in_flight.discard(self._throw)

    def _throw(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None and not self._thrown:
            self._thrown = True
            self._task.cancel()

    def by_switch(self) -> tuple[Trip, Guard] | None:
        """The stop that ended the call, when it was not somebody else's cancellation."""
        task = asyncio.current_task()
        if not self._thrown or task is None or task.uncancel() > 0:
            return None
        return next(
            (
                (toll.run.stopped, toll.guard)
                for toll in self._tolls
                if toll.run is not None and toll.run.stopped is not None
            ),
            None,
        )


class Crossing:
    """A call on its way through the border: whose accounts it is on, and how the kill switch ends it."""

    __slots__ = ("ended", "llm", "owners", "tolls")

    def __init__(self, llm: BaseLlm, tolls: list[Toll]) -> None:
        self.llm, self.tolls, self.ended = llm, tolls, Ended(tolls)
        self.owners = (*(charge for charge in OWNERS.get() if not charge.over), *(toll.charge for toll in tolls))


_CROSSING: Final[ContextVar[Crossing | None]] = ContextVar("runguard_crossing", default=None)


async def _guarded(
    original: Callable[..., Any], llm: BaseLlm, request: LlmRequest, stream: bool, args: Any, kwargs: Any
) -> AsyncGenerator[LlmResponse, None]:
    """The model's answers, with the call on its accounts.

    A fault of ours changes nothing of them, and leaves no reservation behind.
    """
    outer = _CROSSING.get()
    tolls: list[Toll] = []
    crossing: Crossing | None = None
    own = request.config
    try:
        stop = await _enter(outer, llm, request, tolls)
        if stop is None:
            crossing = Crossing(llm, tolls)
    except Exception as fault:
        stop = _fault(fault, tolls)
    except BaseException:  # cancelled while the next guard was asked
        _call_off(tolls)
        raise
    if stop is not None:
        try:
            refusal = await _refuse(*stop, tolls)
        except RunStoppedError:
            raise
        except Exception as fault:
            refusal = _refuse_barely(*stop, tolls, fault)
        yield refusal
        return
    capped = request.config
    error: BaseException | None = None
    inside, owners = (crossing, crossing.owners) if crossing is not None else (outer, OWNERS.get())
    ended = crossing.ended if crossing is not None else None
    try:
        answers = aiter(original(llm, request, stream, *args, **kwargs))
        async with aclosing(answers) if hasattr(answers, "aclose") else nullcontext():  # not every one is a generator
            while True:
                tokens = _CROSSING.set(inside), OWNERS.set(owners)
                try:
                    if ended is not None:
                        ended.listen()
                except Exception as fault:
                    _fault(fault, tolls)
                try:
                    response = await anext(answers)
                except StopAsyncIteration:
                    break
                finally:
                    try:
                        if ended is not None:
                            ended.deaf()
                    except Exception as fault:
                        _fault(fault, tolls)
                    OWNERS.reset(tokens[1])
                    _CROSSING.reset(tokens[0])
                for toll in tolls:
                    try:
                        if not toll.delegated:
                            toll.saw(response)
                    except Exception as fault:
                        _give_up(toll, fault)
                yield response
    except asyncio.CancelledError as raised:
        error = raised
        stopped = _ended_by_switch(ended, tolls)
        if stopped is None:
            raise
        yield stopped
    except BaseException as raised:
        error = raised
        raise
    finally:
        if request.config is capped:
            request.config = own  # the caller may use his request again
        for toll in tolls:
            try:
                toll.ended(error, stream)
            except Exception as fault:
                _give_up(toll, fault)


def _ended_by_switch(ended: Ended | None, tolls: list[Toll]) -> LlmResponse | None:
    """The stop to answer with when the kill switch has ended the call; None when somebody else has cancelled it."""
    try:
        stopped = ended.by_switch() if ended is not None else None
    except Exception as fault:
        _fault(fault, tolls)
        return None
    if stopped is None:
        return None
    trip, guard = stopped
    try:
        return stop_response(trip, guard.stop_text(trip))
    except Exception as fault:
        _fault(fault, tolls)
        return LlmResponse(error_code=STOP_CODE, error_message=trip.rule)


# ---- faults of our own ----------------------------------------------------------------------------------------------


def _fault(fault: Exception, tolls: list[Toll]) -> Stop | None:
    """Report a fault of ours to the guards whose call this is.

    Returns a stop when the policy of one of them says so.
    """
    guards = (
        {toll.guard for toll in tolls}
        | {guard for guard, _, _ in FLIGHTS.get()}
        | {layer.guard for layer in LAYERS.get()}
    )
    runs = {charge.home: charge.purse.info.run for charge in (toll.charge for toll in tolls)}
    runs |= {layer.guard.accounts: layer.invocation.run.info.run for layer in LAYERS.get()}
    stream = STREAM.get()
    if stream is not None and stream.plugin is not None:
        guards.add(stream.plugin.guard)
        with suppress(Exception):  # a fault in here leaves the run unknown
            found = (stream.plugin.find_invocation(one) for one in stream.invocations)
            runs.setdefault(stream.plugin.guard.accounts, next(one.run.info.run for one in found if one is not None))
    if not guards:
        _log.error(
            "runguard.guard_error: the border failed with %s; the call goes on", type(fault).__name__, exc_info=fault
        )
    stop = None
    for guard in guards:
        trip = guard.fault("border", fault, runs.get(guard.accounts, ""))
        stop = stop or ((trip, guard) if trip is not None else None)
    return stop


def _give_up(toll: Toll, fault: Exception) -> None:
    """What a call took cannot be booked: an estimate is, at once, so that no other call waits for what it holds."""
    guard, charge = toll.guard, toll.charge
    guard.fault("border", fault, charge.purse.info.run)
    if toll.delegated:
        return
    try:
        guard.abandon(charge)
    except Exception as second:
        guard.close(charge, second)


def _call_off(tolls: list[Toll]) -> None:
    """The call is not made after all: another guard refuses it, or its caller has gone."""
    for toll in tolls:
        try:
            toll.called_off()
        except Exception as fault:
            _give_up(toll, fault)


def _refuse_barely(trip: Trip | str | None, guard: Guard, tolls: list[Toll], fault: Exception) -> LlmResponse:
    """The refusal could not be made as it should be.

    The call is refused all the same, and a run that is stopped as a whole is ended.
    """
    guard.faults.note("refusing", fault)
    _call_off(tolls)
    if isinstance(trip, str):
        return _said(trip)
    run = guard.runs.get(trip.run_id) if trip is not None else None
    if trip is not None and run is not None and run.stopped is not None and FRAME.get() is None:
        raise Halt(trip)
    return LlmResponse(error_code=STOP_CODE, error_message="refused")


def _said(words: str) -> LlmResponse:
    return LlmResponse(content=types.Content(role="model", parts=[types.Part(text=words)]))


async def _refuse(trip: Trip | str | None, guard: Guard, tolls: list[Toll]) -> LlmResponse:
    """Answer instead of the model. A loop that asks again and again, whatever the answer, is ended from outside."""
    _call_off(tolls)  # another guard had let it through: it does not leave now
    if isinstance(trip, str):
        return _said(trip)
    if trip is None:  # aside of a run that has given its answer: nothing is stopped
        return LlmResponse(error_code=STOP_CODE, error_message=text_for_user(""))
    run = guard.runs.get(trip.run_id)
    first = run is not None and not run.refusing
    if run is not None:
        run.refusing = True
    await asyncio.sleep(0)  # whoever asks in a loop must not keep the event loop to itself
    if run is not None and first:  # calls that are refused together are one round
        run.refusing = False
        times, made = run.refused_at_border  # others that work in between start the count anew
        run.refused_at_border = (times + 1 if made == run.spend.model_calls else 1, run.spend.model_calls)
        if run.refused_at_border[0] > _SPINS:
            if FRAME.get() is not None and run.refused_at_border[0] <= 2 * _SPINS:
                raise RunStoppedError.of(trip)  # inside a tool: its call gets an answer, unless it swallows this
            for _ in range(600):  # paid calls first: at most half a minute
                if not run.slots.busy():
                    break
                await asyncio.sleep(0.05)
            raise Halt(trip)
    return refused_response(trip, guard.stop_text(trip))


async def _enter(outer: Crossing | None, llm: BaseLlm, request: LlmRequest, tolls: list[Toll]) -> Stop | None:
    """Fill in the accounts of this call; a stop when it may not be made."""
    if outer is not None:
        for toll in outer.tolls:
            stop = await _attempt(toll, request, tolls)
            if stop is not None:
                return stop
    for toll in _announced(request) if outer is None else ():
        tolls.append(toll)
        _keep_cap(request, toll.charge)
    mine = {toll.guard for toll in tolls}
    for guard, invocation, lane, agent, tool, is_layer in _callers(request):
        if guard in mine or (outer is not None and not is_layer):
            continue  # its own hook announced the call
        owners = OWNERS.set((*OWNERS.get(), *(toll.charge for toll in tolls)))
        try:
            stop = await _ask(guard, invocation, lane, agent, tool, request, tolls, is_layer=is_layer, slot=bool(tool))
        except Exception as error:  # the guard's own fault: the policy says what it means
            trip = guard.fault("border", error, invocation.run.info.run, agent)
            if trip is None:
                continue
            return trip, guard
        finally:
            OWNERS.reset(owners)
        if stop is not None:
            return stop
    return None


def _announced(request: LlmRequest) -> list[Toll]:
    """The accounts that hooks have opened for this call."""
    found: list[Toll] = []
    for guard, invocation, flight in FLIGHTS.get():
        if (
            flight.charge is None
            or flight.left
            or flight.answered
            or flight.charge.over
            or flight.request() is not request
        ):
            continue
        found.append(Toll(guard, flight.charge, invocation, flight))
        flight.left = True  # last: what is not found here is settled by the hook that sees the answer
    if found:
        FLIGHTS.set(tuple(entry for entry in FLIGHTS.get() if not entry[2].left))
    return found


def _keep_cap(request: LlmRequest, charge: Charge) -> None:
    """A callback after ours may have asked for more output than was reserved."""
    asked = request.config.max_output_tokens
    if charge.is_capped and charge.max_output > 0 and (charge.limited if asked is None else asked > charge.max_output):
        cap_output(request, charge.max_output)


def cap_output(request: LlmRequest, tokens: int) -> None:
    """In a copy: the configuration may be shared with every later call."""
    request.config = request.config.model_copy(update={"max_output_tokens": tokens})


async def _attempt(toll: Toll, request: LlmRequest, tolls: list[Toll]) -> Stop | None:
    """A model inside a model: the first attempt takes over what was reserved,
    every further one is a call of its own.
    """
    guard, charge = toll.guard, toll.charge
    invocation, flight = toll.place
    first = not toll.delegated
    toll.delegated = True
    if first and (request.model or "") == charge.model and not charge.over:
        tolls.append(Toll(guard, charge, invocation, flight, is_layer=toll.is_layer))
        return None
    if first:
        guard.release(charge)
        guard.unspent(charge.purse.info.run)
    return await _ask(
        guard, invocation, charge.lane, charge.agent, charge.tool, request, tolls, flight, in_layer=toll.is_layer
    )


def _callers(request: LlmRequest) -> Iterable[tuple[Guard, Invocation, str, str, str, bool]]:
    """Whose unannounced call this is: that of the tool call we are in, or of the runner that is at work; and the
    guarded models around.
    """
    child = _child_agent(request)
    for layer in LAYERS.get():
        yield layer.guard, layer.invocation, layer.lane, layer.agent, "", True
    frame, seen = FRAME.get(), set()
    while frame is not None:
        run = frame.invocation.run
        if frame.guard not in seen and frame.guard.runs.get(run.info.run) is run:
            seen.add(frame.guard)
            yield (
                frame.guard,
                frame.invocation,
                frame.lane,
                child or (frame.path[-1] if frame.path else DIRECT),
                frame.tool,
                False,
            )
        frame = frame.outer
    stream = STREAM.get()
    while stream is not None and stream.plugin is None:  # a Runner without a guard inside of one that has a guard
        stream = stream.outer
    if seen or stream is None or stream.plugin is None:
        return
    for invocation_id in reversed(stream.invocations):
        invocation = stream.plugin.find_invocation(invocation_id)
        if invocation is not None:
            yield stream.plugin.guard, invocation, invocation.lane, child or DIRECT, "", False
            return


def _child_agent(request: LlmRequest) -> str:
    """The agent that makes this call in a Runner without a guard: ADK labels each request with its name. Empty for a
    call that no agent makes.
    """
    labels = request.config.labels if request.config is not None else None
    named = labels.get(_AGENT_LABEL) if labels else None
    if named:
        return named
    stream = STREAM.get()
    return stream.agent if stream is not None and stream.plugin is None else ""


async def _ask(
    guard: Guard,
    invocation: Invocation | None,
    lane: str,
    agent: str,
    tool: str,
    request: LlmRequest,
    tolls: list[Toll],
    flight: ModelInFlight | None = None,
    *,
    is_layer: bool = False,
    in_layer: bool = False,
    slot: bool = False,
) -> Stop | None:
    if guard.policy.mode == "off" or invocation is None:
        return None
    sizes = project(request, invocation.prompts.get((lane, agent)) if is_layer else None)
    limit = request.config.max_output_tokens
    event = ModelCall(
        invocation.run.info.run,
        lane,
        agent,
        guard.clock(),
        request.model or "",
        sizes.upper,
        sizes.audio,
        limit,
        None,
        None,
        tool,
    )
    event.aside, event.candidates = invocation.finished, request.config.candidate_count or 1
    if is_layer:  # nobody else has looked at the size of this request
        event.projected_tokens, event.request_bytes, event.context_limit = (
            sizes.likely,
            sizes.size,
            guard.accounts.context_limit(event.model),
        )
        flight = ModelInFlight(agent, None, lane, projection=sizes)
    counter = guard.policy.tokens
    if counter is not None and (counted := await count_tokens(counter, request)) is not None:
        event.input_tokens = counted
        event.projected_tokens = counted if is_layer else None
    frame = enclosing_frame(guard) if slot else None  # the tool call that makes this call of its own
    # agents that no hook sees: each Runner is one delegation deeper
    if frame is not None and (inside := runners_inside(frame)):
        entered = AgentEntered(event.run, lane, agent, event.at, frame.depth + inside)
        too_deep = guard.check(entered)
        if too_deep.action is _BLOCK and too_deep.enforced:
            return too_deep.for_model, guard
    decision = guard.check(event)
    if decision.action < _BLOCK or not decision.enforced:
        decision = await guard.reserve(event, slot=slot)
    if decision.action >= _BLOCK and decision.enforced:
        frame = FRAME.get()
        if frame is not None and (call := frame.invocation.calls.get(frame.call_id)) is not None:
            call.cut = True
        return decision.trip, guard
    charge = event.charge
    if charge is not None:
        try:
            tolls.append(Toll(guard, charge, invocation, flight, is_layer=is_layer or in_layer))
            tolls[-1].holder = asyncio.current_task() if slot else None
        except BaseException:
            guard.release(charge)
            raise
        if charge.lowered:
            cap_output(request, charge.max_output)
    return None


# ---- putting it in place --------------------------------------------------------------------------------------------


class Border:
    """Wraps every class of models there is, and those that come later."""

    def __init__(self) -> None:
        self._wrapped: dict[type, Any] = {}

    def put_up(self) -> None:
        self.watch_all()
        if _BORN not in BaseLlm.__dict__:
            setattr(BaseLlm, _BORN, classmethod(lambda kind, **_: self._watch_new(kind)))

    def watch_all(self) -> None:
        pending: list[type] = [BaseLlm]
        for kind in pending:
            pending.extend(kind.__subclasses__())
            if kind is not BaseLlm:
                self.watch(kind)

    def _watch_new(self, kind: type) -> None:
        try:
            self.watch(kind)
        except Exception:
            _log.exception("runguard.guard_error: calls of the model class '%s' are not seen", kind.__name__)

    def watch(self, kind: type) -> None:
        if kind in self._wrapped or kind.__module__ == _LAYER_MODULE:
            return
        original = kind.__dict__.get(_METHOD)
        self._wrapped[kind] = original
        if callable(original):
            setattr(kind, _METHOD, _wrap(original))

    def take_down(self) -> None:
        for kind, original in self._wrapped.items():
            if original is not None and getattr(kind.__dict__.get(_METHOD), "__wrapped__", None) is original:
                setattr(kind, _METHOD, original)
        self._wrapped.clear()
        if _BORN in BaseLlm.__dict__:
            delattr(BaseLlm, _BORN)


def _asked_first(
    call: AsyncGenerator[LlmResponse, None], request: LlmRequest, watched: tuple[Any, ...]
) -> AsyncGenerator[LlmResponse, None]:
    from runguard.adk.termination import asked_first

    return asked_first(call, watched, request, lambda: _call_off(_announced(request)))


def _wrap(original: Any) -> Any:
    @wraps(original)
    def generate_content_async(
        self: BaseLlm, llm_request: LlmRequest, stream: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        crossing = _CROSSING.get()
        watched = TERMINATIONS.get()
        if crossing is not None:
            # a class that calls its parent's method: the same call
            if crossing.llm is self or not (crossing.tolls or LAYERS.get()):
                return original(self, llm_request, stream, *args, **kwargs)
        elif watched:
            guarded = _guarded(original, self, llm_request, stream, args, kwargs)
            try:
                return _asked_first(guarded, llm_request, watched)
            except Exception as fault:
                _fault(fault, [])
                return guarded
        elif not FLIGHTS.get() and FRAME.get() is None and STREAM.get() is None and not LAYERS.get():
            return original(self, llm_request, stream, *args, **kwargs)
        return _guarded(original, self, llm_request, stream, args, kwargs)

    return generate_content_async
