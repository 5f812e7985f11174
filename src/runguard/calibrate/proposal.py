"""``calibrate``: measure recorded runs and propose limits, in two passes over the recordings.

The first pass measures the recordings, the second compares the proposal with the current policy.
``runguard calibrate`` calls ``run``; code calls ``calibrate``.
"""

import json
import os
import re
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from hashlib import blake2b
from math import ceil, exp, floor, isnan, lgamma, log, log1p, log10, nan, sqrt
from pathlib import Path
from textwrap import wrap
from typing import Any, Final, NamedTuple

from rich.text import Text

import runguard.console as screen
from runguard.core.decision import printable
from runguard.core.errors import PolicyError
from runguard.core.events import Answer, ModelCall, RunInfo, ToolResults
from runguard.core.identity import size_of
from runguard.core.money import DEFAULT_THRESHOLDS, UNITS, Budget
from runguard.engine.guard import Result
from runguard.policy.settings import RULES, Policy, PolicyFile
from runguard.pricing.rates import Usage
from runguard.replay.output import check_place, count, money, print_sections, share, skipped, with_progress, write_file
from runguard.replay.player import Judge, PieceResult, Player, Playing, each_run, harmless, workers_for
from runguard.replay.results import Group, RunResult, wilson
from runguard.replay.sources import Source, listed, nothing_read, open_sources
from runguard.replay.steps import Faults, RecordedRun, Turn

# ---- the usage of the runs of a recording, measured with the replay engine

# A guard without limits: the usage of a run must not depend on where a policy would have stopped it.
UNLIMITED: Final[dict[str, Any]] = {
    "max_model_calls": 10**9,
    "max_tool_calls": None,
    "max_seconds": None,
    "max_usd": None,
    "max_tokens": None,
    "max_tool_result_chars": None,
    "max_tool_failures": None,
    "budgets": (),
    "rules": dict.fromkeys(RULES, False),
}
_ENOUGH: Final = 1_000_000_000


class Usages(NamedTuple):
    """The highest of each figure among the runs of a recording; a run lasts from one user message to the next.

    Runs of one conversation resemble each other, so only recordings are independent, and a limit that allows the
    largest run allows the recording. NaN if the recording does not contain a figure: no price, no times, no answers.
    """

    usd: float = nan
    tokens: float = nan
    model_calls: float = nan
    tool_calls: float = nan
    seconds: float = nan
    largest_answer: float = nan


def unlimited(policy: Policy) -> Judge:
    """Return a judge without limits, with the prices and tools of ``policy``."""
    return Judge(changed(policy, UNLIMITED), to_the_end=True)


def _size(answer: Answer, is_understood: bool) -> float:
    """Return the size of an answer, or NaN. A journal has only live measurements; other recordings may omit answers."""
    if answer.chars:
        return float(answer.chars)
    is_recorded = not is_understood and answer.value is not None and answer.value != {"result": None}
    return float(size_of(answer.value, _ENOUGH)) if is_recorded else nan


class MeasuringPlayer(Player):
    """Plays a recording and notes what its runs use."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.largest = nan  # answer of the run, in characters
        self.usages = Usages()
        self.unpriced: dict[str, int] = {}  # model -> calls
        self.begins_untimed = False  # the recording has times, but not for the beginning of a run
        self._before = (0, 0, 0, 0)
        self._since: float | None = None  # when the run began
        self._is_timed = False

    def finish(self) -> RunResult:
        result = super().finish()
        if self.unpriced:
            self.usages = self.usages._replace(usd=nan)
        return result

    def feed(self, step: Any) -> None:
        super().feed(step)
        if type(step) is not Turn and getattr(step, "at", None) is not None:
            self._is_timed = True
            self.begins_untimed = self.begins_untimed or self._since is None

    def after(self, event: Result) -> None:
        if isinstance(event, ToolResults):
            for answer in event.answers:
                size = _size(answer, event.is_understood)
                if not isnan(size):
                    self.largest = size if isnan(self.largest) else max(self.largest, size)
        super().after(event)

    def begin(self, info: RunInfo) -> None:
        super().begin(info)
        self._before = self._counts()
        self._since, self._is_timed = self.clock.now or None, False
        self.largest = nan

    def book(self, event: ModelCall, usage: Usage, model: str, **options: Any) -> None:
        before = self.result.unpriced
        super().book(event, usage, model, **options)
        if self.result.unpriced > before and "usd" not in self.recorded.unknown:
            self.unpriced[model] = self.unpriced.get(model, 0) + 1

    def _close(self) -> None:
        if self._begun:
            model_calls, tool_calls, tokens, nano = (
                now - before for now, before in zip(self._counts(), self._before, strict=True)
            )
            if model_calls or tool_calls:  # an unanswered message is not a run
                # without pauses
                seconds = self.clock.now - self.live.started if self._is_timed and self._since is not None else nan
                usages = Usages(nano / 1e9, float(tokens), model_calls, tool_calls, seconds, self.largest)
                if unknown := self.recorded.unknown:
                    usages = Usages(
                        *(nan if name in unknown else value for name, value in zip(Usages._fields, usages, strict=True))
                    )
                self.usages = Usages(
                    *(new if isnan(old) or new > old else old for old, new in zip(self.usages, usages, strict=True))
                )
        super()._close()

    def _counts(self) -> tuple[int, int, int, int]:
        result = self.result
        return result.model_calls, result.tool_calls, result.tokens, result.nano


@dataclass(slots=True)
class Measured:
    """What the runs of one recording used."""

    result: RunResult
    usages: Usages
    unpriced: dict[str, int]
    begins_untimed: bool


class Measuring:
    """Measures a recording."""

    def __init__(self, policy: Policy) -> None:
        self._meter = unlimited(policy)

    def __call__(self, run: RecordedRun) -> Measured:
        meter = MeasuringPlayer(self._meter, run)
        for step in run.steps:
            meter.feed(step)
        result = meter.finish()
        result.curve.clear()  # another process sends the result
        return Measured(result, meter.usages, meter.unpriced, meter.begins_untimed)


# ---- the figures of all recordings, and their quantiles

LABELS: Final = {True: "success", False: "failure", None: "unlabelled"}
HALVES: Final = (0, 1)
LEVEL: Final = 0.95  # of the interval, two-sided
_FAR: Final = 12  # standard deviations; beyond them a double is 0


def half_of(name: str) -> int:
    """Return the half of a recording, derived from its id, so that order and processes do not matter."""
    return blake2b(name.encode("utf-8", "replace"), digest_size=1).digest()[0] & 1


class Figures:
    """The usages of all recordings, by label and half."""

    def __init__(self) -> None:
        self.by = {(label, half): array("d") for label in LABELS.values() for half in HALVES}
        self.runs: Counter[tuple[str, int]] = Counter()

    def add(self, measured: Measured) -> None:
        key = LABELS[measured.result.success], half_of(measured.result.id)
        self.by[key].extend(measured.usages)
        self.runs[key] += measured.result.runs

    def recordings(self, label: str) -> int:
        return self.basis((label,)).recordings

    def basis(self, labels: tuple[str, ...], halves: tuple[int, ...] = HALVES) -> "Basis":
        kind = " and ".join("successful" if label == "success" else label for label in labels)
        keys = [(label, half) for label in labels for half in halves]
        return Basis(kind, [self.by[key] for key in keys], sum(self.runs[key] for key in keys))

    def labels_for(self, needed: int) -> tuple[str, ...]:
        """Return the labels on which limits are based: success, and unlabelled if too few are labelled.

        Failed recordings are never used, because they may be runaways.
        """
        successful, unlabelled = self.recordings("success"), self.recordings("unlabelled")
        if not successful:
            return ("unlabelled",)
        has_enough = successful >= needed or successful + unlabelled < needed or not unlabelled
        return ("success",) if has_enough else ("success", "unlabelled")


@dataclass(slots=True)
class Basis:
    """The recordings on which limits are based, as rows of the columns of ``Usages``."""

    kind: str  # "successful", "successful and unlabelled" or "unlabelled"
    rows: list["array[float]"]
    runs: int

    @property
    def recordings(self) -> int:
        return sum(len(rows) for rows in self.rows) // len(Usages._fields)

    def column(self, name: str) -> list[float]:
        """Return the known values of a column."""
        start, step = Usages._fields.index(name), len(Usages._fields)
        return [value for rows in self.rows for value in rows[start::step] if not isnan(value)]


@dataclass(frozen=True, slots=True)
class Quantile:
    """The quantile of a sample, and the two of its values that enclose the true one with confidence ``level``."""

    share: float
    runs: int
    value: float
    low: float
    high: float
    level: float


def runs_needed(share: float, level: float = LEVEL) -> int:
    """Return the fewest runs whose smallest and largest enclose the quantile.

    Each must miss it in at most half of 1 - level of all samples.
    """
    tail = (1 - level) / 2
    return max(ceil(log(tail) / log(share)), ceil(log(tail) / log1p(-share)))


def ranks(runs: int, share: float, level: float = LEVEL) -> tuple[int, int] | None:
    """Return which runs, counted from the smallest as 1, enclose the quantile; None if there are too few.

    Of n independent runs the number below the true quantile is binomial, for any distribution. So the k-th smallest run
    lies below the quantile with a probability that depends only on n, k and the share.
    """
    tail = (1 - level) / 2
    mean, spread = runs * share, _FAR * sqrt(runs * share * (1 - share)) + _FAR
    below, low = 0.0, max(int(mean - spread), 0)
    while low < runs and below + (mass := _binomial(low, runs, share)) <= tail:
        below += mass
        low += 1
    above, high = 0.0, min(int(mean + spread), runs)
    while high > 0 and above + (mass := _binomial(high, runs, share)) <= tail:
        above += mass
        high -= 1
    high += 1
    return (low, high) if 1 <= low < high <= runs else None


def quantile(values: Sequence[float], share: float, level: float = LEVEL) -> Quantile | None:
    """Return the smallest value that at least ``share`` of all do not exceed, with its interval; None if too few."""
    found = ranks(len(values), share, level)
    if found is None:
        return None
    ordered = sorted(values)
    middle = ceil(len(values) * share - 1e-9)
    return Quantile(share, len(values), ordered[middle - 1], ordered[found[0] - 1], ordered[found[1] - 1], level)


def _binomial(hits: int, runs: int, share: float) -> float:
    ways = lgamma(runs + 1) - lgamma(hits + 1) - lgamma(runs - hits + 1)
    return exp(ways + hits * log(share) + (runs - hits) * log1p(-share))


# ---- settings of a policy: change them, or express them as values of a file

SECRET: Final = ("store", "alerts")  # their addresses may hold passwords and tokens


def file_values(policy: Policy) -> tuple[dict[str, Any], list[str]]:
    """Return plain values for a file without the rules, and the names of settings that a file cannot express.

    A file cannot express functions, and limits that were switched off with ``None``.
    """
    judged_by_code = [name for name, rule in policy.tools.items() if callable(rule.failed)]
    exclude: dict[str, Any] = dict.fromkeys((*SECRET, "rules", "budgets"), True)
    if judged_by_code:
        exclude["tools"] = {name: {"failed": True} for name in judged_by_code}
    fields = PolicyFile.model_fields
    values = policy.model_dump(mode="json", exclude_unset=True, include=set(fields), exclude=exclude, exclude_none=True)
    missing = [f"tools.{name}.failed" for name in judged_by_code]
    missing += [
        f"{name} = None" for name in fields if getattr(policy, name) is None and fields[name].default is not None
    ]
    plain = [_budget(budget, f"budgets[{number}]", missing) for number, budget in enumerate(policy.budgets)]
    if budgets := [budget for budget in plain if budget]:
        values["budgets"] = budgets
    return values, missing


def _budget(budget: Budget, name: str, missing: list[str]) -> dict[str, Any] | None:
    """Return the budget as plain data, or None if no amount is left; add what is left out to ``missing``."""
    amounts = {unit: amount for unit in UNITS if (amount := getattr(budget, unit)) is not None}
    missing += [f"{name}.{unit}" for unit, amount in amounts.items() if callable(amount)]
    values: dict[str, Any] = {
        unit: str(amount) if isinstance(amount, Decimal) else amount
        for unit, amount in amounts.items()
        if not callable(amount)
    }
    if not values:
        return None
    values |= {"per": budget.per, "window": budget.window, "tz": budget.tz}
    if budget.on_exhausted != "refuse":
        values["on_exhausted"] = budget.on_exhausted
    if budget.burn_alert:
        values["burn_alert"] = True
    if tuple(budget.thresholds) != DEFAULT_THRESHOLDS:
        values["thresholds"] = [replace(each, callback=None).to_dict() for each in budget.thresholds]
        missing += [
            f"{name}.thresholds[{number}].callback"
            for number, each in enumerate(budget.thresholds)
            if each.callback is not None
        ]
    return values


def changed(policy: Policy, settings: Mapping[str, Any]) -> Policy:
    """Return the policy with ``settings`` as in a file; other rules keep their rungs."""
    read = Policy.validated(settings, "")
    values = {name: getattr(read, name) for name in settings}
    if "rules" in values:
        values["rules"] = {**policy.rules, **read.rules}
    return policy.model_copy(update=values)


def is_allowed(settings: Mapping[str, Any]) -> bool:
    """Return whether the settings are valid; their numbers have bounds."""
    try:
        Policy.validated(settings, "")
    except PolicyError:
        return False
    return True


# ---- limits from the usage of runs: 2.5 times the 95th percentile, or the reason why there is no proposal

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

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {"value": self.value, "recordings": self.recordings, "why_not": self.why_not or None}
        found = self.quantile
        if found is None:
            return data
        interval = {"quantile": found.value, "interval": [found.low, found.high], "level": found.level}
        return data | {"share": found.share, "factor": FACTOR, **interval, "largest": self.largest}


@dataclass(slots=True)
class Missing:
    """Facts that recordings lack; without them a limit would stop healthy runs."""

    unpriced: int = 0  # recordings with calls of models that have no price
    models: dict[str, int] = field(default_factory=dict)  # the first such models, with their calls
    begins: int = 0  # recordings with times, but not for the beginning of their first run

    def add(self, measured: Measured) -> None:
        self.unpriced += bool(measured.unpriced)
        self.begins += measured.begins_untimed
        for model, calls in measured.unpriced.items():
            if model in self.models or len(self.models) < _NAMES:
                self.models[model] = self.models.get(model, 0) + calls

    def against(self, kind: Kind) -> str:
        """Return why there can be no limit of this kind, or an empty string."""
        if kind.setting == "max_usd" and self.unpriced:
            names = sorted(self.models, key=lambda model: -self.models[model])
            shown = listed([name or "(no name: pass --model)" for name in names], 5)
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


def _limit(kind: Kind, basis: Basis, missing: Missing) -> Limit:
    values, needed = basis.column(kind.column), runs_needed(SHARE)
    if why_not := missing.against(kind):
        return Limit(kind, len(values), why_not=why_not)
    found = quantile(values, SHARE)
    if len(values) < needed or found is None:
        lacking = "" if len(values) == basis.recordings else f" contain the {kind.of}"
        why_not = (
            f"{len(values)} {basis.kind} recordings{lacking}, {needed} are needed: with fewer, even the largest lies "
            f"below the true P{SHARE * 100:.0f} in more than {(1 - LEVEL) / 2:.1%} of all samples"
        )
        return Limit(kind, len(values), why_not=why_not)
    value = rounded_up(FACTOR * found.value, kind.is_whole)
    if value <= 0:
        why_not = f"{SHARE:.0%} of the recordings have none: there is no limit to derive"
    elif not is_allowed({kind.setting: value}):
        why_not = f"2.5 x P95 is {value:,g}, more than a policy allows: are the recorded {kind.of} right?"
    elif kind.setting == "max_tool_result_chars" and value < _LARGE_ANSWER:
        why_not = (
            f"2.5 x P95 is {value:,g}: answers are small, and such a low limit would hide longer ones, above all errors"
        )
    return Limit(kind, len(values), None if why_not else value, found, max(values), why_not)


def rounded_up(value: float, is_whole: bool) -> float:
    """Round up to three digits."""
    if value <= 0:
        return 0
    step = 10.0 ** (floor(log10(value)) - _DIGITS + 1)
    if is_whole:
        step = max(step, 1.0)
    up = ceil(value / step - 1e-9) * step
    return round(up) if is_whole else float(f"{up:.{_DIGITS}g}")


# ---- effects of policies on the recordings: by label, by limit, and on the half they were not fitted to

_SHOWN: Final = 5
_SOURCES: Final = 1_000


def _by_label() -> dict[str, Group]:
    return {label: Group() for label in LABELS.values()}


def effect_dict(by_label: dict[str, Group]) -> dict[str, Any]:
    """Return the effect of a policy on the recordings of each label as plain data."""
    return {
        label: {
            "recordings": group.runs,
            "nudged": group.nudged,
            "refused": group.blocked,
            "stopped": group.stopped,
            "stopped_interval": [round(edge, 4) for edge in wilson(group.stopped, group.runs)],
            "tokens_after": group.saved.tokens,
            "usd_after": group.saved.nano / 1e9,
        }
        for label, group in by_label.items()
    }


@dataclass(slots=True)
class LimitEffect:
    """The effect of one limit added to the current rules: recordings that it stops, or whose answers it shortens."""

    by_label: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LABELS.values(), 0))
    tokens: int = 0  # after its stops
    nano: int = 0
    successes: list[str] = field(default_factory=list)  # the first ones
    stopped_by_source: Counter[str] = field(default_factory=Counter)  # successful ones
    by_source: Counter[str] = field(default_factory=Counter)  # all successful ones, affected or not

    def add(self, result: RunResult, kind: Kind) -> None:
        """Add a recording that was replayed with this limit alone."""
        success, source = result.success, result.source
        acts = [
            v for v in result.verdicts if v.rule == kind.rule and (not kind.unit or v.unit == kind.unit) and not v.moot
        ]
        has_acted = any(v.action in ("block", "stop") for v in acts)
        if success and (source in self.by_source or len(self.by_source) < _SOURCES):
            self.by_source[source] += 1
            self.stopped_by_source[source] += has_acted
        if not has_acted:
            return
        self.by_label[LABELS[success]] += 1
        self.tokens += sum(v.after.tokens for v in acts if v.action == "stop")
        self.nano += sum(v.after.nano for v in acts if v.action == "stop")
        if success and len(self.successes) < _SHOWN:
            self.successes.append(result.id)

    @property
    def apart(self) -> list[str]:
        """Sources in which it affects most successful recordings: another kind of work than the rest."""
        hit, many = self.stopped_by_source, len(self.by_source) > 1
        return [source for source, of in self.by_source.items() if many and hit[source] > 1 and 2 * hit[source] > of]

    def to_dict(self) -> dict[str, Any]:
        after = {"tokens_after": self.tokens, "usd_after": self.nano / 1e9}
        return {"apart": self.apart, "recordings": self.by_label, **after, "successful": self.successes}


@dataclass(slots=True)
class HeldOut:
    """Stops on the half of the recordings that a setting was not fitted to, both ways."""

    fitted: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # settings for which half of the runs were too few
    # recordings, stopped, stopped before
    by_label: dict[str, list[int]] = field(default_factory=lambda: {label: [0, 0, 0] for label in LABELS.values()})

    def words(self) -> str:
        label = "success" if self.by_label["success"][0] else "unlabelled"
        runs, stopped, before = self.by_label[label]
        low, high = wilson(stopped, runs)
        named = "successful" if label == "success" else "unlabelled"
        text = (
            f"of {runs} held-out {named} recordings {stopped} would have been stopped ({low:.1%} to {high:.1%}); "
            f"{before} with the present settings"
        )
        if self.missing:
            text += f". Not checked, half of the runs are too few: {', '.join(self.missing)}"
        return text

    def to_dict(self) -> dict[str, Any]:
        names = ("recordings", "stopped", "stopped_now")
        by_label = {label: dict(zip(names, counts, strict=True)) for label, counts in self.by_label.items()}
        return {**by_label, "fitted_on_halves": self.fitted, "not_checked": self.missing}


# ---- the proposal

Watch = Callable[[str, Iterator[PieceResult]], Iterable[PieceResult]]


@dataclass(slots=True)
class Proposal:
    """Limits from recorded runs, with their basis and their effects."""

    sources: list[str]
    policy: Policy  # the current policy, which the proposal changes
    figures: Figures = field(default_factory=Figures)
    basis: Basis = field(default_factory=lambda: Basis("", [], 0))
    limits: list[Limit] = field(default_factory=list)
    model_calls: int = 0
    estimated: int = 0
    missing: Missing = field(default_factory=Missing)
    faults: Faults = field(default_factory=Faults)
    now: dict[str, Group] = field(default_factory=_by_label)
    proposed: dict[str, Group] = field(default_factory=_by_label)
    cuts: dict[str, LimitEffect] = field(default_factory=dict)  # by setting
    held_out: HeldOut = field(default_factory=HeldOut)

    @property
    def changes(self) -> dict[str, Any]:
        """The proposed settings, as a policy file names them."""
        return _changes(self.limits)

    def to_toml(self) -> str:
        return toml_of(self)

    def to_dict(self) -> dict[str, Any]:
        basis, runs = self.basis, self.figures.runs
        return {
            "sources": self.sources,
            "recordings": {label: self.figures.recordings(label) for label in LABELS.values()},
            "runs": {label: sum(runs[label, half] for half in HALVES) for label in LABELS.values()},
            "basis": {"kind": basis.kind, "runs": basis.runs, "recordings": basis.recordings},
            "model_calls": self.model_calls,
            "estimated_calls": self.estimated,
            "unpriced": {"recordings": self.missing.unpriced, "calls_by_model": self.missing.models},
            "limits": {
                limit.setting: limit.to_dict()
                | ({"cut": self.cuts[limit.setting].to_dict()} if limit.setting in self.cuts else {})
                for limit in self.limits
            },
            "proposal": self.changes,
            "now": effect_dict(self.now),
            "proposed": effect_dict(self.proposed),
            "held_out": self.held_out.to_dict(),
            "skipped": {"count": self.faults.count, "first": self.faults.first},
            "toml": self.to_toml(),
        }


def calibrate(
    source: str | Path | list[Source],
    policy: Policy | None = None,
    *,
    workers: int = 1,
    model: str = "",
    watch: Watch | None = None,
) -> Proposal:
    """Propose limits from recorded runs; raise UnreadableError if the source cannot be read.

    ``policy``: the current policy with prices, tools and rules, which the proposal changes; the defaults without it.
    ``model``: the model of recordings that do not name one.
    """
    sources = open_sources(str(source)) if isinstance(source, str | Path) else source
    policy = policy if policy is not None else Policy.validated({}, "")
    now = harmless(policy)
    workers = workers_for([now], workers)
    watch = watch or (lambda _, found: found)
    made = Proposal([each.name for each in sources], policy)
    for done in watch("measuring", each_run(sources, Measuring, (now,), workers, model)):
        made.faults.merge(done.faults)
        for measured in done.results:
            made.figures.add(measured)
            made.model_calls += measured.result.model_calls
            made.estimated += measured.result.estimated
            made.missing.add(measured)

    labels = made.figures.labels_for(runs_needed(SHARE))
    made.basis = made.figures.basis(labels)
    made.limits = [_limit(kind, made.basis, made.missing) for kind in KINDS]
    bases = [made.figures.basis(labels, (half,)) for half in HALVES]
    halves = [[_limit(kind, basis, made.missing) for kind in KINDS] for basis in bases]
    while made.changes:
        made.now, made.proposed = _by_label(), _by_label()
        proposed = [limit for limit in made.limits if limit.value is not None]
        made.cuts |= {limit.setting: LimitEffect() for limit in proposed}
        fitted = [_changes(half) for half in halves]
        made.held_out = HeldOut(fitted, [name for name in made.changes if any(name not in half for half in fitted)])
        alone = [{limit.setting: limit.value} for limit in proposed]
        policies = [now, *(changed(now, changes) for changes in (made.changes, *fitted, *alone))]
        for done in watch("comparing", each_run(sources, Playing, (policies, False, True), workers, model)):
            for results in done.results:
                _add_compared(made, proposed, results)
        found = [limit for limit in proposed if made.cuts[limit.setting].apart]
        if not found:
            return made
        for limit in found:
            _withhold(limit, made.cuts[limit.setting].apart, halves)
    made.now, made.proposed, made.held_out = _by_label(), _by_label(), HeldOut()  # no proposal is left to compare
    return made


def _changes(limits: list[Limit]) -> dict[str, Any]:
    """Return the settings of the limits that have a value."""
    return {limit.setting: limit.value for limit in limits if limit.value is not None}


def _withhold(limit: Limit, apart: list[str], halves: list[list[Limit]]) -> None:
    """Withdraw a limit that would stop most work of one source: different distributions have no common P95."""
    limit.why_not = (
        f"2.5 x P95 is {limit.value:,g}, but that stops most successful recordings of {listed(apart, 3)}: another "
        "kind of work; calibrate each source separately"
    )
    for limits in ([limit], *halves):
        next(each for each in limits if each.setting == limit.setting).value = None


def _add_compared(made: Proposal, proposed: list[Limit], results: list[RunResult]) -> None:
    """Add a recording as the policies of the second pass would have treated it."""
    now, then, *others = results
    label, held_out = LABELS[now.success], others[1 - half_of(now.id)]
    made.now[label].add(now)
    made.proposed[label].add(then)
    counts = (1, *(result.first("stop") is not None for result in (held_out, now)))
    made.held_out.by_label[label] = [sum(pair) for pair in zip(made.held_out.by_label[label], counts, strict=True)]
    for limit, result in zip(proposed, others[len(HALVES) :], strict=True):
        made.cuts[limit.setting].add(result, limit.kind)


# ---- the proposal as a ``runguard.toml``: proposed settings with their reasons, then the other settings

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_WIDTH: Final = 130


def toml_of(made: Proposal) -> str:
    changes = made.changes
    lines = [
        *_comment(f"Proposed by 'runguard calibrate' from {listed(made.sources, 3)}."),
        *_comment(basis_text(made)),
    ]
    if changes:
        lines += _comment(f"Fitted on one half, counted on the other: {made.held_out.words()}.")
    if made.estimated:
        lines += _comment(
            f"Tokens of {count(made.estimated)} of {count(made.model_calls)} model calls are estimated from "
            "the length of their texts."
        )
    lines += ["# Try it on the recordings first: runguard replay SOURCE --policy THIS_FILE", ""]
    for limit in made.limits:
        lines += [*_limit_lines(limit, made), ""]
    values, missing = file_values(made.policy)
    if values := {name: value for name, value in values.items() if name not in changes}:
        lines += ["# Unchanged:", *(f"{_key(name)} = {value_of(value)}" for name, value in values.items()), ""]
    if missing := [name for name in missing if name.removesuffix(" = None") not in changes]:
        lines += [*_comment(f"Not copied, because only code can express it: {', '.join(missing)}."), ""]
    if any(name in made.policy.model_fields_set for name in SECRET):
        lines += ["# store and alerts are not copied, because they may hold secrets: copy them here.", ""]
    if rules := made.policy.rules:
        lines += ["[rules]", *(f"{_key(rule)} = {value_of(rungs)}" for rule, rungs in rules.items())]
    return "\n".join(lines) + "\n"


def _limit_lines(limit: Limit, made: Proposal) -> list[str]:
    if limit.value is None or limit.quantile is None:
        return _comment(f"{limit.setting}: no proposal. {limit.why_not}.")
    text = f"{FACTOR:g} x {about_quantile(limit)}. {about_cut(limit, made.cuts[limit.setting])}."
    return [*_comment(text), f"{limit.setting} = {value_of(limit.value)}"]


def _comment(text: str) -> list[str]:
    """Return comment lines; no part of a name may become a setting."""
    return [f"# {line}" for line in wrap(printable(text), _WIDTH)]


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _string(name)


def _string(text: str) -> str:
    """Return a TOML string. JSON escapes are valid TOML, but DEL must be escaped and surrogate pairs are invalid."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def value_of(value: Any) -> str:
    """Return a policy value in TOML, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, dict):
        return (
            "{ "
            + ", ".join(f"{_key(str(name))} = {value_of(entry)}" for name, entry in value.items() if entry is not None)
            + " }"
        )
    if isinstance(value, list | tuple):
        return f"[{', '.join(value_of(entry) for entry in value if entry is not None)}]"
    return repr(int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else value)


def number(limit: Limit, value: float) -> str:
    if limit.setting == "max_usd":
        return f"${value:,.2f}" if value >= 10 else f"${value:.3g}"
    return count(round(value, 1))


def recordings(many: int) -> str:
    return f"{many:,} recording{'s' * (many != 1)}"


def basis_text(made: Proposal) -> str:
    basis = made.basis
    by = {label: made.figures.recordings(label) for label in LABELS.values()}
    in_all = sum(by.values())
    if not in_all:
        return "No recording could be read."
    parts = {"success": "labelled a success", "failure": "labelled a failure", "unlabelled": "without a label"}
    by_label = ", ".join(f"{by[label]:,} {words}" for label, words in parts.items() if by[label])
    text = f"{recordings(in_all)}: {by_label}. Limits are based on the {basis.recordings:,} {basis.kind} ones"
    if basis.runs > basis.recordings:
        text += f" (the largest of the {basis.runs:,} runs in them, one per recording)"
    if basis.kind == "unlabelled":
        text += "; runaways among them raise the limits"
    return f"{text}."


def about_quantile(limit: Limit) -> str:
    found = limit.quantile
    assert found is not None
    low, value, high = (number(limit, each) for each in (found.low, found.value, found.high))
    return (
        f"P{found.share * 100:.0f} of {found.runs:,} recordings, {value} {limit.kind.of} ({found.level:.0%} "
        f"interval {low} to {high})"
    )


def about_cut(limit: Limit, cut: LimitEffect) -> str:
    """Describe what the limit would have stopped, and name the successful recordings among them."""
    hit = sum(cut.by_label.values())
    if not hit:
        return "Would have stopped no recording"
    by_label = ", ".join(f"{number:,} {label}" for label, number in cut.by_label.items() if number)
    if limit.setting == "max_tool_result_chars":
        text = f"Would have shortened answers in {recordings(hit)} ({by_label})"
    else:
        text = (
            f"Would have stopped {recordings(hit)} ({by_label}), {count(cut.tokens)} tokens and {money(cut.nano)} "
            "before their end"
        )
    if not cut.successes:
        return text
    more = " and others" if cut.by_label["success"] > len(cut.successes) else ""
    largest = number(limit, limit.largest)
    return f"{text}. Successful among them: {', '.join(cut.successes)}{more}; the largest took {largest}"


# ---- the command: print a proposal as the file that it makes, with its effects, or as JSON


def run(
    sources: list[Source],
    policy: Policy,
    *,
    target: Path | None = None,
    as_json: bool = False,
    workers: int | None = None,
    model: str = "",
) -> bool:
    """Print a proposal and return whether there is one; only then write the file.

    Raise UnreadableError if no recording can be read.
    """
    if target is not None:
        check_place(target)
    made = calibrate(
        sources,
        policy,
        workers=workers or os.cpu_count() or 1,
        model=model,
        watch=lambda _, found: with_progress(sources, found),
    )
    if not sum(made.figures.recordings(label) for label in LABELS.values()):
        raise nothing_read(sources, made.faults)
    if as_json:
        sys.stdout.write(json.dumps(made.to_dict(), indent=2) + "\n")
    else:
        _print(made)
    if made.changes and target is not None:
        write_file(target, made.to_toml())
    return bool(made.changes)


def _print(made: Proposal) -> None:
    out = screen.console()
    out.print(Text(made.to_toml()), soft_wrap=True)
    if not made.changes:
        out.print("nothing to propose from these recordings", style="yellow")
    else:
        figures = (
            *("recordings", "stopped now", "stopped then", "tokens after, now", "tokens after, then"),
            "money after, then",
        )
        shown = screen.table("", *figures, right=figures)
        for label, before in made.now.items():
            if before.runs:
                then = made.proposed[label]
                stopped = [f"{each.stopped} ({share(each.stopped, each.runs)})" for each in (before, then)]
                after = (count(before.saved.tokens), count(then.saved.tokens), money(then.saved.nano))
                shown.add_row(label, f"{before.runs:,}", *stopped, *after)
        out.print(screen.heading("the whole proposal"))
        screen.print_table(out, shown)
    print_sections(out, skipped(made.faults))
