"""What the tokens of a settled call cost."""

from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import pytest
from google.adk.agents import ParallelAgent
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.sessions import InMemorySessionService
from google.genai import types

from runguard.testing import ScriptedModel, call, text
from tests.kit.adk_runs import play
from tests.kit.money import CALL_USD, agent, assert_nothing_reserved, figures, guard
from tests.kit.settling import Chunks, Meddler, RefusedError, assert_usable, recover, said, usage
from tests.kit.tools import step

DEAR = {"input": 10, "output": 40, "cached": 1, "audio": 100, "cached_audio": 50, "audio_output": 400}


def detail(modality: str, tokens: int) -> list[types.ModalityTokenCount]:
    return [types.ModalityTokenCount(modality=types.MediaModality(modality), token_count=tokens)]


@pytest.mark.parametrize(
    ("told", "usd"),
    [
        # thinking is output, whether the model counts it among the candidates or beside them
        (
            usage(
                prompt_token_count=1_000, candidates_token_count=100, thoughts_token_count=150, total_token_count=1_250
            ),
            "0.02",
        ),
        (
            usage(
                prompt_token_count=1_000, candidates_token_count=250, thoughts_token_count=150, total_token_count=1_250
            ),
            "0.02",
        ),
        (usage(prompt_token_count=1_000, candidates_token_count=100, thoughts_token_count=150), "0.02"),
        # of the prompt, 600 were read from a cache
        (
            usage(
                prompt_token_count=1_000,
                cached_content_token_count=600,
                candidates_token_count=250,
                total_token_count=1_250,
            ),
            "0.0146",
        ),
        # the prompts of built-in tools are input beside the prompt
        (
            usage(
                prompt_token_count=1_000,
                tool_use_prompt_token_count=500,
                candidates_token_count=250,
                total_token_count=1_750,
            ),
            "0.025",
        ),
        # of the prompt, 400 were heard; of the answer, 50 spoken
        (
            usage(
                prompt_token_count=1_000,
                prompt_tokens_details=detail("AUDIO", 400),
                candidates_token_count=250,
                total_token_count=1_250,
            ),
            "0.056",
        ),
        (
            usage(
                prompt_token_count=1_000,
                candidates_token_count=250,
                candidates_tokens_details=detail("AUDIO", 50),
                total_token_count=1_250,
            ),
            "0.038",
        ),
        (
            usage(
                prompt_token_count=1_000,
                prompt_tokens_details=detail("AUDIO", 400),
                cached_content_token_count=300,
                cache_tokens_details=detail("AUDIO", 300),
                candidates_token_count=250,
                total_token_count=1_250,
            ),
            "0.041",
        ),
    ],
    ids=[
        "thoughts apart",
        "thoughts within",
        "no total",
        "cached",
        "tool use",
        "audio in",
        "audio out",
        "cached audio",
    ],
)
async def test_each_kind_of_token_has_its_own_price(told: Any, usd: str) -> None:
    content = types.Content(role="model", parts=[types.Part(text="x")])
    model = Chunks(LlmResponse(content=content, usage_metadata=told))
    plugin, service = guard(prices={"scripted-1": DEAR}, max_usd=5), InMemorySessionService()
    root = agent("a", model)
    await play(root, plugins=[plugin], session_service=service)
    assert figures(plugin) == (1, 0, Decimal(usd))
    await assert_usable(plugin, root, service)


async def test_a_trip_says_when_what_was_spent_is_partly_an_estimate() -> None:
    model = ScriptedModel(lambda n, _: call("step", q=n), usage_on="none")
    plugin = guard(max_usd="0.03")
    await play(agent("a", model, tools=[step]), plugins=[plugin])
    (trip,) = plugin.trips
    assert trip.estimated
    assert "about $" in trip.message


@pytest.mark.parametrize(
    ("answering", "usd", "estimated"),
    [("small-1", "0.002", 0), ("scripted-1", "0.02", 0), ("nobody-knows-1", "0.02", 1)],
)
async def test_the_model_that_answered_is_paid(answering: str, usd: str, estimated: int) -> None:
    """Without a price for the one that answered, that of the one that was asked stands, marked as an estimate."""
    prices = {"scripted-1": {"input": 10, "output": 40}, "small-1": {"input": 1, "output": 4}}
    plugin = guard(prices=prices, max_usd="0.10")
    await play(agent("a", Chunks(said("x", (1_000, 250), model=answering))), plugins=[plugin])
    assert figures(plugin) == (1, estimated, Decimal(usd))
    assert list(plugin.spend()["by_model"]) == [answering]


def _branches(models: Iterable[Any]) -> ParallelAgent:
    return ParallelAgent(name="par", sub_agents=[agent(f"p{n}", model) for n, model in enumerate(models)])


async def test_branches_that_end_in_every_way_at_once_leave_nothing_behind() -> None:
    """An answer, one without usage, a refusal, an estimate of what broke and an answer from a cache, side by side."""
    plugin, service = guard(max_usd="0.10"), InMemorySessionService()
    models = [
        ScriptedModel([text("fine")]),
        Chunks(said("x" * 400)),
        Chunks(RefusedError(503)),
        Chunks(ConnectionError("broke")),
        ScriptedModel([text("fine")]),
    ]
    root = _branches(models)
    branches: list[Any] = root.sub_agents
    for branch in branches[2:4]:
        branch.on_model_error_callback = recover
    cache = Meddler(lambda: said("cached"))

    def once(callback_context: Any, llm_request: LlmRequest) -> LlmResponse | None:
        act, cache.act = cache.act, None
        return act() if act is not None else None

    branches[4].before_model_callback = once
    result = await play(root, plugins=[plugin], session_service=service)
    assert sorted(result.texts) == sorted(["fine", "x" * 400, "never mind", "never mind", "cached"])
    assert figures(plugin) == (4, 2, CALL_USD + Decimal("0.014") + CALL_USD)
    assert_nothing_reserved(plugin)
    again = await play(root, "and now?", plugins=[plugin], session_service=service)
    assert again.texts == ["fine"] * 5
    assert figures(plugin) == (9, 2, Decimal("0.154"))
