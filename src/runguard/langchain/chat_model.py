"""``GuardedChatModel``: a chat model with a guard inside, for graphs that take no middleware.

It is a model of the same class: a subclass of its own, made for one guard, whose methods ask ``calls/run`` first.
``turns`` finds the run, and ``messages`` reads requests and answers.
"""

import inspect
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from copy import copy
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Final, Self, Unpack
from uuid import UUID

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableWithFallbacks
from langchain_core.utils.function_calling import convert_to_openai_tool

from runguard.background import FINALIZED
from runguard.calls.model_calls import CallMark, Permission
from runguard.calls.model_calls import ModelRequest as Asked
from runguard.calls.run import AgentRun, Named, Spent, Whom, fitting, guard_of
from runguard.calls.surroundings import live_blocks
from runguard.core.decision import Trip
from runguard.core.errors import PolicyError
from runguard.engine.guard import Controls, Guard
from runguard.langchain.messages import (
    answer_size,
    answered_by,
    calls_of,
    last_message,
    limit_key,
    newest_answers,
    notice_message,
    request_of,
    response_id,
    told,
    usage_of,
    was_refused,
)
from runguard.langchain.turns import Found, Runs, scope_here
from runguard.policy.keywords import PolicySettings
from runguard.providers.usage import name_of_tool
from runguard.termination.conditions import Ended, TerminationCondition

_log: Final = logging.getLogger("runguard")
_AGENT: Final = "model"
_MARK: Final = "__runguard__"  # the attribute of a guarded model's class
_CHOICES: Final = (None, "auto", "none")  # what the tool choice of a request may be where a text can answer

if TYPE_CHECKING:

    class _Guarded(Controls, BaseChatModel):
        """What a guarded model is for a type checker: a chat model that can be asked what it spends."""

        @property
        def _llm_type(self) -> str: ...

        def _generate(self, *args: Any, **kwargs: Any) -> ChatResult: ...

else:

    class _Recognized(type):
        """Makes ``isinstance(model, GuardedChatModel)`` true of the models that it gives."""

        def __instancecheck__(cls, one: object) -> bool:
            return hasattr(type(one), _MARK)

    class _Guarded(metaclass=_Recognized):
        pass


class GuardedChatModel(_Guarded):
    """``GuardedChatModel(ChatOpenAI(...), max_usd=1.50)``, in a ``StateGraph`` of your own.

    Gives a model of the same class with the same fields. All its calls in one turn of a graph are one run; a loop that
    is written by hand needs ``with runguard.run():`` around it. Tools are seen in the next request, so a tool call
    cannot be refused; the run is stopped before its next model call. A stop is an ``AIMessage`` without tool calls;
    ``on_stop="raise"`` raises the typed error instead, and so does every stop where the request asks for an object.
    The keywords are those of ``RunGuardPlugin``.
    """

    def __new__(
        cls,
        model: BaseChatModel,
        *,
        app: str = "",
        user: Named = "",
        termination_condition: TerminationCondition | None = None,
        **policy: Unpack[PolicySettings],
    ) -> Self:
        """``user`` may be a function of LangGraph's ``Runtime``; ``with runguard.run(user=…)`` around the call wins.

        ``model`` may have fallbacks: each attempt is asked for and paid by its own price.
        """
        given: Any = model
        models: list[Any] = [given.runnable, *given.fallbacks] if isinstance(given, RunnableWithFallbacks) else [given]
        if not all(isinstance(one, BaseChatModel) for one in models):
            raise PolicyError(f"GuardedChatModel({model!r}): give a chat model of LangChain")
        whom = Whom(app=app, user=user)
        guard = guard_of(policy)
        condition = fitting(termination_condition, "LangChain", has_hand_offs=False)
        asking = _Asking(guard, Runs(guard, whom, condition, _AGENT))
        made: Any = asking.guarded(models[0])
        if given is not models[0]:
            made = given.model_copy(update={"runnable": made, "fallbacks": [asking.guarded(one) for one in models[1:]]})
        return made  # type: ignore[no-any-return]

    if TYPE_CHECKING:

        def __init__(
            self,
            model: BaseChatModel,
            *,
            app: str = "",
            user: Named = "",
            termination_condition: TerminationCondition | None = None,
            **policy: Unpack[PolicySettings],
        ) -> None: ...

        @property
        def controls(self) -> Controls:
            """What an operator may ask and do, also where the model has a field of such a name, such as ``stop``."""

        def bill(self) -> Spent | None:
            """Return what the run around this code has used so far: in a node or a tool. None: there is no run."""


class _Controls(Controls):
    def __init__(self, guard: Guard) -> None:
        self.guard = guard


class _Asking:
    """Asks one guard before each call of its models."""

    def __init__(self, guard: Guard, runs: Runs) -> None:
        self.guard, self.runs, self.controls = guard, runs, _Controls(guard)
        self._bound: dict[str, Any] = {}  # tools that the model keeps where no request shows them
        self._alone, self._has_warned = 0, False

    # ---- the class of a guarded model -------------------------------------------------------------------------------

    def guarded(self, model: BaseChatModel, kind: Any = None) -> BaseChatModel:
        """Return a model that shares everything with this one and asks before each call. ``kind``: its plain class."""
        kind = kind or type(model)
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        made: Any = type(kind)(kind.__name__, (kind,), {**names, "model_config": {"defer_build": True}})
        for name, value in self._attributes(kind).items():
            setattr(made, name, value)
        one = object.__new__(made)
        for name in ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__"):
            object.__setattr__(one, name, getattr(model, name))
        return one  # type: ignore[no-any-return]

    def _attributes(self, kind: Any) -> dict[str, Any]:
        """Return what the class of a guarded model has beside that of its model, whose own fields stay."""
        given: dict[str, Any] = {_MARK: self, "controls": self.controls, "guard": self.guard, "bill": self.runs.bill}
        given |= {name: getattr(self.controls, name) for name in _METHODS}
        given["trips"] = property(lambda _: self.controls.trips)
        given = {name: one for name, one in given.items() if name not in kind.model_fields and not hasattr(kind, name)}
        for name in ("_generate", "_agenerate", "_stream", "_astream"):
            own = getattr(kind, name)
            if own is not getattr(BaseChatModel, name):  # what it does not have itself goes through the others
                given[name] = getattr(self, name)(own)
        for name in ("_stream_chat_model_events", "_astream_chat_model_events"):
            if hasattr(kind, name):  # LangChain makes these events of the stream instead, which is guarded
                given[name] = None
        given["bind_tools"], given["with_fallbacks"] = self._bind_tools(kind), self._with_fallbacks(kind)
        return given | {_MARK: self, "__reduce_ex__": _not_pickled}

    def _bind_tools(self, kind: Any) -> Callable[..., Any]:
        @wraps(kind.bind_tools)
        def bind_tools(model: Any, /, tools: Sequence[Any], **more: Any) -> Any:
            bound = kind.bind_tools(model, tools, **more)
            if not isinstance(bound, BaseChatModel):  # a binding, which adds the tools to each request
                return bound
            asking = copy(self)
            asking._bound = {"tools": [_schema(tool) for tool in tools]}
            return asking.guarded(bound, kind)

        return bind_tools

    def _with_fallbacks(self, kind: Any) -> Callable[..., Any]:
        @wraps(kind.with_fallbacks)
        def with_fallbacks(model: Any, /, fallbacks: Sequence[Any], **more: Any) -> Any:
            """Fallbacks that are plain models get the same guard."""
            plain = [
                self.guarded(one) if isinstance(one, BaseChatModel) and not hasattr(type(one), _MARK) else one
                for one in fallbacks
            ]
            return kind.with_fallbacks(model, plain, **more)

        return with_fallbacks

    # ---- its calls --------------------------------------------------------------------------------------------------

    def _generate(self, own: Callable[..., Any]) -> Callable[..., Any]:
        own = _lenient(own)

        def _generate(
            model: Any, /, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
        ) -> ChatResult:
            name = _name(run_manager)
            if _is_inside((self, type(model)), name):  # the model itself calls one of its methods through another
                return own(model, messages, stop=stop, run_manager=run_manager, **kwargs)  # type: ignore[no-any-return]
            found = self._prepared(self.runs.of_now(scope_here(run_manager)), messages)
            with found:
                permission = found.run.ask_now(partial(_asked, found.run, model, messages, self._bound, kwargs))
                if not isinstance(permission, Permission):
                    return _result(self._stopped(permission, kwargs))
                asked, options = permission.changed(partial(_changed, model), (messages, kwargs))
                try:
                    with _Making(permission, (self, type(model)), name):
                        result: ChatResult = own(model, asked, stop=stop, run_manager=run_manager, **options)
                except BaseException as error:
                    permission.fail(error)
                    raise
                permission.read(partial(_settle_result, self._has_tools(kwargs)), result)
                return result

        return _generate

    def _agenerate(self, own: Callable[..., Any]) -> Callable[..., Any]:
        own = _lenient(own)

        async def _agenerate(
            model: Any, /, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
        ) -> ChatResult:
            name = _name(run_manager)
            if _is_inside((self, type(model)), name):
                return await own(model, messages, stop=stop, run_manager=run_manager, **kwargs)  # type: ignore[no-any-return]
            found = self._prepared(await self.runs.of(scope_here(run_manager)), messages)
            with found:
                permission = await found.run.ask(partial(_asked, found.run, model, messages, self._bound, kwargs))
                if not isinstance(permission, Permission):
                    return _result(self._stopped(permission, kwargs))
                asked, options = permission.changed(partial(_changed, model), (messages, kwargs))
                try:
                    with _Making(permission, (self, type(model)), name):
                        result: ChatResult = await permission.during(
                            own(model, asked, stop=stop, run_manager=run_manager, **options)
                        )
                except BaseException as error:
                    permission.fail(error)
                    if (trip := permission.interrupted) is not None:
                        return _result(self._stopped(trip, kwargs))
                    raise
                permission.read(partial(_settle_result, self._has_tools(kwargs)), result)
                return result

        return _agenerate

    def _stream(self, own: Callable[..., Any]) -> Callable[..., Any]:
        own = _lenient(own)

        def _stream(
            model: Any, /, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
        ) -> Iterator[ChatGenerationChunk]:
            name = _name(run_manager)
            if _is_inside((self, type(model)), name):
                yield from own(model, messages, stop=stop, run_manager=run_manager, **kwargs)
                return
            found = self._prepared(self.runs.of_now(scope_here(run_manager)), messages)
            permission = found.run.ask_now(partial(_asked, found.run, model, messages, self._bound, kwargs))
            if not isinstance(permission, Permission):
                found.leave()
                yield _chunk(self._stopped(permission, kwargs))
                return
            asked, options = permission.changed(partial(_changed, model), (messages, kwargs))
            whole: list[ChatGenerationChunk] = []
            pieces = own(model, asked, stop=stop, run_manager=run_manager, **options)
            try:
                for piece in permission.pieces_now(pieces, _Making(permission, (self, type(model)), name)):
                    whole.append(piece)
                    yield piece
            except GeneratorExit:  # closed by its reader, or by the collector
                FINALIZED.put(lambda: _cut(found, permission, None, whole))
                raise
            except BaseException as error:
                _cut(found, permission, error, whole)
                raise
            permission.read(partial(_settle_pieces, self._has_tools(kwargs)), whole)
            found.leave()

        return _stream

    def _astream(self, own: Callable[..., Any]) -> Callable[..., Any]:
        own = _lenient(own)

        async def _astream(
            model: Any, /, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
        ) -> AsyncIterator[ChatGenerationChunk]:
            name = _name(run_manager)
            if _is_inside((self, type(model)), name):
                async for piece in own(model, messages, stop=stop, run_manager=run_manager, **kwargs):
                    yield piece
                return
            found = self._prepared(await self.runs.of(scope_here(run_manager)), messages)
            permission = await found.run.ask(partial(_asked, found.run, model, messages, self._bound, kwargs))
            if not isinstance(permission, Permission):
                found.leave()
                yield _chunk(self._stopped(permission, kwargs))
                return
            asked, options = permission.changed(partial(_changed, model), (messages, kwargs))
            whole: list[ChatGenerationChunk] = []
            try:
                pieces = own(model, asked, stop=stop, run_manager=run_manager, **options)
                async for piece in permission.pieces(pieces, _Making(permission, (self, type(model)), name)):
                    whole.append(piece)
                    yield piece
                if (trip := permission.interrupted) is not None:
                    _cut(found, permission, None, whole)
                    yield _chunk(self._stopped(trip, kwargs))
                    return
            except BaseException as error:
                _cut(found, permission, error, whole)
                raise
            permission.read(partial(_settle_pieces, self._has_tools(kwargs)), whole)
            found.leave()

        return _astream

    # ---- the run of a turn ------------------------------------------------------------------------------------------

    def _prepared(self, found: Found, messages: Sequence[BaseMessage]) -> Found:
        """Show the run what tools have answered since its last model call."""
        answers = list(newest_answers(messages))
        if found.is_alone:
            self._warn(bool(answers))
        elif found.turn is not None:
            for name, use, message in answers:
                if found.turn.is_news(self.guard, name):
                    found.run.tools.saw(use, *told(message))
            if answers and found.is_new and not (found.turn.has_steps or live_blocks()):  # a chain in a loop
                self._warn(is_loop=True)
        return found

    def _has_tools(self, kwargs: dict[str, Any]) -> bool:
        return bool({**self._bound, **kwargs}.get("tools"))

    def _warn(self, is_loop: bool) -> None:
        """Warn once of a loop that is written by hand, where each call is a run of its own."""
        policy = self.guard.policy
        self._alone += 1
        is_loop = is_loop or (self._alone > 1 and bool(policy.max_model_calls or policy.max_tool_calls))
        if is_loop and not self._has_warned and policy.mode != "off":
            self._has_warned = True
            _log.warning(
                "runguard.no_turn: a guarded chat model is called outside of a graph or an agent, so each call is a "
                "run of its own and limits per run never add up; put 'with runguard.run():' around the loop"
            )

    def _stopped(self, end: Trip | Ended, kwargs: dict[str, Any]) -> AIMessage:
        """Return the last answer of a run. Where an object must come, raise the typed error."""
        takes_text = "response_format" not in kwargs and kwargs.get("tool_choice") in _CHOICES
        return last_message(self.guard, end, takes_text=takes_text)


_Owner = tuple[_Asking, type]
# The calls that are being made around this code: who asked, for which class of model, and LangChain's name of the call.
_MAKING: Final[ContextVar[tuple[tuple[_Owner, UUID | None], ...]]] = ContextVar("runguard_making", default=())


def _is_inside(owner: _Owner, name: UUID | None) -> bool:
    """Whether a method of the model is called by another one of its own, as a part of the same call."""
    return any(one == owner and (name is None or name == made) for one, made in _MAKING.get())


class _Making(CallMark):
    """Marks a block as the model's own method at work, and as the model call that a permission is for."""

    __slots__ = ("_call", "_made")

    def __init__(self, permission: Permission, owner: _Owner, name: UUID | None) -> None:
        super().__init__(permission.charges)
        self._call = owner, name

    def __enter__(self) -> None:
        self._made = _MAKING.set((*_MAKING.get(), self._call))
        super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        with suppress(ValueError):  # a coroutine that is thrown away ends in another context
            _MAKING.reset(self._made)


_METHODS: Final = ("snapshot", "spend", "budgets", "extend", "stop", "resume", "stops", "flush")


def _not_pickled(model: Any, protocol: Any) -> Any:
    raise TypeError("a guarded chat model cannot be pickled: its guard lives in this process; pickle the model itself")


def _lenient(own: Callable[..., Any]) -> Callable[..., Any]:
    """``own``, which gets no run manager where it takes none, or where there is none."""
    parameters = inspect.signature(own).parameters
    takes = "run_manager" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())

    def call(model: Any, messages: Any, /, *, stop: Any, run_manager: Any, **options: Any) -> Any:
        if run_manager is not None and takes:
            options["run_manager"] = run_manager
        return own(model, messages, stop=stop, **options)

    return call


def _schema(tool: Any) -> Any:
    """Return what a request says of a tool: a tool of LangChain, a function, a class or a mapping."""
    try:
        return convert_to_openai_tool(tool)
    except Exception:  # a kind of tool that only its model knows
        return repr(tool)


def _name(run_manager: Any) -> UUID | None:
    return getattr(run_manager, "run_id", None)


def _asked(
    run: AgentRun, model: Any, messages: list[BaseMessage], bound: Mapping[str, Any], given: Mapping[str, Any]
) -> Asked:
    """Return what is known of a request. Tools that the model itself has bound cannot be left out."""
    kwargs = {**bound, **given}
    asked = request_of(run.prompts, model, messages, kwargs, kwargs, {"messages": messages, **kwargs})
    asked.tools = [name_of_tool(tool) for tool in given.get("tools") or ()]
    return asked


def _changed(
    model: Any, permission: Permission, request: tuple[list[BaseMessage], dict[str, Any]]
) -> tuple[list[BaseMessage], dict[str, Any]]:
    messages, kwargs = request
    if permission.notice:
        messages = [*messages, notice_message(permission.notice)]
    if permission.withheld and kwargs.get("tools"):
        kwargs = {**kwargs, "tools": permission.left(kwargs["tools"], name_of_tool, kwargs.get("tool_choice"))}
    if (limit := permission.max_output_tokens) is not None:
        kwargs = {**kwargs, limit_key(model): limit}
    return messages, kwargs


def _settle_result(has_tools: bool, permission: Permission, result: ChatResult) -> None:
    _settle(has_tools, permission, result.generations[0], result.llm_output)


def _settle_pieces(has_tools: bool, permission: Permission, pieces: list[ChatGenerationChunk]) -> None:
    if pieces:
        _settle(has_tools, permission, pieces[0] + pieces[1:], None)
    else:
        permission.fail(None)


def _settle(has_tools: bool, permission: Permission, answer: ChatGeneration, whole: dict[str, Any] | None) -> None:
    message = answer.message
    if not isinstance(message, AIMessage):
        permission.fail(None)
    elif was_refused(message):
        permission.release()
    else:
        permission.settle(
            usage_of(message),
            model=answered_by(message.response_metadata, answer.generation_info, whole),
            calls=calls_of(message),
            text=str(message.text) if has_tools else "",  # without tools, many texts in a row are a batch and no loop
            size=partial(answer_size, message),
            answer=response_id(message),
        )


def _cut(found: Found, permission: Permission, error: BaseException | None, pieces: list[ChatGenerationChunk]) -> None:
    """Book a streamed answer that ended early."""
    size = sum(answer_size(piece.message) for piece in pieces)
    permission.fail(error, size, streaming=True)
    found.leave()


def _result(message: AIMessage) -> ChatResult:
    return ChatResult(generations=[ChatGeneration(message=message)])


def _chunk(message: AIMessage) -> ChatGenerationChunk:
    metadata = message.response_metadata
    return ChatGenerationChunk(message=AIMessageChunk(content=message.content, response_metadata=metadata))
