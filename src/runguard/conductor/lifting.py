"""Whether a stopped run that is resumed may go on.

It stays stopped until its budget is extended. A stop of the kill switch is lifted when an operator has taken it back,
and a stop because of an outage when the store answers again. Every other stop holds for the whole run: the user's next
message begins a new one.
"""

import logging
from typing import TYPE_CHECKING, Final

from runguard.accounting.budget_groups import scopes_of
from runguard.accounting.refusals import OUTAGES, finding_of_stop
from runguard.conductor.runs import Run
from runguard.core.decision import Trip
from runguard.core.events import ROOT_LANE, ModelCall
from runguard.core.money import UNITS, Amount, edge

if TYPE_CHECKING:
    from runguard.conductor.guard import Guard

_log: Final = logging.getLogger("runguard")


async def review_stops(guard: "Guard", run: Run) -> None:
    """A run is resumed: lift the stops whose cause is gone, and stop it when the kill switch was thrown meanwhile."""
    await guard.accounts.ledger.refresh()
    for trip in run.stops_in_force():
        if await _is_over(guard, run, trip):
            run.lift_stop(trip)
    stop = guard.accounts.switch.of(scopes_of(run.info))
    if stop is not None and run.stopped is None:
        guard.stop(run, ModelCall(run.info.run, ROOT_LANE, "", guard.clock()), finding_of_stop(stop))


async def _is_over(guard: "Guard", run: Run, trip: Trip) -> bool:
    if trip.rule == "kill_switch":
        return guard.accounts.switch.of(scopes_of(run.info)) is None
    if trip.unit == OUTAGES:
        return True  # the next call asks the store again
    if trip.rule != "budget" or trip.unit not in UNITS:
        return False
    unit = UNITS.index(trip.unit)
    try:
        return any(edge(unit, caps[unit]) > trip.limit for caps in await _caps_now(guard, run, trip))
    except Exception as error:  # a store that is away, or a cap function that failed
        _log.warning(
            "runguard.still_stopped: whether the budget of a stopped run was extended is not known, so it "
            "stays stopped: %s",
            type(error).__name__,
        )
        return False


async def _caps_now(guard: "Guard", run: Run, trip: Trip) -> list[Amount]:
    """The caps in force on the scope that stopped a run: what the policy allows, and what was granted on top."""
    accounts, ledger = guard.accounts, guard.accounts.ledger
    agent = trip.agent_path[-1] if trip.agent_path else ""
    run.run_costs.lines.clear()  # caps may be functions
    event = ModelCall(run.info.run, ROOT_LANE, agent, guard.clock(), trip.model or "")
    lines = accounts.account_lines(run.run_costs, event).accounts
    granted: dict[str, Amount] = {account.key: account.granted for account in lines if account.scope == trip.scope_id}
    allowed = {account.key: account.caps for account in lines if account.key in granted}
    if not ledger.is_shared:
        return list(allowed.values())
    stored: dict[str, Amount] = {}
    await ledger.ask(
        lambda session: stored.update({balance.key: balance.granted for balance in session.read(trip.scope_id)}),
        again=True,
    )
    return [_plus(caps, granted[key], stored.get(key, granted[key])) for key, caps in allowed.items()]


def _plus(caps: Amount, known: Amount, stored: Amount) -> Amount:
    usd, tokens, calls = (cap - before + now for cap, before, now in zip(caps, known, stored, strict=True))
    return usd, tokens, calls
