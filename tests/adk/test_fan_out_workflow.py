"""Over-spawn in Workflows: no hook of ADK tells how many branches a node starts, and still none is paid when there are
too many.
"""

import asyncio
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.workflow import Workflow, node

from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, assert_stopped, text
from tests.kit.adk_runs import play


def over_workers(model: ScriptedModel, count: int) -> Workflow:
    worker = LlmAgent(name="worker", model=model, parallel_worker=True)

    def split(node_input: Any) -> list[str]:
        return [f"part {n}" for n in range(count)]

    return Workflow(name="wf", edges=[("START", split), (split, worker)])


def over_dynamic_nodes(model: ScriptedModel, count: int) -> Workflow:
    worker = LlmAgent(name="worker", model=model)

    @node(rerun_on_resume=True)
    async def spread(ctx: CallbackContext) -> str:
        await asyncio.gather(*(ctx.run_node(worker, f"part {n}", use_sub_branch=True) for n in range(count)))
        return "done"

    return Workflow(name="wf", edges=[("START", spread)])


@pytest.mark.parametrize("spread", [over_workers, over_dynamic_nodes], ids=lambda spread: spread.__name__)
async def test_too_many_branches_cost_nothing(spread: Any) -> None:
    model, plugin = ScriptedModel([text("x")]), RunGuardPlugin()
    trip = assert_stopped(await play(spread(model, 150), plugins=[plugin]), "fan_out")
    assert model.calls == 0
    assert (trip.observed, trip.limit) == (150, 100)
    assert len(plugin.trips) == 1


@pytest.mark.parametrize("spread", [over_workers, over_dynamic_nodes], ids=lambda spread: spread.__name__)
async def test_branches_within_the_limit_are_untouched(spread: Any) -> None:
    model, plugin = ScriptedModel([text("x")], latency_s=0.005), RunGuardPlugin()
    result = await play(spread(model, 40), plugins=[plugin])
    assert model.calls == 40
    assert model.max_in_flight <= 20
    assert plugin.trips == []
    assert not any(event.error_code for event in result.events)


async def test_as_many_one_after_another_are_no_fan_out() -> None:
    model, plugin = ScriptedModel([text("x")]), RunGuardPlugin(max_fan_out=5)
    worker = LlmAgent(name="worker", model=model)

    @node(rerun_on_resume=True)
    async def one_by_one(ctx: CallbackContext) -> str:
        for n in range(20):
            await ctx.run_node(worker, f"part {n}", use_sub_branch=True)
        return "done"

    await play(Workflow(name="wf", edges=[("START", one_by_one)]), plugins=[plugin])
    assert model.calls == 20
    assert plugin.trips == []
