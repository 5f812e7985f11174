"""Long calls that nearly repeat the one before: a file that is written again and again with another line.

The detector nudges and never stops: one query over thirty countries looks the same.
"""

from typing import ClassVar, Final

from runguard.core.decision import NEAR_EQUAL, Action, Finding
from runguard.core.detectors.evidence import evidence_of
from runguard.core.events import Answer, Outcome, ToolResults

_REFUSED: Final = Outcome.REFUSED  # bound once: a lookup on the enum costs as much as the rest of a line
_NUDGE_AT: Final = 6
_LONG: Final = 200  # characters: fewer cannot hold forty words
_READ: Final = 16_384
_WORDS: Final = 40
_SAME: Final = 0.9  # share of the words of both calls


class NearEqualCalls:
    """Counts calls of one tool in a row whose long argument has nearly the same words, and whose other arguments are
    equal. A call of another tool ends the row.
    """

    sees: ClassVar[tuple[type, ...]] = (ToolResults,)
    __slots__ = ("_count", "_others", "_tool", "_words")

    def __init__(self) -> None:
        self._tool = ""
        self._count = 0
        self._others: frozenset[tuple[str, object]] = frozenset()  # the short arguments of the last call
        self._words: frozenset[str] = frozenset()  # of the long argument of the last call

    def observe(self, event: ToolResults) -> Finding | None:
        answer: Answer | None = None
        for one in event.answers:
            if one.counted and one.outcome is not _REFUSED:
                if answer is not None:
                    self._count = 0
                    return None
                answer = one
        if answer is None:
            self._count = 0
            return None
        if not event.is_understood:
            long = ""
            args = answer.args if type(answer.args) is dict else {}
            for given in args.values():
                if type(given) is str and len(given) > len(long):
                    long = given
            answer.is_near = len(long) >= _LONG and self._is_near(answer.tool, args, long)
        self._count = self._count + 1 if answer.is_near else 1
        if self._count < _NUDGE_AT:
            return None
        return Finding(
            "no_news",
            Action.NUDGE,
            self._count,
            _NUDGE_AT,
            NEAR_EQUAL,
            tool=answer.tool,
            key=f"{NEAR_EQUAL}: {answer.tool}",
            evidence=evidence_of(event),
        )

    def _is_near(self, tool: str, args: dict[str, object], long: str) -> bool:
        """Whether the call resembles the last one; from now on it is the last one. An equal call is a repetition."""
        listed = long[:_READ].split()
        words = frozenset(listed)
        others = frozenset(
            (key, value)
            for key, value in args.items()
            if type(key) is str and value is not long and type(value) in (str, int, bool)
        )
        near = (
            tool == self._tool
            and others == self._others
            and len(listed) >= _WORDS
            and words != self._words
            and len(words & self._words) >= _SAME * len(words | self._words)
        )
        self._tool, self._words, self._others = tool, words, others
        return near
