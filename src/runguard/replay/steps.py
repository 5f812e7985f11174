"""The form into which every reader converts a recorded run: its names and a stream of steps."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any, Final

from runguard.core.events import Outcome
from runguard.pricing.rates import Usage

# exceptions caused by a value of the wrong type
ODD: Final = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
_FAULTS_SHOWN: Final = 20
_FAULT_CHARS: Final = 300
_IN_A_ROW: Final = 10_000
_WORD_CHARS: Final = 4_096
_LAST_TIME: Final = 1e12  # seconds


@dataclass(slots=True)
class Turn:
    """A user message that begins a run, or the resume of a paused run after other runs."""

    at: float | None
    run: str = ""  # the recording's own name of that run
    resumes: bool = False


@dataclass(slots=True)
class Resumed:
    """An answer from outside: the time since the last step was a pause."""

    at: float | None


@dataclass(slots=True)
class Asked:
    """A model call with its answer."""

    at: float | None
    agent: str
    branch: str = ""
    model: str = ""
    usage: Usage | None = None  # None: not reported
    estimated: bool = False
    batch: str = ""  # names this response
    text_id: int = 0  # identity of the final text of an activation
    goes_on: bool = False  # it called tools: the agent continues with their answers
    after_answer: bool = False  # a call of the framework after the run's final answer
    refused: bool = False  # RunGuard answered instead of the model
    scope: str = ""  # id of the call that delegated the task in which this happened
    nano: int | None = None  # cost in nano-USD, if recorded
    is_cut: bool = False  # it hit its output limit
    text: str = ""  # the final text of an activation, where it is known
    is_share: bool = False  # a share of the totals of a run: the size of this prompt is unknown
    # of a remote agent: what each of its model calls took; empty: it did not say
    reports: tuple[Usage, ...] | None = None


@dataclass(slots=True)
class Called:
    """A tool call requested by the last response of that agent."""

    at: float | None
    agent: str
    branch: str
    batch: str
    id: str
    tool: str
    args: Any = None
    scope: str = ""  # as in ``Asked``


@dataclass(slots=True)
class Answered:
    """The answer to a call. Answers of one recorded event are one observation."""

    at: float | None
    agent: str
    id: str
    tool: str
    value: object = None
    outcome: Outcome | None = None  # if the value does not show it
    event: str = ""
    ends: bool = False  # the agent ends after it
    pending: bool = False  # waits for a confirmation or a sign-in: neither failure nor repetition


@dataclass(slots=True)
class Passed:
    """A hand-off to another agent."""

    at: float | None
    agent: str
    branch: str
    target: str
    scope: str = ""  # as in ``Asked``


@dataclass(slots=True)
class Changed:
    """The state has changed, or a node has given its output, without a tool call."""

    at: float | None
    agent: str
    branch: str
    value: int  # identity of the new values
    scope: str = ""  # as in ``Asked``


@dataclass(slots=True)
class Delegated:
    """An agent runs the call of another agent as its own task: no tool was called."""

    id: str


@dataclass(slots=True)
class Wrote:
    """An entry of the journal that the guard wrote."""

    at: float | None
    entry: dict[str, Any]


Step = Turn | Resumed | Asked | Called | Answered | Passed | Changed | Delegated | Wrote


class UnreadableError(Exception):
    """A source cannot be replayed; the message says why."""


@dataclass(slots=True)
class Faults:
    """Counts records that could not be read and keeps the first messages."""

    count: int = 0
    first: list[str] = field(default_factory=list)
    in_a_row: int = 0  # since the last record that could be read

    def add(self, where: str, what: str) -> None:
        """Add a message. ``where`` and ``what`` may quote the file: both are shortened and put on one line."""
        self.count += 1
        self.in_a_row += 1
        if len(self.first) < _FAULTS_SHOWN:
            self.first.append(f"{_short(where)}: {_short(what)}")

    def taken(self) -> "Faults":
        """Return the faults found so far and reset this object."""
        found = Faults(self.count, self.first)
        self.count, self.first = 0, []
        return found

    def give_up(self, where: str) -> bool:
        """Return whether too many records in a row were unreadable to continue."""
        if self.in_a_row < _IN_A_ROW:
            return False
        self.add(where, f"{_IN_A_ROW:,} records in a row cannot be read: ignoring the rest")
        return True

    def merge(self, other: "Faults") -> None:
        self.count += other.count
        self.first.extend(other.first[: _FAULTS_SHOWN - len(self.first)])


@dataclass(slots=True)
class RecordedRun:
    """One conversation of one session. ``steps`` can be iterated once."""

    id: str
    steps: Iterator[Step]
    app: str = ""
    user: str = ""
    session: str = ""
    source: str = ""
    success: bool | None = None
    capped: bool | None = None
    labels: Mapping[str, str] | None = None
    unknown: frozenset[str] = frozenset()  # for a run without steps: the figures that its line does not contain


class CheckedRun(RecordedRun):
    """A run whose reader has checked every value of its steps."""

    __slots__ = ()


# ---- values of a file -----------------------------------------------------------------------------------------------


def word(value: Any) -> str:
    """Return a name or an id as a string; "" if the value is neither a string nor a number."""
    if value.__class__ is str:
        text: str = value[:_WORD_CHARS]
        # half a surrogate pair cannot be encoded
        return text if text.isascii() else text.encode("utf-8", "replace").decode()
    return str(value) if value is not None and isinstance(value, int | float) and not isinstance(value, bool) else ""


def time_of(value: Any) -> float | None:
    """Return a time in seconds from a number or an ISO date; None for anything else."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if -_LAST_TIME < value < _LAST_TIME else None
    if not isinstance(value, str):
        return None
    try:
        moment = datetime.fromisoformat(value)
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def _short(text: str) -> str:
    line = " ".join(text[: 2 * _FAULT_CHARS].encode("utf-8", "replace").decode().split())
    return line if len(line) <= _FAULT_CHARS else f"{line[:_FAULT_CHARS]}…"


# ---- values that the guard can handle -------------------------------------------------------------------------------

_MOST_TOKENS: Final = 10**30  # tokens of one model call; sums and costs below this can still be printed
_counts_of: Final = attrgetter(*(field.name for field in fields(Usage)))
_WORDS: Final[dict[type, tuple[str, ...]]] = {
    Turn: ("run",),
    Asked: ("agent", "branch", "model", "batch"),
    Called: ("agent", "branch", "batch", "id", "tool"),
    Answered: ("agent", "id", "tool", "event"),
    Passed: ("agent", "branch", "target"),
    Changed: ("agent", "branch"),
    Delegated: ("id",),
}


def checked(run: RecordedRun, faults: Faults) -> RecordedRun:
    """Return the run with values that every rule and every table can handle."""
    run.id, run.app, run.user, run.session, run.source = (
        word(run.id),
        word(run.app),
        word(run.user),
        word(run.session),
        word(run.source),
    )
    if not isinstance(run, CheckedRun):
        run.steps = _steps(run.steps, run.id, faults)
    return run


def possible(usage: Usage, name: str, faults: Faults) -> Usage | None:
    """Return the usage of a model call of the run ``name``; None, with a fault, if no call can take so many tokens."""
    for count in _counts_of(usage):
        if not 0 <= count < _MOST_TOKENS:
            faults.add(name, "a model call reports an impossible number of tokens: ignoring them")
            return None
    return usage


def _steps(steps: Iterator[Step], name: str, faults: Faults) -> Iterator[Step]:
    for step in steps:
        if type(step) is not Wrote:  # the reader of a journal has checked its entries
            for field in _WORDS.get(type(step), ()):
                if getattr(step, field).__class__ is not str:
                    setattr(step, field, word(getattr(step, field)))
        if type(step) is Asked and step.usage is not None:
            step.usage = possible(step.usage, name, faults)
        yield step
