"""A framework passes on figures that cannot be true: the call is booked as an estimate."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from runguard.langchain.messages import usage_of
from runguard.providers.usage import checked_usage
from runguard.testing.conformance import MODEL, AgentSpec, Harness, Reply
from tests.frameworks.harnesses import beside_adk
from tests.frameworks.langchain_harness import LangChainHarness
from tests.frameworks.openai_harness import OpenAIAgentsHarness
from tests.frameworks.pydantic_harness import PydanticAIHarness

PRICES: Any = {MODEL: {"input": 1.0, "output": 1.0}}


async def _spent(harness: Harness, reply: Reply) -> dict[str, Any]:
    guard = harness.guard(max_usd=1, prices=PRICES)
    result = await harness.session(AgentSpec(lambda n, _: reply), guard).turn("go")
    assert (result.text, result.error) == ("done", None)
    guard.budgets()
    guard.snapshot()
    assert guard.guard.guard_errors == 0
    return guard.spend()


@pytest.mark.parametrize(
    ("harness", "figure"),  # the classes of the other two reject NaN and fractions themselves
    [
        pytest.param(LangChainHarness(), -500, id="langchain"),
        pytest.param(OpenAIAgentsHarness(), -500, id="openai"),
        pytest.param(PydanticAIHarness(), -500, id="pydantic"),
        pytest.param(PydanticAIHarness(), math.nan, id="pydantic-nan"),
        pytest.param(PydanticAIHarness(), 2.5, id="pydantic-fraction"),
    ],
)
async def test_figures_that_cannot_be_true_are_estimated(harness: Harness, figure: Any) -> None:
    spent = await _spent(harness, Reply("done", input_tokens=figure, output_tokens=figure))
    assert spent["estimated_calls"] == 1
    assert spent["input_tokens"] > 0
    assert spent["output_tokens"] > 0


@beside_adk
async def test_output_without_input_has_its_input_estimated(harness: Harness) -> None:
    spent = await _spent(harness, Reply("done", input_tokens=0, output_tokens=7))
    assert (spent["output_tokens"], spent["estimated_calls"]) == (7, 1)
    assert spent["input_tokens"] > 0


@beside_adk
async def test_input_without_output_has_its_output_estimated(harness: Harness) -> None:
    spent = await _spent(harness, Reply("done", input_tokens=7, output_tokens=0))
    assert (spent["input_tokens"], spent["estimated_calls"]) == (7, 1)
    assert spent["output_tokens"] > 0


@pytest.mark.parametrize(
    "report", [{"output_tokens": 5}, {"input_tokens": -3, "output_tokens": 5}, {"input_tokens": "3"}]
)
def test_langchain_reports_are_read_without_a_fault(report: Any) -> None:
    message: Any = SimpleNamespace(usage_metadata=report)
    usage = checked_usage(usage_of(message))
    assert usage is None or (usage.input, usage.output) == (0, 5)
