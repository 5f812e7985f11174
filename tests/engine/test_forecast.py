"""Forecasts: how many calls still fit, and when a budget is used up."""

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from runguard.core.money import (
    LEAST_CALLS,
    Trend,
    Window,
    begin_of,
    budget_forecast,
    calls_until_size,
    calls_within,
    sum_of,
    trend_of,
)
from tests.kit.examples import each_row

LINEAR = [1_000 + 100 * n for n in range(20)]
SAWTOOTH = [1_000 + 500 * (n % 8) for n in range(24)]  # cut three times, at 4,500 tokens
HOUR, DAY = 3_600.0, 86_400.0


def test_linear_growth_is_continued_exactly() -> None:
    trend = trend_of(LINEAR)
    assert trend is not None
    assert sum_of(trend, 1) == 3_000  # the 21st
    assert sum_of(trend, 3) == 3_000 + 3_100 + 3_200
    assert calls_within(trend, 9_300) == 3
    assert calls_within(trend, 9_299) == 2
    assert calls_until_size(LINEAR, 3_900) == 10


def test_flat_prompts_never_reach_a_size() -> None:
    flat = [1_000] * 20
    assert calls_until_size(flat, 2_000) is None
    trend = trend_of(flat)
    assert trend is not None
    assert calls_within(trend, 10_500) == 10


def test_a_history_that_is_cut_is_expected_to_be_cut_again() -> None:
    assert calls_until_size(SAWTOOTH, 100_000) is None
    left = calls_until_size(SAWTOOTH[:-4], 4_500)
    assert left == (4_500 - SAWTOOTH[19]) // 500
    trend = trend_of(SAWTOOTH, is_flat=True)
    assert trend is not None
    assert calls_within(trend, 24 * sum(SAWTOOTH)) == 24 * 24


def test_there_is_no_figure_for_too_few_calls() -> None:
    few = LINEAR[: LEAST_CALLS - 1]
    assert trend_of(few) is None
    assert calls_until_size(few, 100_000) is None
    assert budget_forecast(500, 1_000, LEAST_CALLS - 1, 0, HOUR, DAY) is None
    assert trend_of(LINEAR[:LEAST_CALLS]) is not None


def test_a_series_that_falls_goes_on_at_its_later_half() -> None:
    assert trend_of([900] * 6 + [300] * 6) == Trend(1_800, 0, 6)


def test_calls_that_take_nothing_reach_no_cap() -> None:
    assert calls_within(Trend(0, 0, 1), 100) is None


@given(st.lists(st.integers(0, 10**12), min_size=LEAST_CALLS, max_size=32), st.integers(0, 10**13))
def test_the_calls_that_fit_are_the_most_that_fit(amounts: list[int], room: int) -> None:
    trend = trend_of(amounts)
    assert trend is not None
    left = calls_within(trend, room)
    if left is None:
        assert sum_of(trend, 1_000_000) == 0
        return
    level, growth, scale = trend

    def exact(calls: int) -> int:
        return 2 * calls * level + growth * calls * (calls - 1)

    assert exact(left) <= 2 * scale * room < exact(left + 1)


def test_a_day_is_used_up_at_the_pace_since_midnight() -> None:
    found = budget_forecast(40, 100, 50, 0, 6 * HOUR, DAY)
    assert found is not None
    assert (found.used_up_at, found.share_at_end) == (15 * HOUR, 1.6)


def test_a_burst_counts_less_the_longer_it_is_over() -> None:
    soon, later = (budget_forecast(40, 100, 50, 0, hours * HOUR, DAY) for hours in (1, 20))
    assert soon is not None
    assert soon.used_up_at == 2.5 * HOUR
    assert later is not None
    assert later.used_up_at is None


@each_row(
    ("window", "tz"),
    [("1m", None), ("6h", None), ("1d", None), ("1w", "Asia/Tokyo"), ("month", None), ("month", "America/New_York")],
)
def test_the_begin_of_a_period_is_found_from_its_end(window: str, tz: str | None) -> None:
    for month in range(1, 13):
        at = datetime(2026, month, 20, 13, 30, tzinfo=UTC).timestamp()
        _, begins, ends = Window.parse(window, tz).bounds(at)
        assert abs(begin_of(window, ends) - begins) <= HOUR  # daylight saving time
