"""Agents inside of tools: Runners that a tool starts, with the plugin on the outer App only, and agents that ADK runs
without the plugins.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from decimal import Decimal
from typing import Any

import pytest
from google.adk.agents import BaseAgent, LlmAgent, LoopAgent, SequentialAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.apps import App
from google.adk.events import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import InMemoryRunner, Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools.agent_tool import AgentTool
from google.adk.workflow import Workflow, node
from google.genai import types

import runguard
from runguard import RunStoppedError
from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, text
from tests.kit.adk_runs import play
from tests.kit.money import CALL_USD, SSE, agent, guard
from tests.kit.outside_calls import HELLO, SMALL_USD, ask, booked, consulting, small, two_prices
from tests.kit.tools import step
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


# ---- agents without plugins -----------------------------------------------------------------------------------------


def _hidden(inner: ScriptedModel, name: str) -> tuple[LlmAgent, ScriptedModel]:
    outer = ScriptedModel([call(name, request="one"), call(name, request="two"), text("done")])
    return agent("outer", outer, tools=[AgentTool(agent(name, inner, tools=[step]), include_plugins=False)]), outer


async def test_an_agent_without_plugins_inside_a_tool_is_billed_and_the_blind_spot_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inner = ScriptedModel(lambda n, _: call("step", q=n) if n % 3 else text("part"), model="small-1")
    root, outer = _hidden(inner, "unseen_one")
    plugin = two_prices(max_usd=1)
    with caplog.at_level(logging.WARNING, "runguard"):
        result = await play(root, plugins=[plugin])
    assert result.texts == ["done"]
    assert (outer.calls, inner.calls) == (3, 6)
    assert booked(plugin) == (9, 3 * CALL_USD + 6 * SMALL_USD)
    assert plugin.spend()["by_tool"]["unseen_one"]["calls"] == 6
    assert {name: figures["calls"] for name, figures in plugin.spend()["by_agent"].items()} == {
        "outer": 3,
        "unseen_one": 6,
    }
    said = [record.message for record in caplog.records if "blind_spot" in record.message]
    assert len(said) == 1
    assert "unseen_one" in said[0]


def _child_pipeline() -> tuple[SequentialAgent, ScriptedModel]:
    """Two agents, the second of which consults a model in a tool."""
    advisor = small()
    second = agent("second", ScriptedModel([call("consult", q=1), text("b")]), tools=[consulting(advisor)])
    return SequentialAgent(name="pipeline", sub_agents=[agent("first", ScriptedModel([text("a")])), second]), advisor


def _in_agent_tool() -> BaseAgent:
    child, _ = _child_pipeline()
    return agent(
        "outer",
        ScriptedModel([call("pipeline", request="one"), text("done")]),
        tools=[AgentTool(child, include_plugins=False)],
    )


async def _run_child() -> None:
    child, _ = _child_pipeline()
    service = InMemorySessionService()
    await service.create_session(app_name="child", user_id="u", session_id="s")
    runner = Runner(app=App(name="child", root_agent=child), session_service=service)
    async for _ in runner.run_async(user_id="u", session_id="s", new_message=HELLO):
        pass


def _in_tool_with_runner() -> BaseAgent:
    async def research(q: int) -> str:
        await _run_child()
        return "found"

    return agent("outer", ScriptedModel([call("research", q=1), text("done")]), tools=[research])


class RunsChild(BaseAgent):
    async def _run_async_impl(self, ctx: InvocationContext) -> AsyncGenerator[Event, None]:
        await _run_child()
        yield Event(
            author=self.name,
            invocation_id=ctx.invocation_id,
            content=types.Content(role="model", parts=[types.Part(text="done")]),
        )


def _in_custom_agent() -> BaseAgent:
    return SequentialAgent(
        name="root",
        sub_agents=[
            agent("outer", ScriptedModel([text("x")])),
            agent("outer_two", ScriptedModel([text("y")])),
            RunsChild(name="z"),
        ],
    )


@pytest.mark.parametrize(
    "shape",
    [_in_agent_tool, _in_tool_with_runner, _in_custom_agent],
    ids=lambda shape: shape.__name__.removeprefix("_"),
)
async def test_agents_of_a_runner_without_plugins_are_billed_under_their_own_names(
    shape: Callable[[], BaseAgent],
) -> None:
    plugin = two_prices(max_usd=1)
    result = await play(shape(), plugins=[plugin])
    assert result.texts[-1] == "done"
    spent = {name: (figures["calls"], figures["usd"]) for name, figures in plugin.spend()["by_agent"].items()}
    children = {name: figures for name, figures in spent.items() if not name.startswith("outer")}
    # Nobody announces who consults a model in a child's tool: its root agent pays.
    assert children == {"first": (1, CALL_USD), "second": (2, 2 * CALL_USD), "pipeline": (1, SMALL_USD)}
    assert sum(calls for name, (calls, _) in spent.items() if name.startswith("outer")) == 2


async def test_an_agent_without_plugins_inside_a_tool_is_stopped_by_the_cap() -> None:
    inner = ScriptedModel(lambda n, _: call("step", q=n))
    root, outer = _hidden(inner, "unseen_two")
    plugin = guard(max_usd="0.10")
    result = await play(root, plugins=[plugin])
    assert outer.calls == 1
    assert 1 + inner.calls <= 5
    assert plugin.spend()["usd"] <= Decimal("0.10")
    assert_stopped(result, "budget")
    assert assert_calls_answered(result.session) == 1


# ---- calls that are not the run's -----------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "shape", [lambda a: a, lambda a: LoopAgent(name="loop", max_iterations=1, sub_agents=[a])], ids=["agent", "loop"]
)
async def test_what_the_caller_asks_between_two_events_is_not_the_runs(
    shape: Callable[[Any], Any], streamed: bool
) -> None:
    model = ScriptedModel([call("step", q=1), text("x")], chunks=3)
    plugin, own = guard(max_usd="0.04"), ScriptedModel([text("own")])
    service = InMemorySessionService()
    runner = Runner(
        app=App(name="app", root_agent=shape(agent("a", model, tools=[step])), plugins=[plugin]),
        session_service=service,
    )
    await service.create_session(app_name="app", user_id="u1", session_id="s1")
    await ask(own)
    options: dict[str, Any] = {"run_config": SSE} if streamed else {}
    async for _ in runner.run_async(user_id="u1", session_id="s1", new_message=HELLO, **options):
        await ask(own)
    await ask(own)
    assert own.calls >= 5
    assert (model.calls, plugin.trips) == (2, [])
    assert booked(plugin) == (2, Decimal("0.04"))


async def test_what_a_tool_left_running_asks_after_the_run_is_not_the_runs() -> None:
    own, tasks = ScriptedModel([text("own")]), []
    over = asyncio.Event()

    async def later() -> None:
        await over.wait()
        await ask(own)

    async def start(q: int) -> str:
        tasks.append(asyncio.create_task(later()))
        return "started"

    plugin = guard(max_usd="0.10")
    await play(agent("a", ScriptedModel([call("start", q=1), text("x")]), tools=[start]), plugins=[plugin])
    over.set()
    await tasks[0]
    assert own.calls == 1
    assert booked(plugin) == (2, Decimal("0.04"))


async def test_a_call_that_began_in_a_run_is_the_runs_also_when_it_ends_later() -> None:
    """It was asked for and held while the run lasted; its usage is told when the run is over."""
    go_on, tasks = asyncio.Event(), []

    class Slow(ScriptedModel):
        async def generate_content_async(
            self, llm_request: LlmRequest, stream: bool = False
        ) -> AsyncGenerator[LlmResponse, None]:
            await go_on.wait()
            async for response in super().generate_content_async(llm_request, stream):
                yield response

    slow = Slow([text("own")])  # type: ignore[call-arg]

    async def start(q: int) -> str:
        tasks.append(asyncio.create_task(ask(slow)))
        await asyncio.sleep(0.01)
        return "started"

    plugin = guard(max_usd="0.10")
    result = await play(agent("a", ScriptedModel([call("start", q=1), text("x")]), tools=[start]), plugins=[plugin])
    go_on.set()
    await tasks[0]
    assert slow.calls == 1
    assert booked(plugin) == (3, Decimal("0.06"))
    assert plugin.spend(f"run:{result.events[0].invocation_id}")["usd"] == Decimal("0.06")
