"""What every rule looks like."""

from collections.abc import Sized
from typing import Any, ClassVar, Protocol

from runguard.core.decision import Finding


class Detector(Protocol):
    """``sees`` names the event types that it observes."""

    sees: ClassVar[tuple[type, ...]]

    def observe(self, event: Any, /) -> Finding | None: ...


class Resting(Detector, Protocol):
    """A detector that need not be called for most events, because most of them are plain: a model is called, its
    response calls tools, and the tools give new answers without a failure.

    ``rests`` names the event types of which a plain event changes nothing while ``record`` is empty. ``record`` is
    always the same object.
    """

    rests: ClassVar[tuple[type, ...]]

    @property
    def record(self) -> Sized: ...
