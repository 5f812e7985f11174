"""The order of calls whose cost is known only afterwards.

The first calls run one at a time. As calls return and show what one costs, more and more run at once. The others wait
in a queue, first come, first served.
"""

import asyncio
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum, auto
from typing import Any

from runguard.engine.charges import Charge


class Admission(Enum):
    """When a call may ask for its reservation."""

    NOW = auto()
    ALONGSIDE = auto()  # at once, although others are running: it cannot wait for them
    QUEUED = auto()  # when its ticket is done


class Ticket(Future[None]):
    """One call's place. Done when the call may start; given back when it has ended."""

    def __init__(self, around: frozenset[int]) -> None:
        super().__init__()
        self.pid, self.thread, self.loop = os.getpid(), threading.get_ident(), asyncio._get_running_loop()
        # weak: a task that is thrown away gives its ticket back
        self._task = None if (task := _task()) is None else weakref.ref(task)
        self.around = around  # calls with tickets of other callables that this call is inside of
        self.charge: Charge | None = None
        self.is_alone = False  # nothing else is running: it holds the whole remainder
        self.known = (0, 0)  # nano-USD and tokens that it must hold at least
        self.since = 0.0

    def is_stuck_with(self, no_loop: bool) -> bool:
        """Whether this call cannot end while the caller waits: the same thread or task made it and still reads its
        answer.
        """
        if self.thread != threading.get_ident():
            return False
        return no_loop or self._task is None or self._task() is _task()

    @property
    def is_lost(self) -> bool:
        """Whether the call can never end: it belongs to a parent process, or its event loop is closed."""
        return self.pid != os.getpid() or (self.loop is not None and self.loop.is_closed())


class CallQueue:
    """The running and the waiting calls of one callable. Safe to use from many threads and event loops."""

    def __init__(self, width: Callable[[], int], most_seconds: float) -> None:
        """``width``: how many calls may run at once.

        ``most_seconds``: after this time nothing waits for a call that never ended.
        """
        self._width, self._most_seconds = width, most_seconds
        self._lock = threading.RLock()  # the collector may throw a task away, and give its ticket back, at any time
        self.running: dict[Ticket, None] = {}
        self.waiting: deque[Ticket] = deque()

    def ask(self, around: frozenset[int], no_loop: bool) -> tuple[Admission, Ticket | None]:
        ticket = Ticket(around)
        with self._lock:
            if self.waiting or len(self.running) >= self._width():
                self._drop_lost_locked()
            if not self.waiting and len(self.running) < self._width():
                self._start_locked(ticket)
                return Admission.NOW, ticket
            # a running call may be waiting for the call that this one is inside of
            apart = bool(around) and any(not around & other.around for other in self.running)
            if apart or all(other.is_stuck_with(no_loop) for other in self.running):
                return Admission.ALONGSIDE, None
            self.waiting.append(ticket)
            return Admission.QUEUED, ticket

    def give_back(self, ticket: Ticket) -> None:
        """The call has ended, or will not be made."""
        with self._lock:
            self.running.pop(ticket, None)
            if ticket in self.waiting:
                self.waiting.remove(ticket)
            while self.waiting:
                self._drop_lost_locked()
                if not self.waiting or len(self.running) >= self._width():
                    break
                self._start_locked(self.waiting.popleft())

    def alone(self) -> Ticket | None:
        """The call that holds the whole remainder, if there is one."""
        with self._lock:
            return next((ticket for ticket in self.running if ticket.is_alone), None)

    def _start_locked(self, ticket: Ticket) -> None:
        ticket.is_alone, ticket.since = self._width() == 1, time.monotonic()
        self.running[ticket] = None
        ticket.set_result(None)

    def _drop_lost_locked(self) -> None:
        """Forget calls that can never end, and calls that have run for too long to be waited for."""
        longest = time.monotonic() - self._most_seconds
        for ticket in [ticket for ticket in self.running if ticket.since < longest or ticket.is_lost]:
            self.running.pop(ticket, None)
        while self.waiting and self.waiting[0].is_lost:
            self.waiting.popleft()


def _task() -> "asyncio.Task[Any] | None":
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


async def may_start(ticket: Ticket, seconds: float) -> bool:
    """Wait in the queue, at most this long. Giving up does not disturb others."""
    if not ticket.done():
        await asyncio.wait((asyncio.wrap_future(ticket),), timeout=seconds)
    return ticket.done()
