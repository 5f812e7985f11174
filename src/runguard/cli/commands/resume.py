"""``runguard resume``: lift a stop."""

import sys

import click

from runguard.cli.commands.command import Command, CommandError, print_json
from runguard.cli.commands.options import json_option, store_option


@click.command(
    "resume",
    cls=Command,
    examples="""
    runguard resume user:docs/alice
    runguard resume all
    """,
)
@click.argument("scope")
@store_option
@json_option
def command(scope: str, store: str | None, as_json: bool) -> None:
    """Lift a stop.

    SCOPE is the scope given to `runguard stop`. The next turn continues where the last one ended. A spent budget is not
    a stop: see `runguard extend`. Exit code 0 if the stop was lifted, 1 if there was none, 2 if the store cannot be
    used.
    """
    from dataclasses import asdict

    from runguard.cli.commands.stores import desk, look_at, tell_alerts
    from runguard.core.decision import printable
    from runguard.core.errors import PolicyError
    from runguard.ledger.ledger import check_scope

    try:
        check_scope(scope)
    except PolicyError as error:
        raise CommandError(str(error).replace(" cannot be stopped;", " cannot be resumed;")) from None
    view, policy = look_at(store)
    stops = {stop.scope: stop for stop in view.stops()}
    before = stops.pop(scope, None)
    notes = []
    if before is not None:
        guard = desk(policy)
        guard.release_switch(scope)
        notes = tell_alerts(guard)
    if as_json:
        taken = asdict(before) if before is not None else None
        print_json(
            {
                "ok": before is not None,
                "scope": scope,
                "store": view.name,
                "stop": taken,
                "stops": [asdict(stop) for stop in stops.values()],
                "notes": notes,
            }
        )
    else:
        before, stops, scope = printable((before, stops, scope))
        if before is None:
            click.echo(f"{scope} is not stopped", err=True)
        else:
            click.echo(f"resumed: {scope}, stopped by {before.actor}{before.because}")
        for stop in stops.values():
            click.echo(f"  still stopped: {stop.scope}, by {stop.actor}{stop.because}")
        for note in printable(notes):
            click.echo(f"  note: {note}")
    sys.exit(0 if before is not None else 1)
