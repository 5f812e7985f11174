"""One model call: permission before it is sent, and its bill after it.

``PaidCalls`` is the part of a ``Guard`` that adapters reserve, settle, release and abandon with. It counts what a call
took for its run, and writes it to the store.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from runguard.core.decision import ALLOW, Action, Decision, Finding, Money, Trip
from runguard.core.events import ROOT_LANE, ModelCall, ModelResult
from runguard.core.money import NOTHING, to_usd
from runguard.core.rules.limits import Deadline
from runguard.engine.budgets import Fired
from runguard.engine.charges import Charge, Denied, finding_of
from runguard.engine.context import Gate, GuardContext, GuardOptions
from runguard.engine.decide import burn_words, stop_in_force
from runguard.engine.resume import Pauses
from runguard.engine.runs import Lane, Run
from runguard.engine.spending import Earlier, Entry, record_of, usd_of
from runguard.ledger.ledger import StoreError, StoreOutage
from runguard.policy.settings import Policy
from runguard.pricing.rates import Usage
from runguard.reporting.telemetry import SpanCosts

# ---- What is found before a model call is sent

_WARN, _STOP = Action.WARN, Action.STOP


def stop_meanwhile(run: Run, lane: Lane) -> Trip | None:
    """Return a stop that came while a call waited. Not the limit on calls: this one was counted and is within it."""
    stopped = run.stopped or lane.stop_in_force()
    return None if stopped is not None and stopped.rule == "model_calls" else stopped


def surplus(event: ModelCall, at_once: int, limit: int) -> Finding:
    """Return the finding of more model calls at once than the policy allows."""
    about = f"agent {event.agent}"
    return Finding("fan_out", _STOP, at_once, limit, "model calls at once", "lane", "", "in flight", about)


def lowered(event: ModelCall, charge: Charge) -> Finding:
    """Return the finding that the answer was limited to what the rest of a budget can pay. Reported once per agent."""
    left, key = charge.max_output, f"lowered:{event.agent}"
    return Finding("budget", _WARN, left, left, "output tokens left", "lane", "", key, f"agent {event.agent}")


# ---- Model calls: permission before, the bill after


class PaidCalls(GuardContext):
    """The model calls of a guard: each waits for permission, and its charge is closed when it is over.

    Money comes first. A fault in anything else leaves no reservation behind and does not reach the caller.
    """

    pauses: Pauses

    def __init__(self, policy: Policy, options: GuardOptions, before: GuardContext | None = None) -> None:
        super().__init__(policy, options, before)
        self._spans = SpanCosts.opted_in() if policy.telemetry and policy.mode != "off" else None
        self._thresholds_reached = 0
        self.accounts.on_fired = self._threshold

    async def reserve(
        self, event: ModelCall, *, slot: bool = True, task: "asyncio.Task[Any] | None" = None
    ) -> Decision:
        """Wait for permission to make a model call. Await this right before the call.

        On permission ``event.charge`` is the account of the call: settle, release or abandon it. ``slot=False``: the
        call takes no slot of its own, because it runs inside of another call or outside of the agents. ``task``: the
        current one, where the caller knows it.
        """
        run = self.runs[event.run]
        lane = run.lanes.get(event.lane) or run.lanes[ROOT_LANE]
        task = (task or asyncio.current_task()) if slot else None
        decision, charge = ALLOW, None
        denied: Denied | None = None
        entered: tuple[Gate, ...] = ()
        run.waiting += 1
        try:
            if task is not None and not run.slots.take(task):
                decision = await self._wait_for_slot(run, lane, event, task)
                if decision.action is _STOP and decision.enforced:
                    return decision
            for gate in self.gates:
                if gate.busy and denied is None:
                    entered = (*entered, gate)
                    denied = await gate.enter(run, event, lambda: stop_meanwhile(run, lane) is not None)
                    if (stopped := stop_meanwhile(run, lane)) is not None:
                        self._leave(entered, event)
                        self._give_back(run, event, task)
                        return stop_in_force(stopped)
            # once the accounts of a call of this run were found: a cap function is not asked twice
            if denied is None and run.run_costs.lines:
                charge = self.accounts.open_now(run.run_costs, event)
            if charge is None and (denied is None or not self.enforces):
                charge, refused = await self.accounts.open(
                    run.run_costs, event, self.enforces, lambda: stop_meanwhile(run, lane) is not None
                )
                denied = denied or refused
        except BaseException:  # cancelled while it waited, or the ledger failed
            self._leave(entered, event)
            self._give_back(run, event, task)
            raise
        finally:
            run.waiting -= 1
        event.charge = charge
        try:
            late = None
            if run.deadline is not None and charge is not None and self.enforces:
                late = self._too_late(run.deadline, event)
            if charge is not None:
                charge.number, charge.journal = event.number, run.journal
            if charge is None or denied is not None or late is not None or charge.lowered:  # few calls
                decision = self._answer(run, lane, event, task, denied or late) or decision
            if entered:
                self._leave(entered, event, event.charge)
            return decision
        except BaseException:  # a fault of the guard: free what was reserved
            event.charge = None
            self._leave(entered, event)
            if charge is not None and not charge.over:
                self.release(charge)
                self.unspent(event.run, event)
            if task is not None:
                run.slots.give_back(task)
            raise

    def _too_late(self, deadline: Deadline, event: ModelCall) -> Finding | None:
        """Return the finding that the time of the run is over after the call has waited for money."""
        event.at = max(event.at, self.clock())
        return deadline.observe(event)

    def _answer(
        self, run: Run, lane: Lane, event: ModelCall, task: "asyncio.Task[Any] | None", why: Denied | Finding | None
    ) -> Decision:
        """Return what follows from the answer of the accounts, and from a time that was over when it came."""
        decide, charge = self.deciding.decide, event.charge
        if isinstance(why, Finding):
            event.charge = None
            self.accounts.release(charge)
            self._give_back(run, event, task)
            return decide(run, lane, event, why)
        if why is None:
            return decide(run, lane, event, lowered(event, charge))
        if charge is None:
            stopped = stop_meanwhile(run, lane)
            self._give_back(run, event, task, denied=stopped is None)
            if stopped is not None:
                return stop_in_force(stopped)
        return decide(run, lane, event, finding_of(why, event, self.accounts.ledger.name))

    def _give_back(self, run: Run, event: ModelCall, task: "asyncio.Task[Any] | None", *, denied: bool = False) -> None:
        if task is not None:
            run.slots.give_back(task)
        self.unspent(event.run, event, denied=denied)

    @staticmethod
    def _leave(entered: tuple[Gate, ...], event: ModelCall, charge: Charge | None = None) -> None:
        for gate in entered:
            gate.leave(event, charge)

    async def _wait_for_slot(self, run: Run, lane: Lane, event: ModelCall, task: "asyncio.Task[Any]") -> Decision:
        if self.policy.queues:
            if not self.enforces:
                return ALLOW
            await run.slots.wait(task)
            event.at = self.clock()
            stopped = stop_meanwhile(run, lane)
            late = None if stopped is not None or run.deadline is None else run.deadline.observe(event)
            if stopped is None and late is None:
                return ALLOW
            self._give_back(run, event, task)
            return self.deciding.decide(run, lane, event, late) if late is not None else stop_in_force(stopped)
        at_once = len(run.slots.holders) + 1
        if run.journal is not None:
            run.journal.add({"k": "surplus", "t": event.at, "l": event.lane, "a": event.agent, "at_once": at_once})
        decision = self.deciding.decide(run, lane, event, surplus(event, at_once, self.policy.in_flight))
        if decision.enforced:
            self.unspent(event.run, event)
        return decision

    def reserve_now(self, event: ModelCall, task: "asyncio.Task[Any] | None" = None) -> bool:
        """Reserve a call without waiting, where that is possible. False: await ``reserve``.

        ``task``: the current one, where the call takes a slot of its run.
        """
        for gate in self.gates:
            if gate.busy:
                return False
        run = self.runs[event.run]
        if task is not None and not run.slots.take(task):
            return False
        try:
            event.charge = charge = self.accounts.open_now(run.run_costs, event)
        except BaseException:
            if task is not None:
                self._give_back(run, event, task)
            raise
        if charge is None:
            return False
        charge.number, charge.journal = event.number, run.journal
        return True

    def context_limit(self, model: str, *, quiet: bool = False) -> int | None:
        """Return how many input tokens a request to a model may have, for ``ModelCall.context_limit``.

        None: not known, which is logged unless ``quiet``.
        """
        return self.accounts.expectations.context_limit(model, quiet=quiet)

    async def recover(
        self, where: str, error: Exception, run_id: str, agent: str, describe: Callable[[float], ModelCall]
    ) -> tuple[Decision, ModelCall | None]:
        """Answer after a fault of the guard that has left a model call without a hold.

        Under a budget, the call is reserved on the ledger alone, without rules; ``describe`` makes its event, given the
        time. If that is refused or fails, the call must not be made. After an outage of the store ``on_outage``
        decides, and without a budget ``on_guard_error``. Return the event where it has a charge: close it.
        """
        trip = self.faults.give_up(where, error, run_id, agent)
        if trip is not None:
            return Decision(_STOP, None, trip), None
        run = self.runs.get(run_id)
        if not self.must_hold(error, run):
            return ALLOW, None
        try:
            if run is None:
                raise LookupError(f"no run {run_id!r}")
            event = describe(self.faults.attempt("the clock", self.clock) or run.info.at)
            charge, denied = await self.accounts.open_plain(run.run_costs, event)
            if denied is not None:
                finding = finding_of(denied, event, self.accounts.ledger.name)
                return self.deciding.decide(run, run.lane(event.lane), event, finding), None
        except Exception as second:
            trip = self.faults.give_up(where, second, run_id, agent)
            return Decision(_STOP, None, trip or self.faults.refuse(where, second, run_id, agent)), None
        run.spend.model_calls += 1  # a reservation that failed has taken it back
        if charge is None:
            return ALLOW, None
        event.charge, charge.number, charge.journal = charge, event.number, run.journal
        return ALLOW, event

    def give_up_call(self, where: str, error: Exception, run_id: str = "", agent: str = "") -> Trip | None:
        """Return why a model call must not be made that cannot even be described or has no run. None: make it.

        Under a budget it is never made; else ``on_guard_error`` decides, and ``on_outage`` after an outage.
        """
        trip = self.faults.give_up(where, error, run_id, agent)
        if trip is None and self.must_hold(error, self.runs.get(run_id)):
            trip = self.faults.refuse(where, error, run_id, agent)
        return trip

    def must_hold(self, error: Exception | None = None, run: Run | None = None) -> bool:
        """Return whether a call without a hold would get past a budget. ``error``: a fault, which may be an outage."""
        if not self.enforces or isinstance(error, StoreError | StoreOutage):
            return False
        return self.accounts.has_budgets(run.info if run is not None else None)

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
            usage, estimated = self.accounts.expectations.guess(charge, 0, streaming=False), True
        run = self.runs.get(charge.run_costs.info.run)
        if run is not None and run.run_costs is not charge.run_costs:
            run = None
        earlier = None if charge.booked is None else (charge.booked, charge.entry)
        on_booked = None
        if run is not None:
            spend = run.spend
            if earlier is not None:
                spend.prompt_tokens -= earlier[0].input
                spend.output_tokens -= earlier[0].output
            spend.prompt_tokens += usage.input
            spend.output_tokens += usage.output
            if (usage.cached or run.reads_cache) and usage.input and not (estimated or free or charge.is_tool):
                run.reads_cache = True
                self.sink.tell("cached", run, charge, usage, model)
            if charge.possible_refusal is not None:
                on_booked = partial(self._look_back, run, charge)
        try:
            self.accounts.settle(charge, usage, model, nano, estimated, free, on_booked=on_booked)
        except Exception as error:
            self.close(charge, error, usage)
        if run is not None and self.sink.at["settled"]:
            self.sink.tell("settled", run, charge)
        try:
            if charge.on_over is not None:
                charge.on_over(charge, True)
            booked, spans = charge.booked, self._spans
            if spans is not None and booked is not None and not (booked.unpriced or charge.is_tool or charge.around):
                spans.settled(booked.nano, is_stated=nano is not None, is_estimated=bool(booked.estimated))
            if self.accounts.ledger.is_shared and charge.booked is not None and not charge.around:
                facts = {"nano": nano, "estimated": estimated, "free": free}
                self._record(run, charge, usage, model, facts, earlier)
        except Exception as error:
            self.faults.fault("settle", error, charge.run_costs.info.run)

    def release(self, charge: Charge) -> None:
        """Give back the reservation of a call that was never sent."""
        try:
            self.accounts.release(charge)
        except Exception as error:
            self.faults.fault("release", error, charge.run_costs.info.run)
        try:
            if charge.on_over is not None:
                charge.on_over(charge, False)
            run = self._run_of(charge)
            if run is not None and run.journal is not None:
                run.journal.add({"k": "back", "n": charge.number})
        except Exception as error:
            self.faults.fault("release", error, charge.run_costs.info.run)

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
            self.sink.tell("failed", charge, error)
        if refused and not streamed_tokens:
            self.settle(charge, Usage(), free=True)
            return
        try:
            usage = self.accounts.expectations.guess(charge, streamed_tokens, streaming)
        except Exception as error:
            self.close(charge, error)
            return
        self.settle(charge, usage, estimated=True)

    def close(self, charge: Charge, error: Exception, usage: Usage | None = None) -> None:
        """Close the account of a call after a fault of the guard.

        An estimate is booked, so that later calls do not wait for what this one holds.
        """
        self.faults.fault("settle", error, charge.run_costs.info.run)
        self.faults.attempt("settle", self.accounts.close, charge, usage)

    def _run_of(self, charge: Charge) -> Run | None:
        """Return the run that made a call, at work or paused; None when it has ended."""
        name = charge.run_costs.info.run
        run = self.runs.get(name) or self.pauses.find(name)
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
            self.accounts.ledger.tell(lambda session: session.append("call", charge.run_costs.info.run, text))
        journal = run.journal if run is not None else charge.journal
        if journal is not None and not charge.is_tool:  # ``ToolPrices`` writes those
            charge.number = charge.number or journal.number()  # not reserved before: it gets its number now
            journal.paid(charge.number, self.clock(), usage, model=model, usd=usd_of(charge.booked or Entry()), **facts)
            if run is None:
                journal.flush()

    def _look_back(self, run: Run, charge: Charge) -> None:
        """Decide whether a call that was made in shadow mode was as expensive as it had seemed."""
        possible_refusal = charge.possible_refusal
        kept = run.set_aside.held if run.set_aside is not None else NOTHING
        if possible_refusal is None or not self.accounts.has_come_true(possible_refusal, kept):
            return
        charge.possible_refusal = None
        event = ModelCall(run.info.run, charge.lane, charge.agent, self.clock(), charge.model)
        finding = finding_of(possible_refusal, event, self.accounts.ledger.name)
        if charge.is_tool:
            finding = replace(finding, action=Action.BLOCK, scope="call", tool=charge.tool)
        self.deciding.decide(run, run.lane(charge.lane), event, finding)

    def _threshold(self, charge: Charge, reached: Fired) -> None:
        """Report that a share of a budget is spent, or that it is spent too fast: call its callback, send an alert, and
        warn or nudge the run that spent it.
        """
        account, threshold, status, burn = reached.account, reached.threshold, reached.status, reached.burn
        if threshold.callback is not None:
            self.outbox.send(threshold.callback, status)
        if self.alarms is not None:
            self.alarms.threshold(reached) if burn is None else self.alarms.burning(reached, burn)
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
            detail = burn_words(account.scope, status, burn, self.clock())
        held = to_usd(account.due_usd - account.spent_usd)
        money = Money(reached.group.per.kind, account.scope, to_usd(account.spent_usd), held, account.ends)
        finding = Finding(
            "budget", action, status.spent, status.limit, status.unit, "run", "", key, detail, money=money
        )
        lane = run.lane(charge.lane)
        event = ModelResult(run.info.run, lane.key, charge.agent, self.clock())
        decision = self.deciding.decide(run, lane, event, finding)
        if decision.action is Action.NUDGE and decision.enforced:
            lane.notice = decision.for_model

    def unspent(self, run_id: str, event: ModelCall | None = None, *, denied: bool = False) -> None:
        """Do not count a model call that was allowed and then not made: it was refused, or a cache answered it.

        ``denied``: a budget refused it.
        """
        run = self.runs.get(run_id)
        if run is None:
            return
        run.spend.model_calls -= 1
        if run.journal is not None:
            run.journal.add({"k": "unspent", "n": event.number if event is not None else 0, "denied": denied})
        if run.model_calls is not None:
            run.model_calls.forget()

    def free_slot(self, run_id: str, task: "asyncio.Task[Any] | None" = None) -> None:
        """Give back the slot that ``reserve`` took for the current task, or for ``task``, if it took one."""
        run, holder = self.runs.get(run_id), task or asyncio.current_task()
        if run is not None and holder is not None:
            run.slots.give_back(holder)
