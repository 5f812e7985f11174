"""Permission for one model call: a slot among the calls in flight, and the call's worst case on every budget."""

import asyncio
from collections.abc import Callable
from typing import Any

from runguard.accounting.accounts import Accounts
from runguard.accounting.charges import Charge, Denied
from runguard.accounting.refusals import finding_of
from runguard.conductor.deciding import Deciding, stop_in_force
from runguard.conductor.last_answer import LastAnswers
from runguard.conductor.provider_waits import ProviderWaits
from runguard.conductor.runs import Lane, Run
from runguard.core.decision import ALLOW, Action, Decision, Finding, Trip
from runguard.core.events import ROOT_LANE, ModelCall
from runguard.core.rules.limits import Deadline
from runguard.policy.settings import Policy

_WARN, _STOP = Action.WARN, Action.STOP
_Task = asyncio.Task[Any]


class Reserving:
    """Gives permission for the model calls of one guard, or refuses it."""

    def __init__(
        self,
        policy: Policy,
        clock: Callable[[], float],
        runs: dict[str, Run],
        accounts: Accounts,
        deciding: Deciding,
        release: Callable[[Charge], None],
        last_answers: LastAnswers | None,
        provider: ProviderWaits,
    ) -> None:
        self._policy, self._clock, self._runs, self._accounts = policy, clock, runs, accounts
        self._deciding, self._enforces, self._release = deciding, deciding.enforces, release
        self._last_answers, self._provider = last_answers, provider

    def reserve_now(self, event: ModelCall) -> bool:
        """Permission without a slot and without waiting, where that is possible. False: await ``reserve``."""
        if self._last_answers is not None or self._provider.gates:
            return False
        run = self._runs[event.run]
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
                self._release(charge)
                self.unspent(event.run, event)
            if task is not None:
                run.slots.give_back(task)
            raise

    def _send_probe(self, event: ModelCall) -> None:
        if event.charge is None:
            self._provider.not_made(event)
        else:
            event.charge.is_probe = True

    def free_slot(self, run_id: str, task: _Task | None = None) -> None:
        """Give back the slot that ``reserve`` took. ``task``: the one that awaited ``reserve``, by default the current
        one. Without a slot nothing happens.
        """
        run, holder = self._runs.get(run_id), task or asyncio.current_task()
        if run is not None and holder is not None:
            run.slots.give_back(holder)

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
