"""Limits from the user's own recorded runs: ``runguard calibrate SOURCE`` on the command line,
``calibrate`` from code.
"""

from typing import TYPE_CHECKING

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.calibrate.limits import Limit
    from runguard.calibrate.proposal import Proposal, calibrate
    from runguard.calibrate.quantiles import Quantile, quantile, runs_needed
    from runguard.calibrate.rungs import Choice

_HOMES = {
    "Limit": "runguard.calibrate.limits",
    "Proposal": "runguard.calibrate.proposal",
    "calibrate": "runguard.calibrate.proposal",
    "Quantile": "runguard.calibrate.quantiles",
    "quantile": "runguard.calibrate.quantiles",
    "runs_needed": "runguard.calibrate.quantiles",
    "Choice": "runguard.calibrate.rungs",
}

__all__ = ["Choice", "Limit", "Proposal", "Quantile", "calibrate", "quantile", "runs_needed"]

__getattr__, __dir__ = lazy(__name__, _HOMES)
