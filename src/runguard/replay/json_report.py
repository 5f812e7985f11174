"""The result of a replay as JSON, written run by run."""

import json
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from runguard.console.screen import heading, print_table, table
from runguard.core.printable import printable
from runguard.replay.explain import Explanation
from runguard.replay.formatting import cost, count
from runguard.replay.results import RunResult
from runguard.replay.steps import Faults
from runguard.replay.table import sum_of
from runguard.replay.totals import Totals


class JsonReport:
    """Writes one JSON document, run by run, so that memory does not depend on the number of runs."""

    def __init__(self, out: IO[str], head: dict[str, Any]) -> None:
        self._out, self._first = out, True
        # written with the first run; without any run there is an error to print instead
        self._head = json.dumps(head, indent=2)[:-2] + ',\n  "runs": ['

    def add(self, results: list[RunResult]) -> None:
        self._out.write(f"{self._head}\n    " if self._first else ",\n    ")
        self._first = False
        first, *others = (unknown_as_null(each.to_dict(), each.unpriced) for each in results)
        for other in others:
            first["against"] = {
                key: value for key, value in other.items() if key in ("verdicts", "more_verdicts", "after_stop", "usd")
            }
        self._out.write(json.dumps(first))

    def end(self, totals: list[Totals], faults: Faults) -> None:
        self._out.write("\n  ],\n")
        rest: dict[str, Any] = {"totals": unknown_as_null(totals[0].to_dict(), totals[0].unpriced)}
        if len(totals) > 1:
            rest["against"] = unknown_as_null(totals[1].to_dict(), totals[1].unpriced)
        rest["skipped"] = {"count": faults.count, "first": faults.first}
        self._out.write(json.dumps(rest, indent=2)[2:] + "\n")


def unknown_as_null(data: Any, unpriced: int) -> Any:
    """Replace a ``usd`` of zero by null if calls have no price: the sum is unknown, not zero."""
    if not unpriced:
        return data
    if isinstance(data, list):
        return [unknown_as_null(entry, unpriced) for entry in data]
    if not isinstance(data, dict):
        return data
    known = {key: unknown_as_null(value, unpriced) for key, value in data.items()}
    return known | {"usd": None} if known.get("usd") == "0" and known.get("model_calls") else known


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
    out.print(Text.assemble("\n", heading("the highest count of each rule")))
    shown = table("rule", "highest", "where", "rungs", "why", whole=("rule",), sentences=("why",))
    for near in explanation.rules:
        peak = near.peak
        where = "" if peak is None or not (peak.tool or peak.agent) else f"step {peak.step}, {peak.tool or peak.agent}"
        rungs = " ".join(f"{name} {number:g}" for name, number in near.rungs.items())
        shown.add_row(near.rule, f"{peak.observed:g} {peak.unit}" if peak is not None else "", where, rungs, near.why)
    print_table(out, shown)
    for rule, why in explanation.not_recorded.items():
        out.print(f"{rule}: not evaluated: {why}", style="dim", soft_wrap=True)
