"""``runguard replay``: sources in, a table, JSON or a page out."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from runguard.policy import Policy
from runguard.replay.engine import Judge, quiet
from runguard.replay.explain import Explanation, explain
from runguard.replay.processes import Worked
from runguard.replay.sources import Source
from runguard.replay.steps import Faults, RecordedRun, Turn, UnreadableError
from runguard.replay.table import Rows, print_table
from runguard.replay.told import JsonReport, print_explanation, unknown_as_null
from runguard.replay.totals import Totals
from runguard.replay.work import Batch, replay

if TYPE_CHECKING:
    from runguard.replay.results import RunResult

_Piece = TypeVar("_Piece", Batch, Worked)


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
    """Replay everything and print what it came to; UnreadableError where there is nothing to print, or no place for the page."""
    if page is not None:
        _check_place(page)
    console = console_of_stdout()
    totals = [Totals(name) for name, _ in policies]
    faults, rows = Faults(), Rows(every)
    report = JsonReport(sys.stdout, _head(sources, policies)) if as_json else None
    batches = replay(sources, [policy for _, policy in policies], workers=workers or os.cpu_count() or 1, model=model)
    for batch in with_progress(sources, batches, lambda batch: len(batch.results)):
        faults.merge(batch.faults)
        for results in batch.results:
            _add(results, totals, rows, report)
    if not totals[0].all.runs:
        raise UnreadableError(_nothing_read(sources, faults))
    if report is not None:
        report.end(totals, faults)
    else:
        print_table(console, rows, totals, faults)
    if page is not None:
        from runguard.replay.page import page_of

        _write(page, page_of([source.name for source in sources], totals, rows, faults))


def _nothing_read(sources: list[Source], faults: Faults) -> str:
    names = ", ".join(source.name for source in sources[:5]) + (" and others" if len(sources) > 5 else "")
    if not faults.count:
        return f"{names}: there is no run in it"
    return f"{names}: no run could be read, {faults.count} record{'s' * (faults.count != 1)} skipped; the first: {faults.first[0]}"


def _check_place(page: Path) -> None:
    """Before a long replay rather than after it."""
    if not page.parent.is_dir():
        raise UnreadableError(f"{page}: cannot be written: there is no folder {page.parent}; make it first")
    if not os.access(page if page.exists() else page.parent, os.W_OK):
        raise UnreadableError(f"{page}: cannot be written: permission denied")


def _write(page: Path, text: str) -> None:
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        sys.stderr.write(f"{page}: cannot be written: {error.strerror or error}\n")  # the result is on stdout already
        sys.exit(2)
    sys.stderr.write(f"{page} written\n")


def console_of_stdout() -> Console:
    """A file or a pipe has no width of its own."""
    return Console() if sys.stdout.isatty() else Console(width=160)


def _add(results: "list[RunResult]", totals: list[Totals], rows: Rows, report: JsonReport | None) -> None:
    rows.add(results)
    for total, result in zip(totals, results, strict=True):
        total.add(result)
    if report is not None:
        report.add(results)


def _head(sources: list[Source], policies: list[tuple[str, Policy]]) -> dict[str, Any]:
    told = [{"name": name, "digest": policy.digest} for name, policy in policies]
    return {"sources": [source.name for source in sources], "policy": told[0]} | ({"against_policy": told[1]} if len(told) > 1 else {})


@contextmanager
def _bar(sources: list[Source]) -> Iterator[Progress | None]:
    if not sys.stderr.isatty():
        yield None
        return
    shown = (TextColumn("replaying"), BarColumn(), TextColumn("{task.percentage:>3.0f} %  {task.fields[runs]} runs"), TimeRemainingColumn())
    with Progress(*shown, console=Console(stderr=True), transient=True) as progress:
        sizes = [source.size for source in sources]
        known = None if None in sizes or len({source.unit for source in sources}) > 1 else sum(size or 0 for size in sizes)
        progress.add_task("", total=known, runs=0)
        yield progress


def with_progress(sources: list[Source], pieces: Iterator[_Piece], runs_of: Callable[[_Piece], int]) -> Iterator[_Piece]:
    """A bar on a terminal while pieces of the sources are worked through."""
    runs = 0
    with _bar(sources) as progress:
        for piece in pieces:
            runs += runs_of(piece)
            if progress is not None:
                progress.update(progress.task_ids[0], advance=piece.size, runs=runs)
            yield piece


def run_explanation(sources: list[Source], name: str, policy: Policy, *, as_json: bool = False, model: str = "") -> bool:
    """Explain one run, by its own id, its session's, or that of a run within it; False when there is none."""
    told = find_and_explain(sources, name, policy, model)
    if told is None:
        return False
    if as_json:
        import json

        sys.stdout.write(json.dumps(unknown_as_null(told.to_dict(), told.result.unpriced), indent=2, ensure_ascii=False) + "\n")
    else:
        print_explanation(console_of_stdout(), told)
    return True


def find_and_explain(sources: list[Source], name: str, policy: Policy, model: str = "") -> Explanation | None:
    with quiet():
        for recorded in _runs(sources, model):
            if name in (recorded.id, recorded.session):
                return explain(recorded, Judge(policy, to_the_end=True))
        for recorded in _runs(sources, model):  # a trip names the run within its session
            steps = list(recorded.steps)
            if any(type(step) is Turn and step.run == name for step in steps):
                recorded.steps = iter(steps)
                return explain(recorded, Judge(policy, to_the_end=True))
    return None


def _runs(sources: list[Source], model: str) -> Iterator[RecordedRun]:
    for source in sources:
        for piece in source.pieces():
            yield from piece.runs(Faults(), model)
