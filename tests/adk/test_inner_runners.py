"""A tool that starts Runners of its own, with the plugin on the outer App only: its agents count among the calls in
flight and in the depth.
"""

import asyncio
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.runners import InMemoryRunner
from google.adk.workflow import Workflow, node
from google.genai import types

import runguard
from runguard import RunStoppedError
from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, assert_stopped, call, text
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


# ---- A sync tool that runs an agent with ``Runner.run``: ADK starts a thread for it, without the context of the tool


MESSAGE = types.Content(role="user", parts=[types.Part(text="go")])


async def orchestrator(inner: Any, calls: int, raised: list[RunStoppedError] | None = None) -> LlmAgent:
    """An agent whose sync tool asks another agent, in a Runner of its own without plugins."""
    raised = [] if raised is None else raised
    runner = InMemoryRunner(agent=LlmAgent(name="adviser", model=inner), app_name="inner")
    for number in range(calls):
        await runner.session_service.create_session(app_name="inner", user_id="u", session_id=f"s{number}")
    asked = iter(range(calls))

    def consult(topic: str) -> dict[str, str]:
        """Ask the adviser."""
        try:
            events = list(runner.run(user_id="u", session_id=f"s{next(asked)}", new_message=MESSAGE))
        except RunStoppedError as error:
            raised.append(error)
            raise
        words = [part.text for event in events for part in (event.content.parts if event.content else None) or ()]
        return {"advice": " ".join(word for word in words if word)}

    script = ScriptedModel([*(call("consult", topic=f"t{n}") for n in range(calls)), text("done")])
    return LlmAgent(name="orchestrator", model=script, tools=[consult])


def plugins_of_sync_runners_in_tools(guard: str, **policy: Any) -> tuple[RunGuardPlugin, list[RunGuardPlugin]]:
    if guard == "install":
        return runguard.install(**policy), []
    plugin = RunGuardPlugin(**policy)
    return plugin, [plugin]


@GUARDS
async def test_its_model_calls_are_on_the_account_of_the_run(guard: str) -> None:
    plugin, plugins = plugins_of_sync_runners_in_tools(guard)
    recording = await play(await orchestrator(ScriptedModel([text("sell")] * 2), calls=2), plugins=plugins)
    assert recording.texts[-1] == "done"
    assert plugin.spend()["calls"] == 5
    assert plugin.snapshot()["runs"] == []


@GUARDS
async def test_a_limit_stops_it_before_its_next_model_call(guard: str) -> None:
    plugin, plugins = plugins_of_sync_runners_in_tools(guard, max_model_calls=3)
    inner = ScriptedModel([text("sell")] * 5)
    await play(await orchestrator(inner, calls=5), plugins=plugins)
    assert [trip.rule for trip in plugin.trips] == ["model_calls"]
    assert plugin.spend()["calls"] == 3


async def test_the_error_of_a_stop_is_raised_to_the_caller_of_the_run_and_not_to_the_tool() -> None:
    plugin = runguard.install(max_model_calls=3, on_stop="raise")
    raised: list[Any] = []
    with pytest.raises(RunStoppedError):
        await play(await orchestrator(ScriptedModel([text("sell")] * 5), 5, raised))
    assert len(plugin.trips) == 1
    assert raised == []


# ---- Over-spawn in Workflows: no hook of ADK tells how many branches a node starts, and still none is paid when
# there are too many


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
