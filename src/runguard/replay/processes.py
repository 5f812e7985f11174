"""A task for every recorded run, over as many processes as asked for, with a bounded number of pieces on the way."""

import gc
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final

from runguard.replay.checked import checked
from runguard.replay.engine import quiet
from runguard.replay.sources import Piece, Source
from runguard.replay.steps import Faults, RecordedRun, UnreadableError

_AHEAD: Final = 3  # pieces per process that wait or are worked on
_FEW: Final = 2  # so few pieces are not worth a process
Task = Callable[[RecordedRun], Any]
_task: list[Task] = []


@dataclass(slots=True)
class Worked:
    """What came of one piece of a source: one thing per run."""

    found: list[Any]
    faults: Faults
    size: int


def each_run(
    sources: Iterable[Source], task: Callable[..., Task], given: tuple[Any, ...], workers: int, model: str
) -> Iterator[Worked]:
    """``task(*given)`` is made once per process and called with every recorded run; in order, whatever the number of
    processes.
    """
    pieces: Iterator[Piece] = (piece for source in sources for piece in source.pieces())
    first = list(islice(pieces, _FEW + 1))
    pieces = chain(first, pieces)
    if workers == 1 or len(first) <= _FEW:
        call = task(*given)
        for piece in pieces:
            yield _work(piece, call, model)
        return
    # A new process each: a progress bar has a thread, and a fork would take its locks along.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare, initargs=(task, given)) as pool:
        waiting: deque[Future[Worked]] = deque()
        try:
            for piece in pieces:
                waiting.append(pool.submit(_in_process, piece, model))
                if len(waiting) >= workers * _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _work(piece: Piece, call: Task, model: str) -> Worked:
    worked = Worked([], Faults(), piece.size)
    with quiet():
        try:
            for run in piece.runs(worked.faults, model):
                try:
                    worked.found.append(call(checked(run, worked.faults)))
                except UnreadableError as error:
                    worked.faults.add(run.id, str(error))
                except Exception as error:  # one record that nobody foresaw must not end the replay of the others
                    worked.faults.add(run.id, f"cannot be replayed: {type(error).__name__}: {error}")
        except Exception as error:  # a damaged file, a connection that broke
            worked.faults.add("a part of the source", f"cannot be read to its end: {type(error).__name__}: {error}")
    return worked


def _prepare(task: Callable[..., Task], given: tuple[Any, ...]) -> None:
    _task[:] = [task(*given)]
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # a parsed run is many objects and soon gone


def _in_process(piece: Piece, model: str) -> Worked:
    return _work(piece, _task[0], model)
