"""Rules about repetition: the same call again, cycles, nearly equal calls, answers without news, polling.

``engine/runs`` makes the detectors of a run. ``Detector`` is the form of every rule, also of those in the other
modules.
"""

import json
import re
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, ClassVar, Final, Protocol

from runguard.core.decision import (
    LOOK_ALIKE,
    MAX_EVIDENCE,
    NEAR_EQUAL,
    ONLY_NOTES,
    REWORDED,
    SAME_ANSWER,
    SAME_PAIR,
    WANDERING,
    Action,
    Finding,
    Rungs,
)
from runguard.core.events import (
    FEWER_WORDS,
    MOVES,
    OTHER_WORDS,
    WANDERS,
    WANDERS_LONG,
    AgentEntered,
    Answer,
    ModelCall,
    ModelResult,
    Outcome,
    ToolCall,
    ToolResults,
)
from runguard.core.identity import answer_text, digest, mask, read_as
from runguard.core.outcomes import only_text

# ---- What every rule looks like.


class Detector(Protocol):
    """``sees`` names the event types that it observes.

    Most events are plain: a model is called, its response calls tools and says nothing, the tools are no agents, and
    their answers are new, count and are no failures. A detector that most of these do not concern also has ``rests``,
    the types of events of which a plain one changes nothing while its ``record`` is empty, and ``record``, always the
    same object. It is not called for such events; ``runguard.engine.runs`` sees to that.
    """

    sees: ClassVar[tuple[type, ...]]

    def observe(self, event: Any, /) -> Finding | None: ...


# ---- What a finding about tool results shows.

Pair = tuple[bytes, int]  # a call and the name of its answer
_REFUSED: Final = Outcome.REFUSED  # bound once: a lookup on the enum costs as much as the rest of a line


def evidence_of(event: ToolResults) -> tuple[dict[str, str], ...]:
    """Return digests of the calls and answers, because arguments and results may hold secrets."""
    return tuple(
        {"event": a.event_id, "tool": a.tool, "call": a.call.hex(), "answer": _digest_of(a)}
        for a in event.answers[:MAX_EVIDENCE]
    )


def _digest_of(answer: Answer) -> str:
    return "" if answer.outcome is Outcome.REFUSED else digest(mask(answer_text(answer.value))).hex()


def swap(reached: tuple[Action, float], observed: float) -> tuple[Action, float, float]:
    """Return (action, observed, limit) as a Finding takes them, from the (action, limit) of ``Rungs.at``."""
    return reached[0], observed, reached[1]


# ---- The same call again: with the same answer, or with ever new ones.

# One observation is one model response with all its calls; equal calls within it count once. RunGuard's own refusal is
# an attempt (it counts) but never an answer (it is no progress). Tools declared as polling or paging are left out.

_WORD: Final = re.compile(r"[^\W_]+")
_READ: Final = 16_384  # characters of a text that are looked at
_PAGE_WORDS: Final = 20  # an answer with fewer different words is a state, not a page
_NONE_OPEN: Final[tuple[str, str, frozenset[bytes | str]]] = ("", "", frozenset())


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
            found = self._attempt(event) if event.call in self._calls else None
            return found if found is not None else self._ask_again(event)
        if type(event) is AgentEntered:
            if event.branches:
                return None  # branches begin: the agent that starts them has nothing new
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
            *swap(reached, self._count),
            unit="identical calls and answers",
            tool=first.tool,
            key=first.call.hex(),
            evidence=evidence_of(event),
        )

    def _attempt(self, event: ToolCall) -> Finding | None:
        block = self.rungs.block
        if block is None or event.agent != self._agent or self._count + 1 < block:
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
        """Judge a call that is made again without an answer.

        A framework may leave a call unanswered and ask the model again. Calls outside of a model's response never get
        an answer and do not count.
        """
        if not event.batch:
            return None
        # other words for an agent that never answers are still the same call
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

    def take_back(self, event: ToolCall) -> None:
        """Do not count a call that waits for an approval: its answer is still to come."""
        if event.batch == self._unanswered[1]:
            self._silent = max(self._silent - 1, 0)


class SameCall:
    """The same call over and over although its answers differ: busy waiting, or a clock in the answer.

    In a long row the words are looked at: an answer that shares less than half of them with the one before is
    another page. Where ``wandering`` is given, a row of one call, or of a few calls in turn, is also judged by what its
    answers say: the same words each time, and numbers that do not move one way.
    """

    sees: ClassVar[tuple[type, ...]] = (ToolResults,)
    __slots__ = (
        "_batch",
        "_calls",
        "_count",
        "_first",
        "_look_from",
        "_matters_from",
        "_said",
        "_wandered",
        "_wandering",
        "_words",
        "rungs",
    )

    def __init__(self, rungs: Rungs, *, look_from: float | None = None, wandering: Rungs | None = None) -> None:
        """Take the limits of a row of equal calls and of answers that say the same.

        ``look_from``: how long a row must be before words are looked at. A journal is kept for other rungs too, so it
        wants to know early. ``wandering``: limits for answers that differ in their numbers alone; its rung ``block``
        stops a call with a long argument.
        """
        self.rungs = rungs
        self._calls: frozenset[bytes] = frozenset()
        self._count = 0
        self._batch = ""
        self._first = rungs.lowest  # nothing to say below the lowest rung
        self._matters_from = self._first / 2
        self._look_from = look_from or self._matters_from
        self._words: frozenset[str] = frozenset()  # of the last answer that was looked at
        self._wandering = wandering
        self._said: dict[frozenset[bytes], _Said | None] = {}  # the calls made last; None: made once
        self._wandered = 0  # answers of these in a row that said nothing new

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
        reached = self.rungs.at(self._count) if self._count >= self._first else None
        if self._wandering is not None:
            if calls not in self._said:
                self._wandered = 0
                self._said[calls] = None
                if len(self._said) > _IN_TURN:
                    del self._said[next(iter(self._said))]
            elif event.news:
                found = self._listen(event)
                if found is not None and (reached is None or found.action > reached[0]):
                    return found
        if reached is None:
            return None
        return Finding(
            "same_call",
            *swap(reached, self._count),
            unit="identical calls in a row",
            tool=event.answers[0].tool,
            key=event.answers[0].call.hex(),
            evidence=evidence_of(event),
        )

    def _is_another_page(self, event: ToolResults) -> bool:
        if event.is_understood:
            return event.another_page
        before = self._words
        text = _text_of(event, _READ)
        words = self._words = frozenset(_WORD.findall(text))
        event.another_page = (
            len(words) >= _PAGE_WORDS and bool(before) and 2 * len(words & before) < len(words | before)
        )
        return event.another_page

    def _listen(self, event: ToolResults) -> Finding | None:
        """Look at the words and numbers of an answer to one of the calls made last."""
        if not event.is_understood:
            said = self._said[event.calls] or _Said()
            self._said[event.calls] = said
            event.wanders = said.compare(_text_of(event, _LISTENED))
            if event.wanders == WANDERS and any(_has_long_argument(a) for a in event.answers):
                event.wanders = WANDERS_LONG
        if event.wanders == MOVES:
            return None
        self._wandered = self._wandered + 1 if event.wanders else 0
        assert self._wandering is not None
        nudge, stop_long, stop = self._wandering.nudge, self._wandering.block, self._wandering.stop
        # calls made once or twice are not compared yet
        count = self._wandered + 2 * len(self._said)
        if self._count <= 1 and self._wandered < 2 * len(self._said):
            return None
        is_long = event.wanders == WANDERS_LONG and self._count >= count
        if stop is not None and stop_long is not None and count >= (stop_long if is_long else stop):
            what = (Action.STOP, count, stop_long if is_long else stop)
        elif nudge is not None and count >= nudge and event.wanders:
            what = (Action.NUDGE, count, nudge)
        else:
            return None
        answer = event.answers[0]
        return Finding(
            "same_call",
            *what,
            unit=WANDERING,
            tool=answer.tool,
            key=f"{WANDERING}: {answer.tool}",
            evidence=evidence_of(event),
        )


_IN_TURN: Final = 6  # calls of a circle
_LISTENED: Final = 4_096  # characters of an answer
_NUMBERS_KEPT: Final = 32
_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?")
_UP, _DOWN, _BOTH = 1, -1, 2


class _Said:
    """What one call has answered last: its words, its numbers, and which way each number has moved so far."""

    __slots__ = ("_moved", "_numbers", "_words")

    def __init__(self) -> None:
        self._words: frozenset[str] | None = None
        self._numbers: list[float] = []
        self._moved: list[int] = []

    def compare(self, text: str) -> str:
        """Return how an answer relates to the one before, and remember it as the last one.

        WANDERS: the words are equal and no number moves one way. MOVES: a number does, or nothing differs. "": it says
        something else.
        """
        words = frozenset(word for word in _WORD.findall(text) if not word[0].isdigit())
        numbers = [float(number) for number in _NUMBER.findall(text)[:_NUMBERS_KEPT]]
        before, self._numbers = self._numbers, numbers
        is_same = words == self._words and len(numbers) == len(before)
        self._words = words
        if not is_same:
            self._moved = [0] * len(numbers)
            return ""
        if numbers == before:
            return MOVES
        for at, (now, last) in enumerate(zip(numbers, before, strict=True)):
            if now != last:
                way = _UP if now > last else _DOWN
                self._moved[at] = way if self._moved[at] in (0, way) else _BOTH
        return MOVES if _UP in self._moved or _DOWN in self._moved else WANDERS


def _text_of(event: ToolResults, most: int) -> str:
    """Return the text of the answers that count, up to ``most`` characters of each."""
    return " ".join(
        [answer_text(a.value)[:most] for a in event.answers if a.counted and a.outcome is not Outcome.REFUSED]
    )


def _has_long_argument(answer: Answer) -> bool:
    args = answer.args
    return type(args) is dict and any(type(given) is str and len(given) >= _LONG for given in args.values())


# ---- Full rounds of a cycle.


class Rounds:
    """Counts full rounds of a circle of at most ``max_len`` steps."""

    __slots__ = ("_names", "_recent", "_same", "max_len")

    def __init__(self, max_len: int) -> None:
        self.max_len = max_len
        self._recent: deque[object] = deque(maxlen=max_len)
        self._names: deque[str] = deque(maxlen=max_len)
        self._same = [0] * (max_len + 1)  # _same[p]: steps in a row equal to the one p before

    def add(self, step: object, name: str) -> tuple[int, list[str]]:
        """Return how many rounds end with this step, and the names of one round.

        Where nothing repeats, that is 0 and no names.
        """
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
            *swap(reached, rounds),
            unit="rounds",
            detail=detail,
            tool=event.answers[0].tool,
            evidence=evidence,
        )

    def clear(self) -> None:
        self._rounds.clear()


# ---- Long calls that nearly repeat the one before: a file that is written again and again with another line.

_NUDGE_AT: Final = 6
_LONG: Final = 200  # characters: fewer cannot hold forty words
_WORDS: Final = 40
_SAME: Final = 0.9  # share of the words of both calls


class NearEqualCalls:
    """Counts nearly equal long calls of one tool in a row.

    Their long argument has nearly the same words, and the other arguments are equal. A call of another tool ends the
    row. It nudges and never stops: one query over thirty countries looks the same.
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
        """Return whether the call resembles the last one, and remember it as the last one.

        An equal call is a repetition and not near.
        """
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


# ---- The same call whose long answer says the same in other words: a page that a model describes anew each time.

_LEAST: Final = 40  # different words: a shorter answer is a status
_MOST: Final = 2_048  # words kept of one row
_NEW: Final = 4  # new words that make an answer new
_BACK: Final = 3  # words that come back: in a list that shrinks or a status that moves on there are fewer


class Reworded:
    """Counts answers to one call, in a row, that say the same in other words.

    Such an answer is not equal to the one before, but brings no new number and hardly a new word. The words of all
    answers in the row are known words. An equal answer, and one that only leaves words out, does not count and does not
    end the row. Programs do not reword their answers, so this is not a wait for a change.
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
            self._text, self._last, self._known = only_text(answer.value)[:_READ], set(), set()
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
        """Return how the answer's words relate to those of the answers before it, and add them to the known ones."""
        if self._text:
            self._last, self._text = _words(self._text), ""
            self._known = set(self._last)
        words, before = _words(only_text(answer.value)[:_READ]), self._last
        new = words - self._known
        self._last = words
        if len(self._known) > _MOST:
            self._known.clear()
        self._known |= words
        if len(words) < _LEAST or len(new) >= _NEW or not all(map(str.isalpha, new)):
            return ""
        return OTHER_WORDS if len(words - before) - len(new) >= _BACK else FEWER_WORDS


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.lower()))


# ---- Long answers that were given before: files, pages and reports that an agent reads again and again.

_NEWS_WORTH: Final = 3  # known answers that one new answer makes up for: edit-test-edit never adds up
_SHRUNK: Final = 0.9  # a request below this share of the one before has lost a part of its history
_AGENTS_KEPT: Final = 64
_PAIRS_KEPT: Final = 256


class Rereading:
    """Counts known long answers, from the second time on. One new answer among many known ones does not reset it.

    A short answer may be a status, and asking for a status again is waiting. A long answer deserves no such patience.
    An agent whose history was compacted has lost what it read, so it may read everything once more.

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


# ---- Loops behind noise: the calls differ, or other calls come between.

# Most of these nudge and never stop, because healthy work can look the same.
_ANSWERS_KEPT: Final = 256
_SAME_ANSWERS: Final = 8
_SAME_PAIRS: Final = 12
_ALIKE: Final = 4
_ALIKE_STOP: Final = 20
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
    """Counts answers that were given before, where no other rule sees it.

    - A tool gives a long answer that it gave before, although it was asked something else: a counter, an id, an
      argument that it does not read. Equal short answers are a batch and do not count.
    - One call gives the same long answer again and again, with other work between.
    - A tool gives the same answer in a row to calls that a reader cannot tell apart.
    """

    sees: ClassVar[tuple[type, ...]] = (ToolResults,)
    __slots__ = ("_alike", "_count", "_counts", "_known", "_last")

    def __init__(self) -> None:
        self._count = 0
        self._known: dict[tuple[str, int], None] = {}  # tools and their long answers
        self._counts: dict[Pair, int] = {}  # long answers of one call
        # tool, answer, call and arguments of the last answer
        self._last: tuple[str, int, bytes, object] = ("", 0, b"", None)
        self._alike = 1  # calls in a row that a reader cannot tell apart

    def observe(self, event: ToolResults) -> Finding | None:
        known: Answer | None = None
        found: Finding | None = None
        is_new = False
        for a in event.answers:
            if not a.counted or a.outcome is _REFUSED:
                continue
            tool, answer, call, args = self._last
            self._last = (a.tool, a.answer, a.call, a.args)
            if answer != a.answer or tool != a.tool:
                self._alike = 1
            elif call != a.call:
                found = self._look_alike(event, a, args) or found
            if not a.is_long:
                is_new = is_new or event.news
                continue
            pair = (a.call, a.answer)
            count = self._counts[pair] = self._counts.pop(pair, 0) + 1
            if count >= _SAME_PAIRS:
                found = found or _nudge(event, a, count, _SAME_PAIRS, SAME_PAIR)
            if (a.tool, a.answer) in self._known:
                known = a
            else:
                is_new = True
                self._known[a.tool, a.answer] = None
                if len(self._known) > _ANSWERS_KEPT:
                    del self._known[next(iter(self._known))]
        while len(self._counts) > _ANSWERS_KEPT:
            del self._counts[next(iter(self._counts))]
        if is_new:
            self._count = max(self._count - _NEWS_WORTH, 0)
        elif known is not None:
            self._count += 1
            if self._count >= _SAME_ANSWERS and found is None:
                return _nudge(event, known, self._count, _SAME_ANSWERS, SAME_ANSWER)
        return found

    def _look_alike(self, event: ToolResults, a: Answer, args: object) -> Finding | None:
        """Count an answer that equals the last one, to another call that may read like the last one.

        ``args``: the arguments of the last call.
        """
        if not event.is_understood:
            a.reads_alike = bool(a.args) and bool(args) and read_as(a.args) == read_as(args)
        self._alike = self._alike + 1 if a.reads_alike else 1
        if self._alike < _ALIKE:
            return None
        if self._alike < _ALIKE_STOP:
            return _nudge(event, a, self._alike, _ALIKE, LOOK_ALIKE)
        about = (a.tool, f"{LOOK_ALIKE}: {a.tool}", "", evidence_of(event))
        return Finding("no_news", Action.STOP, self._alike, _ALIKE_STOP, LOOK_ALIKE, "lane", *about)


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


# ---- Answers and final words that were given before: cycles of any length.

_TEXTS_KEPT: Final = 256
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
        self._by_words = False  # words were counted last, and no finding was made about them yet
        self._said: dict[int, None] = {}
        self._asked: dict[int, None] = {}
        self._is_asked_again = False
        self._is_report = False  # a tool has answered since the last words, so the next ones may report on it
        self._times: dict[Pair, int] = {}  # how often each was given again since the last news

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
        """Return whether a patient detector should not stop yet: an answer in the row was given only a few times.

        False for a long circle, and when every answer was a refusal.
        """
        return bool(pairs) and self._count < _LONG_CIRCLE and min(self._times.values(), default=0) < _WAITED

    def _hear(self, words: int) -> None:
        if not _is_known(self._said, words):
            self._start_anew()
        elif self._is_asked_again and not self._is_report:
            self._count += 1
            self._by_words = True
        self._is_report = False

    def _before_the_next(self, event: ModelCall) -> Finding | None:
        """Judge words at the call that would follow them.

        A run that has said its last words is not stopped any more.
        """
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
    """Return whether the name was there before, and remember it."""
    if name in names:
        return True
    names[name] = None
    if len(names) > _TEXTS_KEPT:
        del names[next(iter(names))]
    return False


# ---- Declared polling tools: judged by time.


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
        """Do not count the seconds in which the run was paused."""
        for call, (answer, since) in self._since.items():
            self._since[call] = (answer, since + seconds)
