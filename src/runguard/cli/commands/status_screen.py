"""``runguard status`` on a screen."""

from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runguard.console.hints import hint
from runguard.console.screen import amount, console, heading, moment, print_table, span, table, usd
from runguard.core.decision import printable
from runguard.policy.settings import Policy
from runguard.view.rows import BreakerRow, BudgetRow, Figures, RunForecast, RunningRow, Spend
from runguard.view.store_view import StoreView

_NAMES: Final = 15
_RUNS: Final = 25


def print_status(
    view: StoreView, policy: Policy, state: dict[str, Any], rows: int | None, store: str | None, scope: str
) -> None:
    hints = [hint("resume", stop.scope, store) for stop in state["stops"]]
    state = printable(state)
    out, now = console(), state["now"]
    out.print(f"{view.name}, {moment(now)}; mode {policy.mode} in the local policy", style="dim", soft_wrap=True)
    for stop, back in zip(state["stops"], hints, strict=True):
        words = f"stopped: {stop.scope}, by {stop.actor} {span(now - stop.at)} ago{stop.because}  ({back})"
        out.print(words, style="bold red", soft_wrap=True)
    _running(out, state["running"])
    _budgets(out, state, rows, printable(scope))
    _spend(out, state["spend"])
    _breakers(out, state["breakers"], now)
    if state["unreadable"]:
        out.print(
            f"\n{state['unreadable']} records could not be read and are not in these figures",
            style="yellow",
            soft_wrap=True,
        )


def _running(out: Console, running: list[RunningRow]) -> None:
    out.print(Text.assemble("\n", heading(f"running now: {len(running)}")))
    if not running:
        return
    shown = table(
        "run",
        "app",
        "user",
        "for",
        "model calls",
        "tool calls",
        "tokens",
        "spent",
        "reserved",
        "",
        right=("for", "model calls", "tool calls", "tokens"),
    )
    for row in running[:_RUNS]:
        remarks = [f"stopped by {row.stopped}"] if row.stopped else []
        remarks += [f"{row.in_flight} in flight"] if row.in_flight else []
        remarks += [f"{row.waiting} waiting"] if row.waiting else []
        remarks += _forecast(row.forecast)
        remarks += row.notes
        spent = usd(row.spent_usd) + (f" + {row.unpriced_calls} unpriced" if row.unpriced_calls else "")
        counts = (_count(row.model_calls), _count(row.tool_calls), _count(row.tokens))
        shown.add_row(
            row.run,
            row.app,
            row.user,
            span(row.seconds or 0),
            *counts,
            spent,
            usd(row.reserved_usd),
            ", ".join(remarks),
        )
    print_table(out, shown)
    if len(running) > _RUNS:
        out.print(f"and {len(running) - _RUNS} more; --json lists all", style="dim")


def _forecast(forecast: RunForecast | None) -> list[str]:
    """The nearest limit of a run."""
    if forecast is None:
        return []
    named = (("cap", forecast.cap), ("context window", forecast.window), ("higher price", forecast.tier))
    found = [(ahead.calls_left, name, ahead) for name, ahead in named if ahead is not None]
    if not found:
        return []
    calls, name, ahead = min(found, key=lambda entry: entry[0])
    money = f", {usd(ahead.usd)}" if ahead.usd is not None else ""
    return [f"{name} in about {calls:,} call{'' if calls == 1 else 's'}{money}"]


def _budgets(out: Console, state: dict[str, Any], rows: int | None, scope: str) -> None:
    budgets = state["budgets"]
    out.print(Text.assemble("\n", heading(f"budgets: {len(budgets)}")))
    if not budgets and scope:
        out.print(f"no scope of a budget starts with {scope}; omit --scope to show all", style="dim", soft_wrap=True)
        return
    if not budgets:
        out.print("no budget beyond single runs; set budgets = [...] in the policy", style="dim", soft_wrap=True)
        return
    print_table(out, budget_table(budgets[:rows], state["now"]))
    if rows is not None and len(budgets) > rows:
        out.print(f"and {len(budgets) - rows} more, less full; --all shows them, --scope filters", style="dim")


def _spend(out: Console, spend: Spend) -> None:
    since = f"since {moment(spend.since)}"
    out.print(Text.assemble("\n", heading(f"spent {since}: {_figures(spend.total)}")))
    if spend.total.calls or spend.total.tool_calls:
        shown = table(spend.by, "cost", "tokens", "model calls", "", right=("cost", "tokens", "model calls"))
        for row in spend.totals[:_NAMES]:
            shown.add_row(row.name or "(no name)", usd(row.usd), f"{row.tokens:,}", f"{row.calls:,}", _remarks(row))
        print_table(out, shown)
        if len(spend.totals) > _NAMES:
            out.print(f"and {len(spend.totals) - _NAMES} more; --json lists all", style="dim")
    if spend.capped_at is not None:
        out.print(
            f"only the last {spend.capped_at:,} calls were read; earlier calls are missing",
            style="yellow",
            soft_wrap=True,
        )


def _figures(row: Figures) -> str:
    remarks = _remarks(row)
    calls = f"{row.calls:,} model call{'' if row.calls == 1 else 's'}"
    if row.tool_calls:
        calls += f", {row.tool_calls:,} paid tool call{'' if row.tool_calls == 1 else 's'}"
    return f"{usd(row.usd)}, {row.tokens:,} tokens, {calls}" + (f" ({remarks})" if remarks else "")


def _remarks(row: Figures) -> str:
    remarks = [f"{row.unpriced} without a price, not in the cost"] if row.unpriced else []
    remarks += [f"{row.estimated} estimated"] if row.estimated else []
    return ", ".join(remarks)


def _breakers(out: Console, breakers: list[BreakerRow], now: float) -> None:
    if not breakers:
        return
    out.print(Text.assemble("\n", heading("breakers")))
    shown = table("tool", "state", "failures", "in runs", "since", right=("failures", "in runs"))
    for row in breakers:
        state = Text(row.state, "red" if row.state != "closed" else "")
        shown.add_row(
            row.tool,
            state,
            str(row.failures),
            str(row.runs),
            f"{span(now - row.opened_at)} ago" if row.opened_at else "",
        )
    print_table(out, shown)


def _count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


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
            _budget_remarks(row, now),
        )
    return shown


def _budget_remarks(row: BudgetRow, now: float) -> str:
    remarks = [f"{amount(row.unit, row.granted)} extension"] if row.granted else []
    remarks += [f"{amount(row.unit, row.overrun)} over"] if row.overrun else []
    remarks += ["closed until it is extended" + (" or the next window" if row.ends else "")] if row.closed else []
    remarks += [f"resets in {span(row.ends - now)}"] if row.ends else []
    if row.forecast is not None and row.share < 1:
        at, share = row.forecast.used_up_at, row.forecast.share_at_end
        remarks.append(f"about {share:.0%} by then" if at is None else f"used up in about {span(at - now)}")
    return ", ".join(remarks)
