"""What a look at a store answers: plain values. ``plain`` turns them into JSON, money as decimal strings."""

from dataclasses import dataclass, fields, is_dataclass
from decimal import Decimal
from typing import Any


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """One unit of one budget on one scope in its current period. What may be spent is ``limit`` plus ``granted``."""

    scope: str
    window: str | None
    unit: str
    limit: Decimal | int
    granted: Decimal | int
    spent: Decimal | int
    reserved: Decimal | int
    overrun: Decimal | int
    share: float  # of what may be spent, spent and reserved together
    closed: bool
    ends: float | None


@dataclass(frozen=True, slots=True)
class RunningRow:
    """A run that gave a sign of life lately. Facts that its worker did not tell are None."""

    run: str
    worker: str
    silent_s: float  # since its last sign of life
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


@dataclass(frozen=True, slots=True)
class BreakerRow:
    tool: str
    state: str  # as stored: an open one whose time is up lets one probe through
    failures: int
    runs: int  # that saw them
    opened_at: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """What calls took. Calls without a price are counted and not part of ``usd``."""

    name: str
    usd: Decimal
    tokens: int
    calls: int
    unpriced: int
    estimated: int


@dataclass(frozen=True, slots=True)
class Spend:
    """What was spent over time, by one property of the calls."""

    by: str
    since: float
    until: float
    step: float  # seconds of one bucket
    begins: tuple[float, ...]  # of each bucket
    names: tuple[str, ...]  # the dearest ones; the last may be "others"
    usd: tuple[tuple[float, ...], ...]  # for each name, for each bucket
    tokens: tuple[tuple[int, ...], ...]
    totals: tuple[Figures, ...]
    total: Figures
    capped_at: int | None  # only the last so many records were read, and they do not reach back to ``since``


@dataclass(frozen=True, slots=True)
class Projection:
    """What the run might have cost, up to ADK's own cap on model calls. A projection, not a measurement."""

    cap: int
    made: int
    mean_usd: Decimal  # of the last few calls
    more_usd: Decimal
    total_usd: Decimal


@dataclass(frozen=True, slots=True)
class Repeat:
    what: str  # "call" (the very same one), "hand-off", or the unit in which a rule counts
    name: str
    times: int
    same_answer: int  # how often the most frequent answer came; 0: not known


@dataclass(slots=True)
class StoryRow:
    """One thing that happened in a run."""

    after_s: float
    agent: str
    lane: str
    kind: str  # begin, hand, model, tool, decision
    what: str
    name: str = ""  # of the model, the tool, or whom it was handed to
    nth_call: int = 0  # how often this very call was made so far
    nth_answer: int = 0  # how often this very answer came for it so far
    outcome: str = ""
    tokens_in: int | None = None
    tokens_out: int | None = None
    usd: Decimal | None = None
    estimated: bool = False
    decision: str = ""


@dataclass(frozen=True, slots=True)
class Story:
    """How a run came to its stop."""

    trip: dict[str, Any]
    rows: tuple[StoryRow, ...]
    left_out: int  # rows before the first one shown
    source: str  # "steps", "calls" (an older store: model calls only) or "trip" (nothing else is left)
    repeats: tuple[Repeat, ...]
    why: tuple[str, ...]  # in words; empty when the reason is what repeated
    command: str  # for a shell, to go on; empty where there is none
    usd: Decimal | None  # up to the stop; None: not known
    later_usd: Decimal  # in flight at the stop, in other branches, or after a stop that was only watched
    unpriced: int
    estimated: int
    projection: Projection | None


def plain(value: Any) -> Any:
    """JSON-ready."""
    if isinstance(value, Decimal):
        return f"{value:f}"
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value
