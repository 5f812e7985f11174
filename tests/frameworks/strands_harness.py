"""The conformance harness of ``runguard.strands``: an ``Agent`` with a scripted ``Model``."""

import asyncio
import inspect
import itertools
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import BaseModel
from strands import Agent, ToolContext, tool
from strands.models import Model
from strands.types.exceptions import EventLoopException

from runguard.engine.guard import Controls
from runguard.strands import RunGuard
from runguard.testing.conformance import MODEL, AgentSpec, AskAgainError, Harness, Session, TurnResult

_ids = itertools.count(1)


class Answer(BaseModel):
    answer: int


class ScriptedModel(Model):
    """A model that follows a script."""

    def __init__(self, spec: AgentSpec, counter: list[int]) -> None:
        self._spec, self._counter, self._made = spec, counter, 0

    def get_config(self) -> Any:
        return {"model_id": MODEL}

    def update_config(self, **_: Any) -> None:
        """Nothing can be set."""

    async def structured_output(self, *_: Any, **__: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        yield {}

    async def stream(
        self, messages: Any, tool_specs: Any = None, system_prompt: Any = None, **_: Any
    ) -> AsyncIterator[Any]:
        self._counter[0] += 1
        self._made += 1
        last = messages[-1]["content"][-1]
        newest = last.get("text") or json.dumps(last.get("toolResult", {}).get("content", ""))
        reply = self._spec.script(self._made, newest)
        if reply.error is not None:
            raise reply.error
        if reply.waits:
            await asyncio.Event().wait()
        yield {"messageStart": {"role": "assistant"}}
        for name, args in reply.calls:
            yield {"contentBlockStart": {"start": {"toolUse": {"toolUseId": f"t{next(_ids)}", "name": name}}}}
            yield {"contentBlockDelta": {"delta": {"toolUse": {"input": json.dumps(dict(args))}}}}
            yield {"contentBlockStop": {}}
        if not reply.calls:
            yield {"contentBlockStart": {"start": {}}}
            yield {"contentBlockDelta": {"delta": {"text": reply.text}}}
            if reply.cut:
                raise ConnectionError("the stream broke off")
            yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "tool_use" if reply.calls else "end_turn"}}
        usage = {
            "inputTokens": reply.input_tokens,
            "outputTokens": reply.output_tokens,
            "totalTokens": reply.input_tokens + reply.output_tokens,
        }
        yield {"metadata": {"usage": usage, "metrics": {"latencyMs": 1}}}


def _tool(name: str, function: Any, about: str, *, asks: bool = False) -> Any:
    """A tool of Strands. ``asks``: a human must approve each call."""
    given = inspect.signature(function).parameters
    names = [n for n, p in given.items() if p.kind is not p.VAR_KEYWORD] or (["doc"] if given else [])
    kinds = {n: {"type": "integer"} if function.__annotations__.get(n) is int else {} for n in names}

    def approved(context: ToolContext | None) -> None:
        if context is not None:
            context.interrupt("approve", reason=name)

    async def later(tool_context: ToolContext | None = None, **arguments: Any) -> Any:
        approved(tool_context)
        return await function(**arguments)

    def call(tool_context: ToolContext | None = None, **arguments: Any) -> Any:
        approved(tool_context)
        try:
            return function(**arguments)
        except AskAgainError as request:
            return {"status": "error", "content": [{"text": str(request)}]}

    made: Any = later if inspect.iscoroutinefunction(function) else call
    made.__name__ = name
    parameters = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, annotation=Any, default=None) for n in names]
    hints: dict[str, Any] = {n: int if kinds[n] else Any for n in names}
    parameters = [p.replace(annotation=hints[p.name]) for p in parameters]
    if asks:
        parameters.append(
            inspect.Parameter("tool_context", inspect.Parameter.KEYWORD_ONLY, annotation=ToolContext, default=None)
        )
        hints["tool_context"] = ToolContext
    made.__signature__ = inspect.Signature(parameters)
    made.__annotations__ = hints
    schema = {"json": {"type": "object", "properties": kinds}}
    return tool(name=name, description=about or name, inputSchema=schema, context="tool_context" if asks else False)(
        made
    )


class StrandsSession(Session):
    def __init__(self, spec: AgentSpec, guard: RunGuard | None, messages: list[Any] | None = None) -> None:
        self._counter, self._spec, self._guard = [0], spec, guard
        self._agent = self._build(spec)
        self._waiting: list[Any] = []

    @property
    def model_calls(self) -> int:
        return self._counter[0]

    def moved(self, guard: Controls) -> "StrandsSession":
        assert isinstance(guard, RunGuard)
        made = StrandsSession(self._spec, guard)
        made._agent.load_snapshot(self._agent.take_snapshot(preset="session"))
        made._waiting = self._waiting
        return made

    def _build(self, spec: AgentSpec) -> Agent:
        tools = [
            _tool(name, function, spec.about.get(name, ""), asks=name in spec.approvals)
            for name, function in spec.tools.items()
        ]
        tools += [self._as_tool(inner, spec.pooled) for inner in spec.agents]
        return Agent(
            model=ScriptedModel(spec, self._counter),
            name=spec.name,
            system_prompt=spec.instruction or None,
            tools=tools,
            plugins=[self._guard] if self._guard is not None else [],
            callback_handler=None,
            retry_strategy=None,
            structured_output_model=Answer if spec.structured else None,
        )

    def _as_tool(self, spec: AgentSpec, pooled: bool) -> Any:
        agent = self._build(spec)

        async def ask(request: str) -> str:
            return str(await agent.invoke_async(request))

        def ask_in_pool(request: str) -> str:
            with ThreadPoolExecutor(1) as pool:
                return str(pool.submit(agent, request).result())

        return _tool(spec.name, ask_in_pool if pooled else ask, "")

    def _prompt(self, message: str | None) -> Any:
        if message is not None:
            return message
        return [{"interruptResponse": {"interruptId": one.id, "response": "yes"}} for one in self._waiting]

    async def play(self, message: str | None, *, stream: bool) -> TurnResult:
        result, known = TurnResult(), len(self._agent.messages)
        try:
            if stream:
                done = None
                async for event in self._agent.stream_async(self._prompt(message)):
                    done = event.get("result", done)
            else:
                done = await self._agent.invoke_async(self._prompt(message))
        except Exception as error:
            result.error = error.original_exception if isinstance(error, EventLoopException) else error
            return self._left(result, known, None)
        return self._left(result, known, done)

    def play_now(self, message: str | None) -> TurnResult:
        result, known = TurnResult(), len(self._agent.messages)
        try:
            done = self._agent(self._prompt(message))
        except Exception as error:
            result.error = error.original_exception if isinstance(error, EventLoopException) else error
            return self._left(result, known, None)
        return self._left(result, known, done)

    def _left(self, result: TurnResult, known: int, done: Any) -> TurnResult:
        if done is not None:
            self._waiting = list(done.interrupts or ())
            result.waits = done.stop_reason == "interrupt"
            result.text = "" if result.waits else str(done).strip()
            result.spent = done.state.get("runguard")
        messages: list[Any] = list(self._agent.messages)
        for message in messages[known:]:
            for block in message["content"]:
                if "toolUse" in block:
                    result.events.append(("call", block["toolUse"]["name"], json.dumps(block["toolUse"]["input"])))
                elif "toolResult" in block:
                    result.events.append(("answer", "", json.dumps(block["toolResult"]["content"])))
                elif message["role"] == "assistant":
                    result.events.append(("text", "", block.get("text", "")))
        blocks = [block for message in messages for block in message["content"]]
        answered = {block["toolResult"]["toolUseId"] for block in blocks if "toolResult" in block}
        asked = [block["toolUse"]["toolUseId"] for block in blocks if "toolUse" in block]
        result.open_calls = [call for call in asked if call not in answered]
        return result


class StrandsHarness(Harness):
    name = "Strands"
    impossible = {  # noqa: RUF012
        "hand_off_cycle": "Strands agents have no hand-offs: a tool calls another agent, and that is nested.",
    }

    def guard(self, **settings: Any) -> Controls:
        return RunGuard(**settings)

    def session(self, agent: AgentSpec, guard: Controls | None) -> Session:
        assert guard is None or isinstance(guard, RunGuard)
        return StrandsSession(agent, guard)
