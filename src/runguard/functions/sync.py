"""Coroutines for callers without an event loop: run on the spot as long as nothing has to be waited for."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from runguard.background import start_thread

_T = TypeVar("_T")


class _WaitingLoop:
    """One event loop in a thread of its own, for calls that have to wait and have no loop to do it on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def finish(self, make: Callable[[], Coroutine[Any, Any, _T]], lost: Callable[[_T], None]) -> _T:
        with self._lock:
            # nor does a fork take threads along
            if self._loop is None or self._thread is None or not self._thread.is_alive():
                self._loop = asyncio.new_event_loop()
                # which a SystemExit in a job ends: it is run again
                self._thread = start_thread("runguard-waiting", self._loop.run_forever)
            future = asyncio.run_coroutine_threadsafe(make(), self._loop)
        try:
            return future.result()
        except BaseException:
            if not future.cancel() and not future.cancelled() and future.exception() is None:
                lost(future.result())  # interrupted in the moment in which it came
            raise


_waiting: Final = _WaitingLoop()


def drive(make: Callable[[], Coroutine[Any, Any, _T]], is_shared: bool, lost: Callable[[_T], None]) -> _T:
    """Run a coroutine for a caller without an event loop: here, as long as it need not wait, else on a loop of our own.

    ``make`` makes it when it can be run at once: one that is never run would be warned about. ``lost``: takes a result
    that came when its caller had been interrupted.
    """
    if is_shared:
        return _waiting.finish(make, lost)
    job = make()
    try:
        job.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    return _waiting.finish(lambda: job, lost)


async def awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
