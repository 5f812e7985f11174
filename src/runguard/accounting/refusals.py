"""Why a model call may not be made, in findings and words: a budget, a price, a stop, a store that is away."""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Final

from runguard.accounting.charges import Denied, UnknownCap
from runguard.core.decision import Action, Finding, Money
from runguard.core.events import ModelCall
from runguard.core.money import UNITS, UNLIMITED, amount_text, edge, to_usd
from runguard.ledger.ledger import Refusal, Stop

_STOP: Final = Action.STOP
OUTAGES: Final = "outages"  # the unit of a stop because the store was away


def finding_of(denied: Denied, event: ModelCall, ledger: str) -> Finding:
    """What a denied call comes to: a stop with the scope that refused and how to go on."""
    if denied.stop is not None:
        return finding_of_stop(denied.stop)
    if denied.outage:
        resume = "the next user message tries again; on_outage='open' goes on without the store and books later"
        money = Money("run", f"store {ledger}", None, None, resume=resume)
        return Finding(
            "guard_error",
            _STOP,
            1,
            0,
            OUTAGES,
            "run",
            "",
            "store",
            f"no account could be opened: {denied.outage}",
            money=money,
        )
    if denied.unknown is not None:
        return _finding_of_unknown_cap(denied.unknown)
    if denied.unpriced is not None:
        line = f'prices={{"{event.model}": {{"input": …, "output": …}}}} (USD per million tokens)'
        money = Money(
            "run",
            f"model '{event.model}'",
            None,
            None,
            resume=f"add {line}, or set on_unpriced to a rate or to 'tokens'",
        )
        return Finding(
            "unpriced",
            _STOP,
            1,
            0,
            "models without a price",
            "run",
            "",
            event.model,
            f"no price: {denied.unpriced.reason}; add {line}",
            money=money,
        )
    assert denied.refusal is not None
    assert denied.group is not None
    unit, observed, limit = _describe(denied.refusal)
    account = denied.refusal.account
    scope = "run" if denied.group.per.stops_run else "lane"
    resume = f"extend({account.scope!r}, {unit}=…) moves the cap and the next run goes on"
    if denied.group.per.kind == "run":
        resume = (
            f"the next run starts with a fresh budget; to allow more, raise max_{unit} or the run's budget, or "
            f"extend({account.scope!r}, {unit}=…)"
        )
    if account.ends is not None:
        resume += f"; its window resets at {datetime.fromtimestamp(account.ends, UTC):%Y-%m-%d %H:%M:%S} UTC"
    in_usd = account.cap_usd < UNLIMITED
    money = Money(
        denied.group.per.kind,
        account.scope,
        to_usd(denied.refusal.spent[0]) if in_usd else None,
        to_usd(denied.refusal.held[0]) if in_usd else None,
        account.ends,
        resume,
        account.key,
    )
    return Finding(
        "budget",
        _STOP,
        observed,
        limit,
        unit,
        scope,
        "",
        account.scope,
        _refusal_text(denied.refusal, denied),
        (_figures(denied.refusal),),
        money,
    )


def _finding_of_unknown_cap(unknown: UnknownCap) -> Finding:
    resume = (
        f"correct the function that gives the cap of {unknown.scope}: it must return an amount, 0, or None for no "
        "limit; every new run asks it again"
    )
    detail = f"its cap is not known: {unknown.reason}"
    kind, scope = unknown.group.per.kind, "run" if unknown.group.per.stops_run else "lane"
    return Finding(
        "guard_error",
        _STOP,
        1,
        0,
        "unknown caps",
        scope,
        "",
        unknown.scope,
        detail,
        money=Money(kind, unknown.scope, None, None, resume=resume),
    )


def finding_of_stop(stop: Stop) -> Finding:
    kind = stop.scope.partition(":")[0]
    money = Money(kind, stop.scope, None, None, resume=f"resume({stop.scope!r}) lets runs start again")
    return Finding(
        "kill_switch",
        _STOP,
        1,
        0,
        "stops",
        "run",
        "",
        stop.scope,
        f"stopped by {stop.actor}{stop.because}",
        money=money,
    )


def _describe(refusal: Refusal) -> tuple[str, Decimal | int, Decimal | int]:
    """Unit, what the call would have come to, and the limit."""
    unit = refusal.unit
    return UNITS[unit], edge(unit, refusal.spent[unit] + refusal.wanted[unit]), edge(unit, refusal.account.caps[unit])


def _figures(refusal: Refusal) -> dict[str, str]:
    """The same as plain data, for the trip's evidence."""
    unit, account = refusal.unit, refusal.account
    amounts = {"spent": refusal.spent, "reserved": refusal.held, "wanted": refusal.wanted, "limit": account.caps}
    return {"unit": UNITS[unit], **{name: str(edge(unit, amount[unit])) for name, amount in amounts.items()}}


def _refusal_text(refusal: Refusal, denied: Denied) -> str:
    """For the operator: spent, held and asked, apart."""
    unit, account = refusal.unit, refusal.account
    spent, held, cap = (amount_text(unit, x[unit]) for x in (refusal.spent, refusal.held, account.caps))
    if denied.fraction:
        return f"{spent} of {cap} spent, which is over its threshold of {denied.fraction:.0%}"
    over = f", closed by an overrun of {amount_text(unit, account.overrun[unit])}" if account.closed else ""
    asked = f", this call could take {amount_text(unit, refusal.wanted[unit])}"
    if denied.least:
        asked += f" and the rest does not pay for {denied.least:,} output tokens"
    return f"{spent} spent and {held} reserved of {cap}{over}{asked}"
