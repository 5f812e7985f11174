"""Waiting: for room in a budget, and for a turn, where only so many calls may go at once.

``engine/money`` lets a call wait with a ``Visit`` of the ``Waits`` of its accounts. ``Turns`` are those of the calls in
flight in a run (``engine/runs``), of calls whose cost is known only afterwards (``calls/function_calls``), and of calls
to a provider that asked to wait (``engine/rate_limits``).
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from runguard.core.decision import Action, Finding, Money
from runguard.core.events import ModelCall
from runguard.core.money import UNITS, amount_text, edge, to_usd, window_words
from runguard.engine.budgets import AccountLines
from runguard.engine.charges import Charge
from runguard.ledger.ledger import Account, Ledger, Refusal, Sleeper, new_sleeper, wake
from runguard.policy.settings import Policy

if TYPE_CHECKING:
    from runguard.engine.context import GuardContext
    from runguard.engine.runs import Run

_log: Final = logging.getLogger("runguard")

# ---- Calls that wait for room in a budget with ``on_exhausted="wait"``

_LOOKS_S: Final = 1.0
_CLOCKS_DIFFER_S: Final = 0.25  # the time left and the time of a window come from different clocks
_SHORTEST_S: Final = 0.001  # clocks are not exact: do not ask again and again for the last microseconds of a window


@dataclass(frozen=True, slots=True)
class Opening:
    """When the budgets that refuse a call have room again."""

    account: Account  # the one whose window ends last
    unit: int
    until: float  # by the clock of the ledger
    seconds: float
    fits: bool  # into a window in which nothing is spent

    @property
    def text(self) -> str:
        limit = amount_text(self.unit, self.account.caps[self.unit])
        return f"room in the budget of {self.account.scope}: {limit} per {window_words(self.account.window or '')}"


class Waiter(Protocol):
    """A call that waits."""

    @property
    def scope(self) -> str:
        """What it waits for; "" for its turn."""

    @property
    def until(self) -> float | None:
        """When it will have room, where that is known."""

    def wake(self) -> None:
        """Look now, because the run was stopped. From any thread."""


class Waits:
    """The waiting calls of one policy on one ledger, and the report of them.

    A call waits in line (``runguard.ledger.ledger``), at most ``max_wait_seconds`` and not past the deadline of its
    run. The first in line asks again when its window is over, when another call of this process was settled, and once a
    second, because other workers of a store settle without notice. When the time is over, the call is refused as if the
    budget did not wait. A fault in the report ends no wait and no run.
    """

    def __init__(self, policy: Policy, ledger: Ledger, clock: Callable[[], float]) -> None:
        self.patience, self.ledger, self._clock = policy.max_wait_seconds, ledger, clock
        self.guard: GuardContext | None = None  # whose runs wait
        self.advance: Callable[[float], None] | None = None  # of a replay: moves its clock instead of waiting
        self.waited_s = 0.0  # of all calls, or what they would have waited in shadow mode
        self.calls = 0

    def opening(self, lines: AccountLines, refusal: Refusal, left: float, *, others_settle: bool) -> Opening | None:
        """Return when there is room; None where a budget that refuses does not wait, or the time left is too short.

        ``others_settle``: other calls hold a part of it and may give it back before the window is over.
        """
        known = {a.key: (a, group) for a, group in zip(lines.accounts, lines.groups, strict=True)}
        last: tuple[Account, int] | None = None
        fits = True
        for key, unit in refusal.refusing:
            account, group = known[key]
            if not group.waits[unit] or account.ends is None:
                return None
            fits = fits and refusal.wanted[unit] <= account.caps[unit]
            if last is None or account.ends > (last[0].ends or 0.0):
                last = account, unit
        if last is None or left <= 0:
            return None
        until = last[0].ends or 0.0
        seconds = max(until - self.ledger.period_time(self._clock()), 0.0)
        if seconds > left + _CLOCKS_DIFFER_S and not others_settle:
            return None
        return Opening(last[0], last[1], until, seconds, fits)

    def seconds_left(self, charge: Charge) -> float:
        """Return how long the run of a call may still go on."""
        run = self._run_of(charge)
        return self.left_of(run) if run is not None else math.inf

    def left_of(self, run: "Run") -> float:
        """Return the time until the deadline of a run."""
        if run.deadline is None:
            return math.inf
        return run.deadline.started + run.deadline.seconds - self._clock()

    def began(self, visit: "Visit") -> None:
        """Note that a call begins to wait."""
        run = self._run_of(visit.charge)
        if run is not None:
            run.visits[visit] = None
            if visit.opening is not None:
                self._report(run, visit.charge, visit.opening, "waits")

    def ended(self, visit: "Visit", seconds: float) -> None:
        """Note that a call waits no longer."""
        charge, opening = visit.charge, visit.opening
        run = self._run_of(charge)
        if run is not None:
            run.visits.pop(visit, None)
        self.note(charge.agent, seconds, opening.text if opening is not None else "its turn")

    def note(self, agent: str, seconds: float, what: str, verb: str = "waited") -> None:
        """Count and log a call that has waited."""
        self.calls, self.waited_s = self.calls + 1, self.waited_s + seconds
        _log.info("runguard.waited: a call of agent '%s' %s %.1f s for %s", agent, verb, seconds, what)

    def skip(self, charge: Charge, opening: Opening) -> None:
        """Report a call that an enforcing guard would have let wait; in a replay, let the time pass."""
        self.calls, self.waited_s = self.calls + 1, self.waited_s + opening.seconds
        run = self._run_of(charge)
        if run is not None:
            self._report(run, charge, opening, "would wait")
        if self.advance is not None:
            self.advance(opening.until)

    def _run_of(self, charge: Charge) -> "Run | None":
        return self.guard.runs.get(charge.run_costs.info.run) if self.guard is not None else None

    def _report(self, run: "Run", charge: Charge, opening: Opening, verb: str) -> None:
        """Warn once per run and account."""
        if self.guard is not None:
            self.guard.faults.attempt("reporting a wait", _warn, self.guard, run, charge, opening, verb)


def _warn(guard: "GuardContext", run: "Run", charge: Charge, opening: Opening, verb: str) -> None:
    account, unit = opening.account, opening.unit
    detail = f"a call {verb} up to {opening.seconds:.0f} s for {opening.text}"
    spent, held = to_usd(account.spent_usd), to_usd(account.due_usd - account.spent_usd)
    money = Money(account.scope.partition(":")[0], account.scope, spent, held, account.ends)
    observed, limit = edge(unit, account.spent[unit]), edge(unit, account.caps[unit])
    facts = (observed, limit, UNITS[unit], "run", "", f"wait:{account.meter}", detail)
    lane = run.lane(charge.lane)
    event = ModelCall(run.info.run, lane.key, charge.agent, guard.clock(), charge.model)
    guard.deciding.decide(run, lane, event, Finding("budget", Action.WARN, *facts, money=money))


class Visit:
    """One call on budgets that wait, from the moment it asks until it has its reservation or gives up."""

    __slots__ = ("_began", "_loop", "_stopped", "_waits", "charge", "opening", "place")

    def __init__(self, waits: Waits, charge: Charge, stopped: Callable[[], bool]) -> None:
        self._waits, self.charge, self._stopped = waits, charge, stopped
        self.place = waits.ledger.line.join(charge.lines.names)
        self.opening: Opening | None = None
        self._began: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # on which it sleeps

    @property
    def scope(self) -> str:
        return self.opening.account.scope if self.opening is not None else ""

    @property
    def until(self) -> float | None:
        return self.opening.until if self.opening is not None else None

    def left(self) -> float:
        """Return how long it may still wait."""
        now = asyncio.get_running_loop().time()
        if self._began is None:
            self._began = now
        return min(self._began + self._waits.patience - now, self._waits.seconds_left(self.charge))

    def opens(self, refusal: Refusal, *, others_settle: bool) -> Opening | None:
        return self._waits.opening(self.charge.lines, refusal, self.left(), others_settle=others_settle)

    async def in_turn(self) -> None:
        """Wait until no earlier call is in line, bounded."""
        line = self._waits.ledger.line
        while not self._stopped() and (left := self.left()) > 0:
            sleeper = line.listen(self.place)
            if self.place.may_ask:
                return
            self._begin()
            await asyncio.wait((sleeper[1],), timeout=min(left, _LOOKS_S))

    async def for_room(self, refusal: Refusal, opening: Opening) -> None:
        """Wait until it makes sense to ask again."""
        line = self._waits.ledger.line
        self.opening = opening
        line.block(self.place, opening.account.meter)
        if not self.place.may_ask:
            await self.in_turn()
            return
        sleeper = line.listen(self.place)
        self._begin()
        if not self._stopped():
            seconds = min(opening.seconds, self.left(), _LOOKS_S)
            await self._waits.ledger.changed(refusal, max(seconds, _SHORTEST_S), sleeper)

    def step_aside(self, refusal: Refusal) -> None:
        """Let the calls behind go first: a budget that does not wait refuses this one."""
        self._waits.ledger.line.block(self.place, refusal.account.key)

    def wake(self) -> None:
        """Look now, because the run was stopped. From any thread."""
        self._waits.ledger.line.wake(self.place)

    def leave(self) -> None:
        self._waits.ledger.line.leave(self.place)
        if self._loop is not None:
            self._waits.ended(self, self._loop.time() - (self._began or 0.0))

    def _begin(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._waits.began(self)


def waiting_for(visits: "Iterable[Waiter]") -> list[dict[str, Any]]:
    """Return what these calls wait for, as plain data: the scope, how many calls, and when its window ends."""
    scopes: dict[str, dict[str, Any]] = {}
    for visit in list(visits):
        entry = scopes.setdefault(visit.scope, {"scope": visit.scope, "calls": 0, "until": None})
        entry["calls"] += 1
        entry["until"] = visit.until
    return list(scopes.values())


# ---- Turns: model calls in flight in one run, first calls of unknown cost, and probes of a provider that asked to wait

_SWEEP_S = 0.5  # how often a waiting call looks for turns of calls that are gone
_Member = TypeVar("_Member", bound=Hashable)


class Turns(Generic[_Member]):
    """At most ``limit`` members hold a turn at once. The others wait, first come, first served.

    Works across threads and event loops. The turn of a member that ended without giving it back is free again: a
    waiting member looks for those. Who raises ``limit`` gives those who wait their turns with ``hand_on``.
    """

    __slots__ = ("_is_lost", "_lock", "holders", "limit", "waiting")

    def __init__(self, limit: float, is_lost: Callable[[_Member, float], bool]) -> None:
        """``is_lost``: whether a member that holds a turn since a time of ``time.monotonic`` can no longer use it.

        For members that wait, the time is infinite.
        """
        self.limit, self._is_lost = limit, is_lost
        self.holders: dict[_Member, float] = {}  # since when each has its turn
        self.waiting: dict[_Member, Sleeper | None] = {}  # in the order of asking
        # Reentrant, because the collector may throw away a task at any time, and the task gives its turn back.
        self._lock = threading.RLock()

    def take(self, member: _Member, *, join: bool = False) -> bool:
        """Take a turn now, or return False. A member that already has one keeps it. Waiting members come first.

        ``join``: get in line where there is no turn.
        """
        with self._lock:
            if member in self.holders:
                return True
            if self.waiting or len(self.holders) >= self.limit:
                if join:
                    self.waiting.setdefault(member)
                self._sweep_locked()
                if join or self.waiting or len(self.holders) >= self.limit:
                    return member in self.holders
            self.holders[member] = time.monotonic()
            return True

    async def wait(self, member: _Member, seconds: float = math.inf) -> bool:
        """Wait for a turn, at most this long or until ``wake``. Return whether the member has it.

        It stays in line, so that it can wait again, until it gives up its place with ``give_back``.
        """
        sleeper = loop, woken = new_sleeper()
        until = loop.time() + seconds
        with self._lock:
            if member in self.holders:
                return True
            self.waiting[member] = sleeper
            self._sweep_locked()
            if member in self.holders:
                return True
        try:
            while not woken.done() and (left := until - loop.time()) > 0:
                await asyncio.wait((woken,), timeout=min(left, _SWEEP_S))
                with self._lock:
                    self._sweep_locked()
                    if member in self.holders:
                        return True
        except BaseException:  # cancelled while waiting, or in the very moment of its turn: the next one's turn
            self.give_back(member)
            raise
        return member in self.holders

    def give_back(self, member: _Member) -> None:
        """End the turn of a member, or take it out of the line. The next one goes."""
        with self._lock:
            self.waiting.pop(member, None)
            self.holders.pop(member, None)
            if self.waiting:
                self._hand_on_locked()

    def hand_on(self) -> None:
        """Give free turns to those who wait."""
        with self._lock:
            self._sweep_locked()

    def wake(self, member: _Member) -> None:
        """End the wait of a member, which keeps its place in line. From any thread."""
        sleeper = self.waiting.get(member)
        if sleeper is not None:
            wake([sleeper])

    def busy(self) -> int:
        """Return how many members use their turns."""
        with self._lock:
            self._sweep_locked()
            return len(self.holders)

    def _sweep_locked(self) -> None:
        for member, since in list(self.holders.items()):
            if self._is_lost(member, since):
                self.holders.pop(member, None)
        self._hand_on_locked()

    def _hand_on_locked(self) -> None:
        while self.waiting and len(self.holders) < self.limit:
            member, sleeper = next(iter(self.waiting.items()))
            self.waiting.pop(member, None)
            if not self._is_lost(member, math.inf) and not (sleeper is not None and sleeper[0].is_closed()):
                self.holders[member] = time.monotonic()
                if sleeper is not None:
                    wake([sleeper])


def is_finished(task: "asyncio.Task[Any]", since: float) -> bool:
    """Return whether a task can make no call any more, for the turns of tasks. Only calls hold one, never agents.

    So nesting cannot deadlock: a task makes one model call at a time.
    """
    return task.done() or task.get_loop().is_closed()
