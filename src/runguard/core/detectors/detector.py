"""What every rule looks like."""

from typing import Any, ClassVar, Protocol

from runguard.core.decision import Finding


class Detector(Protocol):
    """``sees`` names the event types that it observes."""

    sees: ClassVar[tuple[type, ...]]

    def observe(self, event: Any, /) -> Finding | None: ...
