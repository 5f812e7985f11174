"""Streams that have to be entered: ``with client.messages.stream(...) as stream``.

Entering makes the call. A manager that is dropped before has made none.
"""

from collections.abc import Coroutine, Generator
from functools import partial
from typing import Any, Final

from runguard.functions.booking import drop_all, fail_all, never_left
from runguard.functions.caller import GuardedCall
from runguard.functions.dropped import DROPPED
from runguard.functions.streams import AsyncGuardedStream, GuardedObject, GuardedStream

_ENTERED_ONCE: Final = "a stream can be entered only once; make another call"


def is_manager(result: Any) -> bool:
    """Whether a call returned an object that has to be entered. Those of Anthropic and OpenAI ask the provider only
    then.
    """
    kind = type(result)
    return kind.__name__.endswith("StreamManager") and (hasattr(kind, "__enter__") or hasattr(kind, "__aenter__"))


def manage(inner: Any, calls: list[GuardedCall]) -> "_StreamManager":
    return AsyncStreamManager(inner, calls) if hasattr(type(inner), "__aenter__") else StreamManager(inner, calls)


class _StreamManager(GuardedObject):
    """What both managers share."""

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
                DROPPED.take(partial(never_left, call))


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
