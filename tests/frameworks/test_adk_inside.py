"""An ADK Runner inside a tool of another framework: one account, one trip, nothing counted twice."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from google.adk.agents import LlmAgent, ParallelAgent
from google.adk.apps import App
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import InMemoryRunner
from google.genai import types

from runguard.adk import RunGuardPlugin, TerminationPlugin
from runguard.core.money import Budget
from runguard.termination import MaxIterationsTermination
from runguard.testing import ScriptedModel, call, text
from runguard.testing.conformance import MODEL, AgentSpec, Harness, Reply
from tests.frameworks.harnesses import EVERY, beside_adk

# A call of 100,000 output tokens costs ten cents.
PRICES: Any = {MODEL: {"input": 0.0, "output": 1.0}}
LIMITS: Any = {MODEL: {"max_output_tokens": 100_000}}


def adk_tool(root: Any, *plugins: BasePlugin) -> Callable[..., Awaitable[str]]:
    """A tool that runs an ADK agent."""
    runner = InMemoryRunner(app=App(name="inner", root_agent=root, plugins=[*plugins]))

    async def ask(n: int = 0) -> str:
        session = await runner.session_service.create_session(app_name="inner", user_id="u")
        said = ""
        message = types.UserContent("go")
        async for event in runner.run_async(user_id="u", session_id=session.id, new_message=message):
            said = "".join(part.text or "" for part in (event.content or types.Content()).parts or []) or said
        return said

    return ask


def look(n: int) -> str:
    return f"page {n}"


@beside_adk
async def test_an_adk_runner_in_a_tool_belongs_to_the_run(harness: Harness) -> None:
    model = ScriptedModel(lambda n, _: call("look", n=n))
    plugin, guard = RunGuardPlugin(max_model_calls=50), harness.guard(max_model_calls=10)
    tool = adk_tool(LlmAgent(name="inner", model=model, tools=[look]), plugin)
    spec = AgentSpec(lambda n, _: Reply(calls=[("ask", {"n": n})]), tools={"ask": tool})
    session = harness.session(spec, guard)
    result = await session.turn("go")
    [trip] = guard.trips
    assert (trip.rule, session.model_calls, model.calls) == ("model_calls", 1, 9)
    assert plugin.trips == []
    assert guard.spend()["calls"] == 10
    assert plugin.spend()["calls"] == 9
    assert result.open_calls == []
    assert not guard.guard.runs


@beside_adk
async def test_a_termination_condition_of_the_inner_run_does_not_hide_it_from_the_outer_one(harness: Harness) -> None:
    model = ScriptedModel(lambda n, _: call("look", n=n))
    plugin, guard = RunGuardPlugin(max_model_calls=50), harness.guard(max_model_calls=10)
    ends = TerminationPlugin(MaxIterationsTermination(1_000))
    tool = adk_tool(LlmAgent(name="inner", model=model, tools=[look]), plugin, ends)
    spec = AgentSpec(lambda n, _: Reply(calls=[("ask", {"n": n})]), tools={"ask": tool})
    session = harness.session(spec, guard)
    await session.turn("go")
    assert [trip.rule for trip in guard.trips] == ["model_calls"]
    assert (session.model_calls, model.calls, guard.spend()["calls"]) == (1, 9, 10)
    assert not guard.guard.runs


@beside_adk
async def test_a_shared_store_books_a_call_once(harness: Harness, tmp_path: Any) -> None:
    settings: Any = {
        "store": f"sqlite:///{tmp_path}/guard.db",
        "budgets": [Budget(usd=5, per=f"model:{MODEL}")],
        "prices": PRICES,
        "models": LIMITS,
    }
    model = ScriptedModel([text("inner")], output_tokens=100_000)
    plugin, guard = RunGuardPlugin(**settings), harness.guard(**settings)
    tool = adk_tool(LlmAgent(name="inner", model=model), plugin)
    replies = [Reply(calls=[("ask", {"n": 1})], output_tokens=100_000), Reply("done", output_tokens=100_000)]
    session = harness.session(AgentSpec(lambda n, _: replies[n - 1], tools={"ask": tool}), guard)
    assert (await session.turn("go")).text == "done"
    guard.flush(10)
    plugin.flush(10)
    [status] = [one for one in guard.budgets(f"model:{MODEL}") if one.unit == "usd"]
    assert (float(status.spent), float(status.reserved)) == (0.3, 0)


@beside_adk
async def test_fifty_calls_inside_a_tool_make_ten_in_all(harness: Harness) -> None:
    """The outer agent calls once, then fifty ADK agents at the same time: ten cents each, one dollar in all."""
    models = [ScriptedModel([text("inner")], output_tokens=100_000, latency_s=0.01) for _ in range(50)]
    branches: list[Any] = [LlmAgent(name=f"inner_{n}", model=model) for n, model in enumerate(models)]
    guard = harness.guard(max_usd=1, prices=PRICES, models=LIMITS)
    tool = adk_tool(ParallelAgent(name="all", sub_agents=branches), RunGuardPlugin(prices=PRICES, models=LIMITS))
    first = Reply(calls=[("ask", {"n": 1})], output_tokens=100_000)
    session = harness.session(AgentSpec(lambda n, _: first if n == 1 else Reply("done"), tools={"ask": tool}), guard)
    await asyncio.wait_for(session.turn("go"), 50)
    assert session.model_calls + sum(model.calls for model in models) == 10
    spend = guard.spend()
    assert (float(spend["usd"]), spend["reserved_usd"]) == (1.0, 0)
    assert [trip.rule for trip in guard.trips] == ["budget"]


async def test_fifty_calls_of_all_frameworks_at_once_make_ten(tmp_path: Any) -> None:
    settings: Any = {
        "store": f"sqlite:///{tmp_path}/guard.db",
        "budgets": [Budget(usd=1, per=f"model:{MODEL}")],
        "prices": PRICES,
        "models": LIMITS,
    }
    guards = [harness.guard(**settings) for harness in EVERY]
    spec = AgentSpec(lambda n, _: Reply("done", input_tokens=10, output_tokens=100_000))
    sessions = [EVERY[n % 4].session(spec, guards[n % 4]) for n in range(50)]
    await asyncio.gather(*(session.turn("go") for session in sessions))
    assert sum(session.model_calls for session in sessions) == 10
    for guard in guards:
        guard.flush(10)
    [status] = [one for one in guards[0].budgets(f"model:{MODEL}") if one.unit == "usd"]
    assert (float(status.spent), float(status.reserved)) == (1.0, 0)
