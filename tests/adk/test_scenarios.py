"""Incidents that users reported, with their exact numbers. Every call has 1,000 prompt and 250 output tokens."""

from collections.abc import Callable
from typing import Any

import pytest
from google.adk.agents import BaseAgent, LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.apps import App
from google.adk.events import Event
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools import ToolContext
from google.adk.workflow import Workflow
from google.genai import types

import runguard
from runguard import ToolRule
from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, text, transfer
from tests.kit.adk_runs import play
from tests.kit.optional import present

CALL_TOKENS = 1_250


# ---- V1: a soft failure in a loop -----------------------------------------------------------------------------------


async def test_v1_a_soft_failure_in_a_loop_agent_ends_at_the_third() -> None:
    runs = 0

    def parse_document_fragment(fragment: str, hint: str) -> dict[str, Any]:
        nonlocal runs
        runs += 1
        return {"status": "partial_parse_error", "data": None}

    model = ScriptedModel(
        lambda n, _: call("parse_document_fragment", fragment="x", hint=f"hint {n}") if n % 2 else text("retry")
    )
    worker = LlmAgent(name="worker", model=model, tools=[parse_document_fragment])
    plugin = RunGuardPlugin(max_identical_tool_results=3)
    result = await play(LoopAgent(name="loop", max_iterations=8, sub_agents=[worker]), plugins=[plugin])

    assert (runs, model.calls) == (3, 5)
    assert assert_calls_answered(result.session) == 3
    (trip,) = plugin.trips
    assert (trip.rule, trip.tool, trip.observed, trip.limit) == ("stall", "parse_document_fragment", 3, 3)
    assert trip.tokens == 5 * CALL_TOKENS
    assert assert_stopped(result) == trip


# ---- V2: the same successful call -----------------------------------------------------------------------------------


def _user_lookup() -> tuple[Any, list[int]]:
    runs: list[int] = []

    def get_user(uid: int) -> dict[str, str]:
        runs.append(uid)
        return {"name": "Ann"}

    return get_user, runs


async def test_v2a_the_third_identical_call_is_refused_and_the_fourth_stops() -> None:
    tool, runs = _user_lookup()
    model = ScriptedModel([call("get_user", uid=1)])
    plugin = RunGuardPlugin(rules={"repetition": {"block": 3}})
    result = await play(LlmAgent(name="worker", model=model, tools=[tool]), plugins=[plugin])

    assert (len(runs), model.calls) == (2, 4)
    assert assert_calls_answered(result.session) == 4
    answers = [response.response for event in result.events for response in event.get_function_responses()]
    assert [present(answer).get("status") for answer in answers] == [None, None, "not_executed", "not_executed"]
    assert len(plugin.trips) == 1
    assert assert_stopped(result, "repetition").tool == "get_user"


async def test_v2b_a_model_that_heeds_the_refusal_finishes() -> None:
    tool, runs = _user_lookup()
    model = ScriptedModel([call("get_user", uid=1)] * 3 + [text("Ann")])
    plugin = RunGuardPlugin(rules={"repetition": {"block": 3}})
    result = await play(LlmAgent(name="worker", model=model, tools=[tool]), plugins=[plugin])
    assert (len(runs), model.calls) == (2, 4)
    assert plugin.trips == []
    assert result.texts == ["Ann"]


# ---- V3: polling that makes progress --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_identical_tool_results": 3},
        {"rules": {"repetition": {"block": 3}}},
        {"max_identical_tool_results": 3, "max_handoff_repeats": 3},
    ],
    ids=str,
)
async def test_v3_polling_that_moves_is_left_alone(limits: dict[str, Any]) -> None:
    runs = 0
    heard: list[Any] = []

    def check_job(job: str) -> dict[str, Any]:
        nonlocal runs
        runs += 1
        return {"status": "RUNNING", "progress": 8 * runs} if runs < 12 else {"status": "DONE"}

    model = ScriptedModel([call("check_job", job="j")] * 12 + [text("done")])
    plugin = RunGuardPlugin(**limits, on_decision=heard.append)
    result = await play(LlmAgent(name="worker", model=model, tools=[check_job]), plugins=[plugin])
    assert plugin.flush()
    assert (model.calls, runs, plugin.trips, heard) == (13, 12, [], [])
    assert result.texts == ["done"]


async def test_v3_a_declared_polling_tool_may_repeat_itself() -> None:
    runs = 0
    heard: list[Any] = []

    def check_job(job: str) -> dict[str, Any]:
        nonlocal runs
        runs += 1
        return {"status": "RUNNING"} if runs < 7 else {"status": "DONE"}

    model = ScriptedModel([call("check_job", job="j")] * 7 + [text("done")])
    plugin = RunGuardPlugin(
        max_identical_tool_results=3,
        tools={"check_job": ToolRule(polling=True, max_calls=10)},
        on_decision=heard.append,
    )
    result = await play(LlmAgent(name="worker", model=model, tools=[check_job]), plugins=[plugin])
    assert plugin.flush()
    assert (runs, plugin.trips, heard) == (7, [], [])
    assert result.texts == ["done"]


# ---- V4: ping-pong --------------------------------------------------------------------------------------------------


async def test_v4_a_transfer_ping_pong_ends_with_its_path() -> None:
    model = ScriptedModel(lambda n, _: transfer("B") if n % 2 else transfer("A"))
    child = LlmAgent(name="B", description="b", model=model)
    plugin = RunGuardPlugin(max_handoff_repeats=3)
    result = await play(LlmAgent(name="A", model=model, sub_agents=[child]), plugins=[plugin])
    assert model.calls == 5
    trip = assert_stopped(result, "handoff")
    assert "A→B→A→B→A" in trip.message
    assert trip.agent_path == ("A", "B", "A", "B", "A")
    assert_calls_answered(result.session)
    assert len(plugin.trips) == 1


def _three_peers(*, work: bool) -> tuple[LlmAgent, list[ScriptedModel], list[int]]:
    """A lead and three peers that pass the task on in a circle, with or without a real tool result between two hops."""
    done: list[int] = []

    def dig(n: int) -> dict[str, int]:
        done.append(n)
        return {"found": n}

    names = ["a", "b", "c"]
    models, peers = [], []
    for index, name in enumerate(names):
        hop = transfer(names[(index + 1) % 3])

        def script(n: int, _: Any, hop: Any = hop, offset: int = index * 100) -> Any:
            if not work:
                return hop
            if len(done) >= 15:
                return text("found everything")
            return call("dig", n=offset + n) if n % 2 else hop

        models.append(ScriptedModel(script))
        peers.append(LlmAgent(name=name, description=name, model=models[-1], tools=[dig]))
    lead = ScriptedModel([transfer("a")])
    return LlmAgent(name="lead", model=lead, sub_agents=peers), [lead, *models], done


async def test_a_circle_of_three_peers_trips() -> None:
    root, models, _ = _three_peers(work=False)
    plugin = RunGuardPlugin()
    result = await play(root, plugins=[plugin])
    trip = assert_stopped(result, "handoff")
    assert sum(model.calls for model in models) <= 1 + 3 * 6
    assert "a→b→c→a" in trip.message
    assert len(plugin.trips) == 1
    assert_calls_answered(result.session)


@pytest.mark.parametrize("limits", [{}, {"max_handoff_repeats": 3}, {"max_handoff_repeats": 2}], ids=str)
async def test_the_same_hand_offs_with_real_results_between_them_do_not_trip(limits: dict[str, Any]) -> None:
    root, _, done = _three_peers(work=True)
    heard: list[Any] = []
    plugin = RunGuardPlugin(**limits, on_decision=heard.append)
    result = await play(root, plugins=[plugin])
    assert plugin.flush()
    assert (len(done), plugin.trips, heard) == (15, [], [])
    assert result.texts == ["found everything"]


# ---- V7: over-spawn -------------------------------------------------------------------------------------------------


def _crowd(size: int, **options: Any) -> tuple[ParallelAgent, ScriptedModel]:
    model = ScriptedModel([text("x")], **options)
    return ParallelAgent(name="crowd", sub_agents=[LlmAgent(name=f"p{i}", model=model) for i in range(size)]), model


async def test_v7a_queued_branches_all_finish_with_twenty_at_once() -> None:
    root, model = _crowd(400, latency_s=0.01)
    plugin = RunGuardPlugin(max_concurrent_agents=20, on_surplus="queue")
    result = await play(root, plugins=[plugin], seconds=50)
    assert (model.calls, model.max_in_flight, plugin.trips) == (400, 20, [])
    assert result.texts == ["x"] * 400


async def test_v7b_refused_branches_cost_nothing_and_are_told_not_to_retry() -> None:
    root, model = _crowd(400, latency_s=0.5)
    plugin = RunGuardPlugin(max_concurrent_agents=20)
    result = await play(root, plugins=[plugin], seconds=50)
    refusals = [event for event in result.events if event.error_code == "RUNGUARD_STOP"]
    assert (model.calls, len(refusals), len(plugin.trips)) == (20, 380, 1)
    assert result.texts == ["x"] * 20
    assert all("not retry" in present(event.error_message) for event in refusals)
    assert plugin.trips[0].rule == "fan_out"


async def test_v7_by_default_four_hundred_branches_are_refused_before_the_first_is_paid() -> None:
    root, model = _crowd(400)
    plugin = RunGuardPlugin()
    result = await play(root, plugins=[plugin])
    assert model.calls == 0
    trip = assert_stopped(result, "fan_out")
    assert (trip.observed, trip.limit, len(plugin.trips)) == (400, 100, 1)


async def test_v7_a_hundred_branches_are_healthy() -> None:
    root, model = _crowd(100, latency_s=0.01)
    plugin = RunGuardPlugin()
    result = await play(root, plugins=[plugin], seconds=50)
    assert (model.calls, plugin.trips, len(result.texts)) == (100, [], 100)
    assert model.max_in_flight == 20


# ---- V8: a stop that harms nothing ----------------------------------------------------------------------------------


def _finder() -> tuple[LlmAgent, ScriptedModel]:
    def find(q: int, tool_context: ToolContext) -> dict[str, int]:
        tool_context.state[f"found_{q}"] = q
        return {"found": q}

    model = ScriptedModel(lambda n, _: call("find", q=n) if n <= 6 else text("that is all"))
    return LlmAgent(name="finder", model=model, tools=[find]), model


async def test_v8a_the_session_stays_whole_and_usable() -> None:
    agent, model = _finder()
    plugin, service = RunGuardPlugin(max_model_calls=6), InMemorySessionService()
    first = await play(agent, plugins=[plugin], session_service=service)
    assert model.calls == 6
    assert assert_calls_answered(first.session) == 6
    assert_stopped(first, "model_calls")
    assert {f"found_{n}": n for n in range(1, 7)}.items() <= first.session.state.items()

    second = await play(agent, "and?", plugins=[plugin], session_service=service)
    assert model.calls == 7
    assert second.texts == ["that is all"]
    assert len(plugin.trips) == 1


async def test_v8b_what_comes_after_an_endless_loop_is_not_started() -> None:
    looped, after = ScriptedModel([text("x")]), ScriptedModel([text("y")])
    loop = LoopAgent(name="loop", sub_agents=[LlmAgent(name="w", model=looped)])
    root = SequentialAgent(name="seq", sub_agents=[loop, LlmAgent(name="after", model=after)])
    result = await play(root, plugins=[RunGuardPlugin(max_model_calls=6)])
    assert (looped.calls, after.calls) == (6, 0)
    assert len(result.events) <= 10


async def test_v8c_a_workflow_that_goes_in_circles_ends_by_itself() -> None:
    model = ScriptedModel([text("draft")])
    writer = LlmAgent(name="writer", model=model)

    def review(node_input: str) -> Event:
        return Event(route="again", output="again")

    root = Workflow(name="wf", edges=[("START", writer), (writer, review), (review, {"again": writer})])
    result = await play(root, plugins=[RunGuardPlugin(max_model_calls=6)])
    assert model.calls == 6
    assert len(result.events) <= 25
    assert_stopped(result, "model_calls")


async def test_v8d_the_trip_tells_everything_without_an_exception() -> None:
    agent, _ = _finder()
    result = await play(agent, plugins=[RunGuardPlugin(max_model_calls=6)])
    trip = runguard.trip(result.events[-1])
    assert trip is not None
    assert (trip.rule, trip.limit, trip.observed, trip.model_calls, trip.tool_calls, trip.tokens) == (
        "model_calls",
        6,
        7,
        6,
        6,
        6 * CALL_TOKENS,
    )
    assert (trip.app, trip.user_id, trip.session_id, trip.agent_path) == ("app", "u1", "s1", ("finder",))
    assert trip.run_id == trip.invocation_id == result.events[0].invocation_id
    assert trip.resume
    assert runguard.trip(result.events[0]) is None
    assert runguard.trip(result.events[-1].model_dump(mode="json", by_alias=True)) == trip


@pytest.mark.parametrize("root", ["single", "loop", "parallel"])
async def test_v8d_in_raise_mode_the_caller_catches_our_own_class(root: str) -> None:
    agent, model = _finder()
    shapes: dict[str, Callable[[], BaseAgent]] = {
        "single": lambda: agent,
        "loop": lambda: LoopAgent(name="l", sub_agents=[agent]),
        "parallel": lambda: ParallelAgent(name="p", sub_agents=[agent]),
    }
    result = await play(shapes[root](), plugins=[RunGuardPlugin(max_model_calls=5, on_stop="raise")], catch=True)
    assert type(result.error) is runguard.LimitExceededError
    assert model.calls == 5
    assert assert_calls_answered(result.session) == 5


@pytest.mark.parametrize("mode", ["plugin", "per agent"])
async def test_code_that_returns_at_the_final_event_gets_the_error_and_not_the_stop_sentence(mode: str) -> None:
    def parse(fragment: str, hint: str) -> dict[str, Any]:
        return {"status": "partial_parse_error", "data": None}

    model = ScriptedModel(lambda n, _: call("parse", fragment="x", hint=str(n)))
    agent = LlmAgent(name="extractor", model=model, tools=[parse])
    if mode == "per agent":
        runguard.ADKCostBreaker(max_identical_tool_results=3).install_on_agent(agent)
    plugins = [RunGuardPlugin(max_identical_tool_results=3, on_stop="raise")] if mode == "plugin" else []
    service = InMemorySessionService()
    await service.create_session(app_name="app", user_id="u", session_id="s")
    runner = Runner(app=App(name="app", root_agent=agent, plugins=plugins), session_service=service)

    async def process_document() -> str:
        message = types.Content(role="user", parts=[types.Part(text="go")])
        try:
            async for event in runner.run_async(user_id="u", session_id="s", new_message=message):
                if event.is_final_response():
                    return f"answer: {event.content}"
        except RuntimeError as error:
            return f"BREAKER_TRIPPED: {error}"
        return "NO_OUTPUT"

    assert (await process_document()).startswith("BREAKER_TRIPPED: stopped by stall of tool 'parse'")
