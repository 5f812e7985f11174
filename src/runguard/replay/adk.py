"""ADK's JSON: sessions as ``adk web`` and the REST API export them, lists of them or of events, and eval sets; snake
and camel case.
"""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TextIO

from runguard.core.identity import CHARS_PER_TOKEN, size_of, words_name
from runguard.pricing.rates import Usage
from runguard.replay.adk_events import Events, calls_and_answers, either
from runguard.replay.bounded_files import (
    DAMAGED,
    MAX_UNPACKED,
    JsonStream,
    TruncatedError,
    UnpackedError,
    load_json,
    open_bytes,
)
from runguard.replay.steps import ODD, Answered, Asked, Called, Faults, RecordedRun, Step, Turn, time_of, word

_HEAD: Final = 64 * 1024
_ENOUGH: Final = 64_000_000


def _open(path: Path, max_unpacked: int = MAX_UNPACKED) -> TextIO:
    return io.TextIOWrapper(open_bytes(path, max_unpacked), encoding="utf-8-sig", errors="replace")


def _head(path: Path) -> str:
    """How a file begins; nothing where it is damaged there."""
    try:
        with _open(path) as file:
            return file.read(_HEAD).lstrip()
    except DAMAGED:
        return ""


def is_document(path: Path) -> bool:
    """Whether a file begins like one of ADK's documents rather than like lines of runs."""
    head = _head(path)
    if head.startswith("["):
        return any(f'"{name}"' in head for name in ("events", "author", "conversation"))
    if not head.startswith("{"):
        return False
    first = head.partition("\n")[0]
    try:
        whole = load_json(first)
    except ValueError:
        whole = None
    if isinstance(whole, dict):  # one line is one object: a run, or a session written without breaks
        return "steps" not in whole and any(name in whole for name in _TELLING)
    if '"steps"' in first and len(first) < len(head):
        return False
    return any(f'"{name}"' in head for name in _TELLING) and '"steps"' not in head


def is_one_object(path: Path) -> bool:
    """Whether it is JSON over several lines, which no JSONL is."""
    head = _head(path)
    first, broken, _ = head.partition("\n")
    return head.startswith("[") or (bool(broken) and head.startswith("{") and first.strip() in ("{", ""))


_TELLING: Final = ("events", "eval_cases", "evalCases", "appName", "app_name", "eval_set_id", "evalSetId")


def runs_of(path: Path, max_unpacked: int, faults: Faults, model: str) -> Iterator[RecordedRun]:
    with _open(path, max_unpacked) as file:
        yield from Document(JsonStream(file), path.name, faults, model).runs()


class Document:
    """One file: a session, an eval set, or a list of sessions, eval cases or events."""

    def __init__(self, stream: JsonStream, name: str, faults: Faults, model: str) -> None:
        self._stream, self._name, self._faults, self._model = stream, name, faults, model
        self._facts: dict[str, Any] = {}
        self._told_end = False

    def runs(self) -> Iterator[RecordedRun]:
        try:
            if self._stream.peek() == "[":
                yield from self._list()
            else:
                yield from self._object()
        except (TruncatedError, *DAMAGED) as error:
            self._cut_off(self._name, error)

    def _cut_off(self, where: str, error: Exception) -> None:
        if not self._told_end:
            reason = "" if isinstance(error, UnpackedError) else "cut off or damaged, "
            self._faults.add(where, f"{reason}read up to there: {error}")
        self._told_end = True

    def _object(self) -> Iterator[RecordedRun]:
        """A session streams its events; an eval set its cases. What names it stands before them in everything ADK
        writes.
        """
        for key in self._stream.members():
            if key == "events" and self._stream.peek() == "[":
                yield self._session(self._event_steps())
            elif key in ("eval_cases", "evalCases") and self._stream.peek() == "[":
                for number, _ in enumerate(self._stream.elements(), 1):
                    yield from self._case(self._stream.value(), number)
            else:
                self._facts[key] = self._stream.value()

    def _session(self, steps: Iterator[Step]) -> RecordedRun:
        facts = self._facts
        app, user = word(either(facts, "app_name", "appName")), word(either(facts, "user_id", "userId"))
        name = word(facts.get("id")) or self._name
        return RecordedRun(name, steps, app, user, name, source=app or self._name)

    def _event_steps(self) -> Iterator[Step]:
        events = Events(self._model)
        try:
            for number, _ in enumerate(self._stream.elements(), 1):
                yield from self._steps_of(events, self._stream.value(), number)
                if self._faults.give_up(f"{self._name} event {number}"):
                    raise TruncatedError("not a session")
        except (TruncatedError, *DAMAGED) as error:
            self._cut_off(f"{self._name} ({word(self._facts.get('id'))})", error)
        yield from events.rest()

    def _steps_of(self, events: Events, event: Any, number: int) -> list[Step]:
        try:
            if not isinstance(event, dict):
                raise TypeError("no object")
            steps = list(events.steps(event))
            self._faults.in_a_row = 0
            return steps
        except ODD as error:
            self._faults.add(f"{self._name} event {number}", f"cannot be read: {error}")
            return []

    def _list(self) -> Iterator[RecordedRun]:
        """Sessions, eval cases, or the events of one session."""
        events: list[Any] = []
        loose = Events(self._model)
        for number, _ in enumerate(self._stream.elements(), 1):
            entry = self._stream.value()
            if isinstance(entry, dict) and isinstance(entry.get("events"), list):
                self._facts = {key: value for key, value in entry.items() if key != "events"}
                yield self._session(self._stored_steps(Events(self._model), entry["events"]))
            elif isinstance(entry, dict) and isinstance(entry.get("conversation"), list):
                yield from self._case(entry, number)
            elif isinstance(entry, dict) and "author" in entry:
                events.append(self._steps_of(loose, entry, number))
            else:
                self._faults.add(f"{self._name} entry {number}", "neither a session nor an event nor an eval case")
                if self._faults.give_up(f"{self._name} entry {number}"):
                    break
        if events:
            yield self._session(step for steps in (*events, loose.rest()) for step in steps)

    def _stored_steps(self, events: Events, stored: list[Any]) -> Iterator[Step]:
        for number, event in enumerate(stored, 1):
            yield from self._steps_of(events, event, number)
        yield from events.rest()

    # ---- eval sets --------------------------------------------------------------------------------------------------

    def _case(self, case: Any, number: int) -> Iterator[RecordedRun]:
        conversation = case.get("conversation") if isinstance(case, dict) else None
        if not isinstance(conversation, list):
            self._faults.add(f"{self._name} case {number}", "no conversation in it")
            return
        name = word(either(case, "eval_id", "evalId")) or f"case {number}"
        session = either(case, "session_input", "sessionInput")
        session = session if isinstance(session, dict) else {}
        app, user = word(either(session, "app_name", "appName")), word(either(session, "user_id", "userId"))
        yield RecordedRun(
            name,
            self._conversation(conversation, name),
            app,
            user,
            name,
            source=word(either(self._facts, "eval_set_id", "evalSetId")) or self._name,
        )

    def _conversation(self, conversation: list[Any], name: str) -> Iterator[Step]:
        """An eval set keeps the tool calls of each turn and its last words; tokens are estimated from their length."""
        history = 0
        for number, turn in enumerate(conversation, 1):
            try:
                steps, history = self._eval_turn(turn, history, f"{name}#{number}")
            except ODD as error:
                self._faults.add(f"{self._name} ({name}) turn {number}", f"cannot be read: {error}")
                continue
            yield from steps

    def _eval_turn(self, turn: dict[str, Any], history: int, name: str) -> tuple[list[Step], int]:
        at = time_of(either(turn, "creation_timestamp", "creationTimestamp"))
        steps: list[Step] = [Turn(at, str(either(turn, "invocation_id", "invocationId") or name))]
        history += size_of(either(turn, "user_content", "userContent"), _ENOUGH)
        data = either(turn, "intermediate_data", "intermediateData") or {}
        stored = either(data, "invocation_events", "invocationEvents")
        if isinstance(stored, list):
            contents = [
                (str(entry.get("author") or "agent"), (entry.get("content") or {}).get("parts") or [])
                for entry in stored
            ]
        else:
            contents = self._paired(data)
        final = either(turn, "final_response", "finalResponse")
        if isinstance(final, dict):
            contents.append((contents[-1][0] if contents else "agent", final.get("parts") or []))
        for number, (author, parts) in enumerate(contents, 1):
            history = self._eval_content(steps, at, author, parts, f"{name}.{number}", history)
        return steps, history

    @staticmethod
    def _paired(data: dict[str, Any]) -> list[tuple[str, list[Any]]]:
        """Tool uses and tool responses in two lists: each use with its answer."""
        uses = either(data, "tool_uses", "toolUses") or []
        answers = {
            str(a.get("id") or number): a
            for number, a in enumerate(either(data, "tool_responses", "toolResponses") or [])
        }
        found: list[tuple[str, list[Any]]] = []
        for number, use in enumerate(uses):
            found.append(("agent", [{"function_call": use}]))
            answer = answers.get(str(use.get("id") or number))
            if answer is not None:
                found.append(("agent", [{"function_response": answer}]))
        return found

    def _eval_content(
        self, steps: list[Step], at: float | None, author: str, parts: list[Any], batch: str, history: int
    ) -> int:
        size = size_of(parts, _ENOUGH)
        calls, answers = calls_and_answers(parts)
        for number, answer in enumerate(answers):
            steps.append(
                Answered(
                    at,
                    author,
                    str(answer.get("id") or number),
                    str(answer.get("name") or ""),
                    answer.get("response"),
                    None,
                    batch,
                )
            )
        if not answers and parts:
            usage = Usage(input=history // CHARS_PER_TOKEN, output=size // CHARS_PER_TOKEN)
            text_id = 0 if calls else words_name(json.dumps(parts, default=str))
            steps.append(Asked(at, author, "", self._model, usage, True, batch, text_id, bool(calls)))
            for number, call in enumerate(calls):
                steps.append(
                    Called(
                        at,
                        author,
                        "",
                        batch,
                        str(call.get("id") or number),
                        str(call.get("name") or ""),
                        call.get("args"),
                    )
                )
        return history + size
