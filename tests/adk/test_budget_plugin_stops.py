"""BudgetPlugin on real ADK runs: stops, nudges and faults."""

import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from google.adk.agents import BaseAgent, LlmAgent, ParallelAgent
from google.adk.agents.invocation_context import InvocationContext
from google.adk.events import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.sessions import InMemorySessionService
from google.adk.tools.agent_tool import AgentTool

from runguard.adk import RunGuardPlugin
from runguard.adk.budget_plugin import BudgetPlugin
from runguard.core.decision import STOP_CODE
from runguard.engine.token_budget import BudgetMonitor, BudgetPolicy
from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, text
from tests.kit.adk_runs import play, prompts, told
from tests.kit.agents import stepping as worker
from tests.kit.budget_plugins import CALL, of, says, stops_at
from tests.kit.contents import parts
from tests.kit.topologies import (
    TOPOLOGIES,
    Team,
    custom_loop,
    custom_quiet_loop,
    spread,
    step,
    task,
    task_again,
    workflow_cycle,
)

Topology = Callable[[Team], Any]


everywhere = pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology.__name__)


# ---- stopping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("topology", "limit"), spread(1, 4, 5))
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
        == "stopped by budget: 1250 tokens, limit 1250 (100% of 1250 tokens reached), in worker; 1 model call so far"
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
            for part in parts(content)
            if part.text and "token budget" in part.text
        ]
        for request in model.requests
    ]
    assert [len(texts) for texts in heard] == [0, 0, 1, 0]
    assert heard[2][0].startswith("50% of the token budget")
    assert "token budget" not in "".join(str(event.content) for event in result.session.events)
    assert result.texts == ["done"]


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
    await plugin.after_model_callback(callback_context=None, llm_response=says(prompt=1_299, candidates=1))
    assert plugin.monitor.current_tokens == 1_300
    assert of(plugin).current_tokens == CALL
    stopped = await plugin.before_model_callback(callback_context=None, llm_request=LlmRequest())
    assert stopped is not None
    assert stopped.error_code == STOP_CODE
