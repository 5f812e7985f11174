"""Tokens -> money. All money is whole nano-USD inside, rounded up once per call; ``Decimal`` only at the edge,
``float`` never.

Prices come from the user (``prices=``), else from a price list: the table of this package, which is made from
genai-prices, or the installed genai-prices itself. The list is loaded when the first price is needed. An unknown price
is never zero: it is ``Unpriced`` with a reason, or the rate the user gave for unknown models.

Not in these sums, because no token count tells them: fees per search or per hour of audio, storage of caches, batch and
priority tariffs, a cache kept for an hour instead of five minutes.
"""

from typing import TYPE_CHECKING

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.pricing.book import Pricing
    from runguard.pricing.given import ModelLimits, Price, Tier
    from runguard.pricing.model_ids import normalise
    from runguard.pricing.price_list import listed_models, preload
    from runguard.pricing.rates import NANO, UNLIMITED, Band, Rates, Unpriced, Usage

_HOMES = {
    "Pricing": "runguard.pricing.book",
    "ModelLimits": "runguard.pricing.given",
    "Price": "runguard.pricing.given",
    "Tier": "runguard.pricing.given",
    "normalise": "runguard.pricing.model_ids",
    "listed_models": "runguard.pricing.price_list",
    "preload": "runguard.pricing.price_list",
    "Band": "runguard.pricing.rates",
    "NANO": "runguard.pricing.rates",
    "Rates": "runguard.pricing.rates",
    "UNLIMITED": "runguard.pricing.rates",
    "Unpriced": "runguard.pricing.rates",
    "Usage": "runguard.pricing.rates",
}

__all__ = [
    "NANO",
    "UNLIMITED",
    "Band",
    "ModelLimits",
    "Price",
    "Pricing",
    "Rates",
    "Tier",
    "Unpriced",
    "Usage",
    "listed_models",
    "normalise",
    "preload",
]

__getattr__, __dir__ = lazy(__name__, _HOMES)
