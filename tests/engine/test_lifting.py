"""A stopped run is resumed: which stops are over, and that an unknown cap keeps the run stopped."""

import logging
from typing import Any

import pytest

from runguard import Budget
from runguard.core.decision import Action, Finding
from runguard.core.events import ROOT_LANE, ModelCall, RunInfo
from runguard.engine.charges import OUTAGES
from runguard.engine.guard import Guard
from runguard.engine.resume import review_stops
from runguard.policy import Policy

USER_BUDGET = Budget(usd="0.002", per="user")


async def stopped_by_money(**policy: Any) -> Guard:
    guard = Guard(Policy(prices={"m": {"input": 1, "output": 4}}, telemetry=False, **policy))
    guard.start(RunInfo("run", "app", "u", "s"))
    event = ModelCall("run", ROOT_LANE, "agent", 1.0, "m", input_tokens=1_000, max_output_tokens=500)
    assert (await guard.reserve(event)).action is Action.STOP
    return guard


def stops(guard: Guard) -> list[str]:
    return [trip.rule for trip in guard.runs["run"].stops_in_force()]


async def test_a_budget_that_was_extended_lets_the_run_go_on() -> None:
    guard = await stopped_by_money(budgets=[USER_BUDGET])
    await review_stops(guard, guard.runs["run"])
    assert stops(guard) == ["budget"]
    guard.accounts.extend("user:app/u", usd=1)
    await review_stops(guard, guard.runs["run"])
    assert stops(guard) == []


async def test_a_cap_that_cannot_be_read_keeps_the_run_stopped(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = await stopped_by_money(budgets=[USER_BUDGET])
    guard.accounts.extend("user:app/u", usd=1)

    def broken(*_: Any) -> None:
        raise RuntimeError("a cap function that fails")

    monkeypatch.setattr(guard.accounts.finder, "of_call", broken)
    with caplog.at_level(logging.WARNING, "runguard"):
        await review_stops(guard, guard.runs["run"])
    assert stops(guard) == ["budget"]
    assert "runguard.still_stopped" in caplog.text


async def test_an_outage_is_over_and_a_loop_is_not() -> None:
    guard = Guard(Policy(telemetry=False))
    run = guard.start(RunInfo("run", "app", "u", "s"))
    event = ModelCall("run", ROOT_LANE, "agent", 1.0, "m")
    guard.stop(run, event, Finding("budget", Action.STOP, 1, 0, OUTAGES, "run"))
    await review_stops(guard, run)
    assert stops(guard) == []
    guard.stop(run, event, Finding("repetition", Action.STOP, 6, 5, "equal calls", "run"))
    await review_stops(guard, run)
    assert stops(guard) == ["repetition"]
