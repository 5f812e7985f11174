"""RunGuard: the circuit breaker for AI agents. It stops a runaway run before its next paid call.

``runguard.install()`` guards every Google ADK Runner of the process. Importing this package loads nothing else; each name is
loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runguard.adk import ADKCostBreaker, GuardedLlm, TerminationPlugin, install, terminate, termination_reason, uninstall
    from runguard.adk.budget_plugin import BudgetPlugin
    from runguard.breaker import BreakerState
    from runguard.budget import Budget, BudgetStatus, Scope
    from runguard.decision import Decision, Finding, Trip, trip
    from runguard.errors import (
        BudgetExceededError,
        CircuitOpenError,
        ContextOverflowError,
        CostGrowthError,
        DeadlineExceededError,
        GuardFailedError,
        InstallError,
        LimitExceededError,
        LoopDetectedError,
        PolicyError,
        RunGuardError,
        RunStoppedError,
        UnpricedModelError,
    )
    from runguard.functions import guard, guard_async, run
    from runguard.monitor import BudgetMonitor, BudgetPolicy, CompressionTriggered
    from runguard.policy import Policy, ToolRule, tool
    from runguard.pricing import ModelLimits, Price
    from runguard.termination import (
        AndTerminationCondition,
        CostTermination,
        ExternalTermination,
        FinalAnswerTermination,
        FunctionalTermination,
        FunctionCallTermination,
        HandoffTermination,
        MaxIterationsTermination,
        MaxMessageTermination,
        NoProgressTermination,
        OrTerminationCondition,
        RuleTermination,
        StateTermination,
        TerminatedError,
        TerminationCondition,
        TerminationResult,
        TextMentionTermination,
        TimeoutTermination,
        TokenUsageTermination,
    )
    from runguard.threshold import Threshold

__version__ = "0.1.0"

_HOMES = {
    "ADKCostBreaker": "runguard.adk",
    "GuardedLlm": "runguard.adk",
    "TerminationPlugin": "runguard.adk",
    "install": "runguard.adk",
    "terminate": "runguard.adk",
    "termination_reason": "runguard.adk",
    "uninstall": "runguard.adk",
    "BudgetPlugin": "runguard.adk.budget_plugin",
    "BreakerState": "runguard.breaker",
    "Budget": "runguard.budget",
    "BudgetStatus": "runguard.budget",
    "Scope": "runguard.budget",
    "Decision": "runguard.decision",
    "Finding": "runguard.decision",
    "Trip": "runguard.decision",
    "trip": "runguard.decision",
    "BudgetExceededError": "runguard.errors",
    "CircuitOpenError": "runguard.errors",
    "ContextOverflowError": "runguard.errors",
    "CostGrowthError": "runguard.errors",
    "DeadlineExceededError": "runguard.errors",
    "GuardFailedError": "runguard.errors",
    "InstallError": "runguard.errors",
    "LimitExceededError": "runguard.errors",
    "LoopDetectedError": "runguard.errors",
    "PolicyError": "runguard.errors",
    "RunGuardError": "runguard.errors",
    "RunStoppedError": "runguard.errors",
    "UnpricedModelError": "runguard.errors",
    "guard": "runguard.functions",
    "guard_async": "runguard.functions",
    "run": "runguard.functions",
    "BudgetMonitor": "runguard.monitor",
    "BudgetPolicy": "runguard.monitor",
    "CompressionTriggered": "runguard.monitor",
    "Policy": "runguard.policy",
    "ToolRule": "runguard.policy",
    "tool": "runguard.policy",
    "ModelLimits": "runguard.pricing",
    "Price": "runguard.pricing",
    "AndTerminationCondition": "runguard.termination",
    "CostTermination": "runguard.termination",
    "ExternalTermination": "runguard.termination",
    "FinalAnswerTermination": "runguard.termination",
    "FunctionCallTermination": "runguard.termination",
    "FunctionalTermination": "runguard.termination",
    "HandoffTermination": "runguard.termination",
    "MaxIterationsTermination": "runguard.termination",
    "MaxMessageTermination": "runguard.termination",
    "NoProgressTermination": "runguard.termination",
    "OrTerminationCondition": "runguard.termination",
    "RuleTermination": "runguard.termination",
    "StateTermination": "runguard.termination",
    "TerminatedError": "runguard.termination",
    "TerminationCondition": "runguard.termination",
    "TerminationResult": "runguard.termination",
    "TextMentionTermination": "runguard.termination",
    "TimeoutTermination": "runguard.termination",
    "TokenUsageTermination": "runguard.termination",
    "Threshold": "runguard.threshold",
}

__all__ = [
    "ADKCostBreaker",
    "AndTerminationCondition",
    "BreakerState",
    "Budget",
    "BudgetExceededError",
    "BudgetMonitor",
    "BudgetPlugin",
    "BudgetPolicy",
    "BudgetStatus",
    "CircuitOpenError",
    "CompressionTriggered",
    "ContextOverflowError",
    "CostGrowthError",
    "CostTermination",
    "DeadlineExceededError",
    "Decision",
    "ExternalTermination",
    "FinalAnswerTermination",
    "Finding",
    "FunctionCallTermination",
    "FunctionalTermination",
    "GuardFailedError",
    "GuardedLlm",
    "HandoffTermination",
    "InstallError",
    "LimitExceededError",
    "LoopDetectedError",
    "MaxIterationsTermination",
    "MaxMessageTermination",
    "ModelLimits",
    "NoProgressTermination",
    "OrTerminationCondition",
    "Policy",
    "PolicyError",
    "Price",
    "RuleTermination",
    "RunGuardError",
    "RunStoppedError",
    "Scope",
    "StateTermination",
    "TerminatedError",
    "TerminationCondition",
    "TerminationPlugin",
    "TerminationResult",
    "TextMentionTermination",
    "Threshold",
    "TimeoutTermination",
    "TokenUsageTermination",
    "ToolRule",
    "Trip",
    "UnpricedModelError",
    "guard",
    "guard_async",
    "install",
    "run",
    "terminate",
    "termination_reason",
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
        if home.startswith("runguard.adk") and error.name is not None and error.name.split(".")[0] == "google":
            raise ImportError(f"runguard.{name} needs google-adk, which is not installed: pip install 'runguard-agents[adk]'") from None
        raise


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
