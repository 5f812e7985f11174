"""Every call that reaches a model passes here: ``patching`` wraps all model classes with ``wrap_model``.

A call that a hook announced brings its reservation along. For a call without a hook (a compaction's summary, an agent
that runs without plugins inside a tool, a tool that calls a model, a custom agent's own call) the guard is asked here.
A model that calls other models (a fallback) is not a call itself: each of its attempts is. However the call ends, its
accounts are closed here.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, suppress
from functools import wraps
from typing import Any, Final

from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types

from runguard.adk.patching import IN_USE
from runguard.adk.requests import cap_output
from runguard.adk.runs import (
    ANNOUNCED,
    HERE,
    Here,
    ModelInFlight,
    enclosing_tool,
    here_of,
    project,
    runners_inside,
)
from runguard.adk.stops import Halt, refused_response, stop_response, until_done
from runguard.adk.termination import asked_first
from runguard.calls.model_calls import Interruption, ModelRequest, Permission, count_tokens, write_off
from runguard.calls.run import AgentRun
from runguard.calls.surroundings import SURROUNDINGS
from runguard.calls.tool_calls import Place
from runguard.core.decision import METADATA_KEY, STOP_CODE, Action, Trip, text_for_user
from runguard.core.errors import RunStoppedError
from runguard.core.events import ROOT_LANE, AgentEntered, ModelCall
from runguard.engine.charges import OWNERS
from runguard.engine.guard import Guard
from runguard.engine.runs import Run
from runguard.providers.usage import CallUsage
from runguard.termination.conditions import KEY, Ended

_log: Final = logging.getLogger("runguard")
_BLOCK: Final = Action.BLOCK

# ---- A model call on its way to its model

# Why a call is not made: a stop; or the text to answer with, where only this call is refused; or None, where the run
# has already given its last answer.
Stop = tuple[Trip | str | None, Guard]


class PassingCall(Interruption):
    """A call on its way to its model: its accounts, and how the kill switch ends it. The switch cancels the task, and
    the cancellation becomes a stop.
    """

    __slots__ = ("_runs", "accounts", "is_due", "llm", "owners")

    def __init__(self, llm: BaseLlm, accounts: list[ModelInFlight]) -> None:
        super().__init__()
        self.llm, self.accounts = llm, accounts
        around = OWNERS.get()
        self.owners = tuple([charge for charge in around if not charge.over]) if around else ()
        self.is_due = False  # the switch was thrown, perhaps while no task waited
        self._runs: list[Run] = []
        for account in accounts:
            self.owners += (account.charge,)
            if (run := account.guard.runs.get(account.charge.run_costs.info.run)) is not None:
                self._runs.append(run)
                run.in_flight.add(self)
                self.is_due = self.is_due or run.stopped is not None

    def __call__(self) -> None:
        """End the call, because its run was stopped. Safe to call from any thread."""
        self.is_due = True
        super().__call__()

    def end_if_due(self) -> None:
        """End the call where its run is still stopped by the switch."""
        self.is_due = any(run.stopped is not None and run.stopped.rule == "kill_switch" for run in self._runs)
        if self.is_due:
            self()

    def over(self) -> None:
        for run in self._runs:
            run.in_flight.discard(self)

    def by_switch(self) -> tuple[Trip, Guard] | None:
        """Return the stop that ended the call, and its guard. None when other code cancelled it."""
        if not self.undone():
            return None
        runs = ((account.run, account.guard) for account in self.accounts)
        return next(((run.stopped, guard) for run, guard in runs if run is not None and run.stopped is not None), None)


def give_up(account: ModelInFlight, fault: Exception) -> None:
    """Book an estimate at once where the usage cannot be booked. Other models bill a call that they carry out."""
    if account.delegated:
        account.guard.fault("border", fault, account.charge.run_costs.info.run)
    else:
        write_off(account.guard, account.charge, "border", fault)


def call_off(accounts: list[ModelInFlight]) -> None:
    """Release the accounts of a call that will not be sent: another guard refused it, or its caller was cancelled."""
    for account in accounts:
        try:
            account.called_off()
        except Exception as fault:
            give_up(account, fault)


# ---- The wrapped method of a model class


def wrap_model(original: Any) -> Any:
    """Wrap ``generate_content_async`` of a model class. Outside of guarded runs the wrapper passes calls through."""

    @wraps(original)
    def generate_content_async(
        self: BaseLlm, llm_request: LlmRequest, stream: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        here = HERE.get()
        passing = here.model_call
        if passing is not None:
            # A class that calls its parent's method makes no second call.
            if passing.llm is self or not (passing.accounts or here.layers):
                return original(self, llm_request, stream, *args, **kwargs)
        elif not (here.conditions or here.layers or here.tool or here.stream or ANNOUNCED.get()):
            return original(self, llm_request, stream, *args, **kwargs)
        guarded = _guarded(original, self, llm_request, stream, args, kwargs)
        try:
            if passing is None and (here.conditions or SURROUNDINGS.get().place is not None):
                return _asked_around(guarded, self, llm_request, stream)
        except Exception as fault:
            _fault(fault, [])
        return guarded

    return generate_content_async


def _asked_around(answers: Any, llm: BaseLlm, request: LlmRequest, stream: bool) -> Any:
    """Return ``answers``, for which what is around the call is asked first: another framework's run, and conditions."""
    place = SURROUNDINGS.get().place
    if isinstance(place, Place):  # in a tool call of another framework
        try:
            answers = joined(answers, llm, request, stream)
        except Exception as fault:
            answers = _joined_again(place, fault, answers, llm, request, stream)
    try:
        if conditions := HERE.get().conditions:
            answers = asked_first(answers, conditions, request, lambda: call_off(announced_accounts(request)))
    except Exception as fault:
        _fault(fault, [])
    return answers


async def _guarded(
    original: Callable[..., Any], llm: BaseLlm, request: LlmRequest, stream: bool, args: Any, kwargs: Any
) -> AsyncGenerator[LlmResponse, None]:
    """Yield the model's answers, and book them on the accounts of the call.

    A failure of RunGuard does not change them and leaves no reservation behind.
    """
    outer = HERE.get().model_call
    accounts: list[ModelInFlight] = []
    passing: PassingCall | None = None
    own = request.config
    try:
        stop = None
        if outer is not None or not _is_announced(request, accounts):
            stop = await _open_accounts(outer, request, accounts)
        if stop is None:
            passing = PassingCall(llm, accounts)
    except Exception as fault:
        stop = await _recover_all(fault, request, accounts)
    except BaseException:  # cancelled while the next guard was asked
        call_off(accounts)
        raise
    if stop is not None:
        try:
            refusal = await refuse(*stop, accounts)
        except RunStoppedError:
            raise
        except Exception as fault:
            refusal = refuse_barely(*stop, accounts, fault)
        yield refusal
        return
    capped = request.config
    error: BaseException | None = None
    inside, owners = (passing, passing.owners) if passing is not None else (outer, OWNERS.get())
    around: Here | None = None
    try:
        answers = aiter(original(llm, request, stream, *args, **kwargs))
        try:
            while True:
                now = HERE.get()
                if now is not around:
                    around = now
                    placed = here_of((now.tool, now.stream, now.layers, now.conditions, inside, now.session))
                tokens = HERE.set(placed), OWNERS.set(owners)
                try:
                    if passing is not None:
                        passing.task = asyncio.current_task()
                        if passing.is_due:
                            passing.end_if_due()
                except Exception as fault:
                    _fault(fault, accounts)
                try:
                    response = await anext(answers)
                except StopAsyncIteration:
                    break
                finally:
                    if passing is not None:
                        passing.task = None
                    OWNERS.reset(tokens[1])
                    now = HERE.get()
                    HERE.reset(tokens[0])
                    if now is not placed:  # the step has changed other fields
                        HERE.set(now._replace(model_call=HERE.get().model_call))
                for account in accounts:
                    try:
                        if not account.delegated:
                            account.saw(response)
                    except Exception as fault:
                        give_up(account, fault)
                yield response
        finally:
            if hasattr(answers, "aclose"):  # not every one is a generator
                await answers.aclose()
    except asyncio.CancelledError as raised:
        error = raised
        stopped = _stop_by_switch(passing, accounts)
        if stopped is None:
            raise
        yield stopped
    except BaseException as raised:
        error = raised
        raise
    finally:
        if capped is not own and request.config is capped:
            request.config = own  # the caller may use the request again
        try:
            if passing is not None:
                passing.over()
        except Exception as fault:
            _fault(fault, accounts)
        for account in accounts:
            try:
                account.ended(error, stream)
            except Exception as fault:
                give_up(account, fault)


def _stop_by_switch(passing: PassingCall | None, accounts: list[ModelInFlight]) -> LlmResponse | None:
    """Return the answer to a call that the kill switch has ended. None when other code has cancelled it."""
    try:
        stopped = passing.by_switch() if passing is not None else None
    except Exception as fault:
        _fault(fault, accounts)
        return None
    if stopped is None:
        return None
    trip, guard = stopped
    try:
        return stop_response(trip, guard.stop_text(trip))
    except Exception as fault:
        _fault(fault, accounts)
        return LlmResponse(error_code=STOP_CODE, error_message=trip.rule)


def _fault(fault: Exception, accounts: list[ModelInFlight]) -> Stop | None:
    """Report a failure of RunGuard to the guards of this call. Return a stop where the policy of one says stop."""
    guards, runs = _guards_of_call(accounts)
    if not guards:
        _log.error(
            "runguard.guard_error: the model wrapper failed with %s; the call goes on",
            type(fault).__name__,
            exc_info=fault,
        )
    stop = None
    for guard in guards:
        trip = guard.fault("border", fault, runs.get(guard.accounts, ""))
        stop = stop or ((trip, guard) if trip is not None else None)
    return stop


def _guards_of_call(accounts: list[ModelInFlight]) -> tuple[set[Guard], dict[Any, str]]:
    """Return the guards around this call, and the run of each by its ``Accounts``, as far as they are known."""
    guards = (
        {account.guard for account in accounts}
        | {flight.guard for flight in ANNOUNCED.get()}
        | {layer.guard for layer in HERE.get().layers}
    )
    runs = {charge.home: charge.run_costs.info.run for charge in (account.charge for account in accounts)}
    runs |= {layer.guard.accounts: layer.invocation.run.info.run for layer in HERE.get().layers}
    stream = HERE.get().stream
    if stream is not None and stream.registry is not None:
        guards.add(stream.registry.guard)
        with suppress(Exception):  # a fault in here leaves the run unknown
            found = (stream.registry.find(one) for one in stream.invocation_ids)
            runs.setdefault(stream.registry.guard.accounts, next(one.run.info.run for one in found if one is not None))
    return guards, runs


def _is_announced(request: LlmRequest, accounts: list[ModelInFlight]) -> bool:
    """Add the accounts that hooks have opened for this call. Return whether no other guard is around it: most calls."""
    for account in announced_accounts(request):
        accounts.append(account)
        charge = account.charge
        # a callback after ours may have asked for more output than is held
        if charge.hold is not None and charge.max_output > 0:
            asked = request.config.max_output_tokens
            if charge.limited if asked is None else asked > charge.max_output:
                cap_output(request, charge.max_output)
    here = HERE.get()
    if not accounts or here.layers or here.tool is not None or here.stream is None:
        return False
    registry = here.stream.registry
    return registry is not None and registry.guard is accounts[0].guard


async def _open_accounts(outer: PassingCall | None, request: LlmRequest, accounts: list[ModelInFlight]) -> Stop | None:
    """Add the accounts that no hook has opened for this call. Return a stop when the call may not be made."""
    for account in outer.accounts if outer is not None else ():
        stop = await _attempt(account, request, accounts)
        if stop is not None:
            return stop
    mine = {account.guard for account in accounts}
    for flight in callers(request):
        if flight.guard in mine or (outer is not None and not flight.is_layer):
            continue  # its own hook announced the call
        owners = OWNERS.set((*OWNERS.get(), *(account.charge for account in accounts)))
        try:
            stop = await _ask(flight, request, accounts, slot=bool(flight.tool))
        except Exception as error:
            run = flight.invocation.run.info.run if flight.invocation is not None else ""
            plain = ModelInFlight(flight.guard, None, flight.lane, flight.agent)
            stop = await _recover(plain, run, request, accounts, error)
        finally:
            OWNERS.reset(owners)
        if stop is not None:
            return stop
    stream = HERE.get().stream
    if outer is None and stream is not None and stream.registry is not None and not stream.invocation_ids:
        guard = stream.registry.guard
        if guard not in mine and guard.must_hold():  # the run of this guard could not begin
            return guard.faults.refuse("border", LookupError("no run")), guard
    return None


async def recover(where: str, flight: ModelInFlight, run_id: str, request: LlmRequest, error: Exception) -> Trip | None:
    """Reserve a call without rules, after a fault of its guard. Return why it must not be made, or None."""

    def describe(at: float) -> ModelCall:
        sizes, config = project(request, None), request.config
        sized = (request.model or "", sizes.upper, sizes.audio, config.max_output_tokens)
        return ModelCall(run_id, flight.lane, flight.agent, at, *sized, candidates=config.candidate_count or 1)

    decision, event = await flight.guard.recover(where, error, run_id, flight.agent, describe)
    flight.charge = event.charge if event is not None else None
    return decision.trip if decision.action is Action.STOP and decision.enforced else None


async def _recover(
    flight: ModelInFlight, run_id: str, request: LlmRequest, accounts: list[ModelInFlight], error: Exception
) -> Stop | None:
    """Add an account that is reserved without rules. Return a stop if that fails."""
    trip = await recover("border", flight, run_id, request, error)
    if flight.charge is not None:
        accounts.append(flight)
    return (trip, flight.guard) if trip is not None else None


async def _recover_all(fault: Exception, request: LlmRequest, accounts: list[ModelInFlight]) -> Stop | None:
    """Reserve a call, after a fault before it is sent, for every guard around it that has no account of it yet.

    A guard that cannot reserve refuses the call: see ``Guard.recover``. Return its stop, or None.
    """
    guards, runs = _guards_of_call(accounts)
    mine = {account.guard for account in accounts}
    mine |= {one.guard for one in ANNOUNCED.get() if one.charge is not None and not one.charge.over}
    stop = _fault(fault, accounts)
    for guard in guards - mine if stop is None else ():
        run = runs.get(guard.accounts, "")
        try:
            stop = await _recover(ModelInFlight(guard, None, ROOT_LANE, ""), run, request, accounts, fault)
        except Exception as second:
            trip = guard.give_up_call("border", second, run)
            stop = (trip, guard) if trip is not None else None
        if stop is not None:
            return stop
    return stop


async def _attempt(account: ModelInFlight, request: LlmRequest, accounts: list[ModelInFlight]) -> Stop | None:
    """Ask for a call that a model makes of another model, such as a fallback. Return a stop, or None.

    The first attempt takes over the reservation of the outer call; each further one is a call of its own.
    """
    guard, charge = account.guard, account.charge
    first = not account.delegated
    account.delegated = True
    attempt = ModelInFlight(guard, account.invocation, charge.lane, charge.agent, tool=charge.tool)
    attempt.is_layer, attempt.whole = account.is_layer, account.whole or account
    if first and (request.model or "") == charge.model and not charge.over:
        attempt.charge = charge
        accounts.append(attempt)
        return None
    if first:
        guard.release(charge)
        guard.unspent(charge.run_costs.info.run)
    return await _ask(attempt, request, accounts)


async def _ask(
    flight: ModelInFlight, request: LlmRequest, accounts: list[ModelInFlight], *, slot: bool = False
) -> Stop | None:
    """Ask the guard of ``flight`` for a call that no hook has announced. ``slot``: it takes one of its run."""
    guard, invocation, lane, agent = flight.guard, flight.invocation, flight.lane, flight.agent
    if guard.policy.mode == "off" or invocation is None:
        return None
    is_measured = flight.is_layer and flight.whole is None  # no hook has measured this request
    sizes = project(request, invocation.prompts.get((lane, agent)) if is_measured else None)
    event = ModelCall(invocation.run.info.run, lane, agent, guard.clock(), request.model or "", tool=flight.tool)
    event.input_tokens, event.audio_tokens = sizes.upper, sizes.audio
    event.max_output_tokens = request.config.max_output_tokens
    event.after_answer, event.candidates = invocation.finished, request.config.candidate_count or 1
    if is_measured:
        event.projected_tokens, event.request_bytes = sizes.likely, sizes.size
        event.context_limit = guard.context_limit(event.model)
        flight.projection = sizes
    counter = guard.policy.tokens
    if counter is not None and (counted := await count_tokens(counter, request)) is not None:
        event.input_tokens = counted
        event.projected_tokens = counted if is_measured else None
    around = enclosing_tool(guard) if slot else None  # the tool call that makes this call
    # agents that no hook sees: each Runner is one delegation deeper
    if around is not None and (inside := runners_inside(around)):
        entered = AgentEntered(event.run, lane, agent, event.at, around.depth + len(inside))
        entered.above = (*around.path[-1:], *inside[:-1])
        too_deep = guard.check(entered)
        if too_deep.action is _BLOCK and too_deep.enforced:
            return too_deep.for_model, guard
    decision = guard.check(event)
    if decision.action < _BLOCK or not decision.enforced:
        decision = await guard.reserve(event, slot=slot)
    if decision.action >= _BLOCK and decision.enforced:
        around = HERE.get().tool
        if around is not None and (call := around.invocation.calls.get(around.call_id)) is not None:
            call.interrupted = True
        return decision.trip, guard
    charge = flight.charge = event.charge
    if charge is not None:
        try:
            flight.holder = asyncio.current_task() if slot else None
            accounts.append(flight)
        except BaseException:
            guard.release(charge)
            raise
        if charge.lowered:
            cap_output(request, charge.max_output)
    return None


# ---- Whose call it is: which hooks announced it, or who makes it where no hook did

_DIRECT: Final = "(direct)"  # the agent of a call that no agent's hook announced
_AGENT_LABEL: Final = "adk_agent_name"


def announced_accounts(request: LlmRequest) -> list[ModelInFlight]:
    """Return the accounts that hooks have opened for this call, each once."""
    announced = ANNOUNCED.get()
    found: list[ModelInFlight] = []
    for flight in announced:
        charge = flight.charge
        if charge is None or charge.over or flight.left or flight.answered or charge.request() is not request:
            continue
        found.append(flight)
        flight.left = True  # last: the after-hook settles the others
    if found:
        ANNOUNCED.set(tuple([e for e in announced if not e.left]) if len(announced) > len(found) else ())
    return found


def callers(request: LlmRequest) -> Iterable[ModelInFlight]:
    """Find who makes a call that no hook announced: guarded models around it, then its tool call or else its Runner."""
    child = _child_agent(request)
    for layer in HERE.get().layers:
        yield ModelInFlight(layer.guard, layer.invocation, layer.lane, layer.agent, is_layer=True)
    tool, seen = HERE.get().tool, set()
    while tool is not None:
        run = tool.invocation.run
        if tool.guard not in seen and tool.guard.runs.get(run.info.run) is run:
            seen.add(tool.guard)
            agent = child or (tool.path[-1] if tool.path else _DIRECT)
            yield ModelInFlight(tool.guard, tool.invocation, tool.lane, agent, tool=tool.name)
        tool = tool.outer
    stream = HERE.get().stream
    while stream is not None and stream.registry is None:  # a Runner without a guard inside of one that has a guard
        stream = stream.outer
    if seen or stream is None or stream.registry is None:
        return
    for invocation_id in reversed(stream.invocation_ids):
        invocation = stream.registry.find(invocation_id)
        if invocation is not None:
            yield ModelInFlight(stream.registry.guard, invocation, invocation.lane, child or _DIRECT)
            return


def _child_agent(request: LlmRequest) -> str:
    """Return the agent that makes this call in a Runner without a guard; "" for a call that no agent makes.

    ADK labels each request with the name of its agent.
    """
    labels = request.config.labels if request.config is not None else None
    named = labels.get(_AGENT_LABEL) if labels else None
    if named:
        return named
    stream = HERE.get().stream
    return stream.agent if stream is not None and stream.registry is None else ""


# ---- Refusals

# Rounds in which a stopped run may ask for a model before it is ended: a long list of documents is not an endless loop.
_SPINS: Final = 1_000


async def refuse(trip: Trip | str | None, guard: Guard, accounts: list[ModelInFlight]) -> LlmResponse:
    """Answer instead of the model. Raise ``Halt`` or ``RunStoppedError`` in a loop that ignores the refusals."""
    call_off(accounts)  # another guard may have admitted the call
    if isinstance(trip, str):
        return _text_response(trip)
    if trip is None:  # the run has given its last answer, and nothing is stopped
        return LlmResponse(error_code=STOP_CODE, error_message=text_for_user(""))
    run = guard.runs.get(trip.run_id)
    first = run is not None and not run.refusing
    if run is not None:
        run.refusing = True
    await asyncio.sleep(0)  # code that asks in a loop must not block the event loop
    if run is not None and first:  # calls that are refused together are one round
        run.refusing = False
        times, made = run.refused_at_border  # a model call in between starts the count anew
        run.refused_at_border = (times + 1 if made == run.spend.model_calls else 1, run.spend.model_calls)
        if run.refused_at_border[0] > _SPINS:
            if HERE.get().tool is not None and run.refused_at_border[0] <= 2 * _SPINS:
                raise RunStoppedError.of(trip)  # inside a tool: its call gets an answer, unless it swallows this
            await until_done(lambda: not run.slots.busy())
            raise Halt(trip)
    return refused_response(trip, guard.stop_text(trip))


def refuse_barely(
    trip: Trip | str | None, guard: Guard, accounts: list[ModelInFlight], fault: Exception
) -> LlmResponse:
    """Refuse a call although ``refuse`` failed. Raise ``Halt`` where the whole run is stopped, outside of tools."""
    guard.faults.note("refusing", fault)
    call_off(accounts)
    if isinstance(trip, str):
        return _text_response(trip)
    run = guard.runs.get(trip.run_id) if trip is not None else None
    if trip is not None and run is not None and run.stopped is not None and HERE.get().tool is None:
        raise Halt(trip)
    return LlmResponse(error_code=STOP_CODE, error_message="refused")


def _text_response(text: str) -> LlmResponse:
    return LlmResponse(content=types.Content(role="model", parts=[types.Part(text=text)]))


# ---- Calls inside a tool of an agent of another framework


def joined(answers: Any, llm: BaseLlm, request: LlmRequest, stream: bool) -> Any:
    """Return ``answers``, paid by the run of another framework whose tool makes this call.

    Every guard of another framework around the call is asked first. ADK's own guard judges the call as always.
    """
    here = HERE.get()
    own = {guard for plugin in IN_USE.plugins if (guard := getattr(plugin, "guard", None)) is not None}
    name = here.stream.agent if here.stream is not None else ""
    run = AgentRun.join(name or "model", own | set(IN_USE.of_models))
    return answers if run is None else _paid_by(run, answers, llm, request, stream)


async def _paid_by(
    run: AgentRun, answers: Any, llm: BaseLlm, request: LlmRequest, stream: bool
) -> AsyncGenerator[LlmResponse, None]:
    config, is_read = request.config, True
    try:
        charges = [flight.charge for flight in ANNOUNCED.get() if flight.charge is not None]
        token = OWNERS.set((*OWNERS.get(), *(charge for charge in charges if charge.request() is request)))
        try:  # so that one store does not hold again what ADK's guard holds in it
            permission = await run.ask(lambda: _asked(llm, request))
        finally:
            OWNERS.reset(token)
        if not isinstance(permission, Permission):
            call_off(announced_accounts(request))
            yield _last_response(run, permission)
            return
        permission.changed(_cap, request)
        capped, usage = request.config, run.guard.faults.attempt("adapter", CallUsage)
        try:
            async with aclosing(permission.pieces(answers)) as pieces:
                async for response in pieces:
                    try:
                        usage.add(response)
                    except Exception as fault:
                        is_read = False
                        run.fault(fault)
                    yield response
        except BaseException as error:
            permission.fail(error, streaming=stream)
            raise
        finally:
            if request.config is capped:
                request.config = config  # the caller may use the request again
        if (trip := permission.interrupted) is not None:
            permission.fail(None, streaming=stream)
            yield _last_response(run, trip)
            return
        if is_read:
            permission.read(_settle, usage)
        else:
            permission.fail(None)
    finally:
        run.end()


async def _joined_again(
    place: Place, fault: Exception, answers: Any, llm: BaseLlm, request: LlmRequest, stream: bool
) -> AsyncGenerator[LlmResponse, None]:
    """Join after a fault in ``joined``. After a second one, a budget that cannot hold the call refuses it."""
    trips = [guard.give_up("adapter", fault, run.info.run) for guard, run, _ in place.layers]
    try:
        answers = joined(answers, llm, request, stream)
    except Exception as second:
        trips = [guard.give_up_call("adapter", second, run.info.run) for guard, run, _ in place.layers]
    for trip, layer in zip(trips, place.layers, strict=True):
        if trip is not None:
            call_off(announced_accounts(request))
            yield stop_response(trip, layer.guard.stop_text(trip))
            return
    async with aclosing(answers) as pieces:
        async for response in pieces:
            yield response


def _last_response(run: AgentRun, end: Trip | Ended) -> LlmResponse:
    if isinstance(end, Ended):  # the same answer as after a condition of ADK's own
        return LlmResponse(custom_metadata={METADATA_KEY: {KEY: {"refused": True}}})
    return stop_response(end, run.guard.stop_text(end))


def _cap(permission: Permission, request: LlmRequest) -> LlmRequest:
    """Cap the output where a budget can pay only for a shorter answer. ADK's guard gives its own notices."""
    if (limit := permission.max_output_tokens) is not None:
        cap_output(request, limit)
    return request


def _asked(llm: BaseLlm, request: LlmRequest) -> ModelRequest:
    projection = project(request, None)
    limit = request.config.max_output_tokens if request.config is not None else None
    upper, likely = projection.upper, projection.likely
    return ModelRequest(request.model or llm.model, upper, likely, limit, projection.audio)


def _settle(permission: Permission, usage: CallUsage) -> None:
    permission.settle(usage.reported)
