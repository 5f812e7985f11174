"""What a ledger still has to tell its store, in order.

The first fact stays in line until it is done. So a writer that dies in the middle of it loses nothing: the next one
finds it where it was.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from runguard.ledger.base import Account
from runguard.ledger.store import Reply, Session

FACTS_KEPT: Final = 100_000


class Fact:
    """Something that happened and that the store must hear."""

    __slots__ = ("accounts", "repeatable", "tell", "then", "tries")

    def __init__(
        self,
        tell: Callable[[Session], Reply | None],
        accounts: Sequence[Account] = (),
        then: Callable[[], None] | None = None,
        *,
        repeatable: bool,
    ) -> None:
        self.tell, self.accounts = tell, accounts
        self.then = then  # called once, when the store has it
        # writing it twice counts once: true of a settlement and a release, not of a record
        self.repeatable = repeatable
        self.tries = 0  # that ended in an exception which no store should raise


class Facts:
    """A bounded line of facts. Any thread puts, one thread takes."""

    def __init__(self) -> None:
        self._line: deque[Fact] = deque()
        self._changed = threading.Condition(threading.Lock())
        self.closed = threading.Event()  # the writer takes no more facts

    def __len__(self) -> int:
        return len(self._line)

    def put(self, fact: Fact) -> bool:
        """False when the line is full."""
        with self._changed:
            if len(self._line) >= FACTS_KEPT:
                return False
            self._line.append(fact)
            self._changed.notify()
        return True

    def first(self, seconds: float) -> Fact | None:
        """The first in line, which stays there; waits for one, bounded."""
        if self._line:
            return self._line[0]
        with self._changed:
            self._changed.wait_for(lambda: bool(self._line) or self.closed.is_set(), seconds)
            return self._line[0] if self._line else None

    def close(self) -> None:
        """End every wait for a fact."""
        self.closed.set()
        with self._changed:
            self._changed.notify_all()

    def done(self, fact: Fact) -> None:
        """Take the first one out of the line."""
        if self._line and self._line[0] is fact:
            self._line.popleft()

    def wait_until_done(self, seconds: float, meanwhile: Callable[[], object]) -> bool:
        """Wait, bounded, until the line is empty."""
        end = time.monotonic() + seconds
        while self._line and time.monotonic() < end:
            meanwhile()
            time.sleep(0.005)
        return not self._line
