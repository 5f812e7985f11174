"""Replay every run of the sources under every policy."""

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from runguard.alerts.alert_settings import AlertSettings
from runguard.policy.settings import Policy
from runguard.replay.engine import Judge, play, quiet
from runguard.replay.processes import each_run
from runguard.replay.results import RunResult
from runguard.replay.sources import Source
from runguard.replay.steps import Faults, RecordedRun, UnreadableError

# Settings that a replay replaces, or that may work only in this process. The mode stays: reading a journal needs it.
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
    """The results of one piece of a source: for each run, one result per policy."""

    results: list[list[RunResult]]
    faults: Faults
    size: int


def replay(
    sources: Iterable[Source], policies: list[Policy], *, workers: int = 1, model: str = "", to_the_end: bool = False
) -> Iterator[Batch]:
    """Yield results in order, for any number of processes. ``model``: the model of recordings that do not name one.

    ``to_the_end``: continue after a stop, as a live guard in shadow mode does.
    """
    policies = [harmless(policy) for policy in policies]
    for worked in each_run(sources, _Playing, (policies, to_the_end), workers_for(policies, workers), model):
        yield Batch(worked.found, worked.faults, worked.size)


def replay_run(run: RecordedRun, policy: Policy) -> RunResult:
    """Replay one run in this process."""
    with quiet():
        return Judge(policy).play(run)


def harmless(policy: Policy) -> Policy:
    """Return the policy without store, alerts, telemetry, callbacks and clock."""
    return policy.model_copy(update=_HARMLESS)


def workers_for(policies: list[Policy], workers: int) -> int:
    """Return the number of processes: 1 if a policy has functions that another process cannot import."""
    if workers == 1:
        return 1
    try:
        given = pickle.dumps(policies)
        pickle.loads(given)
    except Exception:  # a lambda or an object with a lock; each raises its own exception
        return 1
    return 1 if b"__main__" in given else workers  # another process cannot import what a prompt or a notebook defines


class _Playing:
    def __init__(self, policies: list[Policy], to_the_end: bool) -> None:
        self._judges = [Judge(policy, to_the_end=to_the_end) for policy in policies]

    def __call__(self, run: RecordedRun) -> list[RunResult]:
        if run.unknown:
            raise UnreadableError("a run without steps cannot be replayed; 'runguard calibrate' reads it")
        return play(run, self._judges)
