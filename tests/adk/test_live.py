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

    def __init__(self, reports: tuple[dict[str, int], ...]) -> None:
        self.heard: asyncio.Queue[str] = asyncio.Queue()
        self.reports = reports

    async def send_history(self, history: list[types.Content]) -> None:
        return None

    async def send_content(self, content: types.Content) -> None:
        await self.heard.put("content")

    async def send_realtime(self, blob: Any) -> None:
        return None

    async def receive(self) -> AsyncGenerator[LlmResponse, None]:
        await self.heard.get()
        yield LlmResponse(content=types.Content(role="model", parts=[types.Part(text="hello")]))
        for report in self.reports:
            yield LlmResponse(usage_metadata=types.GenerateContentResponseUsageMetadata(**report))
        yield LlmResponse(turn_complete=True)

    async def close(self) -> None:
        return None


class LiveModel(ScriptedModel):
    reports: tuple[dict[str, int], ...] = ({"prompt_token_count": 700, "total_token_count": 1_000},)

    @asynccontextmanager
    async def connect(self, llm_request: Any) -> AsyncGenerator[Talk, None]:  # type: ignore[override]
        yield Talk(self.reports)


ZEROS = {"prompt_token_count": 0, "candidates_token_count": 0, "total_token_count": 0}


async def talk(plugin: RunGuardPlugin, *reports: dict[str, int]) -> tuple[list[str], dict[str, Any]]:
    """One turn of a live session: what was said, and the run as the guard sees it at its end."""
    agent = LlmAgent(name="talker", model=LiveModel([text("unused")], **({"reports": reports} if reports else {})))
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
    (run,) = counted
    return said, run


async def test_zeros_of_a_live_model_are_estimated_from_what_it_said() -> None:
    plugin = RunGuardPlugin(prices={"scripted-1": {"input": 10, "output": 40}})
    _, run = await talk(plugin, ZEROS)
    assert (run["model_calls"], run["prompt_tokens"], run["output_tokens"]) == (1, 0, 2)  # "hello"
    assert plugin.spend()["estimated_calls"] == 1


async def test_zeros_behind_a_report_of_a_live_model_count_nothing_again() -> None:
    _, run = await talk(RunGuardPlugin(), {"prompt_token_count": 700, "total_token_count": 1_000}, ZEROS)
    assert (run["prompt_tokens"], run["output_tokens"]) == (700, 300)


async def test_a_live_session_is_counted_and_left_alone() -> None:
    plugin = RunGuardPlugin()
    said, run = await talk(plugin)
    assert said == ["hello"]
    assert (run["prompt_tokens"], run["output_tokens"]) == (700, 300)
    assert run["model_calls"] == 1
    assert plugin.trips == []
    assert plugin.snapshot()["guard_errors"] == 0
