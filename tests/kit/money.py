"""Calls with exact prices: a standard call has 1,000 prompt and 250 output tokens and costs $0.02."""

from decimal import Decimal
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.genai import types

from runguard import Budget
from runguard.adk import RunGuardPlugin
from runguard.testing import FakeClock

CALL_USD = Decimal("0.02")
CALL_TOKENS = 1_250
FAR_AWAY = Decimal(1_000_000)
PRICES = {"scripted-1": {"input": 10, "output": 40}}
SSE = RunConfig(streaming_mode=StreamingMode.SSE)


def guard(**policy: Any) -> RunGuardPlugin:
    """The test price list, a counter that makes the worst case of a call what it really costs, and an account that
    outlives the runs.
    """
    budgets = [*policy.pop("budgets", ()), Budget(usd=FAR_AWAY, per="app", window="month")]
    return RunGuardPlugin(
        **{"prices": PRICES, "tokens": lambda request: 1_000, "clock": FakeClock(), "budgets": budgets, **policy}
    )


def agent(name: str, model: Any, *, max_output: int | None = 250, **options: Any) -> LlmAgent:
    """An agent whose calls cost at most what they really cost."""
    return LlmAgent(
        name=name,
        model=model,
        generate_content_config=types.GenerateContentConfig(max_output_tokens=max_output),
        **options,
    )


def figures(plugin: Any) -> tuple[int, int, Decimal]:
    """Calls, how many of them are estimates, and dollars."""
    spent = plugin.spend()
    return spent["calls"], spent["estimated_calls"], spent["usd"]


def assert_nothing_reserved(plugin: RunGuardPlugin) -> None:
    """Every reservation was released or booked, and the amount booked is the amount spent."""
    assert plugin.spend()["reserved_usd"] == 0
    assert [status for status in plugin.budgets() if status.reserved] == []
    spent = plugin.spend("app:app")["usd"]
    booked = [status.spent for status in plugin.budgets("app:app") if status.window == "month"]
    assert booked == [spent] or (booked, spent) == ([], 0)
    assert plugin.snapshot()["runs"] == []
    assert plugin.snapshot()["guard_errors"] == 0
