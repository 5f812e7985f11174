"""A tool that asks to try again, whatever it is asked: "retry later", "service is busy, please try again"."""

from collections import OrderedDict
from typing import ClassVar, Final

from runguard.core.decision import TRY_AGAIN, Action, Finding, Rungs
from runguard.core.detectors.evidence import evidence_of
from runguard.core.events import Outcome, ToolResults

_OK: Final = Outcome.OK  # bound once: looking it up on its enum costs as much as the rest of a line
_TOOLS_KEPT: Final = 16
_CALLS_KEPT: Final = 32
_WORDINGS: Final = 3  # a tool that asks in more ways than these tells different things
_NEWS_WORTH: Final = 3  # answers of this kind that one result makes up for; a stop needs all of them in a row


class _Row:
    """What one tool has answered of this kind, and to which calls."""

    __slots__ = ("batch", "calls", "count", "in_a_row", "wordings")

    def __init__(self) -> None:
        self.batch = ""
        self.count = self.in_a_row = 0
        self.calls: set[bytes] = set()
        self.wordings: set[str] = set()

    def add(self, wording: str, call: bytes, batch: str) -> bool:
        """Returns whether this answer counts: to a new call, in words that are known or nearly so, once per batch."""
        if wording not in self.wordings and len(self.wordings) >= _WORDINGS:
            self.count = self.in_a_row = 0
            self.calls.clear()
            self.wordings.clear()
        self.wordings.add(wording)
        if call in self.calls or (batch and batch == self.batch):
            return False
        self.batch = batch
        if len(self.calls) < _CALLS_KEPT:
            self.calls.add(call)
        self.count += 1
        self.in_a_row += 1
        return True


class AskedAgain:
    """Counts answers of one tool that ask to try again, each to another call. The same call once more is a retry and is
    not counted here. A result of any tool ends the row, so that a batch in which some calls get through is not
    stopped.
    """

    sees: ClassVar[tuple[type, ...]] = (ToolResults,)
    rests = sees
    __slots__ = ("_rows", "record", "rungs")

    def __init__(self, rungs: Rungs) -> None:
        self.rungs = rungs
        self.record = self._rows = OrderedDict[str, _Row]()

    def observe(self, event: ToolResults) -> Finding | None:
        if event.progress:
            if self._rows:
                self._relax()
            return None
        found: Finding | None = None
        for a in event.answers:
            if a.outcome is not _OK or not a.failure or not a.counted:
                continue
            row = self._rows.pop(a.tool, None) or _Row()
            self._rows[a.tool] = row
            if len(self._rows) > _TOOLS_KEPT:
                self._rows.popitem(last=False)
            if not row.add(a.failure, a.call, event.batch):
                continue
            stop, nudge = self.rungs.stop, self.rungs.nudge
            if stop is not None and row.in_a_row >= stop:
                what = (Action.STOP, row.in_a_row, stop)
            elif nudge is not None and row.count >= nudge and found is None:
                what = (Action.NUDGE, row.count, nudge)
            else:
                continue
            key = f"{TRY_AGAIN}: {a.tool}"
            found = Finding("stall", *what, TRY_AGAIN, "lane", a.tool, key, "", evidence_of(event))
        return found

    def _relax(self) -> None:
        """Something was achieved."""
        for tool, row in list(self._rows.items()):
            row.in_a_row = 0
            row.count -= _NEWS_WORTH
            if row.count <= 0:
                del self._rows[tool]
