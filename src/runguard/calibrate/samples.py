"""The figures of all recordings, or a uniform sample of them in bounded memory, and quantiles with intervals.

Of n independent runs the number below the true quantile is binomial, for any distribution. So the k-th smallest run
lies below the quantile with a probability that depends only on n, k and the share, and two of the runs enclose it with
a known confidence.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import ceil, exp, lgamma, log, log1p, sqrt
from random import Random
from typing import Final

from runguard.calibrate.meter import Usages

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
    """Return which runs, counted from the smallest as 1, enclose the quantile; None if there are too few."""
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
