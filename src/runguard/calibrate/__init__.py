"""Limits from the user's own recorded runs: ``runguard calibrate SOURCE`` on the command line, ``calibrate`` from code."""

from runguard.calibrate.limits import Limit
from runguard.calibrate.proposal import Proposal, calibrate
from runguard.calibrate.quantile import Quantile, quantile, runs_needed
from runguard.calibrate.rungs import Choice

__all__ = ["Choice", "Limit", "Proposal", "Quantile", "calibrate", "quantile", "runs_needed"]
