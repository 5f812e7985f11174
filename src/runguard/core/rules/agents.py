"""Rules about agents that work together: hand-offs, delegation, orders and reports that repeat, talk without work."""

import json
import re
from collections import deque
from collections.abc import Sequence
from typing import Final

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
from runguard.core.rules.repetition import Cycle
from runguard.core.rules.rule import Limit, Rule, keep, words_of

_REFUSED: Final = Outcome.REFUSED

# ---- Who passes the work to whom: circles of hand-offs, and delegation that goes ever deeper.

_PATH_SHOWN: Final = 12
_EDGES_KEPT: Final = 256  # so many different edges are no circle
_CHAIN_KEPT: Final = 256


class HandOffCycle(Rule):
    """The same hand-off edge again and again with nothing new between.

    One return to the parent is normal and not seen. A ``patient`` rule leaves out hand-offs between which a tool was
    asked: ``RepeatedDelegation`` counts those.
    """

    name = "handoff"
    sees = (HandOff, ToolResults)
    rests = (ToolResults,)
    _answers = 0  # of tools since a hand-off was made

    def __init__(self, rungs: Rungs, *, patient: bool = False) -> None:
        self.rungs = rungs
        self._patient = patient
        # how often each edge was used, and how many answers there were when it was used last
        self.record: dict[tuple[str, str], tuple[int, int]] = {}
        self._path: deque[str] = deque(maxlen=_PATH_SHOWN)

    def observe(self, event: HandOff | ToolResults) -> Finding | None:
        if isinstance(event, ToolResults):
            if event.progress:
                self.record.clear()
                self._path.clear()
            elif self._patient and self.record:
                self._answers += any(answer.counted and not answer.hands_over for answer in event.answers)
            return None
        if not self._path or self._path[-1] != event.agent:
            self._path.append(event.agent)
        edge = (event.agent, event.target)
        count, answers = self.record.get(edge, (0, self._answers))
        count += answers == self._answers
        self.record[edge] = (count, self._answers)
        path = "→".join(self._path)
        self._path.append(event.target)
        if len(self.record) > _EDGES_KEPT:
            self.record.clear()
        return self.found(count, "equal hand-offs without news", None, "", "↔".join(sorted(edge)), path)


class HandOffRounds(Cycle):
    """Full rounds of a circle of at most ``max_len`` hand-offs with nothing new between.

    Off unless ``cycle_repeats`` is set.
    """

    sees = (HandOff, ToolResults)

    def observe(self, event: HandOff | ToolResults) -> Finding | None:
        if isinstance(event, ToolResults):
            if event.progress:
                self.clear()
            return None
        rounds, agents = self._add((event.agent, event.target), event.agent)
        key, path = "↔".join(sorted(set(agents))), "→".join([*agents, event.target])
        found = self.found(rounds, HANDOFF_ROUNDS, None, "", key, path) if rounds else None
        if found is not None:
            found.evidence = ({"event": "", "pattern": json.dumps(agents)},)
        return found


class ReEntry(Rule):
    """An agent that is entered again inside its own chain of delegations: A→B→A is the first re-entry.

    A chain grows by hand-offs, and by agents that are called as a tool, for a task, or by a Runner inside of a tool:
    the lane of such a call goes on with the chain of its caller. The chain of a lane starts again where a container (a
    loop, a sequence) starts an agent. A container that gets a hand-off and starts an agent before any model is asked
    passes the work on: the chain goes on.
    """

    name = "reentry"
    sees = (HandOff, AgentEntered, ModelCall)
    _around: tuple[str, ...] = ()  # the chain of the caller
    _around_count = 0
    _at = ""  # the agent at work
    _handed = False  # a hand-off was made, and no model was asked since
    _count = 0

    def __init__(self, limit: int) -> None:
        self.rungs = Rungs(stop=limit)
        self._chain: dict[str, None] = {}

    def go_on_from(self, caller: "ReEntry", *, is_call: bool) -> None:
        """Go on with the chain of ``caller``, in whose lane the lane of this rule begins.

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
            self._start_anew()
            if event.branches:  # these have lanes of their own
                self._at = ""
                return None
            return self._enter(event.agent, is_again=event.agent in self._around)
        if event.agent not in self._chain:
            self._start_anew()
            self._add(event.agent)
        self._handed = True
        return self._enter(event.target, is_again=event.target in self._chain or event.target in self._around)

    def _enter(self, agent: str, *, is_again: bool) -> Finding | None:
        self._count += is_again
        found = self._again(self._count, agent) if is_again else None
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
        return self._again(count, event.agent, inside) if is_again else None

    def _again(self, count: int, agent: str, inside: Sequence[str] = ()) -> Finding | None:
        chain = [*self._around, *self._chain, *inside]
        return self.found(count, "re-entries", None, "", agent, "→".join([*chain[-_PATH_SHOWN:], agent]))

    def _start_anew(self) -> None:
        """Begin a chain, unless a hand-off goes on with this one."""
        if not self._handed:
            self._chain.clear()
            self._count = self._around_count

    def _add(self, agent: str) -> None:
        self._chain[agent] = None
        if len(self._chain) > _CHAIN_KEPT:
            del self._chain[next(iter(self._chain))]


class Depth(Limit):
    """Delegations made by a model, one inside the other. Containers do not count.

    The callee is refused and the caller goes on. A task cannot be refused like that, because its caller would wait
    for ever: it stops.
    """

    name = "depth"
    sees = (AgentEntered, ToolCall)
    rests = (ToolCall,)
    record = ()

    def observe(self, event: AgentEntered | ToolCall) -> Finding | None:
        if event.depth <= self.limit:
            return None
        about = (event.depth, self.limit, "nested delegations")
        key, tool = f"{event.agent}:{event.depth}", event.tool if isinstance(event, ToolCall) else ""
        if isinstance(event, AgentEntered) and event.is_task:
            return Finding(self.name, Action.STOP, *about, "lane", tool, key, f"agent {event.agent}")
        return Finding(self.name, Action.BLOCK, *about, "call", tool, key, f"from {event.agent}")


# ---- RepeatedDelegation that are given again and again: a worker repeats its calls and gets the same answers.

_AGENTS_KEPT: Final = 64
_PAIRS_KEPT: Final = 512
_READ: Final = 4_096  # characters of a text that are looked at
_VOCABULARY: Final = 1_024
_NUMBER: Final = re.compile(r"\d+")
_ITEM: Final = 1 / 3  # of a round: an order for the next item of a list is probably healthy
_NEW_WORDS: Final = 4  # fewer are another way to say the same
_NEW_SHARE: Final = 3  # a text brings another subject when one word in this many is new


class Vocabulary:
    """The words that orders and reports have used, and their texts without numbers.

    Other words for one order soon repeat each other; other items do not.
    """

    __slots__ = ("_texts", "_words")

    def __init__(self) -> None:
        self._words: set[str] = set()
        self._texts: dict[int, int] = {}  # hash without numbers -> hash of the last such text

    def learn(self, text: str) -> bool:
        """Remember the words of a text. Return whether the text is about something else than those before it."""
        words = words_of(text[:_READ])
        new = len(words - self._words)
        is_first = not self._words
        if len(self._words) > _VOCABULARY:
            self._words.clear()
        self._words |= words
        return not is_first and new >= _NEW_WORDS and _NEW_SHARE * new >= len(words)

    def is_next_item(self, text: str) -> bool:
        """Return whether the text equals an earlier one but for its numbers, and remember it.

        The same words with another number are an order for the next item of a list.
        """
        text = text[:_READ]
        template, whole = hash(_NUMBER.sub("", text)), hash(text)
        before = self._texts.get(template, whole)
        keep(self._texts, template, whole, _AGENTS_KEPT)
        return before != whole


class _Worker:
    """How often an agent was set to work, and in how many of these rounds it did nothing new."""

    entered = 0
    rounds: float = 0  # that repeated an earlier one, since the last news in the run
    calls = 0  # model calls of its own
    calls_of_others = -1  # model calls of other agents before the last round
    counted = 0  # value of ``entered`` in the last round
    lane = ""  # of the last round
    supervisor_turn = -1  # in which the last round was ordered


class RepeatedDelegation(Rule):
    """Counts rounds in which a worker repeats itself, over all lanes of a run.

    The supervisor's words are new each time, so no single lane shows a repetition. A new answer anywhere in the run
    starts anew. A round for the next item of a list counts a third.

    The nudge goes to the agent that gives the orders: with the worker's report, or with the next request of another
    agent. Workers that one response sets to work at once are one round. Nothing is kept until an agent is set to work
    for the second time.
    """

    name = "no_news"
    sees = (AgentEntered, ModelCall, ModelResult, ToolResults)
    rests = (ModelCall, ModelResult, ToolResults)
    _calls = 0  # model calls of all agents
    _counting = False  # some worker has a round without news
    _is_next_item = False  # whether the last text was an order for the next item
    _due: tuple[str, str, int] | None = None  # worker, lane, rounds: what the supervisor should read

    def __init__(self, rungs: Rungs) -> None:
        self.rungs = rungs
        self._workers: dict[str, _Worker] = {}
        self.record: list[str] = []  # the first agent that was set to work for the second time
        # agent, call and answer -> the activation that saw it last
        self._known: dict[tuple[str, bytes, int], int] = {}
        self._delegates: dict[str, None] = {}  # tools that are agents
        self._turns: dict[str, int] = {}  # lane -> model calls in it
        self._vocabulary = Vocabulary()

    def observe(self, event: AgentEntered | ModelCall | ModelResult | ToolResults) -> Finding | None:
        if isinstance(event, AgentEntered):
            if not event.branches:
                self._enter(event)
            return None
        if not self.record:
            return None
        if isinstance(event, ToolResults):
            return self._look_at(event)
        if isinstance(event, ModelCall):
            keep(self._turns, event.lane, self._turns.get(event.lane, 0) + 1, _AGENTS_KEPT)
            self._calls += 1
            if (speaker := self._workers.get(event.agent)) is not None:
                speaker.calls += 1
            return self._tell(event)
        if self._counting:
            if event.text:
                event.new_subject = self._vocabulary.learn(event.text)
                event.new_item = self._is_order(event.agent) and self._vocabulary.is_next_item(event.text)
            self._is_next_item = event.new_item or (self._is_next_item and not self._is_order(event.agent))
            if event.new_subject:
                self._start_anew()
        return None

    def _enter(self, event: AgentEntered) -> None:
        worker = self._workers.get(event.agent)
        if worker is not None and not self.record:
            self.record.append(event.agent)
        keep(self._workers, event.agent, worker or _Worker(), _AGENTS_KEPT).entered += 1
        tool, is_call, _ = event.lane.rpartition("/")[2].partition("@")
        if is_call:
            keep(self._delegates, tool, None, _AGENTS_KEPT)
        elif self._due is not None and self._due[:2] == (event.agent, event.lane):
            self._due = ("", *self._due[1:])  # no other agent has spoken since, so the worker itself gets the nudge

    def _look_at(self, event: ToolResults) -> Finding | None:
        repeated: Answer | None = None
        worker = self._workers.get(event.agent)
        activation = worker.entered if worker is not None else 0
        for a in event.answers:
            if a.outcome is _REFUSED:
                continue
            if a.tool in self._delegates:
                if self._counting:
                    self._read_order(event, a)
            elif a.counted and not a.hands_over:
                pair = (event.agent, a.call, a.answer)
                before = self._known.get(pair)
                if before is None:
                    if a.outcome not in FAILURES:
                        self._start_anew()
                elif before != activation:
                    repeated = a
                keep(self._known, pair, activation, _PAIRS_KEPT)
        if (found := self._reported(event)) is not None or repeated is None or worker is None:
            return found
        return self._count(event, repeated, worker)

    def _is_order(self, agent: str) -> bool:
        """Return whether the words of an agent are orders: those of a worker that repeats itself are reports."""
        worker = self._workers.get(agent)
        return worker is None or not worker.rounds

    def _read_order(self, event: ToolResults, report: Answer) -> None:
        if not event.is_understood:
            order = answer_text(report.args)[: _READ // 2]
            words = f"{order} {answer_text(report.value)[: _READ // 2]}"
            event.new_subject = self._vocabulary.learn(words) or event.new_subject
            event.new_item = self._vocabulary.is_next_item(order) or event.new_item
        if event.new_subject:
            self._start_anew()
        elif event.new_item:
            for worker in self._workers.values():
                if worker.rounds and _is_below(worker.lane, event, report):
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
        if reached[0] is not Action.STOP:
            self._due = (event.agent, event.lane, int(worker.rounds))
            return None
        return self.found(int(worker.rounds), ORDERS, event, repeated.tool, detail=f"agent {event.agent}")

    def _reported(self, event: ToolResults) -> Finding | None:
        """Return the nudge if these are the answers that the supervisor waits for."""
        for a in event.answers if self._due is not None else ():
            if a.tool in self._delegates and self._due is not None and _is_below(self._due[1], event, a):
                return self._nudge(a.tool, self._due[2])
        return None

    def _tell(self, event: ModelCall) -> Finding | None:
        """Return the nudge if another agent of the same lane is about to give the next order."""
        if self._due is None or self._due[0] == event.agent or self._due[1] != event.lane:
            return None
        return self._nudge(self._due[0] or event.agent, self._due[2])

    def _nudge(self, worker: str, rounds: int) -> Finding | None:
        self._due = None
        return self.found(rounds, ORDERS, None, worker, f"{ORDERS}: {worker}")

    def _start_anew(self) -> None:
        if self._counting:
            self._counting, self._due = False, None
            for worker in self._workers.values():
                worker.rounds = 0


def _is_below(lane: str, event: ToolResults, answer: Answer) -> bool:
    """Return whether a lane is that of the agent whose call has this answer, or is inside of it."""
    return f"{lane}/".startswith(f"{event.lane}/{answer.tool}@{answer.id}/")


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


class RepeatedReports(Rule):
    """Counts reports of one worker that bring at most one new word, on orders that bring none.

    Nothing but words shows such a loop. Healthy work through words brings new ones: another item, another draft. A
    report with four new words makes up for three of them, and one with two new words starts the other workers anew:
    they may judge a draft that changes. Another subject, another number, a word that is new in both the order and the
    report, and a step by any tool start anew. RepeatedDelegation of one response are one round.
    """

    name = "no_news"
    sees = (AgentEntered, ToolResults)
    rests = (ToolResults,)

    def __init__(self, rungs: Rungs) -> None:
        self.rungs = rungs
        self.record = self._workers = dict[str, _Reporter]()  # by the tool that calls it

    def observe(self, event: AgentEntered | ToolResults) -> Finding | None:
        if isinstance(event, AgentEntered):
            tool, is_call, _ = event.lane.rpartition("/")[2].partition("@")
            if is_call:
                keep(self._workers, tool, self._workers.get(tool) or _Reporter(), _WORKERS_KEPT)
            return None
        if not self._workers:
            return None
        reports: list[Answer] = []
        for a in event.answers:
            if a.tool in self._workers:
                reports.append(a)
            elif a.outcome is not _REFUSED and not a.is_note:
                self._start_anew()
                return None
        return self._look_at(event, reports) if reports else None

    def _look_at(self, event: ToolResults, reports: list[Answer]) -> Finding | None:
        last = reports[-1]
        if last.outcome is _REFUSED or len({a.tool for a in reports}) > 1:
            return None
        worker = self._workers[last.tool]
        if not event.is_understood:
            order: set[str] = set()
            report: set[str] = set()
            for a in reports[:_WORKERS_KEPT]:
                order |= words_of(answer_text(a.args)[:_READ])
                report |= words_of(answer_text(a.value)[:_READ])
            event.words = worker.compare(order, report)
        if event.words == SAME:
            worker.count += 1
            return self.found(worker.count, TOLD_AGAIN, event, last.tool, f"{TOLD_AGAIN}: {last.tool}")
        if event.words:
            left = {EDITED: worker.count, NEW: max(worker.count - _NEWS_WORTH, 0)}.get(event.words, 0)
            self._start_anew()
            worker.count = left
        return None

    def _start_anew(self) -> None:
        for worker in self._workers.values():
            worker.count = 0


def _joined(known: set[str], words: set[str]) -> set[str]:
    """Return all words, or only the newer ones where they become too many."""
    return known | words if len(known) <= _VOCABULARY else words


# ---- Agents that talk and do nothing: final texts in a row without a tool call or a change of state.

_WATCH: Final = "\0"  # stands for no agent, so that the next step is looked at: it shows that the agent uses tools
_ROWS: Final = 3  # rows of texts that ended with a step: fewer show no habit
_TIMES_LONGER: Final = 2


class TextOnly(Rule):
    """Counts final texts of agents that have spoken before, in one lane.

    The first text of each agent is free: a chain of many agents is not a talk. To a ``patient`` rule a text about
    something else is a step.

    ``after_work`` are earlier limits for a row of texts, the first one counted, by those who have worked with tools:
    one agent, or a team that has so far acted after every few texts.

    An agent inside of a loop that has its own limit of rounds is not counted: that limit is what the developer wants. A
    stop is for the next model call, so a talk that has ended is not stopped.
    """

    name = "talk"
    sees = (AgentEntered, ModelCall, ModelResult, StateChanged, ToolResults)
    rests = (ModelCall, ModelResult, ToolResults)
    _count = 0
    _is_bounded = False  # the agent at work is in a loop with a limit
    _row = 0  # texts since the last step, or since one about something else
    _speaker = ""  # of all texts of the row; "" when there are several
    _rows = 0  # rows of texts that ended with a step
    _longest = 0  # of them

    def __init__(self, rungs: Rungs, *, patient: bool = False, after_work: Rungs | None = None) -> None:
        self.rungs = rungs
        self._patient, self._after_work = patient, after_work or Rungs()
        self.record: dict[str, None] = {_WATCH: None}  # agents that have spoken since something was done
        self._changes: dict[int, None] = {}  # values that were stored: an old one is not a step
        self._vocabulary = Vocabulary()
        self._worked: dict[str, None] = {}  # agents that have used tools

    def observe(self, event: AgentEntered | ModelCall | ModelResult | StateChanged | ToolResults) -> Finding | None:
        if isinstance(event, ToolResults):
            if self.record and any(a.outcome is not _REFUSED and not a.is_note for a in event.answers):
                self._note_work(event.agent)
        elif isinstance(event, ModelResult):
            if event.text_id and not self._is_bounded:
                self._hear(event)
        elif isinstance(event, ModelCall):
            return self._before_the_next(event) if self._row else None
        elif isinstance(event, AgentEntered):
            if not event.branches:
                self._is_bounded = event.is_bounded
                if event.agent not in self._worked:
                    self.record[_WATCH] = None
        elif event.value not in self._changes:
            keep(self._changes, event.value, None, _AGENTS_KEPT)
            self._start_anew()
        return None

    def _hear(self, event: ModelResult) -> None:
        self._row += 1
        self._speaker = event.agent if self._row == 1 or self._speaker == event.agent else ""
        if event.agent not in self.record:
            keep(self.record, event.agent, None, _AGENTS_KEPT)
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
            keep(self._worked, agent, None, _AGENTS_KEPT)
        if self._row:
            self._rows += 1
            self._longest = max(self._longest, self._row)
        self._start_anew()

    def _start_anew(self) -> None:
        self._count = self._row = 0
        self.record.clear()

    def _before_the_next(self, event: ModelCall) -> Finding | None:
        if event.after_answer or self._is_bounded:
            return None
        talk, idle = self.rungs.at(self._count), self._after_work.at(self._row if self._is_idle() else 0)
        is_idle = idle is not None and (talk is None or idle[0] > talk[0])
        reached = idle if is_idle else talk
        key = event.agent if reached is not None and reached[0] is Action.STOP else "talk"
        about = (None, "", key, f"agent {event.agent}")
        if is_idle:
            return self.found(self._row, IDLE, *about, self._after_work)
        return self.found(self._count, "texts in a row without a step", *about)

    def _is_idle(self) -> bool:
        """Return whether those who have worked only talk. The texts of others may be their work."""
        is_new_habit = self._rows >= _ROWS and self._row >= _TIMES_LONGER * self._longest
        return self._speaker in self._worked or is_new_habit
