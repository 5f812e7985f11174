"""Which thresholds of a call's budgets are reached: those that stop it, and those that what it took makes fire."""

from collections.abc import Iterator

from runguard.accounting.budget_groups import NO_LIMIT, BudgetGroup
from runguard.accounting.charges import AccountLines, Denied, Fired, status_of
from runguard.core.money import NOTHING, Amount, share_of, unit_reached
from runguard.ledger.ledger import Account, Ledger, Refusal


def over_threshold(lines: AccountLines) -> Denied | None:
    """A budget that has reached a threshold which stops."""
    for account, group, limits in zip(lines.accounts, lines.groups, lines.limits, strict=True):
        for thresholds, limit in zip(group.thresholds, limits, strict=False) if group.stops else ():
            for threshold in thresholds:
                if threshold.action != "stop":
                    continue
                unit = unit_reached(account.spent, share_of(limit, account.granted, threshold.percent))
                if unit is not None:
                    return Denied(Refusal(account, unit, NOTHING, account.room), group, fraction=threshold.percent)
    return None


def newly_reached(lines: AccountLines, ledger: Ledger) -> Iterator[Fired]:
    """The thresholds that fire now."""
    for account, group, limits in zip(lines.accounts, lines.groups, lines.limits, strict=True):
        alert_usd, alert_tokens, alert_calls = account.alert
        if account.spent_usd >= alert_usd or account.spent_tokens >= alert_tokens or account.spent_calls >= alert_calls:
            yield from _fire(ledger, account, group, limits)


def _fire(ledger: Ledger, account: Account, group: BudgetGroup, limits: list[Amount]) -> Iterator[Fired]:
    """The thresholds that are reached, each against its own budget; and when to look again."""
    following, granted = list(NO_LIMIT), account.granted
    # read once: while the store is asked below, the late reply of an earlier call may set the account back
    spent = account.spent
    for number, (thresholds, limit) in enumerate(zip(group.thresholds, limits, strict=False)):
        for position, threshold in enumerate(thresholds):
            needed = share_of(limit, granted, threshold.percent)
            unit = unit_reached(spent, needed)
            if unit is None:
                following = [min(now, need) for now, need in zip(following, needed, strict=True)]
                continue
            if threshold.recurring:
                following = [0, 0, 0]
            mark = f"{number}.{position}:{threshold.percent}:{threshold.action}"
            is_first = threshold.recurring or ledger.first(account, mark, threshold.percent, limit)
            if is_first is None:  # the store was away: look again with the next settlement
                following = [0, 0, 0]
            elif is_first:
                yield Fired(
                    account,
                    group,
                    threshold,
                    status_of(account, unit, limit[unit] + account.granted[unit], spent[unit]),
                )
    account.alert = (following[0], following[1], following[2])
    if account.granted != granted:  # extended meanwhile: what was re-armed must be found
        account.alert = NOTHING
