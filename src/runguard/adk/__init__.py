"""RunGuard on Google ADK: a plugin, a one-line install, a guarded model, and a breaker per agent."""

from runguard.adk.breaker import ADKCostBreaker
from runguard.adk.guarded import GuardedLlm
from runguard.adk.installation import install, uninstall
from runguard.adk.plugin import RunGuardPlugin
from runguard.adk.termination import TerminationPlugin, terminate, termination_reason

__all__ = ["ADKCostBreaker", "GuardedLlm", "RunGuardPlugin", "TerminationPlugin", "install", "terminate", "termination_reason", "uninstall"]
