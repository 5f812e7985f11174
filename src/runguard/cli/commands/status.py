"""``runguard status``: show the current state of a store."""

import sys
from typing import TYPE_CHECKING, Any, Final

import click

from runguard.cli.commands.command import Command, print_json
from runguard.cli.commands.options import Since, json_option, store_option
from runguard.core.money import Per

if TYPE_CHECKING:
    from runguard.policy import Policy
    from runguard.view.rows import BudgetRow
    from runguard.view.store_view import StoreView

_ROWS: Final = 25


@click.command(
    "status",
    cls=Command,
    examples="""
    runguard status
    runguard status --by user --since 7d
    runguard status --scope user:docs/ --all
    runguard status --store redis://cache:6379/0 --json
    """,
)
@click.option(
    "--scope", metavar="PREFIX", default="", help="Only budgets whose scope starts with this: user:, user:docs/alice."
)
@click.option(
    "--by",
    type=click.Choice(["app", "agent", "model", "user", "tool"]),
    default="app",
    show_default=True,
    help="Group spending by this.",
)
@click.option(
    "--since",
    type=Since(),
    default="24h",
    show_default=True,
    help="Spending since this time: 90m, 24h, 7d, 2026-11-01.",
)
@click.option("--all", "every", is_flag=True, help="Every budget, not only the fullest.")
@store_option
@json_option
def command(scope: str, by: str, since: float, every: bool, store: str | None, as_json: bool) -> None:
    """Show budgets, spend, running runs, stops and breakers.

    Covers all workers that share the store. Budgets show what is spent and what calls in flight have reserved. Exit
    code 0 if nothing needs attention, 1 if a stop is in force, a breaker is open or a budget is used up, 2 if the store
    cannot be read.
    """
    from runguard.cli.commands.stores import look_at
    from runguard.view.rows import plain

    view, policy = look_at(store)
    state = _gather(view, scope, by, since)
    limits = _rate_limits(policy)
    attention = (
        bool(state["stops"])
        or any(b.state != "closed" for b in state["breakers"])
        or any(_is_used_up(row) and (row.scope.partition(":")[0], row.window) not in limits for row in state["budgets"])
    )
    if as_json:
        stops = [
            {"scope": stop.scope, "actor": stop.actor, "reason": stop.reason, "at": stop.at} for stop in state["stops"]
        ]
        spend = state["spend"]
        figures = {
            "by": by,
            "since": spend.since,
            "until": spend.until,
            "total": spend.total,
            "totals": spend.totals,
            "capped_at": spend.capped_at,
        }
        print_json(
            plain(
                {
                    "ok": not attention,
                    "store": view.name,
                    "mode": policy.mode,
                    **state,
                    "stops": stops,
                    "spend": figures,
                }
            )
        )
    else:
        from runguard.cli.commands.status_screen import print_status

        print_status(view, policy, state, None if every else _ROWS, store, scope)
    sys.exit(1 if attention else 0)


def _gather(view: "StoreView", scope: str, by: str, since: float) -> dict[str, Any]:
    now = view.now()
    budgets = [row for row in view.budgets() if row.scope.startswith(scope)]
    return {
        "now": now,
        "stops": view.stops(),
        "running": view.running(),
        "budgets": budgets,
        "spend": view.spend(since, now, by),
        "breakers": view.breakers(),
        "unreadable": view.unreadable.total,
    }


def _rate_limits(policy: "Policy") -> set[tuple[str, str | None]]:
    """Return kind and window of the budgets that wait: they are meant to be used up."""
    ways: dict[tuple[str, str | None], set[str]] = {}
    for budget in policy.budgets:
        ways.setdefault((Per.parse(budget.per).kind, budget.window), set()).add(budget.on_exhausted)
    return {key for key, found in ways.items() if found == {"wait"}}


def _is_used_up(row: "BudgetRow") -> bool:
    """Return whether a budget is spent; an unspent cap of 0 is a plan without money, not a used-up budget."""
    return row.closed or (row.spent > 0 and row.spent >= row.limit + row.granted)
