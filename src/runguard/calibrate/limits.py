"""Limits from what runs took: 2.5 times the 95th percentile, or a refusal that says how many recordings are missing."""

from dataclasses import dataclass, field
from math import ceil, floor, log10
from typing import Any, Final, NamedTuple

from runguard.calibrate.changes import is_allowed
from runguard.calibrate.quantiles import LEVEL, Quantile, quantile, runs_needed
from runguard.calibrate.sample import Basis

SHARE: Final = 0.95
FACTOR: Final = 2.5
_NAMES: Final = 50  # of models that are kept
_DIGITS: Final = 3  # of a proposed number, rounded up
# characters: smaller ones harm no prompt, and an error is often longer than what goes well
_LARGE_ANSWER: Final = 10_000


class Kind(NamedTuple):
    """A limit: its setting, where its numbers are, and how a verdict of it is known."""

    setting: str
    column: str
    rule: str
    unit: str  # of its verdicts, where others have the same rule
    of: str
    is_whole: bool = True


KINDS: Final = (
    Kind("max_usd", "usd", "budget", "usd", "dollars", False),
    Kind("max_tokens", "tokens", "budget", "tokens", "tokens"),
    Kind("max_model_calls", "model_calls", "model_calls", "", "model calls"),
    Kind("max_tool_calls", "tool_calls", "tool_calls", "", "tool calls"),
    Kind("max_seconds", "seconds", "deadline", "", "seconds", False),
    Kind("max_tool_result_chars", "largest_answer", "result_size", "", "characters of a tool answer"),
)


@dataclass(slots=True)
class Limit:
    """A proposed limit, or why there is none."""

    kind: Kind
    recordings: int  # whose number is known
    value: float | None = None
    quantile: Quantile | None = None
    largest: float = 0.0  # that was seen
    why_not: str = ""

    @property
    def setting(self) -> str:
        return self.kind.setting

    def withhold(self, apart: list[str]) -> None:
        """``apart``: sources whose successful recordings it cuts for the most part."""
        shown = ", ".join(apart[:3]) + (" and others" if len(apart) > 3 else "")
        self.why_not = (
            f"2.5 x P95 is {self.value:,g}, but that cuts most of what went well in {shown}: work of another size; "
            "calibrate each source alone"
        )
        self.value = None

    def to_dict(self) -> dict[str, Any]:
        told: dict[str, Any] = {"value": self.value, "recordings": self.recordings, "why_not": self.why_not or None}
        found = self.quantile
        if found is not None:
            told |= {
                "share": found.share,
                "factor": FACTOR,
                "quantile": found.value,
                "interval": [found.low, found.high],
                "level": found.level,
                "largest": self.largest,
            }
        return told


@dataclass(slots=True)
class Missing:
    """What recordings do not tell, without which a limit would stop them for no good reason."""

    unpriced: int = 0  # recordings with calls of models that have no price
    models: dict[str, int] = field(default_factory=dict)  # the first such models, with their calls
    begins: int = 0  # recordings with times, but not of when their first run began

    def add(self, models: dict[str, int], begins_untimed: bool) -> None:
        self.unpriced += bool(models)
        self.begins += begins_untimed
        for model, calls in models.items():
            if model in self.models or len(self.models) < _NAMES:
                self.models[model] = self.models.get(model, 0) + calls

    def against(self, kind: Kind) -> str:
        """Why no limit of this kind can be given."""
        if kind.setting == "max_usd" and self.unpriced:
            names = sorted(self.models, key=lambda model: -self.models[model])
            shown = ", ".join(name or "(no name: give it with --model)" for name in names[:5]) + (
                " and others" if len(names) > 5 else ""
            )
            return (
                f"no price for {shown} ({self.unpriced} recordings): a dollar limit would refuse such calls; give "
                "prices in the policy"
            )
        if kind.setting == "max_seconds" and self.begins:
            return (
                f"{self.begins} recordings have times, but not when their first run began: a limit would stop them "
                "at once"
            )
        return ""


def propose(basis: Basis, missing: Missing) -> list[Limit]:
    return [_limit(kind, basis, missing) for kind in KINDS]


def _limit(kind: Kind, basis: Basis, missing: Missing) -> Limit:
    values = basis.column(kind.column)
    if why_not := missing.against(kind):
        return Limit(kind, len(values), why_not=why_not)
    needed = runs_needed(SHARE)
    if len(values) < needed:
        return Limit(kind, len(values), why_not=too_few(len(values), needed, basis, kind))
    found = quantile(values, SHARE)
    assert found is not None
    value = rounded_up(FACTOR * found.value, kind.is_whole)
    if value <= 0:
        return Limit(
            kind,
            len(values),
            quantile=found,
            why_not=f"{SHARE:.0%} of the recordings have none: nothing to take a multiple of",
        )
    if not is_allowed({kind.setting: value}):
        return Limit(
            kind,
            len(values),
            quantile=found,
            why_not=f"2.5 x P95 is {value:,g}, more than a policy takes: are the recorded {kind.of} right?",
        )
    if kind.setting == "max_tool_result_chars" and value < _LARGE_ANSWER:
        why_not = (
            f"2.5 x P95 is {value:,g}: answers are small, and so low a limit would hide longer ones, errors first "
            "of all"
        )
        return Limit(kind, len(values), quantile=found, why_not=why_not)
    return Limit(kind, len(values), value, found, max(values))


def too_few(known: int, needed: int, basis: Basis, kind: Kind) -> str:
    missing = "" if known == basis.recordings else f" tell the {kind.of}"
    why = (
        f"of fewer, even the largest lies below the true P{SHARE * 100:.0f} in more than {(1 - LEVEL) / 2:.1%} of "
        "all samples"
    )
    return f"{known} {basis.kind} recordings{missing}, {needed} are needed: {why}"


def rounded_up(value: float, is_whole: bool) -> float:
    """To three digits, never down."""
    if value <= 0:
        return 0
    step = 10.0 ** (floor(log10(value)) - _DIGITS + 1)
    if is_whole:
        step = max(step, 1.0)
    up = ceil(value / step - 1e-9) * step
    return round(up) if is_whole else float(f"{up:.{_DIGITS}g}")
