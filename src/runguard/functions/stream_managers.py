"""Streams that have to be entered: ``with client.messages.stream(...) as stream``.

Entering makes the call. A manager that is dropped before has made none.
"""

from collections.abc import Coroutine, Generator
from functools import partial
from typing import Any, Final

from runguard.accounting.charges import OWNERS
from runguard.functions.booking import drop_all, failed, never_left
from runguard.functions.caller import GuardedCall, owners_of
from runguard.functions.dropped import DROPPED
from runguard.functions.streams import AsyncGuardedStream, GuardedStream, fault_in

_ENTERED_ONCE: Final = "a stream can be entered only once; make another call"


def is_manager(result: Any) -> bool:
    """Whether a call returned an object that has to be entered. Those of Anthropic and OpenAI ask the provider only
    then.
    """
    kind = type(result)
    return kind.__name__.endswith("StreamManager") and (hasattr(kind, "__enter__") or hasattr(kind, "__aenter__"))


def manage(inner: Any, calls: list[GuardedCall]) -> "_StreamManager":
    return AsyncStreamManager(inner, calls) if hasattr(type(inner), "__aenter__") else StreamManager(inner, calls)


class _StreamManager:
    """What both managers share. The methods that a user calls catch every error of the methods here."""

    def __init__(self, inner: Any, calls: list[GuardedCall]) -> None:
        self._inner, self._calls = inner, calls
        self._stream: Any = None  # set when it is entered
        DROPPED.ready()

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # not set yet
            raise AttributeError(name)
        return getattr(self._inner, name)

    def _fail(self, error: BaseException) -> None:
        for call in self._calls:
            failed(call, error)

    def _leave(self) -> None:
        if self._stream is not None:
            self._stream._finish(None)

    def __del__(self) -> None:
        if self.__dict__.get("_stream") is None:
            for call in self.__dict__.get("_calls", ()):
                DROPPED.take(partial(never_left, call))


class StreamManager(_StreamManager):
    def __enter__(self) -> Any:
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
            self._stream = GuardedStream(entered, self._calls)
        except Exception as fault:
            drop_all(self._calls, fault)
            return entered
        return self._stream

    def __exit__(self, *error: object) -> Any:
        try:
            return self._inner.__exit__(*error)
        finally:
            try:
                self._leave()
            except Exception as fault:
                drop_all(self._calls, fault)


class AsyncStreamManager(_StreamManager):
    async def __aenter__(self) -> Any:
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
            self._stream = AsyncGuardedStream(entered, self._calls)
        except Exception as fault:
            drop_all(self._calls, fault)
            return entered
        return self._stream

    async def __aexit__(self, *error: object) -> Any:
        try:
            return await self._inner.__aexit__(*error)
        finally:
            try:
                self._leave()
            except Exception as fault:
                drop_all(self._calls, fault)


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
