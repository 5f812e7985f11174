"""Rates: sums, properties, and agreement with genai-prices."""

import math
import random
from datetime import UTC, datetime
from decimal import Decimal, localcontext
from typing import Any

import genai_prices
import pytest
from genai_prices.data_snapshot import get_snapshot
from hypothesis import given
from hypothesis import strategies as st

from runguard.core.money import NANO
from runguard.pricing.book import Price, Pricing, Tier, current_table, entry_of
from runguard.pricing.rates import UNLIMITED, Rates, Unpriced, Usage, normalise
from tests.kit.examples import each_row
from tests.kit.prices import AT, MTOK, per_mtok, rates, unpriced, usd


def of(price: Price) -> Rates:
    return rates("mine", Pricing({"mine": price}))


# ---- sums -----------------------------------------------------------------------------------------------------------


@each_row(
    ("model", "usage", "dollars"),
    [
        ("gemini-2.5-flash", Usage(input=1 * MTOK, output=100_000), "0.55"),
        ("gemini-2.5-flash", Usage(input=1 * MTOK, cached=900_000), "0.057"),
        ("gemini-2.5-flash", Usage(input=1 * MTOK, audio=1 * MTOK), "1"),
        ("gemini-2.5-flash", Usage(input=1 * MTOK, cached=1 * MTOK, audio=1 * MTOK, cached_audio=1 * MTOK), "0.1"),
        ("gemini-2.5-flash", Usage(output=1000, thinking=900), "0.0025"),
        ("gemini-2.5-pro", Usage(input=200_000, output=10_000), "0.35"),
        ("gemini-2.5-pro", Usage(input=200_001, output=10_000), "0.6500025"),
        ("gemini-2.5-pro", Usage(input=1 * MTOK, output=100_000), "4"),
        ("gemini-3-pro-preview", Usage(input=1 * MTOK, output=100_000), "5.8"),
        ("claude-opus-4-8", Usage(input=1 * MTOK, output=100_000), "7.5"),
        ("claude-opus-4-8", Usage(input=1 * MTOK, cache_write=1 * MTOK), "6.25"),
        ("claude-opus-4-8", Usage(input=1 * MTOK, cache_write=1 * MTOK, cache_write_1h=1 * MTOK), "10"),
        ("claude-opus-4-8", Usage(input=1 * MTOK, cache_write=400_000, cache_write_1h=100_000), "5.875"),
        ("claude-opus-4-8", Usage(input=1 * MTOK, cache_write=9 * MTOK, cache_write_1h=8 * MTOK), "10"),
        ("gpt-5.5", Usage(input=1 * MTOK, output=100_000), "14.5"),
        ("o1-pro", Usage(input=1 * MTOK, output=100_000), "210"),
    ],
)
def test_known_prices(model: str, usage: Usage, dollars: str) -> None:
    assert usd(rates(model).cost(usage)) == Decimal(dollars)


def test_a_call_is_rounded_up_once() -> None:
    third = of(Price(input="0.0004", output="0.0004"))  # 0.4 nano-USD a token
    assert [third.cost(Usage(input=n)) for n in (0, 1, 2, 3, 5)] == [0, 1, 1, 2, 2]
    assert third.cost(Usage(input=1, output=1)) == 1


def test_sums_do_not_depend_on_the_decimal_context_of_the_host() -> None:
    with localcontext() as context:
        context.prec = 2
        assert of(Price(input="1.23456", output=0)).cost(Usage(input=1 * MTOK)) == 1_234_560_000


@each_row(
    ("usage", "fitted"),
    [
        (Usage(input=10, cached=5000), Usage(input=10, cached=10)),
        (Usage(input=-5, output=-7), Usage()),
        (Usage(input=10, cached=-3), Usage(input=10)),
        (Usage(input=10, output=10, audio_output=99), Usage(input=10, output=10, audio_output=10)),
        # the cached audio was not reported: the dear kind counts
        (Usage(input=10, cached=10, audio=4), Usage(input=10, cached=6, audio=4)),
        (Usage(input=10, cached_audio=8), Usage(input=10)),
        (Usage(input=3, cached=5, audio=5, cached_audio=5), Usage(input=3, cached=3, audio=3, cached_audio=3)),
        (Usage(input=10, cache_write=99, cached=99), Usage(input=10, cache_write=10)),
    ],
)
def test_contradictory_counts_are_cut_to_fit(usage: Usage, fitted: Usage) -> None:
    price = of(Price(input=3, output=5, cached=1, cache_write=4, audio=7, cached_audio=2, audio_output=9))
    assert price.cost(usage) == price.cost(fitted)


def test_what_a_price_leaves_out_falls_back_to_the_dearest_it_can_mean() -> None:
    bare = of(Price(input=2, output=8))
    full = Usage(input=60, output=10, cached=20, cache_write=10, audio=15, cached_audio=5, audio_output=4)
    assert bare.cost(full) == bare.cost(Usage(input=60, output=10))
    discounted = of(Price(input=2, output=8, cached=1))
    # audio has no price of its own: it is text
    assert discounted.cost(Usage(input=9, cached=9, audio=9, cached_audio=9)) == 9_000
    dear_audio = of(Price(input=2, output=8, cached=1, audio=6))
    # the discount on text says nothing about audio
    assert dear_audio.cost(Usage(input=9, cached=9, audio=9, cached_audio=9)) == 54_000


def test_a_tier_prices_the_whole_call() -> None:
    tiered = of(
        Price(
            input=1,
            output=2,
            cached="0.1",
            tiers=(Tier(above=1000, input=10, output=20), Tier(above=100, input=5, output=6)),
        )
    )
    assert tiered.cost(Usage(input=100, output=1)) == 102_000
    assert tiered.cost(Usage(input=101, output=1)) == 511_000
    assert tiered.cost(Usage(input=1000, output=1)) == 5_006_000
    assert tiered.cost(Usage(input=1001, output=1)) == 10_030_000
    assert tiered.cost(Usage(input=101, cached=101)) == 505_000  # the tier names no discount, so it has none


def test_worst_case_of_a_cheaper_long_tier_covers_shorter_calls() -> None:
    volume = of(Price(input=10, output=10, tiers=(Tier(above=100, input=1, output=1),)))
    assert volume.worst(101, 5) >= volume.cost(Usage(input=100, output=5))


def test_free_output_is_affordable_without_end() -> None:
    assert of(Price(input=1, output=0)).affordable_output(1000, 1) == UNLIMITED
    assert of(Price(input=1, output=0)).affordable_output(999, 1) == -1


# ---- properties -----------------------------------------------------------------------------------------------------


tokens = st.integers(0, 3_000_000)


counts = st.integers(-1000, 3_000_000)


any_usage = st.builds(Usage, counts, counts, counts, counts, counts, counts, counts, counts)


money = st.decimals(0, 700, places=6)


@st.composite
def any_rates(draw: st.DrawFn) -> Rates:
    """Prices of every shape; what is left out, and a tier that is cheaper than the one below, included."""

    def prices() -> dict[str, Any]:
        extras = ("cached", "cache_write", "audio", "cached_audio", "audio_output")
        return {"input": draw(money), "output": draw(money)} | {name: draw(st.none() | money) for name in extras}

    starts = draw(st.lists(st.integers(1, 2_000_000), max_size=3, unique=True))
    return of(Price(**prices(), tiers=tuple(Tier(above=start, **prices()) for start in starts)))


@st.composite
def usual_rates(draw: st.DrawFn) -> Rates:
    """Prices as providers make them: caches are cheaper, audio and cache writes dearer, long calls dearer."""

    def prices(factor: int) -> dict[str, Any]:
        def cents(low: int, high: int) -> Decimal:
            return Decimal(draw(st.integers(low, high))) / 100 * factor

        return {
            "input": cents(100, 200),
            "output": cents(100, 2000),
            "cached": cents(0, 50),
            "cache_write": cents(200, 300),
            "audio": cents(300, 900),
            "cached_audio": cents(50, 99),
        }

    return of(Price(**prices(1), tiers=(Tier(above=draw(st.integers(1, 2_000_000)), **prices(20)),)))


@st.composite
def consistent_usage(draw: st.DrawFn) -> Usage:
    plain, text_cached, both, audio, write, text_out, audio_out = (draw(st.integers(0, 500_000)) for _ in range(7))
    return Usage(
        input=plain + text_cached + both + audio + write,
        output=text_out + audio_out,
        cached=text_cached + both,
        cache_write=write,
        audio=audio + both,
        cached_audio=both,
        audio_output=audio_out,
        thinking=text_out,
    )


@given(any_rates(), any_usage)
def test_no_split_of_the_same_totals_costs_more_than_the_worst_case(price: Rates, usage: Usage) -> None:
    assert 0 <= price.cost(usage) <= price.worst(usage.input, usage.output, usage.audio)


@given(any_rates(), tokens, tokens, tokens, st.integers(0, 10**13))
def test_affordable_output_is_exact(price: Rates, tokens_in: int, audio: int, more: int, nano: int) -> None:
    most = price.affordable_output(nano, tokens_in, audio)
    if most == -1:
        assert price.worst(tokens_in, 0, audio) > nano
    elif most == UNLIMITED:
        assert price.worst(tokens_in, more, audio) == price.worst(tokens_in, 0, audio) <= nano
    else:
        assert price.worst(tokens_in, most, audio) <= nano < price.worst(tokens_in, most + 1, audio)


@given(any_rates(), tokens, tokens, tokens, tokens, tokens, tokens)
def test_worst_case_grows_with_every_count(
    price: Rates, a: int, b: int, c: int, more_a: int, more_b: int, more_c: int
) -> None:
    assert price.worst(a, b, c) <= price.worst(a + more_a, b + more_b, c + more_c)


@given(usual_rates(), any_usage, tokens)
def test_more_tokens_never_cost_less(price: Rates, usage: Usage, more: int) -> None:
    before = price.cost(usage)
    usage.output += more
    assert price.cost(usage) >= before
    before = price.cost(usage)
    usage.input += more
    assert price.cost(usage) >= before


@given(usual_rates(), consistent_usage(), st.data())
def test_a_dearer_kind_of_token_never_makes_a_call_cheaper(price: Rates, usage: Usage, data: st.DataObject) -> None:
    plain = usage.input - usage.cached - usage.cache_write - usage.audio + usage.cached_audio
    before, some = price.cost(usage), data.draw(st.integers(0, plain))
    name, sign = data.draw(st.sampled_from([("cached", -1), ("cache_write", 1), ("audio", 1)]))
    setattr(usage, name, getattr(usage, name) + some)
    assert (price.cost(usage) - before) * sign >= 0


# ---- against genai-prices -------------------------------------------------------------------------------------------


_NOT_TOLD_APART = (
    "input_image_tokens",
    "input_video_tokens",
    "cache_image_read_tokens",
    "output_image_tokens",
    "output_video_tokens",
)


_OUTSIDE = {"google": "gemini/", "anthropic": "anthropic/", "openai": "openai/"}


def a_usage(chance: random.Random, *, writes: bool, output: bool) -> Usage:
    edges = (100_000, 100_001, 128_000, 128_001, 200_000, 200_001, 272_000, 272_001)
    total = chance.choice([chance.randrange(2000), chance.randrange(2_000_000), chance.choice(edges)])
    audio = chance.randrange(total + 1) * chance.choice([0, 1])
    both = chance.randrange(audio + 1) * chance.choice([0, 1])
    cached = both + chance.randrange(total - audio + 1) * chance.choice([0, 1])
    write = chance.randrange(total - audio - cached + both + 1) if writes else 0
    out = chance.randrange(70_000) if output else 0
    return Usage(total, out, cached, write, audio, both, chance.randrange(out + 1) * chance.choice([0, 1]))


def their_usage(usage: Usage) -> genai_prices.Usage:
    return genai_prices.Usage(
        input_tokens=usage.input,
        output_tokens=usage.output,
        cache_read_tokens=usage.cached,
        cache_write_tokens=usage.cache_write,
        input_audio_tokens=usage.audio,
        cache_audio_read_tokens=usage.cached_audio,
        output_audio_tokens=usage.audio_output,
        **dict.fromkeys(_NOT_TOLD_APART, 0),
    )


@pytest.mark.parametrize("provider", ["google", "anthropic", "openai"])
def test_equal_to_genai_prices_for_every_model_of_the_big_three(provider: str) -> None:
    """Every model in the data, 100 calls each: equal to the nano-USD where tokens are all that counts; where
    pictures or video have prices of their own, which nobody counts apart, never less."""
    when, book, chance = datetime.fromtimestamp(AT, UTC), Pricing(), random.Random(provider)
    seller = next(p for p in get_snapshot().providers if p.id == provider)
    exact: set[str] = set()
    bounds: set[str] = set()
    without: set[str] = set()
    for info in seller.models:
        found = book.rates(_OUTSIDE[provider] + info.id, AT)
        if isinstance(found, Unpriced):
            without.add(info.id)
            continue
        (bounds if found.estimated else exact).add(info.id)
        listed = info.get_prices(when)
        for _ in range(100):
            usage = a_usage(chance, writes=listed.input_audio_mtok is None, output=listed.output_mtok is not None)
            theirs = math.ceil(
                info.calc_price(their_usage(usage), seller, genai_request_timestamp=when).total_price * NANO
            )
            assert found.cost(usage) >= theirs if found.estimated else found.cost(usage) == theirs, (info.id, usage)
    assert len(exact) > 20
    assert not [
        model
        for model in bounds
        if not any(word in model for word in ("image", "live", "omni", "banana", "embedding", "realtime"))
    ]
    assert not [
        model
        for model in without
        if model.startswith(("gemini", "claude", "gpt-4", "gpt-5", "gpt-6", "o1", "o3", "o4"))
    ]


def test_every_id_and_alias_of_the_big_three_finds_its_own_entry() -> None:
    """The names that the data itself lists as exact must lead to the very entry that lists them."""

    def aliases(clause: Any) -> list[str]:
        inner = getattr(clause, "or_", None) or getattr(clause, "and_", None)
        return (
            [name for part in inner for name in aliases(part)]
            if inner
            else [clause.equals]
            if hasattr(clause, "equals")
            else []
        )

    for seller in (p for p in get_snapshot().providers if p.id in _OUTSIDE):
        for info in seller.models:
            for alias in aliases(info.match):
                listed = entry_of(current_table(), _OUTSIDE[seller.id] + alias)
                theirs = seller.find_model(alias)
                assert listed is not None, alias
                assert theirs is not None, alias
                assert listed[0].id == theirs.id, alias


def test_a_fee_per_call_is_charged_once() -> None:
    sonar = rates("perplexity/sonar")
    assert usd(sonar.cost(Usage())) == Decimal("0.012")
    assert usd(sonar.worst(0, 0)) == Decimal("0.012")
    assert sonar.affordable_output(11_999_999, 0) == -1


def test_prices_change_with_the_date_and_the_hour() -> None:
    book = Pricing()
    before, after = (datetime(2025, 6, day, tzinfo=UTC).timestamp() for day in (9, 10))
    million = Usage(input=1 * MTOK)
    assert usd(rates("o3", book, before).cost(million)) == 10
    assert usd(rates("o3", book, after).cost(million)) == 2
    assert usd(rates("o3", book, before).cost(million)) == 10  # a replay may go back
    noon = datetime(2025, 8, 1, 12, tzinfo=UTC).timestamp()
    night = datetime(2025, 8, 1, 18, tzinfo=UTC).timestamp()
    assert rates("deepseek-chat", book, night).cost(million) < rates("deepseek-chat", book, noon).cost(million)


# ---- Which model an id means


@each_row(
    ("given_id", "expected"),
    [
        ("gemini-2.5-flash", "gemini-2.5-flash"),
        ("models/gemini-2.5-flash", "gemini-2.5-flash"),
        ("gemini/gemini-2.5-flash", "gemini-2.5-flash"),
        ("vertex_ai/gemini-2.5-pro", "gemini-2.5-pro"),
        ("publishers/google/models/gemini-2.5-pro", "gemini-2.5-pro"),
        ("projects/p/locations/us-central1/publishers/google/models/gemini-2.5-pro-001", "gemini-2.5-pro-001"),
        ("claude-sonnet-4-5@20250929", "claude-sonnet-4-5-20250929"),
        ("vertex_ai/claude-sonnet-5@default", "claude-sonnet-5"),
        ("claude-opus-4-8@latest", "claude-opus-4-8"),
        (" GPT-4o ", "gpt-4o"),
        ("anthropic/claude-opus-4-8", "claude-opus-4-8"),
        ("azure/gpt-4o", "gpt-4o"),
        ("openrouter/google/gemini-2.5-pro", "gemini-2.5-pro"),
        ("bedrock/us.anthropic.claude-sonnet-4-5-20250929-v1:0", "claude-sonnet-4-5-20250929"),
        ("bedrock/us-east-1/anthropic.claude-3-5-sonnet-20241022-v2:0", "claude-3-5-sonnet-20241022"),
        ("ollama/gemma3", "ollama/gemma3"),
        ("models/", "models/"),
        ("", ""),
    ],
)
def test_normalise(given_id: str, expected: str) -> None:
    assert normalise(given_id) == expected
    assert normalise(expected) == expected


@each_row(
    ("model", "price_in", "price_out"),
    [
        ("gemini-2.5-flash-001", "0.3", "2.5"),
        ("gemini-2.5-flash-preview-09-2025", "0.3", "2.5"),
        ("gemini-2.5-flash-lite", "0.1", "0.4"),
        ("gemini-2.5-flash-lite-preview-09-2025", "0.1", "0.4"),
        ("gemini-2.5-pro-preview-06-05", "1.25", "10"),
        ("gemini-2.5-pro-preview-tts", "1", "20"),
        ("gemini-2.0-flash-001", "0.1", "0.4"),
        ("gemini-2.0-flash-lite-001", "0.075", "0.3"),
        ("gemini-3.5-flash", "1.5", "9"),
        ("gemini-3.8-flash", "0.75", "3.75"),
        ("gemini-flash-latest", "0.75", "3.75"),
        ("gemini-3.1-pro-preview-customtools", "2", "12"),
        ("models/gemini-2.5-flash", "0.3", "2.5"),
        ("projects/p/locations/eu/publishers/google/models/gemini-2.5-pro-001", "1.25", "10"),
        ("claude-sonnet-4-5@20250929", "3", "15"),
        ("projects/p/locations/l/publishers/anthropic/models/claude-opus-4-1@20250805", "15", "75"),
        ("vertex_ai/claude-opus-4@20250514", "15", "75"),
        ("openrouter/anthropic/claude-sonnet-4.5", "3", "15"),
        # a region of Bedrock is dearer than global
        ("bedrock/us.anthropic.claude-sonnet-4-5-20250929-v1:0", "3.3", "16.5"),
        ("bedrock/global.anthropic.claude-sonnet-4-5-20250929-v1:0", "3", "15"),
        ("gpt-5.5-2026-04-23", "5", "30"),
        ("gpt-5.5-2026-09-01", "5", "30"),  # a dated release that the list does not have yet
        ("gpt-4o-20240806", "2.5", "10"),
        ("gpt-4o-2024-05-13", "5", "15"),  # an old release with a price of its own
        ("azure/gpt-4o", "2.5", "10"),
        # Azure's list says "contains o4-mini"; the maker's list has the real one
        ("azure/o4-mini-deep-research", "2", "8"),
        ("ft:gpt-4o-mini-2024-07-18:acme::abc", "0.3", "1.2"),
    ],
)
def test_real_ids(model: str, price_in: str, price_out: str) -> None:
    assert per_mtok(model) == (Decimal(price_in), Decimal(price_out))
    assert not rates(model).estimated


@each_row(
    "model",
    [
        # each begins with, or contains, the name of a listed model and would be priced as that by the list's own lookup
        "gemini-1.5-flash-8b",
        "gemini-2.0-flash-exp-image-generation",
        "gemini-2.5-pro-computer-use",
        "gemini-3.5-flash-8b",
        "gemini-3.6-flash-lite",
        "gemini-3.8-flash-lite",
        "gemini-3.8-flash-image",
        "claude-opus-4-10",
        "claude-haiku-4-50",
        "claude-sonnet-4-5-mini",
        "my-gemini-1.5-pro",
        "azure/team-o4-mini",
        # names that only look like a model
        "gemini-3-pro",
        "gemini",
        "gpt",
        "gpt-",
        "azure/my-deployment",
        "ollama/gemini-1.5-pro",
        "hosted_vllm/gpt-oss-20b",
        "no-such-model",
    ],
)
def test_a_similar_name_is_not_the_same_model(model: str) -> None:
    assert "does not know it" in unpriced(model).reason
    assert Pricing().limits(model) == (None, None)


def test_the_image_model_is_not_priced_as_its_text_sibling() -> None:
    image = rates("gemini-2.5-flash-image-preview")
    # the picture rate for all output, since pictures are not counted apart
    assert usd(image.cost(Usage(output=1 * MTOK))) == 30
    assert image.estimated


@each_row("model", ["gemma-4-31b-it", "whisper-1", "tts-1", "gpt-live-1"])
def test_a_listed_model_without_token_prices_is_unpriced(model: str) -> None:
    assert "without a price for tokens" in unpriced(model).reason


def test_a_free_model_is_free_only_when_its_id_says_so() -> None:
    assert rates("openrouter/deepseek/deepseek-r1:free").cost(Usage(input=1 * MTOK, output=1 * MTOK)) == 0
    assert "does not know it" in unpriced("no-such-model:free").reason


@each_row(
    "model",
    [
        "projects/p/locations/us/endpoints/123",
        "vertex_ai/endpoints/123",
        "tunedModels/mine-x1",
        "projects/p/locations/us/models/55",
    ],
)
def test_a_tuned_model_says_so(model: str) -> None:
    assert "tuned" in unpriced(model).reason
    assert rates(model, Pricing({"*": Price(input=1, output=1)})).source == "prices"


def test_a_price_of_another_seller_is_an_estimate() -> None:
    assert rates("groq/gemini-2.5-flash").estimated
    assert not rates("gemini/gemini-2.5-flash").estimated


def test_unpriced_reads_as_a_sentence() -> None:
    assert str(Unpriced("m", "nobody knows it")) == "model 'm' has no price: nobody knows it"


@each_row(
    "model",
    [
        "",
        "   ",
        "x" * 10_000,
        "\x00",
        "🦜" * 300,
        "/",
        "//",
        "a/" * 200,
        "@",
        "@default",
        "..",
        "[",
        "gemini-2.5-flash\n-evil",
    ],
)
def test_no_name_can_hurt(model: str) -> None:
    book = Pricing({"[ab]*": Price(input=1, output=1)})
    assert len(str(book.rates(model, AT))) < 1000
    assert book.limits(model) == (None, None)
