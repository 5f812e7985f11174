"""A recording past many guards at once. What comes back is small."""

from dataclasses import dataclass
from typing import NamedTuple

from runguard.calibrate.grid import OF_REPETITION, Variant, lowest_rungs, with_rule
from runguard.calibrate.meter import Meter, Took, looking_on
from runguard.calibrate.sample import half_of
from runguard.policy.settings import Policy
from runguard.replay.engine import Judge, play
from runguard.replay.player import Player
from runguard.replay.results import RunResult
from runguard.replay.steps import RecordedRun


class Outcome(NamedTuple):
    """What a policy would have done to one recording, and what came after its stops.

    ``its``: what one rule that is asked about has done.
    """

    nudged: bool = False
    refused: bool = False
    stopped: bool = False
    tokens: int = 0
    nano: int = 0
    acted: bool = False
    its_tokens: int = 0
    its_nano: int = 0


def outcome_of(result: RunResult, rule: str = "", unit: str = "") -> Outcome:
    """``rule``, ``unit``: whose part is told apart."""
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
    return Outcome(nudged, refused, stopped, saved.tokens, saved.nano, bool(its), *after)


@dataclass(slots=True)
class Measured:
    """One recording: what its runs took, what the present policy would have done, and what other settings would have
    done otherwise.
    """

    id: str
    success: bool | None
    took: Took
    runs: int
    tokens: int
    model_calls: int
    estimated: int
    unpriced: dict[str, int]
    begins_untimed: bool
    now: Outcome
    tried: dict[int, Outcome]  # by number; what is missing comes out as now


class Measuring:
    """Meters a recording, and plays it to every setting of those rules that find something in it."""

    def __init__(self, policy: Policy, tried: list[Variant]) -> None:
        self._meter, self._now = looking_on(policy), Judge(policy)
        self._tried = [(variant.rule, Judge(with_rule(policy, variant))) for variant in tried]
        self._lowest = lowest_rungs(policy, tried)

    def __call__(self, run: RecordedRun) -> Measured:
        steps = list(run.steps)
        meter, now = Meter(self._meter, run), Player(self._now, run)
        for step in steps:
            meter.feed(step)
            now.feed(step)
        told, result = meter.finish(), now.finish()
        counted = {rule: meter.repeated if rule in OF_REPETITION else meter.fruitless for rule in self._lowest}
        # no count can be higher
        near = [(n, judge) for n, (rule, judge) in enumerate(self._tried) if counted[rule] + 1 >= self._lowest[rule]]
        run.steps = iter(steps)
        tried = {
            n: outcome_of(played) for (n, _), played in zip(near, play(run, [judge for _, judge in near]), strict=True)
        }
        facts = (
            meter.took,
            told.runs,
            told.tokens,
            told.model_calls,
            told.estimated,
            meter.unpriced,
            meter.begins_untimed,
        )
        return Measured(run.id, run.success, *facts, outcome_of(result), tried)


class Asked(NamedTuple):
    """A policy to compare: whose part is told apart, and which half of the recordings it is for (None: all)."""

    policy: Policy
    rule: str = ""
    unit: str = ""
    half: int | None = None


@dataclass(slots=True)
class Compared:
    """One recording under every policy; None where the policy is for the other half."""

    id: str
    source: str
    success: bool | None
    outcomes: list[Outcome | None]


class Comparing:
    """Plays a recording to every policy that is for its half."""

    def __init__(self, asked: list[Asked]) -> None:
        self._asked = asked
        self._judges = [Judge(each.policy) for each in asked]

    def __call__(self, run: RecordedRun) -> Compared:
        half = half_of(run.id)
        mine = [number for number, each in enumerate(self._asked) if each.half in (None, half)]
        outcomes: list[Outcome | None] = [None] * len(self._asked)
        for number, result in zip(mine, play(run, [self._judges[number] for number in mine]), strict=True):
            outcomes[number] = outcome_of(result, self._asked[number].rule, self._asked[number].unit)
        return Compared(run.id, run.source, run.success, outcomes)
