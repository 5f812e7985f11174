"""``StoreView``: one read-only connection to a durable store. The command line and the dashboard read through it.

Its methods block; any thread may call them, one at a time is served.
"""

import json
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote, unquote

from runguard.core.errors import PolicyError, did_you_mean
from runguard.core.money import UNITS, UNLIMITED, begin_of, budget_forecast, edge, scope_part, to_usd
from runguard.ledger.ledger import (
    COUNTS,
    Balance,
    DaySums,
    Stop,
    StoreError,
    StoreOutage,
    StoreSession,
    identity_of,
    read_control,
    read_stops,
    read_sums,
    store_faults,
)
from runguard.ledger.memory import in_memory, store_of
from runguard.ledger.redis import RedisSession
from runguard.ledger.sqlite import SqliteSession, SqliteStore, mapped_errors
from runguard.view.story import (
    BreakerRow,
    BudgetRow,
    Call,
    Figures,
    RunningRow,
    Spend,
    Story,
    Unreadable,
    build_story,
    cost_of,
    count,
    dollars,
    entries,
    latest,
    notes_of,
    number,
    read_call,
    read_forecast,
    table,
    whole,
    word,
)

_T = TypeVar("_T")
_ALIVE_S: Final = 10.0  # workers send a heartbeat every second
_TIMEOUT_S: Final = 5.0
_SETTLED_S: Final = 60.0  # after a stop: calls that were in flight have been booked by then
_COSTS_KEPT: Final = 1_000


class StoreView:
    """Connects on first use, and again after an outage.

    Raises ``StoreOutage`` and ``StoreError`` as the store does.
    """

    def __init__(self, url: str, timeout: float = _TIMEOUT_S) -> None:
        if in_memory(url):
            raise PolicyError(
                f"store = '{url}' ends with its process, so other processes cannot read it; "
                "name a durable store, in the policy or with --store: sqlite:///guard.db, redis://host:6379/0 or postgresql://user@host/database"
            )
        self._store, self._timeout = store_of(url), timeout
        self.name = self._store.name
        self._address = self.name if isinstance(self._store, SqliteStore) else url  # works from any folder
        self.unreadable = Unreadable()
        self._lock = threading.Lock()
        self._session: StoreSession | None = None
        self._log = CallLog()
        self._costs: dict[str, Decimal | None] = {}  # of trips, by id; only of runs whose calls are all booked

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _ask(self, question: Callable[[StoreSession], _T]) -> _T:
        with self._lock, store_faults(self.name):
            fresh = self._session is None
            while True:
                try:
                    return question(self._open())
                except Exception as error:
                    self._drop()
                    if fresh or not isinstance(error, StoreOutage):
                        raise
                    fresh = True  # a connection that broke while idle is not an outage

    def _open(self) -> StoreSession:
        if isinstance(self._store, SqliteStore):
            return self._open_file(self._store.path)
        if self._session is None:
            self._session = self._store.connect(self._timeout)
        return self._session

    def _open_file(self, path: Path) -> StoreSession:
        """Reconnect if the file was replaced since the last read."""
        if not path.is_file():
            self._drop()
            if not path.parent.is_dir():
                raise StoreError(
                    f"{self.name}: its folder {path.parent} does not exist; create the folder, or name another file"
                )
            raise StoreError(
                f"{self.name}: no such store; it is made by the first guarded run with store={self.name!r}"
            )
        if not (isinstance(self._session, SqliteLook) and self._session.is_of(path)):
            self._drop()
            self._session = SqliteLook(path, self._timeout)
        return self._session

    def now(self) -> float:
        """Return the time of the store's clock, which all its times use."""
        return self._ask(lambda session: session.now())

    def durability(self) -> str:
        """Return what survives which failure, in one sentence."""
        return self._store.durable

    def forgets_in_a_crash(self) -> bool | None:
        """Return whether a crash of a Redis or Valkey server loses what was booked; None if that is not known."""
        return self._ask(lambda session: isinstance(session, RedisSession) and session.forgets_in_a_crash())

    def identity(self) -> list[str]:
        """Return the id of the store, then the ids that it replaces; [""] for a store without an id."""
        return self._ask(lambda session: identity_of(session, self.name))

    def damage(self) -> str:
        """Return what is wrong with the control document; "" if nothing is."""
        try:
            self._ask(lambda session: read_control(session, self.name))
        except StoreError as error:
            return str(error)
        return ""

    # ---- money ------------------------------------------------------------------------------------------------------

    def budgets(self, *, ended_runs: bool = False, limit: int | None = None) -> list[BudgetRow]:
        """Return every budget in its current period, the fullest first; budgets of runs only while they run."""

        def read(session: StoreSession) -> tuple[float, list[tuple[float, str, int, Balance]]]:
            now, shown = session.now(), {None, *(run for run, *_ in session.running(_ALIVE_S))}
            current = (
                b
                for b in session.read()
                if (b.ends is None or b.ends > now) and (ended_runs or run_of(b.scope) in shown)
            )
            return now, [
                (-_share(b, unit), b.scope, unit, b)
                for b in current
                for unit, cap in enumerate(b.caps)
                if cap < UNLIMITED
            ]

        now, found = self._ask(read)
        found.sort(key=lambda entry: entry[:3])
        return [_budget(balance, unit, now) for _, _, unit, balance in found[:limit]]

    def spend(self, since: float, until: float | None = None, by: str = "app", scope: str = "") -> Spend:
        """Return the spending between two times of the store's clock (until now), by app, agent, model or user.

        ``scope``: only calls that have a scope which starts with this, as user:docs/alice. Calls tell their run, app,
        user, agent, model and tool; any other kind of scope filters nothing.
        """
        if by not in BY:
            raise ValueError(f"by = {by!r}: one of {', '.join(BY)}")

        def read(session: StoreSession) -> Spend:
            self._log.refresh(session, self.unreadable)
            return spend_of(self._log, since, session.now() if until is None else until, by, scope)

        return self._ask(read)

    def daily_sums(self, first: date, last: date) -> dict[str, DaySums]:
        """Return what calls took on each day (UTC) that has any, both ends included. ``bill_of`` groups it."""
        return self._ask(lambda session: read_sums(session, first, last))

    @property
    def calls_known(self) -> int:
        """Return how many calls the last read of the spending knew, of any time."""
        return len(self._log.calls)

    # ---- runs and trips ---------------------------------------------------------------------------------------------

    def running(self, within: float = _ALIVE_S) -> list[RunningRow]:
        """Return recently active runs, the longest running first."""
        now, found = self._ask(lambda session: (session.now(), session.running(within)))
        self.unreadable.counts["running"] = sum(table(text) is None for *_, text in found)
        rows = [_running(run, worker, max(now - at, 0.0), table(text) or {}) for run, worker, at, text in found]
        return sorted(rows, key=lambda row: -(row.seconds or 0.0))

    def trips(self, limit: int = 50) -> list[dict[str, Any]]:
        """Return the last trips, newest first, in the form of ``Trip.to_dict``;

        "shadow": decided and not carried out.
        """
        rows = self._ask(lambda session: session.tail("trip", limit))
        found = [_trip(at, ref, text) for at, ref, text in reversed(rows)]
        self.unreadable.counts["trip"] = found.count(None)
        return [trip for trip in found if trip is not None]

    def trip(self, trip_id: str) -> dict[str, Any] | None:
        rows = self._ask(lambda session: session.about("trip", trip_id))
        return next((trip for at, text in reversed(rows) if (trip := _trip(at, trip_id, text)) is not None), None)

    def costs(self, trips: Sequence[dict[str, Any]]) -> dict[str, Decimal | None]:
        """Return the cost of each trip's run up to the trip, by the trip's id, as in its story.

        The trip of a budget contains only the spending of the budget.
        """

        def read(session: StoreSession) -> dict[str, Decimal | None]:
            settled, found = session.now() - _SETTLED_S, {}
            for trip in trips:
                key = trip["id"]
                found[key] = (
                    self._costs[key]
                    if key in self._costs
                    else cost_of(trip, _calls(session, word(trip.get("run_id")))[0])
                )
                if trip["recorded_at"] < settled:
                    self._costs[key] = found[key]
            for key in list(self._costs)[:-_COSTS_KEPT]:
                del self._costs[key]
            return found

        return self._ask(read)

    def story(self, trip_id: str) -> Story | None:
        """Return the story of a trip, from its steps or else from its model calls; None if there is no such trip."""
        trip = self.trip(trip_id)
        if trip is None:
            return None
        run = word(trip.get("run_id"))
        (calls, lost), stepped = self._ask(lambda session: (_calls(session, run), session.about("steps", run)))
        steps = [entries(text) for _, text in stepped]
        self.unreadable.counts["story"] = lost + steps.count(None)
        return build_story(trip, calls, [entry for part in steps for entry in part or ()], self._address)

    # ---- what is in force -------------------------------------------------------------------------------------------

    def _control(self) -> dict[str, Any]:
        _, text = self._ask(lambda session: session.get("control"))
        found = table(text or "{}")
        self.unreadable.counts["control"] = int(found is None)
        return found or {}

    def breakers(self) -> list[BreakerRow]:
        """Return breakers with failures, open ones first."""
        stored = self._control().get("breakers")
        rows = [
            _breaker(tool, state)
            for tool, state in (stored.items() if isinstance(stored, dict) else ())
            if isinstance(state, dict)
        ]
        return sorted(
            (row for row in rows if row.state != "closed" or row.failures),
            key=lambda row: (row.state == "closed", row.tool),
        )

    def stops(self) -> list[Stop]:
        """Return the stops of the kill switch in force, newest first."""
        _, text = self._ask(lambda session: session.get("control"))
        try:
            stops = read_stops(text)
        except (ValueError, TypeError, AttributeError):
            self.unreadable.counts["control"] = 1
            return []
        return sorted(stops.values(), key=lambda stop: -stop.at)


def _calls(session: StoreSession, run: str) -> tuple[list[Call], int]:
    """Return the model calls of a run, and the number of unreadable records."""
    found = [read_call(at, run, text) for at, text in session.about("call", run)]
    return latest([call for call in found if call is not None]), found.count(None)


def run_of(scope: str) -> str | None:
    """Return the run of a scope, or None."""
    kinds, _, names = scope.partition(":")
    if "run" not in kinds:
        return None
    parts = kinds.split("+")
    if "run" not in parts:
        return None
    found = names.split("+") if len(parts) > 1 else [names]
    return unquote(found[parts.index("run")]) if len(found) == len(parts) else None


def _share(balance: Balance, unit: int) -> float:
    limit, used = balance.caps[unit] + balance.granted[unit], balance.spent[unit] + balance.held[unit]
    return used / limit if limit else float(used > 0)


def _budget(balance: Balance, unit: int, now: float) -> BudgetRow:
    forecast = None
    if balance.window is not None and balance.ends is not None:
        cap, begins = balance.caps[unit] + balance.granted[unit], begin_of(balance.window, balance.ends)
        forecast = budget_forecast(balance.spent[unit], cap, balance.spent[2], begins, now, balance.ends)
    return BudgetRow(
        balance.scope,
        balance.window,
        UNITS[unit],
        edge(unit, balance.caps[unit]),
        edge(unit, balance.granted[unit]),
        edge(unit, balance.spent[unit]),
        edge(unit, balance.held[unit]),
        edge(unit, balance.overrun[unit]),
        _share(balance, unit),
        balance.closed,
        balance.ends,
        forecast,
    )


def _running(run: str, worker: str, silent_s: float, facts: dict[str, Any]) -> RunningRow:
    tokens_in, tokens_out = whole(facts.get("prompt_tokens")), whole(facts.get("output_tokens"))
    return RunningRow(
        run,
        worker,
        silent_s,
        number(facts.get("seconds")),
        word(facts.get("app")),
        word(facts.get("user")),
        word(facts.get("session")),
        whole(facts.get("model_calls")),
        whole(facts.get("tool_calls")),
        tokens_in + tokens_out if tokens_in is not None and tokens_out is not None else None,
        whole(facts.get("in_flight")),
        dollars(facts.get("spent_usd")),
        dollars(facts.get("reserved_usd")),
        count(facts.get("unpriced_calls")),
        count(facts.get("estimated_calls")),
        count(facts.get("nudges")),
        word(facts.get("stopped")) or None,
        read_forecast(facts.get("forecast")),
        notes_of(facts),
        _waiting(facts.get("waiting")),
    )


def _waiting(found: Any) -> int:
    """Return how many calls of a run wait."""
    return (
        sum(count(entry.get("calls")) for entry in found if isinstance(entry, dict)) if isinstance(found, list) else 0
    )


def _trip(at: float, ref: str, text: str) -> dict[str, Any] | None:
    trip = table(text)
    if trip is None or not word(trip.get("rule")):
        return None
    return {**trip, "id": word(trip.get("id")) or ref, "recorded_at": at, "shadow": trip.get("enforced") is False}


def _breaker(tool: str, state: dict[str, Any]) -> BreakerRow:
    runs = state.get("runs")
    name = word(state.get("state")) or "closed"
    return BreakerRow(
        tool,
        name,
        count(state.get("failures")),
        len(runs) if isinstance(runs, list) else 0,
        number(state.get("opened_at")) or None,
    )


# ---- a read-only SQLite store: it creates, queues and charges nothing, and read permission is enough

_BESIDE: Final = (
    "while no run has the file open, SQLite must create another file next to it to read it: get write permission for "
    "its folder, or read a copy"
)


def _text(raw: bytes) -> str:
    """Decode a text; "" if it is damaged, because SQLite's own message would repeat all of it."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return ""


class SqliteLook(SqliteSession):
    """One read-only connection.

    Expired reservations are shown as reserved; the next guarded call charges them.
    """

    def __init__(self, path: Path, timeout: float) -> None:
        self._path, self._timeout, self._place, self._queue = path, timeout, str(path), None
        with mapped_errors(path):
            self._inode = path.stat().st_ino
            self._db = sqlite3.connect(
                f"file:{quote(str(path))}?mode=ro",
                timeout=timeout,
                isolation_level=None,
                check_same_thread=False,
                uri=True,
            )
            self._db.text_factory = _text
            try:
                if not self._is_ours():
                    raise StoreError(f"{path}: the store is empty; the first guarded run fills it")
            except sqlite3.OperationalError as error:
                self.close()
                if getattr(error, "sqlite_errorname", "").startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY")):
                    raise StoreError(f"{path}: {error}; {_BESIDE}") from error
                raise
            except BaseException:
                self.close()
                raise

    def is_of(self, path: Path) -> bool:
        """Return whether the file is still the one that was opened."""
        return path.stat().st_ino == self._inode

    @contextmanager
    def _write(self, *, count: bool = True) -> Iterator[float]:
        yield self.now()

    def _meet(self) -> None:
        """Skip the check of the store's id: any store may be read."""

    def _expire(self, now: float, *, everything: bool = False) -> None:
        pass


# ---- the calls of a store over time; each refresh reads only new records

CALLS_KEPT: Final = 20_000
TOOLS: Final = "(tools)"  # calls of tools that have a price, beside the models
OTHERS: Final = "others"
_FIRST_LOOK: Final = 256
_STEPS: Final = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3_600.0, 21_600.0, 86_400.0, 604_800.0)
_BUCKETS: Final = 60
_NAMES: Final = 7  # names with their own colour


class CallLog:
    """The last calls that a store recorded, oldest first."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.is_truncated = False  # the store has older calls
        self._last: list[tuple[float, str, str]] = []

    def refresh(self, session: StoreSession, unreadable: Unreadable) -> None:
        """Read new records: request a longer and longer tail until it contains the last known record."""
        size = _FIRST_LOOK
        while True:
            rows = session.tail("call", size)
            known = _end_of(rows, self._last)
            if known is not None or len(rows) < size or size >= CALLS_KEPT:
                break
            size = min(size * 8, CALLS_KEPT)
        if known is None:  # the first refresh, or too many new records: start over
            self.calls, known, unreadable.counts["call"] = [], 0, 0
            self.is_truncated = len(rows) >= CALLS_KEPT
        new_calls = [read_call(*row) for row in rows[known:]]
        unreadable.counts["call"] = unreadable.counts.get("call", 0) + new_calls.count(None)
        self.calls += [call for call in new_calls if call is not None]
        if len(self.calls) > CALLS_KEPT:
            self.calls, self.is_truncated = self.calls[-CALLS_KEPT:], True
        self._last = rows[-8:] or self._last


# What a call belongs to, by the property that spending is grouped by.
_PROPERTIES: Final[dict[str, Callable[[Call], str]]] = {
    "app": lambda call: call.app,
    "agent": lambda call: call.agent,
    "model": lambda call: TOOLS if call.is_tool else call.model,
    "user": lambda call: call.user,
    "tool": lambda call: call.tool,
}
BY: Final = tuple(_PROPERTIES)
# The names in a call's scope, by the kind of the scope. Other kinds are not told by calls.
_SCOPES: Final[dict[str, Callable[[Call], Sequence[str]]]] = {
    "run": lambda call: (call.run,),
    "app": lambda call: (call.app,),
    "user": lambda call: (call.app, call.user),
    "agent": lambda call: (call.app, call.agent),
    "tool": lambda call: (call.app, call.tool) if call.is_tool else (),
    "model": lambda call: () if call.is_tool else (call.model,),
}


def _end_of(rows: Sequence[tuple[float, str, str]], last: Sequence[tuple[float, str, str]]) -> int | None:
    """Return the position after the last known records, or None if they are not in ``rows``."""
    if not last:
        return None
    for end in range(len(rows), len(last) - 1, -1):
        if rows[end - 1] == last[-1] and list(rows[end - len(last) : end]) == list(last):
            return end
    return None


def spend_of(log: CallLog, since: float, until: float, by: str, scope: str = "") -> Spend:
    """Sum up the calls of a period, and of a scope, in buckets that begin at multiples of the step."""
    until = max(until, since + 1.0)
    step = next((step for step in _STEPS if (until - since) / step <= _BUCKETS), (until - since) / _BUCKETS)
    first = since // step * step
    begins = tuple(first + step * number for number in range(int((until - first) // step) + 1))
    calls = [call for call in latest(log.calls) if since <= call.at <= until]
    kind = scope.partition(":")[0]
    if (names_of := _SCOPES.get(kind)) is not None:
        keyed = ((call, f"{kind}:{'/'.join(map(scope_part, names))}") for call in calls if (names := names_of(call)))
        calls = [call for call, key in keyed if key.startswith(scope)]
    property_of = _PROPERTIES[by]
    named: defaultdict[str, list[Call]] = defaultdict(list)
    for call in calls:
        named[property_of(call)].append(call)
    totals = sorted(
        (_figures(name, found) for name, found in named.items()),
        key=lambda figures: (-figures.usd, -figures.tokens, figures.name),
    )
    names = [figures.name for figures in totals]
    lines = [named[name] for name in names]
    if len(names) > _NAMES + 1:
        names = [*names[:_NAMES], OTHERS]
        lines = [*lines[:_NAMES], [call for line in lines[_NAMES:] for call in line]]
    nanos, tokens = ([[0] * len(begins) for _ in names] for _ in range(2))
    for position, line in enumerate(lines):
        for call in line:
            bucket = min(int((call.at - first) // step), len(begins) - 1)
            nanos[position][bucket] += call.nano or 0
            tokens[position][bucket] += call.tokens_in + call.tokens_out
    reaches_back = not log.is_truncated or (bool(log.calls) and log.calls[0].at <= since)
    return Spend(
        by,
        since,
        until,
        step,
        begins,
        tuple(names),
        tuple(tuple(nano / 1e9 for nano in row) for row in nanos),
        tuple(map(tuple, tokens)),
        tuple(totals),
        _figures("", calls),
        None if reaches_back else len(log.calls),
        "" if names_of is None else scope,
    )


def _figures(name: str, calls: Sequence[Call]) -> Figures:
    return Figures(
        name,
        to_usd(sum(call.nano or 0 for call in calls)),
        sum(call.tokens_in + call.tokens_out for call in calls),
        sum(not call.is_tool for call in calls),
        sum(call.nano is None for call in calls),
        sum(call.estimated for call in calls),
        sum(call.is_tool for call in calls),
    )


# ---- what the calls cost, grouped for a bill: by day, app, user, agent, model, tool or label

NAMES: Final = ("app", "user", "agent", "model", "tool")
GROUPS: Final = ("day", *NAMES)


@dataclass(frozen=True, slots=True)
class BillRow:
    """The calls of one group. ``names`` are in the order that was asked for."""

    names: tuple[str, ...]
    calls: int  # of models
    tool_calls: int  # of tools that have a price
    input_tokens: int
    output_tokens: int
    usd: Decimal  # exact; without the calls that have no price
    unpriced: int  # calls without a price
    estimated: int  # calls whose usage or price is an estimate


def check_groups(by: Sequence[str]) -> tuple[str, ...]:
    """Return the groups, each once; raise ``PolicyError`` for an unknown one."""
    for name in by:
        if name not in GROUPS and not (name.startswith("label:") and name != "label:"):
            raise PolicyError(f"cannot group by {name!r}; {did_you_mean(name, (*GROUPS, 'label:NAME'))}")
    return tuple(dict.fromkeys(by))


def bill_of(days: Mapping[str, DaySums], by: Sequence[str]) -> tuple[list[BillRow], BillRow]:
    """Return the rows of a bill, the most expensive first, and their total."""
    groups: dict[tuple[str, ...], list[int]] = {}
    total = [0] * len(COUNTS)
    for day, sums in days.items():
        for key, counts in sums.rows.items():
            facts = {"day": day, **dict(zip(NAMES, key, strict=False))}
            labels: dict[str, Any] = json.loads(key[-1]) if key[-1] else {}
            names = tuple(facts[name] if name in facts else str(labels.get(name[6:], "")) for name in by)
            row = groups.setdefault(names, [0] * len(COUNTS))
            for position, amount in enumerate(counts):
                row[position] += amount
                total[position] += amount
    rows = [_row(names, counts) for names, counts in groups.items() if any(counts)]
    return sorted(rows, key=lambda row: (-row.usd, row.names)), _row(("",) * len(by), total)


def _row(names: tuple[str, ...], counts: Sequence[int]) -> BillRow:
    calls, tokens_in, tokens_out, nano, unpriced, estimated, tool_calls = counts
    return BillRow(names, calls, tool_calls, tokens_in, tokens_out, to_usd(nano), unpriced, estimated)
