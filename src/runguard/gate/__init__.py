"""A gate for continuous integration: ``runguard gate SOURCE`` on the command line, ``gate`` in code."""

from typing import TYPE_CHECKING

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.gate.checks import Baseline, Check, GateFinding, GateReport, assert_within_budget, gate

__all__ = ["Baseline", "Check", "GateFinding", "GateReport", "assert_within_budget", "gate"]

__getattr__, __dir__ = lazy(__name__, dict.fromkeys(__all__, "runguard.gate.checks"))
