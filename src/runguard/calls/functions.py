"""``guard`` and ``guard_async`` check a function that calls a model before every call. ``run`` owns the calls.

    call = runguard.guard(call_model, budget={"max_usd": 2.0}, loop={"repeats": 3})

Users call them. The wrapped function returns what it returned before. Its cost, tokens and tool calls are read from
that. A refused call raises the error that says why, and so does every later call of the same run.
"""

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial, update_wrapper
from types import CoroutineType, TracebackType
from typing import Any, Concatenate, Final, ParamSpec, Protocol, Self, TypeVar, Unpack, overload

from runguard.background import FINALIZED
from runguard.calls.function_calls import (
    done,
    drop_all,
    fail_all,
    failed,
    never_left,
    open_call,
    open_now,
    recover_calls,
)
from runguard.calls.function_state import (
    SURROUNDINGS,
    Admission,
    Caller,
    GuardedCall,
    GuardSettings,
    RunContext,
    drive,
    may_start,
    open_ones,
    settings_of,
)
from runguard.calls.threads import carry
from runguard.calls.whom import check_whom
from runguard.core.decision import Trip
from runguard.core.errors import PolicyError, RunStoppedError, nearest
from runguard.core.money import BudgetStatus
from runguard.engine.charges import OWNERS, Charge
from runguard.engine.money import StepOut
from runguard.ledger.ledger import Stop
from runguard.policy.settings import FunctionSettings, Policy
from runguard.providers.messages import Reading, Request, earlier_in, read
from runguard.providers.streams import StreamReading

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
_TYPES_KEPT: Final = 512
_WHOLE: Final[set[type]] = {dict}  # types of results that are whole answers: not streams, coroutines or managers
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
    """``guard`` for a coroutine function, or one that returns an async iterator."""
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
            raise PolicyError(f"{name}: no such setting; {nearest(name, known)}")


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
    **limits: Unpack[FunctionSettings],
) -> Iterator[RunContext]:
    """Begin a run: every guarded call in the block belongs to it.

    It has its own counters and is charged to this user and session, with these labels. Agents of LangChain, OpenAI
    Agents and Pydantic AI that start in the block belong to it, too; ADK's Runner names its own user and session.
    ``budget=`` and the other limits of ``guard`` apply to all guarded calls in the block together. ``usd``, ``tokens``,
    ``calls`` and ``trips`` of the block are its bill, also after its end. Works the same in async code.
    """
    check_whom(user=user, session=session, app=app)
    if labels is not None and not (
        isinstance(labels, Mapping) and all(isinstance(text, str) for pair in labels.items() for text in pair)
    ):
        raise PolicyError("labels: give a mapping of texts to texts, such as {'team': 'search'}")
    _check_names({**limits}, ("user", "session", "app", "labels"))
    here = RunContext(app, user, session, labels, _caller(app or "run", {**limits}) if limits else None)
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
    """The history of a google-genai chat, None for other functions.

    A chat that calls functions asks again by itself, and only its history says how often.
    """
    if getattr(fn, "__name__", "") != "send_message":
        return None
    history = getattr(getattr(fn, "__self__", None), "get_history", None)
    return history if callable(history) else None


def _chat_reading(result: Any, history: Callable[[], Any]) -> Reading:
    reading = read(result)
    with suppress(Exception):
        reading.earlier = reading.earlier or earlier_in(history())
    return reading


def _in_pieces(result: Any, calls: list[GuardedCall], *, lazy: bool = False, is_async: bool = False) -> Any:
    """The stream or the manager around what the call returned: it books the call when it ends. None: a whole answer.

    A stream of LiteLLM can be read with ``for`` and with ``async for``. ``is_async``: the second is meant.
    """
    kind = type(result)
    if isinstance(result, AsyncIterator):
        if not isinstance(result, Iterator):
            return AsyncGuardedStream(result, calls)
        return _AlsoSyncStream(result, calls) if is_async else _AlsoAsyncStream(result, calls)
    if isinstance(result, Iterator):
        return GuardedStream(result, calls, lazy=lazy)
    if is_manager(result):
        return manage(result, calls)
    if result.__class__ is kind and not hasattr(kind, "__await__") and len(_WHOLE) < _TYPES_KEPT:
        _WHOLE.add(kind)
    return None


def _guard(fn: Callable[..., Any], caller: Caller, inner: Caller | None) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
        raise PolicyError(f"'{caller.name}' is async: use guard_async")
    if caller.is_off:
        return lambda *args, **kwargs: fn(*args, **kwargs)
    lazy, history = inspect.isgeneratorfunction(fn), _history(fn)

    def guarded(*args: Any, **kwargs: Any) -> Any:
        calls: list[GuardedCall] = []
        owners, around, mark = OWNERS.get(), SURROUNDINGS.get(), None
        try:
            is_inner = around.inner is not None and is_inner_call(caller)
            calls, owners = open_layers_now(caller, inner is not None, is_inner, args, kwargs)
        except (RunStoppedError, PolicyError):
            raise
        except Exception as fault:
            calls = _recovered_now(caller, fault)
        token = OWNERS.set(owners)
        if inner is not None or around.inner:  # what is guarded itself need not ask the runs again
            mark = SURROUNDINGS.set(around._replace(inner=None if inner is None else [inner]))
        try:
            result = fn(*args, **kwargs)
        except BaseException as error:
            fail_all(calls, error)
            raise
        finally:
            if mark is not None:
                SURROUNDINGS.reset(mark)
            OWNERS.reset(token)
        is_whole = type(result) in _WHOLE
        if not is_whole and isinstance(result, Coroutine):
            result.close()
            take_back(calls)
            raise PolicyError(f"'{caller.name}' returned a coroutine: use guard_async")
        try:
            if not is_whole and (handed := _in_pieces(result, calls, lazy=lazy)) is not None:
                return handed
            reading = None if history is None else _chat_reading(result, history)
            for call in calls:
                done(call, result, reading)
        except BaseException as fault:
            drop_all(calls, fault)
            if not isinstance(fault, Exception):
                raise
        return result

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
        calls: list[GuardedCall] = []
        owners, around, mark = OWNERS.get(), SURROUNDINGS.get(), None
        try:
            is_inner = around.inner is not None and is_inner_call(caller)
            calls, owners = await open_layers(caller, inner is not None, is_inner, args, kwargs)
        except (RunStoppedError, PolicyError):
            raise
        except Exception as fault:
            calls = await _recovered(caller, fault)
        token = OWNERS.set(owners)
        if inner is not None or around.inner:
            mark = SURROUNDINGS.set(around._replace(inner=None if inner is None else [inner]))
        try:
            result = fn(*args, **kwargs)
            if type(result) is CoroutineType or inspect.isawaitable(result):
                result = await result
        except BaseException as error:
            fail_all(calls, error)
            raise
        finally:
            try:
                if mark is not None:
                    SURROUNDINGS.reset(mark)
                OWNERS.reset(token)
            except ValueError:  # a coroutine that is thrown away ends in another context: there is nothing to restore
                pass
        try:
            if type(result) not in _WHOLE and (handed := _in_pieces(result, calls, is_async=True)) is not None:
                return handed
            reading = None if history is None else _chat_reading(result, history)
            for call in calls:
                done(call, result, reading)
        except BaseException as fault:
            drop_all(calls, fault)
            if not isinstance(fault, Exception):
                raise
        return result

    if getattr(fn, "__name__", "") == "stream" and not inspect.iscoroutinefunction(fn):
        return lambda *args, **kwargs: Pending(guarded(*args, **kwargs))
    return guarded


def _guard_generator(fn: Callable[..., Any], caller: Caller, inner: Caller | None) -> Callable[..., Any]:
    """An async generator does nothing before its first piece, so the call is opened then."""
    caller.is_lazy = True

    def streaming(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        if caller.is_off:
            return fn(*args, **kwargs)  # type: ignore[no-any-return]
        is_inner = False
        try:
            is_inner = is_inner_call(caller)
        except Exception as fault:
            caller.fault(fault)
        around = SURROUNDINGS.get()
        mark = SURROUNDINGS.set(around._replace(inner=[inner])) if inner is not None else None
        try:
            pieces: AsyncIterator[Any] = fn(*args, **kwargs)
        finally:
            if mark is not None:
                SURROUNDINGS.reset(mark)

        async def opened() -> list[GuardedCall]:
            return (await open_layers(caller, inner is not None, is_inner, args, kwargs))[0]

        try:
            return AsyncGuardedStream(pieces, caller=caller, opener=opened)
        except Exception as fault:
            caller.give_up_call(fault)
            return pieces

    return streaming


# ---- Open a call at every layer that limits it: the runs around it, the outermost first, then the callable.


def is_inner_call(caller: Caller) -> bool:
    """Whether this is the call that the guard around makes. Another attempt of a retry between is one more call."""
    inner = SURROUNDINGS.get().inner
    return inner is not None and caller in inner and inner.pop() is caller


def _layers(caller: Caller) -> tuple[Caller, ...]:
    """The runs with limits around a call, the outermost first, then the callable itself."""
    layers = [caller]
    context = SURROUNDINGS.get().run
    while context is not None:
        if context.caller is not None and not context.ended and not context.caller.is_off:
            layers.append(context.caller)
        context = context.outer
    return tuple(reversed(layers))


Opened = tuple[list[GuardedCall], tuple[Charge, ...]]  # a call at each layer, and the charges of all of them


async def open_layers(
    caller: Caller,
    stacked: bool,
    is_inner: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    no_loop: bool = False,
) -> Opened:
    """Get permission for one call from every layer.

    ``stacked``: the callable is itself guarded. ``is_inner``: the guard around has already asked the runs. ``no_loop``:
    a synchronous caller drives this. Each call is in the list before anything else can fail, so that an error takes all
    of them back.
    """
    owners = open_ones(OWNERS.get())
    layers = (caller,) if is_inner or SURROUNDINGS.get().run is None else _layers(caller)
    calls: list[GuardedCall] = []
    try:
        for layer in layers:
            request = layer.request(args, kwargs)
            if layer.settings.tokens is not None:
                counted = _count(layer, args, kwargs)
                if not no_loop and inspect.isawaitable(counted):
                    counted = await _result_of(counted)
                request = layer.counted(request, counted)
            call = open_now(layer, request, owners) or await _open_in_turn(layer, request, owners, no_loop)
            calls.append(call)
            if stacked:
                call.stacked = True
            if call.charge is not None:
                owners = (*owners, call.charge)
    except BaseException:
        take_back(calls)
        raise
    return calls, owners


def open_layers_now(
    caller: Caller, stacked: bool, is_inner: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Opened:
    """``open_layers`` for synchronous callers."""
    make = partial(open_layers, caller, stacked, is_inner, args, kwargs, no_loop=True)
    return drive(make, False, lambda opened: take_back(opened[0]))


async def _recovered(caller: Caller, fault: Exception) -> list[GuardedCall]:
    """The calls of all layers after a fault of ours. Raises where one of them must not be made."""
    try:
        return await recover_calls(_layers(caller), fault)
    except (RunStoppedError, PolicyError):
        raise
    except Exception as second:
        caller.give_up_call(second)
        return []


def _recovered_now(caller: Caller, fault: Exception) -> list[GuardedCall]:
    """``_recovered`` for callers without an event loop."""
    try:
        return drive(partial(_recovered, caller, fault), True, take_back)
    except (RunStoppedError, PolicyError):
        raise
    except Exception as second:
        caller.give_up_call(second)
        return []


def take_back(calls: list[GuardedCall]) -> None:
    """The call is not made after all."""
    for call in calls:
        never_left(call)


async def _open_in_turn(layer: Caller, request: Request, owners: tuple[Charge, ...], no_loop: bool) -> GuardedCall:
    """Open a call, after those whose cost must be known first."""
    on_loop = no_loop and asyncio._get_running_loop() is not None  # it blocks everything on that loop
    admission, ticket = layer.admission(request, no_loop, owners)
    try:
        if admission is Admission.QUEUED and ticket is not None and not ticket.done():
            if no_loop and not on_loop:
                await StepOut()
            if on_loop or not await may_start(ticket, layer.settings.policy.hold_seconds):
                layer.give_back(ticket)  # the ledger knows what the others have reserved
                admission, ticket = Admission.ALONGSIDE if on_loop else Admission.NOW, None
        if no_loop and layer.guard.shares_store:
            await StepOut()
        return await open_call(layer, request, admission, ticket, no_loop, on_loop, owners)
    except BaseException:
        layer.give_back(ticket)
        raise


def _count(layer: Caller, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``tokens`` gives, or the exception that it raises."""
    assert layer.settings.tokens is not None
    try:
        return layer.settings.tokens(*args, **kwargs)
    except Exception as error:
        return error


async def _result_of(counted: Any) -> Any:
    try:
        return await counted
    except Exception as error:
        return error


# ---- An answer that comes in pieces.

# What the streams of Anthropic's and OpenAI's libraries have put together so far. Both fail before the first piece.
_SNAPSHOTS: Final = ("current_message_snapshot", "current_completion_snapshot")


def _reads_rest(name: str) -> bool:
    """Whether a method of such streams reads the whole rest by itself."""
    return name == "until_done" or name.startswith("get_final_")


def fault_in(calls: list[GuardedCall], error: Exception) -> None:
    """Count an internal error in a stream that goes on."""
    for call in calls:
        call.caller.guard.fault("stream", error, call.state.run.info.run)


class GuardedObject(ABC):
    """Wraps an object of the provider's library: everything else that it can do still works.

    No method here lets an error of RunGuard out: the provider's answer must not fail because of it.
    """

    def __init__(self, inner: Any, calls: list[GuardedCall]) -> None:
        self._inner, self._calls = inner, calls
        FINALIZED.ready()

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # not set yet
            raise AttributeError(name)
        return getattr(self._inner, name)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Run code of the provider's library. It belongs to these calls; an exception of it ends them."""
        owners = OWNERS.get()
        try:
            owners = (*open_ones(owners), *(call.charge for call in self._calls if call.charge is not None))
        except Exception as fault:
            fault_in(self._calls, fault)
        token = OWNERS.set(owners)
        try:
            yield
        except BaseException as error:
            self._end(error)
            raise
        finally:
            OWNERS.reset(token)

    def _end(self, error: BaseException | None = None) -> None:
        try:
            self._finish(error)
        except BaseException as fault:
            drop_all(self._calls, fault)
            if not isinstance(fault, Exception):
                raise

    @abstractmethod
    def _finish(self, error: BaseException | None) -> None: ...


class _Pieces(GuardedObject):
    """What sync and async streams share: reading the pieces and booking the call.

    Each piece is passed on at once. The call is booked when the stream ends, fails or is closed early.
    """

    def __init__(self, inner: Any, calls: list[GuardedCall], lazy: bool) -> None:
        super().__init__(inner, calls)
        self._reading = StreamReading()
        self._last: Any = None  # the last piece
        self._begun = not lazy  # a generator does nothing before its first piece

    def _taken(self, piece: Any) -> Any:
        try:
            self._last = piece
            self._reading.feed(piece)
        except Exception as fault:
            fault_in(self._calls, fault)
        return piece

    def _finish(self, error: BaseException | None) -> None:
        """Book the last reported usage: the stream ended, failed, or was left (None).

        It is flagged as an estimate unless the provider's report was final.
        """
        if isinstance(error, StopIteration | StopAsyncIteration):
            unreported = self._reading.received if self._reading.ends_unreported else None
            for call in self._calls:
                done(call, self._last, self._reading.reading(), unreported)
            return
        for call in self._calls:
            if call.over:
                continue
            if not self._begun:
                never_left(call)
                continue
            self._read_snapshot()
            so_far, reading = self._reading, self._reading.reading()
            if error is None and (reading.usage is not None or reading.usd is not None):
                done(call, self._last, reading, None if so_far.is_final else so_far.received)
            else:
                failed(call, error, so_far.received, streaming=True, reading=reading, last=self._last)

    def _read_snapshot(self) -> None:
        """Read what the provider's stream has put together.

        Somebody may have read that stream directly, as with Anthropic's ``text_stream``. Then it knows more.
        """
        for name in () if self._reading.is_final else _SNAPSHOTS:
            try:
                snapshot = getattr(self._inner, name, None)
            except Exception:
                continue
            if snapshot is not None:
                self._reading = StreamReading()
                self._reading.take_whole(snapshot)
                self._last = snapshot
                return

    def __del__(self) -> None:
        if any(not call.over for call in self.__dict__.get("_calls", ())):  # dropped without being closed
            FINALIZED.put(self._end)


class GuardedStream(_Pieces, Iterator[Any]):
    def __init__(self, inner: Any, calls: list[GuardedCall], *, lazy: bool = False) -> None:
        super().__init__(inner, calls, lazy)

    def __iter__(self) -> Self:
        return self

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if name in ("send", "throw"):  # of a generator
            return partial(self.__next__, found)
        return partial(self._rest, found) if _reads_rest(name) else found

    def _rest(self, then: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for _ in self:
            pass
        result = then(*args, **kwargs)
        return self if result is self._inner else result

    def __next__(self, ask: Callable[..., Any] | None = None, *args: Any) -> Any:
        """The next piece. ``ask``: the method that gives it, where that is not ``next``."""
        self._begun = True
        with self._asking():
            piece = next(self._inner) if ask is None else ask(*args)
        return self._taken(piece)

    def close(self) -> None:
        try:
            close = getattr(self._inner, "close", None)
            if close is not None:
                close()
        finally:
            self._end()

    def __enter__(self) -> Self:
        enter = getattr(self._inner, "__enter__", None)
        if enter is not None:
            entered = enter()
            self._inner = entered if isinstance(entered, Iterator) else self._inner
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave = getattr(self._inner, "__exit__", None)
        try:
            if leave is not None:
                leave(kind, error, trace)
        finally:
            self.close()


class AsyncGuardedStream(_Pieces, AsyncIterator[Any]):
    """``opener``: opens the call of an async generator at its first piece. The generator does nothing before."""

    def __init__(
        self,
        inner: Any,
        calls: list[GuardedCall] | None = None,
        *,
        opener: Callable[[], Awaitable[list[GuardedCall]]] | None = None,
        caller: Caller | None = None,
    ) -> None:
        super().__init__(inner, calls or [], lazy=opener is not None)
        self._opener, self._opening, self._caller = opener, False, caller

    def __aiter__(self) -> Self:
        return self

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return partial(self._rest, found) if _reads_rest(name) else found

    async def _rest(self, then: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        async for _ in self:
            pass
        result = await then(*args, **kwargs)
        return self if result is self._inner else result

    async def __anext__(self) -> Any:
        if self._opener is not None:  # a refused call is opened again with the next piece
            if self._opening:
                raise RuntimeError("another task already waits for a piece of this stream")
            self._opening = True
            try:
                self._calls = await self._opener()
            except (RunStoppedError, PolicyError):
                raise
            except Exception as fault:
                if self._caller is not None:
                    self._calls = await _recovered(self._caller, fault)
            finally:
                self._opening = False
            self._opener = None
        self._begun = True
        with self._asking():
            piece = await anext(self._inner)
        return self._taken(piece)

    async def aclose(self) -> None:
        self._opener = None
        try:
            close = getattr(self._inner, "aclose", None) or getattr(self._inner, "close", None)
            if close is not None:
                result = close()
                if hasattr(result, "__await__"):
                    await result
        finally:
            self._end()

    close = aclose  # the name in OpenAI's and Anthropic's libraries

    async def __aenter__(self) -> Self:
        enter = getattr(self._inner, "__aenter__", None)
        if enter is not None:
            entered = await enter()
            self._inner = entered if isinstance(entered, AsyncIterator) else self._inner
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave = getattr(self._inner, "__aexit__", None)
        try:
            if leave is not None:
                await leave(kind, error, trace)
        finally:
            await self.aclose()


class _AlsoAsyncStream(GuardedStream):
    """Can be read with ``async for``, too."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        self._begun = True
        with self._asking():
            piece = await anext(self._inner)
        return self._taken(piece)


class _AlsoSyncStream(AsyncGuardedStream):
    """Can be read with ``for``, too."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        self._begun = True
        with self._asking():
            piece = next(self._inner)
        return self._taken(piece)


# ---- Streams that have to be entered: ``with client.messages.stream(...) as stream``.

_ENTERED_ONCE: Final = "a stream can be entered only once; make another call"


def is_manager(result: Any) -> bool:
    """Whether a call returned an object that has to be entered. Anthropic's and OpenAI's ask the provider only then."""
    kind = type(result)
    return kind.__name__.endswith("StreamManager") and (hasattr(kind, "__enter__") or hasattr(kind, "__aenter__"))


def manage(inner: Any, calls: list[GuardedCall]) -> "_StreamManager":
    return AsyncStreamManager(inner, calls) if hasattr(type(inner), "__aenter__") else StreamManager(inner, calls)


class _StreamManager(GuardedObject):
    """What both managers share. Entering makes the call. A manager that is dropped before has made none."""

    _stream: Any = None  # set when it is entered

    def _entered(self, entered: Any, kind: type[GuardedStream | AsyncGuardedStream]) -> Any:
        try:
            self._stream = kind(entered, self._calls)
        except Exception as fault:
            drop_all(self._calls, fault)
            return entered
        return self._stream

    def _finish(self, error: BaseException | None) -> None:
        if error is not None:
            fail_all(self._calls, error)
        elif self._stream is not None:
            self._stream._finish(None)

    def __del__(self) -> None:
        if self._stream is None:
            for call in self.__dict__.get("_calls", ()):
                FINALIZED.put(partial(never_left, call))


class StreamManager(_StreamManager):
    def __enter__(self) -> Any:
        if self._stream is not None or any(call.over for call in self._calls):
            raise RuntimeError(_ENTERED_ONCE)
        with self._asking():
            entered = self._inner.__enter__()
        return self._entered(entered, GuardedStream)

    def __exit__(self, *error: object) -> Any:
        try:
            return self._inner.__exit__(*error)
        finally:
            self._end()


class AsyncStreamManager(_StreamManager):
    async def __aenter__(self) -> Any:
        if self._stream is not None or any(call.over for call in self._calls):
            raise RuntimeError(_ENTERED_ONCE)
        with self._asking():
            entered = await self._inner.__aenter__()
        return self._entered(entered, AsyncGuardedStream)

    async def __aexit__(self, *error: object) -> Any:
        try:
            return await self._inner.__aexit__(*error)
        finally:
            self._end()


class Pending(Coroutine[Any, Any, Any]):
    """A call that can be awaited, or entered at once as in ``async with client.messages.stream(...)``."""

    def __init__(self, job: Coroutine[Any, Any, Any]) -> None:
        self._job, self._manager = job, None

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._job.__await__()

    def send(self, value: Any) -> Any:
        return self._job.send(value)

    def throw(self, *error: Any) -> Any:
        return self._job.throw(*error)

    def close(self) -> None:
        self._job.close()

    async def __aenter__(self) -> Any:
        self._manager = manager = await self._job
        return await manager.__aenter__()

    async def __aexit__(self, *error: object) -> Any:
        manager: Any = self._manager
        return await manager.__aexit__(*error)
