"""Whose turn it is where nobody knows what a call may take: one goes alone, until its cost is known."""

import asyncio
import os
import threading
from concurrent.futures import Future
from enum import Enum, auto
from typing import Any

from runguard.charges import Charge


class Turn(Enum):
    """When a call may ask for leave."""

    NOW = auto()
    ALONE = auto()  # as the one that others wait for
    BESIDE = auto()
    LATER = auto()  # when the one that goes alone has come back


class First(Future[None]):
    """The call that goes alone. Done when it has come back."""

    def __init__(self) -> None:
        super().__init__()
        self.pid, self.thread, self.task = os.getpid(), threading.get_ident(), _task()
        self.charge: Charge | None = None
        self.around: frozenset[int] = frozenset()  # calls that go alone, of others, which it is inside of
        self.known = (0, 0)  # nano-USD and tokens of it that are known

    def is_stuck_with(self, no_loop: bool) -> bool:
        """Whether it cannot come back while whoever asks waits: made by the same thread or task, whose answer is still being read."""
        if self.thread != threading.get_ident():
            return False
        return no_loop or self.task is None or self.task is _task()


def _task() -> "asyncio.Task[Any] | None":
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


async def finished(first: First, seconds: float) -> bool:
    """Wait for the call that goes alone, bounded; to give up waiting does not disturb it."""
    done, _ = await asyncio.wait((asyncio.wrap_future(first),), timeout=seconds)
    return bool(done)
