"""``max_reentries``: an agent that is entered again inside its own chain of delegations."""

from collections.abc import Callable
from typing import Any

import pytest
from google.adk.agents import LlmAgent, LoopAgent, ParallelAgent
from google.adk.sessions import InMemorySessionService
from google.adk.tools import ToolContext
from google.adk.tools.agent_tool import AgentTool

import runguard
from runguard import ADKCostBreaker
from runguard.adk import GuardedLlm, RunGuardPlugin
from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, run, text, transfer
from tests.kit.adk_runs import observe
from tests.kit.topologies import NESTED
from tests.kit.topologies import Team as Nested

LEVELS = 6
OUTPUT = 250


def route_to_specialist(task_type: str, tool_context: ToolContext) -> dict[str, str]:
    """Route the task to the agent for its type."""
    tool_context.actions.transfer_to_agent = "orchestrator" if task_type == "orchestrate" else "research_specialist"
    return {"status": "routed"}


class Team:
    """An orchestrator and a specialist that pass the work back and forth for six levels; every level pays for the whole
    history.
    """

    def __init__(self, hand_over: Callable[[str], Any]) -> None:
        self.made = 0

        def passing_to(target: str) -> ScriptedModel:
            def step(_: int, __: Any) -> Any:
                self.made += 1
                return hand_over(target) if self.made < LEVELS else text("done")

            return ScriptedModel(step, prompt_tokens=lambda _: 1_000 * self.made, output_tokens=OUTPUT)

        self.specialist = LlmAgent(
            name="research_specialist",
            description="researches",
            model=passing_to("orchestrator"),
            tools=[route_to_specialist],
        )
        self.root = LlmAgent(
            name="orchestrator",
            model=passing_to("research_specialist"),
            tools=[route_to_specialist],
            sub_agents=[self.specialist],
        )

    @property
    def tokens(self) -> int:
        return sum(1_000 * level + OUTPUT for level in range(1, self.made + 1))


def by_tool(target: str) -> Any:
    return call("route_to_specialist", task_type="orchestrate" if target == "orchestrator" else "research")


HAND_OVERS = pytest.mark.parametrize("hand_over", [transfer, by_tool], ids=["transfer", "routing tool"])


@HAND_OVERS
async def test_the_plugin_stops_at_the_first_reentry_and_saves_84_percent(hand_over: Callable[[str], Any]) -> None:
    free, held = Team(hand_over), Team(hand_over)
    assert (await run(free.root)).texts == ["done"]
    plugin = RunGuardPlugin(max_reentries=1)
    recording = await run(held.root, plugins=[plugin])
    trip = assert_stopped(recording, "reentry")
    assert (free.made, held.made) == (6, 2)
    assert 1 - held.tokens / free.tokens == pytest.approx(0.844, abs=0.001)
    assert (trip.observed, trip.limit, trip.agent_path) == (
        1,
        1,
        ("orchestrator", "research_specialist", "orchestrator"),
    )
    assert "max_reentries" in trip.resume
    assert_calls_answered(recording.session)


@HAND_OVERS
async def test_the_cost_breaker_raises_at_the_first_reentry(hand_over: Callable[[str], Any]) -> None:
    team, breaker = Team(hand_over), ADKCostBreaker(max_delegation_depth=3, max_reentries=1)
    for agent in (team.specialist, team.root):
        breaker.install_on_agent(agent)
    recording = await run(team.root, catch=True)
    assert isinstance(recording.error, runguard.LoopDetectedError)
    assert (recording.error.trip.rule, team.made) == ("reentry", 2)


@HAND_OVERS
async def test_by_default_a_return_is_normal(hand_over: Callable[[str], Any]) -> None:
    team = Team(hand_over)
    plugin = RunGuardPlugin()
    assert (await run(team.root, plugins=[plugin])).texts == ["done"]
    assert (team.made, plugin.trips) == (6, [])


async def test_a_higher_number_allows_returns() -> None:
    team = Team(transfer)
    await run(team.root, plugins=[RunGuardPlugin(max_reentries=3)])
    assert team.made == 4  # orchestrator, specialist, orchestrator, specialist: the third re-entry is refused


@pytest.mark.parametrize("topology", NESTED, ids=lambda topology: topology.__name__)
async def test_a_caller_that_is_entered_inside_its_own_call_is_a_reentry(topology: Callable[[Nested], Any]) -> None:
    """Agents called for a single turn or a task, which pass the work back to whoever called them."""
    team = Nested(endless=True)
    seen = await observe(topology(team), max_reentries=1, play_with={"catch": True})
    (trip,) = seen.plugin.trips
    assert trip.rule == "reentry"
    assert trip.agent_path[-1] in trip.agent_path[:-1]
    assert team.calls <= 3


# ---- what is not a re-entry -----------------------------------------------------------------------------------------


async def healthy(root: Any) -> list[str]:
    plugin = RunGuardPlugin(max_reentries=1)
    recording = await run(root, plugins=[plugin])
    assert plugin.trips == []
    return recording.texts


def helper(name: str, script: Any = None, **options: Any) -> LlmAgent:
    return LlmAgent(name=name, description=f"does {name}", model=ScriptedModel(script or [text(name)]), **options)


async def test_parallel_branches_have_chains_of_their_own() -> None:
    leads = [helper(f"lead{n}", [transfer(f"worker{n}")], sub_agents=[helper(f"worker{n}")]) for n in range(3)]
    assert sorted(await healthy(ParallelAgent(name="all", sub_agents=leads))) == ["worker0", "worker1", "worker2"]


async def test_a_loop_inside_a_call_may_enter_its_agents_again() -> None:
    loop = LoopAgent(name="loop", description="works", sub_agents=[helper("one"), helper("two")], max_iterations=3)
    lead = helper(
        "lead", [call("loop", request="go"), call("loop", request="on"), text("done")], tools=[AgentTool(loop)]
    )
    assert await healthy(lead) == ["done"]


async def test_a_loop_may_have_a_fan_out_before_it_hands_over_anew() -> None:
    lead = helper("lead", lambda n, _: transfer("worker"), sub_agents=[helper("worker")])
    fan_out = ParallelAgent(name="all", sub_agents=[helper("left"), helper("right")])
    loop = LoopAgent(name="loop", sub_agents=[lead, fan_out], max_iterations=3)
    assert (await healthy(loop)).count("worker") == 3


async def test_the_next_turn_starts_a_new_chain() -> None:
    root = helper(
        "lead", [transfer("worker"), text("two")], sub_agents=[helper("worker", [text("one"), transfer("lead")])]
    )
    plugin, service = RunGuardPlugin(max_reentries=1), InMemorySessionService()
    assert (await run(root, plugins=[plugin], session_service=service)).texts == ["one"]
    assert (await run(root, plugins=[plugin], session_service=service)).texts == ["two"]
    assert plugin.trips == []


# ---- ``cycle_repeats`` on hand-offs: agents that pass the work round in a circle, with the plugin and with a guarded
# model alone


LIMITS: dict[str, Any] = {"cycle_repeats": 3, "max_cycle_len": 4}  # of the seed document


def dig(n: int) -> dict[str, int]:
    return {"found": n}


def busy(n: int) -> dict[str, str]:
    return {"error": "the archive is busy"}


def pair(script: Any, guarded: dict[str, Any] | None = None) -> tuple[LlmAgent, ScriptedModel]:
    """A triage agent and a specialist that share a model, guarded or not."""
    model = ScriptedModel(script)
    used = model if guarded is None else GuardedLlm(model, **guarded)
    specialist = LlmAgent(name="research_agent", description="knows more", model=used, tools=[dig, busy])
    return LlmAgent(name="triage_agent", model=used, tools=[dig, busy], sub_agents=[specialist]), model


def ping_pong(n: int, _: Any) -> Any:
    return transfer("research_agent" if n % 2 else "triage_agent")


async def test_the_plugin_stops_in_the_third_round() -> None:
    root, model = pair(ping_pong)
    plugin = RunGuardPlugin(**LIMITS)
    result = await run(root, plugins=[plugin])
    assert model.calls == 6
    trip = assert_stopped(result, "cycle")
    assert (trip.observed, trip.limit, trip.unit) == (3, 3, "rounds of hand-offs")
    assert "triage_agent→research_agent→triage_agent" in trip.message
    assert runguard.LoopDetectedError(trip).pattern == ("triage_agent", "research_agent")
    assert_calls_answered(result.session)


async def test_a_guarded_model_names_the_agents() -> None:
    root, model = pair(ping_pong, LIMITS)
    with pytest.raises(runguard.LoopDetectedError) as caught:
        await run(root)
    assert model.calls == 6
    assert (caught.value.pattern, caught.value.repeats) == (("triage_agent", "research_agent"), 3)


def between(tool: str, end: int) -> Any:
    """Each agent calls a tool before it passes the work on."""

    def script(n: int, request: Any) -> Any:
        if n > end:
            return text("done")
        return call(tool, n=n) if n % 2 else ping_pong(n // 2, request)

    return script


@pytest.mark.parametrize("guarded", [None, LIMITS], ids=["plugin", "guarded model"])
@pytest.mark.parametrize(
    ("script", "calls"),
    [(between("dig", 40), 41), (lambda n, request: ping_pong(n, request) if n < 5 else text("done"), 5)],
    ids=["news between", "one return"],
)
async def test_news_between_hand_offs_is_work_and_one_return_is_normal(
    script: Any, calls: int, guarded: dict[str, Any] | None
) -> None:
    root, model = pair(script, guarded)
    result = await run(root, plugins=[RunGuardPlugin(**LIMITS)] if guarded is None else [])
    assert (result.texts, model.calls) == (["done"], calls)


@pytest.mark.parametrize("guarded", [None, {**LIMITS, "rules": {"stall": False}}], ids=["plugin", "guarded model"])
async def test_a_failure_between_is_no_news(guarded: dict[str, Any] | None) -> None:
    root, model = pair(between("busy", 400), guarded)
    plugins = [RunGuardPlugin(**LIMITS, rules={"stall": False}, on_stop="raise")] if guarded is None else []
    with pytest.raises(runguard.LoopDetectedError) as caught:
        await run(root, plugins=plugins)
    assert caught.value.trip.rule == "cycle"
    assert set(caught.value.pattern) == {"triage_agent", "research_agent"}
    assert model.calls == 12


async def test_stacked_with_the_plugin_only_the_plugin_judges() -> None:
    root, _ = pair(ping_pong, LIMITS)
    plugin = RunGuardPlugin(**LIMITS)
    result = await run(root, plugins=[plugin])
    assert_stopped(result, "cycle")
    assert [trip.rule for trip in plugin.trips] == ["cycle"]
