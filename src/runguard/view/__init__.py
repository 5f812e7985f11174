"""A durable store for people: budgets, running runs, spend, trips and their stories. Looks only, and shows what can be read."""

from runguard.view.store_view import StoreView

__all__ = ["StoreView"]
