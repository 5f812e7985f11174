"""ADK's session databases: SqliteSessionService, and DatabaseSessionService (schema v1) on SQLite or Postgres. Only
read, never written.

The legacy schema of DatabaseSessionService keeps part of each event as a pickle. Unpickling runs whatever the file
says, so it is refused.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from runguard.replay.adk_events import Events
from runguard.replay.bounded_files import load_json
from runguard.replay.steps import ODD, Faults, RecordedRun, Step, UnreadableError, word

Session = tuple[str, str, str]  # app, user, session
LEGACY: Final = (
    "this database has the legacy schema of DatabaseSessionService, which keeps the actions of events as "
    "pickles. Unpickling a file runs code "
    "that the file chooses, so it is not read. Move it first with 'adk migrate session' and replay the new database"
)
_EVENTS: Final = (
    "SELECT timestamp, event_data FROM events WHERE app_name = ? AND user_id = ? AND session_id = ? ORDER BY rowid"
)
_PG_EVENTS: Final = (
    "SELECT timestamp, event_data FROM events WHERE app_name = %s AND user_id = %s AND session_id = %s ORDER BY "
    "timestamp, ctid"
)
_SESSIONS: Final = "SELECT app_name, user_id, id FROM sessions ORDER BY create_time, app_name, user_id, id"
_COLUMNS: Final = {
    "events": {"app_name", "user_id", "session_id", "timestamp", "event_data"},
    "sessions": {"app_name", "user_id", "id", "create_time"},
}
_AT_ONCE: Final = 500


def check_columns(tables: dict[str, set[str]]) -> None:
    """Whether the tables ``events`` and ``sessions`` are ones that can be read."""
    if "event_data" not in tables["events"] and "actions" in tables["events"]:
        raise UnreadableError(LEGACY)
    for table, needed in _COLUMNS.items():
        if missing := sorted(needed - tables[table]):
            raise UnreadableError(f"its table '{table}' is not one of ADK's: it has no column {missing[0]}")


# ---- SQLite ---------------------------------------------------------------------------------------------------------


def connect(path: Path) -> sqlite3.Connection:
    """Read only: a service may be writing to it."""
    db = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)
    db.text_factory = lambda raw: raw.decode("utf-8", "replace")
    return db


def sqlite_tables(path: Path) -> dict[str, set[str]]:
    """Tables and their columns."""
    try:
        with closing(connect(path)) as db:
            names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            return {
                name: {column for (column,) in db.execute("SELECT name FROM pragma_table_info(?)", (name,))}
                for name in names
            }
    except (sqlite3.Error, UnicodeError) as error:
        raise UnreadableError(f"not a SQLite database that can be read: {error}") from None


def sqlite_sessions(path: Path) -> Iterator[Session]:
    with closing(connect(path)) as db:
        yield from db.execute(_SESSIONS)


def sqlite_runs(path: Path, sessions: list[Session], faults: Faults, model: str = "") -> Iterator[RecordedRun]:
    with closing(connect(path)) as db:
        for session in sessions:
            rows = db.execute(_EVENTS, session)
            yield _run(session, rows, faults, model)


# ---- Postgres -------------------------------------------------------------------------------------------------------


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


def postgres_columns(url: str) -> dict[str, set[str]]:
    with connect_postgres(url) as db:
        found: dict[str, set[str]] = {}
        query = (
            "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = ANY "
            "(current_schemas(false))"
        )
        for table, column in db.execute(query):
            found.setdefault(table, set()).add(column)
        return found


def postgres_sessions(url: str) -> Iterator[Session]:
    with connect_postgres(url) as db, db.cursor(name="runguard_sessions") as cursor:
        cursor.itersize = _AT_ONCE
        cursor.execute(_SESSIONS)
        yield from cursor


def postgres_runs(url: str, sessions: list[Session], faults: Faults, model: str = "") -> Iterator[RecordedRun]:
    with connect_postgres(url) as db:
        for session in sessions:
            with db.cursor(name="runguard_events") as cursor:
                cursor.itersize = _AT_ONCE
                cursor.execute(_PG_EVENTS, session)
                yield _run(session, cursor, faults, model)


# ---- both -----------------------------------------------------------------------------------------------------------


def _run(session: Session, rows: Any, faults: Faults, model: str) -> RecordedRun:
    app, user, name = (word(part) for part in session)
    return RecordedRun(name, _steps(rows, f"{app}/{user}/{name}", faults, model), app, user, name, source=app)


def _steps(rows: Any, where: str, faults: Faults, model: str) -> Iterator[Step]:
    events = Events(model)
    for number, (at, data) in enumerate(_whole(rows, where, faults), 1):
        try:
            event = load_json(data) if isinstance(data, str | bytes) else data
            if not isinstance(event, dict):
                raise TypeError("no object")
            if event.get("timestamp") is None:
                event["timestamp"] = at if isinstance(at, int | float | str) else at.isoformat()
            steps = list(events.steps(event))
        except ODD as error:
            faults.add(f"{where} event {number}", f"cannot be read: {error}")
            continue
        yield from steps
    yield from events.rest()


def _whole(rows: Any, where: str, faults: Faults) -> Iterator[Any]:
    """Rows up to where the database is damaged."""
    try:
        yield from rows
    except Exception as error:  # sqlite3.Error or psycopg.Error: each driver has its own
        faults.add(where, f"cannot be read to its end: {type(error).__name__}: {error}")
