"""Trees of agents that nobody drew by hand:
whatever is nested in whatever, a stop ends it, exactly and without harm.
"""

import random
from typing import Any

import pytest
from google.adk.agents import BaseAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.events import Event
from google.adk.sessions import InMemorySessionService
from google.adk.tools.agent_tool import AgentTool
from google.adk.workflow import JoinNode, Workflow

import runguard
from runguard.adk import RunGuardPlugin
from runguard.testing import assert_calls_answered, assert_stopped, call, calls, text, transfer
from tests.kit.adk_runs import play, prompts
from tests.kit.optional import present
from tests.kit.topologies import Again, Team, step

SEEDS = [3, 66, 102, 123, 124, 132, *range(200, 212)]


class Tree:
    """A random application. The same seed gives the same tree; ``endless`` only changes what its agents say."""

    def __init__(self, seed: int, *, endless: bool) -> None:
        self.random = random.Random(seed)
        self.team = Team(endless=endless)
        self._names = 0
        self._in_workflow = False
        self.root = self._workflow() if self.random.random() < 0.3 else self._branch(3)
        self.limit = self.random.randint(1, 14)
        for model in self.team.models.values():
            model.latency_s = self.random.choice([0, 0, 0.01, 0.03])

    def _name(self, kind: str) -> str:
        self._names += 1
        return f"{kind}{self._names}"

    def _branch(self, depth: int) -> BaseAgent:
        if depth <= 0 or self.random.random() < 0.25:
            return self._leaf()
        kind = self.random.choice(["sequence", "loop", "parallel", "custom"])
        children = [self._branch(depth - 1) for _ in range(1 if kind == "custom" else self.random.randint(1, 3))]
        match kind:
            case "sequence":
                return SequentialAgent(name=self._name("seq"), sub_agents=children)
            case "loop":
                return LoopAgent(
                    name=self._name("loop"), sub_agents=children, max_iterations=None if self.team.endless else 2
                )
            case "parallel":
                return ParallelAgent(name=self._name("par"), sub_agents=children)
        return Again(name=self._name("custom"), sub_agents=children, team=self.team)

    def _leaf(self) -> BaseAgent:
        team, done = self.team, text("done")
        # Old versions of ADK cannot run a single-turn agent's own single-turn agents, and an agent of a Workflow is
        # one.
        kind = self.random.choice(
            [
                "worker",
                "speaker",
                "repeating",
                "agent tools",
                "transfer",
                "speaker" if self._in_workflow else "single turn",
            ]
        )
        match kind:
            case "worker":
                return team.worker(self._name("worker"))
            case "speaker":
                return team.speaker(self._name("speaker"))
            case "repeating":
                return team.agent(
                    self._name("repeating"), [call("step", n=1), done], lambda n: call("step", n=1), tools=[step]
                )
            case "transfer":
                child = team.worker(self._name("child"))
                return team.agent(
                    self._name("lead"), [transfer(child.name), done], lambda n: transfer(child.name), sub_agents=[child]
                )
            case "single turn":
                helpers = [
                    team.speaker(self._name("helper"), mode="single_turn") for _ in range(self.random.randint(1, 3))
                ]
                return self._asking(helpers, sub_agents=helpers)
        called = [self._branch(1) for _ in range(self.random.randint(1, 2))]
        return self._asking(called, tools=[AgentTool(agent) for agent in called])

    def _asking(self, agents: list[Any], **options: Any) -> BaseAgent:
        def ask(n: int) -> Any:
            return calls(*(call(agent.name, request=f"part {n}") for agent in agents))

        return self.team.agent(self._name("lead"), [ask(1), text("done")], ask, **options)

    def _workflow(self) -> Workflow:
        self._in_workflow = True
        nodes, join = [self._branch(1) for _ in range(self.random.randint(1, 3))], JoinNode(name="join")
        rounds = 0

        def start(node_input: Any) -> str:
            return "go"

        def review(node_input: Any) -> Event:
            nonlocal rounds
            rounds += 1
            again = not self.team.calm and (self.team.endless or rounds < 2)
            return Event(route="again" if again else "good", output="reviewed")

        def publish(node_input: Any) -> str:
            return "published"

        fan = [(start, node) for node in nodes] + [(node, join) for node in nodes]
        return Workflow(
            name="wf", edges=[("START", start), *fan, (join, review), (review, {"again": start, "good": publish})]
        )


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_random_tree_ends_exactly_and_without_harm(seed: int) -> None:
    tree = Tree(seed, endless=True)
    plugin, service = RunGuardPlugin(max_model_calls=tree.limit), InMemorySessionService()
    result = await play(tree.root, plugins=[plugin], session_service=service, seconds=20)

    assert tree.team.calls <= tree.limit
    whole = [trip for trip in plugin.trips if trip.scope == "run"]
    assert len(whole) <= 1
    if whole and whole[0].rule == "model_calls":
        assert tree.team.calls == tree.limit
    if plugin.trips:
        assert_stopped(result)
    assert {event.error_code for event in result.events} <= {None, "RUNGUARD_STOP"}
    assert all(runguard.trip(event) in plugin.trips for event in result.events if event.error_code)
    assert_calls_answered(result.session)
    said = {plugin.guard.stop_text(trip) for trip in plugin.trips}
    assert not any(words in str(value) for value in result.session.state.values() for words in said)
    assert plugin.snapshot()["runs"] == []
    assert plugin.snapshot()["guard_errors"] == 0

    if not _ends_when_calm(tree.root):
        return
    tree.team.calm, before = True, tree.team.calls
    for model in tree.team.models.values():
        model.requests.clear()
    plugin = RunGuardPlugin(max_model_calls=500)
    await play(tree.root, "and now?", plugins=[plugin], session_service=service, seconds=20)
    assert tree.team.calls > before
    assert plugin.trips == []
    assert not any(words in str(prompts(tree.team.requests)) for words in said)


def _ends_when_calm(agent: Any) -> bool:
    """A LoopAgent without a limit goes on however calm its members are."""
    if isinstance(agent, Workflow):
        return all(_ends_when_calm(node) for node in present(agent.graph).nodes)
    tools = [tool.agent for tool in getattr(agent, "tools", []) if isinstance(tool, AgentTool)]
    below = [*(getattr(agent, "sub_agents", None) or []), *tools]
    return not isinstance(agent, LoopAgent) and all(_ends_when_calm(part) for part in below)


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_healthy_random_tree_is_left_alone(seed: int) -> None:
    bare, tree = Tree(seed, endless=False), Tree(seed, endless=False)
    heard: list[Any] = []
    plugin = RunGuardPlugin(on_decision=heard.append)
    without, result = await play(bare.root), await play(tree.root, plugins=[plugin])
    assert sorted(result.texts) == sorted(without.texts)
    assert {name: model.calls for name, model in tree.team.models.items()} == {
        name: model.calls for name, model in bare.team.models.items()
    }
    assert result.session.state == without.session.state
    assert plugin.flush()
    assert heard == []
    assert plugin.snapshot()["guard_errors"] == 0


@pytest.mark.parametrize("seed", SEEDS[:12])
async def test_a_random_tree_raises_to_its_caller(seed: int) -> None:
    tree = Tree(seed, endless=True)
    plugin = RunGuardPlugin(max_model_calls=tree.limit, on_stop="raise")
    result = await play(tree.root, plugins=[plugin], catch=True, seconds=20)
    assert isinstance(result.error, runguard.RunStoppedError) is bool(plugin.trips)
    assert_calls_answered(result.session)
