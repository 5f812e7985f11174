"""What a fault of the guard itself means for a run: it goes on or stops, as the policy says."""

from collections import deque
from collections.abc import Callable

from runguard.conductor.deciding import Deciding
from runguard.conductor.faults import GuardFaults
from runguard.conductor.runs import Run
from runguard.conductor.trips import guard_error_trip
from runguard.core.decision import Action, Finding, Trip
from runguard.core.events import ROOT_LANE, ModelCall
from runguard.ledger.ledger import StoreError, StoreOutage
from runguard.policy.settings import Policy


class OwnFaults:
    """Counts the faults of one guard and stops runs where the policy says so."""

    def __init__(
        self,
        policy: Policy,
        clock: Callable[[], float],
        runs: dict[str, Run],
        trips: deque[Trip],
        deciding: Deciding,
        faults: GuardFaults,
    ) -> None:
        self._policy, self._clock, self._runs, self._trips = policy, clock, runs, trips
        self._deciding, self._faults, self.attempt = deciding, faults, faults.attempt

    def fault(self, where: str, error: Exception, run_id: str = "", agent: str = "") -> Trip | None:
        """Count and log a fault. Stops the run where the policy says so and returns why; None: go on."""
        self._faults.note(where, error)
        return self.stop_after(where, error, run_id, agent)

    def stop_after(self, where: str, error: Exception, run_id: str, agent: str = "") -> Trip | None:
        """Like ``fault``, for a fault that is already counted."""
        if self.goes_on_after(error):
            return None
        try:
            return self.fail(run_id, "guard_error", f"{where}: {type(error).__name__}", agent)
        except Exception as second:
            self._faults.note("stopping", second)
            return None

    def goes_on_after(self, error: Exception) -> bool:
        """Whether a call is made that could not be judged.

        A fault of the store follows ``on_outage``, any other ``on_guard_error``.
        """
        if not self._deciding.enforces:
            return True
        if isinstance(error, StoreError | StoreOutage):
            return self._policy.on_outage == "open"
        return self._policy.on_guard_error == "allow"

    def give_up(self, where: str, error: Exception, run_id: str = "", agent: str = "") -> Trip | None:
        """Like ``fault``, for a call that is about to be made. It returns a reason to refuse the call even where the
        run could not begin.
        """
        trip = self.fault(where, error, run_id, agent)
        if trip is None and not self.goes_on_after(error):
            try:
                at = self._clock()
            except Exception as second:  # the call is refused all the same
                self._faults.note("the clock", second)
                at = 0.0
            trip = guard_error_trip(f"{where}: {type(error).__name__}", run_id, self._policy, at)
            self._trips.append(trip)
        return trip

    def fail(self, run_id: str, rule: str, message: str, agent: str = "") -> Trip | None:
        """Stop a run for the guard's own sake: a broken policy, or a fault under ``on_guard_error="block"``."""
        run = self._runs.get(run_id)
        if run is None or run.stopped is not None:
            return run.stopped if run else None
        event = ModelCall(run_id, ROOT_LANE, agent, self._clock())
        finding = Finding(rule, Action.STOP, 1, 0, "errors", "run", detail=message)
        return self._deciding.decide(run, run.lanes[ROOT_LANE], event, finding).trip
