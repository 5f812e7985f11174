"""Limits from recorded runs: ``runguard calibrate SOURCE`` on the command line, ``calibrate`` in code."""

from typing import TYPE_CHECKING

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.calibrate.proposal import Proposal, calibrate
    from runguard.calibrate.proposed_limits import Limit
    from runguard.calibrate.rungs import Choice
    from runguard.calibrate.samples import Quantile, quantile, runs_needed

_HOMES = {
    "Limit": "runguard.calibrate.proposed_limits",
    "Proposal": "runguard.calibrate.proposal",
    "calibrate": "runguard.calibrate.proposal",
    "Quantile": "runguard.calibrate.samples",
    "quantile": "runguard.calibrate.samples",
    "runs_needed": "runguard.calibrate.samples",
    "Choice": "runguard.calibrate.rungs",
}

__all__ = ["Choice", "Limit", "Proposal", "Quantile", "calibrate", "quantile", "runs_needed"]

__getattr__, __dir__ = lazy(__name__, _HOMES)
