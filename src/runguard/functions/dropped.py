"""Books streams that were dropped without being closed."""

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from runguard.background import log_fault, start_thread


class Dropped:
    """Jobs of finalizers, done on a thread of its own: where the collector runs may be inside of any of our locks."""

    def __init__(self) -> None:
        # the one queue that may be put into while it is being used
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._pid = self._faults = 0
        self._thread: threading.Thread | None = None

    def ready(self) -> None:
        """Called when something is made that may be dropped: a thread cannot be started where the collector runs."""
        if self._pid != os.getpid():  # a fork takes no threads along
            self._pid, self._jobs, self._thread = os.getpid(), queue.SimpleQueue(), None
        if self._thread is None or not self._thread.is_alive():
            # no thread available: the next stream or flush tries again
            with contextlib.suppress(RuntimeError, MemoryError):
                self._thread = start_thread("runguard-dropped", partial(self._work, self._jobs))

    def take(self, job: Callable[[], object]) -> None:
        self._jobs.put(job)

    def flush(self, seconds: float) -> bool:
        """Wait, bounded, until everything dropped so far is booked."""
        if self._pid != os.getpid():
            return True
        self.ready()
        done = threading.Event()
        self._jobs.put(done.set)
        return done.wait(seconds)

    def _work(self, jobs: "queue.SimpleQueue[Callable[[], object]]") -> None:
        while True:
            job = jobs.get()
            try:
                job()
            except BaseException:
                self._faults += 1
                log_fault("a dropped stream could not be booked", self._faults)
            del job  # the next one may take long to come


DROPPED: Final = Dropped()
