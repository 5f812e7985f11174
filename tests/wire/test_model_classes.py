"""Every model class of ADK against a provider on this machine: the bill is what the provider reports, however the class
passes it on.
"""

import importlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from decimal import Decimal
from importlib.util import find_spec
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.models import Gemini
from google.adk.models.gemma_llm import Gemma
from google.genai import types

from runguard.adk import RunGuardPlugin
from tests.kit.anthropic_server import AnthropicServer
from tests.kit.contents import parts
from tests.kit.gemini_server import Answer, GeminiServer, text, usage
from tests.kit.openai_server import KEY, OpenAIServer
from tests.kit.sse_server import Json, Reply
from tests.kit.wire import play

RATES = {"input": 10, "output": 40, "cached": 1, "cache_write": 20}
WORDS = "word " * 80  # 100 tokens
PROMPT = 1_000
Expected = tuple[int, int, int, int]  # input, output, and of the input cached and written to a cache
modes = pytest.mark.parametrize("mode", ["unary", "sse"])

GEMINI: dict[str, tuple[Json, Expected | None]] = {
    "plain": (usage(900, 250), (900, 250, 0, 0)),
    "all": (usage(700, 100, thoughts=150, cached=400, tool_use=200), (900, 250, 400, 0)),
    "zeros": ({"promptTokenCount": 0, "candidatesTokenCount": 0, "totalTokenCount": 0}, None),
    "a total of zero": ({"promptTokenCount": 900, "candidatesTokenCount": 250, "totalTokenCount": 0}, (900, 250, 0, 0)),
}
CHAT: dict[str, tuple[Json, Expected | None]] = {
    "plain": ({"prompt_tokens": 900, "completion_tokens": 250, "total_tokens": 1_150}, (900, 250, 0, 0)),
    "thinking": (
        {
            "prompt_tokens": 900,
            "completion_tokens": 250,
            "total_tokens": 1_150,
            "completion_tokens_details": {"reasoning_tokens": 150},
        },
        (900, 250, 0, 0),
    ),
    "zeros": ({"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}, None),
}
ANTHROPIC: dict[str, tuple[Json, Expected | None]] = {
    "plain": ({"input_tokens": 900, "output_tokens": 250}, (900, 250, 0, 0)),
    "cache": (
        {"input_tokens": 60, "output_tokens": 250, "cache_read_input_tokens": 800, "cache_creation_input_tokens": 40},
        (900, 250, 800, 40),
    ),
    "zeros": ({"input_tokens": 0, "output_tokens": 0}, None),
}


def cases(shapes: dict[str, tuple[Json, Expected | None]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("reported", "expected"), shapes.values(), ids=shapes)


async def assert_billed(model: Any, priced: str, mode: str, expected: Expected | None) -> None:
    """One call. Nothing reported is an estimate of the prompt and of what came back."""
    plugin = RunGuardPlugin(prices={priced: RATES}, tokens=lambda request: PROMPT, max_usd=5)
    config = types.GenerateContentConfig(max_output_tokens=500)
    result = await play(
        LlmAgent(name="a", model=model, generate_content_config=config), plugins=[plugin], mode=mode, seconds=60
    )
    assert (
        "".join(parts(event.content)[0].text or "" for event in result.events if event.content and not event.partial)
        == WORDS
    )
    tokens, output, cached, write = expected or (PROMPT, 100, 0, 0)
    spent = plugin.spend()
    assert (spent["calls"], spent["estimated_calls"]) == (1, int(expected is None))
    assert (spent["input_tokens"], spent["output_tokens"], spent["cached_tokens"]) == (tokens, output, cached)
    assert spent["usd"] == Decimal((tokens - cached - write) * 10 + cached + write * 20 + output * 40) / 1_000_000
    assert spent["reserved_usd"] == 0


def module(name: str, package: str) -> Any:
    if find_spec(package) is None:  # not imported here: that takes seconds
        pytest.skip(f"{package} is not installed")
    return importlib.import_module(f"google.adk.models.{name}")


@pytest.fixture
def chat() -> Iterator[OpenAIServer]:
    running = OpenAIServer()
    yield running
    running.close()


@pytest.fixture
def messages() -> Iterator[AnthropicServer]:
    running = AnthropicServer()
    yield running
    running.close()


@asynccontextmanager
async def closing(model: Any) -> AsyncIterator[Any]:
    yield model
    await model.api_client.aio.aclose()
    model.api_client.close()


# ---- Google's own ---------------------------------------------------------------------------------------------------


@modes
@cases(GEMINI)
@pytest.mark.parametrize(("kind", "name"), [(Gemini, "gemini-2.5-flash"), (Gemma, "gemma-3-27b-it")])
async def test_gemini_and_gemma(
    server: GeminiServer, kind: Any, name: str, reported: Json, expected: Expected | None, mode: str
) -> None:
    server.script(Answer([text(WORDS)], usage=reported, chunks=3))
    async with closing(kind(model=name, base_url=server.url)) as model:
        await assert_billed(model, name, mode, expected)


@modes
@cases(GEMINI)
async def test_apigee_in_front_of_gemini(
    server: GeminiServer, reported: Json, expected: Expected | None, mode: str
) -> None:
    from google.adk.models.apigee_llm import ApigeeLlm

    server.script(Answer([text(WORDS)], usage=reported, chunks=3))
    async with closing(ApigeeLlm(model="apigee/gemini/v1beta/gemini-2.5-flash", proxy_url=server.url)) as model:
        await assert_billed(model, "*gemini-2.5-flash", mode, expected)


@modes
@cases(CHAT)
async def test_apigee_in_front_of_chat_completions(
    chat: OpenAIServer, reported: Json, expected: Expected | None, mode: str
) -> None:
    from google.adk.models.apigee_llm import ApigeeLlm

    chat.script(Reply(WORDS, usage=reported))
    model = ApigeeLlm(
        model="apigee/openai/gpt-4o", proxy_url=f"{chat.url}/v1", custom_headers={"Authorization": f"Bearer {KEY}"}
    )
    asks_for_usage = mode == "unary"  # in a stream it does not, so the provider reports none
    await assert_billed(model, "*gpt-4o", mode, expected if asks_for_usage else None)
    assert ("stream_options" in chat.requests[0].body) is False


INTERACTIONS = [
    # the API's total also covers thoughts and tools; older versions of ADK add up input and output alone
    (
        {
            "total_input_tokens": 700,
            "total_output_tokens": 100,
            "total_thought_tokens": 150,
            "total_tool_use_tokens": 200,
            "total_tokens": 1_150,
        },
        (900, 250),
    ),
    ({"total_input_tokens": 900, "total_output_tokens": 250, "total_tokens": 1_150}, (900, 250)),
    ({"total_input_tokens": 0, "total_output_tokens": 0, "total_tokens": 0}, None),
]


@pytest.mark.parametrize(("counted", "expected"), INTERACTIONS)
def test_interactions(counted: dict[str, int], expected: tuple[int, int] | None) -> None:
    utils = importlib.import_module("google.adk.models.interactions_utils")
    if not hasattr(utils, "_build_usage_metadata"):
        pytest.skip("this version of ADK reports less of an interaction")
    from types import SimpleNamespace

    from runguard.providers.usage import CallUsage

    told = {
        name: counted.get(name)
        for name in ("total_cached_tokens", "total_thought_tokens", "total_tool_use_tokens", *counted)
    }
    call = CallUsage()
    call.add({"usage_metadata": utils._build_usage_metadata(SimpleNamespace(**told))})
    reported = call.reported
    assert (None if reported is None else (reported.input, reported.output)) == expected


# ---- others' --------------------------------------------------------------------------------------------------------


@modes
@cases(ANTHROPIC)
async def test_anthropic(
    messages: AnthropicServer, reported: Json, expected: Expected | None, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = module("anthropic_llm", "anthropic")
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    monkeypatch.setenv("ANTHROPIC_BASE_URL", messages.url)
    messages.script(Reply(WORDS, usage=reported))
    await assert_billed(models.AnthropicLlm(model="claude-sonnet-4-5"), "claude-sonnet-4-5", mode, expected)


@modes
@cases(CHAT)
async def test_litellm_with_openai(chat: OpenAIServer, reported: Json, expected: Expected | None, mode: str) -> None:
    models = module("lite_llm", "litellm")
    chat.script(Reply(WORDS, usage=reported))
    model = models.LiteLlm(model="openai/gpt-4o", api_base=f"{chat.url}/v1", api_key=KEY)
    await assert_billed(model, "*gpt-4o", mode, expected)


@modes
@cases(ANTHROPIC)
async def test_litellm_with_anthropic(
    messages: AnthropicServer, reported: Json, expected: Expected | None, mode: str
) -> None:
    models = module("lite_llm", "litellm")
    messages.script(Reply(WORDS, usage=reported))
    model = models.LiteLlm(model="anthropic/claude-sonnet-4-5", api_base=messages.url, api_key=KEY)
    await assert_billed(model, "*claude-sonnet-4-5", mode, expected)


async def test_a_fallback_is_billed_by_the_model_that_answered(server: GeminiServer) -> None:
    if find_spec("google.adk.models._fallback_model") is None:
        pytest.skip("this version of ADK has no fallback model")
    models = importlib.import_module("google.adk.models._fallback_model")
    server.script(Answer([text(WORDS)], usage=usage(900, 250)))
    async with closing(Gemini(model="gemini-2.5-flash", base_url=server.url)) as inner:
        await assert_billed(models.FallbackModel(models=[inner]), "gemini-2.5-flash", "unary", (900, 250, 0, 0))
