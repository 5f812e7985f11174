"""The charge of a call: what it holds on which accounts, and why a budget refuses it.

``engine/money`` opens a ``Charge``. The other files of ``engine`` and the adapters pass it on until it is settled. A
charge of a guard around a call covers what the guards inside would hold again.
"""

import threading
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from runguard.core.decision import Action, Finding, Money
from runguard.core.events import ModelCall
from runguard.core.money import NOTHING, UNITS, UNLIMITED, Amount, amount_text, edge, to_usd
from runguard.engine.budgets import AccountLines, BudgetGroup, UnknownCap
from runguard.engine.spending import Entry, RunCosts
from runguard.ledger.ledger import Hold, Ledger, Refusal, Stop
from runguard.pricing.rates import Rates, Unpriced

if TYPE_CHECKING:
    from runguard.engine.money import Accounts


# ---- One call's way from reserve to settle: its charge, and why one is denied

_NO_GUARDS: Final[frozenset[Any]] = frozenset()
_NO_LINE: Final = ("", "", "")


class Charge:
    """One model call, or one tool call with a price, on its way from reserve to settle."""

    __slots__ = (
        "agent",
        "around",
        "at",
        "audio",
        "booked",
        "bound",
        "candidates",
        "covers",
        "entry",
        "held",
        "hold",
        "home",
        "input",
        "instead_of",
        "is_tool",
        "journal",
        "lane",
        "limited",
        "lines",
        "lowered",
        "max_output",
        "model",
        "number",
        "on_over",
        "over",
        "possible_refusal",
        "rates",
        "request",
        "run_costs",
        "stands",
        "tool",
    )

    def __init__(
        self,
        run_costs: RunCosts,
        event: ModelCall,
        lines: AccountLines,
        home: "Accounts",
    ) -> None:
        price = lines.price
        if not price[0] <= event.at < price[1]:
            price = home.price(lines, event.model, event.at)
        self.run_costs, self.lines, self.rates = run_costs, lines, price[2]
        self.home: Accounts | None = home  # that opened it; None for a call that was never checked
        # what guards around this one with the same ledger hold for the call: it is not held or recorded again
        self.around: tuple[Charge, ...] = ()
        # Accounts of guards inside that hold nothing for one call because of this
        self.covers: frozenset[Any] = _NO_GUARDS
        self.agent, self.model, self.tool, self.lane = event.agent, event.model, event.tool, event.lane
        self.at, self.input, self.audio = event.at, event.input_tokens, event.audio_tokens
        self.max_output = event.max_output_tokens or 0  # what is reserved for; 0 where no budget has to know
        if event.max_output_tokens is None and event.bound is None and lines.needs_output:
            limit = lines.output_limit
            if limit is None:
                limit = lines.output_limit = home.expectations.output_limit(event.model)
            self.max_output = limit
        self.candidates = event.candidates  # each may answer with ``max_output``
        self.lowered = False  # the request must be capped to ``max_output``
        # the request said how much it may answer, or was lowered: what was reserved relies on it
        self.limited = event.max_output_tokens is not None
        # the highest usage according to the caller: nano-USD and tokens, None if unknown
        self.bound = event.bound
        self.is_tool = event.is_tool  # the price of a tool call: not a model call
        self.stands = event.stands  # held for as long as its run lives
        self.instead_of = event.instead_of  # the model that was asked for, where a threshold chose a cheaper one
        self.hold: Hold | None = None
        self.held = 0  # nano-USD
        self.booked: Entry | None = None
        self.entry = _NO_LINE
        self.over = False  # settled or released
        self.number = 0  # of the call, in the run's journal
        # called when the call is over, with whether its provider has answered
        self.on_over: Callable[[Charge, bool], None] | None = None
        self.journal: Any = None  # of its run, where one is kept: a usage may be reported after the run's end
        self.request: Any = None  # a weak reference to what is sent, where the adapter can read its parts
        # in shadow mode: an enforcing guard would have waited or requested less before it refused
        self.possible_refusal: Denied | None = None


@dataclass(slots=True)
class Denied:
    """Why a call may not be made."""

    refusal: Refusal | None = None
    group: BudgetGroup | None = None
    unpriced: Unpriced | None = None
    fraction: float = 0.0  # a stop threshold that was reached
    stop: Stop | None = None  # the kill switch was used
    outage: str = ""  # the store is away
    unknown: UnknownCap | None = None
    least: int = 0  # output tokens below which an answer was not worth asking for


def worst_of(charge: Charge) -> Amount:
    if charge.bound is not None:
        usd, tokens = charge.bound
        return (
            _least_cap(charge, 0) if usd is None else usd,
            _least_cap(charge, 1) if tokens is None else tokens,
            0 if charge.is_tool else 1,
        )
    output = charge.max_output * charge.candidates
    cost = charge.rates.worst(charge.input, output, charge.audio) if isinstance(charge.rates, Rates) else 0
    return cost, charge.input + output, 1


def _least_cap(charge: Charge, unit: int) -> int:
    """If the cost of a call is unknown, it reserves everything and runs exclusively."""
    least = min((account.caps[unit] for account in charge.lines.accounts), default=UNLIMITED)
    return max(least, 1) if least < UNLIMITED else 0  # never 0: an unknown cost does not fit into a cap of 0


# ---- Guards around guards: what a layer around a call holds on an account is not held again

# The charges of the call that is being made, from the outermost layer to the innermost.
OWNERS: Final[ContextVar[tuple[Charge, ...]]] = ContextVar("runguard_owners", default=())
# A charge covers one call of each guard inside. Calls that run at the same time must not all count on it.
_covering: Final = threading.Lock()


def owners_of(event: ModelCall) -> tuple[Charge, ...]:
    """Return the charges around a call, the outermost first."""
    return OWNERS.get() if event.around is None else event.around


def layers_around(home: Any, owners: tuple[Charge, ...]) -> tuple[Charge, ...]:
    """Return what other guards with the same ledger have opened for the call that is being made.

    ``home``: the Accounts that ask. When a retry between the guards makes another call, nothing around covers it.
    """
    return tuple(
        charge
        for charge in owners
        if not charge.over
        and not charge.is_tool
        and charge.home is not None
        and charge.home is not home
        and charge.home.ledger is home.ledger
        and home not in charge.covers
    )


def cover(home: Any, owners: tuple[Charge, ...]) -> tuple[Charge, ...]:
    """Let what is held around the call cover it, and no further call of ``home``."""
    with _covering:
        around = layers_around(home, owners)
        for charge in around:
            charge.covers |= {home}
    return around


def uncover(around: tuple[Charge, ...], home: Any) -> None:
    """Let the next attempt be covered: the call was not made."""
    with _covering:
        for charge in around:
            charge.covers -= {home}


def admits(run_costs: RunCosts, lane: str, owners: tuple[Charge, ...]) -> bool:
    """Return whether a guard has let in the call that is being made, for the same lane of its run: once for each."""
    with _covering:
        for charge in owners:
            if charge.run_costs is run_costs and charge.lane == lane and not (charge.over or charge.is_tool):
                is_first = charge.home not in charge.covers
                charge.covers |= {charge.home}
                return is_first
    return False


def not_held_by(around: tuple[Charge, ...], lines: AccountLines) -> AccountLines:
    """Return the accounts that are left to hold."""
    if not around:
        return lines
    held = {account.key for charge in around for account in charge.lines.accounts}
    if not any(account.key in held for account in lines.accounts):
        return lines
    kept = [
        (account, group, limit)
        for account, group, limit in zip(lines.accounts, lines.groups, lines.limits, strict=True)
        if account.key not in held
    ]
    accounts, groups, limits = zip(*kept, strict=True) if kept else ((), (), ())
    names = lines.names and lines.names & {account.meter for account in accounts}
    return AccountLines(tuple(accounts), tuple(groups), tuple(limits), lines.until, lines.unknown, names)


def stricter_than(around: tuple[Charge, ...], lines: AccountLines, event: ModelCall) -> Denied | None:
    """Return why our caps refuse what a layer around holds under its own caps, or under none. None: they do not."""
    held = {account.key: (account, charge.hold) for charge in around for account in charge.lines.accounts}
    usd, tokens = event.bound or (0, 0)
    for account, group in zip(lines.accounts, lines.groups, strict=True):
        theirs, hold = held.get(account.key, (None, None))
        if theirs is None:
            continue
        due = [theirs.due_usd, theirs.due_tokens, theirs.due_calls]  # this call is in it
        for unit, bound in enumerate((usd, tokens)):
            # not with all that a call of unknown cost holds there, but with what it needs here
            if bound is None and hold is not None:
                due[unit] += max(event.least[unit], 1) - hold.amount[unit]
        refusing = next((u for u in range(3) if due[u] > account.caps[u]), None)
        if refusing is not None:
            return Denied(Refusal(account, refusing, NOTHING, account.room), group)
    return None


def held_for_long(refusal: Refusal, ledger: Ledger, owners: Iterable[Charge], standing: Iterable[Charge]) -> int:
    """Return what is held on the account that refuses and does not come back while a call waits: by the calls around
    it, and by ``standing`` charges.
    """
    unit, key = refusal.unit, refusal.account.key
    holds = [
        charge.hold
        for charge in (*owners, *standing)
        if not charge.over and charge.hold is not None and charge.home is not None and charge.home.ledger is ledger
    ]
    return sum(hold.amount[unit] for hold in holds if any(account.key == key for account in hold.accounts))


# ---- Why a model call may not be made, in findings and words: a budget, a price, a stop, a store that is away

_STOP: Final = Action.STOP
OUTAGES: Final = "outages"  # the unit of a stop because the store was away


def finding_of(denied: Denied, event: ModelCall, ledger: str) -> Finding:
    """Return what a denied call comes to: a stop with the scope that refused and how to go on."""
    if denied.stop is not None:
        return finding_of_stop(denied.stop)
    if denied.outage:
        resume = "bring the store back: the next message tries again. on_outage='open' goes on and books later"
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
        if event.model:
            line = f'add prices={{"{event.model}": {{"input": …, "output": …}}}} (USD per million tokens)'
        else:
            line = "give the model a name"
        money = Money(
            "run",
            f"model '{event.model}'",
            None,
            None,
            resume=f"{line}, or set on_unpriced to a rate or to 'tokens'",
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
            f"no price: {denied.unpriced.reason}; {line}",
            money=money,
        )
    assert denied.refusal is not None
    assert denied.group is not None
    refusal, account, unit = denied.refusal, denied.refusal.account, UNITS[denied.refusal.unit]
    observed = edge(refusal.unit, refusal.spent[refusal.unit] + refusal.wanted[refusal.unit])
    limit = edge(refusal.unit, account.caps[refusal.unit])
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


def _figures(refusal: Refusal) -> dict[str, str]:
    """Return the same as plain data, for the trip's evidence."""
    unit, account = refusal.unit, refusal.account
    amounts = {"spent": refusal.spent, "reserved": refusal.held, "wanted": refusal.wanted, "limit": account.caps}
    return {"unit": UNITS[unit], **{name: str(edge(unit, amount[unit])) for name, amount in amounts.items()}}


def _refusal_text(refusal: Refusal, denied: Denied) -> str:
    """Return what the operator reads: spent, held and asked, apart."""
    unit, account = refusal.unit, refusal.account
    spent, held, cap = (amount_text(unit, x[unit]) for x in (refusal.spent, refusal.held, account.caps))
    if denied.fraction:
        return f"{spent} of {cap} spent, which is over its threshold of {denied.fraction:.0%}"
    over = f", closed by an overrun of {amount_text(unit, account.overrun[unit])}" if account.closed else ""
    asked = f", this call could take {amount_text(unit, refusal.wanted[unit])}"
    if denied.least:
        asked += f" and the rest does not pay for {denied.least:,} output tokens"
    return f"{spent} spent and {held} reserved of {cap}{over}{asked}"
