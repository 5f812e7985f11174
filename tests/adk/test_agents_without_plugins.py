"""Agents that ADK runs without the plugins, and calls that belong to no run."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from decimal import Decimal
from typing import Any

import pytest
from google.adk.agents import BaseAgent, LlmAgent, LoopAgent, SequentialAgent
from google.adk.agents.invocation_context import InvocationContext
from google.adk.apps import App
from google.adk.events import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools.agent_tool import AgentTool
from google.genai import types

from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, text
from tests.kit.adk_runs import play
from tests.kit.money import CALL_USD, SSE, agent, assert_nothing_reserved, guard
from tests.kit.outside_calls import HELLO, SMALL_USD, ask, booked, consulting, small, two_prices
from tests.kit.tools import step

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
    assert_nothing_reserved(plugin)


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
    assert_nothing_reserved(plugin)


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
    assert_nothing_reserved(plugin)


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
    assert_nothing_reserved(plugin)


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
    assert_nothing_reserved(plugin)


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
    assert_nothing_reserved(plugin)
