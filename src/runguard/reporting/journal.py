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
from typing import Any, Final

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
        self.add(_WRITERS[type(event)](event))

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


def _base(kind: str, event: Event) -> Entry:
    return {"k": kind, "t": event.at, "l": event.lane, "a": event.agent}


def _entered(event: AgentEntered) -> Entry:
    flags = {"task": event.is_task, "bounded": event.is_bounded}
    rest = {"depth": event.depth, "branches": event.branches, **flags, "above": list(event.above)}
    return _base("enter", event) | _sparse(rest)


def _asked(event: ModelCall) -> Entry:
    sizes = {
        "in": event.input_tokens,
        "audio": event.audio_tokens,
        "max": event.max_output_tokens,
        "likely": event.projected_tokens,
    }
    rest = {
        "fits": event.context_limit,
        "tool": event.tool,
        "aside": event.after_answer,
        "bound": event.bound,
        "least": list(event.least) if any(event.least) else None,
        "candidates": event.candidates - 1,
        "asked": event.asked,
        "bytes": event.request_bytes,
        "instead_of": event.instead_of,
    }
    return _base("ask", event) | {"n": event.number, "model": event.model} | _sparse({**sizes, **rest})


def _got(event: ModelResult) -> Entry:
    rest = _sparse({"said": event.text_id, "cut": event.is_cut, "new": event.new_subject, "item": event.new_item})
    return _base("got", event) | {"in": event.prompt_tokens, "out": event.output_tokens} | rest


def _called(event: ToolCall) -> Entry:
    rest = _sparse({"depth": event.depth, "once": event.once.hex()})
    return (
        _base("call", event) | {"tool": event.tool, "call": event.call.hex(), "id": event.id, "b": event.batch} | rest
    )


def _answered(event: ToolResults) -> Entry:
    flags = _sparse({"news": event.news, "progress": event.progress, "another_page": event.another_page})
    flags |= _sparse({"new": event.new_subject, "item": event.new_item, "words": event.words, "wanders": event.wanders})
    return _base("answers", event) | {"b": event.batch, "of": [_answer(answer) for answer in event.answers]} | flags


def _answer(a: Answer) -> Entry:
    facts = {
        "tool": a.tool,
        "call": a.call.hex(),
        "id": a.id,
        "as": (a.outcome or Outcome.OK).value,
        "answer": a.answer,
        "chars": a.chars,
    }
    failure = digest(a.failure)[:_FAILURE_NAME].hex() if a.failure else ""
    if a.failure.startswith(LATE):
        failure = f"{LATE}{failure}"
    return facts | _sparse(
        {
            "failure": failure,
            "too_large": a.too_large,
            "uncounted": not a.counted,
            "event": a.event_id,
            "once": a.once.hex(),
            "identity": a.identity,
            "long": a.is_long,
            "lacks": a.lacks_arguments,
            "note": a.is_note,
            "near": a.is_near,
            "wording": a.wording,
            "command": a.is_command,
            "alike": a.reads_alike,
            "ending": digest(a.ending)[:_FAILURE_NAME].hex() if a.ending and a.ending != a.failure else "",
        }
    )


_WRITERS: Final[dict[type, Callable[[Any], Entry]]] = {
    AgentEntered: _entered,
    HandOff: lambda event: {**_base("hand", event), "to": event.target},
    ModelCall: _asked,
    ModelResult: _got,
    ToolCall: _called,
    StateChanged: lambda event: {**_base("state", event), "of": event.value},
    ToolResults: _answered,
}


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
    reader = _READERS.get(entry["k"])
    if reader is None:
        return None
    return reader((run, str(entry.get("l") or ""), str(entry.get("a") or ""), float(entry["t"])), entry)


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
_Where = tuple[str, str, str, float]


def _read_ask(where: _Where, entry: Entry) -> ModelCall:
    get = entry.get
    bound, least = get("bound"), get("least")
    return ModelCall(
        *where,
        str(get("model") or ""),
        input_tokens=int(get("in") or 0),
        audio_tokens=int(get("audio") or 0),
        max_output_tokens=get("max"),
        projected_tokens=get("likely"),
        context_limit=get("fits"),
        tool=str(get("tool") or ""),
        after_answer=bool(get("aside")),
        bound=(bound[0], bound[1]) if bound else None,
        least=(least[0], least[1]) if least else (0, 0),
        candidates=1 + int(get("candidates") or 0),
        number=int(get("n") or 0),
        asked=int(get("asked") or 0),
        request_bytes=int(get("bytes") or 0),
        instead_of=str(get("instead_of") or ""),
    )


def _read_call(where: _Where, entry: Entry) -> ToolCall:
    get = entry.get
    call, once = bytes.fromhex(entry["call"]), bytes.fromhex(get("once") or "")
    return ToolCall(
        *where, entry["tool"], call, str(get("b") or ""), str(get("id") or ""), int(get("depth") or 0), once
    )


def _read_answers(where: _Where, entry: Entry) -> ToolResults:
    answers = [
        Answer(
            answer["tool"],
            bytes.fromhex(answer["call"]),
            id=str(answer.get("id") or ""),
            outcome=Outcome(answer["as"]),
            event_id=str(answer.get("event") or ""),
            answer=int(answer.get("answer") or 0),
            failure=str(answer.get("failure") or ""),
            chars=int(answer.get("chars") or 0),
            too_large=bool(answer.get("too_large")),
            counted=not answer.get("uncounted"),
            once=bytes.fromhex(answer.get("once") or ""),
            identity=str(answer.get("identity") or ""),
            is_long=bool(answer.get("long")),
            lacks_arguments=bool(answer.get("lacks")),
            is_note=bool(answer.get("note")),
            is_near=bool(answer.get("near")),
            wording=str(answer.get("wording") or ""),
            is_command=bool(answer.get("command")),
            reads_alike=bool(answer.get("alike")),
            ending=str(answer.get("ending") or answer.get("failure") or ""),
        )
        for answer in entry["of"]
    ]
    news, progress, page = (bool(entry.get(name)) for name in ("news", "progress", "another_page"))
    return ToolResults(
        *where,
        str(entry.get("b") or ""),
        answers,
        news,
        progress,
        another_page=page,
        new_subject=bool(entry.get("new")),
        new_item=bool(entry.get("item")),
        words=str(entry.get("words") or ""),
        wanders=str(entry.get("wanders") or ""),
        is_understood=True,
    )


_READERS: Final[dict[str, Callable[[_Where, Entry], Event]]] = {
    "enter": lambda where, entry: AgentEntered(
        *where,
        int(entry.get("depth") or 0),
        int(entry.get("branches") or 0),
        bool(entry.get("task")),
        bool(entry.get("bounded")),
        tuple(str(name) for name in entry.get("above") or ()),
    ),
    "hand": lambda where, entry: HandOff(*where[:3], str(entry["to"]), where[3]),
    "ask": _read_ask,
    "got": lambda where, entry: ModelResult(
        *where,
        entry.get("in"),
        entry.get("out"),
        text_id=int(entry.get("said") or 0),
        is_cut=bool(entry.get("cut")),
        new_subject=bool(entry.get("new")),
        new_item=bool(entry.get("item")),
    ),
    "call": _read_call,
    "answers": _read_answers,
    "state": lambda where, entry: StateChanged(*where, int(entry.get("of") or 0)),
}
