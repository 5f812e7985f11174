"""Every run of the sources past every policy."""

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from runguard.alerts.settings import AlertSettings
from runguard.policy.settings import Policy
from runguard.replay.engine import Judge, play, quiet
from runguard.replay.processes import each_run
from runguard.replay.results import RunResult
from runguard.replay.sources import Source
from runguard.replay.steps import Faults, RecordedRun, UnreadableError

# What a judge replaces anyway, and what may be fit for this process alone. The mode stays: a journal is read by it.
_HARMLESS: Final[dict[str, Any]] = {
    "store": "memory",
    "alerts": AlertSettings(),
    "telemetry": False,
    "on_trip": None,
    "on_decision": None,
    "clock": None,
}


@dataclass(slots=True)
class Batch:
    """The results of one piece: per run, one per policy."""

    results: list[list[RunResult]]
    faults: Faults
    size: int


def replay(
    sources: Iterable[Source], policies: list[Policy], *, workers: int = 1, model: str = "", to_the_end: bool = False
) -> Iterator[Batch]:
    """In order, whatever the number of processes. ``model``: its name where a recording names none.

    ``to_the_end``: judge also what a stopped run would not have come to, as a live guard in the shadow does.
    """
    policies = [harmless(policy) for policy in policies]
    for worked in each_run(sources, _Playing, (policies, to_the_end), workers_for(policies, workers), model):
        yield Batch(worked.found, worked.faults, worked.size)


def replay_run(run: RecordedRun, policy: Policy) -> RunResult:
    """One run, here and now."""
    with quiet():
        return Judge(policy).play(run)


def harmless(policy: Policy) -> Policy:
    """What of a policy matters to recorded runs."""
    return policy.model_copy(update=_HARMLESS)


def workers_for(policies: list[Policy], workers: int) -> int:
    """As many processes as asked for, or this one alone where a policy has functions that no other process can find."""
    if workers == 1:
        return 1
    try:
        given = pickle.dumps(policies)
        pickle.loads(given)
    except Exception:  # a lambda, an object with a lock: each with its own exception
        return 1
    return 1 if b"__main__" in given else workers  # what a prompt or a notebook defines is there by name only


class _Playing:
    def __init__(self, policies: list[Policy], to_the_end: bool) -> None:
        self._judges = [Judge(policy, to_the_end=to_the_end) for policy in policies]

    def __call__(self, run: RecordedRun) -> list[RunResult]:
        if run.unknown:
            raise UnreadableError("a run without steps cannot be replayed; 'runguard calibrate' reads it")
        return play(run, self._judges)
