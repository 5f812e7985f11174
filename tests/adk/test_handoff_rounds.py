"""``cycle_repeats`` on hand-offs: agents that pass the work round in a circle, with the plugin and with a guarded model
alone.
"""

from typing import Any

import pytest
from google.adk.agents import LlmAgent

import runguard
from runguard.adk import GuardedLlm, RunGuardPlugin
from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, run, text, transfer

LIMITS: dict[str, Any] = {"cycle_repeats": 3, "max_cycle_len": 4}  # of the seed document


def dig(n: int) -> dict[str, int]:
    return {"found": n}


def busy(n: int) -> dict[str, str]:
    return {"error": "the archive is busy"}


def pair(script: Any, guarded: dict[str, Any] | None = None) -> tuple[LlmAgent, ScriptedModel]:
    """A triage agent and a specialist that share a model, guarded or not."""
    model = ScriptedModel(script)
    used = model if guarded is None else GuardedLlm(model, **guarded)
    specialist = LlmAgent(name="research_agent", description="knows more", model=used, tools=[dig, busy])
    return LlmAgent(name="triage_agent", model=used, tools=[dig, busy], sub_agents=[specialist]), model


def ping_pong(n: int, _: Any) -> Any:
    return transfer("research_agent" if n % 2 else "triage_agent")


async def test_the_plugin_stops_in_the_third_round() -> None:
    root, model = pair(ping_pong)
    plugin = RunGuardPlugin(**LIMITS)
    result = await run(root, plugins=[plugin])
    assert model.calls == 6
    trip = assert_stopped(result, "cycle")
    assert (trip.observed, trip.limit, trip.unit) == (3, 3, "rounds of hand-offs")
    assert "triage_agent→research_agent→triage_agent" in trip.message
    assert runguard.LoopDetectedError(trip).pattern == ("triage_agent", "research_agent")
    assert_calls_answered(result.session)


async def test_a_guarded_model_names_the_agents() -> None:
    root, model = pair(ping_pong, LIMITS)
    with pytest.raises(runguard.LoopDetectedError) as caught:
        await run(root)
    assert model.calls == 6
    assert (caught.value.pattern, caught.value.repeats) == (("triage_agent", "research_agent"), 3)


def between(tool: str, end: int) -> Any:
    """Each agent calls a tool before it passes the work on."""

    def script(n: int, request: Any) -> Any:
        if n > end:
            return text("done")
        return call(tool, n=n) if n % 2 else ping_pong(n // 2, request)

    return script


@pytest.mark.parametrize("guarded", [None, LIMITS], ids=["plugin", "guarded model"])
async def test_news_between_hand_offs_is_work(guarded: dict[str, Any] | None) -> None:
    root, model = pair(between("dig", 40), guarded)
    plugins = [RunGuardPlugin(**LIMITS)] if guarded is None else []
    result = await run(root, plugins=plugins)
    assert result.texts == ["done"]
    assert model.calls == 41


@pytest.mark.parametrize("guarded", [None, {**LIMITS, "rules": {"stall": False}}], ids=["plugin", "guarded model"])
async def test_a_failure_between_is_no_news(guarded: dict[str, Any] | None) -> None:
    root, model = pair(between("busy", 400), guarded)
    plugins = [RunGuardPlugin(**LIMITS, rules={"stall": False}, on_stop="raise")] if guarded is None else []
    with pytest.raises(runguard.LoopDetectedError) as caught:
        await run(root, plugins=plugins)
    assert caught.value.trip.rule == "cycle"
    assert set(caught.value.pattern) == {"triage_agent", "research_agent"}
    assert model.calls == 12


@pytest.mark.parametrize("guarded", [None, LIMITS], ids=["plugin", "guarded model"])
async def test_one_return_is_normal(guarded: dict[str, Any] | None) -> None:
    root, model = pair(lambda n, request: ping_pong(n, request) if n < 5 else text("done"), guarded)
    result = await run(root, plugins=[RunGuardPlugin(**LIMITS)] if guarded is None else [])
    assert result.texts == ["done"]
    assert model.calls == 5


async def test_stacked_with_the_plugin_only_the_plugin_judges() -> None:
    root, _ = pair(ping_pong, LIMITS)
    plugin = RunGuardPlugin(**LIMITS)
    result = await run(root, plugins=[plugin])
    assert_stopped(result, "cycle")
    assert [trip.rule for trip in plugin.trips] == ["cycle"]
