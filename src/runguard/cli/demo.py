"""``runguard demo``: four runaways and six healthy look-alikes on real ADK, each run without and with the guard.

``stories`` holds and runs the agents; nothing of Google's is loaded before ``run``.
``doctor`` uses ``load`` and ``defaults``, too.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from textwrap import fill
from types import ModuleType
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

import runguard.console as screen
from runguard._version import __version__
from runguard.cli.main import CommandError, print_json
from runguard.core.money import NANO

if TYPE_CHECKING:
    from runguard.cli.stories import Pair, Report


class AdkMissingError(CommandError):
    """google-adk is missing or too old; the message says what to do."""


def run(*, as_json: bool = False) -> int:
    """Run the demo and print it. Return the exit code: 0 if everything ended as expected, otherwise 1."""
    if not as_json:
        return show()
    play = load()
    report: Report = play.play(play.new_report())
    print_json(report.to_dict())
    return 0 if report.ok else 1


@contextmanager
def defaults() -> Iterator[None]:
    """Run without the local policy file and environment variables."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("RUNGUARD_")}
    os.environ["RUNGUARD_POLICY"] = os.devnull
    try:
        yield
    finally:
        del os.environ["RUNGUARD_POLICY"]
        os.environ.update(kept)


def load() -> ModuleType:
    """Import the module that runs the demo; it imports ADK."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module("runguard.cli.stories")
    except ImportError as error:
        name = error.name or ""
        if name.split(".")[0] != "google":
            raise
        reason = "which is not installed" if name in ("google", "google.adk") else f"the installed one lacks {name}"
        raise AdkMissingError(
            f"runguard demo needs google-adk 2.3 or newer, {reason}: pip install -U 'runguard-agents[adk]'"
        ) from None


# ---- the demo on a screen: tables that fill up while the stories run, plain lines without a terminal

_WIDTH = 80  # for both tables
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


def show() -> int:
    out = screen.console()
    live = out.is_terminal and not out.is_dumb_terminal and out.width >= _WIDTH
    with out.status("loading google-adk") if live else nullcontext():
        play = load()
    out.print(_head(play.adk_version))
    report: Report = play.new_report()
    if live:
        # Redrawn from the current numbers; the last drawing stays.
        with Live(get_renderable=lambda: tables(report), console=out, refresh_per_second=10):
            play.play(report)
    else:
        play.play(report, _line_by_line(out))
        for table in (_runaways(report), _healthy(report)):
            out.print()
            screen.print_table(out, table)
        out.print()
    out.print(messages(report, out.width), soft_wrap=True)
    out.print(_verdict(report))
    return 0 if report.ok else 1


def _head(adk_version: str) -> RenderableType:
    return Group(
        Text.assemble(("RunGuard", "bold"), f" {__version__} on google-adk {adk_version}"),
        Text("Each agent runs twice: without and with RunGuardPlugin() on its defaults.", "dim"),
        Text("Real ADK, scripted models: no network, no key, no cost.", "dim"),
    )


def _line_by_line(out: Console) -> "Callable[[Pair], None]":
    def say(pair: "Pair") -> None:
        if not pair.done:
            return
        trip = pair.guarded.trip
        end = (
            f"stopped by {trip.rule}" if trip is not None else "untouched" if pair.untouched else "touched, not stopped"
        )
        calls = f"{pair.without.counter.model_calls} model calls without, {pair.guarded.counter.model_calls} with"
        out.print(f"{pair.story.title}: {calls}; {end}", soft_wrap=True)

    out.print()
    return say


# ---- tables


def tables(report: "Report") -> RenderableType:
    """Return both tables in their current state."""
    return Group(Text(), _runaways(report), Text(), _healthy(report), Text())


def _runaways(report: "Report") -> Table:
    table = _table("runaway", "model calls", "tokens", "cost, list price", width=15)
    table.columns[2].min_width = 18  # reserve the final width, so that the table does not move while numbers grow
    table.columns[3].min_width = 17
    table.add_column("\nsaved", justify="right", min_width=5)
    for pair in report.runaways:
        before, after = pair.without.counter, pair.guarded.counter
        table.add_row(
            _title(pair),
            _change(pair, f"{before.model_calls:,}", f"{after.model_calls:>3,}"),
            _change(pair, f"{before.tokens:,}", f"{after.tokens:>6,}"),
            _change(pair, f"${before.nano_usd / NANO:.4f}", f"${after.nano_usd / NANO:.4f}"),
            _last(pair, f"{pair.saved:.1f}%", good=pair.stopped),
        )
    return table


def _healthy(report: "Report") -> Table:
    table = _table("healthy look-alike", "model calls", "tool calls", "events")
    table.add_column("\ntouched", justify="right")
    for pair in report.healthy:
        before, after = pair.without, pair.guarded
        touched = len(after.interventions)
        table.add_row(
            _title(pair),
            _change(pair, f"{before.counter.model_calls:,}", f"{after.counter.model_calls:>3,}"),
            _change(pair, f"{before.counter.tool_calls:,}", f"{after.counter.tool_calls:>3,}"),
            _change(pair, f"{before.events:,}", f"{after.events:>3,}"),
            _last(pair, f"{touched}" if pair.untouched else f"{touched} ✗", good=pair.untouched),
        )
    return table


def _table(first: str, *others: str, width: int = 20) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("\n" + first, min_width=width, no_wrap=True)
    for name in others:
        table.add_column(Text.assemble(name, ("\nwithout → with", "not bold dim")), justify="right", no_wrap=True)
    return table


def _title(pair: "Pair") -> Text:
    return Text(pair.story.title, "" if pair.done else "bold" if pair.started else "dim")


def _change(pair: "Pair", before: str, after: str) -> Text:
    if not pair.started:
        return Text("…", "dim")
    return Text.assemble(
        (before, "" if pair.without.done else "cyan"),
        (" → ", "dim"),
        (after, "bold" if pair.guarded.done else "cyan"),
    )


def _last(pair: "Pair", words: str, *, good: bool) -> Text:
    if pair.done:
        return Text(words, "green" if good else "red")
    return Text(_FRAMES[int(time.monotonic() * 10) % len(_FRAMES)], "cyan") if pair.started else Text("…", "dim")


# ---- text


def messages(report: "Report", width: int) -> Text:
    """Return how each runaway ended, in the operator's text."""
    words = Text()
    for pair in report.runaways:
        words.append(fill_lines(f"{pair.story.title}: {pair.story.about}", width), "bold")
        for line, style in _endings(pair):
            words.append(fill_lines(line, width, "  "), style)
        words.append("\n")
    words.append(
        fill_lines(
            "Calls are counted at the models and in the tools; tokens are the characters of the real requests "
            "and answers, over 4; saved are tokens. "
            "Cost: what gemini-2.5-flash would have billed at list price.",
            width,
        ),
        "dim",
    )
    words.append(
        fill_lines(
            "The scripted models ignore every nudge; a real model may follow it and never reach the stop.", width
        ),
        "dim",
    )
    if any(pair.guarded.warnings for pair in report.healthy):
        words.append(
            fill_lines("Long healthy runs may cause a growth warning: a line in the log without any effect.", width),
            "dim",
        )
    return words


def fill_lines(line: str, width: int, indent: str = "") -> str:
    """Return the line, folded to the width, with its newline."""
    return fill(line, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False) + "\n"


def _endings(pair: "Pair") -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    if pair.without.error:
        lines.append(
            (
                f"without: {pair.without.error}, ADK's own limit, after {pair.without.counter.model_calls} model calls",
                "",
            )
        )
    before, after = pair.without.counter, pair.guarded.counter
    if before.largest_prompt > 20 * before.first_prompt:
        lines.append(
            (
                (
                    f"prompt of one call: from {before.first_prompt:,} to {before.largest_prompt:,} tokens "
                    f"without, {after.largest_prompt:,} with"
                ),
                "",
            )
        )
    rungs = [
        f"{d.action.word} ({d.finding.rule} at {d.finding.observed:g})"
        for d in pair.guarded.decisions
        if d.finding is not None
    ]
    if rungs:
        lines.append((f"with: {' → '.join(rungs)}", ""))
    if pair.guarded.trip is not None:
        lines.append((str(pair.guarded.trip), "green" if pair.stopped else "red"))
    else:
        lines.append(("not stopped", "red"))
    if pair.guarded.error:
        lines.append((f"the guarded run raised {pair.guarded.error}", "red"))
    if not pair.guarded.answered:
        lines.append(("function calls were not answered", "red"))
    if pair.story.note:
        lines.append((f"Note: {pair.story.note}", "dim"))
    return lines


def _verdict(report: "Report") -> RenderableType:
    stopped, untouched = sum(pair.stopped for pair in report.runaways), sum(pair.untouched for pair in report.healthy)
    words = (
        f"{stopped} of {len(report.runaways)} runaways stopped, {untouched} of {len(report.healthy)} healthy runs "
        "untouched"
    )
    return Text.assemble((words, "bold green" if report.ok else "bold red"), (f" ({report.seconds:.1f} s)", "dim"))
