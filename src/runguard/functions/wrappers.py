"""``guard`` and ``guard_async``: any function that calls a model, checked before every call. ``run``: whose calls they
are.

    call = runguard.guard(call_model, budget={"max_usd": 2.0}, loop={"repeats": 3})

The wrapped function returns what it returned before; its cost, tokens and tool calls are read from that. A call that
may not be made raises the error that says why, and so does every later one of the same run.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from functools import update_wrapper
from typing import Any, Final, ParamSpec, TypeVar, Unpack, overload

from runguard.accounting.charges import OWNERS, Charge
from runguard.core.exceptions import PolicyError, RunStoppedError
from runguard.core.mistakes import nearest
from runguard.functions.calls import RUN, Call, Caller, RunContext, owners_of
from runguard.functions.first_call import Turn, called
from runguard.functions.keywords import Settings, settings_of
from runguard.functions.streams import AsyncStream, Pending, Stream, drop_all, is_manager, manage
from runguard.functions.sync import awaited, drive
from runguard.policy.settings import Policy
from runguard.policy.typed_settings import FunctionSettings
from runguard.providers.answers import Reading, earlier_in, read
from runguard.providers.prompts import Request

_P = ParamSpec("_P")
_R = TypeVar("_R")
# The guard right inside of the one that calls now, until it is called: runs around both have been asked.
_INSIDE: Final[ContextVar[list[Caller]]] = ContextVar("runguard_inside")
_CONTROLS: Final = ("spend", "budgets", "extend", "stop", "resume", "stops", "snapshot", "flush", "reset")
_OWN: Final = ("budget", "loop", "context", "breaker", "tokens", "signature", "cost")


@overload
def guard(fn: Callable[_P, _R], /, **keywords: Unpack[FunctionSettings]) -> Callable[_P, _R]: ...
@overload
def guard(
    fn: None = None, /, **keywords: Unpack[FunctionSettings]
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...
def guard(fn: Callable[..., Any] | None = None, /, **keywords: Unpack[FunctionSettings]) -> Any:
    """Guard a function that calls a model. Also a decorator: ``@guard(budget={"max_usd": 2})``.

    ``budget``: ``max_usd``, ``max_tokens``, ``max_calls`` of the run; ``per_minute``, ``per_hour``, ``per_day``,
    ``per_week``, ``per_month`` over all runs, in dollars or as a mapping of the same three; or ``Budget`` objects.
    ``loop``: ``repeats`` rounds of a circle of at most ``max_cycle_len`` calls; ``by``: ``"result"`` (the same call, or
    the same tool with nothing new in its results), ``"call"`` or ``"name"``. ``context``: ``max_context_tokens`` and
    ``headroom``. ``breaker``: ``failures`` in a row and ``reset_seconds``. ``tokens``: counts the prompt, given the
    call's arguments. ``signature``: what a result did, for ``loop``; None leaves it out. ``cost``: dollars of every
    call, or a function of the result, or one of input and output tokens. ``name``: what it is called in trips and
    figures. All else as in a policy: ``store``, ``alerts``, ``on_trip``, ``mode``, ``prices``, ``max_seconds``,
    ``on_outage`` and so on.

    The guarded function has ``trips``, ``spend()``, ``budgets()``, ``extend()``, ``stop()``, ``resume()``,
    ``snapshot()``, ``flush()`` and
    ``reset()``.
    """
    return _wrapped(fn, {**keywords}, _guard)


@overload
def guard_async(fn: Callable[_P, _R], /, **keywords: Unpack[FunctionSettings]) -> Callable[_P, _R]: ...
@overload
def guard_async(
    fn: None = None, /, **keywords: Unpack[FunctionSettings]
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...
def guard_async(fn: Callable[..., Any] | None = None, /, **keywords: Unpack[FunctionSettings]) -> Any:
    """``guard`` for a coroutine function, or one that returns an async iterator."""
    return _wrapped(fn, {**keywords}, _guard_async)


def _wrapped(
    fn: Callable[..., Any] | None,
    keywords: dict[str, Any],
    wrap: Callable[[Callable[..., Any], Caller, Caller | None], Any],
) -> Any:
    if fn is None:
        _settings(keywords)  # a mistake is told where it was made
        return lambda function: _wrapped(function, keywords, wrap)
    if not callable(fn):
        raise PolicyError(
            f"{fn!r} cannot be called: give the function that calls the model, and everything else by keyword"
        )
    caller = _caller(getattr(fn, "__qualname__", None) or type(fn).__name__, keywords)
    inside = getattr(fn, "__runguard__", None)
    made = wrap(fn, caller, inside if isinstance(inside, Caller) else None)
    update_wrapper(made, fn)
    made.__runguard__ = caller
    for name in _CONTROLS:
        setattr(made, name, getattr(caller, name))
    made.trips = caller.guard.trips
    return made


def _caller(name: str, keywords: dict[str, Any]) -> Caller:
    return Caller(str(keywords.get("name") or name), _settings(keywords))


def _check_names(keywords: dict[str, Any], also: tuple[str, ...] = ()) -> None:
    known = (*_OWN, "name", *also, *Policy.model_fields)
    for name in keywords:
        if name not in known:
            raise PolicyError(f"{name}: no such setting; {nearest(name, known)}")


def _settings(keywords: dict[str, Any]) -> Settings:
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
    **limits: Unpack[FunctionSettings],
) -> Iterator[RunContext]:
    """One run: every guarded call in the block belongs to it, with fresh counters, on the account of this user and
    session.

    With ``budget=`` or other limits of ``guard``, they hold for all guarded calls in the block together. The same
    in async code.
    """
    for name, value in (("user", user), ("session", session), ("app", app)):
        if not isinstance(value, str):
            raise PolicyError(f"{name} = {value!r}: give a text")
    if labels is not None and not (
        isinstance(labels, Mapping) and all(isinstance(text, str) for pair in labels.items() for text in pair)
    ):
        raise PolicyError("labels: give a mapping of texts to texts, such as {'team': 'search'}")
    _check_names({**limits}, ("user", "session", "app", "labels"))
    here = RunContext(app, user, session, labels, _caller(app or "run", {**limits}) if limits else None)
    here.outer = RUN.get()
    if here.caller is not None:
        here.caller.context = here
    token = RUN.set(here)
    try:
        yield here
    finally:
        try:
            here.end()
        except Exception as fault:
            for caller in list(here.states):
                caller.guard.faults.note("end of run", fault)
        with suppress(ValueError):  # left in another context than it was entered in: the other one knows nothing of it
            RUN.reset(token)


def _is_inside(own: Caller) -> bool:
    """Whether this is the call that the guard around makes; another attempt of a retry between them is one more call
    .
    """
    expected = _INSIDE.get([])
    return own in expected and expected.pop() is own


def _layers(own: Caller, is_inside: bool) -> list[Caller]:
    """Who has a say about a call: the runs around it that have limits, the outermost first,
    then the callable itself.
    """
    context = None if is_inside else RUN.get()
    layers = [own]
    if context is None:
        return layers
    while context is not None:
        if context.caller is not None and not context.ended and not context.caller.is_off:
            layers.append(context.caller)
        context = context.outer
    layers.reverse()
    return layers


def _history(fn: Callable[..., Any]) -> Callable[[], Any] | None:
    """A chat of google-genai asks again by itself when it has called functions,
    and only its history tells how often.
    """
    told = (
        getattr(getattr(fn, "__self__", None), "get_history", None)
        if getattr(fn, "__name__", "") == "send_message"
        else None
    )
    return told if callable(told) else None


def _chat_reading(result: Any, history: Callable[[], Any]) -> Reading:
    told = read(result)
    with suppress(Exception):
        told.earlier = told.earlier or earlier_in(history())
    return told


def _handed_over(result: Any, calls: list[Call], history: Callable[[], Any] | None, *, lazy: bool = False) -> Any:
    """What came back, booked; or, where it comes in pieces, what books it when they end."""
    if type(result) is not dict:  # most are
        if isinstance(result, Iterator):
            return Stream(result, calls, lazy=lazy)
        if isinstance(result, AsyncIterator):
            return AsyncStream(result, calls)
        if is_manager(result):
            return manage(result, calls)
    told = None if history is None else _chat_reading(result, history)
    for call in calls:
        call.caller.done(call, result, told)
    return result


# ---- without an event loop ------------------------------------------------------------------------------------------


def _guard(fn: Callable[..., Any], caller: Caller, inside: Caller | None) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
        raise PolicyError(f"'{caller.name}' is async: use guard_async")
    if caller.is_off:
        return lambda *args, **kwargs: fn(*args, **kwargs)
    lazy, history = inspect.isgeneratorfunction(fn), _history(fn)

    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            calls, token = _open_layers(caller, inside, args, kwargs)
        except (RunStoppedError, PolicyError):
            raise
        except Exception as fault:
            caller.fault(fault)
            calls, token = [], OWNERS.set(OWNERS.get())
        # what is guarded itself need not ask the runs again
        mark = _INSIDE.set([inside]) if inside is not None else None
        try:
            result = fn(*args, **kwargs)
        except BaseException as error:
            for call in calls:
                try:
                    call.caller.failed(call, error)
                except Exception as fault:
                    call.caller.drop(call, fault)
            raise
        finally:
            if mark is not None:
                _INSIDE.reset(mark)
            OWNERS.reset(token)
        if type(result) is not dict and isinstance(result, Coroutine):
            result.close()
            _never_left(calls)
            raise PolicyError(f"'{caller.name}' returned a coroutine: use guard_async")
        try:
            return _handed_over(result, calls, history, lazy=lazy)
        except Exception as fault:
            drop_all(calls, fault)
            return result

    return guarded


def _open_layers(
    caller: Caller, inside: Caller | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> "tuple[list[Call], Token[tuple[Charge, ...]]]":
    """Leave from everybody who has a say; from then on they own what is called, until the token is reset."""
    layers, before = _layers(caller, _is_inside(caller)), OWNERS.get()
    if len(layers) == 1 and not before:
        call = _open(caller, args, kwargs)
        call.stacked = inside is not None
        return [call], OWNERS.set((call.charge,) if call.charge is not None else ())
    calls: list[Call] = []
    token = OWNERS.set(owners_of(before, calls))
    try:
        for layer in layers:
            calls.append(_open(layer, args, kwargs))
            calls[-1].stacked = inside is not None
            OWNERS.set(owners_of(before, calls))
    except BaseException:
        OWNERS.reset(token)
        _never_left(calls)
        raise
    return calls, token


def _open(layer: Caller, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    request = layer.request(args, kwargs)
    if layer.settings.tokens is not None:
        request = layer.counted(request, _count(layer, args, kwargs))
    if (call := layer.open_now(request)) is not None:
        return call
    on_loop = asyncio._get_running_loop() is not None  # a sync call on an event loop holds up everything on it
    turn, ticket = layer.turn(request, True)
    if turn is Turn.LATER and ticket is not None:
        try:
            ticket.result(0.0 if on_loop else layer.settings.policy.hold_seconds)
        except TimeoutError:  # the ledger says who holds what
            layer.give_back(ticket)
            turn, ticket = Turn.BESIDE if on_loop else Turn.NOW, None
        except BaseException:
            layer.give_back(ticket)
            raise
    try:
        return drive(
            layer.open(request, turn, ticket, True, on_loop), layer.guard.accounts.ledger.is_shared, layer.never_left
        )
    except BaseException:
        layer.give_back(ticket)
        raise


def _count(layer: Caller, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    assert layer.settings.tokens is not None
    try:
        return layer.settings.tokens(*args, **kwargs)
    except Exception as error:
        return error


def _never_left(calls: list[Call]) -> None:
    for call in calls:
        call.caller.never_left(call)


# ---- with an event loop ---------------------------------------------------------------------------------------------


def _guard_async(fn: Callable[..., Any], caller: Caller, inside: Caller | None) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(fn):
        raise PolicyError(f"'{caller.name}' is not async: use guard")
    if inspect.isasyncgenfunction(fn) or (
        inside is not None and inside.is_lazy and not inspect.iscoroutinefunction(fn)
    ):
        caller.is_lazy = True

        def streaming(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            if caller.is_off:
                return fn(*args, **kwargs)  # type: ignore[no-any-return]
            is_inside = False
            try:
                is_inside = _is_inside(caller)
            except Exception as fault:
                caller.fault(fault)
            mark = _INSIDE.set([inside]) if inside is not None else None
            try:
                inner: AsyncIterator[Any] = fn(*args, **kwargs)
            finally:
                if mark is not None:
                    _INSIDE.reset(mark)
            try:
                return AsyncStream(
                    inner, caller=caller, opener=lambda: _open_all(caller, inside, is_inside, args, kwargs)
                )
            except Exception as fault:
                caller.fault(fault)
                return inner

        return streaming

    history = _history(fn)

    async def guarded(*args: Any, **kwargs: Any) -> Any:
        if caller.is_off:
            return await awaited(fn(*args, **kwargs))
        calls: list[Call] = []
        owners = OWNERS.get()
        try:
            calls = await _open_all(caller, inside, _is_inside(caller), args, kwargs)
            owners = owners_of(owners, calls)
        except (RunStoppedError, PolicyError):
            raise
        except Exception as fault:
            caller.fault(fault)
        tokens = OWNERS.set(owners), _INSIDE.set([] if inside is None else [inside])
        try:
            result = fn(*args, **kwargs)
            if inspect.isawaitable(result):
                result = await result
        except BaseException as error:
            for call in calls:
                try:
                    call.caller.failed(call, error)
                except Exception as fault:
                    call.caller.drop(call, fault)
            raise
        finally:
            # a coroutine that is thrown away ends in another context: there is nothing to restore
            with suppress(ValueError):
                _INSIDE.reset(tokens[1])
                OWNERS.reset(tokens[0])
        try:
            return _handed_over(result, calls, history)
        except Exception as fault:
            drop_all(calls, fault)
            return result

    if getattr(fn, "__name__", "") == "stream" and not inspect.iscoroutinefunction(fn):
        return lambda *args, **kwargs: Pending(guarded(*args, **kwargs))
    return guarded


async def _open_all(
    caller: Caller, inside: Caller | None, is_inside: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Call]:
    calls: list[Call] = []
    before = OWNERS.get()
    token = OWNERS.set(owners_of(before, calls))
    try:
        for layer in _layers(caller, is_inside):
            calls.append(await _open_async(layer, args, kwargs))
            calls[-1].stacked = inside is not None
            OWNERS.set(owners_of(before, calls))
    except BaseException:
        _never_left(calls)
        raise
    finally:
        with suppress(ValueError):
            OWNERS.reset(token)
    return calls


async def _open_async(layer: Caller, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    request: Request = layer.request(args, kwargs)
    if layer.settings.tokens is not None:
        counted = _count(layer, args, kwargs)
        request = layer.counted(request, await _quietly(counted) if inspect.isawaitable(counted) else counted)
    if (call := layer.open_now(request)) is not None:
        return call
    turn, ticket = layer.turn(request, False)
    if turn is Turn.LATER and ticket is not None:
        try:
            is_called = await called(ticket, layer.settings.policy.hold_seconds)
        except BaseException:
            layer.give_back(ticket)
            raise
        if not is_called:
            layer.give_back(ticket)
            turn, ticket = Turn.NOW, None
    return await layer.open(request, turn, ticket, False)


async def _quietly(counted: Any) -> Any:
    try:
        return await counted
    except Exception as error:
        return error
