"""``runguard replay``: read sources, print a table or JSON, write a page."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from runguard.console.screen import console
from runguard.policy.settings import Policy
from runguard.replay.batches import Batch, PieceResult, replay
from runguard.replay.engine import Judge, quiet
from runguard.replay.explain import explain
from runguard.replay.results import RunResult
from runguard.replay.sources import Source, error_text
from runguard.replay.steps import Faults, RecordedRun, Step, Turn, UnreadableError, checked
from runguard.replay.table import Rows, print_explanation, print_result
from runguard.replay.totals import Totals

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


def _add(results: list[RunResult], totals: list[Totals], rows: Rows, report: JsonReport | None) -> None:
    rows.add(results)
    for total, result in zip(totals, results, strict=True):
        total.add(result)
    if report is not None:
        report.add(results)


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
        print_explanation(console(), explanation)


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
