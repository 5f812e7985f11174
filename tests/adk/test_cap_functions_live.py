"""Caps that a function gives, on real ADK:
0 is a cap, None is no cap, and whatever else it does never removes the cap.
"""

import asyncio
import logging
from decimal import Decimal
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.sessions import InMemorySessionService

from runguard import Budget
from runguard.adk import RunGuardPlugin
from runguard.testing import FakeClock, Recording, ScriptedModel, assert_calls_answered, assert_stopped, call, text
from tests.kit.adk_runs import play
from tests.kit.money import agent, guard
from tests.kit.tools import step

FREE = {"scripted-1": {"input": 0, "output": 0}}


def steps(count: int) -> ScriptedModel:
    """So many tool calls with new answers, then an end."""
    return ScriptedModel([*(call("step", q=n) for n in range(count)), text("done")])


def raises(scope: Any) -> Any:
    raise KeyError(scope.user)


async def later(scope: Any) -> float:
    return 5.0


BROKEN = [
    pytest.param(lambda scope: -1, id="negative"),
    pytest.param(lambda scope: float("nan"), id="nan"),
    pytest.param(lambda scope: float("inf"), id="infinity"),
    pytest.param(lambda scope: 10**30, id="beyond every store"),
    pytest.param(lambda scope: "much", id="text"),
    pytest.param(lambda scope: True, id="bool"),
    pytest.param(lambda scope: [5], id="list"),
    pytest.param(raises, id="exception"),
    pytest.param(later, id="coroutine"),
]


async def test_a_cap_of_0_lets_no_paid_call_through() -> None:
    plans = {"ann": 5}
    model, plugin = steps(50), guard(budgets=[Budget(usd=lambda scope: plans.get(scope.user, 0), per="user")])
    result = await play(agent("a", model, tools=[step]), plugins=[plugin], user_id="bob")
    assert model.calls == 0
    trip = assert_stopped(result, "budget")
    assert (trip.scope_id, trip.limit, trip.spent_usd) == ("user:app/bob", Decimal(0), Decimal(0))
    (status,) = plugin.budgets("user:app/bob")
    assert (status.limit, status.spent, status.utilization, status.remaining) == (0, 0, 0.0, 0)
    allowed = await play(agent("a", steps(5), tools=[step]), plugins=[plugin], user_id="ann")
    assert allowed.trips == []


async def test_under_a_cap_of_0_a_free_model_still_runs_and_no_threshold_fires(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = steps(5)
    plugin = RunGuardPlugin(budgets=[Budget(usd=lambda scope: 0, per="user")], prices=FREE)
    with caplog.at_level(logging.INFO, "runguard"):
        result = await play(agent("a", model, tools=[step]), plugins=[plugin])
    assert (model.calls, result.trips, result.texts) == (6, [], ["done"])
    assert [record for record in caplog.records if "spent" in record.getMessage()] == []
    (status,) = plugin.budgets()
    assert (status.spent, status.utilization) == (0, 0.0)


@pytest.mark.parametrize("unit", ["tokens", "calls"])
async def test_a_cap_of_0_tokens_or_calls_lets_nothing_through(unit: str) -> None:
    model = steps(3)
    cap: dict[str, Any] = {unit: lambda scope: 0}
    plugin = RunGuardPlugin(budgets=[Budget(**cap, per="user")], prices=FREE)
    assert_stopped(await play(agent("a", model, tools=[step]), plugins=[plugin]), "budget")
    assert model.calls == 0


async def test_none_is_no_limit() -> None:
    model = steps(5)
    plugin = guard(budgets=[Budget(usd=lambda scope: None, per="user")])
    assert (await play(agent("a", model, tools=[step]), plugins=[plugin])).trips == []
    assert plugin.budgets("user:app/u1") == []


@pytest.mark.parametrize("on_guard_error", ["allow", "block"])
@pytest.mark.parametrize("broken", BROKEN)
async def test_a_function_that_gives_no_cap_denies_the_calls(
    broken: Any, on_guard_error: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = steps(50)
    plugin = guard(budgets=[Budget(usd=broken, per="user")], on_guard_error=on_guard_error)
    service = InMemorySessionService()
    for _ in range(3):
        result = await play(agent("a", model, tools=[step]), plugins=[plugin], session_service=service)
        trip = assert_stopped(result, "guard_error")
        assert trip.scope_id == "user:app/u1"
        assert "usd" in trip.message
        assert "None" in trip.resume
        assert_calls_answered(result.session)
    assert model.calls == 0
    assert caplog.text.count("budget_function_failed") == 1, "said once"


@pytest.mark.parametrize("broken", BROKEN)
async def test_the_last_cap_holds_for_ten_minutes_and_then_calls_are_denied(broken: Any) -> None:
    clock, works, model = FakeClock(), True, ScriptedModel([text("done")])
    plugin = guard(budgets=[Budget(usd=lambda scope: "0.10" if works else broken(scope), per="user")], clock=clock)

    async def turn() -> Recording:
        return await play(agent("a", model), plugins=[plugin])

    await turn()
    works = False
    for seconds in (0, 300, 300):
        clock.advance(seconds)
        assert (await turn()).trips == [], "the last cap still counts"
    assert model.calls == 4
    clock.advance(1)
    assert_stopped(await turn(), "guard_error")
    assert model.calls == 4
    works = True
    assert (await turn()).trips == []
    assert_stopped(await turn(), "budget")
    assert model.calls == 5, "what was spent meanwhile is on the account"
    assert plugin.budgets("user:app/u1")[0].spent == Decimal("0.10")


async def test_an_unknown_cap_is_asked_for_again_at_the_next_call_of_the_same_run() -> None:
    answers: list[Any] = ["1", "1", KeyError("away")]

    def cap(scope: Any) -> Any:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    clock = FakeClock()
    # a window that ends asks again within a run
    plugin = guard(budgets=[Budget(usd=cap, per="user", window="1m")], clock=clock)

    def script(n: int, request: Any) -> Any:
        clock.advance(61)
        return call("step", q=n)

    model = ScriptedModel(script)
    result = await play(agent("a", model, tools=[step]), plugins=[plugin])
    assert_stopped(result, "guard_error")
    assert model.calls == 11, "two with a cap, nine more within ten minutes of the last one"
    assert_calls_answered(result.session)


async def test_in_shadow_mode_calls_are_made_booked_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    works, model = False, steps(2)
    plugin = guard(mode="shadow", budgets=[Budget(usd=lambda scope: "0.01" if works else -1, per="user")])
    result = await play(agent("a", model, tools=[step]), plugins=[plugin])
    assert (model.calls, result.texts) == (3, ["done"])
    assert [(trip.rule, trip.enforced) for trip in plugin.trips] == [("guard_error", False)]
    works = True
    await play(agent("a", steps(0)), plugins=[plugin])
    (status,) = plugin.budgets("user:app/u1")
    assert status.spent == Decimal("0.08"), "what was spent while the cap was unknown is on the account"


async def test_alerts_say_once_that_a_cap_is_unknown_and_once_that_it_is_back() -> None:
    alerts: list[Any] = []
    works, clock = False, FakeClock()
    plugin = guard(
        budgets=[Budget(usd=lambda scope: 5 if works else -1, per="user")], alerts=alerts.append, clock=clock
    )
    for _ in range(3):
        await play(agent("a", steps(0)), plugins=[plugin])
    works = True
    for _ in range(2):
        await play(agent("a", steps(0)), plugins=[plugin])
    assert plugin.flush()
    told = [(alert.kind, alert.resolved) for alert in alerts if "user:app/u1" in alert.text and alert.kind == "outage"]
    assert told == [("outage", False), ("outage", True)]


async def test_a_run_with_its_own_limit_does_not_need_the_function_that_it_replaces() -> None:
    from google.adk.agents.run_config import RunConfig

    model = steps(0)
    plugin = guard(budgets=[Budget(usd=lambda scope: -1)])
    config = RunConfig(custom_metadata={"runguard": {"max_usd": 1}})
    assert (await play(agent("a", model), plugins=[plugin], run_config=config)).trips == []
    assert model.calls == 1


async def test_branches_that_run_at_once_are_all_denied() -> None:
    from google.adk.agents import ParallelAgent

    models = [steps(3) for _ in range(8)]
    plugin = guard(budgets=[Budget(usd=raises, per="app")])
    root = ParallelAgent(
        name="par", sub_agents=[LlmAgent(name=f"w{n}", model=model, tools=[step]) for n, model in enumerate(models)]
    )
    result = await asyncio.wait_for(play(root, plugins=[plugin]), 20)
    assert sum(model.calls for model in models) == 0
    assert_stopped(result, "guard_error")
