"""The proposal on a screen: what is proposed, on what ground, and what it would have cut."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runguard.calibrate.effects import Cut
from runguard.calibrate.limits import Limit
from runguard.calibrate.rungs import Choice, Point
from runguard.calibrate.words import about_successes, basis_words, number, rungs_words
from runguard.console import screen
from runguard.replay.table import print_faults
from runguard.replay.words import count, money, share

if TYPE_CHECKING:
    from runguard.calibrate.proposal import Proposal


def print_proposal(out: Console, made: "Proposal") -> None:
    out.print(basis_words(made))
    if made.estimated:
        out.print(
            f"tokens of {count(made.estimated)} of {count(made.model_calls)} model calls are estimated from "
            "the length of their texts",
            style="dim",
        )
    _print_limits(out, made)
    _print_rules(out, made)
    if made.changes:
        _print_effect(out, made)
        out.print(f"fitted on one half, counted on the other: {made.held_out.words()}")
    else:
        out.print("nothing could be advised from these recordings", style="yellow")
    print_faults(out, made.faults)


def _print(out: Console, title: str, shown: Table) -> None:
    out.print(Text.assemble("\n", screen.heading(title)))
    screen.print_table(out, shown)


def _print_limits(out: Console, made: "Proposal") -> None:
    figures = ("proposed", "P95", "its 95 % interval", "recordings")
    shown = screen.table(
        "setting",
        *figures,
        "would have cut",
        right=figures,
        whole=("setting", "proposed", "P95"),
        sentences=("would have cut",),
    )
    for limit in made.settings.limits:
        found = limit.quantile
        if limit.value is None or found is None:
            shown.add_row(
                limit.setting, Text("none", "dim"), "", "", str(limit.recordings), Text(limit.why_not, "yellow")
            )
            continue
        proposed, now, low, high = (number(limit, each) for each in (limit.value, found.value, found.low, found.high))
        shown.add_row(
            limit.setting,
            Text(proposed, "bold"),
            now,
            f"{low} – {high}",
            f"{found.runs:,}",
            _cut(out, limit, made.cuts[limit.setting]),
        )
    _print(out, "limits: 2.5 x P95", shown)


def _cut(out: Console, limit: Limit, cut: Cut) -> Text:
    told = Text(", ".join(f"{many:,} {label}" for label, many in cut.by_label.items() if many)) or Text(
        "nothing", "dim"
    )
    if cut.tokens:
        told.append(f"; {count(cut.tokens)} tokens, {money(cut.nano)} after the stops")
    if cut.successes:
        told.append("\n" if out.is_terminal else ". ").append(about_successes(limit, cut), "red")
    return told


def _print_rules(out: Console, made: "Proposal") -> None:
    counts = ("false stops", "at most", "refused", "nudged", "tokens saved")
    shown = screen.table("rule", "rungs", *counts, "", right=counts, whole=("rule",), sentences=("",))
    for choice in made.settings.choices:
        stays = Text.assemble(("now", "dim"), "" if choice.rungs else f". Stays: {choice.why}")
        shown.add_row(choice.rule, rungs_words(choice.now), *_point(choice.before), stays)
        for rungs, point in _worth_showing(choice):
            chosen = Text.assemble(("proposed", "bold green"), f": {choice.why}") if rungs == choice.rungs else ""
            shown.add_row("", rungs_words(rungs), *_point(point), chosen)
    _print(out, "rungs: saved tokens against false stops", shown)
    out.print(
        "false stops, refused, nudged: successful recordings; tokens saved: after the stops of the others; "
        "both because of that rule alone",
        style="dim",
    )


def _worth_showing(choice: Choice) -> list[tuple[dict[str, int], Point]]:
    """Settings that change something."""
    now = choice.before
    return [
        (rungs, point)
        for rungs, point in choice.curve
        if rungs == choice.rungs or (point.tokens, point.stopped) != (now.tokens, now.stopped)
    ]


def _point(point: Point) -> list[str]:
    at_most = f"{point.false_stops[1]:.1%}" if point.successes else "?"
    return [str(point.stopped), at_most, str(point.refused), str(point.nudged), count(point.tokens)]


def _print_effect(out: Console, made: "Proposal") -> None:
    figures = (
        "recordings",
        "stopped now",
        "stopped then",
        "tokens after, now",
        "tokens after, then",
        "money after, then",
    )
    shown = screen.table("", *figures, right=figures)
    for label, before in made.now.by_label.items():
        if before.recordings:
            then = made.proposed.by_label[label]
            stopped = [f"{each.stopped} ({share(each.stopped, each.recordings)})" for each in (before, then)]
            shown.add_row(
                label, f"{before.recordings:,}", *stopped, count(before.tokens), count(then.tokens), money(then.nano)
            )
    _print(out, "all of it together", shown)
