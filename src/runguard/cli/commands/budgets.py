"""Budgets as a table: spent, reserved by calls in flight, and limit."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from runguard.console.screen import amount, span, table
from runguard.view.rows import BudgetRow


def budget_table(rows: Sequence[BudgetRow], now: float) -> Table:
    shown = table(
        "scope",
        "window",
        "spent",
        "reserved",
        "limit",
        "used",
        "",
        right=("spent", "reserved", "limit", "used"),
        whole=("limit",),
    )
    for row in rows:
        what = {"usd": ""}.get(row.unit, f" {row.unit}")
        limit = f"{amount(row.unit, row.limit + row.granted)}{what}"
        colour = "red" if row.closed or row.share >= 1 else "yellow" if row.share >= 0.8 else ""
        shown.add_row(
            row.scope,
            row.window or "",
            amount(row.unit, row.spent),
            amount(row.unit, row.reserved),
            limit,
            Text(f"{row.share:.0%}", colour),
            _remarks(row, now),
        )
    return shown


def _remarks(row: BudgetRow, now: float) -> str:
    remarks = [f"{amount(row.unit, row.granted)} extension"] if row.granted else []
    remarks += [f"{amount(row.unit, row.overrun)} over"] if row.overrun else []
    remarks += ["closed until it is extended" + (" or the next window" if row.ends else "")] if row.closed else []
    remarks += [f"resets in {span(row.ends - now)}"] if row.ends else []
    if row.forecast is not None and row.share < 1:
        at, share = row.forecast.used_up_at, row.forecast.share_at_end
        remarks.append(f"about {share:.0%} by then" if at is None else f"used up in about {span(at - now)}")
    return ", ".join(remarks)
