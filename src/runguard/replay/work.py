"""Every run of the sources past every policy, over as many processes as asked for, with a bounded number of pieces on the way."""

import gc
import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Final

from runguard.policy import Policy
from runguard.replay.engine import Judge, play, quiet
from runguard.replay.results import RunResult
from runguard.replay.sources import Piece, Source
from runguard.replay.steps import Faults, RecordedRun

_AHEAD: Final = 3  # pieces per process that wait or are worked on
_FEW: Final = 2  # so few pieces are not worth a process
_LEFT_OUT: Final = {"mode", "store", "alerts", "telemetry", "on_trip", "on_decision", "clock"}  # what a judge replaces anyway
_judges: list[Judge] = []
_model = ""


@dataclass(slots=True)
class Batch:
    """The results of one piece: per run, one per policy."""

    results: list[list[RunResult]]
    faults: Faults
    size: int


def replay(sources: Iterable[Source], policies: list[Policy], *, workers: int = 1, model: str = "", to_the_end: bool = False) -> Iterator[Batch]:
    """In order, whatever the number of processes. ``model``: its name where a recording names none.

    ``to_the_end``: judge also what a stopped run would not have come to, as a live guard in the shadow does.
    """
    pieces = (piece for source in sources for piece in source.pieces())
    first = []
    for piece in pieces:
        first.append(piece)
        if len(first) > _FEW:
            break
    every = chain(first, pieces)
    if workers > 1 and len(first) > _FEW:
        yield from _in_processes(every, policies, workers, model, to_the_end)
        return
    judges = [Judge(policy, to_the_end=to_the_end) for policy in policies]
    for piece in every:
        yield _work(piece, judges, model)


def replay_run(run: RecordedRun, policy: Policy) -> RunResult:
    """One run, here and now."""
    with quiet():
        return Judge(policy).play(run)


def _work(piece: Piece, judges: list[Judge], model: str) -> Batch:
    faults = Faults()
    results: list[list[RunResult]] = []
    with quiet():
        try:
            for run in piece.runs(faults, model):
                try:
                    results.append(play(run, judges))
                except Exception as error:  # one record that nobody foresaw must not end the replay of the others
                    faults.add(run.id, f"cannot be replayed: {type(error).__name__}: {error}")
        except Exception as error:  # a damaged file, a connection that broke
            faults.add("a part of the source", f"cannot be read to its end: {type(error).__name__}: {error}")
    return Batch(results, faults, piece.size)


def _in_processes(pieces: Iterator[Piece], policies: list[Policy], workers: int, model: str, to_the_end: bool) -> Iterator[Batch]:
    # A new process each: the progress bar has a thread, and a fork would take its locks along.
    context = multiprocessing.get_context("spawn")
    told = [policy.model_dump(exclude_unset=True, exclude=_LEFT_OUT) for policy in policies]
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare, initargs=(told, model, to_the_end)) as pool:
        waiting: deque[Future[Batch]] = deque()
        try:
            for piece in pieces:
                waiting.append(pool.submit(_in_process, piece))
                if len(waiting) >= workers * _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _prepare(policies: list[dict[str, object]], model: str, to_the_end: bool) -> None:
    global _model
    _judges[:] = [Judge(Policy.validated(values, ""), to_the_end=to_the_end) for values in policies]
    _model = model
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # a parsed run is many objects and soon gone


def _in_process(piece: Piece) -> Batch:
    return _work(piece, _judges, _model)
