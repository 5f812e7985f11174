"""Measure recordings: what their runs used, what other limits would have done to them, and quantiles.

``proposal`` calls it. ``Measuring`` and ``Comparing`` are the tasks of its two passes over the recordings.
"""

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from hashlib import blake2b
from math import ceil, exp, isnan, lgamma, log, log1p, nan, sqrt
from typing import Any, Final, NamedTuple

from runguard.core.errors import PolicyError
from runguard.core.events import Answer, ModelCall, RunInfo, ToolResults
from runguard.core.identity import size_of
from runguard.core.money import DEFAULT_THRESHOLDS, UNITS, Budget
from runguard.engine.guard import Result
from runguard.policy.settings import RULES, Policy, PolicyFile
from runguard.pricing.rates import Usage
from runguard.replay.player import Judge, Player, play
from runguard.replay.results import RunResult
from runguard.replay.steps import RecordedRun, Turn

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


# ---- a recording under several policies


class RecordingOutcome(NamedTuple):
    """What a policy would have done to one recording, and what the recording spent after its stops."""

    nudged: bool = False
    refused: bool = False
    stopped: bool = False
    tokens: int = 0
    nano: int = 0


def outcome_of(result: RunResult) -> RecordingOutcome:
    nudged, refused, stopped = (result.first(action) is not None for action in ("nudge", "block", "stop"))
    return RecordingOutcome(nudged, refused, stopped, result.saved.tokens, result.saved.nano)


@dataclass(slots=True)
class Measured:
    """What the runs of one recording used."""

    id: str
    success: bool | None
    usages: Usages
    unpriced: dict[str, int]
    begins_untimed: bool
    result: RunResult


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
        return Measured(run.id, run.success, meter.usages, meter.unpriced, meter.begins_untimed, result)


class Cut(NamedTuple):
    """What one limit would have stopped or shortened in a recording, and what the recording spent afterwards."""

    acted: bool
    tokens: int
    nano: int


@dataclass(slots=True)
class Compared:
    """One recording under several policies, and the effect of single limits."""

    id: str
    source: str
    success: bool | None
    outcomes: list[RecordingOutcome]
    cuts: list[Cut]


class Comparing:
    """Replays a recording under several policies, and under policies with one limit of a rule and unit each."""

    def __init__(self, policies: list[Policy], limits: list[tuple[Policy, str, str]]) -> None:
        self._judges = [Judge(policy) for policy in (*policies, *(policy for policy, _, _ in limits))]
        self._limits = [(rule, unit) for _, rule, unit in limits]

    def __call__(self, run: RecordedRun) -> Compared:
        results = play(run, self._judges)
        whole = len(results) - len(self._limits)
        cuts = [_cut(result, *limit) for result, limit in zip(results[whole:], self._limits, strict=True)]
        return Compared(run.id, run.source, run.success, [outcome_of(result) for result in results[:whole]], cuts)


def _cut(result: RunResult, rule: str, unit: str) -> Cut:
    acts = [v for v in result.verdicts if v.rule == rule and (not unit or v.unit == unit) and not v.moot]
    after = [v.after for v in acts if v.action == "stop"]
    acted = any(v.action in ("block", "stop") for v in acts)
    return Cut(acted, sum(each.tokens for each in after), sum(each.nano for each in after))


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

    def add(self, success: bool | None, half: int, usages: Usages, runs: int) -> None:
        self.by[LABELS[success], half].extend(usages)
        self.runs[LABELS[success], half] += runs

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
        values["thresholds"] = [
            {"percent": each.percent, "action": each.action, "recurring": each.recurring} for each in budget.thresholds
        ]
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
