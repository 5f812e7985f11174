"""A stop fires in every topology and harms nothing there; the healthy look-alike is not touched."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from google.adk.agents import LlmAgent, LoopAgent, SequentialAgent
from google.adk.apps import App
from google.adk.events import Event
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.workflow import Workflow
from google.genai import types

import runguard
from runguard import Budget
from runguard.adk import RunGuardPlugin
from runguard.core.decision import STOP_CODE
from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, text
from tests.kit.adk_runs import play, prompts, told
from tests.kit.money import CALL_USD, guard
from tests.kit.topologies import (
    TOPOLOGIES,
    Answer,
    Team,
    agent_tool,
    agent_tool_two_deep,
    agent_tool_with_schema,
    single_turn,
    single_turn_two_at_once,
    spread,
    task,
    task_again,
)

Topology = Callable[[Team], Any]
everywhere = pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology.__name__)


def open_calls(topology: Topology, limit: int) -> int:
    """A task that is stopped is paused, and keeps its delegation open: that is how ADK resumes it."""
    return 1 if topology is task or (topology is task_again and limit % 2) else 0


# ---- firing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("topology", "limit"), spread(*range(1, 7), each=3))
async def test_a_limit_stops_exactly_there_and_harms_nothing(topology: Topology, limit: int) -> None:
    team, plugin = Team(endless=True), RunGuardPlugin(max_model_calls=limit)
    result = await play(topology(team), plugins=[plugin])

    assert team.calls == limit
    trip = assert_stopped(result, "model_calls")
    assert [t.id for t in plugin.trips] == [trip.id]
    assert (trip.limit, trip.model_calls, trip.scope, trip.enforced) == (limit, limit, "run", True)
    streamed, stored = (
        [event for event in events if event.error_code == "RUNGUARD_STOP"]
        for events in (result.events, result.session.events)
    )
    assert told(streamed) == told(stored)
    assert [(event.custom_metadata or {})["runguard"] for event in streamed] == [trip.to_dict()] * len(streamed)
    assert all(event.error_message for event in streamed)
    assert {key for key in result.session.state if not key.endswith("_said") and key != "word"} == set()
    assert_calls_answered(result.session, open_calls=open_calls(topology, limit))
    assert plugin.snapshot()["runs"] == []
    assert plugin.snapshot()["guard_errors"] == 0


@pytest.mark.parametrize(("topology", "limit"), spread(5, 6))
async def test_the_next_turn_works_and_does_not_hear_of_the_stop(topology: Topology, limit: int) -> None:
    team, plugin, service = Team(endless=True), RunGuardPlugin(max_model_calls=limit), InMemorySessionService()
    root = topology(team)
    first = await play(root, plugins=[plugin], session_service=service)
    stop_text = plugin.guard.stop_text(assert_stopped(first))
    assert all(stop_text not in str(value) for value in first.session.state.values()), (
        "the stop became an agent's answer"
    )

    team.calm = True
    second = await play(root, "and now?", plugins=[plugin], session_service=service)
    assert team.calls > limit
    assert second.texts or second.events[-1].output is not None or second.events[-1].actions.escalate
    assert not any(event.error_code for event in second.events)
    assert len(plugin.trips) == 1
    assert_calls_answered(second.session)
    said = str(prompts(team.requests))
    assert stop_text not in said
    assert "RUNGUARD" not in said


@everywhere
async def test_raise_mode_raises_to_the_caller_after_the_clean_stop(topology: Topology) -> None:
    team, plugin = Team(endless=True), RunGuardPlugin(max_model_calls=5, on_stop="raise")
    result = await play(topology(team), plugins=[plugin], catch=True)
    assert type(result.error) is runguard.LimitExceededError
    assert isinstance(result.error, runguard.RunStoppedError)
    assert result.error.trip == plugin.trips[0] == assert_stopped(result)
    assert (result.error.observed, result.error.limit) == (6, 5)
    assert not any(event.error_code == STOP_CODE for event in result.events), (
        "the error is raised in place of the event"
    )
    assert team.calls == 5
    assert len(plugin.trips) == 1
    assert_calls_answered(result.session, open_calls=open_calls(topology, 5))
    assert plugin.snapshot()["runs"] == []


@everywhere
def test_raise_mode_raises_through_the_synchronous_runner(topology: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    in_threads: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", in_threads.append)
    team, plugin, service = (
        Team(endless=True),
        RunGuardPlugin(max_model_calls=5, on_stop="raise"),
        InMemorySessionService(),
    )
    asyncio.run(service.create_session(app_name="app", user_id="u1", session_id="s1"))
    runner = Runner(app=App(name="app", root_agent=topology(team), plugins=[plugin]), session_service=service)
    message = types.Content(role="user", parts=[types.Part(text="go")])
    events: list[Event] = []
    with pytest.raises(runguard.LimitExceededError) as raised:
        events.extend(runner.run(user_id="u1", session_id="s1", new_message=message))
    assert not any(event.error_code == STOP_CODE for event in events), "the error is raised in place of the event"
    session = asyncio.run(service.get_session(app_name="app", user_id="u1", session_id="s1"))
    assert session is not None
    assert raised.value.trip == assert_stopped(session.events)
    assert team.calls == 5
    assert plugin.snapshot()["runs"] == []
    # of a database of an earlier test
    ours = [death for death in in_threads if "_connection_worker_thread" not in death.thread.name]
    assert ours == [], "the runner's thread died with a traceback of its own"


@everywhere
async def test_the_stop_text_is_the_users_own(topology: Topology) -> None:
    team, plugin = Team(endless=True), RunGuardPlugin(max_model_calls=5, stop_text="Bitte wenden.")
    result = await play(topology(team), plugins=[plugin])
    stops = [event for event in result.events if event.error_code == "RUNGUARD_STOP"]
    assert stops
    assert all(event.error_message == "Bitte wenden." for event in stops)
    assert "Bitte wenden." not in result.texts, "a stop is shown as an error, never as an agent's words"


@pytest.mark.parametrize(
    "topology",
    [agent_tool, agent_tool_two_deep, agent_tool_with_schema, single_turn, single_turn_two_at_once],
    ids=lambda t: t.__name__,
)
async def test_an_agent_that_was_stopped_as_a_tool_answers_with_a_refusal(topology: Topology) -> None:
    """Neither silence nor the end user's sentence may pass for the agent's answer; finished answers
    beside it are kept.
    """
    team, plugin = Team(endless=True), RunGuardPlugin(max_model_calls=5)
    result = await play(topology(team), plugins=[plugin])
    *kept, last = [response.response for event in result.session.events for response in event.get_function_responses()]
    assert last["status"] == "not_executed"
    assert "again" in last["message"]
    assert all("status" not in response for response in kept)


# ---- not firing -----------------------------------------------------------------------------------------------------


@everywhere
async def test_a_healthy_run_is_the_same_with_and_without_the_guard(topology: Topology) -> None:
    bare, guarded = Team(endless=False), Team(endless=False)
    heard: list[Any] = []
    kinds = ("session", "user", "agent", "model", "run+agent", "tool")
    budgets = [Budget(usd=1_000, tokens=10**9, calls=10_000, per=kind) for kind in kinds]
    limits: dict[str, Any] = {"max_model_calls": 50, "max_seconds": 60, "max_tool_result_chars": 10_000, "max_usd": 9}
    plugin = guard(**limits, max_context_tokens=1_000_000, budgets=budgets, on_decision=heard.append)
    without = await play(topology(bare))
    with_guard = await play(topology(guarded), plugins=[plugin])
    assert told(with_guard.events) == told(without.events)
    assert told(with_guard.session.events) == told(without.session.events)
    assert with_guard.session.state == without.session.state
    assert prompts(guarded.requests) == prompts(bare.requests)
    assert plugin.flush()
    assert (plugin.trips, heard, plugin.spend()["usd"]) == ([], [], bare.calls * CALL_USD)


@everywhere
async def test_limits_allow_exactly_their_number(topology: Topology) -> None:
    """A run that needs exactly N calls gets them; with one less it is stopped."""
    bare = Team(endless=False)
    await play(topology(bare))
    for limit, stopped in ((bare.calls, False), (bare.calls - 1, True)):
        team, plugin = Team(endless=False), RunGuardPlugin(max_model_calls=limit)
        result = await play(topology(team), plugins=[plugin])
        assert team.calls == limit
        assert bool(plugin.trips) is stopped
        assert any(event.error_code == "RUNGUARD_STOP" for event in result.events) is stopped


# ---- answers that have a shape --------------------------------------------------------------------------------------


def _writer(name: str = "writer", **options: Any) -> tuple[LlmAgent, ScriptedModel]:
    model = ScriptedModel([text('{"word": "yes"}')])
    return LlmAgent(
        name=name, description="writes", model=model, output_schema=Answer, output_key="written", **options
    ), model


def schema_alone(agent: LlmAgent) -> Any:
    return agent


def schema_in_sequence(agent: LlmAgent) -> Any:
    return SequentialAgent(name="seq", sub_agents=[LlmAgent(name="first", model=ScriptedModel([text("one")])), agent])


def schema_in_loop(agent: LlmAgent) -> Any:
    return LoopAgent(name="loop", sub_agents=[agent])


def schema_in_workflow(agent: LlmAgent) -> Any:
    def review(node_input: Any) -> Any:
        return Event(route="again", output="again")

    return Workflow(name="wf", edges=[("START", agent), (agent, review), (review, {"again": agent})])


def schema_in_single_turn(agent: LlmAgent) -> Any:
    agent.mode = "single_turn"
    return LlmAgent(name="lead", model=ScriptedModel(lambda n, _: call("writer", request=f"{n}")), sub_agents=[agent])


SCHEMA_SHAPES = [schema_alone, schema_in_sequence, schema_in_loop, schema_in_workflow, schema_in_single_turn]


@pytest.mark.parametrize("shape", SCHEMA_SHAPES, ids=lambda shape: shape.__name__)
@pytest.mark.parametrize("limit", [1, 2, 3])
async def test_a_stop_neither_breaks_an_output_schema_nor_lands_in_the_state(
    shape: Callable[[LlmAgent], Any], limit: int
) -> None:
    agent, model = _writer()
    plugin = RunGuardPlugin(max_model_calls=limit)
    result = await play(shape(agent), plugins=[plugin])
    assert model.calls <= limit
    if shape is schema_alone:
        assert plugin.trips == []
    elif not (shape is schema_in_sequence and limit > 1):
        assert_stopped(result, "model_calls")
    assert result.session.state.get("written") in (None, {"word": "yes"})
    assert (result.session.state.get("written") is not None) == (model.calls > 0)
    assert_calls_answered(result.session)


async def test_a_schema_beside_tools_is_not_broken_either() -> None:
    """With tools, ADK lets the model answer through set_model_response; a stop comes before it."""

    def look(n: int) -> dict[str, int]:
        return {"seen": n}

    model = ScriptedModel(lambda n, _: call("look", n=n))
    agent = LlmAgent(name="writer", model=model, output_schema=Answer, output_key="written", tools=[look])
    plugin = RunGuardPlugin(max_model_calls=4)
    result = await play(agent, plugins=[plugin])
    assert model.calls == 4
    assert_stopped(result, "model_calls")
    assert "written" not in result.session.state
    assert_calls_answered(result.session)
