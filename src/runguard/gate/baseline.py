"""Cost per success of recorded runs, and whether it rose by more than chance explains.

The cost per success is a ratio: the cost of all runs, divided by the number of successful runs. Its logarithm is close
to normal, also for skewed costs, and its variance follows from a few sums (the delta method). Two samples of the same
runs are compared run by run, so that differences between runs cancel out. ``Baseline`` keeps the figures of
one gate for later ones.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import exp, inf, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final, NamedTuple

from runguard.core.errors import RunGuardError
from runguard.replay.results import RunResult

LEVEL: Final = 0.99  # of the interval, two-sided: 1 of 200 comparisons of equal samples finds a rise
RUNS_NEEDED: Final = 20  # in each of two different samples; with fewer, skewed costs make the interval too narrow
PAIRS_NEEDED: Final = 5  # of the same runs

Cost = tuple[int, bool]  # of one run, in nano-USD or tokens, and whether the run succeeded
FORMAT: Final = 1
_LISTED: Final = 10_000  # runs whose figures are kept one by one
_UNITS: Final = ("usd", "tokens")


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


class BaselineError(RunGuardError):
    """A baseline file cannot be used; the message says why."""


@dataclass(slots=True)
class Baseline:
    """Sums in both units, and the figures of each run while there are few.

    A run counts with what it spends up to the stop that the policy would make.
    """

    usd: Sums = field(default_factory=Sums)  # in nano-USD
    tokens: Sums = field(default_factory=Sums)
    unpriced: int = 0  # model calls without a price
    listed: dict[str, tuple[int, int, bool]] | None = field(default_factory=dict)  # id: nano-USD, tokens, success

    def add(self, run: RunResult, is_success: bool) -> None:
        """Add a run; ``is_success`` is false for a run that the policy would have stopped."""
        nano, tokens = run.nano - run.saved.nano, run.tokens - run.saved.tokens
        self.usd.add(nano, is_success)
        self.tokens.add(tokens, is_success)
        self.unpriced += run.unpriced
        if self.listed is not None:
            if run.id in self.listed or len(self.listed) >= _LISTED:
                self.listed = None  # too many, or ids that name no run: compare sums only
            else:
                self.listed[run.id] = (nano, tokens, is_success)

    @property
    def unit(self) -> str:
        """The unit to compare: dollars, unless a call has no price or nothing has a cost."""
        return "tokens" if self.unpriced or not self.usd.cost else "usd"

    def sums(self, unit: str) -> Sums:
        return self.usd if unit == "usd" else self.tokens

    def costs(self, unit: str) -> Mapping[str, Cost]:
        """Return the cost of each run by its id; empty if they are not kept."""
        place = _UNITS.index(unit)
        return {name: (figures[place], figures[2]) for name, figures in (self.listed or {}).items()}

    def to_dict(self) -> dict[str, Any]:
        sums = self.sums(self.unit)
        low, high = interval(sums) if sums.cost and sums.successes else (None, None)
        return {
            "runguard_gate": FORMAT,
            "unit": self.unit,
            "runs": sums.runs,
            "successes": sums.successes,
            "per_success": _shown(sums.per_success if sums.successes else None, self.unit),
            "interval": [_shown(low, self.unit), _shown(high, self.unit)],
            "sums": {"usd": asdict(self.usd), "tokens": asdict(self.tokens), "unpriced": self.unpriced},
            "listed": self.listed and {name: list(figures) for name, figures in sorted(self.listed.items())},
        }

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8", errors="replace")

    @classmethod
    def read(cls, path: Path) -> "Baseline":
        """Read a file that ``write`` wrote; raise BaselineError for anything else."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise BaselineError(f"{path}: no such file; create it with --update-baseline") from None
        except (OSError, ValueError) as error:
            raise BaselineError(f"{path}: cannot be read: {error}") from None
        try:
            if data["runguard_gate"] != FORMAT:
                raise BaselineError(
                    f"{path}: format {data['runguard_gate']!r}, this version reads {FORMAT}; "
                    "create it again with --update-baseline"
                )
            sums, listed = data["sums"], data["listed"]
            found = cls(
                Sums(**{name: _whole(value) for name, value in sums["usd"].items()}),
                Sums(**{name: _whole(value) for name, value in sums["tokens"].items()}),
                _whole(sums["unpriced"]),
                {name: (_whole(usd), _whole(tokens), bool(ok)) for name, (usd, tokens, ok) in listed.items()}
                if listed is not None
                else None,
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise BaselineError(f"{path}: not a baseline of runguard gate; create it with --update-baseline") from None
        if not found.sums(found.unit).successes:
            raise BaselineError(f"{path}: contains no successful run; create it again with --update-baseline")
        return found


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(value)
    return value


def _shown(value: float | None, unit: str) -> float | None:
    """Return a readable figure: dollars to six digits, or whole tokens."""
    if value is None:
        return None
    return float(f"{value / 1e9:.6g}") if unit == "usd" else float(round(value))
