"""``runguard calibrate``: make a proposal and print it with its reasons and effects, or as JSON."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runguard.calibrate.effects import LimitEffect
from runguard.calibrate.proposal import calibrate
from runguard.calibrate.proposed_limits import Limit
from runguard.calibrate.rungs import Choice, Point
from runguard.calibrate.toml_file import about_successes, basis_text, number, rungs_text
from runguard.console import screen
from runguard.console.screen import console
from runguard.core.decision import printable
from runguard.policy.settings import Policy
from runguard.replay.formatting import count, money, share
from runguard.replay.output import check_place, with_progress, write_file
from runguard.replay.sources import Source
from runguard.replay.table import print_faults

if TYPE_CHECKING:
    from runguard.calibrate.proposal import Proposal


def print_proposal(out: Console, made: "Proposal") -> None:
    out.print(basis_text(made))
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
        out.print("nothing to propose from these recordings", style="yellow")
    print_faults(out, made.faults)


def _print(out: Console, title: str, shown: Table) -> None:
    out.print(Text.assemble("\n", screen.heading(title)))
    screen.print_table(out, shown)


def _print_limits(out: Console, made: "Proposal") -> None:
    figures = ("proposed", "P95", "its 95 % interval", "recordings")
    shown = screen.table(
        "setting",
        *figures,
        "would have stopped",
        right=figures,
        whole=("setting", "proposed", "P95"),
        sentences=("would have stopped",),
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


def _cut(out: Console, limit: Limit, cut: LimitEffect) -> Text:
    text = Text(", ".join(f"{many:,} {label}" for label, many in cut.by_label.items() if many)) or Text(
        "nothing", "dim"
    )
    if cut.tokens:
        text.append(f"; {count(cut.tokens)} tokens, {money(cut.nano)} after the stops")
    if cut.successes:
        text.append("\n" if out.is_terminal else ". ").append(about_successes(limit, cut), "red")
    return text


def _print_rules(out: Console, made: "Proposal") -> None:
    counts = ("false stops", "at most", "refused", "nudged", "tokens saved")
    shown = screen.table("rule", "rungs", *counts, "", right=counts, whole=("rule",), sentences=("",))
    for choice in made.settings.choices:
        stays = Text.assemble(("now", "dim"), "" if choice.rungs else f". Stays: {choice.why}")
        shown.add_row(choice.rule, rungs_text(choice.now), *_point(choice.before), stays)
        for rungs, point in _worth_showing(choice):
            chosen = Text.assemble(("proposed", "bold green"), f": {choice.why}") if rungs == choice.rungs else ""
            shown.add_row("", rungs_text(rungs), *_point(point), chosen)
    _print(out, "rungs: saved tokens against false stops", shown)
    out.print(
        "false stops, refused, nudged: successful recordings; tokens saved: after the stops of the others; "
        "both counted for that rule only",
        style="dim",
    )


def _worth_showing(choice: Choice) -> list[tuple[dict[str, int], Point]]:
    """Return the settings that change the result."""
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
    _print(out, "the whole proposal", shown)


def run(
    sources: list[Source],
    policy: Policy,
    *,
    target: Path | None = None,
    as_json: bool = False,
    max_false_stops: float = 0,
    workers: int | None = None,
    model: str = "",
) -> bool:
    """Return whether there is a proposal; only then the file is written."""
    if target is not None:
        check_place(target)

    made = calibrate(
        sources,
        policy,
        max_false_stops=max_false_stops,
        workers=workers or os.cpu_count() or 1,
        model=model,
        watch=lambda _, found: with_progress(sources, found),
    )
    has_advice = bool(made.changes)
    if as_json:
        sys.stdout.write(json.dumps(made.to_dict(), indent=2) + "\n")
    else:
        print_proposal(console(), printable(made))
    if has_advice and target is not None:
        write_file(target, made.to_toml())
    elif has_advice and not as_json:
        sys.stdout.write("\n" + made.to_toml())
    return has_advice
