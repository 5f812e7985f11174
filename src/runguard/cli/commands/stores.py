"""The store that a command looks at or acts on: that of ``--store``, or of the policy in force."""

import logging
from typing import Final

import click

from runguard.cli.commands.command import CommandError
from runguard.cli.commands.policies import policy_here
from runguard.conductor.guard import Guard
from runguard.core.exceptions import PolicyError
from runguard.ledger.sqlite.backend import SqliteStore
from runguard.ledger.store import Session, StoreOutage
from runguard.ledger.urls import store_of
from runguard.policy.settings import Policy
from runguard.view.store_view import StoreView

_ALERTS_S: Final = 5.0
_LOOK_S: Final = 3.0


def look_at(store: str | None) -> tuple[StoreView, Policy]:
    """A look at the store, which has answered, and the policy in force; raises where there is no durable one, or it is
    away.
    """
    policy = _policy(store)
    check_file(policy.store)
    # an outage ends the command with its message: not told twice
    logging.getLogger("runguard").addHandler(logging.NullHandler())
    view = StoreView(policy.store, _LOOK_S)
    try:
        view.now()
    except StoreOutage as error:
        if policy.store.startswith("sqlite:"):
            raise
        said = str(error)
        raise CommandError(
            f"{said}{' ' if said.endswith(('.', '?')) else '. '}Start it, check host and port, or give another --store"
        ) from None
    return view, policy


def named_store(store: str | None) -> tuple[str, Session]:
    """The name of the store and a connection to it; an empty place is made a store."""
    policy = _policy(store)
    if policy.store == "memory":
        raise CommandError(
            "store = 'memory' lives and dies with its process; name a durable store, in the policy or with --store"
        )
    check_file(policy.store)
    found = store_of(policy.store)
    return found.name, found.connect(_LOOK_S)


def _policy(store: str | None) -> Policy:
    """The policy in force. With a store named, one that is not valid here keeps nobody from looking or from the kill
    switch.
    """
    if store is None:
        try:
            return policy_here()
        except PolicyError as error:
            raise CommandError(f"{error}\ngive --store URL to look and act without this policy") from None
    alone = Policy.validated({"store": store}, "--store")
    try:
        return policy_here(store)
    except PolicyError as error:
        click.echo(f"note: the policy here is left out, and its alerts are not told: {error}", err=True)
        return alone


def check_file(store: str) -> None:
    """A folder can be no SQLite store, and looks like one that is not there yet."""
    if store.startswith("sqlite:") and (path := SqliteStore(store).path).is_dir():
        raise CommandError(
            f"sqlite:///{path}: is a directory; name a file in it, such as sqlite:///{path / 'guard.db'}"
        )


def desk(policy: Policy) -> Guard:
    """A guard to act with: it runs nothing, changes accounts and the kill switch, and tells those whom the policy's
    alerts name.
    """
    return Guard(policy.model_copy(update={"telemetry": False}))


def tell_alerts(guard: Guard) -> list[str]:
    """Wait until the policy's alerts have left; what to say when they have not."""
    if guard.flush(_ALERTS_S) or guard.alarms is None:
        return []
    return [f"the alerts of the policy had not left after {_ALERTS_S:g} s"]
