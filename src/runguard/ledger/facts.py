"""What a ledger still has to write to its store, in order.

The first fact stays in the queue until it is done. So a writer that dies in the middle of it loses nothing: the next
writer finds it there.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from runguard.ledger.base import Account
from runguard.ledger.store import StoreReply, StoreSession

FACTS_KEPT: Final = 100_000


class Fact:
    """Something that happened and that the store must book."""

    __slots__ = ("accounts", "repeatable", "then", "tries", "write")

    def __init__(
        self,
        write: Callable[[StoreSession], StoreReply | None],
        accounts: Sequence[Account] = (),
        then: Callable[[], None] | None = None,
        *,
        repeatable: bool,
    ) -> None:
        self.write, self.accounts = write, accounts
        self.then = then  # called once, when the store has it
        # writing it twice counts once: true of a settlement and a release, not of a record
        self.repeatable = repeatable
        self.tries = 0  # attempts that ended in an exception which no store should raise


class Facts:
    """A bounded queue of facts. Any thread puts, one thread takes."""

    def __init__(self) -> None:
        self._queue: deque[Fact] = deque()
        self._changed = threading.Condition(threading.Lock())
        self.closed = threading.Event()  # the writer takes no more facts

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, fact: Fact) -> bool:
        """False when the queue is full."""
        with self._changed:
            if len(self._queue) >= FACTS_KEPT:
                return False
            self._queue.append(fact)
            self._changed.notify()
        return True

    def first(self, seconds: float) -> Fact | None:
        """The first fact, which stays in the queue; waits for one, bounded."""
        if self._queue:
            return self._queue[0]
        with self._changed:
            self._changed.wait_for(lambda: bool(self._queue) or self.closed.is_set(), seconds)
            return self._queue[0] if self._queue else None

    def close(self) -> None:
        """End every wait for a fact."""
        self.closed.set()
        with self._changed:
            self._changed.notify_all()

    def done(self, fact: Fact) -> None:
        """Take the first one out of the queue."""
        if self._queue and self._queue[0] is fact:
            self._queue.popleft()

    def wait_until_done(self, seconds: float, meanwhile: Callable[[], object]) -> bool:
        """Wait, bounded, until the queue is empty."""
        end = time.monotonic() + seconds
        while self._queue and time.monotonic() < end:
            meanwhile()
            time.sleep(0.005)
        return not self._queue
