"""A run that has ended is freed at once: nothing of it waits for the garbage collector."""

import gc

from runguard.core.events import RunInfo
from runguard.engine.guard import Guard
from runguard.engine.runs import Lane, Run
from runguard.policy import Policy


def test_an_ended_run_is_freed_without_the_garbage_collector() -> None:
    guard = Guard(Policy.validated({}, ""))
    gc.collect()
    gc.disable()
    try:
        kept = _held()
        run = guard.start(RunInfo("run", "app", "user", "session", "run", 0.0))
        guard.open_lane(run, "/helper@1", "", concurrent=False, delegate="helper")
        guard.open_lane(run, "/helper@1/helper@2", "/helper@1", concurrent=False, delegate="helper")
        assert _held() == kept + 4
        guard.end("run")
        del run
        assert _held() == kept
    finally:
        gc.enable()


def _held() -> int:
    return sum(type(one) in (Lane, Run) for one in gc.get_objects())
