"""A store's accounts as this process last saw them."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from runguard.core.money import UNLIMITED, Amount
from runguard.ledger.base import STALE, Account, Refusal, Stale, refusal_of
from runguard.ledger.store import Balance, Line, StoreReply

_ACCOUNTS_KEPT: Final = 10_000  # copies only: the store keeps all of them


class StoredAccount(Account):
    """An account as the store last reported it."""

    __slots__ = ("line",)

    def __init__(self, line: Line) -> None:
        super().__init__(line.key, line.scope, line.window, line.ends)
        self.line = line
        self.limit(line.caps)

    def with_line(self, line: Line) -> "StoredAccount":
        """The same figures under other limits."""
        other = StoredAccount(line)
        other.granted, other.overrun, other.closed, other.alert = self.granted, self.overrun, self.closed, self.alert
        other.spent_usd, other.spent_tokens, other.spent_calls = self.spent
        other.due_usd, other.due_tokens, other.due_calls = self.due_usd, self.due_tokens, self.due_calls
        other.limit(line.caps)
        return other

    def limit(self, caps: Amount) -> None:
        self.cap_usd, self.cap_tokens, self.cap_calls = (
            UNLIMITED if cap >= UNLIMITED else cap + more for cap, more in zip(caps, self.granted, strict=True)
        )

    def learn(self, balance: Balance) -> None:
        """Take over what the store reported."""
        self.granted, self.overrun, self.closed = balance.granted, balance.overrun, balance.closed
        self.limit(self.line.caps)
        self.spent_usd, self.spent_tokens, self.spent_calls = balance.spent
        self.due_usd, self.due_tokens, self.due_calls = (
            s + h for s, h in zip(balance.spent, balance.held, strict=True)
        )


class StoredAccounts:
    """The accounts that this process uses, by key. Safe to use from many threads."""

    def __init__(self) -> None:
        self._accounts: OrderedDict[str, StoredAccount] = OrderedDict()  # the latest used last
        self._by_scope: dict[str, set[str]] = {}
        self.restart()

    def restart(self) -> None:
        """Also in a forked child: a thread of the parent may have held the lock."""
        self._lock = threading.Lock()

    def get(self, line: Line) -> StoredAccount:
        """The account of a line, made if new, with its limits."""
        with self._lock:
            account = self._accounts.get(line.key)
            if account is None:
                account = self._accounts[line.key] = StoredAccount(line)
                self._by_scope.setdefault(line.scope, set()).add(line.key)
                if len(self._accounts) > _ACCOUNTS_KEPT:
                    old, dropped = self._accounts.popitem(last=False)
                    self._remove_from_scope(dropped.scope, old)
            elif account.line != line:  # limits of another guard, or new ones: users of the old one keep its limits
                account = self._accounts[line.key] = account.with_line(line)
                self._accounts.move_to_end(line.key)
            else:
                self._accounts.move_to_end(line.key)
            return account

    def learn(self, balance: Balance) -> Account:
        """The account of a balance, with its figures; not kept where it is not in use."""
        with self._lock:
            account = self._accounts.get(balance.key)
        if account is None:
            account = StoredAccount(Line(balance.key, balance.scope, balance.window, None, balance.ends, balance.caps))
        account.learn(balance)
        return account

    def all(self) -> list[Account]:
        with self._lock:
            return list(self._accounts.values())

    def forget(self, scope: str) -> None:
        with self._lock:
            for key in self._by_scope.pop(scope, ()):
                self._accounts.pop(key, None)

    def _remove_from_scope(self, scope: str, key: str) -> None:
        keys = self._by_scope.get(scope)
        if keys is not None:
            keys.discard(key)
            if not keys:
                del self._by_scope[scope]


def lines_of(accounts: Sequence[Account]) -> list[Line]:
    return [account.line for account in accounts if isinstance(account, StoredAccount)]


def refusal_from(reply: StoreReply, accounts: Sequence[Account], want: Amount, seen: int) -> Refusal | Stale:
    """The refusal in a store's reply, by the figures of this reply: the accounts may know newer ones by now.

    Without figures there was no refusal: the reservation was given back before it arrived, and made no account.
    """
    reported = {balance.key: balance for balance in reply.balances}
    if any(line.key not in reported for line in lines_of(accounts)):
        return STALE
    copies: list[Account] = []
    for line in lines_of(accounts):
        copy = StoredAccount(line)
        copy.learn(reported[line.key])
        copies.append(copy)
    refusal = refusal_of(copies, want, seen)
    refusal.account = next(account for account in accounts if account.key == refusal.account.key)
    return refusal
