"""Limits from recorded runs: ``runguard calibrate SOURCE`` on the command line, ``calibrate`` in code."""

from typing import TYPE_CHECKING

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.calibrate.measure import Quantile, quantile, runs_needed
    from runguard.calibrate.proposal import Limit, Proposal, calibrate

_HOMES = {
    "Limit": "runguard.calibrate.proposal",
    "Proposal": "runguard.calibrate.proposal",
    "calibrate": "runguard.calibrate.proposal",
    "Quantile": "runguard.calibrate.measure",
    "quantile": "runguard.calibrate.measure",
    "runs_needed": "runguard.calibrate.measure",
}

__all__ = ["Limit", "Proposal", "Quantile", "calibrate", "quantile", "runs_needed"]

__getattr__, __dir__ = lazy(__name__, _HOMES)
