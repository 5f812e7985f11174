"""Read a durable store: budgets, running runs, spending, trips and their stories. Changes nothing."""

from typing import TYPE_CHECKING

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.view.store import StoreView

_HOMES = {
    "StoreView": "runguard.view.store",
}

__all__ = ["StoreView"]

__getattr__, __dir__ = lazy(__name__, _HOMES)
