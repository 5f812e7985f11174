"""The conformance harness of ``runguard.agent_framework``: an ``Agent`` with a scripted chat client."""

import asyncio
import inspect
import itertools
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agent_framework import (
    Agent,
    AgentSession,
    BaseChatClient,
    ChatMiddlewareLayer,
    ChatResponse,
    ChatResponseUpdate,
    Content,
    FunctionInvocationLayer,
    FunctionTool,
    Message,
)
from pydantic import BaseModel

from runguard.agent_framework import RunGuard
from runguard.engine.guard import Controls
from runguard.testing.conformance import MODEL, AgentSpec, Harness, Reply, Session, TurnResult

_ids = itertools.count(1)


class Answer(BaseModel):
    answer: int


class ScriptedClient(FunctionInvocationLayer, ChatMiddlewareLayer, BaseChatClient):
    """A model that follows a script."""

    def __init__(self, spec: AgentSpec, counter: list[int]) -> None:
        # the framework itself takes the tools away after three errors in a row, and after 40 calls
        super().__init__(
            function_invocation_configuration={"max_consecutive_errors_per_request": 1_000, "max_iterations": 1_000}
        )
        self.model, self._spec, self._counter, self._made = MODEL, spec, counter, 0

    def _inner_get_response(
        self, *, messages: Sequence[Message], stream: bool, options: Mapping[str, Any], **_: Any
    ) -> Any:
        if stream:
            return self._build_response_stream(self._pieces(messages))
        return self._whole(messages)

    def _reply(self, messages: Sequence[Message]) -> Reply:
        self._counter[0] += 1
        self._made += 1
        last = messages[-1].contents[-1]
        reply = self._spec.script(self._made, last.text or json.dumps(last.result if last.result is not None else ""))
        if reply.error is not None:
            raise reply.error
        return reply

    @staticmethod
    def _contents(reply: Reply) -> list[Content]:
        if not reply.calls:
            return [Content.from_text(reply.text)]
        return [
            Content.from_function_call(f"t{next(_ids)}", name, arguments=json.dumps(dict(args)))
            for name, args in reply.calls
        ]

    async def _whole(self, messages: Sequence[Message]) -> ChatResponse[Any]:
        reply = self._reply(messages)
        if reply.waits:
            await asyncio.Event().wait()
        if reply.cut:
            raise ConnectionError("the answer broke off")
        usage: Any = {"input_token_count": reply.input_tokens, "output_token_count": reply.output_tokens}
        message = Message(role="assistant", contents=self._contents(reply))
        return ChatResponse(messages=[message], model=MODEL, usage_details=usage)

    async def _pieces(self, messages: Sequence[Message]) -> AsyncIterator[ChatResponseUpdate]:
        reply = self._reply(messages)
        if reply.waits:
            await asyncio.Event().wait()
        yield ChatResponseUpdate(role="assistant", contents=self._contents(reply), model=MODEL)
        if reply.cut:
            raise ConnectionError("the stream broke off")
        usage: Any = {"input_token_count": reply.input_tokens, "output_token_count": reply.output_tokens}
        yield ChatResponseUpdate(role="assistant", contents=[Content.from_usage(usage)])


def _tool(name: str, function: Any, about: str, *, asks: bool = False) -> FunctionTool:
    given = inspect.signature(function).parameters
    names = [n for n, p in given.items() if p.kind is not p.VAR_KEYWORD] or (["doc"] if given else [])
    kinds = {n: {"type": "integer"} if function.__annotations__.get(n) is int else {} for n in names}

    async def later(**arguments: Any) -> Any:
        return await function(**arguments)

    def call(**arguments: Any) -> Any:
        return function(**arguments)

    return FunctionTool(
        name=name,
        description=about or name,
        func=later if inspect.iscoroutinefunction(function) else call,
        input_model={"type": "object", "properties": kinds},
        approval_mode="always_require" if asks else "never_require",
    )


class AgentFrameworkSession(Session):
    def __init__(self, spec: AgentSpec, guard: RunGuard | None, session: AgentSession | None = None) -> None:
        self._counter, self._spec, self._guard = [0], spec, guard
        self.agent = self._build(spec)
        self._session = session or self.agent.create_session()
        self._waiting: list[Content] = []

    @property
    def model_calls(self) -> int:
        return self._counter[0]

    def moved(self, guard: Controls) -> "AgentFrameworkSession":
        assert isinstance(guard, RunGuard)
        made = AgentFrameworkSession(self._spec, guard, AgentSession.from_dict(self._session.to_dict()))
        made._waiting = self._waiting
        return made

    def _build(self, spec: AgentSpec) -> Agent:
        tools = [
            _tool(name, function, spec.about.get(name, ""), asks=name in spec.approvals)
            for name, function in spec.tools.items()
        ]
        for inner in spec.agents:
            agent = self._build(inner)
            tools.append(self._pooled(agent) if spec.pooled else agent.as_tool(arg_name="request"))
        options: Any = {"response_format": Answer} if spec.structured else None
        return Agent(
            ScriptedClient(spec, self._counter),
            name=spec.name,
            instructions=spec.instruction or None,
            tools=tools,
            middleware=[self._guard] if self._guard is not None else None,
            default_options=options,
        )

    @staticmethod
    def _pooled(agent: Agent) -> FunctionTool:
        def ask(request: str) -> str:
            with ThreadPoolExecutor(1) as pool:
                return str(pool.submit(lambda: asyncio.run(agent.run(request))).result().text)  # type: ignore[arg-type]

        return _tool(agent.name or "", ask, "")

    def _prompt(self, message: str | None) -> Any:
        if message is not None:
            return message
        return Message(role="user", contents=[one.to_function_approval_response(True) for one in self._waiting])

    async def play(self, message: str | None, *, stream: bool) -> TurnResult:
        result = TurnResult()
        known = len(self._history())
        try:
            if stream:
                answers = self.agent.run(self._prompt(message), session=self._session, stream=True)
                async for _ in answers:
                    pass
                done = await answers.get_final_response()
            else:
                done = await self.agent.run(self._prompt(message), session=self._session)
            result.text = done.text
        except Exception as error:
            result.error = error
            return self._left(result, known, None)
        return self._left(result, known, done)

    def play_now(self, message: str | None) -> TurnResult:
        raise AssertionError("Agent Framework has no synchronous entry")

    def _history(self) -> list[Message]:
        return next((held["messages"] for held in self._session.state.values() if "messages" in held), [])

    def _left(self, result: TurnResult, known: int, done: Any) -> TurnResult:
        if done is not None:
            self._waiting = list(done.user_input_requests)
            result.waits = bool(self._waiting)
            result.text = "" if result.waits else done.text
            result.spent = done.additional_properties.get("runguard")
        history = self._history()
        for message in history[known:]:
            for content in message.contents:
                if content.type == "function_call":
                    result.events.append(("call", content.name or "", json.dumps(content.parse_arguments())))
                elif content.type == "function_result":
                    result.events.append(("answer", "", json.dumps(content.result)))
                elif content.type == "text" and message.role == "assistant":
                    result.events.append(("text", "", content.text or ""))
        contents = [content for message in history for content in message.contents]
        answered = {one.call_id for one in contents if one.type == "function_result"}
        asked = [one.call_id for one in contents if one.type == "function_call"]
        result.open_calls = [call for call in asked if call and call not in answered]
        return result


class AgentFrameworkHarness(Harness):
    name = "Agent Framework"
    impossible = {  # noqa: RUF012
        ":sync": "Agent Framework has no synchronous entry.",
        "hand_off_cycle": "Agent Framework has no hand-offs: a workflow connects agents, each with its own run.",
    }

    def guard(self, **settings: Any) -> Controls:
        return RunGuard(**settings)

    def session(self, agent: AgentSpec, guard: Controls | None) -> Session:
        assert guard is None or isinstance(guard, RunGuard)
        return AgentFrameworkSession(agent, guard)
