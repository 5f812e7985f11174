"""Settlements that linger: the next reservation on the same accounts takes one along, as one step of the store.

A run settles one call and soon reserves the next. Together they take one round trip and one commit instead of two.
"""

from collections.abc import Callable, Sequence

from runguard.core.money import Amount
from runguard.ledger.base import Account, Hold
from runguard.ledger.facts import Fact, Facts
from runguard.ledger.store import Line, Record, SettledCall, StoreError, StoreReply, StoreSession
from runguard.ledger.stored_account import lines_of


def settlement_of(hold: Hold, actual: Amount, then: Callable[[], None] | None, record: Record | None) -> Fact:
    """The fact that a call is over."""
    bill = SettledCall(hold.id, lines_of(hold.accounts), actual, record)

    def write(session: StoreSession) -> StoreReply:
        return session.settle(bill.hold, bill.lines, bill.actual, bill.record)

    return Fact(write, hold.accounts, then, repeatable=True, bill=bill)


def reaches_alert(accounts: Sequence[Account], more: Amount) -> bool:
    """Whether an account that spends ``more`` reaches its next threshold."""
    return any(
        spent + added >= alert
        for account in accounts
        for spent, added, alert in zip(account.spent, more, account.alert, strict=True)
    )


def is_unnoticed(hold: Hold, actual: Amount) -> bool:
    """Whether it makes no difference to any call that a settlement is booked a moment later.

    Its hold covers it, so that nothing is lost with a process that is killed meanwhile. No threshold is reached. Half
    of every budget is free, so that no other worker is refused because of the hold.
    """
    if not hold.is_open or any(took > held for took, held in zip(actual, hold.amount, strict=True)):
        return False
    for account in hold.accounts:
        due = (account.due_usd, account.due_tokens, account.due_calls)
        if account.closed or any(2 * now > cap for now, cap in zip(due, account.caps, strict=True)):
            return False
    return not reaches_alert(hold.accounts, actual)


def reserve_along(
    facts: Facts, session: StoreSession, hold: Hold, ttl: float, lines: Sequence[Line], force: bool
) -> tuple[StoreReply, tuple[Fact, StoreReply] | None]:
    """Reserve, and settle what lingers on the same accounts: the reply, and the settlement with its reply."""
    fact = facts.take(tuple(account.key for account in hold.accounts))
    if fact is None or fact.bill is None:
        return session.reserve(hold.id, ttl, lines, hold.amount, force=force), None
    try:
        settled, reply = session.settle_and_reserve(fact.bill, hold.id, ttl, lines, hold.amount, force=force)
    except BaseException as error:
        facts.give_back(fact)
        if not isinstance(error, StoreError):
            raise
        # The store may refuse the settlement alone, which must not refuse this call.
        return session.reserve(hold.id, ttl, lines, hold.amount, force=force), None
    facts.booked(fact)
    return reply, (fact, settled)
