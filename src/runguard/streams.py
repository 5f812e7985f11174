"""An answer that comes in pieces: passed on as they come, booked when it ends, fails or is closed early.

Everything else that the provider's stream can do is still there.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Self

from runguard.caller import Call, owners_of
from runguard.charges import OWNERS
from runguard.reading import StreamReading


class _Booked:
    """What both kinds of stream know of their call."""

    def __init__(self, inner: Any, calls: list[Call], lazy: bool) -> None:
        self._inner, self._calls, self._reading = inner, calls, StreamReading()
        self._begun = not lazy  # a generator has done nothing until it is asked for its first piece

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # not made yet
            raise AttributeError(name)
        return getattr(self._inner, name)

    def _ended(self) -> None:
        for call in self._calls:
            call.caller.done(call, None, self._reading.reading())

    def _cut(self, error: BaseException | None) -> None:
        for call in self._calls:
            if not self._begun:
                call.caller.never_left(call)
            elif error is None and self._reading.reading().usage is not None:
                call.caller.done(call, None, self._reading.reading())
            else:
                call.caller.failed(call, error, self._reading.chars, streaming=True, told=self._reading.reading())

    def __del__(self) -> None:
        if any(not call.over for call in self.__dict__.get("_calls", ())):  # dropped without a word
            self._cut(None)


class Stream(_Booked, Iterator[Any]):
    def __init__(self, inner: Any, calls: list[Call], *, lazy: bool = False) -> None:
        super().__init__(inner, calls, lazy)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self._piece(next, self._inner)

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return partial(self._piece, found) if name in ("send", "throw") else found  # of a generator

    def _piece(self, ask: Callable[..., Any], *args: Any) -> Any:
        self._begun = True
        token = OWNERS.set(owners_of(OWNERS.get(), self._calls))
        try:
            chunk = ask(*args)
        except StopIteration:
            self._ended()
            raise
        except BaseException as error:
            self._cut(error)
            raise
        finally:
            OWNERS.reset(token)
        self._reading.feed(chunk)
        return chunk

    def close(self) -> None:
        try:
            close = getattr(self._inner, "close", None)
            if close is not None:
                close()
        finally:
            self._cut(None)

    def __enter__(self) -> Self:
        enter = getattr(self._inner, "__enter__", None)
        if enter is not None:
            entered = enter()
            self._inner = entered if isinstance(entered, Iterator) else self._inner
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        leave = getattr(self._inner, "__exit__", None)
        try:
            if leave is not None:
                leave(kind, error, trace)
        finally:
            self.close()


class AsyncStream(_Booked, AsyncIterator[Any]):
    """``opener``: an async generator is asked for at its first piece, as it does nothing before."""

    def __init__(self, inner: Any, calls: list[Call] | None = None, *, opener: Callable[[], Awaitable[list[Call]]] | None = None) -> None:
        super().__init__(inner, calls or [], lazy=opener is not None)
        self._opener, self._opening = opener, False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if self._opener is not None:  # refused, it is asked for again with the next piece
            if self._opening:
                raise RuntimeError("the stream is already being asked for a piece")
            self._opening = True
            try:
                self._calls = await self._opener()
            finally:
                self._opening = False
            self._opener = None
        self._begun = True
        token = OWNERS.set(owners_of(OWNERS.get(), self._calls))
        try:
            chunk = await anext(self._inner)
        except StopAsyncIteration:
            self._ended()
            raise
        except BaseException as error:
            self._cut(error)
            raise
        finally:
            OWNERS.reset(token)
        self._reading.feed(chunk)
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
            self._cut(None)

    close = aclose  # what OpenAI's and Anthropic's streams call it

    async def __aenter__(self) -> Self:
        enter = getattr(self._inner, "__aenter__", None)
        if enter is not None:
            entered = await enter()
            self._inner = entered if isinstance(entered, AsyncIterator) else self._inner
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        leave = getattr(self._inner, "__aexit__", None)
        try:
            if leave is not None:
                await leave(kind, error, trace)
        finally:
            await self.aclose()
