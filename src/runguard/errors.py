"""Every exception that RunGuard raises. ``runguard.core.exceptions`` defines them and draws the tree."""

from runguard.core.exceptions import (
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

__all__ = [
    "BudgetExceededError",
    "CircuitOpenError",
    "ContextOverflowError",
    "CostGrowthError",
    "DeadlineExceededError",
    "GuardFailedError",
    "InstallError",
    "LimitExceededError",
    "LoopDetectedError",
    "PolicyError",
    "RunGuardError",
    "RunStoppedError",
    "UnpricedModelError",
]
