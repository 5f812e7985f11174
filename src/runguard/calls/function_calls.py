"""After a guarded call: book what it cost, tell the breaker how it ended, and look for loops.

Every call is booked, whatever happens to it. Where the cost was not reported, an estimate is booked and flagged.
"""

import logging
from copy import copy
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from typing import Any, Final

from runguard.core.breaker import Permit
from runguard.core.decision import Action, Finding
from runguard.core.errors import RunStoppedError
from runguard.core.outcomes import provider_status
from runguard.functions.caller import Caller, GuardedCall
from runguard.functions.loop_watch import watch_loops
from runguard.pricing.rates import Rates, Usage
from runguard.providers.errors import was_unbilled
from runguard.providers.messages import Reading, Request, read
from runguard.providers.usage import tokens_in

_log: Final = logging.getLogger("runguard")
_PROBLEMS_KEPT: Final = 32
_NOTHING: Final[tuple[str, ...]] = ()
# A bad request says nothing about the health of the provider.
_BAD_REQUEST: Final = frozenset({400, 401, 403, 404, 405, 409, 413, 415, 422})


def done(call: GuardedCall, result: Any, reading: Reading | None = None, received: int | None = None) -> None:
    """The call returned.

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
            watch_loops(call, answer, result)
    except Exception as error:  # an internal error must not cost the caller the result
        drop(call, error)
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
    """The call raised, was cancelled or ended early: book what it may have cost, flagged as an estimate.

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
    except Exception as fault:
        drop(call, fault)
    finally:
        call.caller.give_back(call.ticket)


def fail_all(calls: list[GuardedCall], error: BaseException) -> None:
    """All of these calls were the one that raised."""
    for call in calls:
        try:
            failed(call, error)
        except Exception as fault:
            drop(call, fault)


def never_left(call: GuardedCall) -> None:
    """The call was admitted and then not made."""
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


def drop(call: GuardedCall, error: Exception) -> None:
    """After an internal error: book what is reserved for the call as an estimate, so that no other call waits for
    it.
    """
    call.over = True
    caller, guard, charge = call.caller, call.caller.guard, call.charge
    if charge is None or charge.over:
        guard.fault("functions", error, call.state.run.info.run, caller.name)
    elif _is_priced(call):
        guard.fault("functions", error, call.state.run.info.run, caller.name)
        try:
            guard.abandon(charge)
        except Exception as second:
            guard.close(charge, second)
    else:
        guard.close(charge, error)
    guard.faults.attempt("functions", caller.give_back, call.ticket)


def drop_all(calls: list[GuardedCall], error: Exception) -> None:
    """After an internal error: nothing stays reserved for these calls."""
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
    request, usage, guessed, unknown = call.request, answer.usage, False, _NOTHING
    if received and usage is not None:
        usage = replace(usage, output=max(usage.output, tokens_in(received)))
    if usage is not None:
        if not usage.input:
            usage, guessed = _with_input(usage, answer, request)
    elif request.input_tokens is not None or answer.size:
        output = tokens_in(answer.size) if answer.size else 0
        usage, guessed = Usage(request.input_tokens or 0, output, audio=request.audio_tokens), True
    costs, model = caller.costs, answer.model or request.model
    nano = costs.of(answer, usage, result)
    priced = nano is not None or (
        usage is not None and isinstance(caller.guard.accounts.rates_of(charge, model), Rates)
    )
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
