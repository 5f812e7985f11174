"""Replay a recording under many settings at once, and choose the settings to try for each loop rule."""

from dataclasses import dataclass
from typing import Final, NamedTuple

from runguard.calibrate.meter import MeasuringPlayer, Usages, unlimited
from runguard.calibrate.policy_values import changed, is_allowed
from runguard.calibrate.samples import half_of
from runguard.core.decision import Rungs
from runguard.policy.settings import Policy
from runguard.replay.engine import Judge, play
from runguard.replay.player import Player
from runguard.replay.results import RunResult
from runguard.replay.steps import RecordedRun

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
