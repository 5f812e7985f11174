"""A gate for continuous integration: ``runguard gate SOURCE`` on the command line, ``gate`` in code."""

from typing import TYPE_CHECKING

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.gate.baseline import Baseline
    from runguard.gate.budgets import assert_within_budget
    from runguard.gate.checks import Check, GateFinding, GateReport, gate

_HOMES = {
    "Baseline": "runguard.gate.baseline",
    "Check": "runguard.gate.checks",
    "GateFinding": "runguard.gate.checks",
    "GateReport": "runguard.gate.checks",
    "assert_within_budget": "runguard.gate.budgets",
    "gate": "runguard.gate.checks",
}

__all__ = ["Baseline", "Check", "GateFinding", "GateReport", "assert_within_budget", "gate"]

__getattr__, __dir__ = lazy(__name__, _HOMES)
