"""Incidents about money that users reported, with their exact numbers.

A standard call has 1,000 prompt and 250 output tokens and costs $0.02.
"""

import asyncio
import random
from collections.abc import AsyncGenerator
from decimal import Decimal
from typing import Any

import pytest
from google.adk.agents import LlmAgent, ParallelAgent
from google.adk.apps import App
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools.agent_tool import AgentTool
from google.genai import types

import runguard
from runguard import Budget
from runguard.adk import RunGuardPlugin
from runguard.testing import FakeClock, ScriptedModel, assert_calls_answered, assert_stopped, call, text
from tests.kit.adk_runs import play
from tests.kit.contents import parts
from tests.kit.money import CALL_TOKENS, CALL_USD, SSE, agent, guard
from tests.kit.optional import present
from tests.kit.tools import step

DAY = 86_400


# ---- V5: one budget over AgentTool ----------------------------------------------------------------------------------


def _delegating() -> tuple[LlmAgent, ScriptedModel, ScriptedModel]:
    """The inner agent makes nine steps and an answer each time; the outer one calls it for ever."""
    inner = ScriptedModel(lambda n, _: call("step", q=n) if n % 10 else text(f"part {n // 10} is done"))
    outer = ScriptedModel(lambda n, _: call("inner", request=f"part {n}"))
    return agent("outer", outer, tools=[AgentTool(agent("inner", inner, tools=[step]))]), outer, inner


async def test_v5_one_budget_in_dollars_holds_over_agents_called_as_tools() -> None:
    root, outer, inner = _delegating()
    plugin = guard(max_usd="0.50")
    result = await play(root, plugins=[plugin])
    assert (outer.calls, inner.calls) == (3, 22)
    trip = assert_stopped(result, "budget")
    assert (trip.spent_usd, trip.limit, trip.scope, trip.unit) == (Decimal("0.50"), Decimal("0.50"), "run", "usd")
    assert assert_calls_answered(result.session) == 3
    assert len(plugin.trips) == 1


# ---- V6: a race for the last dollars --------------------------------------------------------------------------------


def _crowd(size: int, model: Any, **options: Any) -> ParallelAgent:
    return ParallelAgent(name="crowd", sub_agents=[agent(f"p{n}", model, **options) for n in range(size)])


async def test_v6_branches_that_race_for_a_budget_spend_it_and_not_a_cent_more() -> None:
    model = ScriptedModel([text("x")], latency_s=0.05)
    plugin = guard(max_usd="0.20")
    result = await play(_crowd(40, model), plugins=[plugin])
    assert model.calls == 10
    assert plugin.spend()["usd"] == Decimal("0.20")
    assert [
        event.content.parts[0].text for event in result.session.events if event.content and event.error_code is None
    ][1:] == ["x"] * 10
    assert sum(event.error_code == "RUNGUARD_STOP" for event in result.session.events) == 30
    (trip,) = plugin.trips
    assert (trip.rule, trip.spent_usd, trip.reserved_usd, trip.limit) == (
        "budget",
        Decimal("0.20"),
        Decimal(0),
        Decimal("0.20"),
    )
    assert trip.observed == Decimal("0.22"), "what the refused call would have made of it"


async def test_v6_a_cap_that_pays_for_no_whole_number_of_calls_is_not_exceeded() -> None:
    model = ScriptedModel([text("x")], latency_s=0.01)
    plugin = guard(max_usd="0.199")
    result = await play(_crowd(40, model), plugins=[plugin])
    assert (model.calls, len(result.texts), plugin.spend()["usd"]) == (9, 9, Decimal("0.18"))


class _UnavailableError(Exception):
    """The provider's own refusal: it answers with a status and bills nothing."""

    code = 503


class _Provider(ScriptedModel):
    """Bills what it has worked on, whoever still waits for it; fails, refuses and is late by a seed."""

    def __init__(self, seed: int, *, refusals: float = 0.0, failures: float = 0.0) -> None:
        super().__init__([text("x")])
        self._random = random.Random(seed)
        self._refusals, self._failures = refusals, failures
        self._worked = self._answered = 0
        self._at: tuple[int, Any] = (0, None)

    _random: Any = None
    _refusals: float = 0.0
    _failures: float = 0.0
    _worked: int = 0
    _answered: int = 0
    _at: tuple[int, Any] = (0, None)

    @property
    def billed(self) -> Decimal:
        return self._worked * CALL_USD

    @property
    def answered(self) -> int:
        return self._answered

    def at_call(self, number: int, act: Any) -> None:
        """Do something while call ``number`` is on its way."""
        self._at = (number, act)

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        luck = self._random.random()
        latency = self._random.random() * 0.004
        if luck < self._refusals:
            await asyncio.sleep(latency)
            raise _UnavailableError
        self._worked += 1  # from here on it works for us, also if we hang up
        if self._worked == self._at[0]:
            self._at[1]()
        await asyncio.sleep(latency)
        if luck < self._refusals + self._failures:
            raise ConnectionError("the line broke")
        self._answered += 1
        async for response in super().generate_content_async(llm_request, stream):
            yield response


def _recover(callback_context: Any, llm_request: Any, error: Exception) -> LlmResponse:
    return LlmResponse(content=types.Content(role="model", parts=[types.Part(text="no answer")]))


@pytest.mark.parametrize(("seed", "size"), [*((seed, 24) for seed in range(6)), (24, 400)])
async def test_many_branches_without_errors_get_exactly_the_calls_that_the_cap_pays(seed: int, size: int) -> None:
    provider = _Provider(seed)
    plugin = guard(max_usd="0.20", max_fan_out=400)
    result = await play(_crowd(size, provider), plugins=[plugin], seconds=50)
    assert (provider.calls, provider.billed, len(result.texts)) == (10, Decimal("0.20"), 10)
    assert sum(bool(event.content and event.content.parts[0].text == "x") for event in result.session.events) == 10
    assert len(plugin.trips) == 1


_SEEDS = [*((seed, 24) for seed in range(30)), *((seed, 400) for seed in range(72, 75))]


@pytest.mark.parametrize(("seed", "size"), _SEEDS)
async def test_errors_and_cancellation_neither_lose_nor_leak_money(seed: int, size: int) -> None:
    """A third of the seeds recovers from errors, a third lets them end the run, a third is cancelled in the middle."""
    provider = _Provider(seed, refusals=0.2, failures=0.2)
    plugin = guard(max_usd="0.20", max_fan_out=400)
    root = _crowd(size, provider, **({} if seed % 3 == 1 else {"on_model_error_callback": _recover}))
    playing = asyncio.create_task(play(root, plugins=[plugin], seconds=50, catch=True))
    if seed % 3 == 2:
        provider.at_call(1 + seed % 10, playing.cancel)
        with pytest.raises(asyncio.CancelledError):
            await playing
    else:
        result = await playing
        assert (result.error is None) or seed % 3 == 1
    spent = plugin.spend()
    assert provider.billed <= Decimal("0.20")
    assert provider.billed <= spent["usd"] <= Decimal("0.20")
    if seed % 3 == 0:
        # Refused calls gave their money back, so that others could use it; what broke is taken for what it cost.
        assert (provider.billed, spent["usd"]) == (Decimal("0.20"), Decimal("0.20"))
        assert result.texts.count("x") == provider.answered
        assert len(plugin.trips) == 1


# ---- V9: streaming is counted once ----------------------------------------------------------------------------------


@pytest.mark.parametrize("usage_on", ["all", "last", "final"])
async def test_v9_a_streamed_answer_is_counted_once(usage_on: str) -> None:
    model = ScriptedModel([text("whole")], chunks=7, usage_on=usage_on)
    plugin = guard(max_usd="1", budgets=[Budget(usd=1, tokens=10_000, per="session")])
    result = await play(agent("a", model), plugins=[plugin], run_config=SSE)
    assert len([event for event in result.events if event.partial]) == 6
    spent = plugin.spend()
    assert (model.calls, spent["calls"], spent["tokens"], spent["usd"]) == (1, 1, CALL_TOKENS, CALL_USD)
    assert spent["estimated_calls"] == 0
    assert {status.unit: status.spent for status in plugin.budgets("session:app/u1/s1")} == {
        "usd": CALL_USD,
        "tokens": CALL_TOKENS,
    }


async def test_v9_a_streamed_answer_without_any_usage_is_estimated_and_marked() -> None:
    model = ScriptedModel([text("whole")], chunks=7, usage_on="none")
    plugin = guard(max_usd="1")
    await play(agent("a", model), plugins=[plugin], run_config=SSE)
    spent = plugin.spend()
    assert (spent["calls"], spent["estimated_calls"], spent["input_tokens"]) == (1, 1, 1_000)
    assert Decimal("0.01") < spent["usd"] < CALL_USD, "the prompt and the few words that came"


# ---- V10: a model without a price -----------------------------------------------------------------------------------


def _unknown() -> tuple[LlmAgent, ScriptedModel]:
    model = ScriptedModel([text("x")], model="acme-unknown-1")
    return agent("a", model), model


async def test_v10_a_dollar_cap_and_a_model_without_a_price_cost_nothing() -> None:
    root, model = _unknown()
    plugin = guard(max_usd=1)
    result = await play(root, plugins=[plugin])
    assert model.calls == 0
    trip = assert_stopped(result, "unpriced")
    assert "acme-unknown-1" in trip.message
    assert 'prices={"acme-unknown-1": {"input": …, "output": …}}' in trip.message
    assert trip.model == "acme-unknown-1"
    assert (trip.spent_usd, len(plugin.trips)) == (Decimal(0), 1)


async def test_a_model_without_a_name_is_refused_and_no_price_is_asked_for() -> None:
    root = agent("a", ScriptedModel([text("x")], model=""))
    trip = assert_stopped(await play(root, plugins=[guard(max_usd=1)]), "unpriced")
    assert "the call names no model; give the model a name" in trip.message
    assert "prices=" not in trip.message


async def test_v10_with_a_fallback_price_it_runs_and_says_so() -> None:
    root, model = _unknown()
    plugin = guard(max_usd="0.10", on_unpriced={"input": 10, "output": 40})
    await play(root, plugins=[plugin])
    spent = plugin.spend()
    assert (model.calls, spent["usd"], spent["estimated_calls"], spent["unpriced_calls"]) == (1, CALL_USD, 1, 0)
    assert plugin.trips == []


# ---- V11: the context grows -----------------------------------------------------------------------------------------


async def test_v11_the_call_that_would_not_fit_is_never_sent() -> None:
    model = ScriptedModel(lambda n, _: call("step", q=n), prompt_tokens=lambda n: 1_000 * n, output_tokens=10)
    decisions: list[Any] = []
    plugin = guard(
        max_context_tokens=20_000,
        tokens=lambda request: 1_000 * (model.calls + 1),
        on_decision=decisions.append,
        rules={"growth": False},
    )
    result = await play(agent("a", model, tools=[step]), plugins=[plugin])
    assert plugin.flush()
    assert model.calls == 20
    assert plugin.spend()["tokens"] == 210_200
    assert assert_calls_answered(result.session) == 20
    trip = assert_stopped(result, "context")
    assert (trip.observed, trip.limit, trip.unit) == (21_000, 20_000, "tokens")
    warned = [
        (decision.finding.rule, decision.finding.observed) for decision in decisions if decision.action.word == "warn"
    ]
    assert warned == [("context", 16_000)]
    assert len(plugin.trips) == 1


# ---- V12: a user's cap over all his sessions ------------------------------------------------------------------------


def _service(plugin: RunGuardPlugin, script: Any = None, latency_s: float = 0.0) -> tuple[Runner, ScriptedModel]:
    """One Runner for all users. Every run wants five calls: four steps and an answer."""
    answered: dict[str, int] = {}

    def five(n: int, request: LlmRequest) -> types.Part:
        who = parts(request.contents[0])[0].text or ""  # the user's first words name the run
        answered[who] = answered.get(who, 0) + 1
        return call("step", q=answered[who]) if answered[who] % 5 else text("done")

    model = ScriptedModel(script or five, latency_s=latency_s)
    app = App(name="app", root_agent=agent("a", model, tools=[step]), plugins=[plugin])
    return Runner(app=app, session_service=InMemorySessionService()), model


async def test_v12_a_users_cap_holds_over_all_sessions_and_begins_anew_the_next_day() -> None:
    clock = FakeClock()
    plugin = guard(budgets=[Budget(usd="0.10", per="user", window="1d")], clock=clock)
    runner, model = _service(plugin, latency_s=0.002)

    async def one(user: str, session: str) -> tuple[Any, int]:
        before = plugin.spend(f"session:app/{user}/{session}")["calls"]
        result = await play(runner.agent, f"{user} {session}", runner=runner, user_id=user, session_id=session)
        return result, plugin.spend(f"session:app/{user}/{session}")["calls"] - before

    *alice, (bobs, bobs_calls) = await asyncio.gather(
        one("alice", "s1"), one("alice", "s2"), one("alice", "s3"), one("bob", "s1")
    )
    assert sum(made for _, made in alice) == 5
    assert plugin.spend("user:app/alice")["usd"] == Decimal("0.10")
    assert bobs_calls == 5
    assert bobs.texts == ["done"]
    assert bobs.trips == []
    assert plugin.spend("user:app/bob")["usd"] == Decimal("0.10")
    for result, _ in alice:
        assert_calls_answered(result.session)
    assert {(trip.scope, trip.scope_id, trip.user_id) for trip in plugin.trips} == {("user", "user:app/alice", "alice")}

    calls = model.calls
    fourth, made = await one("alice", "s4")
    assert (made, model.calls) == (0, calls)
    trip = assert_stopped(fourth, "budget")
    assert (trip.scope, trip.scope_id, trip.spent_usd) == ("user", "user:app/alice", Decimal("0.10"))
    assert "UTC" in trip.resume

    clock.advance(DAY)
    fifth, made = await one("alice", "s5")
    assert made == 5
    assert fifth.texts == ["done"]


@pytest.mark.parametrize(
    ("session", "user", "named", "made"),
    [("0.06", "0.10", "session", 3), ("0.10", "0.06", "user", 3), ("0.04", "0.08", "session", 2)],
)
async def test_v12_of_two_caps_the_tighter_one_stops_and_is_named(
    session: str, user: str, named: str, made: int
) -> None:
    plugin = guard(budgets=[Budget(usd=session, per="session"), Budget(usd=user, per="user", window="1d")])
    runner, model = _service(plugin)
    result = await play(runner.agent, runner=runner, user_id="alice")
    assert model.calls == made
    trip = assert_stopped(result, "budget")
    assert trip.scope == named
    assert trip.scope_id == {"session": "session:app/alice/s1", "user": "user:app/alice"}[named]
    assert trip.limit == Decimal(min(session, user))


# ---- V13: pause, extend, go on --------------------------------------------------------------------------------------


def _eight_steps() -> tuple[LlmAgent, ScriptedModel, list[int]]:
    done: list[int] = []

    def work(q: int) -> dict[str, int]:
        done.append(q)
        return {"done": q}

    def script(n: int, request: LlmRequest) -> types.Part:
        """Goes on behind the last step that the session has."""
        answered = [
            present(p.function_response.response)["done"]
            for c in request.contents
            for p in c.parts or []
            if p.function_response
        ]
        following = max(answered, default=0) + 1
        return call("work", q=following) if following <= 8 else text("all eight")

    model = ScriptedModel(script)
    return agent("a", model, tools=[work]), model, done


async def test_v13_an_extended_session_goes_on_where_it_paused() -> None:
    root, model, done = _eight_steps()
    plugin, service = guard(budgets=[Budget(usd="0.10", per="session")]), InMemorySessionService()
    first = await play(root, plugins=[plugin], session_service=service)
    assert (model.calls, done) == (5, [1, 2, 3, 4, 5])
    trip = assert_stopped(first, "budget")
    assert trip.resumable
    assert (trip.scope, trip.scope_id) == ("session", "session:app/u1/s1")
    assert "extend('session:app/u1/s1', usd=…)" in trip.resume
    assert runguard.trip(first.events[-1]) == trip

    (status,) = plugin.extend(trip.scope_id, usd="0.10")
    assert (status.spent, status.limit) == (Decimal("0.10"), Decimal("0.20"))
    second = await play(root, "continue", plugins=[plugin], session_service=service)
    assert (model.calls, done) == (9, list(range(1, 9)))
    assert second.texts == ["all eight"]
    assert second.trips == []
    assert assert_calls_answered(second.session) == 8
    (status,) = plugin.budgets("session:app/u1/s1")
    assert (status.spent, status.limit, status.reserved) == (Decimal("0.18"), Decimal("0.20"), 0)
    assert plugin.spend("session:app/u1/s1")["usd"] == Decimal("0.18")


async def test_v13_without_an_extension_the_next_turn_costs_nothing() -> None:
    root, model, done = _eight_steps()
    plugin, service = guard(budgets=[Budget(usd="0.10", per="session")]), InMemorySessionService()
    await play(root, plugins=[plugin], session_service=service)
    second = await play(root, "continue", plugins=[plugin], session_service=service)
    assert (model.calls, done) == (5, [1, 2, 3, 4, 5])
    trip = assert_stopped(second, "budget")
    assert (trip.model_calls, trip.spent_usd) == (0, Decimal("0.10"))
    assert assert_calls_answered(second.session) == 5
    # A third turn, extended at last, finds a session that is still whole.
    plugin.extend("session:app/u1/s1", usd="0.10")
    third = await play(root, "continue", plugins=[plugin], session_service=service)
    assert third.texts == ["all eight"]
    assert done == list(range(1, 9))


async def test_v13_another_session_of_the_same_user_is_not_paused() -> None:
    root, model, _ = _eight_steps()
    plugin, service = guard(budgets=[Budget(usd="0.10", per="session")]), InMemorySessionService()
    await play(root, plugins=[plugin], session_service=service)
    await play(root, plugins=[plugin], session_service=service, session_id="s2")
    assert model.calls == 10
    assert [trip.scope_id for trip in plugin.trips] == ["session:app/u1/s1", "session:app/u1/s2"]
