"""The data of the page, from a view of the store.

Blocking: call it on threads. It reads the store once for all open browsers.
"""

import threading
import time
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

from runguard.core.errors import RunGuardError
from runguard.core.identity import Newest
from runguard.view.rows import plain
from runguard.view.store_view import StoreView

RANGES: Final = {"15m": 900.0, "1h": 3_600.0, "1d": 86_400.0, "7d": 604_800.0, "30d": 2_592_000.0}
_FRESH_S: Final = 1.0
_RESTS: Final = 5  # slow reads are made less often, because runs need the store more
_LONGEST_REST_S: Final = 20.0
_ANSWERS_KEPT: Final = 64
_ROWS: Final = 50


class Looks:
    """Caches results for a moment."""

    def __init__(self, view: StoreView) -> None:
        self._view = view
        self._lock = threading.Lock()
        self._kept = Newest[tuple[str, ...], tuple[float, Any]](_ANSWERS_KEPT)

    def overview(self, by: str, within: str) -> dict[str, Any]:
        view = self._view
        now = self._once(("now",), view.now)
        budgets = self._once(("budgets",), lambda: view.budgets(limit=_ROWS + 1))
        running = self._once(("running",), view.running)
        trips, costs = self._once(("trips",), self._trips)
        spend = self._once(("spend", by, within), lambda: view.spend(now - RANGES[within], now, by))
        stops, breakers = self._once(("control",), lambda: (view.stops(), view.breakers()))
        return {
            "store": view.name,
            "now": now,
            "spend": plain(spend),
            "budgets": plain(budgets[:_ROWS]),
            "budgets_left_out": len(budgets) > _ROWS,
            "running": plain(running[:_ROWS]),
            "running_left_out": max(len(running) - _ROWS, 0),
            "trips": [{**_line(trip), "usd": plain(costs[trip["id"]])} for trip in trips[:_ROWS]],
            "trips_left_out": len(trips) > _ROWS,
            "stops": [
                {"scope": stop.scope, "actor": stop.actor, "reason": stop.reason, "at": stop.at} for stop in stops
            ],
            "breakers": plain(breakers),
            "unreadable": view.unreadable.total,
            "is_empty": not (budgets or running or trips or view.calls_known),
        }

    def _trips(self) -> tuple[list[dict[str, Any]], dict[str, Decimal | None]]:
        trips = self._view.trips(_ROWS + 1)
        return trips, self._view.costs(trips[:_ROWS])

    def story(self, trip_id: str) -> dict[str, Any] | None:
        story = self._once(("story", trip_id), lambda: self._view.story(trip_id))
        return (
            None
            if story is None
            else {"store": self._view.name, "now": self._once(("now",), self._view.now), **plain(story)}
        )

    def _once(self, key: tuple[str, ...], ask: Callable[[], Any]) -> Any:
        with self._lock:
            kept = self._kept.get(key)
            if kept is None or time.monotonic() >= kept[0]:
                begin = time.monotonic()
                try:
                    answer = ask()
                except RunGuardError as error:  # waiting callers get the same error without another read
                    answer = error
                end = time.monotonic()
                kept = self._kept[key] = end + max(_FRESH_S, min(_RESTS * (end - begin), _LONGEST_REST_S)), answer
                self._kept.move_to_end(key)
        if isinstance(kept[1], RunGuardError):
            raise RunGuardError(str(kept[1]))
        return kept[1]


def _line(trip: dict[str, Any]) -> dict[str, Any]:
    """Return a trip as one line of the list."""
    names = (
        "id",
        "rule",
        "tool",
        "app",
        "user_id",
        "agent_path",
        "model_calls",
        "estimated",
        "at",
        "shadow",
        "branch",
        "message",
    )
    return {name: trip.get(name) for name in names}
