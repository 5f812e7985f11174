"""``runguard store``: show the id of a store, accept a replaced one, repair a damaged one, delete what is old."""

import sys
import time
from typing import Final

import click

from runguard.cli.commands.command import Command, CommandError, CommandGroup, print_json
from runguard.cli.commands.options import Since, json_option, store_option

_TRIES: Final = 5


@click.group(
    "store",
    cls=CommandGroup,
    invoke_without_command=True,
    examples="""
    runguard store
    runguard store adopt 3f2a9c0d5e6b7a81
    runguard store adopt 3f2a9c0d5e6b7a81 --store redis://cache:6379/0
    runguard store repair
    runguard store purge --older-than 7d
    """,
)
@store_option
@json_option
@click.pass_context
def command(ctx: click.Context, store: str | None, as_json: bool) -> None:
    """Show the id of a store; accept it as a replacement; repair it; delete what is old.

    A store has a random id in its data. Running workers refuse a store with another id than the one they know. Exit
    code 0, 1 if the control document (stops and breakers) is damaged, 2 if the store cannot be read.
    """
    if ctx.invoked_subcommand is not None:
        return
    from runguard.cli.commands.stores import look_at
    from runguard.core.decision import printable

    view, _ = look_at(store)
    own, *replaced = view.identity()
    damage = view.damage()
    if as_json:
        print_json(
            {"ok": not damage, "store": view.name, "id": own or None, "replaces": replaced, "damage": damage or None}
        )
    else:
        click.echo(printable(view.name))
        click.echo(f"  id: {own or 'none yet; the next worker creates it'}")
        for old in replaced:
            click.echo(f"  replaces: {old}")
        if damage:
            click.echo(printable(f"  {damage}"))
    sys.exit(1 if damage else 0)


@command.command(
    "adopt",
    cls=Command,
    examples="""
    runguard store adopt 3f2a9c0d5e6b7a81
    runguard store adopt 3f2a9c0d5e6b7a81 --store redis://cache:6379/0
    """,
)
@click.argument("replaced", metavar="ID")
@store_option
@json_option
def adopt_command(replaced: str, store: str | None, as_json: bool) -> None:
    """Accept this store as the replacement of the one with the given id.

    The alert `store_replaced` and the log of the workers that refuse contain the ID. Running workers accept this store
    within about a second. Budgets continue from the accounts of this store; stops of the old store are not in force.
    Exit code 0 if the store is accepted, 2 if it cannot be reached.
    """
    from runguard.cli.commands.stores import named_store
    from runguard.core.decision import printable
    from runguard.ledger.ledger import adopt, is_id

    if not is_id(replaced):
        raise CommandError(
            f"{replaced}: an id has 16 digits of 0-9 and a-f; find it in the alert or in the log line "
            "runguard.store_replaced"
        )
    name, session = named_store(store)
    try:
        own, *others = adopt(session, name, replaced)
        accounts = len(session.read())
    finally:
        session.close()
    if as_json:
        print_json({"ok": True, "store": name, "id": own, "replaces": others, "accounts": accounts})
        return
    click.echo(printable(f"adopted: {name}, id {own}, replaces {replaced}"))
    known = (
        f"has {accounts} accounts: budgets continue from them" if accounts else "is empty: all budgets start at zero"
    )
    click.echo(f"  it {known}. Stops of the old store are not in force: repeat `runguard stop` for each one you need")


@command.command("repair", cls=Command, examples="runguard store repair")
@store_option
@json_option
def repair(store: str | None, as_json: bool) -> None:
    """Remove a damaged control document.

    The document holds the stops of the kill switch and the breakers of tools. While it cannot be read, RunGuard allows
    no call, because the document may hold a stop. Afterwards no stop is in force: repeat `runguard stop` for each one
    you need. Exit code 0 if no damage is left, 2 if the store cannot be reached.
    """
    from runguard.cli.commands.stores import named_store
    from runguard.core.decision import printable
    from runguard.ledger.ledger import repair_control

    name, session = named_store(store)
    try:
        found = repair_control(session, name)
    finally:
        session.close()
    if as_json:
        print_json({"ok": True, "store": name, "repaired": bool(found), "found": found or None})
    elif found:
        click.echo(printable(f"removed: {found}"))
        click.echo("  no stop is in force now: repeat `runguard stop` for each one you need")
    else:
        click.echo("nothing to repair: the control document is readable")


@command.command("purge", cls=Command, examples="runguard store purge --older-than 7d")
@click.option(
    "--older-than", "since", type=Since(), required=True, metavar="TIME", help="A span such as 12h or 7d, or a day."
)
@store_option
@json_option
def purge_command(since: float, store: str | None, as_json: bool) -> None:
    """Delete records, ended runs and past periods that are older.

    Workers do the same once an hour with the policy's `retention_days`. What calls cost stays as sums of days, so
    `runguard spend` does not change. The last minute is always kept. Exit code 0 if it is done, 2 if the store cannot
    be reached.
    """
    from runguard.cli.commands.stores import named_store
    from runguard.core.decision import printable
    from runguard.ledger.ledger import purge

    older_than = time.time() - since  # noqa: TID251 - a command uses the system's clock
    if older_than <= 0:
        raise CommandError("--older-than names a time in the future: use a span such as 7d")
    name, session = named_store(store)
    try:
        if not any(purge(session, older_than) for _ in range(_TRIES)):
            raise CommandError(f"{name}: a worker is summing up its records at this moment; try again")
    finally:
        session.close()
    if as_json:
        print_json({"ok": True, "store": name, "older_than_seconds": round(older_than)})
    else:
        click.echo(printable(f"purged: {name}; what calls cost is kept as sums of days"))
