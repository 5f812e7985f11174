"""An agent without tools that is called again and again, with the same order in other words, and reports the same in
other words.

Nothing but words shows such a loop. Healthy work through words brings new ones: another item, another draft.
"""

import re
from collections import OrderedDict
from typing import ClassVar, Final

from runguard.core.decision import TOLD_AGAIN, Finding, Rungs
from runguard.core.detectors.evidence import evidence_of, swap
from runguard.core.events import AgentEntered, Answer, Outcome, ToolResults
from runguard.core.fingerprint import answer_text

_WORD: Final = re.compile(r"[^\W_]+")
_READ: Final = 4_096  # characters of a text that are looked at
_WORKERS_KEPT: Final = 16
_VOCABULARY: Final = 1_024
_LEAST: Final = 12  # different words: a shorter report is a label or a verdict
_SAME: Final = 1  # new words in a report that says the same; an edited sentence brings more
_NEW: Final = 4  # new words that make a report new
_NEW_SHARE: Final = 3  # one word in so many is new where a text brings another subject
_NEWS_WORTH: Final = 3  # reports in known words that one new report makes up for

# How a report relates to the earlier ones of its worker; the journal stores these.
SAME, EDITED, NEW, OTHER = "same", "edited", "new", "other"


class _Reporter:
    """The words of the orders for one worker and of its reports, and how often they were the same."""

    __slots__ = ("count", "orders", "reports")

    def __init__(self) -> None:
        self.count = 0
        self.orders: set[str] = set()
        self.reports: set[str] = set()

    def compare(self, order: set[str], report: set[str]) -> str:
        """How this round relates to those before it; from now on its words are known."""
        if not self.reports:
            self.orders, self.reports = order, report
            return OTHER
        in_order, in_report = order - self.orders, report - self.reports
        self.orders, self.reports = _joined(self.orders, order), _joined(self.reports, report)
        if in_order & in_report or not all(map(str.isalpha, in_order | in_report)):
            return OTHER  # another item, or another number
        if len(in_report) >= _NEW:
            return OTHER if _NEW_SHARE * len(in_report) >= len(report) else NEW
        if len(in_report) > _SAME:
            return EDITED
        return SAME if not in_order and len(report) >= _LEAST else ""


class ToldAgain:
    """Counts reports of one worker that bring at most one new word, on orders that bring none. A report with four new
    words makes up for three of them, and one with two new words starts the other workers anew: they may judge a draft
    that changes. Another subject, another number, a word that is new in both the order and the report, and
    a step by any tool start anew. Orders of one response are one round.
    """

    sees: ClassVar[tuple[type, ...]] = (AgentEntered, ToolResults)
    rests: ClassVar[tuple[type, ...]] = (ToolResults,)
    __slots__ = ("_workers", "record", "rungs")

    def __init__(self, rungs: Rungs) -> None:
        self.rungs = rungs
        self.record = self._workers = OrderedDict[str, _Reporter]()  # by the tool that calls it

    def observe(self, event: AgentEntered | ToolResults) -> Finding | None:
        if type(event) is AgentEntered:
            tool, is_call, _ = event.lane.rpartition("/")[2].partition("@")
            if is_call:
                self._workers.setdefault(tool, _Reporter())
                self._workers.move_to_end(tool)
                if len(self._workers) > _WORKERS_KEPT:
                    self._workers.popitem(last=False)
            return None
        if not self._workers:
            return None
        assert isinstance(event, ToolResults)
        reports: list[Answer] = []
        for a in event.answers:
            if a.tool in self._workers:
                reports.append(a)
            elif a.outcome is not Outcome.REFUSED and not a.is_note:
                self._start_anew()
                return None
        return self._look_at(event, reports) if reports else None

    def _look_at(self, event: ToolResults, reports: list[Answer]) -> Finding | None:
        last = reports[-1]
        if last.outcome is Outcome.REFUSED or len({a.tool for a in reports}) > 1:
            return None
        worker = self._workers[last.tool]
        if not event.is_understood:
            order: set[str] = set()
            report: set[str] = set()
            for a in reports[:_WORKERS_KEPT]:
                order |= _words(a.args)
                report |= _words(a.value)
            event.words = worker.compare(order, report)
        if event.words == SAME:
            worker.count += 1
        elif event.words:
            left = {EDITED: worker.count, NEW: max(worker.count - _NEWS_WORTH, 0)}.get(event.words, 0)
            self._start_anew()
            worker.count = left
        reached = self.rungs.at(worker.count) if event.words == SAME else None
        if reached is None:
            return None
        key, evidence = f"{TOLD_AGAIN}: {last.tool}", evidence_of(event)
        return Finding(
            "no_news", *swap(reached, worker.count), unit=TOLD_AGAIN, tool=last.tool, key=key, evidence=evidence
        )

    def _start_anew(self) -> None:
        for worker in self._workers.values():
            worker.count = 0


def _words(value: object) -> set[str]:
    return set(_WORD.findall(answer_text(value)[:_READ].lower()))


def _joined(known: set[str], words: set[str]) -> set[str]:
    """All of them; only the newer ones where they become too many."""
    return known | words if len(known) <= _VOCABULARY else words
