"""``calibrate``: propose limits and rungs from recorded runs, in two passes over the recordings.

The first pass measures the recordings and tries settings, the second compares the proposal with the current policy.
``runguard calibrate`` calls ``run``; code calls ``calibrate``.
"""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import ceil, floor, log10
from pathlib import Path
from textwrap import wrap
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runguard import console as screen
from runguard.calibrate.measure import (
    HALVES,
    LABELS,
    LEVEL,
    SECRET,
    Basis,
    Compared,
    Comparing,
    Comparison,
    Measured,
    Measuring,
    Quantile,
    RecordingOutcome,
    Samples,
    Variant,
    changed,
    file_values,
    half_of,
    is_allowed,
    quantile,
    runs_needed,
    scaled,
    variants,
)
from runguard.core.decision import printable
from runguard.policy.settings import Policy
from runguard.replay.output import check_place, count, money, print_faults, share, with_progress, write_file
from runguard.replay.player import PieceResult, each_run, harmless, workers_for
from runguard.replay.results import wilson
from runguard.replay.sources import Source, open_sources
from runguard.replay.steps import Faults

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


# ---- rungs: compare the settings of one rule by saved tokens and affected successful runs, and choose

ENOUGH: Final = 5  # recordings that must end differently before a setting changes
WORTH: Final = 0.01  # share of the tokens of failed and unlabelled recordings that a change must save
MOST_FALSE: Final = 0.05  # a rate of false stops that the successful runs must rule out
MOST_NUDGED: Final = 0.02  # share of the successful runs that a new setting may nudge


@dataclass(slots=True)
class Point:
    """One setting of a rule over many recordings.

    Compared with the rule switched off, so the effects of other rules do not count.
    """

    successes: int = 0
    others: int = 0  # failed or unlabelled
    spent: int = 0  # tokens of the others
    stopped: int = 0  # successful ones, because of this rule
    refused: int = 0
    nudged: int = 0
    caught: int = 0  # others that it stopped
    tokens: int = 0  # after its stops, of the others
    nano: int = 0
    saves_more: int = 0  # others in which it saves more than the current setting
    spared: int = 0  # successful ones that the current setting stops and this one does not

    def add(
        self, success: bool | None, spent: int, mine: RecordingOutcome, off: RecordingOutcome, now: RecordingOutcome
    ) -> None:
        if success:
            self.successes += 1
            self.stopped += mine.stopped and not off.stopped
            self.refused += mine.refused and not off.refused
            self.nudged += mine.nudged and not off.nudged
            self.spared += now.stopped and not mine.stopped
            return
        self.others += 1
        self.spent += spent
        self.caught += mine.stopped and not off.stopped
        self.tokens += mine.tokens - off.tokens
        self.nano += mine.nano - off.nano
        self.saves_more += mine.tokens > now.tokens

    def __add__(self, other: "Point") -> "Point":
        return Point(*(getattr(self, name) + getattr(other, name) for name in Point.__slots__))

    @property
    def false_stops(self) -> tuple[float, float]:
        """Of the successful runs: an interval for the rate."""
        return wilson(self.stopped, self.successes)

    def to_dict(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in ("stopped", "refused", "nudged", "caught", "tokens")}
        return counts | {"usd": self.nano / 1e9, "false_stop_interval": [round(end, 4) for end in self.false_stops]}


@dataclass(slots=True)
class Curve:
    """All settings of one rule, each in the two halves of the recordings."""

    rule: str
    now: dict[str, int]
    tried: list[Variant]  # without the one that is off
    as_it_is: list[Point] = field(default_factory=lambda: [Point(), Point()])
    points: list[list[Point]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.points = [[Point(), Point()] for _ in self.tried]

    def add(
        self,
        success: bool | None,
        half: int,
        spent: int,
        now: RecordingOutcome,
        off: RecordingOutcome,
        outcomes: list[RecordingOutcome],
    ) -> None:
        """``spent``: tokens of the recording."""
        self.as_it_is[half].add(success, spent, now, off, now)
        for halves, outcome in zip(self.points, outcomes, strict=True):
            halves[half].add(success, spent, outcome, off, now)

    def over(self, halves: tuple[int, ...]) -> tuple[Point, list[Point]]:
        return _sum(self.as_it_is, halves), [_sum(point, halves) for point in self.points]


def _sum(points: list[Point], halves: tuple[int, ...]) -> Point:
    return sum((points[half] for half in halves), Point())


@dataclass(slots=True)
class Choice:
    """What becomes of one rule. ``rungs`` None: it stays as it is."""

    rule: str
    now: dict[str, int]
    rungs: dict[str, int] | None
    why: str
    before: Point
    after: Point | None = None
    curve: list[tuple[dict[str, int], Point]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        points = [{"rungs": rungs, **point.to_dict()} for rungs, point in self.curve]
        return {
            "now": self.now,
            "proposed": self.rungs,
            "why": self.why,
            "curve": [{"rungs": self.now, "is_now": True, **self.before.to_dict()}, *points],
        }


def choose(curve: Curve, halves: tuple[int, ...], most: float) -> Choice:
    """The most saving setting that touches no more successful runs than the present one; the present one when the
    recordings cannot tell.

    ``most``: false stops allowed, a number, or below 1 a share of the successful runs.
    """
    now, points = curve.over(halves)
    tried = list(zip(curve.tried, points, strict=True))
    choice = Choice(
        curve.rule, curve.now, None, "", now, curve=[(dict(variant.rungs or ()), point) for variant, point in tried]
    )
    if not now.successes:
        choice.why = "nothing is labelled a success: what another setting would stop wrongly cannot be known"
        return choice
    allowed = int(most * now.successes + 1e-9) if 0 < most < 1 else int(most)
    must_loosen = now.stopped > allowed
    fair = [(variant, point) for variant, point in tried if _is_fair(point, now, allowed)]
    best = max(fair, key=lambda entry: entry[1].tokens, default=None)
    if must_loosen:
        choice.why = _loosened(choice, best, allowed)
    elif not now.others:
        choice.why = "all recordings are labelled a success: there is nothing to save"
    elif best is None or best[1].tokens <= now.tokens:
        choice.why = "no other setting saves more without touching more successful recordings"
    else:
        choice.why = _tightened(choice, best)
    return choice


def _is_fair(point: Point, now: Point, allowed: int) -> bool:
    nudges = max(now.nudged, int(MOST_NUDGED * point.successes))
    return point.stopped <= min(allowed, now.stopped) and point.refused <= now.refused and point.nudged <= nudges


def _tightened(choice: Choice, best: tuple[Variant, Point]) -> str:
    variant, point = best
    now, rungs = choice.before, dict(variant.rungs or ())
    more = f"{point.tokens - now.tokens:,} more tokens in {point.saves_more} recording{'s' * (point.saves_more != 1)}"
    if point.saves_more < ENOUGH:
        return f"{rungs_text(rungs)} would save {more}: too few to tell from chance ({ENOUGH} needed)"
    if point.tokens - now.tokens < WORTH * point.spent:
        return f"{rungs_text(rungs)} would save {more}: less than {WORTH:.0%} of what they spent, not worth a change"
    if point.false_stops[1] > MOST_FALSE:
        return (
            f"{rungs_text(rungs)} would save {more}, but {point.successes} successful recordings cannot rule out "
            "that it stops "
            f"{MOST_FALSE:.0%} of them (at most {point.false_stops[1]:.1%})"
        )
    choice.rungs, choice.after = rungs, point
    return (
        f"saves {more} and stops {point.stopped} of {point.successes} successful ones (at most "
        f"{point.false_stops[1]:.1%})"
    )


def _loosened(choice: Choice, best: tuple[Variant, Point] | None, allowed: int) -> str:
    now = choice.before
    stops = f"stops {now.stopped} of {now.successes} successful recordings, {allowed} allowed"
    if best is None:
        return f"{stops}, and so does every other setting: read them with 'runguard replay --explain'"
    variant, point = best
    rungs = dict(variant.rungs or ())
    if point.spared < ENOUGH:
        return (
            f"{stops}; {rungs_text(rungs)} would spare {point.spared}: too few to tell from chance ({ENOUGH} "
            "needed); read them first"
        )
    choice.rungs, choice.after = rungs, point
    return (
        f"{stops}; this spares {point.spared} of them and gives up {now.tokens - point.tokens:,} tokens after the stops"
    )


# ---- effects of policies on the recordings: by label, by limit, and on the half they were not fitted to

_SHOWN: Final = 5
_SOURCES: Final = 1_000


@dataclass(slots=True)
class Share:
    """Recordings with one label under one policy."""

    recordings: int = 0
    nudged: int = 0
    refused: int = 0
    stopped: int = 0
    tokens: int = 0
    nano: int = 0

    def add(self, outcome: RecordingOutcome) -> None:
        self.recordings += 1
        self.nudged += outcome.nudged
        self.refused += outcome.refused
        self.stopped += outcome.stopped
        self.tokens += outcome.tokens
        self.nano += outcome.nano

    def to_dict(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in ("recordings", "nudged", "refused", "stopped")}
        return counts | {
            "stopped_interval": [round(end, 4) for end in wilson(self.stopped, self.recordings)],
            "tokens_after": self.tokens,
            "usd_after": self.nano / 1e9,
        }


@dataclass(slots=True)
class Effect:
    """The effect of a whole policy, by label."""

    by_label: dict[str, Share] = field(default_factory=lambda: {label: Share() for label in LABELS.values()})

    def add(self, success: bool | None, outcome: RecordingOutcome) -> None:
        self.by_label[LABELS[success]].add(outcome)

    def to_dict(self) -> dict[str, Any]:
        return {label: share.to_dict() for label, share in self.by_label.items()}


@dataclass(slots=True)
class LimitEffect:
    """The effect of one limit added to the current rules: recordings that it stops, or whose answers it shortens."""

    by_label: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LABELS.values(), 0))
    tokens: int = 0  # after its stops
    nano: int = 0
    successes: list[str] = field(default_factory=list)  # the first ones
    stopped_by_source: Counter[str] = field(default_factory=Counter)  # successful ones
    by_source: Counter[str] = field(default_factory=Counter)  # all successful ones, affected or not

    def add(self, name: str, source: str, success: bool | None, outcome: RecordingOutcome) -> None:
        if success and (source in self.by_source or len(self.by_source) < _SOURCES):
            self.by_source[source] += 1
            self.stopped_by_source[source] += outcome.acted
        if not outcome.acted:
            return
        self.by_label[LABELS[success]] += 1
        self.tokens += outcome.its_tokens
        self.nano += outcome.its_nano
        if success and len(self.successes) < _SHOWN:
            self.successes.append(name)

    @property
    def recordings(self) -> int:
        return sum(self.by_label.values())

    @property
    def apart(self) -> list[str]:
        """Sources in which it affects most successful recordings: another kind of work than the rest."""
        hit = self.stopped_by_source
        return [
            source
            for source, many in self.by_source.items()
            if len(self.by_source) > 1 and hit[source] > 1 and 2 * hit[source] > many
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "apart": self.apart,
            "recordings": self.by_label,
            "tokens_after": self.tokens,
            "usd_after": self.nano / 1e9,
            "successful": self.successes,
        }


@dataclass(slots=True)
class HeldOut:
    """Stops on the half of the recordings that a setting was not fitted to, both ways.

    Counts only runs that should not be stopped: successful, or else unlabelled.
    """

    fitted: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # settings for which half of the runs were too few
    # recordings, stopped, stopped before
    by_label: dict[str, list[int]] = field(default_factory=lambda: {label: [0, 0, 0] for label in LABELS.values()})

    @classmethod
    def of(cls, halves: list[dict[str, Any]], whole: dict[str, Any]) -> "HeldOut":
        return cls(halves, [name for name in whole if name != "rules" and any(name not in half for half in halves)])

    def add(self, success: bool | None, now: RecordingOutcome, outcome: RecordingOutcome) -> None:
        counts = self.by_label[LABELS[success]]
        counts[0] += 1
        counts[1] += outcome.stopped
        counts[2] += now.stopped

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
        by_label = {
            label: {"recordings": counts[0], "stopped": counts[1], "stopped_now": counts[2]}
            for label, counts in self.by_label.items()
        }
        return {**by_label, "fitted_on_halves": self.fitted, "not_checked": self.missing}


# ---- the proposal

Watch = Callable[[str, Iterator[PieceResult]], Iterable[PieceResult]]


@dataclass(slots=True)
class Settings:
    """Fitted limits and rungs that change a policy."""

    basis: Basis
    limits: list[Limit]
    choices: list[Choice]

    @property
    def proposed(self) -> list[Limit]:
        return [limit for limit in self.limits if limit.value is not None]

    @property
    def changes(self) -> dict[str, Any]:
        found: dict[str, Any] = {limit.setting: limit.value for limit in self.proposed}
        rules = {choice.rule: choice.rungs for choice in self.choices if choice.rungs is not None}
        return found | ({"rules": rules} if rules else {})

    def over(self, policy: Policy) -> Policy:
        return changed(policy, self.changes)


@dataclass(slots=True)
class Proposal:
    """Limits and rungs from recorded runs, with their basis and their effects."""

    sources: list[str]
    policy: Policy  # the current policy, which the proposal changes
    samples: Samples
    settings: Settings
    model_calls: int = 0
    estimated: int = 0
    missing: Missing = field(default_factory=Missing)
    faults: Faults = field(default_factory=Faults)
    now: Effect = field(default_factory=Effect)
    proposed: Effect = field(default_factory=Effect)
    cuts: dict[str, LimitEffect] = field(default_factory=dict)  # by setting
    held_out: HeldOut = field(default_factory=HeldOut)

    @property
    def changes(self) -> dict[str, Any]:
        """The proposed settings, as a policy file names them."""
        return self.settings.changes

    def to_toml(self) -> str:
        return toml_of(self)

    def to_dict(self) -> dict[str, Any]:
        basis, samples = self.settings.basis, self.samples
        return {
            "sources": self.sources,
            "recordings": {label: samples.recordings(label) for label in LABELS.values()},
            "runs": {label: samples.runs(label) for label in LABELS.values()},
            "basis": {
                "kind": basis.kind,
                "runs": basis.runs,
                "recordings": basis.recordings,
                "is_sampled": basis.is_sampled,
            },
            "model_calls": self.model_calls,
            "estimated_calls": self.estimated,
            "unpriced": {"recordings": self.missing.unpriced, "calls_by_model": self.missing.models},
            "limits": {
                limit.setting: limit.to_dict()
                | ({"cut": self.cuts[limit.setting].to_dict()} if limit.setting in self.cuts else {})
                for limit in self.settings.limits
            },
            "rules": {choice.rule: choice.to_dict() for choice in self.settings.choices},
            "proposal": self.changes,
            "now": self.now.to_dict(),
            "proposed": self.proposed.to_dict(),
            "held_out": self.held_out.to_dict(),
            "skipped": {"count": self.faults.count, "first": self.faults.first},
            "toml": self.to_toml(),
        }


def calibrate(
    source: str | Path | list[Source],
    policy: Policy | None = None,
    *,
    max_false_stops: float = 0,
    workers: int = 1,
    model: str = "",
    watch: Watch | None = None,
) -> Proposal:
    """Propose limits from recorded runs; raise UnreadableError if the source cannot be read.

    ``policy``: the current policy with prices, tools and rules, which the proposal changes; the defaults without it.
    ``max_false_stops``: how many successful runs a rule may stop: a number, or below 1 a share. ``model``: the model of
    recordings that do not name one.
    """
    sources = open_sources(str(source)) if isinstance(source, str | Path) else source
    policy = policy if policy is not None else Policy.validated({}, "")
    now = harmless(policy)
    workers = workers_for([now], workers)
    watch = watch or (lambda _, found: found)
    tried = variants(policy)
    curves = _curves(policy, tried)
    made = Proposal([each.name for each in sources], policy, Samples(), Settings(Basis("", [], HALVES), [], []))
    for done in watch("measuring", each_run(sources, Measuring, (now, tried), workers, model)):
        made.faults.merge(done.faults)
        for measured in done.results:
            _add_measured(made, curves, tried, measured)

    def fitted(halves: tuple[int, ...]) -> Settings:
        needed = runs_needed(SHARE)
        basis = made.samples.basis(needed, halves)
        return Settings(
            basis, propose(basis, made.missing), [choose(curve, halves, max_false_stops) for curve in curves]
        )

    made.settings = fitted(HALVES)
    parts = [fitted((half,)) for half in HALVES]
    while made.changes:
        made.now, made.proposed, made.held_out = (
            Effect(),
            Effect(),
            HeldOut.of([part.changes for part in parts], made.changes),
        )
        comparisons = _comparisons(made, parts, now)
        for done in watch("comparing", each_run(sources, Comparing, (comparisons,), workers, model)):
            for compared in done.results:
                _add_compared(made, compared)
        if not _withhold(made, parts):
            return made
    made.now, made.proposed, made.held_out = Effect(), Effect(), HeldOut()  # no proposal is left to compare
    return made


def _comparisons(made: Proposal, parts: list[Settings], now: Policy) -> list[Comparison]:
    """Return the current policy, the proposal, each limit alone, and the fit of each half for the other half."""
    made.cuts |= {limit.setting: LimitEffect() for limit in made.settings.proposed}
    alone = [
        Comparison(changed(now, {limit.setting: limit.value}), limit.kind.rule, limit.kind.unit)
        for limit in made.settings.proposed
    ]
    halves = [Comparison(part.over(now), half=1 - half) for half, part in zip(HALVES, parts, strict=True)]
    return [Comparison(now), Comparison(made.settings.over(now)), *alone, *halves]


def _withhold(made: Proposal, parts: list[Settings]) -> bool:
    """Withdraw limits that would stop most work of one source: different distributions have no common P95."""
    found = [limit for limit in made.settings.proposed if made.cuts[limit.setting].apart]
    for limit in found:
        limit.withhold(made.cuts[limit.setting].apart)
        for part in parts:
            for other in part.limits:
                if other.setting == limit.setting:
                    other.value = None
    return bool(found)


def _curves(policy: Policy, tried: list[Variant]) -> list[Curve]:
    found = []
    for rule in dict.fromkeys(variant.rule for variant in tried):
        rungs = policy.rungs(rule)
        assert rungs is not None
        found.append(
            Curve(
                rule,
                scaled(rungs, 1.0),
                [variant for variant in tried if variant.rule == rule and variant.rungs is not None],
            )
        )
    return found


def _add_measured(made: Proposal, curves: list[Curve], tried: list[Variant], measured: Measured) -> None:
    half = half_of(measured.id)
    made.samples.add(measured.success, half, measured.usages, measured.runs)
    made.model_calls += measured.model_calls
    made.estimated += measured.estimated
    made.missing.add(measured.unpriced, measured.begins_untimed)
    now = measured.now
    for curve in curves:
        mine = [
            (variant, measured.tried.get(number, now))
            for number, variant in enumerate(tried)
            if variant.rule == curve.rule
        ]
        off = next(outcome for variant, outcome in mine if variant.rungs is None)
        curve.add(
            measured.success,
            half,
            measured.tokens,
            now,
            off,
            [outcome for variant, outcome in mine if variant.rungs is not None],
        )


def _add_compared(made: Proposal, compared: Compared) -> None:
    now, proposed, *rest = compared.outcomes
    assert now is not None
    assert proposed is not None
    made.now.add(compared.success, now)
    made.proposed.add(compared.success, proposed)
    limits = made.settings.proposed
    for limit, outcome in zip(limits, rest, strict=False):
        assert outcome is not None
        made.cuts[limit.setting].add(compared.id, compared.source, compared.success, outcome)
    held_out = next(outcome for outcome in rest[len(limits) :] if outcome is not None)
    made.held_out.add(compared.success, now, held_out)


# ---- the proposal as a ``runguard.toml``: proposed settings with their reasons, then the other settings

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_WIDTH: Final = 130


def toml_of(made: Proposal) -> str:
    changes = made.changes
    lines = [
        *_comment(f"Proposed by 'runguard calibrate' from {', '.join(_names(made))}."),
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
    for limit in made.settings.limits:
        lines += [*_limit_lines(limit, made), ""]
    values, missing = file_values(made.policy)
    if values := {name: value for name, value in values.items() if name not in changes}:
        lines += ["# Unchanged:", *(f"{_key(name)} = {value_of(value)}" for name, value in values.items()), ""]
    if missing := [name for name in missing if name.removesuffix(" = None") not in changes]:
        lines += [*_comment(f"Not copied, because only code can express it: {', '.join(missing)}."), ""]
    if any(name in made.policy.model_fields_set for name in SECRET):
        lines += ["# store and alerts are not copied, because they may hold secrets: copy them here.", ""]
    lines += ["[rules]"]
    proposed = {choice.rule: choice for choice in made.settings.choices}
    for rule, choice in proposed.items():
        lines += _comment(
            f"{rule}: {'changed from' if choice.rungs else 'stays'} {rungs_text(choice.now)}. {choice.why}."
        )
        if choice.rungs is not None:
            lines.append(f"{rule} = {value_of(choice.rungs)}")
    lines += [
        f"{_key(rule)} = {value_of(rungs)}"
        for rule, rungs in made.policy.rules.items()
        if rule not in changes.get("rules", {})
    ]
    return "\n".join(lines) + "\n"


def _limit_lines(limit: Limit, made: Proposal) -> list[str]:
    if limit.value is None or limit.quantile is None:
        return _comment(f"{limit.setting}: no proposal. {limit.why_not}.")
    text = f"{FACTOR:g} x {about_quantile(limit)}. {about_cut(limit, made.cuts[limit.setting])}."
    return [*_comment(text), f"{limit.setting} = {value_of(limit.value)}"]


def _names(made: Proposal) -> list[str]:
    return [*made.sources[:3], *([f"{len(made.sources) - 3} others"] if len(made.sources) > 3 else [])]


def _comment(text: str) -> list[str]:
    """Return comment lines; no part of a name may become a setting."""
    return [f"# {line}" for line in wrap("".join(c if c.isprintable() else " " for c in text), _WIDTH)]


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
    basis, samples = made.settings.basis, made.samples
    in_all = sum(samples.recordings(label) for label in ("success", "failure", "unlabelled"))
    if not in_all:
        return "No recording could be read."
    parts = {"success": "labelled a success", "failure": "labelled a failure", "unlabelled": "without a label"}
    by_label = ", ".join(
        f"{samples.recordings(label):,} {words}" for label, words in parts.items() if samples.recordings(label)
    )
    text = f"{recordings(in_all)}: {by_label}. Limits are based on the {basis.recordings:,} {basis.kind} ones"
    if basis.runs > basis.recordings:
        text += f" (the largest of the {basis.runs:,} runs in them, one per recording)"
    if basis.is_sampled:
        text += ", on a uniform sample of them"
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
    """Describe what the limit would have stopped."""
    if not cut.recordings:
        return "Would have stopped no recording"
    by_label = ", ".join(f"{number:,} {label}" for label, number in cut.by_label.items() if number)
    if limit.setting == "max_tool_result_chars":
        text = f"Would have shortened answers in {recordings(cut.recordings)} ({by_label})"
    else:
        text = (
            f"Would have stopped {recordings(cut.recordings)} ({by_label}), {count(cut.tokens)} tokens and "
            f"{money(cut.nano)} before their end"
        )
    return f"{text}. {about_successes(limit, cut)}" if cut.successes else text


def about_successes(limit: Limit, cut: LimitEffect) -> str:
    """Name the successful recordings that a limit would have affected."""
    more = " and others" if cut.by_label["success"] > len(cut.successes) else ""
    return f"Successful among them: {', '.join(cut.successes)}{more}; the largest took {number(limit, limit.largest)}"


def rungs_text(rungs: dict[str, int]) -> str:
    return " ".join(f"{name} {at}" for name, at in rungs.items())


# ---- the command: print a proposal with its reasons and effects, or as JSON


def run(
    sources: list[Source],
    policy: Policy,
    *,
    target: Path | None = None,
    as_json: bool = False,
    max_false_stops: float = 0,
    workers: int | None = None,
    model: str = "",
) -> bool:
    """Return whether there is a proposal; only then the file is written."""
    if target is not None:
        check_place(target)
    made = calibrate(
        sources,
        policy,
        max_false_stops=max_false_stops,
        workers=workers or os.cpu_count() or 1,
        model=model,
        watch=lambda _, found: with_progress(sources, found),
    )
    has_advice = bool(made.changes)
    if as_json:
        sys.stdout.write(json.dumps(made.to_dict(), indent=2) + "\n")
    else:
        print_proposal(screen.console(), printable(made))
    if has_advice and target is not None:
        write_file(target, made.to_toml())
    elif has_advice and not as_json:
        sys.stdout.write("\n" + made.to_toml())
    return has_advice


def print_proposal(out: Console, made: Proposal) -> None:
    out.print(basis_text(made))
    if made.estimated:
        out.print(
            f"tokens of {count(made.estimated)} of {count(made.model_calls)} model calls are estimated from "
            "the length of their texts",
            style="dim",
        )
    _print_limits(out, made)
    _print_rules(out, made)
    if made.changes:
        _print_effect(out, made)
        out.print(f"fitted on one half, counted on the other: {made.held_out.words()}")
    else:
        out.print("nothing to propose from these recordings", style="yellow")
    print_faults(out, made.faults)


def _print(out: Console, title: str, shown: Table) -> None:
    out.print(Text.assemble("\n", screen.heading(title)))
    screen.print_table(out, shown)


def _print_limits(out: Console, made: Proposal) -> None:
    figures = ("proposed", "P95", "its 95 % interval", "recordings")
    shown = screen.table(
        "setting",
        *figures,
        "would have stopped",
        right=figures,
        whole=("setting", "proposed", "P95"),
        sentences=("would have stopped",),
    )
    for limit in made.settings.limits:
        found = limit.quantile
        if limit.value is None or found is None:
            shown.add_row(
                limit.setting, Text("none", "dim"), "", "", str(limit.recordings), Text(limit.why_not, "yellow")
            )
            continue
        proposed, now, low, high = (number(limit, each) for each in (limit.value, found.value, found.low, found.high))
        shown.add_row(
            limit.setting,
            Text(proposed, "bold"),
            now,
            f"{low} – {high}",
            f"{found.runs:,}",
            _cut(out, limit, made.cuts[limit.setting]),
        )
    _print(out, "limits: 2.5 x P95", shown)


def _cut(out: Console, limit: Limit, cut: LimitEffect) -> Text:
    text = Text(", ".join(f"{many:,} {label}" for label, many in cut.by_label.items() if many)) or Text(
        "nothing", "dim"
    )
    if cut.tokens:
        text.append(f"; {count(cut.tokens)} tokens, {money(cut.nano)} after the stops")
    if cut.successes:
        text.append("\n" if out.is_terminal else ". ").append(about_successes(limit, cut), "red")
    return text


def _print_rules(out: Console, made: Proposal) -> None:
    counts = ("false stops", "at most", "refused", "nudged", "tokens saved")
    shown = screen.table("rule", "rungs", *counts, "", right=counts, whole=("rule",), sentences=("",))
    for choice in made.settings.choices:
        stays = Text.assemble(("now", "dim"), "" if choice.rungs else f". Stays: {choice.why}")
        shown.add_row(choice.rule, rungs_text(choice.now), *_point(choice.before), stays)
        for rungs, point in _worth_showing(choice):
            chosen = Text.assemble(("proposed", "bold green"), f": {choice.why}") if rungs == choice.rungs else ""
            shown.add_row("", rungs_text(rungs), *_point(point), chosen)
    _print(out, "rungs: saved tokens against false stops", shown)
    out.print(
        "false stops, refused, nudged: successful recordings; tokens saved: after the stops of the others; "
        "both counted for that rule only",
        style="dim",
    )


def _worth_showing(choice: Choice) -> list[tuple[dict[str, int], Point]]:
    """Return the settings that change the result."""
    now = choice.before
    return [
        (rungs, point)
        for rungs, point in choice.curve
        if rungs == choice.rungs or (point.tokens, point.stopped) != (now.tokens, now.stopped)
    ]


def _point(point: Point) -> list[str]:
    at_most = f"{point.false_stops[1]:.1%}" if point.successes else "?"
    return [str(point.stopped), at_most, str(point.refused), str(point.nudged), count(point.tokens)]


def _print_effect(out: Console, made: Proposal) -> None:
    figures = (
        "recordings",
        "stopped now",
        "stopped then",
        "tokens after, now",
        "tokens after, then",
        "money after, then",
    )
    shown = screen.table("", *figures, right=figures)
    for label, before in made.now.by_label.items():
        if before.recordings:
            then = made.proposed.by_label[label]
            stopped = [f"{each.stopped} ({share(each.stopped, each.recordings)})" for each in (before, then)]
            shown.add_row(
                label, f"{before.recordings:,}", *stopped, count(before.tokens), count(then.tokens), money(then.nano)
            )
    _print(out, "the whole proposal", shown)
