"""Facts that wait to be booked: settlements, releases and records, in the order in which they were handed over.

The first fact stays in the queue until it is done. So a writer that dies in the middle of it loses nothing: the next
writer finds it there.

A settlement may linger for a moment. The next reservation on the same accounts then takes it along, so that both are
one step of the store. The writer books what no reservation took.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Final

from runguard.ledger.base import Account
from runguard.ledger.store import SettledCall, StoreSession

FACTS_KEPT: Final = 100_000
_LINGER_S: Final = 0.1  # far less than a model call, during which its hold stands anyway
_LINGERING_KEPT: Final = 64


class Fact:
    """Something that happened and that the store must book."""

    __slots__ = ("accounts", "bill", "due", "keys", "repeatable", "then", "tries", "write")

    def __init__(
        self,
        write: Callable[[StoreSession], object],
        accounts: Sequence[Account] = (),
        then: Callable[[], None] | None = None,
        *,
        repeatable: bool,
        bill: SettledCall | None = None,
    ) -> None:
        self.write, self.accounts = write, accounts
        self.then = then  # called once, when the store has it
        # writing it twice counts once: true of a settlement and a release, not of a record
        self.repeatable = repeatable
        self.tries = 0  # attempts that ended in an exception which no store should raise
        self.bill = bill  # of a settlement
        self.keys = tuple(account.key for account in accounts) if bill is not None else ()
        self.due = 0.0  # when the writer books a settlement that lingers


class Facts:
    """A bounded queue of facts. Any thread puts, one thread takes."""

    def __init__(self) -> None:
        self._queue: deque[Fact] = deque()
        self._lingering: OrderedDict[Fact, None] = OrderedDict()  # the oldest first
        self._taken: dict[str, Fact] = {}  # by their hold: a reservation takes them along right now
        self._changed = threading.Condition(threading.Lock())
        self.closed = threading.Event()  # the writer takes no more facts

    def __len__(self) -> int:
        return len(self._queue) + len(self._lingering) + len(self._taken)

    def put(self, fact: Fact) -> bool:
        """False when the queue is full. Settlements that linger go before it: the order of facts stays."""
        with self._changed:
            self._hurry_locked()
            if len(self._queue) >= FACTS_KEPT:
                return False
            self._queue.append(fact)
            self._changed.notify()
        return True

    def linger(self, fact: Fact) -> None:
        """Let a settlement wait for the next reservation on its accounts."""
        with self._changed:
            fact.due = time.monotonic() + _LINGER_S
            self._lingering[fact] = None
            if len(self._lingering) > _LINGERING_KEPT:
                self._queue.append(self._lingering.popitem(last=False)[0])
            self._changed.notify()

    def take(self, keys: tuple[str, ...]) -> Fact | None:
        """A settlement that lingers, for a reservation on the same accounts. Then call ``booked`` or ``give_back``."""
        if not self._lingering:
            return None
        with self._changed:
            fact = next((each for each in self._lingering if each.keys == keys), None)
            if fact is not None and fact.bill is not None:
                del self._lingering[fact]
                self._taken[fact.bill.hold] = fact
            return fact

    def booked(self, fact: Fact) -> None:
        """The reservation has taken it along."""
        with self._changed:
            self._put_down_locked(fact)
            self._changed.notify()

    def give_back(self, fact: Fact) -> None:
        """It may or may not be booked: the writer books it, before later facts about the same call."""
        with self._changed:
            self._put_down_locked(fact)
            self._queue.appendleft(fact)
            self._changed.notify()

    def _put_down_locked(self, fact: Fact) -> None:
        if fact.bill is not None:
            self._taken.pop(fact.bill.hold, None)

    def hurry(self) -> None:
        """Let nothing linger: somebody wants to see it booked."""
        if self._lingering:
            with self._changed:
                self._hurry_locked()
                self._changed.notify()

    def _hurry_locked(self) -> None:
        self._queue.extend(self._lingering)
        self._lingering.clear()

    def first(self, seconds: float) -> Fact | None:
        """The first fact, which stays in the queue; waits for one, bounded."""
        end = time.monotonic() + seconds
        with self._changed:
            while not self.closed.is_set():
                now = time.monotonic()
                while self._lingering and (oldest := next(iter(self._lingering))).due <= now:
                    del self._lingering[oldest]
                    self._queue.append(oldest)
                if self._queue and not self._is_taken_locked(self._queue[0]):
                    return self._queue[0]
                if now >= end:
                    return None
                self._changed.wait(min([end, *(fact.due for fact in list(self._lingering)[:1])]) - now)
            return None

    def _is_taken_locked(self, fact: Fact) -> bool:
        """Whether an earlier settlement of the same call is under way."""
        return fact.bill is not None and fact.bill.hold in self._taken

    def close(self) -> None:
        """End every wait for a fact."""
        self.closed.set()
        with self._changed:
            self._changed.notify_all()

    def done(self, fact: Fact) -> None:
        """Take it out of the queue."""
        with self._changed:
            if fact in self._queue:
                self._queue.remove(fact)

    def wait_until_done(self, seconds: float, meanwhile: Callable[[], object]) -> bool:
        """Wait, bounded, until every fact is booked."""
        end = time.monotonic() + seconds
        while len(self) and time.monotonic() < end:
            self.hurry()
            meanwhile()
            time.sleep(0.005)
        return not len(self)
