"""``guard`` and ``guard_async`` check a function that calls a model before every call. ``run`` owns the calls.

    call = runguard.guard(call_model, budget={"max_usd": 2.0}, loop={"repeats": 3})

Users call them. The wrapped function returns what it returned before. Its cost, tokens and tool calls are read from
that. A refused call raises the error that says why, and so does every later call of the same run.
"""

import inspect
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial, update_wrapper
from types import CoroutineType
from typing import Any, Concatenate, Final, ParamSpec, Protocol, Self, TypeVar, Unpack, overload

from runguard.background import FINALIZED
from runguard.calls.function_calls import Caller, GuardedCall
from runguard.calls.function_settings import GuardSettings, settings_of
from runguard.calls.run import check_whom
from runguard.calls.streams import WHOLE, AsyncGuardedStream, Pending, in_pieces
from runguard.calls.surroundings import SURROUNDINGS, RunContext, carry
from runguard.core.decision import Trip
from runguard.core.errors import PolicyError, did_you_mean
from runguard.core.money import BudgetStatus, shown
from runguard.engine.charges import OWNERS
from runguard.ledger.ledger import Stop
from runguard.policy.keywords import FunctionSettings
from runguard.policy.settings import Policy
from runguard.providers.messages import Reading, earlier_in, read

_P = ParamSpec("_P")
_Rest = ParamSpec("_Rest")
_R = TypeVar("_R")
_R_co = TypeVar("_R_co", covariant=True)
_T = TypeVar("_T")


class GuardedFunction(Protocol[_P, _R_co]):
    """What ``guard`` and ``guard_async`` return: called like the function, with controls beside.

    The controls are those of its ``Caller``. Type checkers and editors read them here.
    """

    __name__: str
    __qualname__: str
    __wrapped__: Callable[..., Any]
    __runguard__: Caller
    trips: deque[Trip]

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R_co: ...

    # A method is bound to its object: the call is written without "self". The last form is for static methods.
    @overload
    def __get__(self, instance: None, owner: type[Any]) -> Self: ...
    @overload
    def __get__(
        self: "GuardedFunction[Concatenate[_T, _Rest], _R_co]", instance: _T, owner: type[_T]
    ) -> "GuardedFunction[_Rest, _R_co]": ...
    @overload
    def __get__(self, instance: object, owner: type[Any]) -> "GuardedFunction[..., _R_co]": ...

    def spend(self, scope: str | None = None) -> dict[str, Any]: ...
    def budgets(self, scope: str | None = None) -> list[BudgetStatus]: ...
    def extend(
        self, scope: str | None = None, *, usd: Any = None, tokens: Any = None, calls: Any = None
    ) -> list[BudgetStatus]: ...
    def stop(self, scope: str, *, actor: str | None = None, reason: str | None = None) -> None: ...
    def resume(self, scope: str) -> None: ...
    def stops(self) -> list[Stop]: ...
    def snapshot(self) -> dict[str, Any]: ...
    def flush(self, seconds: float = 2.0) -> bool: ...
    def reset(self) -> None: ...


# ---- ``guard``, ``guard_async`` and ``run``.

_CONTROLS: Final = ("spend", "budgets", "extend", "stop", "resume", "stops", "snapshot", "flush", "reset")
_OWN: Final = ("budget", "loop", "context", "breaker", "tokens", "signature", "cost")


@overload
def guard(fn: Callable[_P, _R], /, **keywords: Unpack[FunctionSettings]) -> GuardedFunction[_P, _R]: ...
@overload
def guard(
    fn: None = None, /, **keywords: Unpack[FunctionSettings]
) -> Callable[[Callable[_P, _R]], GuardedFunction[_P, _R]]: ...
def guard(fn: Callable[..., Any] | None = None, /, **keywords: Unpack[FunctionSettings]) -> Any:
    """Guard a function that calls a model. Also a decorator: ``@guard(budget={"max_usd": 2})``.

    ``budget``: ``max_usd``, ``max_tokens``, ``max_calls`` of the run; ``per_minute``, ``per_hour``, ``per_day``,
    ``per_week``, ``per_month`` over all runs, in dollars or as a mapping of the same three; or ``Budget`` objects.
    ``loop``: ``repeats`` rounds of a cycle of at most ``max_cycle_len`` calls; ``by``: ``"result"`` (the same call, or
    the same tool with nothing new in its results), ``"call"`` or ``"name"``. ``context``: ``max_context_tokens`` and
    ``headroom``. ``breaker``: ``failures`` in a row and ``reset_seconds``. ``tokens``: counts the prompt, given the
    call's arguments. ``signature``: what a result did, for ``loop``; None leaves it out. ``cost``: dollars of every
    call, or a function of the result, or one of input and output tokens. ``name``: its name in trips and
    figures. Everything else as in a policy: ``store``, ``alerts``, ``on_trip``, ``mode``, ``prices``, ``max_seconds``,
    ``on_outage`` and so on.

    The guarded function has ``trips``, ``spend()``, ``budgets()``, ``extend()``, ``stop()``, ``resume()``,
    ``snapshot()``, ``flush()`` and ``reset()``.
    """
    return _wrapped(fn, {**keywords}, _guard)


@overload
def guard_async(fn: Callable[_P, _R], /, **keywords: Unpack[FunctionSettings]) -> GuardedFunction[_P, _R]: ...
@overload
def guard_async(
    fn: None = None, /, **keywords: Unpack[FunctionSettings]
) -> Callable[[Callable[_P, _R]], GuardedFunction[_P, _R]]: ...
def guard_async(fn: Callable[..., Any] | None = None, /, **keywords: Unpack[FunctionSettings]) -> Any:
    """Guard a coroutine function, or one that returns an async iterator, as ``guard`` does for other functions."""
    return _wrapped(fn, {**keywords}, _guard_async)


def _wrapped(
    fn: Callable[..., Any] | None,
    keywords: dict[str, Any],
    wrap: Callable[[Callable[..., Any], Caller, Caller | None], Any],
) -> Any:
    if fn is None:
        _settings(keywords)  # reject mistakes here, not when the function is decorated
        return lambda function: _wrapped(function, keywords, wrap)
    if not callable(fn):
        raise PolicyError(
            f"{fn!r} cannot be called: give the function that calls the model, and everything else by keyword"
        )
    caller = _caller(getattr(fn, "__qualname__", None) or type(fn).__name__, keywords)
    inner = getattr(fn, "__runguard__", None)
    made = wrap(fn, caller, inner if isinstance(inner, Caller) else None)
    update_wrapper(made, fn)
    made.__runguard__ = caller
    for name in _CONTROLS:
        setattr(made, name, getattr(caller, name))
    made.trips = caller.guard.trips
    return made


def _caller(name: str, keywords: dict[str, Any]) -> Caller:
    settings, given = _settings(keywords), keywords.get("name")
    if given is not None and not isinstance(given, str):
        raise PolicyError(f"name = {given!r}: give a text")
    return Caller(given or name, settings)


def _check_names(keywords: dict[str, Any], also: tuple[str, ...] = ()) -> None:
    known = (*_OWN, "name", *also, *Policy.model_fields)
    for name in keywords:
        if name not in known:
            raise PolicyError(f"{name}: no such setting; {did_you_mean(name, known)}")


def _settings(keywords: dict[str, Any]) -> GuardSettings:
    _check_names(keywords)
    own = {name: keywords.get(name) for name in _OWN}
    return settings_of(
        **own, policy={key: value for key, value in keywords.items() if key not in _OWN and key != "name"}
    )


@contextmanager
def run(
    *,
    user: str = "",
    session: str = "",
    app: str = "",
    labels: Mapping[str, str] | None = None,
    automatic: bool = False,
    **limits: Unpack[FunctionSettings],
) -> Iterator[RunContext]:
    """Begin a run: every guarded call in the block belongs to it.

    It has its own counters and is charged to this user and session, with these labels. Agents of LangChain, OpenAI
    Agents and Pydantic AI that start in the block belong to it, too; ADK's Runner names its own user and session.
    ``budget=`` and the other limits of ``guard`` apply to all guarded calls in the block together. ``usd``, ``tokens``,
    ``calls`` and ``trips`` of the block are its bill, also after its end. Works the same in async code.

    ``automatic``: a program has written the message, so a loop of agents goes on where the last run of the session has
    left it. A person's message starts every count anew.
    """
    check_whom(user=user, session=session, app=app)
    if labels is not None and not (
        isinstance(labels, Mapping) and all(isinstance(text, str) for pair in labels.items() for text in pair)
    ):
        raise PolicyError("labels: give a mapping of texts to texts, such as {'team': 'search'}")
    if not isinstance(automatic, bool):
        raise PolicyError(f"automatic = {shown(automatic)}: give True for a message that no person wrote")
    _check_names({**limits}, ("user", "session", "app", "labels", "automatic"))
    caller = _caller(app or "run", {**limits}) if limits else None
    here = RunContext(app, user, session, labels, caller, automatic=automatic)
    around = SURROUNDINGS.get()
    here.outer = around.run
    if here.caller is not None:
        here.caller.context = here
    token = SURROUNDINGS.set(around._replace(run=here))
    is_closed = False
    try:
        FINALIZED.ready()
        carry()
        yield here
    except GeneratorExit:  # the block is in a generator that is closed, perhaps by the collector
        is_closed = True
        FINALIZED.put(here.end)
        raise
    finally:
        if not is_closed:
            try:
                here.end()
            except Exception as fault:
                for caller in list(here.states):
                    caller.guard.faults.note("end of run", fault)
        with suppress(ValueError):  # the block ends in another context, which has no such value
            SURROUNDINGS.reset(token)


def _history(fn: Callable[..., Any]) -> Callable[[], Any] | None:
    """Return the method that gives the history of a google-genai chat, or None for other functions.

    A chat that calls functions asks again by itself, and only its history says how often.
    """
    if getattr(fn, "__name__", "") != "send_message":
        return None
    history = getattr(getattr(fn, "__self__", None), "get_history", None)
    return history if callable(history) else None


def _chat_reading(result: Any, history: Callable[[], Any]) -> Reading:
    reading = read(result)
    with suppress(Exception):
        return reading if reading.earlier else replace(reading, earlier=earlier_in(history()))
    return reading


def _finished(
    result: Any, call: GuardedCall, history: Callable[[], Any] | None, *, lazy: bool = False, is_async: bool = False
) -> Any:
    """Book the call, and return the result. A result in pieces is returned in a stream that books the call."""
    try:
        if type(result) not in WHOLE and (handed := in_pieces(result, call, lazy=lazy, is_async=is_async)) is not None:
            return handed
        call.settle(result, None if history is None else _chat_reading(result, history))
    except BaseException as fault:
        call.drop(fault)
        if not isinstance(fault, Exception):
            raise
    return result


def _guard(fn: Callable[..., Any], caller: Caller, inner: Caller | None) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
        raise PolicyError(f"'{caller.name}' is async: use guard_async")
    if caller.is_off:
        return lambda *args, **kwargs: fn(*args, **kwargs)
    lazy, history = inspect.isgeneratorfunction(fn), _history(fn)

    def guarded(*args: Any, **kwargs: Any) -> Any:
        around, mark = SURROUNDINGS.get(), None
        call = GuardedCall(caller, around.inner, is_stacked=inner is not None)
        call.ask_now(args, kwargs)
        token = OWNERS.set(call.owners)
        if inner is not None or around.inner:  # what is guarded itself need not ask the runs again
            mark = SURROUNDINGS.set(around._replace(inner=None if inner is None else [inner]))
        try:
            result = fn(*args, **kwargs)
        except BaseException as error:
            call.fail(error)
            raise
        finally:
            if mark is not None:
                SURROUNDINGS.reset(mark)
            OWNERS.reset(token)
        if type(result) not in WHOLE and isinstance(result, Coroutine):
            result.close()
            call.release()
            raise PolicyError(f"'{caller.name}' returned a coroutine: use guard_async")
        return _finished(result, call, history, lazy=lazy)

    return guarded


def _guard_async(fn: Callable[..., Any], caller: Caller, inner: Caller | None) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(fn):
        raise PolicyError(f"'{caller.name}' is not async: use guard")
    is_inner_lazy = inner is not None and inner.is_lazy and not inspect.iscoroutinefunction(fn)
    if inspect.isasyncgenfunction(fn) or is_inner_lazy:
        return _guard_generator(fn, caller, inner)
    history = _history(fn)

    async def guarded(*args: Any, **kwargs: Any) -> Any:
        if caller.is_off:
            result = fn(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result
        around, mark = SURROUNDINGS.get(), None
        call = GuardedCall(caller, around.inner, is_stacked=inner is not None)
        await call.ask(args, kwargs)
        token = OWNERS.set(call.owners)
        if inner is not None or around.inner:
            mark = SURROUNDINGS.set(around._replace(inner=None if inner is None else [inner]))
        try:
            result = fn(*args, **kwargs)
            if type(result) is CoroutineType or inspect.isawaitable(result):
                result = await result
        except BaseException as error:
            call.fail(error)
            raise
        finally:
            with suppress(ValueError):  # a coroutine that is thrown away ends in another context: nothing to restore
                if mark is not None:
                    SURROUNDINGS.reset(mark)
                OWNERS.reset(token)
        return _finished(result, call, history, is_async=True)

    if getattr(fn, "__name__", "") == "stream" and not inspect.iscoroutinefunction(fn):
        return lambda *args, **kwargs: Pending(guarded(*args, **kwargs))
    return guarded


def _guard_generator(fn: Callable[..., Any], caller: Caller, inner: Caller | None) -> Callable[..., Any]:
    """Guard a function that returns an async generator. Open each call at the first piece: nothing is sent before."""
    caller.is_lazy = True

    def streaming(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        if caller.is_off:
            return fn(*args, **kwargs)  # type: ignore[no-any-return]
        around = SURROUNDINGS.get()
        call = GuardedCall(caller, around.inner, is_stacked=inner is not None)
        mark = SURROUNDINGS.set(around._replace(inner=[inner])) if inner is not None else None
        try:
            pieces: AsyncIterator[Any] = fn(*args, **kwargs)
        finally:
            if mark is not None:
                SURROUNDINGS.reset(mark)
        try:
            return AsyncGuardedStream(pieces, call, opener=partial(call.ask, args, kwargs))
        except Exception as fault:
            caller.give_up_call(fault)
            return pieces

    return streaming
