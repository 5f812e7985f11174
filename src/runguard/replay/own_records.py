"""RunGuard's own records in a store: what each model call of each run took. Tool calls and texts are not kept there, so only the rules
about money, tokens, calls, growth and time have something to look at."""

import json
from collections.abc import Iterator
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from runguard.pricing import Usage
from runguard.replay.adk_database import connect, connect_postgres
from runguard.replay.steps import Asked, Faults, RecordedRun, Step, Turn, UnreadableError

_ROWS: Final = "SELECT ref, kind, at, text FROM {} WHERE kind IN ('call', 'run') ORDER BY ref, seq"
_SCHEMA: Final = "runguard"
_AT_ONCE: Final = 1_000
Row = tuple[str, str, float, str]


def sqlite_records(path: Path, faults: Faults) -> Iterator[RecordedRun]:
    with closing(connect(path)) as db:
        yield from _runs(db.execute(_ROWS.format("records")), path.name, faults)


def has_records(url: str) -> bool:
    """Whether a Postgres database is one of our stores. Asked before anything is read: connecting as a store would make one."""
    plain, schema = without_schema(url)
    with connect_postgres(plain) as db:
        found = db.execute("SELECT 1 FROM information_schema.tables WHERE table_schema = %s AND table_name = 'records'", (schema,)).fetchone()
        return found is not None


def postgres_records(url: str, faults: Faults) -> Iterator[RecordedRun]:
    plain, schema = without_schema(url)
    if not schema.replace("_", "").isalnum():
        raise UnreadableError("a schema's name has letters, digits and underscores")
    with connect_postgres(plain) as db, db.cursor(name="runguard_records") as cursor:
        cursor.itersize = _AT_ONCE
        cursor.execute(_ROWS.format(f'"{schema}".records'))
        yield from _runs(cursor, "records", faults)


def without_schema(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    schema = dict(parse_qsl(parts.query)).get("schema", _SCHEMA)
    kept = "&".join(option for option in parts.query.split("&") if not option.startswith("schema="))
    return urlunsplit(parts._replace(query=kept)), schema


def _runs(rows: Any, where: str, faults: Faults) -> Iterator[RecordedRun]:
    for name, group in groupby(rows, lambda row: row[0]):
        calls: dict[str, tuple[float, dict[str, Any]]] = {}
        facts: dict[str, Any] = {}
        for number, (_, kind, at, text) in enumerate(group):
            try:
                record = json.loads(text)
                if not isinstance(record, dict):
                    raise TypeError("no object")
            except (ValueError, TypeError) as error:
                faults.add(f"{where} ({name})", f"a record cannot be read: {error}")
                continue
            if kind == "run":
                facts = record
            else:  # a later record with the same id replaces the earlier
                calls[str(record.get("id") or number)] = (float(at), record)
        yield RecordedRun(
            name, _steps(name, list(calls.values())), str(facts.get("app") or ""), str(facts.get("user") or ""), str(facts.get("session") or ""), source=where
        )


def _steps(name: str, calls: list[tuple[float, dict[str, Any]]]) -> Iterator[Step]:
    yield Turn(calls[0][0] if calls else None, name)
    for at, record in calls:
        usage = Usage(input=_count(record.get("input")), output=_count(record.get("output")), cached=_count(record.get("cached")))
        agent, model = str(record.get("agent") or ""), str(record.get("model") or "")
        yield Asked(at, agent, "", model, usage, bool(record.get("estimated")), goes_on=True)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
