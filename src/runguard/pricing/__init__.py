"""Tokens -> money. All money is whole nano-USD inside, rounded up once per call; ``Decimal`` only at the edge, ``float`` never.

Prices come from the user (``prices=``), else from genai-prices, which is imported when the first price is needed. An unknown price
is never zero: it is ``Unpriced`` with a reason, or the rate the user gave for unknown models.

Not in these sums, because no token count tells them: fees per search or per hour of audio, storage of caches, batch and priority
tariffs, a cache kept for an hour instead of five minutes.
"""

from runguard.pricing.book import Pricing
from runguard.pricing.given import ModelLimits, Price, Tier
from runguard.pricing.model_ids import normalise
from runguard.pricing.price_list import listed_models, preload, price_changes
from runguard.pricing.rates import NANO, UNLIMITED, Band, Rates, Unpriced, Usage

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
    "price_changes",
]
