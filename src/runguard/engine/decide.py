"""What a person should know of a guard's work, as alerts: stops, thresholds, growth, a store that is away, breakers,
the kill switch.

Each is sent once per rule, scope and period, over all workers that share a store. An alert is also sent when the cause
is over, so that an incident closes by itself. Alerts hold names and numbers only, never arguments or answers of tools.
"""

from collections.abc import Callable
from decimal import Decimal
from typing import Final

from runguard.accounting.charges import Burn, Fired
from runguard.alerts.alert import Alert, AlertKind, Fact
from runguard.alerts.alert_settings import AlertSettings
from runguard.alerts.sending import Alerts
from runguard.core.decision import Finding, Trip
from runguard.core.events import RunInfo
from runguard.core.money import BudgetStatus, nanos, usd_text
from runguard.ledger.ledger import Ledger, Stop, StoreOutage, StoreReplacedError, StoreSession

_HOUR: Final = 3_600.0
_DAY: Final = 86_400.0
_LONGEST: Final = 30 * _DAY


class Alarms:
    """The alerts of one guard."""

    def __init__(self, settings: AlertSettings, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._alerts, self._ledger, self._clock = Alerts(settings), ledger, clock
        self._away: list[AlertKind] = []  # what was sent about a store that is not back yet

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        return self._alerts.counts

    def flush(self, seconds: float) -> bool:
        return self._ledger.flush(seconds) and self._alerts.flush(seconds)

    # ---- what happened ----------------------------------------------------------------------------------------------

    def tripped(self, trip: Trip, finding: Finding) -> None:
        """A stop. Of a budget: once for its period.

        Of anything else: once an hour for the same rule in the same place.
        """
        if trip.rule == "kill_switch":
            return  # alerted where it was thrown
        verb = "stopped" if trip.enforced else "would have stopped"
        where = "→".join(trip.agent_path) or trip.app or trip.run_id
        money = finding.money
        text = (
            f"RunGuard {verb} {where}: {trip.rule}, {_amount(trip.unit, trip.observed)}, "
            f"limit {_figure(trip.unit, trip.limit)}"
        )
        key, period = f"{trip.rule} {trip.app} {where} {trip.tool or ''} {int(trip.at // _HOUR)}", _HOUR
        if money is not None and trip.rule == "budget":
            spent = next((_figure(trip.unit, item["spent"]) for item in trip.evidence if "spent" in item), "?")
            text = (
                f"RunGuard {verb} {where}: {spent} of {_amount(trip.unit, trip.limit)} of {money.scope} are spent, "
                "too little is left for the next call"
            )
            key, period = _budget_key(money.key), _LONGEST if money.ends is None else max(money.ends - trip.at, _HOUR)
        facts: dict[str, Fact] = {
            "rule": trip.rule,
            "scope": trip.scope_id,
            "observed": str(trip.observed),
            "limit": str(trip.limit),
            "unit": trip.unit,
            "app": trip.app,
            "agent": where,
            "tool": trip.tool,
            "model": trip.model,
            "run": trip.run_id,
            "session": trip.session_id,
            "model_calls": trip.model_calls,
            "spent_usd": str(trip.spent_usd) if trip.spent_usd is not None else None,
            "enforced": trip.enforced,
            "trip": trip.id,
            "resume": trip.resume,
        }
        self._send_once(Alert("trip", key, "critical" if trip.enforced else "info", text, facts, trip.at), period)

    def compaction(self, info: RunInfo, finding: Finding, *, enforced: bool) -> None:
        """The summary of a session's history was refused.

        Once a day for the same rule in the same app: a tight limit refuses many sessions.
        """
        now = self._clock()
        verb = "refused" if enforced else "would have refused"
        text = (
            f"RunGuard {verb} to compact the history of a session of {info.app}: {finding.rule}; its later calls "
            "are more expensive"
        )
        facts: dict[str, Fact] = {
            "rule": finding.rule,
            "scope": finding.money.scope if finding.money is not None else f"run:{info.run}",
            "observed": str(finding.observed),
            "limit": str(finding.limit),
            "unit": finding.unit,
            "app": info.app,
            "session": info.session,
            "enforced": enforced,
        }
        key = f"compaction {info.app} {finding.rule} {finding.unit} {int(now // _DAY)}"
        self._send_once(Alert("compaction", key, "warning" if enforced else "info", text, facts, now), _DAY)

    def threshold(self, reached: Fired) -> None:
        """A share of a budget is spent. The ledger says so once per period, to one worker."""
        status, percent = reached.status, reached.threshold.percent
        text = (
            f"{percent:.0%} of the budget of {status.scope} is spent: {_figure(status.unit, status.spent)} of "
            f"{_amount(status.unit, status.limit)}"
        )
        self._alerts.send(
            Alert(
                "threshold",
                f"threshold {reached.account.key} {reached.account.granted} {percent} {reached.threshold.action}",
                "warning",
                text,
                {"percent": percent, **_facts_of(status)},
                self._clock(),
            )
        )

    def burning(self, reached: Fired, burn: Burn) -> None:
        """A budget is spent too fast to last. The ledger says so once per period, to one worker."""
        status, now = reached.status, self._clock()
        facts: dict[str, Fact] = {
            **_facts_of(status),
            "fast": round(burn.fast, 2),
            "slow": round(burn.slow, 2),
            "used_up_at": round(burn.used_up_at),
            "ends": status.ends,
            "estimated": True,
        }
        key = f"burn {reached.account.key} {reached.account.granted}"
        self._alerts.send(Alert("burn_rate", key, "warning", burn_words(status.scope, status, burn, now), facts, now))

    def grown(self, finding: Finding, info: RunInfo, agent: str, at: float) -> None:
        """The prompts of a session have grown. Sent once per session."""
        session = "/".join(filter(None, (info.app, info.user, info.session)))
        text = (
            f"the prompts of {agent or info.app} in {session or info.run} are {finding.observed} times as large as "
            "its first ones"
        )
        facts: dict[str, Fact] = {
            "rule": finding.rule,
            "observed": str(finding.observed),
            "limit": str(finding.limit),
            "unit": finding.unit,
            "app": info.app,
            "user": info.user,
            "session": info.session,
            "agent": agent,
            "run": info.run,
        }
        self._send_once(
            Alert("growth", f"growth {session if info.session else info.run}", "warning", text, facts, at), _LONGEST
        )

    def extended(self, statuses: list[BudgetStatus], keys: list[str]) -> None:
        """More was granted: alerts about these budgets are over, and may be sent again."""
        for status, account in zip(statuses, keys, strict=True):
            text = f"the budget of {status.scope} is now {_amount(status.unit, status.limit)}"
            self._resolve(
                Alert("trip", _budget_key(account), "info", text, _facts_of(status), self._clock(), resolved=True)
            )

    def store(self, error: Exception | None) -> None:
        """The store is away, was replaced, or is back (no error).

        No store can say which worker sends this: every one does.
        """
        name = self._ledger.name
        if error is None:
            for sent in self._away:
                self._alerts.send(
                    Alert(
                        sent,
                        f"{sent} {name}",
                        "critical",
                        f"the store {name} answers again",
                        {"store": name},
                        self._clock(),
                        resolved=True,
                    )
                )
            self._away.clear()
            return
        kind: AlertKind = "outage"
        text, facts = f"the store {name} is away: {error}", {"store": name}
        if isinstance(error, StoreReplacedError):
            kind, text, facts["command"] = "store_replaced", f"the store was replaced: {error}", error.command
        self._away.append(kind)
        self._alerts.send(Alert(kind, f"{kind} {name}", "critical", text, facts, self._clock()))

    def cap(self, scope: str, unit: str, wrong: str) -> None:
        """A cap function gives no cap for a scope, or gives one again (nothing is wrong)."""
        text = f"no cap in {unit} for {scope}: {wrong}" if wrong else f"the cap in {unit} of {scope} is known again"
        alert = Alert(
            "outage",
            f"cap {unit} {scope}",
            "critical",
            text,
            {"scope": scope, "unit": unit},
            self._clock(),
            resolved=not wrong,
        )
        self._send_once(alert, _HOUR) if wrong else self._resolve(alert)

    def breaker(self, tool: str, is_open: bool) -> None:
        text = f"the breaker of '{tool}' {'is open: it failed too often' if is_open else 'is closed again'}"
        alert = Alert(
            "breaker", f"breaker {tool}", "warning", text, {"tool": tool}, self._clock(), resolved=not is_open
        )
        self._send_once(alert, _DAY) if is_open else self._resolve(alert)

    def switched(self, scope: str, stop: Stop | None) -> None:
        """The kill switch was thrown, or taken back."""
        text = f"{stop.actor} stopped {scope}{stop.because}" if stop is not None else f"{scope} may run again"
        facts: dict[str, Fact] = (
            {"scope": scope, "actor": stop.actor, "reason": stop.reason} if stop is not None else {"scope": scope}
        )
        self._alerts.send(
            Alert("kill_switch", f"kill_switch {scope}", "warning", text, facts, self._clock(), resolved=stop is None)
        )

    # ---- once over all workers --------------------------------------------------------------------------------------

    def _send_once(self, alert: Alert, period: float) -> None:
        if not self._ledger.is_shared:
            self._alerts.send(alert)
            return

        def claim(session: StoreSession) -> None:
            try:
                mine = session.claim(_claim(alert), period) == "yes"
            except StoreOutage:
                raise  # the ledger tries again
            except Exception:
                mine = True  # the store cannot say which worker sends it: an alert sent twice is better than none
            if mine:
                self._alerts.send(alert)

        self._ledger.tell(claim)

    def _resolve(self, alert: Alert) -> None:
        def free(session: StoreSession) -> None:
            session.finish(_claim(alert), False)
            self._alerts.send(alert)  # in order: what it ends may still be on its way

        if self._ledger.is_shared:
            self._ledger.tell(free)
        else:
            self._alerts.send(alert)


def burn_words(scope: str, status: BudgetStatus, burn: Burn, now: float) -> str:
    hours = max(burn.used_up_at - now, 0.0) / _HOUR
    left = f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.0f} minutes"
    return (
        f"the budget of {scope} will be used up in about {left}, before its window ends: "
        f"{_figure(status.unit, status.spent)} of {_amount(status.unit, status.limit)} are spent, "
        f"{burn.fast:.1f} times as fast as the rest allows"
    )


def _figure(unit: str, value: object) -> str:
    """``$0.15``, ``1200``."""
    return usd_text(nanos(Decimal(str(value)))) if unit == "usd" else str(value)


def _amount(unit: str, value: object) -> str:
    """``$0.15``, ``1200 tokens``."""
    return _figure(unit, value) if unit == "usd" else f"{value} {unit}"


def _claim(alert: Alert) -> str:
    return f"alert {alert.key}"


def _budget_key(account: str) -> str:
    return f"budget {account}"


def _facts_of(status: BudgetStatus) -> dict[str, Fact]:
    return {
        "scope": status.scope,
        "spent": str(status.spent),
        "reserved": str(status.reserved),
        "limit": str(status.limit),
        "unit": status.unit,
        "window": status.window,
    }
