"""What is remembered of a session's prompts from one run to the next. Bounded: the sessions that were used last are kept."""

import threading
from collections import OrderedDict
from typing import Final

from runguard.events import RunInfo

SESSIONS_KEPT: Final = 1_024


class SessionGrowth:
    """The prompts of one session."""

    __slots__ = ("warned",)

    def __init__(self) -> None:
        self.warned = False  # the growth warning was given


class SessionGrowths:
    """The sessions of one guard. Safe to use from many threads."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[tuple[str, str, str], SessionGrowth] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, info: RunInfo) -> SessionGrowth:
        """The session of a run. A run without a session is a session of its own."""
        if not info.session:
            return SessionGrowth()
        key = (info.app, info.user, info.session)
        with self._lock:
            found = self._sessions.get(key)
            if found is None:
                found = self._sessions[key] = SessionGrowth()
                if len(self._sessions) > SESSIONS_KEPT:
                    self._sessions.popitem(last=False)
            else:
                self._sessions.move_to_end(key)
        return found
