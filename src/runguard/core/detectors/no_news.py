"""Answers and final words that were given before: cycles of any length."""

from typing import ClassVar, Final

from runguard.core.decision import Action, Finding, Rungs
from runguard.core.detectors.evidence import Pair, evidence_of, swap
from runguard.core.events import ModelCall, ModelResult, ToolResults

_TEXTS_KEPT: Final = 256
_PAIRS_KEPT: Final = 256
_WAITED: Final = 6  # times given again: five unchanged repeats, and the one that might have found the change
_LONG_CIRCLE: Final = 96


class NoNews:
    """Counts answers in a row that were already given at least twice, and so detects cycles of every length.

    A second time is free: an agent that lost its history to a compaction reads everything again, and a waiting agent
    asks again. Final texts count too: a new text is progress, the same text for the same question is not. A
    ``patient`` detector does not stop before every answer was given seven times, so that polling several jobs in turn
    is allowed as long as polling one; a long cycle is stopped all the same.
    """

    sees: ClassVar[tuple[type, ...]] = (ModelCall, ModelResult, ToolResults)
    rests: ClassVar[tuple[type, ...]] = (ModelResult,)
    record: ClassVar[tuple[()]] = ()  # a plain response has no words
    __slots__ = (
        "_asked",
        "_batch",
        "_by_words",
        "_count",
        "_is_asked_again",
        "_is_report",
        "_patient",
        "_said",
        "_times",
        "rungs",
    )

    def __init__(self, rungs: Rungs, *, patient: bool = False) -> None:
        self.rungs = rungs
        self._patient = patient
        self._count = 0
        self._batch = ""
        self._by_words = False  # what was counted last were words: nothing has been said about it yet
        self._said: dict[int, None] = {}
        self._asked: dict[int, None] = {}
        self._is_asked_again = False
        self._is_report = False  # a tool has answered since the last words: the next ones tell of that
        self._times: dict[Pair, int] = {}  # since the last news, how often again

    def observe(self, event: ModelCall | ModelResult | ToolResults) -> Finding | None:
        if type(event) is ModelCall:
            if event.asked:
                self._is_asked_again = event.asked in self._asked or _is_known(self._asked, event.asked)
            return self._before_the_next(event) if self._by_words else None
        if isinstance(event, ModelResult):
            if event.text_id:
                self._hear(event.text_id)
            return None
        assert isinstance(event, ToolResults)
        if event.news:
            if self._count or self._by_words or self._times:
                self._start_anew()
            return None
        if not event.calls or (event.batch and event.batch == self._batch):
            return None
        self._batch = event.batch
        self._is_report = True
        if not self._is_known_well(event.pairs):
            return None
        self._count += 1
        self._by_words = False
        reached = self.rungs.at(self._count)
        if reached is None or (self._patient and reached[0] is Action.STOP and self._may_be_waiting(event.pairs)):
            return None
        return Finding(
            "no_news",
            *swap(reached, self._count),
            unit="answers without news",
            tool=event.answers[0].tool,
            evidence=evidence_of(event),
        )

    def _may_be_waiting(self, pairs: frozenset[Pair]) -> bool:
        """Refusals alone are no waiting."""
        return bool(pairs) and self._count < _LONG_CIRCLE and min(self._times.values(), default=0) < _WAITED

    def _hear(self, words: int) -> None:
        if not _is_known(self._said, words):
            self._start_anew()
        elif self._is_asked_again and not self._is_report:
            self._count += 1
            self._by_words = True
        self._is_report = False

    def _before_the_next(self, event: ModelCall) -> Finding | None:
        """Words stop the call that would follow them: a run whose last words are there is not stopped any more."""
        reached = self.rungs.at(self._count)
        if (
            reached is None
            or reached[0] is not Action.STOP
            or (self._patient and self._times and self._may_be_waiting(frozenset(self._times)))
        ):
            return None
        return Finding(
            "no_news",
            *swap(reached, self._count),
            unit="answers without news",
            key=event.agent,
            detail=f"agent {event.agent}",
        )

    def _is_known_well(self, pairs: frozenset[Pair]) -> bool:
        """Return whether all answers were already repeated, and remember them. Refusals alone are not answers."""
        known = pairs <= self._times.keys()
        if not known and len(self._times) >= _PAIRS_KEPT:
            self._times.clear()  # an agent that reads this many different things is not in a cycle
        for pair in pairs:
            self._times[pair] = self._times.get(pair, 0) + 1
        return known

    def _start_anew(self) -> None:
        self._count, self._by_words = 0, False
        self._times.clear()


def _is_known(names: dict[int, None], name: int) -> bool:
    """Whether it was there before; now it is."""
    if name in names:
        return True
    names[name] = None
    if len(names) > _TEXTS_KEPT:
        del names[next(iter(names))]
    return False
