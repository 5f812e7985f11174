"""A run or a lane that a trip can stop. The only place that writes ``stopped``."""

from runguard.core.decision import Trip


class Stoppable:
    """``stopped`` is the trip in force, or None. A stop stays until ``lift``."""

    __slots__ = ("stopped",)

    def __init__(self) -> None:
        self.stopped: Trip | None = None

    def stop(self, trip: Trip) -> None:
        """Refuse everything from here on."""
        self.stopped = trip

    def lift(self) -> None:
        """Take the stop back, whatever its cause."""
        self.stopped = None

    def is_stopped_by(self, trip: Trip) -> bool:
        return self.stopped is not None and self.stopped.id == trip.id
