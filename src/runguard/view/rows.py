"""The results of reading a store, as plain values. ``plain`` converts them to JSON data, money as decimal strings."""

from dataclasses import dataclass, fields, is_dataclass
from decimal import Decimal
from typing import Any

from runguard.engine.forecast import BudgetForecast


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """One unit of one budget on one scope in its current period. The cap is ``limit`` plus ``granted``."""

    scope: str
    window: str | None
    unit: str
    limit: Decimal | int
    granted: Decimal | int
    spent: Decimal | int
    reserved: Decimal | int
    overrun: Decimal | int
    share: float  # spent plus reserved, divided by the cap
    closed: bool
    ends: float | None
    forecast: BudgetForecast | None = None  # None: no window, or too few calls


@dataclass(frozen=True, slots=True)
class Ahead:
    """A limit that a run will reach: how many calls still fit, and what they will cost. An estimate."""

    calls_left: int
    usd: Decimal | None
    limit: Decimal | int | None
    unit: str
    agent: str  # "": the whole run


@dataclass(frozen=True, slots=True)
class RunForecast:
    calls: int  # that it is based on
    cap: Ahead | None
    window: Ahead | None  # of the model
    tier: Ahead | None  # a higher price of the model


@dataclass(frozen=True, slots=True)
class RunningRow:
    """A recently active run. Facts that its worker did not report are None."""

    run: str
    worker: str
    silent_s: float  # since its last heartbeat
    seconds: float | None
    app: str
    user: str
    session: str
    model_calls: int | None
    tool_calls: int | None
    tokens: int | None
    in_flight: int | None
    spent_usd: Decimal | None
    reserved_usd: Decimal | None
    unpriced_calls: int
    estimated_calls: int
    nudges: int
    stopped: str | None  # the rule
    forecast: RunForecast | None = None  # None: too few calls
    notes: tuple[str, ...] = ()  # agents on a cheaper model, and a prompt cache that is no longer used
    waiting: int = 0  # calls that wait for room in a budget, or for their provider


@dataclass(frozen=True, slots=True)
class BreakerRow:
    tool: str
    state: str  # as stored; an open breaker allows one probe after its time is up
    failures: int
    runs: int  # runs with failures
    opened_at: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """Usage of calls. Calls without a price are counted, but ``usd`` does not contain them."""

    name: str
    usd: Decimal
    tokens: int
    calls: int  # of models
    unpriced: int
    estimated: int
    tool_calls: int = 0  # of tools that have a price


@dataclass(frozen=True, slots=True)
class Spend:
    """Spending over time, grouped by one property of the calls."""

    by: str
    since: float
    until: float
    step: float  # seconds of one bucket
    begins: tuple[float, ...]  # of each bucket
    names: tuple[str, ...]  # the most expensive ones; the last may be "others"
    usd: tuple[tuple[float, ...], ...]  # for each name, for each bucket
    tokens: tuple[tuple[int, ...], ...]
    totals: tuple[Figures, ...]
    total: Figures
    capped_at: int | None  # number of records read, if they do not reach back to ``since``


@dataclass(frozen=True, slots=True)
class Projection:
    """The projected cost of the run up to ADK's own cap on model calls."""

    cap: int
    made: int
    mean_usd: Decimal  # of the last few calls
    more_usd: Decimal
    total_usd: Decimal


@dataclass(frozen=True, slots=True)
class Repeat:
    what: str  # "call" (identical), "hand-off", or the unit in which a rule counts
    name: str
    times: int
    same_answer: int  # how often the most frequent answer came; 0: unknown


@dataclass(slots=True)
class StoryRow:
    """One event of a run."""

    after_s: float
    agent: str
    lane: str
    kind: str  # begin, hand, model, tool, decision
    what: str
    name: str = ""  # of the model, the tool, or the agent it was handed to
    nth_call: int = 0  # how often this identical call was made so far
    nth_answer: int = 0  # how often this identical answer came for it so far
    outcome: str = ""
    tokens_in: int | None = None
    tokens_out: int | None = None
    usd: Decimal | None = None
    estimated: bool = False
    decision: str = ""


@dataclass(frozen=True, slots=True)
class Story:
    """The course of a run up to its stop."""

    trip: dict[str, Any]
    rows: tuple[StoryRow, ...]
    left_out: int  # rows before the first one in ``rows``
    source: str  # "steps", "calls" (an older store: only model calls) or "trip" (nothing else is stored)
    repeats: tuple[Repeat, ...]
    why: tuple[str, ...]  # as text; empty if the reason is a repetition
    command: str  # shell command to continue; empty if there is none
    usd: Decimal | None  # up to the stop; None: unknown
    later_usd: Decimal  # in flight at the stop, in other branches, or after a stop in shadow mode
    unpriced: int
    estimated: int
    projection: Projection | None


def plain(value: Any) -> Any:
    """Convert a value to JSON data."""
    if isinstance(value, Decimal):
        return f"{value:f}"
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value
