"""Split a SOURCE into pieces that fit into memory and can be read in another process."""

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

from runguard.replay import adk_database as database
from runguard.replay import adk_json, own_records
from runguard.replay.adk_database import Session
from runguard.replay.bounded_files import DAMAGED, MAX_UNPACKED, is_gzip, lines_of, ranges
from runguard.replay.neutral import read_line
from runguard.replay.steps import Faults, RecordedRun, UnreadableError, word

_Where = TypeVar("_Where", Path, str)  # a file, or the URL of a database
_PART: Final = 4 * 1024 * 1024  # bytes of JSONL that one piece holds
_SESSIONS: Final = 64
_SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".json", ".json.gz", ".db", ".sqlite", ".sqlite3")
_SQLITE: Final = b"SQLite format 3\x00"
_POSTGRES: Final = ("postgres", "postgresql")
_REDIS: Final = ("redis", "rediss", "valkey", "valkeys", "unix")


@dataclass(slots=True)
class Piece:
    """Part of a source, which can be sent to another process. ``size`` is its share of the progress."""

    size: int
    runs: Callable[[Faults, str], Iterator[RecordedRun]]  # given where to report faults, and the model of the runs


@dataclass(slots=True)
class Source:
    """Something to replay. ``unit`` says what its sizes count."""

    name: str
    size: int | None
    unit: str
    read: Callable[[int], Iterator[Piece]]  # given how many bytes to read of a compressed file
    max_unpacked: int = MAX_UNPACKED

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces of the source. An exception ends them and is reported like an unreadable record."""
        try:
            yield from self.read(self.max_unpacked)
        except Exception as error:  # a damaged file or a broken connection; each reader has its own exceptions
            yield Piece(0, partial(_broken, self.name, error_text(error)))


def open_sources(given: str, max_unpacked: int = MAX_UNPACKED) -> list[Source]:
    """Return the sources of a path, a folder or a URL; raise UnreadableError if there is nothing to replay.

    ``max_unpacked``: bytes to read of each compressed file.
    """
    try:
        found = _sources(given)
    except UnreadableError:
        raise
    except Exception as error:
        raise UnreadableError(f"{given}: cannot be read: {error_text(error)}") from None
    for source in found:
        source.max_unpacked = max_unpacked
    return found


def error_text(error: Exception) -> str:
    """Return an exception as one line: its message, with its type unless it is an error about files."""
    # without the path, which the caller adds
    words = " ".join((getattr(error, "strerror", None) or str(error)).split())
    return words if words and isinstance(error, (UnreadableError, *DAMAGED)) else f"{type(error).__name__}: {words}"


def _sources(given: str) -> list[Source]:
    scheme, mark, rest = given.partition("://")
    if mark:
        return [_of_url(given, scheme.partition("+")[0], rest)]
    path = Path(given)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.name.lower().endswith(_SUFFIXES))
        found = [source for file in files if (source := _of_file_in_folder(file)) is not None]
        if not found:
            raise UnreadableError(f"{given}: no recording in this folder; looked for {', '.join(_SUFFIXES)}")
        return found
    if not path.is_file():
        raise UnreadableError(f"{given}: no such file")
    return [_of_file(path)]


def _of_file_in_folder(path: Path) -> Source | None:
    """Return the source, or None for a file that is not a recording; report an unreadable recording."""
    try:
        return _of_file(path)
    except UnreadableError:
        if path.name.lower().endswith((".db", ".sqlite", ".sqlite3")):
            raise
        return None


def _of_file(path: Path) -> Source:
    try:
        with path.open("rb") as file:
            head = file.read(16)
        size = path.stat().st_size
    except OSError as error:
        raise UnreadableError(f"{path}: cannot be read: {error_text(error)}") from None
    if head == _SQLITE:
        return _of_sqlite(path)
    if adk_json.is_document(path):
        return Source(word(path.name), size, "bytes", partial(_json_pieces, path, size))
    if adk_json.is_one_object(path):
        raise UnreadableError(f"{path}: JSON, but neither an ADK session nor an eval set nor lines of runs")
    return Source(word(path.name), size, "bytes", partial(_jsonl_pieces, path))


def _of_sqlite(path: Path) -> Source:
    try:
        tables = database.sqlite_tables(path)
        if {"events", "sessions"} <= tables.keys():
            database.check_columns(tables)
            with_size = sum(1 for _ in database.sqlite_sessions(path))
            sessions = partial(_session_pieces, path, database.sqlite_sessions, database.sqlite_runs)
            return Source(word(path.name), with_size, "sessions", sessions)
    except (UnreadableError, sqlite3.Error) as error:
        raise UnreadableError(f"{path}: {error}") from None
    if {"records", "accounts"} <= tables.keys():
        return _store(word(path.name), own_records.sqlite_records, path)
    raise UnreadableError(f"{path}: neither an ADK session database nor a RunGuard store")


def _of_url(given: str, scheme: str, rest: str) -> Source:
    if scheme == "sqlite":
        if not rest:
            raise UnreadableError(f"{given}: names no file")
        return _of_file(Path(rest.removeprefix("/")))
    if scheme in _POSTGRES:
        name = _without_password(scheme, rest)
        try:
            plain = own_records.without_schema(given)[0]
            tables = database.postgres_columns(plain)
            if {"events", "sessions"} <= tables.keys():
                database.check_columns(tables)
                sessions = partial(_session_pieces, plain, database.postgres_sessions, database.postgres_runs)
                return Source(name, None, "sessions", sessions)
            if own_records.has_records(given):
                return _store(name, own_records.postgres_records, given)
        except UnreadableError as error:
            raise UnreadableError(f"{name}: {error}") from None
        raise UnreadableError(f"{name}: neither an ADK session database nor a RunGuard store")
    if scheme in _REDIS:
        name = _without_password(scheme, rest)
        if not own_records.is_redis_store(given):
            raise UnreadableError(f"{name}: no RunGuard store in this namespace; add ?namespace=name to use another")
        return _store(name, own_records.redis_records, given)
    raise UnreadableError(
        f"{scheme}://…: cannot be replayed; use a file, a folder, sqlite:///path, postgresql://… or redis://…"
    )


def _without_password(scheme: str, rest: str) -> str:
    """Return the URL without the password, which may be before the host or in the options."""
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"


def _store(name: str, records: Callable[[_Where, Faults], Iterator[RecordedRun]], where: _Where) -> Source:
    """A RunGuard store: one piece."""
    return Source(name, 1, "stores", lambda _: iter([Piece(1, partial(_record_runs, records, where))]))


def _session_pieces(
    where: _Where,
    sessions: Callable[[_Where], Iterator[Session]],
    runs: Callable[[_Where, list[Session], Faults, str], Iterator[RecordedRun]],
    _: int,
) -> Iterator[Piece]:
    """Sessions of an ADK database."""
    found = sessions(where)
    while some := list(islice(found, _SESSIONS)):
        yield Piece(len(some), partial(runs, where, some))


def _json_pieces(path: Path, size: int, max_unpacked: int) -> Iterator[Piece]:
    """A JSON file from ADK."""
    yield Piece(size, partial(adk_json.runs_of, path, max_unpacked))


def _jsonl_pieces(path: Path, max_unpacked: int) -> Iterator[Piece]:
    if not is_gzip(path):
        for start, end in ranges(path, _PART):
            yield Piece(end - start, partial(_part_runs, path, start, end))
        return
    faults = Faults()
    held: list[tuple[int, bytes]] = []
    size = 0
    packed = path.stat().st_size
    for begins, line in lines_of(path, faults, max_unpacked=max_unpacked):
        held.append((begins, line))
        size += len(line)
        if size >= _PART:
            yield Piece(0, partial(_unpacked_runs, path.name, held, faults.taken()))
            held, size = [], 0
    # the progress within a compressed file is unknown until its end
    yield Piece(packed, partial(_unpacked_runs, path.name, held, faults))


# ---- the runs of a piece; functions of a module, because those can be sent to another process -----------------------


def _part_runs(path: Path, start: int, end: int, faults: Faults, model: str) -> Iterator[RecordedRun]:
    """Bytes of a plain JSONL file."""
    return _of_lines(lines_of(path, faults, start, end), path.name, faults)


def _unpacked_runs(
    name: str, lines: list[tuple[int, bytes]], found: Faults, faults: Faults, model: str
) -> Iterator[RecordedRun]:
    """Decompressed lines of a compressed file."""
    faults.merge(found)
    return _of_lines(iter(lines), name, faults)


def _record_runs(
    records: Callable[[_Where, Faults], Iterator[RecordedRun]], where: _Where, faults: Faults, model: str
) -> Iterator[RecordedRun]:
    """A RunGuard store, whose records name their models."""
    return records(where, faults)


def _broken(name: str, why: str, faults: Faults, model: str) -> Iterator[RecordedRun]:
    """The rest of a source that cannot be read, and why."""
    faults.add(name, f"cannot be read to its end: {why}")
    return iter(())


def _of_lines(lines: Iterator[tuple[int, bytes]], name: str, faults: Faults) -> Iterator[RecordedRun]:
    for begins, line in lines:
        where = f"{name} at byte {begins}"
        run = read_line(line, where, faults)
        if run is not None:
            faults.in_a_row = 0
            yield run
        elif faults.give_up(where):
            return
