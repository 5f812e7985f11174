"""A conversation that pauses: an app that asks a person, and goes on with the answer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.apps.app import ResumabilityConfig
from google.adk.events import Event
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools import LongRunningFunctionTool
from google.genai import types

from runguard.testing import ScriptedModel, call

PRICES = {"scripted-1": {"input": 8.0, "output": 8.0}}  # 1,250 tokens a call: one cent


def ask(question: str) -> None:
    """A person answers later."""


def look(n: int) -> dict[str, int]:
    return {"n": n}


@dataclass
class Desk:
    """A session in which an app pauses and goes on. Several workers may serve it."""

    root: Any
    service: InMemorySessionService = field(default_factory=InMemorySessionService)
    resumable: bool = True
    open_call: types.FunctionCall | None = None
    invocation: str = ""
    user: str = "u1"
    session: str = "s1"

    def runner(self, plugin: Any) -> Runner:
        config = ResumabilityConfig(is_resumable=True) if self.resumable else None
        app = App(
            name="app", root_agent=self.root, plugins=[plugin] if plugin is not None else [], resumability_config=config
        )
        return Runner(app=app, session_service=self.service)

    async def make_session(self) -> None:
        if await self.service.get_session(app_name="app", user_id=self.user, session_id=self.session) is None:
            await self.service.create_session(app_name="app", user_id=self.user, session_id=self.session)

    async def play(self, plugin: Any, message: types.Content | None = None, **options: Any) -> list[Event]:
        await self.make_session()
        events: list[Event] = []
        async for event in self.runner(plugin).run_async(
            user_id=self.user, session_id=self.session, new_message=message, **options
        ):
            events.append(event)
            self.invocation = event.invocation_id
            for function_call in event.get_function_calls():
                if function_call.id in (event.long_running_tool_ids or ()):
                    self.open_call = function_call
        return events

    async def say(self, plugin: Any, words: str = "go", **options: Any) -> list[Event]:
        return await self.play(plugin, types.Content(role="user", parts=[types.Part(text=words)]), **options)

    async def answer(self, plugin: Any, response: dict[str, Any] | None = None) -> list[Event]:
        assert self.open_call is not None
        told = types.FunctionResponse(id=self.open_call.id, name=self.open_call.name, response=response or {"ok": True})
        return await self.play(plugin, types.Content(role="user", parts=[types.Part(function_response=told)]))

    async def again(self, plugin: Any) -> list[Event]:
        """The same invocation once more, without any message."""
        return await self.play(plugin, invocation_id=self.invocation)


def asking(script: Callable[..., Any] | None = None, **options: Any) -> tuple[ScriptedModel, Desk]:
    """An agent that asks a person again and again."""
    model = ScriptedModel(script or (lambda n, _: call("ask", question=str(n))), **options)
    return model, Desk(LlmAgent(name="clerk", model=model, tools=[LongRunningFunctionTool(ask), look]))
