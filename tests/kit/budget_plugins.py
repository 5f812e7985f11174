"""Models and helpers for the tests of BudgetPlugin."""

from google.adk.models.llm_response import LlmResponse
from google.genai import types

from runguard.adk.budget_plugin import BudgetPlugin
from runguard.engine.token_budget import BudgetMonitor, BudgetPolicy

CALL = 1_250  # what one call of a scripted model costs


def stops_at(calls: int) -> BudgetPolicy:
    return BudgetPolicy(calls * CALL).with_threshold(1.0, action="stop")


def of(plugin: BudgetPlugin, user: str = "u1", session: str = "s1") -> BudgetMonitor:
    return plugin.monitor_for(app_name="app", user_id=user, session_id=session)


def says(**counts: int) -> LlmResponse:
    usage = types.GenerateContentResponseUsageMetadata(
        **{f"{name}_token_count": count for name, count in counts.items()}
    )
    return LlmResponse(content=types.Content(role="model", parts=[types.Part(text="x")]), usage_metadata=usage)
