"""What ``runguard replay`` prints and writes: tables, JSON, the explanation of one run, and a page with plots.

``cli/policy_commands`` calls ``run`` and ``run_explanation``, and writes files of ``gate`` as here.
``calibrate/proposal`` shares the formatting of numbers, the progress bar and the writing of files.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Final, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from runguard import console as screen
from runguard.core.decision import Rungs, printable
from runguard.core.events import AgentEntered, ToolCall
from runguard.core.money import to_usd
from runguard.engine.guard import Question
from runguard.engine.runs import LaneRules, lane_rungs_of
from runguard.policy.settings import RULES, Policy
from runguard.replay.player import ADK_MODEL_CALLS, Batch, Judge, PieceResult, Player, quiet, replay
from runguard.replay.results import After, Group, RunResult, Totals, Verdict
from runguard.replay.sources import Source, error_text, nothing_read
from runguard.replay.steps import Faults, RecordedRun, Step, Turn, UnreadableError, Wrote, checked

# ---- the command

_Piece = TypeVar("_Piece", Batch, PieceResult)
_NAMED: Final = 10


def run(
    sources: list[Source],
    policies: list[tuple[str, Policy]],
    *,
    as_json: bool = False,
    every: bool = False,
    workers: int | None = None,
    model: str = "",
) -> "Report":
    """Replay all sources, print the result and return it; raise UnreadableError if there is no run."""
    totals = [Totals(name) for name, _ in policies]
    faults, rows = Faults(), Rows(every)
    report = JsonReport(sys.stdout, _head(sources, policies)) if as_json else None
    batches = replay(sources, [policy for _, policy in policies], workers=workers or os.cpu_count() or 1, model=model)
    for batch in with_progress(sources, batches):
        faults.merge(batch.faults)
        for results in batch.results:
            rows.add(results)
            for total, result in zip(totals, results, strict=True):
                total.add(result)
            if report is not None:
                report.add(results)
    if not totals[0].all.runs:
        raise nothing_read(sources, faults)
    if report is not None:
        report.end(totals, faults)
    else:
        print_result(screen.console(), rows, totals, faults)
    return Report([source.name for source in sources], totals, rows, faults)


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


def check_place(file: Path) -> None:
    """Check that the file can be written, before the long work starts."""
    if not file.parent.is_dir():
        raise UnreadableError(f"{file}: cannot be written: the folder {file.parent} does not exist; create it first")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UnreadableError(f"{file}: cannot be written: permission denied")


def write_file(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8", errors="replace")  # a name may contain half a surrogate pair
    except OSError as error:
        sys.stderr.write(f"{file}: cannot be written: {error.strerror or error}\n")  # the result is already on stdout
        sys.exit(2)
    sys.stderr.write(f"{file} written\n")


def _head(sources: list[Source], policies: list[tuple[str, Policy]]) -> dict[str, Any]:
    used = [{"name": name, "digest": policy.digest} for name, policy in policies]
    return {"sources": [source.name for source in sources], "policy": used[0]} | (
        {"against_policy": used[1]} if len(used) > 1 else {}
    )


@contextmanager
def _bar(sources: list[Source]) -> Iterator[Progress | None]:
    if not sys.stderr.isatty():
        yield None
        return
    shown = (
        TextColumn("replaying"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %  {task.fields[runs]} runs"),
        TimeRemainingColumn(),
    )
    with Progress(*shown, console=Console(stderr=True), transient=True) as progress:
        sizes = [source.size for source in sources]
        known = (
            None if None in sizes or len({source.unit for source in sources}) > 1 else sum(size or 0 for size in sizes)
        )
        progress.add_task("", total=known, runs=0)
        yield progress


def with_progress(sources: list[Source], pieces: Iterator[_Piece]) -> Iterator[_Piece]:
    """Show a progress bar on a terminal while the pieces are processed."""
    runs = 0
    with _bar(sources) as progress:
        for piece in pieces:
            runs += len(piece.results)
            if progress is not None:
                progress.update(progress.task_ids[0], advance=piece.size, runs=runs)
            yield piece


def run_explanation(
    sources: list[Source], name: str, policy: Policy, *, as_json: bool = False, model: str = ""
) -> None:
    """Explain one run; raise UnreadableError if there is no run of that name."""
    with quiet():
        recorded = _find(sources, name, model)
        try:
            explanation = explain(recorded, Judge(policy, to_the_end=True))
        except Exception as error:  # an unforeseen record
            raise UnreadableError(f"{recorded.id}: cannot be replayed: {error_text(error)}") from None
    if as_json:
        sys.stdout.write(
            json.dumps(unknown_as_null(explanation.to_dict(), explanation.result.unpriced), indent=2) + "\n"
        )
    else:
        print_explanation(screen.console(), explanation)


def _find(sources: list[Source], name: str, model: str) -> RecordedRun:
    """Find a run by its id, its session's id or a run within it, or by a unique prefix of one of the first two."""
    prefixed: dict[str, None] = {}
    known: list[str] = []
    faults = Faults()
    for recorded in _runs(sources, model, faults):
        if name in (recorded.id, recorded.session):
            return _held(recorded)
        if len(known) < _NAMED:
            known.append(recorded.id)
        if len(prefixed) < _NAMED and (recorded.id.startswith(name) or recorded.session.startswith(name)):
            prefixed[recorded.id] = None
    for recorded in _runs(sources, model, Faults()):  # a trip names the run within its session
        steps = list(_held(recorded).steps)
        if any(type(step) is Turn and step.run == name for step in steps):
            recorded.steps = iter(steps)
            return recorded
    if len(prefixed) == 1:
        return next(_held(recorded) for recorded in _runs(sources, model, Faults()) if recorded.id in prefixed)
    if prefixed:
        raise UnreadableError(f"{name!r} matches several runs: {', '.join(prefixed)}")
    if not known:
        raise nothing_read(sources, faults)
    raise UnreadableError(f"{name!r}: no run with this id. The first ones are {', '.join(known)}; --json lists all")


def _runs(sources: list[Source], model: str, faults: Faults) -> Iterator[RecordedRun]:
    for source in sources:
        for piece in source.pieces():
            try:
                for recorded in piece.runs(faults, model):
                    yield checked(recorded, faults)
            except Exception as error:  # the rest of a damaged source
                faults.add(source.name, f"cannot be read to its end: {error_text(error)}")


def _held(recorded: RecordedRun) -> RecordedRun:
    """Return the run with all its steps in memory, up to the first damaged one; its file closes when reading ends."""
    steps: list[Step] = []
    with suppress(Exception):
        steps.extend(recorded.steps)
    recorded.steps = iter(steps)
    return recorded


# ---- why a run stopped or not: the highest count of each rule, where, and what was missing

_IN_JOURNALS: Final = {
    "depth": "only the journal of a RunGuard store records how agents are nested",
    "fan_out": "only the journal of a RunGuard store records how many branches begin at once",
}
_NOT_RECORDED: Final = {
    "breaker": "breakers work across runs, but each recorded run is replayed alone",
    "kill_switch": "operators' stops are not replayed",
}


@dataclass(slots=True)
class Peak:
    """The highest count of a rule in a run."""

    observed: float
    unit: str
    step: int
    turn: int
    tool: str
    agent: str


@dataclass(slots=True)
class Near:
    """One rule with its rungs and its highest count."""

    rule: str
    rungs: dict[str, float]
    peak: Peak | None
    why: str


@dataclass(slots=True)
class Explanation:
    result: RunResult
    rules: list[Near]
    not_recorded: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        rules = [
            {
                "rule": near.rule,
                "rungs": near.rungs,
                "peak": None if near.peak is None else {name: getattr(near.peak, name) for name in Peak.__slots__},
                "why": near.why,
            }
            for near in self.rules
        ]
        return {"run": self.result.to_dict(), "rules": rules, "not_recorded": self.not_recorded}


class _Watcher(Player):
    """Plays a run and keeps the highest count of every rule, also of those that reach no rung."""

    def __init__(self, judge: Judge, run: RecordedRun) -> None:
        every = {name: _from_the_first(rungs) for name, rungs in lane_rungs_of(judge.policy).items()}
        super().__init__(judge, run, LaneRules(judge.policy, every))
        self.peaks: dict[str, Peak] = {}
        self.guard.sink.on_found(
            "replay",
            lambda found, event: self._saw(found.rule, float(found.observed), found.unit, found.tool, event.agent),
        )

    def check(self, event: Question) -> None:
        if isinstance(event, AgentEntered | ToolCall):
            self._saw("depth", event.depth, "nested delegations", "", event.agent)
        if isinstance(event, AgentEntered):
            self._saw("fan_out", event.branches, "branches of one node", "", event.agent)
        super().check(event)

    def _saw(self, rule: str, observed: float, unit: str, tool: str, agent: str) -> None:
        peak, result = self.peaks.get(rule), self.result
        if observed and (peak is None or observed > peak.observed):
            self.peaks[rule] = Peak(float(observed), unit, result.steps, result.model_calls, tool, agent)


def _from_the_first(rungs: Rungs) -> Rungs:
    """Rungs that report every count from the first on."""
    lowest = rungs.lowest
    return replace(rungs, warn=min(1.0, lowest) if lowest > 0 else lowest)


def explain(run: RecordedRun, judge: Judge) -> Explanation:
    """Walk a run twice at once: as it is judged, and with every count reported."""
    plain, watching = Player(judge, run), _Watcher(Judge(judge.original, to_the_end=True), run)
    is_journal = False
    for step in run.steps:
        is_journal = is_journal or type(step) is Wrote
        plain.feed(step)
        watching.feed(step)
    result = plain.finish()
    watching.finish()
    peaks = watching.peaks
    found = [_near(rule, judge, peaks.get(rule)) for rule in RULES]
    if is_journal:
        found += [
            _branching("depth", "block", judge.policy.max_delegation_depth, peaks),
            _branching("fan_out", "stop", judge.policy.fan_out, peaks),
        ]
    return Explanation(
        result, [*found, *_limits(judge, result)], _NOT_RECORDED if is_journal else {**_IN_JOURNALS, **_NOT_RECORDED}
    )


def _near(rule: str, judge: Judge, peak: Peak | None) -> Near:
    rungs = judge.policy.rungs(rule)
    if rungs is None or rungs == Rungs():
        return Near(rule, {}, None, "off in this policy")
    ladder = ("warn", "nudge", "withhold", "block", "stop")
    set_rungs = {name: number for name in ladder if (number := getattr(rungs, name)) is not None}
    if rule == "context":
        return Near(
            rule,
            set_rungs,
            peak,
            "the prompt came near the window"
            if peak is not None
            else "no prompt came near the model's window, or the window is unknown",
        )
    if peak is None:
        return Near(rule, set_rungs, None, "no event to count")
    reached = [name for name, number in set_rungs.items() if peak.observed >= number]
    stop = rungs.stop
    if stop is None:
        why = "has no stop in this policy"
    elif peak.observed >= stop:
        why = "reached its stop"
    else:
        why = f"{peak.observed:g} of {stop:g} needed to stop"
    if reached and reached[-1] != "stop":
        why += f"; reached its {reached[-1]}"
    return Near(rule, set_rungs, peak, why)


def _branching(rule: str, rung: str, limit: int | None, peaks: dict[str, Peak]) -> Near:
    """Describe a limit that allows exactly its number."""
    if limit is None:
        return Near(rule, {}, peaks.get(rule), "no limit in this policy")
    seen = peaks[rule].observed if rule in peaks else 0
    return Near(
        rule,
        {rung: float(limit)},
        peaks.get(rule),
        f"{seen:g}; {limit} are allowed" if seen <= limit else f"reached its {rung}",
    )


def _limits(judge: Judge, result: RunResult) -> list[Near]:
    policy = judge.policy
    turns = f"{result.runs} user turn{'s' * (result.runs != 1)}"
    spent: dict[str, tuple[Any, float | None, str]] = {
        "max_model_calls": (policy.max_model_calls or ADK_MODEL_CALLS, result.model_calls, "model calls"),
        "max_tool_calls": (policy.max_tool_calls, result.tool_calls, "tool calls"),
        "max_tokens": (policy.max_tokens, result.tokens, "tokens"),
        "max_usd": (policy.max_usd, None if result.usd is None else float(result.usd), "USD"),
    }
    found = []
    for name, (limit, seen, unit) in spent.items():
        peak = None if seen is None else Peak(float(seen), unit, result.steps, result.model_calls, "", "")
        spent_text = f"{seen:g} {unit}" if seen is not None else "unknown"
        why = (
            "no limit in this policy"
            if limit is None
            else f"{spent_text} in {turns}; the limit is {float(limit):g} for each"
        )
        if unit == "USD" and result.unpriced:
            why += f"; {result.unpriced} of {result.model_calls} model calls have no price"
        found.append(Near(name, {} if limit is None else {"stop": float(limit)}, peak, why))
    return found


# ---- the result on a screen

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
        is_touched = any(_first_verdicts(run) for run in results)
        rows = self.touched if is_touched or self._every else self.others
        if len(rows) < ROWS:
            rows.append(results)
        else:
            self.hidden += is_touched

    @property
    def shown(self) -> list[list[RunResult]]:
        return self.touched or self.others


def print_result(out: Console, rows: Rows, totals: list[Totals], faults: Faults) -> None:
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


def print_faults(out: Console, faults: Faults) -> None:
    if faults.count:
        out.print(f"{faults.count} records could not be read and were skipped:", style="yellow")
        for line in faults.first:
            out.print(f"  {printable(line)}", style="dim", soft_wrap=True)


def _story(run: RunResult, out: Console) -> Text:
    """Return the verdicts of a run; on one line in a pipe."""
    verdicts = [_verdict(verdict) for verdict in _first_verdicts(run)]
    return Text("\n" if out.is_terminal else "; ").join(verdicts) if verdicts else Text("nothing", "dim")


def _first_verdicts(run: RunResult) -> list[Verdict]:
    """Return the first nudge, the first refusal and the stop of a run, as far as it has them."""
    return [verdict for action in ("nudge", "block", "stop") if (verdict := run.first(action)) is not None]


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
    """Return the figures of a group in the order of ``MEASURES``."""
    touched = [f"{number} ({share(number, group.runs)})" for number in (group.nudged, group.blocked, group.stopped)]
    saved = group.saved
    spent = [count(group.model_calls), count(group.tokens), sum_of(group, unpriced)]
    after = [f"{count(saved.tokens)} ({share(saved.tokens, group.tokens)})", _part(saved, group, unpriced)]
    return [str(group.runs), *touched, *spent, *after]


def _part(saved: After, group: Group, unpriced: int) -> str:
    text = sum_of(saved, unpriced)
    return text if unpriced else f"{text} ({share(saved.nano, group.nano)})"


# ---- one run on a screen


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


# ---- the result as data for the page of ``--html``, which the dashboard's scripts render

_NANO: Final = 1e9
_RULE_COLUMNS: Final = (
    *("rule", "policy", "nudged first", "blocked first", "stopped", "of those labelled a success"),
    "money after its stops",
)


@dataclass(slots=True)
class Report:
    """The result of a replay of all sources under one policy or two."""

    sources: list[str]
    totals: list[Totals]
    rows: Rows
    faults: Faults

    def page_data(self) -> dict[str, Any]:
        """Return the texts and curves of the page."""
        totals, several = self.totals, len(self.totals) > 1
        return {
            "sources": ", ".join(self.sources[:10]) + (" and others" if len(self.sources) > 10 else ""),
            "policies": [each.name for each in totals],
            "notes": _notes(totals[0]),
            "totals": [
                _table(
                    each.name if several else "In total",
                    ("", *MEASURES),
                    [[name, *group_cells(group)] for name, group in each.groups.items()],
                )
                for each in totals
            ],
            "cost": _curves(totals[0], "Cost per turn", "USD", totals[0].cost_sums, column=1, scale=_NANO),
            "prompts": _curves(totals[0], "Prompt growth", "Prompt tokens", totals[0].prompt_sums, column=0),
            "stops": {
                "title": "Where stops fall",
                "label": "Runs stopped, by the share of their model calls made by then",
                "policies": [{"name": each.name, "heights": each.stop_shares} for each in totals],
            },
            "details": [*self._rules(), self._runs(), *self._lists()],
        }

    def _rules(self) -> list[dict[str, Any]]:
        rows = [
            [name, each.name, *map(str, (rule.nudge, rule.block, rule.stop, rule.false_stops)), money(rule.saved.nano)]
            for each in self.totals
            for name, rule in sorted(each.rules.items())
        ]
        return [_table("Rules", _RULE_COLUMNS, rows, words=(0, 1))] if rows else []

    def _runs(self) -> dict[str, Any]:
        head = ["run", "would have been", *["would have been, second policy"] * (len(self.totals) - 1)]
        rows = [
            [run.id, *map(_endings, results), *map(count, (run.model_calls, run.tool_calls, run.tokens)), cost(run)]
            for results in self.rows.shown
            for run in results[:1]
        ]
        more = f"and {self.rows.hidden} more that would have been touched" if self.rows.hidden else ""
        words = tuple(range(len(head)))
        return _table("Runs", (*head, "model calls", "tool calls", "tokens", "cost"), rows, words=words, note=more)

    def _lists(self) -> list[dict[str, Any]]:
        found = [
            {
                "title": f"Stopped although labelled a success, under {each.name}: {each.false_stop_count}",
                "items": each.false_stops,
            }
            for each in self.totals
            if each.false_stop_count
        ]
        if self.faults.count:
            title = f"Records that could not be read: {self.faults.count}"
            found.append({"title": title, "items": self.faults.first})
        return found


def _table(
    title: str, head: Sequence[str], rows: list[list[str]], *, words: tuple[int, ...] = (0,), note: str = ""
) -> dict[str, Any]:
    """Return a table of the page; ``words`` are the columns that hold no numbers."""
    return {"title": title, "head": head, "words": words, "rows": rows, "note": note}


def _notes(totals: Totals) -> list[str]:
    """Return what the figures do not know."""
    calls = totals.all.model_calls
    notes = []
    if totals.unpriced:
        notes.append(
            f"{totals.unpriced} of {calls} model calls have no price and count as $0: give one under prices in the "
            "policy, or --model."
        )
    if totals.estimated:
        notes.append(f"Tokens of {totals.estimated} of {calls} model calls are estimated from the length of the texts.")
    return notes


def _endings(run: RunResult) -> str:
    """Return what would have happened to a run, one line per verdict."""
    lines = []
    for verdict in _first_verdicts(run):
        spent = f", {money(verdict.after.nano)}" if run.usd is not None else ""
        lines.append(f"after call {verdict.turn}: {verdict}; then {count(verdict.after.tokens)} tokens{spent}")
    return "\n".join(lines) or "left alone"


def _curves(
    totals: Totals, title: str, unit: str, sums: list[int], *, column: int, scale: float = 1.0
) -> dict[str, Any]:
    """Return the mean of all runs and the most expensive runs. ``column``: of their curves, prompt tokens or cost."""
    enough = max(totals.turn_counts[0] // 100, 1)
    turns = max(sum(seen >= enough for seen in totals.turn_counts), 2)  # those that one run in a hundred has
    counted = zip(sums[:turns], totals.turn_counts, strict=False)
    runs = [
        {"name": name, "values": [values[column] / scale for values in curve[:turns]], "stop": stop}
        for _, name, curve, stop in totals.lines
    ]
    label = f"{unit} of each model call of a run"
    return {"title": title, "label": label, "mean": [total / (n or 1) / scale for total, n in counted], "runs": runs}


# ---- numbers for people


def count(number: float) -> str:
    """1234567 -> 1.2M."""
    for limit, divisor, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (10_000, 1e3, "k")):
        if number >= limit:
            return f"{number / divisor:.1f}{letter}"
    return f"{number:g}"


def money(nano: int) -> str:
    usd = to_usd(nano)
    return f"${usd:,.2f}" if usd >= 1 or not usd else f"${usd:.4f}"


def cost(run: RunResult) -> str:
    """Format the cost of a run; "?" if none of its calls has a price."""
    if run.unpriced and not run.nano:
        return "?"
    return ("≥" if run.unpriced else "≈" if run.estimated else "") + money(run.nano)


def share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "–"
