"""An answer that comes in pieces: each piece is passed on at once, and the call is booked when the stream ends, fails
or is closed early.

Everything else that the provider's stream can do still works.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from runguard.core.errors import PolicyError, RunStoppedError
from runguard.engine.charges import OWNERS
from runguard.functions.booking import done, drop_all, failed, never_left
from runguard.functions.caller import Caller, GuardedCall, open_ones
from runguard.functions.dropped import DROPPED
from runguard.providers.streams import StreamReading

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
        DROPPED.ready()

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
        except Exception as fault:
            drop_all(self._calls, fault)

    @abstractmethod
    def _finish(self, error: BaseException | None) -> None: ...


class _Pieces(GuardedObject):
    """What sync and async streams share: reading the pieces and booking the call."""

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
        """The stream ended, failed, or was left (None). Book the last reported usage, flagged as an estimate unless the
        provider's report was final.
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
        """Somebody may have read the provider's stream directly, as with Anthropic's ``text_stream``. Then its snapshot
        knows more.
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
            DROPPED.take(partial(self._finish, None))


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
                    self._caller.fault(fault)
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
