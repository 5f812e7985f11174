"""The conformance harness of ``runguard.pydantic_ai``: an ``Agent`` with a ``FunctionModel``."""

import asyncio
import inspect
import itertools
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent, DeferredToolRequests, DeferredToolResults, ModelRetry, Tool
from pydantic_ai.messages import (
    ModelMessage,
    ModelMessagesTypeAdapter,
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
from runguard.testing.conformance import MODEL, AgentSpec, AskAgainError, Harness, Reply, Session, TurnResult

_ids = itertools.count(1)
_ENDLESS = UsageLimits(request_limit=None)
_RETRIES = 100  # the guard stops a run before the framework does


class Answer(BaseModel):
    answer: int


class ScriptedModel(FunctionModel):
    """Reports the usage of its script when it streams, too: ``FunctionModel`` counts the words of a stream."""

    streamed = RequestUsage()

    @asynccontextmanager
    async def request_stream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async with super().request_stream(*args, **kwargs) as response:
            streamed: Any = response
            pieces = streamed._iter

            async def told() -> AsyncIterator[Any]:
                async for piece in pieces:
                    yield piece
                streamed._usage = self.streamed

            streamed._iter = told()
            yield response


async def said(agent: Agent[Any, Any], given: str, stream: bool, **options: Any) -> Any:
    """Run an agent, streamed or not, and return its output."""
    if stream:
        async with agent.run_stream(given, **options) as streamed:
            return await streamed.get_output()
    return (await agent.run(given, **options)).output


class PydanticAISession(Session):
    def __init__(self, spec: AgentSpec, guard: RunGuard | None, history: bytes = b"[]") -> None:
        """``history``: the stored conversation, where it goes on."""
        self._calls = 0
        self._spec, self._guard = spec, guard
        self._agent = self._build(spec)
        self._history: list[ModelMessage] = ModelMessagesTypeAdapter.validate_json(history)
        self._asked: DeferredToolRequests | None = None

    def moved(self, guard: Controls) -> "PydanticAISession":
        assert isinstance(guard, RunGuard)
        session = PydanticAISession(self._spec, guard, ModelMessagesTypeAdapter.dump_json(self._history))
        session._asked = self._asked
        return session

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
            model.streamed = RequestUsage(input_tokens=reply.input_tokens, output_tokens=reply.output_tokens)
            if reply.waits:
                await asyncio.Event().wait()
            if reply.calls:
                for index, (tool, args) in enumerate(reply.calls):
                    yield {index: DeltaToolCall(tool, json.dumps(dict(args)), tool_call_id=f"call_{next(_ids)}")}
                return
            yield reply.text
            if reply.cut:
                raise ConnectionError("the stream broke off")

        tools = [
            Tool(
                _tool(f, name),
                name=name,
                description=spec.about.get(name),
                takes_ctx=False,
                requires_approval=name in spec.approvals,
                max_retries=_RETRIES,
            )
            for name, f in spec.tools.items()
        ]
        tools += [self._as_tool(inner, pooled=spec.pooled) for inner in spec.agents]
        outputs: Any = [str, DeferredToolRequests] if spec.approvals else Answer if spec.structured else str
        model = ScriptedModel(answer, stream_function=stream, model_name=MODEL)
        return Agent(
            model,
            name=spec.name,
            instructions=spec.instruction or None,
            tools=tools,
            output_type=outputs,
            retries=_RETRIES,
            capabilities=[self._guard] if self._guard is not None else [],
            metadata=self._guard.bill if self._guard is not None else None,
        )

    def _as_tool(self, spec: AgentSpec, *, pooled: bool) -> Tool[Any]:
        agent = self._build(spec)

        async def ask(request: str) -> str:
            return str((await agent.run(request, usage_limits=_ENDLESS)).output)

        def ask_in_pool(request: str) -> str:
            with ThreadPoolExecutor(1) as pool:
                return str(pool.submit(lambda: agent.run_sync(request, usage_limits=_ENDLESS)).result().output)

        return Tool(ask_in_pool if pooled else ask, name=spec.name, takes_ctx=False)

    def play_now(self, message: str | None) -> TurnResult:
        result, known = TurnResult(), len(self._history)
        try:
            self._keep(result, self._agent.run_sync(message, **self._given(message)))
        except Exception as error:
            result.error = error
        return self._left(result, known)

    async def play(self, message: str | None, *, stream: bool) -> TurnResult:
        result, known = TurnResult(), len(self._history)
        try:
            if stream:
                async with self._agent.run_stream(message, **self._given(message)) as streamed:
                    output = await streamed.get_output()
                self._keep(result, streamed, output)
            else:
                self._keep(result, await self._agent.run(message, **self._given(message)))
        except Exception as error:
            result.error = error
        return self._left(result, known)

    def _given(self, message: str | None) -> dict[str, Any]:
        given: dict[str, Any] = {"message_history": self._history, "usage_limits": _ENDLESS}
        if message is None:
            assert self._asked is not None
            approved: dict[str, Any] = {call.tool_call_id: True for call in self._asked.approvals}
            given["deferred_tool_results"] = DeferredToolResults(approvals=approved)
        return given

    def _keep(self, result: TurnResult, ran: Any, output: Any = None) -> None:
        output = ran.output if output is None else output
        self._asked = output if isinstance(output, DeferredToolRequests) else None
        result.waits, result.text = self._asked is not None, "" if self._asked is not None else str(output)
        result.spent = (ran.metadata or {}).get("runguard")
        self._history = ran.all_messages()

    def _left(self, result: TurnResult, known: int) -> TurnResult:
        parts: list[Any] = [part for one in self._history for part in one.parts]
        result.events = [event for one in self._history[known:] for part in one.parts for event in _events(part)]
        told = [part for part in parts if not isinstance(part, ToolCallPart)]
        answered = {part.tool_call_id for part in told if hasattr(part, "tool_call_id")}
        calls = [part.tool_call_id for part in parts if isinstance(part, ToolCallPart)]
        result.open_calls = [call for call in calls if call not in answered and not result.waits]
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
    kinds = {n: int if kind is int else Any for n, kind in getattr(function, "__annotations__", {}).items()}
    names = [n for n, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD]
    takes_any = len(names) < len(inspect.signature(function).parameters)

    def call(**kwargs: Any) -> Any:
        try:
            return function(**kwargs)
        except AskAgainError as request:
            raise ModelRetry(str(request)) from request

    async def wait(**kwargs: Any) -> Any:
        return await function(**kwargs)

    tool: Any = wait if inspect.iscoroutinefunction(function) else call
    keywords = names or (["doc"] if takes_any else [])
    tool.__name__ = name
    tool.__signature__ = inspect.Signature(
        [
            inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, annotation=kinds.get(n, Any), default=None)
            for n in keywords
        ]
    )
    tool.__annotations__ = {n: kinds.get(n, Any) for n in keywords}
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
