"""``runguard demo``: stop runaways and leave healthy runs alone, on real ADK."""

import sys

import click

from runguard.cli.commands.command import Command, fail


@click.command("demo", cls=Command, examples="runguard demo\nrunguard demo --seed-table\nrunguard demo --json")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON instead of tables.")
@click.option("--seed-table", is_flag=True, help="Run the seed's failure modes and compare with its figures.")
@click.pass_context
def command(ctx: click.Context, as_json: bool, seed_table: bool) -> None:
    """Show runaway agents being stopped and healthy ones left alone.

    Runs four runaways and six healthy look-alikes, each without and with the guard on its defaults, on real Google ADK
    with scripted models: no network, no key. Exit code 0 if every runaway was stopped and no healthy run was touched, 1
    otherwise, 2 without google-adk. With --seed-table, exit code 0 means that the seed's values stop each of its
    failure modes.
    """
    from runguard.demo import AdkMissingError, run

    try:
        code = run(as_json=as_json, seed_table=seed_table)
    except AdkMissingError as error:
        fail(ctx, str(error))
    sys.exit(code)
