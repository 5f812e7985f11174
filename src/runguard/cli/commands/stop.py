"""``runguard stop``: the kill switch for every worker that shares a store."""

import getpass

import click

from runguard.cli.commands.command import Command, CommandError, print_json
from runguard.cli.commands.options import json_option, store_option


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container's user may have no name
        return "unknown"


@click.command(
    "stop",
    cls=Command,
    examples="""
    runguard stop user:docs/alice --reason "looking into her bill"
    runguard stop app:docs --reason "bad release" --actor oncall
    runguard stop all --reason "provider incident" --store redis://cache:6379/0
    """,
)
@click.argument("scope")
@click.option("--reason", default="", help="The reason; every following trip contains it.")
@click.option("--actor", default=_user, show_default="the user of this system", help="Who stops the scope.")
@store_option
@json_option
def command(scope: str, reason: str, actor: str, store: str | None, as_json: bool) -> None:
    """Stop a run, session, user, app or everything (the kill switch).

    SCOPE is run:ID, session:APP/USER/ID, user:APP/USER, app:APP or all. Every worker that shares the store ends
    model calls in flight within about a second and refuses later calls and new runs, until `runguard resume SCOPE`.
    Exit code 0 if the stop is in force, 2 if not.
    """
    from runguard.cli.commands.stores import desk, known_scopes, look_at, near, running_in, tell_alerts
    from runguard.console.hints import hint
    from runguard.core.decision import printable
    from runguard.ledger.ledger import ALL, check_scope

    check_scope(scope)
    if not actor.strip():
        raise CommandError("--actor: must not be empty")
    reason = reason if reason.strip() else ""
    view, policy = look_at(store)
    before = next((stop for stop in view.stops() if stop.scope == scope), None)
    runs = running_in(view, scope)
    guard = desk(policy)
    guard.throw_switch(scope, actor, reason)
    notes = [f"it was already stopped by {before.actor}{before.because}"] if before is not None else []
    if not runs and before is None and scope != ALL and scope not in (known := known_scopes(view)):
        notes.append(f"the store has no budget and no active run of {scope}; {near(scope, known)}")
    notes += tell_alerts(guard)
    if as_json:
        print_json(
            {
                "ok": True,
                "scope": scope,
                "actor": actor,
                "reason": reason,
                "store": view.name,
                "running": runs,
                "notes": notes,
            }
        )
        return
    click.echo(printable(f"stopped: {scope}, by {actor}" + (f": {reason}" if reason else "")))
    if runs:
        runs = printable(runs)
        click.echo(
            f"  {len(runs)} running now; they end within about a second: "
            f"{', '.join(runs[:5])}{' and more' if len(runs) > 5 else ''}"
        )
    for note in printable(notes):
        click.echo(f"  note: {note}")
    click.echo(f"  lift it with: {hint('resume', scope, store)}")
