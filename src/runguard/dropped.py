"""Books what was dropped without a word: streams that nobody closed."""

import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Final

_log: Final = logging.getLogger("runguard")


class Dropped:
    """Jobs of finalizers, done on a thread of its own: where the collector runs may be inside of any of our locks."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()  # the one queue that may be put into while it is being used
        self._pid = 0

    def ready(self) -> None:
        """Called when something is made that may be dropped: a thread cannot be started where the collector runs."""
        if self._pid != os.getpid():  # a fork takes no threads along
            self._pid, self._jobs = os.getpid(), queue.SimpleQueue()
            threading.Thread(target=self._work, args=(self._jobs,), name="runguard-dropped", daemon=True).start()

    def take(self, job: Callable[[], object]) -> None:
        self._jobs.put(job)

    def flush(self, seconds: float) -> bool:
        """Wait, bounded, until everything dropped so far is booked."""
        if self._pid != os.getpid():
            return True
        done = threading.Event()
        self._jobs.put(done.set)
        return done.wait(seconds)

    @staticmethod
    def _work(jobs: "queue.SimpleQueue[Callable[[], object]]") -> None:
        while True:
            job = jobs.get()
            try:
                job()
            except Exception:
                _log.exception("runguard.guard_error: a dropped stream could not be booked")
            del job  # the next one may take long to come


DROPPED: Final = Dropped()
