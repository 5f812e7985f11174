"""Agents that are called by a model and pass the work back up: hand-offs inside of single-turn calls and tasks."""

from collections.abc import Callable
from typing import Any

import pytest
from google.adk.agents import LlmAgent, ParallelAgent

from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, calls, text, transfer
from tests.kit.adk_runs import observe, play, prompts, told
from tests.kit.topologies import (
    LOST_TASKS,
    NESTED,
    OLDER_TASKS,
    Team,
    single_turn_back,
    single_turn_back_by_a_peer,
    single_turn_back_to_its_lead,
    step,
    task_back,
)

Topology = Callable[[Team], Any]
everywhere = pytest.mark.parametrize("topology", NESTED, ids=lambda topology: topology.__name__)
newer_tasks = pytest.mark.skipif(
    LOST_TASKS, reason="this ADK calls a task from inside of itself as a tool that never answers"
)
LOOP_RULES = {"handoff", "no_news", "repetition"}


# ---- circles --------------------------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("depth", [2, 5, None])
async def test_a_circle_through_delegated_agents_is_stopped_by_a_loop_rule(
    topology: Topology, depth: int | None
) -> None:
    team = Team(endless=True)
    seen = await observe(topology(team), max_delegation_depth=depth, max_model_calls=200, play_with={"catch": True})
    (trip,) = seen.plugin.trips
    assert trip.rule in (LOOP_RULES if depth is None else {*LOOP_RULES, "depth"})
    assert team.calls <= 30
    assert_stopped(seen.result, trip.rule)


@pytest.mark.parametrize(
    "topology", [single_turn_back, single_turn_back_by_a_peer, single_turn_back_to_its_lead], ids=lambda t: t.__name__
)
async def test_hand_offs_are_counted_across_the_calls_they_happen_in(topology: Topology) -> None:
    team = Team(endless=True)
    seen = await observe(topology(team), max_delegation_depth=None)
    trip = assert_stopped(seen.result, "handoff")
    assert (trip.observed, trip.limit, trip.scope) == (6, 6, "run")
    assert team.models["helper"].calls == 6, "each of them handed the work over once"
    assert set(seen.rules) == {("nudge", "handoff"), ("stop", "handoff")}
    assert_calls_answered(seen.result.session)


@newer_tasks
async def test_hand_offs_are_counted_across_the_starts_of_a_task() -> None:
    team = Team(endless=True)
    seen = await observe(task_back(team), max_delegation_depth=None)
    trip = assert_stopped(seen.result, "handoff")
    assert (trip.observed, trip.scope, team.models["tasked"].calls) == (6, "run", 6)
    assert trip.agent_path[:2] == ("lead", "tasked")
    assert_calls_answered(seen.result.session, open_calls=1)  # a stopped task is paused


@pytest.mark.skipif(not LOST_TASKS, reason="this ADK starts the task instead")
async def test_a_call_that_never_gets_an_answer_is_stopped_when_it_is_made_again_and_again() -> None:
    """This ADK calls a task from inside of itself as a tool, gives no answer and asks the model again, whatever it asks
    for.
    """
    models = {
        "lead": ScriptedModel(lambda n, _: call("tasked", request=f"room {n}")),
        "tasked": ScriptedModel(lambda n, _: transfer("lead")),
    }
    tasked = LlmAgent(name="tasked", description="works", model=models["tasked"], mode="task")
    seen = await observe(
        LlmAgent(name="lead", model=models["lead"], sub_agents=[tasked]), max_model_calls=200, play_with={"catch": True}
    )
    trip = assert_stopped(seen.result, "repetition")
    assert (trip.observed, trip.unit, trip.tool) == (9, "equal calls without an answer", "tasked")
    assert models["lead"].calls == 10


async def test_a_circle_of_parallel_calls_does_not_grow() -> None:
    """Every answer asks two agents, each of them passes the work back: twice as many at each level."""

    def both(n: int) -> Any:
        return calls(call("left", request="room"), call("right", request="room"))

    team = Team(endless=True)
    delegates = [
        team.agent(name, [transfer("lead")], lambda n: transfer("lead"), mode="single_turn")
        for name in ("left", "right")
    ]
    seen = await observe(team.agent("lead", [both(1)], both, sub_agents=delegates), max_model_calls=200)
    assert {trip.rule for trip in seen.plugin.trips} <= {"handoff", "no_news"}
    assert team.calls < 100
    assert_calls_answered(seen.result.session)


# ---- depth ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 3])
async def test_single_turn_calls_inside_each_other_are_levels(limit: int) -> None:
    """The call that is too deep is refused, and the model that asked can still answer."""
    team = Team(endless=True)
    root = single_turn_back(team)
    ask = team.models["lead"]._script

    def lead(n: int, request: Any) -> Any:
        team.calm = team.calm or "too many times" in str(request.contents)
        return ask(n, request)

    team.models["lead"]._script = lead
    seen = await observe(root, max_delegation_depth=limit)
    assert seen.plugin.trips == []
    assert set(seen.rules) == {("block", "depth")}
    assert team.models["helper"].calls == limit
    refused = [answer for answer in seen.answers if answer.get("status") == "not_executed"]
    assert refused
    assert "delegated too many times" in refused[0]["message"]
    assert_calls_answered(seen.result.session)


@newer_tasks
@pytest.mark.parametrize("limit", [1, 2, 3])
async def test_tasks_inside_each_other_are_levels(limit: int) -> None:
    """The caller of a task cannot hear a refusal: the run is stopped, and says so."""
    team = Team(endless=True)
    seen = await observe(task_back(team), max_delegation_depth=limit)
    trip = assert_stopped(seen.result, "depth")
    assert (trip.observed, trip.limit, trip.unit) == (limit + 1, limit, "nested delegations")
    assert team.models["tasked"].calls == limit
    assert seen.result.texts == [], "a stop is not an agent's answer"


@newer_tasks
async def test_a_task_that_is_over_is_no_level_any_more() -> None:
    """Three times a task comes back to the lead, and starts again there; each start is over before the next task
    begins.
    """
    finish = call("finish_task", result="clean")
    models = {
        "lead": ScriptedModel(
            [
                call("tasked", request="one"),
                call("tasked", request="two"),
                call("tasked", request="three"),
                text("all done"),
            ]
        ),
        "tasked": ScriptedModel(lambda n, _: transfer("lead") if n % 2 else finish),
    }
    tasked = LlmAgent(name="tasked", description="works", model=models["tasked"], mode="task")
    lead = LlmAgent(name="lead", model=models["lead"], sub_agents=[tasked])
    seen = await observe(lead, max_delegation_depth=4)
    assert seen.plugin.trips == []
    assert seen.result.texts[-1] == "all done"


def _chain_of(mode: str, levels: int) -> LlmAgent:
    """Each agent delegates to the one below it."""
    agent: LlmAgent | None = None
    for level in range(levels, 0, -1):
        done = call("finish_task", result="clean") if mode == "task" else text(f"level {level} is done")
        script = [call(f"level_{level + 1}", request="go on"), done] if agent is not None else [done]
        agent = LlmAgent(
            name=f"level_{level}",
            description="works",
            model=ScriptedModel(script),
            mode=mode,
            sub_agents=[agent] if agent else [],
        )
    assert agent is not None
    return LlmAgent(
        name="lead", model=ScriptedModel([call("level_1", request="go on"), text("lead is done")]), sub_agents=[agent]
    )


@newer_tasks
@pytest.mark.parametrize("mode", ["single_turn", "task"])
async def test_agents_below_each_other_are_as_deep_as_they_stand(mode: str) -> None:
    within = await observe(_chain_of(mode, 4), max_delegation_depth=4)
    assert (within.plugin.trips, within.decisions, within.result.texts[-1]) == ([], [], "lead is done")
    beyond = await observe(_chain_of(mode, 4), max_delegation_depth=3)
    assert beyond.rules[0] == ("stop" if mode == "task" else "block", "depth")


# ---- healthy ones ---------------------------------------------------------------------------------------------------


async def _untouched(make: Callable[[Team], Any], **policy: Any) -> None:
    bare, guarded = Team(endless=False), Team(endless=False)
    heard: list[Any] = []
    without = await play(make(bare), catch=True)
    plugin = RunGuardPlugin(on_decision=heard.append, **policy)
    with_guard = await play(make(guarded), plugins=[plugin], catch=True)
    assert told(with_guard.events) == told(without.events)
    assert told(with_guard.session.events) == told(without.session.events)
    assert prompts(guarded.requests) == prompts(bare.requests)
    assert type(with_guard.error) is type(without.error)
    assert plugin.flush()
    assert (plugin.trips, heard, plugin.snapshot()["runs"], plugin.snapshot()["guard_errors"]) == ([], [], [], 0)


@everywhere
async def test_passing_the_work_back_once_is_healthy(topology: Topology) -> None:
    if topology is task_back and OLDER_TASKS:
        pytest.skip("this ADK fails when a task is handed over to its caller")
    await _untouched(topology)


def _fan_out_to_an_expert(team: Team) -> Any:
    """Twelve calls at once, each passed on to the same expert."""
    expert = team.agent("expert", [text("like this")], lambda n: text("like this"))
    helper = team.agent("helper", [transfer("expert")], lambda n: transfer("expert"), mode="single_turn")
    rooms = calls(*(call("helper", request=f"room {n}") for n in range(12)))
    return team.agent("lead", [rooms, text("lead is done")], lambda n: rooms, sub_agents=[helper, expert])


def _rooms_by_an_expert(team: Team) -> Any:
    """Ten calls, one after the other, each passed on to the same expert."""
    expert = team.agent("expert", [text("like this")], lambda n: text("like this"))
    helper = team.agent("helper", [transfer("expert")], lambda n: transfer("expert"), mode="single_turn")
    rooms = [call("helper", request=f"room {n}") for n in range(10)]
    return team.agent("lead", [*rooms, text("lead is done")], lambda n: rooms[0], sub_agents=[helper, expert])


def _tasks_one_after_the_other(team: Team) -> Any:
    finish = call("finish_task", result="clean")
    tasked = team.agent("tasked", [call("step", n=1), finish] * 10, lambda n: finish, mode="task", tools=[step])
    rooms = [call("tasked", request=f"room {n}") for n in range(10)]
    return team.agent("lead", [*rooms, text("lead is done")], lambda n: rooms[0], sub_agents=[tasked])


def _task_with_parallel_work(team: Team) -> Any:
    """Inside of a task, branches of a ParallelAgent look at the same things."""
    par = ParallelAgent(name="par", description="all at once", sub_agents=[team.worker(f"p{n}") for n in range(3)])
    tasked = team.agent(
        "tasked",
        [transfer("par"), call("finish_task", result="clean")],
        lambda n: transfer("par"),
        mode="task",
        sub_agents=[par],
    )
    return team.agent(
        "lead", [call("tasked", request="rooms"), text("lead is done")], lambda n: text("done"), sub_agents=[tasked]
    )


def _deeper_with_news(team: Team) -> Any:
    """Four calls inside each other, each with something new: a question that is taken apart."""

    def helper(n: int) -> Any:
        return call("step", n=n) if n % 2 else transfer("lead")

    healthy = [helper(n) for n in range(1, 9)]
    agent = team.agent("helper", healthy, helper, mode="single_turn", tools=[step])
    asks = [call("helper", request=f"part {n}") for n in range(4)]
    return team.agent("lead", [*asks, text("lead is done")], lambda n: asks[0], sub_agents=[agent])


@pytest.mark.parametrize(
    "make",
    [
        _fan_out_to_an_expert,
        _rooms_by_an_expert,
        _tasks_one_after_the_other,
        _task_with_parallel_work,
        _deeper_with_news,
    ],
    ids=lambda make: make.__name__.lstrip("_"),
)
async def test_healthy_delegation_is_untouched(make: Topology) -> None:
    # newer ADK loses what the expert has said: the lead finds nothing, ten times
    await _untouched(make, rules={"empty": False})
