"""Code that a guarded call starts in other threads belongs to the same run.

``asyncio.to_thread`` takes context variables along. Threads and thread pools do not, so ``calls/run`` and ``adk`` call
``carry`` before the first agent starts. It carries only what RunGuard itself keeps there, and only for one job: a
pool's worker that kept it would take the run into later jobs of others. ``multiprocessing.pool.ThreadPool`` stays
uncovered.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import thread as pools
from contextvars import Context, ContextVar
from functools import wraps
from typing import Any, Final

from runguard.calls.surroundings import SURROUNDINGS
from runguard.engine.charges import OWNERS

_Values = tuple[object, ...]
_lock: Final = threading.Lock()
_carried: "tuple[tuple[ContextVar[Any], ...], _Values]" = ((), ())  # variables, and their values where no run is around


def carry(*variables: ContextVar[Any]) -> None:
    """Let threads and thread pools take the run around along, from now on. Safe to call again.

    ``variables``: where a framework keeps its own record of it.
    """
    global _carried
    if _carried[0] and not variables:
        return
    with _lock:
        known = _carried[0] or (SURROUNDINGS, OWNERS)
        every = (*known, *(one for one in variables if one not in known))
        _carried = every, tuple(Context().run(one.get) for one in every)
        if not getattr(ThreadPoolExecutor.submit, "__runguard__", False):
            _carry_into_threads()
            _carry_into_pools()


def _here() -> _Values | None:
    """Return the values of the carried variables, or None where no run is around, which is the common case."""
    variables, defaults = _carried
    values = tuple([variable.get() for variable in variables])
    return None if values == defaults else values


def _inside(carried: _Values, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    tokens = [(variable, variable.set(value)) for variable, value in zip(_carried[0], carried, strict=False)]
    try:
        return work(*args, **kwargs)
    finally:
        for variable, token in tokens:
            variable.reset(token)


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
