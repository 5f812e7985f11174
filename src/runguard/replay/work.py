"""Every run of the sources past every policy."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from runguard.policy import Policy
from runguard.replay.engine import Judge, play, quiet
from runguard.replay.processes import each_run
from runguard.replay.results import RunResult
from runguard.replay.sources import Source
from runguard.replay.steps import Faults, RecordedRun

_LEFT_OUT: Final = {"mode", "store", "alerts", "telemetry", "on_trip", "on_decision", "clock"}  # what a judge replaces anyway


@dataclass(slots=True)
class Batch:
    """The results of one piece: per run, one per policy."""

    results: list[list[RunResult]]
    faults: Faults
    size: int


def replay(sources: Iterable[Source], policies: list[Policy], *, workers: int = 1, model: str = "", to_the_end: bool = False) -> Iterator[Batch]:
    """In order, whatever the number of processes. ``model``: its name where a recording names none.

    ``to_the_end``: judge also what a stopped run would not have come to, as a live guard in the shadow does.
    """
    given = ([(policy.mode, settings_of(policy)) for policy in policies], to_the_end)
    for worked in each_run(sources, _Playing, given, workers, model):
        yield Batch(worked.found, worked.faults, worked.size)


def replay_run(run: RecordedRun, policy: Policy) -> RunResult:
    """One run, here and now."""
    with quiet():
        return Judge(policy).play(run)


def settings_of(policy: Policy) -> dict[str, Any]:
    """What of a policy matters to recorded runs, as plain values that another process can be given."""
    return policy.model_dump(exclude_unset=True, exclude=_LEFT_OUT)


class _Playing:
    def __init__(self, policies: list[tuple[str, dict[str, Any]]], to_the_end: bool) -> None:
        self._judges = [Judge(Policy.validated({**values, "mode": mode}, ""), to_the_end=to_the_end) for mode, values in policies]

    def __call__(self, run: RecordedRun) -> list[RunResult]:
        return play(run, self._judges)
