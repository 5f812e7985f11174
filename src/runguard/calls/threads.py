"""Code that a guarded call starts in other threads belongs to the same run.

``asyncio.to_thread`` takes context variables along. Threads and thread pools do not, so ``calls/run`` calls ``carry``
before the first agent starts. It carries only what RunGuard itself keeps there, and only for one job: a pool's worker
that kept it would take the run into later jobs of others. ``multiprocessing.pool.ThreadPool`` stays uncovered.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import thread as pools
from functools import wraps
from typing import Any, Final

from runguard.calls.function_state import SURROUNDINGS, Surroundings
from runguard.engine.charges import OWNERS, Charge

_Carried = tuple[Surroundings, tuple[Charge, ...]]
_NOTHING: Final[_Carried] = (SURROUNDINGS.get(), ())
_lock: Final = threading.Lock()
_marks: Final[list[Callable[[Surroundings], Surroundings]]] = []


def mark(add: Callable[[Surroundings], Surroundings]) -> None:
    """Let a framework that knows by itself in which turn this code runs add the turn to what threads take along."""
    _marks.append(add)
    carry()


def carry() -> None:
    """Let threads and thread pools take the run around along, from now on. Safe to call again."""
    if getattr(ThreadPoolExecutor.submit, "__runguard__", False):
        return
    with _lock:
        if not getattr(ThreadPoolExecutor.submit, "__runguard__", False):
            _carry_into_threads()
            _carry_into_pools()


def _here() -> _Carried | None:
    """What is around this code; None where no run is, which is the common case."""
    surroundings = SURROUNDINGS.get()
    for add in _marks:
        surroundings = add(surroundings)
    carried = surroundings, OWNERS.get()
    return None if carried == _NOTHING else carried


def _inside(carried: _Carried, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    surroundings, owners = SURROUNDINGS.set(carried[0]), OWNERS.set(carried[1])
    try:
        return work(*args, **kwargs)
    finally:
        OWNERS.reset(owners)
        SURROUNDINGS.reset(surroundings)


def _carry_into_pools() -> None:
    submit: Any = ThreadPoolExecutor.submit

    @wraps(submit)
    def submit_inside(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        carried = _here()
        if carried is None:
            return submit(self, fn, *args, **kwargs)
        return submit(self, _inside, carried, fn, *args, **kwargs)

    made: Any = submit_inside
    made.__runguard__ = True
    ThreadPoolExecutor.submit = made  # type: ignore[method-assign]


def _carry_into_threads() -> None:
    start = threading.Thread.start
    worker = getattr(pools, "_worker", None)  # a worker of a pool outlives the call that began it

    @wraps(start)
    def start_inside(self: threading.Thread) -> None:
        carried = _here() if getattr(self, "_target", None) is not worker else None
        if carried is not None:
            run = self.run

            def run_inside() -> None:
                try:
                    _inside(carried, run)
                finally:
                    vars(self).pop("run", None)  # a thread does not keep the run alive

            self.run = run_inside  # type: ignore[method-assign]
        start(self)

    threading.Thread.start = start_inside  # type: ignore[method-assign]
