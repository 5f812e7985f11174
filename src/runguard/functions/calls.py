"""The engine behind ``guard`` and ``guard_async``: one guard, its state in each run, and the way of one call through
it.

A call is asked for before it is made, with what it may take held on every budget. Where that is not known beforehand,
the first calls go one by one, and then more and more at once, each with the dearest seen held for it. Whatever then
happens to the call, it is booked.
"""

import asyncio
import logging
import os
import re
import secrets
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from decimal import Decimal
from typing import Any, Final

from runguard.accounting.charges import OWNERS, Charge, scopes_of
from runguard.conductor.controls import Controls
from runguard.conductor.guard import Guard
from runguard.conductor.runs import Run
from runguard.core.breaker import Permit
from runguard.core.budget import BudgetStatus
from runguard.core.decision import Action, Decision, Finding, Trip
from runguard.core.events import ROOT_LANE, Answer, ModelCall, RunInfo, ToolResults
from runguard.core.exceptions import PolicyError, RunStoppedError
from runguard.core.fingerprint import call_fingerprint
from runguard.core.money import shown
from runguard.core.outcomes import provider_status
from runguard.functions.costs import Costs
from runguard.functions.dropped import DROPPED
from runguard.functions.first_call import Ticket, Turn, Turns
from runguard.functions.keywords import Settings
from runguard.functions.no_progress import NoProgress
from runguard.ledger.base import Hold
from runguard.ledger.store import StoreError, StoreOutage
from runguard.pricing.rates import Rates, Usage
from runguard.providers.answers import Reading, read
from runguard.providers.failures import was_unbilled
from runguard.providers.prompts import Request, read_request
from runguard.providers.sizes import tokens_in
from runguard.providers.tool_results import ToolResult, newest_results, request_mark

_log: Final = logging.getLogger("runguard")
_STOP, _BLOCK = Action.STOP, Action.BLOCK
_NO_REQUEST: Final = Request()
_NAME_CHARS: Final = 120
_PROBLEMS_KEPT: Final = 32
_PLAIN_NAME: Final = re.compile(r"[\w.:/#@+-]{1,64}")
# a bad request says nothing about the provider
_CALLERS_FAULT: Final = frozenset({400, 401, 403, 404, 405, 409, 413, 415, 422})
_FRESH: Final = "reset() or a new run starts afresh"
_ADVICE: Final = {
    "cycle": f"{_FRESH}; to allow more, raise loop={{'repeats': …}}, set loop={{'by': 'call'}} to compare arguments "
    "alone, "
    "or give None as the signature of calls that may repeat",
    "unpriced": f"return {{'usd': …}}, give cost= or prices=, or set on_unpriced='tokens'; {_FRESH}",
    "breaker": "wait until retry_after has passed: then one call is tried",
    "context": f"send less, then {_FRESH}; to allow more, raise context={{'max_context_tokens': …}}",
    "deadline": f"{_FRESH}; to allow more, raise max_seconds",
    "model_calls": f"{_FRESH}; to allow more, raise max_model_calls",
}


@dataclass(slots=True, eq=False)
class State:
    """What one caller knows of one run."""

    run: Run
    lock: threading.Lock = field(default_factory=threading.Lock)
    until: float | None = None  # the budget that stopped it begins anew then
    progress: NoProgress | None = None  # None: loops are not compared by results


@dataclass(slots=True)
class Call:
    """One call from its reservation to its bill."""

    caller: "Caller"
    state: State
    charge: Charge | None
    request: Request
    ticket: Ticket | None = None  # its cost is not known beforehand: others wait for it
    beside: bool = False  # its cost is not known beforehand, and it cannot wait for the others
    permit: Permit | None = None
    stacked: bool = False  # what is called is guarded itself: a refusal there is no call
    over: bool = False


def owners_of(before: tuple[Charge, ...], calls: "list[Call]") -> tuple[Charge, ...]:
    """The layers around a call, and its own.

    A call that is over is around nothing: a task begun in it may outlive it.
    """
    return (
        *(charge for charge in before if not charge.over),
        *(call.charge for call in calls if call.charge is not None),
    )


class RunContext:
    """``with runguard.run(...)``: whose run this is, and what the callers know of it until it ends."""

    def __init__(
        self, app: str, user: str, session: str, labels: Mapping[str, str] | None, caller: "Caller | None"
    ) -> None:
        self.id = secrets.token_hex(8)
        self.app, self.user, self.session, self.labels, self.caller = app, user, session, labels, caller
        self.outer: RunContext | None = None
        self.states: dict[Caller, State] = {}
        self.ended = False

    def end(self) -> None:
        self.ended = True
        for caller, state in list(self.states.items()):
            caller.guard.faults.attempt("end of run", caller.guard.end, state.run.info.run)
        self.states.clear()


# by identity, of the calls with tickets: a call inside of one must not wait for another
_WAITED_FOR: Final[dict[int, Charge]] = {}
RUN: Final[ContextVar[RunContext | None]] = ContextVar("runguard_run", default=None)


class Caller(Controls):
    """One wrapped callable, or the limits of one ``run``."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name, self.settings = name[:_NAME_CHARS], settings
        self.guard = Guard(settings.policy, breaker_runs=1, advice=_ADVICE)
        self.guard.check_store()
        self.is_off = settings.policy.mode == "off"
        self.is_lazy = False  # an async generator: nothing happens before its first piece
        self._enforces = settings.policy.mode == "enforce"
        self._reads_request = settings.in_usd or settings.in_tokens or settings.context
        self.costs = Costs(self.name, settings, self.guard.accounts.pricing, self.guard.clock)
        self._told_waiting = False
        self.turns = Turns(lambda: self.costs.width, settings.policy.hold_seconds)
        self._lock = threading.Lock()
        self._own: State | None = None
        self.context: RunContext | None = None  # of the limits of a run: that run, also in a run inside of it
        self._pid = os.getpid()
        self._problems: set[str] = set()  # with answers, that were logged

    # ---- runs -------------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """The run in force: that of ``with runguard.run(...)``, or the one that began with this callable."""
        context = self.context or RUN.get()
        while context is not None and context.ended:
            context = context.outer
        if context is None:
            own = self._own
            if own is None or self._pid != os.getpid():  # after a fork, the child's calls are a run of their own
                with self._lock:
                    own = self._own if self._pid == os.getpid() else None
                    if own is None:
                        own = self._own = self._begin(RunContext("", "", "", None, None))
                    self._pid = os.getpid()
            return own
        known = context.states.get(self)
        if known is None:
            with self._lock:
                known = context.states.get(self) or self._begin(context)
                context.states[self] = known
        return known

    def _begin(self, context: RunContext) -> State:
        info = RunInfo(
            context.id,
            context.app or self.name,
            context.user,
            context.session,
            "",
            self.guard.clock(),
            labels=context.labels,
        )
        state, policy = State(self.guard.start(info)), self.settings.policy
        if self.settings.loop and self.settings.by == "result":
            assert policy.cycle_repeats is not None
            state.progress = NoProgress(policy.cycle_repeats, policy.max_cycle_len or 1)
        return state

    def reset(self) -> None:
        """Begin a new run: fresh limits, an empty memory.

        Inside ``with runguard.run(...)``, for this callable in that block.
        """
        context = self.context or RUN.get()
        with self._lock:
            if context is not None and not context.ended:
                old = context.states.pop(self, None)
            else:
                old, self._own = self._own, None
        if old is not None:
            self.guard.end(old.run.info.run)

    # ---- before a call ----------------------------------------------------------------------------------------------

    def request(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Request:
        """What the arguments say about the call, and about the tools that the answer before asked for."""
        if self.settings.loop and self.settings.by == "result":
            try:
                self._look_for_progress(args, kwargs)
            except Exception as error:
                self.fault(error)
        try:
            return read_request(args, kwargs) if self._reads_request and (args or kwargs) else _NO_REQUEST
        except Exception as error:
            self.fault(error)
            return _NO_REQUEST

    def _look_for_progress(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = self.state()
        run, progress = state.run, state.progress
        if progress is None or run.stopped is not None:
            return
        results = newest_results(args, kwargs)
        mark = None if results else request_mark(args, kwargs)
        with state.lock:
            finding = progress.next_request(run.info.run, self.name, self.guard.clock(), results, mark)
            if finding is not None:
                self._stop(state, finding)

    def counted(self, request: Request, tokens: Any) -> Request:
        """The user's own count wins over the estimate.

        A count of 0 does not: it would hold nothing for a prompt that is there.
        """
        if type(tokens) is int and (tokens > 0 or (tokens == 0 and not request.input_tokens)):
            return replace(request, input_tokens=tokens)
        what = f"raised {type(tokens).__name__}" if isinstance(tokens, Exception) else f"gave {shown(tokens)}"
        _log.warning("runguard.tokens_failed: tokens %s for '%s'; the prompt is estimated instead", what, self.name)
        return request

    def turn(self, request: Request, no_loop: bool) -> tuple[Turn, Ticket | None]:
        """Whether a call may go now, or has to wait in line because its cost is not known beforehand."""
        try:
            if not self._enforces or None not in self.costs.bound(request):
                return Turn.NOW, None
            # Made inside of a call of the same callable, or of any that others wait for: waiting might never end.
            owners = [charge for charge in OWNERS.get() if not charge.over]
            if any(charge.home is self.guard.accounts for charge in owners):
                return Turn.BESIDE, None
            turn, ticket = self.turns.ask(
                frozenset(id(charge) for charge in owners if id(charge) in _WAITED_FOR), no_loop
            )
            if turn is Turn.LATER and not self._told_waiting:
                self._told_waiting = True
                _log.info(
                    "runguard.unknown_cost: what a call of '%s' costs is known only afterwards, so the first "
                    "calls go one by one; "
                    "cost=, or a price and an output limit, lets them run at once",
                    self.name,
                )
            return turn, ticket
        except Exception as error:
            self.fault(error)
            return Turn.NOW, None

    def give_back(self, ticket: Ticket | None) -> None:
        """The call has come back, or was not made: the next in line may go."""
        if ticket is None:
            return
        _WAITED_FOR.pop(id(ticket.charge), None)
        self.turns.give_back(ticket)

    def open_now(self, request: Request) -> Call | None:
        """``open`` of the common case: nobody has to be asked or waited for. None: nothing has happened, so ask."""
        guard = self.guard
        if self.settings.breaker or guard.accounts.ledger.is_shared:
            return None
        counted = ""
        run: Run | None = None
        event: ModelCall | None = None
        try:
            bound, state = self.costs.bound(request), self.state()
            run = state.run
            if None in bound:  # the most that its model can take fits: no call has to wait
                bound = self.costs.of_model(request) or bound
            if None in bound or run.stopped is not None:
                return None
            event = ModelCall(
                run.info.run,
                ROOT_LANE,
                self.name,
                guard.clock(),
                request.model,
                request.input_tokens or 0,
                request.audio_tokens,
            )
            event.max_output_tokens, event.bound = request.max_output_tokens, bound
            if self.settings.context:
                event.projected_tokens, event.context_limit = (
                    request.input_tokens,
                    guard.accounts.context_limit(request.model),
                )
            with state.lock:
                decision = guard.check(event)
            self._obey(state, decision)
            counted = event.run
            if guard.reserve_now(event):
                return Call(self, state, event.charge, request)
        except RunStoppedError:
            raise
        except Exception as error:
            if event is not None and event.charge is not None:
                guard.release(event.charge)
            # else it was ended meanwhile: the call belongs to the next one
            if run is None or run.info.run in guard.runs:
                self.fault(error, run)
        if counted:
            guard.unspent(counted)
        return None

    async def open(
        self, request: Request, turn: Turn, ticket: Ticket | None, no_loop: bool, no_wait: bool = False
    ) -> Call:
        """Leave for one call, or the error that says why not.

        ``no_wait``: the caller blocks an event loop, and with it the calls it would wait for.
        """
        try:
            call = Call(self, self.state(), None, request, ticket, turn is Turn.BESIDE)
            while True:
                try:
                    await self._open(call, no_loop, no_wait)
                    break
                except (RunStoppedError, PolicyError):
                    raise
                except Exception as error:  # a fault of ours: the policy says what it means
                    if call.state.run.info.run in self.guard.runs:
                        self.give_back(ticket)
                        self.fault(error, call.state.run)
                        break
                    call.state = self.state()  # its run was ended meanwhile: it belongs to the next
        except BaseException:
            self.give_back(ticket)
            raise
        if ticket is not None and call.charge is not None:
            ticket.charge = _WAITED_FOR[id(call.charge)] = call.charge
            ticket.known = self.guard.faults.attempt("functions", self._least_of, request) or (0, 0)
        return call

    def _least_of(self, request: Request) -> tuple[int, int]:
        return _least(self.costs.expected(request))

    async def _open(self, call: Call, no_loop: bool, no_wait: bool) -> None:
        guard, state, request = self.guard, call.state, call.request
        run = state.run
        if run.stopped is not None:
            await self._lift(state)
            if run.stopped is not None:
                raise RunStoppedError.of(run.stopped)
        if self.settings.breaker:
            call.permit = await self._admit(state)
        limit = guard.accounts.context_limit(request.model) if self.settings.context else None
        event = ModelCall(
            run.info.run,
            ROOT_LANE,
            self.name,
            guard.clock(),
            request.model,
            request.input_tokens or 0,
            request.audio_tokens,
        )
        event.max_output_tokens, event.no_loop, event.no_wait = request.max_output_tokens, no_loop, no_wait
        event.projected_tokens, event.context_limit = request.input_tokens, limit
        is_alone = call.ticket is not None and call.ticket.is_alone
        bound, expected = self.costs.bound(request), self.costs.expected(request)
        event.bound, event.least = bound if is_alone else expected, _least(expected)
        if call.beside:
            event.bound = event.least
        try:
            with state.lock:
                decision = guard.check(event)
            self._obey(state, decision)
            if call.beside:
                await self._make_way()
            decision = await guard.reserve(event, slot=False)
            self._obey(state, decision)
        except BaseException:
            if event.charge is not None and not event.charge.over:  # a fault of ours
                guard.release(event.charge)
                guard.faults.attempt("functions", guard.unspent, event.run, event)
            if call.permit is not None:
                permit, call.permit = call.permit, None
                guard.faults.attempt("functions", guard.breakers.release, self.name, permit)
            raise
        call.charge = event.charge

    async def _make_way(self) -> None:
        """A call that goes alone holds all that is left. One that has to go beside it needs some of that."""
        ticket, ledger = self.turns.alone(), self.guard.accounts.ledger
        charge = ticket.charge if ticket is not None else None
        if ticket is None or charge is None or charge.hold is None:
            return
        try:
            hold = await ledger.reserve(
                charge.lines.accounts, (*ticket.known, 1), force=True, ttl=self.settings.policy.hold_seconds
            )
        except (StoreOutage, StoreError):
            return  # the reservation that follows meets the same store, and on_outage decides
        if not isinstance(hold, Hold):
            return
        held, charge.hold = charge.hold, hold
        ledger.release(held)
        if charge.over:  # it came back meanwhile
            ledger.release(hold)
        else:
            charge.purse.reserved -= charge.held - ticket.known[0]
            charge.held = ticket.known[0]

    def _obey(self, state: State, decision: Decision) -> None:
        if decision.action < _BLOCK or not decision.enforced or decision.trip is None:
            return
        if decision.finding is not None:  # else one that was stopped before: what lifts it is known
            money = decision.finding.money
            state.until = money.ends if money is not None and decision.trip.rule == "budget" else None
            if decision.trip.rule == "budget" and _only_held(decision.finding):
                state.until = 0.0  # others will settle: the next call is asked again
        raise RunStoppedError.of(decision.trip)

    async def _lift(self, state: State) -> None:
        """A stop stays, but for those whose reason can go away: a window that begins anew, a switch taken back, a store
        that is back.
        """
        run, accounts = state.run, self.guard.accounts
        trip = run.stopped
        if trip is None:
            return
        if trip.rule == "kill_switch":
            await accounts.ledger.refresh()
            over = accounts.switch.of(scopes_of(run.info)) is None
        elif trip.rule == "budget":
            over = state.until is not None and accounts.ledger.period_time(self.guard.clock()) >= state.until
            over = over or (accounts.ledger.is_shared and await asyncio.to_thread(self._was_extended, trip))
        else:
            over = trip.rule == "guard_error"
        if over:
            run.lift()

    def _was_extended(self, trip: Trip) -> bool:
        """Somebody else may have moved the cap that stopped the run."""
        try:
            return any(
                status.unit == trip.unit and status.limit > trip.limit
                for status in self.guard.accounts.budgets(trip.scope_id)
            )
        except (StoreError, StoreOutage):
            return False

    async def _admit(self, state: State) -> Permit | None:
        guard = self.guard
        permit = await guard.breakers.claim_probe(self.name, guard.clock())
        breaker = guard.breakers.get(self.name)
        if permit is not None or breaker is None:
            return permit
        now = guard.accounts.ledger.now(guard.clock())
        permit = breaker.admit(now)
        if permit is not None:
            return permit
        wait = breaker.retry_after(now)
        evidence = ({"retry_after": f"{wait if wait is not None else float('inf'):.3f}"},)
        finding = Finding(
            "breaker",
            _BLOCK,
            breaker.threshold,
            breaker.threshold,
            "failures in a row",
            "call",
            self.name,
            self.name,
            "",
            evidence,
        )
        event = ModelCall(state.run.info.run, ROOT_LANE, self.name, now)
        with state.lock:
            trip = guard.refuse(state.run, event, finding)
        if not self._enforces:
            return None
        raise RunStoppedError.of(trip)

    def fault(self, error: Exception, run: Run | None = None) -> None:
        """A fault of ours before a call: counted. Raises where the policy says that it stops."""
        trip = self.guard.give_up("functions", error, run.info.run if run is not None else "", self.name)
        if trip is not None:
            raise RunStoppedError.of(trip)

    # ---- after a call -----------------------------------------------------------------------------------------------

    def done(self, call: Call, result: Any, reading: Reading | None = None, left_after: int | None = None) -> None:
        """The call came back: book what it took, and see whether it goes in circles.

        ``left_after``: the characters of a stream that was left, or that ended, before it reported all of them:
        booked as an estimate.
        """
        if call.over:
            return
        call.over = True
        try:
            told = _told(call.request, result) if reading is None else reading
            self._book(call, told, result, left_after)
            if told.problems:
                self._tell_problems(told.problems)
            if self.settings.breaker:
                self._report(call, True)
            if self.settings.loop:
                self._watch(call, told, result)
        except Exception as error:  # a fault of ours must not take away what was paid for
            self.drop(call, error)
        finally:
            self.give_back(call.ticket)

    def drop(self, call: Call, error: Exception) -> None:
        """After a fault of ours: what is held for a call is booked as an estimate,
        so that no other call waits for it.
        """
        call.over = True
        charge = call.charge
        if charge is None or charge.over:
            self.guard.fault("functions", error, call.state.run.info.run, self.name)
        elif (
            isinstance(charge.rates, Rates)
            and self.settings.cost_of_result is None
            and self.settings.fixed_cost is None
        ):
            self.guard.fault("functions", error, call.state.run.info.run, self.name)
            try:
                self.guard.abandon(charge)
            except Exception as second:
                self.guard.close(charge, second)
        else:
            self.guard.close(charge, error)
        self.guard.faults.attempt("functions", self.give_back, call.ticket)

    def failed(
        self,
        call: Call,
        error: BaseException | None,
        chars: int = 0,
        *,
        streaming: bool = False,
        told: Reading | None = None,
        last: Any = None,
    ) -> None:
        """The call raised, was cancelled or was cut off: what it may have taken stands for it, marked. ``last``: the
        last piece that came.
        """
        if call.stacked and isinstance(error, RunStoppedError) and not chars:
            self.never_left(call)
        if call.over:
            return
        call.over = True
        try:
            status = provider_status(error) if isinstance(error, Exception) else None
            spared = status in _CALLERS_FAULT or not isinstance(error, Exception) or isinstance(error, RunStoppedError)
            self._report(call, None if spared else False)
            charge = call.charge
            if charge is None:
                return
            heard = tokens_in(chars)
            # its client made several requests, and the last one told nothing
            untold = told is not None and told.earlier and told.usage is None
            if told is not None and untold:
                told = replace(told, usage=Usage(input=max(usage.input for usage in told.earlier)))
            if told is not None and told.usage is not None:  # what was told before it broke is the least that it took
                more = heard > told.usage.output  # a stream may tell its prompt first and its output only at the end
                usage = replace(told.usage, output=heard) if more else told.usage
                usage, guessed = _with_input(usage, told, call.request)
                self._settle(call, told, usage, self.costs.of(told, usage, last), more or guessed or bool(untold))
            elif (
                not chars and call.request.rounds == 1 and was_unbilled(error)
            ):  # else requests before the refused one may have been answered
                self.guard.settle(charge, Usage(), free=True)
            elif (
                isinstance(charge.rates, Rates)
                and self.settings.cost_of_result is None
                and self.settings.fixed_cost is None
            ):
                self.guard.abandon(charge, heard, streaming=streaming)
            else:
                usage = Usage(input=call.request.input_tokens or 0, output=heard)
                nano = self.settings.fixed_cost if self.settings.fixed_cost is not None else self.costs.dearest[0]
                if (
                    not nano
                    and streaming
                    and chars
                    and self.settings.in_usd
                    and self.settings.policy.on_unpriced == "refuse"
                ):
                    self._untold(call, "usd")  # pieces came, so it was billed
                self.guard.settle(charge, usage, nano=nano or None, estimated=True)
        except Exception as fault:
            self.drop(call, fault)
        finally:
            self.give_back(call.ticket)

    def never_left(self, call: Call) -> None:
        """Leave was given, and the call was not made."""
        if call.over:
            return
        call.over = True
        attempt = self.guard.faults.attempt  # a fault in one step does not prevent the others
        if call.charge is not None:
            self.guard.release(call.charge)
            attempt("functions", self.guard.unspent, call.state.run.info.run)
        if call.permit is not None:
            attempt("functions", self.guard.breakers.release, self.name, call.permit)
        attempt("functions", self.give_back, call.ticket)

    def _tell_problems(self, problems: tuple[str, ...]) -> None:
        """Why a call is booked as an estimate although it gave an answer: each reason is logged once."""
        for problem in problems:
            if problem not in self._problems and len(self._problems) < _PROBLEMS_KEPT:
                self._problems.add(problem)
                _log.info("runguard.unreadable: the answer of '%s': %s", self.name, problem)

    def _report(self, call: Call, ok: bool | None) -> None:
        """How it ended, for the breaker; None: nothing that speaks for or against what was called."""
        breakers = self.guard.breakers
        if ok is None and call.permit is not None:
            breakers.release(self.name, call.permit)
        elif ok is not None and self.settings.breaker:
            breakers.report(self.name, call.permit or Permit(0), ok, self.guard.clock(), call.state.run.info.run)

    def _book(self, call: Call, told: Reading, result: Any, left_after: int | None) -> None:
        charge, settings = call.charge, self.settings
        if charge is None:
            return
        usage, guessed = told.usage, False
        untold: list[str] = []
        if left_after and usage is not None:
            usage = replace(usage, output=max(usage.output, tokens_in(left_after)))
        if usage is not None:
            usage, guessed = _with_input(usage, told, call.request)
        elif call.request.input_tokens is not None or told.size:
            usage, guessed = (
                Usage(
                    input=call.request.input_tokens or 0, output=tokens_in(told.size), audio=call.request.audio_tokens
                ),
                True,
            )
        nano = self.costs.of(told, usage, result)
        model = told.model or call.request.model
        priced = nano is not None or (
            usage is not None and isinstance(self.guard.accounts.rates_of(charge, model), Rates)
        )
        estimated = guessed and (nano is None or settings.in_tokens)
        if usage is None and settings.in_tokens:
            if self.costs.dearest[1]:
                usage, estimated = Usage(input=self.costs.dearest[1]), True
            else:
                untold.append("tokens")
        if not priced and settings.in_usd:
            if self.costs.dearest[0]:
                nano, estimated = self.costs.dearest[0], True
            elif settings.policy.on_unpriced == "refuse":
                untold.append("usd")
        self._settle(call, told, usage or Usage(), nano, estimated or left_after is not None)
        for unit in untold:
            self._untold(call, unit, model)
        booked = charge.booked
        if booked is not None and not estimated:
            self.costs.learn(booked.nano if priced else None, booked.input + booked.output)

    def _settle(self, call: Call, told: Reading, usage: Usage, nano: int | None, estimated: bool) -> None:
        charge = call.charge
        assert charge is not None
        model = told.model or call.request.model
        if not told.earlier:
            self.guard.settle(charge, usage, model, nano=nano, estimated=estimated)
            return
        # Several requests for one call: their sum is booked at once, and then the number of them.
        requests = [usage, *(_reckoned(one, usage, call.request.max_output_tokens) for one in told.earlier)]
        whole = Usage(*(sum(getattr(one, part.name) for one in requests) for part in dataclass_fields(Usage)))
        if nano is not None and self.settings.cost_of_tokens is not None:
            nano = self.costs.asked(self.settings.cost_of_tokens, whole.input, whole.output)
        elif nano is None and isinstance(rates := self.guard.accounts.rates_of(charge, model), Rates):
            nano, estimated = sum(rates.cost(one) for one in requests), estimated or rates.estimated
        estimated = estimated or any(not one.input for one in told.earlier)
        self.guard.settle(charge, whole, model, nano=nano, estimated=estimated)
        for _ in told.earlier:
            counted = replace(charge, hold=None, held=0, booked=None, over=False, number=0)
            self.guard.settle(self.guard.accounts.uncounted(counted), Usage(), model, nano=0)

    def _untold(self, call: Call, unit: str, model: str = "") -> None:
        """There is a limit and nothing tells what the call took: unknown is not zero, so it is the last one."""
        if not self._enforces:
            return
        what = "return its usage, for example {'tokens': …}"
        if unit == "usd":
            price = f", or prices={{{model!r}: {{'input': …, 'output': …}}}} (USD per million tokens)" if model else ""
            what = f"return {{'usd': …}}, give cost={price or ', or call a model whose price is known'}"
        about = f" and '{model}' has no known price" if unit == "usd" and model else ""
        finding = Finding(
            "unpriced",
            _STOP,
            1,
            0,
            f"call without {unit}",
            "run",
            "",
            self.name,
            f"'{self.name}' told no {unit}{about}: {what}",
        )
        self._stop(call.state, finding)

    def _stop(self, state: State, finding: Finding) -> Trip | None:
        run = state.run
        if run.stopped is not None:
            return run.stopped
        event = ModelCall(run.info.run, ROOT_LANE, self.name, self.guard.clock())
        return self.guard.stop(run, event, finding)

    def _watch(self, call: Call, told: Reading, result: Any) -> None:
        run, now = call.state.run, self.guard.clock()
        answers = self._answers(told, result)
        has_sign = self.settings.signature is not None or told.sig is not None
        progress = None if has_sign else call.state.progress  # the caller's own sign is the whole identity of a step
        with call.state.lock:
            if answers:
                self.guard.after(ToolResults(run.info.run, ROOT_LANE, self.name, now, "", answers))
            if progress is None or run.stopped is not None:
                return
            if not told.results:
                progress.answered(told.calls)
                return
            results = [(ToolResult(tool, value), args) for tool, args, value in told.results]
            finding = progress.observe(run.info.run, self.name, now, results)
            if finding is not None:
                self._stop(call.state, finding)

    def _answers(self, told: Reading, result: Any) -> list[Answer]:
        """What the call did, as the loop rule sees it: its signature, or the tools that the model wants called."""
        sig = told.sig
        if self.settings.signature is not None:
            try:
                sig = self.settings.signature(result)
            except Exception:
                _log.warning(
                    "runguard.signature_failed: signature raised for '%s'; the call is not looked at for loops",
                    self.name,
                    exc_info=True,
                )
                return []
            if sig is None:
                return []
        if sig is not None:
            call = call_fingerprint("", {"sig": sig})
            # What is no plain name may be content, which belongs in no trip, log or alert.
            name = sig if isinstance(sig, str) and _PLAIN_NAME.fullmatch(sig) else f"{self.name}#{call.hex()[:8]}"
            return [Answer(name, call, told.result)]
        if told.results:
            return [Answer(tool, self._call_id(tool, args), value, args=args) for tool, args, value in told.results]
        return [Answer(tool, self._call_id(tool, args)) for tool, args in told.calls]

    def _call_id(self, tool: str, args: Any) -> bytes:
        return call_fingerprint(tool, {} if self.settings.by == "name" else args)

    def flush(self, seconds: float = 2.0) -> bool:
        """Wait, bounded, until everything handed over has left, and what was dropped is booked."""
        return DROPPED.flush(seconds) and super().flush(seconds)

    # ---- more
    # ---------------------------------------------------------------------------------------------------------

    def extend(
        self, scope: str | None = None, *, usd: Any = None, tokens: Any = None, calls: Any = None
    ) -> list[BudgetStatus]:
        """Move the caps of a scope, or of the run in force, and let a run that they had stopped go on."""
        state = self.state()
        moved = self.guard.accounts.extend(scope or scopes_of(state.run.info)[0], usd, tokens, calls)
        for run in list(self.guard.runs.values()):
            if (
                run.stopped is not None
                and run.stopped.rule == "budget"
                and any(status.scope == run.stopped.scope_id for status in moved)
            ):
                run.lift()
        return moved


def _least(expected: tuple[int | None, int | None]) -> tuple[int, int]:
    usd, tokens = expected
    return usd or 0, tokens or 0


def _only_held(finding: Finding) -> bool:
    """Whether nothing but what others hold was in the way: that is no end of a budget."""
    told = finding.evidence[0] if finding.evidence else {}
    if "reserved" not in told:
        return False
    spent, reserved, wanted, limit = (Decimal(told[name]) for name in ("spent", "reserved", "wanted", "limit"))
    return reserved > 0 and spent < limit and (spent + wanted <= limit or wanted >= limit)


def _told(request: Request, result: Any) -> Reading:
    told = read(result)
    if request.rounds > 1:
        if request.untold:
            told.earlier = (Usage(),) * (request.rounds - 1)
        elif request.answered:  # rounds that were in the prompt
            told.earlier = told.earlier[: -request.answered]
    return told


def _with_input(usage: Usage, told: Reading, request: Request) -> tuple[Usage, bool]:
    """A usage that reports output and no input, with the input estimated; and whether it was."""
    if not told.lacks_input or request.input_tokens == 0:  # the user's own counter says so too
        return usage, False
    return replace(usage, input=request.input_tokens or 0, audio=request.audio_tokens), True


def _reckoned(one: Usage, last: Usage, most: int | None) -> Usage:
    """A request before the last one.

    What nobody told of it: the last prompt was the longest, and nothing of it need have been cached.
    """
    if one.input:
        return one
    output = max(one.output + last.thinking, last.output)
    return Usage(
        input=last.input, output=output if most is None else min(output, max(most, last.output)), audio=last.audio
    )
