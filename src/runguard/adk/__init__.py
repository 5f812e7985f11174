"""RunGuard on Google ADK: a plugin, a one-line install, and a breaker per agent."""

from runguard.adk.breaker import ADKCostBreaker
from runguard.adk.installation import install, uninstall
from runguard.adk.plugin import RunGuardPlugin

__all__ = ["ADKCostBreaker", "RunGuardPlugin", "install", "uninstall"]
