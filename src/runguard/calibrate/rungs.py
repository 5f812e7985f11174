"""Compare the settings of one rule by saved tokens and affected successful runs, and choose one or none."""

from dataclasses import dataclass, field
from typing import Any, Final

from runguard.calibrate.measuring import RecordingOutcome, Variant
from runguard.replay.totals import wilson

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
    now = choice.before
    more = f"{point.tokens - now.tokens:,} more tokens in {point.saves_more} recording{'s' * (point.saves_more != 1)}"
    if point.saves_more < ENOUGH:
        return f"{_rungs_text(variant)} would save {more}: too few to tell from chance ({ENOUGH} needed)"
    if point.tokens - now.tokens < WORTH * point.spent:
        return f"{_rungs_text(variant)} would save {more}: less than {WORTH:.0%} of what they spent, not worth a change"
    if point.false_stops[1] > MOST_FALSE:
        return (
            f"{_rungs_text(variant)} would save {more}, but {point.successes} successful recordings cannot rule out "
            "that it stops "
            f"{MOST_FALSE:.0%} of them (at most {point.false_stops[1]:.1%})"
        )
    choice.rungs, choice.after = dict(variant.rungs or ()), point
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
    if point.spared < ENOUGH:
        return (
            f"{stops}; {_rungs_text(variant)} would spare {point.spared}: too few to tell from chance ({ENOUGH} "
            "needed); read them first"
        )
    choice.rungs, choice.after = dict(variant.rungs or ()), point
    return (
        f"{stops}; this spares {point.spared} of them and gives up {now.tokens - point.tokens:,} tokens after the stops"
    )


def _rungs_text(variant: Variant) -> str:
    return " ".join(f"{name} {number}" for name, number in variant.rungs or ())
