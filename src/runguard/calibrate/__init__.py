"""Limits from recorded runs: ``runguard calibrate SOURCE`` on the command line, ``calibrate`` in code."""

from typing import TYPE_CHECKING

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.calibrate.proposal import Limit, Proposal, Quantile, calibrate, quantile, runs_needed

_HOMES = {
    "Limit": "runguard.calibrate.proposal",
    "Proposal": "runguard.calibrate.proposal",
    "calibrate": "runguard.calibrate.proposal",
    "Quantile": "runguard.calibrate.proposal",
    "quantile": "runguard.calibrate.proposal",
    "runs_needed": "runguard.calibrate.proposal",
}

__all__ = ["Limit", "Proposal", "Quantile", "calibrate", "quantile", "runs_needed"]

__getattr__, __dir__ = lazy(__name__, _HOMES)
