"""Calls with exact prices: a standard call has 1,000 prompt and 250 output tokens and costs $0.02."""

from collections.abc import Iterator
from contextlib import contextmanager
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

_watched: list[tuple[RunGuardPlugin, bool]] = []


@contextmanager
def looked_through() -> Iterator[None]:
    """Look through the guards of a test when it is over: nothing is reserved, and all that was spent is booked."""
    _watched.clear()
    yield
    guards = list(_watched)
    _watched.clear()
    for plugin, has_faults in guards:
        assert_nothing_reserved(plugin, has_faults=has_faults)


def watched(plugin: RunGuardPlugin, *, has_faults: bool = False) -> RunGuardPlugin:
    """Have a guard looked through at the end of its test."""
    _watched.append((plugin, has_faults))
    return plugin


def guard(*, has_faults: bool = False, **policy: Any) -> RunGuardPlugin:
    """The test price list, a counter that makes the worst case of a call what it really costs, and an account that
    outlives the runs.
    """
    budgets = [*policy.pop("budgets", ()), Budget(usd=FAR_AWAY, per="app", window="month")]
    return watched(
        RunGuardPlugin(
            **{"prices": PRICES, "tokens": lambda request: 1_000, "clock": FakeClock(), "budgets": budgets, **policy}
        ),
        has_faults=has_faults,
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


def assert_nothing_reserved(plugin: RunGuardPlugin, *, has_faults: bool = False) -> None:
    """Every reservation was released or booked, and the amount booked is the amount spent."""
    assert plugin.spend()["reserved_usd"] == 0
    assert [status for status in plugin.budgets() if status.reserved] == []
    spent = plugin.spend("app:app")["usd"]
    booked = [status.spent for status in plugin.budgets("app:app") if status.window == "month"]
    assert booked == [spent] or (booked, spent) == ([], 0)
    assert plugin.snapshot()["runs"] == []
    assert has_faults is (plugin.snapshot()["guard_errors"] > 0)
