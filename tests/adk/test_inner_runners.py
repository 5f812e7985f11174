"""A tool that starts Runners of its own, with the plugin on the outer App only: its agents count among the calls in
flight and in the depth.
"""

import asyncio
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.runners import InMemoryRunner
from google.genai import types

import runguard
from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, call, text
from tests.kit.adk_runs import play
from tests.kit.waiting import until_async

GUARDS = pytest.mark.parametrize("guard", ["plugin", "install"])


async def answer_of(agent: LlmAgent, message: str) -> str:
    """Run an agent in a Runner of its own, without plugins."""
    runner = InMemoryRunner(agent=agent, app_name="inner")
    session = await runner.session_service.create_session(app_name="inner", user_id="u")
    content = types.Content(role="user", parts=[types.Part(text=message)])
    words = ""
    async for event in runner.run_async(user_id="u", session_id=session.id, new_message=content):
        words = next((part.text for part in (event.content.parts if event.content else None) or () if part.text), words)
    return words


def plugins_of(guard: str, **policy: Any) -> list[RunGuardPlugin]:
    if guard == "plugin":
        return [RunGuardPlugin(**policy)]
    runguard.install(**policy)
    return []


def fan_out(items: int) -> tuple[LlmAgent, ScriptedModel]:
    """An agent whose tool processes each item of an index with an agent of its own, all at once."""
    inner = ScriptedModel(lambda n, _: text(f"part {n}"), latency_s=0.05)

    async def process_index(query: str) -> dict[str, int]:
        """Process every item."""
        parts = [LlmAgent(name=f"part_{n}", model=inner) for n in range(items)]
        answers = await asyncio.gather(*(answer_of(part, f"item {n}") for n, part in enumerate(parts)))
        return {"done": sum(answer.startswith("part") for answer in answers)}

    return LlmAgent(
        name="orchestrator",
        model=ScriptedModel([call("process_index", query="all"), text("done")]),
        tools=[process_index],
    ), inner


@GUARDS
async def test_surplus_agents_of_a_tool_are_refused(guard: str) -> None:
    root, inner = fan_out(60)
    await play(root, plugins=plugins_of(guard, max_concurrent_agents=20))
    assert (inner.calls, inner.max_in_flight) == (20, 20)


@GUARDS
@pytest.mark.parametrize("policy", [{}, {"max_concurrent_agents": 7, "on_surplus": "queue"}], ids=["default", "queue"])
async def test_surplus_agents_of_a_tool_wait_where_they_may(guard: str, policy: dict[str, Any]) -> None:
    root, inner = fan_out(60)
    recording = await play(root, plugins=plugins_of(guard, **policy))
    assert (inner.calls, inner.max_in_flight) == (60, policy.get("max_concurrent_agents", 20))
    assert recording.texts == ["done"]


async def test_every_place_is_free_again_after_calls_that_fail_or_are_cancelled() -> None:
    broken = ScriptedModel([ValueError("no")])
    slow = ScriptedModel([text("late")], latency_s=30)

    async def try_both(query: str) -> dict[str, str]:
        """Make calls that do not come back well."""
        await asyncio.gather(
            *(answer_of(LlmAgent(name=f"b{n}", model=broken), "x") for n in range(5)), return_exceptions=True
        )
        waiting = [asyncio.create_task(answer_of(LlmAgent(name=f"s{n}", model=slow), "x")) for n in range(5)]
        await until_async(lambda: slow.calls == 5)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return {"in_flight": str(plugin.snapshot()["runs"][0]["in_flight"])}

    plugin = RunGuardPlugin(max_concurrent_agents=5)
    root = LlmAgent(name="root", model=ScriptedModel([call("try_both", query="x"), text("done")]), tools=[try_both])
    recording = await play(root, plugins=[plugin])
    assert recording.texts == ["done"]
    assert plugin.trips == []
    (response,) = [r for event in recording.session.events for r in event.get_function_responses()]
    assert response.response == {"in_flight": "0"}


@GUARDS
async def test_runners_inside_of_runners_count_in_the_depth(guard: str) -> None:
    reached: list[int] = []

    def at(level: int) -> LlmAgent:
        async def delegate(task: str) -> dict[str, str]:
            """Delegate the task."""
            reached.append(level + 1)
            return {"answer": await answer_of(at(level + 1), task)}

        return LlmAgent(
            name=f"level_{level}",
            model=ScriptedModel([call("delegate", task=f"task {level}"), text(f"level {level} is done")]),
            tools=[delegate],
        )

    recording = await play(at(0), plugins=plugins_of(guard, max_delegation_depth=3))
    assert reached == [1, 2, 3, 4], "the agent at the fourth level is refused, so that it delegates nothing"
    assert recording.texts == ["level 0 is done"]
