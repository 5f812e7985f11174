"""Where a policy would have switched a recorded run to a cheaper model, and how much less its calls would have cost."""

from dataclasses import replace

from runguard.conductor.downgrades import Downgrades
from runguard.conductor.runs import Run
from runguard.core.events import ModelCall
from runguard.pricing.book import Pricing
from runguard.pricing.rates import Rates, Usage
from runguard.replay.results import RunResult


class ReplayedSwitches:
    """The switches of one recorded run. The recording goes on with its own models, so the saving is an estimate."""

    def __init__(self, downgrades: Downgrades, pricing: Pricing, result: RunResult) -> None:
        self._downgrades, self._pricing, self._result = downgrades, pricing, result
        self._chosen: dict[tuple[str, str], str] = {}  # by lane and agent: the model of its last call

    def asked(self, run: Run, event: ModelCall) -> None:
        """A recorded model call. Recordings hold answered calls, so every point is a safe one."""
        chosen = self._downgrades.choose(run, event, lambda: False, lambda model: "")
        before = self._chosen.get((event.lane, event.agent), "")
        self._chosen[event.lane, event.agent] = chosen
        event.cheaper = chosen, chosen != before

    def paid(self, event: ModelCall, usage: Usage, nano: int) -> None:
        """The first call on another model finds no cache there; later ones read as much from it as in the recording."""
        model, is_first = event.cheaper or ("", False)
        rates = self._pricing.rates(model, event.at) if model else None
        if not isinstance(rates, Rates):
            return
        if is_first:
            usage = replace(usage, cached=0, cached_audio=0, cache_write=usage.cache_write + usage.cached)
        self._result.switched.model_calls += 1
        self._result.switched.tokens += usage.input + usage.output
        self._result.switched.nano += nano - rates.cost(usage)
