"""``runguard spend``: what the calls of a store cost, grouped for a bill."""

import csv
import re
import sys
from dataclasses import asdict
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import click

from runguard.cli.commands.command import Command, print_json
from runguard.cli.commands.options import json_option, store_option

if TYPE_CHECKING:
    from runguard.view.bill import BillRow

_DAYS: Final = re.compile(r"([1-9]\d{0,3})([dw])")
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet runs a cell that begins with one of these


class Day(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A day in UTC: 30d or 4w back, today included, or 2026-11-01."""

    name = "day"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> date:
        if isinstance(value, date):
            return value
        if (found := _DAYS.fullmatch(value.strip().lower())) is not None:
            days = int(found[1]) * (7 if found[2] == "w" else 1)
            return datetime.now(UTC).date() - timedelta(days - 1)  # noqa: TID251 - a command uses the system's clock
        try:
            return date.fromisoformat(value.strip())
        except ValueError:
            self.fail(f"{value!r} is not a day; sums are kept by day: use 30d, 4w or 2026-11-01", param, ctx)


@click.command(
    "spend",
    cls=Command,
    examples="""
    runguard spend --by app,user --since 30d
    runguard spend --by day,model --since 2026-11-01 --until 2026-11-30
    runguard spend --by label:team --csv > november.csv
    """,
)
@click.option(
    "--by",
    default="app",
    show_default=True,
    metavar="GROUPS",
    help="What to group by, with commas: day, app, user, agent, model, tool, label:NAME.",
)
@click.option("--since", type=Day(), default="30d", show_default=True, help="The first day: 30d, 4w, 2026-11-01.")
@click.option("--until", type=Day(), default="1d", help="The last day. Default: today.")
@click.option("--csv", "as_csv", is_flag=True, help="Print the rows as CSV.")
@store_option
@json_option
def command(by: str, since: date, until: date, as_csv: bool, store: str | None, as_json: bool) -> None:
    """Show what calls cost by app, user, model or label, for a bill.

    Days are in UTC. Sums are exact and equal the budgets' accounts; they are kept when old records are purged. Exit
    code 0, also if nothing was spent, or 2 if the store cannot be read.
    """
    if as_csv and as_json:
        raise click.UsageError("give --csv or --json, not both")
    if since > until:
        raise click.UsageError(f"--since {since} is after --until {until}")
    from runguard.cli.commands.stores import look_at
    from runguard.view.bill import bill_of, check_groups

    groups = check_groups([name.strip() for name in by.split(",") if name.strip()] or ["app"])
    view, _ = look_at(store)
    days = view.daily_sums(since, until)
    unreadable = sum(sums.unreadable for sums in days.values())
    rows, total = bill_of(days, groups)
    if as_json:
        named = [dict(zip(groups, row.names, strict=True)) | _figures(row) for row in rows]
        facts = {"ok": True, "store": view.name, "since": str(since), "until": str(until), "by": groups}
        print_json({**facts, "rows": named, "total": _figures(total), "unreadable": unreadable})
    elif as_csv:
        _print_csv(groups, rows)
    else:
        _print_screen(f"{view.name}: {since} to {until} (UTC)", groups, rows, total, unreadable)


def _figures(row: "BillRow") -> dict[str, Any]:
    figures = asdict(row)
    del figures["names"]
    return {**figures, "usd": f"{row.usd:f}"}


def _print_csv(groups: tuple[str, ...], rows: list["BillRow"]) -> None:
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow([*groups, "calls", "tool_calls", "input_tokens", "output_tokens", "usd", "unpriced", "estimated"])
    for row in rows:
        names = [f"'{name}" if name.startswith(_FORMULA) else name for name in row.names]
        out.writerow([*names, *_figures(row).values()])


def _print_screen(
    title: str, groups: tuple[str, ...], rows: list["BillRow"], total: "BillRow", unreadable: int
) -> None:
    from runguard.console.screen import console, heading, print_table, table, usd
    from runguard.core.decision import printable

    out = console()
    if not rows:
        out.print(f"{title}: no call is recorded", soft_wrap=True)
        return
    out.print(heading(title), soft_wrap=True)
    right = ("calls", "priced tool calls", "input", "output", "cost")
    shown = table(*groups, *right, "", right=right, whole=(*right,))
    for row in [*rows, total] if len(rows) > 1 else rows:
        names = ["total", *[""] * (len(groups) - 1)] if row is total else [printable(name) or "–" for name in row.names]
        remarks = [
            f"{row.unpriced:,} without a price" if row.unpriced else "",
            f"{row.estimated:,} estimated" if row.estimated else "",
        ]
        counts = (row.calls, row.tool_calls, row.input_tokens, row.output_tokens)
        shown.add_row(*names, *[f"{count:,}" for count in counts], usd(row.usd), ", ".join(filter(None, remarks)))
    print_table(out, shown)
    if unreadable:
        out.print(f"{unreadable} records could not be read", style="yellow")
