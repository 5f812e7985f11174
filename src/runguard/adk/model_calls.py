"""Every call that reaches a model passes here, whether or not a hook announced it.

A call that a hook announced brings its reservation along. For a call without a hook (a compaction's summary, an agent
that runs without plugins inside a tool, a tool that calls a model, a custom agent's own call) the guard is asked here.
A model that calls other models (a fallback) is not a call itself: each of its attempts is. However the call ends, its
accounts are closed here.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from functools import wraps
from typing import Any, Final

from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse

from runguard.adk.call_accounts import (
    CallAccount,
    PassingCall,
    Stop,
    call_off,
    cap_output,
    give_up,
    keep_cap,
)
from runguard.adk.context import ANNOUNCED, HERE, enclosing_tool, here_of, runners_inside
from runguard.adk.estimate import count_tokens, project
from runguard.adk.invocation_state import Invocation, ModelInFlight
from runguard.adk.joining import joined
from runguard.adk.model_refusals import refuse, refuse_barely
from runguard.adk.stop_events import stop_response
from runguard.adk.termination_calls import asked_first
from runguard.adk.unannounced_calls import announced_accounts, callers
from runguard.calls.model_calls import is_inside_tool
from runguard.core.decision import STOP_CODE, Action
from runguard.core.errors import RunStoppedError
from runguard.core.events import AgentEntered, ModelCall
from runguard.engine.charges import OWNERS
from runguard.engine.guard import Guard

_log: Final = logging.getLogger("runguard")
_BLOCK: Final = Action.BLOCK


async def _guarded(
    original: Callable[..., Any], llm: BaseLlm, request: LlmRequest, stream: bool, args: Any, kwargs: Any
) -> AsyncGenerator[LlmResponse, None]:
    """The model's answers, booked on the accounts of the call.

    A failure of RunGuard does not change them and leaves no reservation behind.
    """
    outer = HERE.get().model_call
    accounts: list[CallAccount] = []
    passing: PassingCall | None = None
    own = request.config
    try:
        stop = await _open_accounts(outer, request, accounts)
        if stop is None:
            passing = PassingCall(llm, accounts)
    except Exception as fault:
        stop = _fault(fault, accounts)
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
    try:
        answers = aiter(original(llm, request, stream, *args, **kwargs))
        try:
            while True:
                now = HERE.get()
                placed = here_of((now.tool, now.stream, now.layers, now.conditions, inside))
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


def _stop_by_switch(passing: PassingCall | None, accounts: list[CallAccount]) -> LlmResponse | None:
    """The answer when the kill switch has ended the call. None when other code has cancelled it."""
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


def _fault(fault: Exception, accounts: list[CallAccount]) -> Stop | None:
    """Report a failure of RunGuard to the guards of this call.

    Returns a stop where the policy of one of them says stop.
    """
    guards = (
        {account.guard for account in accounts}
        | {guard for guard, _, _ in ANNOUNCED.get()}
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


async def _open_accounts(outer: PassingCall | None, request: LlmRequest, accounts: list[CallAccount]) -> Stop | None:
    """Fill in the accounts of this call. Returns a stop when the call may not be made."""
    if outer is not None:
        for account in outer.accounts:
            stop = await _attempt(account, request, accounts)
            if stop is not None:
                return stop
    for account in announced_accounts(request) if outer is None else ():
        accounts.append(account)
        if account.charge.hold is not None:
            keep_cap(request, account.charge)
    here = HERE.get()
    if accounts and not here.layers and here.tool is None and here.stream is not None:
        registry = here.stream.registry
        if registry is not None and registry.guard is accounts[0].guard:
            return None  # most calls: the hook of the only guard around has announced it
    mine = {account.guard for account in accounts}
    for guard, invocation, lane, agent, tool, is_layer in callers(request):
        if guard in mine or (outer is not None and not is_layer):
            continue  # its own hook announced the call
        owners = OWNERS.set((*OWNERS.get(), *(account.charge for account in accounts)))
        try:
            stop = await _ask(
                guard, invocation, lane, agent, tool, request, accounts, is_layer=is_layer, slot=bool(tool)
            )
        except Exception as error:  # the guard itself failed: its policy decides
            trip = guard.fault("border", error, invocation.run.info.run, agent)
            if trip is None:
                continue
            return trip, guard
        finally:
            OWNERS.reset(owners)
        if stop is not None:
            return stop
    return None


async def _attempt(account: CallAccount, request: LlmRequest, accounts: list[CallAccount]) -> Stop | None:
    """A model inside a model: the first attempt takes over the reservation, each further one is a call of its own."""
    guard, charge = account.guard, account.charge
    invocation, flight = account.place
    first = not account.delegated
    account.delegated = True
    if first and (request.model or "") == charge.model and not charge.over:
        accounts.append(CallAccount(guard, charge, invocation, flight, is_layer=account.is_layer))
        return None
    if first:
        guard.release(charge)
        guard.unspent(charge.run_costs.info.run)
    return await _ask(
        guard, invocation, charge.lane, charge.agent, charge.tool, request, accounts, flight, in_layer=account.is_layer
    )


async def _ask(
    guard: Guard,
    invocation: Invocation | None,
    lane: str,
    agent: str,
    tool: str,
    request: LlmRequest,
    accounts: list[CallAccount],
    flight: ModelInFlight | None = None,
    *,
    is_layer: bool = False,
    in_layer: bool = False,
    slot: bool = False,
) -> Stop | None:
    if guard.policy.mode == "off" or invocation is None:
        return None
    sizes = project(request, invocation.prompts.get((lane, agent)) if is_layer else None)
    event = ModelCall(invocation.run.info.run, lane, agent, guard.clock(), request.model or "", tool=tool)
    event.input_tokens, event.audio_tokens = sizes.upper, sizes.audio
    event.max_output_tokens = request.config.max_output_tokens
    event.after_answer, event.candidates = invocation.finished, request.config.candidate_count or 1
    if is_layer:  # no hook has measured this request
        event.projected_tokens, event.request_bytes = sizes.likely, sizes.size
        event.context_limit = guard.context_limit(event.model)
        flight = ModelInFlight(agent, None, lane, projection=sizes)
    counter = guard.policy.tokens
    if counter is not None and (counted := await count_tokens(counter, request)) is not None:
        event.input_tokens = counted
        event.projected_tokens = counted if is_layer else None
    around = enclosing_tool(guard) if slot else None  # the tool call that makes this call
    # agents that no hook sees: each Runner is one delegation deeper
    if around is not None and (inside := runners_inside(around)):
        entered = AgentEntered(event.run, lane, agent, event.at, around.depth + inside)
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
    charge = event.charge
    if charge is not None:
        try:
            accounts.append(CallAccount(guard, charge, invocation, flight, is_layer=is_layer or in_layer))
            accounts[-1].holder = asyncio.current_task() if slot else None
        except BaseException:
            guard.release(charge)
            raise
        if charge.lowered:
            cap_output(request, charge.max_output)
    return None


def wrap_model(original: Any) -> Any:
    """The wrapped ``generate_content_async`` of a model class. Outside of guarded runs it passes the call through."""

    @wraps(original)
    def generate_content_async(
        self: BaseLlm, llm_request: LlmRequest, stream: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        here = HERE.get()
        passing = here.model_call
        if passing is not None:
            # a class that calls its parent's method: the same call
            if passing.llm is self or not (passing.accounts or here.layers):
                return original(self, llm_request, stream, *args, **kwargs)
        elif not (here.conditions or here.layers or here.tool or here.stream or ANNOUNCED.get()):
            return original(self, llm_request, stream, *args, **kwargs)
        guarded: Any = _guarded(original, self, llm_request, stream, args, kwargs)
        if passing is None:
            try:
                if is_inside_tool():
                    guarded = joined(guarded, self, llm_request, stream)
            except Exception as fault:
                _fault(fault, [])
            try:
                if here.conditions:
                    guarded = asked_first(
                        guarded, here.conditions, llm_request, lambda: call_off(announced_accounts(llm_request))
                    )
            except Exception as fault:
                _fault(fault, [])
        return guarded

    return generate_content_async
