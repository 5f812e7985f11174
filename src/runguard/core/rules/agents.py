"""Orders that are given again and again: a worker is set to work anew, makes the calls that it made before, and gets
the answers that it got before. The supervisor's words are new each time, so no single lane shows a repetition.
"""

import re
from collections import OrderedDict
from typing import ClassVar, Final, TypeVar

from runguard.core.decision import ORDERS, Action, Finding, Rungs
from runguard.core.detectors.evidence import evidence_of
from runguard.core.events import FAILURES, AgentEntered, Answer, ModelCall, ModelResult, Outcome, ToolResults
from runguard.core.fingerprint import answer_text

_AGENTS_KEPT: Final = 64
_PAIRS_KEPT: Final = 512
_WORD: Final = re.compile(r"[^\W_]+")
_READ: Final = 4_096  # characters of a text that are looked at
_VOCABULARY: Final = 1_024
_NUMBER: Final = re.compile(r"\d+")
_ITEM: Final = 1 / 3  # of a round: an order for the next item of a list is probably healthy
_NEW_WORDS: Final = 4  # fewer are another way to say the same
_NEW_SHARE: Final = 3  # one word in so many is new where a text brings another subject


class Vocabulary:
    """The words that orders and reports have used. Other words for one order soon repeat each other; other items do
    not.
    """

    __slots__ = ("_words",)

    def __init__(self) -> None:
        self._words: set[str] = set()

    def learn(self, text: str) -> bool:
        """Remember the words of a text. Returns whether the text is about something else than those before it."""
        words = set(_WORD.findall(text[:_READ].lower()))
        new = len(words - self._words)
        is_first = not self._words
        if len(self._words) > _VOCABULARY:
            self._words.clear()
        self._words |= words
        return not is_first and new >= _NEW_WORDS and _NEW_SHARE * new >= len(words)


class Templates:
    """Texts without their numbers. The same words with another number are an order for the next item of a list."""

    __slots__ = ("_texts",)

    def __init__(self) -> None:
        self._texts: OrderedDict[int, int] = OrderedDict()  # hash without numbers -> hash of the last such text

    def is_next_item(self, text: str) -> bool:
        text = text[:_READ]
        template, whole = hash(_NUMBER.sub("", text)), hash(text)
        before = self._texts.get(template)
        _put(self._texts, template, whole)
        return before is not None and before != whole


class _Worker:
    """How often an agent was set to work, and in how many of these rounds it did nothing new."""

    __slots__ = ("calls", "calls_of_others", "counted", "entered", "lane", "rounds", "supervisor_turn")

    def __init__(self) -> None:
        self.entered = 0
        self.rounds: float = 0  # that repeated an earlier one, since the last news in the run
        self.calls = 0  # model calls of its own
        self.calls_of_others = -1  # model calls of other agents before the last round
        self.counted = 0  # value of ``entered`` in the last round
        self.lane = ""  # of the last round
        self.supervisor_turn = -1  # in which the last round was ordered


class Orders:
    """Counts rounds in which a worker repeats itself, over all lanes of a run. A new answer anywhere in the run starts
    anew. A round for the next item of a list counts a third.

    The nudge goes to the agent that gives the orders: with the worker's report, or with the next request of another
    agent. Workers that one response sets to work at once are one round. Nothing is kept until an agent is set to work
    for the second time.
    """

    sees: ClassVar[tuple[type, ...]] = (AgentEntered, ModelCall, ModelResult, ToolResults)
    rests: ClassVar[tuple[type, ...]] = (ModelCall, ModelResult, ToolResults)
    __slots__ = (
        "_calls",
        "_counting",
        "_delegates",
        "_due",
        "_is_next_item",
        "_known",
        "_templates",
        "_turns",
        "_vocabulary",
        "_workers",
        "record",
        "rungs",
    )

    def __init__(self, rungs: Rungs) -> None:
        self.rungs = rungs
        self._workers: OrderedDict[str, _Worker] = OrderedDict()
        self.record: list[str] = []  # the first agent that was set to work for the second time
        self._known: _Known = OrderedDict()  # agent, call and answer -> the activation that saw it last
        self._delegates: OrderedDict[str, None] = OrderedDict()  # tools that are agents
        self._turns: OrderedDict[str, int] = OrderedDict()  # lane -> model calls in it
        self._calls = 0  # model calls of all agents
        self._counting = False  # some worker has a round without news
        self._vocabulary = Vocabulary()
        self._templates = Templates()
        self._is_next_item = False  # what was said last
        self._due: tuple[str, str, int] | None = None  # worker, lane, rounds: what the supervisor should read

    def observe(self, event: AgentEntered | ModelCall | ModelResult | ToolResults) -> Finding | None:
        if type(event) is AgentEntered:
            if not event.branches:
                self._enter(event)
            return None
        if not self.record:
            return None
        if type(event) is ToolResults:
            return self._look_at(event)
        if type(event) is ModelCall:
            _put(self._turns, event.lane, self._turns.get(event.lane, 0) + 1)
            self._calls += 1
            if (speaker := self._workers.get(event.agent)) is not None:
                speaker.calls += 1
            return self._tell(event) if self._due is not None else None
        if self._counting and isinstance(event, ModelResult):
            if event.text:
                event.new_subject = self._vocabulary.learn(event.text)
                event.new_item = self._is_order(event.agent) and self._templates.is_next_item(event.text)
            self._is_next_item = event.new_item or (self._is_next_item and not self._is_order(event.agent))
            if event.new_subject:
                self._start_anew()
        return None

    def _enter(self, event: AgentEntered) -> None:
        worker = self._workers.get(event.agent)
        if worker is None:
            worker = _Worker()
        elif not self.record:
            self.record.append(event.agent)
        _put(self._workers, event.agent, worker)
        worker.entered += 1
        opened_by = event.lane.rpartition("/")[2]
        if "@" in opened_by:
            _put(self._delegates, opened_by.partition("@")[0], None)
        elif self._due is not None and self._due[0] == event.agent and self._due[1] == event.lane:
            self._due = ("", *self._due[1:])  # no other agent has spoken since: the worker itself reads it

    def _look_at(self, event: ToolResults) -> Finding | None:
        repeated: Answer | None = None
        known = self._known
        worker = self._workers.get(event.agent)
        activation = worker.entered if worker is not None else 0
        for a in event.answers:
            if a.outcome is Outcome.REFUSED:
                continue
            if a.tool in self._delegates:
                if self._counting:
                    self._read_order(event, a)
            elif a.counted and not a.hands_over:
                pair = (event.agent, a.call, a.answer)
                before = known.get(pair)
                if before is None:
                    if a.outcome not in FAILURES:
                        self._start_anew()
                elif before != activation:
                    repeated = a
                _put(known, pair, activation, _PAIRS_KEPT)
        if self._due is not None and (found := self._reported(event)) is not None:
            return found
        return None if repeated is None or worker is None else self._count(event, repeated, worker)

    def _is_order(self, agent: str) -> bool:
        """Whether the words of an agent are orders: those of a worker that repeats itself are reports."""
        worker = self._workers.get(agent)
        return worker is None or not worker.rounds

    def _read_order(self, event: ToolResults, report: Answer) -> None:
        if not event.is_understood:
            order = answer_text(report.args)[: _READ // 2]
            words = f"{order} {answer_text(report.value)[: _READ // 2]}"
            event.new_subject = self._vocabulary.learn(words) or event.new_subject
            event.new_item = self._templates.is_next_item(order) or event.new_item
        if event.new_subject:
            self._start_anew()
        elif event.new_item:
            below = f"{event.lane}/{report.tool}@{report.id}"
            for worker in self._workers.values():
                if worker.rounds and (worker.lane == below or worker.lane.startswith(f"{below}/")):
                    worker.rounds -= 1 - _ITEM
                    if self.rungs.at(worker.rounds) is None:
                        self._due = None

    def _count(self, event: ToolResults, repeated: Answer, worker: _Worker) -> Finding | None:
        if worker.counted == worker.entered:
            return None
        turn = self._turns.get(event.lane.rpartition("/")[0], 0) if event.lane else -1
        if worker.lane != event.lane and worker.supervisor_turn == turn and worker.rounds:
            return None  # set to work at once with others
        worker.counted, worker.lane, worker.supervisor_turn = worker.entered, event.lane, turn
        others, before = self._calls - worker.calls, worker.calls_of_others
        worker.calls_of_others = others
        if others == before:
            return None  # a loop set it to work, and no agent gave an order: its own texts may be its work
        worker.rounds += _ITEM if self._is_next_item else 1
        self._counting = True
        reached = self.rungs.at(worker.rounds)
        if reached is None:
            return None
        action, limit = reached
        if action is not Action.STOP:
            self._due = (event.agent, event.lane, int(worker.rounds))
            return None
        about = f"agent {event.agent}"
        evidence = evidence_of(event)
        return Finding(
            "no_news", action, int(worker.rounds), limit, ORDERS, tool=repeated.tool, detail=about, evidence=evidence
        )

    def _reported(self, event: ToolResults) -> Finding | None:
        """The nudge, where these are the answers that the supervisor waits for."""
        assert self._due is not None
        lane = self._due[1]
        for a in event.answers:
            below = f"{event.lane}/{a.tool}@{a.id}"
            if a.tool in self._delegates and (lane == below or lane.startswith(f"{below}/")):
                return self._nudge(a.tool)
        return None

    def _tell(self, event: ModelCall) -> Finding | None:
        """The nudge, where another agent of the same lane is about to give the next order."""
        assert self._due is not None
        worker, lane, _ = self._due
        return self._nudge(worker or event.agent) if lane == event.lane and worker != event.agent else None

    def _nudge(self, worker: str) -> Finding | None:
        assert self._due is not None
        (_, _, rounds), self._due = self._due, None
        action, limit = self.rungs.at(rounds) or (Action.NUDGE, rounds)
        return Finding("no_news", action, rounds, limit, ORDERS, tool=worker, key=f"{ORDERS}: {worker}")

    def _start_anew(self) -> None:
        if self._counting:
            self._counting, self._due = False, None
            for worker in self._workers.values():
                worker.rounds = 0


_Known = OrderedDict[tuple[str, bytes, int], int]
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def _put(kept: OrderedDict[_Key, _Value], key: _Key, value: _Value, most: int = _AGENTS_KEPT) -> None:
    """Set an entry and make it the newest; the oldest goes when there are too many."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)
