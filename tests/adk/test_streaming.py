"""Streams, broken-off runs, databases, threads: what is counted once, and what is left behind when a run does not end
as planned.
"""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.apps import App
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import BaseSessionService, DatabaseSessionService, InMemorySessionService
from google.adk.sessions.sqlite_session_service import SqliteSessionService
from google.adk.tools.agent_tool import AgentTool
from google.adk.workflow import Workflow
from google.genai import types

import runguard
from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, text
from tests.kit.adk_runs import play, told
from tests.kit.agents import stepping as worker
from tests.kit.topologies import Team, custom_quiet_loop, parallel, single, workflow_cycle

SSE = RunConfig(streaming_mode=StreamingMode.SSE)


# ---- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("usage_on", "tokens"), [("all", 1_250), ("last", 1_250), ("final", 1_250), ("none", 0)])
@pytest.mark.parametrize("streaming", [True, False])
async def test_usage_is_counted_once_however_often_it_is_told(usage_on: str, tokens: int, streaming: bool) -> None:
    seen: list[tuple[int, int, int]] = []

    def look(n: int) -> dict[str, int]:
        (running,) = plugin.snapshot()["runs"]
        seen.append((running["model_calls"], running["prompt_tokens"], running["output_tokens"]))
        return {"n": n}

    if not streaming and usage_on == "last":
        pytest.skip("one response has no last chunk before it")
    plugin = RunGuardPlugin(max_model_calls=3)
    model = ScriptedModel(lambda n, _: call("look", n=n), chunks=7, usage_on=usage_on)
    options: dict[str, Any] = {"run_config": SSE} if streaming else {}
    result = await play(LlmAgent(name="worker", model=model, tools=[look]), plugins=[plugin], **options)
    trip = assert_stopped(result, "model_calls")
    if tokens:
        assert seen == [(n, n * 1_000, n * 250) for n in (1, 2, 3)]
        assert (trip.tokens, plugin.spend()["estimated_calls"]) == (3 * tokens, 0)
    else:  # never told: unknown is not zero, it is estimated and marked
        assert all(0 < a[1] < b[1] and 0 < a[2] < b[2] for a, b in pairwise(seen))
        assert (trip.tokens > 0, trip.estimated, plugin.spend()["estimated_calls"]) == (True, True, 3)
    assert sum(bool(event.partial) for event in result.events) == (18 if streaming else 0)


async def test_thoughts_and_tool_prompts_are_tokens_too() -> None:
    counts = {
        "prompt_token_count": 100,
        "tool_use_prompt_token_count": 20,
        "candidates_token_count": 30,
        "thoughts_token_count": 50,
    }
    usage = types.GenerateContentResponseUsageMetadata(**counts)
    said = LlmResponse(content=types.Content(role="model", parts=[types.Part(text="x")]), usage_metadata=usage)
    plugin = RunGuardPlugin(max_model_calls=1)
    root = LoopAgent(name="loop", max_iterations=2, sub_agents=[worker([said])])
    assert assert_stopped(await play(root, plugins=[plugin])).tokens == 200


async def test_a_streamed_run_is_the_same_with_and_without_the_guard() -> None:
    def build() -> LlmAgent:
        return worker([call("step", n=1), text("done")], chunks=7)

    plugin = RunGuardPlugin()
    assert told((await play(build(), plugins=[plugin], run_config=SSE)).events) == told(
        (await play(build(), run_config=SSE)).events
    )
    assert plugin.trips == []


# ---- runs that do not end as planned --------------------------------------------------------------------------------


def _slow(name: str = "slow", **options: Any) -> LlmAgent:
    return worker([call("step", n=1), text("done")], name=name, latency_s=30, **options)


def slow_single() -> Any:
    return _slow()


def slow_sequence() -> Any:
    return SequentialAgent(name="seq", sub_agents=[worker([text("first")], name="first"), _slow()])


def slow_parallel() -> Any:
    return ParallelAgent(name="par", sub_agents=[_slow("a"), _slow("b"), worker([text("first")], name="first")])


def slow_workflow() -> Any:
    first, second = worker([text("first")], name="first"), _slow()
    return Workflow(name="wf", edges=[("START", first), (first, second)])


def slow_agent_tool() -> Any:
    return LlmAgent(
        name="lead", model=ScriptedModel([call("slow", request="go"), text("done")]), tools=[AgentTool(_slow())]
    )


SLOW: list[Callable[[], Any]] = [slow_single, slow_sequence, slow_parallel, slow_workflow, slow_agent_tool]
slow_shapes = pytest.mark.parametrize("shape", SLOW, ids=lambda shape: shape.__name__)


async def _stream(root: Any, plugin: RunGuardPlugin, **options: Any) -> Any:
    service = InMemorySessionService()
    await service.create_session(app_name="app", user_id="u1", session_id="s1")
    runner = Runner(app=App(name="app", root_agent=root, plugins=[plugin]), session_service=service)
    return runner.run_async(
        user_id="u1", session_id="s1", new_message=types.Content(role="user", parts=[types.Part(text="go")]), **options
    )


async def _eventually(condition: Callable[[], bool], seconds: float = 20, *, collect: bool = True) -> bool:
    async with asyncio.timeout(seconds):
        while not condition():
            if collect:
                gc.collect(1)
            await asyncio.sleep(0.01)
    return True


def _nothing_left(plugin: RunGuardPlugin) -> bool:
    return plugin.snapshot()["runs"] == [] and not plugin.invocations.known


@slow_shapes
async def test_a_cancelled_run_leaves_nothing_behind(shape: Callable[[], Any]) -> None:
    plugin = RunGuardPlugin()
    task = asyncio.create_task(play(shape(), plugins=[plugin]))
    # a collection may take longer than what is waited for
    await _eventually(lambda: any(r["in_flight"] for r in plugin.snapshot()["runs"]), collect=False)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert await _eventually(lambda: _nothing_left(plugin))
    assert (plugin.trips, plugin.snapshot()["guard_errors"]) == ([], 0)


TALKATIVE: list[Callable[[], Any]] = [
    lambda: single(Team(endless=True)),
    lambda: parallel(Team(endless=True)),
    lambda: workflow_cycle(Team(endless=True)),
    lambda: LoopAgent(name="loop", sub_agents=[worker([text("again")])]),
]


@pytest.mark.parametrize("shape", TALKATIVE, ids=["single", "parallel", "workflow", "loop"])
@pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
async def test_an_abandoned_generator_leaves_nothing_behind(shape: Callable[[], Any], close: bool) -> None:
    plugin = RunGuardPlugin()
    stream = await _stream(shape(), plugin)
    if close:
        with suppress(BaseExceptionGroup):  # old versions of ADK let a ParallelAgent's GeneratorExit out as a group
            async with aclosing(stream):
                async for _ in stream:
                    break
    else:
        async for _ in stream:
            break
    del stream
    assert await _eventually(lambda: _nothing_left(plugin))
    assert plugin.trips == []


FAILING: list[Callable[[Any], Any]] = [
    lambda agent: agent,
    lambda agent: SequentialAgent(name="seq", sub_agents=[agent]),
    lambda agent: LoopAgent(name="loop", sub_agents=[agent]),
    lambda agent: Workflow(name="wf", edges=[("START", agent)]),
    lambda agent: LlmAgent(name="lead", model=ScriptedModel([call("worker", request="go")]), tools=[AgentTool(agent)]),
]


@pytest.mark.parametrize("shape", FAILING, ids=["single", "sequence", "loop", "workflow", "agent tool"])
@pytest.mark.parametrize("broken", ["model", "tool"])
async def test_an_error_stays_what_it_was_and_leaves_nothing_behind(shape: Callable[[Any], Any], broken: str) -> None:
    def fall(n: int) -> None:
        raise LookupError("not mine")

    def build() -> Any:
        script = [LookupError("not mine")] if broken == "model" else [call("fall", n=1)]
        return shape(LlmAgent(name="worker", description="works", model=ScriptedModel(script), tools=[fall]))

    plugin = RunGuardPlugin()
    bare, guarded = await play(build(), catch=True), await play(build(), plugins=[plugin], catch=True)
    assert (type(guarded.error), str(guarded.error)) == (type(bare.error), str(bare.error))
    assert told(guarded.events) == told(bare.events)
    assert _nothing_left(plugin)
    assert plugin.trips == []


async def test_a_model_call_that_fails_gives_its_place_back() -> None:
    def build(n: int) -> LlmAgent:
        return LlmAgent(name=f"p{n}", model=ScriptedModel([ConnectionError("down")]), on_model_error_callback=recover)

    def recover(callback_context: Any, llm_request: Any, error: Exception) -> LlmResponse:
        return LlmResponse(content=types.Content(role="model", parts=[types.Part(text="recovered")]))

    plugin = RunGuardPlugin(max_concurrent_agents=2, on_surplus="queue")
    result = await play(ParallelAgent(name="par", sub_agents=[build(n) for n in range(8)]), plugins=[plugin])
    assert result.texts == ["recovered"] * 8


# ---- databases ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "database"])
async def make(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Callable[[], BaseSessionService]]:
    """Opens a session service on the same database each time it is called."""
    opened: list[DatabaseSessionService] = []

    def open_one() -> BaseSessionService:
        if request.param == "sqlite":
            return SqliteSessionService(str(tmp_path / "sessions.db"))
        opened.append(DatabaseSessionService(f"sqlite+aiosqlite:///{tmp_path / 'sessions.db'}"))
        return opened[-1]

    yield open_one
    for service in opened:
        await service.close()


@pytest.mark.parametrize("topology", [single, parallel, workflow_cycle], ids=lambda topology: topology.__name__)
async def test_a_stop_survives_in_a_database(
    make: Callable[[], BaseSessionService], topology: Callable[[Team], Any]
) -> None:
    team, plugin = Team(endless=True), RunGuardPlugin(max_model_calls=6)
    root = topology(team)
    first = await play(root, plugins=[plugin], session_service=make())
    assert team.calls == 6
    assert_stopped(first, "model_calls")

    service = make()  # another process
    stored = await service.get_session(app_name="app", user_id="u1", session_id="s1")
    assert stored is not None
    assert plugin.trips[0] in [runguard.trip(event) for event in stored.events]
    assert_calls_answered(stored)

    team.calm = True
    second = await play(root, "and now?", plugins=[plugin], session_service=service)
    assert team.calls > 6
    assert not any(event.error_code for event in second.events)


async def test_a_swallowed_stop_is_stored_in_a_database_too(make: Callable[[], BaseSessionService]) -> None:
    plugin = RunGuardPlugin(max_model_calls=3)
    result = await play(custom_quiet_loop(Team(endless=True)), plugins=[plugin], session_service=make())
    assert_stopped(result)
    assert [runguard.trip(event) for event in result.session.events if event.error_code] == plugin.trips


# ---- threads and loops ----------------------------------------------------------------------------------------------


async def test_two_runs_in_one_session_at_once_are_two_runs() -> None:
    plugin, service = RunGuardPlugin(max_model_calls=4), InMemorySessionService()
    await service.create_session(app_name="app", user_id="u1", session_id="s1")
    teams = [Team(endless=True), Team(endless=True)]
    await asyncio.gather(*(play(single(team), plugins=[plugin], session_service=service) for team in teams))
    assert [team.calls for team in teams] == [4, 4]
    assert len({trip.run_id for trip in plugin.trips}) == 2
