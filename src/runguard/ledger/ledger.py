"""What every ledger and every store must do, and the documents that workers share in a store.

``engine`` reserves and settles on a ``Ledger``: ``ledger/memory`` has that of one process, ``ledger/remote`` the one
over a ``Store``. ``ledger/sqlite``, ``ledger/redis`` and ``ledger/postgres`` are the stores.
``engine/decide`` changes the control document; ``view/store`` reads it, and the sums of days.
"""

import asyncio
import contextlib
import json
import logging
import math
import re
import secrets
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime
from operator import attrgetter
from typing import Any, Final, Generic, Protocol, TypeVar

from runguard import background  # noqa: F401 - its filter keeps every log line on one line
from runguard.core.breaker import Breaker
from runguard.core.errors import PolicyError, RunGuardError
from runguard.core.money import MOST_USD, NANO, NOTHING, UNITS, UNLIMITED, Amount, to_nano

_log: Final = logging.getLogger("runguard")

# ---- What a durable store must be able to do.

SCHEMA_VERSION = 1


class StoreError(RunGuardError):
    """The store answered, and the answer cannot be worked with: wrong schema, damaged file."""


class StoreOutage(RunGuardError):  # noqa: N818 - it is a state of the world rather than a mistake
    """The store cannot be reached, is too slow, or is full. Another attempt may succeed."""


class StoreDeniedError(StoreOutage):
    """The store refuses this process: a wrong password, a missing right, a file that may not be opened.

    At construction it is a mistake to report at once. Later it is an outage that an operator ends, for example when a
    password is rotated: what was spent waits until it can be booked.
    """


@dataclass(frozen=True, slots=True)
class Line:
    """An account as a reservation names it."""

    key: str  # scope, window and period: unique
    scope: str
    window: str | None
    begins: float | None  # of the period, by the store's clock
    ends: float | None
    caps: Amount  # the budget's, without extensions


@dataclass(slots=True)
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

    @property
    def beyond(self) -> Amount:
        """How far the account is above its cap with its extensions; less than 0 where there is room."""
        parts = zip(self.spent, self.held, self.caps, self.granted, strict=True)
        usd, tokens, calls = (spent + held - cap - granted for spent, held, cap, granted in parts)
        return usd, tokens, calls


@dataclass(slots=True)
class StoreReply:
    """The answer to a reservation or a settlement, with what the caller should know of the world."""

    balances: Sequence[Balance]
    now: float  # the store's clock
    control: int  # version of the control document: when it changed, read it
    ok: bool = True
    stale: bool = False  # a line's period is not the current one: nothing was held
    latest: float = -math.inf  # while the store's clock is behind this time, periods are those of this time


Record = tuple[str, str, str]  # kind, what it is about, text


@dataclass(frozen=True, slots=True)
class SettledCall:
    """A settlement: what the call of a hold took."""

    hold: str
    lines: Sequence[Line]
    actual: Amount
    record: Record | None = None


class StoreSession(Protocol):
    """One connection, used by one thread at a time.

    Every method raises ``StoreOutage`` when the store is away and ``StoreError`` when it is unusable. Rules that every
    store keeps:

    - ``reserve`` is one atomic step over all lines. Holds are counted beside the spend, not in it.
    - A hold's id is unique; a reserve with a known id changes nothing and answers as before.
    - ``settle`` is a fact: never refused, booked once; again with another amount it replaces the earlier one. It books
      also when the hold expired (it was charged then: the difference is booked) or is not known at all (the store
      forgot, or was away).
    - An expired hold is *charged*, not released: the provider may have billed.
    - Time is the store's own clock; workers' clocks do not matter. A line whose period is over, or not yet begun, by
      that clock is ``Stale``, and nothing is held. A store whose clock may be set back goes on with the latest period
      that was used, and says so with ``StoreReply.latest``.
    - Amounts are whole numbers. Whatever else arrives is refused before anything is written.
    - What reads or changes accounts does so in the store that the process has seen, and in no other one: checked in
      the same step.
    """

    def reserve(self, hold: str, ttl: float, lines: Sequence[Line], want: Amount, *, force: bool = False) -> StoreReply:
        """Hold ``want`` on all lines or on none.

        Where it does not fit, ``ok`` is False, and the balances say who refused. ``ttl``: seconds after which the hold
        is charged. ``force`` ignores the caps.
        """

    def settle(self, hold: str, lines: Sequence[Line], actual: Amount, record: Record | None = None) -> StoreReply:
        """Book what a call took, and append its record, in one step. Again with the same amount, it appends nothing."""

    def settle_and_reserve(
        self, bill: SettledCall, hold: str, ttl: float, lines: Sequence[Line], want: Amount, *, force: bool = False
    ) -> tuple[StoreReply, StoreReply]:
        """Settle and then reserve, in one round trip and with one commit where the store can do that.

        It may be repeated, as both of them. When it raises, the settlement may be booked: settle again.
        """

    def release(self, hold: str) -> StoreReply:
        """Release the hold of a call that was never sent.

        Of an expired or settled hold nothing is taken back. A hold that is not known is remembered as released: a
        reservation of it that is still on its way holds nothing when it arrives.
        """

    def extend(self, line: Line, more: Amount) -> Balance:
        """Raise the cap of one account, which is made if it is new."""

    def read(self, scope: str | None = None) -> list[Balance]:
        """Return the accounts of a scope, or all for None. Expired holds are charged first."""

    def first(self, key: str, mark: str, percent: float, limit: Amount) -> bool:
        """Return True once per account and mark.

        ``percent`` and ``limit`` say at which share of which limit the mark stands.
        """

    def marks(self, key: str) -> dict[str, tuple[float, Amount]]:
        """Return the marks to which ``first`` has answered True, with their share and limit."""

    def unmark(self, key: str, marks: Sequence[str]) -> None:
        """Delete marks so that their thresholds can fire again."""

    def get(self, name: str) -> tuple[int, str]:
        """Return the version and the text of a document; (0, "") when there is none. "control" is one."""

    def put(self, name: str, version: int, text: str) -> bool:
        """Replace a document if it still has this version, and return whether it had.

        Its next version is one higher.
        """

    def drop(self, name: str) -> None:
        """Remove a document, whether or not it can be read."""

    def now(self) -> float:
        """Return the time of the store's clock, in unix seconds."""

    def append(self, kind: str, ref: str, text: str) -> None:
        """Add a record. It never changes, and only ``purge`` drops it."""

    def tail(self, kind: str, count: int) -> list[tuple[float, str, str]]:
        """Return the last records of a kind, oldest first: when, about what, text."""

    def page(self, kind: str, after: str, count: int) -> list[tuple[str, float, str, str]]:
        """Return the next records of a kind after the one with this id, oldest first: id, when, about what, text.

        ``after``: "" begins with the oldest. Ids are whole numbers, or two of them with a dash between, and grow.
        """

    def about(self, kind: str, ref: str, *, last: int | None = None) -> list[tuple[float, str]]:
        """Return all records of a kind about one thing, or the ``last`` ones, oldest first: when, text."""

    def beat(self, run: str, worker: str, text: str, *, ended: bool = False) -> int:
        """Note that a run is alive, or has ended; return the version of the control document."""

    def running(self, within: float) -> list[tuple[str, str, float, str]]:
        """Return the runs that gave a sign of life within so many seconds: run, worker, when, text."""

    def claim(self, key: str, ttl: float) -> str:
        """Claim a side effect: "yes", "pending" (another call is doing it), or "done"."""

    def finish(self, key: str, done: bool) -> None:
        """Note that the claimed side effect was done, or with ``done=False`` set it free for another claim."""

    def purge(self, older_than: float) -> None:
        """Drop what is older than so many seconds and has no open hold.

        That is records, ended or silent runs and sessions with their accounts, finished holds, past periods, and
        finished claims.
        """

    def close(self) -> None: ...


class Store(Protocol):
    """A place to keep accounts. Making one does no I/O."""

    name: str  # for people: no password
    durable: str  # what survives which failure, in one sentence

    def connect(self, timeout: float) -> StoreSession:
        """Return a session whose every call ends within about ``timeout`` seconds.

        The first one creates or migrates the schema; it raises ``StoreError`` for another schema. Later ones create
        nothing and raise ``StoreReplacedError`` when they meet another store than the first.
        """


# ---- The order of calls that wait for room in a budget: first come, first served, per account of one ledger.

Sleeper = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]  # a call that waits, and what ends its wait


class LinePlace:
    """The place of one call in the line."""

    __slots__ = ("blocked_on", "may_ask", "names", "sleeper")

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names  # of the accounts that it may have to wait for
        self.blocked_on = ""  # the account that refused it last; "": it has not asked yet
        self.may_ask = False
        self.sleeper: Sleeper | None = None


class WaitingLine:
    """The calls in line at one ledger, on any thread and event loop.

    Every call on a budget that waits takes a place before it asks. It may ask when no earlier call waits for an account
    that it needs. A call that waits for one account does not hold up calls that only share another account with it: a
    user without room must not block the other users of the same model.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: dict[LinePlace, None] = {}  # in the order of arrival

    def __len__(self) -> int:
        return len(self._line)

    def is_free(self, names: frozenset[str]) -> bool:
        """Return whether a call that comes now could ask at once. ``names``: those of its accounts."""
        if not self._line:
            return True
        with self._lock:
            return names.isdisjoint(self._advance_locked())

    def join(self, names: frozenset[str]) -> LinePlace:
        place = LinePlace(names)
        with self._lock:
            self._line[place] = None
            self._advance_locked()
        return place

    def block(self, place: LinePlace, name: str) -> None:
        """Note which account refused the call.

        It waits for that one only, and calls on its other accounts may go ahead.
        """
        if place.blocked_on != name:
            with self._lock:
                place.blocked_on = name
                self._advance_locked()

    def leave(self, place: LinePlace) -> None:
        """Take a call out of the line, because it has what it wanted, gave up or was cancelled.

        The next one may ask.
        """
        with self._lock:
            self._line.pop(place, None)
            self._advance_locked()

    def listen(self, place: LinePlace) -> Sleeper:
        """Return a future of the running loop that is done when the call may ask, or after ``wake``."""
        with self._lock:
            place.sleeper = new_sleeper()
            return place.sleeper

    def wake(self, place: LinePlace) -> None:
        """End the wait of a call whose run was stopped."""
        with self._lock:
            _wake_place(place)

    def waiting_for(self, names: Iterable[str]) -> int:
        """Return how many calls wait for one of these accounts."""
        wanted = set(names)
        with self._lock:
            return sum(place.blocked_on in wanted for place in self._line)

    def _advance_locked(self) -> set[str]:
        """Let each place ask for whose accounts no earlier one waits, and return the accounts that are waited for."""
        taken: set[str] = set()
        for place in self._line:
            needs = {place.blocked_on} if place.blocked_on else place.names
            may_ask = taken.isdisjoint(needs)
            if may_ask and not place.may_ask:
                _wake_place(place)
            place.may_ask = may_ask
            taken |= needs
        return taken


def _wake_place(place: LinePlace) -> None:
    if place.sleeper is not None:
        wake([place.sleeper])


def new_sleeper() -> Sleeper:
    """Return a new future with its loop, for a call on the running loop."""
    loop = asyncio.get_running_loop()
    return loop, loop.create_future()


def wake(sleepers: Iterable[Sleeper]) -> None:
    """End the waits of calls, from any thread."""
    for loop, woken in sleepers:
        with contextlib.suppress(RuntimeError):  # its loop is closed: nothing waits there any more
            loop.call_soon_threadsafe(_resolve, woken)


def _resolve(woken: "asyncio.Future[None]") -> None:
    if not woken.done():
        woken.set_result(None)


# ---- Who wants to know when something has changed.

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Listeners(Generic[_Method]):
    """Methods to call, each once and as long as its object lives."""

    def __init__(self) -> None:
        self._methods: tuple[weakref.WeakMethod[_Method], ...] = ()

    def add(self, method: _Method) -> None:
        own = weakref.WeakMethod(method)
        self._methods = (*(known for known in self._methods if known() is not None and known != own), own)

    def __iter__(self) -> Iterator[_Method]:
        return iter([method for known in self._methods if (method := known()) is not None])


_CLOCK_BACK_S: Final = 60.0  # less is no sign of a clock set back: calls made at once come in any order

# ---- A ledger, and what it works with: accounts, holds and refusals.


class Account:
    """One scope in one period. Numbers are nano-USD, tokens, calls.

    A hold is counted beside the spend, not in it: ``due`` is spent plus held. As long as no call bills more than it
    held, ``due`` never exceeds the cap.
    """

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
        """The account's key without its period."""
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
        """How much may still be held; nothing when closed."""
        if self.closed:
            return NOTHING
        return (
            max(self.cap_usd - self.due_usd, 0),
            max(self.cap_tokens - self.due_tokens, 0),
            max(self.cap_calls - self.due_calls, 0),
        )

    def limit(self, caps: Amount) -> None:
        """Set the caps of the budget in force now. Extensions come on top."""
        usd, tokens, calls = caps
        more_usd, more_tokens, more_calls = self.granted
        self.cap_usd = usd + more_usd if usd < UNLIMITED else UNLIMITED
        self.cap_tokens = tokens + more_tokens if tokens < UNLIMITED else UNLIMITED
        self.cap_calls = calls + more_calls if calls < UNLIMITED else UNLIMITED

    def refusing_units(self, want: Amount) -> list[int]:
        """Return all units in which ``want`` does not fit.

        For a closed account: those that it broke, or one that it limits.
        """
        due, caps = (self.due_usd, self.due_tokens, self.due_calls), self.caps
        if self.closed:
            broken = [unit for unit in range(3) if self.overrun[unit]]
            return broken or [next((unit for unit in range(3) if caps[unit] < UNLIMITED), 0)]
        # not by its room, which is 0 above the cap: there an account refuses even a want of 0
        return [unit for unit in range(3) if due[unit] + want[unit] > caps[unit]]


class Hold:
    """The worst case of one call, held on all its accounts; later what it really cost."""

    __slots__ = ("accounts", "amount", "booked", "expires", "id", "is_expired", "is_open", "peers")

    def __init__(self, accounts: Sequence[Account], amount: Amount, id: str = "") -> None:  # noqa: A002
        self.accounts, self.amount, self.id = accounts, amount, id
        self.expires = math.inf  # on this process's monotonic clock; a store keeps its own time
        self.peers: dict[Hold, None] | None = None  # the open holds of such a ledger that it waits among
        self.booked: Amount = NOTHING
        self.is_open = True
        self.is_expired = False  # a ledger in memory has charged it


class Refusal:
    """Why a reservation did not fit: the tightest of the accounts that refused."""

    wait_helps = False  # other calls hold the room; when they settle, more may fit
    seen = 0  # the ledger's state that refused: no call waits for a change that came after it
    refusing: Sequence[tuple[str, int]] = ()  # every account, by its key, and unit that refuses

    def __init__(self, account: Account, unit: int, wanted: Amount, room: Amount) -> None:
        self.account, self.unit, self.wanted = account, unit, wanted
        self.spent, self.held = account.spent, account.held  # as they were when it refused
        self.room = room  # what would fit now on all accounts together

    def __str__(self) -> str:
        return f"{self.account.scope} has no room for {self.wanted[self.unit]} {UNITS[self.unit]}"


class Stale:
    """The answer when a period is over by the ledger's clock: ask again with the accounts of the current one."""


STALE: Final = Stale()


def refusal_of(accounts: Sequence[Account], want: Amount, seen: int) -> Refusal:
    """Return a refusal that names the tightest of the accounts that refuse: the one with the least room, dollars first.

    ``seen``: the ledger's state that refused.
    """
    refusing = [(a, units) for a in accounts if (units := a.refusing_units(want))]
    firsts = [(a, units[0]) for a, units in refusing]
    account, unit = min(firsts, key=lambda entry: (entry[1], entry[0].room[entry[1]]))
    rooms = [a.room for a in accounts]
    room = (min(r[0] for r in rooms), min(r[1] for r in rooms), min(r[2] for r in rooms))
    refusal = Refusal(account, unit, want, room)
    # Waiting helps while others hold something: when they settle for less, more room appears.
    refusal.wait_helps = all(not a.closed and a.held[u] > 0 and a.spent[u] < a.caps[u] for a, u in firsts)
    refusal.seen, refusal.refusing = seen, [(a.key, u) for a, units in refusing for u in units]
    return refusal


class Ledger(Protocol):
    """Accounts, and the holds on them. Admission is one atomic step over all accounts of a call.

    Reserve is awaited. Settling and releasing are facts that a caller only hands over; they are never refused. What has
    a body here is right for a ledger that no other process shares.
    """

    name: str
    is_shared: bool = False  # other processes see it: ask it before every paid call
    worker: str = ""  # the name of this process in a shared ledger
    line: WaitingLine  # calls of this process that wait for room in a budget that waits
    _waiting: list[Sleeper]  # calls that wait for a change, on any event loop
    _changes: int = 0  # how much was settled, released or extended so far
    _latest: float = -math.inf  # periods do not go back behind this time
    _told_back: bool = False
    _lock: threading.Lock

    def __init__(self) -> None:
        self.line, self._waiting, self._lock = WaitingLine(), [], threading.Lock()

    @property
    def is_away(self) -> bool:
        """Whether the store did not answer the last time it was asked."""
        return False

    def now(self, at: float) -> float:
        """Return the time of the ledger's clock. ``at`` is the caller's time."""
        return at

    def period_time(self, at: float) -> float:
        """Return the time by which periods begin and end. It never goes back to an earlier period."""

    def _tell_clock_back(self, seconds: float) -> None:
        """Log for the first time that the clock was set back, if these seconds say so."""
        if seconds > _CLOCK_BACK_S and not self._told_back:
            self._told_back = True
            _log.warning(
                "runguard.clock_back: the clock was set back by %.0f s; budgets with a window go on when it has caught "
                "up",
                seconds,
            )

    def account(
        self, key: str, scope: str, window: str | None, ends: float | None, caps: Amount, begins: float | None = None
    ) -> Account:
        """Return the account of a scope and period, made if new, with the caps in force now."""

    async def reserve(
        self, accounts: Sequence[Account], want: Amount, *, force: bool = False, ttl: float = 900.0
    ) -> Hold | Refusal | Stale:
        """Hold ``want`` on all accounts, or on none. ``force``, for shadow mode, ignores the caps.

        ``ttl``: seconds after which a hold that was not settled is charged; a late settlement corrects the
        charge. Raises ``StoreOutage`` or ``StoreError``.
        """

    def hold_now(self, accounts: Sequence[Account], want: Amount, ttl: float = 900.0) -> Hold | None:
        """Reserve at once where this ledger can and it fits; None: await ``reserve``."""

    def book(self, accounts: Sequence[Account]) -> Hold:
        """Return a hold of nothing, for a call that could not be reserved. Its settlement is still booked."""

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

        Again for the same hold: the later figure replaces the earlier. ``then``: called once it is booked. ``record``:
        where the ledger is durable, it is written in the same step. ``may_wait``: a store may book it with the next
        reservation, or a moment later; ``then`` is only needed where an account reaches its alert.
        """

    def release(self, hold: Hold) -> None:
        """Release the reservation of a call that was never sent."""

    def extend(self, account: Account, more: Amount) -> None:
        """Raise the cap of an account by ``more``. What was spent stays spent."""

    def first(self, account: Account, mark: str, percent: float, limit: Amount) -> bool | None:
        """Return True for the first caller with this mark in this account and period; None without an answer."""

    async def changed(self, since: Refusal, seconds: float, sleeper: Sleeper | None = None) -> bool:
        """Wait until something was settled, released or extended since a refusal; False when the time is over.

        A shared ledger returns early, because other workers settle without notice. With a ``sleeper``, whose future
        the caller may resolve to end the wait, every ledger waits for the whole time.
        """
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

    def _wake_all(self) -> None:
        """Let every call that waits ask again, on any event loop."""
        with self._lock:
            self._changes += 1
            waiting, self._waiting = self._waiting, []
        wake(waiting)

    def find(self, scope: str) -> list[Account]:
        """Return the accounts of a scope, that of the current period last."""

    def accounts(self) -> list[Account]:
        """Return every account, for reading.

        Some may be copies: to change one, get it from ``find`` or ``account``.
        """

    def known(self) -> list[Account]:
        """Return the accounts that this process knows, without asking the store. For reading, as ``accounts``."""
        return self.accounts()

    def forget(self, scope: str) -> None:
        """Forget the accounts of a run that has ended."""

    def flush(self, seconds: float) -> bool:
        """Wait, bounded, until every fact handed over is booked.

        False when something is left, or could never be booked.
        """
        return True

    def health(self) -> dict[str, Any]:
        """Return what is on its way to a store, and what went wrong on the way.

        It is plain data, empty without a store.
        """
        return {}

    async def ask(self, job: Callable[[StoreSession], Any], *, again: bool = False) -> Any:
        """Let a shared store do something now, within its deadline. ``again``: doing it twice counts once."""
        return None

    def tell(self, fact: Callable[[StoreSession], Any]) -> None:
        """Write a record, where the ledger keeps records. It is dropped when too many facts are waiting."""
        return

    def change_control(self, change: Callable[[str], str]) -> str:
        """Change the control document safely against concurrent changes; return the new text."""

    async def refresh(self) -> None:
        """Read the control document again if it has changed."""
        return

    def refresh_now(self) -> None:
        """Read the control document again, for callers that are not on the path of a run.

        Raise when the store does not answer.
        """
        return

    def check(self) -> None:
        """Raise ``StoreError`` or ``StoreDeniedError`` when the store behind it cannot be worked with."""
        return

    def watch(self, on_control: Callable[[str], None], running: Callable[[], Iterable[tuple[str, str]]]) -> None:
        """Call ``on_control`` when the control document has changed, and ask ``running`` for the runs that are alive.

        ``running`` gives their names and texts.
        """

    def watch_dropped(self, on_dropped: Callable[[int, int], None]) -> None:
        """Call ``on_dropped`` when settlements were dropped: how many so far, and what they cost in nano-dollars."""
        return


# ---- Arithmetic that every store shares.

MOST: Final = MOST_USD * NANO  # of one amount


def check_amounts(amounts: Amount, lines: Sequence[Line] = ()) -> None:
    """Refuse invalid amounts before anything is written. Raise ValueError for them."""
    most, meaning = MOST, "an amount"
    for numbers in (amounts, *map(attrgetter("caps"), lines)):
        if len(numbers) != 3:
            raise ValueError("three amounts belong together: nano-USD, tokens, calls")
        for number in numbers:
            if type(number) is not int or not 0 <= number <= most:
                raise ValueError(f"{number!r} is not {meaning}: a whole number from 0 to {most}")
        most, meaning = UNLIMITED, "a limit"


def check_ttl(ttl: float) -> None:
    if not 0 <= ttl <= 10**9:
        raise ValueError(f"{ttl!r} is not a time to live: seconds, not negative")


def check_version(name: str, version: int, foreign: str) -> None:
    """Raise StoreError for another version of the schema than ours. ``foreign``: the text for one that is not newer."""
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{name}: its schema is version {version}, made by a newer RunGuard; this one knows version "
            f"{SCHEMA_VERSION}. Upgrade runguard-agents"
        )
    if version != SCHEMA_VERSION:
        raise StoreError(f"{name}: {foreign}")


def fits(balance: Balance, want: Amount) -> bool:
    return all(beyond + wanted <= 0 for beyond, wanted in zip(balance.beyond, want, strict=True))


def overrun_of(before: Amount, more: Amount, beyond: Amount) -> Amount | None:
    """Return the overrun of an account after a call that billed more than it held; None where it broke no cap.

    ``before``: the overrun until then. ``more``: how much more than held the call billed. ``beyond``: how far the
    account is above its cap now.
    """
    if not any(m > 0 and over > 0 for m, over in zip(more, beyond, strict=True)):
        return None  # the cap may be lower than before, or force ignored it
    usd, tokens, calls = (
        max(known, min(over, known + m)) if m > 0 else known
        for known, m, over in zip(before, more, beyond, strict=True)
    )
    return usd, tokens, calls


# ---- The boundary to a store: every exception that comes out of it is a ``StoreOutage`` or a ``StoreError``.

_TRANSIENT: Final = (OSError, EOFError)
_LONGEST_TEXT: Final = 300


class UnforeseenError(StoreError):
    """An exception that the code of the store did not expect.

    It may come from a damaged row, an answer of the wrong shape, or a defect in a client library. It must not look like
    a fault of the guard, because ``on_guard_error="allow"`` would let the call through. Another attempt may succeed: a
    connection in a strange state is replaced.
    """


@contextlib.contextmanager
def store_faults(name: str, kinds: type[BaseException] = Exception) -> Iterator[None]:
    """Turn every exception of code that talks to the store ``name`` into a store fault.

    On a thread of ours ``kinds`` is ``BaseException``: no other code handles exceptions there.
    """
    try:
        yield
    except kinds as error:
        fault = fault_of(name, error)
        if fault is error:
            raise
        raise fault from error


def fault_of(name: str, error: BaseException) -> StoreError | StoreOutage:
    """Return the error itself if it is a store fault, otherwise a store fault in its place."""
    if isinstance(error, StoreError | StoreOutage):
        return error
    if isinstance(error, PolicyError):  # settings that only connecting could prove wrong; it names the store
        return StoreError(str(error))
    found = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_TEXT].removesuffix(": ")
    if isinstance(error, _TRANSIENT):
        return StoreOutage(f"{name}: {found}")
    return UnforeseenError(
        f"{name}: the store gave an answer that cannot be used ({found}); its data may be damaged. Check it "
        "with: runguard doctor"
    )


# ---- Which store this is, and whether another one took its place.
# The id is kept in the document ``identity``: the store's own id, then the ids that it replaces, newest first, with
# spaces between. Replicas, failovers, dumps and restores have the same one. Every operation that reads or changes an
# account compares the whole text in the same step, so there is no moment between the check and the change.

IDENTITY: Final = "identity"
_IDENTITY_TEXT: Final = re.compile(r"[0-9a-f]{16}( [0-9a-f]{16})*")
_REPLACED_KEPT: Final = 20  # ids
_TRIES: Final = 20


class StoreReplacedError(StoreOutage):
    """Another store answers at the address of the one that this process has worked with, or it lost its data.

    Its accounts say nothing of what was spent. The process makes nothing there and refuses calls as in an outage, until
    the old store is back or an operator runs ``runguard store adopt``, which writes into the new store whose place it
    takes.
    """

    def __init__(self, name: str, why: str, seen: str) -> None:
        self.facts = name, why, seen
        # without an address: alerts and logs must not show one that holds a password
        self.command = f"runguard store adopt {seen}"
        super().__init__(
            f"{name}: {why}. What was spent before is not known there. Bring the old store back, or go on with "
            f"this one: {self.command}"
        )

    def again(self) -> "StoreReplacedError":
        """Return the same error, to be raised once more."""
        return StoreReplacedError(*self.facts)


class Seen:
    """The store that this process has worked with. One for each ``Store``; it outlives connections.

    A forked child inherits it. A process that starts accepts what it finds.

    A SQLite file can also go back in time, when an older copy is put in its place or its ``-wal`` file is deleted. So
    the version of its document counts changes. Redis and Postgres have no such check: there, a failover to a replica
    that lags behind goes back a little and is a documented loss.

    There is no lock, which a fork could leave locked. Callers take ``text`` and ``generation`` before they ask the
    store and pass them to ``meet``: what another thread learns meanwhile is not held against an older answer.
    """

    __slots__ = ("files", "generation", "name", "text")

    def __init__(self, name: str) -> None:
        self.name = name
        self.text = ""  # the identity document; "" before the first connection
        self.generation = 0  # SQLite: changes that are known to be in the file
        self.files = (0, 0)  # SQLite: the inodes of the file and of its -wal file

    def meet(self, expected: str, found: str, generation: int = 0, floor: int = 0) -> None:
        """Accept the identity that a store has, "" for none, or raise StoreReplacedError or StoreError.

        ``expected`` and ``floor`` are the identity and the generation that this process had seen before it asked.
        """
        own, *replaced = _ids(self.name, found)
        before = expected.partition(" ")[0]
        if before and own != before and before not in replaced:
            why = (
                f"another store answers here: its id is {own}, and this process has worked with {before}"
                if own
                else "the store was emptied or removed"
            )
            raise StoreReplacedError(self.name, why, before)
        if own == before and generation < floor:
            lost = (
                f"an older copy was put in its place, or its -wal file was deleted; {floor - generation} changes "
                "are missing"
            )
            raise StoreReplacedError(self.name, f"the file went back in time: {lost}", before)
        if not own:
            raise StoreError(f"{self.name}: the store lost its id while it was being opened; try again")
        if found != expected:
            self.text, self.generation = found, generation


def new_id() -> str:
    return secrets.token_hex(8)


def is_id(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{16}", text) is not None


def identity_of(session: StoreSession, name: str) -> list[str]:
    """Return the id of a store, then those that it replaces."""
    return _ids(name, session.get(IDENTITY)[1])


def adopt(session: StoreSession, name: str, replaced: str) -> list[str]:
    """Let a store take the place of another one, for processes that have seen that one. Return its new ids.

    To replace itself, after it went back in time, it gets a new id.
    """
    for _ in range(_TRIES):
        version, text = session.get(IDENTITY)
        own, *others = _ids(name, text)
        if replaced in others:
            return [own, *others]
        ids = [new_id() if replaced == own else own, replaced, *others][: _REPLACED_KEPT + 1]
        if session.put(IDENTITY, version, " ".join(ids)):
            return ids
    raise StoreOutage(f"{name}: too many processes change the store at the same time")


def _ids(name: str, text: str) -> list[str]:
    if text and not _IDENTITY_TEXT.fullmatch(text):
        raise StoreError(f"{name}: the id of the store is damaged: {text[:60]!r}. Restore the store from a backup")
    return text.split(" ")


# ---- The control document: stops of the kill switch and breakers of tools, shared by every worker of a store.
# It is read when its version changes. A ledger in memory keeps the same document for its own process.

_CONTROL: Final = "control"


def read_control(session: StoreSession, store: str) -> tuple[int, str]:
    """Return the version and the text of the document. ``store`` is the store's name, for the message.

    A document that cannot be read is a fault of the store: it may hold a stop.
    """
    version, text = session.get(_CONTROL)
    if (version, text) == (0, ""):
        return 0, ""
    try:
        if type(version) is not int or type(text) is not str:
            raise ValueError(f"version {version!r} with {type(text).__name__} for a text")
        read_stops(text)
        for state in (json.loads(text).get("breakers") or {}).values():
            Breaker().load(state)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise StoreError(
            f"{store}: the control document is damaged ({why}). It holds the stops of the kill switch and the "
            "breakers. "
            "Restore the store from a backup, or remove the document: runguard store repair"
        ) from error
    return version, text


def repair_control(session: StoreSession, store: str) -> str:
    """Remove the control document if it is damaged. Return what was wrong, or "" when it is not."""
    try:
        with store_faults(store):
            read_control(session, store)
    except StoreError as error:
        session.drop(_CONTROL)
        return str(error)
    return ""


def change_control(session: StoreSession, store: str, change: Callable[[str], str]) -> str:
    """Change the document by compare-and-set, because others may do so at the same time; return the new text."""
    for _ in range(_TRIES):
        version, text = read_control(session, store)
        changed = change(text)
        if changed == text or session.put(_CONTROL, version, changed):
            return changed
    raise StoreOutage(f"{store}: too many workers change the control document at the same time")


def change_document(session: StoreSession, store: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the parsed control document in place, with ``change_control``."""

    def changed(text: str) -> str:
        document = json.loads(text or "{}")
        change(document)
        return json.dumps(document, sort_keys=True)

    change_control(session, store, changed)


# ---- The kill switch: the stops in the control document.

ALL: Final = "all"
_KINDS: Final = ("all", "app:…", "user:app/user", "session:app/user/session", "run:…")
_PARTS: Final = {"app": 1, "run": 1, "user": 2, "session": 3}


@dataclass(frozen=True, slots=True)
class Stop:
    """One stop in force."""

    scope: str
    actor: str
    reason: str
    at: float

    @property
    def because(self) -> str:
        """The reason as the end of a sentence; nothing where none was given."""
        return f": {self.reason}" if self.reason else ""


class Switch:
    """The stops in force, and how to change them."""

    def __init__(self) -> None:
        self.stops: dict[str, Stop] = {}
        self.on_change = Listeners[Callable[[], None]]()

    def of(self, scopes: Iterable[str]) -> Stop | None:
        """Return the stop that covers one of these scopes, if there is one."""
        if not self.stops:
            return None
        return self.stops.get(ALL) or next((self.stops[scope] for scope in scopes if scope in self.stops), None)

    def load(self, text: str) -> None:
        """Take over the stops of a control document that the ledger has checked."""
        self.stops = read_stops(text)
        for listener in self.on_change:
            listener()


def read_stops(text: str) -> dict[str, Stop]:
    """Return the stops of a control document.

    A document of the wrong shape raises ``ValueError``, ``TypeError`` or ``AttributeError``.
    """
    stops = {scope: Stop(scope, **fields) for scope, fields in (json.loads(text or "{}").get("stops") or {}).items()}
    for stop in stops.values():
        if not (isinstance(stop.actor, str) and isinstance(stop.reason, str) and isinstance(stop.at, int | float)):
            raise ValueError(f"the stop of {stop.scope} needs an actor, a reason and a time")
    return stops


def with_stops(text: str, stops: dict[str, Stop]) -> str:
    """Return a control document with other stops and everything else as it was."""
    document = json.loads(text or "{}")
    document["stops"] = {
        scope: {k: v for k, v in asdict(stop).items() if k != "scope"} for scope, stop in stops.items()
    }
    return json.dumps(document, sort_keys=True)


def check_scope(scope: Any) -> str:
    """Return a scope that can be stopped. Raise PolicyError for any other: an incomplete one would stop nothing."""
    kind, _, names = scope.partition(":") if isinstance(scope, str) else ("", "", "")
    if scope == ALL or (kind in _PARTS and len(names.split("/")) == _PARTS[kind] and all(names.split("/"))):
        return str(scope)
    raise PolicyError(f"{scope!r} cannot be stopped; give one of {', '.join(_KINDS)}")


def check_actor(actor: Any) -> str:
    if not isinstance(actor, str) or not actor.strip():
        raise PolicyError("actor: say who stops, such as actor='ops'")
    return actor


def check_reason(reason: Any) -> str:
    """Return a reason, which may be left out. Raise PolicyError when it is not a text."""
    if reason is not None and not isinstance(reason, str):
        raise PolicyError(f"reason: give a text, not a {type(reason).__name__}")
    return reason if reason and reason.strip() else ""


# ---- The calls of a store, summed up by day: for the bill of a month, and for days whose records were purged.

_DONE: Final = "spend"  # the document that says up to which record days are summed up
_PAGE: Final = 2_000
_SUM_TRIES: Final = 5
# A store may number a record before it shows it: sum up what has been there for a while.
SETTLED_S: Final = 30.0
_NAMES: Final = ("app", "user", "agent", "model", "tool")
COUNTS: Final = ("calls", "input", "output", "nano", "unpriced", "estimated", "tool_calls")

Key = tuple[str, ...]  # app, user, agent, model and tool of calls, then their labels as JSON


@dataclass(slots=True)
class DaySums:
    """The calls of one day (UTC), by who made them. Kept as one document per day."""

    last: str = ""  # id of the last record that is summed up
    rows: dict[Key, list[int]] = field(default_factory=dict)  # in the order of COUNTS
    unreadable: int = 0

    def add(self, text: str) -> None:
        """Add the record of a call. One that corrects an earlier record takes that one back."""
        try:
            record = json.loads(text)
            labels = record.get("labels") or {}
            who = (record.get("app"), record.get("user"), json.dumps(labels, sort_keys=True) if labels else "")
            new = _counts(record, who)
            was = _counts(record["was"], who) if record.get("was") else None
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError, PolicyError):
            self.unreadable += 1
            return
        self._book(*new, 1)
        if was is not None:
            self._book(*was, -1)

    def _book(self, key: Key, counts: Iterable[int], sign: int) -> None:
        row = self.rows.setdefault(key, [0] * len(COUNTS))
        for position, count in enumerate(counts):
            row[position] += sign * count
        if not any(row):
            del self.rows[key]

    def dumped(self) -> str:
        rows = [[*key, *row] for key, row in self.rows.items()]
        return json.dumps({"last": self.last, "rows": rows, "unreadable": self.unreadable}, separators=(",", ":"))

    @classmethod
    def loaded(cls, text: str) -> "DaySums":
        if not text:
            return cls()
        found: dict[str, Any] = json.loads(text)
        width = len(_NAMES) + 1
        rows = {tuple(row[:width]): list(row[width:]) for row in found["rows"]}
        return cls(found["last"], rows, found["unreadable"])


def _counts(facts: dict[str, Any], who: tuple[Any, Any, str]) -> tuple[Key, tuple[int, ...]]:
    usd = facts["usd"]
    nano = 0 if usd is None else to_nano(usd, least=0)
    names = (who[0], who[1], facts["agent"], facts["model"], facts["tool"])
    key = (*(name if isinstance(name, str) else "" for name in names), who[2])
    unpriced, estimated = int(usd is None), int(bool(facts.get("estimated")))
    of_tool = int(facts.get("kind") == "tool")  # the price of a tool, not a model call
    return key, (1 - of_tool, int(facts["input"]), int(facts["output"]), nano, unpriced, estimated, of_tool)


def day_of(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).date().isoformat()


def sum_up(session: StoreSession) -> bool:
    """Add new records to the sums of their days. Return False when another worker is doing it at this moment.

    The document of a day has the id of the last record in its sums, and one more document says up to which record all
    days are summed up. So any worker may continue, and one that dies in the middle, or that another one overtakes,
    counts nothing twice.
    """
    until = session.now() - SETTLED_S
    while True:
        version, done = session.get(_DONE)
        page = [row for row in session.page("call", done, _PAGE) if row[1] < until]
        if not page:
            return True
        for day in sorted({day_of(at) for _, at, _, _ in page}):
            if not _add_to_day(session, day, [(name, text) for name, at, _, text in page if day_of(at) == day]):
                return False
        if not session.put(_DONE, version, page[-1][0]):
            return False


def purge(session: StoreSession, older_than: float) -> bool:
    """Drop what is older than so many seconds. Return False when another worker sums up at this moment.

    What calls cost stays, as sums of their days; without the sums nothing is dropped.
    """
    if not sum_up(session):
        return False
    session.purge(max(older_than, 2 * SETTLED_S))
    return True


def _add_to_day(session: StoreSession, day: str, records: list[tuple[str, str]]) -> bool:
    version, text = session.get(f"{_DONE} {day}")
    sums = DaySums.loaded(text)
    new = [(name, record) for name, record in records if _order(name) > _order(sums.last)]
    for _, record in new:
        sums.add(record)
    sums.last = new[-1][0] if new else sums.last
    return not new or session.put(f"{_DONE} {day}", version, sums.dumped())


def read_sums(session: StoreSession, first: date, last: date) -> dict[str, DaySums]:
    """Return the sums of days, with the records that are not summed up yet. Nothing is written."""
    for _ in range(_SUM_TRIES):
        _, done = session.get(_DONE)
        found = _read_days(session, first, last, done)
        if session.get(_DONE)[1] == done:
            return found
    raise StoreOutage("the sums of the store change while they are read; try again")


def _read_days(session: StoreSession, first: date, last: date, done: str) -> dict[str, DaySums]:
    days: dict[str, DaySums] = {}
    for number in range(first.toordinal(), last.toordinal() + 1):
        day = date.fromordinal(number).isoformat()
        if text := session.get(f"{_DONE} {day}")[1]:
            days[day] = DaySums.loaded(text)
    after = done
    while page := session.page("call", after, _PAGE):
        after = page[-1][0]
        for name, at, _, text in page:
            day = day_of(at)
            if first.isoformat() <= day <= last.isoformat():
                sums = days.setdefault(day, DaySums())
                if _order(name) > _order(sums.last):
                    sums.add(text)
    return days


def _order(name: str) -> tuple[int, ...]:
    """Return the id of a record as numbers, which grow from record to record."""
    return tuple(map(int, name.split("-"))) if name else ()
