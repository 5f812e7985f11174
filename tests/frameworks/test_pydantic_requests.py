"""Pydantic AI: what a model request may cost, where other capabilities or other models have a part in it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from pydantic_ai import Agent, ModelHTTPError
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, NativeToolCallPart, TextPart, UserPromptPart
from pydantic_ai.models.fallback import FallbackModel
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.wrapper import WrapperModel
from pydantic_ai.usage import RequestUsage

import runguard
from runguard import Budget
from runguard.pydantic_ai import RunGuard, _usage_of
from tests.frameworks.pydantic_harness import said

BIG = "word " * 8_000
PRICES: Any = {"dear": {"input": 10, "output": 100}, "cheap": {"input": 1, "output": 1}}
LIMITS: Any = {name: {"max_output_tokens": 1_000} for name in PRICES}
Answering = Callable[[], ModelResponse]


def model_of(name: str, answer: Answering | None = None) -> FunctionModel:
    """A model of a name. Without ``answer`` it answers with a hundred tokens."""

    def plain(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        if answer is not None:
            return answer()
        return ModelResponse([TextPart(f"from {name}")], usage=RequestUsage(input_tokens=10, output_tokens=100))

    async def stream(messages: list[ModelMessage], info: AgentInfo) -> Any:
        for part in plain(messages, info).parts:
            assert isinstance(part, TextPart)
            yield part.content

    return FunctionModel(plain, stream_function=stream, model_name=name)


def busy() -> ModelResponse:
    raise ModelHTTPError(503, "dear", None)


def guard_with(**settings: Any) -> RunGuard:
    return RunGuard(**{"max_usd": 1, "prices": PRICES, "models": LIMITS, **settings})


# ---- What other capabilities put into a request.


class Adding(AbstractCapability[Any]):
    """Another capability, which sends more than the history holds."""

    async def before_model_request(self, ctx: Any, request_context: Any) -> Any:
        added = ModelRequest([UserPromptPart(BIG)])
        return replace(request_context, messages=[*request_context.messages[:-1], added])


@pytest.mark.parametrize("is_first", [True, False])
async def test_what_another_capability_adds_is_reserved(is_first: bool) -> None:
    reserved: list[int] = []
    guard = guard_with(prices={"cheap": {"input": 1, "output": 0}})

    def answer() -> ModelResponse:
        reserved.append(int(guard.spend()["reserved_usd"] * 1_000_000))
        return ModelResponse([TextPart("done")])

    capabilities: list[Any] = [guard, Adding()] if is_first else [Adding(), guard]
    await Agent(model_of("cheap", answer), capabilities=capabilities).run("x")
    assert reserved[0] > 10_000


@pytest.mark.parametrize("stream", [False, True])
async def test_a_budget_stops_a_request_that_another_capability_makes_too_large(stream: bool) -> None:
    guard = guard_with(max_usd="0.02", prices={"dear": {"input": 2, "output": 0}})
    made: list[int] = []

    def answer() -> ModelResponse:
        made.append(1)
        return ModelResponse([TextPart("done")])

    agent: Agent[Any, str] = Agent(model_of("dear", answer), capabilities=[guard, Adding()])
    text = await said(agent, "x", stream)
    assert not made
    assert text == guard.guard.stop_text(guard.trips[0])


async def test_the_arguments_of_a_provider_s_own_tool_are_part_of_the_history() -> None:
    reserved: list[int] = []
    guard = guard_with(prices={"cheap": {"input": 1, "output": 0}})

    def answer() -> ModelResponse:
        reserved.append(int(guard.spend()["reserved_usd"] * 1_000_000))
        return ModelResponse([TextPart("done")])

    history: list[ModelMessage] = [
        ModelRequest([UserPromptPart("x")]),
        ModelResponse([NativeToolCallPart("code_execution", {"code": BIG}), TextPart("done")]),
    ]
    await Agent(model_of("cheap", answer), capabilities=[guard]).run("y", message_history=history)
    assert reserved[0] > 10_000


# ---- Models that answer in place of another one.


class Reserving:
    """A guard whose holds are looked at while a model answers."""

    def __init__(self, **settings: Any) -> None:
        self.guard, self.held = guard_with(**settings), list[Decimal]()

    def model(self, name: str, answer: Answering | None = None) -> FunctionModel:
        def look() -> ModelResponse:
            self.held.append(self.guard.spend()["reserved_usd"])
            if answer is not None:
                return answer()
            return ModelResponse([TextPart(name)], usage=RequestUsage(input_tokens=10, output_tokens=100))

        return model_of(name, look)

    async def run(self, model: Any, *more: Any, stream: bool = False) -> str:
        return str(await said(Agent(model, capabilities=[self.guard, *more]), "x", stream))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dear_first", [True, False])
async def test_a_fallback_model_reserves_the_most_expensive_and_pays_for_the_one_that_answers(
    dear_first: bool, stream: bool
) -> None:
    reserving = Reserving()
    names = ("dear", "cheap") if dear_first else ("cheap", "dear")
    fallback = FallbackModel(reserving.model(names[0], busy), WrapperModel(reserving.model(names[1])))
    assert await reserving.run(WrapperModel(fallback), stream=stream) == names[1]
    assert all(Decimal("0.1") < held < Decimal("0.11") for held in reserving.held), "a thousand tokens of the dear one"
    spend = reserving.guard.spend()
    assert spend["by_model"].keys() == {names[1]}
    assert spend["usd"] < Decimal("0.001") if dear_first else spend["usd"] > Decimal("0.0001")
    assert not reserving.guard.trips
    assert spend["reserved_usd"] == 0


async def test_a_fallback_model_with_an_unknown_price_is_refused_by_its_name() -> None:
    reserving = Reserving()
    await reserving.run(FallbackModel(reserving.model("cheap"), reserving.model("nobody-knows-1")))
    assert not reserving.held
    assert [trip.rule for trip in reserving.guard.trips] == ["unpriced"]
    assert "nobody-knows-1" in str(reserving.guard.trips[0])
    assert "fallback:" not in str(reserving.guard.trips[0])


async def test_a_fallback_model_whose_models_are_all_busy_costs_nothing() -> None:
    reserving = Reserving()
    with pytest.raises(ExceptionGroup):
        await reserving.run(FallbackModel(reserving.model("dear", busy), reserving.model("cheap", busy)))
    assert reserving.guard.spend()["usd"] == reserving.guard.spend()["reserved_usd"] == 0


def rejects(response: ModelResponse) -> bool:
    return "bad" in str(response.parts)


def bad() -> ModelResponse:
    return ModelResponse([TextPart("bad")], usage=RequestUsage(input_tokens=10, output_tokens=900))


NEWEST = pytest.mark.skipif(
    not hasattr(ModelResponse([]), "failed_attempts"), reason="this version does not say what failed attempts used"
)


@NEWEST
async def test_an_answer_that_a_fallback_model_rejects_is_paid() -> None:
    reserving = Reserving()
    fallback = FallbackModel(reserving.model("dear", bad), reserving.model("cheap"), fallback_on=rejects)
    assert await reserving.run(fallback) == "cheap"
    assert reserving.guard.spend()["usd"] >= Decimal("0.09")


@NEWEST
@pytest.mark.parametrize("stream", [False, True])
async def test_each_attempt_of_a_fallback_capability_is_asked_for_and_the_one_that_answers_is_paid(
    stream: bool,
) -> None:
    reserving = Reserving()
    fallback: Any = _fallback_capability(reserving.model("cheap"))
    assert await reserving.run(reserving.model("dear", busy), fallback, stream=stream) == "cheap"
    assert [held > Decimal("0.1") for held in reserving.held] == [True, False]
    spend = reserving.guard.spend()
    assert spend["usd"] < Decimal("0.001"), "the busy model billed nothing"
    assert spend["estimated_calls"] == 0
    assert spend["reserved_usd"] == 0


@NEWEST
async def test_an_answer_that_a_fallback_capability_rejects_is_paid_as_it_was_reported() -> None:
    reserving = Reserving()
    fallback: Any = _fallback_capability(reserving.model("cheap"), fallback_on=rejects)
    assert await reserving.run(reserving.model("dear", bad), fallback) == "cheap"
    spend = reserving.guard.spend()
    assert spend["usd"] == Decimal("0.0901") + Decimal("0.00011")
    assert spend["estimated_calls"] == 0


@NEWEST
async def test_a_budget_that_cannot_pay_the_next_attempt_still_pays_the_one_before() -> None:
    reserving = Reserving(max_usd="0.15")
    fallback: Any = _fallback_capability(reserving.model("dear-too"), fallback_on=rejects)
    reserving.guard = guard_with(
        max_usd="0.15",
        prices={**PRICES, "dear-too": PRICES["dear"]},
        models={**LIMITS, "dear-too": LIMITS["dear"]},
        min_output_tokens=1_000,
    )
    await reserving.run(reserving.model("dear", bad), fallback)
    assert len(reserving.held) == 1, "the second model was asked"
    assert [trip.rule for trip in reserving.guard.trips] == ["budget"]
    assert reserving.guard.spend()["usd"] > 0


def _fallback_capability(*models: Any, **given: Any) -> Any:
    from pydantic_ai.capabilities import ModelFallback

    return ModelFallback(*models, **given)


# ---- Two guards.


@pytest.mark.parametrize("stricter", ["first", "second"])
async def test_two_guards_of_an_agent_both_hold_and_book_each_call_once(stricter: str) -> None:
    loose, strict = guard_with(max_model_calls=9), guard_with(max_model_calls=1, on_stop="raise")
    guards: Sequence[RunGuard] = [strict, loose] if stricter == "first" else [loose, strict]
    agent: Agent[Any, str] = Agent(model_of("cheap"), capabilities=list(guards))
    with runguard.run():
        await agent.run("x")
        with pytest.raises(runguard.RunStoppedError):
            await agent.run("x")
    assert [guard.spend()["calls"] for guard in guards] == [1, 1]


async def test_two_guards_with_one_store_book_each_call_once() -> None:
    settings: Any = {"store": "memory://both", "app": "shop", "budgets": [Budget(calls=10, per="app")]}
    guards = [guard_with(**settings) for _ in range(2)]
    await Agent(model_of("cheap"), capabilities=guards).run("x")
    [budget] = guards[0].budgets()
    assert (budget.spent, budget.reserved) == (1, 0)


# ---- What the provider has stored.


@pytest.mark.parametrize(
    ("setting", "is_whole"),
    [("openai_conversation_id", True), ("openai_previous_response_id", True), ("google_cached_content", False)],
)
async def test_what_the_provider_has_stored_is_reserved_after_its_first_answer(setting: str, is_whole: bool) -> None:
    """``is_whole``: the name of the first answer, or of the conversation, brings that answer along."""
    held: list[int] = []

    def large() -> ModelResponse:
        held.append(int(guard.spend()["reserved_usd"] * 1_000_000))
        usage = RequestUsage(input_tokens=50_000, output_tokens=1_000)
        return ModelResponse([TextPart("done")], usage=usage, provider_response_id=f"{setting}-answer")

    guard = guard_with(prices={"cheap": {"input": 1, "output": 0}})
    agent = Agent(model_of("cheap", large), capabilities=[guard])
    for name in ("base", "answer" if setting == "openai_previous_response_id" else "base", "base"):
        settings: Any = {setting: f"{setting}-{name}"}
        await agent.run("go", model_settings=settings)
    assert held[0] < 100, "nothing is known before the first answer"
    assert (51_000 if is_whole else 49_900) <= held[1] < 51_100
    assert 49_900 <= held[2] < 51_100


def test_what_a_cache_keeps_for_an_hour_costs_twice_the_input_price() -> None:
    details = {"ephemeral_1h_input_tokens": 200, "compaction_ephemeral_1h_input_tokens": 50}
    usage = _usage_of(RequestUsage(input_tokens=1000, output_tokens=5, cache_write_tokens=300, details=details))
    assert usage is not None
    assert (usage.cache_write, usage.cache_write_1h) == (300, 250)
