"""What ``runguard replay`` prints and writes: tables, JSON, the explanation of one run, and a page with plots.

``cli/recordings`` calls ``run`` and ``run_explanation``, and writes files of ``gate`` as here.
``calibrate/proposal`` shares the formatting of numbers, the progress bar and the writing of files.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Final, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from rich.text import Text

import runguard.console as screen
from runguard.core.decision import Rungs, printable
from runguard.core.events import AgentEntered, ToolCall
from runguard.core.money import to_usd
from runguard.engine.guard import Question
from runguard.engine.runs import LaneRules, lane_rungs_of
from runguard.policy.settings import RULES, Policy
from runguard.replay.player import ADK_MODEL_CALLS, Judge, PieceResult, Player, quiet, replay
from runguard.replay.results import After, Group, RunResult, Totals, Verdict
from runguard.replay.sources import Source, error_text, listed, nothing_read
from runguard.replay.steps import Faults, RecordedRun, Step, Turn, UnreadableError, Wrote

# ---- the command

_Piece = TypeVar("_Piece", bound=PieceResult)
_NAMED: Final = 10
ROWS: Final = 40


@dataclass(slots=True)
class Report:
    """The result of a replay of all sources under one policy or two.

    It shows the first affected runs, or the first of all if none is affected.
    """

    sources: list[str]
    totals: list[Totals]
    every: bool = False  # show runs that are not affected, too
    faults: Faults = field(default_factory=Faults)
    touched: list[list[RunResult]] = field(default_factory=list)
    others: list[list[RunResult]] = field(default_factory=list)
    hidden: int = 0  # affected runs that are not shown

    def add(self, results: list[RunResult]) -> None:
        for total, result in zip(self.totals, results, strict=True):
            total.add(result)
        is_touched = any(_first_verdicts(run) for run in results)
        rows = self.touched if is_touched or self.every else self.others
        if len(rows) < ROWS:
            rows.append(results)
        else:
            self.hidden += is_touched

    def page_data(self) -> dict[str, Any]:
        """Return the texts and curves of the page of ``--html``, which the dashboard's scripts render."""
        first, (runs, *rest) = self.totals[0], _sections(self, for_page=True)
        stops = [{"name": each.name, "heights": each.stop_shares} for each in self.totals]
        return {
            "sources": listed(self.sources, 10),
            "policies": [each.name for each in self.totals],
            "cost": _curves(first, "Cost per turn", "USD", first.cost_sums, column=1, scale=1e9),
            "prompts": _curves(first, "Prompt growth", "Prompt tokens", first.prompt_sums, column=0),
            "stops": {
                "title": "Where stops fall",
                "label": "Runs stopped, by the share of their model calls made by then",
                "policies": stops,
            },
            "totals": [asdict(section) for section in rest if section.is_total],
            "details": [asdict(section) for section in (*rest, runs) if not section.is_total],
        }


def run(
    sources: list[Source],
    policies: list[tuple[str, Policy]],
    *,
    as_json: bool = False,
    every: bool = False,
    workers: int | None = None,
    model: str = "",
) -> Report:
    """Replay all sources, print the result and return it; raise UnreadableError if there is no run."""
    report = Report([source.name for source in sources], [Totals(name) for name, _ in policies], every)
    document = JsonReport(sys.stdout, _head(sources, policies)) if as_json else None
    batches = replay(sources, [policy for _, policy in policies], workers=workers or os.cpu_count() or 1, model=model)
    for batch in with_progress(sources, batches):
        report.faults.merge(batch.faults)
        for results in batch.results:
            report.add(results)
            if document is not None:
                document.add(results)
    if not report.totals[0].all.runs:
        raise nothing_read(sources, report.faults)
    if document is not None:
        document.end(report)
    else:
        print_report(screen.console(), report)
    return report


class JsonReport:
    """Writes one JSON document, run by run, so that memory does not depend on the number of runs."""

    def __init__(self, out: IO[str], head: dict[str, Any]) -> None:
        # written with the first run; without any run there is an error to print instead
        self._out, self._before = out, json.dumps(head, indent=2)[:-2] + ',\n  "runs": [\n    '

    def add(self, results: list[RunResult]) -> None:
        first, *others = (unknown_as_null(each.to_dict(), each.unpriced) for each in results)
        for other in others:
            first["against"] = {key: other[key] for key in ("usd", "verdicts", "more_verdicts", "after_stop")}
        self._out.write(self._before + json.dumps(first))
        self._before = ",\n    "

    def end(self, report: Report) -> None:
        names = ("totals", "against")[: len(report.totals)]
        rest: dict[str, Any] = {
            name: unknown_as_null(totals.to_dict(), totals.all.unpriced)
            for name, totals in zip(names, report.totals, strict=True)
        }
        rest["skipped"] = {"count": report.faults.count, "first": report.faults.first}
        self._out.write("\n  ],\n" + json.dumps(rest, indent=2)[2:] + "\n")


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


def with_progress(sources: list[Source], pieces: Iterator[_Piece]) -> Iterator[_Piece]:
    """Show a progress bar on a terminal while the pieces are processed."""
    shown = ("replaying", BarColumn(), "{task.percentage:>3.0f} %  {task.fields[runs]} runs", TimeRemainingColumn())
    sizes = [source.size for source in sources]
    is_known = None not in sizes and len({source.unit for source in sources}) == 1
    on_terminal, runs = Console(stderr=True), 0
    with Progress(*shown, console=on_terminal, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=sum(size or 0 for size in sizes) if is_known else None, runs=0)
        for piece in pieces:
            runs += len(piece.results)
            progress.update(task, advance=piece.size, runs=runs)
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
    known: list[str] = []
    inside: RecordedRun | None = None
    prefixed: dict[str, RecordedRun] = {}
    faults = Faults()
    for recorded in _runs(sources, model, faults):
        steps = _held(recorded)
        recorded.steps = iter(steps)
        if name in (recorded.id, recorded.session):
            return recorded
        if len(known) < _NAMED:
            known.append(recorded.id)
        if inside is None and any(type(step) is Turn and step.run == name for step in steps):
            inside = recorded  # a trip names the run within its session
        if len(prefixed) < _NAMED and (recorded.id.startswith(name) or recorded.session.startswith(name)):
            prefixed.setdefault(recorded.id, recorded)
    if inside is not None or len(prefixed) == 1:
        return inside or next(iter(prefixed.values()))
    if prefixed:
        raise UnreadableError(f"{name!r} matches several runs: {', '.join(prefixed)}")
    if not known:
        raise nothing_read(sources, faults)
    raise UnreadableError(f"{name!r}: no run with this id. The first ones are {', '.join(known)}; --json lists all")


def _runs(sources: list[Source], model: str, faults: Faults) -> Iterator[RecordedRun]:
    for source in sources:
        for piece in source.pieces():
            try:
                yield from piece.runs(faults, model)
            except Exception as error:  # the rest of a damaged source
                faults.add(source.name, f"cannot be read to its end: {error_text(error)}")


def _held(recorded: RecordedRun) -> list[Step]:
    """Return all steps of a run up to the first damaged one; its file closes when reading ends."""
    steps: list[Step] = []
    with suppress(Exception):
        steps.extend(recorded.steps)
    return steps


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
        return {
            "run": self.result.to_dict(),
            "rules": [asdict(near) for near in self.rules],
            "not_recorded": self.not_recorded,
        }


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


# ---- the result as tables and lists, for the screen and for the page of ``--html``

_COLOURS: Final = {"stop": "red", "block": "yellow", "nudge": "cyan", "warn": "dim"}
_MEASURES: Final = (
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
_RULE_COLUMNS: Final = (
    "nudged first",
    "blocked first",
    "stopped",
    "of those labelled a success",
    "money after its stops",
)
_LABELS: Final = {True: "success", False: "failure", None: ""}
_LISTED: Final = 20


@dataclass(slots=True)
class Section:
    """A part of the result: a table, or a list if it has one column."""

    title: str
    head: tuple[str, ...]
    rows: list[list[str]]
    words: tuple[int, ...] = (0,)  # columns that hold no numbers
    notes: list[str] = field(default_factory=list)
    is_total: bool = False


def _sections(report: Report, *, for_page: bool = False) -> list[Section]:
    """Return the affected runs, the totals of each policy, the rules that acted, and the stopped successes."""
    several = len(report.totals) > 1
    under = [f"under {printable(each.name)}" for each in report.totals]
    found = [_run_section(report, under if several else ["what the policy would have done"], for_page)]
    rules, lists = [], []
    for name, each in zip(under, report.totals, strict=True):
        columns = [_group_cells(group, each.all.unpriced) for group in each.groups.values()]
        rows = [list(cells) for cells in zip(_MEASURES, *columns, strict=True)]
        title = name if several else "in total"
        found.append(Section(title, ("", *each.groups), rows, notes=_notes(each), is_total=True))
        for rule, did in sorted(each.rules.items()):
            counts = map(str, (did.nudge, did.block, did.stop, did.false_stops))
            rules.append([rule, name.removeprefix("under "), *counts, _sum_of(did.saved, each.all.unpriced)])
        if each.false_stop_count:
            title = f"stopped although labelled a success{f', {name}' if several else ''}: {each.false_stop_count}"
            lists.append(Section(title, ("run",), [[printable(run)] for run in each.false_stops]))
    if rules:
        found.append(Section("rules", ("rule", "policy", *_RULE_COLUMNS), rules, (0, 1)))
    return found + lists + skipped(report.faults)


def skipped(faults: Faults) -> list[Section]:
    """Return the list of records that could not be read, if there are any."""
    title = f"{faults.count} records could not be read and were skipped"
    return [Section(title, ("record",), [[printable(line)] for line in faults.first])] if faults.count else []


def _run_section(report: Report, stories: list[str], for_page: bool) -> Section:
    columns = [column for story in stories for column in (story, "after the stop")]
    rows = []
    for run, *others in report.touched or report.others:
        row = [printable(run.id), _LABELS[run.success], f"{count(run.model_calls)}+{count(run.tool_calls)}"]
        row += [count(run.tokens), cost(run)]
        for result in (run, *others):
            after = f"{count(result.saved.tokens)} {_sum_of(result.saved, result.unpriced)}"
            row += [_story(result, for_page), after if result.first("stop") else ""]
        rows.append(row)
    notes = ["calls: model + tool; after the stop: what the recording spent from there on"]
    if report.hidden:
        notes.append(f"and {report.hidden} more affected runs; --json lists all")
    words = (0, 1, *range(5, 5 + len(columns), 2))
    return Section("runs", ("run", "label", "calls", "tokens", "cost", *columns), rows, words, notes)


def _story(run: RunResult, for_page: bool) -> str:
    """Return the verdicts of a run, one on each line."""
    lines = []
    for verdict in _first_verdicts(run):
        words = f"{verdict.action} at call {verdict.turn}: {verdict.rule}{verdict.about}"
        words += f", {verdict.observed:g} {verdict.unit}"
        if for_page:
            words += f"; then {count(verdict.after.tokens)} tokens, {_sum_of(verdict.after, run.unpriced)}"
        lines.append(printable(words))
    return "\n".join(lines) or "nothing"


def _first_verdicts(run: RunResult) -> list[Verdict]:
    """Return the first nudge, the first refusal and the stop of a run, as far as it has them."""
    firsts = run.firsts()
    return [firsts[action] for action in ("nudge", "block", "stop") if action in firsts]


def _group_cells(group: Group, unpriced: int) -> list[str]:
    """Return the figures of a group in the order of ``_MEASURES``."""
    saved = group.saved
    touched = [f"{number} ({share(number, group.runs)})" for number in (group.nudged, group.blocked, group.stopped)]
    spent = [count(group.model_calls), count(group.tokens), _sum_of(group, unpriced)]
    of_money = "" if unpriced else f" ({share(saved.nano, group.nano)})"
    after = [f"{count(saved.tokens)} ({share(saved.tokens, group.tokens)})", _sum_of(saved, unpriced) + of_money]
    return [str(group.runs), *touched, *spent, *after]


def _notes(totals: Totals) -> list[str]:
    """Return what the figures do not know, and what the run would have done besides."""
    every, notes = totals.all, []
    if every.switched.model_calls:
        calls, saved = count(every.switched.model_calls), money(every.switched.nano)
        notes.append(f"{calls} model calls would have gone to a cheaper model, for about {saved} less")
    if every.waited.calls:
        seconds = f"{every.waited.seconds:,.0f} s in all"
        notes.append(f"{count(every.waited.calls)} model calls would have waited for room in a budget, {seconds}")
    if every.unpriced:
        without = f"{every.unpriced} of {every.model_calls} model calls have no price and count as $0"
        notes.append(f"{without}: set prices in the policy, or pass --model")
    if every.estimated:
        notes.append(
            f"tokens of {every.estimated} of {every.model_calls} model calls are estimated from the length of the texts"
        )
    return notes


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


# ---- the result on a screen


def print_report(out: Console, report: Report) -> None:
    runs, *rest = _sections(report)
    _print_body(out, runs)
    print_sections(out, rest)


def print_sections(out: Console, sections: list[Section]) -> None:
    for section in sections:
        out.print(Text.assemble("\n", screen.heading(section.title)), soft_wrap=True)
        _print_body(out, section)


def _print_body(out: Console, section: Section) -> None:
    if len(section.head) == 1:
        for (name,) in section.rows[:_LISTED]:
            out.print(f"  {name}", soft_wrap=True)
    else:
        _print_table(out, section)
    for note in section.notes:
        out.print(note, style="dim", soft_wrap=True)


def _print_table(out: Console, section: Section) -> None:
    words = [section.head[position] for position in section.words]
    right = [name for name in section.head if name not in words]
    shown = screen.table(*section.head, right=right, whole=[*words[:2], *right], sentences=words[2:])
    for row in section.rows:
        cells = [Text(cell if out.is_terminal else cell.replace("\n", "; ")) for cell in row]
        for cell in cells:
            for action, colour in _COLOURS.items():
                cell.highlight_regex(rf"\b{action}(?= at call )", colour)
        shown.add_row(*cells)
    screen.print_table(out, shown)


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
            f"; then {count(verdict.after.tokens)} tokens, {_sum_of(verdict.after, run.unpriced)}"
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


def _sum_of(spent: After | Group, unpriced: int) -> str:
    """Format dollars; ``unpriced`` is the number of calls without a price."""
    if unpriced and spent.model_calls:
        return f"at least {money(spent.nano)}" if spent.nano else "unknown"
    return money(spent.nano)


def share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "–"
