"""What an account is about: budgets that share one, the money of a run, one call's way from reserve to settle, and why
one is denied.
"""

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final
from urllib.parse import unquote

from runguard.core.budget import Budget, BudgetStatus
from runguard.core.events import RunInfo
from runguard.core.money import UNITS, UNLIMITED, Amount, edge, to_usd
from runguard.core.periods import Window
from runguard.core.scope import Per, Scope, scope_part
from runguard.core.threshold import Threshold
from runguard.ledger.base import Account, Hold, Refusal
from runguard.ledger.kill_switch import Stop
from runguard.policy.settings import Policy
from runguard.pricing.model_ids import normalise
from runguard.pricing.rates import Rates, Unpriced

LINES_KEPT: Final = 256


NO_LIMIT: Final[Amount] = (UNLIMITED, UNLIMITED, UNLIMITED)


class Meter:
    """All budgets that count by the same thing over the same window: they share one account per scope."""

    def __init__(self, per: Per, window: Window | None, budgets: list[Budget]) -> None:
        self.per, self.window, self.budgets = per, window, budgets
        self.thresholds = [sorted(budget.thresholds, key=lambda t: t.percent) for budget in budgets]
        self.stops = any(t.action == "stop" for of_one in self.thresholds for t in of_one)
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


@dataclass(frozen=True, slots=True)
class UnknownCap:
    """An unknown cap: the function that should return it failed, and its last value is too old."""

    meter: Meter
    scope: str
    reason: str


@dataclass(slots=True)
class Lines:
    """The accounts that a call of one agent, model and tool goes on."""

    accounts: tuple[Account, ...]
    meters: tuple[Meter, ...]
    limits: tuple[list[Amount], ...]  # of each account, what each of its budgets allows
    until: float
    # a cap that is not known: calls are denied, and what is spent all the same is booked
    unknown: UnknownCap | None = None
    in_usd: bool = field(init=False)
    may_stop: bool = field(init=False)  # some budget has a threshold that stops

    def __post_init__(self) -> None:
        self.in_usd, self.may_stop = (
            any(a.cap_usd < UNLIMITED for a in self.accounts),
            any(m.stops for m in self.meters),
        )


@dataclass(slots=True)
class Entry:
    """What one agent took from one model inside one tool."""

    calls: int = 0
    input: int = 0
    output: int = 0
    cached: int = 0
    thinking: int = 0
    nano: int = 0
    unpriced: int = 0  # calls whose price nobody knows: their cost is not in ``nano``
    estimated: int = 0  # calls whose usage or rate was estimated

    def count(self, one: "Entry") -> None:
        """Add the entry of one call, most of which is nothing."""
        self.calls += one.calls
        self.nano += one.nano
        if one.input or one.output:
            self.input += one.input
            self.output += one.output
            self.cached += one.cached
            self.thinking += one.thinking
        if one.unpriced or one.estimated:
            self.unpriced += one.unpriced
            self.estimated += one.estimated

    def add(self, other: "Entry", sign: int = 1) -> None:
        self.calls += sign * other.calls
        self.input += sign * other.input
        self.output += sign * other.output
        self.cached += sign * other.cached
        self.thinking += sign * other.thinking
        self.nano += sign * other.nano
        self.unpriced += sign * other.unpriced
        self.estimated += sign * other.estimated


Tally = dict[tuple[str, str, str], Entry]  # agent, model, tool


class Purse:
    """The money of one run."""

    __slots__ = (
        "calls",
        "ended",
        "estimated",
        "flat",
        "info",
        "inherited",
        "lines",
        "nano",
        "over",
        "own",
        "reserved",
        "tally",
        "unpriced",
    )

    def __init__(self, info: RunInfo, flat: Amount | None) -> None:
        self.info, self.flat = info, flat
        self.tally: Tally = {}
        self.inherited: Tally = {}  # spent by another worker before this one resumed the run
        self.lines: dict[tuple[str, str, str], Lines] = {}
        self.nano = self.reserved = self.unpriced = self.estimated = self.calls = 0
        self.own: set[str] = set()  # scopes that end with the run
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
        self.nano, self.unpriced, self.estimated, self.calls = total.nano, total.unpriced, total.estimated, total.calls

    @property
    def spent_usd(self) -> Decimal | None:
        """Dollars spent; None when nothing has a known price."""
        return None if self.unpriced and self.unpriced == self.calls else to_usd(self.nano)


@dataclass(slots=True)
class Charge:
    """One model call on its way from reserve to settle."""

    purse: Purse
    agent: str
    model: str
    tool: str
    rates: Rates | Unpriced
    input: int
    audio: int
    max_output: int  # what was reserved for
    at: float
    lane: str
    lines: Lines
    hold: Hold | None = None
    held: int = 0  # nano-USD
    lowered: bool = False  # the request must be capped to ``max_output``
    limited: bool = False  # the request said how much it may answer, or was lowered: what was reserved relies on it
    booked: Entry | None = None
    entry: tuple[str, str, str] = ("", "", "")
    over: bool = False  # settled or released
    candidates: int = 1  # each may answer with ``max_output``
    home: Any = None  # the Accounts that opened it
    # a layer around this one has the same ledger and owns the call: what it holds is not held again
    within: bool = False
    # what the caller says it may take: nano-USD and tokens, None where nobody knows
    bound: tuple[int | None, int | None] | None = None
    number: int = 0  # of the call, in the run's journal
    journal: Any = None  # of its run, where one is kept: what a call took may be told after the run's end
    doubt: "Denied | None" = None  # in the shadow: enforcing would have waited or asked for less before it refused

    @property
    def is_capped(self) -> bool:
        """Whether some budget relies on the output limit."""
        return self.hold is not None


@dataclass(slots=True)
class Fired:
    """A threshold that was reached, and its budget as it stands."""

    account: Account
    meter: Meter
    threshold: Threshold
    status: BudgetStatus


@dataclass(slots=True)
class Denied:
    """Why a call may not be made."""

    refusal: Refusal | None = None
    meter: Meter | None = None
    unpriced: Unpriced | None = None
    fraction: float = 0.0  # a stop threshold that was reached
    stop: Stop | None = None  # somebody threw the kill switch
    outage: str = ""  # the store is away
    unknown: UnknownCap | None = None
    least: int = 0  # output tokens below which an answer was not worth asking for


def meters_of(policy: Policy) -> list[Meter]:
    budgets = list(policy.budgets)
    if policy.max_usd is not None or policy.max_tokens is not None:
        budgets.insert(0, Budget(usd=policy.max_usd, tokens=policy.max_tokens, per="run"))
    elif not any(Per.parse(b.per).kind == "run" and b.window is None for b in budgets):
        # One that limits nothing, so that a single run can be given a limit through its RunConfig.
        return [Meter(Per.parse("run"), None, []), *_grouped(budgets)]
    return _grouped(budgets)


def _grouped(budgets: list[Budget]) -> list[Meter]:
    groups: dict[tuple[Per, Window | None], list[Budget]] = {}
    for budget in budgets:
        window = Window.parse(budget.window, budget.tz) if budget.window is not None else None
        per = Per.parse(budget.per)
        # Models are known by their plain names: "model:models/gemini-*" means what "model:gemini-*" means.
        plain = Per(
            tuple((kind, normalise(name) if kind == "model" and name != "*" else name) for kind, name in per.parts)
        )
        groups.setdefault((plain, window), []).append(budget)
    return [Meter(per, window, group) for (per, window), group in groups.items()]


def flat_limits(info: RunInfo) -> Amount | None:
    if info.max_usd is None and info.max_tokens is None:
        return None
    return (
        UNLIMITED if info.max_usd is None else info.max_usd,
        UNLIMITED if info.max_tokens is None else info.max_tokens,
        UNLIMITED,
    )


# The accounts of the call that is being made, from the outermost layer to the innermost.
OWNERS: Final[ContextVar[tuple[Charge, ...]]] = ContextVar("runguard_owners", default=())


def worst_of(charge: Charge) -> Amount:
    if charge.bound is not None:
        usd, tokens = charge.bound
        return (_least_cap(charge, 0) if usd is None else usd), (_least_cap(charge, 1) if tokens is None else tokens), 1
    output = charge.max_output * charge.candidates
    cost = charge.rates.worst(charge.input, output, charge.audio) if isinstance(charge.rates, Rates) else 0
    return cost, charge.input + output, 1


def _least_cap(charge: Charge, unit: int) -> int:
    """Where nobody knows what a call may take, it asks for everything: nothing else is let in beside it."""
    least = min((account.caps[unit] for account in charge.lines.accounts), default=UNLIMITED)
    return max(least, 1) if least < UNLIMITED else 0  # never 0: an unknown cost does not fit into a cap of 0


def scopes_of(info: RunInfo) -> tuple[str, str, str, str]:
    app, user = scope_part(info.app), scope_part(info.user)
    return (
        f"run:{scope_part(info.run)}",
        f"session:{app}/{user}/{scope_part(info.session)}",
        f"user:{app}/{user}",
        f"app:{app}",
    )


def parse_scope(kind: str, parts: list[str]) -> Scope | None:
    """A scope from its key, for the kinds whose key says everything."""
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
    }


def split_by(tally: Tally, position: int) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[Entry]] = {}
    for key, entry in tally.items():
        if key[position]:
            groups.setdefault(key[position], []).append(entry)
    return {name: totals(entries) for name, entries in sorted(groups.items())}
