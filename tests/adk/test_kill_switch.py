"""The kill switch on a model call in flight: one stop event, in the stream and in the session."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from google.adk.agents import LlmAgent, LoopAgent, SequentialAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.apps import App
from google.adk.events import Event
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.genai import types
from pydantic import PrivateAttr

import runguard
from runguard.adk import RunGuardPlugin


class EndlessLlm(BaseLlm):
    """A model that says two words and then nothing more."""

    model: str = "gemini-2.5-flash"
    _begun: asyncio.Event = PrivateAttr(default_factory=asyncio.Event)

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        if stream:
            content = types.Content(role="model", parts=[types.Part(text="I think")])
            yield LlmResponse(content=content, partial=True)
        self._begun.set()
        await asyncio.Event().wait()
        yield LlmResponse()


TOPOLOGIES: dict[str, Any] = {
    "alone": lambda agent: agent,
    "sequential": lambda agent: SequentialAgent(name="team", sub_agents=[agent]),
    "loop": lambda agent: LoopAgent(name="team", sub_agents=[agent], max_iterations=5),
}


@pytest.mark.parametrize("mode", [StreamingMode.NONE, StreamingMode.SSE])
@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_a_call_that_the_switch_ends_leaves_one_stop_event(topology: str, mode: StreamingMode) -> None:
    plugin, service = RunGuardPlugin(), InMemorySessionService()
    model = EndlessLlm()
    agent = TOPOLOGIES[topology](LlmAgent(name="worker", model=model))
    await service.create_session(app_name="shop", user_id="ann", session_id="s")
    runner = Runner(app=App(name="shop", root_agent=agent, plugins=[plugin]), session_service=service)
    message = types.Content(role="user", parts=[types.Part(text="go")])

    async def play() -> list[Event]:
        config = RunConfig(streaming_mode=mode)
        events = runner.run_async(user_id="ann", session_id="s", new_message=message, run_config=config)
        return [event async for event in events]

    running = asyncio.ensure_future(play())
    await model._begun.wait()
    plugin.stop("app:shop", actor="ops")
    events = await running
    stops = [event for event in events if event.error_code == "RUNGUARD_STOP"]
    assert len(stops) == 1
    trip = runguard.trip(stops[0])
    assert trip is not None
    assert trip.rule == "kill_switch"
    session = await service.get_session(app_name="shop", user_id="ann", session_id="s")
    assert session is not None
    assert [event.error_code for event in session.events if event.error_code] == ["RUNGUARD_STOP"]
