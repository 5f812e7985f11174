"""The conformance harness of ``runguard.adk``: a real ``Runner`` with a scripted ``BaseLlm``."""

import asyncio
import inspect
import itertools
import json
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
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
from runguard.testing.conformance import MODEL, AgentSpec, AskAgainError, Harness, Reply, Session, TurnResult

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
    def __init__(
        self, spec: AgentSpec, plugins: list[Any], app: str, stored: "tuple[InMemorySessionService, str] | None" = None
    ) -> None:
        """``stored``: where the conversation is, when it goes on."""
        self._counter, self._spec = [0], spec
        agent = self._build(spec, [self._build(other, []) for other in spec.hand_offs])
        self._service, self._id = stored or (InMemorySessionService(), f"s{next(_ids)}")
        self._plugin = plugins[0] if plugins else None
        self._runner = Runner(
            app=App(name=app, root_agent=agent, plugins=plugins),
            session_service=self._service,
        )
        self._app = app

    def moved(self, guard: Controls) -> "AdkSession":
        return AdkSession(self._spec, [guard], self._app, (self._service, self._id))

    @property
    def model_calls(self) -> int:
        return self._counter[0]

    def _build(self, spec: AgentSpec, sub_agents: list[LlmAgent]) -> LlmAgent:
        tools: list[Any] = [
            FunctionTool(_tool(function, name, spec.about.get(name, "")), require_confirmation=name in spec.approvals)
            for name, function in spec.tools.items()
        ]
        inner = [self._build(one, []) for one in spec.agents]
        tools += [self._pooled(one) if spec.pooled else AgentTool(one) for one in inner]
        return LlmAgent(
            name=spec.name,
            instruction=spec.instruction,
            model=ScriptedLlm(spec, self._counter),
            tools=tools,
            sub_agents=sub_agents,
            output_schema=Answer if spec.structured else None,
        )

    def _pooled(self, agent: LlmAgent) -> FunctionTool:
        """A tool that runs an agent of its own in a thread pool of its own."""
        runner = Runner(app_name=self._app_of_inner, agent=agent, session_service=InMemorySessionService())

        def work(request: str) -> str:
            service = InMemorySessionService()
            runner.session_service = service
            return asyncio.run(_ask(runner, service, request))

        def call(request: str) -> str:
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(work, request).result()

        call.__name__ = agent.name
        return FunctionTool(call)

    _app_of_inner = "inner_app"

    async def play(self, message: str | None, *, stream: bool) -> TurnResult:
        config = RunConfig(streaming_mode=StreamingMode.SSE if stream else StreamingMode.NONE)
        result, known = TurnResult(), await self._known()
        try:
            async for _ in self._runner.run_async(
                user_id="u", session_id=self._id, new_message=await self._content(message), run_config=config
            ):
                pass
        except Exception as error:
            result.error = error
        return await self._left(result, known)

    def play_now(self, message: str | None) -> TurnResult:
        result, known = TurnResult(), asyncio.run(self._known())
        try:
            for _ in self._runner.run(
                user_id="u", session_id=self._id, new_message=asyncio.run(self._content(message))
            ):
                pass
        except Exception as error:
            result.error = error
        return asyncio.run(self._left(result, known))

    @property
    def _key(self) -> Any:
        return {"app_name": self._app, "user_id": "u", "session_id": self._id}

    async def _known(self) -> int:
        """The events that the conversation has already."""
        session = await self._service.get_session(**self._key)
        return len((session or await self._service.create_session(**self._key)).events)

    async def _content(self, message: str | None) -> types.Content:
        if message is not None:
            return types.Content(role="user", parts=[types.Part(text=message)])
        session = await self._service.get_session(**self._key)
        assert session is not None
        asked = [call for event in session.events for call in event.get_function_calls()]
        answered = {answer.id for event in session.events for answer in event.get_function_responses()}
        parts = [
            types.Part(
                function_response=types.FunctionResponse(id=call.id, name=call.name, response={"confirmed": True})
            )
            for call in asked
            if call.name == _CONFIRMATION and call.id not in answered
        ]
        return types.Content(role="user", parts=parts)

    async def _left(self, result: TurnResult, known: int) -> TurnResult:
        session = await self._service.get_session(**self._key)
        assert session is not None
        newest = [event for event in session.events[known:] if event.author != "user"]
        result.waits = any(call.name == _CONFIRMATION for event in newest for call in event.get_function_calls())
        if self._plugin is not None and newest:
            spend = self._plugin.spend(f"run:{newest[-1].invocation_id}")
            result.spent = {**spend, "model_calls": spend["calls"]}
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


_CONFIRMATION = "adk_request_confirmation"


async def _ask(runner: Runner, service: InMemorySessionService, request: str) -> str:
    session = await service.create_session(app_name=runner.app_name, user_id="u")
    content = types.Content(role="user", parts=[types.Part(text=request)])
    texts = [
        part.text
        async for event in runner.run_async(user_id="u", session_id=session.id, new_message=content)
        for part in (event.content.parts if event.content else None) or []
        if part.text
    ]
    return texts[-1] if texts else ""


def _tool(function: Any, name: str, about: str) -> Any:
    """A function with the plain keywords of the scenario's, so that ADK passes all arguments on."""
    names = [n for n, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD]

    def tool(**kwargs: Any) -> Any:
        try:
            return function(**kwargs)
        except AskAgainError as request:  # ADK has no request of its own
            raise ValueError(str(request)) from None

    tool.__doc__ = about or name
    keywords = names or (["doc"] if inspect.signature(function).parameters else [])
    tool.__name__ = name
    kinds = {n: int if function.__annotations__.get(n) is int else str for n in keywords}
    tool.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, annotation=kinds[n], default=kinds[n]())
            for n in keywords
        ]
    )
    tool.__annotations__ = kinds
    return tool


_NAMES_USERS = "ADK's Runner names the user and the session of each turn, and `plugin.spend('run:…')` is its bill."


class AdkHarness(Harness):
    name = "Google ADK"
    impossible = {  # noqa: RUF012
        "approval_by_another_user": _NAMES_USERS,
        "user_per_call": _NAMES_USERS,
        "unnamed_user": _NAMES_USERS,
        "bill_of_a_block": _NAMES_USERS,
        "wrong_arguments": "ADK does not check the types of arguments: the tool gets them as they are.",
    }

    def guard(self, **settings: Any) -> Controls:
        self._app = settings.pop("app", "") or "conformance"
        condition = settings.pop("termination_condition", None)
        self._conditions = [TerminationPlugin(condition)] if condition is not None else []
        return RunGuardPlugin(**settings)

    def session(self, agent: AgentSpec, guard: Controls | None) -> Session:
        assert guard is None or isinstance(guard, RunGuardPlugin)
        plugins = [] if guard is None else [guard, *self._conditions]
        return AdkSession(agent, plugins, getattr(self, "_app", "conformance"))
