"""``examples/guarded_litellm.py`` with the real LiteLLM against a local provider: a healthy run answers, and each way
to fail ends in its own error.
"""

import importlib.util
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import runguard
from runguard.adk import GuardedLlm
from runguard.testing import run
from tests.kit.openai_server import KEY, OpenAIServer
from tests.kit.sse_server import Asked, Reply

if importlib.util.find_spec("litellm") is None:  # not imported here: that takes seconds, in every worker
    pytest.skip("litellm is not installed", allow_module_level=True)
MODEL = "openai/gpt-4o-mini"
PRICES = {"gpt-4o-mini": {"input": "0.15", "output": "0.60"}}
CALL_USD = Decimal("0.0003")  # 1,000 in and 250 out, by LiteLLM's list and by ours


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "guarded_litellm.py"
    spec = importlib.util.spec_from_file_location("guarded_litellm", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def provider() -> Iterator[OpenAIServer]:
    running = OpenAIServer()
    yield running
    running.close()


def at(provider: OpenAIServer) -> dict[str, Any]:
    """Where the provider is.

    LiteLLM wants the package mcp as soon as there are tools, unless it is told that none of them is of that kind.
    """
    return {
        "api_base": f"{provider.url}/v1",
        "api_key": KEY,
        **({} if importlib.util.find_spec("mcp") else {"_skip_mcp_handler": True}),
    }


def research(n: int, request: Asked) -> Reply:
    """What a model does that gets somewhere."""
    if n == 1:
        return Reply("", call=("search", {"query": "the moon"}))
    if n == 2:
        return Reply("", call=("summarize", {"text": "The moon is 384,400 km away. It has no air."}))
    return Reply("It is 384,400 km away.")


def stubborn(n: int, request: Asked) -> Reply:
    """The same call again, whatever comes of it."""
    return Reply("", call=("search", {"query": "the archive"}))


def rewording(n: int, request: Asked) -> Reply:
    """The same tool with slightly modified arguments, for the same error each time."""
    return Reply("", call=("search", {"query": f"the archive, in other words no. {n}"}))


def greedy(n: int, request: Asked) -> Reply:
    """Ever new calls."""
    return Reply("", call=("search", {"query": f"page {n} on the moon"}))


async def test_a_healthy_run_answers(example: ModuleType, provider: OpenAIServer) -> None:
    provider.answer_by(research)
    assert await example.run_adk_agent("How far is the moon?", MODEL, **at(provider)) == "It is 384,400 km away."
    assert len(provider.requests) == 3
    told = [message["role"] for message in provider.requests[-1].body["messages"]]
    assert told == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert "384,400" in str(provider.requests[1].body["messages"][-1]), "what the tool found reached the model"


@pytest.mark.parametrize("model", [stubborn, rewording])
async def test_a_loop_of_tool_errors_is_stopped(example: ModuleType, provider: OpenAIServer, model: Any) -> None:
    provider.answer_by(model)
    said = await example.run_adk_agent("Find it.", MODEL, **at(provider))
    assert said == "Loop detected (pattern: ('search',)). Agent aborted."
    assert len(provider.requests) == 3
    assert "permission denied" in str(provider.requests[-1].body["messages"][-1])


async def test_a_budget_cap_is_kept(example: ModuleType, provider: OpenAIServer) -> None:
    """Each call may answer with 2,000 tokens, $0.0012 and its prompt: the fourth would not fit any more."""
    provider.answer_by(greedy)
    said = await example.run_adk_agent("Find everything.", MODEL, 0.0021, **at(provider))
    assert said == "Budget cap reached ($0.001). Agent aborted."
    assert len(provider.requests) == 3
    assert CALL_USD * len(provider.billed) <= Decimal("0.0021")


async def test_a_prompt_beyond_the_context_is_not_sent(example: ModuleType, provider: OpenAIServer) -> None:
    said = await example.run_adk_agent("moon " * 700_000, MODEL, **at(provider))
    assert said.startswith("Context limit approaching (875")
    assert not provider.requests


async def test_what_litellm_says_that_it_cost_is_what_is_booked(example: ModuleType, provider: OpenAIServer) -> None:
    provider.answer_by(research)
    client = example.GuardedClient(1.50)
    agent = example.research_agent(example.LiteLlm(model=MODEL, llm_client=client, **at(provider)))
    await run(agent, "How far is the moon?")
    spent = client.acompletion.spend()
    assert (spent["calls"], spent["estimated_calls"], spent["usd"], spent["tokens"]) == (3, 0, CALL_USD * 3, 3_750)
    assert spent["reserved_usd"] == 0


# ---- the same by the model alone ------------------------------------------------------------------------------------

GUARDED = [
    (stubborn, {"max_usd": 1, "cycle_repeats": 3, "max_cycle_len": 4}, runguard.LoopDetectedError, 3),
    (greedy, {"max_usd": CALL_USD * 4}, runguard.BudgetExceededError, 4),
    (greedy, {"max_context_tokens": 1_500, "context_headroom": 600}, runguard.ContextOverflowError, 0),
]


@pytest.mark.parametrize(("model", "limits", "error", "requests"), GUARDED, ids=["loop", "budget", "context"])
async def test_by_its_model_alone(
    example: ModuleType,
    provider: OpenAIServer,
    model: Any,
    limits: dict[str, Any],
    error: type[Exception],
    requests: int,
) -> None:
    provider.answer_by(model)
    guarded = GuardedLlm(
        example.LiteLlm(model=MODEL, **at(provider)), prices=PRICES, tokens=lambda request: 1_000, **limits
    )
    agent = example.research_agent(guarded)
    agent.generate_content_config.max_output_tokens = 250
    with pytest.raises(error):
        await run(agent, "Find it.")
    assert len(provider.requests) == requests
    spent = guarded.spend()
    assert (spent["usd"], spent["reserved_usd"]) == (CALL_USD * requests, 0)
