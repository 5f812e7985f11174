"""One call's way from reserve to settle: its accounts, its charge, and why one is denied."""

from collections import deque
from contextvars import ContextVar
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final, NamedTuple

from runguard.accounting.budget_groups import BudgetGroup
from runguard.accounting.figures import Entry, Tally, add_tally
from runguard.accounting.forecast import CALLS_KEPT
from runguard.core.events import ModelCall, RunInfo
from runguard.core.money import UNITS, UNLIMITED, Amount, BudgetStatus, Threshold, edge, to_usd
from runguard.ledger.ledger import Account, Hold, Refusal, Stop
from runguard.pricing.rates import Rates, Unpriced

_NONE: Final[frozenset[Any]] = frozenset()
_NO_LINE: Final = ("", "", "")
RecentCall = tuple[str, str, str, Entry]  # lane, agent and model of a call, and what it took


@dataclass(frozen=True, slots=True)
class UnknownCap:
    """An unknown cap: the function that should return it failed, and its last value is too old."""

    group: BudgetGroup
    scope: str
    reason: str


@dataclass(slots=True)
class AccountLines:
    """The accounts that a call of one agent, model and tool goes on."""

    accounts: tuple[Account, ...]
    groups: tuple[BudgetGroup, ...]
    limits: tuple[list[Amount], ...]  # of each account, what each of its budgets allows
    until: float
    # a cap that is not known: calls are denied, and what is spent all the same is booked
    unknown: UnknownCap | None = None
    names: frozenset[str] = frozenset()  # of the accounts that calls wait for
    in_usd: bool = field(init=False)
    may_stop: bool = field(init=False)  # some budget has a threshold that stops
    may_burn: bool = field(init=False)  # some budget warns when it is spent too fast

    def __post_init__(self) -> None:
        self.in_usd, self.may_stop, self.may_burn = (
            any(a.cap_usd < UNLIMITED for a in self.accounts),
            any(m.stops for m in self.groups),
            any(m.burns for m in self.groups),
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
        """What each tool with a price has cost, in nano-USD."""
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
        "is_probe",
        "is_tool",
        "journal",
        "lane",
        "limited",
        "lines",
        "lowered",
        "max_output",
        "model",
        "number",
        "over",
        "possible_refusal",
        "rates",
        "request",
        "run_costs",
        "tool",
    )

    def __init__(
        self,
        run_costs: RunCosts,
        event: ModelCall,
        lines: AccountLines,
        rates: Rates | Unpriced,
        max_output: int,
        home: Any,
        around: "tuple[Charge, ...]" = (),
    ) -> None:
        self.run_costs, self.lines, self.rates = run_costs, lines, rates
        self.home = home  # the Accounts that opened it
        # what guards around this one with the same ledger hold for the call: it is not held or recorded again
        self.around = around
        self.covers: frozenset[Any] = _NONE  # Accounts of guards inside that hold nothing for one call because of this
        self.agent, self.model, self.tool, self.lane = event.agent, event.model, event.tool, event.lane
        self.at, self.input, self.audio = event.at, event.input_tokens, event.audio_tokens
        self.max_output = max_output  # what was reserved for
        self.candidates = event.candidates  # each may answer with ``max_output``
        self.lowered = False  # the request must be capped to ``max_output``
        # the request said how much it may answer, or was lowered: what was reserved relies on it
        self.limited = event.max_output_tokens is not None
        # the highest usage according to the caller: nano-USD and tokens, None if unknown
        self.bound = event.bound
        self.is_tool = event.is_tool  # the price of a tool call: not a model call
        self.instead_of = event.instead_of  # the model that was asked for, where a threshold chose a cheaper one
        self.hold: Hold | None = None
        self.held = 0  # nano-USD
        self.booked: Entry | None = None
        self.entry = _NO_LINE
        self.over = False  # settled or released
        self.number = 0  # of the call, in the run's journal
        self.is_probe = False  # the first call after its provider asked to wait
        self.journal: Any = None  # of its run, where one is kept: a usage may be reported after the run's end
        self.request: Any = None  # a weak reference to what is sent, where the adapter can read its parts
        # in shadow mode: an enforcing guard would have waited or requested less before it refused
        self.possible_refusal: Denied | None = None

    @property
    def is_capped(self) -> bool:
        """Whether some budget relies on the output limit."""
        return self.hold is not None


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


# The accounts of the call that is being made, from the outermost layer to the innermost.
OWNERS: Final[ContextVar[tuple[Charge, ...]]] = ContextVar("runguard_owners", default=())


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
