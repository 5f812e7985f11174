"""``GuardedChatModel``: a chat model with a guard around it, for graphs that take no middleware."""

import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Final, Unpack

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.config import get_config
from pydantic import PrivateAttr

from runguard.calls.model_calls import Permission, ToolUse
from runguard.calls.run import AgentRun, fitting
from runguard.core.decision import Trip
from runguard.core.errors import PolicyError, RunStoppedError
from runguard.engine.guard import Controls, Guard
from runguard.langchain.messages import (
    answer_size,
    answered_by,
    calls_of,
    last_message,
    limit_key,
    model_name,
    notice_message,
    request_of,
    usage_of,
)
from runguard.policy.settings import Policy, PolicySettings
from runguard.termination.conditions import Ended, TerminationCondition

_TURNS_KEPT: Final = 1_024
# The outer model reports to the callbacks. Reports of the inner one would appear twice in a stream of messages.
_QUIET: Final[RunnableConfig] = {"callbacks": []}


class GuardedChatModel(Controls, BaseChatModel):
    """``GuardedChatModel(ChatOpenAI(...), max_usd=1.50)``, in a ``StateGraph`` of your own.

    A run lasts from a human message to the answer that calls no tool. Tools are seen in the next request, so a tool
    call cannot be refused; the run is stopped before its next model call. A stop is an ``AIMessage`` without tool
    calls; ``on_stop="raise"`` raises the typed error instead. The keywords are those of ``RunGuardPlugin``.
    """

    _inner: Any = PrivateAttr()
    _guard: Guard = PrivateAttr()
    _model: BaseChatModel = PrivateAttr()
    _whom: dict[str, Any] = PrivateAttr()
    _turns: Any = PrivateAttr(default_factory=OrderedDict)  # id of the human message -> the message and its run
    _lock: Any = PrivateAttr(default_factory=threading.Lock)

    def __init__(
        self,
        model: BaseChatModel,
        *,
        app: str = "",
        user: str = "",
        termination_condition: TerminationCondition | None = None,
        **policy: Unpack[PolicySettings],
    ) -> None:
        if not isinstance(model, BaseChatModel):
            raise PolicyError(f"GuardedChatModel({model!r}): give a chat model of LangChain")
        super().__init__()
        self._inner = self._model = model
        self._guard = Guard(Policy.build(**policy))
        self._guard.check_store()
        condition = fitting(termination_condition, "LangChain", has_hand_offs=False)
        self._whom = {"app": app, "user": user, "condition": condition}

    @property
    def guard(self) -> Guard:  # type: ignore[override]
        return self._guard

    @property
    def _llm_type(self) -> str:
        return "runguard"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Runnable[Any, AIMessage]:
        """The guarded model with tools. Both share one guard."""
        made = self.model_copy()
        made.__pydantic_private__ = dict(self.__pydantic_private__ or {})
        made._inner = self._inner.bind_tools(tools, **kwargs)
        return made

    # ---- calls ------------------------------------------------------------------------------------------------------

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        run, key = self._turn(messages)
        permission = run.ask_now(lambda: request_of(self._model, messages, kwargs, kwargs))
        if not isinstance(permission, Permission):
            return _result(self._stopped(permission, key))
        asked, options = permission.changed(self._changed, (messages, kwargs))
        try:
            with permission.being_made():
                message = self._inner.invoke(asked, _QUIET, stop=stop, **options)
        except BaseException as error:
            permission.fail(error)
            raise
        permission.read(lambda one, answer: self._settle(one, answer, key), message)
        return _result(message)

    async def _agenerate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        run, key = self._turn(messages)
        permission = await run.ask(lambda: request_of(self._model, messages, kwargs, kwargs))
        if not isinstance(permission, Permission):
            return _result(self._stopped(permission, key))
        asked, options = permission.changed(self._changed, (messages, kwargs))
        try:
            message = await permission.during(self._inner.ainvoke(asked, _QUIET, stop=stop, **options))
        except BaseException as error:
            permission.fail(error)
            if (trip := permission.interrupted) is not None:
                return _result(self._stopped(trip, key))
            raise
        permission.read(lambda one, answer: self._settle(one, answer, key), message)
        return _result(message)

    def _stream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        run, key = self._turn(messages)
        permission = run.ask_now(lambda: request_of(self._model, messages, kwargs, kwargs))
        if not isinstance(permission, Permission):
            yield _chunk(self._stopped(permission, key))
            return
        asked, options = permission.changed(self._changed, (messages, kwargs))
        whole: Any = None
        try:
            for piece in permission.pieces_now(self._inner.stream(asked, _QUIET, stop=stop, **options)):
                whole = piece if whole is None else whole + piece
                yield ChatGenerationChunk(message=piece)
        except BaseException as error:
            permission.fail(error, answer_size(whole) if whole is not None else 0, streaming=True)
            raise
        permission.read(lambda one, answer: self._settle(one, answer, key), whole)

    async def _astream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        run, key = self._turn(messages)
        permission = await run.ask(lambda: request_of(self._model, messages, kwargs, kwargs))
        if not isinstance(permission, Permission):
            yield _chunk(self._stopped(permission, key))
            return
        asked, options = permission.changed(self._changed, (messages, kwargs))
        whole: Any = None
        try:
            async for piece in permission.pieces(self._inner.astream(asked, _QUIET, stop=stop, **options)):
                whole = piece if whole is None else whole + piece
                yield ChatGenerationChunk(message=piece)
            if (trip := permission.interrupted) is not None:
                permission.fail(None, answer_size(whole) if whole is not None else 0, streaming=True)
                yield _chunk(self._stopped(trip, key))
                return
        except BaseException as error:
            permission.fail(error, answer_size(whole) if whole is not None else 0, streaming=True)
            raise
        permission.read(lambda one, answer: self._settle(one, answer, key), whole)

    # ---- the run of a turn ------------------------------------------------------------------------------------------

    def _turn(self, messages: list[BaseMessage]) -> tuple[AgentRun, Any]:
        """The run of the newest human message, which has seen the answers since the last model call."""
        human = next((one for one in reversed(messages) if isinstance(one, HumanMessage)), None)
        key = human.id or id(human) if human is not None else None
        with self._lock:
            known = self._turns.get(key)
            if known is None or key is None:
                run = AgentRun.start(self._guard, "model", session=_thread(), **self._whom)
                self._turns[key] = (human, run)
                if len(self._turns) > _TURNS_KEPT:
                    self._turns.popitem(last=False)[1][1].end()
            else:
                run = known[1]
        for use, value in _newest_answers(messages):
            run.tools.saw(use, value)
        return run, key

    def _changed(
        self, permission: Permission, request: tuple[list[BaseMessage], dict[str, Any]]
    ) -> tuple[list[BaseMessage], dict[str, Any]]:
        messages, kwargs = request
        if permission.notice:
            messages = [*messages, notice_message(permission.notice)]
        if (limit := permission.max_output_tokens) is not None:
            kwargs = {**kwargs, limit_key(self._model): limit}
        return messages, kwargs

    def _settle(self, permission: Permission, message: Any, key: Any) -> None:
        if message is None:
            permission.fail(None)
            return
        calls = calls_of(message)
        permission.settle(
            usage_of(message), model=answered_by(message) or model_name(self._model), calls=calls,
            text=str(message.text), size=answer_size(message),
        )  # fmt: skip
        if not calls:
            self._end(key)

    def _stopped(self, end: Trip | Ended, key: Any) -> AIMessage:
        self._end(key)
        if self._guard.policy.on_stop == "raise" and isinstance(end, Trip):
            raise RunStoppedError.of(end)
        return last_message(self._guard, end)

    def _end(self, key: Any) -> None:
        with self._lock:
            known = self._turns.pop(key, None)
        if known is not None:
            known[1].end()


def _newest_answers(messages: list[BaseMessage]) -> Iterator[tuple[ToolUse, object]]:
    """The tool messages after the last answer of the model, each with the call that it answers."""
    answers: list[ToolMessage] = []
    for message in reversed(messages):
        if isinstance(message, AIMessage):
            asked = {use.id: use for use in calls_of(message)}
            yield from (
                (asked[one.tool_call_id], one.content) for one in reversed(answers) if one.tool_call_id in asked
            )
            return
        if isinstance(message, ToolMessage):
            answers.append(message)


def _thread() -> str:
    try:
        return str(get_config().get("configurable", {}).get("thread_id") or "")
    except RuntimeError:  # not inside a graph
        return ""


def _result(message: Any) -> ChatResult:
    return ChatResult(generations=[ChatGeneration(message=message)])


def _chunk(message: AIMessage) -> ChatGenerationChunk:
    return ChatGenerationChunk(
        message=AIMessageChunk(content=message.content, response_metadata=message.response_metadata)
    )
