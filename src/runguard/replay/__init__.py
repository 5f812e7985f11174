"""Recorded runs through the same guard as live ones: what would it have said and stopped, where, and what came after.

``runguard replay SOURCE`` on the command line; ``replay`` and ``open_sources`` from code.
"""

from typing import TYPE_CHECKING

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.replay.player import Batch, replay, replay_run
    from runguard.replay.results import RunResult, Verdict
    from runguard.replay.sources import open_sources
    from runguard.replay.steps import RecordedRun, UnreadableError

_HOMES = {
    "RunResult": "runguard.replay.results",
    "Verdict": "runguard.replay.results",
    "open_sources": "runguard.replay.sources",
    "RecordedRun": "runguard.replay.steps",
    "UnreadableError": "runguard.replay.steps",
    "Batch": "runguard.replay.player",
    "replay": "runguard.replay.player",
    "replay_run": "runguard.replay.player",
}

__all__ = ["Batch", "RecordedRun", "RunResult", "UnreadableError", "Verdict", "open_sources", "replay", "replay_run"]

__getattr__, __dir__ = lazy(__name__, _HOMES)
