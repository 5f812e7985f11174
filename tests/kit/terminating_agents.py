"""Agents and conditions for termination on real runs."""

import asyncio
from collections.abc import Callable
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.apps import App
from google.adk.events import Event
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.genai import types

from runguard.adk import termination_reason
from runguard.testing import Recording, ScriptedModel, assert_calls_answered, call, text
from tests.kit.topologies import (
    step,
)

CALL = 1_250  # tokens of one call of a scripted model


PRICES = {"scripted-1": {"input": 1, "output": 2}}  # 0.0015 USD a call


SSE = RunConfig(streaming_mode=StreamingMode.SSE)


def speaker(name: str = "writer", say: Callable[[int], str] | None = None, **options: Any) -> LlmAgent:
    return LlmAgent(
        name=name, description=name, model=ScriptedModel(lambda n, _: text(say(n) if say else f"{name} {n}"), **options)
    )


def worker(name: str = "worker", **options: Any) -> LlmAgent:
    """Calls a tool for ever."""
    return LlmAgent(
        name=name, description=name, model=ScriptedModel(lambda n, _: call("step", n=n), **options), tools=[step]
    )


def assert_ended(result: Recording, reason: str, author: str | None = None) -> Event:
    """It ended by this condition, said so once and last, and left a history that a provider takes."""
    last = result.events[-1]
    assert reason in (termination_reason(last) or "nothing")
    actions: Any = last.actions  # the reason is an extra field
    assert actions.termination_reason == termination_reason(last)
    assert actions.escalate is True
    assert last.content is None, "the reason is no agent's answer"
    assert not last.is_final_response(), "a reader of final responses would read its content"
    assert last.invocation_id == result.events[0].invocation_id
    assert last.author == (author or last.author)
    assert [event for event in result.events if termination_reason(event)] == [last]
    stored = result.session.events[-1]
    assert (stored.id, termination_reason(stored)) == (last.id, termination_reason(last))
    assert_calls_answered(result.session)
    return last


async def runner_of(root: Any, *plugins: Any, session: str = "s1") -> Runner:
    service = InMemorySessionService()
    await service.create_session(app_name="app", user_id="u1", session_id=session)
    return Runner(app=App(name="app", root_agent=root, plugins=list(plugins)), session_service=service)


def message(words: str = "go") -> types.Content:
    return types.Content(role="user", parts=[types.Part(text=words)])


async def is_third(events: Any) -> bool:
    await asyncio.sleep(0)
    return any(part.text == "writer 3" for event in events for part in (event.content.parts if event.content else []))
