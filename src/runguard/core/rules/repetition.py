"""Rules about repetition: the same call again, cycles, nearly equal calls, answers without news, polling."""

import json
import re
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, Final

from runguard.core.decision import (
    LOOK_ALIKE,
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
from runguard.core.identity import answer_text, read_as
from runguard.core.outcomes import only_text
from runguard.core.rules.rule import WORD, Rule, keep, words_of, worse

Pair = tuple[bytes, int]  # a call and the name of its answer
_REFUSED: Final = Outcome.REFUSED  # bound once: a lookup on the enum costs as much as the rest of a line
_READ: Final = 16_384  # characters of a text that are looked at

# ---- The same call again: with the same answer, or with ever new ones.

# One observation is one model response with all its calls; equal calls within it count once. RunGuard's own refusal is
# an attempt (it counts) but never an answer (it is no progress). Tools declared as polling or paging are left out.

_PAGE_WORDS: Final = 20  # an answer with fewer different words is a state, not a page
_NONE_OPEN: Final[tuple[str, str, frozenset[bytes | str]]] = ("", "", frozenset())
_EQUAL: Final = "identical calls and answers"


class Repetition(Rule):
    """The same call (or batch of calls) with the same answer, in a row, by one agent.

    Nudge N rides on the Nth answer, block N refuses the Nth call, stop N ends at the Nth attempt: after a block the
    next identical attempt stops. A call that gets no answer at all and is made again stops at N, too.
    """

    name = "repetition"
    sees = (AgentEntered, ToolCall, ToolResults)
    _agent = _batch = ""
    _pairs: frozenset[Pair] = frozenset()
    _calls: frozenset[bytes] = frozenset()
    _count = 0
    _unanswered = _NONE_OPEN  # agent, response and calls that have no answer yet
    _silent = 0  # responses in a row that made the same unanswered call

    def __init__(self, rungs: Rungs) -> None:
        self.rungs = rungs

    def observe(self, event: AgentEntered | ToolCall | ToolResults) -> Finding | None:
        if isinstance(event, ToolCall):
            found = self._attempt(event) if event.call in self._calls else None
            return found or self._ask_again(event)
        if isinstance(event, AgentEntered):
            # a new activation may ask once more what the last one asked; circles of them are NoNewAnswers' business
            if not event.branches:  # an agent that starts branches has nothing new
                self._count, self._pairs, self._calls, self._unanswered = 0, frozenset(), frozenset(), _NONE_OPEN
            return None
        self._unanswered = _NONE_OPEN
        pairs, calls = event.pairs, event.calls
        if not pairs:
            return None  # nothing that counts, or refusals only: those were counted when the calls were made
        same_batch = bool(event.batch) and event.batch == self._batch
        if same_batch:  # the rest of a batch whose answers came one by one
            pairs, calls = pairs | self._pairs, calls | self._calls
        if pairs == self._pairs and event.agent == self._agent:
            self._count += not same_batch
        else:
            self._pairs, self._calls, self._count = pairs, calls, 1
        self._batch, self._agent = event.batch, event.agent
        reached = self.rungs.at(self._count) if self._count >= self.rungs.lowest else None
        if reached is None or reached[0] is Action.BLOCK:
            return None  # a block waits for the next call
        first = next(a for a in event.answers if a.counted)
        return self.found(self._count, _EQUAL, event, first.tool, first.call.hex())

    def _attempt(self, event: ToolCall) -> Finding | None:
        block = self.rungs.block
        if block is None or event.agent != self._agent or self._count + 1 < block:
            return None
        if event.batch != self._batch or not event.batch:
            self._count += 1
            self._batch = event.batch
        return self.refused(self._count, block, _EQUAL, event, event.call.hex())

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
        return self.found(self._silent, "equal calls without an answer", None, event.tool, event.call.hex())

    def take_back(self, event: ToolCall) -> None:
        """Do not count a call that waits for an approval: its answer is still to come."""
        if event.batch == self._unanswered[1]:
            self._silent = max(self._silent - 1, 0)


class SameCall(Rule):
    """The same call over and over although its answers differ: busy waiting, or a clock in the answer.

    In a long row the words are looked at: an answer that shares less than half of them with the one before is
    another page. Where ``wandering`` is given, a row of one call, or of a few calls in turn, is also judged by what its
    answers say: the same words each time, and numbers that do not move one way.
    """

    name = "same_call"
    sees = (ToolResults,)
    _batch = ""
    _calls: frozenset[bytes] = frozenset()
    _count = 0
    _words: frozenset[str] = frozenset()  # of the last answer that was looked at
    _wandered = 0  # answers in a row to the calls made last that said nothing new

    def __init__(self, rungs: Rungs, *, look_from: float | None = None, wandering: Rungs | None = None) -> None:
        """Take the limits of a row of equal calls and of answers that say the same.

        ``look_from``: how long a row must be before words are looked at. A journal is kept for other rungs too, so it
        wants to know early. ``wandering``: limits for answers that differ in their numbers alone; its rung ``block``
        stops a call with a long argument.
        """
        self.rungs = rungs
        self._matters_from = rungs.lowest / 2
        self._look_from = look_from or self._matters_from
        self._wandering = wandering
        self._said: dict[frozenset[bytes], _Said | None] = {}  # the calls made last; None: made once

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
        wandered: Finding | None = None
        if self._wandering is not None:
            if calls not in self._said:
                self._wandered = 0
                keep(self._said, calls, None, _IN_TURN)
            elif event.news:
                wandered = self._listen(event, self._wandering)
        if self._count < self.rungs.lowest:
            return wandered
        answer = event.answers[0]
        found = self.found(self._count, "identical calls in a row", event, answer.tool, answer.call.hex())
        return worse(found, wandered)

    def _is_another_page(self, event: ToolResults) -> bool:
        if not event.is_understood:
            before, words = self._words, frozenset(WORD.findall(_text_of(event, _READ)))
            self._words = words
            event.another_page = (
                len(words) >= _PAGE_WORDS and bool(before) and 2 * len(words & before) < len(words | before)
            )
        return event.another_page

    def _listen(self, event: ToolResults, limits: Rungs) -> Finding | None:
        """Look at the words and numbers of an answer to one of the calls made last."""
        if not event.is_understood:
            said = self._said[event.calls] = self._said[event.calls] or _Said()
            event.wanders = said.compare(_text_of(event, _LISTENED))
            if event.wanders == WANDERS and any(map(_has_long_argument, event.answers)):
                event.wanders = WANDERS_LONG
        if event.wanders == MOVES:
            return None
        self._wandered = self._wandered + 1 if event.wanders else 0
        # calls made once or twice are not compared yet
        count = self._wandered + 2 * len(self._said)
        if not self._wandered or (self._count <= 1 and self._wandered < 2 * len(self._said)):
            return None
        is_long = event.wanders == WANDERS_LONG and self._count >= count
        limits = Rungs(nudge=limits.nudge, stop=limits.block if is_long else limits.stop)
        tool = event.answers[0].tool
        return self.found(count, WANDERING, event, tool, f"{WANDERING}: {tool}", rungs=limits)


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
        words = frozenset([word for word in WORD.findall(text) if not word[0].isdigit()])
        numbers = [float(number) for number in _NUMBER.findall(text)[:_NUMBERS_KEPT]]
        is_same = words == self._words and len(numbers) == len(self._numbers)
        before, self._numbers, self._words = self._numbers, numbers, words
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
    return " ".join([answer_text(a.value)[:most] for a in event.answers if a.counted and a.outcome is not _REFUSED])


def _has_long_argument(answer: Answer) -> bool:
    args = answer.args
    return type(args) is dict and any(type(given) is str and len(given) >= _LONG for given in args.values())


# ---- Full rounds of a cycle.


class Cycle(Rule):
    """Full rounds of a circle of at most ``max_len`` observations.

    Off unless asked for: ``NoNewAnswers`` sees circles too.
    """

    name = "cycle"
    sees: ClassVar[tuple[type, ...]] = (ToolResults,)

    def __init__(self, rungs: Rungs, max_len: int = 4) -> None:
        self.rungs, self._max_len = rungs, max_len
        self._recent: deque[tuple[object, str]] = deque(maxlen=max_len)  # steps and their names
        self.clear()

    def clear(self) -> None:
        self._recent.clear()
        self._same = [0] * (self._max_len + 1)  # _same[p]: steps in a row equal to the one p before

    def observe(self, event: Any) -> Finding | None:
        if not event.pairs:
            return None
        rounds, pattern = self._add(event.pairs, "+".join(sorted({a.tool for a in event.answers if a.counted})))
        if not rounds:
            return None
        detail = f"of {len(pattern)} calls: {'→'.join(pattern)}" if len(pattern) > 1 else "of one call"
        found = self.found(rounds, "rounds", event, event.answers[0].tool, detail=detail)
        if found is not None:
            found.evidence[0]["pattern"] = json.dumps(pattern)
        return found

    def _add(self, step: object, name: str) -> tuple[int, list[str]]:
        """Return how many rounds end with this step, and the names of one round.

        Where fewer than two rounds end, that is 0 and no names.
        """
        rounds, length = 0, 0
        for period, (earlier, _) in enumerate(reversed(self._recent), 1):
            same = self._same[period] = self._same[period] + 1 if earlier == step else 0
            if same >= period and same // period + 1 > rounds:
                rounds, length = same // period + 1, period
        self._recent.append((step, name))
        return rounds, [name for _, name in self._recent][-length:] if length else []


# ---- Long calls that nearly repeat the one before: a file that is written again and again with another line.

_LONG: Final = 200  # characters: fewer cannot hold forty words
_WORDS: Final = 40
_SAME: Final = 0.9  # share of the words of both calls


class NearEqualCalls(Rule):
    """Counts nearly equal long calls of one tool in a row.

    Their long argument has nearly the same words, and the other arguments are equal. A call of another tool ends the
    row. It nudges and never stops: one query over thirty countries looks the same.
    """

    name = "no_news"
    sees = (ToolResults,)
    _tool = ""
    _count = 0
    _others: frozenset[tuple[str, object]] = frozenset()  # the short arguments of the last call
    _words: frozenset[str] = frozenset()  # of the long argument of the last call
    rungs = Rungs(nudge=6)

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
        if self._count < self.rungs.lowest:
            return None
        return self.found(self._count, NEAR_EQUAL, event, answer.tool, f"{NEAR_EQUAL}: {answer.tool}")

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


class Reworded(Rule):
    """Counts answers to one call, in a row, that say the same in other words.

    Such an answer is not equal to the one before, but brings no new number and hardly a new word. The words of all
    answers in the row are known words. An equal answer, and one that only leaves words out, does not count and does not
    end the row. Programs do not reword their answers, so this is not a wait for a change.
    """

    name = "no_news"
    sees = (ToolResults,)
    _batch = ""
    _call = b""
    _count = 0
    _text = ""  # the first answer of the row, until its words are needed
    _last: AbstractSet[str] = frozenset()  # words of the last answer
    _known: AbstractSet[str] = frozenset()  # words of all answers in the row

    def __init__(self, rungs: Rungs) -> None:
        self.rungs = rungs

    def observe(self, event: ToolResults) -> Finding | None:
        if not event.calls or (event.batch and event.batch == self._batch):
            return None
        self._batch = event.batch
        answer = event.answers[0]
        if len(event.answers) > 1 or answer.outcome is _REFUSED or not answer.is_long:
            self._call, self._count = b"", 0
            return None
        if answer.call != self._call:
            self._call, self._count = answer.call, 0
            self._text, self._last, self._known = only_text(answer.value)[:_READ], frozenset(), frozenset()
            return None
        if not event.news:
            return None
        if not event.is_understood:
            answer.wording = self._compare(answer)
        if answer.wording == FEWER_WORDS:
            return None
        self._count = self._count + 1 if answer.wording == OTHER_WORDS else 0
        return self.found(self._count, REWORDED, event, answer.tool, f"{REWORDED}: {answer.tool}")

    def _compare(self, answer: Answer) -> str:
        """Return how the answer's words relate to those of the answers before it, and add them to the known ones."""
        if self._text:
            self._last = self._known = words_of(self._text)
            self._text = ""
        words, before = words_of(only_text(answer.value)[:_READ]), self._last
        new = words - self._known
        self._last = words
        self._known = words | self._known if len(self._known) <= _MOST else words
        if len(words) < _LEAST or len(new) >= _NEW or not all(map(str.isalpha, new)):
            return ""
        return OTHER_WORDS if len(words - before) - len(new) >= _BACK else FEWER_WORDS


# ---- Long answers that were given before: files, pages and reports that an agent reads again and again.

_NEWS_WORTH: Final = 3  # known answers that one new answer makes up for: edit-test-edit never adds up
_SHRUNK: Final = 0.9  # a request below this share of the one before has lost a part of its history
_AGENTS_KEPT: Final = 64
_PAIRS_KEPT: Final = 256
_NO_NEWS: Final = "answers without news"


class SameLongAnswer(Rule):
    """Counts known long answers, from the second time on. One new answer among many known ones does not reset it.

    A short answer may be a status, and asking for a status again is waiting. A long answer deserves no such patience.
    An agent whose history was compacted has lost what it read, so it may read everything once more.

    Reports as ``no_news``, whose default limits for answers of any length are later.
    """

    name = "no_news"
    sees = (ModelCall, ModelResult, ToolResults)
    rests = (ModelResult,)
    record = ()  # a plain response has no words
    _count = 0
    _batch = ""
    _read: set[Pair] | None = None  # answers given since the last compaction; None: there was none

    def __init__(self, rungs: Rungs) -> None:
        self.rungs = rungs
        self._sizes: dict[str, int] = {}  # agent -> size of its last request

    def observe(self, event: ModelCall | ModelResult | ToolResults) -> Finding | None:
        if isinstance(event, ModelCall):
            # a summary is being made, or the agent's request is much smaller than its last one: it was compacted
            size = event.request_bytes or event.input_tokens
            if event.after_answer or size < _SHRUNK * self._sizes.get(event.agent, 0):
                self._count, self._read = 0, set()
            if len(self._sizes) >= _AGENTS_KEPT and event.agent not in self._sizes:
                self._sizes.clear()  # so many agents of one lane do not work at once
            self._sizes[event.agent] = size
        elif isinstance(event, ModelResult):
            if event.new_subject:
                self._count = 0  # one agent writes something else while another reads what it always reads
        elif event.pairs and not (event.batch and event.batch == self._batch):
            self._batch = event.batch
            if event.news:
                self._count = max(self._count - _NEWS_WORTH, 0)
            elif self._is_known_and_long(event):
                self._count += 1
                return self.found(self._count, _NO_NEWS, event, event.answers[0].tool)
        return None

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
_SAME_PAIRS: Final = Rungs(nudge=12)
_ALIKE: Final = Rungs(nudge=4, stop=20)


class SameAnswers(Rule):
    """Counts answers that were given before, where no other rule sees it.

    - A tool gives a long answer that it gave before, although it was asked something else: a counter, an id, an
      argument that it does not read. Equal short answers are a batch and do not count.
    - One call gives the same long answer again and again, with other work between.
    - A tool gives the same answer in a row to calls that a reader cannot tell apart.
    """

    name = "no_news"
    sees = (ToolResults,)
    _count = 0
    _last: tuple[str, int, bytes, object] = ("", 0, b"", None)  # tool, answer, call and arguments of the last answer
    _alike = 1  # calls in a row that a reader cannot tell apart
    rungs = Rungs(nudge=8)

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], None] = {}  # tools and their long answers
        self._counts: dict[Pair, int] = {}  # long answers of one call

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
            count = keep(self._counts, pair, self._counts.get(pair, 0) + 1, _ANSWERS_KEPT)
            if count >= _SAME_PAIRS.lowest:
                found = found or self._again(count, SAME_PAIR, event, a, _SAME_PAIRS)
            if (a.tool, a.answer) in self._known:
                known = a
            else:
                is_new = True
                keep(self._known, (a.tool, a.answer), None, _ANSWERS_KEPT)
        if is_new:
            self._count = max(self._count - _NEWS_WORTH, 0)
        elif known is not None:
            self._count += 1
            return found or self._again(self._count, SAME_ANSWER, event, known, self.rungs)
        return found

    def _look_alike(self, event: ToolResults, a: Answer, args: object) -> Finding | None:
        """Count an answer that equals the last one, to another call that may read like the last one.

        ``args``: the arguments of the last call.
        """
        if not event.is_understood:
            a.reads_alike = bool(a.args) and bool(args) and read_as(a.args) == read_as(args)
        self._alike = self._alike + 1 if a.reads_alike else 1
        return self._again(self._alike, LOOK_ALIKE, event, a, _ALIKE)

    def _again(self, count: int, unit: str, event: ToolResults, a: Answer, rungs: Rungs) -> Finding | None:
        return self.found(count, unit, event, a.tool, f"{unit}: {a.tool}", rungs=rungs)


class OnlyNotes(Rule):
    """Plans, thoughts and lists of tasks in a row, and nothing is done."""

    name = "no_news"
    sees = (ToolResults,)
    rests = sees
    rungs = Rungs(nudge=12)

    def __init__(self) -> None:
        self.record: Counter[str] = Counter()  # of one row

    def observe(self, event: ToolResults) -> Finding | None:
        if not event.answers:
            return None
        if not all(answer.is_note for answer in event.answers):
            self.record.clear()
            return None
        self.record[ONLY_NOTES] += 1
        tool = event.answers[0].tool
        return self.found(self.record[ONLY_NOTES], ONLY_NOTES, event, tool, f"{ONLY_NOTES}: {tool}")


# ---- Answers and final words that were given before: cycles of any length.

_TEXTS_KEPT: Final = 256
_WAITED: Final = 6  # times given again: five unchanged repeats, and the one that might have found the change
_LONG_CIRCLE: Final = 96


class NoNewAnswers(Rule):
    """Counts answers in a row that were already given at least twice, and so detects cycles of every length.

    A second time is free: an agent that lost its history to a compaction reads everything again, and a waiting agent
    asks again. Final texts count too: a new text is progress, the same text for the same question is not. A
    ``patient`` rule does not stop before every answer was given seven times, so that polling several jobs in turn
    is allowed as long as polling one; a long cycle is stopped all the same.
    """

    name = "no_news"
    sees = (ModelCall, ModelResult, ToolResults)
    rests = (ModelResult, ToolResults)
    _count = 0
    _batch = ""
    _by_words = False  # words were counted last, and no finding was made about them yet
    _is_asked_again = False
    _is_report = False  # a tool has answered since the last words, so the next ones may report on it

    def __init__(self, rungs: Rungs, *, patient: bool = False) -> None:
        self.rungs = rungs
        self._patient = patient
        self._said: dict[int, None] = {}
        self._asked: dict[int, None] = {}
        self._times: dict[Pair, int] = {}  # how often each was given again since the last news
        self.record: list[bool] = []  # True, as soon as something was counted since then

    def observe(self, event: ModelCall | ModelResult | ToolResults) -> Finding | None:
        if isinstance(event, ModelCall):
            if event.asked:
                self._is_asked_again = _is_known(self._asked, event.asked)
            return self._before_the_next(event) if self._by_words else None
        if isinstance(event, ModelResult):
            if event.text_id:
                self._hear(event.text_id)
            return None
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
        found = self.found(self._count, _NO_NEWS, event, event.answers[0].tool)
        return None if self._may_be_waiting(found) and event.pairs else found

    def _may_be_waiting(self, found: Finding | None) -> bool:
        """Return whether a patient rule should not stop yet: an answer in the row was given only a few times.

        A long circle is no waiting.
        """
        is_stop = found is not None and found.action is Action.STOP
        waited = min(self._times.values(), default=0)
        return self._patient and is_stop and self._count < _LONG_CIRCLE and waited < _WAITED

    def _hear(self, words: int) -> None:
        if not _is_known(self._said, words):
            self._start_anew()
        elif self._is_asked_again and not self._is_report:
            self._count += 1
            self._by_words = True
            self.record[:] = (True,)
        self._is_report = False

    def _before_the_next(self, event: ModelCall) -> Finding | None:
        """Judge words at the call that would follow them.

        A run that has said its last words is not stopped any more.
        """
        found = self.found(self._count, _NO_NEWS, None, "", event.agent, f"agent {event.agent}")
        if found is None or found.action is not Action.STOP or (self._times and self._may_be_waiting(found)):
            return None
        return found

    def _is_known_well(self, pairs: frozenset[Pair]) -> bool:
        """Return whether all answers were already repeated, and remember them. Refusals alone are not answers."""
        known = pairs <= self._times.keys()
        if not known and len(self._times) >= _PAIRS_KEPT:
            self._times.clear()  # an agent that reads this many different things is not in a cycle
        self.record[:] = (True,)
        for pair in pairs:
            self._times[pair] = self._times.get(pair, 0) + 1
        return known

    def _start_anew(self) -> None:
        self._count, self._by_words = 0, False
        self._times.clear()
        self.record.clear()


def _is_known(names: dict[int, None], name: int) -> bool:
    """Return whether the name was there before, and remember it."""
    is_known = name in names
    if not is_known:
        keep(names, name, None, _TEXTS_KEPT)
    return is_known


# ---- Declared polling tools: judged by time.

_POLLS_KEPT: Final = 64


class Polling(Rule):
    """A declared polling tool that shows no change: judged by time, never by count."""

    name = "polling"
    sees = (ToolResults,)
    rests = sees
    record = ()  # a plain event has no answer of a polling tool

    def __init__(self, rungs: Rungs, is_polling: Callable[[str], bool]) -> None:
        self.rungs = rungs
        self.is_polling = is_polling
        self._since: dict[bytes, tuple[int, float]] = {}

    def observe(self, event: ToolResults) -> Finding | None:
        worst: Finding | None = None
        for a in event.answers:
            if a.counted or a.outcome is _REFUSED or not self.is_polling(a.tool):
                continue
            answer, since = self._since.get(a.call, (None, 0.0))
            if answer != a.answer:
                keep(self._since, a.call, (a.answer, event.at), _POLLS_KEPT)
                continue
            found = self.found(event.at - since, "seconds unchanged", event, a.tool, a.call.hex())
            worst = worse(worst, found)
        if worst is not None:
            worst.observed = round(worst.observed)
        return worst

    def skip(self, seconds: float) -> None:
        """Do not count the seconds in which the run was paused."""
        for call, (answer, since) in self._since.items():
            self._since[call] = (answer, since + seconds)
