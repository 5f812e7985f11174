"""A budget that switches to a cheaper model, on real ADK."""

import logging
from decimal import Decimal
from typing import Any

import pytest
from google.adk.agents import LlmAgent, SequentialAgent
from google.adk.models.llm_response import LlmResponse
from google.genai import types

from runguard import Budget, PolicyError, Threshold
from runguard.adk import GuardedLlm, RunGuardPlugin
from runguard.testing import FakeClock, ScriptedModel, call, text
from tests.kit.adk_runs import Observed, observe, play
from tests.kit.examples import each_row
from tests.kit.rule_agents import Tool, agent

# With 1,000 prompt and 250 output tokens a call of the large model costs $0.02, one of the small model $0.002.
PRICES = {"big-1": {"input": 10, "output": 40, "cached": 1}, "small-1": {"input": 1, "output": 4}}
MODELS = {
    "big-1": {"context_window": 100_000, "max_output_tokens": 250},
    "small-1": {"context_window": 20_000, "max_output_tokens": 250},
}
SIZES: dict[str, Any] = {"prices": PRICES, "models": MODELS, "tokens": lambda request: 1_000}


class Family(ScriptedModel):
    """Two models of one class."""

    @classmethod
    def supported_models(cls) -> list[str]:
        return ["big-.*", "small-.*"]


def steps(until: int = 10**9) -> Any:
    return lambda n, _: call("work", q=n) if n < until else text("done")


def worker(script: Any = None, **options: Any) -> tuple[LlmAgent, Family]:
    model = Family(script or steps(11), model="big-1", **options)  # type: ignore[misc]
    return agent(model, Tool("work", lambda n: {"done": n})), model


def budget(usd: str = "0.10", *thresholds: Threshold, **options: Any) -> Budget:
    return Budget(usd=usd, thresholds=thresholds or [Threshold(0.5, model="small-1")], **options)


def used(model: ScriptedModel) -> list[str]:
    return [str(request.model) for request in model.requests]


def switches(seen: Observed) -> list[str]:
    return [d.finding.detail for d in seen.decisions if d.finding is not None and d.finding.rule == "downgrade"]


async def test_a_run_finishes_on_the_cheaper_model(caplog: pytest.LogCaptureFixture) -> None:
    root, model = worker()
    with caplog.at_level(logging.WARNING, "runguard"):
        seen = await observe(root, budgets=[budget()], **SIZES)
    assert used(model) == ["big-1"] * 3 + ["small-1"] * 8, "three calls of $0.02 pass half of the budget"
    assert seen.result.texts == ["done"]
    assert not seen.plugin.trips
    bill = seen.plugin.spend()
    assert {name: figures["calls"] for name, figures in bill["by_model"].items()} == {"big-1": 3, "small-1": 8}
    assert (bill["usd"], bill["reserved_usd"]) == (Decimal("0.076"), 0)
    (said,) = switches(seen)
    assert "50% of the budget of run:" in said
    assert "agent worker is switched from big-1 to small-1" in said
    assert [r.getMessage() for r in caplog.records if r.getMessage().startswith("runguard.model_switch: ")] == [
        f"runguard.model_switch: {said}"
    ]


async def test_below_the_threshold_nothing_changes() -> None:
    root, model = worker()
    seen = await observe(root, budgets=[budget("1.00")], **SIZES)
    assert used(model) == ["big-1"] * 11
    assert switches(seen) == []


async def test_the_reservation_has_the_price_of_the_model_that_answers() -> None:
    """After the fifth call exactly the price of five small calls is left."""
    root, model = worker(steps(100))
    plugin = RunGuardPlugin(budgets=[budget("0.11")], **{**SIZES, "tokens": lambda request: 800})
    await play(root, plugins=[plugin])
    assert used(model).count("small-1") == 25
    assert plugin.spend()["usd"] == Decimal("0.11")
    assert [trip.rule for trip in plugin.trips] == ["budget"]


async def test_shadow_mode_reports_and_switches_nothing() -> None:
    root, model = worker()
    seen = await observe(root, mode="shadow", budgets=[budget()], **SIZES)
    assert used(model) == ["big-1"] * 11
    (said,) = switches(seen)
    assert "agent worker would be switched from big-1 to small-1" in said


async def test_only_the_named_agents_are_switched() -> None:
    models = [Family([text("done")], model="big-1") for _ in range(3)]  # type: ignore[misc]
    team = [
        LlmAgent(name=name, model=model)
        for name, model in zip(("writer", "research_a", "research_b"), models, strict=True)
    ]
    seen = await observe(
        SequentialAgent(name="team", sub_agents=[team[0], team[1], team[2]]),
        budgets=[budget("0.10", Threshold(0.1, model="small-1", agents=["*_b"]))],
        **SIZES,
    )
    assert [used(model) for model in models] == [["big-1"], ["big-1"], ["small-1"]]
    assert len(switches(seen)) == 1


async def test_the_next_window_brings_the_agent_back() -> None:
    clock = FakeClock()
    plugin = RunGuardPlugin(budgets=[budget("0.10", per="user", window="1h")], clock=clock, **SIZES)
    names = []
    for _ in range(2):
        root, model = worker(steps(5))
        await play(root, plugins=[plugin])
        names.append(used(model))
        clock.advance(3_600)
    assert names == [["big-1"] * 3 + ["small-1"] * 2] * 2


async def test_an_extension_brings_the_agent_back_within_the_run() -> None:
    def script(n: int, request: Any) -> Any:
        if n == 5:
            plugin.extend(plugin.budgets()[0].scope, usd=1)
        return call("work", q=n) if n < 7 else text("done")

    said: list[Any] = []
    plugin = RunGuardPlugin(budgets=[budget()], on_decision=said.append, **SIZES)
    root, model = worker(script)
    await play(root, plugins=[plugin])
    assert used(model) == ["big-1"] * 3 + ["small-1"] * 2 + ["big-1"] * 2
    assert plugin.flush()
    found = [d.finding.detail for d in said if d.finding.rule == "downgrade"]
    assert found[-1] == "agent worker is back on big-1"


def cached(prompt: int, of_it: int, part: types.Part) -> LlmResponse:
    usage = types.GenerateContentResponseUsageMetadata(
        prompt_token_count=prompt,
        candidates_token_count=10,
        cached_content_token_count=of_it,
        total_token_count=prompt + 10,
    )
    return LlmResponse(content=types.Content(role="model", parts=[part]), usage_metadata=usage)


async def test_a_switch_that_loses_a_large_cache_is_refused_once() -> None:
    """9,900 of 10,000 tokens at $1 per million are cheaper than 10,000 at $2."""
    root, model = worker(lambda n, _: cached(10_000, 9_900, call("work", q=n) if n < 9 else text("done")))
    prices = {**PRICES, "small-1": {"input": 2, "output": 4}}
    sizes = {**SIZES, "prices": prices, "tokens": lambda request: 10_000}
    seen = await observe(root, budgets=[budget("0.40", Threshold(0.05, model="small-1"))], **sizes)
    assert used(model) == ["big-1"] * 9
    (said,) = switches(seen)
    assert "agent worker stays on big-1: the next call, about 10,000 prompt tokens, 9,900 of them cached, costs" in said


async def test_a_prompt_that_does_not_fit_stays() -> None:
    root, model = worker(steps(6))
    sizes = {**SIZES, "tokens": lambda request: 30_000}
    seen = await observe(root, budgets=[budget("10", Threshold(0.001, model="small-1"))], **sizes)
    assert set(used(model)) == {"big-1"}
    (said,) = switches(seen)
    assert "30,000 tokens do not fit into the window of small-1" in said


async def test_a_class_that_does_not_list_the_model_stays() -> None:
    model = ScriptedModel(steps(6), model="big-1")
    seen = await observe(agent(model, Tool("work", lambda n: {"done": n})), budgets=[budget()], **SIZES)
    assert set(used(model)) == {"big-1"}
    (said,) = switches(seen)
    assert "ScriptedModel does not list small-1" in said


async def test_no_switch_while_a_call_is_open() -> None:
    """Two requests come without the answers of their last calls: the switch waits."""
    root, model = worker(steps(8))

    class Dropping(RunGuardPlugin):
        async def before_model_callback(self, *, callback_context: Any, llm_request: Any) -> Any:
            if model.calls in (3, 4):
                llm_request.contents = llm_request.contents[:-1]
            return await super().before_model_callback(callback_context=callback_context, llm_request=llm_request)

    plugin = Dropping(budgets=[budget("0.20", Threshold(0.25, model="small-1"))], **SIZES)
    await play(root, plugins=[plugin])
    assert used(model) == ["big-1"] * 5 + ["small-1"] * 3


@each_row(
    ("options", "message"),
    [
        ({"thresholds": [Threshold(0.8, model="small-2")]}, "model 'small-2' has no price"),
        ({"thresholds": [{"percent": 0.8, "model": "tiny-1"}]}, "its context window is not known"),
        ({"thresholds": [Threshold(0.8, model="big-1")], "per": "model:small-1"}, "it is not cheaper than 'small-1'"),
        (
            {"thresholds": [Threshold(0.5, model="small-1"), Threshold(0.8, model="big-1")]},
            "it is not cheaper than 'small-1'",
        ),
    ],
)
def test_invalid_models_are_rejected_at_construction(options: dict[str, Any], message: str) -> None:
    prices = {**PRICES, "tiny-1": {"input": 1, "output": 1}}
    with pytest.raises(PolicyError, match=message):
        RunGuardPlugin(budgets=[Budget(usd=1, **options)], prices=prices, models=MODELS)


def test_invalid_thresholds_are_rejected() -> None:
    for wrong in ({"action": "stop", "model": "x"}, {"agents": ["a"]}, {"model": ""}, {"model": "x", "agents": "a"}):
        with pytest.raises(PolicyError):
            Threshold(0.8, **wrong)


def test_a_guarded_model_rejects_the_setting() -> None:
    with pytest.raises(PolicyError, match="the model cannot be switched here"):
        GuardedLlm(Family([text("done")], model="big-1"), budgets=[budget()], prices=PRICES, models=MODELS)  # type: ignore[misc]


async def test_a_last_answer_comes_from_the_cheaper_model() -> None:
    """The price of the last answer is held at the first model's price, and paid at that of the model that answers."""

    def script(n: int, request: Any) -> Any:
        return call("work", q=n) if request.config.tools else text("what I have")

    root, model = worker(script)
    plugin = RunGuardPlugin(
        budgets=[budget("0.16", Threshold(0.25, model="small-1"))], final_answer=True, min_output_tokens=250, **SIZES
    )
    result = await play(root, plugins=[plugin])
    assert result.texts == ["what I have"]
    assert used(model)[-1] == "small-1"
    assert plugin.spend()["usd"] <= Decimal("0.16")
    assert plugin.spend()["reserved_usd"] == 0
    assert [trip.rule for trip in plugin.trips] == ["budget"]
