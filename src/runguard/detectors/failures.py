"""Tools that do not get anywhere: the same failure, nothing found, one error after another."""

from collections import OrderedDict
from typing import ClassVar

from runguard.decision import Action, Finding, Rungs
from runguard.detectors.repetition import evidence_of
from runguard.events import FAILURES, Outcome, ToolCall, ToolResults

# Members bound once: looking one up on its enum costs as much as the rest of a line.
_OK, _EMPTY = Outcome.OK, Outcome.EMPTY
_TOOLS_KEPT = 64


class _Streaks:
    """Per tool: what keeps happening, how often in a row, and in which batch it was last counted."""

    __slots__ = ("_by_tool",)

    def __init__(self) -> None:
        self._by_tool: OrderedDict[str, tuple[str, int, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_tool)

    def count(self, tool: str) -> int:
        return self._by_tool.get(tool, ("", 0, ""))[1]

    def kind(self, tool: str) -> str:
        return self._by_tool.get(tool, ("", 0, ""))[0]

    def add(self, tool: str, kind: str, batch: str) -> int:
        """One more of ``kind``; calls of one batch count once, another kind starts at one."""
        before, count, last = self._by_tool.pop(tool, ("", 0, ""))
        if before != kind:
            count = 1
        elif not batch or batch != last:
            count += 1
        self._by_tool[tool] = (kind, count, batch)
        if len(self._by_tool) > _TOOLS_KEPT:
            self._by_tool.popitem(last=False)
        return count

    def clear(self, tool: str | None = None) -> None:
        if tool is None:
            self._by_tool.clear()
        else:
            self._by_tool.pop(tool, None)


class Stall:
    """One tool fails in the same way, whatever the arguments.

    Any tool's new answer that is no failure breaks the streak: edit, test, edit, test is work even while the test fails.
    """

    sees: ClassVar[tuple[type, ...]] = (ToolCall, ToolResults)
    rule: ClassVar[str] = "stall"
    unit: ClassVar[str] = "equal failures"
    __slots__ = ("_streaks", "rungs")

    def __init__(self, rungs: Rungs) -> None:
        self.rungs = rungs
        self._streaks = _Streaks()

    def observe(self, event: ToolCall | ToolResults) -> Finding | None:
        if type(event) is ToolCall:
            return self._attempt(event)
        assert isinstance(event, ToolResults)
        if event.progress:
            if self._streaks:
                self._streaks.clear()
            if not event.failures:
                return None
        worst: Finding | None = None
        for a in event.answers:
            if a.outcome is _OK or a.outcome is _EMPTY:
                self._streaks.clear(a.tool)  # the tool works, though it said nothing new
            if a.outcome not in FAILURES or (a.outcome is Outcome.FAILED and not a.counted):
                continue
            count = self._streaks.add(a.tool, self._kind(a.failure), event.batch)
            reached = self.rungs.at(count)
            if reached is None or reached[0] is Action.BLOCK or (worst and worst.action >= reached[0]):
                continue
            action, limit = reached
            worst = Finding(self.rule, action, count, limit, self.unit, "lane", a.tool, a.tool, a.failure[:120], evidence_of(event))
        return worst

    def _attempt(self, event: ToolCall) -> Finding | None:
        block = self.rungs.block
        if block is None or not self._streaks or self._streaks.count(event.tool) + 1 < block:
            return None
        count = self._streaks.add(event.tool, self._streaks.kind(event.tool), event.batch)
        action, limit = self.rungs.at(count) or (Action.BLOCK, block)
        evidence = ({"event": "", "tool": event.tool, "call": event.call.hex(), "answer": ""},)
        return Finding(self.rule, action, count, limit, self.unit, "lane", event.tool, event.tool, self._streaks.kind(event.tool)[:120], evidence)

    def _kind(self, failure: str) -> str:
        return failure


class ToolFailures(Stall):
    """One tool fails again and again, each time in its own way: errors, timeouts, refusals by others."""

    rule: ClassVar[str] = "tool_failures"
    unit: ClassVar[str] = "failures in a row"
    __slots__ = ()

    def _kind(self, failure: str) -> str:
        return "failure"


class EmptyAnswers:
    """One tool finds nothing, again and again with new arguments: a sweep, so by default it is only nudged."""

    sees: ClassVar[tuple[type, ...]] = (ToolResults,)
    __slots__ = ("_streaks", "rungs")

    def __init__(self, rungs: Rungs) -> None:
        self.rungs = rungs
        self._streaks = _Streaks()

    def observe(self, event: ToolResults) -> Finding | None:
        worst: Finding | None = None
        for a in event.answers:
            if not a.counted:
                continue
            if a.outcome is not _EMPTY:
                if self._streaks:
                    self._streaks.clear(a.tool if a.outcome in FAILURES else None)  # whatever was found elsewhere: the work moves
                continue
            count = self._streaks.add(a.tool, "empty", event.batch)
            reached = self.rungs.at(count)
            if reached is not None and (worst is None or reached[0] > worst.action):
                worst = Finding("empty", reached[0], count, reached[1], "empty answers", "lane", a.tool, a.tool, "", evidence_of(event))
        return worst
