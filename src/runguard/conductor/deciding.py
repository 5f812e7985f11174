"""From a finding to a decision: what follows in this mode, whether it was reported before, and which scope a stop
ends. The only place where anything is decided.
"""

from collections import deque
from collections.abc import Mapping
from typing import Final

from runguard.conductor.faults import GuardFaults
from runguard.conductor.runs import Lane, Run
from runguard.conductor.sink import Decided, Sink
from runguard.conductor.trips import trip_of
from runguard.core.decision import ALLOW, Action, Decision, Finding, Trip, text_for_model
from runguard.core.events import Event, ModelCall
from runguard.policy.settings import Policy

# Members bound once: looking one up on its enum costs as much as the rest of a line.
_WARN, _NUDGE, _BLOCK, _STOP = Action.WARN, Action.NUDGE, Action.BLOCK, Action.STOP
_REPORTED_KEPT: Final = 256
_STOPPED_TEXT: Final = text_for_model(Finding("stopped", _STOP, 0, 0, ""))


class Deciding:
    """Decides by one policy and publishes every decision on the sink."""

    __slots__ = ("_advice", "_faults", "_policy", "_sink", "_trips", "enforces")

    def __init__(
        self, policy: Policy, advice: Mapping[str, str], sink: Sink, faults: GuardFaults, trips: deque[Trip]
    ) -> None:
        self._policy, self._advice, self._sink, self._faults, self._trips = policy, advice, sink, faults, trips
        self.enforces = policy.mode == "enforce"

    def stronger(self, before: Finding | None, found: Finding, event: Event) -> Finding:
        """Publish what one more detector of a lane found. Returns the stronger finding, of two equal ones the first."""
        if self._sink.watches_findings:
            self._sink.found(found, event)
        return found if before is None or found.action > before.action else before

    def decide(self, run: Run, lane: Lane, event: Event, finding: Finding) -> Decision:
        """What follows from a finding. A stop takes effect here."""
        action = finding.action
        if action is _STOP and type(event) is ModelCall and event.after_answer:
            action = _BLOCK  # the run has given its answer: only this call is refused
        if self._is_old_news(run, lane, finding, action):
            return ALLOW
        if action is _NUDGE:
            run.nudges += 1
        text = text_for_model(finding) if action >= _NUDGE else ""
        decision = Decision(action, finding, None, text, self.enforces)
        if action is _STOP:
            decision.trip = self._trip(run, lane, event, finding)
        # The decision holds, whether or not it can be reported.
        self._faults.attempt("reporting a decision", self._sink.decided, Decided(decision, finding, run, lane, event))
        return decision

    def _is_old_news(self, run: Run, lane: Lane, finding: Finding, action: Action) -> bool:
        """Whether a finding was reported before, or nothing may follow from it. Remembers it otherwise.

        Warnings and nudges are given once. Refusals and stops that are enforced repeat; in shadow mode each is
        reported once.
        """
        repeats = action > _NUDGE and self.enforces
        if repeats:
            return False
        mark = (finding.rule, "" if finding.scope == "run" else lane.first_key, finding.key, action)
        if mark in run.noted:
            return True
        if action is _WARN and finding.rule == "growth":
            # once per session, whichever of its runs and agents it is about
            if run.growth.warned:
                return True
            run.growth.warned = True
        if action is _NUDGE and run.nudges >= self._policy.max_nudges:
            return True
        run.noted[mark] = None
        if len(run.noted) > _REPORTED_KEPT:
            run.noted.popitem(last=False)
        return False

    def _trip(self, run: Run, lane: Lane, event: Event, finding: Finding) -> Trip:
        owner = lane.owner(finding) if finding.scope == "lane" else None
        for earlier in run.trips if finding.rule == "fan_out" else ():
            if earlier.rule == finding.rule and earlier.unit == finding.unit:
                # A surplus is one event however many branches it refuses.
                if owner is not None and self.enforces:
                    owner.stop(earlier)
                return earlier
        trip = self.describe(run, lane, event, finding)
        if self.enforces:
            (run if owner is None else owner).stop(trip)
            for visit in list(run.visits):
                visit.wake()  # a stopped call does not wait
        self._faults.attempt("recording a trip", self._record, run, trip, finding)
        return trip

    def _record(self, run: Run, trip: Trip, finding: Finding) -> None:
        run.trips.append(trip)
        self._trips.append(trip)
        self._sink.tripped(trip, finding)

    def describe(self, run: Run, lane: Lane, event: Event, finding: Finding) -> Trip:
        """A finding as a trip. Stops nothing and records nothing."""
        return trip_of(finding, run, lane, event, self._policy, self._advice)


def stop_in_force(trip: Trip | None) -> Decision:
    """The answer within a scope that was stopped before."""
    return Decision(_STOP, None, trip, _STOPPED_TEXT, enforced=True)
