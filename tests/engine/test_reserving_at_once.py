"""A call that fits its budgets is reserved without waiting, exactly as one that goes the long way."""

from typing import Any

import pytest

from runguard.core.events import ModelCall, RunInfo
from runguard.engine.guard import Guard
from runguard.policy.settings import Policy

PRICES = {"m": {"input": 1, "output": 4}}


def opened(**policy: Any) -> Guard:
    guard = Guard(Policy(prices=PRICES, telemetry=False, **policy))
    guard.start(RunInfo("run", "app", "u", "s"))
    return guard


def call(model: str = "m", **more: Any) -> ModelCall:
    return ModelCall("run", "", "agent", 1.0, model, input_tokens=1_000, **more)


@pytest.mark.parametrize(
    ("policy", "more"),
    [
        pytest.param({}, {}, id="no budget"),
        pytest.param({"max_usd": 1}, {"max_output_tokens": 500}, id="limit of the request"),
        pytest.param({"max_usd": 1}, {}, id="limit of the model"),
        pytest.param({"max_tokens": 200_000}, {}, id="tokens"),
        pytest.param({"max_usd": 1}, {"max_output_tokens": 500, "candidates": 3}, id="several candidates"),
    ],
)
async def test_what_is_reserved_is_the_same(
    monkeypatch: pytest.MonkeyPatch, policy: dict[str, Any], more: dict[str, Any]
) -> None:
    waits, at_once = opened(**policy), opened(**policy)
    one, other = call(**more), call(**more)
    monkeypatch.setattr(waits.accounts.ledger, "hold_now", lambda *_: None)
    assert not await waits.reserve(one)
    assert not await at_once.reserve(other)
    for name in ("held", "max_output", "limited", "lowered", "input", "candidates"):
        assert getattr(other.charge, name) == getattr(one.charge, name), name
    assert at_once.runs["run"].run_costs.reserved == waits.runs["run"].run_costs.reserved
    assert [a.held for a in other.charge.lines.accounts] == [a.held for a in one.charge.lines.accounts]


@pytest.mark.parametrize(
    ("policy", "model"),
    [
        pytest.param({"max_usd": 1}, "a-model-without-a-price", id="no price"),
        pytest.param({"max_usd": "0.001"}, "m", id="too expensive"),
        pytest.param({"max_tokens": 1_000}, "m", id="too many tokens"),
    ],
)
async def test_a_call_that_may_be_refused_is_decided_in_full(policy: dict[str, Any], model: str) -> None:
    guard = opened(**policy)
    event = call(model)
    decision = await guard.reserve(event)
    assert decision.action.name == "STOP"
    assert event.charge is None
    assert guard.runs["run"].run_costs.reserved == 0
