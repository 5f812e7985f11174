"""RunGuard: the circuit breaker for AI agents. It stops a runaway run before its next paid call.

``runguard.install()`` guards every Google ADK Runner of the process. Importing this package loads nothing else; each
name is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runguard._version import __version__ as __version__
    from runguard.adk.budget_plugin import BudgetPlugin
    from runguard.adk.cost_breaker import ADKCostBreaker
    from runguard.adk.guarded_llm import GuardedLlm
    from runguard.adk.plugin import RunGuardPlugin
    from runguard.adk.runner import install, uninstall
    from runguard.adk.termination import TerminationPlugin, terminate
    from runguard.calls.functions import guard, guard_async, run
    from runguard.core.breaker import BreakerState
    from runguard.core.decision import Decision, Finding, Trip, trip
    from runguard.core.errors import (
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
    from runguard.core.money import Budget, BudgetStatus, Scope, Threshold
    from runguard.engine.token_budget import BudgetMonitor, BudgetPolicy, CompressionTriggered
    from runguard.policy.settings import Policy, RemoteAgent, ToolRule, tool
    from runguard.pricing.book import ModelLimits, Price
    from runguard.termination.conditions import (
        AndTerminationCondition,
        ExternalTermination,
        FinalAnswerTermination,
        FunctionalTermination,
        FunctionCallTermination,
        HandoffTermination,
        MaxIterationsTermination,
        MaxMessageTermination,
        OrTerminationCondition,
        StateTermination,
        TerminatedError,
        TerminationCondition,
        TerminationResult,
        TextMentionTermination,
        termination_reason,
    )
    from runguard.termination.usage import (
        CostTermination,
        NoProgressTermination,
        RuleTermination,
        TimeoutTermination,
        TokenUsageTermination,
    )

_HOMES = {
    "__version__": "runguard._version",
    "ADKCostBreaker": "runguard.adk",
    "GuardedLlm": "runguard.adk",
    "RunGuardPlugin": "runguard.adk",
    "TerminationPlugin": "runguard.adk",
    "install": "runguard.adk",
    "terminate": "runguard.adk",
    "uninstall": "runguard.adk",
    "termination_reason": "runguard.termination.conditions",
    "BudgetPlugin": "runguard.adk.budget_plugin",
    "BreakerState": "runguard.core.breaker",
    "Budget": "runguard.core.money",
    "BudgetStatus": "runguard.core.money",
    "Scope": "runguard.core.money",
    "Decision": "runguard.core.decision",
    "Finding": "runguard.core.decision",
    "Trip": "runguard.core.decision",
    "trip": "runguard.core.decision",
    "BudgetExceededError": "runguard.core.errors",
    "CircuitOpenError": "runguard.core.errors",
    "ContextOverflowError": "runguard.core.errors",
    "CostGrowthError": "runguard.core.errors",
    "DeadlineExceededError": "runguard.core.errors",
    "GuardFailedError": "runguard.core.errors",
    "InstallError": "runguard.core.errors",
    "LimitExceededError": "runguard.core.errors",
    "LoopDetectedError": "runguard.core.errors",
    "PolicyError": "runguard.core.errors",
    "RunGuardError": "runguard.core.errors",
    "RunStoppedError": "runguard.core.errors",
    "UnpricedModelError": "runguard.core.errors",
    "guard": "runguard.calls.functions",
    "guard_async": "runguard.calls.functions",
    "run": "runguard.calls.functions",
    "BudgetMonitor": "runguard.engine.token_budget",
    "BudgetPolicy": "runguard.engine.token_budget",
    "CompressionTriggered": "runguard.engine.token_budget",
    "Policy": "runguard.policy.settings",
    "RemoteAgent": "runguard.policy.settings",
    "ToolRule": "runguard.policy.settings",
    "tool": "runguard.policy.settings",
    "ModelLimits": "runguard.pricing.book",
    "Price": "runguard.pricing.book",
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
    "Threshold": "runguard.core.money",
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
    "RemoteAgent",
    "RuleTermination",
    "RunGuardError",
    "RunGuardPlugin",
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


_ADAPTERS = {  # what the guards of other frameworks are called, and where they are
    "GuardedChatModel": "runguard.langchain",
    "RunGuardMiddleware": "runguard.langchain",
    "AgentGuard": "runguard.openai_agents",
    "guarded": "runguard.openai_agents",
    "RunGuard": "runguard.pydantic_ai, runguard.strands or runguard.agent_framework",
    "RunGuardInterceptor": "runguard.agent_hooks",
    "RunGuardGateway": "runguard.litellm",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        if name in _ADAPTERS:  # with an AttributeError, `from runguard import …` would not tell the place
            raise ImportError(f"import {name} from {_ADAPTERS[name]}")
        raise AttributeError(f"module 'runguard' has no attribute '{name}'")
    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        if home.startswith("runguard.adk") and error.name is not None and error.name.split(".")[0] == "google":
            raise ImportError(
                f"runguard.{name} needs google-adk, which is not installed: pip install 'runguard-agents[adk]'"
            ) from None
        raise


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
