"""Code that calls a model itself, on any thread and loop."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from decimal import Decimal
from typing import Any

import pytest
from google.adk.agents import BaseAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.agents.invocation_context import InvocationContext
from google.adk.apps import App
from google.adk.events import Event
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools.agent_tool import AgentTool
from google.genai import types

import runguard
from runguard import Budget
from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, text
from tests.kit.adk_runs import play
from tests.kit.contents import parts
from tests.kit.money import CALL_USD, agent, assert_nothing_reserved, guard
from tests.kit.outside_calls import HELLO, SMALL_USD, Asking, ask, booked, consulting, small, two_prices
from tests.kit.tools import step

# ---- code that asks a model itself ----------------------------------------------------------------------------------


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
            response.content and parts(response.content)[0].text == "good" for response in await ask(self.llm)
        ):
            pass
        yield Event(author=self.name, invocation_id=ctx.invocation_id)


def _stubborn_agent(model: Any) -> Any:
    return Stubborn(name="mine", llm=model)


def _stubborn_tool(model: Any) -> Any:
    async def consult(q: int) -> str:
        while not any(response.content and parts(response.content)[0].text == "good" for response in await ask(model)):
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
    callbacks: dict[str, Any] = {moment: check}
    await play(agent("a", model, **callbacks), plugins=[plugin])
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


# ---- threads and loops ----------------------------------------------------------------------------------------------


def _sync_runner(plugin: RunGuardPlugin, advisor: BaseLlm, model: BaseLlm) -> Runner:
    root = agent("a", model, tools=[consulting(advisor, times=2)])
    service = InMemorySessionService()
    runner = Runner(app=App(name="app", root_agent=root, plugins=[plugin]), session_service=service)
    for name in ("s1", "s2"):
        asyncio.run(service.create_session(app_name="app", user_id="u1", session_id=name))
    return runner


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
