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
from html import escape
from math import ceil, floor, log10
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
from runguard.replay.results import BINS, After, Group, RunResult, Totals, Verdict
from runguard.replay.sources import Source, error_text
from runguard.replay.steps import Faults, RecordedRun, Step, Turn, UnreadableError, Wrote, checked

# ---- the command

_Piece = TypeVar("_Piece", Batch, PieceResult)
_NAMED: Final = 10


def run(
    sources: list[Source],
    policies: list[tuple[str, Policy]],
    *,
    as_json: bool = False,
    page: Path | None = None,
    every: bool = False,
    workers: int | None = None,
    model: str = "",
) -> None:
    """Replay all sources and print the result; raise UnreadableError if there is no run or the page is not writable."""
    if page is not None:
        check_place(page)
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
        raise UnreadableError(_nothing_read(sources, faults))
    if report is not None:
        report.end(totals, faults)
    else:
        print_result(screen.console(), rows, totals, faults)
    if page is not None:
        write_file(page, page_of([source.name for source in sources], totals, rows, faults))


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


def _nothing_read(sources: list[Source], faults: Faults) -> str:
    """Return one line that says why there is no run."""
    names = ", ".join(source.name for source in sources[:5]) + (" and others" if len(sources) > 5 else "")
    if not faults.count:
        return f"{names}: contains no run"
    return (
        f"{names}: no run could be read, {faults.count} record{'s' * (faults.count != 1)} skipped; the first: "
        f"{faults.first[0]}"
    )


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
        raise UnreadableError(_nothing_read(sources, faults))
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
    """The figures of a group in the order of ``MEASURES``."""
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


# ---- the result as one self-contained page: tables and plots, no script, no request, light and dark

_NANO: Final = 1e9
_STYLES: Final = ("first", "second")
_WORDS: Final = ("policy", "would have been", "would have been, second policy")  # columns of words, not of numbers
_CSS: Final = """
:root { color-scheme: light dark; --bg: #ffffff; --fg: #1c2024; --dim: #60646c; --rule: #d9d9e0;
  --first: #0a6cc9; --second: #b4530a; --bad: #c62a2f; --many: #8b8d98; }
@media (prefers-color-scheme: dark) {
  :root { --bg: #111113; --fg: #edeef0; --dim: #b0b4ba; --rule: #363a3f; --first: #70b8ff; --second: #ffa057;
  --bad: #ff9592; --many: #696e77; } }
body { background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
max-width: 1400px; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } h1, h2, p, li { overflow-wrap: anywhere; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } .wide { overflow-x: auto; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid var(--rule); text-align: right; vertical-align: top;
white-space: nowrap; }
th:first-child, td:first-child, .text { text-align: left; }
td.id, td.text, td.story { white-space: normal; overflow-wrap: anywhere; } td.id { min-width: 7rem; max-width: 22rem; }
td.text { min-width: 7rem; } td.story { min-width: 14rem; text-align: left; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 34rem), 1fr)); gap: 1.5rem;
margin-top: 2rem; }
figure { margin: 0; min-width: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto;
min-width: 32rem; }
.key { color: var(--dim); font-size: 13px; margin: 0; }
.key span { display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin: 0 .35em 0 .6em; }
.key span:first-child { margin-left: 0; }
.key .first { background: var(--first); } .key .second { background: var(--second); }
.key .many { background: var(--many); }
.key .stop { background: var(--bad); }
.grid { stroke: var(--rule); } .tick, .axis, .label { fill: var(--dim); font-size: 12px; } .label { fill: var(--fg); }
polyline { fill: none; stroke-width: 2; } polyline.first { stroke: var(--first); }
polyline.second { stroke: var(--second); stroke-dasharray: 5 3; }
polyline.many { stroke: var(--many); stroke-width: 1; opacity: .6; }
rect.first, circle.first { fill: var(--first); opacity: .8; } rect.second, circle.second { fill: var(--second);
opacity: .8; } circle.stop { fill: var(--bad); }
.dim { color: var(--dim); } .bad { color: var(--bad); }
"""


def page_of(sources: list[str], totals: list[Totals], rows: Rows, faults: Faults) -> str:
    policy = totals[0].name if len(totals) < 2 else f"{totals[0].name} against {totals[1].name}"
    parts = [
        "<!doctype html>",
        (
            '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, '
            'initial-scale=1">'
        ),
        f"<title>RunGuard replay</title><style>{_CSS}</style></head><body>",
        "<h1>What RunGuard would have done</h1>",
        (
            f"<p>{escape(', '.join(sources[:10]))}{' and others' if len(sources) > 10 else ''}, under "
            f"{escape(policy)}.</p>"
        ),
        *(_summary(each, len(totals) > 1) for each in totals),
        _notes(totals[0]),
        '<div class="plots">',
        _curves(totals[0], "Cost per turn", "USD", totals[0].cost_sums, column=1, scale=_NANO, prefix="$"),
        _curves(totals[0], "Prompt growth", "prompt tokens", totals[0].prompt_sums, column=0),
        _where_plot(totals),
        _saved_plot(totals),
        "</div>",
        _rules(totals),
        _runs_table(rows),
        _false_stops(totals),
        _skipped(faults),
        "</body></html>\n",
    ]
    return "\n".join(parts)


# ---- tables of the page


def _table(head: list[str], rows: list[list[str]]) -> str:
    top = "".join(
        f'<th class="text">{escape(name)}</th>' if name in _WORDS else f"<th>{escape(name)}</th>" for name in head
    )
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(text: str, kind: str = "") -> str:
    return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"


def _summary(totals: Totals, several: bool) -> str:
    title = f"<h2>{escape(totals.name)}</h2>" if several else ""
    rows = [[_cell(text) for text in (name, *group_cells(group))] for name, group in totals.groups.items()]
    return title + _table(["", *MEASURES], rows)


def _notes(totals: Totals) -> str:
    """What the figures do not know."""
    notes = []
    if totals.unpriced:
        notes.append(
            f"{totals.unpriced} of {totals.all.model_calls} model calls have no price and count as $0: give "
            "one under prices in the policy, or --model."
        )
    if totals.estimated:
        notes.append(
            f"Tokens of {totals.estimated} of {totals.all.model_calls} model calls are estimated from the "
            "length of the texts."
        )
    return f'<p class="dim">{escape(" ".join(notes))}</p>' if notes else ""


def _rules(totals: list[Totals]) -> str:
    rows = [
        [
            _cell(name),
            _cell(each.name, "text"),
            *(_cell(str(n)) for n in (rule.nudge, rule.block, rule.stop, rule.false_stops)),
            _cell(money(rule.saved.nano)),
        ]
        for each in totals
        for name, rule in sorted(each.rules.items())
    ]
    head = [
        "rule",
        "policy",
        "nudged first",
        "blocked first",
        "stopped",
        "of those labelled a success",
        "money after its stops",
    ]
    return f"<h2>Rules</h2>{_table(head, rows)}" if rows else ""


def _runs_table(rows: Rows) -> str:
    shown = [
        [
            _cell(run.id, "id"),
            *map(_story_cell, results),
            *(_cell(text) for text in (count(run.model_calls), count(run.tool_calls), count(run.tokens), cost(run))),
        ]
        for results in rows.shown
        for run in results[:1]
    ]
    several = bool(rows.shown) and len(rows.shown[0]) > 1
    head = [
        "run",
        "would have been",
        *(["would have been, second policy"] if several else []),
        "model calls",
        "tool calls",
        "tokens",
        "cost",
    ]
    more = f'<p class="dim">and {rows.hidden} more that would have been touched</p>' if rows.hidden else ""
    return f"<h2>Runs</h2>{_table(head, shown)}{more}"


def _story_cell(run: RunResult) -> str:
    lines = []
    for verdict in _first_verdicts(run):
        spent = f"{count(verdict.after.tokens)} tokens" + (
            f", {money(verdict.after.nano)}" if run.usd is not None else ""
        )
        lines.append(escape(f"after call {verdict.turn}: {verdict}; then {spent}"))
    return f'<td class="story">{"<br>".join(lines) or "left alone"}</td>'


def _false_stops(totals: list[Totals]) -> str:
    parts = []
    for each in totals:
        if each.false_stop_count:
            names = "".join(f"<li>{escape(name)}</li>" for name in each.false_stops)
            parts.append(
                f'<h2 class="bad">Stopped although labelled a success, under {escape(each.name)}: '
                f"{each.false_stop_count}</h2><ul>{names}</ul>"
            )
    return "".join(parts)


def _skipped(faults: Faults) -> str:
    if not faults.count:
        return ""
    lines = "".join(f"<li>{escape(line)}</li>" for line in faults.first)
    return f"<h2>Records that could not be read: {faults.count}</h2><ul>{lines}</ul>"


# ---- plots of the page


def _turns(totals: Totals) -> int:
    """How many turns are worth drawing: as many as one run in a hundred has."""
    enough = max(totals.turn_counts[0] // 100, 1)
    return max(sum(1 for seen in totals.turn_counts if seen >= enough), 2)


def _curves(
    totals: Totals, title: str, unit: str, sums: list[int], *, column: int, scale: float = 1.0, prefix: str = ""
) -> str:
    """The mean of all runs, and the most expensive runs. ``column``: of their curves, prompt tokens or cost."""
    turns = _turns(totals)
    counted = zip(sums, totals.turn_counts[:turns], strict=False)
    means: list[tuple[float, float]] = [
        (turn, total / runs / scale) for turn, (total, runs) in enumerate(counted, 1) if runs
    ]
    lines: list[tuple[str, list[tuple[float, float]], int | None]] = [
        (name, [(turn, values[column] / scale) for turn, values in enumerate(curve[:turns], 1)], stop)
        for _, name, curve, stop in totals.lines
    ]
    top = max((value for points in (means, *(line[1] for line in lines)) for _, value in points), default=1.0)
    stops = (
        [("stop", "would have been stopped")]
        if any(stop is not None and 0 < stop <= len(points) for _, points, stop in lines)
        else []
    )
    key = key_of(("first", "mean of all runs"), ("many", "the most expensive runs"), *stops)
    plot = Plot(title, "model call of the run", unit, turns, top, y_prefix=prefix, whole="x", key=key)
    for name, points, stop in lines:
        plot.line(points, "many", name)
        if stop is not None and 0 < stop <= len(points):
            plot.point(*points[stop - 1], "stop", f"{name}: would have been stopped after call {stop}")
    plot.line(means, "first", "mean of all runs")
    return plot.svg()


def _where_plot(totals: list[Totals]) -> str:
    top = max((height for each in totals for height in each.stop_shares), default=1)
    plot = Plot(
        "Where stops fall",
        "% of the run's model calls made by then",
        "runs stopped",
        100,
        top,
        whole="y",
        key=_policies(totals),
    )
    width = 100 / BINS / len(totals)
    for number, each in enumerate(totals):
        for position, height in enumerate(each.stop_shares):
            if height:
                start = position * 100 / BINS + number * width
                plot.bar(
                    start,
                    start + width,
                    height,
                    _STYLES[number],
                    f"{each.name}: {height} runs stopped at {position * 100 // BINS} % or later",
                )
    return plot.svg()


def _saved_plot(totals: list[Totals]) -> str:
    points = [
        (name, rule, number) for number, each in enumerate(totals) for name, rule in each.rules.items() if rule.stop
    ]
    by_money = any(rule.saved.nano for _, rule, _ in points)
    saved = [
        (name, rule.false_stops, rule.saved.nano / _NANO if by_money else rule.saved.tokens, number)
        for name, rule, number in points
    ]
    right, top = (
        max((false for _, false, _, _ in saved), default=1),
        max((value for _, _, value, _ in saved), default=1.0),
    )
    title = "Saved against false stops, by rule"
    y = "USD after the stops" if by_money else "tokens after the stops"
    prefix = "$" if by_money else ""
    plot = Plot(
        title,
        "stops of runs labelled a success",
        y,
        max(right, 1),
        top or 1.0,
        y_prefix=prefix,
        whole="x",
        key=_policies(totals),
        inset=True,
    )
    for name, false, value, number in saved:
        plot.point(false, value, _STYLES[number], f"{totals[number].name}: {name}, {false} false stops", name)
    return plot.svg()


def _policies(totals: list[Totals]) -> str:
    return (
        key_of(*((style, each.name) for style, each in zip(_STYLES, totals, strict=False))) if len(totals) > 1 else ""
    )


# ---- a plot as inline SVG: lines, bars and points; the page defines the colours as CSS variables

WIDTH: Final = 640
HEIGHT: Final = 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 20, 16, 44
_TICKS: Final = 5  # at most, beside the zero
_INSET: Final = 14  # keeps points at zero off the labels of the axis


def number(value: float) -> str:
    """Format a number as a short label."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


def step_of(largest: float, *, whole: bool = False) -> float:
    """Return the distance of ticks: 1, 2 or 5 times a power of ten; ``whole`` for counts."""
    rough = largest / _TICKS
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return max(step, 1.0) if whole else step


class Plot:
    """One plot with its axes.

    ``x`` and ``y`` run from 0 to their largest value; ``whole`` names the axes on which things are counted.
    """

    def __init__(
        self,
        title: str,
        x_label: str,
        y_label: str,
        x_max: float,
        y_max: float,
        *,
        y_prefix: str = "",
        whole: str = "",
        key: str = "",
        inset: bool = False,
    ) -> None:
        self.title, self.x_label, self.y_label, self.y_prefix = title, x_label, y_label, y_prefix
        self.x_step, self.y_step = step_of(x_max or 1.0, whole="x" in whole), step_of(y_max or 1.0, whole="y" in whole)
        self.x_max = x_max or 1.0
        self.y_max = ceil((y_max or 1.0) / self.y_step - 1e-9) * self.y_step
        self._key, self._inset = key, _INSET if inset else 0
        self._parts: list[str] = []

    def x(self, value: float) -> float:
        return round(_LEFT + self._inset + value / self.x_max * (WIDTH - _LEFT - _RIGHT - 2 * self._inset), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - _BOTTOM - value / self.y_max * (HEIGHT - _TOP - _BOTTOM), 1)

    def line(self, points: Sequence[tuple[float, float]], style: str, hint: str = "") -> None:
        if not points:
            return
        path = " ".join(f"{self.x(x)},{self.y(y)}" for x, y in points)
        self._parts.append(f'<polyline class="{style}" points="{path}">{_hint(hint)}</polyline>')

    def bar(self, start: float, end: float, height: float, style: str, hint: str = "") -> None:
        left, right, top = self.x(start), self.x(end), self.y(height)
        wide = max(right - left - 1, 1)
        self._parts.append(
            f'<rect class="{style}" x="{left}" y="{top}" width="{wide:.1f}" '
            f'height="{max(self.y(0) - top, 0):.1f}">{_hint(hint)}</rect>'
        )

    def point(self, x: float, y: float, style: str, hint: str = "", label: str = "") -> None:
        at_x, at_y = self.x(x), self.y(y)
        self._parts.append(f'<circle class="{style}" cx="{at_x}" cy="{at_y}" r="5">{_hint(hint)}</circle>')
        if label:
            side = ("end", -9) if at_x > WIDTH * 0.6 else ("start", 9)
            self._parts.append(
                f'<text class="label" x="{at_x + side[1]:.1f}" y="{at_y + 4:.1f}" '
                f'text-anchor="{side[0]}">{escape(label)}</text>'
            )

    def svg(self) -> str:
        base, right = self.y(0), WIDTH - _RIGHT
        marks = []
        for tick in range(int(self.y_max / self.y_step + 1e-9) + 1):
            up = tick * self.y_step
            marks.append(f'<line class="grid" x1="{_LEFT}" y1="{self.y(up)}" x2="{right}" y2="{self.y(up)}"/>')
            marks.append(
                f'<text class="tick" x="{_LEFT - 6}" y="{self.y(up) + 4:.1f}" '
                f'text-anchor="end">{escape(self.y_prefix + number(up))}</text>'
            )
        for tick in range(int(self.x_max / self.x_step + 1e-9) + 1):
            along = tick * self.x_step
            marks.append(
                f'<text class="tick" x="{self.x(along)}" y="{base + 16:.1f}" '
                f'text-anchor="middle">{escape(number(along))}</text>'
            )
        marks.append(
            f'<text class="axis" x="{(_LEFT + right) / 2}" y="{HEIGHT - 6}" '
            f'text-anchor="middle">{escape(self.x_label)}</text>'
        )
        marks.append(
            f'<text class="axis" x="12" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 12 '
            f'{HEIGHT / 2})">{escape(self.y_label)}</text>'
        )
        body = "".join(marks + self._parts)
        return (
            f'<figure><figcaption>{escape(self.title)}</figcaption>{self._key}<div class="wide"><svg '
            f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="{escape(self.title, quote=True)}">{body}</svg></div></figure>'
        )


def key_of(*entries: tuple[str, str]) -> str:
    """Return the legend of a plot from pairs of style and text."""
    entries_html = "".join(f'<span class="{style}"></span>{escape(words)} ' for style, words in entries)
    return f'<p class="key">{entries_html}</p>'


def _hint(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


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
