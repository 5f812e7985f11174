"""The Strands plugin plays every conformance scenario, and holds where agents share the state of an invocation."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from runguard.testing import conformance
from runguard.testing.conformance import AgentSpec, Reply, Script

pytest.importorskip("strands", reason="strands-agents is not among the oldest supported frameworks")
from strands import Agent, ToolContext, tool
from strands.multiagent import GraphBuilder

from runguard.strands import RunGuard
from tests.frameworks.strands_harness import ScriptedModel, StrandsHarness


@pytest.mark.parametrize(("name", "mode"), conformance.CASES)
async def test_scenario(name: str, mode: str) -> None:
    await conformance.check(StrandsHarness(), name, mode)


@tool
def look(page: int) -> str:
    """Return a page."""
    return f"page {page}"


def looking(number: int, _: str) -> Reply:
    return Reply(calls=[("look", {"page": number})]) if number <= 60 else Reply("gave up")


def agent(guard: RunGuard, name: str, script: Script, tool: Callable[..., Any] = look) -> tuple[Agent, list[int]]:
    """Return an agent of Strands and the number of its model calls."""
    calls, spec = [0], AgentSpec(script)
    made = Agent(
        model=ScriptedModel(spec, calls), name=name, tools=[tool], plugins=[guard], callback_handler=None,
        retry_strategy=None,
    )  # fmt: skip
    return made, calls


def test_the_nodes_of_a_graph_are_guarded_each_for_itself() -> None:
    guard, made = RunGuard(max_model_calls=5), GraphBuilder()
    nodes = [agent(guard, name, looking) for name in ("one", "two", "three")]
    for node, _ in nodes:
        made.add_node(node, node.name)
        made.set_entry_point(node.name)
    made.set_max_node_executions(10)
    made.build()("go")
    assert [calls for _, [calls] in nodes] == [5, 5, 5]
    assert not guard.guard.runs


def test_an_agent_that_gets_the_state_of_its_caller_leaves_the_caller_guarded() -> None:
    guard = RunGuard(max_model_calls=6)
    inner, inner_calls = agent(guard, "inner", lambda n, _: Reply("done"))

    @tool(context=True)
    async def ask(request: str, tool_context: ToolContext) -> str:
        """Ask the other agent."""
        return str(await inner.invoke_async(request, invocation_state=tool_context.invocation_state))

    outer, outer_calls = agent(guard, "outer", lambda n, _: Reply(calls=[("ask", {"request": f"task {n}"})]), ask)
    outer("go")
    assert inner_calls[0] + outer_calls[0] == 6
    assert [trip.rule for trip in guard.trips] == ["model_calls"]
    assert not guard.guard.runs


@pytest.mark.parametrize(("outer", "inner"), [(3, 9), (9, 3)])
def test_two_guards_of_one_agent_both_hold_and_count_a_call_once(outer: int, inner: int) -> None:
    class Second(RunGuard):
        name = "second"

    guards: list[Any] = [RunGuard(max_model_calls=outer), Second(max_model_calls=inner)]
    calls = [0]
    model = ScriptedModel(AgentSpec(looking), calls)
    Agent(model=model, tools=[look], plugins=guards, callback_handler=None)("go")
    assert calls == [3]
    assert [guard.spend()["calls"] for guard in guards] == [3, 3]
    assert not any(guard.guard.runs for guard in guards)


@pytest.mark.parametrize("delay", [0, 0.05])
def test_an_agent_that_a_timer_of_a_tool_starts_belongs_to_the_run(delay: float) -> None:
    guard = RunGuard(max_model_calls=6)
    inner, inner_calls = agent(guard, "inner", looking)

    @tool
    def later() -> str:
        """Ask the other agent."""
        timer = threading.Timer(delay, inner, ("go",))  # Strands lets OpenTelemetry replace how timers start
        timer.start()
        timer.join()
        return "done"

    outer, outer_calls = agent(guard, "outer", lambda n, _: Reply(calls=[("later", {})]), later)
    outer("go")
    assert (outer_calls, inner_calls) == ([1], [5])
    assert not guard.guard.runs
