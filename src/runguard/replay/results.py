"""The result of one recorded run under one policy, as plain data that any process can return."""

from dataclasses import asdict, dataclass, field
from decimal import Decimal
from typing import Any, Final

from runguard.core.decision import against_limit
from runguard.core.money import to_usd
from runguard.engine.charges import Summable

CURVE_KEPT: Final = 400  # turns whose prompt and cost are kept for the plots
VERDICTS_KEPT: Final = 200


@dataclass(slots=True)
class After(Summable):
    """What the recording spent after a decision."""

    model_calls: int = 0
    tool_calls: int = 0
    tokens: int = 0
    nano: int = 0


@dataclass(slots=True)
class Waited(Summable):
    """Calls that would have waited for room in a budget, and how long. A replay does not wait."""

    calls: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {"waited": {"calls": self.calls, "seconds": round(self.seconds, 3)}} if self.calls else {}


@dataclass(slots=True)
class Verdict:
    """A decision that the guard would have made."""

    action: str
    rule: str
    step: int  # of the recorded run, from 1
    turn: int  # model calls made before it
    run: str
    lane: str
    agent: str
    tool: str
    observed: float
    limit: float
    unit: str
    detail: str
    at: float
    evidence: tuple[dict[str, str], ...] = ()
    moot: bool = False  # not reached: the run was already stopped
    after: After = field(default_factory=After)

    def __str__(self) -> str:
        about = f" of {self.tool}" if self.tool else ""
        done = {"stop": "stopped", "block": "refused", "nudge": "nudged", "warn": "warned"}.get(
            self.action, self.action
        )
        return f"{done} by {self.rule}{about}: {against_limit(self.observed, self.unit, self.limit)}"


@dataclass(slots=True)
class RunResult:
    """Counts, cost and verdicts of one recorded run."""

    id: str
    app: str = ""
    user: str = ""
    session: str = ""
    source: str = ""
    success: bool | None = None
    capped: bool | None = None
    steps: int = 0
    runs: int = 0  # user messages
    model_calls: int = 0
    tool_calls: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    nano: int = 0
    unpriced: int = 0  # model calls without a price
    estimated: int = 0  # model calls whose tokens are estimated
    verdicts: list[Verdict] = field(default_factory=list)
    more: int = 0  # verdicts beyond the limit, counted only
    saved: After = field(default_factory=After)  # after the stops
    curve: list[tuple[int, int]] = field(default_factory=list)  # per model call: prompt tokens, nano-USD
    last_answers: After = field(default_factory=After)  # calls that ``final_answer`` would have made, at most
    # calls that would have gone to a cheaper model, and how much less they would have cost
    switched: After = field(default_factory=After)
    waited: Waited = field(default_factory=Waited)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def usd(self) -> Decimal | None:
        """None if no call had a price."""
        return None if self.unpriced and not self.nano else to_usd(self.nano)

    def first(self, action: str) -> Verdict | None:
        """Return the first verdict of that action before any stop."""
        return next((v for v in self.verdicts if v.action == action and not v.moot), None)

    @property
    def is_false_stop(self) -> bool:
        """Stopped although it is labelled a success."""
        return self.success is True and self.first("stop") is not None

    def to_dict(self) -> dict[str, Any]:
        verdicts = []
        for verdict in self.verdicts:
            entry = asdict(verdict)
            entry["evidence"] = list(verdict.evidence)
            entry["after"] = after_dict(verdict.after)
            verdicts.append(entry)
        names = (
            "id",
            "app",
            "user",
            "session",
            "source",
            "success",
            "capped",
            "steps",
            "runs",
            "model_calls",
            "tool_calls",
            "prompt_tokens",
            "output_tokens",
        )
        data = {name: getattr(self, name) for name in names}
        data |= {"usd": _text(self.usd), "unpriced_calls": self.unpriced, "estimated_calls": self.estimated}
        data |= {"verdicts": verdicts, "more_verdicts": self.more, "after_stop": after_dict(self.saved)}
        if self.last_answers.model_calls:
            data["last_answers"] = after_dict(self.last_answers)
        data |= self.waited.to_dict()
        return data | ({"switched": switched_dict(self.switched)} if self.switched.model_calls else {})


def after_dict(after: After) -> dict[str, Any]:
    return {
        "model_calls": after.model_calls,
        "tool_calls": after.tool_calls,
        "tokens": after.tokens,
        "usd": _text(to_usd(after.nano)),
    }


def switched_dict(switched: After) -> dict[str, Any]:
    return {
        "model_calls": switched.model_calls,
        "tokens": switched.tokens,
        "saved_usd": _text(to_usd(switched.nano)),
    }


def _text(usd: Decimal | None) -> str | None:
    return None if usd is None else f"{usd:f}"
