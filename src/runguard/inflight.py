"""Model calls in flight in one run: a bounded number at once, the surplus waits in order.

A slot belongs to a task, because a task makes one model call at a time; a finished task gives its slot back even when nobody
said so. Works across event loops: tools in a thread pool may run nested agents on loops of their own.
"""

import asyncio
import threading
from collections import deque
from typing import Any

_SWEEP_S = 0.5  # how often a waiting call looks for slots whose tasks ended without a word


class Slots:
    """At most ``limit`` holders. Holders are tasks; only model calls hold, never agents, so nesting cannot deadlock."""

    __slots__ = ("_holders", "_lock", "_waiting", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._holders: set[asyncio.Task[Any]] = set()
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._holders)

    def take(self, task: asyncio.Task[Any]) -> bool:
        """A slot now, or False. A task that already holds one goes on with it."""
        with self._lock:
            if task in self._holders:
                return True
            if len(self._holders) >= self.limit:
                self._sweep_locked()
                if len(self._holders) >= self.limit:
                    return False
            self._holders.add(task)
            return True

    async def wait(self, task: asyncio.Task[Any]) -> None:
        """A slot, in the order of asking."""
        loop = asyncio.get_running_loop()
        while not self.take(task):
            turn: asyncio.Future[None] = loop.create_future()
            with self._lock:
                self._waiting.append((loop, turn))
            try:
                await asyncio.wait((turn,), timeout=_SWEEP_S)
            finally:
                turn.cancel()

    def give_back(self, task: asyncio.Task[Any]) -> None:
        with self._lock:
            if task not in self._holders:
                return
            self._holders.discard(task)
            self._wake_locked()

    def busy(self) -> int:
        """Holders that still run."""
        with self._lock:
            self._sweep_locked()
            return len(self._holders)

    def _sweep_locked(self) -> None:
        ended = [task for task in self._holders if task.done()]
        for task in ended:
            self._holders.discard(task)
            self._wake_locked()

    def _wake_locked(self) -> None:
        while self._waiting:
            loop, turn = self._waiting.popleft()
            if turn.cancelled() or loop.is_closed():
                continue
            loop.call_soon_threadsafe(_resolve, turn)
            return


def _resolve(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
