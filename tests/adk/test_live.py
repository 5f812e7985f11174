"""Live sessions: the guard observes and counts, and does no harm."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from google.adk.agents import LiveRequestQueue, LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.apps import App
from google.adk.models.base_llm_connection import BaseLlmConnection
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.genai import types

from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, text


class Talk(BaseLlmConnection):
    """Answers every content it is sent with a sentence, then tells its usage, as live models do: in an event of its own."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[str] = asyncio.Queue()

    async def send_history(self, history: list[types.Content]) -> None:
        return None

    async def send_content(self, content: types.Content) -> None:
        await self.heard.put("content")

    async def send_realtime(self, blob: Any) -> None:
        return None

    async def receive(self) -> AsyncGenerator[LlmResponse, None]:
        await self.heard.get()
        yield LlmResponse(content=types.Content(role="model", parts=[types.Part(text="hello")]))
        yield LlmResponse(usage_metadata=types.GenerateContentResponseUsageMetadata(prompt_token_count=700, total_token_count=1_000))
        yield LlmResponse(turn_complete=True)

    async def close(self) -> None:
        return None


class LiveModel(ScriptedModel):
    @asynccontextmanager
    async def connect(self, llm_request: Any) -> AsyncGenerator[Talk, None]:  # type: ignore[override]
        yield Talk()


async def test_a_live_session_is_counted_and_left_alone() -> None:
    plugin = RunGuardPlugin()
    agent = LlmAgent(name="talker", model=LiveModel([text("unused")]))
    service = InMemorySessionService()
    session = await service.create_session(app_name="app", user_id="u", session_id="s")
    runner = Runner(app=App(name="app", root_agent=agent, plugins=[plugin]), session_service=service)
    queue = LiveRequestQueue()
    said, counted = [], []
    queue.send_content(types.Content(role="user", parts=[types.Part(text="hi")]))
    async with asyncio.timeout(20):
        config = RunConfig(streaming_mode=StreamingMode.BIDI, response_modalities=["TEXT"])
        async for event in runner.run_live(user_id="u", session_id=session.id, live_request_queue=queue, run_config=config):
            said += [part.text for part in (event.content.parts if event.content else []) or [] if part.text]
            if event.turn_complete:
                counted += plugin.snapshot()["runs"]
                queue.close()
                break
    assert said == ["hello"]
    (run,) = counted
    assert (run["prompt_tokens"], run["output_tokens"]) == (700, 300)
    assert run["model_calls"] == 1
    assert plugin.trips == []
    assert plugin.snapshot()["guard_errors"] == 0
