"""Loops behind noise: the calls differ, or other calls come between. These detectors nudge and never stop, because
healthy work can look the same.
"""

from typing import ClassVar, Final

from runguard.core.decision import ONLY_NOTES, SAME_ANSWER, SAME_PAIR, Action, Finding
from runguard.core.detectors.evidence import Pair, evidence_of
from runguard.core.events import Answer, Outcome, ToolResults

_KEPT: Final = 256
_NEWS_WORTH: Final = 3  # equal answers that one new answer makes up for
_SAME_ANSWERS: Final = 8
_SAME_PAIRS: Final = 12
_NOTES: Final = 12


def _nudge(event: ToolResults, answer: Answer, count: int, limit: int, unit: str) -> Finding:
    return Finding(
        "no_news",
        Action.NUDGE,
        count,
        limit,
        unit,
        tool=answer.tool,
        key=f"{unit}: {answer.tool}",
        evidence=evidence_of(event),
    )


class SameAnswers:
    """A tool gives a long answer that it gave before, although it was asked something else: a counter, an id, another
    spelling, an argument that it does not read. Equal short answers are a batch and do not count.
    """

    sees: ClassVar[tuple[type, ...]] = (ToolResults,)
    __slots__ = ("_count", "_known")

    def __init__(self) -> None:
        self._count = 0
        self._known: dict[tuple[str, int], None] = {}  # tools and their long answers

    def observe(self, event: ToolResults) -> Finding | None:
        known: Answer | None = None
        is_new = False
        for a in event.answers:
            if not a.counted or a.outcome is Outcome.REFUSED:
                continue
            if not a.is_long:
                is_new = is_new or event.news
            elif (a.tool, a.answer) in self._known:
                known = a
            else:
                is_new = True
                self._known[a.tool, a.answer] = None
                if len(self._known) > _KEPT:
                    del self._known[next(iter(self._known))]
        if is_new:
            self._count = max(self._count - _NEWS_WORTH, 0)
        elif known is not None:
            self._count += 1
            if self._count >= _SAME_ANSWERS:
                return _nudge(event, known, self._count, _SAME_ANSWERS, SAME_ANSWER)
        return None


class SamePair:
    """One call gives the same long answer again and again, with other work between."""

    sees: ClassVar[tuple[type, ...]] = (ToolResults,)
    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[Pair, int] = {}

    def observe(self, event: ToolResults) -> Finding | None:
        found: Finding | None = None
        for a in event.answers:
            if not a.is_long or not a.counted:
                continue
            pair = (a.call, a.answer)
            count = self._counts[pair] = self._counts.pop(pair, 0) + 1
            if count >= _SAME_PAIRS:
                found = _nudge(event, a, count, _SAME_PAIRS, SAME_PAIR)
        while len(self._counts) > _KEPT:
            del self._counts[next(iter(self._counts))]
        return found


class OnlyNotes:
    """Plans, thoughts and lists of tasks in a row, and nothing is done."""

    sees: ClassVar[tuple[type, ...]] = (ToolResults,)
    __slots__ = ("_count",)

    def __init__(self) -> None:
        self._count = 0

    def observe(self, event: ToolResults) -> Finding | None:
        if not event.answers:
            return None
        for answer in event.answers:
            if not answer.is_note:
                self._count = 0
                return None
        self._count += 1
        return _nudge(event, event.answers[0], self._count, _NOTES, ONLY_NOTES) if self._count >= _NOTES else None
