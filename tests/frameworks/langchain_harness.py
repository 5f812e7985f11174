"""The conformance harness of ``runguard.langchain``: ``create_agent`` with a scripted chat model."""

import asyncio
import inspect
import itertools
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.tools import StructuredTool, ToolException
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command, interrupt
from pydantic import BaseModel, PrivateAttr, create_model

from runguard.engine.guard import Controls
from runguard.langchain import RunGuardMiddleware
from runguard.testing.conformance import MODEL, AgentSpec, AskAgainError, Harness, Reply, Script, Session, TurnResult

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
        if reply.waits:
            await asyncio.Event().wait()
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


async def called(model: Any, given: Any, way: str, **options: Any) -> Any:
    """Call a model or an agent in one of its four ways."""
    if way == "invoke":
        return model.invoke(given, **options)
    if way == "ainvoke":
        return await model.ainvoke(given, **options)
    if way == "stream":
        return list(model.stream(given, **options))
    return [piece async for piece in model.astream(given, **options)]


class LangChainSession(Session):
    def __init__(
        self, spec: AgentSpec, guard: RunGuardMiddleware | None, stored: tuple[Any, Any] | None = None
    ) -> None:
        """``stored``: where the conversation is, when it goes on."""
        self._counter, self._spec, self._guard = [0], spec, guard
        configurable = {"configurable": {"thread_id": f"thread-{next(_ids)}"}, "recursion_limit": 1_000}
        self._stored = stored or (InMemorySaver(), configurable)
        self._agent: Any = self._build(spec, self._stored[0])
        self._config = self._stored[1]

    def moved(self, guard: Controls) -> "LangChainSession":
        assert isinstance(guard, RunGuardMiddleware)
        return LangChainSession(self._spec, guard, self._stored)

    def _build(self, spec: AgentSpec, saver: Any) -> Any:
        tools = [
            _tool(function, name, spec.about.get(name, name), asks=name in spec.approvals)
            for name, function in spec.tools.items()
        ]
        tools += [self._as_tool(inner, pooled=spec.pooled) for inner in spec.agents]
        return create_agent(
            ScriptedChat(spec.script, self._counter),
            tools,
            middleware=[self._guard] if self._guard is not None else [],
            checkpointer=saver,
            name=spec.name,
            system_prompt=spec.instruction or None,
            response_format=Answer if spec.structured else None,
        )

    def _as_tool(self, spec: AgentSpec, *, pooled: bool) -> StructuredTool:
        agent = self._build(spec, None)

        async def ask(request: str) -> str:
            result = await agent.ainvoke({"messages": [HumanMessage(request)]}, {"recursion_limit": 1_000})
            return str(result["messages"][-1].content)

        def ask_now(request: str) -> str:
            result = agent.invoke({"messages": [HumanMessage(request)]}, {"recursion_limit": 1_000})
            return str(result["messages"][-1].content)

        def ask_in_pool(request: str) -> str:
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(ask_now, request).result()

        if pooled:
            return StructuredTool.from_function(ask_in_pool, name=spec.name, description=spec.name)
        return StructuredTool.from_function(ask_now, ask, name=spec.name, description=spec.name)

    @property
    def model_calls(self) -> int:
        return self._counter[0]

    async def play(self, message: str | None, *, stream: bool) -> TurnResult:
        result, known = TurnResult(), len(self._messages())
        try:
            if stream:
                async for _ in self._agent.astream(_asked(message), self._config, stream_mode="messages"):
                    pass
            else:
                await self._agent.ainvoke(_asked(message), self._config)
        except Exception as error:
            result.error = error
        return self._left(result, known)

    def play_now(self, message: str | None) -> TurnResult:
        result, known = TurnResult(), len(self._messages())
        try:
            self._agent.invoke(_asked(message), self._config)
        except Exception as error:
            result.error = error
        return self._left(result, known)

    def _left(self, result: TurnResult, known: int) -> TurnResult:
        state = self._agent.get_state(self._config)
        messages = self._messages()
        result.waits = bool(state.interrupts)
        bill = self._guard.bill(state.values) if self._guard is not None else None
        result.spent = bill.to_dict() if bill is not None else None
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


def _asked(message: str | None) -> Any:
    return Command(resume="yes") if message is None else {"messages": [HumanMessage(message)]}


def _named(function: Any, name: str, *, asks: bool) -> Any:
    def tool(**kwargs: Any) -> Any:
        if asks:
            interrupt(f"may I call {name}?")
        try:
            value = function(**kwargs)
        except AskAgainError as error:
            raise ToolException(str(error)) from None
        return value if isinstance(value, str) else json.dumps(value)

    tool.__name__ = name
    return tool


def _tool(function: Any, name: str, about: str, *, asks: bool) -> StructuredTool:
    kind = "coroutine" if inspect.iscoroutinefunction(function) else "func"
    given: dict[str, Any] = {kind: function if kind == "coroutine" else _named(function, name, asks=asks)}
    return StructuredTool.from_function(
        **given, name=name, description=about, args_schema=_schema(function), handle_tool_error=True
    )


def _schema(function: Any) -> Any:
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    if parameters and all(p.annotation in (int, str) for p in parameters):
        fields: dict[str, Any] = {p.name: (p.annotation, ...) for p in parameters}
        return create_model("Arguments", **fields)
    return {"type": "object", "properties": {p.name: {} for p in parameters}, "additionalProperties": True}


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
