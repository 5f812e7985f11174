"""What a model call took: booked on the budgets, counted for the run, written to the store.

Money comes first. A fault in anything else leaves no reservation behind and does not reach the caller.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from runguard.accounting.accounts import Accounts
from runguard.accounting.charges import Charge, Fired
from runguard.accounting.figures import Entry
from runguard.accounting.refusals import finding_of
from runguard.accounting.spending import Earlier, record_of, usd_of
from runguard.conductor.cached_prompts import CacheWatch
from runguard.conductor.deciding import Deciding
from runguard.conductor.own_faults import OwnFaults
from runguard.conductor.provider_waits import ProviderWaits
from runguard.conductor.runs import Run
from runguard.core.decision import Action, Finding, Money
from runguard.core.events import ModelCall, ModelResult
from runguard.core.money import NOTHING, to_usd
from runguard.outlets.alarms import Alarms, burn_words
from runguard.outlets.callbacks import Outbox
from runguard.outlets.span_cost import SpanCosts
from runguard.pricing.rates import Usage


class Settling:
    """Closes the charges of one guard. ``find_paused`` finds a run that is paused."""

    def __init__(
        self,
        clock: Callable[[], float],
        accounts: Accounts,
        runs: dict[str, Run],
        find_paused: Callable[[str], Run | None],
        deciding: Deciding,
        faults: OwnFaults,
        outbox: Outbox,
        alarms: Alarms | None,
        cache_watch: CacheWatch,
        spans: SpanCosts | None,
        provider: ProviderWaits,
    ) -> None:
        self._clock, self._accounts, self._runs, self._find_paused = clock, accounts, runs, find_paused
        self._deciding, self._faults, self._outbox, self._alarms = deciding, faults, outbox, alarms
        self._cache_watch, self._spans, self._provider, self._thresholds_reached = cache_watch, spans, provider, 0

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
        knows it. ``estimated``: flag the figures as an estimate. ``free``: it cost nothing.
        """
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
        run = self._runs.get(name) or self._find_paused(name)
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
        if journal is not None and not charge.is_tool:  # ``tool_prices`` writes those
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
