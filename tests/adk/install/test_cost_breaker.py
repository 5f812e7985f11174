"""``ADKCostBreaker``: attached agent by agent, correct where a hand-written one is not."""

import asyncio
import contextlib
import copy
import dataclasses
from typing import Any

import pytest
from google.adk.agents import LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.agents.run_config import RunConfig
from google.adk.runners import InMemoryRunner
from google.adk.sessions import InMemorySessionService
from google.adk.tools.tool_context import ToolContext
from google.genai import types

import runguard
from runguard import ADKCostBreaker, BreakerState
from runguard.adk import RunGuardPlugin
from runguard.testing import FakeClock, ScriptedModel, call, run, text, transfer


def parse_document_fragment(fragment: str, hint: str = "") -> dict[str, Any]:
    return {"status": "partial_parse_error", "data": None, "retry_hint": "E42"}


def lookup(key: str) -> dict[str, Any]:
    return {"value": key}


def stuck_model() -> ScriptedModel:
    return ScriptedModel(
        lambda n, _: call("parse_document_fragment", fragment="x", hint=str(n)) if n % 2 else text("retry")
    )


def test_constructor_has_the_promised_defaults() -> None:
    breaker = ADKCostBreaker()
    promised = {
        "max_identical_tool_results": 3,
        "max_delegation_depth": 5,
        "max_event_cost_ratio": 3.0,
        "cost_baseline_events": 5,
        "max_concurrent_agents": 20,
        "half_open_reset_seconds": 60,
        "state": BreakerState.CLOSED,
        "trip_reason": None,
    }
    assert {name: getattr(breaker, name) for name in promised} == promised


def test_a_bad_argument_fails_at_construction() -> None:
    with pytest.raises(runguard.PolicyError, match="max_concurrent_agents"):
        ADKCostBreaker(max_concurrent_agents=0)


def test_except_runtime_error_works_with_the_synchronous_runner() -> None:
    breaker, model = ADKCostBreaker(), stuck_model()
    worker = LlmAgent(name="w", model=model, tools=[parse_document_fragment])
    breaker.install_on_agent(worker)
    runner = InMemoryRunner(agent=LoopAgent(name="l", sub_agents=[worker], max_iterations=8), app_name="app")
    asyncio.run(runner.session_service.create_session(app_name="app", user_id="u", session_id="s"))
    message = types.Content(role="user", parts=[types.Part(text="go")])
    with pytest.raises(RuntimeError, match="stall"):
        list(runner.run(user_id="u", session_id="s", new_message=message))
    assert model.calls == 5


async def test_existing_callbacks_stay_and_see_everything() -> None:
    seen: list[str] = []

    def before_agent(callback_context: Any) -> None:
        seen.append("before_agent")

    async def before_model(callback_context: Any, llm_request: Any) -> None:
        seen.append("before_model")

    def before_tool(tool: Any, args: Any, tool_context: Any) -> None:
        seen.append("before_tool")

    def after_tool(tool: Any, args: Any, tool_context: Any, tool_response: Any) -> dict[str, Any]:
        seen.append("after_tool")
        return {"value": "replaced"}

    model = ScriptedModel([call("lookup", key="a"), text("done")])
    agent = LlmAgent(
        name="a",
        model=model,
        tools=[lookup],
        before_agent_callback=before_agent,
        before_model_callback=[before_model],
        before_tool_callback=before_tool,
        after_tool_callback=after_tool,
    )
    breaker = ADKCostBreaker()
    breaker.install_on_agent(agent)
    breaker.install_on_agent(agent)  # twice is not double
    recording = await run(agent)
    assert seen == ["before_agent", "before_model", "before_tool", "after_tool", "before_model"]
    answers = [r.response for e in recording.session.events for r in e.get_function_responses()]
    assert answers == [{"value": "replaced"}]


async def test_it_judges_what_the_users_callback_made_of_the_answer() -> None:
    def rescue(tool: Any, args: Any, tool_context: Any, tool_response: Any) -> dict[str, Any]:
        return {"value": args["hint"]}  # every answer is news now

    model = ScriptedModel(
        lambda n, _: call("parse_document_fragment", fragment="x", hint=str(n)) if n < 7 else text("done")
    )
    agent = LlmAgent(name="a", model=model, tools=[parse_document_fragment], after_tool_callback=rescue)
    breaker = ADKCostBreaker()
    breaker.install_on_agent(agent)
    assert (await run(agent)).texts == ["done"]
    assert breaker.trips == []


async def test_where_re_entries_are_allowed_a_return_to_the_parent_is_healthy_and_a_circle_is_not() -> None:
    def pair(model: ScriptedModel, breaker: ADKCostBreaker) -> LlmAgent:
        specialist = LlmAgent(name="B", description="knows", model=model)
        root = LlmAgent(name="A", description="asks", model=model, sub_agents=[specialist])
        breaker.install_on_agent(specialist)
        breaker.install_on_agent(root)
        return root

    healthy = ADKCostBreaker(max_reentries=None)
    assert (await run(pair(ScriptedModel([transfer("B"), transfer("A"), text("done")]), healthy))).texts == ["done"]
    assert healthy.state is BreakerState.CLOSED
    circle = ADKCostBreaker(max_handoff_repeats=3, max_reentries=None)
    model = ScriptedModel(lambda n, _: transfer("B") if n % 2 else transfer("A"))
    recording = await run(pair(model, circle), catch=True)
    assert type(recording.error) is runguard.LoopDetectedError
    assert model.calls == 5
    assert circle.trips[0].agent_path == ("A", "B", "A", "B", "A")


async def test_task_delegation_never_trips() -> None:
    worker = LlmAgent(
        name="T", description="does it", mode="task", model=ScriptedModel([call("finish_task", result="done")])
    )
    coordinator = LlmAgent(
        name="C",
        model=ScriptedModel(
            [call("T", request="one"), call("T", request="two"), call("T", request="three"), text("all done")]
        ),
        sub_agents=[worker],
    )
    breaker = ADKCostBreaker()
    breaker.install_on_agent(worker)
    breaker.install_on_agent(coordinator)
    assert (await run(coordinator)).texts[-1:] == ["all done"]
    assert breaker.trips == []


async def test_parallel_leaves_with_equal_answers_never_trip() -> None:
    breaker = ADKCostBreaker()
    leaves = [
        breaker.install_on_agent(
            LlmAgent(
                name=f"p{i}",
                model=ScriptedModel([call("parse_document_fragment", fragment="x"), text("ok")]),
                tools=[parse_document_fragment],
            )
        )
        for i in range(8)
    ]
    recording = await run(ParallelAgent(name="par", sub_agents=leaves))
    assert recording.texts == ["ok"] * 8
    assert breaker.trips == []


async def test_sessions_never_block_each_other() -> None:
    breaker = ADKCostBreaker()
    stuck = LlmAgent(name="stuck", model=stuck_model(), tools=[parse_document_fragment])
    fine = LlmAgent(
        name="fine", model=ScriptedModel([call("lookup", key="a"), text("done")], latency_s=0.02), tools=[lookup]
    )
    breaker.install_on_agent(stuck)
    breaker.install_on_agent(fine)
    bad, good = await asyncio.gather(
        run(LoopAgent(name="l", sub_agents=[stuck], max_iterations=8), session_id="bad", catch=True),
        run(fine, session_id="good", catch=True),
    )
    assert isinstance(bad.error, RuntimeError)
    assert type(bad.error) is runguard.LoopDetectedError
    assert good.error is None
    assert good.texts == ["done"]
    assert breaker.state is BreakerState.OPEN  # outside a run: the last trip
    again = await run(LlmAgent(name="other", model=ScriptedModel([text("free")])), session_id="third")
    assert again.texts == ["free"]


async def test_state_tells_about_the_current_run_and_then_the_last_trip() -> None:
    clock = FakeClock()
    breaker = ADKCostBreaker(clock=clock)
    states: list[BreakerState] = []

    def look() -> dict[str, Any]:
        states.append(breaker.state)
        return {"seen": len(states)}

    stuck = LlmAgent(name="stuck", model=stuck_model(), tools=[parse_document_fragment])
    breaker.install_on_agent(stuck)
    await run(LoopAgent(name="l", sub_agents=[stuck], max_iterations=8), catch=True)
    assert breaker.state is BreakerState.OPEN
    healthy = LlmAgent(name="h", model=ScriptedModel([call("look"), text("done")]), tools=[look])
    breaker.install_on_agent(healthy)
    clock.advance(1)
    await run(healthy, session_id="s2")
    assert states == [BreakerState.HALF_OPEN]  # the probe
    assert (breaker.state, breaker.trip_reason) == (BreakerState.CLOSED, None)


async def test_it_is_half_open_after_the_reset_time_and_closes_after_a_clean_run() -> None:
    clock = FakeClock()
    breaker = ADKCostBreaker(clock=clock)
    stuck = breaker.install_on_agent(LlmAgent(name="stuck", model=stuck_model(), tools=[parse_document_fragment]))
    await run(LoopAgent(name="l", sub_agents=[stuck], max_iterations=8), catch=True)
    clock.advance(61)
    assert (breaker.state, breaker.trip_reason is not None) == (BreakerState.HALF_OPEN, True)
    healthy = breaker.install_on_agent(LlmAgent(name="h", model=ScriptedModel([text("done")])))
    await run(healthy, session_id="s2")
    assert (breaker.state, breaker.trip_reason) == (BreakerState.CLOSED, None)
    clock.advance(61)
    assert (breaker.state, breaker.trip_reason) == (BreakerState.CLOSED, None)
    again = breaker.install_on_agent(LlmAgent(name="again", model=stuck_model(), tools=[parse_document_fragment]))
    await run(LoopAgent(name="l2", sub_agents=[again], max_iterations=8), catch=True, session_id="s3")
    assert breaker.state is BreakerState.OPEN


def submission(breaker: ADKCostBreaker) -> tuple[LoopAgent, ScriptedModel]:
    model = stuck_model()
    worker = breaker.install_on_agent(LlmAgent(name="extraction_agent", model=model, tools=[parse_document_fragment]))
    return LoopAgent(name="document_loop", sub_agents=[worker], max_iterations=8), model


async def test_the_same_document_is_refused_within_the_reset_time() -> None:
    clock = FakeClock()
    breaker = ADKCostBreaker(clock=clock)
    pipeline, model = submission(breaker)
    for attempt in range(15):
        recording = await run(pipeline, "document 1", session_id=f"s{attempt}", catch=True)
        assert isinstance(recording.error, runguard.RunStoppedError)
        assert type(recording.error) is (runguard.CircuitOpenError if attempt else runguard.LoopDetectedError)
        clock.advance(1)
    assert model.calls == 5, "only the first submission was paid"
    assert type(recording.error) is runguard.CircuitOpenError
    assert recording.error.retry_after == pytest.approx(60 - 14)
    assert "the same input was stopped by stall" in str(recording.error)
    assert breaker.state is BreakerState.OPEN
    assert "parse_document_fragment" in (breaker.trip_reason or ""), (
        "the reason is that of the trip, not of the refusals"
    )


async def test_the_refusal_ends_with_the_reset_time_counted_from_the_trip_or_with_reset() -> None:
    clock = FakeClock()
    breaker = ADKCostBreaker(clock=clock, half_open_reset_seconds=10)
    pipeline, model = submission(breaker)
    for seconds, calls_made in ((0, 5), (9, 5), (2, 11)):
        clock.advance(seconds)
        await run(pipeline, "document 1", session_id=f"s{clock.now}", catch=True)
        assert model.calls == calls_made
    breaker.reset()
    await run(pipeline, "document 1", session_id="after reset", catch=True)
    assert model.calls == 17


@pytest.mark.parametrize(
    "again",
    [
        {"message": "document 2", "session_id": "s2"},
        {"message": "document 1", "session_id": "s2", "user_id": "u2"},
        {"message": "document 1"},
    ],
    ids=["another document", "another user", "a later message of the session"],
)
async def test_no_other_input_is_refused(again: dict[str, Any]) -> None:
    breaker, service = ADKCostBreaker(), InMemorySessionService()
    pipeline, model = submission(breaker)
    await run(pipeline, "document 1", session_service=service, catch=True)
    recording = await run(pipeline, **again, session_service=service, catch=True)
    assert type(recording.error) is runguard.LoopDetectedError
    assert model.calls == 11


async def test_in_shadow_mode_a_resubmission_is_reported_and_runs() -> None:
    breaker = ADKCostBreaker(mode="shadow")
    pipeline, model = submission(breaker)
    for attempt in range(2):
        await run(pipeline, "document 1", session_id=f"s{attempt}")
    assert model.calls == 32
    assert "breaker" in [trip.rule for trip in breaker.trips]


async def test_a_trip_refuses_its_input_though_an_equal_one_has_begun_since() -> None:
    breaker, begun, other_begun = ADKCostBreaker(), asyncio.Event(), asyncio.Event()

    async def parse(hint: str) -> dict[str, Any]:
        begun.set()
        await asyncio.wait_for(other_begun.wait(), 5)
        return {"status": "partial_parse_error"}

    def submit(model: ScriptedModel, session: str) -> Any:
        agent = LlmAgent(name="extraction_agent", model=model, tools=[parse])
        breaker.install_on_agent(agent)
        return run(agent, "document 1", session_id=session, catch=True)

    stuck = asyncio.create_task(submit(ScriptedModel(lambda n, _: call("parse", hint=str(n))), "s1"))
    await begun.wait()
    assert (await submit(ScriptedModel([text("parsed")]), "s2")).texts == ["parsed"]
    other_begun.set()
    assert type((await stuck).error) is runguard.LoopDetectedError
    assert type((await submit(ScriptedModel([text("parsed")]), "s3")).error) is runguard.CircuitOpenError


async def test_a_run_that_trips_after_a_reset_has_its_input_refused() -> None:
    breaker, model = ADKCostBreaker(), stuck_model()

    def reset(tool: Any, args: Any, tool_context: Any, tool_response: Any) -> None:
        if model.calls < 3:  # as another session that ends in the middle of this run
            breaker.reset()

    worker = LlmAgent(name="w", model=model, tools=[parse_document_fragment], after_tool_callback=reset)
    breaker.install_on_agent(worker)
    pipeline = LoopAgent(name="l", sub_agents=[worker], max_iterations=8)
    for session in ("s1", "s2"):
        await run(pipeline, session_id=session, catch=True)
    assert [trip.rule for trip in breaker.trips] == ["stall", "breaker"]


@pytest.mark.parametrize("stopped_by", ["an operator", "a budget of the user"])
async def test_an_input_is_not_refused_for_a_stop_with_another_cause(stopped_by: str) -> None:
    calls_allowed = 99 if stopped_by == "an operator" else 2
    breaker = ADKCostBreaker(budgets=[{"calls": calls_allowed, "per": "user"}])

    def read_page(n: int) -> dict[str, Any]:
        if n == 2:
            breaker._plugin.stop("all", actor="ops")
        return {"page": n}

    model = ScriptedModel(lambda n, _: call("read_page", n=n) if n < 4 else text("done"))
    agent = breaker.install_on_agent(LlmAgent(name="a", model=model, tools=[read_page]))
    first = await run(agent, "document 1", session_id="s1", catch=True)
    assert isinstance(first.error, runguard.RunStoppedError)
    breaker._plugin.resume("all")
    breaker._plugin.extend("user:app/u1", calls=9)
    assert (await run(agent, "document 1", session_id="s2", catch=True)).texts == ["done"]


def test_recorded_tokens_stay_bounded_whatever_the_baseline() -> None:
    for baseline in (5, 600):
        breaker = ADKCostBreaker(cost_baseline_events=baseline)
        for _ in range(20_000):
            breaker.record_event_tokens(1_000)
        assert 2 * baseline <= len(breaker._event_token_counts) <= 2_400
        assert breaker.growth_ratio == 1


async def test_prompt_growth_trips_per_agent_and_not_across_agents() -> None:
    grown = ADKCostBreaker(max_event_cost_ratio=3.0)
    agent = LlmAgent(
        name="a",
        model=ScriptedModel(lambda n, _: call("lookup", key=str(n)), prompt_tokens=lambda n: 1_000 * n),
        tools=[lookup],
    )
    grown.install_on_agent(agent)
    recording = await run(agent, catch=True)
    assert isinstance(recording.error, runguard.LimitExceededError)
    assert type(recording.error) is runguard.CostGrowthError
    assert recording.error.trip.rule == "growth"
    mixed = ADKCostBreaker(max_event_cost_ratio=3.0)
    small = LlmAgent(name="small", model=ScriptedModel([text("x")], prompt_tokens=100))
    large = LlmAgent(name="large", model=ScriptedModel([text("y")], prompt_tokens=10_000))
    for one in (small, large):
        mixed.install_on_agent(one)
    pipeline = SequentialAgent(
        name="s",
        sub_agents=[
            LoopAgent(name="l1", sub_agents=[small], max_iterations=6),
            LoopAgent(name="l2", sub_agents=[large], max_iterations=6),
        ],
    )
    assert (await run(pipeline)).texts == ["x"] * 6 + ["y"] * 6
    assert mixed.trips == []


def test_tokens_told_by_hand_trip_at_the_ratio() -> None:
    breaker = ADKCostBreaker(cost_baseline_events=5, max_event_cost_ratio=3.0)
    for count in [800] * 5 + [2_400] * 4:
        breaker.record_event_tokens(count)
    assert [breaker.growth_ratio] == [None]
    with pytest.raises(runguard.CostGrowthError, match=r"3\.0 times") as caught:
        breaker.record_event_tokens(2_400)
    assert type(caught.value) is runguard.CostGrowthError
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, runguard.LimitExceededError)
    assert (caught.value.trip.rule, caught.value.observed, caught.value.limit) == ("growth", 3.0, 3.0)
    assert (breaker.state, breaker.growth_ratio) == (BreakerState.OPEN, 3.0)
    assert breaker.trip_reason == str(caught.value)
    assert breaker.trips == [caught.value.trip]
    assert breaker._plugin.snapshot()["runs"] == []
    breaker.reset()
    assert (breaker.state, breaker.growth_ratio) == (BreakerState.CLOSED, None)


async def test_tokens_recorded_by_hand_stop_an_attached_run() -> None:
    breaker = ADKCostBreaker(max_event_cost_ratio=3.0)
    model = ScriptedModel(lambda n, _: call("lookup", key=str(n)), prompt_tokens=100)
    agent = breaker.install_on_agent(LlmAgent(name="a", model=model, tools=[lookup]))
    runner = InMemoryRunner(agent=agent, app_name="app")
    await runner.session_service.create_session(app_name="app", user_id="u", session_id="s")
    message = types.Content(role="user", parts=[types.Part(text="go")])

    async def consume() -> None:
        async with contextlib.aclosing(runner.run_async(user_id="u", session_id="s", new_message=message)) as events:
            async for event in events:
                if event.usage_metadata is not None:
                    breaker.record_event_tokens(1_000 * model.calls)

    with pytest.raises(runguard.CostGrowthError):
        await consume()
    assert model.calls == 11  # 7 + 8 + 9 + 10 + 11 is three times 1 + 2 + 3 + 4 + 5
    assert breaker.state is BreakerState.OPEN


def test_recorded_counts_are_bounded_and_can_be_sliced() -> None:
    breaker = ADKCostBreaker(max_event_cost_ratio=999.0)
    for count in range(25_000):
        breaker.record_event_tokens(800 if count < 5 else 1_000)
    counts = breaker._event_token_counts
    assert len(counts) <= 10_000
    assert counts[:5] == [800] * 5
    assert breaker.growth_ratio == 1.25


def test_the_soft_alert_reports_growth_once_and_raises_nothing() -> None:
    alerts: list[str] = []
    breaker = ADKCostBreaker(mode="shadow", on_trip=lambda trip: alerts.append(str(trip)))
    for count in [800] * 5 + [2_400] * 20:
        breaker.record_event_tokens(count)
    breaker._plugin.flush()
    assert len(alerts) == 1
    assert "3.0 times" in alerts[0]
    assert breaker.growth_ratio == 3.0


async def test_shadow_mode_alerts_through_on_trip_without_stopping() -> None:
    reasons: list[str] = []
    breaker = ADKCostBreaker(mode="shadow", on_trip=lambda reason: reasons.append(f"ADK breaker tripped: {reason}"))
    worker = LlmAgent(name="w", model=stuck_model(), tools=[parse_document_fragment])
    breaker.install_on_agent(worker)
    await run(LoopAgent(name="l", sub_agents=[worker], max_iterations=8))
    breaker._plugin.flush()
    assert reasons
    assert "would have stopped" in reasons[0]
    assert all(not t.enforced for t in breaker.trips)


async def test_concurrency_refuses_the_surplus_and_keeps_what_was_paid() -> None:
    breaker = ADKCostBreaker(max_concurrent_agents=3, on_stop="stop")
    model = ScriptedModel([text("x")], latency_s=0.05)
    leaves = [breaker.install_on_agent(LlmAgent(name=f"p{i}", model=model)) for i in range(10)]
    recording = await run(ParallelAgent(name="par", sub_agents=leaves))
    assert model.calls == 3
    assert recording.texts == ["x"] * 3
    assert len(breaker.trips) == 1


@pytest.mark.parametrize("guarded_by", ["plugin", "breaker"])
async def test_the_answer_of_a_routing_tool_is_no_progress(guarded_by: str) -> None:
    """Two agents that route to each other, each time with another wording of the task."""

    def route(target: str, task: str, tool_context: ToolContext) -> dict[str, str]:
        """Routes the task."""
        tool_context.actions.transfer_to_agent = target
        return {"routed": task}

    model = ScriptedModel(lambda n, _: call("route", target="b" if n % 2 else "a", task=f"wording {n}"))
    b = LlmAgent(name="b", model=model, tools=[route])
    a = LlmAgent(name="a", model=model, tools=[route], sub_agents=[b])
    breaker = ADKCostBreaker(max_delegation_depth=100, max_reentries=None)
    plugins = [RunGuardPlugin()] if guarded_by == "plugin" else []
    for agent in () if plugins else (a, b):
        breaker.install_on_agent(agent)
    recording = await run(a, plugins=plugins, catch=True, run_config=RunConfig(max_llm_calls=30))
    assert recording.trips[0].rule == "handoff"
    assert model.calls == 11


# ---- a dataclass ----------------------------------------------------------------------------------------------------


async def stuck_run(breaker: ADKCostBreaker, message: str) -> int:
    """How many model calls a stuck agent makes."""
    model = stuck_model()
    worker = breaker.install_on_agent(LlmAgent(name="w", model=model, tools=[parse_document_fragment]))
    await run(LoopAgent(name="l", sub_agents=[worker], max_iterations=8), message, session_id=message, catch=True)
    return model.calls


async def test_a_limit_that_is_assigned_later_takes_effect() -> None:
    breaker = ADKCostBreaker()
    assert await stuck_run(breaker, "one") == 5
    breaker.max_identical_tool_results = 5
    assert breaker.max_identical_tool_results == 5
    assert await stuck_run(breaker, "two") == 9
    breaker.max_identical_tool_results = 2
    assert await stuck_run(breaker, "three") == 3
    assert [trip.limit for trip in breaker.trips] == [3, 5, 2], "trips are kept"


async def test_a_limit_that_is_assigned_in_a_run_holds_for_the_next_run() -> None:
    breaker, model = ADKCostBreaker(), stuck_model()

    def loosen(tool: Any, args: Any, tool_context: Any, tool_response: Any) -> None:
        breaker.max_identical_tool_results = 7

    worker = LlmAgent(name="w", model=model, tools=[parse_document_fragment], after_tool_callback=loosen)
    breaker.install_on_agent(worker)
    await run(LoopAgent(name="l", sub_agents=[worker], max_iterations=8), catch=True)
    assert (model.calls, breaker.trips[0].limit) == (5, 3)
    assert breaker.state is BreakerState.OPEN
    assert await stuck_run(breaker, "next") == 13


def test_a_wrong_limit_that_is_assigned_raises_and_changes_nothing() -> None:
    breaker = ADKCostBreaker()
    with pytest.raises(runguard.PolicyError, match="max_concurrent_agents"):
        breaker.max_concurrent_agents = 0
    assert breaker.max_concurrent_agents == 20


def test_it_compares_prints_and_is_replaced_like_a_dataclass() -> None:
    breaker = ADKCostBreaker(max_delegation_depth=3, alerts={"slack_webhook": "https://hooks.slack.com/secret"})
    assert breaker == ADKCostBreaker(max_delegation_depth=3, alerts={"slack_webhook": "https://hooks.slack.com/secret"})
    assert breaker != ADKCostBreaker(max_delegation_depth=3)
    assert "max_delegation_depth=3, " in repr(breaker)
    assert "state=<BreakerState.CLOSED: 'closed'>, trip_reason=None" in repr(breaker)
    assert "secret" not in repr(breaker)
    changed = dataclasses.replace(breaker, max_identical_tool_results=4, max_model_calls=9)  # type: ignore[call-arg]
    assert (changed.max_identical_tool_results, changed.max_delegation_depth) == (4, 3)
    assert changed.settings == {**breaker.settings, "max_model_calls": 9}
    assert dataclasses.asdict(breaker)["max_concurrent_agents"] == 20


async def test_a_copied_agent_has_a_breaker_of_its_own_with_the_same_limits() -> None:
    breaker = ADKCostBreaker(max_identical_tool_results=4)
    agents = [LlmAgent(name=name, model=stuck_model(), tools=[parse_document_fragment]) for name in "ab"]
    for agent in agents:
        breaker.install_on_agent(agent)
    copies = copy.deepcopy([agent.before_agent_callback for agent in agents])
    one, other = (callbacks[0].__self__ for callbacks in copies)  # type: ignore[index, union-attr]
    assert one is other
    assert one is not breaker
    assert one == breaker == copy.deepcopy(breaker)
    assert await stuck_run(one, "copy") == 7
    assert (breaker.trips, breaker.state) == ([], BreakerState.CLOSED)


@pytest.mark.parametrize("name", ["max_identical_tool_result", "max_model_calls"])
def test_a_field_that_does_not_exist_cannot_be_assigned(name: str) -> None:
    with pytest.raises(AttributeError, match=f"{name} = 4: no such field; other settings are set with settings="):
        setattr(ADKCostBreaker(), name, 4)


@pytest.mark.parametrize(("field", "value"), [("state", BreakerState.CLOSED), ("trip_reason", None)])
async def test_state_can_be_set_to_reset_it(field: str, value: Any) -> None:
    breaker = ADKCostBreaker()
    pipeline, model = submission(breaker)
    await run(pipeline, "document 1", session_id="s1", catch=True)
    assert breaker.state is BreakerState.OPEN
    setattr(breaker, field, value)
    assert (breaker.state, breaker.trip_reason) == (BreakerState.CLOSED, None)
    await run(pipeline, "document 1", session_id="s2", catch=True)
    assert model.calls == 11


def test_a_state_that_cannot_be_set_is_rejected() -> None:
    breaker = ADKCostBreaker()
    with pytest.raises(ValueError, match=r"only BreakerState\.CLOSED can be set"):
        breaker.state = BreakerState.OPEN
    with pytest.raises(runguard.PolicyError, match="only None can be set"):
        breaker.trip_reason = "mine"  # type: ignore[assignment]
