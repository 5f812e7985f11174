"""Questions to a store: threads ask it, callers wait for the answer within a deadline."""

import asyncio
import contextlib
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final, Generic, TypeVar

from runguard.ledger.store import StoreOutage, StoreSession
from runguard.ledger.store_faults import fault_of
from runguard.ledger.store_link import StoreLink

_T = TypeVar("_T")
_LONGEST_QUEUE: Final = 60  # times the deadline that a call may wait in the queue while others are served


class _Job(Generic[_T]):
    """Something that a caller wants the store to do now."""

    __slots__ = ("again", "asked", "begun", "do", "future")

    def __init__(self, do: Callable[[StoreSession], _T], again: bool) -> None:
        self.do, self.again = do, again  # again: doing it twice counts once
        self.asked = time.monotonic()
        self.begun: float | None = None
        self.future: Future[_T] = Future()


class StoreJobs:
    """A queue of jobs. Several threads run ``work``."""

    def __init__(self, link: StoreLink, ensure_threads: Callable[[], None]) -> None:
        self._link, self._ensure_threads = link, ensure_threads
        self.restart()

    def restart(self) -> "queue.SimpleQueue[_Job[Any] | None]":
        """Begin a new queue; returns the old one."""
        old: queue.SimpleQueue[_Job[Any] | None] = getattr(self, "_queue", queue.SimpleQueue())
        self._queue: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._served = 0.0  # when a job was last done
        return old

    async def ask(self, job: Callable[[StoreSession], _T], *, again: bool = False) -> _T:
        """Run a job on a thread and await it, within the deadline. ``again``: doing it twice counts once."""
        link = self._link
        link.check_rest()
        asked = self._put(job, again)
        wrapped = asyncio.wrap_future(asked.future)
        # its caller may be cancelled or stop waiting: asyncio reports an exception that is never looked at
        wrapped.add_done_callback(lambda late: late.cancelled() or late.exception())
        try:
            while (left := self._time_left(asked)) > 0:
                await asyncio.wait((wrapped,), timeout=left)
                if wrapped.done():
                    return wrapped.result()
        except StoreOutage as error:
            link.outage(error)
            raise
        asked.future.cancel()
        outage = StoreOutage(f"{link.name}: no answer within {link.timeout:g} s")
        link.outage(outage)
        raise outage

    def call(self, job: Callable[[StoreSession], _T], *, again: bool = False) -> _T:
        """For callers that are not on the path of a run: ask, and wait here."""
        asked = self._put(job, again)
        while (left := self._time_left(asked)) > 0:
            with contextlib.suppress(FutureTimeout):
                return asked.future.result(left)
            if asked.future.done():
                return asked.future.result()  # it came at this very moment
        asked.future.cancel()
        raise StoreOutage(
            f"{self._link.name}: no answer within {self._link.timeout:g} s; what was asked may still be done: look "
            "before you repeat it"
        )

    def _put(self, job: Callable[[StoreSession], _T], again: bool) -> "_Job[_T]":
        self._ensure_threads()
        asked: _Job[_T] = _Job(job, again)
        self._queue.put(asked)
        return asked

    def _time_left(self, job: "_Job[Any]") -> float:
        """Seconds that a caller still waits. While others are served, the deadline starts again until it is the
        job's turn: a long queue is not an outage.

        A job that begins late because the ones before it failed has no more time than they had.
        """
        served = self._served if job.begun is None else min(self._served, job.begun)
        timeout = self._link.timeout
        since = max(job.asked, min(served, job.asked + _LONGEST_QUEUE * timeout))
        return since + timeout - time.monotonic()

    # ---- on the threads ---------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Do jobs until the queue ends."""
        jobs = self._queue
        while (job := jobs.get()) is not None:
            job.begun = time.monotonic()
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                result = self._do(job)
            except BaseException as error:
                # The answer comes first: its caller must not wait for anything else that may go wrong.
                job.future.set_exception(fault_of(self._link.name, error))
                self._link.drop_session()
            else:
                self._served = time.monotonic()
                job.future.set_result(result)
        self._link.drop_session()

    def _do(self, job: "_Job[_T]") -> _T:
        link = self._link
        had_session, began = link.has_session, time.monotonic()
        with link.in_use():
            try:
                return job.do(link.session())
            except StoreOutage:
                if not (had_session and job.again) or time.monotonic() - began > link.timeout / 2:
                    raise
                # a connection that was cut while idle is not an outage: try again on a new one
                link.drop_session()
                return job.do(link.session())
