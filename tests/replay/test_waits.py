"""A replay does not wait: it counts how long calls would have waited."""

from typing import Any

from runguard import Budget
from runguard.policy import Policy
from runguard.pricing.rates import Usage
from runguard.replay.player import Judge
from runguard.replay.results import RunResult, Totals
from runguard.replay.steps import Asked, RecordedRun, Turn


def replayed(every_s: float, **policy: Any) -> RunResult:
    """Six calls, from a full minute on."""
    steps: list[Any] = [Turn(600_000.0, "r")]
    steps += [Asked(600_000.0 + (n + 1) * every_s, "a", model="m", usage=Usage(100, 10)) for n in range(6)]
    budget = Budget(calls=2, per="model", window="1m", on_exhausted="wait")
    return Judge(Policy.validated({"budgets": [budget], **policy}, "")).play(RecordedRun("r", steps=iter(steps)))


def test_calls_that_would_have_waited_are_counted_with_their_time() -> None:
    result = replayed(every_s=1.0)
    assert result.first("stop") is None
    # the third call comes two seconds after the full minute, the fifth within the time that the third has waited
    assert result.to_dict()["waited"] == {"calls": 2, "seconds": 118.0}
    totals = Totals("policy")
    totals.add(result)
    assert totals.all.to_dict()["waited"] == {"calls": 2, "seconds": 118.0}


def test_calls_within_the_limit_do_not_wait() -> None:
    result = replayed(every_s=40.0)
    assert (result.waited.calls, result.verdicts) == (0, [])
    assert "waited" not in result.to_dict()


def test_a_wait_beyond_the_bound_is_a_stop() -> None:
    stop = replayed(every_s=1.0, max_wait_seconds=5).first("stop")
    assert stop is not None
    assert (stop.rule, stop.turn) == ("budget", 2)


def test_the_deadline_counts_the_waits() -> None:
    assert replayed(every_s=1.0, max_seconds=100).first("stop") is not None
    assert replayed(every_s=1.0, max_seconds=200).first("stop") is None
