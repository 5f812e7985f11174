"""A switch to a cheaper model with ADK's Gemini class, over real HTTP."""

from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.agents.context_cache_config import ContextCacheConfig
from google.adk.apps import App
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.genai import types

from runguard import Budget, Threshold
from runguard.adk import RunGuardPlugin
from tests.kit.gemini_models import Models
from tests.kit.gemini_server import Answer, GeminiServer, Request, call, text, usage
from tests.kit.topologies import MAKES_NO_CACHES


def work(q: int) -> dict[str, int]:
    """Works."""
    return {"done": q}


@pytest.mark.skipif(MAKES_NO_CACHES, reason="this ADK cannot create a context cache")
async def test_gemini_is_asked_for_the_cheaper_model_and_never_with_the_cache_of_the_other(
    server: GeminiServer, gemini: Models
) -> None:
    """The sixth call is the last one of the large model's share of the budget; its context cache stays behind."""

    def answer(number: int, request: Request) -> Answer:
        cached = 1_000 if "cachedContent" in request.body else 0
        parts = [call("work", q=number)] if number % 4 else [text("fine")]
        return Answer(parts, usage=usage(6_000, 250, cached=cached))

    server.answer_by(answer)
    plugin = RunGuardPlugin(budgets=[Budget(usd="0.02", per="user", thresholds=[Threshold(0.6, model=LITE)])])
    root = LlmAgent(
        name="worker",
        model=gemini(),
        instruction="x" * 30_000,
        tools=[work],
        generate_content_config=types.GenerateContentConfig(max_output_tokens=250),
    )
    app = App(
        name="wire",
        root_agent=root,
        plugins=[plugin],
        context_cache_config=ContextCacheConfig(min_tokens=0, ttl_seconds=600),
    )
    runner = Runner(app=app, session_service=InMemorySessionService(), auto_create_session=True)
    for _ in range(3):
        await _turn(runner)
    asked = [(request.path.split("/")[-1].split(":")[0], "cachedContent" in request.body) for request in server.calls]
    models = [model for model, _ in asked]
    switched = models.index(LITE)
    assert models == ["gemini-2.5-flash"] * switched + [LITE] * (12 - switched)
    assert any(is_cached for _, is_cached in asked[:switched]), "the first model had a cache"
    made = [request.body["model"] for request in server.requests if request.path == "/v1beta/cachedContents"]
    first_cached = next((n for n, (_, is_cached) in enumerate(asked[switched:]) if is_cached), None)
    assert first_cached is None or f"models/{LITE}" in made, "a cache is sent to the model that made it"
    calls = {name: figures["calls"] for name, figures in plugin.spend()["by_model"].items()}
    assert calls == {"gemini-2.5-flash": switched, LITE: 12 - switched}


LITE = "gemini-2.5-flash-lite"


async def _turn(runner: Any) -> None:
    message = types.Content(role="user", parts=[types.Part(text="go")])
    async for _ in runner.run_async(user_id="u", session_id="s", new_message=message):
        pass
