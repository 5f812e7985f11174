"""Before a guarded call: admit it, and reserve the most it may cost on every budget."""

import asyncio
from decimal import Decimal
from typing import Final

from runguard.core.breaker import Permit
from runguard.core.decision import ALLOW, Action, Decision, Finding, Trip
from runguard.core.errors import PolicyError, RunStoppedError
from runguard.core.events import ROOT_LANE, ModelCall
from runguard.engine.charges import scopes_of
from runguard.engine.runs import Run
from runguard.functions.call_queue import Admission, Ticket
from runguard.functions.caller import WAITED_FOR, Caller, GuardedCall
from runguard.functions.run_context import RunState
from runguard.ledger.ledger import Hold, StoreError, StoreOutage
from runguard.providers.messages import Request

_BLOCK: Final = Action.BLOCK


def open_now(caller: Caller, request: Request) -> GuardedCall | None:
    """Open a call in the common case, in which nothing has to be awaited. None: nothing has happened, use
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
        event = _event(caller, run, request)
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


def _event(caller: Caller, run: Run, request: Request) -> ModelCall:
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
    no_wait: bool = False,
) -> GuardedCall:
    """Permission for one call, or the error that says why not.

    ``no_wait``: the caller blocks an event loop, and with it the calls that it would wait for.
    """
    try:
        call = GuardedCall(caller, caller.state(), None, request, ticket, admission is Admission.ALONGSIDE)
        while True:
            try:
                await _open(call, no_loop, no_wait)
                break
            except (RunStoppedError, PolicyError):
                raise
            except Exception as error:  # an internal error: the policy says what follows
                if call.state.run.info.run in caller.guard.runs:
                    caller.give_back(ticket)
                    caller.fault(error, call.state.run)
                    break
                call.state = caller.state()  # its run has ended meanwhile: it belongs to the next one
    except BaseException:
        caller.give_back(ticket)
        raise
    if ticket is not None and call.charge is not None:
        ticket.charge = WAITED_FOR[id(call.charge)] = call.charge
        ticket.known = caller.guard.faults.attempt("functions", _least_of, caller, request) or (0, 0)
    return call


async def _open(call: GuardedCall, no_loop: bool, no_wait: bool) -> None:
    caller, state, request = call.caller, call.state, call.request
    guard, run = caller.guard, state.run
    if run.stopped is not None:
        await _lift(caller, state)
        if run.stopped is not None:
            raise RunStoppedError.of(run.stopped)
    if caller.settings.breaker:
        call.permit = await _admit(caller, state)
    event = _event(caller, run, request)
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
    """A call that runs alone holds the whole remainder. A call that has to run alongside needs part of it."""
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
    if decision.action < _BLOCK or not decision.enforced or decision.trip is None:
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
    """Lift the stop when its reason is gone: a new period began, the kill switch was taken back, the cap was raised,
    the store answers again. Every other stop stays.
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
    wait, failures = breaker.retry_after(now), breaker.threshold
    evidence = ({"retry_after": f"{wait if wait is not None else float('inf'):.3f}"},)
    finding = Finding("breaker", _BLOCK, failures, failures, "failures in a row", "call", name, name, "", evidence)
    event = ModelCall(state.run.info.run, ROOT_LANE, name, now)
    with state.lock:
        trip = guard.refuse(state.run, event, finding)
    if not caller.enforces:
        return None
    raise RunStoppedError.of(trip)
