"""A quantile of runs, and how well so few of them know it: order statistics, no assumption about how costs are
distributed.

Of n independent runs the number below the true quantile is binomial, whatever the distribution. So the k-th smallest
run lies below the quantile with a probability that depends on n, k and the share alone, and two of the runs themselves
enclose it with a known confidence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, lgamma, log, log1p, sqrt
from typing import Final

LEVEL: Final = 0.95  # of the interval, two-sided
_FAR: Final = 12  # standard deviations: beyond them is nothing that a double can tell


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
    """The fewest runs of which the largest and the smallest enclose the quantile: each must miss it in at most half of
    1 - level of all samples.
    """
    tail = (1 - level) / 2
    return max(ceil(log(tail) / log(share)), ceil(log(tail) / log1p(-share)))


def ranks(runs: int, share: float, level: float = LEVEL) -> tuple[int, int] | None:
    """Which runs, counted from the smallest as 1, enclose the quantile; None when there are too few of them."""
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
    """The smallest value that at least ``share`` of all do not exceed,
    with its interval; None when there are too few.
    """
    found = ranks(len(values), share, level)
    if found is None:
        return None
    ordered = sorted(values)
    middle = ceil(len(values) * share - 1e-9)
    return Quantile(share, len(values), ordered[middle - 1], ordered[found[0] - 1], ordered[found[1] - 1], level)


def _binomial(hits: int, runs: int, share: float) -> float:
    ways = lgamma(runs + 1) - lgamma(hits + 1) - lgamma(runs - hits + 1)
    return exp(ways + hits * log(share) + (runs - hits) * log1p(-share))
