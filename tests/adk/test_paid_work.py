"""What was paid for is kept: a stop throws away neither finished answers nor those still on their way."""

import json
from collections.abc import Callable
from typing import Any, Literal

import pytest
from google.adk.agents import LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.events import Event
from google.adk.tools.agent_tool import AgentTool
from google.adk.workflow import JoinNode, Workflow

import runguard
from runguard.adk import RunGuardPlugin
from runguard.testing import Recording, ScriptedModel, assert_calls_answered, assert_stopped, call, calls, text
from tests.kit.adk_runs import play
from tests.kit.topologies import Again, Team, step

SLOW = 3


def slow_agents(seconds: float = 0.4, **options: Any) -> list[LlmAgent]:
    """Agents whose only model call takes a while."""
    return [
        LlmAgent(
            name=f"slow{n}",
            description="slow",
            model=ScriptedModel([text(f"paid answer {n}")], latency_s=seconds),
            **options,
        )
        for n in range(SLOW)
    ]


def quick(**options: Any) -> LlmAgent:
    """An agent that never ends and reaches every limit while the others still wait for their model."""
    return LlmAgent(
        name="quick", description="quick", model=ScriptedModel(lambda n, _: call("step", n=n)), tools=[step], **options
    )


def kept(result: Recording) -> int:
    """How many of the slow answers the stored session has."""
    stored = json.dumps([event.model_dump(mode="json", exclude_none=True) for event in result.session.events])
    return sum(f"paid answer {n}" in stored for n in range(SLOW))


def looping(name: str = "looping", **options: Any) -> LlmAgent:
    """An agent that makes the same call for ever: stopped by repetition, in its own branch."""
    return LlmAgent(name=name, description="loops", model=ScriptedModel([call("step", n=1)]), tools=[step], **options)


# ---- a stop of one branch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10, 40])
async def test_a_branch_that_loops_is_stopped_alone(size: int) -> None:
    healthy = [
        LlmAgent(
            name=f"p{n}", model=ScriptedModel([call("step", n=n), text(f"answer {n}")], latency_s=0.05), tools=[step]
        )
        for n in range(1, size)
    ]
    after = ScriptedModel([text("summed up")])
    root = SequentialAgent(
        name="seq",
        sub_agents=[ParallelAgent(name="par", sub_agents=[looping(), *healthy]), LlmAgent(name="after", model=after)],
    )
    plugin = RunGuardPlugin()
    result = await play(root, plugins=[plugin])
    assert sorted(result.texts) == sorted([*(f"answer {n}" for n in range(1, size)), "summed up"])
    (trip,) = plugin.trips
    assert (trip.rule, trip.scope) == ("repetition", "branch")
    assert "looping" in str(trip.branch)
    assert assert_stopped(result) == trip
    assert after.calls == 1, "the run itself was not stopped"
    assert_calls_answered(result.session)


async def test_a_branch_stopped_in_raise_mode_still_keeps_its_siblings() -> None:
    plugin = RunGuardPlugin(on_stop="raise")
    result = await play(ParallelAgent(name="par", sub_agents=[looping(), *slow_agents()]), plugins=[plugin], catch=True)
    assert type(result.error) is runguard.LoopDetectedError
    assert result.error.pattern == ("step",)
    assert kept(result) == SLOW


def loop_around() -> Any:
    return LoopAgent(name="loop", sub_agents=[ParallelAgent(name="par", sub_agents=[looping()])])


def loop_and_sequence_around() -> Any:
    pair = ParallelAgent(name="par", sub_agents=[looping("one"), looping("two")])
    return LoopAgent(name="loop", sub_agents=[SequentialAgent(name="seq", sub_agents=[pair])])


def workflow_cycle_around() -> Any:
    pair = ParallelAgent(name="par", sub_agents=[looping()])

    def again(node_input: Any) -> Event:
        return Event(route="again", output="again")

    return Workflow(name="wf", edges=[("START", pair), (pair, again), (again, {"again": pair})])


def custom_loop_inside() -> Any:
    again = Again(name="custom", sub_agents=[looping()], team=Team(endless=True))
    return ParallelAgent(
        name="par", sub_agents=[again, LlmAgent(name="sibling", model=ScriptedModel([text("sibling is done")]))]
    )


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "shape",
    [loop_around, loop_and_sequence_around, workflow_cycle_around, custom_loop_inside],
    ids=lambda shape: shape.__name__,
)
async def test_a_stopped_branch_does_not_spin(shape: Callable[[], Any]) -> None:
    """The branch may not escalate for its siblings' sake; the loop around or inside it must end all the same."""
    plugin = RunGuardPlugin()
    result = await play(shape(), plugins=[plugin])
    assert_stopped(result, "repetition")
    assert len(result.events) < 100
    assert_calls_answered(result.session)
    assert plugin.snapshot()["runs"] == []


async def test_a_branch_that_spins_after_its_stop_waits_for_its_siblings_whole_work() -> None:
    again = Again(name="custom", sub_agents=[looping()], team=Team(endless=True))
    busy = ScriptedModel([*(call("step", n=n) for n in range(6)), text("busy is done")], latency_s=0.1)
    root = ParallelAgent(name="par", sub_agents=[again, LlmAgent(name="busy", model=busy, tools=[step])])
    result = await play(root, plugins=[RunGuardPlugin()])
    assert busy.calls == 7
    assert result.texts == ["busy is done"]


# ---- a stop of the whole run while others are on their way ----------------------------------------------------------


def beside_in_parallel() -> Any:
    return ParallelAgent(name="par", sub_agents=[quick(), *slow_agents()])


def loop_of_parallel() -> Any:
    return LoopAgent(name="loop", sub_agents=[beside_in_parallel()])


def sequence_with_parallel() -> Any:
    return SequentialAgent(
        name="seq", sub_agents=[beside_in_parallel(), LlmAgent(name="after", model=ScriptedModel([text("never said")]))]
    )


def parallel_of_loop() -> Any:
    return ParallelAgent(name="par", sub_agents=[LoopAgent(name="loop", sub_agents=[quick()]), *slow_agents()])


def parallel_of_sequence() -> Any:
    return ParallelAgent(name="par", sub_agents=[SequentialAgent(name="seq", sub_agents=[quick()]), *slow_agents()])


def parallel_of_parallel() -> Any:
    return ParallelAgent(name="outer", sub_agents=[ParallelAgent(name="par", sub_agents=[quick()]), *slow_agents()])


def parallel_of_custom_loop() -> Any:
    """The custom agent ignores every soft stop, and is ended from outside only when nothing paid is on its way."""
    team = Team(endless=True)
    return ParallelAgent(
        name="par", sub_agents=[Again(name="custom", sub_agents=[team.speaker("quick")], team=team), *slow_agents()]
    )


def workflow_join() -> Any:
    fast, join = quick(), JoinNode(name="join")
    nodes = [fast, *slow_agents()]
    return Workflow(name="wf", edges=[*(("START", node) for node in nodes), *((node, join) for node in nodes)])


def _lead(script: list[Any], **options: Any) -> LlmAgent:
    return LlmAgent(name="lead", model=ScriptedModel(script), **options)


def agents_as_tools() -> Any:
    members = [quick(), *slow_agents()]
    batch = calls(*(call(member.name, request="go") for member in members))
    return _lead([batch, text("never said")], tools=[AgentTool(member) for member in members])


SHAPES: list[Callable[[], Any]] = [
    beside_in_parallel,
    loop_of_parallel,
    sequence_with_parallel,
    parallel_of_loop,
    parallel_of_sequence,
    parallel_of_parallel,
    parallel_of_custom_loop,
    workflow_join,
    agents_as_tools,
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
@pytest.mark.parametrize("on_stop", ["stop", "raise"])
async def test_answers_on_their_way_are_kept(shape: Callable[[], Any], on_stop: Literal["stop", "raise"]) -> None:
    plugin = RunGuardPlugin(max_model_calls=SLOW + 5, on_stop=on_stop)
    result = await play(shape(), plugins=[plugin], catch=on_stop == "raise")
    assert kept(result) == SLOW
    trip = assert_stopped(result, "model_calls")
    assert (len(plugin.trips), trip.model_calls) == (1, SLOW + 5)
    assert "never said" not in result.texts
    assert_calls_answered(result.session)
    assert type(result.error) is (runguard.LimitExceededError if on_stop == "raise" else type(None))
    assert plugin.snapshot()["runs"] == []


@pytest.mark.parametrize("line", [{}, {"max_concurrent_agents": 5, "on_surplus": "queue"}], ids=str)
async def test_calls_that_wait_in_line_within_the_limit_are_made(line: dict[str, Any]) -> None:
    """The limit is reached while allowed calls still wait for their turn: they are part of what was allowed."""
    model = ScriptedModel([text("x")], latency_s=0.02)
    root = ParallelAgent(name="par", sub_agents=[LlmAgent(name=f"p{n}", model=model) for n in range(40)])
    plugin = RunGuardPlugin(max_model_calls=30, **line)
    result = await play(root, plugins=[plugin])
    assert model.calls == 30
    assert result.texts == ["x"] * 30
    assert len(plugin.trips) == 1
