"""BudgetPlugin on real ADK runs: what it counts, and who pays."""

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from google.adk.agents import LiveRequestQueue, LlmAgent, LoopAgent, SequentialAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.apps import App
from google.adk.models.base_llm import BaseLlm
from google.adk.models.google_llm import Gemini
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools.agent_tool import AgentTool
from google.genai import types

from runguard.adk import budget_plugin
from runguard.adk.budget_plugin import BudgetPlugin
from runguard.core.money import Threshold
from runguard.engine.token_budget import BudgetMonitor, BudgetPolicy
from runguard.errors import PolicyError
from runguard.testing import ScriptedModel, assert_stopped, call, text
from tests.kit.adk_runs import play
from tests.kit.agents import stepping as worker
from tests.kit.budget_plugins import CALL, of, stops_at
from tests.kit.examples import each_row
from tests.kit.topologies import (
    Team,
    single,
)

from .test_live import LiveModel

SSE = RunConfig(streaming_mode=StreamingMode.SSE)


@each_row("wrong", [None, 200_000, "policy", BudgetPolicy, Threshold(0.5)])
def test_anything_else_is_a_policy_error(wrong: Any) -> None:
    with pytest.raises(PolicyError, match="give a BudgetPolicy or a BudgetMonitor"):
        BudgetPlugin(wrong)


async def test_a_plugin_leaves_nothing_behind() -> None:
    plugin = BudgetPlugin(BudgetPolicy())
    await play(worker([call("step", n=1), text("done")]), plugins=[plugin])
    there = weakref.ref(plugin)
    del plugin
    gc.collect(1)
    assert there() is None


# ---- counting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("usage_on", ["all", "last", "final"])
@pytest.mark.parametrize("wiring", ["plugin", "hook", "both"])
async def test_streamed_usage_counts_once(usage_on: str, wiring: str) -> None:
    seen: list[int] = []
    monitor = BudgetMonitor(100_000).on_threshold(0.001, lambda m: seen.append(m.current_tokens), recurring=True)
    agent = worker([call("step", n=1), text("done")], chunks=7, usage_on=usage_on)
    if wiring != "plugin":
        agent.after_model_callback = monitor.after_model_hook()
    await play(agent, plugins=[BudgetPlugin(monitor)] if wiring != "hook" else [], run_config=SSE)
    assert (monitor.current_tokens, monitor.turn_count) == (2 * CALL, 2)
    assert seen == [CALL, 2 * CALL], "a recurring threshold hears of a call once, at its end"


class StreamingGemini(Gemini):
    """ADK's own Gemini and its way of putting chunks together; only the network is left out. A call costs 100 + 12
    tokens, 5 of them thoughts.
    """

    usage_on: str = "all"

    @property
    def api_client(self) -> Any:
        async def chunks() -> AsyncGenerator[types.GenerateContentResponse, None]:
            for number, words in enumerate(("he", "ll", "o"), 1):
                counts = {
                    "prompt_token_count": 100,
                    "candidates_token_count": 2 * number + 1,
                    "thoughts_token_count": 5,
                    "total_token_count": 106 + 2 * number,
                }
                usage = (
                    types.GenerateContentResponseUsageMetadata(**counts)
                    if self.usage_on == "all" or number == 3
                    else None
                )
                content = types.Content(role="model", parts=[types.Part(text=words)])
                candidate = types.Candidate(
                    content=content, finish_reason=types.FinishReason.STOP if number == 3 else None
                )
                yield types.GenerateContentResponse(candidates=[candidate], usage_metadata=usage)

        async def generate_content_stream(**_: Any) -> Any:
            return chunks()

        return SimpleNamespace(
            vertexai=False, aio=SimpleNamespace(models=SimpleNamespace(generate_content_stream=generate_content_stream))
        )


@pytest.mark.parametrize("usage_on", ["all", "last"])
@pytest.mark.parametrize("progressive", [True, False])
@pytest.mark.parametrize("wiring", ["plugin", "hook", "both"])
async def test_gemini_streams_count_once_in_both_of_adks_ways(
    usage_on: str, progressive: bool, wiring: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not progressive:
        monkeypatch.setenv("ADK_DISABLE_PROGRESSIVE_SSE_STREAMING", "1")
    monitor = BudgetMonitor()
    agent = LlmAgent(name="talker", model=StreamingGemini(model="gemini-2.5-flash", usage_on=usage_on))
    if wiring != "plugin":
        agent.after_model_callback = monitor.after_model_hook()
    root = LoopAgent(name="loop", max_iterations=3, sub_agents=[agent])
    result = await play(root, plugins=[BudgetPlugin(monitor)] if wiring != "hook" else [], run_config=SSE)
    assert sum(event.usage_metadata is not None for event in result.events) > 3, (
        "usage was told more often than it was spent"
    )
    assert (monitor.current_tokens, monitor.turn_count) == (3 * 112, 3)


class ToldTwice(BaseLlm):
    """A chunk, the whole text, and an empty end, with usage on each."""

    model: str = "told-twice"

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        def usage(output: int) -> types.GenerateContentResponseUsageMetadata:
            return types.GenerateContentResponseUsageMetadata(
                prompt_token_count=100, candidates_token_count=output, total_token_count=100 + output
            )

        yield LlmResponse(
            content=types.Content(role="model", parts=[types.Part(text="he")]), partial=True, usage_metadata=usage(5)
        )
        yield LlmResponse(
            content=types.Content(role="model", parts=[types.Part(text="hello")]), usage_metadata=usage(10)
        )
        yield LlmResponse(content=types.Content(role="model", parts=[types.Part(text="")]), usage_metadata=usage(10))


@pytest.mark.parametrize("wiring", ["plugin", "hook"])
async def test_two_whole_responses_of_one_call_are_one_call(wiring: str) -> None:
    monitor = BudgetMonitor()
    agent = LlmAgent(name="first", model=ToldTwice())
    if wiring == "hook":
        agent.after_model_callback = monitor.after_model_hook()
    root = LoopAgent(name="loop", max_iterations=3, sub_agents=[agent])
    await play(root, plugins=[BudgetPlugin(monitor)] if wiring == "plugin" else [], run_config=SSE)
    assert (monitor.current_tokens, monitor.turn_count) == (330, 3)


async def test_a_live_session_is_counted() -> None:
    plugin, service, queue = BudgetPlugin(BudgetPolicy()), InMemorySessionService(), LiveRequestQueue()
    await service.create_session(app_name="app", user_id="u1", session_id="s1")
    agent = LlmAgent(name="talker", model=LiveModel([text("unused")]))  # type: ignore[call-arg]
    runner = Runner(app=App(name="app", root_agent=agent, plugins=[plugin]), session_service=service)
    queue.send_content(types.Content(role="user", parts=[types.Part(text="hi")]))
    config = RunConfig(streaming_mode=StreamingMode.BIDI, response_modalities=["TEXT"])
    async with asyncio.timeout(20):
        async for event in runner.run_live(user_id="u1", session_id="s1", live_request_queue=queue, run_config=config):
            if event.turn_complete:
                queue.close()
                break
    assert (of(plugin).current_tokens, of(plugin).turn_count) == (1_000, 1)


async def test_a_model_that_reports_no_usage_is_estimated_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    plugin = BudgetPlugin(BudgetPolicy())
    await play(worker([call("step", n=1), text("done")], usage_on="none"), message="word " * 300, plugins=[plugin])
    assert (of(plugin).turn_count, of(plugin).estimated_turns) == (2, 2)
    assert of(plugin).current_tokens > 2 * 500  # the message alone, in both prompts
    assert sum("runguard.no_usage" in record.message for record in caplog.records) == 1


# ---- who pays -------------------------------------------------------------------------------------------------------


async def test_alice_does_not_pay_for_bob() -> None:
    plugin = BudgetPlugin(stops_at(3))
    endless = lambda n, _: call("step", n=n)  # noqa: E731
    first, second = ScriptedModel(endless), ScriptedModel([text("done")])
    alice = await play(worker(first), plugins=[plugin], user_id="alice")
    assert_stopped(alice, "budget")
    assert plugin.monitor.current_tokens == 3 * CALL
    bob = await play(worker(second), plugins=[plugin], user_id="bob")
    assert (bob.texts, plugin.monitor.current_tokens) == (["done"], CALL)
    assert [of(plugin, user).current_tokens for user in ("alice", "bob", "carol")] == [3 * CALL, CALL, 0]
    assert of(plugin, "alice", "another").current_tokens == 0


async def test_sessions_that_run_at_once_stay_apart() -> None:
    plugin = BudgetPlugin(stops_at(4))
    teams = [Team(endless=number % 2 == 0) for number in range(20)]
    results = await asyncio.gather(
        *(play(single(team), plugins=[plugin], session_id=f"s{number}") for number, team in enumerate(teams))
    )
    assert [team.calls for team in teams] == [4, 3] * 10
    assert [bool(result.trips) for result in results] == [True, False] * 10
    assert [of(plugin, session=f"s{number}").turn_count for number in range(20)] == [4, 3] * 10


async def test_a_monitor_is_one_budget_for_everybody() -> None:
    monitor = BudgetMonitor(2 * CALL).on_threshold(1.0, action="stop")
    plugin = BudgetPlugin(monitor)
    for user in ("alice", "bob"):
        await play(worker([text("done")]), plugins=[plugin], user_id=user)
    assert (monitor.turn_count, plugin.monitor) == (2, monitor)
    assert_stopped(await play(worker([text("done")]), plugins=[plugin], user_id="carol"), "budget")


@pytest.mark.parametrize("wrap", [False, True], ids=["node path", "legacy path"])
async def test_an_agent_called_as_a_tool_is_paid_by_its_caller(wrap: bool) -> None:
    """Two levels of AgentTool, each with a session of its own that nobody else knows."""

    def build() -> Any:
        inner = worker([call("step", n=1), text("inner")], name="inner")
        middle = LlmAgent(
            name="middle",
            description="m",
            model=ScriptedModel([call("inner", request="go"), text("middle")]),
            tools=[AgentTool(inner)],
        )
        outer = LlmAgent(
            name="outer", model=ScriptedModel([call("middle", request="go"), text("outer")]), tools=[AgentTool(middle)]
        )
        return SequentialAgent(name="seq", sub_agents=[outer]) if wrap else outer

    plugin = BudgetPlugin(BudgetPolicy())
    await asyncio.gather(*(play(build(), plugins=[plugin], user_id=user) for user in ("alice", "bob")))
    assert [of(plugin, user).turn_count for user in ("alice", "bob")] == [6, 6]
    assert set(plugin._sessions) == {("app", "alice", "s1"), ("app", "bob", "s1")}


async def test_what_a_tool_leaves_running_pays_for_itself_once_the_run_is_over() -> None:
    plugin, left = BudgetPlugin(BudgetPolicy()), []
    over = asyncio.Event()

    async def leave() -> str:
        async def serve() -> None:
            await over.wait()
            await play(worker([text("done")]), plugins=[plugin], user_id="bob")

        left.append(asyncio.create_task(serve()))
        return "left"

    agent = LlmAgent(name="alice", model=ScriptedModel([call("leave"), text("done")]), tools=[leave])
    await play(agent, plugins=[plugin], user_id="alice")
    over.set()
    await left[0]
    assert [of(plugin, user).turn_count for user in ("alice", "bob")] == [2, 1]


async def test_the_monitor_at_hand_is_that_of_the_session() -> None:
    plugin, seen = BudgetPlugin(BudgetPolicy()), {}

    def look(tool_context: Any) -> str:
        seen[tool_context.session.user_id] = plugin.monitor
        return "looked"

    def build() -> LlmAgent:
        return LlmAgent(name="looker", model=ScriptedModel([call("look"), text("done")]), tools=[look])

    await asyncio.gather(*(play(build(), plugins=[plugin], user_id=user) for user in ("alice", "bob")))
    assert seen == {user: of(plugin, user) for user in ("alice", "bob")}
    assert plugin.monitor in seen.values(), "outside of any session, the one used last"


async def test_two_budgets_watch_one_run() -> None:
    session, everybody = BudgetPlugin(BudgetPolicy(), name="session"), BudgetPlugin(BudgetMonitor(), name="everybody")
    inner = worker([text("inner")], name="inner")
    for user in ("alice", "bob"):
        outer = LlmAgent(
            name="outer", model=ScriptedModel([call("inner", request="go"), text("outer")]), tools=[AgentTool(inner)]
        )
        await play(outer, plugins=[session, everybody], user_id=user)
    assert [of(session, user).turn_count for user in ("alice", "bob")] == [3, 3]
    assert everybody.monitor.turn_count == 6


async def test_only_so_many_sessions_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_plugin, "_SESSIONS_KEPT", 2)
    plugin = BudgetPlugin(BudgetPolicy())
    for user in ("alice", "bob", "alice", "carol"):
        await play(worker([text("done")]), plugins=[plugin], user_id=user)
    assert [user for _, user, _ in plugin._sessions] == ["alice", "carol"]
    assert of(plugin, "alice").turn_count == 2
