"""Who spent what: per agent, model and tool of each run, and in all of its session, its user and its app.

``RunCosts`` is the money of one run. ``engine/money`` books every call on ``Spending``. ``engine/money`` and
``engine/calls`` write what ``record_of`` returns to the store.
"""

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, Self

from runguard.core.errors import PolicyError
from runguard.core.events import RunInfo
from runguard.core.identity import LruDict
from runguard.core.money import CALLS_KEPT, UNLIMITED, Amount, scope_part, to_usd

if TYPE_CHECKING:
    from runguard.engine.budgets import AccountLines
    from runguard.engine.charges import Charge


# ---- A run's own limits, and the scopes that it belongs to


def flat_limits(info: RunInfo) -> Amount | None:
    if info.max_usd is None and info.max_tokens is None:
        return None
    return (
        UNLIMITED if info.max_usd is None else info.max_usd,
        UNLIMITED if info.max_tokens is None else info.max_tokens,
        UNLIMITED,
    )


Ceiling = tuple[int | None, int | None]  # nano-USD and tokens


def lower_ceiling(one: Ceiling, other: Ceiling) -> Ceiling:
    """Return the lower of two amounts that a caller can pay for; None: not limited."""
    usd, tokens = (min((n for n in pair if n is not None), default=None) for pair in zip(one, other, strict=True))
    return usd, tokens


def scopes_of(info: RunInfo) -> tuple[str, str, str, str]:
    app, user = scope_part(info.app), scope_part(info.user)
    return (
        f"run:{scope_part(info.run)}",
        f"session:{app}/{user}/{scope_part(info.session)}",
        f"user:{app}/{user}",
        f"app:{app}",
    )


# ---- Figures: what one agent took from one model inside one tool, and their sums

LINES_KEPT: Final = 256


class Summable:
    """A dataclass of counts that can be added up."""

    __slots__: tuple[str, ...] = ()

    def add(self, other: Self, sign: int = 1) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + sign * getattr(other, name))


@dataclass(slots=True)
class Entry(Summable):
    """What one agent took from one model inside one tool, and what the tool itself cost."""

    calls: int = 0
    input: int = 0
    output: int = 0
    cached: int = 0
    thinking: int = 0
    nano: int = 0
    unpriced: int = 0  # calls without a known price: ``nano`` does not contain their cost
    estimated: int = 0  # calls whose usage or rate was estimated
    tool_calls: int = 0  # calls of tools that have a price
    tool_nano: int = 0  # of ``nano``, what those cost
    searches: int = 0  # on the model's side
    search_nano: int = 0  # of ``nano``, what those cost


Tally = dict[tuple[str, str, str], Entry]  # agent, model, tool


def add_tally(into: Tally, more: Mapping[tuple[str, str, str], Entry], sign: int = 1) -> None:
    for key, entry in list(more.items()):
        if key not in into and len(into) >= LINES_KEPT * 4:
            key = ("(others)", "(others)", "(others)")
        into.setdefault(key, Entry()).add(entry, sign)


def totals(entries: Iterable[Entry]) -> dict[str, Any]:
    total = Entry()
    for entry in entries:
        total.add(entry)
    return {
        "usd": to_usd(total.nano),
        "calls": total.calls,
        "tokens": total.input + total.output,
        "input_tokens": total.input,
        "output_tokens": total.output,
        "cached_tokens": total.cached,
        "thinking_tokens": total.thinking,
        "unpriced_calls": total.unpriced,
        "estimated_calls": total.estimated,
        "paid_tool_calls": total.tool_calls,
        "tools_usd": to_usd(total.tool_nano),
        "searches": total.searches,
        "searches_usd": to_usd(total.search_nano),
    }


def split_by(tally: Tally, position: int) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[Entry]] = {}
    for key, entry in tally.items():
        if key[position]:
            groups.setdefault(key[position], []).append(entry)
    return {name: totals(entries) for name, entries in sorted(groups.items())}


# ---- The money of one run

RecentCall = tuple[str, str, str, Entry]  # lane, agent and model of a call, and what it took


class RunCosts:
    """The money of one run."""

    __slots__ = (
        "closed_calls",
        "ended",
        "estimated",
        "flat",
        "info",
        "inherited",
        "lines",
        "nano",
        "open",
        "over",
        "own",
        "recent",
        "tally",
        "unpriced",
    )

    def __init__(self, info: RunInfo, flat: Amount | None) -> None:
        self.info, self.flat = info, flat
        self.tally: Tally = {}
        self.inherited: Tally = {}  # spent by another worker before this one resumed the run
        self.lines: dict[tuple[str, str, str], AccountLines] = {}
        self.nano = self.unpriced = self.estimated = self.closed_calls = 0
        self.open: set[Charge] = set()  # calls under way; no lock is needed to add one
        self.own: set[str] = set()  # scopes that end with the run
        self.recent: deque[RecentCall] = deque(maxlen=CALLS_KEPT)  # its last calls, for a forecast
        self.over = False  # nothing runs and nothing is waited for; kept because it could be run again
        self.ended = False

    def inherit(self, whole: Tally) -> None:
        """Take over what the run has spent on all workers.

        What others spent is part of the run's figures and of nothing else here.
        """
        self.inherited = {}
        add_tally(self.inherited, whole)
        add_tally(self.inherited, self.tally, -1)
        total = Entry()
        for entry in whole.values():
            total.add(entry)
        self.nano, self.unpriced, self.estimated, self.closed_calls = (
            total.nano,
            total.unpriced,
            total.estimated,
            total.calls + total.tool_calls,
        )

    def tool_costs(self) -> dict[str, int]:
        """Return what each tool with a price has cost, in nano-USD."""
        costs: dict[str, int] = {}
        for (_, _, tool), entry in [*self.inherited.items(), *self.tally.items()]:
            if entry.tool_calls:
                costs[tool] = costs.get(tool, 0) + entry.tool_nano
        return costs

    @property
    def calls(self) -> int:
        """Calls that were sent, those under way included."""
        return self.closed_calls + len(self.open)

    @property
    def reserved(self) -> int:
        """Nano-USD held for the calls under way."""
        return sum(charge.held for charge in self.open.copy())

    @property
    def spent_usd(self) -> Decimal | None:
        """Dollars spent; None when nothing has a known price."""
        return None if self.unpriced and self.unpriced == self.calls else to_usd(self.nano)


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

    def released(self, charge: "Charge") -> None:
        """Close the charge of a call that was never sent."""
        with self._lock:
            charge.run_costs.open.discard(charge)
            charge.over = True

    def give_up(self, charge: "Charge") -> None:
        """Close a charge whose cost cannot be booked."""
        with self._lock:
            if not charge.over:
                charge.over = True
                charge.run_costs.open.discard(charge)
                charge.run_costs.closed_calls += 1

    def book(self, charge: "Charge", entry: Entry, model: str) -> None:
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


def record_of(charge: "Charge", before: Earlier | None = None) -> dict[str, Any]:
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
