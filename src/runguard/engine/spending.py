"""Who spent what, and budgets that are spent too fast.

``engine/money`` books every call on ``Spending`` and asks ``BurnWatch`` after it. ``engine/money`` and ``engine/calls``
write what ``record_of`` returns to the store.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from runguard.core.errors import PolicyError
from runguard.core.events import RunInfo
from runguard.core.identity import LruDict
from runguard.core.money import LEAST_CALLS, UNITS, UNLIMITED, Amount, Threshold, begin_of, to_usd
from runguard.engine.charges import (
    LINES_KEPT,
    AccountLines,
    Burn,
    Charge,
    Entry,
    Fired,
    RecentCall,
    RunCosts,
    Tally,
    add_tally,
    flat_limits,
    scopes_of,
    split_by,
    status_of,
    totals,
    uncover,
)
from runguard.ledger.ledger import Account, Ledger

# ---- Who spent what: per agent, model and tool of each run, and in all of its session, its user and its app

_HISTORY_KEPT: Final = 10_000  # scopes
Earlier = tuple[Entry, tuple[str, str, str]]  # what was booked for a call before, and on which agent, model and tool
_KINDS: Final = ("run", "session", "user", "app")  # of scopes that have figures


class Spending:
    """The figures of the runs under way, and of those that are over by whom they belong to. With or without a budget.

    Safe to use from many threads.
    """

    def __init__(self) -> None:
        self.costs_by_run: dict[str, RunCosts] = {}  # of the runs under way
        self.history = LruDict[str, Tally](_HISTORY_KEPT)  # of those that are over, by scope; "" is all of them
        self._lock = threading.Lock()

    def begin(self, info: RunInfo) -> RunCosts:
        run_costs = RunCosts(info, flat_limits(info))
        self.costs_by_run[info.run] = run_costs
        return run_costs

    def end(self, run_costs: RunCosts) -> None:
        """Add the figures of a run that is over to those of its session, user and app."""
        info = run_costs.info
        self.costs_by_run.pop(info.run, None)
        with self._lock:
            run_costs.ended = True
            if not run_costs.tally:
                return
            for scope in (*scopes_of(info), ""):  # "" last: what was used last is never forgotten
                tally = self.history[scope] = self.history.get(scope, {})
                add_tally(tally, run_costs.tally)

    def released(self, charge: Charge) -> None:
        """Close the charge of a call that was never sent."""
        with self._lock:
            charge.run_costs.open.discard(charge)
            charge.over = True
        if charge.around:
            uncover(charge.around, charge.home)

    def give_up(self, charge: Charge) -> None:
        """Close a charge whose cost cannot be booked."""
        with self._lock:
            if not charge.over:
                charge.over = True
                charge.run_costs.open.discard(charge)
                charge.run_costs.closed_calls += 1

    def book(self, charge: Charge, entry: Entry, model: str) -> None:
        """Count the usage of a call; a later report of the same call replaces the earlier one."""
        run_costs, before = charge.run_costs, charge.booked
        tally, key = run_costs.tally, (charge.agent, model, charge.tool)
        with self._lock:
            if before is None:
                run_costs.open.discard(charge)  # not in it: it was released, and sent after all
                run_costs.closed_calls += 1
                run_costs.recent.append((charge.lane, charge.agent, model, entry))
            else:
                old = tally[charge.entry]
                old.add(before, -1)
                if not old.calls and not old.tool_calls:
                    del tally[charge.entry]
                for position, (lane, agent, _, known) in enumerate(run_costs.recent):
                    if known is before:
                        run_costs.recent[position] = (lane, agent, model, entry)
                run_costs.nano -= before.nano
                run_costs.unpriced -= before.unpriced
                run_costs.estimated -= before.estimated
            kept = tally.get(key)
            if kept is None:
                # names beyond that share one line: a run must not grow without bound
                if len(tally) >= LINES_KEPT:
                    key = ("(others)", "(others)", "(others)")
                kept = tally.setdefault(key, Entry())
            kept.calls += entry.calls
            kept.nano += entry.nano
            run_costs.nano += entry.nano
            if entry.input or entry.output:  # most of an entry is nothing
                kept.input += entry.input
                kept.output += entry.output
                kept.cached += entry.cached
                kept.thinking += entry.thinking
            if entry.unpriced or entry.estimated:
                kept.unpriced += entry.unpriced
                kept.estimated += entry.estimated
                run_costs.unpriced += entry.unpriced
                run_costs.estimated += entry.estimated
            if entry.tool_calls or entry.searches:
                kept.tool_calls += entry.tool_calls
                kept.tool_nano += entry.tool_nano
                kept.searches += entry.searches
                kept.search_nano += entry.search_nano
            if run_costs.ended:  # reported after the end of its run, whose figures are in the history
                for scope in (*scopes_of(run_costs.info), ""):
                    kept_there = self.history[scope] = self.history.get(scope, {})
                    if before is not None and charge.entry in kept_there:
                        kept_there[charge.entry].add(before, -1)
                    add_tally(kept_there, {key: entry})
            charge.booked, charge.entry, charge.over = entry, key, True

    def recent_of(self, run_costs: RunCosts) -> list[RecentCall]:
        """Return the last calls of a run, the oldest first."""
        with self._lock:
            return list(run_costs.recent)

    def used_by(self, run_costs: RunCosts) -> tuple[int, int]:
        """Return the tokens and the model calls of one run."""
        with self._lock:
            entries = [*run_costs.inherited.values(), *run_costs.tally.values()]
            return sum([one.input + one.output for one in entries]), sum([one.calls for one in entries])

    def of_run(self, run_costs: RunCosts) -> dict[str, Any]:
        """Return one run's figures, JSON-ready but for its dollars."""
        with self._lock:
            tally: Tally = {}
            add_tally(tally, run_costs.inherited)
            add_tally(tally, run_costs.tally)
        return {
            **totals(tally.values()),
            "by_agent": split_by(tally, 0),
            "by_model": split_by(tally, 1),
            "by_tool": split_by(tally, 2),
        }

    def of_scope(self, scope: str | None) -> dict[str, Any]:
        """Return what was spent in a scope as budgets name it; None: in all. Also per agent, model and tool."""
        if scope is not None and (not isinstance(scope, str) or scope.partition(":")[0] not in _KINDS):
            raise PolicyError(
                f"spend({scope!r}): give a scope such as 'user:app/alice'; figures are kept by {', '.join(_KINDS)}"
            )
        total: Tally = {}
        reserved = 0
        with self._lock:
            add_tally(total, self.history.get(scope or "", {}))
            for run_costs in list(self.costs_by_run.values()):
                if scope is None or scope in scopes_of(run_costs.info):
                    add_tally(total, run_costs.tally)
                    reserved += run_costs.reserved
        return {
            **totals(total.values()),
            "reserved_usd": to_usd(reserved),
            "by_agent": split_by(total, 0),
            "by_model": split_by(total, 1),
            "by_tool": split_by(total, 2),
        }


def record_of(charge: Charge, before: Earlier | None = None) -> dict[str, Any]:
    """Return what one call took, for the store: numbers and names, no text of users, models or tools.

    A later record with the same id replaces it. ``before``: what an earlier record of the same call contained; it is
    repeated as "was", so that records can be summed up without looking for the earlier one.
    """
    info = charge.run_costs.info
    record: dict[str, Any] = {
        "id": charge.hold.id if charge.hold is not None else "",
        "app": info.app,
        "user": info.user,
        "session": info.session,
        **_figures_of(charge.booked or Entry(), charge.entry),
    }
    if charge.instead_of:
        record["instead_of"] = charge.instead_of
    if info.labels:
        record["labels"] = dict(info.labels)
    if before is not None:
        record["was"] = _figures_of(*before)
    return record


def _figures_of(entry: Entry, key: tuple[str, str, str]) -> dict[str, Any]:
    agent, model, tool = key
    facts = {
        "agent": agent,
        "model": model,
        "tool": tool,
        "input": entry.input,
        "output": entry.output,
        "cached": entry.cached,
    }
    unknown = {"estimated": True} if entry.estimated else {}
    if entry.tool_calls:
        facts["kind"] = "tool"
    if entry.searches:
        facts["searches"] = entry.searches
    return {**facts, **unknown, "usd": usd_of(entry)}


def usd_of(entry: Entry) -> str | None:
    """Dollars as records contain them; None without a price."""
    return None if entry.unpriced else str(to_usd(entry.nano))


# ---- Budgets that are spent too fast

FAST: Final = 24  # the fast window is a 24th of the period: an hour of a day
SLOW: Final = 4  # the slow one a quarter: six hours of a day
FACTOR: Final = 1.5  # calls come in bursts: a budget that just lasts must not be reported
_SLOTS: Final = 8  # of a fast window
_SLOTS_KEPT: Final = FAST // SLOW * _SLOTS + 2  # a slow window, the slot in which it begins, and the one before
_ACCOUNTS_KEPT: Final = 1_024
_ALL: Final = Threshold(1.0)

Slots = Sequence[tuple[int, Amount]]  # the number of a slot of time, and what was spent at its end


def burn_of(slots: Slots, spent: Amount, cap: int, unit: int, begins: float, now: float, ends: float) -> Burn | None:
    """Return how many times as fast as allowed a budget is spent; None where it is not spent too fast.

    Too fast is ``FACTOR`` times as fast as what is left of the period allows, over both a fast and a slow window: a
    short burst, and spending that has calmed down, are not reported.
    """
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
    """What accounts have spent over time, as far as this process saw it. Safe to use from many threads.

    Looked at after each call on a budget with ``burn_alert=True``, and on no other. What an account has spent is noted
    once per slot of time, so the memory per account is constant.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float], before: "BurnWatch | None" = None) -> None:
        """``before``: goes on with the slots of another watch."""
        self._ledger, self._clock = ledger, clock
        self._lock: threading.Lock = threading.Lock() if before is None else before._lock
        # the slots of an account, by its key; and for which extension it was reported
        self._slots: LruDict[str, deque[tuple[int, Amount]]] = (
            LruDict(_ACCOUNTS_KEPT) if before is None else before._slots
        )
        self._reported: LruDict[str, Amount] = LruDict(_ACCOUNTS_KEPT) if before is None else before._reported

    def look(self, lines: AccountLines) -> Iterator[Fired]:
        """Yield the budgets that burn too fast now, each once per period over all workers."""
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
    """Yield each unit that is limited, its cap with extensions, and the amounts of its budget."""
    for limit in limits:
        for unit, amount in enumerate(limit):
            if amount < UNLIMITED:
                yield unit, amount + granted[unit], limit
