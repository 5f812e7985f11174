"""The interval of a quantile covers what it says, whatever the distribution."""

from collections.abc import Callable
from fractions import Fraction
from math import comb, exp, log
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runguard.calibrate.proposal import quantile, ranks, runs_needed

SHARES = st.sampled_from([0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99])
LEVELS = st.sampled_from([0.8, 0.9, 0.95, 0.99])


def chance(share: float, runs: int, low: int, high: int) -> float:
    """That at least ``low`` and fewer than ``high`` of the runs lie below the quantile: exact."""
    p = Fraction(share).limit_denominator(1_000)
    return float(sum(comb(runs, k) * p**k * (1 - p) ** (runs - k) for k in range(low, high)))


@given(st.integers(1, 400), SHARES, LEVELS)
@settings(max_examples=40, deadline=None)
def test_the_ranks_enclose_the_quantile_at_least_as_often_as_they_say(runs: int, share: float, level: float) -> None:
    found = ranks(runs, share, level)
    if found is None:
        assert runs < runs_needed(share, level)
        return
    low, high = found
    assert chance(share, runs, low, high) >= level - 1e-9
    tail = (1 - level) / 2
    assert chance(share, runs, 0, low) <= tail + 1e-9  # each end errs as seldom as the other may
    assert chance(share, runs, high, runs + 1) <= tail + 1e-9
    assert chance(share, runs, 0, low + 1) > tail - 1e-9  # and neither lies further out than it must
    assert chance(share, runs, high - 1, runs + 1) > tail - 1e-9


def test_how_many_runs_are_needed_follows_from_the_tails() -> None:
    assert runs_needed(0.95) == 72
    assert 0.95**72 <= 0.025 < 0.95**71
    assert runs_needed(0.95, level=0.9) == 59  # each tail 5 %: the figure for a bound on one side
    assert runs_needed(0.5) == 6


@given(SHARES, LEVELS)
@settings(deadline=None)
def test_one_run_fewer_than_needed_is_too_few(share: float, level: float) -> None:
    needed = runs_needed(share, level)
    assert ranks(needed, share, level) is not None
    assert ranks(needed - 1, share, level) is None


@given(st.integers(72, 3_000), SHARES)
@settings(max_examples=40, deadline=None)
def test_more_runs_move_the_ranks_on_and_narrow_them(runs: int, share: float) -> None:
    here, next_, later = ranks(runs, share), ranks(runs + 1, share), ranks(4 * runs, share)
    if here is None:
        return
    assert next_ is not None
    assert later is not None
    assert here[0] <= next_[0] <= here[0] + 1
    assert here[1] <= next_[1] <= here[1] + 1
    assert (later[1] - later[0]) / (4 * runs) < (here[1] - here[0]) / runs


@given(st.lists(st.floats(0, 1e6), min_size=72, max_size=200), st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_order_does_not_matter_and_the_value_lies_within(values: list[float], random: Random) -> None:
    found = quantile(values, 0.95)
    assert found is not None
    shuffled = list(values)
    random.shuffle(shuffled)
    assert quantile(shuffled, 0.95) == found
    assert found.low <= found.value <= found.high
    assert sum(value <= found.value for value in values) >= 0.95 * len(values) - 1e-6
    assert {found.low, found.value, found.high} <= set(values)


@pytest.mark.parametrize(
    ("draw", "true"),
    [
        (lambda random: random.random(), 0.95),
        (lambda random: random.expovariate(1.0), -log(0.05)),
        (lambda random: exp(2 * random.gauss(0, 1)), exp(2 * 1.6448536269514722)),
        (lambda random: (1 - random.random()) ** (-1 / 1.1), 0.05 ** (-1 / 1.1)),  # no variance
        (lambda random: float(random.randrange(100)), 94.0),  # many equal ones
    ],
    ids=["uniform", "exponential", "lognormal", "pareto", "discrete"],
)
@pytest.mark.parametrize("runs", [72, 150])
def test_it_covers_the_true_quantile_of_known_distributions(draw: Callable[..., Any], true: Any, runs: int) -> None:
    random = Random(7)
    covered = 0
    for _ in range(1_000):
        found = quantile([draw(random) for _ in range(runs)], 0.95)
        assert found is not None
        covered += found.low <= true <= found.high
    assert covered >= 935  # 95 % and more; two standard deviations of a thousand tries below
