"""Plain limits of the whole run tree: calls, time, size, branches. Each allows exactly its number."""

from collections import Counter
from collections.abc import Callable, Sized
from typing import Any, ClassVar

from runguard.core.decision import Action, Finding
from runguard.core.detectors.evidence import evidence_of
from runguard.core.events import AgentEntered, HandOff, ModelCall, ToolCall, ToolResults


class ModelCalls:
    """Model calls of the run and everything nested in it."""

    sees: ClassVar[tuple[type, ...]] = (ModelCall,)
    __slots__ = ("count", "kept", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.kept = 0  # of the limit, for a last answer
        self.count = 0

    def observe(self, event: ModelCall) -> Finding | None:
        if self.count + self.kept >= self.limit:
            wanted, detail = self.count + self.kept + 1, "one is kept for the last answer" if self.kept else ""
            return Finding("model_calls", Action.STOP, wanted, self.limit, "model calls", "run", detail=detail)
        self.count += 1
        return None

    def forget(self) -> None:
        """The call was answered by somebody else's cache or never left."""
        self.count = max(0, self.count - 1)


class ToolCalls:
    """Tool calls of the run and everything nested in it."""

    sees: ClassVar[tuple[type, ...]] = (ToolCall,)
    __slots__ = ("count", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0

    def observe(self, event: ToolCall) -> Finding | None:
        self.count += 1
        if self.count <= self.limit:
            return None
        return Finding("tool_calls", Action.STOP, self.count, self.limit, "tool calls", "run", event.tool)


class CallsPerTool:
    """Calls of one tool in the run: the surplus is refused, and asking again in a later response stops."""

    sees: ClassVar[tuple[type, ...]] = (ToolCall,)
    rests = sees
    __slots__ = ("_counts", "_refused", "limit_of", "record")

    def __init__(self, limit_of: Callable[[str], int | None], limited: Sized) -> None:
        """``limited``: the tools that have a limit, as far as they are known. More may be declared later."""
        self.limit_of, self.record = limit_of, limited
        self._counts: Counter[str] = Counter()
        self._refused: dict[str, str] = {}

    def observe(self, event: ToolCall) -> Finding | None:
        limit = self.limit_of(event.tool)
        if limit is None:
            return None
        if self._counts[event.tool] < limit:
            self._counts[event.tool] += 1
            return None
        refused_before = self._refused.get(event.tool)
        again = refused_before is not None and (not event.batch or refused_before != event.batch)
        self._refused.setdefault(event.tool, event.batch)
        action = Action.STOP if again else Action.BLOCK
        return Finding(
            "tool_limit", action, limit + 1 + again, limit, "calls of one tool", "lane", event.tool, event.tool
        )

    def dump(self) -> dict[str, list[int | str | None]]:
        """Each tool that was counted: its calls, and the response in which one was refused first. JSON-ready."""
        return {tool: [self._counts[tool], self._refused.get(tool)] for tool in {**self._counts, **self._refused}}

    def load(self, counted: dict[str, list[Any]]) -> None:
        """What ``dump`` gave, on another worker."""
        for tool, (count, refused) in counted.items():
            self._counts[tool] = int(count)
            if refused is not None:
                self._refused[tool] = str(refused)


class FanOut:
    """Branches that one node starts at once: too many are refused before the first is paid."""

    sees: ClassVar[tuple[type, ...]] = (AgentEntered,)
    __slots__ = ("limit",)

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def observe(self, event: AgentEntered) -> Finding | None:
        if event.branches <= self.limit:
            return None
        return Finding(
            "fan_out",
            Action.STOP,
            event.branches,
            self.limit,
            "branches of one node",
            "lane",
            "",
            event.agent,
            f"agent {event.agent}",
        )


class Deadline:
    """Wall clock of the run."""

    # before the next step: a finished run is not stopped
    sees: ClassVar[tuple[type, ...]] = (ModelCall, ToolCall, AgentEntered, HandOff)
    __slots__ = ("seconds", "started")

    def __init__(self, seconds: float, started: float) -> None:
        self.seconds, self.started = seconds, started

    def observe(self, event: ModelCall | ToolCall | AgentEntered | HandOff) -> Finding | None:
        elapsed = event.at - self.started
        if elapsed <= self.seconds:
            return None
        return Finding("deadline", Action.STOP, round(elapsed, 3), self.seconds, "seconds", "run")

    def skip(self, seconds: float) -> None:
        """So much time does not count: the run was paused."""
        self.started += seconds


class ResultSize:
    """An answer too large to enter the history: the model gets a note instead."""

    sees: ClassVar[tuple[type, ...]] = (ToolResults,)
    __slots__ = ("limit",)

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def observe(self, event: ToolResults) -> Finding | None:
        found: Finding | None = None
        for a in event.answers:
            if a.chars > self.limit:
                a.too_large = True
                found = found or Finding(
                    "result_size",
                    Action.BLOCK,
                    a.chars,
                    self.limit,
                    "characters",
                    "call",
                    a.tool,
                    a.call.hex(),
                    "",
                    evidence_of(event),
                )
        return found
