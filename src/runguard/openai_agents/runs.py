"""Which guarded run a hook, a model call or a tool call of the SDK belongs to.

Hooks and tools see the run's context. A model sees only its request: the hook that the SDK calls right before it sees
the same list of input items, and that list connects the two.
"""

import threading
import weakref
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from runguard.calls.model_calls import current_place
from runguard.calls.run import AgentRun
from runguard.core.identity import Newest
from runguard.engine.guard import Guard

_REQUESTS_KEPT: Final = 4_096


@dataclass(slots=True)
class _Request:
    items: Any
    run: AgentRun
    is_guarded: bool = False  # a guarded model was called for it


class PastTheGuard(NamedTuple):
    """A model call that no guarded model has made."""

    items: Any
    is_first: bool  # of this guard


class Runs:
    """The runs of one guard."""

    def __init__(self, guard: Guard, whom: dict[str, Any]) -> None:
        self._guard, self._whom = guard, whom
        self._runs: dict[tuple[int, str], AgentRun] = {}
        self._requests = Newest[int, _Request](_REQUESTS_KEPT)
        self._has_missed = False  # a call past the guard was seen
        self._lock = threading.Lock()

    def of(self, context: Any, agent: str) -> AgentRun:
        """The run of a context, begun with its first agent. An agent used as a tool shares the usage of its caller's
        context, and is identified by the tool call that it runs in.
        """
        usage = context.usage
        key = (id(usage), current_place().call)
        with self._lock:
            run = self._runs.get(key)
            if run is None:
                run = self._runs[key] = AgentRun.start(self._guard, agent, **self._whom)
                # A run that fails reaches no hook. It ends with its context.
                weakref.finalize(usage, self._forget, key)
            return run

    def alone(self) -> AgentRun:
        """A run for a model call whose agent is not known: it was made with other input items, or by your code."""
        with self._lock:
            waiting = (request for request in reversed(self._requests.values()) if not request.is_guarded)
            if (newest := next(waiting, None)) is not None:
                newest.is_guarded = True
        return AgentRun.start(self._guard, "model", **self._whom)

    def end(self, context: Any) -> None:
        self._forget((id(context.usage), current_place().call))

    def _forget(self, key: tuple[int, str]) -> None:
        with self._lock:
            run = self._runs.pop(key, None)
        if run is not None:
            run.end()

    def connect(self, items: Any, run: AgentRun) -> None:
        """The next model call with these input items belongs to ``run``."""
        with self._lock:
            self._requests[id(items)] = _Request(items, run)

    def asking(self, items: Any) -> AgentRun | None:
        with self._lock:
            found = self._requests.get(id(items))
            if found is None or found.items is not items:
                return None
            found.is_guarded = True
            return found.run

    def disconnect(self, run: AgentRun) -> PastTheGuard | None:
        """The model has answered: its input items are no longer kept. Returns a call that no guarded model has made."""
        with self._lock:
            past = None
            for key in [key for key, one in self._requests.items() if one.run is run]:
                request = self._requests.pop(key)
                past = past if request.is_guarded else request
            if past is None:
                return None
            is_first, self._has_missed = not self._has_missed, True
            return PastTheGuard(past.items, is_first)
