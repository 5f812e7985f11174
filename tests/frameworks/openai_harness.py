"""The conformance harness of ``runguard.openai_agents``: the SDK's ``Runner`` with a scripted ``Model``."""

import asyncio
import inspect
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

from agents import Agent, FunctionTool, RunConfig, Runner, SQLiteSession, set_tracing_disabled
from agents.items import ModelResponse
from agents.models.interface import Model
from agents.usage import Usage
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseTextDeltaEvent,
)
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails, ResponseUsage
from pydantic import BaseModel

from runguard.engine.guard import Controls
from runguard.openai_agents import AgentGuard
from runguard.testing.conformance import MODEL, AgentSpec, Harness, Reply, Session, TurnResult

_ids = itertools.count(1)
set_tracing_disabled(True)


class Answer(BaseModel):
    answer: int


class ScriptedModel(Model):
    """A model that follows a script."""

    def __init__(self, spec: AgentSpec, counter: list[int]) -> None:
        self.model = MODEL
        self._spec, self._counter, self._calls = spec, counter, 0

    def _reply(self, items: Any) -> Reply:
        self._counter[0] += 1
        self._calls += 1
        last = items if isinstance(items, str) else items[-1]
        newest = last if isinstance(last, str) else last.get("content", last.get("output", ""))
        reply = self._spec.script(self._calls, str(newest))
        if reply.error is not None:
            raise reply.error
        return reply

    async def get_response(self, system_instructions: Any, input: Any, *args: Any, **kwargs: Any) -> ModelResponse:  # noqa: A002
        await asyncio.sleep(0)
        reply = self._reply(input)
        if reply.waits:
            await asyncio.Event().wait()
        total = reply.input_tokens + reply.output_tokens
        usage = Usage(1, reply.input_tokens, output_tokens=reply.output_tokens, total_tokens=total)
        return ModelResponse(self._items(reply), usage, None)

    async def stream_response(
        self,
        system_instructions: Any,
        input: Any,  # noqa: A002
        *args: Any,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        reply = self._reply(input)
        if reply.cut:
            yield ResponseTextDeltaEvent(
                content_index=0,
                delta=reply.text,
                item_id="m",
                logprobs=[],
                output_index=0,
                sequence_number=0,
                type="response.output_text.delta",
            )
            raise ConnectionError("the stream broke off")
        usage = ResponseUsage(
            input_tokens=reply.input_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=0, cache_write_tokens=0),
            output_tokens=reply.output_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
            total_tokens=reply.input_tokens + reply.output_tokens,
        )
        response = Response(
            id="r",
            created_at=0.0,
            model=MODEL,
            object="response",
            output=self._items(reply),
            parallel_tool_calls=False,
            tool_choice="auto",
            tools=[],
            usage=usage,
        )
        yield ResponseCompletedEvent(response=response, sequence_number=1, type="response.completed")

    def _items(self, reply: Reply) -> list[Any]:
        agents = {inner.name for inner in self._spec.agents}
        for_agent = {"request": "input"}  # the SDK's name for what an agent as a tool is asked
        calls = [
            (tool, {for_agent.get(name, name): value for name, value in args.items()} if tool in agents else dict(args))
            for tool, args in reply.calls
        ]
        return [_call(tool, args) for tool, args in calls] or _said(reply)


def _said(reply: Reply) -> list[Any]:
    if reply.hand_off:
        return [_call(f"transfer_to_{reply.hand_off}", {})]
    text = ResponseOutputText(type="output_text", text=reply.text, annotations=[])
    message = ResponseOutputMessage(
        id=f"m{next(_ids)}", type="message", role="assistant", status="completed", content=[text]
    )
    return [message]


def _call(tool: str, args: dict[str, Any]) -> ResponseFunctionToolCall:
    return ResponseFunctionToolCall(
        arguments=json.dumps(args), call_id=f"call_{next(_ids)}", name=tool, type="function_call"
    )


class OpenAIAgentsSession(Session):
    def __init__(self, spec: AgentSpec, guard: AgentGuard | None) -> None:
        self._counter = [0]
        agent = self._build(spec)
        for target in spec.hand_offs:
            other = self._build(target)
            other.handoffs, agent.handoffs = [agent], [*agent.handoffs, other]
        self._agent = guard.guarded(agent) if guard is not None else agent
        self._session = SQLiteSession(f"s{next(_ids)}")

    @property
    def model_calls(self) -> int:
        return self._counter[0]

    def _build(self, spec: AgentSpec) -> Agent[Any]:
        tools: list[Any] = [_tool(function, name) for name, function in spec.tools.items()]
        tools += [self._build(inner).as_tool(inner.name, inner.name, max_turns=1_000) for inner in spec.agents]
        model = ScriptedModel(spec, self._counter)
        return Agent(name=spec.name, model=model, tools=tools, output_type=Answer if spec.structured else None)

    def play_now(self, message: str | None) -> TurnResult:
        raise NotImplementedError

    def moved(self, guard: Controls) -> Session:
        raise NotImplementedError

    async def play(self, message: str | None, *, stream: bool) -> TurnResult:
        if message is None:
            raise NotImplementedError
        result = TurnResult()
        known = len(await self._session.get_items())
        config = RunConfig(tracing_disabled=True)
        try:
            if stream:
                ran = Runner.run_streamed(
                    self._agent, message, session=self._session, max_turns=1_000, run_config=config
                )
                async for _ in ran.stream_events():
                    pass
                result.text = str(ran.final_output or "")
            else:
                done = await Runner.run(self._agent, message, session=self._session, max_turns=1_000, run_config=config)
                result.text = str(done.final_output)
        except Exception as error:
            result.error = error
        items: list[Any] = list(await self._session.get_items())
        result.events = [event for item in items[known:] for event in _events(item)]
        answered = {item["call_id"] for item in items if item.get("type") == "function_call_output"}
        result.open_calls = [
            item["call_id"] for item in items if item.get("type") == "function_call" and item["call_id"] not in answered
        ]
        return result


def _events(item: Any) -> list[tuple[str, str, str]]:
    kind = item.get("type")
    if kind == "function_call":
        return [("call", item["name"], item["arguments"])]
    if kind == "function_call_output":
        return [("answer", "", str(item["output"]))]
    return [("text", "", str(item.get("content")))] if item.get("role") == "assistant" else []


def _tool(function: Any, name: str) -> FunctionTool:
    names = [n for n, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD]
    schema = {"type": "object", "properties": {n: {} for n in names}, "additionalProperties": True}

    async def invoke(context: Any, args: str) -> Any:
        value = function(**json.loads(args or "{}"))
        value = await value if inspect.isawaitable(value) else value
        return value if isinstance(value, str) else json.dumps(value)

    return FunctionTool(name, name, schema, invoke, strict_json_schema=False)


class OpenAIAgentsHarness(Harness):
    name = "OpenAI Agents"

    def guard(self, **settings: Any) -> Controls:
        return AgentGuard(**settings)

    def session(self, agent: AgentSpec, guard: Controls | None) -> Session:
        assert guard is None or isinstance(guard, AgentGuard)
        return OpenAIAgentsSession(agent, guard)
