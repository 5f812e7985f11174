"""Rules about agents that work together: hand-offs, delegation, orders and reports that repeat, talk without work.

``engine/runs`` makes the detectors of a run.
"""

import json
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import ClassVar, Final, TypeVar

from runguard.core.decision import HANDOFF_ROUNDS, IDLE, ORDERS, TOLD_AGAIN, Action, Finding, Rungs
from runguard.core.events import (
    FAILURES,
    AgentEntered,
    Answer,
    HandOff,
    ModelCall,
    ModelResult,
    Outcome,
    StateChanged,
    ToolCall,
    ToolResults,
)
from runguard.core.identity import answer_text
from runguard.core.rules.repetition import Rounds, evidence_of, swap

# ---- Who passes the work to whom: circles of hand-offs, and delegation that goes ever deeper.

_PATH_SHOWN: Final = 12
_CHAIN_KEPT: Final = 256


class HandOffCycle:
    """The same hand-off edge again and again with nothing new between.

    One return to the parent is normal and not seen. A ``patient`` detector leaves out hand-offs between which a tool
    was asked: ``Orders`` counts those.
    """

    sees: ClassVar[tuple[type, ...]] = (HandOff, ToolResults)
    rests: ClassVar[tuple[type, ...]] = (ToolResults,)
    __slots__ = ("_answers", "_edges", "_path", "_patient", "_seen", "record", "rungs")

    def __init__(self, rungs: Rungs, *, patient: bool = False) -> None:
        self.rungs, self._patient = rungs, patient
        self._answers = 0  # of tools since a hand-off was made
        self._seen: dict[tuple[str, str], int] = {}  # edge -> answers so far when it was last used
        self.record = self._edges = Counter[tuple[str, str]]()
        self._path: deque[str] = deque(maxlen=_PATH_SHOWN)

    def observe(self, event: HandOff | ToolResults) -> Finding | None:
        if not isinstance(event, HandOff):
            if event.progress and self._edges:
                self._edges.clear()
                self._path.clear()
                self._seen.clear()
            if self._patient and self._edges:
                for answer in event.answers:
                    if answer.counted and not answer.hands_over:
                        self._answers += 1
                        break
            return None
        if not self._path or self._path[-1] != event.agent:
            self._path.append(event.agent)
        edge = (event.agent, event.target)
        self._edges[edge] += self._seen.get(edge, self._answers) == self._answers
        self._seen[edge] = self._answers
        count = self._edges[edge]
        path = "→".join(self._path)
        self._path.append(event.target)
        if len(self._edges) > 256:  # so many different edges are no circle
            self._edges.clear()
            self._seen.clear()
        reached = self.rungs.at(count)
        if reached is None:
            return None
        return Finding(
            "handoff",
            reached[0],
            count,
            reached[1],
            "equal hand-offs without news",
            "lane",
            "",
            "↔".join(sorted((event.agent, event.target))),
            path,
        )


class HandOffRounds:
    """Full rounds of a circle of at most ``max_len`` hand-offs with nothing new between.

    Off unless ``cycle_repeats`` is set.
    """

    sees: ClassVar[tuple[type, ...]] = (HandOff, ToolResults)
    __slots__ = ("_rounds", "rungs")

    def __init__(self, rungs: Rungs, max_len: int = 4) -> None:
        self.rungs, self._rounds = rungs, Rounds(max_len)

    def observe(self, event: HandOff | ToolResults) -> Finding | None:
        if not isinstance(event, HandOff):
            if event.progress:
                self._rounds.clear()
            return None
        rounds, agents = self._rounds.add((event.agent, event.target), event.agent)
        reached = self.rungs.at(rounds)
        if reached is None or rounds < 2:
            return None
        evidence = ({"event": "", "pattern": json.dumps(agents)},)
        key = "↔".join(sorted(set(agents)))
        return Finding(
            "cycle",
            reached[0],
            rounds,
            reached[1],
            HANDOFF_ROUNDS,
            "lane",
            "",
            key,
            "→".join([*agents, event.target]),
            evidence,
        )


class ReEntry:
    """An agent that is entered again inside its own chain of delegations: A→B→A is the first re-entry.

    A chain grows by hand-offs, and by agents that are called as a tool, for a task, or by a Runner inside of a tool:
    the lane of such a call goes on with the chain of its caller. The chain of a lane starts again where a container (a
    loop, a sequence) starts an agent. A container that gets a hand-off and starts an agent before any model is asked
    passes the work on: the chain goes on.
    """

    sees: ClassVar[tuple[type, ...]] = (HandOff, AgentEntered, ModelCall)
    __slots__ = ("_around", "_around_count", "_at", "_chain", "_count", "_handed", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._around: tuple[str, ...] = ()  # the chain of the caller
        self._around_count = 0
        self._chain: dict[str, None] = {}
        self._at = ""  # the agent at work
        self._handed = False  # a hand-off was made, and no model was asked since
        self._count = 0

    def go_on_from(self, caller: "ReEntry", *, is_call: bool) -> None:
        """Go on with the chain of ``caller``, in whose lane the lane of this detector begins.

        ``is_call``: it begins with a call of an agent. Else it is a parallel branch of a container, which goes on with
        the chain only if the work was just handed to it.
        """
        if is_call or caller._handed:
            self._around = (*caller._around, *caller._chain)[-_CHAIN_KEPT:]
            self._around_count = self._count = caller._count

    def observe(self, event: HandOff | AgentEntered | ModelCall) -> Finding | None:
        if isinstance(event, ModelCall):
            self._handed = False
            return None
        if isinstance(event, AgentEntered):
            if event.above:
                return self._look_inside(event)
            if event.agent == self._at:
                return None
            if not self._handed:
                self._start_anew()
            if event.branches:  # these have lanes of their own
                self._at = ""
                return None
            return self._enter(event.agent, is_again=event.agent in self._around)
        if event.agent not in self._chain:
            if not self._handed:
                self._start_anew()
            self._add(event.agent)
        self._handed = True
        return self._enter(event.target, is_again=event.target in self._chain or event.target in self._around)

    def _enter(self, agent: str, *, is_again: bool) -> Finding | None:
        self._count += is_again
        found = self._finding(self._count, agent) if is_again else None
        self._add(agent)
        self._at = agent
        return found

    def _look_inside(self, event: AgentEntered) -> Finding | None:
        """Judge an agent in a Runner that no hook sees. Each of its model calls tells the whole chain anew."""
        count, known, inside = self._count, {*self._around, *self._chain, event.above[0]}, event.above[1:]
        is_again = False
        for agent in (*inside, event.agent):
            is_again = agent in known
            count += is_again
            known.add(agent)
        return self._finding(count, event.agent, inside) if is_again else None

    def _finding(self, count: int, agent: str, inside: Sequence[str] = ()) -> Finding | None:
        if count < self.limit:
            return None
        chain = [*self._around, *self._chain, *inside]
        path = "→".join([*chain[-_PATH_SHOWN:], agent])
        return Finding("reentry", Action.STOP, count, self.limit, "re-entries", "lane", "", agent, path)

    def _start_anew(self) -> None:
        self._chain.clear()
        self._count = self._around_count

    def _add(self, agent: str) -> None:
        self._chain[agent] = None
        if len(self._chain) > _CHAIN_KEPT:
            del self._chain[next(iter(self._chain))]


class Depth:
    """Delegations made by a model, one inside the other. Containers do not count.

    The callee is refused and the caller goes on. A task cannot be refused like that, because its caller would wait
    for ever: it stops.
    """

    sees: ClassVar[tuple[type, ...]] = (AgentEntered, ToolCall)
    rests: ClassVar[tuple[type, ...]] = (ToolCall,)
    record: ClassVar[tuple[()]] = ()
    __slots__ = ("limit",)

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def observe(self, event: AgentEntered | ToolCall) -> Finding | None:
        if event.depth <= self.limit:
            return None
        about = (event.depth, self.limit, "nested delegations")
        key = f"{event.agent}:{event.depth}"
        if isinstance(event, ToolCall):
            return Finding("depth", Action.BLOCK, *about, "call", event.tool, key, f"from {event.agent}")
        if event.is_task:
            return Finding("depth", Action.STOP, *about, "lane", "", key, f"agent {event.agent}")
        return Finding("depth", Action.BLOCK, *about, "call", "", key, f"from {event.agent}")


# ---- Orders that are given again and again: a worker repeats its calls and gets the same answers.

_AGENTS_KEPT: Final = 64
_PAIRS_KEPT: Final = 512
_WORD: Final = re.compile(r"[^\W_]+")
_READ: Final = 4_096  # characters of a text that are looked at
_VOCABULARY: Final = 1_024
_NUMBER: Final = re.compile(r"\d+")
_ITEM: Final = 1 / 3  # of a round: an order for the next item of a list is probably healthy
_NEW_WORDS: Final = 4  # fewer are another way to say the same
_NEW_SHARE: Final = 3  # a text brings another subject when one word in this many is new


class Vocabulary:
    """The words that orders and reports have used.

    Other words for one order soon repeat each other; other items do not.
    """

    __slots__ = ("_words",)

    def __init__(self) -> None:
        self._words: set[str] = set()

    def learn(self, text: str) -> bool:
        """Remember the words of a text. Return whether the text is about something else than those before it."""
        words = _words(text)
        new = len(words - self._words)
        is_first = not self._words
        if len(self._words) > _VOCABULARY:
            self._words.clear()
        self._words |= words
        return not is_first and new >= _NEW_WORDS and _NEW_SHARE * new >= len(words)


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text[:_READ].lower()))


class Templates:
    """Texts without their numbers. The same words with another number are an order for the next item of a list."""

    __slots__ = ("_texts",)

    def __init__(self) -> None:
        self._texts: OrderedDict[int, int] = OrderedDict()  # hash without numbers -> hash of the last such text

    def is_next_item(self, text: str) -> bool:
        """Return whether the text equals an earlier one but for its numbers, and remember it."""
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
    """Counts rounds in which a worker repeats itself, over all lanes of a run.

    The supervisor's words are new each time, so no single lane shows a repetition. A new answer anywhere in the run
    starts anew. A round for the next item of a list counts a third.

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
        # agent, call and answer -> the activation that saw it last
        self._known: OrderedDict[tuple[str, bytes, int], int] = OrderedDict()
        self._delegates: OrderedDict[str, None] = OrderedDict()  # tools that are agents
        self._turns: OrderedDict[str, int] = OrderedDict()  # lane -> model calls in it
        self._calls = 0  # model calls of all agents
        self._counting = False  # some worker has a round without news
        self._vocabulary = Vocabulary()
        self._templates = Templates()
        self._is_next_item = False  # whether the last text was an order for the next item
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
            self._due = ("", *self._due[1:])  # no other agent has spoken since, so the worker itself gets the nudge

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
        """Return whether the words of an agent are orders: those of a worker that repeats itself are reports."""
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
            return None  # the same response set it to work together with others
        worker.counted, worker.lane, worker.supervisor_turn = worker.entered, event.lane, turn
        others, before = self._calls - worker.calls, worker.calls_of_others
        worker.calls_of_others = others
        if others == before:
            return None  # a loop set it to work without an order of an agent: its own texts may be its work
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
        """Return the nudge if these are the answers that the supervisor waits for."""
        assert self._due is not None
        lane = self._due[1]
        for a in event.answers:
            below = f"{event.lane}/{a.tool}@{a.id}"
            if a.tool in self._delegates and (lane == below or lane.startswith(f"{below}/")):
                return self._nudge(a.tool)
        return None

    def _tell(self, event: ModelCall) -> Finding | None:
        """Return the nudge if another agent of the same lane is about to give the next order."""
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


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def _put(kept: OrderedDict[_Key, _Value], key: _Key, value: _Value, most: int = _AGENTS_KEPT) -> None:
    """Set an entry and make it the newest. The oldest one goes when there are more than ``most``."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)


# ---- An agent without tools that gets the same order in other words, and reports the same in other words.

_WORKERS_KEPT: Final = 16
_LEAST: Final = 12  # different words: a shorter report is a label or a verdict
_SAME: Final = 1  # new words in a report that says the same; an edited sentence brings more
_NEW: Final = 4  # new words that make a report new
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
        """Return how this round relates to those before it, and add its words to the known ones.

        ``""``: its words are known, but a new order or a short report proves nothing.
        """
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
    """Counts reports of one worker that bring at most one new word, on orders that bring none.

    Nothing but words shows such a loop. Healthy work through words brings new ones: another item, another draft. A
    report with four new words makes up for three of them, and one with two new words starts the other workers anew:
    they may judge a draft that changes. Another subject, another number, a word that is new in both the order and the
    report, and a step by any tool start anew. Orders of one response are one round.
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
                _put(self._workers, tool, self._workers.get(tool) or _Reporter(), _WORKERS_KEPT)
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
                order |= _words(answer_text(a.args))
                report |= _words(answer_text(a.value))
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


def _joined(known: set[str], words: set[str]) -> set[str]:
    """Return all words, or only the newer ones where they become too many."""
    return known | words if len(known) <= _VOCABULARY else words


# ---- Agents that talk and do nothing: final texts in a row without a tool call or a change of state.


class Talk:
    """Counts final texts of agents that have spoken before, in one lane.

    The first text of each agent is free: a chain of many agents is not a talk. To a ``patient`` detector a text about
    something else is a step.

    ``after_work`` are earlier limits for a row of texts, the first one counted, by those who have worked with tools:
    one agent, or a team that has so far acted after every few texts.

    An agent inside of a loop that has its own limit of rounds is not counted: that limit is what the developer wants. A
    stop is for the next model call, so a talk that has ended is not stopped.
    """

    sees: ClassVar[tuple[type, ...]] = (AgentEntered, ModelCall, ModelResult, StateChanged, ToolResults)
    rests: ClassVar[tuple[type, ...]] = (ModelCall, ModelResult, ToolResults)
    __slots__ = (
        "_after_work",
        "_changes",
        "_count",
        "_is_bounded",
        "_longest",
        "_patient",
        "_row",
        "_rows",
        "_speaker",
        "_spoken",
        "_vocabulary",
        "_worked",
        "record",
        "rungs",
    )

    def __init__(self, rungs: Rungs, *, patient: bool = False, after_work: Rungs | None = None) -> None:
        self.rungs, self._patient, self._after_work = rungs, patient, after_work
        self._count = 0
        self._is_bounded = False  # the agent at work is in a loop with a limit
        self.record = self._spoken = OrderedDict[str, None]()  # agents that have spoken since something was done
        self._changes: OrderedDict[int, None] = OrderedDict()  # values that were stored: an old one is not a step
        self._vocabulary = Vocabulary()
        self._worked: dict[str, None] = {}  # agents that have used tools
        self._spoken[_WATCH] = None
        self._row = 0  # texts since the last step, or since one about something else
        self._speaker = ""  # of all texts of the row; "" when there are several
        self._rows = 0  # rows of texts that ended with a step
        self._longest = 0  # of them

    def observe(self, event: AgentEntered | ModelCall | ModelResult | StateChanged | ToolResults) -> Finding | None:
        if type(event) is ToolResults:
            if self._spoken and _is_step(event):
                self._note_work(event.agent)
        elif type(event) is ModelResult:
            if event.text_id and not self._is_bounded:
                self._hear(event)
        elif type(event) is ModelCall:
            return self._before_the_next(event) if self._row else None
        elif type(event) is AgentEntered:
            if not event.branches:
                self._is_bounded = event.is_bounded
                if event.agent not in self._worked:
                    self._spoken[_WATCH] = None
        elif type(event) is StateChanged and event.value not in self._changes:
            _put(self._changes, event.value, None)
            self._start_anew()
        return None

    def _hear(self, event: ModelResult) -> None:
        self._row += 1
        self._speaker = event.agent if self._row == 1 or self._speaker == event.agent else ""
        if event.agent not in self._spoken:
            _put(self._spoken, event.agent, None)
            if not self._worked:
                return
        else:
            self._count += 1
        if self._patient:
            if event.text:
                event.new_subject = self._vocabulary.learn(event.text) or event.new_subject
            if event.new_subject:
                self._count = self._row = 0

    def _note_work(self, agent: str) -> None:
        if agent not in self._worked:
            self._worked[agent] = None
            if len(self._worked) > _AGENTS_KEPT:
                del self._worked[next(iter(self._worked))]
        if self._row:
            self._rows += 1
            self._longest = max(self._longest, self._row)
        self._start_anew()

    def _start_anew(self) -> None:
        self._count = self._row = 0
        self._spoken.clear()

    def _before_the_next(self, event: ModelCall) -> Finding | None:
        if event.after_answer or self._is_bounded:
            return None
        found, unit = self.rungs.at(self._count), "texts in a row without a step"
        count = self._count
        if self._after_work is not None and (found is None or found[0] is not Action.STOP):
            idle = self._after_work.at(self._idle())
            if idle is not None and (found is None or idle[0] > found[0]):
                found, unit, count = idle, IDLE, self._row
        if found is None:
            return None
        action, limit = found
        key = event.agent if action is Action.STOP else "talk"
        return Finding("talk", action, count, limit, unit, key=key, detail=f"agent {event.agent}")

    def _idle(self) -> int:
        """Return how many texts in a row are too many for those who have worked.

        It is 0 where the texts may be their work.
        """
        if self._speaker in self._worked:
            return self._row
        return self._row if self._rows >= _ROWS and self._row >= _TIMES_LONGER * self._longest else 0


_WATCH: Final = "\0"  # stands for no agent, so that the next step is looked at: it shows that the agent uses tools
_ROWS: Final = 3  # rows of texts that ended with a step: fewer show no habit
_TIMES_LONGER: Final = 2


def _is_step(event: ToolResults) -> bool:
    return any(a.outcome is not Outcome.REFUSED and not a.is_note for a in event.answers)
