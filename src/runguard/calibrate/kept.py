"""What a policy says, as a file can say it: functions, and limits that were switched off by ``None``, only code can
give.
"""

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

from runguard.core.budget import DEFAULT_THRESHOLDS, Budget
from runguard.core.money import UNITS
from runguard.policy.policy_file import PolicyFile
from runguard.policy.settings import Policy

SECRET: Final = ("store", "alerts")  # their addresses may hold passwords and tokens


@dataclass(slots=True)
class Kept:
    """Plain values for a file, and the names of what is missing in them. Rules are not among them."""

    values: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def kept_of(policy: Policy) -> Kept:
    judged_by_code = [name for name, rule in policy.tools.items() if callable(rule.failed)]
    exclude: dict[str, Any] = dict.fromkeys((*SECRET, "rules", "budgets"), True)
    if judged_by_code:
        exclude["tools"] = {name: {"failed": True} for name in judged_by_code}
    values = policy.model_dump(
        mode="json", exclude_unset=True, include=set(PolicyFile.model_fields), exclude=exclude, exclude_none=True
    )
    kept = Kept(values, [f"tools.{name}.failed" for name in judged_by_code])
    fields = PolicyFile.model_fields
    kept.missing += [
        f"{name} = None" for name in fields if getattr(policy, name) is None and fields[name].default is not None
    ]
    if budgets := [
        told
        for number, budget in enumerate(policy.budgets)
        if (told := _budget(budget, f"budgets[{number}]", kept.missing))
    ]:
        kept.values["budgets"] = budgets
    return kept


def _budget(budget: Budget, name: str, missing: list[str]) -> dict[str, Any] | None:
    """None where no amount is left. ``missing``: is told what is left out."""
    amounts = {unit: amount for unit in UNITS if (amount := getattr(budget, unit)) is not None}
    missing += [f"{name}.{unit}" for unit, amount in amounts.items() if callable(amount)]
    told: dict[str, Any] = {
        unit: str(amount) if isinstance(amount, Decimal) else amount
        for unit, amount in amounts.items()
        if not callable(amount)
    }
    if not told:
        return None
    told |= {"per": budget.per, "window": budget.window, "tz": budget.tz}
    if tuple(budget.thresholds) != DEFAULT_THRESHOLDS:
        told["thresholds"] = [
            {"percent": each.percent, "action": each.action, "recurring": each.recurring} for each in budget.thresholds
        ]
        missing += [
            f"{name}.thresholds[{number}].callback"
            for number, each in enumerate(budget.thresholds)
            if each.callback is not None
        ]
    return told
