"""Cases where a guard that is nearly right is wrong: order of siblings, re-submission, verdicts, waiting calls, two
guards.
"""

import asyncio
import copy
import json
import re
import time
from typing import Any

import pytest
from google.adk.agents import LlmAgent, LoopAgent, ParallelAgent
from google.adk.apps import App
from google.adk.sessions import InMemorySessionService
from google.adk.tools.agent_tool import AgentTool

from runguard import ADKCostBreaker, ToolRule
from runguard.adk import RunGuardPlugin
from runguard.core.decision import _NUDGES, _REFUSALS, PART_STOPPED, STOPPED
from runguard.testing import FakeClock, ScriptedModel, assert_calls_answered, assert_stopped, call, calls, text
from tests.kit.adk_runs import play


def fail(n: int) -> dict[str, Any]:
    return {"status": "partial_parse_error"}


def step(n: int) -> dict[str, Any]:
    return {"step": n}


def stuck(name: str = "stuck") -> tuple[LlmAgent, ScriptedModel]:
    model = ScriptedModel(lambda n, _: call("fail", n=n))
    return LlmAgent(name=name, description="cannot do it", model=model, tools=[fail]), model


async def test_a_call_that_waited_past_the_deadline_is_not_paid() -> None:
    clock = FakeClock()

    def late(n: int, request: Any) -> Any:
        clock.advance(60)
        return text("x")

    model, plugin = ScriptedModel(late, latency_s=0.05), RunGuardPlugin(max_seconds=10, clock=clock)
    root = ParallelAgent(name="par", sub_agents=[LlmAgent(name=f"p{n}", model=model) for n in range(60)])
    assert_stopped(await play(root, plugins=[plugin]), "deadline")
    assert model.calls == 20


@pytest.mark.parametrize("stuck_first", [True, False])
async def test_a_stuck_agent_called_beside_another_ends_alone_whatever_the_order(stuck_first: bool) -> None:
    worker, _ = stuck()
    helper_model = ScriptedModel([*[call("step", n=n) for n in range(11)], text("helped")])
    helper = LlmAgent(name="helper", description="helps", model=helper_model, tools=[step])
    asked = [call("stuck", request="x"), call("helper", request="y")]
    root_model = ScriptedModel([calls(*(asked if stuck_first else reversed(asked))), text("done")])
    plugin = RunGuardPlugin()
    result = await play(
        LlmAgent(name="root", model=root_model, tools=[AgentTool(worker), AgentTool(helper)]), plugins=[plugin]
    )
    assert result.texts[-1] == "done"
    assert helper_model.calls == 12
    assert [trip.scope for trip in plugin.trips] == ["branch"]
    assert_calls_answered(result.session)


async def test_a_stopped_strand_is_not_paid_again_however_often_it_is_called() -> None:
    worker, model = stuck()
    helper = LlmAgent(name="helper", description="helps", model=ScriptedModel(lambda n, _: text(f"news {n}")))
    root_model = ScriptedModel(
        lambda n, _: calls(call("stuck", request=f"r{n}"), call("helper", request=f"r{n}")) if n < 9 else text("done")
    )
    plugin = RunGuardPlugin()
    await play(LlmAgent(name="root", model=root_model, tools=[AgentTool(worker), AgentTool(helper)]), plugins=[plugin])
    assert model.calls == 6
    assert len(plugin.trips) == 1


async def test_a_writer_that_reads_its_guide_in_every_round_is_healthy() -> None:
    def get_style_guide() -> dict[str, Any]:
        return {"guide": "be brief"}

    model = ScriptedModel(lambda n, _: call("get_style_guide") if n % 2 else text(f"draft {n}"))
    plugin = RunGuardPlugin()
    writer = LlmAgent(name="writer", model=model, tools=[get_style_guide])
    await play(LoopAgent(name="loop", sub_agents=[writer], max_iterations=15), plugins=[plugin])
    assert model.calls == 30
    assert plugin.trips == []


async def test_a_loop_that_only_reads_the_same_and_says_the_same_is_stopped() -> None:
    def get_style_guide() -> dict[str, Any]:
        return {"guide": "be brief"}

    model = ScriptedModel(lambda n, _: call("get_style_guide") if n % 2 else text("again"))
    writer = LlmAgent(name="writer", model=model, tools=[get_style_guide])
    assert_stopped(await play(LoopAgent(name="loop", sub_agents=[writer]), plugins=[RunGuardPlugin()]), "no_news")
    assert model.calls < 40


@pytest.mark.parametrize("verdict", ["rejected", "denied", "invalid"])
async def test_verdicts_are_answers_and_no_failures(verdict: str) -> None:
    def screen(candidate: int) -> dict[str, Any]:
        return {"candidate": f"number {candidate}", "status": verdict}

    model, plugin = (
        ScriptedModel(lambda n, _: call("screen", candidate=n) if n <= 15 else text("none fits")),
        RunGuardPlugin(),
    )
    result = await play(LlmAgent(name="a", model=model, tools=[screen]), plugins=[plugin])
    assert result.texts == ["none fits"]
    assert plugin.trips == []


async def test_a_polled_service_that_is_down_is_judged_by_time() -> None:
    def health() -> dict[str, Any]:
        return {"status": "unavailable"}

    model = ScriptedModel(lambda n, _: call("health") if n <= 12 else text("up"))
    plugin = RunGuardPlugin(tools={"health": ToolRule(polling=True)})
    assert (await play(LlmAgent(name="a", model=model, tools=[health]), plugins=[plugin])).texts == ["up"]


async def test_a_slow_sync_tool_is_a_timeout_when_it_returns() -> None:
    def slow(n: int) -> dict[str, Any]:
        time.sleep(0.03)
        return {"n": n}

    model = ScriptedModel(lambda n, _: call("slow", n=n) if n <= 12 else text("done"))
    plugin = RunGuardPlugin(tools={"slow": ToolRule(max_seconds=0.01)})
    trip = assert_stopped(await play(LlmAgent(name="a", model=model, tools=[slow]), plugins=[plugin]), "stall")
    assert trip.tool == "slow"


async def test_too_many_agents_called_in_one_response_cost_nothing() -> None:
    inner = ScriptedModel([text("x")])
    worker = LlmAgent(name="worker", description="works", model=inner)
    root = LlmAgent(
        name="root",
        model=ScriptedModel([calls(*(call("worker", request=f"r{n}") for n in range(150)))]),
        tools=[AgentTool(worker)],
    )
    result = await play(root, plugins=[RunGuardPlugin()])
    assert_stopped(result, "fan_out")
    assert inner.calls == 0
    assert assert_calls_answered(result.session) == 150


async def test_once_holds_within_one_response_and_a_failure_frees_it() -> None:
    done: list[int] = []

    async def send(n: int) -> dict[str, Any]:
        done.append(n)
        await asyncio.sleep(0.01)
        return {"error": "try later"} if n == 2 and done.count(2) == 1 else {"sent": n}

    script: list[Any] = [
        calls(call("send", n=1), call("send", n=1)),
        call("send", n=2),
        call("send", n=2),
        call("send", n=1),
        text("done"),
    ]
    plugin = RunGuardPlugin(tools={"send": ToolRule(once=True, writes=True)})
    result = await play(LlmAgent(name="a", model=ScriptedModel(script), tools=[send]), plugins=[plugin])
    assert result.texts == ["done"]
    assert done == [1, 2, 2]


async def test_two_guards_on_one_run_each_keep_the_whole_account() -> None:
    inner_model = ScriptedModel(lambda n, _: call("step", n=n) if n % 5 else text("part"))
    inner = LlmAgent(name="inner", description="works", model=inner_model, tools=[step])
    outer_model = ScriptedModel(lambda n, _: call("inner", request=f"r{n}"))
    outer = LlmAgent(name="outer", model=outer_model, tools=[AgentTool(inner)])
    ADKCostBreaker(on_stop="stop").install_on_agent(outer)
    plugin = RunGuardPlugin(max_model_calls=15)
    assert_stopped(await play(outer, plugins=[plugin]), "model_calls")
    assert inner_model.calls + outer_model.calls == 15


async def test_a_normalizer_does_not_hide_a_failure() -> None:
    def quote(n: int) -> dict[str, Any]:
        return {"status": "error", "price": None}

    model = ScriptedModel(lambda n, _: call("quote", n=n) if n <= 30 else text("done"))
    plugin = RunGuardPlugin(tool_result_normalizer={"quote": lambda answer: answer.get("price")})
    assert_stopped(await play(LlmAgent(name="a", model=model, tools=[quote]), plugins=[plugin]), "stall")


async def test_what_a_stop_leaves_in_the_history_forbids_nothing_in_the_next_turn() -> None:
    def look(n: int) -> dict[str, Any]:
        return {"seen": n}

    service = InMemorySessionService()
    model = ScriptedModel(lambda n, _: calls(call("look", n=n), call("look", n=-n)))
    plugin = RunGuardPlugin(max_tool_calls=5)
    await play(LlmAgent(name="a", model=model, tools=[look]), plugins=[plugin], session_service=service)
    following = ScriptedModel([text("hello")])
    again = await play(
        LlmAgent(name="a", model=following, tools=[look]), "next", plugins=[plugin], session_service=service
    )
    assert again.texts == ["hello"]
    prompt = json.dumps([content.model_dump(mode="json") for content in following.requests[0].contents])
    assert "this turn was stopped" in prompt
    assert "any more tools" not in prompt


def test_every_text_for_the_model_speaks_of_this_turn_only() -> None:
    for told in (*_REFUSALS.values(), *_NUDGES.values(), STOPPED, PART_STOPPED):
        for sentence in re.findall(r"[^.;:]*\bDo not (?:call|retry|pass|delegate|keep)\b[^.;:]*", told):
            assert "in this turn" in sentence, told


def test_a_copied_app_keeps_its_guard() -> None:
    plugin = RunGuardPlugin(max_usd=1)
    app = App(name="app", root_agent=LlmAgent(name="a", model=ScriptedModel([text("x")])), plugins=[plugin])
    assert copy.deepcopy(app).plugins == [plugin]
    assert copy.deepcopy(plugin) is plugin
