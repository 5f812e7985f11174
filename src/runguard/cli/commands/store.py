"""``runguard store``: which store this is, and what to do when it was replaced or damaged."""

import sys

import click

from runguard.cli.commands.command import Command, CommandError, Group, json_option, print_json, store_option


@click.group(
    "store",
    cls=Group,
    invoke_without_command=True,
    examples="""
    runguard store
    runguard store adopt 3f2a9c0d5e6b7a81
    runguard store adopt 3f2a9c0d5e6b7a81 --store redis://cache:6379/0
    runguard store repair
    """,
)
@store_option
@json_option
@click.pass_context
def command(ctx: click.Context, store: str | None, as_json: bool) -> None:
    """Show which store this is; accept it in place of another one.

    A store has a random id in its data. Workers that have seen an id refuse to work with a store that has another
    one. Exit code 0, 1 when the control document (stops and breakers) is damaged, 2 when the store cannot be read.
    """
    if ctx.invoked_subcommand is not None:
        return
    from runguard.cli.commands.stores import look_at
    from runguard.core.printable import printable

    view, _ = look_at(store)
    own, *replaced = view.identity()
    damage = view.damage()
    if as_json:
        print_json(
            {"ok": not damage, "store": view.name, "id": own or None, "replaces": replaced, "damage": damage or None}
        )
    else:
        click.echo(printable(view.name))
        click.echo(f"  id: {own or 'none yet; the next worker gives it one'}")
        for old in replaced:
            click.echo(f"  in place of: {old}")
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
    """Accept this store in place of the one that has the given id.

    ID stands in the alert `store_replaced` and in the log of the workers that refuse. Running workers that have seen it
    accept this store within about a second. Budgets go on from what this store knows of them; stops of the old store
    are not in force. Exit code 0 when the store is accepted, 2 when it cannot be reached.
    """
    from runguard.cli.commands.stores import named_store
    from runguard.core.printable import printable
    from runguard.ledger.identity import adopt, is_id

    if not is_id(replaced):
        raise CommandError(
            f"{replaced}: an id has 16 digits of 0-9 and a-f; it stands in the alert and in the log line "
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
    click.echo(printable(f"adopted: {name}, id {own}, in place of {replaced}"))
    known = f"knows {accounts} accounts: budgets go on from there" if accounts else "is empty: all budgets begin anew"
    click.echo(f"  it {known}. Stops of the old store are not in force: throw those again that must hold")


@command.command("repair", cls=Command, examples="runguard store repair")
@store_option
@json_option
def repair(store: str | None, as_json: bool) -> None:
    """Remove a control document that is damaged.

    The document holds the stops of the kill switch and the breakers of tools. While it cannot be read, no call is made,
    because it may hold a stop. Afterwards no stop is in force: throw those again that must hold. Exit code 0 when there
    is no damage left, 2 when the store cannot be reached.
    """
    from runguard.cli.commands.stores import named_store
    from runguard.core.printable import printable
    from runguard.ledger.control import repair_control

    name, session = named_store(store)
    try:
        found = repair_control(session, name)
    finally:
        session.close()
    if as_json:
        print_json({"ok": True, "store": name, "repaired": bool(found), "found": found or None})
    elif found:
        click.echo(printable(f"removed: {found}"))
        click.echo("  no stop is in force now: throw those again that must hold")
    else:
        click.echo("nothing to repair: the control document can be read")
