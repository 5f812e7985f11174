"""Prices for recorded time, which jumps: what a model cost then, found once per model where its price never changed."""

from typing import Final

from runguard.policy.settings import Policy
from runguard.pricing.book import Pricing
from runguard.pricing.price_list import price_changes
from runguard.pricing.rates import Rates, Unpriced

_HALF_HOUR: Final = 1_800.0  # some providers change prices at half past
_KEPT: Final = 4_096


class RecordedPrices(Pricing):
    """The same prices as live, kept longer: live, an answer holds for a minute of the one clock there is."""

    __slots__ = ("_always", "_by_time", "_changes")

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.prices, policy.models, policy.unknown_price)
        self._by_time: dict[tuple[str, float], Rates | Unpriced] = {}
        self._always: dict[str, Rates | Unpriced] = {}
        self._changes: dict[str, bool] = {}

    def rates(self, model: str, at: float) -> Rates | Unpriced:
        known = self._always.get(model)
        if known is not None:
            return known
        key = (model, at // _HALF_HOUR)
        known = self._by_time.get(key)
        if known is None:
            known = super().rates(model, at)
            if len(self._by_time) >= _KEPT:
                self._by_time.clear()
            self._by_time[key] = known
            if len(self._always) < _KEPT and not self._may_change(model):
                self._always[model] = known
        return known

    def _may_change(self, model: str) -> bool:
        return next(self._prices.matches(model), None) is not None or price_changes(model)
