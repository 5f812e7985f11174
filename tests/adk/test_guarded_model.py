"""``GuardedLlm``: an agent guarded by its ``model=`` alone, without a plugin; and stacked with one."""

import asyncio
import copy
import pickle
from collections.abc import AsyncGenerator
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import pytest
from google.adk.agents import LlmAgent, LoopAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.tools.agent_tool import AgentTool
from google.genai import types

import runguard
from runguard import Budget
from runguard.adk import GuardedLlm, RunGuardPlugin
from runguard.testing import ScriptedModel, assert_calls_answered, call, calls, run, text
from tests.kit.adk_runs import told
from tests.kit.contents import parts
from tests.kit.tools import step
from tests.kit.waiting import until_async

PRICES = {"scripted-1": {"input": 10, "output": 40}}  # one call of 1,000 and 250 tokens: $0.02
MONEY: dict[str, Any] = {
    "prices": PRICES,
    "models": {"scripted-1": {"max_output_tokens": 250}},
    "tokens": lambda request: 1_000,
}
SSE = RunConfig(streaming_mode=StreamingMode.SSE)


def same(q: int) -> dict[str, str]:
    return {"status": "partial_parse_error"}


def on(model: BaseLlm, name: str = "a", **options: Any) -> LlmAgent:
    return LlmAgent(name=name, model=model, **{"tools": [step, same], **options})


def endless(tool: str = "step") -> ScriptedModel:
    return ScriptedModel(lambda n, request: call(tool, q=n))


# ---- each failure mode ends in its own error ------------------------------------------------------------------------


async def test_the_cap_is_exact_and_raises() -> None:
    model = endless()
    guarded = GuardedLlm(model, max_usd=0.10, **MONEY)
    with pytest.raises(runguard.BudgetExceededError) as caught:
        await run(on(guarded))
    assert model.calls == 5
    assert (caught.value.spent, caught.value.limit, caught.value.reserved) == (
        Decimal("0.1"),
        Decimal("0.1"),
        Decimal(0),
    )
    assert guarded.spend()["usd"] == Decimal("0.1")
    assert guarded.spend()["reserved_usd"] == 0
    assert [trip.rule for trip in guarded.trips] == ["budget"]
    assert pickle.loads(pickle.dumps(caught.value)).trip == caught.value.trip


async def test_the_context_is_checked_before_the_request_is_sent() -> None:
    model = endless()
    guarded = GuardedLlm(
        model, max_context_tokens=10_000, context_headroom=1_000, tokens=lambda request: 1_000 * len(request.contents)
    )
    with pytest.raises(runguard.ContextOverflowError) as caught:
        await run(on(guarded))
    assert model.calls == 5  # 1, 3, 5, 7 and 9 contents
    assert (caught.value.projected_tokens, caught.value.limit) == (11_000, 9_000)


async def test_a_model_without_a_price_is_refused_under_a_dollar_limit() -> None:
    model = ScriptedModel([text("hi")], model="acme-unknown-1")
    with pytest.raises(runguard.UnpricedModelError, match="acme-unknown-1"):
        await run(on(GuardedLlm(model, max_usd=1)))
    assert model.calls == 0


async def test_a_stop_can_be_an_answer_instead_of_an_error() -> None:
    model = endless()
    done = await run(on(GuardedLlm(model, max_usd=0.04, on_stop="stop", **MONEY)))
    assert model.calls == 2
    assert done.events[-1].error_code == "RUNGUARD_STOP"
    trip = runguard.trip(done.events[-1])
    assert trip is not None
    assert trip.rule == "budget"
    assert_calls_answered(done)


# ---- healthy runs are untouched -------------------------------------------------------------------------------------


async def test_a_healthy_run_has_the_same_events() -> None:
    def script(n: int, request: LlmRequest) -> types.Part:
        return call("step", q=n) if n < 4 else text("done")

    bare = await run(on(ScriptedModel(script)))
    guarded = await run(on(GuardedLlm(ScriptedModel(script), max_usd=5, **MONEY)))
    assert told(guarded.events) == told(bare.events)


async def test_a_style_guide_read_in_every_round_is_no_loop() -> None:
    script = [part for n in range(8) for part in (call("step", q=1), text(f"draft {n}"))]
    model = ScriptedModel(script)
    await run(LoopAgent(name="l", sub_agents=[on(GuardedLlm(model))], max_iterations=8))
    assert model.calls == 16


async def test_agents_called_as_tools_side_by_side_are_no_loop() -> None:
    model = ScriptedModel(lambda n, request: text("done") if len(request.contents) > 1 else call("step", q=1))
    inner = GuardedLlm(model)
    ask = [call("inner", request="x") for _ in range(8)]
    outer = ScriptedModel(lambda n, request: calls(*ask) if n == 1 else text("all"))
    done = await run(LlmAgent(name="outer", model=outer, tools=[AgentTool(on(inner, "inner"))]))
    assert model.calls == 16
    assert parts(done.events[-1].content)[0].text == "all"


# ---- one bill -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("usage_on", ["all", "last", "final"])
async def test_a_stream_is_booked_once(usage_on: str) -> None:
    model = ScriptedModel([text("a long answer")], chunks=7, usage_on=usage_on)
    guarded = GuardedLlm(model, max_usd=1, **MONEY)
    await run(on(guarded), run_config=SSE)
    assert (guarded.spend()["calls"], guarded.spend()["usd"]) == (1, Decimal("0.02"))


class Fallback(BaseLlm):
    """Asks one model after the other until one answers."""

    models: list[Any]

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        for model in self.models:
            try:
                async for response in model.generate_content_async(
                    llm_request.model_copy(update={"model": model.model}), stream
                ):
                    yield response
                return
            except ValueError:
                continue


async def test_a_fallback_is_as_many_calls_as_it_makes() -> None:
    broken = [ScriptedModel([ValueError("no")], model=f"scripted-{n}") for n in (2, 3)]
    works = ScriptedModel([text("hi")])
    prices = {f"scripted-{n}": PRICES["scripted-1"] for n in (1, 2, 3)}
    guarded = GuardedLlm(
        Fallback(model="scripted-1", models=[*broken, works]), max_usd=1, **{**MONEY, "prices": prices}
    )
    await run(on(guarded))
    assert guarded.spend()["calls"] == 3
    assert guarded.spend()["reserved_usd"] == 0


@pytest.mark.parametrize("plugins", [0, 1])
async def test_a_guarded_model_inside_of_another_is_guarded(plugins: int) -> None:
    works = ScriptedModel([text("hi")])
    router = Fallback(model="scripted-1", models=[GuardedLlm(works, max_usd="0.01", **MONEY)])
    with pytest.raises(runguard.BudgetExceededError):
        await run(on(router), plugins=[RunGuardPlugin(**MONEY)] * plugins)
    assert works.calls == 0


@pytest.mark.parametrize("store", ["memory", "sqlite"])
async def test_plugin_and_guarded_model_count_a_call_once(store: str, tmp_path: Path) -> None:
    url = "memory" if store == "memory" else f"sqlite:///{tmp_path}/guard.db"
    model = ScriptedModel(lambda n, request: call("step", q=n) if n < 4 else text("done"))
    shared: dict[str, Any] = {"store": url, "store_timeout": 30, "budgets": [Budget(usd=5, per="user")], **MONEY}
    guarded, plugin = GuardedLlm(model, max_usd=1, **shared), RunGuardPlugin(max_usd=1, **shared)
    await run(on(guarded), plugins=[plugin])
    plugin.guard.accounts.ledger.flush(5)
    assert model.calls == 4
    for layer in (plugin, guarded):
        assert (layer.spend()["calls"], layer.spend()["usd"]) == (4, Decimal("0.08"))
        (user,) = [status for status in layer.budgets() if status.scope == "user:app/u1"]
        assert (user.spent, user.reserved) == (Decimal("0.08"), 0)


# ---- what it is -----------------------------------------------------------------------------------------------------


async def test_it_is_a_real_model_by_name_or_instance() -> None:
    by_name = GuardedLlm("gemini-2.5-flash", max_usd=1)
    assert isinstance(by_name, BaseLlm)
    assert by_name.model == "gemini-2.5-flash"
    assert type(by_name.inner).__name__ == "Gemini"
    assert on(by_name).canonical_model is by_name
    assert copy.deepcopy(by_name) is by_name
    assert by_name.model_copy() is not by_name


async def test_without_a_runner_the_model_itself_is_the_run() -> None:
    model = ScriptedModel([text("x")])
    guarded = GuardedLlm(model, max_usd=0.04, **MONEY)
    request = LlmRequest(model="scripted-1", contents=[types.Content(role="user", parts=[text("go")])])
    for _ in range(2):
        assert [response async for response in guarded.generate_content_async(request)]
    for _ in range(2):
        with pytest.raises(runguard.BudgetExceededError):
            _ = [response async for response in guarded.generate_content_async(request)]
    assert model.calls == 2


async def test_cancelled_calls_leave_nothing_reserved() -> None:
    model = ScriptedModel([text("x")], latency_s=5)
    guarded = GuardedLlm(model, max_usd=1, **MONEY)
    task = asyncio.create_task(run(on(guarded)))
    await until_async(lambda: model.calls)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert guarded.spend()["reserved_usd"] == 0
    assert guarded.spend()["estimated_calls"] == 1


@pytest.mark.parametrize("way", ["runner", "model"])
async def test_work_in_the_background_outlives_the_run_that_began_it(way: str) -> None:
    guarded = GuardedLlm(ScriptedModel([call("wait", q=1), text("done")]), budgets=[Budget(calls=9, per="app")])
    has_ended, jobs = asyncio.Event(), list[asyncio.Task[Any]]()
    request = LlmRequest(model="scripted-1", contents=[types.Content(role="user", parts=[text("go")])])

    async def ask_model() -> None:
        for _ in range(2):
            assert [response async for response in guarded.generate_content_async(request)]
            await has_ended.wait()

    async def wait(q: int) -> str:
        await has_ended.wait()
        return "an answer"

    async def start(q: int) -> str:
        inner = LlmAgent(name="inner", model=guarded, tools=[wait])
        jobs.append(asyncio.create_task(run(inner) if way == "runner" else ask_model()))
        await asyncio.sleep(0.05)  # until it has asked its model
        return "It works on it."

    await run(on(ScriptedModel([call("start", q=1), text("done")]), tools=[start]))
    has_ended.set()
    await asyncio.wait_for(jobs.pop(), 10)
    assert (guarded.trips, guarded.guard.guard_errors, guarded.spend()["calls"]) == ([], 0, 2)


async def test_shadow_and_off_let_everything_pass() -> None:
    modes: dict[Literal["shadow", "off"], int] = {"shadow": 1, "off": 0}
    for mode, trips in modes.items():
        model = ScriptedModel([call("step", q=1), call("step", q=2), text("done")])
        guarded = GuardedLlm(model, max_usd=0.02, mode=mode, **MONEY)
        await run(on(guarded))
        assert model.calls == 3
        assert [trip.enforced for trip in guarded.trips] == [False] * trips


def test_what_cannot_be_guarded_is_told_at_once() -> None:
    with pytest.raises(runguard.PolicyError, match="give a model"):
        GuardedLlm(object())  # type: ignore[arg-type]
    with pytest.raises(runguard.PolicyError, match="guarded already"):
        GuardedLlm(GuardedLlm(ScriptedModel([text("x")])))
    with pytest.raises(runguard.PolicyError, match="max_usd"):
        GuardedLlm(ScriptedModel([text("x")]), max_us=1)  # type: ignore[call-arg]
