"""Read recordings of ADK: JSON exports, eval sets and session databases, all from their stored events.

``sources`` calls it. Keys may be in snake or camel case.
"""

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, quote, urlsplit, urlunsplit

from runguard.core.decision import LEFT_OUT, METADATA_KEY, NOT_EXECUTED, NOTICE_KEY, STOP_CODE
from runguard.core.events import Outcome
from runguard.core.identity import CHARS_PER_TOKEN, LruDict, answer_text, size_of, words_name
from runguard.engine.resume import run_name
from runguard.pricing.rates import Usage
from runguard.providers.a2a import RESPONSE_KEY, ReplyReader
from runguard.providers.usage import CallUsage, EventUsage
from runguard.replay.steps import (
    DAMAGED,
    ODD,
    Answered,
    Asked,
    Called,
    Changed,
    Delegated,
    Faults,
    JsonStream,
    Passed,
    RecordedRun,
    Resumed,
    Step,
    Stopped,
    TruncatedError,
    Turn,
    UnpackedError,
    UnreadableError,
    load_json,
    open_text,
    possible,
    time_of,
    word,
)

# ---- stored events as steps: what the live adapter reads from hooks, read from the record

_Data = dict[str, Any]
_USER: Final = "user"
_CUT: Final = "MAX_TOKENS"  # the finish reason of a response that hit its output limit
# Stops that a model call was refused with: the call was asked for and not made.
_AT_MODEL: Final = frozenset({"model_calls", "deadline", "growth", "context", "budget", "unpriced"})


def either(data: dict[str, Any], snake: str, camel: str) -> Any:
    value = data.get(snake)
    return data.get(camel) if value is None else value


def calls_and_answers(parts: list[Any]) -> tuple[list[_Data], list[_Data]]:
    """Return the function calls and the function responses of a content."""
    calls = (either(part, "function_call", "functionCall") for part in parts)
    answers = (either(part, "function_response", "functionResponse") for part in parts)
    return [one for one in calls if isinstance(one, dict)], [one for one in answers if isinstance(one, dict)]


class Events:
    """The events of one session, in the order in which they passed the runner."""

    def __init__(self, model: str = "") -> None:
        self._model = model  # where events do not name theirs
        self._invocation = ""
        self._messages: dict[str, int] = {}  # of the user, by invocation
        self._last: tuple[str, str, Any] | None = None  # author, branch and usage of the last model event
        self._usage = EventUsage()
        self._remote = RemoteReplies()

    def rest(self) -> list[Step]:
        """Return the steps that the end of the session completes."""
        return [*self._remote.rest()]

    def steps(self, event: dict[str, Any]) -> Iterator[Step]:
        """Yield the steps of one event; raise ValueError or TypeError if it is not an event."""
        author = event.get("author") or ""
        content = event.get("content") or {}
        if not isinstance(author, str) or not isinstance(content, dict):
            raise TypeError("an event has an author and a content")
        if event.get("partial"):
            self._usage.read(event)
            return
        at = time_of(event.get("timestamp"))
        actions = event.get("actions") or {}
        parts = [part for part in content.get("parts") or () if isinstance(part, dict)]
        calls, answers = calls_and_answers(parts)
        invocation = word(either(event, "invocation_id", "invocationId"))
        compaction = actions.get("compaction")
        is_message = author == _USER and bool(parts) and not answers and not compaction
        if (invocation and invocation != self._invocation) or is_message or not self._invocation:
            self._invocation, self._last = invocation or "?", None
            yield from self._remote.rest()
            known = self._messages.get(invocation, 0)
            if invocation:
                self._messages[invocation] = known + is_message
            text = " ".join(said for part in parts if isinstance(said := part.get("text"), str)) if is_message else ""
            resumes = bool(known) and not is_message
            yield Turn(at, run_name(invocation, known + is_message), resumes, text)
        branch = word(event.get("branch"))
        scope = word(either(event, "isolation_scope", "isolationScope"))
        metadata = either(event, "custom_metadata", "customMetadata")
        error = either(event, "error_message", "errorMessage")
        remote = self._remote.read(metadata, error, author, at, branch, scope) if metadata or error else None
        if remote is not None:
            yield from remote
        elif compaction:
            yield Asked(at, "", branch, self._named(event), *self._summary(event, compaction), after_answer=True)
        elif answers:
            self._last = None
            self._usage.pass_by(event)
            if author == _USER:
                yield Resumed(at)
            yield from self._answered(event, at, author, actions, answers)
        elif author != _USER:
            yield from self._spoke(event, at, author, branch, scope, parts, calls)
            if value := _change(event, actions, parts):
                yield Changed(at, author, branch, value, scope)
        else:
            self._usage.pass_by(event)
        target = either(actions, "transfer_to_agent", "transferToAgent")
        if target:
            yield Passed(at, author, branch, word(target), scope)

    def _named(self, event: dict[str, Any]) -> str:
        return word(either(event, "model_version", "modelVersion")) or self._model

    def _summary(self, event: dict[str, Any], compaction: Any) -> tuple[Usage, bool]:
        """Return what the summary of a compaction took, estimated where its event does not report it."""
        call = CallUsage()
        call.add(
            {
                **event,
                "content": either(compaction, "compacted_content", "compactedContent")
                if isinstance(compaction, dict)
                else None,
            }
        )
        return call.bill(self._usage.prompt)

    def _spoke(
        self,
        event: dict[str, Any],
        at: float | None,
        author: str,
        branch: str,
        scope: str,
        parts: list[dict[str, Any]],
        calls: list[dict[str, Any]],
    ) -> Iterator[Step]:
        if either(event, "error_code", "errorCode") == STOP_CODE:
            trip = (either(event, "custom_metadata", "customMetadata") or {}).get(METADATA_KEY)
            rule = word(trip.get("rule")) if isinstance(trip, dict) else ""
            if rule in _AT_MODEL:
                yield Asked(at, author, branch, self._named(event), Usage(), refused=True, scope=scope)
            yield Stopped(at)
            return
        raw = either(event, "usage_metadata", "usageMetadata")
        has_content = (
            raw is not None
            or bool(calls)
            or any(event.get(name) for name in ("model_version", "modelVersion", "finish_reason", "finishReason"))
        )
        if not has_content or (not parts and (author, branch, raw) == self._last):
            self._usage.pass_by(event)
            return  # an agent's or a node's own event; or the empty end of a stream, which repeats its usage
        self._last = (author, branch, raw)
        taken = self._usage.read(event, is_answer=True)
        path = (either(event, "node_info", "nodeInfo") or {}).get("path") or ""
        opened_by = path.rpartition("@")[2]
        if opened_by and not opened_by.isdigit():
            # a task: its node is named by the call; one of an agent called as a tool has a number
            yield Delegated(opened_by)
        text_id, words = 0, ""
        if all(isinstance(p.get("text"), str) for p in parts):
            words = "".join(p["text"] for p in parts if isinstance(p.get("text"), str) and not p.get("thought"))
            text_id = words_name(words or str(either(event, "error_code", "errorCode") or ""))
        batch = word(event.get("id"))
        if taken is not None:  # else the function calls of an answer whose words came before
            yield Asked(
                at,
                author,
                branch,
                self._named(event),
                taken.usage,
                taken.estimated,
                batch,
                text_id,
                bool(calls),
                scope=scope,
                is_cut=either(event, "finish_reason", "finishReason") == _CUT,
                text=words,
            )
        for call in calls:
            yield Called(
                at, author, branch, batch, word(call.get("id")), word(call.get("name")), call.get("args"), scope
            )

    def _answered(
        self,
        event: dict[str, Any],
        at: float | None,
        author: str,
        actions: dict[str, Any],
        answers: list[dict[str, Any]],
    ) -> Iterator[Step]:
        waiting = {
            *(either(actions, "requested_tool_confirmations", "requestedToolConfirmations") or ()),
            *(either(actions, "requested_auth_configs", "requestedAuthConfigs") or ()),
        }
        ends = author == _USER or bool(
            either(actions, "skip_summarization", "skipSummarization") or actions.get("escalate")
        )
        for answer in answers:
            value, outcome = answer.get("response"), None
            if isinstance(value, dict):
                if value.get("status") in (NOT_EXECUTED, LEFT_OUT) and "message" in value and len(value) == 2:
                    outcome = Outcome.REFUSED
                elif NOTICE_KEY in value:
                    value = {key: entry for key, entry in value.items() if key != NOTICE_KEY}  # it was judged without
            name, call_id = word(answer.get("name")), word(answer.get("id"))
            yield Answered(at, author, call_id, name, value, outcome, word(event.get("id")), ends, call_id in waiting)


def read_events(stored: Iterable[tuple[Any, Any]], where: str, faults: Faults, model: str) -> Iterator[Step]:
    """Yield the steps of the stored events of one session, given as times and events; report those that are none."""
    events = Events(model)
    for number, (at, data) in enumerate(stored, 1):
        try:
            event = load_json(data) if isinstance(data, str | bytes) else data
            if not isinstance(event, dict):
                raise TypeError("no object")
            if at is not None and event.get("timestamp") is None:
                event["timestamp"] = at if isinstance(at, int | float | str) else at.isoformat()
            steps = list(events.steps(event))
        except ODD as error:
            faults.add(f"{where} event {number}", f"cannot be read: {error}")
            if faults.give_up(f"{where} event {number}"):
                break
            continue
        faults.in_a_row = 0
        for step in steps:
            if type(step) is Asked and step.usage is not None:
                step.usage = possible(step.usage, where, faults)
            yield step
    yield from events.rest()


def _change(event: dict[str, Any], actions: dict[str, Any], parts: list[dict[str, Any]]) -> int:
    """Return a name for what the event has stored, or 0. Words of an agent under its ``output_key`` do not count."""
    stored, output = either(actions, "state_delta", "stateDelta"), None if parts else event.get("output")
    changed: list[Any] = [] if output is None else [output]
    if isinstance(stored, dict) and stored:
        words = "".join(p["text"] for p in parts if isinstance(p.get("text"), str) and not p.get("thought"))
        changed += [[key, value] for key, value in stored.items() if value != words]
    return words_name(answer_text(changed)) if changed else 0


# ---- JSON: sessions as ``adk web`` and the REST API export them, lists of them or of events, and eval sets

_ENOUGH: Final = 64_000_000


def runs_of(path: Path, max_unpacked: int, faults: Faults, model: str) -> Iterator[RecordedRun]:
    with open_text(path, max_unpacked) as file:
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
        """Yield a session, whose events are streamed, or the cases of an eval set.

        ADK writes the names of both before them.
        """
        for key in self._stream.members():
            if key == "events" and self._stream.peek() == "[":
                yield self._session(self._streamed())
            elif key in ("eval_cases", "evalCases") and self._stream.peek() == "[":
                for number, _ in enumerate(self._stream.elements(), 1):
                    yield from self._case(self._stream.value(), number)
            else:
                self._facts[key] = self._stream.value()

    def _session(self, stored: Iterable[tuple[None, Any]]) -> RecordedRun:
        facts, steps = self._facts, read_events(stored, self._name, self._faults, self._model)
        app, user = word(either(facts, "app_name", "appName")), word(either(facts, "user_id", "userId"))
        name = word(facts.get("id")) or self._name
        return RecordedRun(name, steps, app, user, name, source=app or self._name)

    def _streamed(self) -> Iterator[tuple[None, Any]]:
        try:
            for _ in self._stream.elements():
                yield None, self._stream.value()
        except (TruncatedError, *DAMAGED) as error:
            self._cut_off(f"{self._name} ({word(self._facts.get('id'))})", error)

    def _list(self) -> Iterator[RecordedRun]:
        """Sessions, eval cases, or the events of one session."""
        loose: list[tuple[None, Any]] = []
        for number, _ in enumerate(self._stream.elements(), 1):
            entry = self._stream.value()
            if isinstance(entry, dict) and isinstance(entry.get("events"), list):
                self._facts = {key: value for key, value in entry.items() if key != "events"}
                yield self._session((None, event) for event in entry["events"])
            elif isinstance(entry, dict) and isinstance(entry.get("conversation"), list):
                yield from self._case(entry, number)
            elif isinstance(entry, dict) and "author" in entry:
                loose.append((None, entry))
            else:
                self._faults.add(f"{self._name} entry {number}", "neither a session nor an event nor an eval case")
                if self._faults.give_up(f"{self._name} entry {number}"):
                    break
        if loose:
            yield self._session(loose)

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
        """Yield the steps of a case: tool calls and last words of each turn. Estimate tokens from their length."""
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
        steps: list[Step] = [Turn(at, word(either(turn, "invocation_id", "invocationId")) or name)]
        history += size_of(either(turn, "user_content", "userContent"), _ENOUGH)
        data = either(turn, "intermediate_data", "intermediateData") or {}
        stored = either(data, "invocation_events", "invocationEvents")
        if isinstance(stored, list):
            contents = [
                (word(entry.get("author")) or "agent", (entry.get("content") or {}).get("parts") or [])
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
                    word(answer.get("id")) or str(number),
                    word(answer.get("name")),
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
                        word(call.get("id")) or str(number),
                        word(call.get("name")),
                        call.get("args"),
                    )
                )
        return history + size


# ---- session databases: SqliteSessionService, and DatabaseSessionService (schema v1); only read
# The legacy schema of DatabaseSessionService keeps part of each event as a pickle. Unpickling runs whatever the file
# says, so it is refused.

Session = tuple[str, str, str]  # app, user, session
LEGACY: Final = (
    "this database has the legacy schema of DatabaseSessionService, which keeps the actions of events as "
    "pickles. Unpickling a file runs code "
    "that the file chooses, so it is not read. Move it first with 'adk migrate session' and replay the new database"
)
_EVENTS: Final = "SELECT timestamp, event_data FROM events WHERE app_name = ? AND user_id = ? AND session_id = ?"
_SESSIONS: Final = "SELECT app_name, user_id, id FROM sessions ORDER BY create_time, app_name, user_id, id"
_SQLITE_TABLES: Final = (
    "SELECT tables.name, fields.name FROM sqlite_master AS tables, pragma_table_info(tables.name) AS fields "
    "WHERE tables.type = 'table'"
)
_POSTGRES_TABLES: Final = (
    "SELECT table_name, column_name FROM information_schema.columns "
    "WHERE table_schema = ANY(current_schemas(false) || ?)"
)
_COLUMNS: Final = {
    "events": {"app_name", "user_id", "session_id", "timestamp", "event_data"},
    "sessions": {"app_name", "user_id", "id", "create_time"},
}
_AT_ONCE: Final = 500
_SCHEMA: Final = "runguard"


def check_columns(tables: dict[str, set[str]]) -> None:
    """Whether the tables ``events`` and ``sessions`` are ones that can be read."""
    if "event_data" not in tables["events"] and "actions" in tables["events"]:
        raise UnreadableError(LEGACY)
    for table, needed in _COLUMNS.items():
        if missing := sorted(needed - tables[table]):
            raise UnreadableError(f"its table '{table}' is not one of ADK's: it has no column {missing[0]}")


Where = Path | str  # a file of SQLite, or the URL of a database of Postgres
Ask = Callable[..., Any]  # yields rows, given a query and its parameters


@contextmanager
def opened(where: Where) -> Iterator[Ask]:
    """Open a database to read only, because a service may be writing to it. Give a function that yields rows."""
    if isinstance(where, Path):
        with closing(sqlite3.connect(f"file:{quote(str(where))}?mode=ro", uri=True)) as db:
            db.text_factory = lambda raw: raw.decode("utf-8", "replace")
            yield db.execute
    else:
        with connect_postgres(without_schema(where)[0]) as server:
            yield partial(_rows, server)


def _rows(server: Any, query: str, values: Sequence[Any] = ()) -> Iterator[Any]:
    with server.cursor(name="runguard") as cursor:
        cursor.itersize = _AT_ONCE
        cursor.execute(query.replace("?", "%s"), values)
        yield from cursor


def tables_of(where: Where) -> dict[str, set[str]]:
    """Return the tables of a database and their columns; in Postgres also those of the schema that the URL names."""
    found: dict[str, set[str]] = {}
    query = (_SQLITE_TABLES,) if isinstance(where, Path) else (_POSTGRES_TABLES, ([without_schema(where)[1]],))
    try:
        with opened(where) as ask:
            for table, column in ask(*query):
                found.setdefault(table, set()).add(column)
    except (sqlite3.Error, UnicodeError) as error:
        raise UnreadableError(f"not a SQLite database that can be read: {error}") from None
    return found


def sessions_of(where: Where) -> Iterator[Session]:
    with opened(where) as ask:
        yield from ask(_SESSIONS)


def runs_in(where: Where, sessions: list[Session], faults: Faults, model: str) -> Iterator[RecordedRun]:
    """Yield the run of each session. Its events are in the order in which they were stored."""
    order = "rowid" if isinstance(where, Path) else "timestamp, ctid"
    with opened(where) as ask:
        for session in sessions:
            with closing(ask(f"{_EVENTS} ORDER BY {order}", session)) as rows:
                app, user, name = (word(part) for part in session)
                place = f"{app}/{user}/{name}"
                steps = read_events(_whole(rows, place, faults), place, faults, model)
                yield RecordedRun(name, steps, app, user, name, source=app)


def _whole(rows: Any, where: str, faults: Faults) -> Iterator[Any]:
    """Yield rows up to where the database is damaged."""
    try:
        yield from rows
    except Exception as error:  # sqlite3.Error or psycopg.Error: each driver has its own
        faults.add(where, f"cannot be read to its end: {type(error).__name__}: {error}")


def without_schema(url: str) -> tuple[str, str]:
    """Return a URL of Postgres without the schema of our tables in it, and that schema."""
    parts = urlsplit(url)
    schema = dict(parse_qsl(parts.query)).get("schema", _SCHEMA)
    kept = "&".join(option for option in parts.query.split("&") if not option.startswith("schema="))
    return urlunsplit(parts._replace(query=kept)), schema


def connect_postgres(url: str) -> Any:
    try:
        import psycopg
    except ImportError:
        raise UnreadableError("a Postgres database needs psycopg: pip install 'runguard-agents[postgres]'") from None
    scheme, _, rest = url.partition("://")
    try:
        params = psycopg.conninfo.conninfo_to_dict(f"{scheme.partition('+')[0]}://{rest}")
    except psycopg.Error:  # its message may quote the URL
        raise UnreadableError(
            "cannot connect: libpq does not understand this address, or an option after its question mark"
        ) from None
    try:
        db = psycopg.connect(**{"connect_timeout": 10, **params})  # type: ignore[arg-type]
    except psycopg.Error as error:
        raise UnreadableError(f"cannot connect: {_text_of(error, str(params.get('password') or ''))}") from None
    db.read_only = True
    return db


def _text_of(error: Exception, password: str) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text.replace(password, "***") if password else text


# ---- calls of remote A2A agents: read as the live guard reads them

_PREFIX: Final = "a2a:"  # of ADK's metadata about a remote call
_TASKS_KEPT: Final = 10_000


@dataclass(slots=True)
class _OpenReply:
    """A remote call whose reply has not ended."""

    at: float | None
    branch: str
    scope: str
    reports: list[Usage] = field(default_factory=list)
    went_on: int = 0  # reports after which the remote agent went on
    lacks_usage: bool = False


class RemoteReplies:
    """The remote calls of one session. A reply comes in several events; it is one call."""

    def __init__(self) -> None:
        self._reader = ReplyReader()
        self._open: dict[tuple[str, str], _OpenReply] = {}  # by author and branch
        self._ended = LruDict[str, None](_TASKS_KEPT)  # tasks

    def read(
        self, metadata: Any, error: Any, author: str, at: float | None, branch: str, scope: str
    ) -> list[Asked] | None:
        """Return the calls that an event completes, or None for an event of no remote agent."""
        key, facts = (author, branch), metadata if isinstance(metadata, dict) else {}
        response = facts.get(RESPONSE_KEY)
        if not isinstance(response, dict):
            is_remote = key in self._open or any(str(name).startswith(_PREFIX) for name in facts)
            if not error or not is_remote:
                return None
            call = self._open.setdefault(key, _OpenReply(at, branch, scope))
            call.at, call.lacks_usage = at, True  # the far side is gone, or never was there
            return self._close(key)
        task, reply = str(response.get("id") or ""), self._reader.read(response)
        if not reply.reports and task in self._ended:
            return []
        call = self._open.setdefault(key, _OpenReply(at, branch, scope))
        call.at = at
        call.reports += reply.reports
        if not reply.is_over:
            call.went_on = len(call.reports)
            return []
        if task:
            self._ended[task] = None
        call.lacks_usage = call.lacks_usage or not call.reports
        return self._close(key)

    def rest(self) -> list[Asked]:
        """Return the calls whose replies never ended, with what they reported until then."""
        return [asked for key in list(self._open) for asked in self._close(key)]

    def _close(self, key: tuple[str, str]) -> list[Asked]:
        call, author = self._open.pop(key), key[0]
        where = (call.at, author, call.branch)
        calls = []
        if call.reports:
            calls.append(Asked(*where, scope=call.scope, reports=tuple(call.reports), went_on=call.went_on))
        if call.lacks_usage or not call.reports:
            calls.append(Asked(*where, scope=call.scope, reports=()))
        return calls
