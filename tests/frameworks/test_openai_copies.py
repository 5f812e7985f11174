"""Guarded agents can be copied and thrown away like plain ones."""

import copy
import dataclasses
import gc
import pickle
import weakref
from typing import Any

import pytest
from agents import Agent, AgentHooks, Runner, function_tool

from runguard.openai_agents import AgentGuard, guarded
from runguard.testing.conformance import AgentSpec, Reply
from tests.frameworks.openai_harness import ScriptedModel


@function_tool
def look(page: int) -> str:
    return f"page {page}"


def worker(calls: list[int], **parts: Any) -> Agent[Any]:
    model = ScriptedModel(
        AgentSpec(lambda n, _: Reply(calls=[("look", {"page": n})]) if n < 3 else Reply("done")), calls
    )
    return Agent(name="worker", model=model, tools=[look], **parts)


async def test_the_items_of_a_result_can_be_copied() -> None:
    agent = guarded(worker([0]))
    result = await Runner.run(agent, "go")
    assert len(copy.deepcopy(result.new_items)) == len(result.new_items)


@pytest.mark.parametrize("by_name", [False, True], ids=["model", "name"])
async def test_a_copy_of_a_guarded_agent_has_the_same_guard(by_name: bool) -> None:
    calls = [0]
    if by_name:
        assert copy.deepcopy(guarded(Agent(name="worker", model="gpt-5-mini"))).runguard
        return
    agent = guarded(worker(calls, handoffs=[worker(calls)]), max_model_calls=2)
    copied = copy.deepcopy(agent)
    assert copied.runguard is agent.runguard
    await Runner.run(copied, "go")
    assert calls == [0], "the model was copied with what it holds"
    assert [trip.rule for trip in agent.runguard.trips] == ["model_calls"]


def test_agents_that_are_dropped_are_released() -> None:
    guard = AgentGuard()
    alive: list[weakref.ref[Any]] = []
    for _ in range(50):
        first, second = worker([0]), worker([0])
        first.handoffs, second.handoffs = [second], [first]
        made = guard.guarded(first)
        assert guard.guarded(first) is made
        alive += [weakref.ref(first), weakref.ref(second), weakref.ref(made)]
    del first, second, made
    gc.collect()
    assert sum(one() is not None for one in alive) == 0


def test_a_copy_is_equal_to_its_agent_alone() -> None:
    guard, first, second = AgentGuard(), worker([0]), worker([0])
    first.handoffs = [second]
    made = guard.guarded(first)
    [target] = made.handoffs
    assert (made, target) == (first, second)
    assert (first, second) == (made, target)
    assert (made == second, made == target) == (False, False)
    assert made in [second, first]
    assert made == guard.guarded(first)


async def test_a_copy_follows_what_its_agent_is_given_later() -> None:
    """A handler may guard one agent for each request, and change it in between."""
    calls = [0]
    guard, plain = AgentGuard(max_model_calls=2), worker(calls, instructions="Be brief.")
    made = guard.guarded(plain)
    made.tools = []
    plain.instructions, plain.handoffs = "Be long.", [Agent(name="other")]
    again = guard.guarded(plain)
    assert again is made
    assert (made.instructions, [type(one).__name__ for one in made.handoffs]) == ("Be long.", ["GuardedAgent"])
    assert made.tools == [], "what was not changed in the original stays"
    plain.handoffs.append(Agent(name="third"))
    plain.tools, plain.model = [look], worker(calls).model
    guard.guarded(plain)
    names: list[Any] = made.handoffs
    assert [one.name for one in names] == ["other", "third"]
    await Runner.run(made, "go")
    assert calls == [2]


def test_an_agent_never_gets_the_copy_of_another_one() -> None:
    """Agents that are dropped pass their identity on to new ones."""
    guard = AgentGuard()
    copies = [
        guard.guarded(Agent(name=str(number), model=ScriptedModel(AgentSpec(_done), [0]))) for number in range(50)
    ]
    assert [made.name for made in copies] == [str(number) for number in range(50)]


def _done(*_: Any) -> Reply:
    return Reply("done")


async def test_what_a_run_gives_shows_the_guarded_copy() -> None:
    """The documentation promises it."""
    shown: list[Any] = []

    class Seen(AgentHooks[Any]):
        async def on_start(self, context: Any, agent: Any) -> None:
            shown.append(agent)

    plain = worker([0], hooks=Seen())
    agent = guarded(plain)
    result = await Runner.run(agent, "go")
    assert shown == [agent]
    assert result.last_agent is agent
    assert all(item.agent is agent for item in result.new_items)
    assert agent.tools == plain.tools
    assert agent.hooks is plain.hooks


async def test_copies_work_and_pickling_fails_with_a_clear_error() -> None:
    endless = ScriptedModel(AgentSpec(lambda n, _: Reply(calls=[("look", {"page": n})])), [0])
    agent = guarded(worker([0], handoffs=[worker([0])]), max_model_calls=2)
    agent.model = endless
    for copied in (copy.copy(agent), copy.deepcopy(agent), agent.clone(name="other"), dataclasses.replace(agent)):
        assert copied.runguard is agent.runguard
        await Runner.run(copied, "go")
    assert len(agent.runguard.trips) == 4
    with pytest.raises(TypeError, match="'worker' cannot be pickled: pickle the agent, then call guarded"):
        pickle.dumps(agent)
    result = await Runner.run(agent, "go")
    assert agent.runguard.spent(copy.deepcopy(result)) == agent.runguard.spent(result)
