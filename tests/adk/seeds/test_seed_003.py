"""Seed 003, a cumulative token budget: its samples with ``from runguard import`` in place of ``from adk_fluent
import``.

The agents are ADK's own, because the seed's fluent builders belong to another package. ``H.budget_policy(n)`` is
``BudgetPolicy(n)``.
"""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from google.adk.agents import LlmAgent

from runguard import BudgetMonitor, BudgetPlugin, BudgetPolicy, CompressionTriggered, Threshold
from runguard.testing import ScriptedModel, call, run, text

CALL = 1_250  # tokens of one call of a scripted model


def look(n: int) -> dict[str, int]:
    """Look."""
    return {"n": n}


def model() -> ScriptedModel:
    return ScriptedModel([call("look", n=1), call("look", n=2), text("done")])


async def test_manual_wiring(capsys: pytest.CaptureFixture[str]) -> None:
    compressed: list[int] = []
    monitor = BudgetMonitor(max_tokens=3_000)
    monitor.on_threshold(0.8, lambda m: print(f"warn: {m.utilization:.0%} used"))
    monitor.on_threshold(0.95, lambda m: compressed.append(m.current_tokens))
    agent = LlmAgent(
        name="coder",
        instruction="You are a senior engineer.",
        model=model(),
        tools=[look],
        after_model_callback=monitor.after_model_hook(),
    )
    await run(agent)
    assert capsys.readouterr().out == "warn: 83% used\n"
    assert compressed == [3 * CALL]
    assert monitor.summary() == {
        "max_tokens": 3_000,
        "current_tokens": 3_750,
        "utilization": 1.0,
        "turns": 3,
        "avg_per_turn": 1_250.0,
        "remaining": 0,
        "est_turns_remaining": 0,
        "thresholds_fired": 2,
    }


async def test_a_policy_and_a_plugin_for_a_whole_tree() -> None:
    warned: list[str] = []
    policy = (
        BudgetPolicy(4 * CALL)
        .with_threshold(0.5, lambda m: warned.append("warn"))
        .with_threshold(0.95, lambda m: warned.append("compress"))
    )
    plugin = BudgetPlugin(policy)
    helper = LlmAgent(name="helper", mode="single_turn", description="Helps.", model=ScriptedModel([text("helped")]))
    coordinator = LlmAgent(
        name="coordinator",
        model=ScriptedModel([call("helper", request="help"), call("look", n=1), text("done")]),
        tools=[look],
        sub_agents=[helper],
    )
    await run(coordinator, plugins=[plugin])
    assert plugin.monitor.summary()["current_tokens"] == 4 * CALL
    assert warned == ["warn", "compress"]


def test_a_threshold_and_a_policy_are_values() -> None:
    threshold = Threshold(percent=0.8, callback=print, recurring=False)
    with pytest.raises(AttributeError):
        threshold.percent = 0.9  # type: ignore[misc]
    for wrong in (0.0, 1.1):
        with pytest.raises(ValueError, match="percent"):
            Threshold(percent=wrong, callback=print)
    policy = BudgetPolicy(max_tokens=200_000, thresholds=())
    assert policy.with_threshold(0.8, print).thresholds != policy.thresholds == ()
    assert hash(policy) == hash(BudgetPolicy())
    assert policy.build_monitor() is not policy.build_monitor()


def test_the_members_of_a_monitor() -> None:
    events: list[Any] = []
    fired: list[str] = []
    monitor = BudgetMonitor(max_tokens=100).with_bus(SimpleNamespace(emit=events.append))
    monitor.on_threshold(0.5, lambda m: fired.append("once")).add_threshold(
        Threshold(0.5, lambda m: fired.append("always"), recurring=True)
    )
    monitor.on_threshold(0.6, lambda m: 1 / 0)  # a callback that fails breaks nothing
    monitor.record_usage(30, 30)
    monitor.record_usage(10, 0)
    assert fired == ["once", "always", "always"]
    assert (monitor.max_tokens, monitor.current_tokens, monitor.remaining, monitor.utilization) == (100, 70, 30, 0.7)
    assert (monitor.turn_count, monitor.avg_tokens_per_turn, monitor.thresholds_fired()) == (2, 35.0, 3)
    assert all(isinstance(event, CompressionTriggered) for event in events)
    monitor.adjust(20)
    assert (monitor.current_tokens, monitor.thresholds_fired()) == (20, 0)
    monitor.reset()
    assert (monitor.current_tokens, monitor.turn_count) == (0, 0)


def test_the_testing_sample() -> None:
    fired: list[float] = []
    policy = BudgetPolicy(
        max_tokens=100,
        thresholds=(Threshold(percent=0.5, callback=lambda m: fired.append(m.utilization)),),
    )
    plugin = BudgetPlugin(policy)

    asyncio.run(
        plugin.after_model_callback(
            callback_context=None,
            llm_response=SimpleNamespace(  # type: ignore[arg-type]
                usage_metadata=SimpleNamespace(
                    prompt_token_count=30,
                    candidates_token_count=30,
                )
            ),
        )
    )
    assert fired == [0.6]
    assert plugin.monitor.current_tokens == 60


# ---- the package that the seed describes ----------------------------------------------------------------------------


@pytest.fixture
def event_bus() -> Any:
    """The event bus of adk-fluent, which the newest development environment has."""
    module = pytest.importorskip("adk_fluent._harness._event_bus", reason="adk-fluent is not installed here")
    return module.EventBus(max_buffer=10)


def test_the_real_event_bus_gets_each_threshold(event_bus: Any) -> None:
    heard: list[Any] = []
    event_bus.on("compression_triggered", heard.append)
    monitor = BudgetMonitor(max_tokens=100).with_bus(event_bus)
    monitor.on_threshold(0.5, lambda m: None).on_threshold(0.9, lambda m: None)
    monitor.record_usage(30, 30)
    monitor.record_usage(40, 0)
    assert [(event.kind, event.token_count, event.threshold) for event in heard] == [
        ("compression_triggered", 60, 50),
        ("compression_triggered", 100, 90),
    ]
    assert monitor.callback_errors == 0


def test_defaults_are_those_of_the_seed() -> None:
    assert BudgetPlugin(BudgetPolicy()).name == "adkf_budget_plugin"
    assert BudgetMonitor().estimated_turns_remaining == 0
    assert BudgetMonitor().summary()["est_turns_remaining"] == 0
    assert CompressionTriggered(1, 2).kind == "compression_triggered"


def test_anything_but_a_policy_or_a_monitor_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="policy_or_monitor = 'not a policy'"):
        BudgetPlugin("not a policy")  # type: ignore[arg-type]
