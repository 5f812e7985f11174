"""RunGuard on Google ADK: a plugin, a one-line install, a guarded model, and a breaker per agent."""

try:
    import google.adk  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("google", "google.adk"):
        raise
    raise ImportError("runguard.adk needs google-adk, which is not installed: pip install 'runguard-agents[adk]'") from None

from runguard.adk.breaker import ADKCostBreaker
from runguard.adk.guarded import GuardedLlm
from runguard.adk.installation import install, uninstall
from runguard.adk.plugin import RunGuardPlugin
from runguard.adk.termination import TerminationPlugin, terminate, termination_reason

__all__ = ["ADKCostBreaker", "GuardedLlm", "RunGuardPlugin", "TerminationPlugin", "install", "terminate", "termination_reason", "uninstall"]
