"""Rates are kept until the price changes: over a moving clock the kept rate is always the one of the moment."""

from datetime import date, timedelta

from hypothesis import given
from hypothesis import strategies as st

from runguard.pricing.book import DAY_S, Price, Pricing, current_table
from runguard.pricing.rates import Rates, Usage

DAILY = ("deepseek/deepseek-chat", "deepseek/deepseek-reasoner", "deepseek/deepseek-v4-flash")  # prices by the hour
DATED = [  # models whose list price changes by date
    entry.id
    for provider in current_table().providers
    if provider.id in ("anthropic", "google", "openai")
    for entry in provider.entries
    if len(entry.prices) > 1
]
LIST_CHANGES = sorted(
    {
        price.begins
        for provider in current_table().providers
        for entry in provider.entries
        for price in entry.prices
        if price.begins > 0
    }
)
near_a_change = st.builds(
    lambda change, offset: change + offset,
    st.sampled_from(LIST_CHANGES),
    st.one_of(st.sampled_from([-1.0, -0.001, 0.0, 0.001, 1.0]), st.floats(-3 * DAY_S, 3 * DAY_S)),
)
moments = st.one_of(
    near_a_change,
    st.floats(0, 2e9),
    st.integers(20_000, 21_000).map(lambda day: float(day * DAY_S)),
    st.builds(lambda day, half_hour: day * DAY_S + half_hour * 1800.0, st.integers(20_000, 21_000), st.integers(0, 47)),
    st.sampled_from([float("nan"), float("inf"), float("-inf"), -5.0, 1e30]),
)
prices = st.lists(
    st.one_of(st.none(), st.integers(0, 1500).map(lambda days: date(2024, 1, 1) + timedelta(days=days))),
    min_size=1,
    max_size=4,
    unique=True,
).map(lambda days: [Price(input=n + 1, output=n + 1, since=day) for n, day in enumerate(days)])


def seen(book: Pricing, model: str, at: float) -> object:
    found = book.rates(model, at)
    return getattr(found, "bands", found), getattr(found, "source", None)


@given(st.sampled_from([*DAILY, *DATED, "gemini-2.5-flash", "no-such-model"]), st.lists(moments, max_size=30))
def test_the_list_price_is_that_of_the_moment(model: str, clock: list[float]) -> None:
    kept = Pricing()
    for at in clock:  # forward, backward, and beyond any calendar
        assert seen(kept, model, at) == seen(Pricing(), model, at), at


@given(prices, st.lists(moments, max_size=30))
def test_the_users_price_is_that_of_the_moment(dated: list[Price], clock: list[float]) -> None:
    given_prices = {"gemini-2.5-flash": dated, "deepseek-chat": dated, "mine": dated}
    kept = Pricing(given_prices)
    for at in clock:
        for model in (*given_prices, "deepseek/deepseek-chat"):
            assert seen(kept, model, at) == seen(Pricing(given_prices), model, at), at


def test_a_price_by_the_hour_changes_on_the_second() -> None:
    book, midnight = Pricing(), 20_300.0 * DAY_S
    start, end = midnight + 1800, midnight + 59_400  # deepseek-chat costs twice as much from 00:30 to 16:30 UTC
    costs = []
    for at in (start - 1, start, end - 0.001, end, start, start + DAY_S - 0.001, start + DAY_S):
        rates = book.rates("deepseek/deepseek-chat", at)
        assert isinstance(rates, Rates)
        costs.append(rates.cost(Usage(input=1000)))
    assert costs == [135_000, 270_000, 270_000, 135_000, 270_000, 135_000, 270_000]
