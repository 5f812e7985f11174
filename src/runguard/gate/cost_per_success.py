"""Cost per success of recorded runs, and whether it rose by more than chance explains.

The cost per success is a ratio: the cost of all runs, divided by the number of successful runs. Its logarithm is close
to normal, also for skewed costs, and its variance follows from a few sums (the delta method). Two samples of the same
runs are compared run by run, so that differences between runs cancel out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, inf, sqrt
from statistics import NormalDist
from typing import Final, NamedTuple

LEVEL: Final = 0.99  # of the interval, two-sided: 1 of 200 comparisons of equal samples finds a rise
RUNS_NEEDED: Final = 20  # in each of two different samples; with fewer, skewed costs make the interval too narrow
PAIRS_NEEDED: Final = 5  # of the same runs

Cost = tuple[int, bool]  # of one run, in nano-USD or tokens, and whether the run succeeded


@dataclass(slots=True)
class Sums:
    """Sums over runs. ``square`` is of costs, ``with_success`` of the costs of successful runs."""

    runs: int = 0
    cost: int = 0
    successes: int = 0
    square: int = 0
    with_success: int = 0

    def add(self, cost: int, is_success: bool) -> None:
        self.runs += 1
        self.cost += cost
        self.successes += is_success
        self.square += cost * cost
        self.with_success += cost * is_success

    @property
    def per_success(self) -> float:
        return self.cost / self.successes if self.successes else inf

    def scatter(self) -> float:
        """Return the sum of squares of each run's relative deviation, ``cost / mean - success / mean``."""
        mean_cost, mean_success = self.cost / self.runs, self.successes / self.runs
        return max(
            self.square / mean_cost**2
            - 2 * self.with_success / (mean_cost * mean_success)
            + self.successes / mean_success**2,
            0.0,
        )


class Change(NamedTuple):
    """The cost per success as a multiple of the baseline's, with its interval. 1.0: unchanged."""

    ratio: float
    low: float
    high: float
    paired: bool

    def is_rise(self, allowed: float = 0.0) -> bool:
        """Return whether the whole interval lies above the baseline plus the allowed share."""
        return self.low > (1 + allowed) * (1 + 1e-9)


def change(now: Sums, before: Sums, pairs: list[tuple[Cost, Cost]] | None = None) -> Change:
    """Compare two samples with costs and successes. ``pairs``: (now, before) of each run, if both have the same."""
    ratio = now.per_success / before.per_success
    if pairs is not None:
        runs = len(pairs)
        spread, freedom = sqrt(_pair_scatter(now, before, pairs) / (runs * max(runs - 1, 1))), max(runs - 1.0, 1.0)
    else:
        parts = [(each.scatter() / (each.runs * max(each.runs - 1, 1)), each.runs) for each in (now, before)]
        total = sum(variance for variance, _ in parts)
        spread = sqrt(total)
        below = sum(variance**2 / max(runs - 1, 1) for variance, runs in parts)
        freedom = max(total**2 / below, 1.0) if below else 1.0
    reach = exp(min(_student(1 - (1 - LEVEL) / 2, freedom) * spread, 700.0))
    return Change(ratio, ratio / reach, ratio * reach, pairs is not None)


def interval(sums: Sums) -> tuple[float, float]:
    """Return the interval of a sample's cost per success."""
    spread = sqrt(sums.scatter() / (sums.runs * max(sums.runs - 1, 1)))
    reach = exp(min(_student(1 - (1 - LEVEL) / 2, max(sums.runs - 1, 1)) * spread, 700.0))
    return sums.per_success / reach, sums.per_success * reach


def pairs_of(now: Mapping[str, Cost], before: Mapping[str, Cost]) -> list[tuple[Cost, Cost]] | None:
    """Return the costs of each run in both samples; None if the samples consist of different runs."""
    if not now or now.keys() != before.keys():
        return None
    return [(cost, before[name]) for name, cost in now.items()]


def _pair_scatter(now: Sums, before: Sums, pairs: list[tuple[Cost, Cost]]) -> float:
    means = [(each.cost / each.runs, each.successes / each.runs) for each in (now, before)]
    total = 0.0
    for pair in pairs:
        first, second = (
            cost / mean_cost - is_success / mean_success
            for (cost, is_success), (mean_cost, mean_success) in zip(pair, means, strict=True)
        )
        total += (first - second) ** 2
    return total


def _student(share: float, freedom: float) -> float:
    """Return a quantile of Student's distribution: the normal quantile with the first terms of its expansion."""
    z = NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum((term / freedom**power for power, term in enumerate(terms, 1)), 0.0)
