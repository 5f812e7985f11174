"""RunGuard on Google ADK: a plugin, a one-line install, a guarded model, and a breaker per agent."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.adk.budget_plugin import BudgetPlugin
    from runguard.adk.cost_breaker import ADKCostBreaker
    from runguard.adk.guarded_llm import GuardedLlm
    from runguard.adk.plugin import RunGuardPlugin
    from runguard.adk.runner import install, uninstall
    from runguard.adk.termination import TerminationPlugin, terminate
    from runguard.termination.conditions import termination_reason

_HOMES = {
    "ADKCostBreaker": "runguard.adk.cost_breaker",
    "BudgetPlugin": "runguard.adk.budget_plugin",
    "GuardedLlm": "runguard.adk.guarded_llm",
    "install": "runguard.adk.runner",
    "uninstall": "runguard.adk.runner",
    "RunGuardPlugin": "runguard.adk.plugin",
    "TerminationPlugin": "runguard.adk.termination",
    "terminate": "runguard.adk.termination",
    "termination_reason": "runguard.termination.conditions",
}

__all__ = [
    "ADKCostBreaker",
    "BudgetPlugin",
    "GuardedLlm",
    "RunGuardPlugin",
    "TerminationPlugin",
    "install",
    "terminate",
    "termination_reason",
    "uninstall",
]

__getattr__, __dir__ = lazy(__name__, _HOMES)


def _is_missing(package: str) -> bool:
    try:
        return find_spec(package) is None
    except (ImportError, ValueError):  # its parent is missing, or it was blocked
        return True


if _is_missing("google.adk"):
    raise ImportError(
        "runguard.adk needs google-adk, which is not installed: pip install 'runguard-agents[adk]'. "
        "Other frameworks have guards of their own: runguard.langchain, runguard.openai_agents, runguard.pydantic_ai, "
        "runguard.strands, runguard.agent_framework. runguard.guard is for any function"
    )
