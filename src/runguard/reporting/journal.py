"""The journal of a run in a durable store: every event that the guard saw, as numbers, names and digests. It holds no
text of users, models or tools.

``engine/guard`` writes it. The dashboard shows from it what led to a trip, and ``replay`` plays it to another policy:
the guard decides on these events alone, so every rule of a run can be judged again.
"""

import json
import os
import threading
from collections.abc import Callable
from dataclasses import fields
from math import isfinite
from typing import Any, Final, NamedTuple

from runguard.core.decision import Action, Decision
from runguard.core.events import (
    LATE,
    AgentEntered,
    Answer,
    Event,
    HandOff,
    ModelCall,
    ModelResult,
    Outcome,
    RunInfo,
    StateChanged,
    ToolCall,
    ToolResults,
)
from runguard.core.identity import digest
from runguard.pricing.rates import Usage

KIND: Final = "steps"  # of the records; each holds a list of entries
_AT_ONCE: Final = 32
_FAILURE_NAME: Final = 4  # bytes: tells the failures of one run apart
_LARGEST: Final = 2**64  # of every number in an entry
_USAGE: Final = tuple(field.name for field in fields(Usage))

Entry = dict[str, Any]


class Journal:
    """Collects the entries of one run and hands them over in pieces. ``send`` takes a text and returns at once."""

    __slots__ = ("_asked", "_entries", "_lock", "_pid", "_pieces", "_send")

    def __init__(self, info: RunInfo, send: Callable[[str], None]) -> None:
        self._send, self._asked, self._pieces, self._lock = send, 0, 0, threading.Lock()
        self._pid = os.getpid()
        self._entries: list[Entry] = [_sparse({"k": "start", "t": info.at, **_facts(info)})]

    @property
    def written(self) -> tuple[int, int]:
        """The number of paid calls and of pieces so far. A worker that resumes the run counts on from them."""
        return self._asked, self._pieces

    def paused(self, at: float) -> None:
        """Note that the run may be resumed later. What was collected is sent, so that ``written`` is complete."""
        self.add({"k": "pause", "t": at})
        self.flush()

    def resumed(self, at: float, written: tuple[int, int] | None = None) -> None:
        """Note that the run goes on. ``written``: where another worker's journal of it ended."""
        with self._lock:
            if written is not None or os.getpid() != self._pid:
                self._entries.clear()
            self._pid = os.getpid()
            self._asked, self._pieces = written or (self._asked, self._pieces)
        self.add({"k": "resume", "t": at})

    def number(self) -> int:
        """Return the number of the next call that is paid."""
        self._asked += 1
        return self._asked

    def saw(self, event: Event) -> None:
        if type(event) is ModelCall:
            event.number = self.number()
        kind, fields_of = _KINDS[type(event)]
        self.add(_write(fields_of, event, {"k": kind, "t": event.at, "l": event.lane, "a": event.agent}))

    def decided(self, decision: Decision, lane: str, agent: str, at: float) -> None:
        finding = decision.finding
        if finding is None:
            return
        numbers = {"observed": float(finding.observed), "limit": float(finding.limit), "unit": finding.unit}
        facts = {
            "do": decision.action.word,
            "rule": finding.rule,
            "tool": finding.tool,
            **numbers,
            "enforced": decision.enforced,
        }
        self.add({"k": "decision", "t": at, "l": lane, "a": agent, **facts})
        if decision.action is Action.STOP:
            self.flush()  # a reader of the trip finds everything that led to it

    def paid(
        self,
        number: int,
        at: float,
        usage: Usage,
        *,
        model: str,
        nano: int | None,
        usd: str | None,
        estimated: bool,
        free: bool,
    ) -> None:
        """Write what an asked call took. A later one with the same number replaces it."""
        tokens = {name: getattr(usage, name) for name in _USAGE}
        tokens |= {"in": tokens.pop("input"), "out": tokens.pop("output")}
        cost = {} if nano is None else {"nano": nano}
        self.add(
            {
                "k": "paid",
                "n": number,
                **cost,
                **_sparse({"t": at, **tokens, "model": model, "usd": usd, "estimated": estimated, "free": free}),
            }
        )

    def add(self, entry: Entry) -> None:
        with self._lock:
            self._entries.append(entry)
            is_full = len(self._entries) >= _AT_ONCE
        if is_full:
            self.flush()

    def flush(self) -> None:
        with self._lock:
            entries, self._entries = self._entries, []
            # after a fork, the parent sends what it has collected
            if entries and os.getpid() == self._pid:
                self._pieces += 1
                entries[0]["p"] = self._pieces
                # inside of the lock: the order of the pieces is that of the run
                self._send(json.dumps(entries, separators=(",", ":")))


# ---- Writing entries.


def _sparse(entry: Entry) -> Entry:
    """Return the entry without empty values."""
    return {key: value for key, value in entry.items() if value or key == "t"}


def _facts(info: RunInfo) -> Entry:
    limits = {"model_call_limit": info.model_call_limit, "max_usd": info.max_usd, "max_tokens": info.max_tokens}
    facts = {"app": info.app, "user": info.user, "session": info.session, **limits, "labels": dict(info.labels or {})}
    facts["automatic"] = info.is_automatic
    return facts if info.ceiling == (None, None) else {**facts, "ceiling": list(info.ceiling)}


# ---- The codec: which field of which event stands under which key, and how it is written and read.


def _text(value: Any) -> str:
    return str(value or "")


def _count(value: Any) -> int:
    return int(value or 0)


def _digest(value: Any) -> bytes:
    return bytes.fromhex(value or "")


def _pair(value: Any) -> tuple[Any, Any] | None:
    return (value[0], value[1]) if value else None


def _as_is(value: Any) -> Any:
    return value


def _given(value: Any) -> str:
    if value is None:
        raise ValueError("a name is missing")
    return str(value)


class _Field(NamedTuple):
    """A key of an entry, and the field of the event that it stands for."""

    key: str
    name: str
    read: Callable[[Any], Any]
    write: Callable[[Any], Any] | None = None  # None: as it is
    always: bool = False  # it is written also when it is empty


def _write(fields_of: tuple[_Field, ...], source: object, entry: Entry) -> Entry:
    for key, name, _, write, always in fields_of:
        value = getattr(source, name)
        if write is not None:
            value = write(value)
        if value or always:
            entry[key] = value
    return entry


def _read(fields_of: tuple[_Field, ...], entry: Entry) -> dict[str, Any]:
    return {field.name: field.read(entry.get(field.key)) for field in fields_of}


_SUBJECT: Final = (_Field("new", "new_subject", bool), _Field("item", "new_item", bool))
_FIELDS: Final[dict[str, tuple[type, tuple[_Field, ...]]]] = {
    "enter": (
        AgentEntered,
        (
            _Field("depth", "depth", _count),
            _Field("branches", "branches", _count),
            _Field("task", "is_task", bool),
            _Field("bounded", "is_bounded", bool),
            _Field("above", "above", lambda names: tuple(str(name) for name in names or ())),
        ),
    ),
    "hand": (HandOff, (_Field("to", "target", _given, always=True),)),
    "ask": (
        ModelCall,
        (
            _Field("n", "number", _count, always=True),
            _Field("model", "model", _text, always=True),
            _Field("in", "input_tokens", _count),
            _Field("audio", "audio_tokens", _count),
            _Field("max", "max_output_tokens", _as_is),
            _Field("likely", "projected_tokens", _as_is),
            _Field("fits", "context_limit", _as_is),
            _Field("tool", "tool", _text),
            _Field("aside", "after_answer", bool),
            _Field("bound", "bound", _pair),
            _Field(
                "least", "least", lambda pair: _pair(pair) or (0, 0), lambda pair: list(pair) if any(pair) else None
            ),
            _Field("candidates", "candidates", lambda more: 1 + _count(more), lambda number: number - 1),
            _Field("asked", "asked", _count),
            _Field("bytes", "request_bytes", _count),
            _Field("instead_of", "instead_of", _text),
        ),
    ),
    "got": (
        ModelResult,
        (
            _Field("in", "prompt_tokens", _as_is, always=True),
            _Field("out", "output_tokens", _as_is, always=True),
            _Field("said", "text_id", _count),
            _Field("cut", "is_cut", bool),
            *_SUBJECT,
        ),
    ),
    "call": (
        ToolCall,
        (
            _Field("tool", "tool", _given, always=True),
            _Field("call", "call", bytes.fromhex, bytes.hex, always=True),
            _Field("id", "id", _text, always=True),
            _Field("b", "batch", _text, always=True),
            _Field("depth", "depth", _count),
            _Field("once", "once", _digest, bytes.hex),
        ),
    ),
    "state": (StateChanged, (_Field("of", "value", _count, always=True),)),
    "answers": (
        ToolResults,
        (
            _Field("b", "batch", _text, always=True),
            _Field(
                "of",
                "answers",
                lambda answers: [_read_answer(one) for one in answers],
                lambda answers: [_write_answer(one) for one in answers],
                always=True,
            ),
            _Field("news", "news", bool),
            _Field("progress", "progress", bool),
            _Field("another_page", "another_page", bool),
            *_SUBJECT,
            _Field("words", "words", _text),
            _Field("wanders", "wanders", _text),
        ),
    ),
}
_KINDS: Final = {made: (kind, fields_of) for kind, (made, fields_of) in _FIELDS.items()}
_ANSWER: Final = (
    _Field("tool", "tool", _given, always=True),
    _Field("call", "call", bytes.fromhex, bytes.hex, always=True),
    _Field("id", "id", _text, always=True),
    _Field("as", "outcome", Outcome, lambda outcome: (outcome or Outcome.OK).value, always=True),
    _Field("answer", "answer", _count, always=True),
    _Field("chars", "chars", _count, always=True),
    _Field("too_large", "too_large", bool),
    _Field("uncounted", "counted", lambda uncounted: not uncounted, lambda counted: not counted),
    _Field("event", "event_id", _text),
    _Field("once", "once", _digest, bytes.hex),
    _Field("identity", "identity", _text),
    _Field("long", "is_long", bool),
    _Field("lacks", "lacks_arguments", bool),
    _Field("note", "is_note", bool),
    _Field("near", "is_near", bool),
    _Field("wording", "wording", _text),
    _Field("command", "is_command", bool),
    _Field("alike", "reads_alike", bool),
)


def _write_answer(answer: Answer) -> Entry:
    """Write an answer; of its failure only names, which tell the failures of one run apart."""
    entry = _write(_ANSWER, answer, {})
    if answer.failure:
        entry["failure"] = (LATE if answer.failure.startswith(LATE) else "") + _name_of(answer.failure)
    if answer.ending and answer.ending != answer.failure:
        entry["ending"] = _name_of(answer.ending)
    return entry


def _read_answer(entry: Entry) -> Answer:
    failure = _text(entry.get("failure"))
    return Answer(**_read(_ANSWER, entry), failure=failure, ending=_text(entry.get("ending")) or failure)


def _name_of(failure: str) -> str:
    return digest(failure)[:_FAILURE_NAME].hex()


# ---- Reading entries.


def read_entries(text: str) -> list[Entry]:
    """Return the entries of one record; raise ``ValueError`` if the text is not a list of entries."""
    entries = json.loads(text)
    if not isinstance(entries, list) or any(
        not isinstance(entry, dict) or not isinstance(entry.get("k"), str) for entry in entries
    ):
        raise ValueError("no list of entries")
    return entries


def check_entry(entry: Entry) -> None:
    """``ValueError`` for an entry that cannot be played."""
    try:
        if not isfinite(float(entry.get("t") or 0)):
            raise ValueError(f"t = {entry['t']!r}")
        if any(isinstance(value, int) and not -_LARGEST < value < _LARGEST for value in entry.values()):
            raise ValueError("a number that is too large")
        read_event("", entry)
        for key, kind in _MUST_HAVE.get(entry["k"], {}).items():
            if not isinstance(entry[key], kind):
                raise ValueError(f"{key} = {entry[key]!r}")
    except (KeyError, ValueError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise ValueError(f"an entry of kind {entry['k']!r} cannot be read: {type(error).__name__}: {error}") from None


def read_usage(entry: Entry) -> Usage:
    """Return the usage of a "paid" entry."""
    tokens = {**entry, "input": entry.get("in"), "output": entry.get("out")}
    return Usage(**{name: count for name in _USAGE if isinstance(count := tokens.get(name), int) and count > 0})


def read_event(run: str, entry: Entry) -> Event | None:
    """Return the event of an entry; None for an entry that is not an event: a decision, a payment, a lane."""
    known = _FIELDS.get(entry["k"])
    if known is None:
        return None
    made, fields_of = known
    where = {"lane": _text(entry.get("l")), "agent": _text(entry.get("a")), "at": float(entry["t"])}
    event: Event = made(run=run, **where, **_read(fields_of, entry))
    if isinstance(event, ToolResults):
        event.is_understood = True
    return event


_MUST_HAVE: Final[dict[str, dict[str, Any]]] = {
    "start": {"t": int | float},
    "lane": {"l": str, "path": list},
    "lane_end": {"l": str},
    "back": {"n": int},
    "paid": {"n": int},
    "surplus": {"at_once": int},
    "pause": {"t": int | float},
    "resume": {"t": int | float},
    "growth": {"of": dict},
    "tool_hold": {"id": str, "bound": int},
    "tool_paid": {"id": str, "nano": int},
    "tool_back": {"id": str},
}
