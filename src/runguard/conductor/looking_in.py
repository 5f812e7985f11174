"""What a guard does now, as plain data."""

from typing import TYPE_CHECKING, Any

from runguard.conductor.run_forecasts import run_facts

if TYPE_CHECKING:
    from runguard.conductor.guard import Guard


def snapshot_of(guard: "Guard") -> dict[str, Any]:
    """The runs with their counts and growth, budgets, breakers and counters of one guard. Runs of guards whose policies
    it has replaced are included.
    """
    now, ledger = guard.clock(), guard.accounts.ledger
    guards = [*(before for elder in guard.elders if (before := elder()) is not None), guard]
    return {
        "mode": guard.policy.mode,
        "policy": guard.policy.digest,
        "runs": [run_facts(run, each.accounts, now) for each in guards for run in list(each.runs.values())],
        "paused": guard.pauses.waiting,
        "budgets": guard.accounts.budgets(as_known_here=True),
        "forecasts": guard.accounts.forecasts(),
        "outages": dict(guard.accounts.outages),
        "store": ledger.health(),
        "breakers": {tool: breaker.state(ledger.now(now)).value for tool, breaker in guard.breakers.items()},
        "provider_waits": guard.provider_waits.seconds_left(),
        "trips": len(guard.trips),
        "guard_errors": guard.guard_errors + guard.accounts.cap_functions.errors,
        "callbacks_dropped": guard.outbox.dropped,
        "callbacks_failed": guard.outbox.failed,
        "alerts": guard.alarms.counts if guard.alarms is not None else {},
    }
