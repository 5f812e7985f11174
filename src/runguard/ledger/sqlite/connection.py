"""One connection to a SQLite file: opening it, its schema and identity, and transactions."""

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from runguard.ledger.identity import IDENTITY, Seen, StoreReplacedError, new_id
from runguard.ledger.sqlite.error_mapping import mapped_errors, store_error_of
from runguard.ledger.sqlite.statements import COUNT_CHANGE, IS_CURRENT, READ_DOCUMENT, SCHEMA
from runguard.ledger.sqlite.writer_queue import WriterQueue, writer_queue
from runguard.ledger.store import SCHEMA_VERSION, StoreError, StoreOutage

_APPLICATION: Final = 0x52474C47  # "RGLG" in the file's header: marks a database of RunGuard
_CHECKPOINT_PAGES: Final = 4_000  # 16 MB


class SqliteConnection:
    """One connection. Every write is a transaction that takes the write lock when it begins, because a read that turns
    into a write fails in WAL mode.
    """

    def __init__(self, path: Path, synchronous: str, timeout: float, seen: Seen) -> None:
        self._path, self._timeout, self._place, self._seen = path, timeout, str(path), seen
        self._queue: WriterQueue | None = None
        self._wal = self._generation = 0
        self._now: float | None = None  # of the step whose parts are under way
        with mapped_errors(path):
            if seen.text:  # create nothing: neither the file nor its tables
                self._db = self._reopened()
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._db = sqlite3.connect(path, timeout=timeout, isolation_level=None, check_same_thread=False)
            try:
                if seen.text:
                    self._meet()
                is_new = not self._is_ours_now()
                self._queue = writer_queue(path, timeout)
                self._inode = path.stat().st_ino
                if is_new:  # before anything is written to it
                    self._db.execute("PRAGMA auto_vacuum=INCREMENTAL")
                self._use_wal()
                self._db.execute(f"PRAGMA synchronous={synchronous}")
                # every commit is on disk already; how often the log is merged into the file only affects speed
                if synchronous == "full":
                    self._db.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}")
                if not seen.text:
                    self._migrate()
                self._meet()
                self._wal = _inode(f"{path}-wal")
                seen.files = (self._inode, self._wal)
            except BaseException:
                self.close()
                raise

    # ---- identity ---------------------------------------------------------------------------------------------------

    def _reopened(self) -> sqlite3.Connection:
        """Open the file that this process has worked with, or one that may be it."""
        seen, main = self._seen, _inode(self._place)
        if not main:
            seen.meet(seen.text, "")
        if main != seen.files[0] and seen.files[1] and _inode(f"{self._place}-wal") == seen.files[1]:
            why = (
                "another file was put in its place, beside the -wal file of the old one: to read them together "
                "would mix both"
            )
            raise StoreReplacedError(seen.name, why, seen.text.partition(" ")[0])
        address = f"{self._path.as_uri()}?mode=rw"
        return sqlite3.connect(address, timeout=self._timeout, isolation_level=None, check_same_thread=False, uri=True)

    def _meet(self) -> None:
        expected, floor = self._seen.text, self._seen.generation
        try:
            row = self._db.execute(READ_DOCUMENT, (IDENTITY,)).fetchone()
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorname", "") != "SQLITE_ERROR":
                raise
            row = None  # there is no such table
        generation, found = row or (0, "")
        self._seen.meet(expected, found, generation, floor)

    def _use_wal(self) -> None:
        """Switch to WAL mode. SQLite ignores its timeout here while another session writes the new file: retry."""
        if self._db.execute("PRAGMA journal_mode").fetchone()[0] == "wal":  # already set: no need to queue
            return
        end = time.monotonic() + self._timeout
        while True:
            try:
                self._enter()
                try:
                    self._db.execute("PRAGMA journal_mode=WAL")
                finally:
                    self._leave()
                return
            except sqlite3.OperationalError as error:
                if not str(getattr(error, "sqlite_errorname", "")).startswith("SQLITE_BUSY") or time.monotonic() > end:
                    raise
                time.sleep(0.01)

    def _is_ours_now(self) -> bool:
        """``_is_ours`` in one transaction, because another session may be creating the schema."""
        self._db.execute("BEGIN")
        try:
            return self._is_ours()
        finally:
            if self._db.in_transaction:  # an error may have ended it
                self._db.execute("ROLLBACK")

    def _is_ours(self) -> bool:
        """Whether the schema exists. Raises when the file belongs to another program or has another version."""
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        owner = self._db.execute("PRAGMA application_id").fetchone()[0]
        if owner == _APPLICATION and version == SCHEMA_VERSION:
            return True
        if owner == _APPLICATION and version > SCHEMA_VERSION:
            raise StoreError(
                f"{self._path}: its schema is version {version}, made by a newer RunGuard; this one knows "
                f"version {SCHEMA_VERSION}. Upgrade runguard-agents"
            )
        if owner or version or self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise StoreError(
                f"{self._path}: this database belongs to something else (schema version {version}); choose another file"
            )
        return False

    def _migrate(self) -> None:
        if self._is_ours_now() and self._db.execute(IS_CURRENT, (IDENTITY,)).fetchone():
            return
        with self._transaction():
            if self._is_ours():
                # a file from an older version has no such index and no identity
                self._db.execute("CREATE INDEX IF NOT EXISTS records_about ON records (kind, ref)")
                self._db.execute("INSERT OR IGNORE INTO documents VALUES (?, 1, ?)", (IDENTITY, new_id()))
                return
            for statement in SCHEMA.split(";\n"):
                if statement.strip():
                    self._db.execute(statement)
            self._db.execute("INSERT INTO documents VALUES (?, 1, ?)", (IDENTITY, new_id()))
            self._db.execute(f"PRAGMA application_id={_APPLICATION}")
            self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    # ---- transactions -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _write(self, *, count: bool = True) -> Iterator[float]:
        """A transaction that changes the store this process has seen, and no other store.

        Records are not counted: losing some of them loses no money. Within ``_step`` it is a part of that transaction.
        """
        if self._now is not None:
            yield self._now
            return
        seen = self._seen
        with self._transaction(self._committed) as now:
            yield now
            rows = self._db.execute(COUNT_CHANGE if count else READ_DOCUMENT, (IDENTITY,)).fetchall()
            self._generation, found = rows[0] if rows else (0, "")
            seen.meet(seen.text, found, self._generation, seen.generation + count)

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        """One transaction for several operations: all of them are written, or none."""
        with self._write() as self._now:
            try:
                yield
            finally:
                self._now = None

    def _committed(self) -> None:
        self._seen.changed(self._generation)

    @contextlib.contextmanager
    def _transaction(self, committed: Callable[[], None] = lambda: None) -> Iterator[float]:
        """A transaction; yields the store's clock. The writers of all processes queue first: SQLite's own waiting is
        unfair.
        """
        try:
            self._enter()
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield time.time()  # noqa: TID251 - one machine, one clock: it is the store's
                    self._db.execute("COMMIT")
                    committed()  # before the next writer's turn
                except BaseException:
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")
                    raise
            finally:
                self._leave()
        except (sqlite3.Error, OSError) as error:
            raise store_error_of(self._path, error) from error

    def _enter(self) -> None:
        if self._queue is None:
            return
        self._queue.take()
        try:
            if _inode(self._place) != self._inode or (self._wal and _inode(f"{self._place}-wal") != self._wal):
                raise StoreOutage(
                    f"{self._path}: the file or its -wal file was removed or replaced while it was in use; "
                    "what is written now would be lost"
                )
        except BaseException:
            self._queue.leave()
            raise

    def _leave(self) -> None:
        if self._queue is not None:
            self._queue.leave()

    def close(self) -> None:
        self._db.close()
        if self._queue is not None:
            self._queue.close()


def _inode(path: str) -> int:
    """0 when there is no such file."""
    try:
        return os.stat(path).st_ino  # noqa: PTH116 - pathlib takes twice as long
    except FileNotFoundError:
        return 0
