"""Change settings of a policy, and express a policy as values of a file.

A file cannot express functions, and limits that were switched off with ``None``.
"""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from runguard.core.errors import PolicyError
from runguard.core.money import DEFAULT_THRESHOLDS, UNITS, Budget
from runguard.policy.settings import Policy, PolicyFile

SECRET: Final = ("store", "alerts")  # their addresses may hold passwords and tokens


def file_values(policy: Policy) -> tuple[dict[str, Any], list[str]]:
    """Return plain values for a file without the rules, and the names of settings that a file cannot express."""
    judged_by_code = [name for name, rule in policy.tools.items() if callable(rule.failed)]
    exclude: dict[str, Any] = dict.fromkeys((*SECRET, "rules", "budgets"), True)
    if judged_by_code:
        exclude["tools"] = {name: {"failed": True} for name in judged_by_code}
    fields = PolicyFile.model_fields
    values = policy.model_dump(mode="json", exclude_unset=True, include=set(fields), exclude=exclude, exclude_none=True)
    missing = [f"tools.{name}.failed" for name in judged_by_code]
    missing += [
        f"{name} = None" for name in fields if getattr(policy, name) is None and fields[name].default is not None
    ]
    plain = [_budget(budget, f"budgets[{number}]", missing) for number, budget in enumerate(policy.budgets)]
    if budgets := [budget for budget in plain if budget]:
        values["budgets"] = budgets
    return values, missing


def _budget(budget: Budget, name: str, missing: list[str]) -> dict[str, Any] | None:
    """Return the budget as plain data, or None if no amount is left; add what is left out to ``missing``."""
    amounts = {unit: amount for unit in UNITS if (amount := getattr(budget, unit)) is not None}
    missing += [f"{name}.{unit}" for unit, amount in amounts.items() if callable(amount)]
    values_of_budget: dict[str, Any] = {
        unit: str(amount) if isinstance(amount, Decimal) else amount
        for unit, amount in amounts.items()
        if not callable(amount)
    }
    if not values_of_budget:
        return None
    values_of_budget |= {"per": budget.per, "window": budget.window, "tz": budget.tz}
    if budget.on_exhausted != "refuse":
        values_of_budget["on_exhausted"] = budget.on_exhausted
    if budget.burn_alert:
        values_of_budget["burn_alert"] = True
    if tuple(budget.thresholds) != DEFAULT_THRESHOLDS:
        values_of_budget["thresholds"] = [
            {"percent": each.percent, "action": each.action, "recurring": each.recurring} for each in budget.thresholds
        ]
        missing += [
            f"{name}.thresholds[{number}].callback"
            for number, each in enumerate(budget.thresholds)
            if each.callback is not None
        ]
    return values_of_budget


def changed(policy: Policy, settings: Mapping[str, Any]) -> Policy:
    """Return the policy with ``settings`` as in a file; other rules keep their rungs."""
    read = Policy.validated(settings, "")
    values = {name: getattr(read, name) for name in settings}
    if "rules" in values:
        values["rules"] = {**policy.rules, **read.rules}
    return policy.model_copy(update=values)


def is_allowed(settings: Mapping[str, Any]) -> bool:
    """Return whether the settings are valid; their numbers have bounds."""
    try:
        Policy.validated(settings, "")
    except PolicyError:
        return False
    return True
