"""The conformance harness of ``runguard.adk``: a real ``Runner`` with a scripted ``BaseLlm``."""

import asyncio
import inspect
import itertools
import json
from collections.abc import AsyncGenerator
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode  # type: ignore[attr-defined]
from google.adk.apps import App
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools.agent_tool import AgentTool
from google.adk.tools.function_tool import FunctionTool
from google.genai import types
from pydantic import BaseModel, PrivateAttr

from runguard.adk import RunGuardPlugin, TerminationPlugin
from runguard.engine.guard import Controls
from runguard.testing.conformance import MODEL, AgentSpec, Harness, Reply, Session, TurnResult

_ids = itertools.count(1)


class Answer(BaseModel):
    answer: int


class ScriptedLlm(BaseLlm):
    """A model that follows a script."""

    model: str = MODEL
    _spec: AgentSpec = PrivateAttr()
    _counter: list[int] = PrivateAttr()
    _calls: int = PrivateAttr(default=0)

    def __init__(self, spec: AgentSpec, counter: list[int]) -> None:
        super().__init__(model=MODEL)
        self._spec, self._counter = spec, counter

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        await asyncio.sleep(0)
        self._counter[0] += 1
        self._calls += 1
        reply = self._spec.script(self._calls, _newest(llm_request))
        if reply.error is not None:
            raise reply.error
        if reply.waits:
            await asyncio.Event().wait()
        usage = types.GenerateContentResponseUsageMetadata(
            prompt_token_count=reply.input_tokens,
            candidates_token_count=reply.output_tokens,
            total_token_count=reply.input_tokens + reply.output_tokens,
        )
        if reply.cut and stream:
            yield LlmResponse(content=types.Content(role="model", parts=[types.Part(text=reply.text)]), partial=True)
            raise ConnectionError("the stream broke off")
        yield LlmResponse(content=types.Content(role="model", parts=_parts(reply)), usage_metadata=usage)


def _newest(request: LlmRequest) -> str:
    part = request.contents[-1].parts[-1] if request.contents and request.contents[-1].parts else types.Part(text="")
    return part.text if part.text is not None else str(part.function_response)


def _parts(reply: Reply) -> list[types.Part]:
    if reply.hand_off:
        return [types.Part.from_function_call(name="transfer_to_agent", args={"agent_name": reply.hand_off})]
    calls = [types.Part.from_function_call(name=tool, args=dict(args)) for tool, args in reply.calls]
    return calls or [types.Part(text=reply.text)]


class AdkSession(Session):
    def __init__(self, spec: AgentSpec, plugins: list[Any], app: str) -> None:
        self._counter = [0]
        agent = self._build(spec, [self._build(other, []) for other in spec.hand_offs])
        self._service = InMemorySessionService()
        self._runner = Runner(
            app=App(name=app, root_agent=agent, plugins=plugins),
            session_service=self._service,
        )
        self._app, self._id = app, f"s{next(_ids)}"

    @property
    def model_calls(self) -> int:
        return self._counter[0]

    def _build(self, spec: AgentSpec, sub_agents: list[LlmAgent]) -> LlmAgent:
        tools: list[Any] = [FunctionTool(_tool(function, name)) for name, function in spec.tools.items()]
        tools += [AgentTool(self._build(inner, [])) for inner in spec.agents]
        return LlmAgent(
            name=spec.name,
            model=ScriptedLlm(spec, self._counter),
            tools=tools,
            sub_agents=sub_agents,
            output_schema=Answer if spec.structured else None,
        )

    async def turn(self, message: str, *, stream: bool = False) -> TurnResult:
        result = TurnResult()
        key: Any = {"app_name": self._app, "user_id": "u", "session_id": self._id}
        if await self._service.get_session(**key) is None:
            await self._service.create_session(**key)
        known = len((await self._service.get_session(**key)).events)  # type: ignore[union-attr]
        config = RunConfig(streaming_mode=StreamingMode.SSE if stream else StreamingMode.NONE)
        content = types.Content(role="user", parts=[types.Part(text=message)])
        try:
            async for _ in self._runner.run_async(
                user_id="u", session_id=self._id, new_message=content, run_config=config
            ):
                pass
        except Exception as error:
            result.error = error
        session = await self._service.get_session(**key)
        assert session is not None
        parts = [part for event in session.events for part in (event.content.parts if event.content else None) or []]
        fresh = [event for event in session.events[known:] if event.author != "user"]
        for event in fresh:
            for part in (event.content.parts if event.content else None) or []:
                result.events += _events(part)
        texts = [text for kind, _, text in result.events if kind == "text"]
        result.text = texts[-1] if texts and result.error is None else ""
        answered = {part.function_response.id for part in parts if part.function_response is not None}
        calls = [part.function_call.id for part in parts if part.function_call is not None]
        result.open_calls = [str(call) for call in calls if call not in answered]
        return result


def _events(part: types.Part) -> list[tuple[str, str, str]]:
    if part.function_call is not None:
        return [("call", part.function_call.name or "", json.dumps(part.function_call.args))]
    if part.function_response is not None:
        return [("answer", part.function_response.name or "", json.dumps(part.function_response.response))]
    return [("text", "", part.text)] if part.text else []


def _tool(function: Any, name: str) -> Any:
    """A function with the plain keywords of the scenario's, so that ADK passes all arguments on."""
    names = [n for n, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD]

    def tool(**kwargs: Any) -> Any:
        return function(**kwargs)

    keywords = names or (["doc"] if inspect.signature(function).parameters else [])
    tool.__name__ = name
    tool.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, annotation=str, default="") for n in keywords]
    )
    tool.__annotations__ = dict.fromkeys(keywords, str)
    return tool


class AdkHarness(Harness):
    name = "Google ADK"

    def guard(self, **settings: Any) -> Controls:
        self._app = settings.pop("app", "") or "conformance"
        condition = settings.pop("termination_condition", None)
        self._conditions = [TerminationPlugin(condition)] if condition is not None else []
        return RunGuardPlugin(**settings)

    def session(self, agent: AgentSpec, guard: Controls | None) -> Session:
        assert guard is None or isinstance(guard, RunGuardPlugin)
        plugins = [] if guard is None else [guard, *self._conditions]
        return AdkSession(agent, plugins, getattr(self, "_app", "conformance"))
