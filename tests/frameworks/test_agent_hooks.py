"""The AGENT-HOOKS interceptor, in a host of the contract's own library and in Microsoft Agent Framework."""

import asyncio
from decimal import Decimal
from typing import Any

import pytest

from runguard import Budget
from runguard.testing.conformance import MODEL, AgentSpec, Reply

pytest.importorskip("agent_hooks", reason="agent-hooks-sdk is not among the oldest supported frameworks")
from agent_framework import Agent, create_agent_hooks_middleware
from agent_hooks import ALLOW, AgentContextBuilder, InterceptionBlocked, InterceptionEmitter, Verdict

from runguard import agent_hooks
from runguard.agent_hooks import RunGuardInterceptor
from tests.frameworks.agent_framework_harness import AgentFrameworkSession

_PRICES = {MODEL: {"input": 1.0, "output": 1.0}}
_LIMITS = {MODEL: {"max_output_tokens": 1_000}}


class Host:
    """A session of a host: what it asks the interceptor."""

    def __init__(self, guard: RunGuardInterceptor, session: str = "s1") -> None:
        self.emitter = InterceptionEmitter()
        self.emitter.register(guard, "runguard")
        self.builder = AgentContextBuilder(agent_id="a1", agent_name="writer", framework="test", session_id=session)

    async def asks(self, **more: Any) -> Any:
        messages = [{"role": "user", "content": "Write a letter."}]
        return (await self.emitter.emit(self.builder.pre_model_call(model_id=MODEL, messages=messages, **more))).target

    async def gets(self, *calls: dict[str, Any], usage: dict[str, int] | None = None, **more: Any) -> None:
        told: dict[str, Any] = {"content": "Here", "tool_calls": list(calls), "finish_reason": "stop", "usage": usage}
        await self.emitter.emit(self.builder.post_model_call(model_id=MODEL, **told, **more))

    async def tool(self, number: int, answer: Any, *, is_error: bool = False) -> Any:
        call: dict[str, Any] = {"call_id": f"c{number}", "name": "look", "args": {"page": number}}
        await self.emitter.emit(self.builder.pre_tool_call(**call))
        done = self.builder.post_tool_call(**call, value=answer, is_error=is_error)
        return (await self.emitter.emit(done)).target

    async def ends(self) -> None:
        await self.emitter.emit_unchecked(self.builder.agent_shutdown(reason="completed"))


async def test_a_call_is_reserved_settled_and_its_session_is_a_run() -> None:
    guard = RunGuardInterceptor(budgets=[Budget(usd=1, per="session")], prices=_PRICES, models=_LIMITS)
    host = Host(guard)
    await host.asks()
    assert guard.spend()["reserved_usd"] > 0
    await host.gets(usage={"prompt_tokens": 100, "completion_tokens": 10})
    spend = guard.spend()
    assert (spend["usd"], spend["tokens"], spend["reserved_usd"]) == (Decimal("0.00011"), 110, 0)
    await host.ends()
    assert not guard.guard.runs


async def test_a_loop_is_denied_with_its_rule() -> None:
    guard = RunGuardInterceptor()
    host, denied = Host(guard), []
    for number in range(20):
        try:
            await host.asks()
            await host.gets({"id": f"c{number}", "name": "look", "args": {"page": number}})
            await host.tool(number, "the database is down", is_error=True)
        except InterceptionBlocked as blocked:
            denied.append(blocked.result.verdict.reason)
    assert denied[-1] == f"runguard:{guard.trips[0].rule}"
    assert guard.spend()["calls"] < 10


async def test_a_budget_holds_for_fifty_sessions_at_once() -> None:
    guard = RunGuardInterceptor(budgets=[Budget(calls=10, per="app")], app="docs", max_wait_seconds=0)

    async def one(number: int) -> bool:
        try:
            await Host(guard, f"s{number}").asks()
        except InterceptionBlocked:
            return False
        return True

    assert sum(await asyncio.gather(*(one(number) for number in range(50)))) == 10


async def test_a_call_without_an_answer_is_booked_as_an_estimate() -> None:
    guard = RunGuardInterceptor(max_usd=1, prices=_PRICES, models=_LIMITS)
    host = Host(guard)
    await host.asks()
    await host.asks()  # the first one failed
    await host.ends()
    spend = guard.spend()
    assert (spend["estimated_calls"], spend["reserved_usd"]) == (2, 0)


async def test_calls_that_failed_hold_nothing_once_the_request_is_sent_again() -> None:
    guard = RunGuardInterceptor(max_usd=1, prices=_PRICES, models=_LIMITS)
    host = Host(guard)
    await host.asks(request_id="r0")
    one = guard.spend()["reserved_usd"]
    for number in range(1, 5):  # as a host does while its provider is away
        await host.asks(request_id=f"r{number}")
    assert (guard.spend()["estimated_calls"], guard.spend()["reserved_usd"]) == (4, one)
    for number in range(5):  # it was not away: the same was asked five times at once
        await host.gets(usage={"prompt_tokens": 100, "completion_tokens": 10}, request_id=f"r{number}")
    spend = guard.spend()
    assert (spend["usd"], spend["calls"], spend["reserved_usd"]) == (5 * Decimal("0.00011"), 5, 0)


async def test_a_session_that_its_host_never_ends_is_booked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_hooks, "_SESSIONS_KEPT", 2)
    guard = RunGuardInterceptor(budgets=[Budget(usd=1, per="app")], app="docs", prices=_PRICES, models=_LIMITS)
    for number in range(5):
        await Host(guard, f"s{number}").asks()
    assert (guard.spend("app:docs")["estimated_calls"], len(guard.guard.runs)) == (3, 2)


async def test_a_client_cannot_choose_who_pays_by_the_id_of_a_session() -> None:
    guard = RunGuardInterceptor(app="docs", user=lambda context: context["agent"]["name"])
    for user in ("ann", "mallory"):
        host = Host(guard, "the same")
        host.builder = AgentContextBuilder(agent_id="a", agent_name=user, framework="test", session_id="the same")
        await host.asks()
        await host.gets()
    assert [guard.spend(f"user:docs/{user}")["calls"] for user in ("ann", "mallory")] == [1, 1]


async def test_a_paid_tool_that_another_interceptor_refuses_costs_nothing() -> None:
    class Refuses:
        def intercept(self, context: Any, /) -> Any:
            return Verdict.deny(reason="no") if context["interception_point"] == "pre_tool_call" else ALLOW

    guard = RunGuardInterceptor(max_usd=5, tools={"look": {"price": "0.5"}}, prices=_PRICES, models=_LIMITS)
    host = Host(guard)
    host.emitter.register(Refuses(), "other")
    await host.asks()
    await host.gets({"id": "c1", "name": "look", "args": {"page": 1}})
    with pytest.raises(InterceptionBlocked):
        await host.tool(1, "a page")
    await host.asks()
    await host.gets()
    await host.ends()
    assert (guard.spend()["tools_usd"], guard.spend()["reserved_usd"]) == (0, 0)


async def test_a_tool_that_is_at_work_during_another_request_is_paid() -> None:
    guard = RunGuardInterceptor(max_usd=5, tools={"look": {"price": "0.5"}}, prices=_PRICES, models=_LIMITS)
    host = Host(guard)
    await host.asks(request_id="r1")
    await host.gets({"id": "c1", "name": "look", "args": {}}, request_id="r1")
    call: dict[str, Any] = {"call_id": "c1", "name": "look", "args": {}}
    await host.emitter.emit(host.builder.pre_tool_call(**call))
    await host.asks(request_id="r2")
    await host.emitter.emit(host.builder.post_tool_call(**call, value="a page", is_error=False))
    await host.gets(request_id="r2")
    await host.ends()
    assert guard.spend()["tools_usd"] == Decimal("0.5")


async def test_requests_with_ids_may_overlap() -> None:
    guard = RunGuardInterceptor(max_usd=1, prices=_PRICES, models=_LIMITS)
    host = Host(guard)
    for name in ("r1", "r2"):
        await host.asks(request_id=name)
    for name in ("r1", "r2"):
        await host.gets(usage={"input_tokens": 50, "output_tokens": 5}, request_id=name)
    spend = guard.spend()
    assert (spend["tokens"], spend["estimated_calls"]) == (110, 0)


async def test_the_model_is_told_and_large_answers_are_left_out() -> None:
    guard = RunGuardInterceptor(max_model_calls=10, budget_notice=[0.1], max_tool_result_chars=1_000)
    host = Host(guard)
    await host.asks()
    await host.gets({"id": "c1", "name": "look", "args": {"page": 1}})
    assert len(str(await host.tool(1, "x" * 100_000))) < 1_000
    assert "9 of 10 model calls" in (await host.asks())[-1]["content"]


async def test_agent_framework_is_a_host() -> None:
    guard = RunGuardInterceptor(model=MODEL, max_model_calls=6, max_usd=1, prices=_PRICES, models=_LIMITS)
    spec = AgentSpec(lambda n, _: Reply(calls=[("look", {"page": n})]), tools={"look": lambda page: f"page {page}"})
    session = AgentFrameworkSession(spec, None)
    agent: Agent[Any] = session.agent
    with pytest.raises(InterceptionBlocked):
        await agent.run("Go", middleware=[create_agent_hooks_middleware([guard])])
    assert session.model_calls == 6
    assert [trip.rule for trip in guard.trips] == ["model_calls"]
    assert (guard.spend()["calls"], guard.spend()["estimated_calls"], guard.spend()["reserved_usd"]) == (6, 0, 0)
    assert not guard.guard.runs
