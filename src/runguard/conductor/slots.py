"""Model calls in flight in one run: a bounded number at once, the surplus waits in order.

A slot belongs to a task, because a task makes one model call at a time. The slot of a finished task is free, also when
it was not given back. Works across event loops: tools in a thread pool may run nested agents on loops of their own.
"""

import asyncio
import threading
from collections import OrderedDict
from typing import Any

_SWEEP_S = 0.5  # how often a waiting call looks for slots of finished tasks
_Task = asyncio.Task[Any]


class Slots:
    """At most ``limit`` holders. Holders are tasks; only model calls hold, never agents, so nesting cannot deadlock."""

    __slots__ = ("_holders", "_lock", "_waiting", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._holders: set[_Task] = set()
        self._waiting: OrderedDict[_Task, tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._holders)

    def take(self, task: _Task) -> bool:
        """A slot now, or False. A task that already holds one keeps it. Waiting tasks come first."""
        with self._lock:
            if task in self._holders:
                return True
            if self._waiting or len(self._holders) >= self.limit:
                self._sweep_locked()
                if self._waiting or len(self._holders) >= self.limit:
                    return False
            self._holders.add(task)
            return True

    async def wait(self, task: _Task) -> None:
        """Wait for a slot, in the order of asking. A slot that is given back goes to the first waiting task."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if task in self._holders:
                return
            self._waiting[task] = (loop, turn)
            self._sweep_locked()
        try:
            while not turn.done():
                await asyncio.wait((turn,), timeout=_SWEEP_S)
                with self._lock:
                    if task in self._holders:
                        return
                    self._sweep_locked()
        except BaseException:
            with self._lock:  # cancelled while waiting, or in the very moment of its turn: the next one's turn
                self._waiting.pop(task, None)
                self._holders.discard(task)
                self._hand_on_locked()
            raise

    def give_back(self, task: _Task) -> None:
        with self._lock:
            if task in self._holders:
                self._holders.discard(task)
                if self._waiting:
                    self._hand_on_locked()

    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def busy(self) -> int:
        """Holders that still run."""
        with self._lock:
            self._sweep_locked()
            return len(self._holders)

    def _sweep_locked(self) -> None:
        for task in [task for task in self._holders if task.done() or task.get_loop().is_closed()]:
            self._holders.discard(task)
        self._hand_on_locked()

    def _hand_on_locked(self) -> None:
        while self._waiting and len(self._holders) < self.limit:
            task, (loop, turn) = self._waiting.popitem(last=False)
            if task.done() or loop.is_closed():
                continue
            self._holders.add(task)
            loop.call_soon_threadsafe(_resolve, turn)


def _resolve(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
