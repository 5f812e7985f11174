"""RunGuard: the circuit breaker for AI agents. It stops a runaway run before its next paid call.

``runguard.install()`` guards every Google ADK Runner of the process. Importing this package loads nothing else; each name is
loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runguard.adk import ADKCostBreaker, install, uninstall
    from runguard.breaker import BreakerState
    from runguard.decision import Decision, Finding, Trip, trip
    from runguard.errors import (
        DeadlineExceededError,
        GuardFailedError,
        InstallError,
        LimitExceededError,
        LoopDetectedError,
        PolicyError,
        RunGuardError,
        RunStoppedError,
    )
    from runguard.policy import Policy, ToolRule, tool

__version__ = "0.1.0"

_HOMES = {
    "ADKCostBreaker": "runguard.adk",
    "install": "runguard.adk",
    "uninstall": "runguard.adk",
    "BreakerState": "runguard.breaker",
    "Decision": "runguard.decision",
    "Finding": "runguard.decision",
    "Trip": "runguard.decision",
    "trip": "runguard.decision",
    "DeadlineExceededError": "runguard.errors",
    "GuardFailedError": "runguard.errors",
    "InstallError": "runguard.errors",
    "LimitExceededError": "runguard.errors",
    "LoopDetectedError": "runguard.errors",
    "PolicyError": "runguard.errors",
    "RunGuardError": "runguard.errors",
    "RunStoppedError": "runguard.errors",
    "Policy": "runguard.policy",
    "ToolRule": "runguard.policy",
    "tool": "runguard.policy",
}

__all__ = [
    "ADKCostBreaker",
    "BreakerState",
    "DeadlineExceededError",
    "Decision",
    "Finding",
    "GuardFailedError",
    "InstallError",
    "LimitExceededError",
    "LoopDetectedError",
    "Policy",
    "PolicyError",
    "RunGuardError",
    "RunStoppedError",
    "ToolRule",
    "Trip",
    "install",
    "tool",
    "trip",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'runguard' has no attribute '{name}'")
    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        if home == "runguard.adk" and error.name is not None and error.name.split(".")[0] == "google":
            raise ImportError(f"runguard.{name} needs google-adk, which is not installed: pip install 'runguard-agents[adk]'") from None
        raise


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
