"""Measure recordings: what their runs used, what other settings would have done to them, and samples of the figures.

``proposal`` calls it. ``Measuring`` and ``Comparing`` are the tasks of its two passes over the recordings.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from hashlib import blake2b
from math import ceil, exp, isnan, lgamma, log, log1p, nan, sqrt
from random import Random
from typing import Any, Final, NamedTuple

from runguard.core.decision import Rungs
from runguard.core.errors import PolicyError
from runguard.core.events import Answer, ModelCall, ModelResult, Outcome, RunInfo, ToolCall, ToolResults
from runguard.core.identity import size_of
from runguard.core.money import DEFAULT_THRESHOLDS, UNITS, Budget
from runguard.engine.guard import Question, Result
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
    """Plays a recording and notes what its runs use, what was done before, and what led to nothing."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.repeated = 0  # repeated calls and final texts
        self.fruitless = 0  # answers that were failures, refusals or empty
        self.largest = nan  # answer of the run, in characters
        self._done: set[bytes | int] = set()
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

    def check(self, event: Question) -> None:
        if isinstance(event, ToolCall):
            self._note(event.call)
        super().check(event)

    def after(self, event: Result) -> None:
        if isinstance(event, ModelResult):
            if event.text_id:
                self._note(event.text_id)
            super().after(event)
            return
        if not isinstance(event, ToolResults):
            super().after(event)
            return
        answers = event.answers
        for answer in answers:
            size = _size(answer, event.is_understood)
            if not isnan(size):
                self.largest = size if isnan(self.largest) else max(self.largest, size)
        super().after(event)
        self.fruitless += sum(answer.outcome is not Outcome.OK for answer in answers)

    def _note(self, name: bytes | int) -> None:
        self.repeated += name in self._done
        self._done.add(name)

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


# ---- a recording under many settings at once, and the settings to try for each loop rule

# these count repeated calls; the others count fruitless answers
OF_REPETITION: Final = ("repetition", "no_news", "same_call")
TRIED: Final = (*OF_REPETITION, "stall", "tool_failures", "empty")
_FACTORS: Final = (0.5, 0.75, 1.5, 2.0)
_LADDER: Final = ("warn", "nudge", "block", "stop")
_LEAST: Final = 2


@dataclass(frozen=True, slots=True)
class Variant:
    """One rule with other rungs than in the policy. ``rungs`` None: the rule is off, for comparison."""

    rule: str
    rungs: tuple[tuple[str, int], ...] | None

    @property
    def change(self) -> dict[str, dict[str, dict[str, int] | bool]]:
        return {"rules": {self.rule: False if self.rungs is None else dict(self.rungs)}}


def variants(policy: Policy) -> list[Variant]:
    """Return for every active rule: off, and each other setting worth trying."""
    found: list[Variant] = []
    for rule in TRIED:
        now = policy.rungs(rule)
        if now is None or now == Rungs():
            continue
        tried = [scaled(now, factor) for factor in _FACTORS]
        if now.stop is None:
            tried += [
                {**rungs, "stop": 2 * max(rungs.values())} for rungs in (scaled(now, factor) for factor in (0.5, 1.0))
            ]
        as_it_is = scaled(now, 1.0)
        found.append(Variant(rule, None))
        others = dict.fromkeys(Variant(rule, tuple(rungs.items())) for rungs in tried if rungs != as_it_is)
        found += [variant for variant in others if is_allowed(variant.change)]
    return found


def scaled(rungs: Rungs, factor: float) -> dict[str, int]:
    """Multiply every rung by ``factor`` and keep them in ascending order."""
    made: dict[str, int] = {}
    least = _LEAST
    for name in _LADDER:
        number = getattr(rungs, name)
        if number is not None:
            made[name] = least = max(round(number * factor), least)
            least += 1
    return made


def lowest_rungs(policy: Policy, tried: list[Variant]) -> dict[str, float]:
    """Return by rule the lowest count at which any of its settings acts."""
    found: dict[str, float] = {}
    for variant in tried:
        now = policy.rungs(variant.rule)
        assert now is not None
        found[variant.rule] = min(
            found.get(variant.rule, now.lowest), *(number for _, number in variant.rungs or ()), now.lowest
        )
    return found


class RecordingOutcome(NamedTuple):
    """What a policy would have done to one recording, and what the recording spent after its stops.

    ``its_tokens`` and ``its_nano`` count only the stops of one chosen rule.
    """

    nudged: bool = False
    refused: bool = False
    stopped: bool = False
    tokens: int = 0
    nano: int = 0
    acted: bool = False
    its_tokens: int = 0
    its_nano: int = 0


def outcome_of(result: RunResult, rule: str = "", unit: str = "") -> RecordingOutcome:
    """Summarize a result; ``rule`` and ``unit`` choose the rule that is counted separately."""
    its = (
        [
            v
            for v in result.verdicts
            if v.rule == rule and not v.moot and v.action in ("block", "stop") and (not unit or v.unit == unit)
        ]
        if rule
        else []
    )
    stops = [verdict for verdict in its if verdict.action == "stop"]
    saved = result.saved
    nudged, refused, stopped = (result.first(action) is not None for action in ("nudge", "block", "stop"))
    after = (sum(verdict.after.tokens for verdict in stops), sum(verdict.after.nano for verdict in stops))
    return RecordingOutcome(nudged, refused, stopped, saved.tokens, saved.nano, bool(its), *after)


@dataclass(slots=True)
class Measured:
    """One recording: usage of its runs, the outcome of the current policy, and different outcomes of other settings."""

    id: str
    success: bool | None
    usages: Usages
    runs: int
    tokens: int
    model_calls: int
    estimated: int
    unpriced: dict[str, int]
    begins_untimed: bool
    now: RecordingOutcome
    tried: dict[int, RecordingOutcome]  # by number; a missing one has the same outcome as now


class Measuring:
    """Measures a recording, and replays it under every setting of the rules that detect something in it."""

    def __init__(self, policy: Policy, tried: list[Variant]) -> None:
        self._meter, self._now = unlimited(policy), Judge(policy)
        self._tried = [(variant.rule, Judge(changed(policy, variant.change))) for variant in tried]
        self._lowest = lowest_rungs(policy, tried)

    def __call__(self, run: RecordedRun) -> Measured:
        steps = list(run.steps)
        meter, now = MeasuringPlayer(self._meter, run), Player(self._now, run)
        for step in steps:
            meter.feed(step)
            now.feed(step)
        measured, result = meter.finish(), now.finish()
        counted = {rule: meter.repeated if rule in OF_REPETITION else meter.fruitless for rule in self._lowest}
        # no count can be higher
        near = [(n, judge) for n, (rule, judge) in enumerate(self._tried) if counted[rule] + 1 >= self._lowest[rule]]
        run.steps = iter(steps)
        tried = {
            n: outcome_of(played) for (n, _), played in zip(near, play(run, [judge for _, judge in near]), strict=True)
        }
        facts = (
            meter.usages,
            measured.runs,
            measured.tokens,
            measured.model_calls,
            measured.estimated,
            meter.unpriced,
            meter.begins_untimed,
        )
        return Measured(run.id, run.success, *facts, outcome_of(result), tried)


class Comparison(NamedTuple):
    """A policy to compare: the rule to count separately, and its half of the recordings (None: all)."""

    policy: Policy
    rule: str = ""
    unit: str = ""
    half: int | None = None


@dataclass(slots=True)
class Compared:
    """One recording under every policy; None if the policy is for the other half."""

    id: str
    source: str
    success: bool | None
    outcomes: list[RecordingOutcome | None]


class Comparing:
    """Replays a recording under every policy for its half."""

    def __init__(self, comparisons: list[Comparison]) -> None:
        self._comparisons = comparisons
        self._judges = [Judge(each.policy) for each in comparisons]

    def __call__(self, run: RecordedRun) -> Compared:
        half = half_of(run.id)
        mine = [number for number, each in enumerate(self._comparisons) if each.half in (None, half)]
        outcomes: list[RecordingOutcome | None] = [None] * len(self._comparisons)
        for number, result in zip(mine, play(run, [self._judges[number] for number in mine]), strict=True):
            outcomes[number] = outcome_of(result, self._comparisons[number].rule, self._comparisons[number].unit)
        return Compared(run.id, run.source, run.success, outcomes)


# ---- the figures of all recordings, or a uniform sample of them in bounded memory, and quantiles

KEPT: Final = 100_000  # recordings of one label and half
LABELS: Final = {True: "success", False: "failure", None: "unlabelled"}
HALVES: Final = (0, 1)
_WIDTH: Final = len(Usages._fields)
LEVEL: Final = 0.95  # of the interval, two-sided
_FAR: Final = 12  # standard deviations; beyond them a double is 0


def half_of(name: str) -> int:
    """Return the half of a recording, derived from its id, so that order and processes do not matter."""
    return blake2b(name.encode("utf-8", "replace"), digest_size=1).digest()[0] & 1


class Sample:
    """Figures of recordings; each recording is equally likely to be in the sample."""

    def __init__(self, most: int = KEPT) -> None:
        self.seen = self.runs = 0
        self._most, self._random, self._cells = most, Random(0), array("d")

    def __len__(self) -> int:
        return len(self._cells) // _WIDTH

    def add(self, usages: Usages, runs: int = 1) -> None:
        self.seen += 1
        self.runs += runs
        if len(self) < self._most:
            self._cells.extend(usages)
        elif (place := self._random.randrange(self.seen)) < self._most:
            self._cells[place * _WIDTH : (place + 1) * _WIDTH] = array("d", usages)

    def column(self, name: str) -> list[float]:
        """Return the known values of a column."""
        return [value for value in self._cells[Usages._fields.index(name) :: _WIDTH] if value == value]


@dataclass(slots=True)
class Basis:
    """The recordings on which limits are based."""

    kind: str  # "successful", "successful and unlabelled" or "unlabelled"
    samples: list[Sample]
    halves: tuple[int, ...]

    @property
    def recordings(self) -> int:
        return sum(sample.seen for sample in self.samples)

    @property
    def runs(self) -> int:
        return sum(sample.runs for sample in self.samples)

    @property
    def is_sampled(self) -> bool:
        return any(len(sample) < sample.seen for sample in self.samples)

    def column(self, name: str) -> list[float]:
        return [value for sample in self.samples for value in sample.column(name)]


@dataclass(slots=True)
class Samples:
    """Samples by label and half."""

    by: dict[tuple[str, int], Sample] = field(
        default_factory=lambda: {(label, half): Sample() for label in LABELS.values() for half in HALVES}
    )

    def add(self, success: bool | None, half: int, usages: Usages, runs: int) -> None:
        self.by[LABELS[success], half].add(usages, runs)

    def recordings(self, label: str) -> int:
        return sum(self.by[label, half].seen for half in HALVES)

    def runs(self, label: str) -> int:
        return sum(self.by[label, half].runs for half in HALVES)

    def basis(self, needed: int, halves: tuple[int, ...] = HALVES) -> Basis:
        """Return successful recordings; if too few are labelled, also unlabelled ones.

        Failed recordings are never used, because they may be runaways.
        """
        successful, unlabelled = self.recordings("success"), self.recordings("unlabelled")
        if not successful:
            labels = ["unlabelled"]
        elif successful >= needed or successful + unlabelled < needed or not unlabelled:
            labels = ["success"]
        else:
            labels = ["success", "unlabelled"]
        kind = " and ".join("successful" if label == "success" else label for label in labels)
        return Basis(kind, [self.by[label, half] for label in labels for half in halves], halves)


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
