"""A fault of the guard in any hook of any adapter: the run goes on as without a guard, or makes no call."""

import asyncio
from decimal import Decimal
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from runguard import RunStoppedError, ToolRule
from runguard.calls.run import AgentRun
from runguard.calls.tool_calls import ToolUse
from runguard.engine.guard import Guard
from runguard.langchain import GuardedChatModel
from runguard.policy import Policy
from runguard.testing.conformance import MODEL, AgentSpec, Harness, Reply
from tests.frameworks.harnesses import beside_adk
from tests.frameworks.langchain_harness import ScriptedChat

# What the adapters call on the guard: before a call is made, and after it.
BEFORE = ["check", "reserve", "fingerprint"]
AFTER = ["settle", "after", "end", "close_lane", "report_failure", "release", "unspent"]
PRICES: Any = {MODEL: {"input": 1.0, "output": 1.0}}


def _broken(*_: Any, **__: Any) -> Any:
    raise LookupError("the guard's own fault")


def _break(guard: Any, method: str) -> None:
    setattr(guard.tools if method == "fingerprint" else guard, method, _broken)


def _script(n: int, _: str) -> Reply:
    return Reply(calls=[("look", {"n": n})]) if n < 3 else Reply("done")


@beside_adk
@pytest.mark.parametrize("method", [*BEFORE, *AFTER])
async def test_a_broken_guard_does_not_change_the_run(harness: Harness, method: str) -> None:
    spec = AgentSpec(_script, tools={"look": lambda n: f"page {n}"})
    plain = await harness.session(spec, None).turn("go")
    guard = harness.guard(max_usd=1, prices=PRICES)
    _break(guard.guard, method)
    session = harness.session(spec, guard)
    result = await session.turn("go")
    assert (result.text, result.error, result.events) == ("done", None, plain.events)
    assert session.model_calls == 3


@beside_adk
@pytest.mark.parametrize("method", ["start", "clock"])
async def test_a_run_that_cannot_begin_makes_no_call_past_a_budget(harness: Harness, method: str) -> None:
    guard = harness.guard(max_usd=1, prices=PRICES)
    _break(guard.guard, method)
    session = harness.session(AgentSpec(_script, tools={"look": lambda n: f"page {n}"}), guard)
    result = await session.turn("go")
    assert session.model_calls == 0
    assert result.error is None or isinstance(result.error, RunStoppedError)
    assert {trip.rule for trip in guard.trips} == {"guard_error"}
    unlimited = harness.guard()
    _break(unlimited.guard, method)
    session = harness.session(AgentSpec(_script, tools={"look": lambda n: f"page {n}"}), unlimited)
    assert (await session.turn("go")).text == "done"


@beside_adk
@pytest.mark.parametrize("method", ["check", "reserve", "context_limit"])
async def test_a_fault_before_the_hold_is_no_free_pass(harness: Harness, method: str) -> None:
    """Calls of $0.01 without end on a budget of $0.05: those that fit are made, and booked."""
    spec = AgentSpec(lambda n, _: Reply(calls=[("look", {"n": n})]), tools={"look": lambda n: f"page {n}"})
    prices: Any = {MODEL: {"input": 0, "output": 100}}
    guard = harness.guard(max_usd=0.05, prices=prices, models={MODEL: {"max_output_tokens": 100}})
    _break(guard.guard, method)
    session = harness.session(spec, guard)
    await session.turn("go")
    assert 0 < session.model_calls <= 5
    assert guard.spend()["calls"] == session.model_calls
    assert guard.spend()["usd"] <= Decimal("0.05")
    assert guard.spend()["reserved_usd"] == 0


@beside_adk
@pytest.mark.parametrize("method", ["start", *BEFORE])
async def test_with_block_a_broken_guard_lets_no_call_through(harness: Harness, method: str) -> None:
    executed: list[int] = []

    def look(n: int) -> str:
        executed.append(n)
        return "x"

    spec = AgentSpec(_script, tools={"look": look})
    guard = harness.guard(on_guard_error="block", max_usd=1, prices=PRICES)
    _break(guard.guard, method)
    session = harness.session(spec, guard)
    result = await session.turn("go")
    assert not executed
    assert session.model_calls == (1 if method == "fingerprint" else 0)
    assert result.error is None or isinstance(result.error, RunStoppedError)
    assert [trip.rule for trip in guard.trips] == ["guard_error"]


@beside_adk
async def test_a_nested_agent_works_when_its_lane_cannot_be_opened(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = AgentSpec(lambda n, _: Reply("inner done"), "helper")
    spec = AgentSpec(
        lambda n, _: Reply(calls=[("helper", {"request": "x"})]) if n == 1 else Reply("done"), agents=[inner]
    )
    guard = harness.guard()
    monkeypatch.setattr(guard.guard, "open_lane", _broken)
    result = await harness.session(spec, guard).turn("go")
    assert (result.text, result.error) == ("done", None)


@pytest.mark.parametrize("method", [*BEFORE, *AFTER])
async def test_a_guarded_chat_model_with_a_broken_guard_answers(method: str) -> None:
    model = GuardedChatModel(ScriptedChat(lambda n, _: Reply("done"), [0]), max_usd=1, prices=PRICES)
    _break(model.guard, method)
    assert (await model.ainvoke([HumanMessage("go")])).content == "done"
    assert model.invoke([HumanMessage("again")]).content == "done"


async def test_what_an_inner_layer_refuses_is_free_for_others_at_once() -> None:
    """The outer guard has noted the side effect as begun. The inner one refuses the call, so it never happens."""
    tools: Any = {"pay": ToolRule(once=True)}
    outer = Guard(Policy.validated({"tools": tools}, "test"))
    inner = Guard(Policy.validated({"max_tool_calls": 1}, "test"))
    run = AgentRun.start(outer, "outer", session="s")
    with run.tools.inside(ToolUse("0", "ask")):
        child = AgentRun.start(inner, "inner")
    assert await child.tools.check(ToolUse("1", "look", {})) is None
    assert await child.tools.check(ToolUse("2", "pay", {"to": "ann"})) is not None
    assert await run.tools.check(ToolUse("3", "pay", {"to": "ann"})) is None
    child.end()
    run.end()


class _Hanging(ScriptedChat):
    """Streams one piece and then nothing."""

    async def _astream(self, *args: Any, **kwargs: Any) -> Any:
        from langchain_core.messages import AIMessageChunk
        from langchain_core.outputs import ChatGenerationChunk

        yield ChatGenerationChunk(message=AIMessageChunk(content="one "))
        await asyncio.Event().wait()


def _hanging() -> Any:
    kind: Any = _Hanging
    return kind(lambda n, _: Reply("done"), [0])


async def test_the_kill_switch_ends_a_stream_that_waits_for_its_next_piece() -> None:
    model = GuardedChatModel(_hanging(), app="docs")
    seen: list[str] = []

    async def read() -> None:
        async for piece in model.astream([HumanMessage("go")]):
            seen.append(str(piece.content))
            if len(seen) == 1:
                asyncio.get_running_loop().call_later(0.05, lambda: model.stop("app:docs", actor="me", reason="test"))

    await asyncio.wait_for(read(), 10)
    assert seen[0] == "one "
    assert "stopped" in "".join(seen[1:])
    assert [trip.rule for trip in model.trips] == ["kill_switch"]
    assert not model.guard.runs


async def test_a_cancelled_stream_is_cancelled_and_nothing_stays_reserved() -> None:
    model = GuardedChatModel(_hanging(), max_usd=1, prices=PRICES)

    async def read() -> None:
        async for _ in model.astream([HumanMessage("go")]):
            pass

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(read(), 0.2)
    spend = model.spend()
    assert (spend["calls"], spend["estimated_calls"], spend["reserved_usd"]) == (1, 1, 0)
