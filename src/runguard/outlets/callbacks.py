"""Callbacks run on one thread of their own, never on the path of a call.

A callback that raises, hangs or takes a minute does not affect the run. The queue is bounded: what does not fit is
dropped and counted.
"""

import asyncio
import atexit
import contextlib
import inspect
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final

from runguard.background import start_thread

_log: Final = logging.getLogger("runguard")
_CAPACITY: Final = 1_000
_GOODBYE_S: Final = 2.0
_IDLE_S: Final = 5.0


class Outbox:
    """Runs callbacks in order on a daemon thread that starts with the first of them."""

    def __init__(self) -> None:
        self.dropped = 0
        self.failed = 0
        self.restart()
        _outboxes.add(self)

    def restart(self) -> None:
        """As new: a forked child has neither the thread nor what was meant for the parent, and a lock may have been
        held at that moment.
        """
        self._queue: queue.Queue[tuple[Callable[..., Any], Any]] = queue.Queue(_CAPACITY)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def send(self, callback: Callable[..., Any], value: Any) -> None:
        with self._lock:
            try:
                self._queue.put_nowait((callback, value))
            except queue.Full:
                self.dropped += 1
                return
            self._ensure_thread_locked()

    def _ensure_thread_locked(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            # no thread available: the next callback or flush tries again
            with contextlib.suppress(RuntimeError, MemoryError):
                self._thread = start_thread("runguard-outbox", self._work)

    def flush(self, seconds: float = _GOODBYE_S) -> bool:
        """Wait, bounded, until everything sent so far was handled."""
        if threading.current_thread() is self._thread or (self._thread is None and self._queue.empty()):
            return True
        end, done = time.monotonic() + seconds, threading.Event()
        try:
            self._queue.put((lambda _: done.set(), None), timeout=seconds)
        except queue.Full:
            return False
        with self._lock:
            self._ensure_thread_locked()
        return done.wait(max(end - time.monotonic(), 0.0))

    def _work(self) -> None:
        while True:
            try:
                callback, value = self._queue.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._queue.empty():  # nothing to do: the next one starts a thread again
                        self._thread = None
                        return
                continue
            try:
                result = callback(value)
                if inspect.isawaitable(result):
                    asyncio.run(_finish(result))
            except BaseException:  # logged for its owner; the run and the other callbacks are not affected
                self.failed += 1
                _log.exception(
                    "runguard.callback_failed: %s raised; the run is not affected",
                    getattr(callback, "__name__", "callback"),
                )


_outboxes: Final["weakref.WeakSet[Outbox]"] = weakref.WeakSet()


@atexit.register
def _say_goodbye() -> None:
    """At the end of the process, one deadline for all of them."""
    end = time.monotonic() + _GOODBYE_S
    for outbox in list(_outboxes):
        outbox.flush(max(end - time.monotonic(), 0.0))


def _restart_all() -> None:
    for outbox in list(_outboxes):
        outbox.restart()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restart_all)


async def _finish(result: Any) -> None:
    await result
