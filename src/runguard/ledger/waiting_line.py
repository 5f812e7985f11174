"""The order of calls that wait for room in a budget: first come, first served, per account of one ledger.

Every call on a budget that waits takes a turn before it asks. A call may ask when no earlier call waits for an account
that it needs. A call that waits for one account does not hold up calls that only share another account with it: a user
without room must not block the other users of the same model.
"""

import asyncio
import contextlib
import threading
from collections.abc import Iterable

Sleeper = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]  # a call that waits, and what ends its wait


class LinePlace:
    """The place of one call in the line."""

    __slots__ = ("blocked_on", "may_ask", "names", "sleeper")

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names  # of the accounts that it may have to wait for
        self.blocked_on = ""  # the account that refused it last; "": it has not asked yet
        self.may_ask = False
        self.sleeper: Sleeper | None = None


class WaitingLine:
    """The calls in line at one ledger, on any thread and event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: dict[LinePlace, None] = {}  # in the order of arrival

    def __len__(self) -> int:
        return len(self._line)

    def is_free(self, names: frozenset[str]) -> bool:
        """Whether a call that comes now could ask at once."""
        if not self._line:
            return True
        with self._lock:
            return names.isdisjoint(self._taken_locked())

    def join(self, names: frozenset[str]) -> LinePlace:
        place = LinePlace(names)
        with self._lock:
            place.may_ask = names.isdisjoint(self._taken_locked()) if self._line else True
            self._line[place] = None
        return place

    def block(self, place: LinePlace, name: str) -> None:
        """An account refused the call: it waits for that one, and calls on its other accounts may go ahead."""
        if place.blocked_on != name:
            with self._lock:
                place.blocked_on = name
                self._advance_locked()

    def leave(self, place: LinePlace) -> None:
        """The call has what it wanted, gave up or was cancelled: the next one may ask."""
        with self._lock:
            self._line.pop(place, None)
            if self._line:
                self._advance_locked()

    def listen(self, place: LinePlace) -> Sleeper:
        """A future of the running loop that is done when the call may ask, or after ``wake``."""
        with self._lock:
            place.sleeper = new_sleeper()
            return place.sleeper

    def wake(self, place: LinePlace) -> None:
        """Let a waiting call look around: its run was stopped."""
        with self._lock:
            _wake_place(place)

    def waiting_for(self, names: Iterable[str]) -> int:
        """How many calls wait for one of these accounts."""
        wanted = set(names)
        with self._lock:
            return sum(place.blocked_on in wanted for place in self._line)

    def _taken_locked(self) -> set[str]:
        taken: set[str] = set()
        for place in self._line:
            taken |= {place.blocked_on} if place.blocked_on else place.names
        return taken

    def _advance_locked(self) -> None:
        taken: set[str] = set()
        for place in self._line:
            needs = {place.blocked_on} if place.blocked_on else place.names
            may_ask = taken.isdisjoint(needs)
            if may_ask and not place.may_ask:
                _wake_place(place)
            place.may_ask = may_ask
            taken |= needs


def _wake_place(place: LinePlace) -> None:
    if place.sleeper is not None:
        wake([place.sleeper])


def new_sleeper() -> Sleeper:
    """For a call on the running loop."""
    loop = asyncio.get_running_loop()
    return loop, loop.create_future()


def wake(sleepers: Iterable[Sleeper]) -> None:
    """End their waits, from any thread."""
    for loop, woken in sleepers:
        with contextlib.suppress(RuntimeError):  # its loop is closed: nothing waits there any more
            loop.call_soon_threadsafe(_resolve, woken)


def _resolve(woken: "asyncio.Future[None]") -> None:
    if not woken.done():
        woken.set_result(None)
