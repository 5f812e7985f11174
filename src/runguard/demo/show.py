"""The demo on a screen: tables that fill up while the stories run, plain lines where there is no terminal, or JSON."""

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from io import TextIOWrapper
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from runguard import __version__

if TYPE_CHECKING:
    from runguard.demo.play import Pair, Report

_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


def show_json() -> int:
    from runguard.demo.play import new_report, play

    report = play(new_report())
    sys.stdout.write(json.dumps(report.to_dict(), indent=2, ensure_ascii=False) + "\n")
    return 0 if report.ok else 1


def show() -> int:
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an arrow that the terminal cannot write is no reason to fail
    console = Console(highlight=False, markup=False)
    with console.status("loading google-adk") if console.is_terminal else nullcontext():
        from runguard.demo.play import new_report, play
    console.print(_head())
    report = new_report()
    if console.is_terminal:
        # Drawn again and again from the numbers as they are at that moment; the last drawing stays.
        with Live(get_renderable=lambda: tables(report), console=console, refresh_per_second=10):
            play(report)
    else:
        play(report, _line_by_line(console))
        console.print(tables(report))
    console.print(messages(report))
    console.print(_verdict(report))
    return 0 if report.ok else 1


def _head() -> RenderableType:
    return Group(
        Text.assemble(("RunGuard", "bold"), f" {__version__} on google-adk {version('google-adk')}"),
        Text("Each agent runs twice: without and with RunGuardPlugin() on its defaults.", "dim"),
        Text("Real ADK, scripted models: no network, no key, no cost.", "dim"),
    )


def _line_by_line(console: Console) -> "Callable[[Pair], None]":
    def say(pair: "Pair") -> None:
        if not pair.done:
            return
        trip = pair.guarded.trip
        end = f"stopped by {trip.rule}" if trip is not None else "untouched" if pair.untouched else "not stopped"
        calls = f"{pair.without.meter.model_calls} model calls without, {pair.guarded.meter.model_calls} with"
        console.print(f"{pair.story.title}: {calls}; {end}", soft_wrap=True)

    console.print()
    return say


# ---- tables ---------------------------------------------------------------------------------------------------------


def tables(report: "Report") -> RenderableType:
    """Both tables, at any moment of the play."""
    return Group(_runaways(report), _healthy(report))


def _runaways(report: "Report") -> Table:
    table = _table("runaway", "model calls", "tool calls", "tokens")
    table.add_column(Text("saved"), justify="right")
    for pair in report.runaways:
        before, after = pair.without.meter, pair.guarded.meter
        table.add_row(
            _title(pair),
            _change(pair, before.model_calls, after.model_calls),
            _change(pair, before.tool_calls, after.tool_calls),
            _change(pair, before.tokens, after.tokens),
            Text(f"{pair.saved:.1f}%", "green" if pair.stopped else "red") if pair.done else Text("…", "dim"),
        )
    return table


def _healthy(report: "Report") -> Table:
    table = _table("healthy look-alike", "model calls", "tool calls", "events")
    table.add_column(Text("touched"), justify="right")
    for pair in report.healthy:
        before, after = pair.without, pair.guarded
        touched = len(after.interventions)
        verdict = Text(str(touched) if pair.untouched else f"{touched} ✗", "green" if pair.untouched else "red")
        table.add_row(
            _title(pair),
            _change(pair, before.meter.model_calls, after.meter.model_calls),
            _change(pair, before.meter.tool_calls, after.meter.tool_calls),
            _change(pair, before.events, after.events),
            verdict if pair.done else Text("…", "dim"),
        )
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column(first, min_width=21, no_wrap=True, vertical="bottom")
    for name in others:
        table.add_column(Text.assemble(name, ("\nwithout → with", "not bold dim")), justify="right", no_wrap=True)
    return table


def _title(pair: "Pair") -> Text:
    if pair.started and not pair.done:
        return Text.assemble((_FRAMES[int(time.monotonic() * 10) % len(_FRAMES)] + " ", "cyan"), (pair.story.title, "bold"))
    return Text("  " + pair.story.title, "" if pair.done else "dim")


def _change(pair: "Pair", before: int, after: int) -> Text:
    if not pair.started:
        return Text("…", "dim")
    return Text.assemble((f"{before:,}", "" if pair.without.done else "cyan"), (" → ", "dim"), (f"{after:>6,}", "bold" if pair.guarded.done else "cyan"))


# ---- words ----------------------------------------------------------------------------------------------------------


def messages(report: "Report") -> RenderableType:
    """How each runaway ended, in the operator's words."""
    lines: list[RenderableType] = []
    for pair in report.runaways:
        lines.append(Text.assemble((pair.story.title, "bold"), (f": {pair.story.about}", "dim")))
        lines += [Padding(Text(line, style), (0, 0, 0, 2)) for line, style in _endings(pair)]
    lines.append(Text())
    lines.append(Text("Calls are counted at the models and inside the tools, tokens are characters of the real requests and answers / 4.", "dim"))
    lines.append(Text("The scripted models ignore every nudge; a real one may heed it and never meet the stop.", "dim"))
    warned = [pair.story.title for pair in report.healthy if pair.guarded.warnings]
    if warned:
        lines.append(Text(f"A warning is a log line for the operator and touches nothing: {', '.join(warned)}.", "dim"))
    return Group(*lines)


def _endings(pair: "Pair") -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    if pair.without.error:
        lines.append((f"without: {pair.without.error}, ADK's own limit, after {pair.without.meter.model_calls} model calls", ""))
    rungs = [f"{d.action.word} ({d.finding.rule} at {d.finding.observed:g})" for d in pair.guarded.decisions if d.finding is not None]
    if rungs:
        lines.append((f"with: {' → '.join(rungs)}", ""))
    if pair.guarded.trip is not None:
        lines.append((str(pair.guarded.trip), "green" if pair.stopped else "red"))
    else:
        lines.append(("not stopped", "red"))
    if pair.guarded.error:
        lines.append((f"the guarded run raised {pair.guarded.error}", "red"))
    if not pair.guarded.answered:
        lines.append(("function calls were left without an answer", "red"))
    return lines


def _verdict(report: "Report") -> RenderableType:
    stopped, untouched = sum(pair.stopped for pair in report.runaways), sum(pair.untouched for pair in report.healthy)
    words = f"{stopped} of {len(report.runaways)} runaways stopped, {untouched} of {len(report.healthy)} healthy runs untouched"
    return Text.assemble("\n", (words, "bold green" if report.ok else "bold red"), (f" ({report.seconds:.1f} s)", "dim"))
