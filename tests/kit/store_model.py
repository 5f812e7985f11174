"""A store of accounts as its rules describe it, kept in the simplest way: a list of holds, and sums made anew."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from runguard.core.money import NOTHING, UNLIMITED, Amount
from runguard.ledger.ledger import Balance, Line

Book = tuple[Amount, Amount, Amount, Amount, Amount, Amount, bool]


def book_of(balance: Balance) -> Book:
    """What the model knows of an account, as a store tells it."""
    b = balance
    return b.caps, b.spent, b.held, b.expired, b.granted, b.overrun, b.closed


@dataclass
class ModelHold:
    keys: tuple[str, ...]
    state: str  # open, settled, released, expired
    amount: Amount
    expires: float = 0.0


@dataclass
class ModelAccount:
    caps: Amount
    granted: Amount = NOTHING
    overrun: Amount = NOTHING
    closed: bool = False


@dataclass
class StoreModel:
    holds: dict[str, ModelHold] = field(default_factory=dict)
    accounts: dict[str, ModelAccount] = field(default_factory=dict)
    expiries: int = 0

    def sum_of(self, key: str, *states: str) -> Amount:
        found = [hold.amount for hold in self.holds.values() if hold.state in states and key in hold.keys]
        return sum(a[0] for a in found), sum(a[1] for a in found), sum(a[2] for a in found)

    def due(self, key: str, unit: int) -> int:
        """How far an account is above its cap; below zero there is room."""
        account = self.accounts[key]
        cap = account.caps[unit]
        return self.sum_of(key, "open", "settled", "expired")[unit] - (
            cap if cap == UNLIMITED else cap + account.granted[unit]
        )

    def refusing(self, key: str, want: Amount) -> int | None:
        """The first unit in which an account refuses; of a closed one, what closed it."""
        account = self.accounts[key]
        if account.closed:
            return next(unit for unit in range(3) if account.overrun[unit])
        return next((unit for unit in range(3) if self.due(key, unit) + want[unit] > 0), None)

    def touch(self, lines: Sequence[Line]) -> None:
        for line in lines:
            self.accounts.setdefault(line.key, ModelAccount(line.caps)).caps = line.caps

    def expire(self, now: float) -> None:
        for hold in self.holds.values():
            if hold.state == "open" and hold.expires <= now:
                hold.state = "expired"
                self.expiries += 1

    def reserve(
        self, name: str, ttl: float, lines: Sequence[Line], want: Amount, now: float, *, force: bool = False
    ) -> str:
        """Return ok, refused or stale."""
        known = self.holds.get(name)
        if known is not None:
            return "ok" if known.state == "open" else "refused"
        for line in lines:
            if (line.ends is not None and now >= line.ends) or (line.begins is not None and now < line.begins):
                return "stale"
        self.expire(now)
        self.touch(lines)
        keys = tuple(line.key for line in lines)
        if not force and any(self.refusing(key, want) is not None for key in keys):
            return "refused"
        self.holds[name] = ModelHold(keys, "open", want, now + ttl)
        return "ok"

    def settle(self, name: str, lines: Sequence[Line], actual: Amount, now: float) -> None:
        hold = self.holds.get(name)
        if hold is None or (hold.state == "released" and not hold.keys):
            self.touch(lines)
            hold = self.holds[name] = ModelHold(tuple(line.key for line in lines), "released", NOTHING)
        before = NOTHING if hold.state == "released" else hold.amount
        hold.state, hold.amount = "settled", actual
        for key in hold.keys:
            account = self.accounts[key]
            overrun = list(account.overrun)
            for unit in range(3):
                more, due = actual[unit] - before[unit], self.due(key, unit)
                if more > 0 and due > 0:
                    account.closed = True
                    overrun[unit] = max(overrun[unit], min(due, overrun[unit] + more))
            account.overrun = (overrun[0], overrun[1], overrun[2])

    def release(self, name: str, now: float) -> None:
        hold = self.holds.get(name)
        if hold is None:
            self.holds[name] = ModelHold((), "released", NOTHING)
        elif hold.state == "open" and hold.expires > now:
            hold.state, hold.amount = "released", NOTHING

    def extend(self, line: Line, more: Amount) -> None:
        self.touch([line])
        account = self.accounts[line.key]
        granted = account.granted
        account.granted = (granted[0] + more[0], granted[1] + more[1], granted[2] + more[2])
        account.closed = account.closed and any(self.due(line.key, unit) > 0 for unit in range(3))

    def books(self) -> dict[str, Book]:
        return {
            key: (
                account.caps,
                self.sum_of(key, "settled", "expired"),
                self.sum_of(key, "open"),
                self.sum_of(key, "expired"),
                account.granted,
                account.overrun,
                account.closed,
            )
            for key, account in self.accounts.items()
        }
