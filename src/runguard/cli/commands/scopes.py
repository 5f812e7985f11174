"""Scopes on the command line: the ones that a store knows, and the runs in one of them."""

from typing import Final

from runguard.accounting.budget_groups import scopes_of
from runguard.core.events import RunInfo
from runguard.core.mistakes import nearest
from runguard.core.printable import printable
from runguard.ledger.kill_switch import ALL
from runguard.view.rows import RunningRow
from runguard.view.store_view import StoreView

_SHOWN: Final = 20


def running_in(view: StoreView, scope: str) -> list[str]:
    """Return the ids of the active runs of a scope."""
    return [row.run for row in view.running() if scope == ALL or scope in _scopes(row)]


def known_scopes(view: StoreView) -> list[str]:
    """Return every scope that has a budget in the store or an active run."""
    running = {scope for row in view.running() for scope in _scopes(row)}
    return sorted({row.scope for row in view.budgets()} | running)


def near(scope: str, known: list[str]) -> str:
    """Return a hint for an unknown scope: the nearest one, or the first ones of the store."""
    if not known:
        return "this store has no scope yet"
    return nearest(scope, printable(known), cutoff=0.8, shown=_SHOWN)


def _scopes(row: RunningRow) -> tuple[str, ...]:
    return scopes_of(RunInfo(run=row.run, app=row.app, user=row.user, session=row.session))
