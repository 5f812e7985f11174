"""Budgets that cap or wait, and budgets that are raised while a run goes on."""

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from google.adk.agents import LlmAgent, LoopAgent, ParallelAgent
from google.adk.agents.run_config import RunConfig
from google.adk.apps import App
from google.adk.models.llm_request import LlmRequest
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.genai import types

import runguard
from runguard import Budget, Threshold
from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, text
from tests.kit.adk_runs import play, told
from tests.kit.endless_agents import endless, worker
from tests.kit.money import CALL_TOKENS, CALL_USD, agent, assert_nothing_reserved, guard
from tests.kit.tools import step
from tests.kit.topologies import TOPOLOGIES, Team, spread

# ---- capping and waiting --------------------------------------------------------------------------------------------


def _talker(limits: list[int | None], **config: Any) -> LlmAgent:
    """An agent that may answer at length; what each request really allows is noted."""

    def script(n: int, request: LlmRequest) -> types.Part:
        limits.append(request.config.max_output_tokens)
        return call("step", q=n)

    return LlmAgent(
        name="a",
        model=ScriptedModel(script),
        tools=[step],
        generate_content_config=types.GenerateContentConfig(**config) if config else None,
    )


async def test_the_answer_is_capped_to_what_the_rest_of_the_budget_pays() -> None:
    limits: list[int | None] = []
    root, service, plugin = (
        _talker(limits, max_output_tokens=2_000, temperature=0.5),
        InMemorySessionService(),
        guard(budgets=[Budget(usd="0.10", per="session")]),
    )
    result = await play(root, plugins=[plugin], session_service=service)
    assert limits == [2_000, 1_750, 1_250], "and 750 would have been too little to be useful"
    trip = assert_stopped(result, "budget")
    assert trip.spent_usd == Decimal("0.06")
    plugin.extend("session:app/u1/s1", usd=1)
    await play(root, plugins=[plugin], session_service=service, run_config=RunConfig(max_llm_calls=1))
    assert limits[3] == 2_000, "the agent's own configuration is as it was"
    assert root.generate_content_config is not None
    assert root.generate_content_config.max_output_tokens == 2_000
    assert_nothing_reserved(plugin)


async def test_an_agent_without_an_output_limit_gets_one_that_the_budget_pays() -> None:
    limits: list[int | None] = []
    root, plugin = _talker(limits), guard(max_usd="0.10", models={"scripted-1": {"max_output_tokens": 2_000}})
    await play(root, plugins=[plugin])
    assert limits == [None, 1_750, 1_250], "what the model can do by itself needs no cap"
    assert root.generate_content_config is None or root.generate_content_config.max_output_tokens is None


async def test_a_callback_cannot_ask_for_more_than_was_reserved() -> None:
    limits: list[int | None] = []

    def greedy(callback_context: Any, llm_request: LlmRequest) -> None:
        llm_request.config.max_output_tokens = 50_000

    root, plugin = _talker(limits, max_output_tokens=1_000), guard(max_usd="0.10")
    root.before_model_callback = greedy
    await play(root, plugins=[plugin])
    assert limits
    assert all(limit is not None and limit <= 1_000 for limit in limits)


@pytest.mark.parametrize(("tokens", "calls"), [(5_000, 4), (4_999, 3)])
async def test_a_token_budget_allows_exactly_its_number(tokens: int, calls: int) -> None:
    model, plugin = endless(), guard(max_tokens=tokens)
    result = await play(worker(model=model), plugins=[plugin])
    assert model.calls == calls
    assert assert_stopped(result, "budget").tokens == calls * CALL_TOKENS


@pytest.mark.parametrize(("wait", "answers"), [(60.0, 3), (0, 1)])
async def test_a_call_waits_for_what_others_hold_before_it_is_refused(wait: float, answers: int) -> None:
    """Each could cost $0.09 and does cost $0.02: one after the other they fit into $0.14, all at once only one does."""
    big = types.GenerateContentConfig(max_output_tokens=2_000)
    model = ScriptedModel([text("x")], latency_s=0.02)
    root = ParallelAgent(
        name="par", sub_agents=[LlmAgent(name=f"p{n}", model=model, generate_content_config=big) for n in range(3)]
    )
    plugin = guard(max_usd="0.14", max_wait_seconds=wait, min_output_tokens=2_000)
    result = await play(root, plugins=[plugin])
    assert (model.calls, len(result.texts)) == (answers, answers)
    assert model.max_in_flight == 1
    assert_nothing_reserved(plugin)


# ---- raising, looking on, rewinding ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        lambda a: a,
        lambda a: LoopAgent(name="loop", sub_agents=[a]),
        lambda a: ParallelAgent(name="par", sub_agents=[a]),
    ],
)
async def test_a_spent_budget_is_raised_with_its_figures(shape: Callable[[Any], Any]) -> None:
    result = await play(
        shape(worker()), plugins=[guard(budgets=[Budget(usd="0.06", per="user")], on_stop="raise")], catch=True
    )
    error = result.error
    assert type(error) is runguard.BudgetExceededError
    assert (error.spent, error.limit, error.scope) == (Decimal("0.06"), Decimal("0.06"), "user:app/u1")
    assert_calls_answered(result.session)


async def test_a_model_without_a_price_is_raised_as_such() -> None:
    model = ScriptedModel([text("x")], model="acme-unknown-1")
    result = await play(agent("a", model), plugins=[guard(max_usd=1, on_stop="raise")], catch=True)
    assert type(result.error) is runguard.UnpricedModelError
    assert model.calls == 0


async def test_a_full_context_is_raised_with_its_size() -> None:
    plugin = guard(max_context_tokens=900, on_stop="raise")
    result = await play(worker(), plugins=[plugin], catch=True)
    assert type(result.error) is runguard.ContextOverflowError
    assert (result.error.projected_tokens, result.error.limit) == (1_000, 900)


async def test_a_shadow_makes_every_call_and_tells_what_it_would_have_done() -> None:
    model = ScriptedModel([*(call("step", q=n) for n in range(5)), text("x")])
    plugin = guard(
        mode="shadow",
        max_usd="0.04",
        budgets=[Budget(usd="0.06", per="session", thresholds=[Threshold(0.5, action="nudge")])],
    )
    result = await play(worker(model=model), plugins=[plugin])
    assert (model.calls, result.texts, result.trips) == (6, ["x"], [])
    assert plugin.spend()["usd"] == Decimal("0.12")
    assert plugin.trips
    assert all(not trip.enforced and trip.rule == "budget" for trip in plugin.trips)
    assert "Finish now" not in str(model.requests)
    assert_nothing_reserved(plugin)


async def test_a_shadow_neither_caps_answers_nor_refuses_models_without_a_price() -> None:
    limits: list[int | None] = []
    plugin = guard(mode="shadow", max_usd="0.10", max_model_calls=4)
    await play(
        _talker(limits, max_output_tokens=2_000), plugins=[plugin], run_config=RunConfig(max_llm_calls=6), catch=True
    )
    assert limits == [2_000] * 6
    model = ScriptedModel([text("x")], model="acme-unknown-1")
    result = await play(agent("a", model), plugins=[guard(mode="shadow", max_usd=1)])
    assert result.texts == ["x"]


async def test_rewinding_a_session_gives_no_money_back() -> None:
    model, service, plugin = endless(), InMemorySessionService(), guard(budgets=[Budget(usd="0.06", per="session")])
    runner = Runner(app=App(name="app", root_agent=worker(model=model), plugins=[plugin]), session_service=service)
    first = await play(runner.agent, runner=runner)
    assert model.calls == 3
    await runner.rewind_async(user_id="u1", session_id="s1", rewind_before_invocation_id=first.events[0].invocation_id)
    second = await play(runner.agent, runner=runner)
    assert model.calls == 3
    assert_stopped(second, "budget")
    assert plugin.spend("session:app/u1/s1")["usd"] == Decimal("0.06")


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology.__name__)
async def test_a_healthy_run_does_not_notice_its_budgets(topology: Callable[[Team], Any]) -> None:
    alone, beside = Team(endless=False), Team(endless=False)
    plain = await play(topology(alone))
    kinds = ("session", "user", "agent", "model", "run+agent", "tool")
    plugin = guard(
        max_usd=1_000,
        max_context_tokens=1_000_000,
        budgets=[Budget(usd=1_000, tokens=10**9, calls=10_000, per=kind) for kind in kinds],
    )
    guarded = await play(topology(beside), plugins=[plugin])
    # strands side by side have no order between them
    assert sorted(map(str, told(guarded.events))) == sorted(map(str, told(plain.events)))
    assert beside.calls == alone.calls
    assert plugin.spend()["usd"] == beside.calls * CALL_USD
    assert plugin.trips == []
    assert_nothing_reserved(plugin)


@pytest.mark.parametrize(("topology", "limit"), spread(1, 5))
async def test_one_cap_in_dollars_holds_for_the_whole_tree_exactly(topology: Callable[[Team], Any], limit: int) -> None:
    """Transfers, agents as tools, tasks, single turns, branches, workflow nodes: one account, whatever the shape."""
    team, plugin = (
        Team(endless=True),
        guard(max_usd=limit * CALL_USD, models={"scripted-1": {"max_output_tokens": 250}}),
    )
    result = await play(topology(team), plugins=[plugin])
    assert team.calls == limit
    trip = assert_stopped(result, "budget")
    assert [t.id for t in plugin.trips] == [trip.id]
    assert (trip.scope, trip.unit, trip.spent_usd, trip.limit) == ("run", "usd", limit * CALL_USD, limit * CALL_USD)
    assert plugin.spend(trip.scope_id)["usd"] == limit * CALL_USD
    assert_nothing_reserved(plugin)
