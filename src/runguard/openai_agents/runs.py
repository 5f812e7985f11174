"""Which guarded run a hook, a model call or a tool call of the SDK belongs to.

Hooks and tools see the run's context. A model sees only its request: the hook that the SDK calls right before it sees
the same list of input items, and that list connects the two.
"""

import threading
import weakref
from collections import OrderedDict
from typing import Any, Final

from runguard.adapters.agent_run import AgentRun
from runguard.adapters.layers import current_place
from runguard.conductor.guard import Guard

_REQUESTS_KEPT: Final = 4_096


class Runs:
    """The runs of one guard."""

    def __init__(self, guard: Guard, whom: dict[str, Any]) -> None:
        self._guard, self._whom = guard, whom
        self._runs: dict[tuple[int, str], AgentRun] = {}
        self._requests: OrderedDict[int, tuple[Any, AgentRun]] = OrderedDict()
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
        """A run for a model call that belongs to no guarded agent."""
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
            self._requests[id(items)] = (items, run)
            if len(self._requests) > _REQUESTS_KEPT:
                self._requests.popitem(last=False)

    def asking(self, items: Any) -> AgentRun | None:
        with self._lock:
            found = self._requests.get(id(items))
        return found[1] if found is not None and found[0] is items else None

    def disconnect(self, run: AgentRun) -> None:
        """The model has answered: its input items are no longer kept."""
        with self._lock:
            for key in [key for key, (_, owner) in self._requests.items() if owner is run]:
                del self._requests[key]
