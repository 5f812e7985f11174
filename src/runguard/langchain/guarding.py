"""RunGuard for LangChain: ``RunGuardMiddleware`` for agents, ``GuardedChatModel`` for graphs of your own.

LangChain calls their hooks. They ask ``calls/run`` before every model call and tool call. The last section translates
between LangChain's messages and RunGuard's terms.
"""

import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Annotated, Any, Final, NotRequired, Unpack

from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse
from langchain.agents.middleware.types import ExtendedModelResponse, PrivateStateAttr, ToolCallRequest
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableBinding, RunnableConfig
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.channels.untracked_value import UntrackedValue
from langgraph.config import get_config
from langgraph.errors import GraphBubbleUp
from langgraph.types import Command
from pydantic import BaseModel, PrivateAttr

from runguard.background import FINALIZED
from runguard.calls.model_calls import ModelRequest as Asked
from runguard.calls.model_calls import ModelSwitch, Permission
from runguard.calls.run import AgentRun, check_whom, error_of, fitting
from runguard.calls.tool_calls import ToolUse
from runguard.core.decision import METADATA_KEY, Trip
from runguard.core.errors import PolicyError, RunStoppedError
from runguard.engine.guard import Controls, Guard
from runguard.policy.settings import Policy, PolicySettings
from runguard.pricing.rates import Usage
from runguard.providers.usage import size_of
from runguard.termination.conditions import Ended, TerminationCondition

# ---- ``RunGuardMiddleware``: guards every agent that takes middleware (``create_agent``, deepagents).

_RUN: Final = "runguard_run"
_RESUMED_KEPT: Final = 1_024


class _State(AgentState[Any]):
    # Never stored in a checkpoint: it ends with the execution of the graph.
    runguard_run: NotRequired[Annotated[Any, UntrackedValue, PrivateStateAttr]]


class RunGuardMiddleware(Controls, AgentMiddleware[Any, Any, Any]):
    """``create_agent(model, tools, middleware=[RunGuardMiddleware(max_usd=1.50)])``.

    The keywords are those of ``RunGuardPlugin``. A stop ends the agent with a message that carries the trip in
    ``response_metadata["runguard"]``; ``on_stop="raise"`` raises the typed error instead. Give the same instance to
    sub-agents: a sub-agent that a tool calls joins the run of its caller.
    """

    state_schema = _State

    def __init__(
        self,
        *,
        app: str = "",
        user: str = "",
        termination_condition: TerminationCondition | None = None,
        **policy: Unpack[PolicySettings],
    ) -> None:
        """``app`` and ``user``: whom budgets per app and per user are for. The session is the thread's id.

        ``termination_condition`` ends a run, of the first agent that has this middleware, when it fires.
        """
        check_whom(app=app, user=user)
        super().__init__()
        self.tools = []
        self.guard = Guard(Policy.build(**policy), gives_last_answers=True, switches_models=True)
        self.guard.check_store()
        self._app, self._user = app, user
        self._condition = fitting(termination_condition, "LangChain", has_hand_offs=False)
        self._is_off = self.guard.policy.mode == "off"
        self._resumed: OrderedDict[str, AgentRun] = OrderedDict()
        self._lock = threading.Lock()

    # ---- the agent's run --------------------------------------------------------------------------------------------

    def before_agent(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        if self._is_off:
            return None
        run = self._start()
        if (trip := run.enter()) is not None:
            self._raise_if_asked(trip)
        return {_RUN: run}

    async def abefore_agent(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        return self.before_agent(state, runtime)

    def after_agent(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        if not self._is_off:
            self._run_of(state).end()
        return None

    async def aafter_agent(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        return self.after_agent(state, runtime)

    def _start(self) -> AgentRun:
        config = get_config()
        session = str(config.get("configurable", {}).get("thread_id") or "")
        name = str((config.get("metadata") or {}).get("lc_agent_name") or "agent")
        whom: dict[str, Any] = {"app": self._app, "user": self._user, "session": session}
        return AgentRun.start(self.guard, name, **whom, condition=self._condition)

    def _run_of(self, state: Any) -> AgentRun:
        """The run that ``before_agent`` began. After an interrupt the graph goes on without it: a new run begins."""
        run = state.get(_RUN)
        if isinstance(run, AgentRun):
            return run
        config = get_config().get("configurable", {})
        key = f"{config.get('thread_id')}/{config.get('checkpoint_ns', '').split('|')[0]}"
        with self._lock:
            run = self._resumed.get(key)
            if run is None:
                run = self._resumed[key] = self._start()
                if len(self._resumed) > _RESUMED_KEPT:
                    self._resumed.popitem(last=False)[1].end()
        return run

    # ---- model calls ------------------------------------------------------------------------------------------------

    def wrap_model_call(self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Any]) -> Any:
        if self._is_off:
            return handler(request)
        run = self._run_of(request.state)
        permission = run.ask_now(partial(_asked, request, self.guard.downgrades is not None))
        if not isinstance(permission, Permission):
            return self._stop(permission, request)
        try:
            with permission.being_made():
                response = handler(permission.changed(_changed, request))
        except BaseException as error:
            permission.fail(error)
            if (trip := permission.interrupted) is not None:
                return self._stop(trip, request)
            raise
        permission.read(_settle, response)
        return response

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[Any]]
    ) -> Any:
        if self._is_off:
            return await handler(request)
        run = self._run_of(request.state)
        permission = await run.ask(partial(_asked, request, self.guard.downgrades is not None))
        if not isinstance(permission, Permission):
            return self._stop(permission, request)
        try:
            response = await permission.during(handler(permission.changed(_changed, request)))
        except BaseException as error:
            permission.fail(error)
            if (trip := permission.interrupted) is not None:
                return self._stop(trip, request)
            raise
        permission.read(_settle, response)
        return response

    def _stop(self, end: Trip | Ended, request: ModelRequest[Any]) -> AIMessage:
        """End the agent. Structured output leaves no way but the exception."""
        if request.response_format is not None:
            raise error_of(end)
        if isinstance(end, Trip):
            self._raise_if_asked(end)
        return last_message(self.guard, end)

    def _raise_if_asked(self, trip: Trip) -> None:
        if self.guard.policy.on_stop == "raise":
            raise RunStoppedError.of(trip)

    # ---- tool calls -------------------------------------------------------------------------------------------------

    def wrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolMessage | Command[Any]]
    ) -> ToolMessage | Command[Any]:
        if self._is_off:
            return handler(request)
        run, use = self._run_of(request.state), _use_of(request)
        refusal = run.tools.check_now(use)
        if refusal is not None:
            return _refused(use, refusal)
        try:
            with run.tools.inside(use):
                result = handler(request)
        except BaseException as error:
            _raised(run, use, error)
            raise
        return _answered(run, use, result)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]]
    ) -> ToolMessage | Command[Any]:
        if self._is_off:
            return await handler(request)
        run, use = self._run_of(request.state), _use_of(request)
        refusal = await run.tools.check(use)
        if refusal is not None:
            return _refused(use, refusal)
        try:
            with run.tools.inside(use):
                result = await handler(request)
        except BaseException as error:
            _raised(run, use, error)
            raise
        return _answered(run, use, result)


def _asked(request: ModelRequest[Any], switches: bool) -> Asked:
    tools = [_declared(tool) for tool in request.tools]
    system = request.system_message.content if request.system_message is not None else ""
    asked = request_of(request.model, request.messages, [system, tools], request.model_settings)
    if switches:
        asked.switch = ModelSwitch(lambda: has_open_call(request.messages), lambda name: _obstacle(request.model, name))
    return asked


def _obstacle(model: Any, name: str) -> str:
    return "" if renamed(model, name) is not None else f"{type(model).__name__} has no field for the name of its model"


_TOOLS_KEPT: Final = 256
_declarations: Final[OrderedDict[int, tuple[Any, Any]]] = OrderedDict()  # by identity of the tool, which is kept alive


def _declared(tool: Any) -> Any:
    """Return what a request says of a tool. LangChain builds the schema anew each time, which takes long."""
    if isinstance(tool, dict):
        return tool
    known = _declarations.get(id(tool))
    if known is None or known[0] is not tool:
        known = _declarations[id(tool)] = (tool, tool.args)
        while len(_declarations) > _TOOLS_KEPT:
            _declarations.popitem(last=False)
    return [tool.name, tool.description, known[1]]


def _changed(permission: Permission, request: ModelRequest[Any]) -> ModelRequest[Any]:
    """The request with a notice for the model, and with the output limit that the budget can pay."""
    if permission.model:
        request = request.override(model=renamed(request.model, permission.model))
    if permission.notice:
        request = request.override(messages=[*request.messages, notice_message(permission.notice)])
    if permission.last_after is not None:
        request = request.override(tools=[], tool_choice=None)
    if (limit := permission.max_output_tokens) is not None:
        request = request.override(model_settings={**request.model_settings, limit_key(request.model): limit})
    return request


def _settle(permission: Permission, response: Any) -> None:
    inner = response.model_response if isinstance(response, ExtendedModelResponse) else response
    messages = inner.result if isinstance(inner, ModelResponse) else [inner]
    message = next((m for m in messages if isinstance(m, AIMessage)), None)
    if message is None:
        permission.fail(None)
        return
    permission.settle(
        usage_of(message),
        model=answered_by(message),
        calls=calls_of(message),
        text=str(message.text),
        size=answer_size(message),
    )


def _use_of(request: ToolCallRequest) -> ToolUse:
    call = request.tool_call
    return ToolUse(call["id"] or "", call["name"], call["args"])


def _refused(use: ToolUse, text: str) -> ToolMessage:
    return ToolMessage(content=text, tool_call_id=use.id, name=use.tool, status="error")


def _answered(run: AgentRun, use: ToolUse, result: ToolMessage | Command[Any]) -> ToolMessage | Command[Any]:
    """What the model sees: the result, or a note where it is too large."""
    if not isinstance(result, ToolMessage):
        run.tools.answered(use, getattr(result, "update", None))
        return result
    note = run.tools.answered(use, result.content)
    return result if note is None else result.model_copy(update={"content": note})


def _raised(run: AgentRun, use: ToolUse, error: BaseException) -> None:
    if isinstance(error, GraphBubbleUp):  # an interrupt: the tool will be called again
        return
    run.tools.raised(use, error)


# ---- ``GuardedChatModel``: a chat model with a guard around it, for graphs that take no middleware.

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
    _bound: dict[str, Any] = PrivateAttr(default_factory=dict)  # what each request has besides its own keywords
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
        check_whom(app=app, user=user)
        super().__init__(profile=model.profile)
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
        made._inner, made._bound = self._inner.bind_tools(tools, **kwargs), {}
        if isinstance(made._inner, RunnableBinding):
            made._bound = dict(made._inner.kwargs)
            made._inner = made._inner.with_config(_QUIET)  # a binding adds the graph's callbacks to those of a call
        made._bound = made._bound or {"tools": [_schema(tool) for tool in tools]}
        return made

    def _should_stream(self, *, async_api: bool, run_manager: Any = None, **kwargs: Any) -> bool:
        """Stream where the model streams."""
        keywords = {**self._bound, **kwargs}
        return self._model._should_stream(async_api=async_api, run_manager=run_manager, **keywords)

    # ---- calls ------------------------------------------------------------------------------------------------------

    def _asked(self, messages: list[BaseMessage], kwargs: dict[str, Any]) -> Asked:
        keywords = {**self._bound, **kwargs}
        return request_of(self._model, messages, keywords, keywords)

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        run, key = self._turn(messages)
        permission = run.ask_now(lambda: self._asked(messages, kwargs))
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
        permission = await run.ask(lambda: self._asked(messages, kwargs))
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
        permission = run.ask_now(lambda: self._asked(messages, kwargs))
        if not isinstance(permission, Permission):
            yield _chunk(self._stopped(permission, key))
            return
        asked, options = permission.changed(self._changed, (messages, kwargs))
        whole: Any = None
        try:
            for piece in permission.pieces_now(self._inner.stream(asked, _QUIET, stop=stop, **options)):
                whole = piece if whole is None else whole + piece
                yield ChatGenerationChunk(message=piece)
        except GeneratorExit:  # closed by its reader, or by the collector
            FINALIZED.put(lambda: permission.fail(None, _size_of(whole), streaming=True))
            raise
        except BaseException as error:
            permission.fail(error, _size_of(whole), streaming=True)
            raise
        permission.read(lambda one, answer: self._settle(one, answer, key), whole)

    async def _astream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        run, key = self._turn(messages)
        permission = await run.ask(lambda: self._asked(messages, kwargs))
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
                permission.fail(None, _size_of(whole), streaming=True)
                yield _chunk(self._stopped(trip, key))
                return
        except BaseException as error:
            permission.fail(error, _size_of(whole), streaming=True)
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
            usage_of(message),
            model=answered_by(message) or model_name(self._model),
            calls=calls,
            text=str(message.text),
            size=answer_size(message),
        )
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


def _schema(tool: Any) -> Any:
    """Return what a request says of a tool: a tool of LangChain, a function, a class or a mapping."""
    try:
        return convert_to_openai_tool(tool)
    except Exception:  # a kind of tool that only its model knows
        return repr(tool)


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


def _size_of(message: Any) -> int:
    """Return the bytes of the part of an answer that has come."""
    return answer_size(message) if message is not None else 0


def _chunk(message: AIMessage) -> ChatGenerationChunk:
    return ChatGenerationChunk(
        message=AIMessageChunk(content=message.content, response_metadata=message.response_metadata)
    )


# ---- LangChain's messages in RunGuard's terms, and the other way round.

# What chat models call their output limit, in the order in which it is looked for.
_LIMITS: Final = ("max_tokens", "max_output_tokens", "max_completion_tokens", "num_predict", "max_new_tokens")
_MESSAGE: Final = 4  # bytes around a message
_MODELS: Final = ("model_name", "model", "model_id")


def model_name(model: Any) -> str:
    """The name under which the provider prices the model."""
    kind: Any = type(model)
    for key in _existing(kind, _MODELS):
        if isinstance(name := getattr(model, key, None), str) and name:
            return name
    return ""


@lru_cache(maxsize=256)
def _existing(kind: type, names: tuple[str, ...]) -> tuple[str, ...]:
    """Which of these attributes the models of a class can have. Asking pydantic for a missing one takes long."""
    if not issubclass(kind, BaseModel) or kind.model_config.get("extra") == "allow":
        return names
    if any("__getattr__" in vars(base) for base in kind.__mro__ if base is not BaseModel):
        return names
    return tuple(name for name in names if name in kind.model_fields or hasattr(kind, name))


def renamed(model: Any, name: str) -> Any:
    """The same chat model with the name of another model of its class; None where its class has no field for it."""
    fields = getattr(type(model), "model_fields", {})
    key = next((key for key in _MODELS if key in fields), None)
    if key is None:
        return None
    if str(getattr(model, key)).startswith("models/") and "/" not in name:
        name = f"models/{name}"
    return model.model_copy(update={key: name})


def has_open_call(messages: Sequence[BaseMessage]) -> bool:
    """Whether the newest tool calls of a conversation lack an answer."""
    answered: set[str] = set()
    for message in reversed(messages):
        if isinstance(message, ToolMessage):
            answered.add(message.tool_call_id)
        elif isinstance(message, AIMessage) and message.tool_calls:
            return any(call["id"] not in answered for call in message.tool_calls)
    return False


def limit_key(model: Any) -> str:
    """The keyword by which this chat model takes an output limit."""
    fields = getattr(type(model), "model_fields", {})
    return next((key for key in _LIMITS if key in fields), _LIMITS[0])


def output_limit(model: Any, settings: dict[str, Any]) -> int | None:
    for key in _LIMITS if settings else ():
        if type(limit := settings.get(key)) is int and limit > 0:
            return limit
    kind: Any = type(model)
    for key in _existing(kind, _LIMITS):
        if type(limit := getattr(model, key, None)) is int and limit > 0:
            return limit
    return None


def request_of(model: Any, messages: Sequence[BaseMessage], others: Any, settings: dict[str, Any]) -> Asked:
    """``others``: what the request holds besides messages, such as the system message and the tools."""
    prompt = [others]
    for message in messages:
        held = message.__dict__  # asking pydantic for a field that a message does not have takes long
        prompt.append(held["content"])
        if calls := held.get("tool_calls"):
            prompt.append(calls)
    return Asked.of(model_name(model), prompt, output_limit(model, settings), len(messages) * _MESSAGE)


def usage_of(message: AIMessage) -> Usage | None:
    """The usage that a message reports, or None."""
    report = message.usage_metadata
    if not report:
        return None
    inputs, outputs = report.get("input_token_details") or {}, report.get("output_token_details") or {}
    return Usage(
        input=report.get("input_tokens"),
        output=report.get("output_tokens"),
        cached=inputs.get("cache_read") or 0,
        cache_write=inputs.get("cache_creation") or 0,
        audio=inputs.get("audio") or 0,
        audio_output=outputs.get("audio") or 0,
        thinking=outputs.get("reasoning") or 0,
    )


def answered_by(message: AIMessage) -> str:
    """The model that answered, as the provider names it."""
    metadata = message.response_metadata
    return next((name for key in _MODELS if isinstance(name := metadata.get(key), str)), "")


def calls_of(message: AIMessage) -> list[ToolUse]:
    """The tool calls that a message asks for, those with broken arguments included."""
    calls = [ToolUse(call["id"] or str(n), call["name"], call["args"]) for n, call in enumerate(message.tool_calls)]
    broken = message.invalid_tool_calls
    return calls + [ToolUse(call["id"] or f"invalid{n}", call["name"] or "", {}) for n, call in enumerate(broken)]


def answer_size(message: BaseMessage) -> int:
    return size_of([message.content, getattr(message, "tool_calls", None)])


def last_message(guard: Guard, end: Trip | Ended) -> AIMessage:
    """What an agent ends with: text for the user; the trip, or the reason of a condition, for programs."""
    text = end.reason if isinstance(end, Ended) else guard.stop_text(end)
    return AIMessage(content=text, response_metadata={METADATA_KEY: end.to_dict()})


def notice_message(notice: str) -> HumanMessage:
    return HumanMessage(content=notice, additional_kwargs={METADATA_KEY: "notice"})
