"""An answer that comes in pieces: passed on as they come, booked when it ends, fails or is closed early.

Everything else that the provider's stream can do is still there.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from runguard.accounting.charges import OWNERS
from runguard.core.exceptions import PolicyError, RunStoppedError
from runguard.functions.calls import Call, Caller, owners_of
from runguard.functions.dropped import DROPPED
from runguard.providers.streams import StreamReading

# What the streams of Anthropic's and OpenAI's libraries have put together so far. Both fail while nothing has come.
_ENTERED_ONCE: Final = "a stream is entered once: ask for another"
_SNAPSHOTS: Final = ("current_message_snapshot", "current_completion_snapshot")


def is_manager(result: Any) -> bool:
    """Whether a call gave what has to be entered to get a stream.

    Those of Anthropic and OpenAI ask the provider only then.
    """
    kind = type(result)
    return kind.__name__.endswith("StreamManager") and (hasattr(kind, "__enter__") or hasattr(kind, "__aenter__"))


def _reads_on(name: str) -> bool:
    """Methods of such streams that read all the rest by themselves."""
    return name == "until_done" or name.startswith("get_final_")


class _Booked:
    """What both kinds of stream know of their call."""

    def __init__(self, inner: Any, calls: list[Call], lazy: bool) -> None:
        self._inner, self._calls, self._reading = inner, calls, StreamReading()
        self._last: Any = None  # piece that came
        DROPPED.ready()
        self._begun = not lazy  # a generator has done nothing until it is asked for its first piece

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # not made yet
            raise AttributeError(name)
        return getattr(self._inner, name)

    def _ended(self) -> None:
        unreported = self._reading.heard if self._reading.ends_unreported else None
        for call in self._calls:
            call.caller.done(call, self._last, self._reading.reading(), unreported)

    def _cut(self, error: BaseException | None) -> None:
        """It failed, or was left. What it told stands for it, marked unless that was the provider's last word."""
        for call in self._calls:
            if call.over:
                continue
            if not self._begun:
                call.caller.never_left(call)
                continue
            self._look_back()
            heard, told = self._reading, self._reading.reading()
            if error is None and (told.usage is not None or told.usd is not None):
                call.caller.done(call, self._last, told, None if heard.is_final else heard.heard)
            else:
                call.caller.failed(call, error, heard.heard, streaming=True, told=told, last=self._last)

    def _look_back(self) -> None:
        """It may have been read past us, as with Anthropic's ``text_stream``:
        then it knows more than was heard here.
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
        if any(not call.over for call in self.__dict__.get("_calls", ())):  # dropped without a word
            DROPPED.take(partial(self._cut, None))


def fault_in(calls: list[Call], error: Exception) -> None:
    """A fault of ours in a stream that goes on."""
    for call in calls:
        call.caller.guard.fault("stream", error, call.state.run.info.run)


def drop_all(calls: list[Call], error: Exception) -> None:
    """After a fault of ours: nothing is held for these calls any more."""
    for call in calls:
        call.caller.drop(call, error)


class Stream(_Booked, Iterator[Any]):
    def __init__(self, inner: Any, calls: list[Call], *, lazy: bool = False) -> None:
        super().__init__(inner, calls, lazy)

    def __iter__(self) -> Self:
        return self

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if name in ("send", "throw"):  # of a generator
            return partial(self.__next__, found)
        return partial(self._rest, found) if _reads_on(name) else found

    def _rest(self, then: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for _ in self:
            pass
        result = then(*args, **kwargs)
        return self if result is self._inner else result

    def __next__(self, ask: Callable[..., Any] | None = None, *args: Any) -> Any:
        """The next piece. ``ask``: what gives it, where that is not ``next``."""
        self._begun, owners = True, OWNERS.get()
        try:
            owners = owners_of(owners, self._calls)
        except Exception as fault:
            fault_in(self._calls, fault)
        token = OWNERS.set(owners)
        try:
            chunk = next(self._inner) if ask is None else ask(*args)
        except StopIteration:
            try:
                self._ended()
            except Exception as fault:
                drop_all(self._calls, fault)
            raise
        except BaseException as error:
            try:
                self._cut(error)
            except Exception as fault:
                drop_all(self._calls, fault)
            raise
        finally:
            OWNERS.reset(token)
        try:
            self._last = chunk
            self._reading.feed(chunk)
        except Exception as fault:
            fault_in(self._calls, fault)
        return chunk

    def close(self) -> None:
        try:
            close = getattr(self._inner, "close", None)
            if close is not None:
                close()
        finally:
            try:
                self._cut(None)
            except Exception as fault:
                drop_all(self._calls, fault)

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


class AsyncStream(_Booked, AsyncIterator[Any]):
    """``opener``: an async generator is asked for at its first piece, as it does nothing before."""

    def __init__(
        self,
        inner: Any,
        calls: list[Call] | None = None,
        *,
        opener: Callable[[], Awaitable[list[Call]]] | None = None,
        caller: Caller | None = None,
    ) -> None:
        super().__init__(inner, calls or [], lazy=opener is not None)
        self._opener, self._opening, self._caller = opener, False, caller

    def __aiter__(self) -> Self:
        return self

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return partial(self._rest, found) if _reads_on(name) else found

    async def _rest(self, then: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        async for _ in self:
            pass
        result = await then(*args, **kwargs)
        return self if result is self._inner else result

    async def __anext__(self) -> Any:
        if self._opener is not None:  # refused, it is asked for again with the next piece
            if self._opening:
                raise RuntimeError("the stream is already being asked for a piece")
            self._opening = True
            try:
                self._calls = await self._opener()
            except (RunStoppedError, PolicyError):
                raise
            except Exception as fault:
                if self._caller is not None:
                    self._caller.fault(fault)
            finally:
                self._opening = False
            self._opener = None
        self._begun, owners = True, OWNERS.get()
        try:
            owners = owners_of(owners, self._calls)
        except Exception as fault:
            fault_in(self._calls, fault)
        token = OWNERS.set(owners)
        try:
            chunk = await anext(self._inner)
        except StopAsyncIteration:
            try:
                self._ended()
            except Exception as fault:
                drop_all(self._calls, fault)
            raise
        except BaseException as error:
            try:
                self._cut(error)
            except Exception as fault:
                drop_all(self._calls, fault)
            raise
        finally:
            OWNERS.reset(token)
        try:
            self._last = chunk
            self._reading.feed(chunk)
        except Exception as fault:
            fault_in(self._calls, fault)
        return chunk

    async def aclose(self) -> None:
        self._opener = None
        try:
            close = getattr(self._inner, "aclose", None) or getattr(self._inner, "close", None)
            if close is not None:
                result = close()
                if hasattr(result, "__await__"):
                    await result
        finally:
            try:
                self._cut(None)
            except Exception as fault:
                drop_all(self._calls, fault)

    close = aclose  # what OpenAI's and Anthropic's streams call it

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


# ---- streams that have to be entered --------------------------------------------------------------------------------


class _Manager:
    """What has to be entered to get a stream: entered, it is the call; dropped before, none was made."""

    def __init__(self, inner: Any, calls: list[Call]) -> None:
        self._inner, self._calls = inner, calls
        self._stream: Any = None  # what was entered
        DROPPED.ready()

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # not made yet
            raise AttributeError(name)
        return getattr(self._inner, name)

    def _fail(self, error: BaseException) -> None:
        for call in self._calls:
            call.caller.failed(call, error)

    def __del__(self) -> None:
        if self.__dict__.get("_stream") is None:
            for call in self.__dict__.get("_calls", ()):
                DROPPED.take(partial(call.caller.never_left, call))


class Manager(_Manager):
    def __enter__(self) -> Stream:
        if any(call.over for call in self._calls) or self._stream is not None:
            raise RuntimeError(_ENTERED_ONCE)
        owners = OWNERS.get()
        try:
            owners = owners_of(owners, self._calls)
        except Exception as fault:
            fault_in(self._calls, fault)
        token = OWNERS.set(owners)
        try:
            entered = self._inner.__enter__()
        except BaseException as error:
            try:
                self._fail(error)
            except Exception as fault:
                drop_all(self._calls, fault)
            raise
        finally:
            OWNERS.reset(token)
        try:
            self._stream = Stream(entered, self._calls)
        except Exception as fault:
            drop_all(self._calls, fault)
            return entered  # type: ignore[no-any-return]
        return self._stream  # type: ignore[no-any-return]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        try:
            return self._inner.__exit__(kind, error, trace)
        finally:
            try:
                if self._stream is not None:
                    self._stream._cut(None)
            except Exception as fault:
                drop_all(self._calls, fault)


class AsyncManager(_Manager):
    async def __aenter__(self) -> AsyncStream:
        if any(call.over for call in self._calls) or self._stream is not None:
            raise RuntimeError(_ENTERED_ONCE)
        owners = OWNERS.get()
        try:
            owners = owners_of(owners, self._calls)
        except Exception as fault:
            fault_in(self._calls, fault)
        token = OWNERS.set(owners)
        try:
            entered = await self._inner.__aenter__()
        except BaseException as error:
            try:
                self._fail(error)
            except Exception as fault:
                drop_all(self._calls, fault)
            raise
        finally:
            OWNERS.reset(token)
        try:
            self._stream = AsyncStream(entered, self._calls)
        except Exception as fault:
            drop_all(self._calls, fault)
            return entered  # type: ignore[no-any-return]
        return self._stream  # type: ignore[no-any-return]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        try:
            return await self._inner.__aexit__(kind, error, trace)
        finally:
            try:
                if self._stream is not None:
                    self._stream._cut(None)
            except Exception as fault:
                drop_all(self._calls, fault)


def manage(inner: Any, calls: list[Call]) -> _Manager:
    return AsyncManager(inner, calls) if hasattr(type(inner), "__aenter__") else Manager(inner, calls)


class Pending(Coroutine[Any, Any, Any]):
    """A call that can be awaited, or entered at once: ``async with client.messages.stream(...)`` needs no ``await``
    either.
    """

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
