"""Tokens -> money. All money is whole nano-USD inside, rounded up once per call; ``Decimal`` only at the edge, ``float`` never.

Prices come from the user (``prices=``), else from genai-prices, which is imported when the first price is needed. An unknown price
is never zero: it is ``Unpriced`` with a reason, or the rate the user gave for unknown models.

Not in these sums, because no token count tells them: fees per search or per hour of audio, storage of caches, batch and priority
tariffs, a cache kept for an hour instead of five minutes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from runguard.pricing.book import Pricing
    from runguard.pricing.given import ModelLimits, Price, Tier
    from runguard.pricing.model_ids import normalise
    from runguard.pricing.price_list import listed_models, preload, price_changes
    from runguard.pricing.rates import NANO, UNLIMITED, Band, Rates, Unpriced, Usage

# Loaded when they are asked for: tokens can be counted without pydantic, which prices need.
_HOMES: Final = {
    **dict.fromkeys(("Pricing",), "book"),
    **dict.fromkeys(("ModelLimits", "Price", "Tier"), "given"),
    **dict.fromkeys(("normalise",), "model_ids"),
    **dict.fromkeys(("listed_models", "preload", "price_changes"), "price_list"),
    **dict.fromkeys(("NANO", "UNLIMITED", "Band", "Rates", "Unpriced", "Usage"), "rates"),
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
    "price_changes",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
