"""Prices that the user sets, limits of models, and how long rates are kept."""

import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from genai_prices.data_snapshot import get_snapshot
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from runguard.engine.guard import Guard
from runguard.errors import PolicyError
from runguard.policy import Policy
from runguard.pricing import book as price_list
from runguard.pricing.book import (
    DAY_S,
    LIMITS,
    ModelLimits,
    Price,
    Pricing,
    Tier,
    current_table,
    entry_of,
    is_release_of,
    limits_of,
    preload,
    prices_per_token,
)
from runguard.pricing.rates import Rates, Usage
from tests.kit.examples import each_row
from tests.kit.prices import AT, MTOK, per_mtok, rates, unpriced, usd

# ---- the user's prices ----------------------------------------------------------------------------------------------


def test_the_users_price_wins_exact_then_normalised_then_glob() -> None:
    book = Pricing(
        {
            "gemini-*": Price(input=1, output=1),
            "gemini-2.5-flash": Price(input=2, output=2),
            "vertex_ai/gemini-2.5-flash": Price(input=3, output=3),
            "gemini-2.5-pro*": Price(input=4, output=4),
        }
    )
    assert per_mtok("vertex_ai/gemini-2.5-flash", book)[0] == 3
    assert per_mtok("gemini/gemini-2.5-flash", book)[0] == 2
    assert per_mtok("gemini-3-anything", book)[0] == 1
    assert per_mtok("models/gemini-3-anything", book)[0] == 1
    assert per_mtok("gemini-2.5-pro", book)[0] == 1  # the first glob that fits
    assert per_mtok("claude-opus-4-8", book)[0] == 5
    plain = Pricing({"gemini-2.5-flash": Price(input=2, output=2), "gemini-*": Price(input=1, output=1)})
    assert per_mtok("models/gemini-2.5-flash", plain)[0] == 2
    assert rates("gemini-2.5-flash", plain).source == "prices"
    assert rates("gemini-2.5-flash").source == current_table().source


def test_dated_prices() -> None:
    book = Pricing(
        {
            "m": [
                Price(input=2, output=2, since=date(2026, 11, 15)),
                Price(input=1, output=1),
                Price(input=3, output=3, since="2027-01-01"),
            ]
        }
    )
    last_second = datetime(2026, 11, 14, 23, 59, 59, tzinfo=UTC).timestamp()
    assert usd(rates("m", book, last_second).cost(Usage(input=1 * MTOK))) == 1
    assert usd(rates("m", book, last_second + 1).cost(Usage(input=1 * MTOK))) == 2
    assert usd(rates("m", book, datetime(2030, 1, 1, tzinfo=UTC).timestamp()).cost(Usage(input=1 * MTOK))) == 3


def test_until_a_future_price_begins_the_list_applies() -> None:
    book = Pricing(
        {
            "gemini-2.5-flash": Price(input=9, output=9, since=date(2027, 1, 1)),
            "new": Price(input=9, output=9, since=date(2027, 1, 1)),
        }
    )
    assert per_mtok("gemini-2.5-flash", book)[0] == Decimal("0.3")
    unpriced("new", book)


@pytest.mark.parametrize(
    "several",
    [[], [Price(input=1, output=1), Price(input=2, output=2)], [Price(input=1, output=1, since=date(2026, 1, 1))] * 2],
)
def test_dated_prices_that_cannot_be_meant(several: list[Price]) -> None:
    with pytest.raises(PolicyError, match=r"prices\.m: "):
        Pricing({"m": several})


def test_a_rate_for_unknown_models() -> None:
    book = Pricing(fallback=Price(input=10, output=30))
    guess = rates("no-such-model", book)
    assert (guess.source, guess.estimated) == ("on_unpriced", True)
    assert usd(guess.cost(Usage(input=1 * MTOK, output=1 * MTOK))) == 40
    assert not rates("gemini-2.5-flash", book).estimated


@each_row("value", [1, 0.1, "0.1", Decimal("0.1"), 0, "1e-3", 999_999, " 2 "])
def test_prices_are_taken_as_written(value: Any) -> None:
    assert Price(input=value, output=0).input == Decimal(str(value).strip())


@each_row(
    "value",
    [
        -1,
        "-0.1",
        float("nan"),
        "nan",
        Decimal("sNaN"),
        float("inf"),
        "-inf",
        True,
        False,
        "cheap",
        "",
        "1,5",
        None,
        [1],
        1e30,
        1_000_000,
        "1e-40",
    ],
)
def test_a_price_that_cannot_be_meant_is_refused(value: Any) -> None:
    for keywords in ({"input": value, "output": 1}, {"input": 1, "output": value}):
        with pytest.raises(PolicyError, match="USD per million tokens"):
            Price(**keywords)
    if value is not None:
        with pytest.raises(PolicyError, match="USD per million tokens"):
            Tier(above=10, input=1, output=1, cached=value)


@each_row(
    "keywords",
    [
        {"inputs": 1},
        {"since": 20261101},
        {"since": datetime(2026, 1, 1, tzinfo=UTC)},
        {"since": "soon"},
        {"tiers": [{"above": 0, "input": 1, "output": 1}]},
        {"tiers": [{"above": True, "input": 1, "output": 1}]},
        {"tiers": [{"above": 5, "input": 1, "output": 1}, {"above": 5, "input": 2, "output": 2}]},
        {"tiers": [{"above": 5, "input": 1}]},
    ],
)
def test_a_price_of_the_wrong_shape_is_refused(keywords: dict[str, Any]) -> None:
    with pytest.raises(PolicyError):
        Price(**({"input": 1, "output": 1} | keywords))


def test_prices_are_frozen_and_come_from_plain_data() -> None:
    price = Price.model_validate(
        {"input": 1, "output": 2.5, "tiers": [{"above": 200_000, "input": "2", "output": 5}], "since": "2026-11-01"}
    )
    assert price.tiers[0].input == 2
    assert price.since == date(2026, 11, 1)
    with pytest.raises(ValidationError):
        price.input = Decimal(3)


# ---- limits ---------------------------------------------------------------------------------------------------------


def test_limits() -> None:
    book = Pricing(
        models={
            "my-model": ModelLimits(context_window=32_000, max_output_tokens=4_000),
            "gemini-*": ModelLimits(max_output_tokens=100),
            "gpt-4o": ModelLimits(),
        }
    )
    assert book.limits("my-model") == (32_000, 4_000)
    assert book.limits("models/gemini-2.5-flash") == (1_048_576, 100)
    assert book.limits("gpt-4o") == (128_000, 16_384)
    assert book.limits("claude-sonnet-4-5@20250929") == (1_000_000, 64_000)
    assert book.limits("openrouter/anthropic/claude-sonnet-4.5") == (1_000_000, 64_000)
    assert book.limits("grok-4") == (256_000, None)  # the price list knows the window, nobody the output
    assert book.limits("no-such-model") == (None, None)


@each_row("value", [0, -1, True, 1.5, "100"])
def test_limits_that_cannot_be_meant(value: Any) -> None:
    with pytest.raises(PolicyError):
        ModelLimits(context_window=value)
    with pytest.raises(PolicyError):
        ModelLimits(max_output_tokens=value)


def test_our_windows_are_not_below_those_of_the_price_list() -> None:
    """Some entries there are rounded (1,000,000 for 1,048,576); ours may be larger, never smaller."""
    for model, (window, output) in LIMITS.items():
        listed = entry_of(current_table(), model)
        assert listed is not None, model
        assert window is not None
        assert window >= (listed[0].window or 0), model
        assert output is None or output < window


def test_a_variant_has_no_limits_of_its_sibling() -> None:
    for variant in (
        "gemini-2.5-flash-image",
        "gemini-2.5-flash-preview-tts",
        "gpt-5-chat-latest",
        "gpt-4o-audio-preview",
        "o3-deep-research",
        "claude-opus-4-10",
    ):
        assert limits_of(variant) == (None, None), variant
    for release in (
        "gemini-2.5-flash-001",
        "gemini-2.5-flash-preview-09-2025",
        "gpt-5-2025-08-07",
        "claude-opus-4-20250514",
        "o3-2025-04-16",
    ):
        assert limits_of(release) != (None, None), release


@each_row(
    ("name", "rest", "same"),
    [
        ("gemini-2.5-pro", "", True),
        ("gemini-2.5-pro", "-preview-05-06", True),
        ("gemini-2.0-flash-0", "01", True),
        ("claude-sonnet-4-2025", "0514", True),
        ("claude-opus-4-1", "0", False),
        ("claude-opus-4", "-1", False),
        ("gpt-5-nano-", "2025-08-07", True),
        ("gpt-4", "o", False),
        ("gpt-4", "-32k", False),
        ("gemini-live-2.5-flash", "-preview-native-audio-09-2025", True),
        ("gemini-2.5-flash", "-native-audio-latest", False),
    ],
)
def test_releases(name: str, rest: str, same: bool) -> None:
    assert is_release_of(name, rest) is same


# ---- caching, threads, import ---------------------------------------------------------------------------------------


def test_made_up_names_do_not_fill_the_memory() -> None:
    book = Pricing()
    theirs = get_snapshot()
    before = len(theirs._lookup_cache) + len(theirs._provider_cache) + len(theirs._provider_misses)
    for n in range(1100):
        book.rates(f"made-up-{n}", AT)
        book.limits(f"made-up-{n}")
    book.rates("y" * 100_000, AT)
    assert len(book._by_id) <= 1024
    assert len(book._known_limits) <= 1024
    assert max(map(len, book._by_id)) < 1000
    assert len(theirs._lookup_cache) + len(theirs._provider_cache) + len(theirs._provider_misses) == before


def test_a_rate_is_looked_up_once_and_kept_until_the_price_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    book = Pricing()
    lookups: list[str] = []

    def looked_up(table: Any, model: str) -> Any:
        lookups.append(model)
        return entry_of(table, model)

    monkeypatch.setattr(price_list, "entry_of", looked_up)
    for at in (AT, AT + 1, AT + 60, AT + 86_400, AT + 86_400 * 3650):
        book.rates("gemini-2.5-flash", at)
        book.rates("no-such-model", at)
    assert lookups == ["gemini-2.5-flash", "no-such-model"]


@each_row("at", [0, -1e9, 1e30, float("nan"), float("inf"), float("-inf"), 1])
def test_a_broken_clock_is_no_failure(at: float) -> None:
    assert isinstance(Pricing({"m": Price(input=1, output=1)}).rates("m", at), Rates)
    assert isinstance(Pricing().rates("gemini-2.5-flash", at), Rates)


def test_many_threads() -> None:
    book = Pricing()

    def work(n: int) -> int:
        book.rates(f"made-up-{n}", AT)
        return rates("gemini-2.5-flash", book).cost(Usage(input=n))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(400))) == [n * 300 for n in range(400)]


def test_without_genai_prices_the_users_prices_still_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "genai_prices.data_snapshot", None)
    preload("genai-prices")
    book = Pricing({"mine": Price(input=1, output=1)}, source="genai-prices")
    assert per_mtok("mine", book) == (Decimal(1), Decimal(1))
    assert "pip install genai-prices" in unpriced("gemini-2.5-flash", book).reason
    assert book.limits("gpt-4") == (None, None)


def test_rates_survive_pickling() -> None:
    price = rates("gemini-2.5-pro")
    assert pickle.loads(pickle.dumps(price)).cost(Usage(input=300_000)) == price.cost(Usage(input=300_000))


def test_the_price_table_is_read_only_when_a_price_is_needed() -> None:
    script = (
        "import sys\n"
        "from runguard.pricing.book import Pricing\n"
        "from runguard.pricing.book import Price\n"
        "from runguard.pricing.book import preload\n"
        "from runguard.pricing.rates import Usage\n"
        "from runguard.pricing.book import current_table\n"
        "book = Pricing({'m': Price(input=1, output=1)})\n"
        "book.rates('m', 0.0), book.limits('gemini-2.5-flash')\n"
        "assert current_table.cache_info().misses == 0\n"
        "preload(); preload()\n"
        "assert current_table.cache_info().misses == 1\n"
        "assert 'genai_prices' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


# ---- prices per token instead of per million tokens


def low(**prices: Any) -> list[str]:
    return prices_per_token({name.replace("_", "-"): price for name, price in prices.items()}, "table")


def test_a_price_a_thousand_times_below_its_family_is_reported_with_what_was_meant() -> None:
    (line,) = low(claude_own=Price(input="0.000003", output=15))
    assert line.startswith("prices.claude-own: input = 0.000003 is less than a thousandth of the lowest price of every")
    assert "known claude model" in line
    assert line.endswith("Prices are in USD per million tokens, not per token; did you mean 3?")


def test_a_price_of_an_unknown_family_is_compared_with_every_known_model() -> None:
    (line,) = low(zzz_own=[Price(input=1, output=2), Price(input=1, output="0.000002", since=date(2026, 1, 1))])
    assert "output = 0.000002 is less than a thousandth of the lowest price of every known model" in line


def test_free_and_cheap_models_are_no_mistake() -> None:
    assert low(gemini_own=Price(input=0, output=0), gpt_own=Price(input="0.002", output="0.01")) == []


def test_a_guard_warns_of_a_price_per_token(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard(Policy.validated({"max_usd": 1, "prices": {"gemini-own": {"input": 3e-7, "output": 2}}}, ""))
    guard.check_store()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("runguard.low_price: prices.gemini-own: input = 0.0000003 ")


# ---- Rates are kept until the price changes: over a moving clock the kept rate is always the one of the moment ------


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
