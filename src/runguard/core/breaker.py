"""The circuit breaker of one tool or model, shared by all runs: a state machine on one screen.

``engine/decide`` keeps one for each tool and model, and ``ledger/ledger`` shares their states between processes.

Closed lets calls through and counts hard failures in a row. Enough of them, from enough different runs, open it: one
run with bad arguments must not close a tool for everybody. After ``reset_after_s`` exactly one probe is let through,
whatever the concurrency; its success closes the breaker, its failure opens it again. Time is an argument. Every opening
and closing starts a new generation, and a report from an older one is ignored: a late result cannot corrupt the state.

        failures >= threshold, runs >= min_runs
    CLOSED ────────────────────────────────────▶ OPEN ──── reset_after_s ────▶ HALF_OPEN
       ▲                                          ▲                               │
       └───────────── probe succeeded ────────────┼───────────────────────────────┤
                                                  └──────── probe failed ─────────┘
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    FORCED_OPEN = "forced_open"  # a public name for matches over all states; nothing opens a breaker by hand


@dataclass(slots=True)  # not frozen: one is handed out per tool call, and freezing quadruples its cost
class Permit:
    """The permission for one call.

    ``report`` it once. An unreported probe expires and is given to the next caller.
    """

    generation: int
    probe: bool = False


_RUNS_KEPT: Final = 64


@dataclass(slots=True)
class Breaker:
    threshold: int = 5
    min_runs: int = 2
    reset_after_s: float = 60.0
    _state: BreakerState = BreakerState.CLOSED
    _generation: int = 0
    _failures: int = 0
    _runs: set[str] = field(default_factory=set)
    _opened_at: float = 0.0
    _probe_at: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def state(self, now: float) -> BreakerState:
        """Return the state as of ``now``; an open breaker whose time is up shows as half-open."""
        with self._lock:
            return self._state_locked(now)

    def admit(self, now: float) -> Permit | None:
        """Return a permit to call, or None while the breaker is open or its one probe is out."""
        if self._state is BreakerState.CLOSED:
            return Permit(self._generation)  # the common case takes no lock: one attribute read
        with self._lock:
            state = self._state_locked(now)
            if state is BreakerState.CLOSED:
                return Permit(self._generation)
            if state is not BreakerState.HALF_OPEN:
                return None
            if self._probe_at is not None and now - self._probe_at < self.reset_after_s:
                return None
            self._probe_at = now
            self._generation += 1  # an expired probe's late report must not count for this one
            return Permit(self._generation, probe=True)

    def report(self, permit: Permit, ok: bool, now: float, run: str = "") -> None:
        """Take in how the permitted call ended. Reports from an older generation are ignored.

        ``run``: the run that made the call, because only failures of ``min_runs`` different runs open the breaker.
        """
        if ok and not self._failures and self._state is BreakerState.CLOSED:
            return
        with self._lock:
            if permit.generation != self._generation:
                return
            if permit.probe:
                self._set_locked(BreakerState.CLOSED if ok else BreakerState.OPEN, now)
            elif self._state is BreakerState.CLOSED:
                if ok:
                    self._failures = 0
                    self._runs.clear()
                    return
                self._failures += 1
                if len(self._runs) < _RUNS_KEPT:
                    self._runs.add(run)
                if self._failures >= self.threshold and len(self._runs) >= self.min_runs:
                    self._set_locked(BreakerState.OPEN, now)

    def release(self, permit: Permit) -> None:
        """Give back the permit of a call that was not made or was cancelled. A probe goes to the next caller."""
        with self._lock:
            if permit.probe and permit.generation == self._generation:
                self._probe_at = None

    def retry_after(self, now: float) -> float:
        """Return the seconds until a probe may be tried."""
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return 0.0
            since = self._opened_at if self._probe_at is None else self._probe_at  # an unreported probe expires as well
            return max(0.0, since + self.reset_after_s - now)

    @property
    def is_pristine(self) -> bool:
        """Whether it is closed and no failure is counted."""
        return self._state is BreakerState.CLOSED and not self._failures

    def permit(self) -> Permit:
        """Return the permit of a call that a copy of this breaker has let through."""
        return Permit(self._generation)

    def dump(self) -> dict[str, Any]:
        """Return the state as plain data, for a store that shares it."""
        with self._lock:
            return {
                "state": self._state.value,
                "generation": self._generation,
                "failures": self._failures,
                "runs": sorted(self._runs),
                "opened_at": self._opened_at,
                "probe_at": self._probe_at,
            }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a dumped state. An empty one changes nothing; a damaged one raises and changes nothing."""
        if not state:
            return
        name, generation, failures, runs = (
            BreakerState(state["state"]),
            int(state["generation"]),
            int(state["failures"]),
            set(map(str, state["runs"])),
        )
        opened_at, probe_at = float(state["opened_at"]), None if state["probe_at"] is None else float(state["probe_at"])
        with self._lock:  # only after all of it was read, so that a damaged state changes nothing
            self._state, self._generation, self._failures, self._runs = name, generation, failures, runs
            self._opened_at, self._probe_at = opened_at, probe_at

    def _state_locked(self, now: float) -> BreakerState:
        if self._state is BreakerState.OPEN and now - self._opened_at >= self.reset_after_s:
            self._state = BreakerState.HALF_OPEN
            self._probe_at = None
        return self._state

    def _set_locked(self, state: BreakerState, now: float) -> None:
        self._state = state
        self._generation += 1
        self._failures = 0
        self._runs.clear()
        self._probe_at = None
        if state is not BreakerState.CLOSED:
            self._opened_at = now
