"""An agent without tools that is ordered again and again in new words, live on ADK."""

import sys
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.models.llm_request import LlmRequest
from google.adk.tools.agent_tool import AgentTool
from google.genai import types

from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, text
from tests.kit.adk_runs import Observed, observe

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from made_up import HEALTHY, LOOPS
from shapes import Shape


def team_of(shape: Shape, *, as_tools: bool) -> LlmAgent:
    """A lead who gives the orders of a made-up run, and workers who report as they do there."""
    orders: list[types.Part] = []
    reports: dict[str, list[str]] = {}
    for step in shape.run()["steps"]:
        if step["kind"] == "tool_call":
            orders.append(call(step["tool"], **step["args"]))
        elif step["kind"] == "tool_result":
            reports.setdefault(step["tool"], []).append(step["result"]["result"])

    def lead(n: int, _: LlmRequest) -> Any:
        return orders[n - 1] if n <= len(orders) else text("done")

    def worker(name: str) -> LlmAgent:
        said = reports[name]
        options: dict[str, Any] = {} if as_tools else {"mode": "single_turn"}
        model = ScriptedModel(lambda n, _: text(said[n - 1]))
        return LlmAgent(name=name, description="answers", model=model, **options)

    workers: list[Any] = [worker(name) for name in reports]
    options: dict[str, Any] = {"tools": [AgentTool(one) for one in workers]} if as_tools else {"sub_agents": workers}
    return LlmAgent(name="lead", model=ScriptedModel(lead), **options)


def shown(shape: Shape, *, as_tools: bool) -> Any:
    return observe(team_of(shape, as_tools=as_tools), message="who collects the taxes?")


everywhere = pytest.mark.parametrize("as_tools", [True, False], ids=["as tool", "single turn"])


@everywhere
@pytest.mark.parametrize(
    "name", ["expert without tools asked in new words", "writer and critic who say the same to their lead"]
)
async def test_orders_in_new_words_are_nudged_and_then_stopped(name: str, as_tools: bool) -> None:
    seen: Observed = await shown(LOOPS[name], as_tools=as_tools)
    assert_stopped(seen.result)
    assert_calls_answered(seen.result.session)
    assert ("nudge", "no_news") in seen.rules
    assert any("other words" in str(answer) for answer in seen.answers)


@everywhere
@pytest.mark.parametrize(
    "name",
    [
        "forty drafts by a writer and their reviews by a critic",
        "debate of twelve rounds between two workers",
        "letters of one form to fifteen people",
    ],
)
async def test_healthy_work_through_words_is_left_alone(name: str, as_tools: bool) -> None:
    seen: Observed = await shown(HEALTHY[name], as_tools=as_tools)
    assert seen.result.trips == []
    assert {action for action, _ in seen.rules} <= {"nudge"}
    assert seen.result.texts[-1] == "done"
