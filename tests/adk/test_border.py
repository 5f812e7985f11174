"""Calls that no hook announces are billed and limited like all others, and none is billed twice."""

import asyncio
import logging
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncGenerator, Callable
from decimal import Decimal
from typing import Any

import pytest
from google.adk.agents import BaseAgent, LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.agents.invocation_context import InvocationContext
from google.adk.apps import App
from google.adk.apps.app import EventsCompactionConfig
from google.adk.apps.llm_event_summarizer import LlmEventSummarizer
from google.adk.events import Event
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools.agent_tool import AgentTool
from google.genai import types

import runguard
from runguard import Budget
from runguard.adk import ADKCostBreaker, RunGuardPlugin
from runguard.alerts import Alert
from runguard.testing import FakeClock, ScriptedModel, assert_calls_answered, assert_stopped, call, text

from .helpers import play
from .test_money_scenarios import CALL_USD, FAR_AWAY, SSE, agent, assert_nothing_reserved, guard, step

SMALL_USD = Decimal("0.002")
PRICES = {"scripted-1": {"input": 10, "output": 40}, "small-1": {"input": 1, "output": 4}}
HELLO = types.Content(role="user", parts=[types.Part(text="go")])
USAGE = types.GenerateContentResponseUsageMetadata(
    prompt_token_count=1_000, candidates_token_count=250, total_token_count=1_250
)


def two_prices(**policy: Any) -> RunGuardPlugin:
    return guard(**{"prices": PRICES, "models": {"*": {"max_output_tokens": 250}}, **policy})


def small(words: str = "advice", **options: Any) -> ScriptedModel:
    """A second model, at a tenth of the price."""
    return ScriptedModel([text(words)], model="small-1", **options)


async def ask(llm: BaseLlm, words: str = "?" * 2_900) -> list[LlmResponse]:
    """What code does that uses a model beside the agents.

    The words are about as long as the usage that models tell here.
    """
    config = types.GenerateContentConfig(max_output_tokens=250)
    request = LlmRequest(
        model=llm.model, contents=[types.Content(role="user", parts=[types.Part(text=words)])], config=config
    )
    return [response async for response in llm.generate_content_async(request)]


def consulting(model: BaseLlm, times: int = 1) -> Callable[..., Any]:
    async def consult(q: int) -> dict[str, Any]:
        answers = [await ask(model) for _ in range(times)]
        return {
            "q": q,
            "advice": [response.content.parts[0].text for got in answers for response in got if response.content],
        }

    return consult


def booked(plugin: RunGuardPlugin) -> tuple[int, Decimal]:
    spent = plugin.spend()
    assert spent["estimated_calls"] == 0
    return spent["calls"], spent["usd"]


# ---- compaction -----------------------------------------------------------------------------------------------------


def _compacting(plugin: RunGuardPlugin, summarizer: ScriptedModel, **config: Any) -> tuple[Runner, ScriptedModel]:
    model = ScriptedModel([text("x")])
    compaction = EventsCompactionConfig(
        summarizer=LlmEventSummarizer(llm=summarizer), **{"compaction_interval": 1, "overlap_size": 0, **config}
    )
    app = App(name="app", root_agent=agent("a", model), plugins=[plugin], events_compaction_config=compaction)
    return Runner(app=app, session_service=InMemorySessionService()), model


def _summaries(session: Any) -> list[str]:
    return [
        event.actions.compaction.compacted_content.parts[0].text for event in session.events if event.actions.compaction
    ]


async def test_the_summary_of_a_sliding_window_is_billed_to_the_run_it_follows() -> None:
    plugin, summarizer = two_prices(max_usd=1), small("in short")
    runner, model = _compacting(plugin, summarizer)
    result = await play(runner.agent, runner=runner)
    assert (model.calls, summarizer.calls) == (1, 1)
    assert _summaries(result.session) == ["in short"]
    assert booked(plugin) == (2, CALL_USD + SMALL_USD)
    spent = plugin.spend(f"run:{result.events[0].invocation_id}")
    assert {name: figures["usd"] for name, figures in spent["by_model"].items()} == {
        "scripted-1": CALL_USD,
        "small-1": SMALL_USD,
    }
    assert plugin.trips == []
    assert_nothing_reserved(plugin)


async def test_the_summary_at_a_token_threshold_is_billed_to_the_run_it_is_made_in() -> None:
    plugin, summarizer = two_prices(max_usd=1), small("in short")
    runner, model = _compacting(plugin, summarizer, compaction_interval=99, token_threshold=500, event_retention_size=0)
    await play(runner.agent, runner=runner)
    before = summarizer.calls
    second = await play(runner.agent, "and?", runner=runner)
    assert model.calls == 2
    assert summarizer.calls > 0
    assert "in short" in _summaries(second.session)
    assert booked(plugin) == (2 + summarizer.calls, 2 * CALL_USD + summarizer.calls * SMALL_USD)
    spent = plugin.spend(f"run:{second.events[0].invocation_id}")
    assert spent["usd"] == CALL_USD + (summarizer.calls - before) * SMALL_USD
    assert_nothing_reserved(plugin)


@pytest.mark.parametrize(
    "policy", [{"max_usd": "0.02"}, {"max_model_calls": 1}, {"budgets": [Budget(usd="0.02", per="session")]}], ids=str
)
async def test_a_refused_summary_harms_nothing(policy: dict[str, Any]) -> None:
    """The answer was paid and stays; no summary is made of our words; the session goes on."""
    plugin, summarizer = two_prices(**policy), small("in short")
    runner, model = _compacting(plugin, summarizer)
    first = await play(runner.agent, runner=runner)
    assert (model.calls, summarizer.calls) == (1, 0)
    assert first.texts[0] == "x"
    assert _summaries(first.session) == []
    assert booked(plugin) == (1, CALL_USD)
    assert (plugin.trips, first.trips) == ([], []), "nothing that the user asked for was stopped"
    if "budgets" in policy:
        plugin.extend("session:app/u1/s1", usd="0.02")
    second = await play(runner.agent, "and?", runner=runner)
    assert "x" in second.texts
    assert model.calls == 2
    sent = [part.text for content in model.requests[-1].contents for part in content.parts]
    assert sent == ["go", "x", "and?"], "our refusal is no part of the conversation"
    assert_nothing_reserved(plugin)


async def _turns(runner: Runner, count: int, **options: Any) -> None:
    for turn in range(count):
        await play(runner.agent, f"turn {turn}", runner=runner, **options)


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        ({"max_usd": "0.02"}, "budget"),
        ({"max_model_calls": 1}, "model_calls"),
        ({"prices": {"scripted-1": PRICES["scripted-1"]}, "max_usd": 1}, "unpriced"),
        ({"mode": "shadow", "max_model_calls": 1}, "model_calls"),
    ],
    ids=str,
)
async def test_a_refused_summary_is_reported_once(
    policy: dict[str, Any], rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    """ADK asks for it again after every run: one warning and one alert, not one per attempt."""
    alerts: list[Alert] = []
    plugin, summarizer = two_prices(alerts=alerts.append, **policy), small("in short")
    runner, _ = _compacting(plugin, summarizer)
    with caplog.at_level(logging.INFO, "runguard"):
        await _turns(runner, 4)
    assert plugin.flush()
    enforced = plugin.snapshot()["mode"] == "enforce"
    assert summarizer.calls == (0 if enforced else 4)
    (line,) = [record for record in caplog.records if "compact" in record.getMessage()]
    assert line.levelno == logging.WARNING
    assert line.getMessage().startswith("runguard.compaction_refused: the history of session app/u1/s1 w")
    (alert,) = [alert for alert in alerts if alert.kind != "threshold"]
    assert (alert.kind, alert.facts["rule"], alert.facts["session"]) == ("compaction", rule, "s1")
    assert (alert.severity, alert.facts["enforced"]) == ("warning" if enforced else "info", enforced)
    assert [trip for trip in plugin.trips if trip.enforced] == []


async def test_each_session_whose_summary_is_refused_gets_a_warning_and_the_app_one_alert(
    caplog: pytest.LogCaptureFixture,
) -> None:
    alerts: list[Alert] = []
    plugin = two_prices(max_model_calls=1, alerts=alerts.append)
    runner, _ = _compacting(plugin, small("in short"))
    with caplog.at_level(logging.WARNING, "runguard"):
        for session in ("s1", "s2", "s3"):
            await _turns(runner, 2, session_id=session)
    assert plugin.flush()
    assert sum("runguard.compaction_refused" in record.getMessage() for record in caplog.records) == 3
    assert [alert.kind for alert in alerts] == ["compaction"]


async def test_a_summary_that_is_refused_within_a_run_is_reported_as_the_stop_of_that_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    alerts: list[Alert] = []
    plugin, summarizer = (
        two_prices(budgets=[Budget(usd="0.021", per="session")], alerts=alerts.append),
        small("in short"),
    )
    runner, _ = _compacting(plugin, summarizer, compaction_interval=99, token_threshold=500, event_retention_size=0)
    with caplog.at_level(logging.WARNING, "runguard"):
        await _turns(runner, 2)
    assert plugin.flush()
    assert summarizer.calls == 0
    names = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert [name for name in names if name.startswith("runguard.") and name != "runguard.warn"] == [
        "runguard.compaction_refused",
        "runguard.trip",
    ]
    assert [alert.kind for alert in alerts if alert.kind != "threshold"] == ["compaction", "trip"]


# ---- agents without plugins -----------------------------------------------------------------------------------------


def _hidden(inner: ScriptedModel, name: str) -> tuple[LlmAgent, ScriptedModel]:
    outer = ScriptedModel([call(name, request="one"), call(name, request="two"), text("done")])
    return agent("outer", outer, tools=[AgentTool(agent(name, inner, tools=[step]), include_plugins=False)]), outer


async def test_an_agent_without_plugins_inside_a_tool_is_billed_and_the_blind_spot_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inner = ScriptedModel(lambda n, _: call("step", q=n) if n % 3 else text("part"), model="small-1")
    root, outer = _hidden(inner, "unseen_one")
    plugin = two_prices(max_usd=1)
    with caplog.at_level(logging.WARNING, "runguard"):
        result = await play(root, plugins=[plugin])
    assert result.texts == ["done"]
    assert (outer.calls, inner.calls) == (3, 6)
    assert booked(plugin) == (9, 3 * CALL_USD + 6 * SMALL_USD)
    assert plugin.spend()["by_tool"]["unseen_one"]["calls"] == 6
    assert {name: figures["calls"] for name, figures in plugin.spend()["by_agent"].items()} == {
        "outer": 3,
        "unseen_one": 6,
    }
    said = [record.message for record in caplog.records if "blind_spot" in record.message]
    assert len(said) == 1
    assert "unseen_one" in said[0]
    assert_nothing_reserved(plugin)


def _child_pipeline() -> tuple[SequentialAgent, ScriptedModel]:
    """Two agents, the second of which consults a model in a tool."""
    advisor = small()
    second = agent("second", ScriptedModel([call("consult", q=1), text("b")]), tools=[consulting(advisor)])
    return SequentialAgent(name="pipeline", sub_agents=[agent("first", ScriptedModel([text("a")])), second]), advisor


def _in_agent_tool() -> BaseAgent:
    child, _ = _child_pipeline()
    return agent(
        "outer",
        ScriptedModel([call("pipeline", request="one"), text("done")]),
        tools=[AgentTool(child, include_plugins=False)],
    )


async def _run_child() -> None:
    child, _ = _child_pipeline()
    service = InMemorySessionService()
    await service.create_session(app_name="child", user_id="u", session_id="s")
    runner = Runner(app=App(name="child", root_agent=child), session_service=service)
    async for _ in runner.run_async(user_id="u", session_id="s", new_message=HELLO):
        pass


def _in_tool_with_runner() -> BaseAgent:
    async def research(q: int) -> str:
        await _run_child()
        return "found"

    return agent("outer", ScriptedModel([call("research", q=1), text("done")]), tools=[research])


class RunsChild(BaseAgent):
    async def _run_async_impl(self, ctx: InvocationContext) -> AsyncGenerator[Event, None]:
        await _run_child()
        yield Event(
            author=self.name,
            invocation_id=ctx.invocation_id,
            content=types.Content(role="model", parts=[types.Part(text="done")]),
        )


def _in_custom_agent() -> BaseAgent:
    return SequentialAgent(
        name="root",
        sub_agents=[
            agent("outer", ScriptedModel([text("x")])),
            agent("outer_two", ScriptedModel([text("y")])),
            RunsChild(name="z"),
        ],
    )


@pytest.mark.parametrize(
    "shape",
    [_in_agent_tool, _in_tool_with_runner, _in_custom_agent],
    ids=lambda shape: shape.__name__.removeprefix("_"),
)
async def test_agents_of_a_runner_without_plugins_are_billed_under_their_own_names(
    shape: Callable[[], BaseAgent],
) -> None:
    plugin = two_prices(max_usd=1)
    result = await play(shape(), plugins=[plugin])
    assert result.texts[-1] == "done"
    spent = {name: (figures["calls"], figures["usd"]) for name, figures in plugin.spend()["by_agent"].items()}
    children = {name: figures for name, figures in spent.items() if not name.startswith("outer")}
    # Nobody announces who consults a model in a child's tool: its root agent pays.
    assert children == {"first": (1, CALL_USD), "second": (2, 2 * CALL_USD), "pipeline": (1, SMALL_USD)}
    assert sum(calls for name, (calls, _) in spent.items() if name.startswith("outer")) == 2
    assert_nothing_reserved(plugin)


async def test_the_budget_of_an_agent_limits_it_without_plugins_too() -> None:
    inner = ScriptedModel(lambda n, _: call("step", q=n))
    root, outer = _hidden(inner, "unseen_three")
    plugin = guard(budgets=[Budget(calls=3, per="agent")])
    result = await play(root, plugins=[plugin])
    assert (outer.calls, inner.calls) == (1, 3)
    trip = assert_stopped(result, "budget")
    assert "unseen_three" in trip.scope_id
    assert assert_calls_answered(result.session) == 1
    assert_nothing_reserved(plugin)


async def test_an_agent_without_plugins_inside_a_tool_is_stopped_by_the_cap() -> None:
    inner = ScriptedModel(lambda n, _: call("step", q=n))
    root, outer = _hidden(inner, "unseen_two")
    plugin = guard(max_usd="0.10")
    result = await play(root, plugins=[plugin])
    assert outer.calls == 1
    assert 1 + inner.calls <= 5
    assert plugin.spend()["usd"] <= Decimal("0.10")
    assert_stopped(result, "budget")
    assert assert_calls_answered(result.session) == 1
    assert_nothing_reserved(plugin)


async def test_under_install_an_agent_without_plugins_is_guarded_and_billed_once() -> None:
    inner = ScriptedModel(lambda n, _: call("step", q=n) if n % 3 else text("part"), model="small-1")
    root, outer = _hidden(inner, "seen")
    plugin = runguard.install(
        prices=PRICES,
        tokens=lambda request: 1_000,
        max_usd=1,
        budgets=[Budget(usd=FAR_AWAY, per="app", window="month")],
        clock=FakeClock(),
    )
    result = await play(root)
    assert result.texts == ["done"]
    assert (outer.calls, inner.calls) == (3, 6)
    assert booked(plugin) == (9, 3 * CALL_USD + 6 * SMALL_USD)
    assert plugin.spend()["by_agent"]["seen"]["calls"] == 6, "its own hooks announced its calls"
    assert_nothing_reserved(plugin)


# ---- code that asks a model itself ----------------------------------------------------------------------------------


async def test_a_tool_that_consults_a_model_pays_for_it() -> None:
    advisor, model = small(), ScriptedModel([call("consult", q=1), text("done")])
    plugin = two_prices(max_usd=1)
    result = await play(agent("a", model, tools=[consulting(advisor, times=3)]), plugins=[plugin])
    assert result.texts == ["done"]
    assert (model.calls, advisor.calls) == (2, 3)
    assert booked(plugin) == (5, 2 * CALL_USD + 3 * SMALL_USD)
    assert plugin.spend()["by_tool"]["consult"]["usd"] == 3 * SMALL_USD
    assert_nothing_reserved(plugin)


async def test_a_tool_that_consults_a_model_is_limited() -> None:
    advisor, model = ScriptedModel([text("advice")]), ScriptedModel([call("consult", q=1), text("done")])
    plugin = guard(max_usd="0.06")
    result = await play(agent("a", model, tools=[consulting(advisor, times=9)]), plugins=[plugin])
    assert (model.calls, advisor.calls) == (1, 2)
    trip = assert_stopped(result, "budget")
    assert trip.spent_usd == Decimal("0.06")
    assert assert_calls_answered(result.session) == 1
    assert len(plugin.trips) == 1
    assert_nothing_reserved(plugin)


async def test_a_tool_that_consults_a_model_counts_against_the_limit_on_calls() -> None:
    advisor, model = small(), ScriptedModel([call("consult", q=1), text("done")])
    plugin = two_prices(max_model_calls=3)
    result = await play(agent("a", model, tools=[consulting(advisor, times=9)]), plugins=[plugin])
    assert (model.calls, advisor.calls) == (1, 2)
    assert assert_stopped(result, "model_calls").model_calls == 3


async def test_the_consulting_tool_of_the_framework_is_billed() -> None:
    consult = pytest.importorskip("google.adk.tools.model_consult")
    advisor = small()
    model = ScriptedModel([call("model_consult", question="what now?"), text("done")])
    plugin = two_prices(max_usd=1)
    result = await play(agent("a", model, tools=[consult.ModelConsultTool(model=advisor)]), plugins=[plugin])
    assert result.texts == ["done"]
    assert (model.calls, advisor.calls) == (2, 1)
    assert booked(plugin) == (3, 2 * CALL_USD + SMALL_USD)
    assert_nothing_reserved(plugin)


class Asking(BaseAgent):
    """An agent of the user's own that calls its model directly."""

    llm: Any
    times: int = 1

    async def _run_async_impl(self, ctx: InvocationContext) -> AsyncGenerator[Event, None]:
        for _ in range(self.times):
            for response in await ask(self.llm):
                yield Event(
                    author=self.name, invocation_id=ctx.invocation_id, branch=ctx.branch, content=response.content
                )


@pytest.mark.parametrize(
    "shape",
    [
        lambda a: a,
        lambda a: SequentialAgent(name="seq", sub_agents=[a]),
        lambda a: ParallelAgent(name="par", sub_agents=[a]),
    ],
)
async def test_an_agent_that_calls_its_model_directly_is_billed_and_limited(shape: Callable[[Any], Any]) -> None:
    model, plugin = ScriptedModel([text("x")]), guard(max_usd="0.06")
    result = await play(shape(Asking(name="mine", llm=model, times=9)), plugins=[plugin])
    assert (model.calls, booked(plugin)) == (3, (3, Decimal("0.06")))
    assert result.texts[:3] == ["x"] * 3
    assert_stopped(result, "budget")
    assert_nothing_reserved(plugin)


class Stubborn(BaseAgent):
    """Asks until it likes the answer, which it never does."""

    llm: Any

    async def _run_async_impl(self, ctx: InvocationContext) -> AsyncGenerator[Event, None]:
        while not any(
            response.content and response.content.parts[0].text == "good" for response in await ask(self.llm)
        ):
            pass
        yield Event(author=self.name, invocation_id=ctx.invocation_id)


def _stubborn_agent(model: Any) -> Any:
    return Stubborn(name="mine", llm=model)


def _stubborn_tool(model: Any) -> Any:
    async def consult(q: int) -> str:
        while not any(response.content and response.content.parts[0].text == "good" for response in await ask(model)):
            pass
        return "good"

    return agent("a", ScriptedModel([call("consult", q=1), text("done")], model="small-1"), tools=[consult])


def _stubborn_hidden_loop(model: Any) -> Any:
    loop = LoopAgent(name="hidden_loop", sub_agents=[agent("w", model)])
    return agent(
        "a",
        ScriptedModel([call("hidden_loop", request="one"), text("done")], model="small-1"),
        tools=[AgentTool(loop, include_plugins=False)],
    )


def _stubborn_that_swallows(model: Any) -> Any:
    async def consult(q: int) -> str:
        while True:
            try:
                await ask(model)
            except Exception:
                continue

    return agent("a", ScriptedModel([call("consult", q=1), text("done")], model="small-1"), tools=[consult])


@pytest.mark.parametrize(
    "shape",
    [_stubborn_agent, _stubborn_tool, _stubborn_hidden_loop, _stubborn_that_swallows],
    ids=lambda shape: shape.__name__.removeprefix("_"),
)
async def test_whoever_asks_on_after_every_refusal_is_ended(shape: Callable[[Any], Any]) -> None:
    """A refusal comes at once and costs nothing, so a loop that only asks would go round for ever."""
    model, plugin = ScriptedModel([text("bad")]), two_prices(max_usd="0.07")
    service = InMemorySessionService()
    result = await play(shape(model), plugins=[plugin], session_service=service)
    assert model.calls == 3
    assert_stopped(result, "budget")
    assert len(plugin.trips) == 1
    assert_calls_answered(result.session)
    assert_nothing_reserved(plugin)


async def test_a_long_list_of_refused_consultations_still_gives_the_tools_answer() -> None:
    """A tool that goes through its documents is no endless loop: it comes to its end and its call is answered."""
    advisor = ScriptedModel([text("advice")])
    plugin = guard(max_usd="0.06")
    root = agent("a", ScriptedModel([call("consult", q=1), text("done")]), tools=[consulting(advisor, times=200)])
    result = await play(root, plugins=[plugin])
    assert advisor.calls == 2
    (answer,) = [response.response for event in result.session.events for response in event.get_function_responses()]
    assert answer["advice"] == ["advice"] * 2
    assert_stopped(result, "budget")


async def test_ending_one_who_asks_on_keeps_what_others_have_paid_for() -> None:
    slow = [agent(f"slow{n}", ScriptedModel([text(f"paid {n}")], latency_s=0.3)) for n in range(2)]
    root = ParallelAgent(name="par", sub_agents=[*slow, Stubborn(name="mine", llm=ScriptedModel([text("bad")]))])
    plugin = guard(max_usd="0.10")
    result = await play(root, plugins=[plugin])
    assert sorted(result.texts)[-2:] == ["paid 0", "paid 1"]
    assert booked(plugin) == (5, Decimal("0.10"))
    assert_nothing_reserved(plugin)


async def test_a_crowd_of_refused_consultations_does_not_end_what_others_have_paid_for() -> None:
    advisor = ScriptedModel([text("advice")])

    async def consult(q: int) -> dict[str, int]:
        got = await asyncio.gather(*(ask(advisor) for _ in range(60)))
        return {"answers": sum(bool(response.content) for answer in got for response in answer)}

    busy = agent("busy", ScriptedModel([call("consult", q=1), text("done")]), tools=[consult])
    slow = agent("slow", ScriptedModel([text("paid")], latency_s=0.3))
    plugin = guard(max_usd="0.10")
    result = await play(ParallelAgent(name="par", sub_agents=[slow, busy]), plugins=[plugin])
    assert "paid" in result.texts
    assert advisor.calls == 3
    assert plugin.spend()["usd"] == Decimal("0.10")
    assert_calls_answered(result.session)
    assert_nothing_reserved(plugin)


@pytest.mark.parametrize(
    "moment", ["before_model_callback", "after_model_callback", "before_agent_callback", "after_agent_callback"]
)
async def test_a_callback_that_consults_a_model_pays_its_own_price(moment: str) -> None:
    """The agent's own call keeps its account, whoever asks a model beside it."""
    checker, model = small(), ScriptedModel([text("x")])

    async def check(*_: Any, **__: Any) -> None:
        await ask(checker)

    plugin = two_prices(max_usd=1)
    await play(agent("a", model, **{moment: check}), plugins=[plugin])
    assert (model.calls, checker.calls) == (1, 1)
    spent = plugin.spend()
    assert {name: figures["usd"] for name, figures in spent["by_model"].items()} == {
        "scripted-1": CALL_USD,
        "small-1": SMALL_USD,
    }
    assert spent["by_agent"]["a"]["usd"] == CALL_USD
    assert booked(plugin) == (2, CALL_USD + SMALL_USD)
    assert_nothing_reserved(plugin)


async def test_a_callers_own_configuration_is_not_changed_by_a_capped_answer() -> None:
    """Code keeps such objects at the top of a module: what the rest of one budget paid must not bind later runs."""
    config = types.GenerateContentConfig(max_output_tokens=100_000)
    limits: list[int | None] = []

    def answer(n: int, request: LlmRequest) -> types.Part:
        limits.append(request.config.max_output_tokens)
        return text("advice")

    advisor = ScriptedModel(answer)

    async def consult(q: int) -> str:
        request = LlmRequest(
            model=advisor.model, contents=[types.Content(role="user", parts=[types.Part(text="?")])], config=config
        )
        return str([response.content async for response in advisor.generate_content_async(request)])

    plugin = guard(max_usd="0.10", min_output_tokens=50)
    await play(agent("a", ScriptedModel([call("consult", q=1), text("done")]), tools=[consult]), plugins=[plugin])
    (limit,) = limits
    assert limit is not None
    assert limit < 3_000
    assert config.max_output_tokens == 100_000
    assert_nothing_reserved(plugin)


# ---- models inside of models ----------------------------------------------------------------------------------------


class BusyError(Exception):
    status_code = 503


async def test_a_model_that_falls_back_makes_one_call_per_attempt() -> None:
    models = pytest.importorskip("google.adk.models._fallback_model")
    first, second, third = (
        ScriptedModel([BusyError()]),
        ScriptedModel([BusyError()], model="small-1"),
        ScriptedModel([text("x")], model="small-1"),
    )
    plugin = two_prices(max_usd=1)
    result = await play(agent("a", models.FallbackModel(models=[first, second, third])), plugins=[plugin])
    assert result.texts == ["x"]
    assert (first.calls, second.calls, third.calls) == (1, 1, 1)
    assert booked(plugin) == (3, SMALL_USD), "a refusal by the provider costs nothing"
    assert {name: figures["calls"] for name, figures in plugin.spend()["by_model"].items()} == {
        "scripted-1": 1,
        "small-1": 2,
    }
    assert plugin.spend()["by_agent"]["a"]["calls"] == 3
    assert_nothing_reserved(plugin)


async def test_attempts_of_a_fallback_count_against_the_limit_on_calls() -> None:
    models = pytest.importorskip("google.adk.models._fallback_model")
    last = ScriptedModel([text("x")])
    fallback = models.FallbackModel(models=[ScriptedModel([BusyError()]), ScriptedModel([BusyError()]), last])
    plugin = guard(max_model_calls=2)
    result = await play(agent("a", fallback), plugins=[plugin])
    assert last.calls == 0
    assert_stopped(result, "model_calls")
    assert_nothing_reserved(plugin)


async def test_a_fallback_that_is_answered_at_once_is_one_call() -> None:
    models = pytest.importorskip("google.adk.models._fallback_model")
    model = ScriptedModel([call("step", q=1), text("x")], chunks=5)
    plugin = guard(max_usd="0.04")
    result = await play(
        agent("a", models.FallbackModel(models=[model, ScriptedModel([text("y")])]), tools=[step]),
        plugins=[plugin],
        run_config=SSE,
    )
    assert (model.calls, booked(plugin)) == (2, (2, Decimal("0.04")))
    assert plugin.trips == []
    assert_calls_answered(result.session)
    assert_nothing_reserved(plugin)


class Polite(ScriptedModel):
    """A subclass that does its part and leaves the rest to its parent."""

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        async for response in super().generate_content_async(llm_request, stream):
            yield response


class MorePolite(Polite):
    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        async for response in super().generate_content_async(llm_request, stream):
            yield response


@pytest.mark.parametrize("kind", [Polite, MorePolite])
@pytest.mark.parametrize("direct", [False, True], ids=["announced", "direct"])
async def test_a_model_that_calls_its_parents_method_makes_one_call(kind: type[ScriptedModel], direct: bool) -> None:
    model, plugin = kind([text("x")]), guard(max_usd="0.10")
    await play(Asking(name="mine", llm=model) if direct else agent("a", model), plugins=[plugin])
    assert (model.calls, booked(plugin)) == (1, (1, CALL_USD))
    assert_nothing_reserved(plugin)


class Router(BaseLlm):
    """A model of the user's own: it lets the others do the work."""

    model: str = "scripted-1"
    steps: list[Any]

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        for model in self.steps[:-1]:
            await ask(model)
        llm_request.model = self.steps[-1].model
        async for response in self.steps[-1].generate_content_async(llm_request, stream):
            yield response


@pytest.mark.parametrize("direct", [False, True], ids=["announced", "direct"])
async def test_a_model_around_another_one_is_billed_as_the_other(direct: bool) -> None:
    model, plugin = small(), two_prices(max_usd="0.10")
    await play(
        Asking(name="mine", llm=Router(steps=[model])) if direct else agent("a", Router(steps=[model])),
        plugins=[plugin],
    )
    assert (model.calls, booked(plugin)) == (1, (1, SMALL_USD))
    assert list(plugin.spend()["by_model"]) == ["small-1"]
    assert_nothing_reserved(plugin)


async def test_a_model_that_asks_several_others_is_billed_for_each_and_not_for_itself() -> None:
    first, second, last = small(), ScriptedModel([text("y")]), ScriptedModel([text("x")])
    plugin = two_prices(max_usd="0.10")
    result = await play(agent("a", Router(steps=[first, second, last])), plugins=[plugin])
    assert result.texts == ["x"]
    assert booked(plugin) == (3, 2 * CALL_USD + SMALL_USD)
    assert_nothing_reserved(plugin)


async def test_a_model_that_asks_several_others_is_stopped_between_them() -> None:
    models = [ScriptedModel([text(f"{n}")]) for n in range(5)]
    plugin = guard(max_usd="0.04")
    result = await play(agent("a", Router(steps=models)), plugins=[plugin])
    assert [model.calls for model in models] == [1, 1, 0, 0, 0]
    assert_stopped(result, "budget")
    assert_nothing_reserved(plugin)


class Patient(BaseLlm):
    """A model of the user's own that tries again when the line breaks."""

    model: str = "scripted-1"
    inner: Any

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        for _ in range(5):
            try:
                async for response in self.inner.generate_content_async(llm_request, stream):
                    yield response
            except ConnectionError:
                continue
            return


async def test_every_try_of_a_model_that_tries_again_is_billed() -> None:
    inner = ScriptedModel([ConnectionError("broke"), text("x")])
    plugin = guard(max_usd="0.10")
    result = await play(agent("a", Patient(inner=inner)), plugins=[plugin])
    assert result.texts == ["x"]
    spent = plugin.spend()
    assert (inner.calls, spent["calls"], spent["estimated_calls"], spent["usd"]) == (2, 2, 1, 2 * CALL_USD)
    assert_nothing_reserved(plugin)


async def test_tries_of_a_model_that_tries_again_end_at_the_cap() -> None:
    inner = ScriptedModel([ConnectionError("broke")])
    plugin = guard(max_usd="0.04")
    result = await play(agent("a", Patient(inner=inner)), plugins=[plugin])
    assert inner.calls == 2
    assert_stopped(result, "budget")
    assert_nothing_reserved(plugin)


# ---- models that are written differently ----------------------------------------------------------------------------


class OneAnswer:
    """An async iterator that is no generator: it cannot be closed."""

    def __init__(self) -> None:
        self.left = 1

    def __aiter__(self) -> "OneAnswer":
        return self

    async def __anext__(self) -> LlmResponse:
        if not self.left:
            raise StopAsyncIteration
        self.left -= 1
        return LlmResponse(content=types.Content(role="model", parts=[types.Part(text="advice")]), usage_metadata=USAGE)


class Answers:
    def __aiter__(self) -> OneAnswer:
        return OneAnswer()


class Plain(BaseLlm):
    """Its method is no generator function."""

    make: Any

    def generate_content_async(self, llm_request: LlmRequest, stream: bool = False) -> Any:
        return self.make()


@pytest.mark.parametrize("make", [OneAnswer, Answers])
@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "beside a guard"])
async def test_whatever_can_be_read_with_async_for_is_billed_and_not_broken(make: type, guarded: bool) -> None:
    plugin, advisor = guard(max_usd="0.10"), Plain(model="scripted-1", make=make)
    root = agent("a", ScriptedModel([call("consult", q=1), text("done")]), tools=[consulting(advisor)])
    result = await play(root, plugins=[plugin] if guarded else [])
    assert result.texts == ["done"]
    (answer,) = [response.response for event in result.session.events for response in event.get_function_responses()]
    assert answer["advice"] == ["advice"]
    assert booked(plugin) == ((3, Decimal("0.06")) if guarded else (0, 0))
    assert_nothing_reserved(plugin)


async def test_a_model_that_fails_before_it_begins_holds_nothing() -> None:
    def no_key() -> Any:
        raise ValueError("no key")

    advisor, plugin = Plain(model="scripted-1", make=no_key), guard(max_usd="0.10")

    async def consult(q: int) -> str:
        try:
            await ask(advisor)
        except ValueError as error:
            return str(error)
        return "answered"

    result = await play(
        agent("a", ScriptedModel([call("consult", q=1), text("done")]), tools=[consult]), plugins=[plugin]
    )
    assert result.texts == ["done"]
    assert_nothing_reserved(plugin)


# ---- classes that come late -----------------------------------------------------------------------------------------


def _new_class() -> type[BaseLlm]:
    class Late(BaseLlm):
        async def generate_content_async(
            self, llm_request: LlmRequest, stream: bool = False
        ) -> AsyncGenerator[LlmResponse, None]:
            await asyncio.sleep(0)
            yield LlmResponse(
                content=types.Content(role="model", parts=[types.Part(text="late")]), usage_metadata=USAGE
            )

    return Late


async def test_a_model_class_defined_after_the_guard_is_billed() -> None:
    plugin = guard(max_usd="0.10")
    result = await play(agent("a", _new_class()(model="scripted-1")), plugins=[plugin])
    assert result.texts == ["late"]
    assert booked(plugin) == (1, CALL_USD)
    assert_nothing_reserved(plugin)


async def test_a_model_class_defined_while_the_run_goes_on_is_billed_and_limited() -> None:
    """Model classes are often imported when they are first needed."""
    answers: list[int] = []

    async def consult(q: int) -> str:
        late = _new_class()(model="scripted-1")
        for _ in range(9):
            answers.append(sum(bool(response.content) for response in await ask(late)))  # noqa: PERF401 - awaits
        return "asked"

    plugin = guard(max_usd="0.06")
    result = await play(
        agent("a", ScriptedModel([call("consult", q=1), text("done")]), tools=[consult]), plugins=[plugin]
    )
    assert sum(answers) == 2
    assert booked(plugin) == (3, Decimal("0.06"))
    assert_stopped(result, "budget")
    assert_nothing_reserved(plugin)


# ---- two guards -----------------------------------------------------------------------------------------------------


def _breaker(**policy: Any) -> ADKCostBreaker:
    budgets = [Budget(usd=FAR_AWAY, per="app", window="month")]
    return ADKCostBreaker(prices=PRICES, tokens=lambda request: 1_000, on_stop="stop", **{"budgets": budgets, **policy})


async def test_two_guards_bill_every_call_once_each() -> None:
    plugin, breaker = two_prices(max_usd=1), _breaker(max_usd=1)
    advisor, model = small(), ScriptedModel([call("consult", q=1), text("done")])
    root = breaker.install_on_agent(agent("a", model, tools=[consulting(advisor)]))
    result = await play(root, plugins=[plugin])
    assert result.texts == ["done"]
    for one in (plugin, breaker._plugin):
        assert booked(one) == (3, 2 * CALL_USD + SMALL_USD)
        assert_nothing_reserved(one)


@pytest.mark.parametrize("tight", ["plugin", "breaker"])
async def test_when_one_of_two_guards_refuses_the_other_holds_nothing(tight: str) -> None:
    limits = {"max_usd": "0.03"}
    plugin, breaker = guard(**(limits if tight == "plugin" else {})), _breaker(**(limits if tight == "breaker" else {}))
    advisor, model = ScriptedModel([text("advice")]), ScriptedModel([call("consult", q=1), text("done")])
    root = breaker.install_on_agent(agent("a", model, tools=[consulting(advisor)]))
    await play(root, plugins=[plugin])
    assert (model.calls, advisor.calls) == (1, 0)
    for one in (plugin, breaker._plugin):
        assert booked(one) == (1, CALL_USD)
        assert_nothing_reserved(one)


@pytest.mark.parametrize("cap", [1, "0.05"], ids=["rich", "poor"])
async def test_a_tool_that_runs_agents_under_a_guard_of_their_own_is_billed_to_its_run_too(cap: Any) -> None:
    """The inner guard announces the calls; the outer run pays for its tool all the same."""
    outer_guard, inner_guard, inner = (
        guard(max_usd=cap),
        guard(max_usd=1),
        ScriptedModel([call("step", q=1), call("step", q=2), text("in")]),
    )

    async def delegate(q: int) -> list[str]:
        return (await play(agent("inner", inner, tools=[step]), plugins=[inner_guard])).texts

    model = ScriptedModel([call("delegate", q=1), text("done")])
    result = await play(agent("a", model, tools=[delegate]), plugins=[outer_guard])
    if cap == 1:
        assert (model.calls, inner.calls) == (2, 3)
        assert booked(outer_guard) == (5, Decimal("0.10"))
        assert booked(inner_guard) == (3, Decimal("0.06"))
    else:
        assert (model.calls, inner.calls) == (1, 1)
        assert_stopped(result, "budget")
    assert_calls_answered(result.session)
    for one in (outer_guard, inner_guard):
        assert_nothing_reserved(one)


# ---- calls that are not the run's -----------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "shape", [lambda a: a, lambda a: LoopAgent(name="loop", max_iterations=1, sub_agents=[a])], ids=["agent", "loop"]
)
async def test_what_the_caller_asks_between_two_events_is_not_the_runs(
    shape: Callable[[Any], Any], streamed: bool
) -> None:
    model = ScriptedModel([call("step", q=1), text("x")], chunks=3)
    plugin, own = guard(max_usd="0.04"), ScriptedModel([text("own")])
    service = InMemorySessionService()
    runner = Runner(
        app=App(name="app", root_agent=shape(agent("a", model, tools=[step])), plugins=[plugin]),
        session_service=service,
    )
    await service.create_session(app_name="app", user_id="u1", session_id="s1")
    await ask(own)
    options = {"run_config": SSE} if streamed else {}
    async for _ in runner.run_async(user_id="u1", session_id="s1", new_message=HELLO, **options):
        await ask(own)
    await ask(own)
    assert own.calls >= 5
    assert (model.calls, plugin.trips) == (2, [])
    assert booked(plugin) == (2, Decimal("0.04"))
    assert_nothing_reserved(plugin)


async def test_what_a_tool_left_running_asks_after_the_run_is_not_the_runs() -> None:
    own, tasks = ScriptedModel([text("own")]), []
    over = asyncio.Event()

    async def later() -> None:
        await over.wait()
        await ask(own)

    async def start(q: int) -> str:
        tasks.append(asyncio.create_task(later()))
        return "started"

    plugin = guard(max_usd="0.10")
    await play(agent("a", ScriptedModel([call("start", q=1), text("x")]), tools=[start]), plugins=[plugin])
    over.set()
    await tasks[0]
    assert own.calls == 1
    assert booked(plugin) == (2, Decimal("0.04"))
    assert_nothing_reserved(plugin)


async def test_a_call_that_began_in_a_run_is_the_runs_also_when_it_ends_later() -> None:
    """It was asked for and held while the run lasted; its usage is told when the run is over."""
    go_on, tasks = asyncio.Event(), []

    class Slow(ScriptedModel):
        async def generate_content_async(
            self, llm_request: LlmRequest, stream: bool = False
        ) -> AsyncGenerator[LlmResponse, None]:
            await go_on.wait()
            async for response in super().generate_content_async(llm_request, stream):
                yield response

    slow = Slow([text("own")])

    async def start(q: int) -> str:
        tasks.append(asyncio.create_task(ask(slow)))
        await asyncio.sleep(0.01)
        return "started"

    plugin = guard(max_usd="0.10")
    result = await play(agent("a", ScriptedModel([call("start", q=1), text("x")]), tools=[start]), plugins=[plugin])
    go_on.set()
    await tasks[0]
    assert slow.calls == 1
    assert booked(plugin) == (3, Decimal("0.06"))
    assert plugin.spend(f"run:{result.events[0].invocation_id}")["usd"] == Decimal("0.06")
    assert_nothing_reserved(plugin)


# ---- threads and loops ----------------------------------------------------------------------------------------------


def _sync_runner(plugin: RunGuardPlugin, advisor: BaseLlm, model: BaseLlm) -> Runner:
    root = agent("a", model, tools=[consulting(advisor, times=2)])
    service = InMemorySessionService()
    runner = Runner(app=App(name="app", root_agent=root, plugins=[plugin]), session_service=service)
    for name in ("s1", "s2"):
        asyncio.run(service.create_session(app_name="app", user_id="u1", session_id=name))
    return runner


def test_the_synchronous_run_is_billed_like_the_other() -> None:
    plugin, advisor, model = two_prices(max_usd=1), small(), ScriptedModel([call("consult", q=1), text("done")])
    events = list(_sync_runner(plugin, advisor, model).run(user_id="u1", session_id="s1", new_message=HELLO))
    assert events[-1].content.parts[0].text == "done"
    assert booked(plugin) == (4, 2 * CALL_USD + 2 * SMALL_USD)
    assert_nothing_reserved(plugin)


def test_the_synchronous_run_is_limited_like_the_other() -> None:
    plugin, advisor, model = (
        guard(max_usd="0.04", on_stop="raise"),
        ScriptedModel([text("advice")]),
        ScriptedModel([call("consult", q=1), text("done")]),
    )
    with pytest.raises(runguard.BudgetExceededError) as raised:
        list(_sync_runner(plugin, advisor, model).run(user_id="u1", session_id="s1", new_message=HELLO))
    assert raised.value.spent == Decimal("0.04")
    assert (model.calls, advisor.calls) == (1, 1)
    assert_nothing_reserved(plugin)


async def test_a_consultation_on_a_loop_of_its_own_in_a_thread_is_billed() -> None:
    advisor, plugin = small(), two_prices(max_usd=1)

    async def consult(q: int) -> str:
        await asyncio.to_thread(lambda: asyncio.run(ask(advisor)))
        return "asked"

    await play(agent("a", ScriptedModel([call("consult", q=1), text("done")]), tools=[consult]), plugins=[plugin])
    assert advisor.calls == 1
    assert booked(plugin) == (3, 2 * CALL_USD + SMALL_USD)
    assert_nothing_reserved(plugin)


def test_two_event_loops_in_two_threads_share_one_budget() -> None:
    """One user, one cap, one guard: each loop has its own runs, and waiting for money works across them."""
    plugin = guard(budgets=[Budget(usd="0.20", per="user")])
    models = [ScriptedModel(lambda n, _: call("step", q=n), latency_s=0.001) for _ in range(2)]
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            runner = Runner(
                app=App(name="app", root_agent=agent("a", models[number], tools=[step]), plugins=[plugin]),
                session_service=InMemorySessionService(),
            )
            result = asyncio.run(play(runner.agent, runner=runner, session_id=f"s{number}"))
            assert_stopped(result, "budget")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failed == []
    assert sum(model.calls for model in models) == 10
    assert booked(plugin) == (10, Decimal("0.20"))
    assert_nothing_reserved(plugin)


# ---- taking it down -------------------------------------------------------------------------------------------------


def test_uninstall_gives_the_classes_back() -> None:
    """In a process of its own: other tests' guards keep the classes watched."""
    script = """
        import gc
        from google.adk.models.base_llm import BaseLlm
        from google.adk.runners import Runner
        from google.adk.models.google_llm import Gemini
        from runguard.testing import ScriptedModel
        import runguard

        class Mine(ScriptedModel):
            async def generate_content_async(self, llm_request, stream=False):
                async for response in super().generate_content_async(llm_request, stream):
                    yield response

        def seen():
            methods = [kind.__dict__.get("generate_content_async") for kind in (BaseLlm, Gemini, ScriptedModel, Mine)]
            runs = [getattr(Runner, name) for name in ("run", "run_async", "run_live")]
            return [*methods, *runs, set(BaseLlm.__dict__)]

        before = seen()
        runguard.install(max_usd=1)
        assert seen()[1:4] != before[1:4]
        runguard.uninstall()
        gc.collect()
        assert seen() == before, (seen(), before)

        class Later(ScriptedModel):
            async def generate_content_async(self, llm_request, stream=False):
                yield None

        assert not hasattr(Later.generate_content_async, "__wrapped__")
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2_000:]
