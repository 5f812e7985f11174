"""A guard that takes over from another one: its policy was edited and loaded again while the process goes on.

What was counted stays: spend and holds in flight, trips, stops, paused runs, side effects that were done, breakers.
Runs in flight stay with the guard they began with. Both guards work on the same objects.
"""

import weakref
from typing import TYPE_CHECKING

from runguard.outlets.alarms import Alarms

if TYPE_CHECKING:
    from runguard.conductor.guard import Guard


def alarms_of(guard: "Guard", before: "Guard | None") -> Alarms | None:
    """The alarms of a guard. With the same receivers they stay the same, so no alert is sent twice."""
    policy, ledger = guard.policy, guard.accounts.ledger
    if not policy.alerts or policy.mode == "off":
        return None
    if (
        before is not None
        and before.alarms is not None
        and before.policy.alerts == policy.alerts
        and before.accounts.ledger is ledger
    ):
        return before.alarms
    return Alarms(policy.alerts, ledger, guard.clock)


def take_over(heir: "Guard", before: "Guard") -> None:
    """Give ``heir`` what ``before`` knows. Changes nothing of ``before``."""
    heir.pauses.share(before.pauses)
    heir.breakers.share(before.breakers)
    heir.once.share(before.once)
    heir.provider_waits.share(before.provider_waits)
    heir.growth.share(before.growth)
    heir.summaries.share(before.summaries)
    heir.elders = (
        *(elder for elder in before.elders if (guard := elder()) is not None and guard.runs),
        weakref.ref(before),
    )


def retire(before: "Guard", heir: "Guard") -> None:
    """``heir`` is in charge now: the budgets that runs share have the heir's caps, also for the runs that ``before``
    still has.
    """
    if before.accounts.ledger is heir.accounts.ledger:
        before.accounts.adopt_shared_budgets(heir.accounts)
    elif before.accounts.switch.stops:  # another store: it does not know the stops
        stops = before.accounts.switch.stops
        heir.operator_stops.change(lambda known: {**stops, **known})
    if before.telemetry is not None:
        before.telemetry.drop(before)
