"""Tells the model what is left: one line in its next request when a stated share of a limit is spent.

Setting: ``budget_notice``. The line goes where nudges go, so every adapter adds it at the same place: behind everything
else in a request.
"""

from collections.abc import Iterator
from typing import Final

from runguard.core.money import UNLIMITED, amount_text
from runguard.engine.charges import Charge
from runguard.engine.context import GuardContext
from runguard.engine.runs import Run

_SHOWN: Final = 3  # limits in one line, the scarcest first
_STEPS: Final = "model calls"
_NOTE: Final = "budget_notice"  # how many shares the model of a run was told of


class BudgetNotices:
    """The notices of one guard."""

    def __init__(self, context: GuardContext) -> None:
        self._shares = sorted(context.policy.notice_shares)  # at which parts of a limit a run is told
        if self._shares and context.enforces:
            context.sink.on("settled", "settle", self.settled)

    def settled(self, run: Run, charge: Charge) -> None:
        """Leave a line for the next request where another share is spent."""
        if charge.is_tool:
            return
        limits = sorted(_limits(run, charge), reverse=True)
        reached = sum(limits[0][0] >= share for share in self._shares) if limits else 0
        if reached <= run.notes.get(_NOTE, 0):
            return
        run.notes[_NOTE] = reached
        told = "; ".join(dict.fromkeys(text for share, text in limits[:_SHOWN] if share >= self._shares[0]))
        lane = run.lane(charge.lane)
        lane.notice = f"{lane.notice}\n{_TEXT.format(left=told)}".lstrip()


_TEXT: Final = "What is left for this work: {left}. Plan the remaining steps so that it is enough."


def _limits(run: Run, charge: Charge) -> Iterator[tuple[float, str]]:
    """Yield the spent share of each limit that the run is under, and what is left of it."""
    for account in charge.lines.accounts:
        caps = account.cap_usd, account.cap_tokens, account.cap_calls
        spent = account.spent_usd, account.spent_tokens, account.spent_calls
        for unit, (cap, used) in enumerate(zip(caps, spent, strict=True)):
            if 0 < cap < UNLIMITED:
                left = amount_text(unit, max(cap - used, 0))
                yield used / cap, f"{left} of {amount_text(unit, cap)}"
    calls = run.model_calls
    if calls is not None:
        yield calls.count / calls.limit, f"{max(calls.limit - calls.kept - calls.count, 0)} of {calls.limit} {_STEPS}"
