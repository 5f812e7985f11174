"""A gate for continuous integration: ``runguard gate SOURCE`` on the command line, ``gate`` in code."""

from typing import TYPE_CHECKING

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.gate.checks import Baseline, Check, GateFinding, GateReport, assert_within_budget, gate

_HOMES = {
    "Baseline": "runguard.gate.checks",
    "Check": "runguard.gate.checks",
    "GateFinding": "runguard.gate.checks",
    "GateReport": "runguard.gate.checks",
    "assert_within_budget": "runguard.gate.checks",
    "gate": "runguard.gate.checks",
}

__all__ = ["Baseline", "Check", "GateFinding", "GateReport", "assert_within_budget", "gate"]

__getattr__, __dir__ = lazy(__name__, _HOMES)
