"""No adapter does more in a late step of a run than in an early one, whatever the history holds."""

from importlib import import_module
from typing import Any

import pytest

from runguard.testing.conformance import MODEL
from tests.kit.work import work_of_steps

HARNESSES = [
    ("adk", "AdkHarness"),
    ("langchain", "LangChainHarness"),
    ("openai", "OpenAIAgentsHarness"),
    ("pydantic", "PydanticAIHarness"),
    ("strands", "StrandsHarness"),
    ("agent_framework", "AgentFrameworkHarness"),
]
PRICES = {MODEL: {"input": 1.0, "output": 4.0}}


@pytest.mark.parametrize("more", [{}, {"tools": {"look_up": {"once": True}}}], ids=["plain", "once"])
@pytest.mark.parametrize(("module", "name"), HARNESSES)
async def test_a_late_step_costs_what_an_early_one_costs(module: str, name: str, more: dict[str, Any]) -> None:
    try:
        harness = getattr(import_module(f"tests.frameworks.{module}_harness"), name)()
    except ImportError:
        pytest.skip("not among the oldest supported frameworks")
    guard = harness.guard(max_usd=1_000, max_model_calls=1_000, prices=PRICES, **more)
    work = await work_of_steps(harness, (15, 90), guard)
    assert 0 < work[90].instructions <= 1.05 * work[15].instructions
    assert work[90].calls <= work[15].calls + 2
