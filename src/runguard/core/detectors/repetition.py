"""Doing again what was done before: in a row, in circles, or without an end.

One observation is one model response with all its calls; equal calls within it collapse. A refusal of ours is an
attempt (it counts) but never an answer (it is no progress). Tools declared as polling or paging do not enter here.
"""

import json
import re
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import ClassVar, Final

from runguard.core.decision import MAX_EVIDENCE, Action, Finding, Rungs
from runguard.core.events import AgentEntered, Answer, ModelCall, ModelResult, Outcome, ToolCall, ToolResults
from runguard.core.fingerprint import answer_text, digest, mask

Pair = tuple[bytes, int]
_TEXTS_KEPT: Final = 256
_TOLD_KEPT: Final = 256
_WAITED: Final = 6  # times told again: five unchanged repeats, and the one that might have found the change
_LONG_CIRCLE: Final = 48
_WORD: Final = re.compile(r"[^\W_]+")
_PAGE_READ: Final = 16_384  # characters of an answer that are looked at
_PAGE_WORDS: Final = 20  # fewer different words are a state, no page


def evidence_of(event: ToolResults) -> tuple[dict[str, str], ...]:
    """Digests only: arguments and results may hold secrets."""
    return tuple(
        {"event": a.event_id, "tool": a.tool, "call": a.call.hex(), "answer": _digest_of(a)}
        for a in event.answers[:MAX_EVIDENCE]
    )


def _digest_of(answer: Answer) -> str:
    return "" if answer.outcome is Outcome.REFUSED else digest(mask(answer_text(answer.value))).hex()


class Repetition:
    """The same call (or batch of calls) with the same answer, in a row, by one agent.

    Nudge N rides on the Nth answer, block N refuses the Nth call, stop N ends at the Nth attempt: after a block the
    next identical attempt stops. A call that gets no answer at all and is made again stops at N, too.
    """

    sees: ClassVar[tuple[type, ...]] = (AgentEntered, ToolCall, ToolResults)
    __slots__ = ("_agent", "_batch", "_calls", "_count", "_first", "_pairs", "_silent", "_unanswered", "rungs")

    def __init__(self, rungs: Rungs) -> None:
        self.rungs = rungs
        self._first = rungs.lowest  # nothing to say below the lowest rung
        self._agent = ""
        self._pairs: frozenset[Pair] = frozenset()
        self._calls: frozenset[bytes] = frozenset()
        self._count = 0
        self._batch = ""
        # agent, response and calls that have no answer yet
        self._unanswered: tuple[str, str, frozenset[bytes | str]] = _NONE_OPEN
        self._silent = 0  # responses in a row that made the same unanswered call

    def observe(self, event: AgentEntered | ToolCall | ToolResults) -> Finding | None:
        if type(event) is ToolCall:
            return self._attempt(event) or self._ask_again(event)
        if type(event) is AgentEntered:
            if event.branches:
                return None  # branches begin: of whoever starts them nothing is new
            # a new activation may ask once more what the last one asked; circles of them are NoNews' business
            self._count = 0
            self._pairs, self._calls = frozenset(), frozenset()
            self._unanswered = _NONE_OPEN
            return None
        assert isinstance(event, ToolResults)
        self._unanswered = _NONE_OPEN
        pairs = event.pairs
        if not pairs:
            return None  # nothing that counts, or refusals only: those were counted when the calls were made
        same_batch = bool(event.batch) and event.batch == self._batch
        if same_batch:
            pairs |= self._pairs  # the rest of a batch whose answers came one by one
        if pairs == self._pairs and event.agent == self._agent:
            self._count += not same_batch
        else:
            self._pairs, self._calls, self._count = (
                pairs,
                event.calls if not same_batch else self._calls | event.calls,
                1,
            )
        self._batch, self._agent = event.batch, event.agent
        if self._count < self._first:
            return None
        reached = self.rungs.at(self._count)
        if reached is None or reached[0] is Action.BLOCK:
            return None  # a block waits for the next call
        first = next(a for a in event.answers if a.counted)
        return Finding(
            "repetition",
            *_swap(reached, self._count),
            unit="identical calls and answers",
            tool=first.tool,
            key=first.call.hex(),
            evidence=evidence_of(event),
        )

    def _attempt(self, event: ToolCall) -> Finding | None:
        block = self.rungs.block
        if block is None or event.call not in self._calls or event.agent != self._agent or self._count + 1 < block:
            return None
        if event.batch != self._batch or not event.batch:
            self._count += 1
            self._batch = event.batch
        action, limit = self.rungs.at(self._count) or (Action.BLOCK, block)
        evidence = ({"event": "", "tool": event.tool, "call": event.call.hex(), "answer": ""},)
        return Finding(
            "repetition",
            action,
            self._count,
            limit,
            "identical calls and answers",
            "lane",
            event.tool,
            event.call.hex(),
            "",
            evidence,
        )

    def _ask_again(self, event: ToolCall) -> Finding | None:
        """A framework may leave a call without an answer and ask the model again.

        Calls outside of a model's response never get one.
        """
        if not event.batch:
            return None
        # an agent that never answers is not asked something else by other words
        call = event.tool if event.depth else event.call
        agent, batch, calls = self._unanswered
        if event.batch == batch:
            self._unanswered = (agent, batch, calls | {call})
            return None
        self._silent = self._silent + 1 if call in calls and event.agent == agent else 1
        self._unanswered = (event.agent, event.batch, frozenset((call,)))
        if self.rungs.stop is None or self._silent < self.rungs.stop:
            return None
        return Finding(
            "repetition",
            Action.STOP,
            self._silent,
            self.rungs.stop,
            "equal calls without an answer",
            "lane",
            event.tool,
            event.call.hex(),
        )


_NONE_OPEN: Final[tuple[str, str, frozenset[bytes | str]]] = ("", "", frozenset())


class NoNews:
    """Answers in a row that tell nothing but what was told at least twice before: sees circles of every period.

    A second time is free: whoever lost its history to a compaction reads everything again, whoever waits asks again.
    Words at the end of an activation count too: new ones are news, the same ones again to the same question are none. A
    ``patient`` one does not stop before every answer was told seven times, so that several jobs polled in turn hold as
    long as one; a long circle ends all the same.
    """

    sees: ClassVar[tuple[type, ...]] = (ModelCall, ModelResult, ToolResults)
    __slots__ = (
        "_asked",
        "_batch",
        "_by_words",
        "_count",
        "_is_asked_again",
        "_is_report",
        "_patient",
        "_said",
        "_told",
        "rungs",
    )

    def __init__(self, rungs: Rungs, *, patient: bool = False) -> None:
        self.rungs = rungs
        self._patient = patient
        self._count = 0
        self._batch = ""
        self._by_words = False  # what was counted last were words: nothing has been said about it yet
        self._said: OrderedDict[int, None] = OrderedDict()
        self._asked: OrderedDict[int, None] = OrderedDict()
        self._is_asked_again = False
        self._is_report = False  # a tool has answered since the last words: the next ones tell of that
        self._told: dict[Pair, int] = {}  # since the last news, how often again

    def observe(self, event: ModelCall | ModelResult | ToolResults) -> Finding | None:
        if type(event) is ModelCall:
            if event.asked:
                self._is_asked_again = _is_known(self._asked, event.asked)
            return self._before_the_next(event) if self._by_words else None
        if isinstance(event, ModelResult):
            if event.said:
                self._hear(event.said)
            return None
        assert isinstance(event, ToolResults)
        if event.news:
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
            *_swap(reached, self._count),
            unit="answers without news",
            tool=event.answers[0].tool,
            evidence=evidence_of(event),
        )

    def _may_be_waiting(self, told: frozenset[Pair]) -> bool:
        """Refusals alone are no waiting."""
        return bool(told) and self._count < _LONG_CIRCLE and min(self._told.values(), default=0) < _WAITED

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
            or (self._patient and self._told and self._may_be_waiting(frozenset(self._told)))
        ):
            return None
        return Finding(
            "no_news",
            *_swap(reached, self._count),
            unit="answers without news",
            key=event.agent,
            detail=f"agent {event.agent}",
        )

    def _is_known_well(self, told: frozenset[Pair]) -> bool:
        """Whether all of it was told again before; what was not has been now. Refusals alone tell nothing."""
        known = told <= self._told.keys()
        if not known and len(self._told) >= _TOLD_KEPT:
            self._told.clear()  # so many different things are a reading, no circle
        for pair in told:
            self._told[pair] = self._told.get(pair, 0) + 1
        return known

    def _start_anew(self) -> None:
        self._count, self._by_words = 0, False
        if self._told:
            self._told.clear()


def _is_known(names: OrderedDict[int, None], name: int) -> bool:
    """Whether it was there before; now it is."""
    if name in names:
        return True
    names[name] = None
    if len(names) > _TEXTS_KEPT:
        names.popitem(last=False)
    return False


class SameCall:
    """The same call over and over although its answers differ: busy waiting, or a clock in the answer.

    In a long row the words are looked at: an answer that shares less than half of them with the one before is
    another page.
    """

    sees: ClassVar[tuple[type, ...]] = (ToolResults,)
    __slots__ = ("_batch", "_calls", "_count", "_look_from", "_matters_from", "_words", "rungs")

    def __init__(self, rungs: Rungs, *, look_from: float | None = None) -> None:
        """``look_from``: how long a row must be before words are looked at; a journal is kept for other rungs too, so
        it wants to know early.
        """
        self.rungs = rungs
        self._calls: frozenset[bytes] = frozenset()
        self._count = 0
        self._batch = ""
        self._matters_from = rungs.lowest / 2
        self._look_from = look_from or self._matters_from
        self._words: frozenset[str] = frozenset()  # of the last answer that was looked at

    def observe(self, event: ToolResults) -> Finding | None:
        calls = event.calls
        if not calls or (event.batch and event.batch == self._batch):
            return None
        self._batch = event.batch
        if calls == self._calls:
            self._count += 1
        else:
            self._calls, self._count, self._words = calls, 1, frozenset()
        if self._count >= self._look_from and self._is_another_page(event) and self._count >= self._matters_from:
            self._count = 1
        reached = self.rungs.at(self._count)
        if reached is None:
            return None
        return Finding(
            "same_call",
            *_swap(reached, self._count),
            unit="identical calls in a row",
            tool=event.answers[0].tool,
            key=event.answers[0].call.hex(),
            evidence=evidence_of(event),
        )

    def _is_another_page(self, event: ToolResults) -> bool:
        if event.is_understood:
            return event.another_page
        before = self._words
        text = " ".join(
            [answer_text(a.value)[:_PAGE_READ] for a in event.answers if a.counted and a.outcome is not Outcome.REFUSED]
        )
        words = self._words = frozenset(_WORD.findall(text))
        event.another_page = (
            len(words) >= _PAGE_WORDS and bool(before) and 2 * len(words & before) < len(words | before)
        )
        return event.another_page


class Rounds:
    """Counts full rounds of a circle of at most ``max_len`` steps."""

    __slots__ = ("_names", "_recent", "_same", "max_len")

    def __init__(self, max_len: int) -> None:
        self.max_len = max_len
        self._recent: deque[object] = deque(maxlen=max_len)
        self._names: deque[str] = deque(maxlen=max_len)
        self._same = [0] * (max_len + 1)  # _same[p]: steps in a row equal to the one p before

    def add(self, step: object, name: str) -> tuple[int, list[str]]:
        """How many rounds end with this step, and the names of one round; no rounds where nothing repeats."""
        rounds, length = 0, 0
        for period in range(1, self.max_len + 1):
            same = len(self._recent) >= period and self._recent[-period] == step
            self._same[period] = self._same[period] + 1 if same else 0
            if self._same[period] >= period and self._same[period] // period + 1 > rounds:
                rounds, length = self._same[period] // period + 1, period
        self._recent.append(step)
        self._names.append(name)
        return rounds, list(self._names)[-length:] if length else []

    def clear(self) -> None:
        if self._recent:
            self._recent.clear()
            self._names.clear()
            self._same = [0] * (self.max_len + 1)


class Cycle:
    """Full rounds of a circle of at most ``max_len`` observations.

    Off unless asked for: ``NoNews`` sees circles too.
    """

    sees: ClassVar[tuple[type, ...]] = (ToolResults,)
    __slots__ = ("_rounds", "rungs")

    def __init__(self, rungs: Rungs, max_len: int = 4) -> None:
        self.rungs, self._rounds = rungs, Rounds(max_len)

    def observe(self, event: ToolResults) -> Finding | None:
        if not event.pairs:
            return None
        rounds, pattern = self._rounds.add(event.pairs, "+".join(sorted({a.tool for a in event.answers if a.counted})))
        reached = self.rungs.at(rounds)
        if reached is None or rounds < 2:
            return None
        length = len(pattern)
        evidence = evidence_of(event)
        evidence[0]["pattern"] = json.dumps(pattern)
        detail = f"of {length} calls: {'→'.join(pattern)}" if length > 1 else "of one call"
        return Finding(
            "cycle",
            *_swap(reached, rounds),
            unit="rounds",
            detail=detail,
            tool=event.answers[0].tool,
            evidence=evidence,
        )

    def clear(self) -> None:
        self._rounds.clear()


class Polling:
    """A declared polling tool that shows no change: judged by time, never by count."""

    sees: ClassVar[tuple[type, ...]] = (ToolResults,)
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
                    *_swap(reached, round(waited)),
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


def _swap(reached: tuple[Action, float], observed: float) -> tuple[Action, float, float]:
    """``Rungs.at`` gives (action, limit); a Finding wants (action, observed, limit)."""
    return reached[0], observed, reached[1]
