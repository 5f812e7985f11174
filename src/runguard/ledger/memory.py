"""The way from a store's URL to its ledger, and the ledger of one process, with idle accounts packed into a few bytes.

``engine/money`` opens a ledger. ``policy/settings``, ``cli`` and ``view/store`` check a URL or open its store.
"""

import logging
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import islice
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar
from weakref import WeakMethod, ref

from runguard.background import off_loop
from runguard.core.errors import PolicyError
from runguard.core.money import NOTHING, UNLIMITED, Amount, share_of, unit_reached
from runguard.ledger.ledger import (
    CLOCK_BACK_S,
    STALE,
    Account,
    Hold,
    Ledger,
    Record,
    Refusal,
    Sleeper,
    Stale,
    Store,
    StoreSession,
    Waiting,
    refusal_of,
    wake,
    warn_clock_back,
)

_log: Final = logging.getLogger("runguard")

# ---- From a store's URL to its ledger.

_KNOWN_STORES: Final = "memory, memory://name, sqlite:///path, redis://host:6379/0, postgresql://user@host/database"
_REDIS: Final = ("redis", "rediss", "unix", "valkey", "valkeys")
_POSTGRES: Final = ("postgresql", "postgres")
_SERVERS: Final = (*_REDIS, *_POSTGRES)
_NAMED: Final = "memory://"
_NAMES: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def in_memory(url: str) -> bool:
    """Return whether a store ends with its process."""
    return url == "memory" or url.startswith(_NAMED)


def check_store(url: str) -> None:
    """Check a store URL without connecting. Raise PolicyError when it is not valid."""
    if not in_memory(url):
        store_of(url)
    elif url != "memory" and _NAMES.fullmatch(url.removeprefix(_NAMED)) is None:
        raise PolicyError(f"store = '{url}': give a name of letters, digits, '_', '.' and '-', such as memory://shop")


def store_name(url: str) -> str:
    """Return a URL for people, without a password."""
    return url if in_memory(url) else store_of(url).name


def open_ledger(url: str, timeout: float, retention_s: float = 30 * 86_400.0) -> Ledger:
    if url == "memory":
        return MemoryLedger()
    if in_memory(url):
        with _named_lock:
            return _named.setdefault(url, MemoryLedger(url))
    return off_loop(lambda: _open_shared(url, timeout, retention_s))


def _open_shared(url: str, timeout: float, retention_s: float) -> Ledger:
    from runguard.ledger.remote import ledger_of

    return ledger_of(store_of(url), url, timeout, retention_s)


def store_of(url: str) -> Store:
    return off_loop(lambda: _store_of(url))  # a relative path asks for the working directory


def _store_of(url: str) -> Store:
    scheme, _, rest = url.partition(":")
    if scheme == "sqlite":
        from runguard.ledger.sqlite import SqliteStore

        return SqliteStore(url)
    if scheme in _SERVERS and not rest.startswith("//"):
        raise PolicyError(f"store = '{scheme}:…': write {scheme}:// with two slashes; known: {_KNOWN_STORES}")
    if scheme in _REDIS:
        from runguard.ledger.redis import RedisStore

        _need("redis", "redis", scheme)
        return RedisStore(url)
    if scheme in _POSTGRES:
        from runguard.ledger.postgres import PostgresStore

        _need("psycopg", "postgres", scheme)
        return PostgresStore(url)
    shown = f"{scheme}:…" if ":" in url else url  # the rest may hold a password
    meant = ""
    if url.rpartition(".")[2] in ("db", "sqlite", "sqlite3") and (":" not in url or len(scheme) == 1):
        meant = f"; a file is written 'sqlite:///{'path/to/file.db' if len(scheme) == 1 else url}'"
    raise PolicyError(f"store = '{shown}': no such store{meant}; known: {_KNOWN_STORES}")


def _need(package: str, extra: str, scheme: str) -> None:
    """Import a client now, because its import must not use up the deadline of the first paid call."""
    try:
        import_module(package)
    except ImportError:
        raise PolicyError(
            f"store = '{scheme}://…' needs {package}, which is not installed: pip install 'runguard-agents[{extra}]'"
        ) from None


# ---- The ledger of one process: dictionaries and a lock.

_ACCOUNTS_KEPT: Final = 100_000
_PAGES: Final = 16  # of packed accounts; the oldest page is forgotten at once
_UNPACKED_KEPT: Final = 2_048  # accounts; beyond that the older half is packed
_END_OF_TIME: Final = 253_402_300_800.0  # the year 10000, beyond which no calendar goes


class MemoryLedger(Waiting):
    """Exact under any number of tasks and threads; gone with the process. Accounts that are not in use are packed."""

    def __init__(self, name: str = "memory") -> None:
        """Make a ledger. ``name``: the URL of a named store, which all guards of this process that name it share."""
        super().__init__()
        self.name, self.is_shared, self.is_away, self.worker = name, False, False, ""
        self.is_common = name != "memory"
        # what the guards that share this ledger have in common, by its type: runs that wait, effects that were done
        self.commons: dict[type, Any] = {}
        self._control = ""
        self._watchers: list[WeakMethod[Callable[[str], None]]] = []
        self._accounts: OrderedDict[str, Account] = OrderedDict()  # by key, the latest used last
        self._by_scope: dict[str, list[Account]] = {}
        # all accounts of a scope are either packed or unpacked
        self._packed = PackedAccounts(max(_ACCOUNTS_KEPT // _PAGES, 1))
        self._pack_at = _UNPACKED_KEPT
        self._told_full = self._told_back = False
        self._latest = -math.inf
        self._open: dict[float, dict[Hold, None]] = {}  # holds by their time to live
        self._next_expiry = math.inf  # no open hold expires before this time

    def now(self, at: float) -> float:
        return at

    def period_time(self, at: float) -> float:
        """Return the latest time that any caller gave.

        The account of a past period is forgotten: a clock that is set back must not open it anew, nor must a thread
        that was held up since it looked its accounts up. Nothing is held on an account that is over by this time.
        """
        if at < self._latest:
            if self._latest - at > CLOCK_BACK_S and not self._told_back:
                self._told_back = True
                warn_clock_back(self._latest - at)
        elif at < _END_OF_TIME:
            with self._lock:
                self._latest = max(self._latest, at)
        return self._latest

    def account(
        self, key: str, scope: str, window: str | None, ends: float | None, caps: Amount, begins: float | None = None
    ) -> Account:
        with self._lock:
            if scope in self._packed:
                self._unpack_locked(scope)
            account = self._accounts.get(key)
            if account is None:
                account = self._accounts[key] = Account(key, scope, window, ends)
                self._drop_past_locked(account)
                self._by_scope.setdefault(scope, []).append(account)
                if len(self._accounts) > self._pack_at:
                    self._pack_locked()
                if len(self._accounts) + len(self._packed) > _ACCOUNTS_KEPT:
                    self._make_room_locked(account)
            else:
                self._accounts.move_to_end(key)
            more = account.granted
            account.cap_usd, account.cap_tokens, account.cap_calls = (
                _sum(cap, extra) for cap, extra in zip(caps, more, strict=True)
            )
            return account

    async def reserve(
        self, accounts: Sequence[Account], want: Amount, *, force: bool = False, ttl: float = 900.0
    ) -> Hold | Refusal | Stale:
        while (hold := self._hold(accounts, want, ttl, force)) is None:
            with self._lock:
                if any(account.ends is not None and account.ends <= self._latest for account in accounts):
                    return STALE
                if any(account.refusing_units(want) for account in accounts):  # otherwise room has appeared meanwhile
                    return refusal_of(accounts, want, self._changes)
        return hold

    def _hold(self, accounts: Sequence[Account], want: Amount, ttl: float = 900.0, force: bool = False) -> Hold | None:
        """Hold ``want`` on all accounts, or return None where it does not fit or a period is over."""
        usd, tokens, calls = want
        hold, now = Hold(accounts, want), time.monotonic()
        hold.expires = expires = now + ttl
        with self._lock:
            if now >= self._next_expiry:
                self._charge_expired_locked(now)
            for a in accounts:
                if a.ends is not None and a.ends <= self._latest:
                    return None
            if not force:
                for a in accounts:
                    if (
                        a.closed
                        or a.due_usd + usd > a.cap_usd
                        or a.due_tokens + tokens > a.cap_tokens
                        or a.due_calls + calls > a.cap_calls
                    ):
                        return None
            peers = self._open.get(ttl)
            if peers is None:
                peers = self._open[ttl] = {}
            peers[hold] = None
            hold.peers = peers
            if expires < self._next_expiry:
                self._next_expiry = expires
            for a in accounts:
                a.due_usd += usd
                a.due_tokens += tokens
                a.due_calls += calls
        return hold

    hold_now = _hold  # nothing has to be waited for

    def _charge_expired_locked(self, now: float) -> None:
        """Charge the holds that outlived their time, as every store does: the provider may have billed.

        A late settlement corrects the charge.
        """
        self._next_expiry, expired = math.inf, []
        for peers in self._open.values():  # one for each time to live: in each the oldest comes first
            for hold in peers:
                if hold.expires > now:
                    self._next_expiry = min(self._next_expiry, hold.expires)
                    break
                expired.append(hold)
        for hold in expired:
            if hold.peers is not None:
                del hold.peers[hold]
            hold.booked, hold.is_open, hold.peers, hold.is_expired = hold.amount, False, None, True
            usd, tokens, calls = hold.amount
            for a in hold.accounts:
                a.spent_usd += usd
                a.spent_tokens += tokens
                a.spent_calls += calls
            self._changes += 1

    def book(self, accounts: Sequence[Account]) -> Hold:
        return Hold(accounts, NOTHING)

    def settle(
        self,
        hold: Hold,
        actual: Amount,
        then: Callable[[], None] | None = None,
        record: Record | None = None,
        *,
        may_wait: bool = False,
    ) -> None:
        usd, tokens, calls = actual
        with self._lock:
            if hold.peers is not None:
                hold.peers.pop(hold, None)
                hold.peers = None
            was_usd, was_tokens, was_calls = hold.booked
            due_usd, due_tokens, due_calls = hold.amount if hold.is_open else hold.booked
            for a in hold.accounts:
                a.spent_usd += usd - was_usd
                a.spent_tokens += tokens - was_tokens
                a.spent_calls += calls - was_calls
                a.due_usd += usd - due_usd
                a.due_tokens += tokens - due_tokens
                a.due_calls += calls - due_calls
                if a.due_usd > a.cap_usd or a.due_tokens > a.cap_tokens or a.due_calls > a.cap_calls:
                    _overrun(a, (usd - due_usd, tokens - due_tokens, calls - due_calls))
            hold.booked, hold.is_open, hold.is_expired = actual, False, False
            self._changes += 1
            waiting = self._waiting
            if waiting:
                self._waiting = []
        if waiting:
            wake(waiting)
        if then is not None:
            then()

    def release(self, hold: Hold) -> None:
        if hold.is_expired:  # the call was never sent, so its charge is taken back
            hold.is_expired = False
            self.settle(hold, NOTHING)
            return
        with self._lock:
            if not hold.is_open:
                return
            hold.is_open = False
            if hold.peers is not None:
                hold.peers.pop(hold, None)
                hold.peers = None
            usd, tokens, calls = hold.amount
            for a in hold.accounts:
                a.due_usd -= usd
                a.due_tokens -= tokens
                a.due_calls -= calls
            self._changes += 1
            waiting, self._waiting = self._waiting, []
        if waiting:
            wake(waiting)

    def extend(self, account: Account, more: Amount) -> None:
        with self._lock:
            account.granted = (account.granted[0] + more[0], account.granted[1] + more[1], account.granted[2] + more[2])
            account.cap_usd = _sum(account.cap_usd, more[0])
            account.cap_tokens = _sum(account.cap_tokens, more[1])
            account.cap_calls = _sum(account.cap_calls, more[2])
            due, caps = (account.due_usd, account.due_tokens, account.due_calls), account.caps
            # an extension may open an account again; it never closes one
            account.closed = account.closed and any(d > c for d, c in zip(due, caps, strict=True))
            spent, granted = account.spent, account.granted
            account.fired = {
                m: (p, limit)
                for m, (p, limit) in account.fired.items()
                if unit_reached(spent, share_of(limit, granted, p)) is not None
            }
            account.alert = NOTHING  # found anew at the next settle
            self._changes += 1
            waiting, self._waiting = self._waiting, []
        wake(waiting)

    def first(self, account: Account, mark: str, percent: float, limit: Amount) -> bool:
        with self._lock:
            if mark in account.fired:
                return False
            account.fired[mark] = (percent, limit)
            return True

    async def changed(self, since: Refusal, seconds: float, sleeper: Sleeper | None = None) -> bool:
        return await self._wait(since, seconds, sleeper)

    def find(self, scope: str) -> list[Account]:
        with self._lock:
            self._charge_expired_locked(time.monotonic())
            if scope in self._packed:
                self._unpack_locked(scope)
            return sorted(self._by_scope.get(scope, ()), key=lambda a: a.ends or 0.0)

    def accounts(self) -> list[Account]:
        with self._lock:
            self._charge_expired_locked(time.monotonic())
            in_use, packed = list(self._accounts.values()), self._packed.copies()
        return [*packed, *in_use]

    def known(self) -> list[Account]:
        return self.accounts()

    def forget(self, scope: str) -> None:
        with self._lock:
            self._packed.take(scope)
            for account in self._by_scope.pop(scope, ()):
                self._accounts.pop(account.key, None)

    def flush(self, seconds: float) -> bool:
        return True

    def health(self) -> dict[str, Any]:
        return {}

    async def ask(self, job: Callable[[StoreSession], None], *, again: bool = False) -> None:
        """Do nothing: there is no store to ask."""

    def tell(self, fact: Callable[[StoreSession], Any]) -> None:
        """Do nothing: a ledger in memory keeps no records."""

    def change_control(self, change: Callable[[str], str]) -> str:
        with self._lock:
            text = self._control = change(self._control)
            watchers = [heard for watcher in self._watchers if (heard := watcher()) is not None]
        for on_control in watchers:
            on_control(text)
        return text

    async def refresh(self) -> None:
        """Do nothing: only this process can change the document."""

    def refresh_now(self) -> None:
        """Do nothing: only this process can change the document."""

    def check(self) -> None:
        """Do nothing: memory can always be used."""

    def watch(self, on_control: Callable[[str], None], running: Callable[[], Iterable[tuple[str, str]]]) -> None:
        """Report changes by other guards that share this ledger."""
        if not self.is_common:
            return
        with self._lock:
            self._watchers = [one for one in self._watchers if one() is not None]
            self._watchers.append(WeakMethod(on_control))
            text = self._control
        if text:
            on_control(text)

    def watch_dropped(self, on_dropped: Callable[[int, int], None]) -> None:
        """Do nothing: memory drops no settlement."""

    def _drop_past_locked(self, new: Account) -> None:
        """Drop the earlier periods of a new account, except those with open holds."""
        if new.ends is None:
            return
        mine = self._by_scope.get(new.scope, [])
        for old in [
            a for a in mine if a.ends is not None and a.ends < new.ends and a.meter == new.meter and a.held == NOTHING
        ]:
            mine.remove(old)
            self._accounts.pop(old.key, None)

    def _make_room_locked(self, newest: Account) -> None:
        """Forget what was not used for longest, packed accounts first, but no account with a hold.

        Log it for the first time only: a scope that comes back begins at zero.
        """
        if self._packed:
            self._packed.drop_oldest()
        else:
            oldest = next((a for a in self._accounts.values() if a.held == NOTHING and a is not newest), None)
            if oldest is not None:
                self._remove_locked(oldest)
        if not self._told_full:
            self._told_full = True
            _log.warning(
                "runguard.ledger_full: more than %d accounts in memory, the oldest are forgotten", _ACCOUNTS_KEPT
            )

    def _remove_locked(self, account: Account) -> None:
        self._accounts.pop(account.key, None)
        mine = self._by_scope[account.scope]
        mine.remove(account)
        if not mine:
            del self._by_scope[account.scope]

    def _pack_locked(self) -> None:
        """Pack the older half of the accounts, except those in use, which count as used now."""
        for scope in {
            account.scope: None
            for account in islice(self._accounts.values(), len(self._accounts) - _UNPACKED_KEPT // 2)
        }:
            if all(map(can_be_packed, self._by_scope[scope])):
                self._pack_scope_locked(scope)
        # while thousands are in use, packing is not tried again for each new account
        self._pack_at = max(_UNPACKED_KEPT, len(self._accounts) * 5 // 4)

    def _pack_scope_locked(self, scope: str) -> None:
        """Pack a scope if this ledger alone refers to its accounts.

        A run, a hold or a caller may refer to one and would go on with an object that no longer counts. Weak
        references show it: they are dead once the ledger drops an account that nothing else refers to.
        """
        accounts = self._by_scope.pop(scope)
        for account in accounts:
            del self._accounts[account.key]
        self._packed.put(scope, accounts)
        kept = [ref(account) for account in accounts]
        del accounts, account
        in_use = {used.key: used for one in kept if (used := one()) is not None}
        if in_use:
            self._unpack_locked(scope, in_use)

    def _unpack_locked(self, scope: str, in_use: Mapping[str, Account] = MappingProxyType({})) -> None:
        """Unpack the accounts of a scope. ``in_use``: those that are still there as objects, by key."""
        accounts = [in_use.get(account.key, account) for account in self._packed.take(scope)]
        self._by_scope[scope] = accounts
        for account in accounts:
            self._accounts[account.key] = account


def _sum(cap: int, more: int) -> int:
    return UNLIMITED if cap >= UNLIMITED else cap + more


def _overrun(account: Account, more: Amount) -> None:
    """Book what a call billed beyond its hold on an account that is above its cap, and close the account.

    ``more``: how much more than held the call billed in each unit. Where that did not break the cap, nothing changes.
    """
    due = (account.due_usd, account.due_tokens, account.due_calls)
    if not any(m > 0 and d > c for d, c, m in zip(due, account.caps, more, strict=True)):
        return  # its cap was lowered, or force ignored it
    beyond = (
        max(o, min(d - c, o + m)) if m > 0 else o
        for o, d, c, m in zip(account.overrun, due, account.caps, more, strict=True)
    )
    account.overrun = tuple(beyond)  # type: ignore[assignment]
    account.closed = True


# ---- Accounts that are not in use, packed into a few bytes each.

_NUMBERS: Final = 4  # per account: its kind and what was spent in each unit


class AccountKind(NamedTuple):
    """What accounts of different scopes may have in common."""

    suffix: str  # of the key, after the scope
    window: str | None
    ends: float | None
    caps: Amount
    granted: Amount
    overrun: Amount
    closed: bool
    fired: tuple[tuple[str, tuple[float, Amount]], ...]


def can_be_packed(account: Account) -> bool:
    """Return whether nothing is held on an account and its key begins with its scope, as the keys of all budgets do."""
    return account.held == NOTHING and account.key.startswith(account.scope)


class PackedAccounts:
    """Accounts by scope. They are kept on pages in the order in which they were put in.

    An account of a finished session is kept because the session may come back. As an object it takes about 1,000 bytes,
    packed less than 200: what it has in common with other accounts, its ``AccountKind``, is stored once for all of
    them. Not safe for threads: its ledger has a lock.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size  # scopes
        self._pages: list[dict[str, bytes]] = [{}]  # the oldest first
        self._kinds: Shared[AccountKind] = Shared()
        self._count = 0

    def __len__(self) -> int:
        """Return how many accounts there are. A scope may have several."""
        return self._count

    def __contains__(self, scope: object) -> bool:
        return any(scope in page for page in self._pages)

    def put(self, scope: str, accounts: Iterable[Account]) -> None:
        """Pack all accounts of a scope that is not here. Each of them must be one that ``can_be_packed``."""
        numbers: list[int] = []
        for account in accounts:
            numbers += (self._kinds.take(_kind_of(account)), *account.spent)
            self._count += 1
        if len(self._pages[-1]) >= self._page_size:
            self._begin_page()
        self._pages[-1][scope] = write_numbers(numbers)

    def take(self, scope: str) -> list[Account]:
        """Unpack a scope and remove it; an empty list if it is not here."""
        for page in self._pages:
            if scope in page:
                data = page.pop(scope)
                accounts = list(self._unpacked(scope, data))
                self._give_back(data)
                return accounts
        return []

    def drop_oldest(self) -> None:
        """Forget the accounts of one page: at once, as it costs little more than to find the oldest account."""
        dropped = next((page for page in self._pages if page), {})
        for data in dropped.values():
            self._give_back(data)
        dropped.clear()

    def copies(self) -> Iterator[Account]:
        """Yield a copy of each account as it is now. The copies are made while they are read, which needs no lock."""
        snapshot = type(self)(self._page_size)
        snapshot._pages, snapshot._kinds = [dict(page) for page in self._pages], self._kinds.snapshot()
        return (
            account
            for page in snapshot._pages
            for scope, data in page.items()
            for account in snapshot._unpacked(scope, data)
        )

    def _begin_page(self) -> None:
        """Begin a new page, and join neighbours that fit on one page, because pages get holes when scopes come back.

        So there are at most twice as many pages as needed.
        """
        pages: list[dict[str, bytes]] = []
        for page in self._pages:
            if pages and len(pages[-1]) + len(page) <= self._page_size:
                pages[-1].update(page)
            else:
                pages.append(page)
        self._pages = [*pages, {}]

    def _unpacked(self, scope: str, data: bytes) -> Iterator[Account]:
        numbers = read_numbers(data)
        for at in range(0, len(numbers), _NUMBERS):
            kind = self._kinds[numbers[at]]
            account = Account(scope + kind.suffix, scope, kind.window, kind.ends)
            account.cap_usd, account.cap_tokens, account.cap_calls = kind.caps
            account.spent_usd, account.spent_tokens, account.spent_calls = spent = numbers[at + 1 : at + _NUMBERS]
            account.due_usd, account.due_tokens, account.due_calls = spent
            account.granted, account.overrun, account.closed, account.fired = (
                kind.granted,
                kind.overrun,
                kind.closed,
                dict(kind.fired),
            )
            account.alert = NOTHING  # found again at the next settle
            yield account

    def _give_back(self, data: bytes) -> None:
        for number in read_numbers(data)[::_NUMBERS]:
            self._kinds.give_back(number)
            self._count -= 1


def _kind_of(account: Account) -> AccountKind:
    suffix = account.key[len(account.scope) :]
    return AccountKind(
        suffix,
        account.window,
        account.ends,
        account.caps,
        account.granted,
        account.overrun,
        account.closed,
        tuple(account.fired.items()),
    )


# ---- Compact forms of data: integers as a few bytes, and values that many entries have in common.

_T = TypeVar("_T", bound=Hashable)


def write_numbers(numbers: Iterable[int]) -> bytes:
    """Return integers of any size and sign as bytes.

    Each byte has seven bits of a number, whose lowest bit is the sign.
    """
    data = bytearray()
    for number in numbers:
        rest = number << 1 if number >= 0 else (-number << 1) - 1
        while rest > 127:
            data.append(rest & 127 | 128)
            rest >>= 7
        data.append(rest)
    return bytes(data)


def read_numbers(data: bytes) -> list[int]:
    numbers, rest, shift = [], 0, 0
    for byte in data:
        rest |= (byte & 127) << shift
        if byte > 127:
            shift += 7
            continue
        numbers.append(-(rest + 1 >> 1) if rest & 1 else rest >> 1)
        rest = shift = 0
    return numbers


class Shared(Generic[_T]):
    """Values that many entries refer to by a number. Each is stored once, for as long as an entry refers to it."""

    def __init__(self) -> None:
        self._numbers: dict[_T, int] = {}
        self._values: dict[int, _T] = {}
        self._users: dict[int, int] = {}  # how many entries refer to a number
        self._free: list[int] = []  # numbers to use again, so that they stay small

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, number: int) -> _T:
        return self._values[number]

    def take(self, value: _T) -> int:
        """Return the number of a value, for one more entry."""
        number = self._numbers.get(value)
        if number is None:
            number = self._free.pop() if self._free else len(self._values)
            self._numbers[value], self._values[number], self._users[number] = number, value, 0
        self._users[number] += 1
        return number

    def give_back(self, number: int) -> None:
        """Count one entry less that refers to a value, and forget the value after the last one."""
        self._users[number] -= 1
        if not self._users[number]:
            del self._numbers[self._values.pop(number)], self._users[number]
            self._free.append(number)

    def snapshot(self) -> Self:
        """Return a copy for reading, in which numbers keep their values whatever is given back here."""
        other = type(self)()
        other._values = dict(self._values)
        return other


_named: Final[dict[str, MemoryLedger]] = {}  # by URL, for the life of the process
_named_lock: Final = threading.Lock()
