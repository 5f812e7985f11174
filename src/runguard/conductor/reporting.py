"""Which outlets receive the decisions and trips of a guard: the journal of the run, the log, callbacks, alerts,
telemetry and the store.
"""

import json
import logging
from typing import Final

from runguard.accounting.accounts import Accounts
from runguard.conductor.breakers import Breakers
from runguard.conductor.sink import Decided, Sink
from runguard.conductor.summaries import RefusedSummaries
from runguard.core.decision import Action, Finding, Trip, printable
from runguard.core.events import ModelCall, ModelResult
from runguard.ledger.ledger import Ledger
from runguard.outlets.alarms import Alarms
from runguard.outlets.callbacks import Outbox
from runguard.outlets.telemetry import Telemetry
from runguard.policy.settings import Policy

_log: Final = logging.getLogger("runguard")
_LOUD_RULES: Final = ("budget", "context", "growth")


class Reporting:
    """Connects the outlets of one guard to its sink."""

    def __init__(
        self,
        policy: Policy,
        ledger: Ledger,
        outbox: Outbox,
        alarms: Alarms | None,
        telemetry: Telemetry | None,
        summaries: RefusedSummaries,
    ) -> None:
        self._policy, self._ledger, self._outbox = policy, ledger, outbox
        self._alarms, self._telemetry, self._summaries = alarms, telemetry, summaries

    def connect(self, sink: Sink) -> None:
        if self._ledger.is_shared:
            sink.on_trip("storing a trip", self._store)
        sink.on_trip("logging a trip", _log_trip)
        if self._policy.on_trip is not None:
            sink.on_trip("on_trip", self._call_on_trip)
        if self._alarms is not None:
            sink.on_trip("alerting", self._alarms.tripped)
        sink.on_decided("writing the journal", _write_journal)
        sink.on_decided("logging a decision", _log_decision)
        if self._policy.on_decision is not None:
            sink.on_decided("on_decision", self._call_on_decision)
        sink.on_decided("reporting a refused summary", self._report_summary)
        if self._alarms is not None:
            sink.on_decided("alerting", self._alert_growth)
        if self._telemetry is not None:
            sink.on_decided("telemetry", self._trace)

    def _store(self, trip: Trip, finding: Finding) -> None:
        text = json.dumps(trip.to_dict())
        self._ledger.tell(lambda session: session.append("trip", trip.id, text))

    def _call_on_trip(self, trip: Trip, finding: Finding) -> None:
        if self._policy.on_trip is not None:
            self._outbox.send(self._policy.on_trip, trip)

    def _call_on_decision(self, decided: Decided) -> None:
        if self._policy.on_decision is not None:
            self._outbox.send(self._policy.on_decision, decided.decision)

    def _report_summary(self, decided: Decided) -> None:
        event = decided.event
        if decided.finding.action is Action.STOP and isinstance(event, ModelCall) and event.after_answer:
            self._summaries.refused(decided.run.info, decided.decision)

    def _alert_growth(self, decided: Decided) -> None:
        finding, event = decided.finding, decided.event
        if self._alarms is not None and finding.rule == "growth" and decided.decision.action is Action.WARN:
            self._alarms.grown(finding, decided.run.info, event.agent, event.at)

    def _trace(self, decided: Decided) -> None:
        event = decided.event
        model = event.model or None if isinstance(event, ModelCall | ModelResult) else None
        if self._telemetry is not None:
            self._telemetry.decided(decided.decision, decided.run.info, event.agent, model)


def connect_alarms(alarms: Alarms, accounts: Accounts, breakers: Breakers) -> None:
    """Alert on what happens beside runs: the store goes away, a budget is extended, a cap function fails, a breaker
    opens.
    """
    accounts.on_store, accounts.on_extended = alarms.store, alarms.extended
    accounts.cap_functions.on_change = alarms.cap
    breakers.on_change = alarms.breaker


def _write_journal(decided: Decided) -> None:
    journal, event = decided.run.journal, decided.event
    if journal is not None:
        journal.decided(decided.decision, decided.lane.key, event.agent, event.at)


def _log_trip(trip: Trip, finding: Finding) -> None:
    _log.warning("runguard.trip: %s", trip.message, extra={"runguard_trip": trip.id, "runguard_rule": trip.rule})


def _log_decision(decided: Decided) -> None:
    """Findings about money and context are warnings. All others are logged at INFO. Trips have a line of their own."""
    finding, action = decided.finding, decided.decision.action
    if action is Action.STOP:
        return
    if finding.rule == "prompt_cache":
        _log.warning("runguard.prompt_cache: %s", printable(finding.detail))
        return
    if finding.rule == "downgrade":
        _log.warning("runguard.model_switch: %s", printable(finding.detail))
        return
    level = logging.WARNING if action is Action.WARN and finding.rule in _LOUD_RULES else logging.INFO
    if finding.money is not None:
        _log.log(level, "runguard.%s: %s", action.word, finding.detail)
        return
    about = printable(finding.tool or finding.detail)
    _log.log(level, "runguard.%s: %s, %s %s of %s", action.word, finding.rule, finding.observed, finding.unit, about)
