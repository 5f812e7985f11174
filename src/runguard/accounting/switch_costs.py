"""What the next call of an agent would cost on its own model and on a cheaper one, in whole nano-USD.

A switch loses the prompt cache of the model that is left: what was read from it is paid in full on the other model, at
its price for writing a cache where it has one.
"""

from dataclasses import dataclass
from typing import NamedTuple

from runguard.pricing.rates import Rates, Usage


@dataclass(slots=True)
class CachedPrompt:
    """The last prompt of one agent in one lane, as its model reported it."""

    model: str
    input: int
    cached: int  # of input: read from a cache
    cache_write: int  # of input: written to a cache


class SwitchCosts(NamedTuple):
    """The expected cost of one call in nano-USD: with the present model, and after a switch."""

    stay: int
    switch: int
    cached: int  # tokens of the prompt that the present model would read from its cache

    @property
    def saves(self) -> bool:
        return self.switch < self.stay


def switch_costs(
    present: Rates, other: Rates, prompt: int, output: int, last: CachedPrompt | None = None
) -> SwitchCosts:
    """``prompt`` and ``output``: expected tokens. ``last``: what the present model had in its cache, None: nothing."""
    cached = write = 0
    if last is not None and last.input > 0:
        cached = min(prompt * last.cached // last.input, prompt)
        write = min(prompt * last.cache_write // last.input, prompt - cached)
    stay = present.cost(Usage(input=prompt, output=output, cached=cached, cache_write=write))
    switch = other.cost(Usage(input=prompt, output=output, cache_write=cached + write))
    return SwitchCosts(stay, switch, cached)
