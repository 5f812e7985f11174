"""Callbacks run on one thread of their own, never on the path of a call.

A callback that raises, hangs or takes a minute does not affect the run. The queue is bounded: what does not fit is
dropped and counted.
"""

import asyncio
import inspect
import logging
from collections.abc import Callable
from typing import Any, ClassVar, Final

from runguard.background import BackgroundQueue, finish

_log: Final = logging.getLogger("runguard")


class Outbox(BackgroundQueue[tuple[Callable[..., Any], Any]]):
    """Callbacks with the value that each is called with."""

    capacity: ClassVar[int] = 1_000

    def __init__(self) -> None:
        super().__init__("runguard-outbox")
        self.dropped = 0
        self.failed = 0

    def send(self, callback: Callable[..., Any], value: Any) -> None:
        self.dropped += not self.put((callback, value))

    def handle(self, item: tuple[Callable[..., Any], Any]) -> None:
        callback, value = item
        try:
            result = callback(value)
            if inspect.isawaitable(result):
                asyncio.run(finish(result))
        except BaseException:  # logged for its owner; the run and the other callbacks are not affected
            self.failed += 1
            _log.exception(
                "runguard.callback_failed: %s raised; the run is not affected",
                getattr(callback, "__name__", "callback"),
            )
