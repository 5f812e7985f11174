"""Thresholds that switch to a cheaper model: which models a policy names, and what is wrong with them."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from runguard.core.money import Budget, Per, Threshold
from runguard.pricing.book import Pricing
from runguard.pricing.rates import Rates, Unpriced, Usage

_USUAL: Final = Usage(input=10_000, output=1_000)  # a call by which two models are compared
_LATEST: Final = math.inf  # the newest price


def switching(budgets: Iterable[Budget]) -> list[tuple[Budget, Threshold]]:
    """The thresholds that switch models, with their budgets."""
    return [(budget, one) for budget in budgets for one in budget.thresholds if one.model is not None]


def fault_of_switches(budgets: Iterable[Budget], prices: Mapping[str, Any], models: Any, source: Any) -> str:
    """What is wrong with the models that thresholds switch to; nothing where all is fine."""
    found = switching(budgets)
    if not found:
        return ""
    pricing = Pricing(prices, models, None, source)
    for budget, threshold in found:
        fault = _fault(budget, threshold, pricing)
        if fault:
            return f"Threshold({threshold.percent:g}, model={threshold.model!r}): {fault}"
    return ""


def _fault(budget: Budget, threshold: Threshold, pricing: Pricing) -> str:
    model = threshold.model or ""
    rates = pricing.rates(model, _LATEST)
    if isinstance(rates, Unpriced):
        return f"{rates}; give it with prices={{{model!r}: {{'input': …, 'output': …}}}}"
    if pricing.limits(model)[0] is None:
        return f"its context window is not known; give it with models={{{model!r}: {{'context_window': …}}}}"
    for name in _dearer_than(budget, threshold):
        other = pricing.rates(name, _LATEST)
        if isinstance(other, Rates) and rates.cost(_USUAL) >= other.cost(_USUAL):
            return f"it is not cheaper than {name!r}, which it would replace"
    return ""


def _dearer_than(budget: Budget, threshold: Threshold) -> Iterable[str]:
    """Models that a switch at this threshold replaces, as far as the budget says."""
    for kind, name in Per.parse(budget.per).parts:
        if kind == "model" and not any(sign in name for sign in "*?["):
            yield name
    for other in budget.thresholds:
        if other.model is not None and other.percent < threshold.percent and other.agents == threshold.agents:
            yield other.model
