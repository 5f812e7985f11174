"""Budgets that are spent too fast: over a fast and over a slow window, both at least one and a half times as fast as
what is left of the period allows. A short burst, and spending that has calmed down, are not reported.

Looked at after each call on a budget with ``burn_alert=True``, and on no other. What an account has spent is noted once
per slot of time, so the memory per account is constant.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from runguard.accounting.charges import AccountLines, Burn, Fired, status_of
from runguard.accounting.forecast import LEAST_CALLS
from runguard.core.identity import Newest
from runguard.core.money import UNITS, UNLIMITED, Amount, Threshold, begin_of
from runguard.ledger.ledger import Account, Ledger

FAST: Final = 24  # the fast window is a 24th of the period: an hour of a day
FACTOR: Final = 1.5  # calls come in bursts: a budget that just lasts must not be reported
SLOW: Final = 4  # the slow one a quarter: six hours of a day
_SLOTS: Final = 8  # of a fast window
_SLOTS_KEPT: Final = FAST // SLOW * _SLOTS + 2  # a slow window, the slot in which it begins, and the one before
_ACCOUNTS_KEPT: Final = 1_024
_ALL: Final = Threshold(1.0)

Slots = Sequence[tuple[int, Amount]]  # the number of a slot of time, and what was spent at its end


def burn_of(slots: Slots, spent: Amount, cap: int, unit: int, begins: float, now: float, ends: float) -> Burn | None:
    """How many times as fast as allowed a budget is spent; None where it is not spent too fast."""
    room, left = cap - spent[unit], ends - now
    if room <= 0 or left <= 0:
        return None
    length = (ends - begins) / FAST / _SLOTS
    rates = []
    for part in (FAST, SLOW):
        first = int((now - (ends - begins) / part) // length)  # the slot in which the window begins
        before = next((known[unit] for slot, known in reversed(slots) if slot < first), None)
        if first * length <= begins:
            amount, seconds = spent[unit], (ends - begins) / part
        else:  # without an earlier slot: what was spent before this process looked first does not count
            amount, seconds = spent[unit] - (slots[0][1][unit] if before is None else before), now - first * length
        if amount * left < FACTOR * room * seconds:
            return None
        rates.append(amount / seconds)
    return Burn(rates[0] * left / room, rates[1] * left / room, now + room / rates[0])


class BurnWatch:
    """What accounts have spent over time, as far as this process saw it. Safe to use from many threads."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float], before: "BurnWatch | None" = None) -> None:
        """``before``: goes on with the slots of another watch."""
        self._ledger, self._clock = ledger, clock
        self._lock: threading.Lock = threading.Lock() if before is None else before._lock
        # the slots of an account, by its key; and for which extension it was reported
        self._slots: Newest[str, deque[tuple[int, Amount]]] = (
            Newest(_ACCOUNTS_KEPT) if before is None else before._slots
        )
        self._reported: Newest[str, Amount] = Newest(_ACCOUNTS_KEPT) if before is None else before._reported

    def look(self, lines: AccountLines) -> Iterator[Fired]:
        """The budgets that burn too fast now, each once per period over all workers."""
        now = self._ledger.period_time(self._clock())
        for account, group, limits in zip(lines.accounts, lines.groups, lines.limits, strict=True):
            if not group.burns or account.window is None or account.ends is None:
                continue
            begins = begin_of(account.window, account.ends)
            slots, spent = self._note(account, begins, now), account.spent
            if spent[2] < LEAST_CALLS or self._reported.get(account.key) == account.granted:
                continue
            watched = (limit for budget, limit in zip(group.budgets, limits, strict=False) if budget.burn_alert)
            for unit, cap, limit in _limited(watched, account.granted):
                burn = burn_of(slots, spent, cap, unit, begins, now, account.ends)
                if burn is None:
                    continue
                is_first = self._ledger.first(account, f"burn:{UNITS[unit]}", 1.0, limit)
                if is_first is not None:  # None: the store was away; look again with the next settlement
                    self._report(account)
                if is_first:
                    yield Fired(account, group, _ALL, status_of(account, unit, cap, spent[unit]), burn)
                break

    def _note(self, account: Account, begins: float, now: float) -> list[tuple[int, Amount]]:
        """Note what an account has spent by now; return all its slots."""
        length = ((account.ends or now) - begins) / FAST / _SLOTS
        slot = int(now // length)
        with self._lock:
            slots = self._slots.get(account.key)
            if slots is None:
                # what others may have spent before: not known when
                slots = self._slots[account.key] = deque([(slot - 1, account.spent)], maxlen=_SLOTS_KEPT)
            if slots[-1][0] >= slot:
                slots[-1] = (slots[-1][0], account.spent)
            else:
                slots.append((slot, account.spent))
            return list(slots)

    def _report(self, account: Account) -> None:
        with self._lock:
            self._reported[account.key] = account.granted


def _limited(limits: Iterable[Amount], granted: Amount) -> Iterator[tuple[int, int, Amount]]:
    """Each unit that is limited, its cap with extensions, and the amounts of its budget."""
    for limit in limits:
        for unit, amount in enumerate(limit):
            if amount < UNLIMITED:
                yield unit, amount + granted[unit], limit
