"""Models that are called in unusual ways: by models, by tools and callbacks, under several guards, on other threads."""

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
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools.agent_tool import AgentTool
from google.genai import types

import runguard
from runguard import Budget
from runguard.adk import ADKCostBreaker, RunGuardPlugin
from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, text
from tests.kit.adk_runs import play
from tests.kit.contents import parts
from tests.kit.money import CALL_USD, FAR_AWAY, SSE, agent, assert_nothing_reserved, guard
from tests.kit.outside_calls import HELLO, PRICES, SMALL_USD, Asking, ask, booked, consulting, small, two_prices
from tests.kit.tools import step

USAGE = types.GenerateContentResponseUsageMetadata(
    prompt_token_count=1_000, candidates_token_count=250, total_token_count=1_250
)


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


async def test_attempts_of_a_fallback_count_against_the_limit_on_calls() -> None:
    models = pytest.importorskip("google.adk.models._fallback_model")
    last = ScriptedModel([text("x")])
    fallback = models.FallbackModel(models=[ScriptedModel([BusyError()]), ScriptedModel([BusyError()]), last])
    plugin = guard(max_model_calls=2)
    result = await play(agent("a", fallback), plugins=[plugin])
    assert last.calls == 0
    assert_stopped(result, "model_calls")


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


async def test_a_model_that_asks_several_others_is_billed_for_each_and_not_for_itself() -> None:
    first, second, last = small(), ScriptedModel([text("y")]), ScriptedModel([text("x")])
    plugin = two_prices(max_usd="0.10")
    result = await play(agent("a", Router(steps=[first, second, last])), plugins=[plugin])
    assert result.texts == ["x"]
    assert booked(plugin) == (3, 2 * CALL_USD + SMALL_USD)


async def test_a_model_that_asks_several_others_is_stopped_between_them() -> None:
    models = [ScriptedModel([text(f"{n}")]) for n in range(5)]
    plugin = guard(max_usd="0.04")
    result = await play(agent("a", Router(steps=models)), plugins=[plugin])
    assert [model.calls for model in models] == [1, 1, 0, 0, 0]
    assert_stopped(result, "budget")


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


async def test_tries_of_a_model_that_tries_again_end_at_the_cap() -> None:
    inner = ScriptedModel([ConnectionError("broke")])
    plugin = guard(max_usd="0.04")
    result = await play(agent("a", Patient(inner=inner)), plugins=[plugin])
    assert inner.calls == 2
    assert_stopped(result, "budget")


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
    limits: dict[str, Any] = {"max_usd": "0.03"}
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


async def test_the_consulting_tool_of_the_framework_is_billed() -> None:
    consult = pytest.importorskip("google.adk.tools.model_consult")
    advisor = small()
    model = ScriptedModel([call("model_consult", question="what now?"), text("done")])
    plugin = two_prices(max_usd=1)
    result = await play(agent("a", model, tools=[consult.ModelConsultTool(model=advisor)]), plugins=[plugin])
    assert result.texts == ["done"]
    assert (model.calls, advisor.calls) == (2, 1)
    assert booked(plugin) == (3, 2 * CALL_USD + SMALL_USD)


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


async def test_ending_one_who_asks_on_keeps_what_others_have_paid_for() -> None:
    slow = [agent(f"slow{n}", ScriptedModel([text(f"paid {n}")], latency_s=0.3)) for n in range(2)]
    root = ParallelAgent(name="par", sub_agents=[*slow, Stubborn(name="mine", llm=ScriptedModel([text("bad")]))])
    plugin = guard(max_usd="0.10")
    result = await play(root, plugins=[plugin])
    assert sorted(result.texts)[-2:] == ["paid 0", "paid 1"]
    assert booked(plugin) == (5, Decimal("0.10"))


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


async def test_a_consultation_on_a_loop_of_its_own_in_a_thread_is_billed() -> None:
    advisor, plugin = small(), two_prices(max_usd=1)

    async def consult(q: int) -> str:
        await asyncio.to_thread(lambda: asyncio.run(ask(advisor)))
        return "asked"

    await play(agent("a", ScriptedModel([call("consult", q=1), text("done")]), tools=[consult]), plugins=[plugin])
    assert advisor.calls == 1
    assert booked(plugin) == (3, 2 * CALL_USD + SMALL_USD)


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
