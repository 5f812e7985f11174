"""What models report about their prompt caches, per agent and lane of a run."""

from typing import Final

from runguard.accounting.charges import Charge
from runguard.accounting.switch_costs import CachedPrompt
from runguard.conductor.runs import Run
from runguard.pricing.rates import Usage

_KEPT: Final = 1_024  # agents of one run


def remember_prompt(run: Run, charge: Charge, usage: Usage, model: str) -> None:
    """A call was settled. Only called once some call of the run has reported cached tokens."""
    if charge.is_tool or not usage.input:
        return
    known = run.cached_prompts
    if known is None or len(known) >= _KEPT:
        known = run.cached_prompts = {}
    known[charge.lane, charge.agent] = CachedPrompt(charge.model, usage.input, usage.cached, usage.cache_write)
