"""The result as JSON, written as it comes, and an explanation on a terminal."""

import json
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from runguard.printable import printable
from runguard.replay.explain import Explanation
from runguard.replay.results import RunResult
from runguard.replay.steps import Faults
from runguard.replay.table import sum_of
from runguard.replay.totals import Totals
from runguard.replay.words import cost, count


class JsonReport:
    """One document, its runs written one by one: the memory it takes does not depend on their number."""

    def __init__(self, out: IO[str], head: dict[str, Any]) -> None:
        self._out, self._first = out, True
        self._head = json.dumps(head, indent=2)[:-2] + ',\n  "runs": ['  # written with the first run: without any there is an error to tell instead

    def add(self, results: list[RunResult]) -> None:
        self._out.write(f"{self._head}\n    " if self._first else ",\n    ")
        self._first = False
        told, *others = (unknown_as_null(each.to_dict(), each.unpriced) for each in results)
        for other in others:
            told["against"] = {key: value for key, value in other.items() if key in ("verdicts", "more_verdicts", "after_stop", "usd")}
        self._out.write(json.dumps(told, ensure_ascii=False))

    def end(self, totals: list[Totals], faults: Faults) -> None:
        self._out.write("\n  ],\n")
        rest: dict[str, Any] = {"totals": unknown_as_null(totals[0].to_dict(), totals[0].unpriced)}
        if len(totals) > 1:
            rest["against"] = unknown_as_null(totals[1].to_dict(), totals[1].unpriced)
        rest["skipped"] = {"count": faults.count, "first": faults.first}
        self._out.write(json.dumps(rest, indent=2, ensure_ascii=False)[2:] + "\n")


def unknown_as_null(told: Any, unpriced: int) -> Any:
    """Where calls have no price, a sum of nothing is not zero but unknown: ``usd`` is null there."""
    if not unpriced:
        return told
    if isinstance(told, list):
        return [unknown_as_null(entry, unpriced) for entry in told]
    if not isinstance(told, dict):
        return told
    known = {key: unknown_as_null(value, unpriced) for key, value in told.items()}
    return known | {"usd": None} if known.get("usd") == "0" and known.get("model_calls") else known


def print_explanation(console: Console, told: Explanation) -> None:
    told = printable(told)
    run = told.result
    spent = f"{run.model_calls} model calls, {run.tool_calls} tool calls, {count(run.tokens)} tokens, {cost(run)}"
    console.print(f"[bold]{escape(run.id)}[/]: {spent}, in {run.runs} user turns")
    for verdict in run.verdicts:
        where = f"step {verdict.step}, after model call {verdict.turn}" + (f", lane {escape(verdict.lane)}" if verdict.lane else "")
        after = f"; then {count(verdict.after.tokens)} tokens, {sum_of(verdict.after, run.unpriced)}" if not verdict.moot else " (would not have come to it)"
        console.print(f"  {where}: would have been {escape(str(verdict))}{after}")
        for piece in verdict.evidence:
            console.print("    [dim]" + escape(" ".join(f"{name}={value}" for name, value in piece.items() if value)) + "[/]")
    if not run.verdicts:
        console.print("  no rule would have said anything")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="how near each rule came", title_justify="left", title_style="bold")
    for name in ("rule", "highest", "where", "rungs", "why"):
        table.add_column(name, overflow="fold")
    for near in told.rules:
        peak = near.peak
        where = "" if peak is None or not (peak.tool or peak.agent) else f"step {peak.step}" + (f", {escape(peak.tool or peak.agent)}")
        rungs = " ".join(f"{name} {number:g}" for name, number in near.rungs.items())
        table.add_row(near.rule, f"{peak.observed:g} {peak.unit}" if peak is not None else "", where, rungs, near.why)
    console.print(table)
    for rule, why in told.not_recorded.items():
        console.print(f"[dim]{rule}: not judged here, {why}[/]")
