"""Runs that may be resumed. One invocation is one run, however often it pauses.

A run that pauses is kept here with everything it has used and seen, so that it goes on where it was. Where a store is
shared, its record of the run tells other workers what the run has used. The number of runs kept in memory is bounded:
the oldest are dropped.
"""

import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from runguard.accounting.budget_groups import flat_limits, lower_ceiling
from runguard.conductor import carried
from runguard.conductor.runs import Run
from runguard.core.decision import printable
from runguard.core.events import RunInfo
from runguard.ledger.ledger import StoreError, StoreSession

if TYPE_CHECKING:
    from runguard.conductor.guard import Guard

_log: Final = logging.getLogger("runguard")
WAITING_KEPT: Final = 1_000  # runs with a question that is open: a confirmation, a sign-in, a long-running call
ENDED_KEPT: Final = 256  # runs that were stopped or have ended: their invocation could still be run again


def run_name(invocation_id: str, messages: int) -> str:
    """The run of an invocation.

    A further message of the user begins a new run, also where ADK goes on under the same invocation id.
    """
    return invocation_id if messages < 2 else f"{invocation_id}.{messages}"


class Pauses:
    """The runs of one guard that may be resumed. Safe to use from many threads."""

    def __init__(self, guard: "Guard") -> None:
        self._guard = guard
        self._waiting: OrderedDict[str, Run] = OrderedDict()
        self._ended: OrderedDict[str, Run] = OrderedDict()
        self._lock = threading.Lock()

    def share(self, other: "Pauses") -> None:
        """Keep the same runs as another guard: either of them resumes a run that the other has paused."""
        self._waiting, self._ended, self._lock = other._waiting, other._ended, other._lock

    @property
    def waiting(self) -> int:
        """How many runs wait for an answer from outside."""
        return len(self._waiting)

    def find(self, run_id: str) -> Run | None:
        return self._waiting.get(run_id) or self._ended.get(run_id)

    def belongs_to_others(self, info: RunInfo) -> bool:
        """Whether a run of this name is another session's. Clients may send any invocation id."""
        known = self._guard.runs.get(info.run) or self.find(info.run)
        return known is not None and _owner(known.info) != _owner(info)

    def keep(self, run_id: str, *, waits: bool) -> "Future[None] | None":
        """A run has paused, or has ended and may be run again.

        ``waits``: for an answer to a question. Returns when its record is written.
        """
        guard = self._guard
        run = guard.runs.pop(run_id, None)
        if run is None:
            return None
        run.paused_at, run.pauses, run.run_costs.over = guard.clock(), run.pauses + 1, not waits
        shelf, most = (self._waiting, WAITING_KEPT) if waits else (self._ended, ENDED_KEPT)
        with self._lock:
            shelf[run_id] = run
            dropped = shelf.popitem(last=False)[1] if len(shelf) > most else None
        attempt = guard.faults.attempt
        for tool, permit in run.permits.values():
            attempt("pause", guard.breakers.release, tool, permit)
        run.permits.clear()
        if run.bills is not None:
            attempt("pause", guard.tool_prices.end, run)
        if guard.last_answers is not None:
            attempt("pause", guard.last_answers.drop, run)
        if run.journal is not None:
            attempt("pause", run.journal.paused, run.paused_at)
        if dropped is not None:
            attempt("pause", self._drop, dropped, waits)
        attempt("pause", guard.growth.record, run.info, run.growth)
        written: Future[None] | None = attempt("pause", self._record, run)
        run.written = written
        if written is not None:
            written.add_done_callback(lambda done: _is_written(run, done))
        return written

    def _record(self, run: Run) -> "Future[None] | None":
        return self._guard.records.write_end(run, carried.dump(run)) if self._guard.accounts.ledger.is_shared else None

    def _drop(self, run: Run, waits: bool) -> None:
        guard = self._guard
        if waits:
            shared = guard.accounts.ledger.is_shared
            _log.log(
                logging.INFO if shared else logging.WARNING,
                "runguard.paused_dropped: more than %d paused runs are in memory; the oldest, %s, was dropped; %s",
                WAITING_KEPT,
                printable(run.info.run),
                "the store keeps what it has used" if shared else "if it is resumed, its limits start again",
            )
        guard.accounts.end(run.run_costs)
        for call in run.pending_once:
            guard.once.settle(run.info, call, False)

    def discard(self, info: RunInfo) -> None:
        """This run cannot be resumed any more."""
        run = self._take(info)
        if run is not None:
            self._drop(run, False)

    def _take(self, info: RunInfo) -> Run | None:
        with self._lock:
            run = self.find(info.run)
            if run is None or _owner(run.info) != _owner(info):
                return None
            self._waiting.pop(info.run, None)
            self._ended.pop(info.run, None)
            return run

    async def latest(self, info: RunInfo) -> dict[str, Any] | None:
        """The store's last record of a run, from whichever worker; None when there is none. Raises ``StoreOutage`` and
        ``StoreError``.
        """
        kept = self.find(info.run)
        if kept is not None and kept.written is not None and not kept.written.done():
            return None  # what is kept here is newer than anything in the store
        found: list[dict[str, Any]] = []
        await self._guard.accounts.ledger.ask(lambda session: found.extend(_records(session, info.run)), again=True)
        return found[-1] if found else None

    def resume(self, info: RunInfo, record: Mapping[str, Any] | None = None) -> Run | None:
        """The run goes on: with what is kept here, and with what other workers have counted since. None when it
        is unknown.

        ``record``: the store's last one. Raises ``StoreError`` when it cannot be read.
        """
        if record is not None and not carried.belongs_to(record, info):
            info.run = f"{info.run}@{info.session}"
            return None
        if record is not None and carried.KEY not in record:
            self.discard(info)  # another worker has brought it to its end
            return None
        run = self._take(info)
        if run is not None:
            _take_over(run, info)
            return self._go_on(run, record)
        return self._go_on(self._guard.start(info), record) if record is not None else None

    def _go_on(self, run: Run, record: Mapping[str, Any] | None) -> Run:
        now, written = self._guard.clock(), None
        run.pid, run.run_costs.over = os.getpid(), False
        run.run_costs.lines.clear()  # the policy may be another one by now
        run.go_on(now)
        if record is not None:
            try:
                if carried.pauses(record) > run.pauses:  # else what is kept here is as new, or has not been written yet
                    written = carried.load(run, record, now)
            except StoreError:
                self._guard.runs.pop(run.info.run, None)
                self._guard.accounts.end(run.run_costs)
                raise
        if run.journal is not None:
            run.journal.resumed(now, written)
        self._guard.runs[run.info.run] = run
        return run


def _is_written(run: Run, done: "Future[None]") -> None:
    """The future is not needed any more. It holds on to the task that waited for it, and to all that the task knows."""
    if run.written is done:  # else the run has paused again
        run.written = None


def _owner(info: RunInfo) -> tuple[str, str, str]:
    return info.app, info.user, info.session


def _take_over(run: Run, info: RunInfo) -> None:
    """A run keeps the limits and labels it began with; those named anew with the resume win."""
    if info.max_usd is None and info.max_tokens is None and not info.labels and info.ceiling == (None, None):
        return
    known, run_costs = run.info, run.run_costs
    known.ceiling = lower_ceiling(known.ceiling, info.ceiling)
    known.max_usd = known.max_usd if info.max_usd is None else info.max_usd
    known.max_tokens = known.max_tokens if info.max_tokens is None else info.max_tokens
    known.labels = info.labels or known.labels
    run_costs.flat = flat_limits(known)
    run_costs.lines.clear()


def _records(session: StoreSession, run_id: str) -> list[dict[str, Any]]:
    """What the store has recorded about a run, oldest first."""
    found = []
    for _, text in session.about("run", run_id):
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            raise StoreError(f"the record of the run {printable(run_id)} cannot be read") from None
        if isinstance(record, dict):
            found.append(record)
    return found
