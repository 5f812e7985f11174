"""Replay every run of the sources under every policy, in one process or in several."""

import gc
import multiprocessing
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final

from runguard.policy.settings import Policy
from runguard.replay.engine import Judge, harmless, play, quiet
from runguard.replay.results import RunResult
from runguard.replay.sources import Piece, Source
from runguard.replay.steps import Faults, RecordedRun, UnreadableError, checked

_AHEAD: Final = 3  # pieces per process that wait or are done on
_COLLECT_EVERY: Final = (5_000, 10, 10)  # rarer ones meet memory that has left the caches
_FEW: Final = 2  # for this number of pieces a process does not pay
Task = Callable[[RecordedRun], Any]
_task: list[Task] = []


@dataclass(slots=True)
class PieceResult:
    """The results of one piece of a source, one per run."""

    results: list[Any]
    faults: Faults
    size: int


def each_run(
    sources: Iterable[Source], task: Callable[..., Task], given: tuple[Any, ...], workers: int, model: str
) -> Iterator[PieceResult]:
    """Create ``task(*given)`` once per process and call it with every recorded run; yield the results in order."""
    pieces: Iterator[Piece] = (piece for source in sources for piece in source.pieces())
    first = list(islice(pieces, _FEW + 1))
    pieces = chain(first, pieces)
    if workers == 1 or len(first) <= _FEW:
        call = task(*given)
        for piece in pieces:
            yield _work(piece, call, model)
        return
    # Spawn instead of fork: the thread of a progress bar may hold locks that a fork would copy.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare, initargs=(task, given)) as pool:
        waiting: deque[Future[PieceResult]] = deque()
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


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Look for cycles less often: a parsed run consists of many short-lived objects."""
    before = gc.get_threshold()
    gc.set_threshold(*_COLLECT_EVERY)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _work(piece: Piece, call: Task, model: str) -> PieceResult:
    done = PieceResult([], Faults(), piece.size)
    with quiet(), _rare_collections():
        try:
            for run in piece.runs(done.faults, model):
                try:
                    done.results.append(call(checked(run, done.faults)))
                except UnreadableError as error:
                    done.faults.add(run.id, str(error))
                except Exception as error:  # one unforeseen record must not end the replay of the others
                    done.faults.add(run.id, f"cannot be replayed: {type(error).__name__}: {error}")
        except Exception as error:  # a damaged file, a connection that broke
            done.faults.add("a part of the source", f"cannot be read to its end: {type(error).__name__}: {error}")
    return done


def _prepare(task: Callable[..., Task], given: tuple[Any, ...]) -> None:
    _task[:] = [task(*given)]
    gc.freeze()


def _in_process(piece: Piece, model: str) -> PieceResult:
    return _work(piece, _task[0], model)


@dataclass(slots=True)
class Batch:
    """The results of one piece of a source: for each run, one result per policy."""

    results: list[list[RunResult]]
    faults: Faults
    size: int


def replay(
    sources: Iterable[Source], policies: list[Policy], *, workers: int = 1, model: str = "", to_the_end: bool = False
) -> Iterator[Batch]:
    """Yield results in order, for any number of processes. ``model``: the model of recordings that do not name one.

    ``to_the_end``: continue after a stop, as a live guard in shadow mode does.
    """
    policies = [harmless(policy) for policy in policies]
    for done in each_run(sources, _Playing, (policies, to_the_end), workers_for(policies, workers), model):
        yield Batch(done.results, done.faults, done.size)


def replay_run(run: RecordedRun, policy: Policy) -> RunResult:
    """Replay one run in this process."""
    with quiet():
        return Judge(policy).play(run)


def workers_for(policies: list[Policy], workers: int) -> int:
    """Return the number of processes: 1 if a policy has functions that another process cannot import."""
    if workers == 1:
        return 1
    try:
        given = pickle.dumps(policies)
        pickle.loads(given)
    except Exception:  # a lambda or an object with a lock; each raises its own exception
        return 1
    return 1 if b"__main__" in given else workers  # another process cannot import what a prompt or a notebook defines


class _Playing:
    def __init__(self, policies: list[Policy], to_the_end: bool) -> None:
        self._judges = [Judge(policy, to_the_end=to_the_end) for policy in policies]

    def __call__(self, run: RecordedRun) -> list[RunResult]:
        if run.unknown:
            raise UnreadableError("a run without steps cannot be replayed; 'runguard calibrate' reads it")
        return play(run, self._judges)
