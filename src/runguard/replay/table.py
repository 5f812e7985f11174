"""The result on a terminal: the runs that would have been touched, and the totals."""

from typing import TYPE_CHECKING, Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from runguard.printable import printable
from runguard.replay.results import After, RunResult, Verdict
from runguard.replay.totals import Group, Totals
from runguard.replay.words import cost, count, money, share

if TYPE_CHECKING:
    from runguard.replay.steps import Faults

ROWS: Final = 40
_COLOURS: Final = {"stop": "red", "block": "yellow", "nudge": "cyan", "warn": "dim"}
_MEASURES: Final = ("runs", "nudged", "blocked", "stopped", "model calls", "tokens", "cost", "tokens after the stops", "money after the stops")
_LABELS: Final = {True: "success", False: "failure", None: ""}


class Rows:
    """The runs worth showing, as they come: the first that were touched; without any, the first of all."""

    def __init__(self, every: bool = False) -> None:
        self._every = every
        self.touched: list[list[RunResult]] = []
        self.others: list[list[RunResult]] = []
        self.hidden = 0

    def add(self, results: list[RunResult]) -> None:
        is_touched = any(run.first(action) is not None for run in results for action in ("stop", "block", "nudge"))
        rows = self.touched if is_touched or self._every else self.others
        if len(rows) < ROWS:
            rows.append(results)
        else:
            self.hidden += is_touched

    @property
    def shown(self) -> list[list[RunResult]]:
        return self.touched or self.others


def print_table(console: Console, rows: Rows, totals: list[Totals], faults: "Faults") -> None:
    several = len(totals) > 1
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("run", overflow="fold", min_width=12)
    for name in ("label", "calls", "tokens", "cost"):
        table.add_column(name, justify="left" if name == "label" else "right", no_wrap=True)
    for each in totals:
        table.add_column(f"under {escape(printable(each.name))}" if several else "what it would have done", overflow="fold", min_width=30)
        table.add_column("after the stop", justify="right", no_wrap=True)
    for results in printable(rows.shown):
        run = results[0]
        cells = [escape(run.id), _LABELS[run.success], f"{count(run.model_calls)}+{count(run.tool_calls)}", count(run.tokens), cost(run)]
        for result in results:
            saved = result.saved
            cells += [_story(result), f"{count(saved.tokens)} {sum_of(saved, result.unpriced)}" if result.first("stop") else ""]
        table.add_row(*cells)
    console.print(table)
    console.print("[dim]calls: model + tool; after the stop: tokens and money that the recording spent from there on[/]")
    if rows.hidden:
        console.print(f"[dim]and {rows.hidden} more runs that would have been touched; --json lists all[/]")
    for each in totals:
        _print_totals(console, each, several)
    if faults.count:
        console.print(f"[yellow]{faults.count} records could not be read and were skipped:[/]")
        for line in faults.first:
            console.print(f"  [dim]{escape(printable(line))}[/]")


def _story(run: RunResult) -> str:
    told = [verdict for action in ("nudge", "block", "stop") if (verdict := run.first(action)) is not None]
    return "\n".join(_verdict(verdict) for verdict in told) or "[dim]nothing[/]"


def _verdict(verdict: Verdict) -> str:
    about = f" of {escape(verdict.tool)}" if verdict.tool else ""
    colour = _COLOURS[verdict.action]
    return f"[{colour}]{verdict.action}[/] at call {verdict.turn}: {verdict.rule}{about}, {verdict.observed:g} {escape(verdict.unit)}"


def _print_totals(console: Console, totals: Totals, several: bool) -> None:
    every = totals.all
    groups = {"all": every, **{name: group for name, group in totals.by_label.items() if group.runs and group.runs != every.runs}}
    title = f"under {escape(printable(totals.name))}" if several else "in all"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="bold")
    table.add_column("")
    for name in groups:
        table.add_column(name, justify="right")
    columns = [_group(group, totals.unpriced) for group in groups.values()]
    for position, name in enumerate(_MEASURES):
        table.add_row(name, *(column[position] for column in columns))
    console.print(table)
    if totals.rules:
        told = ", ".join(
            f"{name} {rule.stop} ({sum_of(rule.saved, totals.unpriced)} after, {rule.false_stops} of them in successful runs)" if rule.stop else f"{name} 0"
            for name, rule in sorted(totals.rules.items(), key=lambda item: -item[1].stop)
        )
        console.print(f"stops by rule: {told}")
    if totals.false_stop_count:
        console.print(f"[red]stopped although labelled a success: {totals.false_stop_count}[/]")
        for name in totals.false_stops[:20]:
            console.print(f"  {escape(printable(name))}")
    if totals.unpriced:
        console.print(f"[yellow]{totals.unpriced} of {every.model_calls} model calls have no price: give one under prices in the policy, or --model[/]")
    if totals.estimated:
        console.print(f"[dim]tokens of {totals.estimated} of {every.model_calls} model calls are estimated from the length of the texts[/]")


def sum_of(spent: After | Group, unpriced: int) -> str:
    """Dollars, where so many calls of the whole have no price."""
    if unpriced and spent.model_calls:
        return f"at least {money(spent.nano)}" if spent.nano else "unknown"
    return money(spent.nano)


def _group(group: Group, unpriced: int) -> list[str]:
    touched = [f"{number} ({share(number, group.runs)})" for number in (group.nudged, group.blocked, group.stopped)]
    saved = group.saved
    spent = [count(group.model_calls), count(group.tokens), sum_of(group, unpriced)]
    after = [f"{count(saved.tokens)} ({share(saved.tokens, group.tokens)})", _part(saved, group, unpriced)]
    return [str(group.runs), *touched, *spent, *after]


def _part(saved: After, group: Group, unpriced: int) -> str:
    told = sum_of(saved, unpriced)
    return told if unpriced else f"{told} ({share(saved.nano, group.nano)})"
