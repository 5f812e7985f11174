"""The proposal on a terminal: what is proposed, on what ground, and what it would have cut."""

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from runguard.calibrate.rungs import Choice, Point
from runguard.calibrate.words import about_successes, basis_words, number, rungs_words
from runguard.replay.words import count, money, share

if TYPE_CHECKING:
    from runguard.calibrate.proposal import Proposal


def print_proposal(console: Console, made: "Proposal") -> None:
    console.print(escape(basis_words(made)))
    if made.estimated:
        console.print(f"[dim]tokens of {count(made.estimated)} of {count(made.model_calls)} model calls are estimated from the length of their texts[/]")
    _print_limits(console, made)
    _print_rules(console, made)
    if made.changes:
        _print_effect(console, made)
        console.print(f"fitted on one half, counted on the other: {escape(made.held_out.words())}")
    else:
        console.print("[yellow]nothing could be advised from these recordings[/]")
    if made.faults.count:
        console.print(f"[yellow]{made.faults.count} records could not be read and were skipped:[/]")
        for line in made.faults.first:
            console.print(f"  [dim]{escape(line)}[/]")


def _table(title: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for position, name in enumerate(columns):
        table.add_column(name, overflow="fold", justify="left" if not position or position == len(columns) - 1 else "right")
    return table


def _print_limits(console: Console, made: "Proposal") -> None:
    table = _table("limits: 2.5 x P95", "setting", "proposed", "P95", "its 95 % interval", "recordings", "would have cut")
    for limit in made.settings.limits:
        found = limit.quantile
        if limit.value is None or found is None:
            table.add_row(limit.setting, "[dim]none[/]", "", "", str(limit.recordings), f"[yellow]{escape(limit.why_not)}[/]")
            continue
        cut = made.cuts[limit.setting]
        told = ", ".join(f"{many:,} {label}" for label, many in cut.by_label.items() if many) or "[dim]nothing[/]"
        if cut.tokens:
            told += f"; {count(cut.tokens)} tokens, {money(cut.nano)} after the stops"
        if cut.successes:
            told += f"\n[red]{escape(about_successes(limit, cut))}[/]"
        figures = [number(limit, each) for each in (limit.value, found.value)]
        table.add_row(limit.setting, f"[bold]{figures[0]}[/]", figures[1], f"{number(limit, found.low)} – {number(limit, found.high)}", f"{found.runs:,}", told)
    console.print(table)


def _print_rules(console: Console, made: "Proposal") -> None:
    columns = ("rule", "rungs", "false stops", "at most", "refused", "nudged", "tokens saved", "")
    table = _table("rungs: saved tokens against false stops", *columns)
    for choice in made.settings.choices:
        table.add_row(choice.rule, rungs_words(choice.now), *_point(choice.before), f"[dim]now[/]{'' if choice.rungs else '. Stays: ' + escape(choice.why)}")
        for rungs, point in _worth_showing(choice):
            is_chosen = rungs == choice.rungs
            table.add_row("", rungs_words(rungs), *_point(point), f"[bold green]proposed[/]: {escape(choice.why)}" if is_chosen else "")
    console.print(table)
    console.print("[dim]false stops, refused, nudged: successful recordings; tokens saved: after the stops of the others; both because of that rule alone[/]")


def _worth_showing(choice: Choice) -> list[tuple[dict[str, int], Point]]:
    """Settings that change something."""
    now = choice.before
    return [(rungs, point) for rungs, point in choice.curve if rungs == choice.rungs or (point.tokens, point.stopped) != (now.tokens, now.stopped)]


def _point(point: Point) -> list[str]:
    at_most = f"{point.false_stops[1]:.1%}" if point.successes else "?"
    return [str(point.stopped), at_most, str(point.refused), str(point.nudged), count(point.tokens)]


def _print_effect(console: Console, made: "Proposal") -> None:
    table = _table("all of it together", "", "recordings", "stopped now", "stopped then", "tokens after, now", "tokens after, then", "money after, then")
    for label, before in made.now.by_label.items():
        if before.recordings:
            then = made.proposed.by_label[label]
            stopped = [f"{each.stopped} ({share(each.stopped, each.recordings)})" for each in (before, then)]
            table.add_row(label, f"{before.recordings:,}", *stopped, count(before.tokens), count(then.tokens), money(then.nano))
    console.print(table)
