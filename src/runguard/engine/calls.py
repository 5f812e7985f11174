"""What a model call took: booked on the budgets, counted for the run, written to the store.

``engine/guard`` offers ``Settling`` to adapters, and ``engine/tools`` settles prices of tools with it.
"""

import json
from dataclasses import replace
from functools import partial
from typing import Any

from runguard.core.decision import Action, Finding, Money, Trip
from runguard.core.events import ModelCall, ModelResult
from runguard.core.money import NOTHING, to_usd
from runguard.engine.charges import Charge, Entry, Fired, finding_of
from runguard.engine.context import GuardContext
from runguard.engine.decide import burn_words
from runguard.engine.resume import Pauses
from runguard.engine.runs import Lane, Run
from runguard.engine.spending import Earlier, record_of, usd_of
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


# ---- What a model call took: booked on the budgets, counted for the run, written to the store


class Settling:
    """Closes the charges of one guard.

    Money comes first. A fault in anything else leaves no reservation behind and does not reach the caller.
    """

    def __init__(self, context: GuardContext, pauses: Pauses) -> None:
        policy = context.policy
        self._clock, self._accounts, self._runs, self._pauses = context.clock, context.accounts, context.runs, pauses
        self._deciding, self._faults, self._outbox = context.deciding, context.faults, context.outbox
        self._alarms, self._sink = context.alarms, context.sink
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
            if (usage.cached or run.reads_cache) and usage.input and not (estimated or free or charge.is_tool):
                run.reads_cache = True
                self._sink.tell("cached", run, charge, usage, model)
        accounts, on_fired, on_booked = self._accounts, self._threshold, None
        if charge.possible_refusal is not None and run is not None:
            on_booked = partial(self._look_back, run, charge)
        try:
            accounts.settle(charge, usage, model, nano, estimated, free, on_fired=on_fired, on_booked=on_booked)
        except Exception as error:
            self.close(charge, error, usage)
        if run is not None and self._sink.at["settled"]:
            self._sink.tell("settled", run, charge)
        try:
            if charge.on_over is not None:
                charge.on_over(charge, True)
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
            if charge.on_over is not None:
                charge.on_over(charge, False)
            run = self._run_of(charge)
            if run is not None and run.journal is not None:
                run.journal.add({"k": "back", "n": charge.number})
        except Exception as error:
            self._faults.fault("release", error, charge.run_costs.info.run)

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
            self._sink.tell("failed", charge, error)
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
        """Return the run that made a call, at work or paused; None when it has ended."""
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
        """Decide whether a call that was made in shadow mode was as expensive as it had seemed."""
        possible_refusal = charge.possible_refusal
        kept = run.set_aside.held if run.set_aside is not None else NOTHING
        if possible_refusal is None or not self._accounts.has_come_true(possible_refusal, kept):
            return
        charge.possible_refusal = None
        event = ModelCall(run.info.run, charge.lane, charge.agent, self._clock(), charge.model)
        finding = finding_of(possible_refusal, event, self._accounts.ledger.name)
        if charge.is_tool:
            finding = replace(finding, action=Action.BLOCK, scope="call", tool=charge.tool)
        self._deciding.decide(run, run.lane(charge.lane), event, finding)

    def _threshold(self, charge: Charge, reached: Fired) -> None:
        """Report that a share of a budget is spent, or that it is spent too fast: call its callback, send an alert, and
        warn or nudge the run that spent it.
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
