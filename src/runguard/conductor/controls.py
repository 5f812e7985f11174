"""What an operator can see and do, the same on a plugin, a guarded model and a guarded function."""

from typing import TYPE_CHECKING, Any

from runguard.conductor.guard import Guard
from runguard.core.decision import Trip
from runguard.core.money import BudgetStatus
from runguard.ledger.ledger import Stop


class Controls:
    """Mixed into whatever has a ``guard``."""

    if TYPE_CHECKING:  # no annotation at run time: a pydantic class that this is mixed into would take it for a field
        guard: Guard

    @property
    def _in_charge(self) -> Guard:
        """The guard that answers here: this one, or the one that has replaced it."""
        return self.guard

    @property
    def trips(self) -> list[Trip]:
        """The last 1,000 trips, oldest first; in shadow mode those that would have been."""
        return list(self._in_charge.trips)

    def snapshot(self) -> dict[str, Any]:
        """What runs now: calls, tokens, prompt growth, breakers. Plain data."""
        return self._in_charge.snapshot()

    def spend(self, scope: str | None = None) -> dict[str, Any]:
        """What was spent, in all and per agent, model and tool:

        of a scope ("run:…", "session:app/user/id", "user:app/user", "app:…"), or of everything.
        """
        return self._in_charge.accounts.spend(scope)

    def budgets(self, scope: str | None = None) -> list[BudgetStatus]:
        """Every budget as it stands: spent, reserved and limit apart."""
        return self._in_charge.accounts.budgets(scope)

    def extend(self, scope: str, *, usd: Any = None, tokens: Any = None, calls: Any = None) -> list[BudgetStatus]:
        """Move the caps of a scope:

        ``extend("user:docs/alice", usd=5)``. What was spent stays spent; the next run goes on.
        """
        return self._in_charge.accounts.extend(scope, usd, tokens, calls)

    def stop(self, scope: str, *, actor: str, reason: str | None = None) -> None:
        """The kill switch: ``stop("user:docs/alice", actor="ops", reason="...")``; a run, session, user, app or "all".

        Model calls in flight are ended, new ones and new runs are refused until ``resume``; with a shared
        store, by every worker.
        """
        self._in_charge.throw_switch(scope, actor, reason)

    def resume(self, scope: str) -> None:
        """Take a stop back."""
        self._in_charge.release_switch(scope)

    def stops(self) -> list[Stop]:
        """The stops in force."""
        return self._in_charge.operator_stops.in_force()

    def flush(self, seconds: float = 2.0) -> bool:
        """Wait, bounded, until everything handed over has left (facts, callbacks, alerts): for tests and shutdown.

        False when something is left, or when a settlement could never be booked; ``snapshot()["store"]`` says how many.
        """
        return self._in_charge.flush(seconds)
