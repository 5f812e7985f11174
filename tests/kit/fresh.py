"""Processes that have ADK imported and no guard yet: for what happens once per process, or ends it."""

import contextlib
import multiprocessing
from collections.abc import Callable
from typing import Any, Self

from tests.kit.waiting import PATIENCE_S

# All are forked from one process, which has imported ADK where the first of them was asked for before it began.
FRESH = multiprocessing.get_context("forkserver")


class FreshProcess:
    """A process that runs a function of a test module: ``work(say, *given)``. What it says is told here."""

    def __init__(self, work: Callable[..., None], *given: Any) -> None:
        FRESH.set_forkserver_preload(["tests.kit.fresh_imports"])  # here: others fork from this process, too
        self._pipe, theirs = FRESH.Pipe()
        self.process = FRESH.Process(target=work, args=(theirs.send, *given), daemon=True)
        self.process.start()
        theirs.close()

    def told(self) -> Any:
        assert self._pipe.poll(PATIENCE_S), "not a word from the process"
        return self._pipe.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ValueError):
            self.process.kill()
        self.process.join(PATIENCE_S)
        self._pipe.close()
