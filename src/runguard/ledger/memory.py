"""The ledger of one process: dictionaries and a lock.

Up to 100,000 accounts are kept. Those that are not in use are packed (``packed``): an account object takes about 1,000
bytes, a packed one less than 200.
"""

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, Final
from weakref import ref

from runguard.core.money import NOTHING, UNLIMITED, Amount, share_of, unit_reached
from runguard.ledger.base import Account, Hold, Refusal, Waiting, refusal_of
from runguard.ledger.packed import PackedAccounts, can_be_packed
from runguard.ledger.store import Record, StoreSession
from runguard.ledger.waiting_line import Sleeper, wake

_log: Final = logging.getLogger("runguard")
_ACCOUNTS_KEPT: Final = 100_000
_PAGES: Final = 16  # of packed accounts; the oldest page is forgotten at once
_UNPACKED_KEPT: Final = 2_048  # accounts; beyond that the older half is packed
_CLOCK_BACK_S: Final = 60.0  # calls that are made at once come in any order, seconds apart at most
_END_OF_TIME: Final = 253_402_300_800.0  # the year 10000, beyond which no calendar goes


class MemoryLedger(Waiting):
    """Exact under any number of tasks and threads; gone with the process."""

    def __init__(self) -> None:
        super().__init__()
        self.name, self.is_shared, self.is_away, self.worker = "memory", False, False, ""
        self._control = ""
        self._accounts: OrderedDict[str, Account] = OrderedDict()  # by key, the latest used last
        self._by_scope: dict[str, list[Account]] = {}
        # all accounts of a scope are here, or all are above
        self._packed = PackedAccounts(max(_ACCOUNTS_KEPT // _PAGES, 1))
        self._pack_at = _UNPACKED_KEPT
        self._told_full = self._told_back = False
        self._latest = -math.inf
        self._open: dict[float, dict[Hold, None]] = {}  # holds by their time to live
        self._next_expiry = math.inf  # no open hold expires before this time

    def now(self, at: float) -> float:
        return at

    def period_time(self, at: float) -> float:
        """The latest time that any caller gave.

        The account of a past period is forgotten: a clock that is set back must not open it anew.
        """
        if at < self._latest:
            if self._latest - at > _CLOCK_BACK_S and not self._told_back:
                self._told_back = True
                _log.warning(
                    "runguard.clock_back: the clock was set back by %.0f s; budgets with a window go on when "
                    "it has caught up",
                    self._latest - at,
                )
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
    ) -> Hold | Refusal:
        while (hold := self._hold(accounts, want, ttl, force)) is None:
            with self._lock:
                if any(account.refusing_units(want) for account in accounts):  # otherwise room has appeared meanwhile
                    return refusal_of(accounts, want, self._changes)
        return hold

    def _hold(self, accounts: Sequence[Account], want: Amount, ttl: float = 900.0, force: bool = False) -> Hold | None:
        """Hold ``want`` on all accounts, or return None where it does not fit."""
        usd, tokens, calls = want
        hold, now = Hold(accounts, want), time.monotonic()
        hold.expires = expires = now + ttl
        with self._lock:
            if now >= self._next_expiry:
                self._charge_expired_locked(now)
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
        """A hold that outlived its time is charged, as in every store: the provider may have billed. A late settlement
        corrects the charge.
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
            hold.booked, hold.is_open, hold.peers = hold.amount, False, None
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
            hold.booked, hold.is_open = actual, False
            self._changes += 1
            waiting = self._waiting
            if waiting:
                self._waiting = []
        if waiting:
            wake(waiting)
        if then is not None:
            then()

    def release(self, hold: Hold) -> None:
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
            # it opens what it pays for, and closes nothing
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
        """There is no store to ask."""

    def tell(self, fact: Callable[[StoreSession], Any]) -> None:
        """A ledger in memory keeps no records."""

    def change_control(self, change: Callable[[str], str]) -> str:
        with self._lock:
            self._control = change(self._control)
            return self._control

    async def refresh(self) -> None:
        """Only this process can change it."""

    def refresh_now(self) -> None:
        """Only this process can change it."""

    def check(self) -> None:
        """Memory can always be used."""

    def watch(self, on_control: Callable[[str], None], running: Callable[[], Iterable[tuple[str, str]]]) -> None:
        """Only this process can change it."""

    def _drop_past_locked(self, new: Account) -> None:
        """Of a scope's earlier periods, keep only those with open holds."""
        if new.ends is None:
            return
        meter = new.key.rpartition("#")[0]
        mine = self._by_scope.get(new.scope, [])
        for old in [
            a
            for a in mine
            if a.ends is not None and a.ends < new.ends and a.key.rpartition("#")[0] == meter and a.held == NOTHING
        ]:
            mine.remove(old)
            self._accounts.pop(old.key, None)

    def _make_room_locked(self, newest: Account) -> None:
        """Forget what was not used for longest, packed accounts first, but no account with a hold.

        Log it once: a scope that comes back begins at zero.
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
        # not again for every account while thousands are in use
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
        """``in_use``: accounts that are still there as objects, by key."""
        accounts = [in_use.get(account.key, account) for account in self._packed.take(scope)]
        self._by_scope[scope] = accounts
        for account in accounts:
            self._accounts[account.key] = account


def _sum(cap: int, more: int) -> int:
    return UNLIMITED if cap >= UNLIMITED else cap + more


def _overrun(account: Account, more: Amount) -> None:
    """An account is above its cap. If a call billed ``more`` than it held in such a unit: book it, and close the
    account.
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
