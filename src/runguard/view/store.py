"""``StoreView``: one read-only connection to a durable store.

Its methods block; any thread may call them, one at a time is served.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote

from runguard.core.errors import PolicyError
from runguard.core.money import UNITS, UNLIMITED, begin_of, edge
from runguard.engine.forecast import budget_forecast
from runguard.ledger.ledger import (
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
from runguard.ledger.memory import store_of
from runguard.ledger.redis import RedisSession
from runguard.ledger.sqlite import SqliteStore
from runguard.view.records import (
    Call,
    Unreadable,
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
from runguard.view.rows import BreakerRow, BudgetRow, RunningRow, Spend, Story
from runguard.view.spend_over_time import BY, CallLog, spend_of
from runguard.view.sqlite_look import SqliteLook
from runguard.view.story import build_story, cost_of

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
        if url == "memory":
            raise PolicyError(
                "store = 'memory' ends with its process, so other processes cannot read it; "
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
            try:
                return question(self._open())
            except StoreOutage:
                self._drop()
                if fresh:
                    raise
                try:
                    return question(self._open())  # a connection that broke while idle is not an outage
                except (StoreOutage, StoreError):
                    self._drop()
                    raise
            except Exception:
                self._drop()
                raise

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

    def spend(self, since: float, until: float | None = None, by: str = "app") -> Spend:
        """Return the spending between two times of the store's clock (until now), by app, agent, model or user."""
        if by not in BY:
            raise ValueError(f"by = {by!r}: one of {', '.join(BY)}")

        def read(session: StoreSession) -> Spend:
            self._log.refresh(session, self.unreadable)
            return spend_of(self._log, since, session.now() if until is None else until, by)

        return self._ask(read)

    def daily_sums(self, first: date, last: date) -> dict[str, DaySums]:
        """Return what calls took on each day (UTC) that has any, both ends included. ``view.bill`` groups it."""
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
