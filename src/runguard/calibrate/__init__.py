"""Limits from recorded runs: ``runguard calibrate SOURCE`` on the command line, ``calibrate`` in code."""

from typing import TYPE_CHECKING

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.calibrate.proposal import Limit, Proposal, Quantile, calibrate, quantile, runs_needed

__all__ = ["Limit", "Proposal", "Quantile", "calibrate", "quantile", "runs_needed"]

__getattr__, __dir__ = lazy(__name__, dict.fromkeys(__all__, "runguard.calibrate.proposal"))
