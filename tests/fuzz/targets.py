"""What is fuzzed: each target reads one input and checks what has to be true of every answer.

No target may raise. The same value gives the same answer. What is returned is bounded, and counts are counts.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any, Final

from runguard.core.events import Outcome
from runguard.core.identity import (
    MAX_CHARS,
    AnswerBook,
    answer_text,
    are_alike,
    call_fingerprint,
    mask,
    size_of,
    snapshot,
)
from runguard.core.outcomes import classify, failure_class, was_done
from runguard.pricing.rates import Usage
from runguard.providers.a2a import ReplyReader
from runguard.providers.messages import TEXT_CHARS, Reading, newest_results, read, read_request, request_mark
from runguard.providers.streams import StreamReading
from runguard.providers.usage import CallUsage, EventUsage, answer_size, measure
from tests.kit.provider_answers import CHAT, KINDS, NAMES, chat_chunk

from . import sources
from .values import build

_TEXT: Final = 8 * MAX_CHARS


@dataclass(frozen=True)
class Target:
    """What to check, and how inputs for it are made.

    ``check`` raises when a guarantee is broken. ``begin`` are the forms from which others are made.
    """

    check: Callable[[Any], None]
    begin: tuple[Any, ...]
    names: tuple[str, ...]
    most_steps: int  # lines of RunGuard that one input may take, however large it is


# ---- fingerprints ---------------------------------------------------------------------------------------------------


def fingerprints(form: Any) -> None:
    value, again = build(form), build(form)
    text = answer_text(value)
    assert text == answer_text(again), "one value, two texts"
    assert len(text) <= _TEXT
    assert len(snapshot(value)[0]) <= _TEXT
    assert are_alike(text[:MAX_CHARS], text[:MAX_CHARS])
    mask(text[:MAX_CHARS])
    assert size_of(value, 1_000) >= 0
    args = {"x": value, "retry": 1}
    assert call_fingerprint("tool", args) == call_fingerprint("tool", {"retry": 2, "x": again})
    assert call_fingerprint("tool", value) == call_fingerprint("tool", _reordered(again))
    assert call_fingerprint("tool", args, identity=["x"]) == call_fingerprint("tool", args, volatile=["retry"])
    book = AnswerBook()
    first, is_new = book.name(b"call", value)
    assert is_new
    assert book.name(b"call", again) == (first, False), "one answer, two names"


def _reordered(value: Any) -> Any:
    """The same arguments with their keys in another order."""
    return dict(reversed(value.items())) if type(value) is dict else value


# ---- outcomes -------------------------------------------------------------------------------------------------------


def outcomes(form: Any) -> None:
    value = build(form)
    outcome, why = classify(value)
    assert type(outcome) is Outcome
    assert type(why) is str
    assert len(why) <= _TEXT
    assert classify(build(form)) == (outcome, why), "one answer, two outcomes"
    assert type(was_done(value)) is bool
    text = answer_text(value)
    classify(text)
    assert failure_class(text) == failure_class(text)


# ---- readers of what providers return -------------------------------------------------------------------------------


def readers(form: Any) -> None:
    assert _read_all(_chunks(form)) == _read_all(_chunks(form)), "one answer, two readings"


def _chunks(form: Any) -> list[Any]:
    value = build(form)
    return value[:50] if type(value) is list else [value]


def _read_all(values: list[Any]) -> Any:
    stream, call, events, replies = StreamReading(), CallUsage(), EventUsage(), ReplyReader()
    seen: list[Any] = []
    for value in values:
        reading = read(value)
        _check_reading(reading)
        stream.feed(value)
        call.add(value)
        _check_usage(call.bill(10).usage)
        if type(value) is dict and all(type(value.get(key)) in (str, type(None)) for key in ("author", "branch")):
            events.pass_by(value)  # sessions have an author and a branch of text
            taken = events.read(value, is_answer=True)
            if taken is not None:
                _check_usage(taken.usage)
        reply = replies.read(value)
        seen.append((reading.usage, reading.usd, reading.text, call.bill(10), events.prompt, reply.reports))
        assert answer_size(value) >= 0
        assert min(measure(value)) >= 0
    _check_reading(stream.reading())
    assert stream.chars >= 0
    request = read_request((), {"messages": values, "contents": values, "max_tokens": values[:1]})
    assert request.input_tokens is None or request.input_tokens > 0
    assert request.max_output_tokens is None or request.max_output_tokens >= 0
    seen.append((request.input_tokens, request.model, len(newest_results((), {"messages": values}))))
    request_mark((), {"messages": values})
    return seen


def _check_reading(reading: Reading) -> None:
    if reading.usage is not None:
        _check_usage(reading.usage)
    assert type(reading.model) is str
    assert len(reading.text) <= TEXT_CHARS
    assert reading.usd is None or (Decimal.is_finite(reading.usd) and reading.usd >= 0)
    assert all(type(name) is str for name, _ in reading.calls)


def _check_usage(usage: Usage) -> None:
    for field in fields(Usage):
        count = getattr(usage, field.name)
        assert type(count) is int, field.name
        assert count >= 0, field.name


# ---- all of them ----------------------------------------------------------------------------------------------------

_WORDS: Final = (
    f"{NAMES} status state error errors message detail exit_code stdout stderr success ok isError items rows author "
    "branch metadata artifacts kind adk_usage_metadata adk_custom_metadata prompt_token_count candidates_token_count "
    "total_token_count thoughts_token_count"
)
_NAMES: Final = tuple(_WORDS.split())
_ANSWERS: Final = (
    {"result": "x"},
    {"status": "error", "message": "no such file: /a/b"},
    {"error": {"code": 500, "message": "try again at 12:30:01"}},
    {"content": [{"type": "text", "text": "Error: 3 failed"}], "isError": True},
    {"stdout": "", "stderr": "grep: x", "exit_code": 2},
    {"items": [{"id": "7f3a-11", "at": "2026-01-01T10:00:00Z"}], "count": 1},
    "Traceback (most recent call last):\nValueError: 17",
    {"$json": {"status": "failed", "detail": [1, 2]}},
)
_RESPONSES: Final = (
    [CHAT],
    [chat_chunk({"content": "a"}), chat_chunk(None, usage={"prompt_tokens": 3, "completion_tokens": 1})],
    [
        {
            "author": "a",
            "partial": True,
            "content": {"parts": [{"text": "x"}]},
            "usage_metadata": {"total_token_count": 9},
        }
    ],
    [{"type": name, "message": {"usage": {"input_tokens": 5, "output_tokens": 1}}} for name in KINDS.split()[:4]],
    [{"kind": "task", "metadata": {"adk_usage_metadata": {"prompt_token_count": 5.0}}, "artifacts": [{"parts": []}]}],
    [{"usage": {"input_tokens": 1, "iterations": [{"input_tokens": 3}]}, "content": [{"type": "text", "text": "x"}]}],
)
TARGETS: Final = {
    "fingerprints": Target(fingerprints, _ANSWERS, _NAMES, 6_000_000),
    "outcomes": Target(outcomes, _ANSWERS, _NAMES, 1_000_000),
    "readers": Target(readers, _RESPONSES, _NAMES, 60_000_000),
    "sources": Target(sources.check, sources.BEGIN, sources.NAMES, 6_000_000),
}


def as_text(form: Any) -> str:
    return json.dumps(form, indent=1, sort_keys=True)
