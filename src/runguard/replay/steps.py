"""A recorded run as every reader tells it: who, and a stream of steps, whatever it was recorded by."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from runguard.events import Outcome
from runguard.pricing import Usage

TRANSFER: Final = "transfer_to_agent"
# Tools by which ADK itself steers: no work, so neither progress nor repetition. The same list as the live adapter's.
FRAMEWORK_TOOLS: Final = frozenset({TRANSFER, "finish_task", "set_model_response", "exit_loop"})
_FAULTS_SHOWN: Final = 20


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

    def add(self, where: str, what: str) -> None:
        self.count += 1
        if len(self.first) < _FAULTS_SHOWN:
            self.first.append(f"{where}: {what}")

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
    recorded_usd: float | None = None
