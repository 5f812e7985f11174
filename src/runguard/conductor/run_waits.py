"""The waiting calls of the runs of one guard: how long they may wait, who waits for what, and the report of it."""

import logging
import math
from collections.abc import Callable
from typing import Final

from runguard.accounting.charges import Charge
from runguard.accounting.waiting_calls import Opening, Visit
from runguard.conductor.deciding import Deciding
from runguard.conductor.faults import GuardFaults
from runguard.conductor.runs import Run
from runguard.core.decision import Action, Finding, Money
from runguard.core.events import ModelCall
from runguard.core.money import UNITS, edge, to_usd

_log: Final = logging.getLogger("runguard")


class RunWaits:
    """Listens to the accounts. A fault here ends no wait and no run."""

    def __init__(
        self, clock: Callable[[], float], runs: dict[str, Run], deciding: Deciding, faults: GuardFaults
    ) -> None:
        self._clock, self._runs, self._deciding, self._faults = clock, runs, deciding, faults
        self.waited_s = 0.0  # of all calls, or what they would have waited in shadow mode
        self.calls = 0

    def seconds_left(self, charge: Charge) -> float:
        run = self._runs.get(charge.run_costs.info.run)
        return self.left_of(run) if run is not None else math.inf

    def left_of(self, run: Run) -> float:
        """The time until the deadline of a run."""
        if run.deadline is None:
            return math.inf
        return run.deadline.started + run.deadline.seconds - self._clock()

    def began(self, visit: Visit) -> None:
        run = self._runs.get(visit.charge.run_costs.info.run)
        if run is not None:
            run.visits[visit] = None
            if visit.opening is not None:
                self._faults.attempt("reporting a wait", self._report, run, visit.charge, visit.opening, "waits")

    def ended(self, visit: Visit, seconds: float) -> None:
        charge, opening = visit.charge, visit.opening
        run = self._runs.get(charge.run_costs.info.run)
        if run is not None:
            run.visits.pop(visit, None)
        self.note(charge.agent, seconds, opening.text if opening is not None else "its turn")

    def note(self, agent: str, seconds: float, what: str, verb: str = "waited") -> None:
        """Count and log a call that has waited."""
        self.calls, self.waited_s = self.calls + 1, self.waited_s + seconds
        _log.info("runguard.waited: a call of agent '%s' %s %.1f s for %s", agent, verb, seconds, what)

    def skipped(self, charge: Charge, opening: Opening) -> None:
        self.calls, self.waited_s = self.calls + 1, self.waited_s + opening.seconds
        run = self._runs.get(charge.run_costs.info.run)
        if run is not None:
            run.skipped_waits_s += opening.seconds
            self._faults.attempt("reporting a wait", self._report, run, charge, opening, "would wait")

    def _report(self, run: Run, charge: Charge, opening: Opening, verb: str) -> None:
        """Once per run and account."""
        account, unit = opening.account, opening.unit
        detail = f"a call {verb} up to {opening.seconds:.0f} s for {opening.text}"
        spent, held = to_usd(account.spent_usd), to_usd(account.due_usd - account.spent_usd)
        money = Money(account.scope.partition(":")[0], account.scope, spent, held, account.ends)
        observed, limit = edge(unit, account.spent[unit]), edge(unit, account.caps[unit])
        facts = (observed, limit, UNITS[unit], "run", "", f"wait:{account.meter}", detail)
        finding = Finding("budget", Action.WARN, *facts, money=money)
        lane = run.lane(charge.lane)
        event = ModelCall(run.info.run, lane.key, charge.agent, self._clock(), charge.model)
        self._deciding.decide(run, lane, event, finding)
