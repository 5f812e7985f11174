"""A stop that ends with the agent's own answer, on real ADK."""

import asyncio
import logging
from decimal import Decimal
from typing import Any

import pytest
from google.adk.agents import LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.models.llm_request import LlmRequest
from google.adk.tools.agent_tool import AgentTool
from google.genai import types
from pydantic import BaseModel

from runguard import Budget, RunStoppedError
from runguard.adk import RunGuardPlugin
from runguard.engine.final_answer import INSTRUCTION
from runguard.testing import FakeClock, ScriptedModel, assert_calls_answered, assert_stopped, call, text
from tests.kit.adk_runs import play
from tests.kit.contents import parts
from tests.kit.rule_agents import Tool, agent

# 100 tokens of every prompt and 50 of every answer: 100 * 10 + 50 * 40 millionths of a dollar
PRICES = {"scripted-1": {"input": 10, "output": 40}}
CALL = Decimal("0.003")
SIZES: dict[str, Any] = {"prices": PRICES, "tokens": lambda request: 100, "min_output_tokens": 50}
SHORT = types.GenerateContentConfig(max_output_tokens=50)


def is_last(request: LlmRequest) -> bool:
    parts = request.contents[-1].parts or []
    return any(part.text == INSTRUCTION for part in parts)


def busy(answer: str = "what I have", **options: Any) -> ScriptedModel:
    """Calls a tool with new arguments until it is asked for its last answer."""
    return ScriptedModel(
        lambda n, request: text(answer) if is_last(request) else call("work", q=n),
        prompt_tokens=100,
        output_tokens=50,
        **options,
    )


def worker(model: ScriptedModel, tool: Any = None, **options: Any) -> LlmAgent:
    tool = tool or Tool("work", lambda n: {"done": n})
    return agent(model, tool, generate_content_config=SHORT, **options)


def said(result: Any) -> list[str]:
    return list(result.texts)


async def test_a_budget_stop_ends_with_an_answer_and_then_the_stop() -> None:
    model = busy()
    plugin = RunGuardPlugin(max_usd=CALL * 20, final_answer=True, **SIZES)
    result = await play(worker(model, output_key="answer"), plugins=[plugin])
    trip = assert_stopped(result, "budget")
    assert said(result) == ["what I have"]
    assert result.events[-1].error_code == "RUNGUARD_STOP"
    assert result.session.state["answer"] == "what I have"
    assert plugin.spend()["usd"] <= CALL * 20
    assert (plugin.spend()["reserved_usd"], plugin.spend()["calls"]) == (0, model.calls)
    assert (trip.enforced, len(plugin.trips)) == (True, 1)
    assert_calls_answered(result)
    last = model.requests[-1]
    assert not last.config.tools
    assert last.config.max_output_tokens == 50


async def test_a_healthy_run_is_untouched_and_holds_nothing_at_its_end() -> None:
    model = ScriptedModel([call("work", q=1), text("fine")], prompt_tokens=100, output_tokens=50)
    plugin = RunGuardPlugin(max_usd=CALL * 50, final_answer=True, **SIZES)
    result = await play(worker(model), plugins=[plugin])
    assert said(result) == ["fine"]
    assert plugin.trips == []
    assert (plugin.spend()["usd"], plugin.spend()["reserved_usd"]) == (CALL * 2, 0)
    assert plugin.snapshot()["guard_errors"] == 0


async def test_the_limit_on_calls_keeps_one_for_the_answer() -> None:
    plugin = RunGuardPlugin(max_model_calls=5, final_answer="Stop here and sum up.")
    model = ScriptedModel(lambda n, request: text("sum") if n == 5 else call("work", q=n))
    result = await play(worker(model), plugins=[plugin])
    assert assert_stopped(result, "model_calls").limit == 5
    assert (model.calls, said(result)) == (5, ["sum"])
    assert parts(model.requests[-1].contents[-1])[0].text == "Stop here and sum up."


async def test_a_loop_ends_with_an_answer() -> None:
    model = ScriptedModel(lambda n, request: text("it keeps failing") if is_last(request) else call("work", q=1))
    plugin = RunGuardPlugin(final_answer=True)
    result = await play(worker(model, Tool("work", [{"error": "no"}])), plugins=[plugin])
    assert said(result) == ["it keeps failing"]
    assert assert_stopped(result).rule in ("repetition", "stall")
    assert result.events[-1].error_code == "RUNGUARD_STOP"


async def test_never_after_the_kill_switch_or_a_deadline() -> None:
    clock = FakeClock()

    def slow(n: int) -> Any:
        clock.advance(30)
        return {"done": n}

    model = busy()
    plugin = RunGuardPlugin(max_seconds=100, final_answer=True, clock=clock)
    result = await play(worker(model, Tool("work", slow)), plugins=[plugin])
    assert assert_stopped(result, "deadline")
    assert said(result) == []

    def thrown(n: int) -> Any:
        plugin.stop("all", actor="ops")
        return {"done": n}

    model, plugin = busy(), RunGuardPlugin(final_answer=True, max_usd=1, **SIZES)
    result = await play(worker(model, Tool("work", thrown)), plugins=[plugin])
    assert assert_stopped(result, "kill_switch")
    assert (said(result), model.calls, plugin.spend()["reserved_usd"]) == ([], 1, 0)


async def test_a_hold_that_does_not_fit_is_reported_and_the_run_starts() -> None:
    model = ScriptedModel([text("fine")], prompt_tokens=100, output_tokens=50)
    heard: list[Any] = []
    plugin = RunGuardPlugin(max_usd=CALL, final_answer=True, on_decision=heard.append, **SIZES)
    result = await play(worker(model), plugins=[plugin])
    assert plugin.flush()
    assert said(result) == ["fine"]
    assert any("no room for the price of a last answer" in str(decision.finding.detail) for decision in heard)


class Report(BaseModel):
    title: str


@pytest.mark.parametrize(("answer", "kept"), [('{"title": "a"}', {"title": "a"}), ("not json", None)])
async def test_an_output_schema_applies(answer: str, kept: Any) -> None:
    model = busy(answer)
    plugin = RunGuardPlugin(max_model_calls=4, final_answer=True)
    root = worker(model, output_schema=Report, output_key="report")
    result = await play(root, plugins=[plugin])
    assert assert_stopped(result, "model_calls")
    assert result.session.state.get("report") == kept
    assert model.requests[-1].config.response_schema is Report


async def test_a_last_answer_that_calls_tools_or_fails_is_a_plain_stop() -> None:
    stubborn = ScriptedModel(lambda n, request: call("work", q=n))
    plugin = RunGuardPlugin(max_model_calls=4, final_answer=True)
    tool = Tool("work", lambda n: {"done": n})
    result = await play(worker(stubborn, tool), plugins=[plugin])
    assert assert_stopped(result, "model_calls")
    assert (stubborn.calls, tool.runs, said(result)) == (4, 3, [])
    assert_calls_answered(result)

    failing = ScriptedModel(lambda n, request: RuntimeError("down") if is_last(request) else call("work", q=n))
    plugin = RunGuardPlugin(max_model_calls=4, final_answer=True)
    result = await play(worker(failing), plugins=[plugin])
    assert assert_stopped(result, "model_calls")
    assert plugin.spend()["reserved_usd"] == 0


async def test_forty_branches_one_answer_and_never_past_the_cap() -> None:
    models = [busy(latency_s=0.001) for _ in range(40)]
    team = ParallelAgent(name="team", sub_agents=[worker(model, name=f"w{n}") for n, model in enumerate(models)])
    plugin = RunGuardPlugin(max_usd=CALL * 60, final_answer=True, **SIZES)
    result = await play(team, plugins=[plugin])
    assert assert_stopped(result, "budget")
    assert said(result) == ["what I have"]
    assert plugin.spend()["usd"] <= CALL * 60
    assert plugin.spend()["reserved_usd"] == 0
    assert sum(is_last(request) for model in models for request in model.requests) == 1


async def test_an_agent_called_as_a_tool_leaves_the_answer_to_its_caller() -> None:
    inner = worker(busy("from inside"), name="inner")
    outer = ScriptedModel(
        lambda n, request: text("from outside") if is_last(request) else call("inner", request="x"), model="free"
    )
    plugin = RunGuardPlugin(max_model_calls=6, final_answer=True)
    result = await play(agent(outer, AgentTool(inner)), plugins=[plugin])
    assert said(result) == ["from outside"]
    assert_stopped(result, "model_calls")


async def test_a_loop_agent_and_the_agents_after_it_end() -> None:
    model, later = busy(), ScriptedModel([text("later")])
    root = SequentialAgent(
        name="all", sub_agents=[LoopAgent(name="loop", sub_agents=[worker(model)]), agent(later, name="later")]
    )
    plugin = RunGuardPlugin(max_model_calls=4, final_answer=True)
    result = await play(root, plugins=[plugin])
    assert (said(result), model.calls, later.calls) == (["what I have"], 4, 0)
    assert_stopped(result, "model_calls")


async def test_on_stop_raise_delivers_the_answer_and_then_raises() -> None:
    plugin = RunGuardPlugin(max_model_calls=4, final_answer=True, on_stop="raise")
    result = await play(worker(busy()), plugins=[plugin], catch=True)
    assert isinstance(result.error, RunStoppedError)
    assert said(result) == ["what I have"]


async def test_prompts_that_grow_are_still_covered() -> None:
    sizes = iter(range(100, 100_000, 150))
    model = ScriptedModel(
        lambda n, request: text("grown") if is_last(request) else call("work", q=n), prompt_tokens=100, output_tokens=50
    )
    plugin = RunGuardPlugin(
        max_usd="0.30", final_answer=True, prices=PRICES, min_output_tokens=50, tokens=lambda request: next(sizes)
    )
    result = await play(worker(model), plugins=[plugin])
    assert assert_stopped(result, "budget")
    assert said(result) == ["grown"]
    assert plugin.spend()["usd"] <= Decimal("0.30")
    assert plugin.snapshot()["guard_errors"] == 0


async def test_a_user_budget_over_two_runs() -> None:
    plugin = RunGuardPlugin(budgets=[Budget(usd=CALL * 30, per="user", window="1d")], final_answer=True, **SIZES)
    results = await asyncio.gather(
        *(play(worker(busy(latency_s=0.001)), plugins=[plugin], session_id=f"s{n}") for n in range(4))
    )
    (status,) = plugin.budgets()
    assert status.spent <= CALL * 30
    assert status.reserved == 0
    assert all(said(result) in (["what I have"], []) for result in results)
    assert any(said(result) for result in results)


# ---- ``final_answer`` in shadow mode, on real ADK: reported, never sent, and the stop where an enforcing guard stops


CALLS = 24


async def shadowed(**policy: Any) -> tuple[ScriptedModel, RunGuardPlugin]:
    """A run that ends by itself."""
    model = ScriptedModel(
        lambda n, _: call("work", q=n) if n < CALLS else text("done"), prompt_tokens=100, output_tokens=50
    )
    short = types.GenerateContentConfig(max_output_tokens=50)
    plugin = RunGuardPlugin(mode="shadow", **{**SIZES, **policy})
    root = agent(model, Tool("work", lambda n: {"done": n}), generate_content_config=short)
    result = await play(root, plugins=[plugin])
    assert (result.texts, model.calls) == (["done"], CALLS)
    sent = [part.text for request in model.requests for one in request.contents for part in one.parts or []]
    assert INSTRUCTION not in sent
    assert plugin.snapshot()["guard_errors"] == 0
    assert plugin.spend()["reserved_usd"] == 0
    assert plugin.spend()["usd"] == CALLS * CALL
    return model, plugin


def reported(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if line.startswith("runguard.last_answer_in_shadow")]


async def test_a_stop_by_budget_is_decided_before_the_held_price_is_spent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "runguard")
    _, without = await shadowed(max_usd=CALL * 20)
    assert reported(caplog) == []
    _, plugin = await shadowed(max_usd=CALL * 20, final_answer=True)
    (line,) = reported(caplog)
    assert "would have ended with a last answer of worker, for at most $0.01" in line
    (early,), (late,) = plugin.trips, without.trips
    assert (early.rule, early.enforced) == ("budget", False)
    assert early.model_calls < late.model_calls  # the price of the last call is kept


async def test_a_limit_of_calls_keeps_one_for_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    _, plugin = await shadowed(max_model_calls=10, final_answer=True)
    assert [(trip.rule, trip.model_calls) for trip in plugin.trips] == [("model_calls", 9)]
    assert len(reported(caplog)) == 1


async def test_a_healthy_run_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    _, plugin = await shadowed(max_usd=CALL * 40, final_answer=True)
    assert (plugin.trips, reported(caplog)) == ([], [])


async def test_a_budget_without_room_for_the_hold_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    await shadowed(max_usd=CALL, final_answer=True)
    assert [line for line in caplog.messages if line.startswith("runguard.no_last_answer")]
    assert reported(caplog) == []
