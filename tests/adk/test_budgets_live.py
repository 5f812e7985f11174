"""Budgets on real ADK runs: scopes, windows, thresholds and live sessions."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from decimal import Decimal
from typing import Any

import pytest
from google.adk.agents import LiveRequestQueue, LlmAgent, ParallelAgent, SequentialAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.apps import App
from google.adk.models.base_llm_connection import BaseLlmConnection
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools.agent_tool import AgentTool
from google.genai import types

import runguard
from runguard import Budget, Threshold
from runguard.adk import RunGuardPlugin
from runguard.testing import FakeClock, Recording, ScriptedModel, assert_calls_answered, assert_stopped, call, text
from tests.kit.adk_runs import play
from tests.kit.endless_agents import endless, options, worker
from tests.kit.money import CALL_TOKENS, CALL_USD, agent, assert_nothing_reserved, guard

# ---- whom a budget is about -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("per", "scope_id", "same", "other"),
    [
        ("session", "session:app/u1/s1", {"session_id": "s1"}, {"session_id": "s2"}),
        ("user", "user:app/u1", {"session_id": "s2"}, {"user_id": "u2"}),
        ("app", "app:app", {"user_id": "u2"}, {"app_name": "another"}),
        (
            "label:team",
            "label:team=search",
            {"user_id": "u2", "run_config": options(labels={"team": "search"})},
            {"run_config": options(labels={"team": "ads"})},
        ),
        ("label:team", "label:team=search", {"user_id": "u2", "run_config": options(labels={"team": "search"})}, {}),
        (
            "user+label:team",
            "user+label:app/u1+team=search",
            {"run_config": options(labels={"team": "search"})},
            {"user_id": "u2"},
        ),
    ],
)
async def test_a_budget_is_shared_by_those_it_names_and_by_nobody_else(
    per: str, scope_id: str, same: dict[str, Any], other: dict[str, Any]
) -> None:
    model, service = endless(), InMemorySessionService()
    plugin = guard(budgets=[Budget(usd="0.06", per=per)], max_model_calls=7)
    labelled = {"run_config": options(labels={"team": "search"})} if "label" in per else {}

    async def turn(**how: Any) -> Recording:
        return await play(worker(model=model), plugins=[plugin], session_service=service, **how)

    first = await turn(**labelled)
    assert model.calls == 3
    trip = assert_stopped(first, "budget")
    assert (trip.scope, trip.scope_id, trip.spent_usd, trip.limit) == (
        per.replace(":team", ""),
        scope_id,
        Decimal("0.06"),
        Decimal("0.06"),
    )
    second = await turn(**same)
    assert model.calls == 3, "nothing is left for the next one either"
    assert assert_stopped(second, "budget").scope_id == scope_id
    third = await turn(**other)
    assert model.calls > 5, "somebody else has a budget of his own, or none"
    assert_calls_answered(third.session)
    assert_nothing_reserved(plugin)


async def test_an_agents_budget_stops_that_agent_and_its_siblings_go_on() -> None:
    greedy, modest = endless(), ScriptedModel([*(call("step", q=n) for n in range(8)), text("modest is done")])
    root = ParallelAgent(name="par", sub_agents=[worker("greedy", greedy), worker("modest", modest)])
    plugin = guard(budgets=[Budget(usd="0.04", per="agent:greedy")])
    result = await play(root, plugins=[plugin])
    assert (greedy.calls, modest.calls) == (2, 9)
    assert result.texts == ["modest is done"]
    (trip,) = plugin.trips
    assert (trip.scope, trip.scope_id) == ("agent", "agent:app/greedy")
    assert_calls_answered(result.session)
    assert_nothing_reserved(plugin)


async def test_a_budget_per_agent_counts_each_by_itself_over_all_runs() -> None:
    models = {name: ScriptedModel([text("x")]) for name in ("one", "two")}
    root = SequentialAgent(name="seq", sub_agents=[agent(name, model) for name, model in models.items()])
    plugin, service = guard(budgets=[Budget(calls=2, per="agent")]), InMemorySessionService()
    for _ in range(2):
        assert (await play(root, plugins=[plugin], session_service=service)).trips == []
    third = await play(root, plugins=[plugin], session_service=service)
    assert {name: model.calls for name, model in models.items()} == {"one": 2, "two": 2}
    assert assert_stopped(third, "budget").scope_id == "agent:app/one"
    assert {(s.scope, s.unit, s.spent) for s in plugin.budgets() if s.scope.startswith("agent")} == {
        ("agent:app/one", "calls", 2),
        ("agent:app/two", "calls", 2),
    }


async def test_a_tools_budget_is_about_the_calls_made_inside_of_it() -> None:
    inner = ScriptedModel(lambda n, _: call("step", q=n) if n % 3 else text(f"part {n // 3}"))
    outer = ScriptedModel([*(call("inner", request=f"part {n}") for n in range(4)), text("outer is done")])
    root = agent("outer", outer, tools=[AgentTool(worker("inner", inner))])
    plugin = guard(budgets=[Budget(usd="0.10", per="tool:inner")])
    result = await play(root, plugins=[plugin])
    assert inner.calls == 5
    assert plugin.spend()["by_tool"]["inner"]["usd"] == Decimal("0.10")
    assert {trip.scope_id for trip in plugin.trips} == {"tool:app/inner"}
    assert_calls_answered(result.session)
    assert_nothing_reserved(plugin)


async def test_a_budget_for_each_agent_of_each_run_begins_anew_with_the_run() -> None:
    model, service, plugin = endless(), InMemorySessionService(), guard(budgets=[Budget(calls=2, per="run+agent")])
    for turn in (1, 2):
        result = await play(worker(model=model), plugins=[plugin], session_service=service)
        assert_stopped(result, "budget")
        assert model.calls == 2 * turn
    assert [status for status in plugin.budgets() if status.scope.startswith("run")] == [], (
        "accounts of ended runs are gone"
    )


# ---- windows and functions ------------------------------------------------------------------------------------------


async def test_dollars_per_minute_stop_a_burst_and_let_the_next_minute_go_on() -> None:
    clock = FakeClock(now=1_000_000_040.0)  # 40 seconds before the next minute begins
    model, service = endless(), InMemorySessionService()
    plugin = guard(budgets=[Budget(usd="0.06", per="app", window="1m")], clock=clock)
    first = await play(worker(model=model), plugins=[plugin], session_service=service)
    assert model.calls == 3
    assert "window resets at" in assert_stopped(first, "budget").resume
    clock.advance(39)
    await play(worker(model=model), plugins=[plugin], session_service=service)
    assert model.calls == 3
    clock.advance(1)
    await play(worker(model=model), plugins=[plugin], session_service=service)
    assert model.calls == 6
    assert plugin.spend()["usd"] == Decimal("0.12"), "what was spent before is not forgotten"
    assert_nothing_reserved(plugin)


async def test_a_window_that_begins_anew_in_the_middle_of_a_run_pays_for_its_later_calls() -> None:
    clock = FakeClock(now=1_000_000_040.0)

    def script(n: int, _: LlmRequest) -> types.Part:
        if n == 3:
            clock.advance(60)
        return call("step", q=n)

    model = ScriptedModel(script)
    plugin = guard(budgets=[Budget(usd="0.06", per="app", window="1m")], clock=clock)
    await play(worker(model=model), plugins=[plugin])
    assert model.calls == 6, "two and a third that was asked for in the first minute, three in the second"
    assert_nothing_reserved(plugin)


async def test_a_cap_from_a_function_knows_whom_it_is_for() -> None:
    seen: list[tuple[str, str]] = []

    def allowance(scope: Any) -> Decimal | None:
        seen.append((scope.kind, scope.user))
        return {"pro": Decimal("0.10"), "free": Decimal("0.02")}.get(scope.user)

    plugin, made = guard(budgets=[Budget(usd=allowance, per="user")], max_model_calls=8), {}
    for user in ("free", "pro", "staff"):
        model = endless()
        await play(worker(model=model), plugins=[plugin], user_id=user)
        made[user] = model.calls
    assert made == {"free": 1, "pro": 5, "staff": 8}
    assert set(seen) == {("user", "free"), ("user", "pro"), ("user", "staff")}
    assert_nothing_reserved(plugin)


# ---- what one run says for itself -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "calls", "unit"),
    [({"max_usd": "0.04"}, 2, "usd"), ({"max_usd": 0.10}, 5, "usd"), ({"max_tokens": 4_000}, 3, "tokens")],
)
async def test_a_run_may_bring_its_own_limit(given: dict[str, Any], calls: int, unit: str) -> None:
    model, service, plugin = endless(), InMemorySessionService(), guard(max_model_calls=8)
    result = await play(worker(model=model), plugins=[plugin], session_service=service, run_config=options(**given))
    assert model.calls == calls
    trip = assert_stopped(result, "budget")
    assert (trip.scope, trip.unit) == ("run", unit)
    assert runguard.trip(result.events[-1]) == trip, "also where the caller's own metadata stands on every event"
    await play(worker(model=model), plugins=[plugin], session_service=service)
    assert model.calls == calls + 8, "the next run has no such limit"


async def test_a_runs_own_limit_holds_for_the_agents_in_its_tools_once() -> None:
    inner, outer = endless(), ScriptedModel(lambda n, _: call("inner", request=f"{n}"))
    plugin = guard()
    root = agent("outer", outer, tools=[AgentTool(worker("inner", inner))])
    result = await play(root, plugins=[plugin], run_config=options(max_usd="0.10", labels={"team": "search"}))
    assert outer.calls + inner.calls == 5
    assert len(plugin.trips) == 1
    assert_stopped(result, "budget")


@pytest.mark.parametrize(
    "given",
    [
        {"max_usd": -1},
        {"max_usd": "abc"},
        {"max_usd": True},
        {"max_tokens": 1.5},
        {"labels": "search"},
        {"max_dollars": 1},
        "a lot",
        5,
        ["max_usd"],
    ],
    ids=str,
)
async def test_a_mistake_in_what_a_run_says_stops_it_before_anything_is_paid(given: Any) -> None:
    model, service, plugin = ScriptedModel([text("x")]), InMemorySessionService(), guard()
    config = RunConfig(custom_metadata={"runguard": given})
    result = await play(agent("a", model), plugins=[plugin], session_service=service, run_config=config)
    assert model.calls == 0
    trip = assert_stopped(result, "policy_error")
    assert "custom_metadata" in trip.message
    again = await play(agent("a", model), plugins=[plugin], session_service=service)
    assert (model.calls, again.texts) == (1, ["x"])
    assert_nothing_reserved(plugin)


# ---- thresholds -----------------------------------------------------------------------------------------------------


async def test_a_threshold_calls_back_once_with_the_budget_as_it_stands() -> None:
    told_once: list[Any] = []
    plugin, service = (
        guard(budgets=[Budget(usd="0.20", per="session", thresholds=[Threshold(0.5, told_once.append)])]),
        InMemorySessionService(),
    )
    model = ScriptedModel(lambda n, _: call("step", q=n) if n % 4 else text("x"))
    for _ in range(2):
        await play(worker(model=model), plugins=[plugin], session_service=service)
    assert plugin.flush()
    (status,) = told_once
    assert (status.scope, status.unit, status.spent, status.limit) == (
        "session:app/u1/s1",
        "usd",
        Decimal("0.10"),
        Decimal("0.20"),
    )
    assert plugin.trips == []


async def test_a_recurring_threshold_calls_back_at_every_call_above_it() -> None:
    told_often: list[Any] = []
    plugin = guard(budgets=[Budget(usd="0.12", thresholds=[Threshold(0.5, told_often.append, recurring=True)])])
    await play(worker(), plugins=[plugin])
    assert plugin.flush()
    assert [status.spent for status in told_often] == [
        Decimal("0.06"),
        Decimal("0.08"),
        Decimal("0.10"),
        Decimal("0.12"),
    ]


async def test_a_callback_that_fails_harms_nothing() -> None:
    def broken(status: Any) -> None:
        raise ValueError("no")

    model = ScriptedModel([call("step", q=1), text("x")])
    plugin = guard(
        max_model_calls=5, budgets=[Budget(usd="0.04", thresholds=[Threshold(0.5, broken), Threshold(1.0, broken)])]
    )
    result = await play(worker(model=model), plugins=[plugin])
    assert plugin.flush()
    assert result.texts == ["x"]
    assert plugin.snapshot()["callbacks_failed"] == 2


async def test_a_nudge_is_in_the_next_request_and_not_in_the_session() -> None:
    seen: list[list[str]] = []

    def script(n: int, request: LlmRequest) -> types.Part:
        seen.append([part.text for content in request.contents for part in content.parts or [] if part.text])
        return call("step", q=n) if n < 4 else text("x")

    plugin, service = (
        guard(budgets=[Budget(usd="0.10", per="session", thresholds=[Threshold(0.4, action="nudge")])]),
        InMemorySessionService(),
    )
    root = worker(model=ScriptedModel(script))
    result = await play(root, plugins=[plugin], session_service=service)
    nudged = [any("Finish now" in words for words in request) for request in seen]
    assert nudged == [False, False, True, False], "said once, in the request after the call that reached it"
    assert "Finish now" not in str([event.content for event in result.session.events])
    await play(root, "and?", plugins=[plugin], session_service=service)
    assert not any("Finish now" in words for words in seen[-1])
    assert_calls_answered(result.session)


async def test_a_stop_threshold_stops_before_the_budget_is_spent() -> None:
    model, plugin = (
        endless(),
        guard(budgets=[Budget(usd="0.20", per="session", thresholds=[Threshold(0.5, action="stop")])]),
    )
    result = await play(worker(model=model), plugins=[plugin])
    assert model.calls == 5
    trip = assert_stopped(result, "budget")
    assert (trip.spent_usd, trip.limit, trip.scope) == (Decimal("0.10"), Decimal("0.20"), "session")
    assert "50%" in trip.message
    plugin.extend("session:app/u1/s1", usd="0.20")
    again = await play(worker(model=ScriptedModel([text("x")])), plugins=[plugin], session_service=None)
    assert again.texts == ["x"], "an extended budget is below its threshold again"


# ---- live sessions --------------------------------------------------------------------------------------------------


class Talk(BaseLlmConnection):
    """Answers every content it is sent and then tells its usage in an event of its own."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[str] = asyncio.Queue()

    async def send_history(self, history: list[types.Content]) -> None:
        return None

    async def send_content(self, content: types.Content) -> None:
        await self.heard.put("content")

    async def send_realtime(self, blob: Any) -> None:
        return None

    async def receive(self) -> AsyncGenerator[LlmResponse, None]:
        await self.heard.get()
        yield LlmResponse(content=types.Content(role="model", parts=[types.Part(text="hello")]))
        yield LlmResponse(
            usage_metadata=types.GenerateContentResponseUsageMetadata(
                prompt_token_count=1_000, candidates_token_count=250, total_token_count=CALL_TOKENS
            )
        )
        yield LlmResponse(turn_complete=True)

    async def close(self) -> None:
        return None


class LiveModel(ScriptedModel):
    @asynccontextmanager
    async def connect(self, llm_request: Any) -> AsyncGenerator[Talk, None]:
        yield Talk()


async def _talk(plugin: RunGuardPlugin, turns: int) -> list[str]:
    """Say something, wait for the answer, and again; what was said, and stops."""
    service = InMemorySessionService()
    await service.create_session(app_name="app", user_id="u1", session_id="s1")
    root = LlmAgent(name="talker", model=LiveModel([text("unused")]))  # type: ignore[call-arg]
    runner = Runner(app=App(name="app", root_agent=root, plugins=[plugin]), session_service=service)
    queue, said = LiveRequestQueue(), []
    hello = types.Content(role="user", parts=[types.Part(text="hi")])
    queue.send_content(hello)
    done = 0
    config = RunConfig(streaming_mode=StreamingMode.BIDI, response_modalities=["TEXT"])
    live = runner.run_live(user_id="u1", session_id="s1", live_request_queue=queue, run_config=config)
    async with asyncio.timeout(20), aclosing(live):
        async for event in live:
            said += [
                part.text
                for part in (event.content.parts if event.content else []) or []
                if part.text and not part.thought
            ]
            if event.turn_complete:
                done += 1
                if done == turns:
                    queue.close()
                    break
                queue.send_content(hello)
    return said


async def test_a_live_sessions_usage_is_booked_once_at_the_price_of_its_model() -> None:
    plugin = guard(max_usd=1, budgets=[Budget(usd=1, per="session")])
    assert await _talk(plugin, 3) == ["hello"] * 3
    spent = plugin.spend()
    assert (spent["calls"], spent["tokens"], spent["usd"], spent["estimated_calls"], spent["unpriced_calls"]) == (
        3,
        3 * CALL_TOKENS,
        3 * CALL_USD,
        0,
        0,
    )
    assert {status.spent for status in plugin.budgets("session:app/u1/s1")} == {3 * CALL_USD}
    assert plugin.trips == []
    assert_nothing_reserved(plugin)
