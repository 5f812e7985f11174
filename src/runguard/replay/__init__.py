"""Recorded runs through the same guard as live ones: what would it have said and stopped, where, and what came after.

``runguard replay SOURCE`` on the command line; ``replay`` and ``open_sources`` from code.
"""

from runguard.replay.results import RunResult, Verdict
from runguard.replay.sources import open_sources
from runguard.replay.steps import RecordedRun, UnreadableError
from runguard.replay.work import Batch, replay, replay_run

__all__ = ["Batch", "RecordedRun", "RunResult", "UnreadableError", "Verdict", "open_sources", "replay", "replay_run"]
