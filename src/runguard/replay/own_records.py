"""RunGuard's own records in a store: the journal of each run, from which every rule can be judged again. Of a run
without one (its journal was purged) there is what each model call took: enough for money, tokens, calls, growth and
time."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from runguard.core.errors import PolicyError
from runguard.core.money import fault_of_dollars, to_nano
from runguard.pricing.rates import Usage
from runguard.replay.adk_database import connect, connect_postgres
from runguard.replay.bounded_files import check_size, load_json
from runguard.replay.steps import ODD, Asked, Faults, RecordedRun, Step, Turn, UnreadableError, Wrote, word
from runguard.reporting.journal import KIND, Entry, check_entry, read_entries

_ROWS: Final = "SELECT ref, kind, at, text FROM {} WHERE kind IN ('call', 'run', 'steps') ORDER BY ref, seq"
_SCHEMA: Final = "runguard"
_AT_ONCE: Final = 1_000
Row = tuple[str, str, float, str]


def sqlite_records(path: Path, faults: Faults) -> Iterator[RecordedRun]:
    with closing(connect(path)) as db:
        yield from _runs(db.execute(_ROWS.format("records")), path.name, faults)


def has_records(url: str) -> bool:
    """Whether a Postgres database is one of our stores.

    Asked before anything is read: connecting as a store would make one.
    """
    plain, schema = without_schema(url)
    with connect_postgres(plain) as db:
        found = db.execute(
            "SELECT 1 FROM information_schema.tables WHERE table_schema = %s AND table_name = 'records'", (schema,)
        ).fetchone()
        return found is not None


def postgres_records(url: str, faults: Faults) -> Iterator[RecordedRun]:
    plain, schema = without_schema(url)
    if not schema.replace("_", "").isalnum():
        raise UnreadableError("a schema's name has letters, digits and underscores")
    with connect_postgres(plain) as db, db.cursor(name="runguard_records") as cursor:
        cursor.itersize = _AT_ONCE
        cursor.execute(_ROWS.format(f'"{schema}".records'))
        yield from _runs(cursor, "records", faults)


def is_redis_store(url: str) -> bool:
    """Whether a Redis or Valkey namespace is one of our stores. Connecting as a store would make one."""
    with _redis(url) as (server, prefix):
        return bool(server.exists(f"{prefix}schema"))


def redis_records(url: str, faults: Faults) -> Iterator[RecordedRun]:
    """The server keeps records by time. A temporary SQLite database sorts them by run, so that memory stays bounded."""
    with closing(sqlite3.connect("")) as spool:
        spool.execute("CREATE TABLE records (ref TEXT, kind TEXT, at REAL, text TEXT, seq INTEGER PRIMARY KEY)")
        with _redis(url) as (server, prefix):
            for kind in ("run", "call", KIND):
                spool.executemany(
                    "INSERT INTO records (ref, kind, at, text) VALUES (?, ?, ?, ?)",
                    _redis_rows(server, f"{prefix}r:{kind}", kind),
                )
        yield from _runs(spool.execute(_ROWS.format("records")), "records", faults)


def _redis_rows(server: Any, stream: str, kind: str) -> Iterator[Row]:
    after = "-"
    while page := server.xrange(stream, after, "+", _AT_ONCE):
        for place, fields in page:
            yield fields["ref"], kind, float(fields["at"]), fields["text"]
            after = f"({place}"


@contextmanager
def _redis(url: str) -> Iterator[tuple[Any, str]]:
    """A plain connection that writes nothing, and the prefix of our keys."""
    try:
        import redis

        from runguard.ledger.redis import RedisStore
    except ImportError:
        raise UnreadableError(
            "a Redis or Valkey store needs the redis package: pip install 'runguard-agents[redis]'"
        ) from None
    try:
        store = RedisStore(url)
        server: Any = redis.Redis.from_url(
            store._url, decode_responses=True, protocol=2, socket_timeout=10, socket_connect_timeout=10
        )
    except (PolicyError, ValueError) as error:
        raise UnreadableError(str(error)) from None
    with closing(server):
        try:
            yield server, f"{{{store.namespace}}}:"
        except (redis.RedisError, KeyError, ValueError) as error:  # the last two: what is in those keys is not ours
            raise UnreadableError(f"{store.name}: cannot be read: {type(error).__name__}: {error}") from None


def without_schema(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    schema = dict(parse_qsl(parts.query)).get("schema", _SCHEMA)
    kept = "&".join(option for option in parts.query.split("&") if not option.startswith("schema="))
    return urlunsplit(parts._replace(query=kept)), schema


def _runs(rows: Any, where: str, faults: Faults) -> Iterator[RecordedRun]:
    for name, group in groupby(rows, lambda row: row[0]):
        calls: dict[str, tuple[float, dict[str, Any]]] = {}
        facts: dict[str, Any] = {}
        journal: list[Entry] = []
        pieces = 0
        for place, (_, kind, at, text) in enumerate(group):
            try:
                if kind == KIND:
                    check_size(text)
                    piece = read_entries(text)
                    number = piece[0].get("p") if piece else None
                    if number not in (1, pieces + 1):
                        faults.add(
                            f"{where} ({name})", "a piece of the journal is missing: what follows is judged without it"
                        )
                    pieces = number if isinstance(number, int) else pieces
                    journal += piece
                    continue
                record, moment = load_json(text), float(at)
                if not isinstance(record, dict):
                    raise TypeError("no object")
            except ODD as error:
                faults.add(f"{where} ({name})", f"a record cannot be read: {error}")
                continue
            if kind == "run":
                facts = record
            else:  # a later record with the same id replaces the earlier
                calls[word(record.get("id")) or str(place)] = (moment, record)
        if journal and journal[0]["k"] == "start":
            facts, steps = journal[0], _entries(journal, f"{where} ({name})", faults)
        else:
            steps = _steps(name, list(calls.values()))
        yield RecordedRun(
            word(name), steps, word(facts.get("app")), word(facts.get("user")), word(facts.get("session")), source=where
        )


def _entries(journal: list[Entry], where: str, faults: Faults) -> Iterator[Step]:
    for entry in journal:
        try:
            check_entry(entry)
        except ValueError as error:
            faults.add(where, str(error))
        else:
            yield Wrote(entry.get("t"), entry)


def _steps(name: str, calls: list[tuple[float, dict[str, Any]]]) -> Iterator[Step]:
    yield Turn(calls[0][0] if calls else None, name)
    for at, record in calls:
        if record.get("kind") == "tool":
            usd = record.get("usd")
            nano = 0 if fault_of_dollars(usd, 0) else to_nano(usd, least=0)
            entry = {"k": "tool_paid", "id": "", "tool": word(record.get("tool")), "nano": nano}
            yield Wrote(at, {**entry, "estimated": bool(record.get("estimated"))})
            continue
        usage = Usage(
            input=_count(record.get("input")),
            output=_count(record.get("output")),
            cached=_count(record.get("cached")),
            searches=_count(record.get("searches")),
        )
        agent, model = word(record.get("agent")), word(record.get("model"))
        yield Asked(at, agent, "", model, usage, bool(record.get("estimated")), goes_on=True)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
