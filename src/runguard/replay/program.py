"""``runguard replay``: sources in, a table, JSON or a page out."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from runguard.console.screen import console
from runguard.policy.settings import Policy
from runguard.replay.checked import checked
from runguard.replay.engine import Judge, quiet
from runguard.replay.explain import explain
from runguard.replay.processes import Worked
from runguard.replay.sources import Source, said_by
from runguard.replay.steps import Faults, RecordedRun, Step, Turn, UnreadableError
from runguard.replay.table import Rows, print_result
from runguard.replay.told import JsonReport, print_explanation, unknown_as_null
from runguard.replay.totals import Totals
from runguard.replay.work import Batch, replay

if TYPE_CHECKING:
    from runguard.replay.results import RunResult

_Piece = TypeVar("_Piece", Batch, Worked)
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
    """Replay everything and print what it came to; UnreadableError where there is nothing to print, or no place for the
    page.
    """
    if page is not None:
        check_place(page)
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
        print_result(console(), rows, totals, faults)
    if page is not None:
        from runguard.replay.page import page_of

        write_file(page, page_of([source.name for source in sources], totals, rows, faults))


def _nothing_read(sources: list[Source], faults: Faults) -> str:
    """Why there is no run, in one line."""
    names = ", ".join(source.name for source in sources[:5]) + (" and others" if len(sources) > 5 else "")
    if not faults.count:
        return f"{names}: there is no run in it"
    return (
        f"{names}: no run could be read, {faults.count} record{'s' * (faults.count != 1)} skipped; the first: "
        f"{faults.first[0]}"
    )


def check_place(file: Path) -> None:
    """Before long work rather than after it."""
    if not file.parent.is_dir():
        raise UnreadableError(f"{file}: cannot be written: there is no folder {file.parent}; make it first")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UnreadableError(f"{file}: cannot be written: permission denied")


def write_file(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8", errors="replace")  # a name may hold half a character
    except OSError as error:
        sys.stderr.write(f"{file}: cannot be written: {error.strerror or error}\n")  # the result is on stdout already
        sys.exit(2)
    sys.stderr.write(f"{file} written\n")


def _add(results: "list[RunResult]", totals: list[Totals], rows: Rows, report: JsonReport | None) -> None:
    rows.add(results)
    for total, result in zip(totals, results, strict=True):
        total.add(result)
    if report is not None:
        report.add(results)


def _head(sources: list[Source], policies: list[tuple[str, Policy]]) -> dict[str, Any]:
    told = [{"name": name, "digest": policy.digest} for name, policy in policies]
    return {"sources": [source.name for source in sources], "policy": told[0]} | (
        {"against_policy": told[1]} if len(told) > 1 else {}
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


def with_progress(
    sources: list[Source], pieces: Iterator[_Piece], runs_of: Callable[[_Piece], int]
) -> Iterator[_Piece]:
    """A bar on a terminal while pieces of the sources are worked through."""
    runs = 0
    with _bar(sources) as progress:
        for piece in pieces:
            runs += runs_of(piece)
            if progress is not None:
                progress.update(progress.task_ids[0], advance=piece.size, runs=runs)
            yield piece


def run_explanation(
    sources: list[Source], name: str, policy: Policy, *, as_json: bool = False, model: str = ""
) -> None:
    """Explain one run; UnreadableError when there is none of that name."""
    with quiet():
        recorded = _find(sources, name, model)
        try:
            told = explain(recorded, Judge(policy, to_the_end=True))
        except Exception as error:  # a record that no reader foresaw
            raise UnreadableError(f"{recorded.id}: cannot be replayed: {said_by(error)}") from None
    if as_json:
        import json

        sys.stdout.write(json.dumps(unknown_as_null(told.to_dict(), told.result.unpriced), indent=2) + "\n")
    else:
        print_explanation(console(), told)


def _find(sources: list[Source], name: str, model: str) -> RecordedRun:
    """By its own id, its session's, or that of a run within it; or by the beginning of one of the first two where that
    is enough.
    """
    beginning: dict[str, None] = {}
    known: list[str] = []
    faults = Faults()
    for recorded in _runs(sources, model, faults):
        if name in (recorded.id, recorded.session):
            return _held(recorded)
        if len(known) < _NAMED:
            known.append(recorded.id)
        if len(beginning) < _NAMED and (recorded.id.startswith(name) or recorded.session.startswith(name)):
            beginning[recorded.id] = None
    for recorded in _runs(sources, model, Faults()):  # a trip names the run within its session
        steps = list(_held(recorded).steps)
        if any(type(step) is Turn and step.run == name for step in steps):
            recorded.steps = iter(steps)
            return recorded
    if len(beginning) == 1:
        return next(_held(recorded) for recorded in _runs(sources, model, Faults()) if recorded.id in beginning)
    if beginning:
        raise UnreadableError(f"{name!r} is the beginning of several: {', '.join(beginning)}")
    if not known:
        raise UnreadableError(_nothing_read(sources, faults))
    raise UnreadableError(f"{name!r}: no run of that id. The first ones are {', '.join(known)}; --json lists all")


def _runs(sources: list[Source], model: str, faults: Faults) -> Iterator[RecordedRun]:
    for source in sources:
        for piece in source.pieces():
            try:
                for recorded in piece.runs(faults, model):
                    yield checked(recorded, faults)
            except Exception as error:  # the rest of a damaged source
                faults.add(source.name, f"cannot be read to its end: {said_by(error)}")


def _held(recorded: RecordedRun) -> RecordedRun:
    """The same run with all its steps read: its file is closed when the next run is not asked for. Steps up to where it
    is damaged.
    """
    steps: list[Step] = []
    with suppress(Exception):
        steps.extend(recorded.steps)
    recorded.steps = iter(steps)
    return recorded
