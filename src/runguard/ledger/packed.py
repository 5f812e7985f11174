"""Accounts that are not in use, packed into a few bytes each.

An account of a finished session is kept because the session may come back. As an object it takes about 1,000 bytes.
Nearly all of it is the same for all sessions: the caps, the window, the thresholds that fired. That part is stored once
for all accounts that share it. What remains is the name of the scope, the number of the shared part, and what was
spent.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from runguard.core.money import NOTHING, Amount
from runguard.ledger.base import Account
from runguard.ledger.packing import Shared, read_numbers, write_numbers

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
    """Nothing is held on it, and its key begins with its scope, as the keys of all budgets do."""
    return account.held == NOTHING and account.key.startswith(account.scope)


class PackedAccounts:
    """Accounts by scope. They are kept on pages in the order in which they were put in.

    Not safe for threads: its ledger has a lock.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size  # scopes
        self._pages: list[dict[str, bytes]] = [{}]  # the oldest first
        self._kinds: Shared[AccountKind] = Shared()
        self._count = 0

    def __len__(self) -> int:
        """How many accounts there are. A scope may have several."""
        return self._count

    def __contains__(self, scope: object) -> bool:
        return any(scope in page for page in self._pages)

    def put(self, scope: str, accounts: Iterable[Account]) -> None:
        """Pack all accounts of a scope that is not here. Each of them ``can_be_packed``."""
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
        """A copy of each account as it is now. The copies are made when they are asked for, which needs no lock."""
        snapshot = type(self)(self._page_size)
        snapshot._pages, snapshot._kinds = [dict(page) for page in self._pages], self._kinds.snapshot()
        return (
            account
            for page in snapshot._pages
            for scope, data in page.items()
            for account in snapshot._unpacked(scope, data)
        )

    def _begin_page(self) -> None:
        """Pages get holes when scopes come back.

        Neighbours that fit on one page are joined, so there are at most twice as many as needed.
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
