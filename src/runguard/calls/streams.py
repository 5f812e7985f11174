"""What a guarded function hands out for an answer that comes in pieces: it books the call when the pieces end.

``calls/functions`` wraps what its function returned with ``in_pieces``: a stream, or a manager that has to be entered.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from runguard.background import FINALIZED
from runguard.calls.function_calls import GuardedCall
from runguard.calls.surroundings import open_ones
from runguard.engine.charges import OWNERS
from runguard.providers.streams import StreamReading

# ---- What all of them share.

# What the streams of Anthropic's and OpenAI's libraries have put together so far. Both fail before the first piece.
_SNAPSHOTS: Final = ("current_message_snapshot", "current_completion_snapshot")


def _reads_rest(name: str) -> bool:
    """Return whether a method of such streams reads the whole rest by itself."""
    return name == "until_done" or name.startswith("get_final_")


class GuardedObject(ABC):
    """Wraps an object of the provider's library: everything else that it can do still works.

    No method here lets an error of RunGuard out: the provider's answer must not fail because of it.
    """

    def __init__(self, inner: Any, call: GuardedCall) -> None:
        self._inner, self._call = inner, call
        FINALIZED.ready()

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # not set yet
            raise AttributeError(name)
        return getattr(self._inner, name)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Run code of the provider's library. It belongs to the call; an exception of it ends the call."""
        owners = OWNERS.get()
        try:
            owners = (*open_ones(owners), *self._call.charges)
        except Exception as fault:
            self._call.fault(fault)
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
            self._call.drop(fault)
            if not isinstance(fault, Exception):
                raise

    @abstractmethod
    def _finish(self, error: BaseException | None) -> None: ...


class _Pieces(GuardedObject):
    """What sync and async streams share: reading the pieces and booking the call.

    Each piece is passed on at once. The call is booked when the stream ends, fails or is closed early.
    """

    def __init__(self, inner: Any, call: GuardedCall, lazy: bool) -> None:
        super().__init__(inner, call)
        self._reading = StreamReading()
        self._last: Any = None  # the last piece
        self._begun = not lazy  # a generator does nothing before its first piece

    def _next(self, ask: Callable[..., Any] | None = None, *args: Any) -> Any:
        """Return the next piece. ``ask``: the method that gives it, where that is not ``next``."""
        self._begun = True
        with self._asking():
            piece = next(self._inner) if ask is None else ask(*args)
        return self._taken(piece)

    async def _anext(self) -> Any:
        self._begun = True
        with self._asking():
            piece = await anext(self._inner)
        return self._taken(piece)

    def _taken(self, piece: Any) -> Any:
        try:
            self._last = piece
            self._reading.feed(piece)
        except Exception as fault:
            self._call.fault(fault)
        return piece

    def _finish(self, error: BaseException | None) -> None:
        """Book the last reported usage: the stream ended, failed, or was left (None).

        It is flagged as an estimate unless the provider's report was final.
        """
        call = self._call
        if isinstance(error, StopIteration | StopAsyncIteration):
            unreported = self._reading.received if self._reading.ends_unreported else None
            call.settle(self._last, self._reading.reading(), unreported)
        elif not self._begun:
            call.release()
        elif call.is_open:
            self._read_snapshot()
            so_far, reading = self._reading, self._reading.reading()
            if error is None and (reading.usage is not None or reading.usd is not None):
                call.settle(self._last, reading, None if so_far.is_final else so_far.received)
            else:
                call.fail(error, so_far.received, streaming=True, reading=reading, last=self._last)

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
        call = self.__dict__.get("_call")
        if call is not None and call.is_open:  # dropped without being closed
            FINALIZED.put(self._end)


class GuardedStream(_Pieces, Iterator[Any]):
    def __init__(self, inner: Any, call: GuardedCall, *, lazy: bool = False) -> None:
        super().__init__(inner, call, lazy)

    def __iter__(self) -> Self:
        return self

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if name in ("send", "throw"):  # of a generator
            return partial(self._next, found)
        return partial(self._rest, found) if _reads_rest(name) else found

    def _rest(self, then: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for _ in self:
            pass
        result = then(*args, **kwargs)
        return self if result is self._inner else result

    def __next__(self) -> Any:
        return self._next()

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

    def __init__(self, inner: Any, call: GuardedCall, *, opener: Callable[[], Awaitable[None]] | None = None) -> None:
        super().__init__(inner, call, lazy=opener is not None)
        self._opener, self._opening = opener, False

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
                await self._opener()
            finally:
                self._opening = False
            self._opener = None
        return await self._anext()

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
        return await self._anext()


class _AlsoSyncStream(AsyncGuardedStream):
    """Can be read with ``for``, too."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self._next()


# ---- Streams that have to be entered: ``with client.messages.stream(...) as stream``.

_ENTERED_ONCE: Final = "a stream can be entered only once; make another call"


def is_manager(result: Any) -> bool:
    """Return whether a result has to be entered. Managers of Anthropic and OpenAI ask the provider only then."""
    kind = type(result)
    return kind.__name__.endswith("StreamManager") and (hasattr(kind, "__enter__") or hasattr(kind, "__aenter__"))


class _StreamManager(GuardedObject):
    """What both managers share. Entering makes the call. A manager that is dropped before has made none."""

    _stream: Any = None  # set when it is entered

    def _entered(self, entered: Any, kind: type[GuardedStream | AsyncGuardedStream]) -> Any:
        try:
            self._stream = kind(entered, self._call)
        except Exception as fault:
            self._call.drop(fault)
            return entered
        return self._stream

    def _finish(self, error: BaseException | None) -> None:
        if error is not None:
            self._call.fail(error)
        elif self._stream is not None:
            self._stream._finish(None)

    def __del__(self) -> None:
        if self._stream is None and (call := self.__dict__.get("_call")) is not None:
            FINALIZED.put(call.release)


class StreamManager(_StreamManager):
    def __enter__(self) -> Any:
        if self._stream is not None or self._call.is_over:
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
        if self._stream is not None or self._call.is_over:
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


# ---- Which of them an answer needs.

_TYPES_KEPT: Final = 512
WHOLE: Final[set[type]] = {dict}  # types of results that are whole answers: not streams, coroutines or managers


def in_pieces(result: Any, call: GuardedCall, *, lazy: bool = False, is_async: bool = False) -> Any:
    """Return the stream or the manager around what the call returned, or None for a whole answer.

    A stream of LiteLLM can be read with ``for`` and with ``async for``. ``is_async``: the second is meant.
    """
    kind = type(result)
    if isinstance(result, AsyncIterator):
        if not isinstance(result, Iterator):
            return AsyncGuardedStream(result, call)
        return _AlsoSyncStream(result, call) if is_async else _AlsoAsyncStream(result, call)
    if isinstance(result, Iterator):
        return GuardedStream(result, call, lazy=lazy)
    if is_manager(result):
        return AsyncStreamManager(result, call) if hasattr(kind, "__aenter__") else StreamManager(result, call)
    if result.__class__ is kind and not hasattr(kind, "__await__") and len(WHOLE) < _TYPES_KEPT:
        WHOLE.add(kind)
    return None
