"""``runguard extend``: raise the budget of a scope in its current period."""

import click

from runguard.cli.commands.command import Command, CommandError, print_json
from runguard.cli.commands.options import json_option, store_option


@click.command(
    "extend",
    cls=Command,
    examples="""
    runguard extend user:docs/alice --usd 5
    runguard extend session:docs/alice/s1 --tokens 200000
    runguard extend app:docs --usd 20 --calls 500 --store sqlite:///guard.db
    """,
)
@click.argument("scope")
@click.option("--usd", metavar="DOLLARS", help="Dollars to add.")
@click.option("--tokens", type=click.IntRange(min=1), help="Tokens to add.")
@click.option("--calls", type=click.IntRange(min=1), help="Model calls to add.")
@store_option
@json_option
def command(
    scope: str, usd: str | None, tokens: int | None, calls: int | None, store: str | None, as_json: bool
) -> None:
    """Raise the budget of a scope.

    SCOPE is a scope as `runguard status` shows it, or a trip's scope_id. The command raises all its budgets in that
    unit, in every current window. Past spending still counts, and the next period begins with the policy's amount
    again. Exit code 0 if a budget was raised, 2 if there is no such budget.
    """
    from runguard.cli.commands.status_screen import budget_table
    from runguard.cli.commands.stores import desk, known_scopes, look_at, near, tell_alerts
    from runguard.console.screen import console, print_table
    from runguard.core.decision import printable
    from runguard.core.errors import PolicyError
    from runguard.view.rows import plain

    if usd is None and tokens is None and calls is None:
        raise CommandError("nothing to add: pass --usd, --tokens or --calls")
    _check_dollars(usd)
    view, policy = look_at(store)
    guard = desk(policy)
    try:
        moved = {
            (status.scope, status.window, status.unit) for status in guard.accounts.extend(scope, usd, tokens, calls)
        }
    except PolicyError:
        units = sorted({row.unit for row in view.budgets(ended_runs=True) if row.scope == scope})
        if units:
            raise CommandError(
                f"{scope}: its budgets limit {' and '.join(units)}; pass --{' or --'.join(units)}"
            ) from None
        raise CommandError(f"{scope}: no budget of that scope; {near(scope, known_scopes(view))}") from None
    notes = tell_alerts(guard)
    rows = [row for row in view.budgets(ended_runs=True) if (row.scope, row.window, row.unit) in moved]
    if as_json:
        print_json({"ok": True, "scope": scope, "budgets": plain(rows), "store": view.name, "notes": notes})
        return
    click.echo(f"extended: {printable(scope)}")
    print_table(console(), budget_table(printable(rows), view.now()))
    for note in printable(notes):
        click.echo(f"note: {note}")


def _check_dollars(usd: str | None) -> None:
    """Check the amount here, because the policy's message would speak of a limit."""
    from decimal import Decimal, InvalidOperation

    from runguard.core.money import to_nano

    if usd is None:
        return
    try:
        is_more = Decimal(usd).is_finite() and Decimal(usd) > 0
    except InvalidOperation:
        is_more = False
    if not is_more and usd.strip().startswith("-"):
        raise CommandError(f"--usd {usd}: must be greater than 0")
    if not is_more:
        raise CommandError(f"--usd {usd}: must be a number of dollars greater than 0, such as 2.50")
    to_nano(usd, "--usd")
