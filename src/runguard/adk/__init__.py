"""RunGuard on Google ADK: a plugin, a one-line install, a guarded model, and a breaker per agent."""

from typing import TYPE_CHECKING, Any

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.adk.breaker import ADKCostBreaker
    from runguard.adk.budget_plugin import BudgetPlugin
    from runguard.adk.guarded import GuardedLlm
    from runguard.adk.installation import install, uninstall
    from runguard.adk.plugin import RunGuardPlugin
    from runguard.adk.termination import TerminationPlugin, terminate, termination_reason

_HOMES = {
    "ADKCostBreaker": "runguard.adk.breaker",
    "BudgetPlugin": "runguard.adk.budget_plugin",
    "GuardedLlm": "runguard.adk.guarded",
    "install": "runguard.adk.installation",
    "uninstall": "runguard.adk.installation",
    "RunGuardPlugin": "runguard.adk.plugin",
    "TerminationPlugin": "runguard.adk.termination",
    "terminate": "runguard.adk.termination",
    "termination_reason": "runguard.adk.termination",
}

__all__ = ["ADKCostBreaker", "BudgetPlugin", "GuardedLlm", "RunGuardPlugin", "TerminationPlugin", "install", "terminate", "termination_reason", "uninstall"]

_load, __dir__ = lazy(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    try:
        return _load(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "google":
            raise
        raise ImportError("runguard.adk needs google-adk, which is not installed: pip install 'runguard-agents[adk]'") from None
