"""The interval of the cost per success: it finds planted rises, and equal samples seldom look like one."""

from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runguard.gate.checks import Cost, Sums, change, interval, pairs_of

COSTS = st.lists(st.tuples(st.integers(1, 10**12), st.booleans()), min_size=2, max_size=60).filter(
    lambda costs: any(is_success for _, is_success in costs)
)


def sums_of(costs: "list[Cost]") -> Sums:
    sums = Sums()
    for cost, is_success in costs:
        sums.add(cost, is_success)
    return sums


def sample(random: Random, runs: int, times: float = 1.0, successes: float = 0.8, spread: float = 0.8) -> "list[Cost]":
    """Skewed costs, as agents have them."""
    return [(int(1e7 * times * random.lognormvariate(0, spread)), random.random() < successes) for _ in range(runs)]


def rises(trials: int, runs: int, seed: int, **planted: float) -> int:
    random = Random(seed)
    return sum(
        change(sums_of(sample(random, runs, **planted)), sums_of(sample(random, runs))).is_rise() for _ in range(trials)
    )


@pytest.mark.parametrize(("runs", "seed"), [(20, 1), (50, 2), (200, 3)])
def test_equal_samples_seldom_look_like_a_rise(runs: int, seed: int) -> None:
    assert rises(600, runs, seed) <= 600 * 0.02  # the level promises 0.5 %; chance adds a few


def test_a_planted_rise_is_found() -> None:
    assert rises(50, 200, 4, times=2.0) == 50


def test_fewer_successes_raise_the_cost_too() -> None:
    assert rises(50, 400, 5, successes=0.4) >= 48


def test_a_fall_is_no_rise() -> None:
    assert rises(50, 200, 6, times=0.5) == 0


def test_the_same_runs_need_fewer_of_them() -> None:
    random = Random(7)
    found = {True: 0, False: 0}
    for _ in range(50):
        before = sample(random, 30, spread=1.2)
        now = [(int(cost * 1.2 * random.uniform(0.95, 1.05)), ok) for cost, ok in before]
        named = [{str(n): cost for n, cost in enumerate(costs)} for costs in (now, before)]
        for paired in found:
            pairs = pairs_of(*named) if paired else None
            found[paired] += change(sums_of(now), sums_of(before), pairs).is_rise()
    assert found[True] == 50
    assert found[False] <= 5


def test_the_allowed_rise_is_allowed() -> None:
    before = [(100_000, True)] * 30
    now = [(109_000, True)] * 30
    found = change(sums_of(now), sums_of(before))
    assert found.is_rise()
    assert not found.is_rise(0.1)


def test_samples_of_other_runs_have_no_pairs() -> None:
    assert pairs_of({"a": (1, True)}, {"b": (1, True)}) is None
    assert pairs_of({}, {}) is None
    assert pairs_of({"a": (1, True)}, {"a": (2, False)}) == [((1, True), (2, False))]


@given(COSTS)
def test_a_sample_does_not_differ_from_itself(costs: "list[Cost]") -> None:
    sums, named = sums_of(costs), {str(n): cost for n, cost in enumerate(costs)}
    for pairs in (None, pairs_of(named, named)):
        found = change(sums, sums, pairs)
        assert found.ratio == 1
        assert not found.is_rise()
    low, high = interval(sums)
    assert low <= sums.per_success * (1 + 1e-9)
    assert high >= sums.per_success * (1 - 1e-9)


def test_without_success_the_cost_is_infinite() -> None:
    assert sums_of([(5, False)]).per_success == inf
