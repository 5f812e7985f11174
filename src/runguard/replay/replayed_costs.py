"""What the model calls of a recording cost."""

from runguard.conductor.guard import Guard
from runguard.conductor.runs import Run
from runguard.core.events import ModelCall
from runguard.pricing.book import Pricing
from runguard.pricing.rates import Unpriced, Usage
from runguard.replay.results import RunResult


class ReplayedCosts:
    """The costs of one player. Calls without a price are counted in its result."""

    def __init__(self, guard: Guard, pricing: Pricing, result: RunResult) -> None:
        self._guard, self._pricing, self._result = guard, pricing, result

    def of_call(
        self, run: Run, event: ModelCall, usage: Usage, model: str, *, estimated: bool, nano: int | None, free: bool
    ) -> int:
        """nano-USD of one call. ``nano``: what the recording says; ``free``: it cost nothing."""
        if event.charge is not None:
            run_costs = run.run_costs
            before, unpriced = run_costs.nano, run_costs.unpriced
            self._guard.settle(event.charge, usage, model, nano=nano, estimated=estimated, free=free)
            self._result.unpriced += run_costs.unpriced - unpriced
            return int(run_costs.nano - before)
        if nano is not None or free:
            return nano or 0
        rates = self._pricing.rates(model, event.at)  # no budget looks at it: the price alone
        if isinstance(rates, Unpriced):
            self._result.unpriced += 1
            return 0
        return rates.cost(usage)
