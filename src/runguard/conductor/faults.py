"""Faults of RunGuard itself: counted, logged, and kept away from the run that it guards."""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

_log: Final = logging.getLogger("runguard")
_LOGGED: Final = 10


class GuardFaults:
    """The faults of one guard. The first ones are logged as errors, later ones at DEBUG; all are counted."""

    __slots__ = ("_meaning", "count")

    def __init__(self, on_guard_error: str) -> None:
        self._meaning, self.count = on_guard_error, 0

    def note(self, where: str, error: BaseException) -> None:
        self.count += 1
        level = logging.ERROR if self.count <= _LOGGED else logging.DEBUG
        with suppress(Exception):  # a handler of the log that raises
            _log.log(
                level,
                "runguard.guard_error: %s failed with %s; on_guard_error=%s",
                where,
                type(error).__name__,
                self._meaning,
                exc_info=error,
            )

    def attempt(self, where: str, do: Callable[..., Any], *args: Any) -> Any:
        """Take one step of several that do not depend on each other. A fault is noted, and the result is None then."""
        try:
            return do(*args)
        except Exception as error:
            self.note(where, error)
            return None
