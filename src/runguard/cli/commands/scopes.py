"""Scopes on the command line: which ones a store knows, and who runs in one now."""

from difflib import get_close_matches
from typing import Final

from runguard.accounting.charges import scopes_of
from runguard.core.events import RunInfo
from runguard.core.printable import printable
from runguard.ledger.kill_switch import ALL
from runguard.view.rows import RunningRow
from runguard.view.store_view import StoreView

_SHOWN: Final = 20


def running_in(view: StoreView, scope: str) -> list[str]:
    """The runs of a scope that are alive now."""
    return [row.run for row in view.running() if scope == ALL or scope in _scopes(row)]


def known_scopes(view: StoreView) -> list[str]:
    """Every scope that has a budget in the store, or a run now."""
    running = {scope for row in view.running() for scope in _scopes(row)}
    return sorted({row.scope for row in view.budgets()} | running)


def near(scope: str, known: list[str]) -> str:
    """The known scopes for somebody who gave another one: the nearest, or the first of all."""
    if not known:
        return "this store knows no scope yet"
    known = printable(known)
    close = get_close_matches(scope, known, n=2, cutoff=0.8)
    if close:
        return f"did you mean {' or '.join(close)}?"
    shown = ", ".join(known[:_SHOWN])
    return f"this store knows {shown}" + (f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else "")


def _scopes(row: RunningRow) -> tuple[str, ...]:
    return scopes_of(RunInfo(run=row.run, app=row.app, user=row.user, session=row.session))
