"""What the end user reads after a stop: one text, texts by rule, or a function of the trip."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent

import runguard
from runguard import Budget, PolicyError, Trip
from runguard.adk import RunGuardPlugin
from runguard.core.decision import STOPPING_RULES
from runguard.policy import Policy
from runguard.policy.settings import RULES
from runguard.testing import ScriptedModel, call, run

PRICED: dict[str, Any] = {"prices": {"scripted-1": {"input": 0, "output": 100}}}
MODELS: dict[str, Any] = {"models": {"scripted-1": {"max_output_tokens": 100}}}
DAILY = Budget(usd=0.02, per="app", window="1d")


async def stopped(**policy: Any) -> tuple[Trip, str]:
    """The trip of a run without end, and what its user reads."""
    plugin = RunGuardPlugin(**PRICED, **MODELS, **policy)

    def look(n: int) -> dict[str, int]:
        return {"page": n}

    agent = LlmAgent(name="solo", model=ScriptedModel(lambda n, _: call("look", n=n)), tools=[look])
    result = await run(agent, "go", plugins=[plugin])
    (event,) = [event for event in result.events if runguard.trip(event) is not None]
    trip = runguard.trip(event)
    assert trip is not None
    return trip, event.error_message or ""


async def test_a_spent_window_says_when_it_opens_again() -> None:
    trip, text = await stopped(budgets=[DAILY])
    assert trip.resets_at is not None
    opens = datetime.fromtimestamp(trip.resets_at, UTC)
    assert (opens.hour, opens.minute) == (0, 0)
    assert text == (
        f"I stopped because the allowance for this period is used up. It starts again at {opens:%Y-%m-%d %H:%M} UTC."
    )
    assert Trip.from_dict(trip.to_dict()).resets_at == trip.resets_at


async def test_a_budget_without_a_window_names_no_time() -> None:
    trip, text = await stopped(max_usd=0.02)
    assert trip.resets_at is None
    assert text == "I stopped because this request reached a safety limit."


async def test_a_function_of_the_trip() -> None:
    trip, text = await stopped(budgets=[DAILY], stop_text=lambda trip: f"{trip.rule} until {trip.resets_at:.0f}")
    assert trip.resets_at is not None
    assert text == f"budget until {trip.resets_at:.0f}"


@pytest.mark.parametrize("broken", [lambda trip: 1 / 0, lambda trip: None, lambda trip: 5, lambda: "no argument"])
async def test_a_function_that_gives_no_text_leaves_the_built_in_one(broken: Any) -> None:
    _, text = await stopped(max_model_calls=2, stop_text=broken)
    assert text == "I stopped because this request reached a safety limit."


async def test_texts_by_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runguard.toml").write_text('[stop_text]\nbudget = "Come back tomorrow."\ndefault = "Sorry."\n')
    monkeypatch.chdir(tmp_path)
    assert (await stopped(budgets=[DAILY]))[1] == "Come back tomorrow."
    assert (await stopped(max_model_calls=2))[1] == "Sorry."


def test_mistakes() -> None:
    for wrong in ("", 5, {"budget": ""}, {"budget": 5}, ["text"]):
        with pytest.raises(PolicyError, match="stop_text"):
            Policy.validated({"stop_text": wrong}, "keywords")
    assert Policy.validated({"stop_text": lambda trip: ""}, "keywords").digest


def test_a_mistyped_rule_is_no_text_that_nobody_reads() -> None:
    with pytest.raises(PolicyError, match=r"stop_text.*no such rule: 'bugdet'; did you mean 'budget'\?"):
        Policy.validated({"stop_text": {"bugdet": "Sorry."}}, "keywords")
    Policy.validated({"stop_text": dict.fromkeys((*STOPPING_RULES, "default"), "Sorry.")}, "keywords")


def test_every_rule_may_have_a_text() -> None:
    assert set(RULES) <= set(STOPPING_RULES)
