"""The conformance harness of ``runguard.openai_agents``: the SDK's ``Runner`` with a scripted ``Model``."""

import asyncio
import inspect
import itertools
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agents import (
    Agent,
    FunctionTool,
    RunConfig,
    Runner,
    RunState,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
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
from runguard.testing.conformance import MODEL, AgentSpec, AskAgainError, Harness, Reply, Session, TurnResult

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
        if reply.waits:
            await asyncio.Event().wait()
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


async def drained(streamed: Any) -> Any:
    """Read a streamed run to its end."""
    async for _ in streamed.stream_events():
        pass
    return streamed


async def played(agent: Agent[Any], given: Any, way: str, **settings: Any) -> Any:
    """Run an agent in one way of the SDK: "run" or "run_streamed"."""
    if way == "run":
        return await Runner.run(agent, given, **settings)
    return await drained(Runner.run_streamed(agent, given, **settings))


class OpenAIAgentsSession(Session):
    def __init__(
        self,
        spec: AgentSpec,
        guard: AgentGuard | None,
        memory: SQLiteSession | None = None,
        stored: dict[str, Any] | None = None,
    ) -> None:
        """``memory`` and ``stored``: the history, and the state of a turn that waits, when the conversation goes on."""
        self._counter, self._spec, self._guard = [0], spec, guard
        agent = self._build(spec)
        for target in spec.hand_offs:
            other = self._build(target)
            other.handoffs, agent.handoffs = [agent], [*agent.handoffs, other]
        self._agent = guard.guarded(agent) if guard is not None else agent
        self._memory = memory or SQLiteSession(f"s{next(_ids)}")
        self._waiting: Any = None  # the result of a turn that waits
        self._stored = stored

    def moved(self, guard: Controls) -> "OpenAIAgentsSession":
        assert isinstance(guard, AgentGuard)
        stored = json.loads(json.dumps(self._waiting.to_state().to_json()))
        return OpenAIAgentsSession(self._spec, guard, self._memory, stored)

    @property
    def model_calls(self) -> int:
        return self._counter[0]

    def _build(self, spec: AgentSpec) -> Agent[Any]:
        tools: list[Any] = [
            _tool(function, name, spec.about.get(name, name), needs_approval=name in spec.approvals)
            for name, function in spec.tools.items()
        ]
        for inner in spec.agents:
            agent = self._build(inner)
            tools.append(_pooled(agent) if spec.pooled else agent.as_tool(inner.name, inner.name, max_turns=1_000))
        return Agent(
            name=spec.name,
            instructions=spec.instruction or None,
            model=ScriptedModel(spec, self._counter),
            tools=tools,
            output_type=Answer if spec.structured else None,
        )

    async def play(self, message: str | None, *, stream: bool) -> TurnResult:
        result, known = TurnResult(), len(await self._memory.get_items())
        done: Any = None
        given = await self._given(message)
        try:
            if stream:
                done = Runner.run_streamed(self._agent, given, **self._settings)
                await drained(done)
            else:
                done = await Runner.run(self._agent, given, **self._settings)
        except Exception as error:
            result.error = error
        return self._left(result, done, known, list(await self._memory.get_items()))

    def play_now(self, message: str | None) -> TurnResult:
        result, known, done = TurnResult(), len(asyncio.run(self._memory.get_items())), None
        given = asyncio.run(self._given(message))
        try:
            done = Runner.run_sync(self._agent, given, **self._settings)
        except Exception as error:
            result.error = error
        return self._left(result, done, known, list(asyncio.run(self._memory.get_items())))

    @property
    def _settings(self) -> dict[str, Any]:
        return {"session": self._memory, "max_turns": 1_000, "run_config": RunConfig(**_CONFIG)}

    async def _given(self, message: str | None) -> Any:
        if message is not None:
            return message
        state: Any = self._waiting.to_state() if self._stored is None else None
        if state is None:
            state, self._stored = await RunState.from_json(self._agent, self._stored or {}), None
        for item in state.get_interruptions():
            state.approve(item)
        return state

    def _left(self, result: TurnResult, done: Any, known: int, items: list[Any]) -> TurnResult:
        self._waiting = done
        if done is not None and result.error is None:
            result.waits = bool(done.interruptions)
            result.text = str(done.final_output or "")
            result.spent = self._guard.spent(done).to_dict() if self._guard is not None else None
        result.events = [event for item in items[known:] for event in _events(item)]
        answered = {item["call_id"] for item in items if item.get("type") == "function_call_output"}
        result.open_calls = [
            item["call_id"] for item in items if item.get("type") == "function_call" and item["call_id"] not in answered
        ]
        return result


_CONFIG: dict[str, Any] = {"tracing_disabled": True}
if "tool_not_found_behavior" in RunConfig.__dataclass_fields__:  # else an unknown tool ends the run
    _CONFIG["tool_not_found_behavior"] = "return_error_to_model"


def _events(item: Any) -> list[tuple[str, str, str]]:
    kind = item.get("type")
    if kind == "function_call":
        return [("call", item["name"], item["arguments"])]
    if kind == "function_call_output":
        return [("answer", "", str(item["output"]))]
    return [("text", "", str(item.get("content")))] if item.get("role") == "assistant" else []


def _tool(function: Any, name: str, about: str, *, needs_approval: bool) -> FunctionTool:
    """A function with the plain keywords of the scenario's."""
    names = [n for n, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD]
    kinds = {n: function.__annotations__.get(n, Any) for n in names}

    async def tool(**kwargs: Any) -> str:
        try:
            value = function(**kwargs)
        except AskAgainError as request:  # the SDK has no request of its own
            raise ValueError(str(request)) from None
        value = await value if inspect.isawaitable(value) else value
        return value if isinstance(value, str) else json.dumps(value)

    made: Any = tool
    made.__signature__ = inspect.Signature(
        [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, annotation=kinds[n]) for n in names]
    )
    made.__annotations__ = kinds
    decorate: Any = function_tool(
        name_override=name, description_override=about, strict_mode=False, needs_approval=needs_approval
    )
    found: FunctionTool = decorate(made)
    return found


def _pooled(agent: Agent[Any]) -> FunctionTool:
    """A tool that runs an agent in a thread pool of its own."""

    def call(input: str) -> str:  # noqa: A002 - the name that an agent as a tool has for it
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(lambda: Runner.run_sync(agent, input, max_turns=1_000))
            return str(done.result().final_output)

    return function_tool(name_override=agent.name)(call)


class OpenAIAgentsHarness(Harness):
    name = "OpenAI Agents"

    def guard(self, **settings: Any) -> Controls:
        return AgentGuard(**settings)

    def session(self, agent: AgentSpec, guard: Controls | None) -> Session:
        assert guard is None or isinstance(guard, AgentGuard)
        return OpenAIAgentsSession(agent, guard)
