"""What every ledger does. Admission is one atomic step over all accounts; a settle is a fact and is never refused.

A hold is counted beside the spend, not in it: ``due`` is spent plus held. As long as no call bills more than it held,
``due`` of no account ever exceeds its cap.
"""

import asyncio
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

from runguard.core.money import NOTHING, UNITS, UNLIMITED, Amount
from runguard.ledger.store import Record, StoreSession
from runguard.ledger.waiting_line import Sleeper, WaitingLine, new_sleeper


class Account:
    """One scope in one period. Numbers are nano-USD, tokens, calls."""

    __slots__ = (
        "__weakref__",
        "alert",
        "cap_calls",
        "cap_tokens",
        "cap_usd",
        "closed",
        "due_calls",
        "due_tokens",
        "due_usd",
        "ends",
        "fired",
        "granted",
        "key",
        "overrun",
        "scope",
        "spent_calls",
        "spent_tokens",
        "spent_usd",
        "window",
    )

    def __init__(self, key: str, scope: str, window: str | None, ends: float | None) -> None:
        self.key, self.scope, self.window, self.ends = key, scope, window, ends
        self.cap_usd = self.cap_tokens = self.cap_calls = UNLIMITED
        self.due_usd = self.due_tokens = self.due_calls = 0
        self.spent_usd = self.spent_tokens = self.spent_calls = 0
        self.granted: Amount = NOTHING  # by extensions, on top of the budget
        self.overrun: Amount = NOTHING  # billed beyond what was held, where it broke the cap
        self.closed = False  # an overrun closes the scope until it is extended or its period ends
        self.fired: dict[str, tuple[float, Amount]] = {}  # thresholds that fired in this period: share and limit
        self.alert: Amount = (UNLIMITED, UNLIMITED, UNLIMITED)  # the spend at which the next threshold fires

    @property
    def meter(self) -> str:
        """Its name without the period."""
        return self.key.rpartition("#")[0]

    @property
    def caps(self) -> Amount:
        return self.cap_usd, self.cap_tokens, self.cap_calls

    @property
    def spent(self) -> Amount:
        return self.spent_usd, self.spent_tokens, self.spent_calls

    @property
    def held(self) -> Amount:
        return self.due_usd - self.spent_usd, self.due_tokens - self.spent_tokens, self.due_calls - self.spent_calls

    @property
    def room(self) -> Amount:
        """What may still be held; nothing when closed."""
        if self.closed:
            return NOTHING
        return (
            max(self.cap_usd - self.due_usd, 0),
            max(self.cap_tokens - self.due_tokens, 0),
            max(self.cap_calls - self.due_calls, 0),
        )

    def refusing_units(self, want: Amount) -> list[int]:
        """All units in which ``want`` does not fit. Of a closed account: what it broke, or what it limits."""
        due, caps = (self.due_usd, self.due_tokens, self.due_calls), self.caps
        if self.closed:
            broken = [unit for unit in range(3) if self.overrun[unit]]
            return broken or [next((unit for unit in range(3) if caps[unit] < UNLIMITED), 0)]
        # not by the room: above its cap an account refuses nothing too
        return [unit for unit in range(3) if due[unit] + want[unit] > caps[unit]]


class Hold:
    """The worst case of one call, held on all its accounts; later what it really cost."""

    __slots__ = ("accounts", "amount", "booked", "expires", "id", "is_open", "peers")

    def __init__(self, accounts: Sequence[Account], amount: Amount, id: str = "") -> None:  # noqa: A002
        self.accounts, self.amount, self.id = accounts, amount, id
        self.expires = math.inf  # when a ledger in memory charges it; a store keeps its own time
        self.peers: dict[Hold, None] | None = None  # the open holds of such a ledger that it waits among
        self.booked: Amount = NOTHING
        self.is_open = True


class Refusal:
    """Why a reservation did not fit: the tightest of the accounts that refused."""

    __slots__ = ("account", "held", "refusing", "room", "seen", "spent", "unit", "wait_helps", "wanted")

    def __init__(
        self,
        account: Account,
        unit: int,
        wanted: Amount,
        room: Amount,
        wait_helps: bool = False,
        seen: int = 0,
        refusing: Sequence[tuple[str, int]] = (),
    ) -> None:
        self.account, self.unit, self.wanted = account, unit, wanted
        self.spent, self.held = account.spent, account.held  # as they were when it refused
        self.seen = seen  # the ledger's state that refused: what changed since then is not waited for
        self.room = room  # what would fit now on all accounts together
        self.wait_helps = wait_helps  # other calls hold the room; when they settle, more may fit
        self.refusing = refusing  # every account, by its key, and unit that refuses

    def __str__(self) -> str:
        return f"{self.account.scope} has no room for {self.wanted[self.unit]} {UNITS[self.unit]}"


class Stale:
    """A period is over by the ledger's clock: ask again with the accounts of the current one."""


STALE: Final = Stale()


def refusal_of(accounts: Sequence[Account], want: Amount, seen: int) -> Refusal:
    """Name the tightest of those that refuse: the one with the least room, dollars first."""
    refusing = [(a, units) for a in accounts if (units := a.refusing_units(want))]
    firsts = [(a, units[0]) for a, units in refusing]
    account, unit = min(firsts, key=lambda entry: (entry[1], entry[0].room[entry[1]]))
    rooms = [a.room for a in accounts]
    room = (min(r[0] for r in rooms), min(r[1] for r in rooms), min(r[2] for r in rooms))
    # Waiting helps while others hold something: when they settle for less, more room appears.
    wait_helps = all(not a.closed and a.held[u] > 0 and a.spent[u] < a.caps[u] for a, u in firsts)
    return Refusal(account, unit, want, room, wait_helps, seen, [(a.key, u) for a, units in refusing for u in units])


class Waiting:
    """Calls that wait until something was settled, released or extended, on any event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changes = 0
        self._waiting: list[Sleeper] = []
        self.line = WaitingLine()  # calls that wait for room in a budget that waits

    async def _wait(self, since: Refusal, seconds: float, sleeper: Sleeper | None = None) -> bool:
        entry = sleeper or new_sleeper()
        woken = entry[1]
        with self._lock:
            if self._changes != since.seen:
                return True
            self._waiting.append(entry)
        try:
            await asyncio.wait((woken,), timeout=seconds)
        finally:
            with self._lock:
                if entry in self._waiting:
                    self._waiting.remove(entry)
        return woken.done()


class Ledger(Protocol):
    """Reserve is awaited; settling and releasing are facts that a caller only hands over."""

    name: str
    is_shared: bool  # other processes see it: ask it before every paid call
    worker: str  # the name of this process in a shared ledger
    line: WaitingLine  # calls of this process that wait for room

    @property
    def is_away(self) -> bool:
        """Whether the store did not answer the last time it was asked."""

    def now(self, at: float) -> float:
        """The ledger's clock; ``at`` is the caller's."""

    def period_time(self, at: float) -> float:
        """The ledger's clock, by which periods begin and end.

        It never reopens a period that this ledger has forgotten.
        """

    def account(
        self, key: str, scope: str, window: str | None, ends: float | None, caps: Amount, begins: float | None = None
    ) -> Account:
        """The account of a scope and period, made if new, with the caps in force now."""

    async def reserve(
        self, accounts: Sequence[Account], want: Amount, *, force: bool = False, ttl: float = 900.0
    ) -> Hold | Refusal | Stale:
        """Hold ``want`` on all accounts, or on none. ``force``, for shadow mode, ignores the caps.

        ``ttl``: seconds after which a hold that was not settled is charged; a late settlement corrects the
        charge. Raises ``StoreOutage`` or ``StoreError``.
        """

    def hold_now(self, accounts: Sequence[Account], want: Amount, ttl: float = 900.0) -> Hold | None:
        """``reserve`` at once, where this ledger can and it fits; None: await ``reserve``."""

    def book(self, accounts: Sequence[Account]) -> Hold:
        """A hold of nothing, for a call that could not be reserved: its settlement is still booked."""

    def settle(
        self,
        hold: Hold,
        actual: Amount,
        then: Callable[[], None] | None = None,
        record: Record | None = None,
        *,
        may_wait: bool = False,
    ) -> None:
        """Book what a call really took.

        Again for the same hold: the later figure replaces the earlier. ``then``: once it is booked. ``record``: where
        the ledger is durable, it is written in the same step. ``may_wait``: a store may book it with the next
        reservation, or a moment later; ``then`` is only needed where an account reaches its alert.
        """

    def release(self, hold: Hold) -> None:
        """The call was never sent: undo its reservation."""

    def extend(self, account: Account, more: Amount) -> None:
        """Move the cap; what was spent stays spent."""

    def first(self, account: Account, mark: str, percent: float, limit: Amount) -> bool | None:
        """Return True for the first caller with this mark in this account and period; None without an answer."""

    async def changed(self, since: Refusal, seconds: float, sleeper: Sleeper | None = None) -> bool:
        """Wait until something was settled, released or extended since a refusal; False when the time is over.

        A shared ledger returns early, because other workers settle without notice. With a ``sleeper``, whose future
        the caller may resolve to end the wait, every ledger waits for the whole time.
        """

    def find(self, scope: str) -> list[Account]:
        """The accounts of a scope, the current period's last."""

    def accounts(self) -> list[Account]:
        """Every account, for reading.

        Some may be copies: to change one, get it from ``find`` or ``account``.
        """

    def known(self) -> list[Account]:
        """The accounts that this process knows, without asking the store. For reading, as ``accounts``."""

    def forget(self, scope: str) -> None:
        """A run has ended: its own accounts are not needed any more."""

    def flush(self, seconds: float) -> bool:
        """Wait, bounded, until every fact handed over is booked.

        False when something is left, or could never be booked.
        """

    def health(self) -> dict[str, Any]:
        """What is on its way to a store, and what went wrong on the way; empty without a store. Plain data."""

    async def ask(self, job: Callable[[StoreSession], None], *, again: bool = False) -> None:
        """Let a shared store do something now, within its deadline."""

    def tell(self, fact: Callable[[StoreSession], Any]) -> None:
        """Write a record, where the ledger keeps records."""

    def change_control(self, change: Callable[[str], str]) -> str:
        """Change the control document safely against concurrent changes; return the new text."""

    async def refresh(self) -> None:
        """Read the control document again if it has changed."""

    def refresh_now(self) -> None:
        """The same, for callers that are not on the path of a run; raises when the store does not answer."""

    def check(self) -> None:
        """Raise ``StoreError`` when the store behind it cannot be worked with."""

    def watch(self, on_control: Callable[[str], None], running: Callable[[], Iterable[tuple[str, str]]]) -> None:
        """Call ``on_control`` when the control document has changed, and ask ``running`` for the runs that are alive:
        names and texts.
        """
