"""Token budgets on real ADK: who pays, what counts once, and how a run ends when the budget is used up."""

import asyncio
import gc
import logging
import weakref
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from google.adk.agents import BaseAgent, LiveRequestQueue, LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.agents.invocation_context import InvocationContext
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.apps import App
from google.adk.events import Event
from google.adk.models.base_llm import BaseLlm
from google.adk.models.google_llm import Gemini
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools.agent_tool import AgentTool
from google.genai import types

from runguard.accounting.cumulative import BudgetMonitor
from runguard.accounting.cumulative_policy import BudgetPolicy
from runguard.adk import RunGuardPlugin, budget_plugin
from runguard.adk.budget_plugin import BudgetPlugin
from runguard.core.decision import STOP_CODE
from runguard.core.threshold import Threshold
from runguard.errors import PolicyError
from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, text
from tests.kit.adk_runs import play, prompts, told
from tests.kit.agents import stepping as worker
from tests.kit.topologies import (
    TOPOLOGIES,
    Team,
    custom_loop,
    custom_quiet_loop,
    single,
    step,
    task,
    task_again,
    workflow_cycle,
)

from .test_live import LiveModel

SSE = RunConfig(streaming_mode=StreamingMode.SSE)
CALL = 1_250  # what one call of a scripted model costs
Topology = Callable[[Team], Any]
everywhere = pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology.__name__)


def stops_at(calls: int) -> BudgetPolicy:
    return BudgetPolicy(calls * CALL).with_threshold(1.0, action="stop")


def of(plugin: BudgetPlugin, user: str = "u1", session: str = "s1") -> BudgetMonitor:
    return plugin.monitor_for(app_name="app", user_id=user, session_id=session)


@pytest.mark.parametrize("wrong", [None, 200_000, "policy", BudgetPolicy, Threshold(0.5)])
def test_anything_else_is_a_policy_error(wrong: Any) -> None:
    with pytest.raises(PolicyError, match="give a BudgetPolicy or a BudgetMonitor"):
        BudgetPlugin(wrong)


def test_the_name_can_be_chosen() -> None:
    assert BudgetPlugin(BudgetPolicy()).name == "runguard_budget"
    assert BudgetPlugin(BudgetPolicy(), name="mine").name == "mine"


async def test_a_plugin_leaves_nothing_behind() -> None:
    plugin = BudgetPlugin(BudgetPolicy())
    await play(worker([call("step", n=1), text("done")]), plugins=[plugin])
    there = weakref.ref(plugin)
    del plugin
    gc.collect()
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
    def api_client(self) -> Any:  # type: ignore[override]
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


def _says(**counts: int) -> LlmResponse:
    usage = types.GenerateContentResponseUsageMetadata(
        **{f"{name}_token_count": count for name, count in counts.items()}
    )
    return LlmResponse(content=types.Content(role="model", parts=[types.Part(text="x")]), usage_metadata=usage)


@pytest.mark.parametrize(
    ("counts", "tokens"),
    [
        ({"prompt": 100, "candidates": 10, "thoughts": 5_000, "total": 5_110}, 5_110),
        ({"prompt": 100, "candidates": 10, "thoughts": 5_000}, 5_110),
        ({"prompt": 100, "tool_use_prompt": 20, "candidates": 30, "thoughts": 50, "total": 200}, 200),
        ({"prompt": 100, "candidates": 80, "thoughts": 50, "total": 180}, 180),  # the answer includes the thoughts
    ],
    ids=["thoughts", "thoughts without a total", "tool prompts", "thoughts inside the answer"],
)
async def test_thoughts_and_tool_prompts_are_tokens_too(counts: dict[str, int], tokens: int) -> None:
    plugin = BudgetPlugin(BudgetPolicy())
    await play(worker([_says(**counts)]), plugins=[plugin])
    assert of(plugin).current_tokens == tokens


async def test_callbacks_behind_the_hook_still_run() -> None:
    heard: list[str] = []
    monitor = BudgetMonitor()

    def second(callback_context: Any, llm_response: Any) -> None:
        heard.append(llm_response.content.parts[0].text)

    agent = worker([text("done")])
    agent.after_model_callback = [monitor.after_model_hook(), second]
    await play(agent)
    assert (heard, monitor.turn_count) == (["done"], 1)


async def test_a_live_session_is_counted() -> None:
    plugin, service, queue = BudgetPlugin(BudgetPolicy()), InMemorySessionService(), LiveRequestQueue()
    await service.create_session(app_name="app", user_id="u1", session_id="s1")
    agent = LlmAgent(name="talker", model=LiveModel([text("unused")]))
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


async def test_turns_of_one_session_add_up() -> None:
    plugin, service = BudgetPlugin(BudgetPolicy()), InMemorySessionService()
    for _ in range(3):
        await play(worker([text("done")]), plugins=[plugin], session_service=service)
    assert of(plugin).turn_count == 3


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


async def test_a_run_after_a_tool_call_pays_for_itself() -> None:
    """A container at the root runs in its caller's context: what it sets there must not reach the next user."""
    plugin = BudgetPlugin(BudgetPolicy())
    for user in ("alice", "bob"):
        root = SequentialAgent(name="seq", sub_agents=[worker([call("step", n=1), text("done")])])
        await play(root, plugins=[plugin], user_id=user)
    assert [of(plugin, user).turn_count for user in ("alice", "bob")] == [2, 2]


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


async def test_who_asks_for_the_monitor_before_the_first_run_sees_it_count() -> None:
    plugin = BudgetPlugin(BudgetPolicy())
    monitor = plugin.monitor
    await play(worker([text("done")]), plugins=[plugin])
    assert monitor is plugin.monitor is of(plugin)
    assert monitor.turn_count == 1


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


# ---- stopping -------------------------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("limit", [1, 4, 5])
async def test_a_used_up_budget_ends_every_topology(topology: Topology, limit: int) -> None:
    team, plugin = Team(endless=True), BudgetPlugin(stops_at(limit))
    result = await play(topology(team), plugins=[plugin])
    monitor = of(plugin)
    # Usage is known when a call is answered: those that run beside it are let finish.
    assert limit <= team.calls <= limit + 2
    assert (monitor.current_tokens, monitor.turn_count) == (team.calls * CALL, team.calls)
    assert set(plugin._sessions) == {("app", "u1", "s1")}
    trip = assert_stopped(result, "budget")
    assert (trip.unit, trip.scope, trip.session_id, trip.limit) == ("tokens", "session", "s1", limit * CALL)
    open_calls = 1 if topology is task or (topology is task_again and limit % 2) else 0
    assert_calls_answered(result.session, open_calls=open_calls)
    assert not any(event.error_code not in (None, STOP_CODE) for event in result.events)
    assert monitor.callback_errors == 0


@everywhere
async def test_a_budget_with_room_changes_nothing(topology: Topology) -> None:
    bare, watched, plugin = Team(endless=False), Team(endless=False), BudgetPlugin(stops_at(1_000))
    without, with_budget = await play(topology(bare)), await play(topology(watched), plugins=[plugin])
    assert sorted(map(str, told(with_budget.events))) == sorted(map(str, told(without.events)))
    assert [prompts(model.requests) for model in watched.models.values()] == [
        prompts(model.requests) for model in bare.models.values()
    ]
    assert of(plugin).turn_count == watched.calls


async def test_the_stop_is_no_answer_of_the_agent() -> None:
    plugin, service = BudgetPlugin(stops_at(1)), InMemorySessionService()
    agent = LlmAgent(name="worker", model=ScriptedModel([call("step", n=1)]), tools=[step], output_key="said")
    result = await play(agent, plugins=[plugin], session_service=service)
    (event,) = [event for event in result.events if event.error_code == STOP_CODE]
    assert event.content is not None
    assert event.content.parts is not None
    assert event.content.parts[0].thought
    assert event.error_message
    assert event.error_message not in (result.session.state.get("said"), *result.texts)
    trip = assert_stopped(result, "budget")
    assert (
        str(trip)
        == "stopped by budget: 1250 tokens, limit 1250 (100% of 1250 tokens reached) in worker; 1 model call so far"
    )
    assert (trip.app, trip.user_id, trip.observed, trip.tokens, trip.model_calls) == ("app", "u1", 1_250, 1_250, 1)


@pytest.mark.parametrize(
    "lift", [lambda m: m.resume(), lambda m: m.reset(), lambda m: m.adjust(100)], ids=["resume", "reset", "adjust"]
)
async def test_a_stop_holds_until_it_is_lifted(lift: Callable[[BudgetMonitor], None]) -> None:
    plugin, service, model = BudgetPlugin(stops_at(2)), InMemorySessionService(), ScriptedModel([text("done")])
    for _ in range(4):
        last = await play(worker(model), plugins=[plugin], session_service=service)
    assert model.calls == 2
    assert_stopped(last, "budget")
    lift(of(plugin))
    again = await play(worker(model), plugins=[plugin], session_service=service)
    assert (again.texts, model.calls) == (["done"], 3)


async def test_a_stop_asked_for_by_a_callback_or_a_tool() -> None:
    plugin = BudgetPlugin(BudgetPolicy().with_threshold(0.01, lambda m: m.stop("enough for today")))
    model = ScriptedModel(lambda n, _: call("step", n=n))
    trip = assert_stopped(await play(worker(model), plugins=[plugin]), "budget")
    assert model.calls == 2
    assert "enough for today" in trip.message


async def test_paid_siblings_keep_their_answers() -> None:
    slow, fast = (
        worker([text("slow")], name="slow", latency_s=0.3),
        worker([call("step", n=1), text("fast")], name="fast"),
    )
    plugin = BudgetPlugin(stops_at(1))
    result = await play(ParallelAgent(name="par", sub_agents=[slow, fast]), plugins=[plugin])
    assert result.texts == ["slow"]
    assert_stopped(result, "budget")


@pytest.mark.parametrize(
    "topology", [workflow_cycle, custom_loop, custom_quiet_loop], ids=lambda topology: topology.__name__
)
async def test_a_loop_that_asks_for_ever_is_ended(topology: Topology) -> None:
    team, plugin = Team(endless=True), BudgetPlugin(stops_at(2))
    result = await play(topology(team), plugins=[plugin])
    assert team.calls == 2
    assert sum(event.error_code == STOP_CODE for event in result.events) <= 3
    team.calm = True
    of(plugin).reset()
    second = await play(topology(team), plugins=[plugin])
    assert not any(event.error_code for event in second.events)


async def test_a_loop_is_not_ended_before_its_paid_siblings_have_answered() -> None:
    team, slow = Team(endless=True), worker([text("slow")], name="slow", latency_s=0.5)
    plugin = BudgetPlugin(stops_at(4))  # enough for the slow one to have asked
    result = await play(ParallelAgent(name="par", sub_agents=[slow, custom_loop(team)]), plugins=[plugin])
    assert "slow" in result.texts
    assert_stopped(result, "budget")


async def test_refusals_that_are_not_in_a_row_end_nothing() -> None:
    """Somebody resumes the budget after every refusal: each is the first again."""
    plugin, model = (
        BudgetPlugin(BudgetPolicy(CALL).with_threshold(1.0, action="stop", recurring=True)),
        ScriptedModel([text("again")]),
    )

    class Patient(BaseAgent):
        async def _run_async_impl(self, ctx: InvocationContext) -> AsyncGenerator[Event, None]:
            for _ in range(12):
                async for event in self.sub_agents[0].run_async(ctx):
                    yield event
                    if event.error_code:
                        of(plugin).resume()

    result = await play(Patient(name="patient", sub_agents=[worker(model)]), plugins=[plugin])
    assert sum(event.error_code == STOP_CODE for event in result.events) == 6
    assert model.calls == 6


@everywhere
async def test_the_guard_and_a_budget_work_together(topology: Topology) -> None:
    team, guard, plugin = Team(endless=True), RunGuardPlugin(max_model_calls=50), BudgetPlugin(stops_at(4))
    result = await play(topology(team), plugins=[guard, plugin])
    assert 4 <= team.calls <= 6
    assert of(plugin).turn_count == team.calls
    assert guard.trips == []
    assert guard.snapshot()["guard_errors"] == 0
    assert_stopped(result, "budget")


async def test_an_agent_that_was_cut_short_does_not_seem_to_have_answered() -> None:
    inner = worker([call("step", n=1), text("inner is done")], name="inner")
    outer = LlmAgent(
        name="outer",
        model=ScriptedModel([call("inner", request="go"), text("outer is done")]),
        tools=[AgentTool(inner)],
    )
    result = await play(outer, plugins=[BudgetPlugin(stops_at(2))])
    assert_stopped(result, "budget")
    (answer,) = [response.response for event in result.session.events for response in event.get_function_responses()]
    assert answer == {
        "status": "not_executed",
        "message": "Not finished: this part was stopped. Do not call it again in this turn.",
    }


# ---- nudging --------------------------------------------------------------------------------------------------------


async def test_the_model_is_told_once_and_nothing_is_stored() -> None:
    plugin = BudgetPlugin(BudgetPolicy(4 * CALL).with_threshold(0.5, action="nudge"))
    model = ScriptedModel([call("step", n=1), call("step", n=2), call("step", n=3), text("done")])
    result = await play(worker(model), plugins=[plugin])
    heard = [
        [
            part.text
            for content in request.contents
            for part in content.parts
            if part.text and "token budget" in part.text
        ]
        for request in model.requests
    ]
    assert [len(texts) for texts in heard] == [0, 0, 1, 0]
    assert heard[2][0].startswith("50% of the token budget")
    assert "token budget" not in "".join(str(event.content) for event in result.session.events)
    assert result.texts == ["done"]


async def test_a_stop_is_stronger_than_a_nudge() -> None:
    plugin = BudgetPlugin(stops_at(1).with_threshold(0.5, action="nudge"))
    model = ScriptedModel([call("step", n=1), text("done")])
    assert_stopped(await play(worker(model), plugins=[plugin]), "budget")
    assert model.calls == 1


# ---- faults ---------------------------------------------------------------------------------------------------------


async def test_a_failing_callback_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fall(monitor: BudgetMonitor) -> None:
        raise LookupError("not mine")

    plugin = BudgetPlugin(BudgetPolicy().with_threshold(0.001, fall))
    result = await play(worker([text("done")]), plugins=[plugin])
    assert (result.texts, of(plugin).callback_errors) == (["done"], 1)
    assert "LookupError" in caplog.text


@pytest.mark.parametrize("broken", ["_run_of", "_trip", "_admit"])
async def test_its_own_fault_is_logged_and_the_run_goes_on(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fall(*_: Any, **__: Any) -> None:
        raise LookupError("broken")

    plugin = BudgetPlugin(stops_at(1))
    monkeypatch.setattr(plugin, broken, fall)
    with caplog.at_level(logging.ERROR, "runguard"):
        result = await play(worker([call("step", n=1), text("done")]), plugins=[plugin])
    if broken != "_admit":
        assert result.texts == ["done"]
    assert "runguard.budget_error" in caplog.text
    assert not any(event.error_code not in (None, STOP_CODE) for event in result.events)


async def test_hooks_without_a_context_do_not_mix_with_sessions() -> None:
    plugin = BudgetPlugin(stops_at(1))
    await play(worker([text("done")]), plugins=[plugin])
    await plugin.after_model_callback(callback_context=None, llm_response=_says(prompt=1_300))
    assert plugin.monitor.current_tokens == 1_300
    assert of(plugin).current_tokens == CALL
    stopped = await plugin.before_model_callback(callback_context=None, llm_request=LlmRequest())
    assert stopped is not None
    assert stopped.error_code == STOP_CODE
