"""What was found, what follows from it, and how it is said: to the model, to the end user, to the operator."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal
from enum import IntEnum
from math import inf
from typing import Any, Final, Self

STOP_CODE: Final = "RUNGUARD_STOP"
METADATA_KEY: Final = "runguard"
NOTICE_KEY: Final = "runguard_notice"
# What a tool's answer has for its status where it is ours: nothing was done, or it was done and its answer is not
# shown.
NOT_EXECUTED: Final = "not_executed"
LEFT_OUT: Final = "answer_left_out"
METADATA_VERSION: Final = 1
MAX_EVIDENCE: Final = 5


class Action(IntEnum):
    """The ladder. A higher rung wins over a lower one."""

    ALLOW = 0
    WARN = 1
    NUDGE = 2
    BLOCK = 3
    STOP = 4

    @property
    def word(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Rungs:
    """At which count a rule does what; ``None`` leaves a rung out. Counts are inclusive: ``stop=5`` acts at five."""

    warn: float | None = None
    nudge: float | None = None
    block: float | None = None
    stop: float | None = None

    def at(self, count: float) -> tuple[Action, float] | None:
        """The strongest rung that ``count`` has reached, and its number."""
        if self.stop is not None and count >= self.stop:
            return Action.STOP, self.stop
        if self.block is not None and count >= self.block:
            return Action.BLOCK, self.block
        if self.nudge is not None and count >= self.nudge:
            return Action.NUDGE, self.nudge
        if self.warn is not None and count >= self.warn:
            return Action.WARN, self.warn
        return None

    @property
    def lowest(self) -> float:
        lowest = inf
        for rung in (self.warn, self.nudge, self.block, self.stop):
            if rung is not None and rung < lowest:
                lowest = rung
        return lowest


# Units of findings of the rule no_news about loops behind noise.
SAME_ANSWER: Final = "equal long answers"
SAME_PAIR: Final = "equal answers to one call"
ONLY_NOTES: Final = "notes in a row"
NEAR_EQUAL: Final = "nearly equal long calls"
REWORDED: Final = "answers in other words"  # to one call
ORDERS: Final = "rounds of the same work"  # of an agent that is set to work again and again
TOLD_AGAIN: Final = "reports in known words"  # of an agent that is called as a tool and uses no tools
CUT_OFF: Final = "calls without their arguments"  # unit of a finding of the rule stall about rejected calls
# unit of a finding of the rule stall about answers that look like success and say "try again"
TRY_AGAIN: Final = "answers that ask to try again"
HANDOFF_ROUNDS: Final = "rounds of hand-offs"  # unit of a finding of the rule cycle about agents instead of calls


@dataclass(slots=True)
class Finding:
    """A rule's observation: the number, the limit it met, and what shows it."""

    rule: str
    action: Action
    observed: Decimal | float
    limit: Decimal | float
    unit: str
    scope: str = "lane"  # "call" refuses one call, "lane" its strand of the run, "run" everything
    tool: str = ""
    key: str = ""  # what it is about: the same key is nudged once
    detail: str = ""  # for the operator: a path, an agent; never what a tool has said
    evidence: tuple[dict[str, str], ...] = ()
    money: "Money | None" = None  # of a finding about a budget


@dataclass(frozen=True, slots=True)
class Money:
    """Whose budget a finding is about, and how it stands."""

    kind: str
    scope: str
    spent_usd: Decimal | None
    reserved_usd: Decimal | None
    ends: float | None = None  # when its window resets
    resume: str = ""
    key: str = ""  # the account: its scope, window and period


@dataclass(slots=True)
class Decision:
    """What to do about one event. ``enforced`` is False in shadow mode: decided and recorded, not carried out."""

    action: Action = Action.ALLOW
    finding: Finding | None = None
    trip: "Trip | None" = None
    for_model: str = ""
    enforced: bool = True
    retry_after: float | None = None

    def __bool__(self) -> bool:
        return self.action is not Action.ALLOW


ALLOW: Final = Decision()


@dataclass(frozen=True, slots=True)
class Trip:
    """A stop that was decided. ``str(trip)`` is the operator's message; money is ``Decimal`` or None when not known."""

    id: str
    rule: str
    action: str
    scope: str
    scope_id: str
    unit: str
    app: str
    user_id: str
    session_id: str
    run_id: str
    invocation_id: str
    message: str
    resume: str
    policy_digest: str
    at: float
    observed: Decimal | float
    limit: Decimal | float
    agent_path: tuple[str, ...] = ()
    branch: str | None = None
    tool: str | None = None
    model: str | None = None
    evidence: tuple[Mapping[str, str], ...] = ()
    model_calls: int = 0
    tool_calls: int = 0
    tokens: int = 0
    spent_usd: Decimal | None = None
    reserved_usd: Decimal | None = None
    enforced: bool = True
    estimated: bool = False
    resumable: bool = True

    def __str__(self) -> str:
        return self.message

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, as it rides in an event's metadata: money as decimal strings."""
        data = asdict(self)
        for key in _MONEY:
            data[key] = str(data[key]) if isinstance(data[key], Decimal) else data[key]
        data["agent_path"] = list(self.agent_path)
        data["evidence"] = [dict(item) for item in self.evidence]
        return {"v": METADATA_VERSION, "retryable": False, **data}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        known["agent_path"] = tuple(known.get("agent_path", ()))
        known["evidence"] = tuple(known.get("evidence", ()))
        for key in _MONEY:
            if isinstance(known.get(key), str):
                known[key] = Decimal(known[key])
        return cls(**known)


_MONEY: Final = ("spent_usd", "reserved_usd", "observed", "limit")


def trip(event: Any) -> Trip | None:
    """The trip that an event carries, or None. Takes an ADK event, or its JSON as a mapping, snake or camel case."""
    snake, camel = "custom_metadata", "customMetadata"
    metadata = (event.get(snake) or event.get(camel)) if isinstance(event, Mapping) else getattr(event, snake, None)
    data = metadata.get(METADATA_KEY) if isinstance(metadata, Mapping) else None
    if not isinstance(data, Mapping) or data.get("v") != METADATA_VERSION:
        return None
    return Trip.from_dict(data)


@dataclass(slots=True)
class RunCounts:
    """What a run has used so far; its money is in its RunCosts."""

    model_calls: int = 0
    tool_calls: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens
