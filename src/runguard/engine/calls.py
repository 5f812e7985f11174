"""Model calls: permission before one is sent, the bill after it, and the waits in between.

``engine/guard`` offers ``Reserving`` and ``Settling`` to adapters, and ``engine/tools`` settles prices of tools with
the latter. Calls wait for room in a budget (``RunWaits``), or because their provider asks for it (``ProviderWaits``).
"""

import asyncio
import json
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from runguard.core.decision import ALLOW, Action, Decision, Finding, Money, Trip
from runguard.core.events import ROOT_LANE, ModelCall, ModelResult
from runguard.core.money import NOTHING, UNITS, edge, to_usd
from runguard.core.outcomes import provider_status
from runguard.core.rules.limits import Deadline
from runguard.engine.budget_notice import BudgetNotices
from runguard.engine.charges import Charge, Denied, Entry, Fired, finding_of
from runguard.engine.decide import GuardContext, burn_words, stop_in_force
from runguard.engine.downgrade import CacheWatch
from runguard.engine.final_answer import LastAnswers
from runguard.engine.money import StepOut
from runguard.engine.resubmissions import Resubmissions
from runguard.engine.resume import Pauses
from runguard.engine.runs import Lane, Run
from runguard.engine.spending import Earlier, record_of, usd_of
from runguard.engine.waiting import Opening, Visit
from runguard.ledger.ledger import StoreError, StoreOutage
from runguard.pricing.rates import Usage, normalise
from runguard.providers.errors import retry_after
from runguard.reporting.telemetry import SpanCosts

# ---- Permission for one model call: a slot among the calls in flight, and its worst case on every budget

_log: Final = logging.getLogger("runguard")
_WARN, _STOP = Action.WARN, Action.STOP
_Task = asyncio.Task[Any]


class Reserving:
    """Gives permission for the model calls of one guard, or refuses it."""

    def __init__(
        self,
        context: GuardContext,
        settling: "Settling",
        provider: "ProviderWaits",
        last_answers: LastAnswers | None,
        resubmissions: Resubmissions,
    ) -> None:
        self._policy, self._clock, self._runs = context.policy, context.clock, context.runs
        self._accounts, self._deciding, self._faults = context.accounts, context.deciding, context.faults
        self._enforces, self._settling, self._provider = context.enforces, settling, provider
        self._last_answers, self._resubmissions = last_answers, resubmissions

    def reserve_now(self, event: ModelCall) -> bool:
        """Permission without a slot and without waiting, where that is possible. False: await ``reserve``."""
        if self._last_answers is not None or self._provider.gates:
            return False
        run = self._runs[event.run]
        if run.awaits_input:
            return False
        event.charge = charge = self._accounts.open_now(run.run_costs, event)
        if charge is not None:
            charge.number, charge.journal = event.number, run.journal
        return charge is not None

    async def reserve(self, event: ModelCall, *, slot: bool = True, task: _Task | None = None) -> Decision:
        """Wait for permission to make a model call. Await this right before the call.

        On permission ``event.charge`` is the account of the call: settle, release or abandon it. ``slot=False``: the
        call takes no slot of its own, because it runs inside of another call or outside of the agents. ``task``: the
        current one, where the caller knows it.
        """
        run = self._runs[event.run]
        lane = run.lanes.get(event.lane) or run.lanes[ROOT_LANE]
        task = (task or asyncio.current_task()) if slot else None
        decision, is_probe = ALLOW, False
        run.waiting += 1
        try:
            if run.awaits_input and (known := await self._resubmissions.recall(run)) is not None:
                self._give_back(run, event, task)
                return stop_in_force(known)
            if task is not None and not run.slots.take(task):
                decision = await self._wait_for_slot(run, lane, event, task)
                if decision.action is _STOP and decision.enforced:
                    return decision
            if self._provider.gates:
                is_probe = await self._provider.enter(run, event, lambda: _stop_meanwhile(run, lane) is not None)
                event.at = max(event.at, self._clock())
                if not is_probe and (stopped := _stop_meanwhile(run, lane)) is not None:
                    self._give_back(run, event, task)
                    return stop_in_force(stopped)
            denied = None
            if self._last_answers is not None:
                denied = await self._last_answers.hold(run, event, lambda: _stop_meanwhile(run, lane) is not None)
            # once the accounts of a call of this run were found: a cap function is not asked twice
            is_known = denied is None and bool(run.run_costs.lines)
            charge = self._accounts.open_now(run.run_costs, event) if is_known else None
            if charge is None and (denied is None or not self._enforces):
                charge, refused = await self._accounts.open(
                    run.run_costs, event, self._enforces, lambda: _stop_meanwhile(run, lane) is not None
                )
                denied = denied or refused
        except BaseException:  # cancelled while it waited, or the ledger failed
            if is_probe:
                self._provider.not_made(event)
            self._give_back(run, event, task)
            raise
        finally:
            run.waiting -= 1
        event.charge = charge
        try:
            late = None
            if run.deadline is not None and charge is not None and self._enforces:
                late = self._too_late(run.deadline, event)
            is_plain = charge is not None and denied is None and late is None and not charge.lowered  # most calls
            if charge is not None:
                charge.number, charge.journal = event.number, run.journal
            if not is_plain:
                decision = self._answer(run, lane, event, task, charge, denied, late, decision)
            if is_probe:
                self._send_probe(event)
            return decision
        except BaseException:  # a fault of the guard: free what was reserved
            event.charge = None
            if is_probe:
                self._provider.not_made(event)
            if charge is not None and not charge.over:
                self._settling.release(charge)
                self.unspent(event.run, event)
            if task is not None:
                run.slots.give_back(task)
            raise

    async def recover(
        self, where: str, error: Exception, run_id: str, agent: str, describe: Callable[[float], ModelCall]
    ) -> tuple[Decision, ModelCall | None]:
        """Answer for a model call that a fault of the guard has left without a hold.

        Under a budget, the call is reserved on the ledger alone, without rules; ``describe`` makes its event, given the
        time. If that is refused or fails, the call must not be made. After an outage of the store ``on_outage``
        decides, and without a budget ``on_guard_error``. Returns the event where it has a charge.
        """
        trip = self._faults.give_up(where, error, run_id, agent)
        if trip is not None:
            return Decision(_STOP, None, trip), None
        run = self._runs.get(run_id)
        if not self.must_hold(error, run):
            return ALLOW, None
        try:
            if run is None:
                raise LookupError(f"no run {run_id!r}")
            event = describe(self._faults.attempt("the clock", self._clock) or run.info.at)
            charge, denied = await self._accounts.open_plain(run.run_costs, event)
            if denied is not None:
                finding = finding_of(denied, event, self._accounts.ledger.name)
                return self._deciding.decide(run, run.lane(event.lane), event, finding), None
        except Exception as second:
            trip = self._faults.give_up(where, second, run_id, agent)
            return Decision(_STOP, None, trip or self._faults.refuse(where, second, run_id, agent)), None
        run.spend.model_calls += 1  # a reservation that failed has taken it back
        if charge is None:
            return ALLOW, None
        event.charge, charge.number, charge.journal = charge, event.number, run.journal
        return ALLOW, event

    def give_up_call(self, where: str, error: Exception, run_id: str = "", agent: str = "") -> Trip | None:
        """Return why a model call must not be made that cannot even be described or has no run. None: make it.

        Under a budget it is never made; else ``on_guard_error`` decides, and ``on_outage`` after an outage.
        """
        trip = self._faults.give_up(where, error, run_id, agent)
        if trip is None and self.must_hold(error, self._runs.get(run_id)):
            trip = self._faults.refuse(where, error, run_id, agent)
        return trip

    def must_hold(self, error: Exception | None = None, run: Run | None = None) -> bool:
        """Return whether a call without a hold would get past a budget. ``error``: a fault, which may be an outage."""
        if not self._enforces or _is_outage(error):
            return False
        return self._accounts.has_budgets(run.info if run is not None else None)

    def _send_probe(self, event: ModelCall) -> None:
        if event.charge is None:
            self._provider.not_made(event)
        else:
            event.charge.is_probe = True

    def unspent(self, run_id: str, event: ModelCall | None = None, *, denied: bool = False) -> None:
        """Do not count a model call that was allowed and then not made: it was refused, or a cache answered it.

        ``denied``: a budget refused it.
        """
        run = self._runs.get(run_id)
        if run is None:
            return
        run.spend.model_calls -= 1
        if run.journal is not None:
            run.journal.add({"k": "unspent", "n": event.number if event is not None else 0, "denied": denied})
        if run.model_calls is not None:
            run.model_calls.forget()

    def _give_back(self, run: Run, event: ModelCall, task: _Task | None, *, denied: bool = False) -> None:
        if task is not None:
            run.slots.give_back(task)
        self.unspent(event.run, event, denied=denied)

    def _answer(
        self,
        run: Run,
        lane: Lane,
        event: ModelCall,
        task: _Task | None,
        charge: Charge | None,
        denied: Denied | None,
        late: Finding | None,
        decision: Decision,
    ) -> Decision:
        """What follows from the answer of the accounts, and from a time that was over when it came."""
        decide = self._deciding.decide
        if charge is not None and late is not None:
            event.charge = None
            self._accounts.release(charge)
            self._give_back(run, event, task)
            return decide(run, lane, event, late)
        if denied is None:
            if charge is not None and charge.lowered:
                return decide(run, lane, event, lowered(event, charge)) or decision
            return decision
        if charge is None:
            stopped = _stop_meanwhile(run, lane)
            self._give_back(run, event, task, denied=stopped is None)
            if stopped is not None:
                return stop_in_force(stopped)
        return decide(run, lane, event, finding_of(denied, event, self._accounts.ledger.name))

    def _too_late(self, deadline: Deadline, event: ModelCall) -> Finding | None:
        """Whether the time of the run is over after the call has waited for money."""
        event.at = max(event.at, self._clock())
        return deadline.observe(event)

    async def _wait_for_slot(self, run: Run, lane: Lane, event: ModelCall, task: _Task) -> Decision:
        if self._policy.queues:
            if not self._enforces:
                return ALLOW
            await run.slots.wait(task)
            event.at = self._clock()
            stopped = _stop_meanwhile(run, lane)
            late = None if stopped is not None or run.deadline is None else run.deadline.observe(event)
            if stopped is None and late is None:
                return ALLOW
            self._give_back(run, event, task)
            return self._deciding.decide(run, lane, event, late) if late is not None else stop_in_force(stopped)
        at_once = len(run.slots) + 1
        if run.journal is not None:
            entry = {"k": "surplus", "t": event.at, "l": event.lane, "a": event.agent, "at_once": at_once}
            run.journal.add(entry)
        decision = self._deciding.decide(run, lane, event, surplus(event, at_once, run.slots.limit))
        if decision.enforced:
            self.unspent(event.run, event)
        return decision


def _is_outage(error: Exception | None) -> bool:
    return isinstance(error, StoreError | StoreOutage)


def _stop_meanwhile(run: Run, lane: Lane) -> Trip | None:
    """A stop that came while a call waited. Not the limit on calls: this one was counted and is within it."""
    stopped = run.stopped or lane.stop_in_force()
    return None if stopped is not None and stopped.rule == "model_calls" else stopped


def surplus(event: ModelCall, at_once: int, limit: int) -> Finding:
    """More model calls at once than the policy allows."""
    about = f"agent {event.agent}"
    return Finding("fan_out", _STOP, at_once, limit, "model calls at once", "lane", "", "in flight", about)


def lowered(event: ModelCall, charge: Charge) -> Finding:
    """The limit on the answer was lowered to what the rest of a budget can pay. Reported once per agent."""
    left, key = charge.max_output, f"lowered:{event.agent}"
    return Finding("budget", _WARN, left, left, "output tokens left", "lane", "", key, f"agent {event.agent}")


# ---- What a model call took: booked on the budgets, counted for the run, written to the store


class Settling:
    """Closes the charges of one guard.

    Money comes first. A fault in anything else leaves no reservation behind and does not reach the caller.
    """

    def __init__(
        self,
        context: GuardContext,
        pauses: Pauses,
        cache_watch: CacheWatch,
        provider: "ProviderWaits",
    ) -> None:
        policy = context.policy
        self._clock, self._accounts, self._runs, self._pauses = context.clock, context.accounts, context.runs, pauses
        self._deciding, self._faults, self._outbox = context.deciding, context.faults, context.outbox
        self._alarms, self._cache_watch, self._provider = context.alarms, cache_watch, provider
        self._notices = BudgetNotices(policy.notice_shares) if policy.notice_shares and context.enforces else None
        self._spans = SpanCosts.opted_in() if policy.telemetry and policy.mode != "off" else None
        self._thresholds_reached = 0

    def settle(
        self,
        charge: Charge,
        usage: Usage,
        model: str = "",
        *,
        nano: int | None = None,
        estimated: bool = False,
        free: bool = False,
    ) -> None:
        """Book what a call took, and fire the thresholds that it reaches.

        A later figure for the same call replaces the earlier one. ``nano``: its cost in nano-USD, where the caller
        knows it. ``estimated``: flag the figures as an estimate. ``free``: it cost nothing. A usage that cannot be true
        is replaced by an estimate.
        """
        if not usage.is_possible:
            usage, estimated = self._accounts.expectations.guess(charge, 0, streaming=False), True
        before, run = charge.booked, self._runs.get(charge.run_costs.info.run)
        if run is not None and run.run_costs is not charge.run_costs:
            run = None
        earlier = None
        if before is not None:
            earlier = (before, charge.entry)
            if run is not None:
                run.spend.prompt_tokens -= before.input
                run.spend.output_tokens -= before.output
        if run is not None:
            spend = run.spend
            spend.prompt_tokens += usage.input
            spend.output_tokens += usage.output
            if (usage.cached or run.caches is not None) and not estimated and not free:
                self._faults.attempt("settle", self._cache_watch.settled, run, charge, usage, model)
        accounts, on_fired, on_booked = self._accounts, self._threshold, None
        if charge.possible_refusal is not None and run is not None:
            on_booked = partial(self._look_back, run, charge)
        try:
            accounts.settle(charge, usage, model, nano, estimated, free, on_fired=on_fired, on_booked=on_booked)
        except Exception as error:
            self.close(charge, error, usage)
        if self._notices is not None and run is not None and not charge.is_tool:
            self._faults.attempt("settle", self._notices.settled, run, charge)
        try:
            if charge.is_probe:
                self._provider.ended(charge, is_success=True)
            if self._spans is not None and charge.booked is not None:
                self._report_on_span(self._spans, charge, nano)
            if accounts.ledger.is_shared and charge.booked is not None and not charge.around:
                facts = {"nano": nano, "estimated": estimated, "free": free}
                self._record(run, charge, usage, model, facts, earlier)
        except Exception as error:
            self._faults.fault("settle", error, charge.run_costs.info.run)

    @staticmethod
    def _report_on_span(spans: SpanCosts, charge: Charge, stated: int | None) -> None:
        booked = charge.booked
        if booked is not None and not booked.unpriced and not charge.is_tool and not charge.around:
            spans.settled(booked.nano, is_stated=stated is not None, is_estimated=bool(booked.estimated))

    def release(self, charge: Charge) -> None:
        """Give back the reservation of a call that was never sent."""
        try:
            self._accounts.release(charge)
        except Exception as error:
            self._faults.fault("release", error, charge.run_costs.info.run)
        try:
            if charge.is_probe:
                self._provider.ended(charge, is_success=False)
            run = self._run_of(charge)
            if run is not None and run.journal is not None:
                run.journal.add({"k": "back", "n": charge.number})
        except Exception as error:
            self._faults.fault("release", error, charge.run_costs.info.run)

    def failed(self, charge: Charge, error: BaseException | None) -> None:
        """A call raised: find out whether its provider asks to wait. Then ``abandon`` or ``settle`` it."""
        try:
            self._provider.failed(charge, error)
        except Exception as fault:
            self._faults.fault("settle", fault, charge.run_costs.info.run)

    def abandon(
        self,
        charge: Charge,
        streamed_tokens: int = 0,
        *,
        streaming: bool = False,
        refused: bool = False,
        error: BaseException | None = None,
    ) -> None:
        """Book an estimate for a call that was sent and ended without reporting its usage.

        ``refused``: the provider refused it or could not be reached, so it cost nothing. It still counts as a call.
        ``error``: what it raised. It may say that the provider asks to wait.
        """
        if charge.over:
            return
        if error is not None:
            self.failed(charge, error)
        if refused and not streamed_tokens:
            self.settle(charge, Usage(), free=True)
            return
        try:
            usage = self._accounts.expectations.guess(charge, streamed_tokens, streaming)
        except Exception as error:
            self.close(charge, error)
            return
        self.settle(charge, usage, estimated=True)

    def close(self, charge: Charge, error: Exception, usage: Usage | None = None) -> None:
        """Close the account of a call after a fault of the guard.

        An estimate is booked, so that later calls do not wait for what this one holds.
        """
        self._faults.fault("settle", error, charge.run_costs.info.run)
        self._faults.attempt("settle", self._accounts.close, charge, usage)

    def _run_of(self, charge: Charge) -> Run | None:
        """The run that made a call, at work or paused. None when it has ended."""
        name = charge.run_costs.info.run
        run = self._runs.get(name) or self._pauses.find(name)
        return run if run is not None and run.run_costs is charge.run_costs else None

    def _record(
        self,
        run: Run | None,
        charge: Charge,
        usage: Usage,
        model: str,
        facts: dict[str, Any],
        earlier: Earlier | None,
    ) -> None:
        """Write a call to the store, and to the journal of its run."""
        if charge.hold is None:  # on no budget: a settlement has written the record of every other call
            text = json.dumps(record_of(charge, earlier))
            self._accounts.ledger.tell(lambda session: session.append("call", charge.run_costs.info.run, text))
        journal = run.journal if run is not None else charge.journal
        if journal is not None and not charge.is_tool:  # ``ToolPrices`` writes those
            charge.number = charge.number or journal.number()  # not reserved before: it gets its number now
            journal.paid(
                charge.number, self._clock(), usage, model=model, usd=usd_of(charge.booked or Entry()), **facts
            )
            if run is None:
                journal.flush()

    def _look_back(self, run: Run, charge: Charge) -> None:
        """In shadow mode a call that seemed too expensive was made. Decide now whether it was."""
        possible_refusal = charge.possible_refusal
        kept = run.closing.held if run.closing is not None else NOTHING
        if possible_refusal is None or not self._accounts.has_come_true(possible_refusal, kept):
            return
        charge.possible_refusal = None
        event = ModelCall(run.info.run, charge.lane, charge.agent, self._clock(), charge.model)
        finding = finding_of(possible_refusal, event, self._accounts.ledger.name)
        if charge.is_tool:
            finding = replace(finding, action=Action.BLOCK, scope="call", tool=charge.tool)
        self._deciding.decide(run, run.lane(charge.lane), event, finding)

    def _threshold(self, charge: Charge, reached: Fired) -> None:
        """A share of a budget is spent, or it is spent too fast: call its callback, send an alert, and warn or nudge
        the run that spent it.
        """
        account, threshold, status, burn = reached.account, reached.threshold, reached.status, reached.burn
        if threshold.callback is not None:
            self._outbox.send(threshold.callback, status)
        if self._alarms is not None:
            self._alarms.threshold(reached) if burn is None else self._alarms.burning(reached, burn)
        run = self._run_of(charge)
        if run is None:
            return
        self._thresholds_reached += 1
        action = Action.NUDGE if threshold.action == "nudge" else Action.WARN
        again = self._thresholds_reached if threshold.recurring else ""
        key = f"{account.key}:{account.granted}:{threshold.percent}:{threshold.action}:{again}"
        detail = (
            f"{threshold.percent:.0%} of the budget of {account.scope} is spent: {status.spent} of {status.limit} "
            f"{status.unit}"
        )
        if burn is not None:
            key = f"{account.key}:{account.granted}:burn"
            detail = burn_words(account.scope, status, burn, self._clock())
        held = to_usd(account.due_usd - account.spent_usd)
        money = Money(reached.group.per.kind, account.scope, to_usd(account.spent_usd), held, account.ends)
        finding = Finding(
            "budget", action, status.spent, status.limit, status.unit, "run", "", key, detail, money=money
        )
        lane = run.lane(charge.lane)
        event = ModelResult(run.info.run, lane.key, charge.agent, self._clock())
        decision = self._deciding.decide(run, lane, event, finding)
        if decision.action is Action.NUDGE and decision.enforced:
            lane.notice = decision.for_model


# ---- Calls that wait for room in a budget: how long they may wait, and the report of it


class RunWaits:
    """The waiting calls of the runs of one guard. Listens to the accounts. A fault here ends no wait and no run."""

    def __init__(self, context: GuardContext) -> None:
        self._clock, self._runs = context.clock, context.runs
        self._deciding, self._faults = context.deciding, context.faults
        context.accounts.waits.listener = self
        self.waited_s = 0.0  # of all calls, or what they would have waited in shadow mode
        self.calls = 0

    def seconds_left(self, charge: Charge) -> float:
        run = self._runs.get(charge.run_costs.info.run)
        return self.left_of(run) if run is not None else math.inf

    def left_of(self, run: Run) -> float:
        """The time until the deadline of a run."""
        if run.deadline is None:
            return math.inf
        return run.deadline.started + run.deadline.seconds - self._clock()

    def began(self, visit: Visit) -> None:
        run = self._runs.get(visit.charge.run_costs.info.run)
        if run is not None:
            run.visits[visit] = None
            if visit.opening is not None:
                self._faults.attempt("reporting a wait", self._report, run, visit.charge, visit.opening, "waits")

    def ended(self, visit: Visit, seconds: float) -> None:
        charge, opening = visit.charge, visit.opening
        run = self._runs.get(charge.run_costs.info.run)
        if run is not None:
            run.visits.pop(visit, None)
        self.note(charge.agent, seconds, opening.text if opening is not None else "its turn")

    def note(self, agent: str, seconds: float, what: str, verb: str = "waited") -> None:
        """Count and log a call that has waited."""
        self.calls, self.waited_s = self.calls + 1, self.waited_s + seconds
        _log.info("runguard.waited: a call of agent '%s' %s %.1f s for %s", agent, verb, seconds, what)

    def skipped(self, charge: Charge, opening: Opening) -> None:
        self.calls, self.waited_s = self.calls + 1, self.waited_s + opening.seconds
        run = self._runs.get(charge.run_costs.info.run)
        if run is not None:
            self._faults.attempt("reporting a wait", self._report, run, charge, opening, "would wait")

    def _report(self, run: Run, charge: Charge, opening: Opening, verb: str) -> None:
        """Once per run and account."""
        account, unit = opening.account, opening.unit
        detail = f"a call {verb} up to {opening.seconds:.0f} s for {opening.text}"
        spent, held = to_usd(account.spent_usd), to_usd(account.due_usd - account.spent_usd)
        money = Money(account.scope.partition(":")[0], account.scope, spent, held, account.ends)
        observed, limit = edge(unit, account.spent[unit]), edge(unit, account.caps[unit])
        facts = (observed, limit, UNITS[unit], "run", "", f"wait:{account.meter}", detail)
        finding = Finding("budget", Action.WARN, *facts, money=money)
        lane = run.lane(charge.lane)
        event = ModelCall(run.info.run, lane.key, charge.agent, self._clock(), charge.model)
        self._deciding.decide(run, lane, event, finding)


# ---- A provider that asks to wait: calls to that model wait in this process, and one probe goes first

_LOOKS_S: Final = 1.0
_MODELS_KEPT: Final = 1_000


class ProviderVisit:
    """One call that waits for a provider."""

    __slots__ = ("_loop", "_woken", "scope", "until")

    def __init__(self, model: str) -> None:
        self.scope = f"provider:{model}"
        self.until: float | None = None
        self._loop = asyncio.get_running_loop()
        self._woken: asyncio.Future[None] = self._loop.create_future()

    async def sleep(self, seconds: float) -> None:
        if self._woken.done():
            self._woken = self._loop.create_future()
        await asyncio.wait((self._woken,), timeout=seconds)

    def wake(self) -> None:
        """Look now. From any thread."""
        try:
            self._loop.call_soon_threadsafe(self._resolve)
        except RuntimeError:  # its loop is closed: nothing waits there any more
            return

    def _resolve(self) -> None:
        if not self._woken.done():
            self._woken.set_result(None)


class _Gate:
    """One model that asked to wait."""

    __slots__ = ("is_probed", "until", "waiting")

    def __init__(self) -> None:
        self.until = 0.0
        self.is_probed = False  # the probe is on its way
        self.waiting: dict[ProviderVisit, None] = {}  # in the order of arrival


class ProviderWaits:
    """The models that asked one guard's calls to wait. Empty, it costs nothing.

    ::

        free ──429 with Retry-After──▶ waiting ──time is over──▶ one probe ──it succeeds──▶ free
                                          ▲                          │
                                          └──── 429 again ───────────┘

    A call that has waited for ``max_wait_seconds``, or that would have to wait longer, is made at once. The provider
    then answers or refuses it.
    """

    def __init__(self, context: GuardContext, waits: RunWaits) -> None:
        self._patience, self._waits = context.policy.max_wait_seconds, waits
        self._is_on, self._enforces = context.policy.waits_for_provider, context.enforces
        self.now: Callable[[], float] = time.monotonic
        self.gates: dict[str, _Gate] = {}
        self._lock = threading.Lock()
        context.keep(self)

    def share(self, other: "ProviderWaits") -> None:
        """Wait for the same models as another guard."""
        self.gates, self._lock, self.now = other.gates, other._lock, other.now

    def seconds_left(self) -> dict[str, float]:
        """By model, for those who look in."""
        now = self.now()
        return {model: round(max(gate.until - now, 0.0), 3) for model, gate in list(self.gates.items())}

    async def enter(self, run: Run, event: ModelCall, stopped: Callable[[], bool]) -> bool:
        """Wait while the provider of a call asks for it. Return whether the call is the probe."""
        model = _gate_key(event)
        gate = self.gates.get(model)
        if gate is None or event.no_wait or event.is_tool:
            return False
        if not self._enforces:
            if (seconds := gate.until - self.now()) > 0:
                what = f"the provider of '{model}', which asked to wait"
                self._waits.note(event.agent, seconds, what, "would have waited")
            return False
        if event.no_loop:
            await StepOut()
        visit, began = ProviderVisit(model), asyncio.get_running_loop().time()
        try:
            while not stopped():
                left = began + self._patience - asyncio.get_running_loop().time()
                left = min(left, self._waits.left_of(run))
                with self._lock:
                    gate = self.gates.get(model)
                    seconds = gate.until - self.now() if gate is not None else 0.0
                    if gate is None or left <= 0 or seconds > left:
                        return False
                    is_next = not gate.is_probed and next(iter(gate.waiting), visit) is visit
                    if seconds <= 0 and is_next:
                        gate.is_probed = True
                        return True
                    gate.waiting[visit] = None
                run.visits[visit] = None
                await visit.sleep(min(left, _LOOKS_S if seconds <= 0 else min(seconds, _LOOKS_S)))
            return False
        finally:
            self._leave(model, visit)
            if run.visits.pop(visit, visit) is None:
                waited = asyncio.get_running_loop().time() - began
                self._waits.note(event.agent, waited, f"the provider of '{model}', which asked to wait")

    def failed(self, charge: Charge, error: BaseException | None) -> None:
        """A call raised. Find out whether the provider asks to wait."""
        seconds = retry_after(error) if self._is_on else None
        if seconds is None:
            if charge.is_probe and _says_nothing(error):
                self.ended(charge, is_success=False)
            return
        model, was_probe, charge.is_probe = _gate_key(charge), charge.is_probe, False
        with self._lock:
            if model not in self.gates and len(self.gates) >= _MODELS_KEPT:
                return
            gate, now = self.gates.setdefault(model, _Gate()), self.now()
            is_new = gate.until <= now
            gate.until = max(gate.until, now + seconds)
            if was_probe:
                gate.is_probed = False
        if is_new:
            waits = "its calls wait here, then one goes first" if self._enforces else "enforcing, its calls would wait"
            _log.warning("runguard.provider_busy: '%s' asks to wait %.1f s: %s", model, seconds, waits)

    def ended(self, charge: Charge, *, is_success: bool) -> None:
        """The probe has come back: free the model, or let another call try."""
        charge.is_probe = False
        self._come_back(_gate_key(charge), is_success)

    def not_made(self, event: ModelCall) -> None:
        """The call that was to be the probe is not made: another call tries."""
        self._come_back(_gate_key(event), False)

    def _come_back(self, model: str, is_success: bool) -> None:
        with self._lock:
            gate = self.gates.get(model)
            if gate is None:
                return
            gate.is_probed = False
            if is_success:
                del self.gates[model]
            woken = list(gate.waiting) if is_success else list(gate.waiting)[:1]
        for visit in woken:
            visit.wake()

    def _leave(self, model: str, visit: ProviderVisit) -> None:
        with self._lock:
            gate = self.gates.get(model)
            if gate is None or gate.waiting.pop(visit, visit) is not None:
                return
            first = next(iter(gate.waiting), None)
        if first is not None:
            first.wake()


def _gate_key(call: ModelCall | Charge) -> str:
    """The model, or the callable where its model is unknown."""
    return normalise(call.model) if call.model else call.agent


def _says_nothing(error: BaseException | None) -> bool:
    """Whether a failure leaves open if the provider takes calls again: it was cancelled, lost, or is overloaded."""
    status = provider_status(error) if isinstance(error, Exception) else None
    return status is None or status == 429 or status >= 500
