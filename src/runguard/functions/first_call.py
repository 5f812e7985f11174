"""Whose turn it is, of a callable whose calls tell their cost only afterwards.

The first calls go one by one. From then on more and more run at once, as the calls that came back have shown what one
costs. Calls that have to wait stand in line, first come, first served.
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

from runguard.accounting.charges import Charge


class Turn(Enum):
    """When a call may ask for leave."""

    NOW = auto()
    BESIDE = auto()  # at once, though others are out: it cannot wait for them
    LATER = auto()  # when its ticket is called


class Ticket(Future[None]):
    """One call's place. Done when it may go; given back when the call has come back."""

    def __init__(self, around: frozenset[int]) -> None:
        super().__init__()
        self.pid, self.thread, self.loop = os.getpid(), threading.get_ident(), asyncio._get_running_loop()
        # weakly: a task that is thrown away gives its ticket back
        self._task = None if (task := _task()) is None else weakref.ref(task)
        self.around = around  # calls with tickets of other callables, which it is inside of
        self.charge: Charge | None = None
        self.is_alone = False  # nothing else is out: it holds all that is left
        self.known = (0, 0)  # nano-USD and tokens that it must hold at least
        self.since = 0.0

    def is_stuck_with(self, no_loop: bool) -> bool:
        """Whether it cannot come back while the caller waits: made by the same thread or task, whose answer is still
        being read.
        """
        if self.thread != threading.get_ident():
            return False
        return no_loop or self._task is None or self._task() is _task()

    @property
    def is_lost(self) -> bool:
        """Whether the call cannot be made or cannot come back: it belongs to a parent process, or its event loop is
        closed.
        """
        return self.pid != os.getpid() or (self.loop is not None and self.loop.is_closed())


class Turns:
    """The calls of one callable that are out, and those in line. Safe to use from many threads and event loops."""

    def __init__(self, width: Callable[[], int], most_seconds: float) -> None:
        """``width``: how many may be out at once.

        ``most_seconds``: after that time a call that never came back is not waited for.
        """
        self._width, self._most_seconds = width, most_seconds
        self._lock = threading.RLock()  # the collector may throw a task away, and give its ticket back, at any time
        self.out: dict[Ticket, None] = {}
        self.line: deque[Ticket] = deque()

    def ask(self, around: frozenset[int], no_loop: bool) -> tuple[Turn, Ticket | None]:
        ticket = Ticket(around)
        with self._lock:
            if self.line or len(self.out) >= self._width():
                self._drop_lost_locked()
            if not self.line and len(self.out) < self._width():
                self._let_out_locked(ticket)
                return Turn.NOW, ticket
            # it may be waiting for the call that this one is inside of
            apart = bool(around) and any(not around & other.around for other in self.out)
            if apart or all(other.is_stuck_with(no_loop) for other in self.out):
                return Turn.BESIDE, None
            self.line.append(ticket)
            return Turn.LATER, ticket

    def give_back(self, ticket: Ticket) -> None:
        """The call came back, or does not want to go any more."""
        with self._lock:
            self.out.pop(ticket, None)
            if ticket in self.line:
                self.line.remove(ticket)
            while self.line:
                self._drop_lost_locked()
                if not self.line or len(self.out) >= self._width():
                    break
                self._let_out_locked(self.line.popleft())

    def alone(self) -> Ticket | None:
        """The call that holds all that is left, if there is one."""
        with self._lock:
            return next((ticket for ticket in self.out if ticket.is_alone), None)

    def _let_out_locked(self, ticket: Ticket) -> None:
        ticket.is_alone, ticket.since = self._width() == 1, time.monotonic()
        self.out[ticket] = None
        ticket.set_result(None)

    def _drop_lost_locked(self) -> None:
        """Forget those who cannot come back, and calls that took too long to be waited for."""
        longest = time.monotonic() - self._most_seconds
        for ticket in [ticket for ticket in self.out if ticket.since < longest or ticket.is_lost]:
            self.out.pop(ticket, None)
        while self.line and self.line[0].is_lost:
            self.line.popleft()


def _task() -> "asyncio.Task[Any] | None":
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


async def called(ticket: Ticket, seconds: float) -> bool:
    """Wait in line, bounded; to give up waiting does not disturb others."""
    if not ticket.done():
        await asyncio.wait((asyncio.wrap_future(ticket),), timeout=seconds)
    return ticket.done()
