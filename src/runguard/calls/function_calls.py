"""One call of a guarded function: admit it and reserve its cost before, book it and look for loops after.

``calls/functions`` calls it. It opens a call with ``open_now`` or ``open_call``. It ends the call with one of ``done``,
``failed``, ``never_left`` and ``drop``.
"""

import asyncio
import logging
import re
from collections.abc import Iterable
from copy import copy
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from decimal import Decimal
from itertools import count
from typing import Any, Final

from runguard.calls.function_state import NO_REQUEST, WAITED_FOR, Admission, Caller, GuardedCall, RunState, Ticket
from runguard.core.breaker import Permit
from runguard.core.decision import ALLOW, Action, Decision, Finding, Trip
from runguard.core.errors import PolicyError, RunStoppedError
from runguard.core.events import ROOT_LANE, Answer, ModelCall, ToolResults
from runguard.core.identity import call_fingerprint
from runguard.core.outcomes import provider_status
from runguard.engine.charges import Charge, scopes_of
from runguard.engine.runs import Run
from runguard.ledger.ledger import Hold, StoreError, StoreOutage
from runguard.pricing.rates import Rates, Usage
from runguard.providers.errors import was_unbilled
from runguard.providers.messages import TRANSFER, Reading, Request, ToolResult, read, step_name
from runguard.providers.usage import tokens_in

_log: Final = logging.getLogger("runguard")

# ---- Before a call: admit it, and reserve the most it may cost on every budget.


def open_now(caller: Caller, request: Request, owners: tuple[Charge, ...]) -> GuardedCall | None:
    """Open a call where nothing has to be awaited, which is the common case.

    ``owners``: the charges around it. Return None if that is not possible. Then nothing has happened: use
    ``open_call``.
    """
    if not caller.opens_at_once:
        return None
    guard, counted = caller.guard, ""
    run: Run | None = None
    event: ModelCall | None = None
    try:
        bound, state = caller.costs.bound(request), caller.state()
        run = state.run
        if None in bound:  # the most that its model can cost may fit: then no call has to wait
            bound = caller.costs.of_model(request) or bound
            if None in bound:
                return None
        if run.stopped is not None:
            return None
        event = _event(caller, run, request, owners)
        event.bound = bound
        with state.lock:
            decision = guard.check(event)
        if decision is not ALLOW:
            _obey(state, decision)
        counted = event.run
        if guard.reserve_now(event):
            return GuardedCall(caller, state, event.charge, request)
    except RunStoppedError:
        raise
    except Exception as error:
        if event is not None and event.charge is not None:
            guard.release(event.charge)
        # otherwise the run has ended meanwhile, and the call belongs to the next one
        if run is None or run.info.run in guard.runs:
            caller.fault(error, run)
    if counted:
        guard.unspent(counted)
    return None


def _event(caller: Caller, run: Run, request: Request, owners: tuple[Charge, ...]) -> ModelCall:
    event = ModelCall(
        run.info.run,
        ROOT_LANE,
        caller.name,
        caller.guard.clock(),
        request.model,
        request.input_tokens or 0,
        request.audio_tokens,
        request.max_output_tokens,
    )
    event.around = owners  # not a context variable: what has to wait goes on in another thread
    if caller.settings.context:
        event.projected_tokens = request.input_tokens
        event.context_limit = caller.guard.context_limit(request.model)
    return event


async def open_call(
    caller: Caller,
    request: Request,
    admission: Admission,
    ticket: Ticket | None,
    no_loop: bool,
    no_wait: bool,
    owners: tuple[Charge, ...],
) -> GuardedCall:
    """Open a call, or raise the error that says why not.

    ``no_wait``: the caller blocks an event loop, and with it the calls that it would wait for. ``owners``: the charges
    around it.
    """
    try:
        call = GuardedCall(caller, caller.state(), None, request, ticket, admission is Admission.ALONGSIDE)
        while True:
            try:
                await _open(call, no_loop, no_wait, owners)
                break
            except (RunStoppedError, PolicyError):
                raise
            except Exception as error:  # an internal error: the policy says what follows
                if call.state.run.info.run in caller.guard.runs:
                    caller.give_back(ticket)
                    await _recover(call, error)
                    break
                call.state = caller.state()  # its run has ended meanwhile: it belongs to the next one
    except BaseException:
        caller.give_back(ticket)
        raise
    if ticket is not None and call.charge is not None:
        ticket.charge = WAITED_FOR[id(call.charge)] = call.charge
        try:
            ticket.known = caller.guard.faults.attempt("functions", _least_of, caller, request) or (0, 0)
        except BaseException:
            never_left(call)
            raise
    return call


async def recover_calls(layers: Iterable[Caller], error: Exception) -> list[GuardedCall]:
    """Open a call at each layer after a fault: on its ledger alone. Raises where that is refused or fails."""
    calls: list[GuardedCall] = []
    try:
        for layer in layers:
            try:
                calls.append(GuardedCall(layer, layer.state(), None, NO_REQUEST))
            except Exception as second:
                layer.give_up_call(second)
            else:
                await _recover(calls[-1], error)
    except BaseException:
        for call in calls:
            never_left(call)
        raise
    return calls


async def _recover(call: GuardedCall, error: Exception) -> None:
    caller, run, request = call.caller, call.state.run, call.request

    def describe(at: float) -> ModelCall:
        sized = (request.model, request.input_tokens or 0, request.audio_tokens, request.max_output_tokens)
        event = ModelCall(run.info.run, ROOT_LANE, caller.name, at, *sized)
        # a cost that cannot be worked out is unknown: the call takes what is left
        event.bound = caller.guard.faults.attempt("functions", caller.costs.expected, request) or (None, None)
        usd, tokens = caller.costs.highest
        event.least = usd or 0, tokens or 0
        return event

    decision, event = await caller.guard.recover("functions", error, run.info.run, caller.name, describe)
    if decision.action is Action.STOP and decision.enforced and decision.trip is not None:
        raise RunStoppedError.of(decision.trip)
    if event is not None:
        call.charge = event.charge


async def _open(call: GuardedCall, no_loop: bool, no_wait: bool, owners: tuple[Charge, ...]) -> None:
    caller, state, request = call.caller, call.state, call.request
    guard, run = caller.guard, state.run
    if run.stopped is not None:
        await _lift(caller, state)
        if run.stopped is not None:
            raise RunStoppedError.of(run.stopped)
    if caller.settings.breaker:
        call.permit = await _admit(caller, state)
    event = _event(caller, run, request, owners)
    event.no_loop, event.no_wait = no_loop, no_wait
    is_alone = call.ticket is not None and call.ticket.is_alone
    bound, expected = caller.costs.bound(request), caller.costs.expected(request)
    event.bound, event.least = bound if is_alone else expected, _least_of(caller, request)
    if call.alongside:
        event.bound = event.least
    try:
        with state.lock:
            decision = guard.check(event)
        _obey(state, decision)
        if call.alongside:
            await _make_room(caller)
        decision = await guard.reserve(event, slot=False)
        _obey(state, decision)
    except BaseException:
        if event.charge is not None and not event.charge.over:  # an internal error
            guard.release(event.charge)
            guard.faults.attempt("functions", guard.unspent, event.run, event)
        if call.permit is not None:
            permit, call.permit = call.permit, None
            guard.faults.attempt("functions", guard.breakers.release, caller.name, permit)
        raise
    call.charge = event.charge


def _least_of(caller: Caller, request: Request) -> tuple[int, int]:
    usd, tokens = caller.costs.expected(request)
    return usd or 0, tokens or 0


async def _make_room(caller: Caller) -> None:
    """Let the call that runs alone, and holds the whole remainder, keep only what it must hold at least."""
    ticket, ledger = caller.queue.alone(), caller.guard.accounts.ledger
    charge = ticket.charge if ticket is not None else None
    if ticket is None or charge is None or charge.hold is None:
        return
    ttl = caller.settings.policy.hold_seconds
    try:
        hold = await ledger.reserve(charge.lines.accounts, (*ticket.known, 1), force=True, ttl=ttl)
    except (StoreOutage, StoreError):
        return  # the reservation that follows meets the same store, and on_outage decides
    if not isinstance(hold, Hold):
        return
    held, charge.hold = charge.hold, hold
    ledger.release(held)
    if charge.over:  # it has ended meanwhile
        ledger.release(hold)
    else:
        charge.held = ticket.known[0]


def _obey(state: RunState, decision: Decision) -> None:
    if decision.action < Action.BLOCK or not decision.enforced or decision.trip is None:
        return
    if decision.finding is not None:  # otherwise an earlier stop, for which ``until`` is already set
        money = decision.finding.money
        state.until = money.ends if money is not None and decision.trip.rule == "budget" else None
        if decision.trip.rule == "budget" and _only_held(decision.finding):
            state.until = 0.0  # other calls will settle: the next call may try again
    raise RunStoppedError.of(decision.trip)


def _only_held(finding: Finding) -> bool:
    """Whether only the reservations of other calls were in the way. Then the budget is not used up."""
    evidence = finding.evidence[0] if finding.evidence else {}
    if "reserved" not in evidence:
        return False
    spent, reserved, wanted, limit = (Decimal(evidence[name]) for name in ("spent", "reserved", "wanted", "limit"))
    return reserved > 0 and spent < limit and (spent + wanted <= limit or wanted >= limit)


async def _lift(caller: Caller, state: RunState) -> None:
    """Lift the stop of a run if its reason is gone.

    That is so if a new period began, the kill switch was released, the cap was raised or the store answers again.
    """
    run, accounts = state.run, caller.guard.accounts
    trip = run.stopped
    if trip is None:
        return
    if trip.rule == "kill_switch":
        await accounts.ledger.refresh()
        over = accounts.switch.of(scopes_of(run.info)) is None
    elif trip.rule == "budget":
        over = state.until is not None and accounts.ledger.period_time(caller.guard.clock()) >= state.until
        over = over or (accounts.ledger.is_shared and await asyncio.to_thread(_was_extended, caller, trip))
    else:
        over = trip.rule == "guard_error"
    if over:
        run.lift()


def _was_extended(caller: Caller, trip: Trip) -> bool:
    """Whether another process has raised the cap that stopped the run."""
    try:
        return any(
            status.unit == trip.unit and status.limit > trip.limit
            for status in caller.guard.accounts.budgets(trip.scope_id)
        )
    except (StoreError, StoreOutage):
        return False


async def _admit(caller: Caller, state: RunState) -> Permit | None:
    """Ask the breaker."""
    guard, name = caller.guard, caller.name
    permit = await guard.breakers.claim_probe(name, guard.clock())
    breaker = guard.breakers.get(name)
    if permit is not None or breaker is None:
        return permit
    now = guard.accounts.ledger.now(guard.clock())
    permit = breaker.admit(now)
    if permit is not None:
        return permit
    wait, limit = breaker.retry_after(now), breaker.threshold
    evidence = ({"retry_after": f"{wait if wait is not None else float('inf'):.3f}"},)
    finding = Finding("breaker", Action.BLOCK, limit, limit, "failures in a row", "call", name, name, "", evidence)
    event = ModelCall(state.run.info.run, ROOT_LANE, name, now)
    with state.lock:
        trip = guard.refuse(state.run, event, finding)
    if not caller.enforces:
        return None
    raise RunStoppedError.of(trip)


# ---- After a call: book it, whatever happened to it, and tell the breaker how it ended.

_PROBLEMS_KEPT: Final = 32
# A bad request says nothing about the health of the provider.
_BAD_REQUEST: Final = frozenset({400, 401, 403, 404, 405, 409, 413, 415, 422})


def done(call: GuardedCall, result: Any, reading: Reading | None = None, received: int | None = None) -> None:
    """Book a call that returned.

    ``received``: the bytes of a stream that was left, or that ended, before it reported all of them. The call is then
    booked as an estimate.
    """
    if call.over:
        return
    call.over, caller = True, call.caller
    try:
        answer = read(result, said=caller.settings.loop) if reading is None else reading
        if reading is None and call.request.rounds > 1:
            _leave_out_rounds(call.request, answer)
        _book(call, answer, result, received)
        if answer.problems:
            _log_problems(caller, answer.problems)
        if caller.settings.breaker:
            _report(call, True)
        if caller.settings.loop:
            _watch_loops(call, answer, result)
    except BaseException as error:  # an internal error must not cost the caller the result
        drop(call, error)
        if not isinstance(error, Exception):
            raise
    finally:
        if call.ticket is not None:
            caller.give_back(call.ticket)


def failed(
    call: GuardedCall,
    error: BaseException | None,
    size: int = 0,
    *,
    streaming: bool = False,
    reading: Reading | None = None,
    last: Any = None,
) -> None:
    """Book a call that raised, was cancelled or ended early: what it may have cost, flagged as an estimate.

    ``size``: the bytes that came. ``last``: the last piece.
    """
    if call.stacked and isinstance(error, RunStoppedError) and not size:
        never_left(call)
    if call.over:
        return
    call.over = True
    try:
        status = provider_status(error) if isinstance(error, Exception) else None
        spared = status in _BAD_REQUEST or not isinstance(error, Exception) or isinstance(error, RunStoppedError)
        _report(call, None if spared else False)
        if call.charge is not None:
            call.caller.guard.settling.failed(call.charge, error)
            _book_failure(call, error, size, streaming, reading, last)
    except BaseException as fault:
        drop(call, fault)
        if not isinstance(fault, Exception):
            raise
    finally:
        call.caller.give_back(call.ticket)


def fail_all(calls: list[GuardedCall], error: BaseException) -> None:
    """Book a call that raised, in each of its layers."""
    for call in calls:
        try:
            failed(call, error)
        except Exception as fault:
            drop(call, fault)
        except BaseException as leaving:
            drop_all(calls, leaving)
            raise


def never_left(call: GuardedCall) -> None:
    """Give back what a call holds that was admitted and then not made."""
    if call.over:
        return
    call.over = True
    caller, guard = call.caller, call.caller.guard
    attempt = guard.faults.attempt  # an error in one step does not prevent the others
    if call.charge is not None:
        guard.release(call.charge)
        attempt("functions", guard.unspent, call.state.run.info.run)
    if call.permit is not None:
        attempt("functions", guard.breakers.release, caller.name, call.permit)
    attempt("functions", caller.give_back, call.ticket)


def drop(call: GuardedCall, error: BaseException) -> None:
    """Book what is reserved for a call as an estimate, after an internal error. No other call waits for it then.

    A function of the user may also end the program or the task, with ``SystemExit`` for example. That is no error.
    """
    call.over = True
    caller, guard, charge = call.caller, call.caller.guard, call.charge
    if isinstance(error, Exception) and (charge is None or charge.over or _is_priced(call)):
        guard.fault("functions", error, call.state.run.info.run, caller.name)
    if charge is not None and not charge.over:
        if _is_priced(call):
            try:
                guard.abandon(charge)
            except Exception as second:
                guard.close(charge, second)
        elif isinstance(error, Exception):
            guard.close(charge, error)
        else:
            guard.faults.attempt("functions", guard.accounts.close, charge)
    guard.faults.attempt("functions", caller.give_back, call.ticket)


def drop_all(calls: list[GuardedCall], error: BaseException) -> None:
    """Drop a call in each of its layers."""
    for call in calls:
        drop(call, error)


def _is_priced(call: GuardedCall) -> bool:
    """Whether the price of the model gives the cost, and not a function or a figure of the user."""
    settings, charge = call.caller.settings, call.charge
    is_own = settings.cost_of_result is not None or settings.fixed_cost is not None
    return charge is not None and isinstance(charge.rates, Rates) and not is_own


def _report(call: GuardedCall, ok: bool | None) -> None:
    """Tell the breaker how the call ended. None: it says nothing for or against the callable."""
    caller, guard = call.caller, call.caller.guard
    if ok is None and call.permit is not None:
        guard.breakers.release(caller.name, call.permit)
    elif ok is not None and caller.settings.breaker:
        permit = call.permit or Permit(0)
        guard.breakers.report(caller.name, permit, ok, guard.clock(), call.state.run.info.run)


def _log_problems(caller: Caller, problems: tuple[str, ...]) -> None:
    """Log each reason once why an answer was booked as an estimate."""
    for problem in problems:
        if problem not in caller.problems and len(caller.problems) < _PROBLEMS_KEPT:
            caller.problems.add(problem)
            _log.info("runguard.unreadable: the answer of '%s': %s", caller.name, problem)


# ---- what a call cost -----------------------------------------------------------------------------------------------


def _leave_out_rounds(request: Request, reading: Reading) -> None:
    """Correct the requests that the client made before the last one, by what is known of its call."""
    if request.hides_rounds:
        reading.earlier = (Usage(),) * (request.rounds - 1)
    elif request.answered:  # rounds that were in the prompt
        reading.earlier = reading.earlier[: -request.answered]


def _book(call: GuardedCall, answer: Reading, result: Any, received: int | None) -> None:
    charge, caller, settings = call.charge, call.caller, call.caller.settings
    if charge is None:
        return
    request, usage, guessed = call.request, answer.usage, False
    unknown: tuple[str, ...] = ()
    if received and usage is not None:
        usage = replace(usage, output=max(usage.output, tokens_in(received)))
    if usage is not None:
        if not usage.input:
            usage, guessed = _with_input(usage, answer, request)
    elif request.input_tokens is not None or answer.size:
        output = tokens_in(answer.size) if answer.size else 0
        if not output and settings.cost_of_result is None and settings.fixed_cost is None:
            # an answer that cannot be read is not a short one
            output = caller.guard.accounts.expectations.typical(charge.model, request.max_output_tokens)
        usage, guessed = Usage(request.input_tokens or 0, output, audio=request.audio_tokens), True
    costs, model = caller.costs, answer.model or request.model
    nano = costs.of(answer, usage, result)
    has_rates = isinstance(caller.guard.accounts.rates_of(charge, model), Rates)
    if usage is None and nano is None and has_rates and answer.problems:  # what it stated cannot be right
        output = caller.guard.accounts.expectations.typical(charge.model, request.max_output_tokens)
        usage, guessed = Usage(output=output), True
    priced = nano is not None or (usage is not None and has_rates)
    estimated = guessed and (nano is None or settings.in_tokens)
    if usage is None or not priced:
        highest_usd, highest_tokens = costs.highest
        if usage is None and settings.in_tokens:
            if highest_tokens:
                usage, estimated = Usage(input=highest_tokens), True
            else:
                unknown = ("tokens",)
        if not priced and settings.in_usd:
            if highest_usd:
                nano, estimated = highest_usd, True
            elif settings.policy.on_unpriced == "refuse":
                unknown = (*unknown, "usd")
    estimate = estimated or received is not None
    if answer.earlier:
        _settle_rounds(call, answer, usage or Usage(), nano, estimate)
    else:
        caller.guard.settle(charge, usage or Usage(), model, nano=nano, estimated=estimate)
    for unit in unknown:
        _stop_unknown(call, unit, model)
    booked = charge.booked
    if booked is not None and not estimated and costs.learns:
        costs.learn(booked.nano if priced else None, booked.input + booked.output)


def _book_failure(
    call: GuardedCall, error: BaseException | None, size: int, streaming: bool, reading: Reading | None, last: Any
) -> None:
    charge, caller, settings, guard = call.charge, call.caller, call.caller.settings, call.caller.guard
    assert charge is not None
    received = tokens_in(size)
    # The client made several requests, and the last one reported nothing.
    lacks_last = reading is not None and reading.earlier and reading.usage is None
    if reading is not None and lacks_last:
        reading = replace(reading, usage=Usage(input=max(usage.input for usage in reading.earlier)))
    if reading is not None and reading.usage is not None:  # what was reported before it broke is the least it cost
        more = received > reading.usage.output  # a stream may report its prompt first and its output only at the end
        usage = replace(reading.usage, output=received) if more else reading.usage
        usage, guessed = _with_input(usage, reading, call.request)
        nano = caller.costs.of(reading, usage, last)
        estimate = more or guessed or bool(lacks_last)
        if reading.earlier:
            _settle_rounds(call, reading, usage, nano, estimate)
        else:
            guard.settle(charge, usage, reading.model or call.request.model, nano=nano, estimated=estimate)
    elif not size and call.request.rounds == 1 and was_unbilled(error):
        # with several rounds, requests before the refused one may have been answered
        guard.settle(charge, Usage(), free=True)
    elif _is_priced(call):
        guard.abandon(charge, received, streaming=streaming)
    else:
        usage = Usage(input=call.request.input_tokens or 0, output=received)
        nano = settings.fixed_cost if settings.fixed_cost is not None else caller.costs.highest[0]
        # pieces came, so the provider has billed something
        if not nano and streaming and size and settings.in_usd and settings.policy.on_unpriced == "refuse":
            _stop_unknown(call, "usd")
        guard.settle(charge, usage, nano=nano or None, estimated=True)


def _settle_rounds(call: GuardedCall, answer: Reading, usage: Usage, nano: int | None, estimated: bool) -> None:
    """Several requests for one call: their sum is booked at once, and then the number of them."""
    charge, caller, guard = call.charge, call.caller, call.caller.guard
    assert charge is not None
    model = answer.model or call.request.model
    requests = [usage, *(_completed(one, usage, call.request.max_output_tokens) for one in answer.earlier)]
    whole = Usage(*(sum(getattr(one, part.name) for one in requests) for part in dataclass_fields(Usage)))
    if nano is not None and caller.settings.cost_of_tokens is not None:
        nano = caller.costs.ask(caller.settings.cost_of_tokens, whole.input, whole.output)
    elif nano is None and isinstance(rates := guard.accounts.rates_of(charge, model), Rates):
        nano, estimated = sum(rates.cost(one) for one in requests), estimated or rates.estimated
    estimated = estimated or any(not one.input for one in answer.earlier)
    guard.settle(charge, whole, model, nano=nano, estimated=estimated)
    for _ in answer.earlier:
        counted = copy(charge)
        counted.hold, counted.held, counted.booked, counted.over, counted.number = None, 0, None, False, 0
        guard.settle(guard.accounts.uncounted(counted), Usage(), model, nano=0)


def _stop_unknown(call: GuardedCall, unit: str, model: str = "") -> None:
    """There is a limit, and nothing says what the call cost. Unknown is not zero, so this was the last call."""
    caller = call.caller
    if not caller.enforces:
        return
    advice, about = "return its usage, for example {'tokens': …}", ""
    if unit == "usd":
        price = f", or prices={{{model!r}: {{'input': …, 'output': …}}}} (USD per million tokens)" if model else ""
        advice = f"return {{'usd': …}}, give cost={price or ', or call a model whose price is known'}"
        about = f" and '{model}' has no known price" if model else ""
    text = f"'{caller.name}' reported no {unit}{about}: {advice}"
    finding = Finding("unpriced", Action.STOP, 1, 0, f"call without {unit}", "run", "", caller.name, text)
    caller.stop_run(call.state, finding)


def _with_input(usage: Usage, answer: Reading, request: Request) -> tuple[Usage, bool]:
    """A usage that reports output and no input, with the input estimated; and whether it was."""
    if not answer.lacks_input or request.input_tokens == 0:  # the user's own counter says so too
        return usage, False
    return replace(usage, input=request.input_tokens or 0, audio=request.audio_tokens), True


def _completed(one: Usage, last: Usage, most: int | None) -> Usage:
    """The usage of a request before the last one.

    Where its input was not reported: the last prompt was the longest, and none of it need have been cached.
    """
    if one.input:
        return one
    output = max(one.output + last.thinking, last.output)
    if most is not None:
        output = min(output, max(most, last.output))
    return Usage(input=last.input, output=output, audio=last.audio)


# ---- After a call: look for loops.

_PLAIN_NAME: Final = re.compile(r"[\w.:/#@+-]{1,64}")
# Why a model stopped, as OpenAI, Anthropic and Gemini say it. As a signature it says nothing about the step.
_STOP_REASONS: Final = frozenset(
    {
        *("stop", "end_turn", "completed", "stop_sequence", "pause_turn", "eos", "eos_token", "refusal", "safety"),
        *("length", "max_tokens", "max_output_tokens", "incomplete", "content_filter"),
        *("tool_use", "tool_calls", "function_call"),
    }
)
_turns: Final = count()  # answers in words: none equals another


def _watch_loops(call: GuardedCall, reading: Reading, result: Any) -> None:
    """Show the loop rules what a call did."""
    caller, run = call.caller, call.state.run
    now = caller.guard.clock()
    signature, is_known = _signature(caller, reading, result)
    if not is_known:
        return
    # the user's signature is the whole identity of a step
    progress = call.state.progress if signature is None else None
    with call.state.lock:
        answers = _answers(call, reading, signature)
        if answers:
            caller.guard.after(ToolResults(run.info.run, ROOT_LANE, caller.name, now, "", answers))
        if progress is None or run.stopped is not None:
            return
        if not reading.results:
            progress.answered(reading.calls)
            return
        results = [(ToolResult(tool, value), args) for tool, args, value in reading.results]
        finding = progress.observe(run.info.run, caller.name, now, results)
        if finding is not None:
            caller.stop_run(call.state, finding)


def _signature(caller: Caller, reading: Reading, result: Any) -> tuple[Any, bool]:
    """The caller's own name of a step, None where it gives none; and whether the step is to be checked at all."""
    signature = reading.sig
    if caller.settings.signature is not None:
        try:
            signature = caller.settings.signature(result)
        except Exception:
            _log.warning(
                "runguard.signature_failed: signature raised for '%s'; the call is not checked for loops",
                caller.name,
                exc_info=True,
            )
            return None, False
        if signature is None:
            return None, False
    is_reason = type(signature) is str and signature.lower() in _STOP_REASONS
    if is_reason and all(name != signature for name, _ in reading.calls):  # a tool may have this name
        return None, True
    return signature, True


def _answers(call: GuardedCall, reading: Reading, signature: Any) -> list[Answer]:
    """What the call did, as the loop rule sees it: its signature, or the tools that the model asks for."""
    caller = call.caller
    if signature is not None:
        if signature == TRANSFER:  # the agents are the steps
            signature = next((step_name(*one) for one in reading.calls if one[0] == TRANSFER), signature)
        made = call_fingerprint("", {"sig": signature})
        # Anything but a plain name may be content, which must not appear in a trip, a log or an alert.
        plain = signature if isinstance(signature, str) and _PLAIN_NAME.fullmatch(signature) else ""
        return [Answer(plain or f"{caller.name}#{made.hex()[:8]}", made, reading.result)]
    if reading.results:
        return [
            Answer(step_name(tool, args), _call_id(caller, tool, args), value, args=args)
            for tool, args, value in reading.results
        ]
    if reading.calls:
        return [Answer(step_name(tool, args), _call_id(caller, tool, args)) for tool, args in reading.calls]
    if reading.sig is None and caller.settings.signature is None:
        return []
    # Beside steps with signatures an answer in words is a step too. It is news, unless the same request got the same.
    mark = call.state.progress.mark if call.state.progress is not None else None
    said = [mark, reading.text] if mark is not None and reading.text else next(_turns)
    return [Answer(f"{caller.name}#words", call_fingerprint("", {"words": said}))]


def _call_id(caller: Caller, tool: str, args: Any) -> bytes:
    return call_fingerprint(step_name(tool, args), {} if caller.settings.by == "name" else args)
