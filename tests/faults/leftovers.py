"""What a process holds at one moment: memory that RunGuard allocated, its objects, threads, tasks, descriptors and
context variables.
"""

import asyncio
import contextvars
import gc
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import runguard

OURS = str(Path(runguard.__file__).parent / "*")


@dataclass(frozen=True)
class Held:
    """One look at the process."""

    objects: Counter[str]  # instances of RunGuard's classes
    memory: int  # bytes allocated by RunGuard's code; 0 where nobody traces
    threads: int
    tasks: int
    descriptors: int
    variables: dict[str, str]  # RunGuard's context variables that have a value

    def more_than(self, before: "Held") -> dict[str, int]:
        """The classes of which there are more instances than before."""
        return dict(self.objects - before.objects)


def look() -> Held:
    for _ in range(2):
        gc.collect()
    kinds = (type(one) for one in gc.get_objects())
    objects = Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("runguard"))
    variables = {
        variable.name: repr(value)  # not the value itself, which would then be left behind here
        for variable, value in contextvars.copy_context().items()
        if variable.name.startswith("runguard_")
    }
    return Held(objects, _traced(), threading.active_count(), len(asyncio.all_tasks()), descriptors(), variables)


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _traced() -> int:
    if not tracemalloc.is_tracing():
        return 0
    found = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, OURS)])
    return sum(line.size for line in found.statistics("filename"))


@contextmanager
def traced() -> Iterator[None]:
    """Count what is allocated inside of it."""
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
