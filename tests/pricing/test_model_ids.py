"""Which model an id means."""

from decimal import Decimal

from runguard.pricing.book import Price, Pricing
from runguard.pricing.rates import Unpriced, Usage, normalise
from tests.kit.examples import each_row
from tests.kit.prices import AT, MTOK, per_mtok, rates, unpriced, usd


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
