"""The conformance harness of ``runguard.pydantic_ai``: an ``Agent`` with a ``FunctionModel``."""

import asyncio
import inspect
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent, Tool
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
)
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel
from pydantic_ai.usage import RequestUsage, UsageLimits

from runguard.engine.guard import Controls
from runguard.pydantic_ai import RunGuard
from runguard.testing.conformance import MODEL, AgentSpec, Harness, Reply, Session, TurnResult

_ids = itertools.count(1)


class Answer(BaseModel):
    answer: int


class PydanticAISession(Session):
    def __init__(self, spec: AgentSpec, guard: RunGuard | None) -> None:
        self._calls = 0
        self._guard = guard
        self._agent = self._build(spec)
        self._history: list[ModelMessage] = []

    @property
    def model_calls(self) -> int:
        return self._calls

    def _build(self, spec: AgentSpec) -> Agent[Any, Any]:
        made = 0

        def reply_to(messages: list[ModelMessage]) -> Reply:
            nonlocal made
            self._calls += 1
            made += 1
            reply = spec.script(made, _newest(messages))
            if reply.error is not None:
                raise reply.error
            return reply

        async def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
            reply = reply_to(messages)
            if reply.waits:
                await asyncio.Event().wait()
            calls = [ToolCallPart(tool, dict(args), f"call_{next(_ids)}") for tool, args in reply.calls]
            usage = RequestUsage(input_tokens=reply.input_tokens, output_tokens=reply.output_tokens)
            return ModelResponse([*calls] or [TextPart(reply.text)], usage=usage)

        async def stream(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
            reply = reply_to(messages)
            if reply.calls:
                for index, (tool, args) in enumerate(reply.calls):
                    yield {index: DeltaToolCall(tool, json.dumps(dict(args)), tool_call_id=f"call_{next(_ids)}")}
                return
            yield reply.text
            if reply.cut:
                raise ConnectionError("the stream broke off")

        tools = [Tool(_tool(f, name), name=name, takes_ctx=False) for name, f in spec.tools.items()]
        tools += [self._as_tool(inner) for inner in spec.agents]
        return Agent(
            FunctionModel(answer, stream_function=stream, model_name=MODEL),
            name=spec.name,
            tools=tools,
            output_type=Answer if spec.structured else str,
            capabilities=[self._guard] if self._guard is not None else [],
        )

    def _as_tool(self, spec: AgentSpec) -> Tool[Any]:
        agent = self._build(spec)

        async def ask(request: str) -> str:
            return str((await agent.run(request, usage_limits=UsageLimits(request_limit=None))).output)

        return Tool(ask, name=spec.name, takes_ctx=False)

    def play_now(self, message: str | None) -> TurnResult:
        raise NotImplementedError

    def moved(self, guard: Controls) -> Session:
        raise NotImplementedError

    async def play(self, message: str | None, *, stream: bool) -> TurnResult:
        if message is None:
            raise NotImplementedError
        result, limits = TurnResult(), UsageLimits(request_limit=None)
        known = len(self._history)
        try:
            if stream:
                async with self._agent.run_stream(
                    message, message_history=self._history, usage_limits=limits
                ) as streamed:
                    result.text = str(await streamed.get_output())
                    self._history = streamed.all_messages()
            else:
                ran = await self._agent.run(message, message_history=self._history, usage_limits=limits)
                result.text, self._history = str(ran.output), ran.all_messages()
        except Exception as error:
            result.error = error
        parts = [part for one in self._history for part in one.parts]
        result.events = [event for one in self._history[known:] for part in one.parts for event in _events(part)]
        answered = {part.tool_call_id for part in parts if isinstance(part, ToolReturnPart)}
        calls = [part.tool_call_id for part in parts if isinstance(part, ToolCallPart)]
        result.open_calls = [call for call in calls if call not in answered]
        return result


def _newest(messages: list[ModelMessage]) -> str:
    last = messages[-1]
    contents = [getattr(part, "content", "") for part in last.parts] if isinstance(last, ModelRequest) else [""]
    return str(contents[-1])


def _events(part: Any) -> list[tuple[str, str, str]]:
    if isinstance(part, ToolCallPart):
        return [("call", part.tool_name, json.dumps(part.args))]
    if isinstance(part, ToolReturnPart):
        return [("answer", part.tool_name, str(part.content))]
    return [("text", "", part.content)] if isinstance(part, TextPart) else []


def _tool(function: Any, name: str) -> Any:
    """A function with the plain keywords of the scenario's, so that Pydantic AI can build a schema."""
    names = [n for n, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD]
    takes_any = len(names) < len(inspect.signature(function).parameters)

    def call(**kwargs: Any) -> Any:
        return function(**kwargs)

    async def wait(**kwargs: Any) -> Any:
        return await function(**kwargs)

    tool: Any = wait if inspect.iscoroutinefunction(function) else call
    keywords = names or (["doc"] if takes_any else [])
    tool.__name__ = name
    tool.__signature__ = inspect.Signature(
        [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, annotation=Any, default=None) for n in keywords]
    )
    tool.__annotations__ = dict.fromkeys(keywords, Any)
    return tool


class PydanticAIHarness(Harness):
    name = "Pydantic AI"
    impossible = {  # noqa: RUF012
        "hand_off_cycle": "Pydantic AI has no hand-offs: a tool calls another agent, and that is nested.",
    }

    def guard(self, **settings: Any) -> Controls:
        return RunGuard(**settings)

    def session(self, agent: AgentSpec, guard: Controls | None) -> Session:
        assert guard is None or isinstance(guard, RunGuard)
        return PydanticAISession(agent, guard)
