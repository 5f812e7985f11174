"""Guards around guards: one layer owns a call, so what a layer around it holds on an account is not held again."""

import threading
from collections.abc import Iterable
from typing import Any, Final

from runguard.accounting.charges import OWNERS, AccountLines, Charge, Denied
from runguard.core.events import ModelCall
from runguard.core.money import NOTHING
from runguard.ledger.ledger import Ledger, Refusal

# A charge covers one call of each guard inside. Calls that run at the same time must not all count on it.
_covering: Final = threading.Lock()


def layers_around(home: Any) -> tuple[Charge, ...]:
    """What other guards with the same ledger have opened for the call that is being made.

    ``home``: the Accounts that ask. When a retry between the guards makes another call, nothing around covers it.
    """
    return tuple(
        charge
        for charge in OWNERS.get()
        if not charge.over
        and not charge.is_tool
        and charge.home is not home
        and charge.home.ledger is home.ledger
        and home not in charge.covers
    )


def cover(home: Any) -> tuple[Charge, ...]:
    """Let what is held around the call cover it, and no further call of ``home``."""
    with _covering:
        around = layers_around(home)
        for charge in around:
            charge.covers |= {home}
    return around


def uncover(around: tuple[Charge, ...], home: Any) -> None:
    """The call was not made: the next attempt may be covered."""
    with _covering:
        for charge in around:
            charge.covers -= {home}


def not_held_by(around: tuple[Charge, ...], lines: AccountLines) -> AccountLines:
    """The accounts that are left to hold."""
    if not around:
        return lines
    held = {account.key for charge in around for account in charge.lines.accounts}
    if not any(account.key in held for account in lines.accounts):
        return lines
    kept = [
        (a, m, limit)
        for a, m, limit in zip(lines.accounts, lines.groups, lines.limits, strict=True)
        if a.key not in held
    ]
    accounts, groups, limits = zip(*kept, strict=True) if kept else ((), (), ())
    names = lines.names and lines.names & {account.meter for account in accounts}
    return AccountLines(tuple(accounts), tuple(groups), tuple(limits), lines.until, lines.unknown, names)


def stricter_than(around: tuple[Charge, ...], lines: AccountLines, event: ModelCall) -> Denied | None:
    """What a layer around holds it holds under its own caps, or under none: ours may be lower."""
    held = {account.key: (account, charge.hold) for charge in around for account in charge.lines.accounts}
    usd, tokens = event.bound or (0, 0)
    for account, group in zip(lines.accounts, lines.groups, strict=True):
        theirs, hold = held.get(account.key, (None, None))
        if theirs is None:
            continue
        due = [theirs.due_usd, theirs.due_tokens, theirs.due_calls]  # this call is in it
        for unit, bound in enumerate((usd, tokens)):
            # not with all that a call of unknown cost holds there, but with what it needs here
            if bound is None and hold is not None:
                due[unit] += max(event.least[unit], 1) - hold.amount[unit]
        refusing = next((u for u in range(3) if due[u] > account.caps[u]), None)
        if refusing is not None:
            return Denied(Refusal(account, refusing, NOTHING, account.room), group)
    return None


def held_for_long(refusal: Refusal, ledger: Ledger, standing: Iterable[Charge]) -> int:
    """What is held on the account that refuses and does not come back while a call waits: by the calls around it, and
    by ``standing`` charges.
    """
    unit, key = refusal.unit, refusal.account.key
    holds = [
        charge.hold
        for charge in (*OWNERS.get(), *standing)
        if not charge.over and charge.hold is not None and charge.home is not None and charge.home.ledger is ledger
    ]
    return sum(hold.amount[unit] for hold in holds if any(account.key == key for account in hold.accounts))
