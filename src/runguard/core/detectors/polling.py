"""Declared polling tools: judged by time."""

from collections import OrderedDict
from collections.abc import Callable
from typing import ClassVar

from runguard.core.decision import Finding, Rungs
from runguard.core.detectors.evidence import evidence_of, swap
from runguard.core.events import Outcome, ToolResults


class Polling:
    """A declared polling tool that shows no change: judged by time, never by count."""

    sees: ClassVar[tuple[type, ...]] = (ToolResults,)
    rests = sees
    record: ClassVar[tuple[()]] = ()  # a plain event has no answer of a polling tool
    __slots__ = ("_since", "is_polling", "rungs")

    def __init__(self, rungs: Rungs, is_polling: Callable[[str], bool]) -> None:
        self.rungs, self.is_polling = rungs, is_polling
        self._since: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def observe(self, event: ToolResults) -> Finding | None:
        worst: Finding | None = None
        for a in event.answers:
            if a.counted or a.outcome is Outcome.REFUSED or not self.is_polling(a.tool):
                continue
            seen = self._since.get(a.call)
            if seen is None or seen[0] != a.answer:
                self._since[a.call] = (a.answer, event.at)
                if len(self._since) > 64:
                    self._since.popitem(last=False)
                continue
            waited = event.at - seen[1]
            reached = self.rungs.at(waited)
            if reached is not None and (worst is None or reached[0] > worst.action):
                unit, key = "seconds unchanged", a.call.hex()
                worst = Finding(
                    "polling",
                    *swap(reached, round(waited)),
                    unit=unit,
                    tool=a.tool,
                    key=key,
                    evidence=evidence_of(event),
                )
        return worst

    def skip(self, seconds: float) -> None:
        """So much time does not count: the run was paused."""
        for call, (answer, since) in self._since.items():
            self._since[call] = (answer, since + seconds)
