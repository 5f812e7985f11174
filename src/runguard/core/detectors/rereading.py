"""Long answers that were given before: files, pages and reports that an agent reads again and again.

A short answer may be a status, and asking for a status again is waiting. A long answer deserves no such patience. The
exception is an agent whose history was compacted: it has lost what it read, so everything may be read once more.
"""

from typing import ClassVar, Final

from runguard.core.decision import Finding, Rungs
from runguard.core.detectors.evidence import Pair, evidence_of
from runguard.core.events import ModelCall, ModelResult, ToolResults

_NEWS_WORTH: Final = 3  # known answers that one new answer makes up for: edit-test-edit never adds up
_SHRUNK: Final = 0.9  # a request below this share of the one before has lost a part of its history
_AGENTS_KEPT: Final = 64
_PAIRS_KEPT: Final = 256


class Rereading:
    """Counts known long answers, from the second time on. One new answer among many known ones does not reset it.

    Reports as ``no_news``, whose default limits for answers of any length are later.
    """

    sees: ClassVar[tuple[type, ...]] = (ModelCall, ModelResult, ToolResults)
    rests: ClassVar[tuple[type, ...]] = (ModelResult,)
    record: ClassVar[tuple[()]] = ()  # a plain response has no words
    __slots__ = ("_batch", "_count", "_read", "_sizes", "rungs")

    def __init__(self, rungs: Rungs) -> None:
        self.rungs = rungs
        self._count = 0
        self._batch = ""
        self._sizes: dict[str, int] = {}  # agent -> size of its last request
        self._read: set[Pair] | None = None  # answers given since the last compaction; None: there was none

    def observe(self, event: ModelCall | ModelResult | ToolResults) -> Finding | None:
        if type(event) is ModelCall:
            # a summary is being made, or the agent's request is much smaller than its last one: it was compacted
            size = event.request_bytes or event.input_tokens
            before = self._sizes.pop(event.agent, 0)
            self._sizes[event.agent] = size
            if len(self._sizes) > _AGENTS_KEPT:
                del self._sizes[next(iter(self._sizes))]
            if event.after_answer or size < _SHRUNK * before:
                self._count, self._read = 0, set()
            return None
        if type(event) is ModelResult:
            if event.new_subject:
                self._count = 0  # one agent writes something else while another reads what it always reads
            return None
        assert isinstance(event, ToolResults)
        if not event.pairs or (event.batch and event.batch == self._batch):
            return None
        self._batch = event.batch
        if event.news:
            self._count = max(self._count - _NEWS_WORTH, 0)
            return None
        if not self._is_known_and_long(event):
            return None
        self._count += 1
        reached = self.rungs.at(self._count)
        if reached is None:
            return None
        action, limit = reached
        return Finding(
            "no_news",
            action,
            self._count,
            limit,
            "answers without news",
            tool=event.answers[0].tool,
            evidence=evidence_of(event),
        )

    def _is_known_and_long(self, event: ToolResults) -> bool:
        long = {(a.call, a.answer) for a in event.answers if a.is_long}
        if not long or self._read is None or long <= self._read:
            return bool(long)
        if len(self._read) >= _PAIRS_KEPT:
            self._read.clear()
        self._read |= long
        return False
