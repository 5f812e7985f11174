"""The same call whose long answer says the same in other words: a page that a model describes anew each time, an agent
that is asked the same question.

Programs do not reword their answers, so this is not a wait for a change.
"""

import re
from typing import ClassVar, Final

from runguard.core.decision import REWORDED, Finding, Rungs
from runguard.core.detectors.evidence import evidence_of, swap
from runguard.core.events import FEWER_WORDS, OTHER_WORDS, Answer, Outcome, ToolResults

_READ: Final = 16_384
_WORD: Final = re.compile(r"[^\W_]+")
_LEAST: Final = 40  # different words: a shorter answer is a status
_MOST: Final = 2_048  # words kept of one row
_NEW: Final = 4  # new words that make an answer new
_BACK: Final = 3  # words that come back: in a list that shrinks or a status that moves on there are fewer


class Reworded:
    """Counts answers to one call, in a row, that are not equal to the answer before but bring no new number and hardly
    a new word. The words of all answers in the row are known words. An equal answer, and one that only leaves words
    out, does not count and does not end the row.
    """

    sees: ClassVar[tuple[type, ...]] = (ToolResults,)
    __slots__ = ("_batch", "_call", "_count", "_known", "_last", "_text", "rungs")

    def __init__(self, rungs: Rungs) -> None:
        self.rungs = rungs
        self._batch = ""
        self._call = b""
        self._count = 0
        self._text = ""  # the first answer of the row, until its words are needed
        self._last: set[str] = set()  # words of the last answer
        self._known: set[str] = set()  # words of all answers in the row

    def observe(self, event: ToolResults) -> Finding | None:
        if not event.calls or (event.batch and event.batch == self._batch):
            return None
        self._batch = event.batch
        answer = event.answers[0]
        if len(event.answers) > 1 or answer.outcome is Outcome.REFUSED or not answer.is_long:
            self._call, self._count = b"", 0
            return None
        if answer.call != self._call:
            self._call, self._count = answer.call, 0
            self._text, self._last, self._known = _prose(answer.value), set(), set()
            return None
        if not event.news:
            return None
        if not event.is_understood:
            answer.wording = self._compare(answer)
        if answer.wording == FEWER_WORDS:
            return None
        self._count = self._count + 1 if answer.wording == OTHER_WORDS else 0
        reached = self.rungs.at(self._count)
        if reached is None:
            return None
        key, evidence = f"{REWORDED}: {answer.tool}", evidence_of(event)
        return Finding(
            "no_news", *swap(reached, self._count), unit=REWORDED, tool=answer.tool, key=key, evidence=evidence
        )

    def _compare(self, answer: Answer) -> str:
        """How the answer's words relate to those of the answers before it; from now on they are known."""
        if self._text:
            self._last, self._text = _words(self._text), ""
            self._known = set(self._last)
        words, before = _words(_prose(answer.value)), self._last
        new = words - self._known
        self._last = words
        if len(self._known) > _MOST:
            self._known.clear()
        self._known |= words
        if len(words) < _LEAST or len(new) >= _NEW or not all(map(str.isalpha, new)):
            return ""
        return OTHER_WORDS if len(words - before) - len(new) >= _BACK else FEWER_WORDS


def _prose(value: object) -> str:
    """The text of an answer that is one text, as it is or as the only value of a dict."""
    if type(value) is dict and len(value) == 1:
        value = next(iter(value.values()))
    return value[:_READ] if type(value) is str else ""


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.lower()))
