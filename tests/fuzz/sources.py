"""Fuzzed recordings: files that ``runguard replay`` reads, with odd values in them and damage on top.

An input names the kind of a file, what is in it, and edits of its bytes.
"""

import gzip
import json
import math
import sqlite3
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, Final

from runguard.policy import Policy
from runguard.replay import UnreadableError, open_sources, replay
from tests.kit.recordings import looping

from .values import build

_USAGE: Final = {"prompt_token_count": 100, "candidates_token_count": 10, "total_token_count": 110}
_CALL: Final = {"id": "c1", "name": "look", "args": {"at": "it"}}
_ANSWER: Final = {"id": "c1", "name": "look", "response": {"seen": 1}}
_EVENTS: Final = [
    {"id": "e1", "invocation_id": "i1", "author": "user", "content": {"parts": [{"text": "go"}]}, "timestamp": 1.0},
    {
        "id": "e2",
        "invocation_id": "i1",
        "author": "a",
        "branch": "a",
        "timestamp": 2.0,
        "partial": False,
        "content": {"parts": [{"function_call": _CALL}]},
        "usage_metadata": _USAGE,
        "model_version": "gemini-2.5-pro",
    },
    {
        "id": "e3",
        "invocation_id": "i1",
        "author": "a",
        "timestamp": 3.0,
        "content": {"parts": [{"function_response": _ANSWER}]},
        "actions": {"transfer_to_agent": "b"},
    },
    {
        "id": "e4",
        "invocation_id": "i1",
        "author": "b",
        "timestamp": 4.0,
        "node_info": {"path": "a@1/b@c1"},
        "content": {"parts": [{"text": "done"}]},
        "usage_metadata": _USAGE,
        "finish_reason": "MAX_TOKENS",
    },
    {
        "id": "e5",
        "invocation_id": "i1",
        "author": "user",
        "timestamp": 5.0,
        "actions": {"compaction": {"compacted_content": {"parts": [{"text": "short"}]}}},
    },
    {
        "id": "e6",
        "invocation_id": "i2",
        "author": "b",
        "timestamp": 6.0,
        "error_code": "RUNGUARD_STOP",
        "custom_metadata": {"runguard": {"rule": "budget", "enforced": True}},
    },
]
_JOURNAL: Final = [
    {"k": "start", "t": 1.0, "app": "app", "user": "u", "session": "s", "model_call_limit": 500, "p": 1},
    {"k": "enter", "t": 1.1, "l": "", "a": "a"},
    {
        "k": "ask",
        "t": 1.2,
        "l": "",
        "a": "a",
        "n": 1,
        "model": "gpt-4o",
        "in": 54,
        "likely": 40,
        "asked": 7,
        "bytes": 9,
    },
    {"k": "paid", "n": 1, "t": 1.3, "in": 1000, "out": 250, "usd": "0.00125"},
    {"k": "got", "t": 1.4, "l": "", "a": "a", "in": 1000, "out": 250},
    {"k": "call", "t": 1.5, "l": "", "a": "a", "tool": "look", "call": "62" * 16, "id": "c1", "b": "b1"},
    {
        "k": "answers",
        "t": 1.6,
        "l": "",
        "a": "a",
        "b": "b1",
        "news": True,
        "progress": True,
        "of": [{"tool": "look", "call": "62" * 16, "id": "c1", "as": "ok", "answer": -24, "chars": 0, "event": "e"}],
    },
    {"k": "lane", "l": "/b@1", "path": ["", "/b@1"], "t": 1.7},
    {"k": "tool_hold", "id": "c2", "bound": 5, "t": 1.8, "tool": "paid"},
    {"k": "tool_paid", "id": "c2", "nano": 5, "t": 1.9, "tool": "paid"},
    {"k": "lane_end", "l": "/b@1", "t": 2.0},
    {"k": "pause", "t": 2.1},
    {"k": "resume", "t": 2.2},
]
_CALL_RECORD: Final = {"id": "x-1", "agent": "a", "model": "gpt-4o", "input": 1000, "output": 250, "usd": "0.00125"}
_TURN: Final = {
    "invocation_id": "i1",
    "user_content": {"parts": [{"text": "go"}]},
    "creation_timestamp": 10.0,
    "final_response": {"parts": [{"text": "done"}]},
    "intermediate_data": {"tool_uses": [_CALL], "tool_responses": [_ANSWER]},
}
_SESSION: Final = {"id": "s1", "app_name": "shop", "user_id": "u1", "state": {}, "events": _EVENTS}
BEGIN: Final = (
    {"kind": "jsonl", "content": [looping("a", 2), {"id": "p", "usd": "0.5", "tokens": 100, "calls": 3}], "edits": []},
    {"kind": "jsonl.gz", "content": [looping("b", 3)], "edits": [[30, "x"]]},
    {"kind": "json", "content": _SESSION, "edits": []},
    {"kind": "json", "content": [_SESSION], "edits": []},
    {"kind": "json", "content": {"eval_set_id": "e", "eval_cases": [{"eval_id": "c", "conversation": [_TURN]}]}},
    {"kind": "sessions", "content": _EVENTS, "edits": []},
    {"kind": "records", "content": [["r", "steps", 1.0, _JOURNAL], ["q", "call", 2.0, _CALL_RECORD]]},
)
_WORDS: Final = """
    id kind agent tool args result text call_id error branch input_tokens output_tokens cached_tokens usd ts text_chars
    result_chars source model task success capped labels app user session steps author content parts function_call
    functionResponse usage_metadata usageMetadata partial actions compaction invocation_id timestamp node_info
    custom_metadata error_code events eval_cases conversation intermediate_data invocation_events tool_uses k t l a n in
    out of call as answer path bound nano p tokens calls edits
"""
NAMES: Final = tuple(_WORDS.split())


def check(form: Any) -> None:
    """Replay the file of an input twice: nothing raises, and both say the same."""
    path = _written(form if type(form) is dict else {"content": form}, Path(_folder().name))
    try:
        first = _replayed(path)
        assert first == _replayed(path), "one file, two results"
    finally:
        path.unlink()


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="runguard-fuzz-")


def _replayed(path: Path) -> Any:
    try:
        sources = open_sources(str(path), max_unpacked=10**6)
    except UnreadableError as error:
        str(error).encode()
        return str(error)
    found: list[Any] = []
    for batch in replay(sources, [_policy()]):
        assert batch.faults.count >= len(batch.faults.first)
        "".join(batch.faults.first).encode()  # a terminal can show it
        for (result,) in batch.results:
            counts = (result.steps, result.model_calls, result.tool_calls, result.prompt_tokens, result.output_tokens)
            assert all(type(count) is int and count >= 0 for count in (*counts, result.nano, result.unpriced))
            assert all(not math.isnan(verdict.observed) for verdict in result.verdicts)
            json.dumps(asdict(result), allow_nan=False, default=str).encode()
            found.append((result.id, counts, result.nano, [str(verdict) for verdict in result.verdicts]))
        found.append((batch.faults.count, batch.faults.first))
    return found


@cache
def _policy() -> Policy:
    return Policy.validated({"max_usd": 5}, "")


def _written(form: dict[str, Any], folder: Path) -> Path:
    kind, content = str(form.get("kind") or "jsonl"), form.get("content")
    if kind in _DATABASES:
        path = folder / "recorded.db"
        with sqlite3.connect(path) as db:
            db.execute("PRAGMA synchronous = off")
            _DATABASES[kind](db, content if type(content) is list else [content])
        db.close()
        data = path.read_bytes()
    elif kind.startswith("json") and not kind.startswith("jsonl"):
        path, data = folder / f"recorded.{_suffix(kind)}", _json(content)
    else:
        path = folder / f"recorded.{_suffix(kind)}"
        data = b"".join(_json(line) + b"\n" for line in (content if type(content) is list else [content]))
    if kind.endswith(".gz"):
        data = gzip.compress(data, 1, mtime=0)
    path.write_bytes(_edited(data, form.get("edits")))
    return path


def _suffix(kind: str) -> str:
    return kind if kind in ("json", "json.gz", "jsonl", "jsonl.gz") else "jsonl"


def _json(form: Any) -> bytes:
    if type(form) is str:
        return form.encode("utf-8", "surrogatepass")  # the text itself, which may be JSON or not
    try:
        return json.dumps(build(form), default=lambda _: None).encode()
    except (ValueError, TypeError, RecursionError):  # cyclic, too deep, a number too long: no JSON
        return b'{"id": "x", "steps": ' + b"[" * 5_000


def _edited(data: bytes, edits: Any) -> bytes:
    """Each edit is a place, and the text that replaces what is there; null cuts the file off."""
    changed = bytearray(data)
    for edit in edits if type(edits) is list else ():
        if type(edit) is not list or len(edit) != 2 or type(edit[0]) is not int or not changed:
            continue
        at = edit[0] % len(changed)
        if type(edit[1]) is str:
            new = edit[1].encode("utf-8", "surrogatepass")
            changed[at : at + len(new)] = new
        else:
            del changed[at:]
    return bytes(changed)


def _sessions(db: sqlite3.Connection, events: list[Any]) -> None:
    db.execute("CREATE TABLE sessions (app_name, user_id, id, state, create_time, update_time)")
    db.execute("CREATE TABLE events (id, app_name, user_id, session_id, invocation_id, timestamp, event_data)")
    db.execute("INSERT INTO sessions VALUES ('shop', 'u1', 's1', '{}', 1, 2)")
    for number, event in enumerate(events):
        data = _json(event).decode("utf-8", "replace")
        db.execute("INSERT INTO events VALUES (?, 'shop', 'u1', 's1', 'i1', 1.0, ?)", (f"e{number}", data))


def _records(db: sqlite3.Connection, rows: list[Any]) -> None:
    db.execute("CREATE TABLE accounts (key)")
    db.execute("CREATE TABLE records (seq INTEGER PRIMARY KEY, at, kind, ref, text)")
    for row in rows:
        ref, kind, at, text = (*row, None, None, None, None)[:4] if type(row) is list else ("r", "steps", 1.0, row)
        plain = [value if type(value) in (str, float, type(None)) else str(value) for value in (at, kind, ref)]
        plain = [value.encode("utf-8", "replace").decode() if type(value) is str else value for value in plain]
        data = _json(text).decode("utf-8", "replace")
        db.execute("INSERT INTO records (at, kind, ref, text) VALUES (?, ?, ?, ?)", (*plain, data))


_DATABASES: Final[dict[str, Callable[[sqlite3.Connection, list[Any]], None]]] = {
    "sessions": _sessions,
    "records": _records,
}
