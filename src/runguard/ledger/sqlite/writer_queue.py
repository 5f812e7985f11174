"""The queue of writers to one SQLite file."""

import contextlib
import threading
import time
from pathlib import Path
from typing import Any, Final

from runguard.ledger.store import StoreOutage

try:
    import fcntl
except ImportError:  # a system without flock: SQLite's own busy handler is all there is
    fcntl = None  # type: ignore[assignment]

_TURN_S: Final = 0.003  # how long a writer may go on before it lets the next one in
_POLL_S: Final = 0.0002


def writer_queue(path: Path, timeout: float) -> "WriterQueue | None":
    """The queue of a file; None on a system without ``flock``."""
    return None if fcntl is None else WriterQueue(path, timeout)


class WriterQueue:
    """Lets the writers of all processes write one after another, in the order in which they asked.

    It uses two file locks, which the kernel frees when a process dies. A writer holds ``turn`` during a transaction.
    The next writer holds ``next`` and polls for ``turn``. All others wait for ``next``, which the kernel hands out in
    order. A writer that got its turn this way may take it again for a few milliseconds without queueing, because
    changing writers costs more than writing. So a writer waits at most those few milliseconds for each writer before
    it.
    """

    def __init__(self, path: Path, timeout: float) -> None:
        self._path, self._timeout = path, timeout
        self._turn, self._next = Path(f"{path}-queue").open("a"), Path(f"{path}-next").open("a")  # noqa: SIM115 - for as long as the session
        self._until = 0.0  # of the turn
        self._mutex, self._got = threading.Lock(), threading.Event()
        self._waiting = self._wanted = self._closed = False

    def take(self) -> None:
        now = time.monotonic()
        if now < self._until and _locked(self._turn):
            return
        end = now + self._timeout
        try:
            if not _locked(self._next):
                # The kernel wakes the first waiter, but a process that asks before it runs gets the lock. Let it run.
                time.sleep(min(_TURN_S, self._timeout / 10))
                self._wait(end)
            while not _locked(self._turn):
                if time.monotonic() > end:
                    raise self._too_long()
                time.sleep(_POLL_S)
        finally:
            fcntl.flock(self._next, fcntl.LOCK_UN)
        self._until = time.monotonic() + _TURN_S

    def leave(self) -> None:
        fcntl.flock(self._turn, fcntl.LOCK_UN)

    def _too_long(self) -> StoreOutage:
        advice = "raise store_timeout, or use Valkey or Postgres for so many workers"
        return StoreOutage(f"{self._path}: locked by other processes for more than {self._timeout:g} s; {advice}")

    def _wait(self, end: float) -> None:
        """Wait for ``next`` on a thread, because the system call that waits in order takes no time limit.

        A thread whose session gave up keeps the place for the session's next call. Without such a call it passes the
        lock on.
        """
        with self._mutex:
            self._wanted = True
            if not self._waiting:
                self._got.clear()
                try:
                    threading.Thread(target=self._stand, name="runguard-sqlite", daemon=True).start()
                    self._waiting = True
                except RuntimeError:  # the interpreter is ending, or no thread is left: wait without an order
                    while not _locked(self._next):
                        if time.monotonic() > end:
                            raise self._too_long() from None
                        time.sleep(_POLL_S)
                    return
        try:
            self._got.wait(max(end - time.monotonic(), 0))
        finally:
            with self._mutex:
                self._wanted = False
                got = self._got.is_set()
        if not got:
            raise self._too_long()

    def _stand(self) -> None:
        got = False
        # on an error the session's deadline reports it, and its next call starts another thread
        with contextlib.suppress(BaseException):
            fcntl.flock(self._next, fcntl.LOCK_EX)
            got = True
        with self._mutex:
            self._waiting = False
            if got and self._wanted:
                self._got.set()
            elif got:
                fcntl.flock(self._next, fcntl.LOCK_UN)
            if self._closed:
                self._next.close()

    def close(self) -> None:
        self._turn.close()
        with self._mutex:
            self._closed = True
            if not self._waiting:
                self._next.close()


def _locked(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
