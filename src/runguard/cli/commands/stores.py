"""The store that a command reads or changes, ``--store`` or the store of the policy in force, and its scopes."""

import logging
from typing import Final

import click

from runguard.cli.commands.command import CommandError
from runguard.cli.commands.policies import policy_here
from runguard.core.decision import printable
from runguard.core.errors import PolicyError, nearest
from runguard.core.events import RunInfo
from runguard.engine.charges import scopes_of
from runguard.engine.guard import Guard
from runguard.ledger.ledger import ALL, StoreOutage, StoreSession
from runguard.ledger.memory import store_of
from runguard.ledger.sqlite import SqliteStore
from runguard.policy.settings import Policy
from runguard.view.rows import RunningRow
from runguard.view.store_view import StoreView

_ALERTS_S: Final = 5.0
_LOOK_S: Final = 3.0
_SHOWN: Final = 20


def look_at(store: str | None) -> tuple[StoreView, Policy]:
    """Return a view of the store and the policy in force; raise if the store is not durable or does not answer.

    The view is closed when the command ends.
    """
    policy = _policy(store)
    check_file(policy.store)
    # an outage ends the command with one message; do not log it as well
    logging.getLogger("runguard").addHandler(logging.NullHandler())
    view = StoreView(policy.store, _LOOK_S)
    click.get_current_context().call_on_close(view.close)
    try:
        view.now()
    except StoreOutage as error:
        if policy.store.startswith("sqlite:"):
            raise
        message = str(error)
        raise CommandError(
            f"{message}{' ' if message.endswith(('.', '?')) else '. '}"
            "Start the store, check host and port, or pass another --store"
        ) from None
    return view, policy


def named_store(store: str | None) -> tuple[str, StoreSession]:
    """Return the name of the store and a connection to it; initialize an empty store."""
    policy = _policy(store)
    if policy.store == "memory":
        raise CommandError(
            "store = 'memory' ends with its process; name a durable store, in the policy or with --store"
        )
    check_file(policy.store)
    found = store_of(policy.store)
    return found.name, found.connect(_LOOK_S)


def _policy(store: str | None) -> Policy:
    """Return the policy in force. With ``--store``, an invalid policy must not block status or the kill switch."""
    if store is None:
        try:
            return policy_here()
        except PolicyError as error:
            raise CommandError(f"{error}\npass --store URL to work without this policy") from None
    alone = Policy.validated({"store": store}, "--store")
    try:
        return policy_here(store)
    except PolicyError as error:
        click.echo(f"note: ignoring the local policy; its alerts will not be sent: {error}", err=True)
        return alone


def check_file(store: str) -> None:
    """Reject a directory as a SQLite store; it would look like a file that does not exist yet."""
    if store.startswith("sqlite:") and (path := SqliteStore(store).path).is_dir():
        raise CommandError(
            f"sqlite:///{path}: is a directory; name a file in it, such as sqlite:///{path / 'guard.db'}"
        )


def desk(policy: Policy) -> Guard:
    """Return a guard for operators: it changes accounts and the kill switch and sends the policy's alerts."""
    return Guard(policy.model_copy(update={"telemetry": False}), switches_models=True)


def tell_alerts(guard: Guard) -> list[str]:
    """Wait until the policy's alerts are sent; return a note if they were not."""
    if guard.flush(_ALERTS_S) or guard.alarms is None:
        return []
    return [f"the alerts of the policy were not sent within {_ALERTS_S:g} s"]


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
