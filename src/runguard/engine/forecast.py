"""What is left: one line for the model of a run, and forecasts for those who look at runs and budgets.

Setting: ``budget_notice``, for the line. It goes where nudges go, so every adapter adds it behind everything else in a
request. Forecasts say when a run reaches its cap, the window of its model or a higher price, and when a budget is used
up. They are estimated from the last calls with the arithmetic of ``core/money``, for snapshots, the signs of life of a
run, and with them ``runguard status`` and the dashboard.
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

from runguard.core.money import (
    LEAST_CALLS,
    UNITS,
    UNLIMITED,
    Trend,
    amount_text,
    begin_of,
    budget_forecast,
    calls_until_size,
    calls_within,
    edge,
    sum_of,
    to_usd,
    trend_of,
    was_cut,
)
from runguard.engine.charges import Charge
from runguard.engine.context import GuardContext
from runguard.engine.money import Accounts
from runguard.engine.runs import Run
from runguard.engine.spending import RecentCall
from runguard.ledger.ledger import Account
from runguard.pricing.rates import Rates

Facts = dict[str, Any]
_SHOWN: Final = 3  # limits in one line, the scarcest first
_NOTE: Final = "budget_notice"  # how many shares the model of a run was told of
_NOTICE: Final = "What is left for this work: {left}. Plan the remaining steps so that it is enough."


class Outlook:
    """Tells the models of one guard what is left, and adds forecasts to its snapshots."""

    def __init__(self, context: GuardContext) -> None:
        self._accounts, self._clock = context.accounts, context.clock
        self._shares = sorted(context.policy.notice_shares)  # at which parts of a limit the model of a run is told
        if self._shares and context.enforces:
            context.sink.on("settled", "settle", self.settled)
        context.sink.on("run outlook", "snapshot", self.of_run)
        context.sink.on("guard facts", "snapshot", self.of_budgets)

    def settled(self, run: Run, charge: Charge) -> None:
        """Leave a line for the next request where another share of a limit is spent."""
        if charge.is_tool:
            return
        limits = sorted(_limits(run, charge), reverse=True)
        reached = sum(limits[0][0] >= share for share in self._shares) if limits else 0
        if reached <= run.notes.get(_NOTE, 0):
            return
        run.notes[_NOTE] = reached
        told = "; ".join(dict.fromkeys(text for share, text in limits[:_SHOWN] if share >= self._shares[0]))
        lane = run.lane(charge.lane)
        lane.notice = f"{lane.notice}\n{_NOTICE.format(left=told)}".lstrip()

    def of_run(self, run: Run, now: float) -> Facts:
        """Return the forecast of a run at work."""
        return {"forecast": run_forecast(run, self._accounts, now)}

    def of_budgets(self) -> Facts:
        """Return when budgets with a window will be used up, as far as this process knows their spending."""
        ledger = self._accounts.ledger
        now = ledger.period_time(self._clock())
        return {"forecasts": [facts for account in ledger.known() for facts in forecasts_of(account, now)]}


def _limits(run: Run, charge: Charge) -> Iterator[tuple[float, str]]:
    """Yield the spent share of each limit that the run is under, and what is left of it."""
    for account in charge.lines.accounts:
        for unit, (cap, used) in enumerate(zip(account.caps, account.spent, strict=True)):
            if 0 < cap < UNLIMITED:
                yield used / cap, f"{amount_text(unit, max(cap - used, 0))} of {amount_text(unit, cap)}"
    if (calls := run.model_calls) is not None:
        yield calls.count / calls.limit, f"{calls.left} of {calls.limit} model calls"


def run_forecast(run: Run, accounts: Accounts, now: float) -> Facts | None:
    """Return the nearest cap, window and price tier of a run, each with the calls that fit; None for too few calls."""
    calls = [call for call in accounts.spending.recent_of(run.run_costs) if call[3].calls]
    if len(calls) < LEAST_CALLS:
        return None
    by_agent: dict[tuple[str, str], list[RecentCall]] = {}
    for call in calls:
        by_agent.setdefault(call[:2], []).append(call)
    is_cut = any(was_cut([entry.input for *_, entry in of_one]) for of_one in by_agent.values())
    sizes = [found for of_one in by_agent.values() for found in _sizes(of_one, accounts, now)]
    return {
        "calls": len(calls),
        "estimated": True,
        "cap": _nearest(_caps(run, calls, is_flat=is_cut)),
        "window": _nearest(found for kind, found in sizes if kind == "window"),
        "tier": _nearest(found for kind, found in sizes if kind == "tier"),
    }


def _nearest(found: Any) -> Facts | None:
    return min(found, key=lambda facts: facts["calls_left"], default=None)


def _caps(run: Run, calls: list[RecentCall], *, is_flat: bool) -> Iterator[Facts]:
    """Yield the caps of the run alone: of its budgets, and of its model calls."""
    cost = _cost_trend(calls, is_flat=is_flat)
    tokens = trend_of([entry.input + entry.output for *_, entry in calls], is_flat=is_flat)
    one = Trend(1, 0, 1)
    own = run.run_costs.own
    accounts = {a.key: a for lines in list(run.run_costs.lines.values()) for a in lines.accounts if a.scope in own}
    for account in accounts.values():
        for unit, (cap, trend) in enumerate(zip(account.caps, (cost, tokens, one), strict=True)):
            left = calls_within(trend, cap - account.spent[unit]) if trend is not None and cap < UNLIMITED else None
            if left is not None:
                yield _facts(left, edge(unit, cap), cost, scope=account.scope, unit=UNITS[unit])
    limit = run.model_calls
    if limit is not None:
        yield _facts(limit.left, limit.limit, cost, scope=f"run:{run.info.run}", unit="calls")


def _sizes(calls: list[RecentCall], accounts: Accounts, now: float) -> Iterator[tuple[str, Facts]]:
    """Yield the window and the next higher price of the model of one agent."""
    _, agent, model, last = calls[-1]
    prompts = [entry.input for *_, entry in calls]
    if len(prompts) < LEAST_CALLS:
        return
    rates = accounts.pricing.rates(model, now)
    bands = rates.bands if isinstance(rates, Rates) else ()
    tier = next((band.above for band in bands[1:] if band.above > last.input), None)
    cost = _cost_trend(calls, is_flat=was_cut(prompts))
    for kind, size in (("window", accounts.expectations.context_limit(model, quiet=True)), ("tier", tier)):
        left = calls_until_size(prompts, size) if size is not None else None
        if left is not None:
            yield kind, _facts(left, size, cost, agent=agent, model=model, unit="tokens")


def _cost_trend(calls: list[RecentCall], *, is_flat: bool) -> Trend | None:
    """Return the cost of calls; None where one has no price."""
    if any(entry.unpriced for *_, entry in calls):
        return None
    return trend_of([entry.nano for *_, entry in calls], is_flat=is_flat)


def _facts(left: int, limit: Any, cost: Trend | None, **names: str) -> Facts:
    usd = to_usd(sum_of(cost, left)) if cost is not None else None
    return {**names, "limit": limit, "calls_left": left, "usd": usd}


def forecasts_of(account: Account, now: float) -> list[dict[str, Any]]:
    """Return the forecasts of an account with a window, one for each unit that it limits, as plain data."""
    if account.window is None or account.ends is None:
        return []
    begins, calls = begin_of(account.window, account.ends), account.spent_calls
    names = {"scope": account.scope, "window": account.window, "ends": account.ends, "estimated": True}
    found = [
        (unit, budget_forecast(account.spent[unit], cap, calls, begins, now, account.ends))
        for unit, cap in enumerate(account.caps)
        if cap < UNLIMITED
    ]
    return [{**names, "unit": UNITS[unit], **asdict(facts)} for unit, facts in found if facts is not None]
