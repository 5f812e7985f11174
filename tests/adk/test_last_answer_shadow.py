"""``final_answer`` in shadow mode, on real ADK: reported, never sent, and the stop where an enforcing guard stops."""

import logging
from decimal import Decimal
from typing import Any

import pytest
from google.genai import types

from runguard.adk import RunGuardPlugin
from runguard.engine.final_answer import INSTRUCTION
from runguard.testing import ScriptedModel, call, text
from tests.kit.adk_runs import play
from tests.kit.rule_agents import Tool, agent

PRICES = {"scripted-1": {"input": 10, "output": 40}}
CALL = Decimal("0.003")  # 100 tokens in and 50 out
SIZES: dict[str, Any] = {"prices": PRICES, "tokens": lambda request: 100, "min_output_tokens": 50}
CALLS = 24


async def shadowed(**policy: Any) -> tuple[ScriptedModel, RunGuardPlugin]:
    """A run that ends by itself."""
    model = ScriptedModel(
        lambda n, _: call("work", q=n) if n < CALLS else text("done"), prompt_tokens=100, output_tokens=50
    )
    short = types.GenerateContentConfig(max_output_tokens=50)
    plugin = RunGuardPlugin(mode="shadow", **{**SIZES, **policy})
    root = agent(model, Tool("work", lambda n: {"done": n}), generate_content_config=short)
    result = await play(root, plugins=[plugin])
    assert (result.texts, model.calls) == (["done"], CALLS)
    sent = [part.text for request in model.requests for one in request.contents for part in one.parts or []]
    assert INSTRUCTION not in sent
    assert plugin.snapshot()["guard_errors"] == 0
    assert plugin.spend()["reserved_usd"] == 0
    assert plugin.spend()["usd"] == CALLS * CALL
    return model, plugin


def reported(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if line.startswith("runguard.last_answer_in_shadow")]


async def test_a_stop_by_budget_is_decided_before_the_held_price_is_spent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "runguard")
    _, without = await shadowed(max_usd=CALL * 20)
    assert reported(caplog) == []
    _, plugin = await shadowed(max_usd=CALL * 20, final_answer=True)
    (line,) = reported(caplog)
    assert "would have ended with a last answer of worker, for at most $0.01" in line
    (early,), (late,) = plugin.trips, without.trips
    assert (early.rule, early.enforced) == ("budget", False)
    assert early.model_calls < late.model_calls  # the price of the last call is kept


async def test_a_limit_of_calls_keeps_one_for_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    _, plugin = await shadowed(max_model_calls=10, final_answer=True)
    assert [(trip.rule, trip.model_calls) for trip in plugin.trips] == [("model_calls", 9)]
    assert len(reported(caplog)) == 1


async def test_a_healthy_run_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    _, plugin = await shadowed(max_usd=CALL * 40, final_answer=True)
    assert (plugin.trips, reported(caplog)) == ([], [])


async def test_a_budget_without_room_for_the_hold_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    await shadowed(max_usd=CALL, final_answer=True)
    assert [line for line in caplog.messages if line.startswith("runguard.no_last_answer")]
    assert reported(caplog) == []
