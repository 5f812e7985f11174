"""What a durable store must be able to do.

One ``StoreSession`` is one connection, used by one thread at a time; all of it is synchronous.

Rules that every store keeps:
- ``reserve`` is one atomic step over all lines. Holds are counted beside the spend, not in it.
- A hold's id is unique; a reserve with a known id changes nothing and answers as before.
- ``settle`` is a fact: never refused, booked once; again with another amount it replaces the earlier one. It books also
  when the hold expired (it was charged then: the difference is booked) or is not known at all (the store forgot, or was
  away).
- An expired hold is *charged*, not released: the provider may have billed.
- Time is the store's own clock; workers' clocks do not matter. A line whose period is over, or not yet begun, by that
  clock is
  ``Stale``, and nothing is held.
- Amounts are whole numbers. Whatever else arrives is refused before anything is written.
- What reads or changes accounts does so in the store that the process has seen, and in no other one: checked in the
  same step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from runguard import log_lines  # noqa: F401 - its filter keeps every log line on one line
from runguard.core.errors import RunGuardError
from runguard.core.money import NOTHING, UNLIMITED, Amount

SCHEMA_VERSION = 1


class StoreError(RunGuardError):
    """The store answered, and the answer cannot be worked with: wrong schema, damaged file, no permission."""


class StoreOutage(RunGuardError):  # noqa: N818 - it is a state of the world rather than a mistake
    """The store cannot be reached, is too slow, or is full. Another attempt may succeed."""


@dataclass(frozen=True, slots=True)
class Line:
    """An account as a reservation names it."""

    key: str  # scope, window and period: unique
    scope: str
    window: str | None
    begins: float | None  # of the period, by the store's clock
    ends: float | None
    caps: Amount  # the budget's, without extensions


@dataclass(frozen=True, slots=True)
class Balance:
    """An account as the store has it."""

    key: str
    scope: str
    window: str | None
    ends: float | None
    caps: Amount  # without extensions
    spent: Amount = NOTHING
    held: Amount = NOTHING
    granted: Amount = NOTHING
    overrun: Amount = NOTHING
    expired: Amount = NOTHING  # of spent: charged for holds that were never settled
    closed: bool = False


@dataclass(frozen=True, slots=True)
class StoreReply:
    """The answer to a reservation or a settlement, with what the caller should know of the world."""

    balances: Sequence[Balance]
    now: float  # the store's clock
    control: int  # version of the control document: when it changed, read it
    ok: bool = True
    stale: bool = False  # a line's period is not the current one: nothing was held


Record = tuple[str, str, str]  # kind, what it is about, text


@dataclass(frozen=True, slots=True)
class SettledCall:
    """A settlement: what the call of a hold took."""

    hold: str
    lines: Sequence[Line]
    actual: Amount
    record: Record | None = None


class StoreSession(Protocol):
    """One connection. Every method raises ``StoreOutage`` when the store is away and ``StoreError`` when it is
    unusable.
    """

    def reserve(self, hold: str, ttl: float, lines: Sequence[Line], want: Amount, *, force: bool = False) -> StoreReply:
        """Hold ``want`` on all lines or on none (``ok`` False, with the balances that refused and the others)."""

    def settle(self, hold: str, lines: Sequence[Line], actual: Amount, record: Record | None = None) -> StoreReply:
        """Book what a call took, and append its record, in one step. Again with the same amount, it appends nothing."""

    def settle_and_reserve(
        self, bill: SettledCall, hold: str, ttl: float, lines: Sequence[Line], want: Amount, *, force: bool = False
    ) -> tuple[StoreReply, StoreReply]:
        """``settle`` and then ``reserve``, in one round trip and with one commit where the store can do that.

        It may be repeated, as both of them. When it raises, the settlement may be booked: settle again.
        """

    def release(self, hold: str) -> StoreReply:
        """The call never left. Of an expired or settled hold nothing is taken back. A hold that is not known is
        remembered as released: a reservation of it that is still on its way holds nothing when it arrives."""

    def extend(self, line: Line, more: Amount) -> Balance:
        """Move the cap of one account, made if new."""

    def read(self, scope: str | None = None) -> list[Balance]:
        """The accounts of a scope, or all; expired holds charged."""

    def first(self, key: str, mark: str, percent: float, limit: Amount) -> bool:
        """True once per account and mark."""

    def marks(self, key: str) -> dict[str, tuple[float, Amount]]:
        """What ``first`` has answered True to."""

    def unmark(self, key: str, marks: Sequence[str]) -> None:
        """Arm again."""

    def get(self, name: str) -> tuple[int, str]:
        """A document and its version; (0, "") when there is none. "control" is one."""

    def put(self, name: str, version: int, text: str) -> bool:
        """Replace a document if it still has this version; its next one is one higher."""

    def drop(self, name: str) -> None:
        """Remove a document, whether or not it can be read."""

    def now(self) -> float:
        """The store's clock."""

    def append(self, kind: str, ref: str, text: str) -> None:
        """Add a record. Never changed, dropped by ``purge`` alone."""

    def tail(self, kind: str, count: int) -> list[tuple[float, str, str]]:
        """The last records of a kind, oldest first: when, about what, text."""

    def page(self, kind: str, after: str, count: int) -> list[tuple[str, float, str, str]]:
        """The next records of a kind after the one with this id ("" for the oldest), oldest first: id, when, about
        what, text. Ids are whole numbers, or two of them with a dash between, and grow."""

    def about(self, kind: str, ref: str, *, last: int | None = None) -> list[tuple[float, str]]:
        """All records of a kind about one thing, or the ``last`` ones, oldest first: when, text."""

    def beat(self, run: str, worker: str, text: str, *, ended: bool = False) -> int:
        """A run is alive, or ended; returns the control version."""

    def running(self, within: float) -> list[tuple[str, str, float, str]]:
        """Runs that gave a sign of life within so many seconds: run, worker, when, text."""

    def claim(self, key: str, ttl: float) -> str:
        """Claim a side effect: "yes", "pending" (another call is doing it), or "done"."""

    def finish(self, key: str, done: bool) -> None:
        """The claimed side effect was done, or is free again."""

    def purge(self, older_than: float) -> None:
        """Drop what is older than so many seconds and has no open hold: records, ended or silent runs and
        sessions with their accounts, finished holds, past periods, finished claims."""

    def close(self) -> None: ...


class Store(Protocol):
    """A place to keep accounts. Making one does no I/O."""

    name: str  # for people: no password
    durable: str  # what survives which failure, in one sentence

    def connect(self, timeout: float) -> StoreSession:
        """A session whose every call ends within about ``timeout``. The first one creates or migrates the
        schema; ``StoreError`` for another one.

        Later ones create nothing and raise ``StoreReplacedError`` when they meet another store than the first
        (``ledger/identity.py``).
        """


# ---- arithmetic that every store shares -----------------------------------------------------------------------------


MOST: Final = 10**17  # of one amount: a hundred million dollars, and few enough digits to be added up for ever


def check_amounts(amounts: Amount, lines: Sequence[Line] = ()) -> None:
    """Refuse invalid amounts before anything is written."""
    if len(amounts) != 3 or any(len(line.caps) != 3 for line in lines):
        raise ValueError("three amounts belong together: nano-USD, tokens, calls")
    for amount in amounts:
        if type(amount) is not int or not 0 <= amount <= MOST:
            raise ValueError(f"{amount!r} is not an amount: a whole number from 0 to {MOST}")
    for cap in (cap for line in lines for cap in line.caps):
        if type(cap) is not int or not 0 <= cap <= UNLIMITED:
            raise ValueError(f"{cap!r} is not a limit: a whole number, not negative")


def check_ttl(ttl: float) -> None:
    if not 0 <= ttl <= 10**9:
        raise ValueError(f"{ttl!r} is not a time to live: seconds, not negative")


def fits(balance: Balance, want: Amount) -> bool:
    parts = zip(balance.spent, balance.held, want, balance.caps, balance.granted, strict=True)
    return all(spent + held + wanted <= cap + granted for spent, held, wanted, cap, granted in parts)


def overrun_of(balance: Balance, more: Amount) -> tuple[Amount, bool]:
    """What a call that billed ``more`` than it held adds to the overrun, and whether that closes the account."""
    over, closed = list(balance.overrun), False
    for unit in range(3):
        due = balance.spent[unit] + balance.held[unit] - balance.caps[unit] - balance.granted[unit]
        if more[unit] > 0 and due > 0:
            closed = True
            over[unit] = max(over[unit], min(due, over[unit] + more[unit]))
    return (over[0], over[1], over[2]), closed
