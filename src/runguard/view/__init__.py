"""A durable store for people: budgets, running runs, spend, trips and their stories. Looks only, and shows what can be
read.
"""

from typing import TYPE_CHECKING

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.view.store_view import StoreView

_HOMES = {
    "StoreView": "runguard.view.store_view",
}

__all__ = ["StoreView"]

__getattr__, __dir__ = lazy(__name__, _HOMES)
