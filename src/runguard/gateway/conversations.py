"""Which run and which lane a request belongs to, read from its transcript.

Each request to a model carries the history of its conversation, and nothing tells where one run ends and the next one
begins. ``Conversations`` finds out:

- A request that answers tool calls goes on with the strand that waits for them. It is known by the beginning of the
  transcript and by the calls: their ids, or else their tools and arguments. Some models give the same ids in every
  conversation, others none.
- A request that ends with the user's word, in a conversation that has had an answer, is the next turn: a new run.
- Other requests of the same session are lanes of its run: titles, summaries, sub-agents. A client names its session in
  a header. Without one, each conversation is a session of its own.
- What the transcript tells and this process has not seen happened on another worker of the store: it is replayed.
"""

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final

from runguard.calls.model_calls import ModelRequest, Permission, Reply
from runguard.calls.run import AgentRun, asked_of
from runguard.calls.tool_calls import ToolUse
from runguard.core.events import Outcome, RunInfo
from runguard.core.identity import LruDict, call_fingerprint, digest, size_of
from runguard.engine.guard import Guard
from runguard.gateway.formats import AnswerReader, Body, WireFormat
from runguard.ledger.ledger import StoreError, StoreOutage
from runguard.providers.messages import Reading, Round

IDLE_S: Final = 1_800.0  # a tool may work for a long time
_MOST: Final = 10_000  # conversations kept
_MOST_STRANDS: Final = 64  # of one conversation
_MOST_TWINS: Final = 256  # strands with the same beginning
_CALLS_KEPT: Final = 50_000
_NAME_WAITS_S: Final = (0.02, 0.08)  # the worker that gave the last answer may be writing the name of the run
_ROUNDS_KEPT: Final = 512  # of one strand
_ARGUMENTS_KEPT: Final = 65_536  # bytes of a call that waits for its tool


@dataclass(frozen=True, slots=True)
class Payer:
    """Whose budgets a request is for. Never read from what a client's text says."""

    app: str
    user: str
    session: str = ""  # of a program that was started with a session of its own

    @property
    def key(self) -> str:
        return f"{self.app}\0{self.user}\0{self.session}"


@dataclass(slots=True)
class Asked:
    """What a request tells about the conversation that it belongs to."""

    payer: Payer
    agent: str
    session: str  # as the client names it, "" where it does not
    beginning: bytes
    length: int  # of the transcript, in messages
    has_tools: bool
    rounds: Iterator[Round]  # of the turn, the newest first
    said: Callable[[], tuple[list[Any], bool]]  # the user's newest message, and whether a conversation goes on with it

    @classmethod
    def of(cls, wire: WireFormat, body: Body, payer: Payer, agent: str, session: str) -> "Asked":
        """Return what a request tells."""
        length, has_tools = len(wire.messages(body) or ()), wire.has_tools(body)
        said = partial(wire.said, body)
        return cls(payer, agent, session, wire.beginning(body), length, has_tools, wire.rounds(body), said)


class Conversation:
    """One run and the strands of transcripts that belong to it."""

    __slots__ = ("is_over", "key", "payer", "run", "strands", "used_at")

    def __init__(self, key: str, payer: Payer, run: AgentRun) -> None:
        self.key, self.payer, self.run = key, payer, run
        self.strands: OrderedDict[int, Strand] = OrderedDict()
        self.used_at = 0.0
        self.is_over = False

    @property
    def is_working(self) -> bool:
        """Whether a call is at a model, or an answer waits for its tools."""
        return any(strand.is_working for strand in self.strands.values())

    def end(self) -> None:
        self.is_over = True
        for strand in self.strands.values():
            if strand.run is not self.run:
                strand.run.end()
        self.run.end()


class Strand:
    """One transcript that grows: an agent at work in a lane of the run."""

    __slots__ = ("beginning", "conversation", "has_answered", "in_flight", "length", "run", "seen", "waiting")

    def __init__(self, conversation: Conversation, run: AgentRun, asked: Asked) -> None:
        self.conversation, self.run = conversation, run
        self.beginning, self.length = asked.beginning, asked.length
        self.in_flight = False
        self.has_answered = False  # the last request has got an answer: the same request again is another run
        self.waiting: dict[str, ToolUse] = {}  # the calls of the newest answer that have no result yet
        self.seen = LruDict[bytes, None](_ROUNDS_KEPT)

    @property
    def is_working(self) -> bool:
        return self.in_flight or bool(self.waiting)

    @property
    def is_over(self) -> bool:
        return self.conversation.is_over

    def awaits(self, one: Round, length: int) -> bool:
        """Whether the calls that wait are those of a round, in a transcript of this length."""
        if not self.waiting or not _answers(one, self.waiting):
            return False
        asked = {call_fingerprint(use.tool, use.args, exact=True) for use in self.waiting.values()}
        if one.calls and asked.isdisjoint(_meant(one.calls)):
            return False
        return _has_ids(one) or self.length < length

    def catch_up(self, rounds: Iterator[Round], before: int) -> None:
        """Show the rules the results that came since the last request, and what happened on other workers.

        ``before``: the length of the transcript that this strand has seen last.
        """
        missed: list[Round] = []
        for one in rounds:
            mark, is_answer = _mark(one), _has_ids(one) and self.waiting and _answers(one, self.waiting)
            if not is_answer and (mark in self.seen or (missed and not _has_ids(one) and one.at < before)):
                break
            self.seen[mark] = None
            missed.append(one)
            if is_answer:
                break
        for one in reversed(missed):
            if self.waiting and _answers(one, self.waiting):
                for use, value, outcome in _paired(one, self.waiting):
                    self.run.tools.saw(use, value, outcome)
                self.waiting = {}
            else:
                self.run.replay(_paired(one, {id_: ToolUse(id_, tool, args) for id_, tool, args in _named(one.calls)}))


class Call:
    """One model call of a program, which is closed exactly once."""

    def __init__(
        self, conversations: "Conversations", strand: Strand, permission: Permission, wire: WireFormat
    ) -> None:
        self._conversations, self.strand, self.permission, self.wire = conversations, strand, permission, wire
        self.is_over = False

    def settle(self, reading: Reading, size: int, *, estimated: bool = False) -> None:
        """Book the call: its answer is complete. ``size``: of the answer in bytes."""
        if self.is_over:
            return
        ids: list[str] = []
        try:
            asked = _calls_of(reading)
            uses = [ToolUse(id_, tool, args) for id_, tool, args in _named(asked)]
            self.permission.settle(
                reading.usage, model=reading.model, calls=uses, text=reading.text, size=size, estimated=estimated
            )
            self.strand.waiting, self.strand.has_answered = {use.id: use for use in uses}, True
            ids = _ids_of(reading.ids, asked)
        except Exception as error:  # a fault of the guard: an estimate is booked, and the answer passes
            self.strand.run.fault(error)
            self.permission.fail(None, size, streaming=True)
        self._close(ids)

    def fail(self, error: BaseException | None, reader: AnswerReader | None = None) -> None:
        """Close a call that failed, or whose stream was cut: book what ``reader`` has seen of its answer.

        The first bytes of an answer that is no stream come when the model has said everything.
        """
        if self.is_over:
            return
        if reader is None or not reader.is_stream:
            self.permission.fail(error)
        else:
            reading = reader.reading
            self.permission.fail(error, reader.said, streaming=True, usage=reading.usage, model=reading.model)
        self._close([])

    def _close(self, ids: list[str]) -> None:
        """End the call. ``ids``: of the tool calls that its answer asks for."""
        self.is_over = True
        self._conversations.give_back(self.strand, ids)


class Conversations:
    """The conversations of one guard. Used from one event loop."""

    def __init__(
        self,
        guard: Guard,
        *,
        idle_seconds: float = IDLE_S,
        most: int = _MOST,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``idle_seconds``: without a request for so long, a run ends. ``most``: how many may be open."""
        self._guard, self.idle_s, self._most, self._now = guard, idle_seconds, most, now
        self._open: OrderedDict[int, Conversation] = OrderedDict()  # by identity, the longest unused first
        self._sessions: dict[str, Conversation] = {}  # the newest of each session
        self._strands = LruDict[str, list[Strand]](4 * most)  # of each beginning, the newest last
        self._calls = LruDict[str, Strand](_CALLS_KEPT)  # by the id of a tool call

    def __len__(self) -> int:
        return len(self._open)

    async def ask(self, asked: Asked, read: Callable[[], ModelRequest]) -> tuple[Strand, Reply]:
        """Ask the run of a request for permission. ``read`` describes the request."""
        strand, reply = await self.take(asked), None
        try:
            reply = await strand.run.ask(read)
            return strand, reply
        finally:
            if not isinstance(reply, Permission):
                self.give_back(strand, [])

    async def take(self, asked: Asked) -> Strand:
        """Return the strand that a request goes on with, marked as in flight, with all answers so far reported."""
        self.expire()
        newest = next(asked.rounds, None)
        strand = self._known(asked, newest) if newest is not None else self._next_turn(asked)
        if strand is None:
            name = await self._elsewhere(asked, newest) if newest is not None else ""
            strand = self._begin(asked, name)
        elif strand.in_flight:
            strand = self._begin(asked, "")
        conversation = strand.conversation
        before, strand.length = strand.length, max(asked.length, 1)
        strand.in_flight, strand.has_answered = True, False
        conversation.used_at = self._now()
        self._open.move_to_end(id(conversation))
        if newest is not None:
            self._guard.faults.attempt("gateway", strand.catch_up, chain([newest], asked.rounds), before)
        return strand

    def give_back(self, strand: Strand, calls: list[str]) -> None:
        """End the call of a strand. ``calls``: the ids of the tool calls that its answer asks for."""
        strand.in_flight = False
        conversation = strand.conversation
        conversation.used_at = self._now()
        for call in calls:
            self._calls[_owned(conversation.payer, call)] = strand
        if calls and self._guard.shares_store and strand.run.layers:
            attempt = self._guard.faults.attempt
            attempt("gateway", self._guard.pauses.name, strand.run.layers[-1].run, calls[:1])

    def expire(self) -> None:
        """End the runs that have been idle for too long, and the oldest where there are too many."""
        latest = self._now() - self.idle_s
        while self._open:
            conversation = next(iter(self._open.values()))
            if conversation.used_at > latest and len(self._open) <= self._most:
                return
            if any(strand.in_flight for strand in conversation.strands.values()):
                self._open.move_to_end(id(conversation))
                conversation.used_at = self._now()
                if len(self._open) > self._most:
                    return
            else:
                self._end(conversation)

    def end(self) -> None:
        """End all runs."""
        for conversation in list(self._open.values()):
            self._end(conversation)

    # ---- which strand -----------------------------------------------------------------------------------------------

    def _known(self, asked: Asked, newest: Round) -> Strand | None:
        """Return the strand whose answer asked for the newest calls."""
        free, length = self._free(asked), asked.length
        if waiting := [strand for strand in free if strand.awaits(newest, length)]:
            return max(waiting, key=lambda strand: (strand.length < length, strand.length))
        if again := [strand for strand in free if strand.length == length and not strand.has_answered]:
            return again[0]  # the same request again, after a failure
        mark = _mark(newest)
        for id_, _ in newest.results:  # with another beginning: the provider keeps it, or the client has shortened it
            strand = self._calls.get(_owned(asked.payer, id_)) if id_ else None
            if strand is not None and not strand.is_over and (strand.awaits(newest, length) or mark in strand.seen):
                return strand
        return free[-1] if free else None

    def _free(self, asked: Asked) -> list[Strand]:
        """Return the strands with the beginning of a request that have no call in flight, the newest last."""
        known = self._strands.get(_strand_key(asked)) or ()
        return [strand for strand in known if not strand.is_over and not strand.in_flight]

    def _next_turn(self, asked: Asked) -> Strand | None:
        """Return the strand of a request that ends with the user's word. None: it begins a run."""
        free = self._free(asked)
        before = [(one.length, not one.waiting, n) for n, one in enumerate(free) if one.length < asked.length]
        strand = free[max(before)[2] if before else -1] if free else None
        session = self._sessions.get(_session_key(asked)) if asked.session else None
        if strand is not None:
            conversation, is_same = strand.conversation, asked.length <= strand.length
            if is_same and not strand.has_answered:
                return strand  # the same request again, after a failure
            if asked.session:
                others = any(other.is_working for other in conversation.strands.values() if other is not strand)
                if is_same and (others or strand.waiting):
                    return self._beside(conversation, asked)
                if others:
                    strand.waiting = {}  # a sub-agent of a run that goes on gets another order
                    return strand
            if asked.session or not is_same:
                self._end(conversation)
            return None
        if session is not None and (session.is_working or not asked.has_tools):
            return self._beside(session, asked)
        return None

    async def _elsewhere(self, asked: Asked, newest: Round) -> str:
        """Return the name of the run that another worker of the store has begun, or ""."""
        if not self._guard.shares_store:
            return ""
        ids = _ids_of([id_ for id_, _ in newest.results], newest.calls)[:1]
        info = RunInfo("", at=self._guard.clock(), **self._whom(asked))
        try:
            for patience in (*_NAME_WAITS_S, None):
                name = await self._guard.pauses.named(ids, info)
                if name or not ids or patience is None:
                    return name
                await asyncio.sleep(patience)
        except (StoreOutage, StoreError) as error:
            self._guard.faults.note("gateway", error)
        return ""

    def _begin(self, asked: Asked, name: str) -> Strand:
        """Begin a run, or a lane of the run of the session. ``name``: that of a run which other workers know."""
        session = self._sessions.get(_session_key(asked)) if asked.session else None
        if session is not None and (session.is_working or name == session.run.id):
            return self._beside(session, asked)
        guard = self._guard
        message, goes_on = guard.faults.attempt("gateway", asked.said) or ([], True)
        whom = self._whom(asked) | asked_of(guard, asked.agent, message, goes_on=goes_on)
        run = None
        if name and name not in guard.runs:
            run = guard.faults.attempt("gateway", guard.start, RunInfo(name, at=guard.clock(), **whom))
        conversation = Conversation(
            _session_key(asked), asked.payer, AgentRun.start(guard, asked.agent, run=run, **whom)
        )
        if session is not None:
            self._end(session)
        self._open[id(conversation)] = self._sessions[conversation.key] = conversation
        conversation.used_at = self._now()
        return self._add(conversation, conversation.run, asked)

    def _beside(self, conversation: Conversation, asked: Asked) -> Strand:
        number = max(conversation.strands, default=0) + 1
        finished = [n for n, one in conversation.strands.items() if n > 1 and not one.is_working]
        if len(conversation.strands) >= _MOST_STRANDS and finished:
            conversation.strands.pop(finished[0]).run.end()
        return self._add(conversation, conversation.run.beside(asked.agent, f"{asked.agent}#{number}"), asked)

    def _add(self, conversation: Conversation, run: AgentRun, asked: Asked) -> Strand:
        strand = Strand(conversation, run, asked)
        conversation.strands[max(conversation.strands, default=0) + 1] = strand
        key = _strand_key(asked)
        known = self._strands.get(key) or ()
        self._strands[key] = [*[one for one in known if not one.is_over][-_MOST_TWINS:], strand]
        return strand

    def _end(self, conversation: Conversation) -> None:
        self._open.pop(id(conversation), None)
        if self._sessions.get(conversation.key) is conversation:
            del self._sessions[conversation.key]
        conversation.end()

    def _whom(self, asked: Asked) -> dict[str, Any]:
        payer = asked.payer
        session = payer.session or asked.session or asked.beginning.hex()
        return {"app": payer.app, "user": payer.user, "session": session}


def _owned(payer: Payer, key: str) -> str:
    """Return a key of one payer alone: a client may send the ids of somebody else."""
    return digest(f"{payer.key}\0{key}").hex()


def _session_key(asked: Asked) -> str:
    return _owned(asked.payer, f"session\0{asked.session}" if asked.session else f"beginning\0{asked.beginning.hex()}")


def _strand_key(asked: Asked) -> str:
    return _owned(asked.payer, f"strand\0{asked.session}\0{asked.beginning.hex()}")


# ---- The calls of an answer, and the results that belong to them.


def _calls_of(reading: Reading) -> list[tuple[str, str, object]]:
    return [(id_, tool, args) for id_, (tool, args) in zip(reading.ids, reading.calls, strict=True)]


def _named(calls: Any) -> Iterator[tuple[str, str, object]]:
    """Yield each call with an id and with a digest in place of long arguments: a run may wait for hours."""
    for number, (id_, tool, args) in enumerate(calls):
        if size_of(args, _ARGUMENTS_KEPT) > _ARGUMENTS_KEPT:
            args = digest(json.dumps(args, default=str)).hex()
        yield id_ or f"call-{number}", tool, args


def _meant(calls: Any) -> list[bytes]:
    return [call_fingerprint(tool, args, exact=True) for _, tool, args in _named(calls)]


def _ids_of(given: Sequence[str], calls: Sequence[tuple[str, str, object]]) -> list[str]:
    """Return the ids of calls, or one for all of them that says what they ask for."""
    ids = [id_ for id_ in given if id_]
    if ids or not calls:
        return ids
    return [digest(str(_meant(calls))).hex()]


def _has_ids(one: Round) -> bool:
    return any(id_ for id_, _ in one.results)


def _mark(one: Round) -> bytes:
    """Return the identity of a round within its strand."""
    ids = [id_ for id_, _ in one.results if id_]
    return digest(f"{ids or one.at}\0{_meant(one.calls)}")


def _answers(one: Round, waiting: dict[str, ToolUse]) -> bool:
    """Whether the results of a round are those that calls wait for."""
    if _has_ids(one):
        return any(id_ in waiting for id_, _ in one.results)
    tools = {use.tool for use in waiting.values()}
    return any(not result.tool or result.tool in tools for _, result in one.results)


def _paired(one: Round, uses: dict[str, ToolUse]) -> list[tuple[ToolUse, object, Outcome | None]]:
    """Each result with its call: by the id, or else the first of the same tool."""
    left, found = dict(uses), []
    for id_, result in one.results:
        use = left.pop(id_, None)
        if use is None and not id_:
            name = next((name for name, held in left.items() if result.tool in ("", held.tool)), None)
            use = left.pop(name) if name is not None else None
        if use is not None:
            found.append((use, result.value, Outcome.ERROR if result.is_error else None))
    return found
