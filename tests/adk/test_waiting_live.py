"""Budgets that wait on real ADK runs, on a clock that needs no time."""

import asyncio
from typing import Any

from google.adk.agents import ParallelAgent

from runguard import Budget
from runguard.testing import ScriptedModel, assert_stopped, call, run, text
from tests.kit.money import PRICES, agent, assert_nothing_reserved, guard
from tests.kit.tools import step
from tests.kit.virtual_time import VirtualLoop, run_virtually

TWO_A_MINUTE = Budget(calls=2, per="model", window="1m", on_exhausted="wait")


def settings(loop: VirtualLoop, **policy: Any) -> dict[str, Any]:
    values = {"prices": PRICES, "tokens": lambda request: 1_000, "clock": loop.clock, "max_wait_seconds": 600}
    return {**values, "budgets": [TWO_A_MINUTE], **policy}


def steps(calls: int, **options: Any) -> ScriptedModel:
    return ScriptedModel(lambda n, _: call("step", q=n) if n < calls else text("done"), **options)


def test_a_run_waits_and_finishes() -> None:
    loop = VirtualLoop()
    plugin, model = guard(**settings(loop)), steps(5)
    result = run_virtually(loop, run(agent("a", model, tools=[step]), plugins=[plugin]))
    assert (result.texts, model.calls, result.trips) == (["done"], 5, [])
    assert 120 <= loop.passed < 121
    assert plugin.guard.waits.calls == 2


def test_branches_wait_in_line_and_all_finish() -> None:
    loop = VirtualLoop()
    starts: list[float] = []

    def answer(n: int, _: Any) -> Any:
        starts.append(loop.passed)
        return text("done")

    plugin, model = guard(**settings(loop)), ScriptedModel(answer, latency_s=0.5)
    team = ParallelAgent(name="team", sub_agents=[agent(f"a{n}", model) for n in range(7)])
    result = run_virtually(loop, run(team, plugins=[plugin]))
    assert len(result.texts) == 7
    assert [int(at // 60) for at in starts] == [0, 0, 1, 1, 2, 2, 3]


def test_the_deadline_of_the_run_ends_with_the_refusal() -> None:
    loop = VirtualLoop()
    plugin, model = guard(**settings(loop, max_seconds=100)), steps(9)
    result = run_virtually(loop, run(agent("a", model, tools=[step]), plugins=[plugin]))
    assert_stopped(result, rule="budget")
    assert model.calls == 4
    assert loop.passed < 61


def test_the_kill_switch_ends_a_wait() -> None:
    loop = VirtualLoop()
    plugin, model = guard(**settings(loop)), steps(9)

    async def go() -> Any:
        running = asyncio.create_task(run(agent("a", model, tools=[step]), plugins=[plugin]))
        await asyncio.sleep(10)
        (alive,) = plugin.snapshot()["runs"]
        assert alive["waiting"] == [{"scope": "model:scripted-1", "calls": 1, "until": loop.clock() + 50}]
        plugin.stop("all", actor="ops")
        return await running

    result = run_virtually(loop, go())
    assert_stopped(result, rule="kill_switch")
    assert (model.calls, loop.passed) == (2, 10)


def test_a_cancelled_run_lets_the_next_one_go() -> None:
    loop = VirtualLoop()
    plugin, model = guard(**settings(loop)), steps(2)

    async def go() -> Any:
        await run(agent("a", model, tools=[step]), plugins=[plugin])
        first, second = (
            asyncio.create_task(run(agent("a", ScriptedModel([text("late")])), plugins=[plugin], session_id=name))
            for name in ("s2", "s3")
        )
        await asyncio.sleep(10)
        first.cancel()
        return await second

    assert run_virtually(loop, go()).texts == ["late"]
    assert_nothing_reserved(plugin)
    (status,) = plugin.budgets("model:scripted-1")
    assert status.spent == 1


def test_shadow_mode_does_not_wait() -> None:
    loop = VirtualLoop()
    plugin, model = guard(**settings(loop, mode="shadow")), steps(5)
    result = run_virtually(loop, run(agent("a", model, tools=[step]), plugins=[plugin]))
    assert (result.texts, loop.passed, plugin.trips) == (["done"], 0, [])
    assert (plugin.guard.waits.calls, plugin.guard.waits.waited_s) == (3, 180)
