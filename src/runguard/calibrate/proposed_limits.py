"""Limits from the usage of runs: 2.5 times the 95th percentile, or the reason why there is no proposal."""

from dataclasses import dataclass, field
from math import ceil, floor, log10
from typing import Any, Final, NamedTuple

from runguard.calibrate.policy_values import is_allowed
from runguard.calibrate.samples import LEVEL, Basis, Quantile, quantile, runs_needed

SHARE: Final = 0.95
FACTOR: Final = 2.5
_NAMES: Final = 50  # names of models in memory
_DIGITS: Final = 3  # of a proposed number, rounded up
# characters: smaller answers fit every prompt, and an error is often longer than a success
_LARGE_ANSWER: Final = 10_000


class Kind(NamedTuple):
    """A limit: its setting, the column of its figures, and the rule and unit of its verdicts."""

    setting: str
    column: str
    rule: str
    unit: str  # of its verdicts, if other limits have the same rule
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
    recordings: int  # with a known figure
    value: float | None = None
    quantile: Quantile | None = None
    largest: float = 0.0  # the largest figure
    why_not: str = ""

    @property
    def setting(self) -> str:
        return self.kind.setting

    def withhold(self, apart: list[str]) -> None:
        """Withdraw the limit. ``apart``: sources in which it would stop most successful recordings."""
        shown = ", ".join(apart[:3]) + (" and others" if len(apart) > 3 else "")
        self.why_not = (
            f"2.5 x P95 is {self.value:,g}, but that stops most successful recordings of {shown}: another kind "
            "of work; calibrate each source separately"
        )
        self.value = None

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {"value": self.value, "recordings": self.recordings, "why_not": self.why_not or None}
        found = self.quantile
        if found is not None:
            data |= {
                "share": found.share,
                "factor": FACTOR,
                "quantile": found.value,
                "interval": [found.low, found.high],
                "level": found.level,
                "largest": self.largest,
            }
        return data


@dataclass(slots=True)
class Missing:
    """Facts that recordings lack; without them a limit would stop healthy runs."""

    unpriced: int = 0  # recordings with calls of models that have no price
    models: dict[str, int] = field(default_factory=dict)  # the first such models, with their calls
    begins: int = 0  # recordings with times, but not for the beginning of their first run

    def add(self, models: dict[str, int], begins_untimed: bool) -> None:
        self.unpriced += bool(models)
        self.begins += begins_untimed
        for model, calls in models.items():
            if model in self.models or len(self.models) < _NAMES:
                self.models[model] = self.models.get(model, 0) + calls

    def against(self, kind: Kind) -> str:
        """Return why there can be no limit of this kind, or an empty string."""
        if kind.setting == "max_usd" and self.unpriced:
            names = sorted(self.models, key=lambda model: -self.models[model])
            shown = ", ".join(name or "(no name: pass --model)" for name in names[:5]) + (
                " and others" if len(names) > 5 else ""
            )
            return (
                f"no price for {shown} ({self.unpriced} recordings): a dollar limit would refuse such calls; set "
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
            why_not=f"{SHARE:.0%} of the recordings have none: there is no limit to derive",
        )
    if not is_allowed({kind.setting: value}):
        return Limit(
            kind,
            len(values),
            quantile=found,
            why_not=f"2.5 x P95 is {value:,g}, more than a policy allows: are the recorded {kind.of} right?",
        )
    if kind.setting == "max_tool_result_chars" and value < _LARGE_ANSWER:
        why_not = (
            f"2.5 x P95 is {value:,g}: answers are small, and such a low limit would hide longer ones, above all errors"
        )
        return Limit(kind, len(values), quantile=found, why_not=why_not)
    return Limit(kind, len(values), value, found, max(values))


def too_few(known: int, needed: int, basis: Basis, kind: Kind) -> str:
    missing = "" if known == basis.recordings else f" contain the {kind.of}"
    why = (
        f"with fewer, even the largest lies below the true P{SHARE * 100:.0f} in more than {(1 - LEVEL) / 2:.1%} of "
        "all samples"
    )
    return f"{known} {basis.kind} recordings{missing}, {needed} are needed: {why}"


def rounded_up(value: float, is_whole: bool) -> float:
    """Round up to three digits."""
    if value <= 0:
        return 0
    step = 10.0 ** (floor(log10(value)) - _DIGITS + 1)
    if is_whole:
        step = max(step, 1.0)
    up = ceil(value / step - 1e-9) * step
    return round(up) if is_whole else float(f"{up:.{_DIGITS}g}")
