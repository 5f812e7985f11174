"""Forecasts of runs and budgets on real ADK, as ``snapshot()`` shows them."""

from decimal import Decimal
from typing import Any

from runguard import Budget
from runguard.adk import RunGuardPlugin
from runguard.testing import FakeClock, ScriptedModel, call, text
from tests.kit.adk_runs import play
from tests.kit.rule_agents import Tool, agent

PRICES = {"scripted-1": {"input": 10, "output": 0, "tiers": [{"above": 200_000, "input": 20, "output": 0}]}}
MODELS = {"scripted-1": {"context_window": 1_000_000, "max_output_tokens": 1_000}}
CALLS = 20


def grows(number: int) -> int:
    return 10_000 + 2_000 * number


async def forecast(prompts: Any, **policy: Any) -> tuple[dict[str, Any], RunGuardPlugin]:
    """The run's facts in the snapshot that its tool takes in the middle of it."""
    seen: list[dict[str, Any]] = []

    def look(n: int) -> dict[str, int]:
        seen.append(plugin.snapshot()["runs"][0])
        return {"step": n}

    model = ScriptedModel(
        [*[call("look", q=n) for n in range(CALLS)], text("done")], prompt_tokens=prompts, output_tokens=0
    )
    plugin = RunGuardPlugin(prices=PRICES, models=MODELS, **policy)
    result = await play(agent(model, Tool("look", look)), plugins=[plugin])
    assert result.texts == ["done"]
    assert [one["forecast"] for one in seen[:11]] == [None] * 11
    assert all(one["forecast"] is not None for one in seen[11:])
    return seen[-1], plugin


async def test_a_growing_run_sees_its_cap_its_window_and_a_higher_price_ahead() -> None:
    run, _ = await forecast(grows, max_usd=20)
    found = run["forecast"]
    assert (found["calls"], found["estimated"]) == (CALLS, True)
    spent = sum(grows(n) for n in range(1, CALLS + 1)) * Decimal("0.00001")
    assert run["spent_usd"] == spent
    cap, room, fits = found["cap"], 20 - spent, 0
    while room >= (price := grows(CALLS + 1 + fits) * Decimal("0.00001")):
        room, fits = room - price, fits + 1
    assert (cap["unit"], cap["limit"], cap["calls_left"]) == ("usd", 20, fits)
    assert cap["usd"] == 20 - spent - room
    last = grows(CALLS)
    assert found["tier"] == {
        "agent": "worker",
        "model": "scripted-1",
        "unit": "tokens",
        "limit": 200_000,
        "calls_left": (200_000 - last) // 2_000,
        "usd": sum(grows(n) for n in range(CALLS + 1, CALLS + 1 + (200_000 - last) // 2_000)) * Decimal("0.00001"),
    }
    assert found["window"]["calls_left"] == (1_000_000 - last) // 2_000


async def test_a_run_with_flat_prompts_has_a_cap_but_no_window_ahead() -> None:
    run, _ = await forecast(10_000, max_model_calls=30)
    found = run["forecast"]
    assert (found["window"], found["tier"]) == (None, None)
    assert (found["cap"]["unit"], found["cap"]["calls_left"], found["cap"]["usd"]) == ("calls", 10, Decimal(1))


async def test_a_run_that_compacts_its_history_goes_on_at_its_mean() -> None:
    run, _ = await forecast(lambda n: 10_000 + 10_000 * (n % 10), max_usd=20)
    found = run["forecast"]
    assert (found["window"], found["tier"]) == (None, None)
    assert found["cap"]["calls_left"] == (20 - run["spent_usd"]) * CALLS // run["spent_usd"]


async def test_a_days_budget_is_forecast_from_its_spending_so_far() -> None:
    clock = FakeClock()
    clock.now = 1_000_000 * 86_400 + 6 * 3_600.0  # six o'clock
    budgets = [Budget(usd=5, per="app", window="1d")]
    _, plugin = await forecast(10_000, budgets=budgets, clock=clock)
    (found,) = plugin.snapshot()["forecasts"]
    spent = Decimal("0.1") * (CALLS + 1)
    assert (found["scope"], found["window"], found["unit"], found["estimated"]) == ("app:app", "1d", "usd", True)
    assert found["calls"] == CALLS + 1
    assert found["used_up_at"] == clock.now + float((5 - spent) / spent) * 6 * 3_600
    clock.advance(12 * 3_600)
    (later,) = plugin.snapshot()["forecasts"]
    assert (later["used_up_at"], later["share_at_end"]) == (None, round(float(spent) / 5 * 24 / 18, 4))
