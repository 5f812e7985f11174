"""The one way out for what a guard finds and decides.

The journal, the log, callbacks, alerts, telemetry, replay, termination conditions and adapters subscribe here::

    guard.sink.on_decided("my adapter", lambda decided: show(decided.decision))
    guard.sink.on_trip("my adapter", lambda trip, finding: print(trip))

Subscribers run in the order in which they subscribed, on the path of the call, so they must be quick: whatever takes
time hands its work to a thread of its own. A subscriber that raises is counted as a fault of the guard. It changes
neither the decision nor what the other subscribers receive.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runguard.conductor.faults import GuardFaults
from runguard.conductor.runs import Lane, Run
from runguard.core.decision import Decision, Finding, Trip
from runguard.core.events import Event


@dataclass(slots=True)
class Decided:
    """A decision other than "allow", with the event that led to it and where that happened."""

    decision: Decision
    finding: Finding
    run: Run
    lane: Lane
    event: Event


OnFound = Callable[[Finding, Event], None]
OnDecided = Callable[[Decided], None]
OnTrip = Callable[[Trip, Finding], None]


class Sink:
    """Passes findings, decisions and trips on to subscribers. Each subscriber gives its name for the log."""

    __slots__ = ("_decided", "_faults", "_found", "_trips", "watches_findings")

    def __init__(self, faults: GuardFaults) -> None:
        self._faults = faults
        self._found: list[tuple[str, OnFound]] = []
        self._decided: list[tuple[str, OnDecided]] = []
        self._trips: list[tuple[str, OnTrip]] = []
        self.watches_findings = False

    def on_found(self, name: str, subscriber: OnFound) -> None:
        """Call ``subscriber`` with every finding of a detector, also with those that decide nothing."""
        self._found.append((name, subscriber))
        self.watches_findings = True

    def on_decided(self, name: str, subscriber: OnDecided) -> None:
        """Call ``subscriber`` with every decision other than "allow", once, where it is made.

        A refusal because of a stop in force is not a new decision.
        """
        self._decided.append((name, subscriber))

    def on_trip(self, name: str, subscriber: OnTrip) -> None:
        """Call ``subscriber`` with every new trip and the finding that it describes, before the decision itself."""
        self._trips.append((name, subscriber))

    def found(self, finding: Finding, event: Event) -> None:
        self._publish(self._found, finding, event)

    def decided(self, decided: Decided) -> None:
        self._publish(self._decided, decided)

    def tripped(self, trip: Trip, finding: Finding) -> None:
        self._publish(self._trips, trip, finding)

    def _publish(self, subscribers: list[tuple[str, Any]], *facts: Any) -> None:
        for name, subscriber in subscribers:
            try:
                subscriber(*facts)
            except Exception as error:
                self._faults.note(name, error)
