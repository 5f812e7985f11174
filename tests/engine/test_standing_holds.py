"""The hold of a last answer lives as long as its run. A call that was never sent costs nothing, however late."""

import asyncio
from decimal import Decimal
from typing import Any

import pytest

from runguard import Budget
from runguard.core.events import ROOT_LANE, ModelCall, RunInfo
from runguard.engine.final_answer import Closing
from runguard.engine.guard import Guard
from runguard.engine.reserving import STANDING_S
from runguard.policy import Policy
from runguard.pricing.rates import Usage
from tests.kit.stores import KINDS, Servers, empty_store, missing

HOLD_S = 0.4
POLICY: dict[str, Any] = {
    "budgets": [Budget(usd=1, per="user", window="1d")],
    "prices": {"m": {"input": 100, "output": 100}},
    "final_answer": True,
    "min_output_tokens": 100,
    "hold_seconds": HOLD_S,
}


@pytest.fixture(params=["memory", *KINDS])
def store(request: pytest.FixtureRequest, servers: Servers, tmp_path: Any) -> dict[str, Any]:
    if request.param == "memory":
        return {}
    if reason := missing(request.param):
        pytest.skip(reason)
    return {"store": empty_store(request.param, servers, tmp_path), "store_timeout": 10}


def office(store: dict[str, Any], **more: Any) -> Guard:
    guard = Guard(Policy.validated({**POLICY, **store, **more}, "keywords"), gives_last_answers=True)
    guard.start(RunInfo("run", "app", "ann", "s", at=guard.clock()))
    return guard


def shown(guard: Guard) -> tuple[Decimal | int, Decimal | int]:
    assert guard.accounts.ledger.flush(10)
    (status,) = guard.accounts.budgets()
    return status.spent, status.reserved


async def ask(guard: Guard) -> None:
    event = ModelCall("run", ROOT_LANE, "agent", guard.clock(), "m", 100, max_output_tokens=100)
    guard.check(event)
    assert not await guard.reserve(event, slot=False)
    guard.settle(event.charge, Usage(100, 100))


async def test_a_run_that_outlives_its_holds_pays_what_it_spent(store: dict[str, Any]) -> None:
    guard = office(store)
    await ask(guard)
    await asyncio.sleep(2 * HOLD_S)
    spent, reserved = shown(guard)
    assert spent == Decimal("0.02")
    assert reserved > 0  # for the last answer
    await ask(guard)
    guard.end("run")
    assert shown(guard) == (Decimal("0.04"), 0)


async def test_a_hold_is_renewed_in_time(store: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    guard = office(store)
    await ask(guard)
    closing = guard.runs["run"].set_aside
    assert isinstance(closing, Closing)
    first = closing.charge
    await ask(guard)
    assert closing.charge is first
    monkeypatch.setattr("runguard.engine.final_answer.STANDING_S", 10 * STANDING_S)  # all holds are old now
    await ask(guard)
    assert (closing.charge is first) is not guard.accounts.ledger.is_shared  # in memory none grows old
    guard.end("run")
    assert shown(guard) == (Decimal("0.06"), 0)


async def test_a_call_that_is_taken_back_late_costs_nothing(store: dict[str, Any]) -> None:
    guard = office(store, final_answer=False)
    event = ModelCall("run", ROOT_LANE, "agent", guard.clock(), "m", 100, max_output_tokens=100)
    assert not await guard.reserve(event, slot=False)
    await asyncio.sleep(2 * HOLD_S)
    guard.accounts.budgets()  # whoever looks finds the hold expired
    guard.release(event.charge)
    assert shown(guard) == (0, 0)
    await ask(guard)
    assert shown(guard) == (Decimal("0.02"), 0)
