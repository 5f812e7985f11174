"""The rule ``resubmission`` on every framework: which inputs are refused, on which worker, and which are free."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import runguard
from runguard.testing import FakeClock
from runguard.testing.conformance import AgentSpec, Harness, Reply

TASK = "Read the invoice of the fourth of May and give me its total."


def failing(says: Any) -> AgentSpec:
    """An agent whose parser answers each of ten attempts alike."""
    return AgentSpec(
        lambda n, _: Reply(calls=[("parse", {"attempt": n})]) if n <= 10 else Reply("gave up"),
        tools={"parse": lambda attempt: says},
    )


async def submit(harness: Harness, guard: Any, spec: AgentSpec, message: str = TASK) -> int:
    """Submit an input. Return how many model calls were made."""
    session = harness.session(spec, guard)
    await session.turn(message, mode="async")
    return session.model_calls


async def test_a_worker_refuses_what_others_have_seen_fail(harness: Harness, tmp_path: Path) -> None:
    """Each attempt is that of another process, or of the same one after a restart: only the store is shared."""
    made = []
    for _ in range(4):
        guard = harness.guard(max_resubmissions=1, store=f"sqlite:///{tmp_path}/guard.db")
        made.append(await submit(harness, guard, failing({"status": "partial_parse_error"})))
        assert guard.flush(5)
    assert made[0] == made[1] > 1
    assert made[2:] == [0, 0]


async def test_who_asks_in_other_words_is_served(harness: Harness) -> None:
    guard = harness.guard(max_resubmissions=0)
    wordings = [TASK, f"Please. {TASK}", "What does the invoice of the fourth of May add up to, all in all?", "again"]
    assert 0 not in [await submit(harness, guard, failing({"status": "partial_parse_error"}), one) for one in wordings]


async def test_an_hourly_job_is_free(harness: Harness) -> None:
    clock = FakeClock()
    guard = harness.guard(max_resubmissions=0, clock=clock)
    for _ in range(3):
        assert await submit(harness, guard, failing({"status": "partial_parse_error"}))
        clock.advance(3_600)
    await submit(harness, guard, failing({"status": "partial_parse_error"}))
    assert await submit(harness, guard, failing({"status": "partial_parse_error"})) == 0


@pytest.mark.parametrize("answer", [{"error": "503 service unavailable"}, "Error: connection refused"], ids=str)
async def test_a_retry_after_an_outage_is_free(harness: Harness, answer: Any) -> None:
    guard = harness.guard(max_resubmissions=0)
    assert 0 not in [await submit(harness, guard, failing(answer)) for _ in range(3)]


# ---- guarded functions ----------------------------------------------------------------------------------------------


def calls_until_refused(call: Callable[..., Any], document: str) -> int:
    """Submit a document to a function. Return how many calls were made before it was stopped."""
    with runguard.run(user="ann", app="batch"):
        for n in range(10):
            try:
                call([{"role": "user", "content": document}, {"role": "user", "content": f"attempt {n}"}])
            except runguard.RunStoppedError:
                return n
    return 10


def test_functions_refuse_it_too_on_every_worker(tmp_path: Path) -> None:
    made = []
    for _ in range(4):
        call = runguard.guard(
            lambda messages: {"sig": "parse", "usd": 0.01},
            loop={"repeats": 3},
            max_resubmissions=1,
            store=f"sqlite:///{tmp_path}/guard.db",
        )
        made.append(calls_until_refused(call, TASK))
        assert call.flush(5)
    assert made[0] == made[1] > 1
    assert made[2:] == [0, 0]
    assert calls_until_refused(call, "Read the invoice of the fifth of May and give me its total.") == made[0]
