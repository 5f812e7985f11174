"""The way from a store's URL to its ledger, and the ledger of one process, whose idle accounts are kept as bytes.

``engine/money`` opens a ledger. ``policy/settings``, ``cli`` and ``view/store`` check a URL or open its store.
"""

import logging
import marshal
import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import islice
from types import MappingProxyType
from typing import Any, Final
from weakref import ref

from runguard.background import off_loop
from runguard.core.errors import PolicyError
from runguard.core.money import NOTHING, UNLIMITED, Amount, share_of, unit_reached
from runguard.ledger.ledger import (
    STALE,
    Account,
    Hold,
    Ledger,
    Listeners,
    Record,
    Refusal,
    Stale,
    Store,
    overrun_of,
    refusal_of,
    wake,
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

_PACKED_KEPT: Final = 100_000  # about; the account that was not used for longest is forgotten, none in use
_PARTS: Final = 64  # of the packed accounts: one large dict would be copied as a whole from time to time
_UNPACKED_KEPT: Final = 2_048  # accounts; beyond that the older half is packed
_END_OF_TIME: Final = 253_402_300_800.0  # the year 10000, beyond which no calendar goes


class MemoryLedger(Ledger):
    """Exact under any number of tasks and threads; gone with the process. Accounts that are not in use are packed."""

    def __init__(self, name: str = "memory") -> None:
        """Make a ledger. ``name``: the URL of a named store, which all guards of this process that name it share."""
        super().__init__()
        self.name, self.is_common = name, name != "memory"
        # what the guards that share this ledger have in common, by its type: runs that wait, effects that were done
        self.commons: dict[type, Any] = {}
        self._control = ""
        self._on_control = Listeners[Callable[[str], None]]()
        self._accounts: OrderedDict[str, Account] = OrderedDict()  # by key, the latest used last
        self._by_scope: dict[str, list[Account]] = {}
        # by scope, in each part the oldest first; all accounts of a scope are packed, or none
        self._packed: list[dict[str, bytes]] = [{} for _ in range(_PARTS)]
        self._pack_at = _UNPACKED_KEPT
        self._told_full = False
        self._open: dict[float, dict[Hold, None]] = {}  # holds by their time to live
        self._next_expiry = math.inf  # no open hold expires before this time

    def period_time(self, at: float) -> float:
        """Return the latest time that any caller gave.

        The account of a past period is forgotten: a clock that is set back must not open it anew, nor must a thread
        that was held up since it looked its accounts up. Nothing is held on an account that is over by this time.
        """
        if at < self._latest:
            self._tell_clock_back(self._latest - at)
        elif at < _END_OF_TIME:
            with self._lock:
                self._latest = max(self._latest, at)
        return self._latest

    def account(
        self, key: str, scope: str, window: str | None, ends: float | None, caps: Amount, begins: float | None = None
    ) -> Account:
        with self._lock:
            if key not in self._accounts:
                self._unpack_locked(scope)
            account = self._accounts.get(key)
            if account is None:
                account = self._accounts[key] = Account(key, scope, window, ends)
                self._drop_past_locked(account)
                self._by_scope.setdefault(scope, []).append(account)
                if len(self._accounts) > self._pack_at:
                    self._pack_locked()
            else:
                self._accounts.move_to_end(key)
            account.limit(caps)
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
                    beyond = a.due_usd - a.cap_usd, a.due_tokens - a.cap_tokens, a.due_calls - a.cap_calls
                    overrun = overrun_of(a.overrun, (usd - due_usd, tokens - due_tokens, calls - due_calls), beyond)
                    if overrun is not None:
                        a.overrun, a.closed = overrun, True
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
        self._wake_all()

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
        self._wake_all()

    def first(self, account: Account, mark: str, percent: float, limit: Amount) -> bool:
        with self._lock:
            if mark in account.fired:
                return False
            account.fired[mark] = (percent, limit)
            return True

    def find(self, scope: str) -> list[Account]:
        with self._lock:
            self._charge_expired_locked(time.monotonic())
            self._unpack_locked(scope)
            return sorted(self._by_scope.get(scope, ()), key=lambda a: a.ends or 0.0)

    def accounts(self) -> list[Account]:
        with self._lock:
            self._charge_expired_locked(time.monotonic())
            in_use = list(self._accounts.values())
            packed = [entry for part in self._packed for entry in part.items()]
        return [*(account for scope, data in packed for account in _unpacked(scope, data)), *in_use]

    def forget(self, scope: str) -> None:
        with self._lock:
            self._part(scope).pop(scope, None)
            for account in self._by_scope.pop(scope, ()):
                self._accounts.pop(account.key, None)

    def change_control(self, change: Callable[[str], str]) -> str:
        with self._lock:
            text = self._control = change(self._control)
        for on_control in self._on_control:
            on_control(text)
        return text

    def watch(self, on_control: Callable[[str], None], running: Callable[[], Iterable[tuple[str, str]]]) -> None:
        """Report changes by other guards that share this ledger."""
        if not self.is_common:
            return
        with self._lock:
            self._on_control.add(on_control)
            text = self._control
        if text:
            on_control(text)

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

    def _pack_locked(self) -> None:
        """Pack the older half of the accounts, except those in use, which count as used now."""
        for scope in {
            account.scope: None
            for account in islice(self._accounts.values(), len(self._accounts) - _UNPACKED_KEPT // 2)
        }:
            if all(account.held == NOTHING for account in self._by_scope[scope]):
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
        part = self._part(scope)
        part[scope] = _packed(accounts)
        kept = [ref(account) for account in accounts]
        del accounts, account
        in_use = {used.key: used for one in kept if (used := one()) is not None}
        if in_use:
            self._unpack_locked(scope, in_use)
        elif len(part) > _PACKED_KEPT // _PARTS:
            del part[next(iter(part))]
            if not self._told_full:  # for the first time only
                self._told_full = True
                _log.warning(
                    "runguard.ledger_full: about %d accounts in memory, the oldest are forgotten: one that comes back "
                    "begins at zero",
                    _PACKED_KEPT,
                )

    def _unpack_locked(self, scope: str, in_use: Mapping[str, Account] = MappingProxyType({})) -> None:
        """Unpack the accounts of a scope, if they are packed. ``in_use``: those still there as objects, by key."""
        data = self._part(scope).pop(scope, None)
        if data is not None:
            accounts = [in_use.get(account.key, account) for account in _unpacked(scope, data)]
            self._by_scope[scope] = accounts
            for account in accounts:
                self._accounts[account.key] = account

    def _part(self, scope: str) -> dict[str, bytes]:
        return self._packed[hash(scope) % _PARTS]


def _sum(cap: int, more: int) -> int:
    return UNLIMITED if cap >= UNLIMITED else cap + more


# ---- Accounts that are not in use, as bytes.

_FIELDS: Final = (
    *("key", "window", "ends", "cap_usd", "cap_tokens", "cap_calls", "spent_usd", "spent_tokens", "spent_calls"),
    *("granted", "overrun", "closed", "fired"),
)


def _packed(accounts: Iterable[Account]) -> bytes:
    """Return accounts of one scope on which nothing is held. As objects they would take five times as much memory."""
    data = marshal.dumps([[getattr(account, name) for name in _FIELDS] for account in accounts])
    return bytes(memoryview(data))  # a copy of the right size: marshal leaves the unused end of its buffer as a hole


def _unpacked(scope: str, data: bytes) -> Iterator[Account]:
    for key, window, ends, *values in marshal.loads(data):
        account = Account(key, scope, window, ends)
        for name, value in zip(_FIELDS[3:], values, strict=True):
            setattr(account, name, value)
        account.due_usd, account.due_tokens, account.due_calls = account.spent
        account.alert = NOTHING  # found again at the next settle
        yield account


_named: Final[dict[str, MemoryLedger]] = {}  # by URL, for the life of the process
