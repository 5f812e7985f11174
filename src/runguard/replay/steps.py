"""A recorded run as every reader tells it: who, and a stream of steps, whatever it was recorded by."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from runguard.core.events import Outcome
from runguard.pricing.rates import Usage

TRANSFER: Final = "transfer_to_agent"
# Tools by which ADK itself steers: no work, so neither progress nor repetition. The same list as the live adapter's.
FRAMEWORK_TOOLS: Final = frozenset({TRANSFER, "finish_task", "set_model_response", "exit_loop"})
# what a value of a wrong kind leads to
ODD: Final = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
_FAULTS_SHOWN: Final = 20
_FAULT_CHARS: Final = 300
_IN_A_ROW: Final = 10_000
_WORD_CHARS: Final = 4_096
_LAST_TIME: Final = 1e12  # seconds


@dataclass(slots=True)
class Turn:
    """A message of the user: a run begins. Or a run that had paused goes on after others."""

    at: float | None
    run: str = ""  # the recording's own name of that run
    resumes: bool = False


@dataclass(slots=True)
class Resumed:
    """Somebody outside has answered a question: the time since the last step was a pause."""

    at: float | None


@dataclass(slots=True)
class Asked:
    """A model was asked and has answered."""

    at: float | None
    agent: str
    branch: str = ""
    model: str = ""
    usage: Usage | None = None  # None: not told
    estimated: bool = False
    batch: str = ""  # names this response
    said: int = 0  # name of the words that ended an activation
    goes_on: bool = False  # it called tools: the agent goes on with their answers
    aside: bool = False  # made for the framework, after the run has given its answer
    refused: bool = False  # RunGuard answered instead of the model
    scope: str = ""  # id of the call by which a task was delegated, for what is done inside of that task
    nano: int | None = None  # nano-USD that it cost, where the recording says so
    is_cut: bool = False  # it hit its output limit
    is_share: bool = False  # of the totals of a run: the size of this one prompt is not known


@dataclass(slots=True)
class Called:
    """A tool call that the last response of that agent has asked for."""

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
    outcome: Outcome | None = None  # where the value cannot tell
    event: str = ""
    ends: bool = False  # the agent does not go on after it
    pending: bool = False  # waits for a confirmation or a sign-in: neither failure nor repetition


@dataclass(slots=True)
class Passed:
    """The work was handed to another agent."""

    at: float | None
    agent: str
    branch: str
    target: str
    scope: str = ""  # as in ``Asked``


@dataclass(slots=True)
class Delegated:
    """An agent works on a call of another one as a task of its own: no tool was called."""

    id: str


@dataclass(slots=True)
class Wrote:
    """An entry of the journal that the guard itself kept."""

    at: float | None
    entry: dict[str, Any]


Step = Turn | Resumed | Asked | Called | Answered | Passed | Delegated | Wrote


class UnreadableError(Exception):
    """A source that cannot be replayed, and why."""


@dataclass(slots=True)
class Faults:
    """Records that could not be read: counted, the first ones kept."""

    count: int = 0
    first: list[str] = field(default_factory=list)
    in_a_row: int = 0  # since the last record that could be read

    def add(self, where: str, what: str) -> None:
        """``where`` and ``what`` may quote the file: both are cut to a readable length, on one line."""
        self.count += 1
        self.in_a_row += 1
        if len(self.first) < _FAULTS_SHOWN:
            self.first.append(f"{_short(where)}: {_short(what)}")

    def taken(self) -> "Faults":
        """What was found so far, to be handed over; this one begins anew."""
        found = Faults(self.count, self.first)
        self.count, self.first = 0, []
        return found

    def give_up(self, where: str) -> bool:
        """Whether so many records in a row cannot be read that the rest is not worth a try."""
        if self.in_a_row < _IN_A_ROW:
            return False
        self.add(where, f"{_IN_A_ROW:,} records in a row cannot be read: the rest is left out")
        return True

    def merge(self, other: "Faults") -> None:
        self.count += other.count
        self.first.extend(other.first[: _FAULTS_SHOWN - len(self.first)])


@dataclass(slots=True)
class RecordedRun:
    """One conversation of one session. ``steps`` can be walked once."""

    id: str
    steps: Iterator[Step]
    app: str = ""
    user: str = ""
    session: str = ""
    source: str = ""
    success: bool | None = None
    capped: bool | None = None
    labels: Mapping[str, str] | None = None
    unknown: frozenset[str] = frozenset()  # of a run without steps: the figures that its line does not tell


# ---- values of a file -----------------------------------------------------------------------------------------------


def word(value: Any) -> str:
    """A name or an id. A number is written out; what is neither text nor number names nothing."""
    if value.__class__ is str:
        text: str = value[:_WORD_CHARS]
        # half a character cannot be written anywhere
        return text if text.isascii() else text.encode("utf-8", "replace").decode()
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else ""


def time_of(value: Any) -> float | None:
    """Seconds, or an ISO date; None for anything else."""
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
