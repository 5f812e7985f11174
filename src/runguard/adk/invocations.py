"""The invocations that one guard knows, from their start to their end, and why the guard gave up on some of them."""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Final

from google.adk.agents.invocation_context import InvocationContext

from runguard.adk.context import HERE
from runguard.adk.invocation_state import Invocation, ModelInFlight
from runguard.core.decision import Trip
from runguard.core.identity import Newest
from runguard.engine.guard import Guard
from runguard.engine.runs import Run

_INVOCATIONS_KEPT: Final = 10_000
_GAVE_UP_KEPT: Final = 1_000
_WRITE_S: Final = 1.0

# agent and branch -> times skipped since the last model call, and how many model calls had been made then
Skips = dict[tuple[str, str | None], tuple[int, int]]


class Invocations:
    """The registry of one guard: invocations by ADK's id.

    ``gave_up``, ``skips`` and ``failed_stops`` belong to ``stops``. They are kept here, by invocation, because they end
    with it.
    """

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.owner: Any = None  # its plugin, where ``generations`` must find it again
        self.known: dict[str, Invocation] = {}
        self.gave_up = Newest[str, Trip](_GAVE_UP_KEPT)  # the guard itself failed, and its policy says stop
        self.skips: dict[str, Skips] = {}
        self.failed_stops: dict[str, int] = {}  # stops that could not be carried out as they should be
        self.writing: dict[str, Future[None]] = {}  # records of paused runs on their way to the store
        self.find: Callable[[str], Invocation | None] = self.known.get

    def find_current(self, invocation_id: str) -> Invocation | None:
        """As ``find``, but None where the run that it was nested in has ended: it is a run of its own from now on."""
        found = self.known.get(invocation_id)
        if found is not None and found.nested and self.guard.runs.get(found.run.info.run) is not found.run:
            return None
        return found

    def stop_of(self, invocation_id: str) -> Trip | None:
        """Why the whole run of an invocation is stopped, or None."""
        invocation = self.known.get(invocation_id)
        return self.gave_up.get(invocation_id) or (invocation.run.stopped if invocation is not None else None)

    def is_idle(self, run: Run, beside: str) -> bool:
        """No call of a run is in progress, except the calls around lane ``beside``."""
        return all(invocation.is_idle(beside) for invocation in list(self.known.values()) if invocation.run is run)

    def give_up(self, invocation_id: str, trip: Trip) -> None:
        """The guard failed in this invocation and its policy says stop. Hooks do not ask the guard again."""
        self.gave_up[invocation_id] = trip

    def register(self, ic: InvocationContext, invocation: Invocation) -> Invocation:
        invocation.live = ic.live_request_queue is not None
        self.known[ic.invocation_id] = invocation
        stream = HERE.get().stream
        if stream is not None:
            stream.invocation_ids.append(ic.invocation_id)
            invocation.streamed = True
        if len(self.known) > _INVOCATIONS_KEPT:
            self.forget(next(iter(self.known)))
        if stream is not None and stream.fault is not None and not invocation.nested:
            fault, stream.fault = stream.fault, None
            self.guard.stop_after("runner", fault, invocation.run.info.run)
        return invocation

    def forget(self, invocation_id: str) -> Trip | None:
        """A stream of an invocation is over, however it ended.

        The first to notice calls this. Returns the last trip, if there was one.
        """
        invocation = self.known.get(invocation_id)
        if invocation is not None and invocation.entered > 1:
            invocation.entered -= 1
            return invocation.run.trips[-1] if invocation.run.trips else None
        self.known.pop(invocation_id, None)
        trip = self.gave_up.pop(invocation_id, None)
        self.skips.pop(invocation_id, None)
        self.failed_stops.pop(invocation_id, None)
        if invocation is None:
            return trip
        attempt = self.guard.faults.attempt  # a fault in one step does not prevent the others
        for task, flight in invocation.flights.items():
            attempt("end of run", self.close_flight, flight)
            if task is not None:
                attempt("end of run", invocation.run.slots.give_back, task)
        for close in list(invocation.at_end.values()):
            attempt("end of run", close)
        if not invocation.nested:
            attempt("end of run", self._end_run, invocation)
        return invocation.run.trips[-1] if invocation.run.trips else trip

    def _end_run(self, invocation: Invocation) -> None:
        """The run is over or paused. A run that can be resumed is kept with its counts."""
        run = invocation.run
        may_resume = invocation.asked or invocation.resumable or run.stopped is not None
        if not may_resume or invocation.live or run.unsure:
            self.guard.end(run.info.run)
            return
        try:
            invocation.rest()
            written = self.guard.pauses.keep(run.info.run, waits=bool(invocation.questions) and run.stopped is None)
            if written is not None:
                writing, name = self.writing, invocation.id
                writing[name] = written
                written.add_done_callback(lambda _: writing.pop(name, None))
        except Exception as error:
            self.guard.faults.note("pause", error)
            self.guard.end(run.info.run)

    async def written(self, invocation_ids: Iterable[str]) -> None:
        """Wait, bounded, until the store has the records of paused runs: another worker may resume them as soon as
        their streams have ended.

        It does not wait while the store is away: every refused run would end a second later.
        """
        futures = [
            asyncio.wrap_future(future) for one in invocation_ids if (future := self.writing.get(one)) is not None
        ]
        if futures and not self.guard.accounts.ledger.is_away:
            await asyncio.wait(futures, timeout=_WRITE_S)

    def close_flight(self, flight: ModelInFlight) -> None:
        """Close the charge of a call that is over: release it if the call never left, book an estimate if it did."""
        charge = flight.charge
        if charge is None or charge.over:
            return
        if flight.left:
            self.guard.abandon(charge)
        else:
            self.guard.release(charge)
