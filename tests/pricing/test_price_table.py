"""The price table gives the price facts of genai-prices, for every model and at any time."""

import math
import random
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import genai_prices
import pytest
from genai_prices.data_snapshot import DataSnapshot, get_snapshot, set_custom_snapshot
from genai_prices.types import ModelInfo, ModelPrice, Provider, TieredPrices

from runguard.core.money import NANO
from runguard.engine.guard import Guard
from runguard.policy import Policy
from runguard.pricing import book as price_book
from runguard.pricing.book import (
    PACKAGED,
    PriceTable,
    Pricing,
    current_table,
    entry_of,
    packaged_table,
    snapshot,
    table_text,
    updated_path,
)
from runguard.pricing.rates import Rates, Usage
from tests.kit.examples import each_row

ROOT = Path(__file__).parents[2]
PREFIXES = {  # provider: how an id names it
    "anthropic": "anthropic/",
    "aws": "bedrock/",
    "azure": "azure/",
    "cerebras": "cerebras/",
    "cohere": "cohere/",
    "databricks": "databricks/",
    "deepseek": "deepseek/",
    "fireworks": "fireworks_ai/",
    "github-copilot": "github_copilot/",
    "google": "gemini/",
    "groq": "groq/",
    "mistral": "mistral/",
    "moonshotai": "moonshot/",
    "novita": "novita/",
    "openai": "openai/",
    "openrouter": "openrouter/",
    "perplexity": "perplexity/",
    "together": "together_ai/",
    "voyageai": "voyage/",
    "x-ai": "xai/",
}
MOMENTS = (datetime(2024, 1, 1, tzinfo=UTC), datetime(2028, 1, 1, tzinfo=UTC))


@pytest.fixture(autouse=True)
def no_table_of_this_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("RUNGUARD_PRICES", str(tmp_path / "prices.jsonl"))
    current_table.cache_clear()
    yield
    current_table.cache_clear()


def a_moment(chance: random.Random) -> datetime:
    return MOMENTS[0] + timedelta(seconds=chance.randrange(int((MOMENTS[1] - MOMENTS[0]).total_seconds())))


def facts_of(prices: ModelPrice) -> dict[str, Any]:
    """What genai-prices says, for tokens and calls."""
    return {
        name: [value.base, *((tier.start, tier.price) for tier in value.tiers)]
        if isinstance(value, TieredPrices)
        else value
        for name, value in vars(prices).items()
        if value is not None and (name.endswith("_mtok") or name == "requests_kcount")
    }


def exactly(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts of the table, as numbers."""
    return {
        name: Decimal(value)
        if isinstance(value, str)
        else [Decimal(value[0]), *((above, Decimal(price)) for above, price in value[1:])]
        for name, value in facts.items()
    }


@each_row("provider", [provider.id for provider in get_snapshot().providers])
def test_every_model_of_every_provider_has_the_same_facts_at_any_time(provider: str) -> None:
    chance = random.Random(provider)
    theirs = next(p for p in get_snapshot().providers if p.id == provider)
    ours = packaged_table().provider(provider)
    assert ours is not None
    assert [entry.id for entry in ours.entries] == [info.id for info in theirs.models]
    for entry, info in zip(ours.entries, theirs.models, strict=True):
        assert entry.window == info.context_window
        for _ in range(20 if isinstance(info.prices, list) else 1):
            moment = a_moment(chance)
            facts = entry.prices[entry.in_force(moment.timestamp())].facts
            assert exactly(facts) == facts_of(info.get_prices(moment)), (info.id, moment)


def a_usage(chance: random.Random, listed: ModelPrice) -> Usage:
    """Kinds of tokens that the model has prices for; for all others genai-prices asks for more figures than a call
    reports.
    """
    edges = (32_000, 100_000, 128_000, 128_001, 200_000, 200_001, 256_001, 272_000, 272_001)
    total = chance.choice([chance.randrange(2000), chance.randrange(2_000_000), chance.choice(edges)])
    audio = chance.randrange(total + 1) if listed.input_audio_mtok is not None else 0
    both = chance.randrange(audio + 1) if listed.cache_audio_read_mtok is not None else 0
    cached = both + chance.randrange(total - audio + 1) * chance.choice([0, 1])
    left = total - audio - cached + both
    write = chance.randrange(left + 1) if listed.cache_write_mtok is not None and not audio else 0
    out = chance.randrange(70_000) if listed.output_mtok is not None else 0
    spoken = chance.randrange(out + 1) if listed.output_audio_mtok is not None else 0
    return Usage(total, out, cached, write, audio, both, spoken)


def their_cost(info: ModelInfo, seller: Provider, usage: Usage, moment: datetime) -> int:
    given = genai_prices.Usage(
        input_tokens=usage.input,
        output_tokens=usage.output,
        cache_read_tokens=usage.cached,
        cache_write_tokens=usage.cache_write,
        input_audio_tokens=usage.audio,
        cache_audio_read_tokens=usage.cached_audio,
        output_audio_tokens=usage.audio_output,
        input_image_tokens=0,
        input_video_tokens=0,
        cache_image_read_tokens=0,
        output_image_tokens=0,
        output_video_tokens=0,
        output_reasoning_tokens=0,
    )
    return math.ceil(info.calc_price(given, seller, genai_request_timestamp=moment).total_price * NANO)


def names_in(clause: dict[str, Any]) -> list[str]:
    ((kind, value),) = clause.items()
    return [name for part in value for name in names_in(part)] if kind in ("or", "and") else [value]


def rounding(facts: dict[str, Any], usage: Usage) -> int:
    """Rates are whole nano-USD per million tokens, rounded up. Almost all list prices are; a few are thirds."""
    prices = [price for value in exactly(facts).values() for price in (value if isinstance(value, list) else [value])]
    whole = all((price[1] if isinstance(price, tuple) else price) * NANO % 1 == 0 for price in prices)
    return 0 if whole else math.ceil((usage.input + usage.output) / 1_000_000)


@pytest.mark.parametrize("provider", PREFIXES)
def test_calls_of_every_supported_provider_cost_the_same_to_the_nano(provider: str) -> None:
    chance, book = random.Random(provider), Pricing()
    seller = next(p for p in get_snapshot().providers if p.id == provider)
    listed = packaged_table().provider(provider)
    assert listed is not None
    compared = 0
    for entry, info in zip(listed.entries, seller.models, strict=True):
        ids = [PREFIXES[provider] + name for name in (info.id, *names_in(entry.match))]
        model = next((name for name in ids if (found := entry_of(packaged_table(), name)) and found[0] is entry), None)
        if model is None:
            continue  # an earlier entry of the provider claims its names, or they begin like a model and go on
        for _ in range(8):
            moment = a_moment(chance)
            rates = book.rates(model, moment.timestamp())
            if not isinstance(rates, Rates):
                assert info.get_prices(moment).input_mtok is None
                continue
            usage = a_usage(chance, info.get_prices(moment))
            ours, theirs = rates.cost(usage), their_cost(info, seller, usage, moment)
            dearer = rounding(entry.prices[entry.in_force(moment.timestamp())].facts, usage)
            assert theirs <= ours, (info.id, moment, usage)
            assert rates.estimated or ours <= theirs + dearer, (info.id, moment, usage)
            compared += 1
    assert compared >= 5 * len(seller.models), "most models were not compared"


def test_the_packaged_table_is_what_the_script_makes_of_genai_prices() -> None:
    assert packaged_table().release == genai_prices.__version__
    script = [sys.executable, str(ROOT / "scripts" / "build_price_table.py"), "--check"]
    assert subprocess.run(script, check=False).returncode == 0, "run scripts/build_price_table.py"


def test_the_same_prices_give_the_same_text() -> None:
    assert table_text(snapshot(), date(2026, 1, 2)) == table_text(snapshot(), date(2026, 1, 2))
    assert PriceTable(table_text(snapshot(), date(2026, 1, 2))).date == date(2026, 1, 2)


# ---- a table of the user --------------------------------------------------------------------------------------------


def one_model(usd: str) -> DataSnapshot:
    info = next(m for p in get_snapshot().providers if p.id == "google" for m in p.models if m.id == "gemini-2.5-flash")
    priced = ModelInfo(info.id, info.match, prices=ModelPrice(input_mtok=Decimal(usd), output_mtok=Decimal(usd)))
    return DataSnapshot([Provider("google", "Google", "x", models=[priced])], from_auto_update=False)


def written(usd: str, release: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("runguard.pricing.book.release", lambda: release)
    updated_path().write_text(table_text(one_model(usd), date(2026, 1, 1)), encoding="utf-8")
    return updated_path()


def cost_of_a_million() -> int:
    rates = Pricing().rates("gemini-2.5-flash", 1.7e9)
    assert isinstance(rates, Rates)
    return rates.cost(Usage(input=1_000_000))


def test_a_newer_table_of_the_user_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    written("7", "999.0", monkeypatch)
    assert cost_of_a_million() == 7 * NANO
    assert current_table().source == "genai-prices 999.0, table of 2026-01-01"


def test_an_older_table_of_the_user_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    written("7", "0.0.1", monkeypatch)
    assert cost_of_a_million() == NANO * 3 // 10


@pytest.mark.parametrize("damage", ["cut", "edited", "empty", "text", "list", "future", "folder", "bytes", "bare"])
def test_a_damaged_table_of_the_user_is_reported_and_not_used(
    damage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = written("7", "999.0", monkeypatch)
    whole = path.read_text(encoding="utf-8")
    damaged = {
        "cut": whole[:-20],
        "edited": whole.replace('"7"', '"8"'),
        "empty": "",
        "text": "prices\n",
        "list": "[1]\n",
        "future": whole.replace('"format":1', '"format":2'),
        "bare": '{"format":1}\n',
    }
    if damage == "folder":
        path.unlink()
        path.mkdir()
    elif damage == "bytes":
        path.write_bytes(b"\xff\xfe\x00")
    else:
        path.write_text(damaged[damage], encoding="utf-8")
    assert cost_of_a_million() == NANO * 3 // 10
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"runguard.prices_failed: the price table {path} cannot be used: ")
    assert "runguard prices --update" in line


@pytest.fixture
def an_old_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A RunGuard whose built-in table is older than the installed genai-prices."""
    old = tmp_path / "old_table.jsonl"
    body = PACKAGED.read_text(encoding="utf-8")
    old.write_text(body.replace(f'"genai_prices":"{packaged_table().release}"', '"genai_prices":"0.0.9"', 1))
    monkeypatch.setattr(price_book, "PACKAGED", old)
    packaged_table.cache_clear()
    yield
    packaged_table.cache_clear()


@pytest.mark.usefixtures("an_old_release")
def test_an_installed_package_that_is_newer_than_the_built_in_table_is_used() -> None:
    try:
        set_custom_snapshot(one_model("5"))
        assert cost_of_a_million() == 5 * NANO
        assert current_table().source.startswith(f"genai-prices {genai_prices.__version__}, ")
    finally:
        set_custom_snapshot(None)


@pytest.mark.usefixtures("an_old_release")
def test_a_written_table_that_is_newer_than_the_installed_package_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    written("7", "999.0", monkeypatch)
    assert cost_of_a_million() == 7 * NANO


@pytest.mark.usefixtures("an_old_release")
def test_a_package_whose_data_has_another_shape_leaves_the_table_in_use(caplog: pytest.LogCaptureFixture) -> None:
    class Other:
        providers = None
        from_auto_update = False

    try:
        set_custom_snapshot(Other())  # type: ignore[arg-type]
        assert cost_of_a_million() == NANO * 3 // 10
    finally:
        set_custom_snapshot(None)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("runguard.prices_failed: the prices of the installed genai-prices cannot be read: ")


def test_of_two_tables_of_one_release_the_later_one_with_other_prices_is_newer() -> None:
    early, late = (table_text(one_model(usd), date(2026, 11, day)) for usd, day in (("5", 1), ("6", 2)))
    assert PriceTable(late).is_newer_than(PriceTable(early))
    assert not PriceTable(early).is_newer_than(PriceTable(late))
    same = table_text(one_model("5"), date(2026, 11, 3))
    assert not PriceTable(same).is_newer_than(PriceTable(early))


def test_without_a_home_folder_the_packaged_table_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUNGUARD_PRICES", "XDG_DATA_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert cost_of_a_million() == NANO * 3 // 10


# ---- prices_source="genai-prices" -----------------------------------------------------------------------------------


def test_the_installed_package_is_followed_when_it_updates_its_prices() -> None:
    book = Pricing(source="genai-prices")
    try:
        for usd in ("5", "6"):
            set_custom_snapshot(one_model(usd))
            rates = book.rates("gemini-2.5-flash", 1.7e9)
            assert isinstance(rates, Rates)
            assert rates.cost(Usage(input=1_000_000)) == int(usd) * NANO
            assert book.rates("gemini-2.5-flash", 1.7e9) is rates
    finally:
        set_custom_snapshot(None)
    rates = book.rates("gemini-2.5-flash", 1.7e9)
    assert isinstance(rates, Rates)
    assert rates.source.startswith(f"genai-prices {genai_prices.__version__}, installed ")


def test_the_installed_package_and_its_table_agree() -> None:
    table, live = Pricing(), Pricing(source="genai-prices")
    for model in ("gemini-2.5-pro", "openai/gpt-5.5", "claude-opus-4-8", "deepseek/deepseek-chat", "no-such-model"):
        ours, theirs = table.rates(model, 1.79e9), live.rates(model, 1.79e9)
        assert getattr(ours, "bands", None) == getattr(theirs, "bands", None), model
        assert table.limits(model) == live.limits(model)


def test_a_guard_takes_its_prices_from_the_source_of_its_policy() -> None:
    guard = Guard(Policy.validated({"prices_source": "genai-prices"}, ""))
    try:
        set_custom_snapshot(one_model("5"))
        rates = guard.accounts.pricing.rates("gemini-2.5-flash", 1.7e9)
    finally:
        set_custom_snapshot(None)
    assert isinstance(rates, Rates)
    assert rates.cost(Usage(input=1_000_000)) == 5 * NANO
