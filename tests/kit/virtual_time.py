"""An event loop whose time passes only while nothing can run: waiting takes no real time and is exact."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")
START = 1_000_020.0  # a full minute


class _Selector:
    """Passes everything on, except that it advances the clock instead of sleeping."""

    def __init__(self, loop: "VirtualLoop", real: selectors.BaseSelector) -> None:
        self._loop, self._real = loop, real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def select(self, timeout: float | None = None) -> Any:
        ready = self._real.select(0)
        if not ready and timeout:
            self._loop.passed += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """``clock`` is the wall clock of the loop, for a guard's ``clock=``."""

    def __init__(self, start: float = START) -> None:
        self.passed, self._start = 0.0, start
        super().__init__(_Selector(self, selectors.DefaultSelector()))  # type: ignore[arg-type]

    def time(self) -> float:
        return self.passed

    def clock(self) -> float:
        return self._start + self.passed


def run_virtually(loop: VirtualLoop, job: Coroutine[Any, Any, _T]) -> _T:
    try:
        return loop.run_until_complete(job)
    finally:
        loop.close()
