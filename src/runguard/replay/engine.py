"""Recorded runs past policies: each policy judges in shadow mode, with the recorded time as its clock."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from runguard.engine.guard import Conductor
from runguard.engine.runs import LaneRules
from runguard.policy.settings import Policy
from runguard.pricing.book import Pricing
from runguard.replay.player import Player
from runguard.replay.results import RunResult
from runguard.replay.steps import RecordedRun
from runguard.reporting.alerts import AlertSettings
from runguard.reporting.telemetry import Outbox

# Settings that a replay replaces, or that may work only in this process. The mode stays: reading a journal needs it.
_HARMLESS: Final[dict[str, Any]] = {
    "store": "memory",
    "alerts": AlertSettings(),
    "telemetry": False,
    "on_trip": None,
    "on_decision": None,
    "clock": None,
}


def harmless(policy: Policy) -> Policy:
    """Return the policy without store, alerts, telemetry, callbacks and clock."""
    return policy.model_copy(update=_HARMLESS)


class Clock:
    """The time of the recording."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the guard from logging recorded runs as if they happened now."""
    log = logging.getLogger("runguard")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


class Judge:
    """A policy made harmless: it decides in shadow mode, keeps its accounts in memory and reports nothing."""

    def __init__(self, policy: Policy, *, to_the_end: bool = False) -> None:
        """``to_the_end``: judge also what a stopped run would not have reached, as a live guard in shadow mode does."""
        self.original, self.to_the_end = policy, to_the_end
        self.clock = Clock()
        self.policy = harmless(policy).model_copy(update={"mode": "shadow", "clock": self.clock})
        # one for all runs
        self.pricing = Pricing(policy.prices, policy.models, policy.unknown_price, policy.prices_source)
        self.lane_rules, self.outbox = LaneRules(self.policy), Outbox()
        self.watches_context = self.policy.rungs("context") is not None
        self._limits: dict[str, int | None] = {}

    def context_limit(self, guard: Conductor, model: str, answered: int) -> int | None:
        """``answered``: a prompt that the model took.

        Where it is larger than the window in the lists, the lists are wrong.
        """
        if model not in self._limits:
            if len(self._limits) > 1_000:
                self._limits.clear()
            self._limits[model] = guard.context_limit(model)
        limit, policy = self._limits[model], self.policy
        if (
            limit is not None
            and answered > limit + policy.context_headroom
            and policy.max_context_tokens is None
            and model not in policy.models
        ):
            limit = self._limits[model] = None
        return limit

    def play(self, run: RecordedRun) -> RunResult:
        return play(run, [self])[0]


def play(run: RecordedRun, judges: list[Judge]) -> list[RunResult]:
    """One walk through a recorded run, past every judge."""
    players = [Player(judge, run) for judge in judges]
    if len(players) == 1:
        feed = players[0].feed
        for step in run.steps:
            feed(step)
    else:
        for step in run.steps:
            for player in players:
                player.feed(step)
    return [player.finish() for player in players]
