"""Runs that pause and resume, and guards that take over from each other.

``Pauses`` keeps runs, and writes the store's records of them. ``adk/runs`` and ``calls/run`` pause runs there and
``reopen`` them. ``adk/runner`` retires a guard whose policy was loaded again.
"""

import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import astuple, fields, replace
from typing import TYPE_CHECKING, Any, Final

from runguard.core.decision import Action, Trip, printable
from runguard.core.events import ROOT_LANE, ModelCall, RunInfo
from runguard.core.identity import LruDict, digest
from runguard.core.money import UNITS, Amount, edge
from runguard.core.rules.limits import CallsPerTool, ModelCalls, ToolCalls
from runguard.engine.charges import OUTAGES, Denied, finding_of, finding_of_stop
from runguard.engine.runs import Run
from runguard.engine.spending import Entry, Tally, add_tally, flat_limits, lower_ceiling, scopes_of
from runguard.ledger.ledger import StoreError, StoreOutage, StoreSession

if TYPE_CHECKING:
    from runguard.engine.guard import Guard

# ---- Runs that may be resumed

_log: Final = logging.getLogger("runguard")
KEY: Final = "key"  # the kind of record that names a run by a key of its framework
KEYS_KEPT: Final = 4_096
WAITING_KEPT: Final = 1_000  # runs with a question that is open: a confirmation, a sign-in, a long-running call
ENDED_KEPT: Final = 256  # runs that were stopped or have ended: their invocation could still be run again


def run_name(invocation_id: str, messages: int) -> str:
    """Return the name of the run of an invocation.

    A further message of the user begins a new run, also where ADK goes on under the same invocation id.
    """
    return invocation_id if messages < 2 else f"{invocation_id}.{messages}"


class Pauses:
    """The runs of one guard that may be resumed. One invocation is one run, however often it pauses.

    A run that pauses is kept here with everything it has used and seen, so that it goes on where it was. Where a store
    is shared, its record of the run tells other workers what the run has used. The number of runs kept in memory is
    bounded: the oldest are dropped. Safe to use from many threads.
    """

    def __init__(self, guard: "Guard") -> None:
        self._guard = guard
        self._waiting: OrderedDict[str, Run] = OrderedDict()
        self._ended: OrderedDict[str, Run] = OrderedDict()
        # when a run was kept and its name, by the keys under which it was kept
        self._names = LruDict[str, tuple[float, str]](KEYS_KEPT)
        self._lock = threading.Lock()
        guard.keep(self, for_store=True)

    def share(self, other: "Pauses") -> None:
        """Keep the same runs as another guard: either of them resumes a run that the other has paused."""
        self._waiting, self._ended, self._lock = other._waiting, other._ended, other._lock
        self._names = other._names

    @property
    def waiting(self) -> int:
        """How many runs wait for an answer from outside."""
        return len(self._waiting)

    def find(self, run_id: str) -> Run | None:
        return self._waiting.get(run_id) or self._ended.get(run_id)

    def belongs_to_others(self, info: RunInfo) -> bool:
        """Return whether a run of this name is another session's. Clients may send any invocation id."""
        known = self._guard.runs.get(info.run) or self.find(info.run)
        return known is not None and _owner(known.info) != _owner(info)

    def keep(self, run_id: str, *, waits: bool, keys: Iterable[str] = ()) -> "Future[None] | None":
        """Keep a run that has paused, or that has ended and may be run again.

        ``waits``: for an answer to a question. ``keys``: what ``named`` will be asked for, where the framework that
        resumes the run does not know its name. Returns when its record is written.
        """
        guard = self._guard
        run = guard.runs.pop(run_id, None)
        if run is None:
            return None
        run.paused_at, run.pauses, run.run_costs.over = guard.clock(), run.pauses + 1, not waits
        self.name(run, keys)
        shelf, most = (self._waiting, WAITING_KEPT) if waits else (self._ended, ENDED_KEPT)
        with self._lock:
            shelf[run_id] = run
            dropped = shelf.popitem(last=False)[1] if len(shelf) > most else None
        attempt = guard.faults.attempt
        guard.sink.tell("run paused", run, waits)
        if run.journal is not None:
            attempt("pause", run.journal.paused, run.paused_at)
        if dropped is not None:
            attempt("pause", self._drop, dropped, waits)
        written: Future[None] | None = attempt("pause", self.write_end, run, True)
        run.written = written
        if written is not None:
            written.add_done_callback(lambda done: _is_written(run, done))
        return written

    def name(self, run: Run, keys: Iterable[str]) -> None:
        """Let ``named`` find a run that is at work, also on other workers of the store."""
        for key in keys:
            self._name(_owned(run.info, key), run.info.run)

    def _name(self, key: str, run_id: str) -> None:
        now = self._guard.clock()
        with self._lock:
            self._names[key] = now, run_id
        ledger = self._guard.accounts.ledger
        if ledger.is_shared:
            ledger.tell(lambda session: session.append(KEY, key, f"{now} {run_id}"))

    async def named(self, keys: Iterable[str], info: RunInfo) -> str:
        """Return the name of the run of this user and session that was kept last under one of these keys, or "".

        Raises ``StoreOutage`` and ``StoreError``.
        """
        owned, ledger = [_owned(info, key) for key in keys], self._guard.accounts.ledger
        found = [known for key in owned if (known := self._names.get(key)) is not None]
        if owned and ledger.is_shared:
            texts: list[str] = []
            await ledger.ask(
                lambda session: texts.extend(text for key in owned for _, text in session.about(KEY, key, last=1)),
                again=True,
            )
            for text in texts:
                at, _, name = text.partition(" ")
                try:
                    found.append((float(at), name))
                except ValueError:
                    raise StoreError("the name of a paused run cannot be read") from None
        return max(found)[1] if found else ""

    def forget(self, keys: Iterable[str], info: RunInfo) -> None:
        """Forget the runs under these keys, where a new run begins."""
        for key in keys:
            with self._lock:
                known = self._names.pop(_owned(info, key), None)
            if known is not None:
                self.discard(replace(info, run=known[1]))

    # ---- the store's records: figures of runs that have ended or paused, signs of life of those at work ------------

    def write_end(self, run: Run, carries: bool = False) -> "Future[None] | None":
        """Write the figures of a run, and that it is not running any more.

        ``carries``: with what another worker needs to resume it. Returns a future that is done when that is written, or
        None where nothing is written.
        """
        ledger = self._guard.accounts.ledger
        if not ledger.is_shared or run.unsure:  # unsure: the record of what it used before is the better one
            return None
        spend = self._guard.accounts.spending.of_run(run.run_costs)
        facts = {**self._guard.facts_of(run), "in_flight": 0, "spend": spend}
        figures = json.dumps(facts, default=str)
        record = json.dumps({**facts, CARRIED: dump_run(run)}, default=str) if carries else figures
        written: Future[None] = Future()
        name = run.info.run  # the fact must not keep the run

        def write(session: StoreSession) -> None:
            try:
                session.append("run", name, record)
                session.beat(name, ledger.worker, figures, ended=True)
            except StoreOutage:
                raise  # the ledger tries again
            except BaseException:
                written.set_result(None)
                raise
            written.set_result(None)

        ledger.tell(write)
        return written

    def signs_of_life(self) -> Iterator[tuple[str, str]]:
        """Yield the runs of this process and their figures. After a fork, the parent reports its own runs."""
        now, here = self._guard.clock(), os.getpid()
        for run in [run for run in list(self._guard.runs.values()) if run.pid == here]:
            yield run.info.run, json.dumps(self._guard.facts_of(run, now), default=str)

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
        guard.sink.tell("run dropped", run)

    def discard(self, info: RunInfo) -> None:
        """Forget a run that cannot be resumed any more."""
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
        """Return the store's last record of a run, from whichever worker; None when there is none.

        Raise ``StoreOutage`` and ``StoreError``.
        """
        kept = self.find(info.run)
        if kept is not None and kept.written is not None and not kept.written.done():
            return None  # what is kept here is newer than anything in the store
        found: list[dict[str, Any]] = []
        await self._guard.accounts.ledger.ask(lambda session: found.extend(_records(session, info.run)), again=True)
        return found[-1] if found else None

    def resume(self, info: RunInfo, record: Mapping[str, Any] | None = None) -> Run | None:
        """Go on with a run: with what is kept here, and with what other workers have counted since. Return None when it
        is unknown.

        ``record``: the store's last one. Raises ``StoreError`` when it cannot be read.
        """
        if record is not None and not _belongs_to(record, info):
            info.run = f"{info.run}@{info.session}"
            return None
        if record is not None and CARRIED not in record:
            self.discard(info)  # another worker has brought it to its end
            return None
        run = self._take(info)
        if run is not None:
            _renew_limits(run, info)
            return self._go_on(run, record)
        return self._go_on(self._guard.start(info), record) if record is not None else None

    def _go_on(self, run: Run, record: Mapping[str, Any] | None) -> Run:
        now, written = self._guard.clock(), None
        run.pid, run.run_costs.over = os.getpid(), False
        run.run_costs.lines.clear()  # the policy may be another one by now
        run.go_on(now)
        if record is not None:
            try:
                if _pauses_of(record) > run.pauses:  # else what is kept here is as new, or has not been written yet
                    written = load_run(run, record, now)
            except StoreError:
                self._guard.runs.pop(run.info.run, None)
                self._guard.accounts.end(run.run_costs)
                raise
        if run.journal is not None:
            run.journal.resumed(now, written)
        self._guard.runs[run.info.run] = run
        return run


def _is_written(run: Run, done: "Future[None]") -> None:
    """Drop a future that is done. It holds on to the task that waited for it, and to all that the task knows."""
    if run.written is done:  # else the run has paused again
        run.written = None


def _owner(info: RunInfo) -> tuple[str, str, str]:
    return info.app, info.user, info.session


def _owned(info: RunInfo, key: str) -> str:
    """Return the name of a key of this user and session alone: a client may send the key of somebody else."""
    return digest("\0".join([*_owner(info), key])).hex()


def _renew_limits(run: Run, info: RunInfo) -> None:
    """Keep the limits and labels that a run began with; those named anew with the resume win."""
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
    """Return what the store has recorded about a run, oldest first."""
    found = []
    for _, text in session.about("run", run_id):
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            raise StoreError(f"the record of the run {printable(run_id)} cannot be read") from None
        if isinstance(record, dict):
            found.append(record)
    return found


# ---- What a run has used, as plain data in the store's record of it

CARRIED: Final = "carried"  # its key in the record of a run
_VERSION: Final = 1
_FIGURES: Final = len(fields(Entry))


def dump_run(run: Run) -> dict[str, Any]:
    """Return everything that counts toward the limits of a run and is not in its snapshot. JSON-ready.

    Another worker that resumes the run counts on from there: model calls, tool calls, calls of each tool, time, nudges,
    side effects on their way, the stop. What the loop rules remember stays on the worker that saw it.
    """
    info, tally = run.info, dict[tuple[str, str, str], Entry]()
    add_tally(tally, run.run_costs.inherited)
    add_tally(tally, run.run_costs.tally)
    return {
        "v": _VERSION,
        "pauses": run.pauses,
        "counted": {type(d).__name__: d.count for d in run.detectors if isinstance(d, ModelCalls | ToolCalls)},
        "tools": {
            tool: counted for d in run.detectors if isinstance(d, CallsPerTool) for tool, counted in d.dump().items()
        },
        "noted": [[rule, lane, key, int(action)] for rule, lane, key, action in run.noted],
        "once": {call.hex(): call_id for call, call_id in run.pending_once.items()},
        "stop": run.stopped.to_dict() if run.stopped is not None else None,
        "tally": [[*key, *astuple(entry)] for key, entry in tally.items()],
        "journal": list(run.journal.written) if run.journal is not None else None,
        "limits": [info.model_call_limit, info.max_usd, info.max_tokens],
        "labels": dict(info.labels or {}),
        **({"ceiling": list(info.ceiling)} if info.ceiling != (None, None) else {}),
    }


def _belongs_to(record: Mapping[str, Any], info: RunInfo) -> bool:
    """Return whether a record tells of a run of the same session: clients may send any invocation id."""
    return (record.get("app"), record.get("user"), record.get("session")) == _owner(info)


def _pauses_of(record: Mapping[str, Any]) -> int:
    """Return how often the run had paused when the record was written. Raise ``StoreError`` when it cannot be read."""
    try:
        return int(record[CARRIED]["pauses"])
    except (KeyError, TypeError, ValueError):
        raise StoreError("the record of a paused run cannot be read") from None


def load_run(run: Run, record: Mapping[str, Any], now: float) -> tuple[int, int] | None:
    """Make a run count on from a record: a new one, or one that was here before. Returns where the run's journal ended.

    Raises ``StoreError`` when the record cannot be read.
    """
    try:
        carried = record[CARRIED]
        if carried["v"] != _VERSION:
            raise ValueError(f"version {carried['v']!r}")
        _load_counts(run, record, carried)
        run.pauses = int(carried["pauses"])
        run.started = now - float(record["seconds"])
        if run.deadline is not None:
            run.deadline.started = run.started
        run.run_costs.inherit(_read_tally(carried["tally"]))
        _load_limits(run, carried)
        run.lift()
        if carried["stop"] is not None:
            trip = Trip.from_dict(carried["stop"])
            run.stop(trip)
            run.trips.append(trip)
        journal = carried["journal"]
        return (int(journal[0]), int(journal[1])) if journal is not None else None
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(
            f"the record of the paused run {run.info.run} cannot be read: {type(error).__name__}: {error}"
        ) from None


def _load_counts(run: Run, record: Mapping[str, Any], carried: Mapping[str, Any]) -> None:
    spend = run.spend
    spend.model_calls, spend.tool_calls = _count(record["model_calls"]), _count(record["tool_calls"])
    spend.prompt_tokens, spend.output_tokens = _count(record["prompt_tokens"]), _count(record["output_tokens"])
    run.nudges = _count(record["nudges"])
    for detector in run.detectors:
        if isinstance(detector, ModelCalls | ToolCalls):
            made = spend.model_calls if isinstance(detector, ModelCalls) else spend.tool_calls
            # the policy of the other worker may have had no such limit
            detector.count = _count(carried["counted"].get(type(detector).__name__, made))
        elif isinstance(detector, CallsPerTool):
            detector.load(carried["tools"])
    for rule, lane, key, action in carried["noted"]:
        run.noted[str(rule), str(lane), str(key), Action(action)] = None
    run.pending_once = {bytes.fromhex(call): str(call_id) for call, call_id in carried["once"].items()}


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _load_limits(run: Run, carried: Mapping[str, Any]) -> None:
    """Keep the limits and labels that a run began with; those named anew with the resume win."""
    info = run.info
    calls, usd, tokens = carried["limits"]
    info.max_usd = usd if info.max_usd is None else info.max_usd
    info.max_tokens = tokens if info.max_tokens is None else info.max_tokens
    info.labels = info.labels or carried["labels"]
    usd, tokens = carried.get("ceiling") or (None, None)
    info.ceiling = lower_ceiling(info.ceiling, (usd, tokens))
    run.run_costs.flat = flat_limits(info)
    if run.model_calls is not None and run.model_calls.limit == info.model_call_limit and calls:
        info.model_call_limit = run.model_calls.limit = calls


def _read_tally(rows: list[list[Any]]) -> Tally:
    return {
        (str(agent), str(model), str(tool)): Entry(*(int(figure) for figure in figures[:_FIGURES]))
        for agent, model, tool, *figures in rows
    }


# ---- A run that goes on


async def reopen(guard: "Guard", info: RunInfo, *, may_be_elsewhere: bool) -> Run | None:
    """Return the run of this name with everything that it has used, or None for a new one.

    ``may_be_elsewhere``: another worker of the store may have paused it. Where the store cannot say what it has used, a
    run comes back that is stopped or starts from zero, as in any outage.
    """
    record = None
    try:
        if guard.shares_store and (may_be_elsewhere or guard.pauses.find(info.run) is not None):
            record = await guard.pauses.latest(info)
        run = guard.runs.get(info.run) or guard.pauses.resume(info, record)  # the first: resumed twice at once
    except (StoreOutage, StoreError) as error:
        return begin_unsure(guard, info, error)
    if run is not None:
        await review_stops(guard, run)
    return run


def begin_unsure(guard: "Guard", info: RunInfo, error: Exception) -> Run:
    """Begin a run whose usage so far the store cannot tell. As in an outage, it stops or starts from zero."""
    run = guard.start(info)
    run.unsure = True
    guard.accounts.outages[guard.policy.on_outage] += 1
    if guard.policy.on_outage == "closed":
        event = ModelCall(info.run, ROOT_LANE, "", guard.clock())
        guard.stop(run, event, finding_of(Denied(outage=str(error)), event, guard.store_name))
    else:
        _log.warning(
            "runguard.resumed_unsure: the usage of a resumed run is unavailable; with on_outage=open it "
            "starts from zero: %s",
            error,
        )
    return run


# ---- Whether a stopped run that is resumed may go on


async def review_stops(guard: "Guard", run: Run) -> None:
    """Lift the stops of a resumed run whose cause is gone, and stop it when the kill switch was thrown meanwhile.

    A run stays stopped until its budget is extended. A stop of the kill switch is lifted when an operator has taken it
    back, and a stop because of an outage when the store answers again. Every other stop holds for the whole run: the
    user's next message begins a new one.
    """
    await guard.accounts.ledger.refresh()
    for trip in run.stops_in_force():
        if await is_over(guard, run, trip):
            run.lift_stop(trip)
    stop = guard.accounts.switch.of(scopes_of(run.info))
    if stop is not None and run.stopped is None:
        guard.stop(run, ModelCall(run.info.run, ROOT_LANE, "", guard.clock()), finding_of_stop(stop))


async def is_over(guard: "Guard", run: Run, trip: Trip) -> bool:
    """Return whether the cause of a stop is gone: the kill switch, an outage, or a cap that was raised."""
    if trip.rule == "kill_switch":
        return guard.accounts.switch.of(scopes_of(run.info)) is None
    if trip.unit == OUTAGES:
        return True  # the next call asks the store again
    if trip.rule != "budget" or trip.unit not in UNITS:
        return False
    unit = UNITS.index(trip.unit)
    try:
        return any(edge(unit, caps[unit]) > trip.limit for caps in await _caps_now(guard, run, trip))
    except Exception as error:  # a store that is away, or a cap function that failed
        _log.warning(
            "runguard.still_stopped: whether the budget of a stopped run was extended is not known, so it "
            "stays stopped: %s",
            type(error).__name__,
        )
        return False


async def _caps_now(guard: "Guard", run: Run, trip: Trip) -> list[Amount]:
    """Return the caps in force on the scope that stopped a run: what the policy allows, and what was granted on top."""
    accounts, ledger = guard.accounts, guard.accounts.ledger
    agent = trip.agent_path[-1] if trip.agent_path else ""
    run.run_costs.lines.clear()  # caps may be functions
    event = ModelCall(run.info.run, ROOT_LANE, agent, guard.clock(), trip.model or "")
    lines = accounts.finder.of_call(run.run_costs, event).accounts
    granted: dict[str, Amount] = {account.key: account.granted for account in lines if account.scope == trip.scope_id}
    allowed = {account.key: account.caps for account in lines if account.key in granted}
    if not ledger.is_shared:
        return list(allowed.values())
    stored: dict[str, Amount] = {}
    await ledger.ask(
        lambda session: stored.update({balance.key: balance.granted for balance in session.read(trip.scope_id)}),
        again=True,
    )
    return [_plus(caps, granted[key], stored.get(key, granted[key])) for key, caps in allowed.items()]


def _plus(caps: Amount, known: Amount, stored: Amount) -> Amount:
    usd, tokens, calls = (cap - before + now for cap, before, now in zip(caps, known, stored, strict=True))
    return usd, tokens, calls


# ---- A guard that takes over from another one: its policy was edited and loaded again


def retire(before: "Guard", heir: "Guard") -> None:
    """``heir`` is in charge now: the budgets that runs share have the heir's caps, also for the runs that ``before``
    still has.
    """
    if before.accounts.ledger is heir.accounts.ledger:
        before.accounts.adopt_shared_budgets(heir.accounts)
    elif before.accounts.switch.stops:  # another store: it does not know the stops
        stops = before.accounts.switch.stops
        heir.operator_stops.change(lambda known: {**stops, **known})
    if before.telemetry is not None:
        before.telemetry.drop(before)
