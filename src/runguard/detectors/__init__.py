"""Rules as small pure objects: ``observe(event) -> Finding | None``; constructor arguments are the configuration.

A detector lives in one lane of one run (or, where it says so, in the run as a whole), sees events in order, keeps a bounded
state, reads no clock and does no I/O. It answers with the strongest rung its count has reached; what is done about it, and
whether it is done at all, is the policy's business.
"""

from typing import Any, ClassVar, Protocol

from runguard.decision import Finding
from runguard.detectors.context import Context
from runguard.detectors.failures import EmptyAnswers, EqualAnswers, Stall, ToolFailures
from runguard.detectors.growth import Growth
from runguard.detectors.handoffs import Depth, HandOffCycle, HandOffRounds, ReEntry
from runguard.detectors.limits import CallsPerTool, Deadline, FanOut, ModelCalls, ResultSize, ToolCalls
from runguard.detectors.repetition import Cycle, NoNews, Polling, Repetition, SameCall


class Detector(Protocol):
    """What every rule looks like. ``sees`` names the event types it wants."""

    sees: ClassVar[tuple[type, ...]]

    def observe(self, event: Any, /) -> Finding | None: ...


__all__ = [
    "CallsPerTool",
    "Context",
    "Cycle",
    "Deadline",
    "Depth",
    "Detector",
    "EmptyAnswers",
    "EqualAnswers",
    "FanOut",
    "Growth",
    "HandOffCycle",
    "HandOffRounds",
    "ModelCalls",
    "NoNews",
    "Polling",
    "ReEntry",
    "Repetition",
    "ResultSize",
    "SameCall",
    "Stall",
    "ToolCalls",
    "ToolFailures",
]
