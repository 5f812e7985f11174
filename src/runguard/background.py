"""Background threads that go on whatever their work raises, and log lines that stay on one line.

The ledger, the reports and ``calls/surroundings`` start their threads here. Importing this module is all that the log
needs: policies, monitors, alerts and stores do it before anything is logged.
"""

import _thread
import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import Context
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, ClassVar, Final, Generic, TypeVar

from runguard.core.decision import printable

# ---- Threads that go on whatever their work raises.

_log: Final = logging.getLogger("runguard")
_PAUSE_S: Final = 0.05
_IDLE_S: Final = 5.0
GOODBYE_S: Final = 2.0
_T = TypeVar("_T")


def start_thread(
    name: str, work: Callable[[], object], on_fault: Callable[[], object] = lambda: None
) -> threading.Thread:
    """Start a daemon thread that calls ``work`` until it returns.

    After an exception of any type it calls ``on_fault`` and then ``work`` again: a thread that ends in silence would
    let settlements, alerts or callbacks pile up for ever. Owners also check ``is_alive()`` before they rely on a
    thread, because nothing can save a thread that the system itself ends.
    """
    thread = threading.Thread(target=_keep, args=(name, work, on_fault), name=name, daemon=True)
    Context().run(thread.start)  # it outlives the run that happens to need it first, and must not belong to it
    return thread


def _keep(name: str, work: Callable[[], object], on_fault: Callable[[], object]) -> None:
    faults = 0
    while True:
        try:
            work()
            return
        except BaseException:
            faults += 1
            log_fault(f"the thread {name} met an exception and goes on", faults)
            with contextlib.suppress(BaseException):
                on_fault()
                time.sleep(_PAUSE_S)


def log_fault(text: str, count: int = 1) -> None:
    """Log the current exception, at the 1st, 2nd, 4th, 8th … time. Logging may fail as well: nothing is raised here."""
    if count & (count - 1) == 0:
        with contextlib.suppress(BaseException):
            _log.exception("runguard.background_error: %s (%d so far)", text, count)


def off_loop(work: Callable[[], _T]) -> _T:
    """Return what ``work`` returns. It reads files, so it never runs in the thread of an event loop.

    ``blockbuster``, which ``langgraph dev`` switches on, raises where code on a loop reads a file, and also where it
    waits for a lock. So a thread of its own does the work, and it reports through a queue that needs no such lock.
    """
    loops = sys.modules.get("asyncio.events")  # not imported here: a token budget must load quickly
    if loops is None or loops._get_running_loop() is None:
        return work()
    results: SimpleQueue[tuple[_T | None, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            results.put((work(), None))
        except BaseException as error:
            results.put((None, error))

    _thread.start_new_thread(run, ())
    result, error = results.get()
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


class BackgroundQueue(ABC, Generic[_T]):
    """A bounded queue, and the daemon thread that handles its items in order.

    The thread starts with the first item and ends when idle. All queues are flushed at the end of the process, with one
    deadline, and are empty in a forked child.
    """

    capacity: ClassVar[int]

    def __init__(self, name: str) -> None:
        self._name = name  # of the thread
        self.restart()
        QUEUES.add(self)

    def restart(self) -> None:
        """Start as new, also in a forked child.

        There the thread and the items are the parent's, and a lock may have been held.
        """
        self._changed = threading.Condition()
        self._waiting: deque[_T] = deque()
        self._thread: threading.Thread | None = None
        self._taken = self._done = 0

    @abstractmethod
    def handle(self, item: _T) -> None: ...

    def put(self, item: _T) -> bool:
        """Return at once; False when the queue is full."""
        with self._changed:
            if len(self._waiting) >= self.capacity:
                return False
            self._waiting.append(item)
            self._taken += 1
            self._changed.notify_all()
            self._start_locked()
            return True

    def flush(self, seconds: float = GOODBYE_S) -> bool:
        """Wait until everything put in so far was handled; False when the time ran out."""
        if threading.current_thread() is self._thread:
            return True  # an item that flushes cannot wait for itself
        with self._changed:
            goal = self._taken
            if self._waiting:
                self._start_locked()
            return self._changed.wait_for(lambda: self._done >= goal, max(seconds, 0.0))

    def _start_locked(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            # no more threads, or the interpreter is ending: the next item or flush tries again
            with contextlib.suppress(RuntimeError, MemoryError):
                self._thread = start_thread(self._name, self._work)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting), _IDLE_S)
                if not self._waiting:
                    self._thread = None
                    return
                item = self._waiting.popleft()
            try:
                self.handle(item)
            finally:
                with self._changed:
                    self._done += 1
                    self._changed.notify_all()


QUEUES: Final[weakref.WeakSet[BackgroundQueue[Any]]] = weakref.WeakSet()


@atexit.register
def _flush_all() -> None:
    end = time.monotonic() + GOODBYE_S
    for queue in list(QUEUES):
        queue.flush(end - time.monotonic())


def _restart_all() -> None:
    for queue in list(QUEUES):
        queue.restart()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restart_all)


# ---- Work that finalizers leave behind


class FinalizerQueue:
    """Jobs of finalizers, done on a thread of their own.

    The collector runs finalizers in the middle of any other code, also while the same thread holds one of our locks. So
    a finalizer, a ``__del__`` and what follows a ``GeneratorExit`` take no lock and do no work: they put a job here.
    """

    def __init__(self) -> None:
        # the one queue that a finalizer may put into while the same thread is using it
        self._jobs: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._pid = self._faults = 0
        self._thread: threading.Thread | None = None

    def ready(self) -> None:
        """Start the thread. Call this when something with a finalizer is made: a finalizer cannot start one."""
        if self._pid != os.getpid():  # a fork takes no threads along
            self._pid, self._jobs, self._thread = os.getpid(), SimpleQueue(), None
        if self._thread is None or not self._thread.is_alive():
            # no thread available: the next call or flush tries again
            with contextlib.suppress(RuntimeError, MemoryError):
                self._thread = start_thread("runguard-finalized", partial(self._work, self._jobs))

    def put(self, job: Callable[[], object]) -> None:
        """Have a job done soon. Safe in a finalizer."""
        self._jobs.put(job)

    def flush(self, seconds: float) -> bool:
        """Wait, bounded, until every job put in so far is done."""
        if self._pid != os.getpid():
            return True
        self.ready()
        done = threading.Event()
        self._jobs.put(done.set)
        return done.wait(seconds)

    def _work(self, jobs: "SimpleQueue[Callable[[], object]]") -> None:
        while True:
            job = jobs.get()
            try:
                job()
            except BaseException:
                self._faults += 1
                log_fault("a job of a finalizer failed", self._faults)
            del job  # the next one may take long to come


FINALIZED: Final = FinalizerQueue()


async def finish(result: Awaitable[Any]) -> None:
    """Await what a callback returned: ``asyncio.run`` takes coroutines only."""
    await result


# ---- The log: one filter on the logger ``runguard``, which all modules use.

_CAUSES_SHOWN: Final = 10
_PLAIN: Final = (int, float, type(None))  # bool is an int; formats such as %d need them as they are


class _Foreign:
    """An object whose text is asked for only when the line is written."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return _text(str, self._value)

    def __repr__(self) -> str:
        return _text(repr, self._value)


class OneLine(logging.Filter):
    """Lets every record pass, with its foreign texts written out on one line.

    Names of users, sessions, tools and models, and texts of exceptions, are foreign. What would end a line, move a
    terminal's cursor or turn its text is written out.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(_safe(value) for value in record.args)
        elif record.args:
            record.args = {name: _safe(value) for name, value in record.args.items()}
        if record.exc_info and not record.exc_text:
            record.exc_text = _traceback(record.exc_info[1])  # a formatter takes what is there
        return True


def _safe(value: Any) -> Any:
    if isinstance(value, str):
        return printable(str(value))
    return value if isinstance(value, _PLAIN) else _Foreign(value)


def _text(write: Any, value: object) -> str:
    try:
        return printable(str(write(value)))
    except Exception:  # a foreign object's own code
        return f"(a {type(value).__name__} without a text)"


def _traceback(error: BaseException | None) -> str:
    """Return a traceback as Python writes it, with the text of each exception on one line."""
    parts: list[str] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen and len(parts) < _CAUSES_SHOWN:
        seen.add(id(error))
        parts.append(_one(error, error.__traceback__))
        is_cause = error.__cause__ is not None
        error = error.__cause__ if is_cause else None if error.__suppress_context__ else error.__context__
        if error is not None:
            reason = "The above exception was the direct cause of the following exception:" if is_cause else _DURING
            parts[-1] = f"{reason}\n\n{parts[-1]}"
    return "\n\n".join(reversed(parts))


_DURING: Final = "During handling of the above exception, another exception occurred:"


def _one(error: BaseException, at: TracebackType | None) -> str:
    text = _text(str, error)
    frames = "".join(traceback.format_tb(at))
    name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    head = f"Traceback (most recent call last):\n{frames}" if frames else ""
    return f"{head}{printable(name)}{f': {text}' if text else ''}"


_log.addFilter(OneLine())
