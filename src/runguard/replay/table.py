"""Print the result of a replay: the affected runs and the totals, or one run with its explanation."""

from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.text import Text

from runguard.console import screen
from runguard.core.decision import printable
from runguard.replay.explain import Explanation
from runguard.replay.formatting import cost, count, money, share
from runguard.replay.results import After, RunResult, Verdict
from runguard.replay.totals import Group, Totals

if TYPE_CHECKING:
    from runguard.replay.steps import Faults

ROWS: Final = 40
_COLOURS: Final = {"stop": "red", "block": "yellow", "nudge": "cyan", "warn": "dim"}
MEASURES: Final = (
    "runs",
    "nudged",
    "blocked",
    "stopped",
    "model calls",
    "tokens",
    "cost",
    "tokens after the stops",
    "money after the stops",
)
_LABELS: Final = {True: "success", False: "failure", None: ""}


class Rows:
    """The runs to show: the first affected ones, or the first of all if none is affected."""

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


def print_result(out: Console, rows: Rows, totals: list[Totals], faults: "Faults") -> None:
    several = len(totals) > 1
    numbers = ("calls", "tokens", "cost", "after the stop")
    stories = [f"under {printable(each.name)}" if several else "what the policy would have done" for each in totals]
    columns = [column for story in stories for column in (story, "after the stop")]
    shown = screen.table(
        "run", "label", *numbers[:3], *columns, right=numbers, whole=("run", "label", *numbers), sentences=stories
    )
    for results in printable(rows.shown):
        run = results[0]
        cells: list[str | Text] = [
            run.id,
            _LABELS[run.success],
            f"{count(run.model_calls)}+{count(run.tool_calls)}",
            count(run.tokens),
            cost(run),
        ]
        for result in results:
            saved = result.saved
            cells += [
                _story(result, out),
                f"{count(saved.tokens)} {sum_of(saved, result.unpriced)}" if result.first("stop") else "",
            ]
        shown.add_row(*cells)
    screen.print_table(out, shown)
    out.print("calls: model + tool; after the stop: what the recording spent from there on", style="dim")
    if rows.hidden:
        out.print(f"and {rows.hidden} more affected runs; --json lists all", style="dim")
    for each in totals:
        _print_totals(out, each, several)
    print_faults(out, faults)


def print_faults(out: Console, faults: "Faults") -> None:
    if faults.count:
        out.print(f"{faults.count} records could not be read and were skipped:", style="yellow")
        for line in faults.first:
            out.print(f"  {printable(line)}", style="dim", soft_wrap=True)


def _story(run: RunResult, out: Console) -> Text:
    """Return the verdicts of a run; on one line in a pipe."""
    verdicts = [
        _verdict(verdict) for action in ("nudge", "block", "stop") if (verdict := run.first(action)) is not None
    ]
    return Text("\n" if out.is_terminal else "; ").join(verdicts) if verdicts else Text("nothing", "dim")


def _verdict(verdict: Verdict) -> Text:
    about = f" of {verdict.tool}" if verdict.tool else ""
    words = f" at call {verdict.turn}: {verdict.rule}{about}, {verdict.observed:g} {verdict.unit}"
    return Text.assemble((verdict.action, _COLOURS[verdict.action]), words)


def _print_totals(out: Console, totals: Totals, several: bool) -> None:
    groups = totals.groups
    out.print(Text.assemble("\n", screen.heading(f"under {printable(totals.name)}" if several else "in total")))
    shown = screen.table("", *groups, right=tuple(groups))
    columns = [group_cells(group, totals.unpriced) for group in groups.values()]
    for position, name in enumerate(MEASURES):
        shown.add_row(name, *(column[position] for column in columns))
    screen.print_table(out, shown)
    if totals.rules:
        by_rule = ", ".join(
            f"{name} {rule.stop} ({sum_of(rule.saved, totals.unpriced)} after, {rule.false_stops} of them in "
            "successful runs)"
            if rule.stop
            else f"{name} 0"
            for name, rule in sorted(totals.rules.items(), key=lambda item: -item[1].stop)
        )
        out.print(f"stops by rule: {by_rule}")
    if (switched := totals.all.switched).model_calls:
        out.print(
            f"{count(switched.model_calls)} model calls would have gone to a cheaper model, for about "
            f"{money(switched.nano)} less"
        )
    if (waited := totals.all.waited).calls:
        out.print(
            f"{count(waited.calls)} model calls would have waited for room in a budget, {waited.seconds:,.0f} s in all"
        )
    if totals.false_stop_count:
        out.print(f"stopped although labelled a success: {totals.false_stop_count}", style="red")
        for name in totals.false_stops[:20]:
            out.print(f"  {printable(name)}", soft_wrap=True)
    if totals.unpriced:
        out.print(
            f"{totals.unpriced} of {totals.all.model_calls} model calls have no price: set prices in the "
            "policy, or pass --model",
            style="yellow",
        )
    if totals.estimated:
        out.print(
            f"tokens of {totals.estimated} of {totals.all.model_calls} model calls are estimated from the length of "
            "the texts",
            style="dim",
        )


def sum_of(spent: After | Group, unpriced: int) -> str:
    """Format dollars; ``unpriced`` is the number of calls without a price."""
    if unpriced and spent.model_calls:
        return f"at least {money(spent.nano)}" if spent.nano else "unknown"
    return money(spent.nano)


def group_cells(group: Group, unpriced: int = 0) -> list[str]:
    """The figures of a group in the order of ``MEASURES``."""
    touched = [f"{number} ({share(number, group.runs)})" for number in (group.nudged, group.blocked, group.stopped)]
    saved = group.saved
    spent = [count(group.model_calls), count(group.tokens), sum_of(group, unpriced)]
    after = [f"{count(saved.tokens)} ({share(saved.tokens, group.tokens)})", _part(saved, group, unpriced)]
    return [str(group.runs), *touched, *spent, *after]


def _part(saved: After, group: Group, unpriced: int) -> str:
    text = sum_of(saved, unpriced)
    return text if unpriced else f"{text} ({share(saved.nano, group.nano)})"


# ---- one run --------------------------------------------------------------------------------------------------------


def print_explanation(out: Console, explanation: Explanation) -> None:
    explanation = printable(explanation)
    run = explanation.result
    spent = f"{run.model_calls} model calls, {run.tool_calls} tool calls, {count(run.tokens)} tokens, {cost(run)}"
    out.print(
        Text.assemble((run.id, "bold"), f": {spent}, in {run.runs} user turn{'s' * (run.runs != 1)}"), soft_wrap=True
    )
    for verdict in run.verdicts:
        where = f"step {verdict.step}, after model call {verdict.turn}" + (
            f", lane {verdict.lane}" if verdict.lane else ""
        )
        after = (
            f"; then {count(verdict.after.tokens)} tokens, {sum_of(verdict.after, run.unpriced)}"
            if not verdict.moot
            else " (not reached: the run was already stopped)"
        )
        out.print(f"  {where}: would have been {verdict}{after}", soft_wrap=True)
        for piece in verdict.evidence:
            out.print(
                "    " + " ".join(f"{name}={value}" for name, value in piece.items() if value),
                style="dim",
                soft_wrap=True,
            )
    if not run.verdicts:
        out.print("  no rule would have acted")
    out.print(Text.assemble("\n", screen.heading("the highest count of each rule")))
    shown = screen.table("rule", "highest", "where", "rungs", "why", whole=("rule",), sentences=("why",))
    for near in explanation.rules:
        peak = near.peak
        where = "" if peak is None or not (peak.tool or peak.agent) else f"step {peak.step}, {peak.tool or peak.agent}"
        rungs = " ".join(f"{name} {number:g}" for name, number in near.rungs.items())
        shown.add_row(near.rule, f"{peak.observed:g} {peak.unit}" if peak is not None else "", where, rungs, near.why)
    screen.print_table(out, shown)
    for rule, why in explanation.not_recorded.items():
        out.print(f"{rule}: not evaluated: {why}", style="dim", soft_wrap=True)
