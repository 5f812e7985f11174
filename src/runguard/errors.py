"""Every exception that RunGuard raises. ``runguard.core.errors`` defines them and draws the tree."""

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
