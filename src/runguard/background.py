"""Threads that go on whatever their work raises.

A background thread that ends in silence is worse than one that fails loudly: settlements, alerts or callbacks would
pile up for ever. So the work is started again after every exception, of any type. Owners also check ``is_alive()``
before they rely on a thread, because nothing can save a thread that the system itself ends.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from runguard import log_lines  # noqa: F401 - its filter keeps every log line on one line

_log: Final = logging.getLogger("runguard")
_PAUSE_S: Final = 0.05


def start_thread(
    name: str, work: Callable[[], object], on_fault: Callable[[], object] = lambda: None
) -> threading.Thread:
    """Start a daemon thread that calls ``work`` until it returns.

    After an exception it calls ``on_fault`` and then ``work`` again.
    """
    thread = threading.Thread(target=_keep, args=(name, work, on_fault), name=name, daemon=True)
    thread.start()
    return thread


def _keep(name: str, work: Callable[[], object], on_fault: Callable[[], object]) -> None:
    faults = 0
    while True:
        try:
            work()
            return
        except BaseException:
            faults += 1
            log_fault(f"the thread {name} met an exception and goes on", faults)
            with contextlib.suppress(BaseException):
                on_fault()
                time.sleep(_PAUSE_S)


def log_fault(text: str, count: int = 1) -> None:
    """Log the current exception, at the 1st, 2nd, 4th, 8th … time. Logging may fail as well: nothing is raised here."""
    if count & (count - 1) == 0:
        with contextlib.suppress(BaseException):
            _log.exception("runguard.background_error: %s (%d so far)", text, count)
