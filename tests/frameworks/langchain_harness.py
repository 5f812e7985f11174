"""The conformance harness of ``runguard.langchain``: ``create_agent`` with a scripted chat model."""

import asyncio
import inspect
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.tools import StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel, PrivateAttr

from runguard.engine.guard import Controls
from runguard.langchain import RunGuardMiddleware
from runguard.testing.conformance import MODEL, AgentSpec, Harness, Reply, Script, Session, TurnResult

_ids = itertools.count(1)


class Answer(BaseModel):
    answer: int


class ScriptedChat(BaseChatModel):
    """A chat model that follows a script."""

    model: str = MODEL
    _script: Script = PrivateAttr()
    _counter: list[int] = PrivateAttr()
    _calls: int = PrivateAttr(default=0)

    def __init__(self, script: Script, counter: list[int]) -> None:
        super().__init__()
        self._script, self._counter = script, counter

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self

    def _reply(self, messages: list[BaseMessage]) -> Reply:
        self._counter[0] += 1
        self._calls += 1
        reply = self._script(self._calls, str(messages[-1].content))
        if reply.error is not None:
            raise reply.error
        return reply

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=_message(self._reply(messages)))])

    async def _agenerate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any
    ) -> ChatResult:
        await asyncio.sleep(0)
        reply = self._reply(messages)
        if reply.waits:
            await asyncio.Event().wait()
        return ChatResult(generations=[ChatGeneration(message=_message(reply))])

    async def _astream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        reply = self._reply(messages)
        message = _message(reply)
        if reply.cut:
            yield ChatGenerationChunk(message=AIMessageChunk(content=reply.text))
            raise ConnectionError("the stream broke off")
        yield ChatGenerationChunk(
            message=AIMessageChunk(
                content=message.content, tool_calls=message.tool_calls, usage_metadata=message.usage_metadata
            )
        )


def _message(reply: Reply) -> AIMessage:
    calls = [{"name": tool, "args": dict(args), "id": f"call_{next(_ids)}"} for tool, args in reply.calls]
    total = reply.input_tokens + reply.output_tokens
    usage = {"input_tokens": reply.input_tokens, "output_tokens": reply.output_tokens, "total_tokens": total}
    return AIMessage(content=reply.text, tool_calls=calls, usage_metadata=usage)


class LangChainSession(Session):
    def __init__(self, spec: AgentSpec, guard: RunGuardMiddleware | None) -> None:
        self._counter = [0]
        self._guard = guard
        self._agent: Any = self._build(spec, InMemorySaver())
        self._config: Any = {"configurable": {"thread_id": f"thread-{next(_ids)}"}, "recursion_limit": 1_000}

    def _build(self, spec: AgentSpec, saver: Any) -> Any:
        tools = [_tool(f, name) for name, f in spec.tools.items()]
        tools += [self._as_tool(inner) for inner in spec.agents]
        return create_agent(
            ScriptedChat(spec.script, self._counter),
            tools,
            middleware=[self._guard] if self._guard is not None else [],
            checkpointer=saver,
            name=spec.name,
            response_format=Answer if spec.structured else None,
        )

    def _as_tool(self, spec: AgentSpec) -> StructuredTool:
        agent = self._build(spec, None)

        async def ask(request: str) -> str:
            result = await agent.ainvoke({"messages": [HumanMessage(request)]}, {"recursion_limit": 1_000})
            return str(result["messages"][-1].content)

        return StructuredTool.from_function(coroutine=ask, name=spec.name, description=spec.name)

    @property
    def model_calls(self) -> int:
        return self._counter[0]

    def play_now(self, message: str | None) -> TurnResult:
        raise NotImplementedError

    def moved(self, guard: Controls) -> Session:
        raise NotImplementedError

    async def play(self, message: str | None, *, stream: bool) -> TurnResult:
        if message is None:
            raise NotImplementedError
        result = TurnResult()
        known = len(self._messages())
        try:
            asked = {"messages": [HumanMessage(message)]}
            if stream:
                async for _ in self._agent.astream(asked, self._config, stream_mode="messages"):
                    pass
            else:
                await self._agent.ainvoke(asked, self._config)
        except Exception as error:
            result.error = error
        messages = self._messages()
        for one in messages[known:]:
            result.events += _events(one)
        last = messages[-1] if messages else None
        result.text = str(last.content) if isinstance(last, AIMessage) and not last.tool_calls else ""
        answered = {one.tool_call_id for one in messages if isinstance(one, ToolMessage)}
        asked_for = [call["id"] for one in messages if isinstance(one, AIMessage) for call in one.tool_calls]
        result.open_calls = [str(call) for call in asked_for if call not in answered]
        return result

    def _messages(self) -> list[BaseMessage]:
        return list(self._agent.get_state(self._config).values.get("messages", []))


def _events(message: BaseMessage) -> list[tuple[str, str, str]]:
    if isinstance(message, AIMessage):
        calls = [("call", call["name"], json.dumps(call["args"])) for call in message.tool_calls]
        return calls or [("text", "", str(message.content))]
    if isinstance(message, ToolMessage):
        return [("answer", str(message.name), str(message.content))]
    return []


def _named(function: Any, name: str) -> Any:
    def tool(**kwargs: Any) -> Any:
        value = function(**kwargs)
        return value if isinstance(value, str) else json.dumps(value)

    tool.__name__ = name
    return tool


def _tool(function: Any, name: str) -> StructuredTool:
    kind = "coroutine" if inspect.iscoroutinefunction(function) else "func"
    given: dict[str, Any] = {kind: function if kind == "coroutine" else _named(function, name)}
    return StructuredTool.from_function(**given, name=name, description=name, args_schema=_schema(function))


def _schema(function: Any) -> dict[str, Any]:
    names = [name for name, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD]
    return {"type": "object", "properties": {name: {} for name in names}, "additionalProperties": True}


class LangChainHarness(Harness):
    name = "LangChain"
    impossible = {  # noqa: RUF012
        "hand_off_cycle": "LangChain has no hand-offs between agents: a tool calls another agent, and that is nested.",
    }

    def guard(self, **settings: Any) -> Controls:
        return RunGuardMiddleware(**settings)

    def session(self, agent: AgentSpec, guard: Controls | None) -> Session:
        assert guard is None or isinstance(guard, RunGuardMiddleware)
        return LangChainSession(agent, guard)
