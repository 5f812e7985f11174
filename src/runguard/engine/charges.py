"""The charge of a call: the accounts it goes on, their caps, and why a budget refuses it.

``engine/money`` finds the accounts of a call (``AccountFinder``) and opens its ``Charge``. The other files of
``engine`` and the adapters pass the charge on until it is settled. From the bottom up: figures, budgets, charges,
guards inside guards, refusals in words, caps, and the accounts of a call.
"""

import inspect
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self
from urllib.parse import unquote

from runguard.core.decision import Action, Finding, Money
from runguard.core.errors import PolicyError
from runguard.core.events import ModelCall, RunInfo
from runguard.core.identity import LruDict
from runguard.core.money import (
    CALLS_KEPT,
    MOST_COUNT,
    MOST_USD,
    NOTHING,
    UNITS,
    UNLIMITED,
    Amount,
    Budget,
    BudgetStatus,
    Per,
    Scope,
    Threshold,
    Window,
    amount_text,
    cap_from_function,
    edge,
    scope_part,
    shown,
    to_usd,
)
from runguard.ledger.ledger import Account, Hold, Ledger, Refusal, Stop
from runguard.policy.settings import Policy
from runguard.pricing.book import DatedRates
from runguard.pricing.rates import Rates, Unpriced, normalise

if TYPE_CHECKING:
    from runguard.engine.money import Accounts

# ---- Figures of spending: what one agent took from one model inside one tool, and their sums

LINES_KEPT: Final = 256


class Summable:
    """A dataclass of counts that can be added up."""

    __slots__: tuple[str, ...] = ()

    def add(self, other: Self, sign: int = 1) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + sign * getattr(other, name))


@dataclass(slots=True)
class Entry(Summable):
    """What one agent took from one model inside one tool, and what the tool itself cost."""

    calls: int = 0
    input: int = 0
    output: int = 0
    cached: int = 0
    thinking: int = 0
    nano: int = 0
    unpriced: int = 0  # calls without a known price: ``nano`` does not contain their cost
    estimated: int = 0  # calls whose usage or rate was estimated
    tool_calls: int = 0  # calls of tools that have a price
    tool_nano: int = 0  # of ``nano``, what those cost
    searches: int = 0  # on the model's side
    search_nano: int = 0  # of ``nano``, what those cost


Tally = dict[tuple[str, str, str], Entry]  # agent, model, tool


def add_tally(into: Tally, more: Mapping[tuple[str, str, str], Entry], sign: int = 1) -> None:
    for key, entry in list(more.items()):
        if key not in into and len(into) >= LINES_KEPT * 4:
            key = ("(others)", "(others)", "(others)")
        into.setdefault(key, Entry()).add(entry, sign)


def totals(entries: Iterable[Entry]) -> dict[str, Any]:
    total = Entry()
    for entry in entries:
        total.add(entry)
    return {
        "usd": to_usd(total.nano),
        "calls": total.calls,
        "tokens": total.input + total.output,
        "input_tokens": total.input,
        "output_tokens": total.output,
        "cached_tokens": total.cached,
        "thinking_tokens": total.thinking,
        "unpriced_calls": total.unpriced,
        "estimated_calls": total.estimated,
        "paid_tool_calls": total.tool_calls,
        "tools_usd": to_usd(total.tool_nano),
        "searches": total.searches,
        "searches_usd": to_usd(total.search_nano),
    }


def split_by(tally: Tally, position: int) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[Entry]] = {}
    for key, entry in tally.items():
        if key[position]:
            groups.setdefault(key[position], []).append(entry)
    return {name: totals(entries) for name, entries in sorted(groups.items())}


# ---- Budgets that share one account, and the scopes that they count by

NO_LIMIT: Final[Amount] = (UNLIMITED, UNLIMITED, UNLIMITED)


class BudgetGroup:
    """All budgets that count by the same thing over the same window: they share one account per scope."""

    def __init__(self, per: Per, window: Window | None, budgets: list[Budget]) -> None:
        self.per, self.window, self.budgets = per, window, budgets
        self.thresholds = [sorted(budget.thresholds, key=lambda t: t.percent) for budget in budgets]
        self.stops = any(t.action == "stop" for of_one in self.thresholds for t in of_one)
        # A unit waits only where every budget that limits it waits: one that refuses must hold.
        self.waits = tuple(_waits(budgets, unit) for unit in range(3))
        self.may_wait = any(self.waits)
        self.burns = any(budget.burn_alert for budget in budgets)
        # "agent" and "agent:research*" count apart
        patterns = [scope_part(name) for kind, name in per.parts if kind != "label" and name != "*"]
        self.suffix = f"/{'+'.join(patterns)}" if patterns else ""
        self.suffix += "" if window is None else f"@{window.text}" + ("" if window.tz == "UTC" else f"/{window.tz}")

        amounts = [
            (position, unit, budget.function(unit)) for position, budget in enumerate(budgets) for unit in range(3)
        ]
        self.functions = [(position, unit, function) for position, unit, function in amounts if function is not None]
        self.fixed: list[Amount] = [(budget.fixed(0), budget.fixed(1), budget.fixed(2)) for budget in budgets] or [
            NO_LIMIT
        ]


def _waits(budgets: list[Budget], unit: int) -> bool:
    ways = {b.on_exhausted for b in budgets if b.function(unit) is not None or b.fixed(unit) < UNLIMITED}
    return ways == {"wait"}


def budget_groups_of(policy: Policy) -> list[BudgetGroup]:
    budgets = list(policy.budgets)
    if policy.max_usd is not None or policy.max_tokens is not None:
        budgets.insert(0, Budget(usd=policy.max_usd, tokens=policy.max_tokens, per="run"))
    elif not any(Per.parse(b.per).kind == "run" and b.window is None for b in budgets):
        # One that limits nothing, so that a single run can be given a limit through its RunConfig.
        return [BudgetGroup(Per.parse("run"), None, []), *_grouped(budgets)]
    return _grouped(budgets)


def _grouped(budgets: list[Budget]) -> list[BudgetGroup]:
    groups: dict[tuple[Per, Window | None], list[Budget]] = {}
    for budget in budgets:
        window = Window.parse(budget.window, budget.tz) if budget.window is not None else None
        per = Per.parse(budget.per)
        # Models are known by their plain names: "model:models/gemini-*" means what "model:gemini-*" means.
        plain = Per(
            tuple((kind, normalise(name) if kind == "model" and name != "*" else name) for kind, name in per.parts)
        )
        groups.setdefault((plain, window), []).append(budget)
    return [BudgetGroup(per, window, group) for (per, window), group in groups.items()]


def flat_limits(info: RunInfo) -> Amount | None:
    if info.max_usd is None and info.max_tokens is None:
        return None
    return (
        UNLIMITED if info.max_usd is None else info.max_usd,
        UNLIMITED if info.max_tokens is None else info.max_tokens,
        UNLIMITED,
    )


Ceiling = tuple[int | None, int | None]  # nano-USD and tokens


def lower_ceiling(one: Ceiling, other: Ceiling) -> Ceiling:
    """Return the lower of two amounts that a caller can pay for; None: not limited."""
    usd, tokens = (min((n for n in pair if n is not None), default=None) for pair in zip(one, other, strict=True))
    return usd, tokens


def scopes_of(info: RunInfo) -> tuple[str, str, str, str]:
    app, user = scope_part(info.app), scope_part(info.user)
    return (
        f"run:{scope_part(info.run)}",
        f"session:{app}/{user}/{scope_part(info.session)}",
        f"user:{app}/{user}",
        f"app:{app}",
    )


def parse_scope(kind: str, parts: list[str]) -> Scope | None:
    """Return a scope from its key, for the kinds whose key says everything."""
    names = [unquote(part) for part in parts]
    if kind == "app" and len(names) == 1:
        return Scope(kind, "", app=names[0])
    if kind == "model" and len(names) == 1:
        return Scope(kind, "", model=names[0])
    if kind in ("user", "agent", "tool") and len(names) == 2:
        user, agent, tool = (names[1] if kind == wanted else "" for wanted in ("user", "agent", "tool"))
        return Scope(kind, "", app=names[0], user=user, agent=agent, tool=tool)
    if kind == "session" and len(names) == 3:
        return Scope(kind, "", app=names[0], user=names[1], session=names[2])
    if kind == "label" and len(names) == 1 and "=" in names[0]:
        name, _, value = names[0].partition("=")
        return Scope(kind, "", labels={name: value})
    return None


# ---- One call's way from reserve to settle: its accounts, its charge, and why one is denied

_NO_GUARDS: Final[frozenset[Any]] = frozenset()
_NO_LINE: Final = ("", "", "")
FOREVER: Final = float("inf")
_NOT_PRICED: Final[DatedRates] = (FOREVER, FOREVER, Unpriced("", "nobody has asked"))
RecentCall = tuple[str, str, str, Entry]  # lane, agent and model of a call, and what it took


@dataclass(frozen=True, slots=True)
class UnknownCap:
    """An unknown cap: the function that should return it failed, and its last value is too old."""

    group: BudgetGroup
    scope: str
    reason: str


@dataclass(slots=True)
class AccountLines:
    """The accounts that a call of one agent, model and tool goes on, and what its model costs."""

    accounts: tuple[Account, ...]
    groups: tuple[BudgetGroup, ...]
    limits: tuple[list[Amount], ...]  # of each account, what each of its budgets allows
    until: float
    # a cap that is not known: calls are denied, and what is spent all the same is booked
    unknown: UnknownCap | None = None
    names: frozenset[str] = frozenset()  # of the accounts that calls wait for
    price: DatedRates = _NOT_PRICED  # of the model, once a call has asked
    output_limit: int | None = None  # of the model, likewise
    in_usd: bool = field(init=False)
    needs_output: bool = field(init=False)  # some budget counts what a call may be answered with
    may_stop: bool = field(init=False)  # some budget has a threshold that stops
    may_burn: bool = field(init=False)  # some budget warns when it is spent too fast

    def __post_init__(self) -> None:
        self.in_usd = any(a.cap_usd < UNLIMITED for a in self.accounts)
        self.needs_output = self.in_usd or any(a.cap_tokens < UNLIMITED for a in self.accounts)
        self.may_stop, self.may_burn = (
            any(group.stops for group in self.groups),
            any(group.burns for group in self.groups),
        )


class RunCosts:
    """The money of one run."""

    __slots__ = (
        "closed_calls",
        "ended",
        "estimated",
        "flat",
        "info",
        "inherited",
        "lines",
        "nano",
        "open",
        "over",
        "own",
        "recent",
        "tally",
        "unpriced",
    )

    def __init__(self, info: RunInfo, flat: Amount | None) -> None:
        self.info, self.flat = info, flat
        self.tally: Tally = {}
        self.inherited: Tally = {}  # spent by another worker before this one resumed the run
        self.lines: dict[tuple[str, str, str], AccountLines] = {}
        self.nano = self.unpriced = self.estimated = self.closed_calls = 0
        self.open: set[Charge] = set()  # calls under way; no lock is needed to add one
        self.own: set[str] = set()  # scopes that end with the run
        self.recent: deque[RecentCall] = deque(maxlen=CALLS_KEPT)  # its last calls, for a forecast
        self.over = False  # nothing runs and nothing is waited for; kept because it could be run again
        self.ended = False

    def inherit(self, whole: Tally) -> None:
        """Take over what the run has spent on all workers.

        What others spent is part of the run's figures and of nothing else here.
        """
        self.inherited = {}
        add_tally(self.inherited, whole)
        add_tally(self.inherited, self.tally, -1)
        total = Entry()
        for entry in whole.values():
            total.add(entry)
        self.nano, self.unpriced, self.estimated, self.closed_calls = (
            total.nano,
            total.unpriced,
            total.estimated,
            total.calls + total.tool_calls,
        )

    def tool_costs(self) -> dict[str, int]:
        """Return what each tool with a price has cost, in nano-USD."""
        costs: dict[str, int] = {}
        for (_, _, tool), entry in [*self.inherited.items(), *self.tally.items()]:
            if entry.tool_calls:
                costs[tool] = costs.get(tool, 0) + entry.tool_nano
        return costs

    @property
    def calls(self) -> int:
        """Calls that were sent, those under way included."""
        return self.closed_calls + len(self.open)

    @property
    def reserved(self) -> int:
        """Nano-USD held for the calls under way."""
        return sum(charge.held for charge in self.open.copy())

    @property
    def spent_usd(self) -> Decimal | None:
        """Dollars spent; None when nothing has a known price."""
        return None if self.unpriced and self.unpriced == self.calls else to_usd(self.nano)


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


class Burn(NamedTuple):
    """A budget that is spent too fast: how many times as fast as what is left allows. An estimate."""

    fast: float  # over the fast window
    slow: float
    used_up_at: float


@dataclass(slots=True)
class Fired:
    """A threshold that was reached, or a budget that is spent too fast, and the figures of the budget."""

    account: Account
    group: BudgetGroup
    threshold: Threshold
    status: BudgetStatus
    burn: Burn | None = None


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


def status_of(account: Account, unit: int, limit: int, spent: int) -> BudgetStatus:
    held, over = edge(unit, account.held[unit]), edge(unit, account.overrun[unit])
    return BudgetStatus(
        account.scope,
        UNITS[unit],
        edge(unit, spent),
        held,
        edge(unit, limit),
        over,
        account.window,
        account.ends,
        account.closed,
    )


def statuses_of(account: Account) -> list[BudgetStatus]:
    return [
        status_of(account, unit, cap, account.spent[unit]) for unit, cap in enumerate(account.caps) if cap < UNLIMITED
    ]


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
    """Return the unit, what the call would have come to, and the limit."""
    unit = refusal.unit
    return UNITS[unit], edge(unit, refusal.spent[unit] + refusal.wanted[unit]), edge(unit, refusal.account.caps[unit])


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


# ---- The caps in force for a scope: fixed amounts, and amounts that functions give

_log: Final = logging.getLogger("runguard")
KEPT_S: Final = 600.0  # how long the last value of a function counts after it was given
_SCOPES_KEPT: Final = 10_000
_REPORTS: Final = 10  # failures that are reported within ...
_REPORTS_S: Final = 60.0  # ... so many seconds: a plan service that is down fails for every user
_CapKey = tuple[BudgetGroup, int, int, str]  # group, position of the budget, unit, scope


@dataclass(slots=True)
class Caps:
    """What a group's budgets allow a scope."""

    limits: list[Amount]  # of each budget
    unknown: UnknownCap | None = None
    is_current: bool = True  # every function gave a value just now; else they are asked again with the next call


class CapFunctions:
    """Asks the functions of one policy's budgets, and remembers what they gave. Safe to use from many threads.

    A function that raises, or returns something that is not an amount, does not remove its cap: its last value for that
    scope counts for ten more minutes, and then the cap is unknown. None is a value: no limit.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._given = LruDict[_CapKey, tuple[int, float]](_SCOPES_KEPT)  # the last cap, and when it was given
        self._failing = LruDict[_CapKey, tuple[str, bool]](_SCOPES_KEPT)  # the cause, and whether it was reported
        self._reports: list[float] = []
        self._unreported = 0
        self.errors = 0
        # scope, unit, and what is wrong; "" when it works again
        self.on_change: Callable[[str, str, str], None] | None = None

    def of(self, group: BudgetGroup, scope: Scope, flat: Amount | None) -> Caps:
        """``flat``: the run's own limits. They replace those of the policy in the units that they give."""
        if not group.functions and flat is None:
            return Caps(group.fixed)
        limits = [list(limit) for limit in group.fixed]
        found = Caps([])
        for position, unit, function in group.functions:
            if flat is None or unit > 1 or flat[unit] >= UNLIMITED:
                limits[position][unit] = self._ask((group, position, unit, scope.key), function, scope, found)
        for limit in limits:
            for unit, own in enumerate(flat[:2] if flat is not None else ()):
                limit[unit] = own if own < UNLIMITED else limit[unit]
        found.limits = [(usd, tokens, calls) for usd, tokens, calls in limits]
        return found

    def _ask(self, key: _CapKey, function: Callable[[Scope], Any], scope: Scope, found: Caps) -> int:
        """Return the cap that a function gives, or its last one. Where neither is known, ``found`` says so."""
        unit = UNITS[key[2]]
        now = self._clock()
        try:
            cap = _cap_from(function, scope, key[2])
        except Exception as error:
            cause = type(error).__name__
            reason = f"the function for {unit} {error if isinstance(error, _NotACapError) else f'raised {cause}'}"
            with self._lock:
                last, given_at = self._given.get(key, (UNLIMITED, float("-inf")))
            is_known = abs(now - given_at) <= KEPT_S
            found.is_current = False
            if not is_known:
                found.unknown = found.unknown or UnknownCap(
                    key[0], scope.key, f"{reason}; it gave no cap in the last {KEPT_S / 60:.0f} minutes"
                )
            self._failed(key, cause, reason, is_known, now, error)
            return last
        self._works(key, cap, now)
        return cap

    def _works(self, key: _CapKey, cap: int, now: float) -> None:
        with self._lock:
            self._given[key] = (cap, now)
            _, was_reported = self._failing.pop(key, ("", False))
        if was_reported:
            _log.warning(
                "runguard.budget_function_back: the function for %s gives a cap for %s again", UNITS[key[2]], key[3]
            )
            self._tell(key, "")

    def _failed(self, key: _CapKey, cause: str, reason: str, is_known: bool, now: float, error: Exception) -> None:
        """Report a failure once per scope and cause, and only so many a minute."""
        with self._lock:
            self.errors += 1
            before, was_reported = self._failing.get(key, ("", False))
            if before == cause and was_reported:
                return
            self._reports = [at for at in self._reports if 0 <= now - at < _REPORTS_S]
            is_reported = len(self._reports) < _REPORTS
            self._failing[key] = (cause, is_reported or was_reported)
            if not is_reported:
                self._unreported += before != cause
                return
            self._reports.append(now)
            more, self._unreported = self._unreported, 0
        follows = (
            f"its last value counts for up to {KEPT_S / 60:.0f} minutes, then calls are denied"
            if is_known
            else "calls are denied until it gives one"
        )
        others = f" ({more} more scopes were not reported)" if more else ""
        _log.error(
            "runguard.budget_function_failed: no cap for %s: %s; %s%s",
            key[3],
            reason,
            follows,
            others,
            # the traceback helps where the function raised; a wrong value is in the message
            exc_info=None if isinstance(error, _NotACapError) else error,
        )
        self._tell(key, f"{reason}; {follows}")

    def _tell(self, key: _CapKey, wrong: str) -> None:
        if self.on_change is not None:
            self.on_change(key[3], UNITS[key[2]], wrong)


class _NotACapError(Exception):
    """A function returned something that is not an amount."""


def _cap_from(function: Callable[[Scope], Any], scope: Scope, unit: int) -> int:
    given = function(scope)
    if inspect.isawaitable(given):
        if inspect.iscoroutine(given):
            given.close()
        raise _NotACapError("is async; it must return the amount at once")
    try:
        return cap_from_function(given, unit)
    except PolicyError:
        most = MOST_USD if unit == 0 else MOST_COUNT
        raise _NotACapError(f"returned {shown(given)}, not an amount from 0 to {most:,} or None for no limit") from None


# ---- Which accounts a call goes on, and which ones a scope names: a policy's budgets, looked up in a ledger

_NO_CEILING: Final = (None, None)


class AccountFinder:
    """One policy's budgets on one ledger."""

    def __init__(self, policy: Policy, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._ledger, self._clock = ledger, clock
        self.groups = budget_groups_of(policy)
        self.caps = CapFunctions(clock)

    def adopt_shared(self, heir: "AccountFinder") -> None:
        """Use the budgets of another policy for every scope but the run."""
        self.groups = [
            *(group for group in self.groups if group.per.kind == "run"),
            *(group for group in heir.groups if group.per.kind != "run"),
        ]

    def of_call(self, run_costs: RunCosts, event: ModelCall, anew: bool = False) -> AccountLines:
        """Return all accounts that a call goes on, kept until the first of their periods is over.

        ``anew``: those of now, not of the call's time.
        """
        key = (event.agent, event.model, event.tool)
        known = run_costs.lines.get(key)
        if known is not None and known.until == FOREVER:  # no budget has a window
            return known
        at = self._ledger.period_time(self._clock() if anew else event.at)
        if known is not None and at < known.until:
            return known
        lines, is_current = self._find_lines(run_costs, event, at)
        if len(run_costs.lines) >= LINES_KEPT:
            run_costs.lines.clear()
        if is_current:
            run_costs.lines[key] = lines
        else:
            run_costs.lines.pop(key, None)
        return lines

    def of_scope(self, scope: str, costs_by_run: Mapping[str, RunCosts]) -> list[Account]:
        """Return the accounts of a scope in their current periods, made where it has spent nothing yet.

        ``costs_by_run``: of the runs under way.
        """
        found = self._ledger.find(scope)
        now = self._ledger.period_time(self._clock())  # as the store has just reported it
        # of several periods that are not over, the latest: the clock was set back
        found = list({a.meter: a for a in found if a.ends is None or a.ends > now}.values())
        kind, _, rest = scope.partition(":")
        parts = rest.split("/")
        if kind == "session" and len(parts) == 2 and not found:  # without the user, if only one matches
            scopes = {
                a.scope
                for a in self._ledger.accounts()
                if a.scope.startswith(f"session:{parts[0]}/") and a.scope.endswith(f"/{parts[1]}")
            }
            if len(scopes) == 1:
                return [a for a in self._ledger.find(scopes.pop()) if a.ends is None or a.ends > now]
        have = {a.meter for a in found}
        for group in self.groups:  # a scope that has spent nothing yet
            if group.per.kind == kind and (named := _scope_named(kind, parts, costs_by_run)) is not None:
                key = group.per.key(named)
                if key is None or f"{key}{group.suffix}" in have:
                    continue  # its caps were found with more than the scope's name: keep them
                run_costs = costs_by_run.get(named.run)
                made = self._account(group, named, now, run_costs)
                account, caps = made if made is not None else (None, None)
                if caps is not None and caps.unknown is not None:
                    raise PolicyError(
                        f"the cap of {scope} is not known: {caps.unknown.reason}; correct the function, then try again"
                    )
                if account is None:
                    continue
                if run_costs is not None:
                    run_costs.own.add(account.scope)
                found.append(account)
        return found

    def _find_lines(self, run_costs: RunCosts, event: ModelCall, at: float) -> tuple[AccountLines, bool]:
        """Return the accounts, and whether every cap function gave a value just now."""
        info = run_costs.info
        accounts: list[Account] = []
        groups: list[BudgetGroup] = []
        allowed: list[list[Amount]] = []
        until = FOREVER
        unknown: UnknownCap | None = None
        is_current = True
        names: frozenset[str] = frozenset()
        for group in self.groups:
            scope = Scope(
                group.per.kind,
                "",
                info.app,
                info.user,
                info.session,
                info.run,
                event.agent,
                normalise(event.model) if event.model else "",
                event.tool,
                info.labels,
            )
            found = self._account(group, scope, at, run_costs)
            if found is None:
                continue
            account, caps = found
            unknown, is_current = unknown or caps.unknown, is_current and caps.is_current
            if account is None:
                continue
            if account.ends is not None:
                until = min(until, account.ends)
            if any(kind == "run" for kind, _ in group.per.parts):
                run_costs.own.add(account.scope)
            if group.may_wait:
                names |= {account.meter}
            accounts.append(account)
            groups.append(group)
            allowed.append(caps.limits)
        return AccountLines(tuple(accounts), tuple(groups), tuple(allowed), until, unknown, names), is_current

    def _account(
        self, group: BudgetGroup, scope: Scope, at: float, run_costs: RunCosts | None
    ) -> tuple[Account | None, Caps] | None:
        """Return the account of a scope, none where nothing is limited, and its caps.

        None: the group is not about this scope.
        """
        key = group.per.key(scope)
        if key is None:
            return None
        named = Scope(
            scope.kind,
            key,
            scope.app,
            scope.user,
            scope.session,
            scope.run,
            scope.agent,
            scope.model,
            scope.tool,
            scope.labels,
        )
        own = run_costs if group.per.kind == "run" and group.window is None else None
        caps = self.caps.of(group, named, own.flat if own is not None else None)
        if own is not None and own.info.ceiling != _NO_CEILING:
            caps.limits = [_lowered(limit, own.info.ceiling) for limit in caps.limits]
        usd, tokens, calls = (min(limit[unit] for limit in caps.limits) for unit in range(3))
        if (usd, tokens, calls) == NO_LIMIT and caps.unknown is None:
            return None, caps
        name, begins, ends = _account_key(group, key, at)
        account = self._in_memory(name, key) if caps.unknown is not None else None
        if account is None:
            account = self._ledger.account(
                name, key, group.window.text if group.window else None, ends, (usd, tokens, calls), begins
            )
            account.alert = NOTHING if any(group.thresholds) else NO_LIMIT  # found anew at the next settle
        return account, caps

    def _in_memory(self, name: str, key: str) -> Account | None:
        """Return the account in memory whose cap is not known now: it keeps the cap by which other runs still go."""
        return (
            None
            if self._ledger.is_shared
            else next((account for account in self._ledger.find(key) if account.key == name), None)
        )


def _lowered(limit: Amount, ceiling: Ceiling) -> Amount:
    """Return a limit of a run, lowered to what its caller can pay for."""
    usd, tokens = ceiling
    return (
        limit[0] if usd is None else min(limit[0], usd),
        limit[1] if tokens is None else min(limit[1], tokens),
        limit[2],
    )


def _account_key(group: BudgetGroup, key: str, at: float) -> tuple[str, float | None, float | None]:
    """Return an account's key, and when its period begins and ends."""
    if group.window is None:
        return f"{key}{group.suffix}#", None, None
    period, begins, ends = group.window.bounds(at)
    return f"{key}{group.suffix}#{period}", begins, ends


def _scope_named(kind: str, parts: list[str], costs_by_run: Mapping[str, RunCosts]) -> Scope | None:
    if kind != "run":
        return parse_scope(kind, parts)
    run_costs = costs_by_run.get(unquote(parts[0])) if len(parts) == 1 else None
    if run_costs is None:
        return None
    info = run_costs.info
    return Scope("run", "", info.app, info.user, info.session, info.run, labels=info.labels)
