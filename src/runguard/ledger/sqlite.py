"""SQLite as a store: one file, no server. Many processes of one machine share it.

``ledger/memory`` opens it for its URL; ``view/store`` and ``cli`` look at its file. ``SqliteStore`` reads the URL,
``SqliteConnection`` opens the file and runs transactions, ``SqliteHolds`` reserves and settles, ``SqliteSession`` has
the other operations, ``WriterQueue`` queues the writers of all processes so that none starves.
"""

import contextlib
import json
import math
import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

from runguard.core.errors import PolicyError
from runguard.core.money import NOTHING, Amount
from runguard.ledger.ledger import (
    IDENTITY,
    SCHEMA_VERSION,
    Balance,
    Line,
    Record,
    Seen,
    SettledCall,
    StoreDeniedError,
    StoreError,
    StoreOutage,
    StoreReplacedError,
    StoreReply,
    check_amounts,
    check_ttl,
    check_version,
    fits,
    new_id,
    overrun_of,
)

try:
    import fcntl
except ImportError:  # a system without flock: SQLite's own busy handler is all there is
    fcntl = None  # type: ignore[assignment]

# ---- The SQL of the SQLite store, and the form of an account's row.

CONTROL: Final = "control"
PERIOD: Final = "period"  # a document: when the latest period began that was ever used
SCHEMA: Final = """
CREATE TABLE accounts (
  key TEXT PRIMARY KEY, scope TEXT NOT NULL, window TEXT, ends REAL,
  cap_usd INTEGER NOT NULL, cap_tokens INTEGER NOT NULL, cap_calls INTEGER NOT NULL,
  spent_usd INTEGER NOT NULL DEFAULT 0, spent_tokens INTEGER NOT NULL DEFAULT 0, spent_calls INTEGER NOT NULL DEFAULT 0,
  held_usd INTEGER NOT NULL DEFAULT 0, held_tokens INTEGER NOT NULL DEFAULT 0, held_calls INTEGER NOT NULL DEFAULT 0,
  granted_usd INTEGER NOT NULL DEFAULT 0, granted_tokens INTEGER NOT NULL DEFAULT 0,
    granted_calls INTEGER NOT NULL DEFAULT 0,
  overrun_usd INTEGER NOT NULL DEFAULT 0, overrun_tokens INTEGER NOT NULL DEFAULT 0,
    overrun_calls INTEGER NOT NULL DEFAULT 0,
  expired_usd INTEGER NOT NULL DEFAULT 0, expired_tokens INTEGER NOT NULL DEFAULT 0,
    expired_calls INTEGER NOT NULL DEFAULT 0,
  closed INTEGER NOT NULL DEFAULT 0, updated REAL NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX accounts_scope ON accounts (scope);
CREATE TABLE holds (
  id TEXT PRIMARY KEY, keys TEXT NOT NULL, state TEXT NOT NULL, expires REAL NOT NULL, updated REAL NOT NULL,
  usd INTEGER NOT NULL, tokens INTEGER NOT NULL, calls INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX holds_open ON holds (expires) WHERE state = 'open';
CREATE TABLE marks (key TEXT NOT NULL, mark TEXT NOT NULL, percent REAL NOT NULL, amounts TEXT NOT NULL,
  PRIMARY KEY (key, mark)) STRICT, WITHOUT ROWID;
CREATE TABLE documents (name TEXT PRIMARY KEY, version INTEGER NOT NULL, text TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE claims (key TEXT PRIMARY KEY, state TEXT NOT NULL, expires REAL NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE records (seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, ref TEXT NOT NULL,
  text TEXT NOT NULL) STRICT;
CREATE INDEX records_kind ON records (kind, seq);
CREATE INDEX records_about ON records (kind, ref);
CREATE TABLE runs (id TEXT PRIMARY KEY, worker TEXT NOT NULL, beat REAL NOT NULL, ended INTEGER NOT NULL,
  text TEXT NOT NULL) STRICT, WITHOUT ROWID;
"""
BALANCE: Final = (
    "key, scope, window, ends, cap_usd, cap_tokens, cap_calls, spent_usd, spent_tokens, spent_calls, held_usd, "
    "held_tokens, held_calls, "
    "granted_usd, granted_tokens, granted_calls, overrun_usd, overrun_tokens, overrun_calls, expired_usd, "
    "expired_tokens, expired_calls, closed"
)

# One account is the common and hot case: one statement does what otherwise takes six. It changes nothing when the
# account is new, closed or full, when the hold is already known, when other holds are overdue, or when a later period
# was used. The general path then handles those cases.
RESERVE_ONE: Final = f"""
UPDATE accounts SET cap_usd = :cap0, cap_tokens = :cap1, cap_calls = :cap2, updated = :now,
  held_usd = held_usd + :want0, held_tokens = held_tokens + :want1, held_calls = held_calls + :want2
WHERE key = :key AND closed = 0 AND spent_usd + held_usd + :want0 <= :cap0 + granted_usd
  AND spent_tokens + held_tokens + :want1 <= :cap1 + granted_tokens
    AND spent_calls + held_calls + :want2 <= :cap2 + granted_calls
  AND NOT EXISTS (SELECT 1 FROM holds WHERE id = :hold) AND NOT EXISTS (SELECT 1 FROM holds WHERE state = 'open'
    AND expires <= :now)
  AND (:ends IS NULL OR :ends > (SELECT CAST(text AS REAL) FROM documents WHERE name = '{PERIOD}'))
RETURNING {BALANCE}, (SELECT version FROM documents WHERE name = '{CONTROL}')
"""
BOOK: Final = f"""
UPDATE accounts SET held_usd = held_usd - ?, held_tokens = held_tokens - ?, held_calls = held_calls - ?,
  spent_usd = spent_usd + ?, spent_tokens = spent_tokens + ?, spent_calls = spent_calls + ?,
  expired_usd = expired_usd + ?, expired_tokens = expired_tokens + ?, expired_calls = expired_calls + ?, updated = ?
WHERE key = ? RETURNING {BALANCE}
"""
COUNT_CHANGE: Final = "UPDATE documents SET version = version + 1 WHERE name = ? RETURNING version, text"
# The number of a record grows for ever, also after a purge that left none: it is at least the time in microseconds.
APPEND: Final = """
INSERT INTO records (seq, at, kind, ref, text)
VALUES (max(?, coalesce((SELECT max(seq) FROM records), 0) + 1), ?, ?, ?, ?)
"""
READ_DOCUMENT: Final = "SELECT version, text FROM documents WHERE name = ?"
KEEP_PERIOD: Final = """
INSERT INTO documents VALUES (?, 1, ?)
ON CONFLICT (name) DO UPDATE SET version = version + 1, text = excluded.text
"""


def balance_of(row: tuple[Any, ...]) -> Balance:
    key, scope, window, ends = row[:4]
    return Balance(
        key, scope, window, ends, row[4:7], row[7:10], row[10:13], row[13:16], row[16:19], row[19:22], bool(row[22])
    )


# ---- SQLite's errors as store errors: an outage may pass by itself, an error needs a repair.


@contextlib.contextmanager
def mapped_errors(path: Path) -> Iterator[None]:
    """Raise SQLite's and the system's errors as ``StoreOutage`` or ``StoreError``."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise store_error_of(path, error) from error


def store_error_of(path: Path, error: Exception) -> StoreError | StoreOutage:
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL", "SQLITE_IOERR")):
        return StoreOutage(f"{path}: {error}")
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return StoreError(
            f"{path}: {error}; the file is damaged or no database. Move it away and keep it: it holds your accounts"
        )
    if isinstance(error, OSError) or name.startswith(
        ("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH")
    ):
        if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises where the folder around may not be searched
            return StoreDeniedError(f"{path}: is a directory; name a file in it, such as sqlite:///{path / 'guard.db'}")
        return StoreDeniedError(f"{path}: {error}; check that the file and its folder can be written")
    return StoreError(f"{path}: {error}")


# ---- The queue of writers to one SQLite file.

_TURN_S: Final = 0.003  # how long a writer may keep writing before it lets the next one in
_POLL_S: Final = 0.0002


def writer_queue(path: Path, timeout: float) -> "WriterQueue | None":
    """Return the queue of a file; None on a system without ``flock``."""
    return None if fcntl is None else WriterQueue(path, timeout)


class WriterQueue:
    """Lets the writers of all processes write one after another, in the order in which they asked.

    It uses two file locks, which the kernel frees when a process dies. A writer holds ``turn`` during a transaction.
    The next writer holds ``next`` and polls for ``turn``. All others wait for ``next``, which the kernel hands out in
    order. A writer that got its turn this way may take it again for a few milliseconds without queueing, because
    changing writers costs more than writing. So a writer waits at most those few milliseconds for each writer before
    it.
    """

    def __init__(self, path: Path, timeout: float) -> None:
        self._path, self._timeout = path, timeout
        self._turn, self._next = Path(f"{path}-queue").open("a"), Path(f"{path}-next").open("a")  # noqa: SIM115 - for as long as the session
        self._until = 0.0  # of the turn
        self._mutex, self._got = threading.Lock(), threading.Event()
        self._waiting = self._wanted = self._closed = False

    def take(self) -> None:
        """Wait for the turn to write. Raise ``StoreOutage`` when it does not come within the timeout."""
        now = time.monotonic()
        if now < self._until and _locked(self._turn):
            return
        end = now + self._timeout
        try:
            if not _locked(self._next):
                # The kernel wakes the first waiter, but a process that asks before it runs gets the lock. Let it run.
                time.sleep(min(_TURN_S, self._timeout / 10))
                self._wait(end)
            while not _locked(self._turn):
                if time.monotonic() > end:
                    raise self._too_long()
                time.sleep(_POLL_S)
        finally:
            fcntl.flock(self._next, fcntl.LOCK_UN)
        self._until = time.monotonic() + _TURN_S

    def leave(self) -> None:
        fcntl.flock(self._turn, fcntl.LOCK_UN)

    def _too_long(self) -> StoreOutage:
        advice = "raise store_timeout, or use Valkey or Postgres for so many workers"
        return StoreOutage(f"{self._path}: locked by other processes for more than {self._timeout:g} s; {advice}")

    def _wait(self, end: float) -> None:
        """Wait for ``next`` on a thread, because the system call that waits in order takes no time limit.

        A thread whose session gave up keeps the place for the session's next call. Without such a call it passes the
        lock on.
        """
        with self._mutex:
            self._wanted = True
            if not self._waiting:
                self._got.clear()
                try:
                    threading.Thread(target=self._stand, name="runguard-sqlite", daemon=True).start()
                    self._waiting = True
                except RuntimeError:  # the interpreter is ending, or no thread is left: wait without an order
                    while not _locked(self._next):
                        if time.monotonic() > end:
                            raise self._too_long() from None
                        time.sleep(_POLL_S)
                    return
        try:
            self._got.wait(max(end - time.monotonic(), 0))
        finally:
            with self._mutex:
                self._wanted = False
                got = self._got.is_set()
        if not got:
            raise self._too_long()

    def _stand(self) -> None:
        got = False
        # on an error the session's deadline reports it, and its next call starts another thread
        with contextlib.suppress(BaseException):
            fcntl.flock(self._next, fcntl.LOCK_EX)
            got = True
        with self._mutex:
            self._waiting = False
            if got and self._wanted:
                self._got.set()
            elif got:
                fcntl.flock(self._next, fcntl.LOCK_UN)
            if self._closed:
                self._next.close()

    def close(self) -> None:
        self._turn.close()
        with self._mutex:
            self._closed = True
            if not self._waiting:
                self._next.close()


def _locked(file: Any) -> bool:
    """Take the lock of a file if it is free, and return whether it is taken now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# ---- One connection to a SQLite file: opening it, its schema and identity, and transactions.

_APPLICATION: Final = 0x52474C47  # "RGLG" in the file's header: marks a database of RunGuard
_CHECKPOINT_PAGES: Final = 4_000  # 16 MB


class SqliteConnection:
    """One connection to a SQLite file.

    Every write is a transaction that takes the write lock when it begins, because a read that turns into a write fails
    in WAL mode.
    """

    def __init__(self, path: Path, synchronous: str, timeout: float, seen: Seen) -> None:
        self._path, self._timeout, self._place, self._seen = path, timeout, str(path), seen
        self._queue: WriterQueue | None = None
        self._wal = 0
        with mapped_errors(path):
            if seen.text:  # create nothing: neither the file nor its tables
                self._db = self._reopened()
            else:
                if not path.parent.is_dir():  # a typing mistake must not become an empty store in a folder of its own
                    raise StoreDeniedError(
                        f"{path}: its folder {path.parent} does not exist; create the folder, or name another file"
                    )
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
                    self._create()
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
        """Return ``_is_ours`` in one transaction, because another session may be creating the schema."""
        self._db.execute("BEGIN")
        try:
            return self._is_ours()
        finally:
            if self._db.in_transaction:  # an error may have ended it
                self._db.execute("ROLLBACK")

    def _is_ours(self) -> bool:
        """Return whether the schema exists. Raise StoreError when the file has another owner or another version."""
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        owner = self._db.execute("PRAGMA application_id").fetchone()[0]
        is_empty = not (owner or version or self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
        if not is_empty:
            foreign = f"this database belongs to something else (schema version {version}); choose another file"
            check_version(str(self._path), version if owner == _APPLICATION else 0, foreign)
        return not is_empty

    def _create(self) -> None:
        """Make the schema where there is none, and give an id to a store that was emptied."""
        if self._is_ours_now() and self._db.execute(READ_DOCUMENT, (IDENTITY,)).fetchone():
            return
        with self._write():
            if not self._is_ours():  # another process may have been faster
                for statement in SCHEMA.split(";\n"):
                    if statement.strip():
                        self._db.execute(statement)
                self._db.execute(f"PRAGMA application_id={_APPLICATION}")
                self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            self._db.execute("INSERT OR IGNORE INTO documents VALUES (?, 1, ?)", (IDENTITY, new_id()))

    # ---- transactions -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _write(self, *, count: bool = True) -> Iterator[float]:
        """Run a transaction, and yield the store's clock.

        It changes the store that this process has seen, and no other store. Records are not counted: losing some of
        them loses no money. The writers of all processes queue first, because SQLite's own waiting is unfair.
        """
        seen, generation = self._seen, 0
        try:
            self._enter()
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield time.time()  # noqa: TID251 - one machine, one clock: it is the store's
                if seen.text:  # otherwise this makes the store
                    rows = self._db.execute(COUNT_CHANGE if count else READ_DOCUMENT, (IDENTITY,)).fetchall()
                    generation, found = rows[0] if rows else (0, "")
                    if found != seen.text or generation < seen.generation + count:
                        seen.meet(seen.text, found, generation, seen.generation + count)
                self._db.execute("COMMIT")
                seen.generation = max(seen.generation, generation)  # before the next writer's turn
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            finally:
                self._leave()
        except (sqlite3.Error, OSError) as error:
            raise store_error_of(self._path, error) from error

    def _rows(self, sql: str, facts: Sequence[Any] = ()) -> list[Any]:
        """Return what a query finds. It takes no lock: reading must not block writers."""
        with mapped_errors(self._path):
            return self._db.execute(sql, facts).fetchall()

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
    """Return the inode of a file; 0 when there is no such file."""
    try:
        return os.stat(path).st_ino  # noqa: PTH116 - pathlib takes twice as long
    except FileNotFoundError:
        return 0


# ---- Reservations and settlements on a SQLite file. Each operation is one transaction.

_EXPIRE_AT_ONCE: Final = 64


class SqliteHolds(SqliteConnection):
    """The operations on accounts."""

    def reserve(self, hold: str, ttl: float, lines: Sequence[Line], want: Amount, *, force: bool = False) -> StoreReply:
        check_amounts(want, lines)
        check_ttl(ttl)
        with self._write() as now:
            return self._hold(hold, ttl, lines, want, now, force=force)

    def settle(self, hold: str, lines: Sequence[Line], actual: Amount, record: Record | None = None) -> StoreReply:
        check_amounts(actual, lines)
        with self._write() as now:
            return StoreReply(self._settle(SettledCall(hold, lines, actual, record), now), now, self._control())

    def settle_and_reserve(
        self, bill: SettledCall, hold: str, ttl: float, lines: Sequence[Line], want: Amount, *, force: bool = False
    ) -> tuple[StoreReply, StoreReply]:
        check_amounts(bill.actual, bill.lines)
        check_amounts(want, lines)
        check_ttl(ttl)
        with self._write() as now:
            settled = self._settle(bill, now)
            reserved = self._hold(hold, ttl, lines, want, now, force=force)
            return StoreReply(settled, now, reserved.control), reserved

    def _hold(
        self, hold: str, ttl: float, lines: Sequence[Line], want: Amount, now: float, *, force: bool
    ) -> StoreReply:
        by_key = {line.key: line for line in lines}
        lines, keys, row = list(by_key.values()), list(by_key), None
        if len(lines) == 1 and not force and not _is_stale(lines[0], now):
            row = self._add_to_one(hold, lines[0], want, now)
        if row is None:
            known = self._db.execute("SELECT state FROM holds WHERE id = ?", (hold,)).fetchone()
            if known is not None:
                return StoreReply(self._balances(keys), now, self._control(), ok=known[0] == "open")
            latest = self._latest_period(lines)
            if any(_is_stale(line, max(now, latest)) for line in lines):
                return StoreReply((), now, self._control(), ok=False, stale=True, latest=latest)
            self._use_periods(lines, latest)
            self._expire(now)
            for line in lines:
                self._touch(line, now)
            balances = self._balances(keys)
            if not force and any(b.closed or not fits(b, want) for b in balances):
                return StoreReply(balances, now, self._control(), ok=False, latest=latest)
            for key in keys:
                self._db.execute(
                    "UPDATE accounts SET held_usd = held_usd + ?, held_tokens = held_tokens + ?, held_calls = "
                    "held_calls + ?, updated = ? WHERE key = ?",
                    (*want, now, key),
                )
        self._db.execute(
            "INSERT INTO holds VALUES (?, ?, 'open', ?, ?, ?, ?, ?)", (hold, json.dumps(keys), now + ttl, now, *want)
        )
        if row is not None:
            return StoreReply([balance_of(row)], now, row[-1] or 0)
        return StoreReply(self._balances(keys), now, self._control(), latest=latest)

    def _add_to_one(self, hold: str, line: Line, want: Amount, now: float) -> tuple[Any, ...] | None:
        facts = {
            "key": line.key, "hold": hold, "now": now, "ends": line.ends,
            "cap0": line.caps[0], "cap1": line.caps[1], "cap2": line.caps[2],
            "want0": want[0], "want1": want[1], "want2": want[2],
        }  # fmt: skip
        return next(iter(self._db.execute(RESERVE_ONE, facts).fetchall()), None)

    def _settle(self, bill: SettledCall, now: float) -> list[Balance]:
        hold, lines, actual = bill.hold, bill.lines, bill.actual
        row = self._db.execute("SELECT keys, state, usd, tokens, calls FROM holds WHERE id = ?", (hold,)).fetchone()
        if row is None:  # the store lost it, or was away when it was reserved: book the spend anyway
            self._use_periods(lines, self._latest_period(lines))
            for line in lines:
                self._touch(line, now)
            row = "[]", "unknown", *NOTHING
        names, state, *_ = row
        keys, amount = json.loads(names), row[2:]
        # of a hold that is not known, or was released before it was made, the accounts are not known either
        if not keys and state in ("unknown", "released"):
            keys = [line.key for line in lines]
            names = json.dumps(keys)
        if bill.record is not None and not (state == "settled" and amount == actual):
            self._append(bill.record, now)
        held = amount if state == "open" else NOTHING
        booked = amount if state in ("settled", "expired") else NOTHING
        late = _less(NOTHING, amount) if state == "expired" else NOTHING
        balances: list[Balance] = []
        for key in keys:
            balance = self._book(key, held, booked, actual, late, now)
            if balance is None:  # dropped by a purge meanwhile
                for line in lines:
                    if line.key == key:
                        self._touch(line, now)
                balance = self._book(key, held, booked, actual, late, now)
            if balance is not None:
                balances.append(balance)
        self._db.execute(
            "INSERT INTO holds VALUES (?, ?, 'settled', ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
            "keys = excluded.keys, state = 'settled', updated = excluded.updated, usd = excluded.usd, "
            "tokens = excluded.tokens, calls = excluded.calls",
            (hold, names, now, now, *actual),
        )
        return balances

    def _append(self, record: Record, now: float) -> None:
        self._db.execute(APPEND, (int(now * 1e6), now, *record))

    def release(self, hold: str) -> StoreReply:
        with self._write() as now:
            row = self._db.execute(
                "SELECT keys, usd, tokens, calls FROM holds WHERE id = ? AND state = 'open' AND expires > ?",
                (hold, now),
            ).fetchone()
            if row is None:
                # A reservation that is still on its way must not hold anything when it arrives.
                self._db.execute(
                    "INSERT OR IGNORE INTO holds VALUES (?, '[]', 'released', ?, ?, 0, 0, 0)", (hold, now, now)
                )
                return StoreReply((), now, self._control())
            found = [self._book(key, row[1:], NOTHING, NOTHING, NOTHING, now) for key in json.loads(row[0])]
            self._db.execute("UPDATE holds SET state = 'released', updated = ? WHERE id = ?", (now, hold))
            return StoreReply([balance for balance in found if balance is not None], now, self._control())

    def extend(self, line: Line, more: Amount) -> Balance:
        check_amounts(more, [line])
        with self._write() as now:
            self._use_periods([line], self._latest_period([line]))
            self._touch(line, now)
            self._db.execute(
                "UPDATE accounts SET granted_usd = granted_usd + ?, granted_tokens = granted_tokens + ?, "
                "granted_calls = granted_calls + ? WHERE key = ?",
                (*more, line.key),
            )
            (balance,) = self._balances([line.key])
            closed = not fits(balance, NOTHING)
            self._db.execute("UPDATE accounts SET closed = ? WHERE key = ?", (int(closed and balance.closed), line.key))
            return self._balances([line.key])[0]

    def read(self, scope: str | None = None) -> list[Balance]:
        with self._write() as now:
            self._expire(now, everything=True)
        where, facts = ("WHERE scope = ?", (scope,)) if scope is not None else ("", ())
        return [balance_of(row) for row in self._rows(f"SELECT {BALANCE} FROM accounts {where} ORDER BY key", facts)]

    def _latest_period(self, lines: Sequence[Line]) -> float:
        """Return when the latest period began that was ever used; minus infinity where no line has a period.

        The machine's clock may be set back over its begin. It stays in force until the clock has caught up: an earlier
        one is over, and what it has left must not be spent.
        """
        if all(line.ends is None for line in lines):
            return -math.inf
        row = self._db.execute(READ_DOCUMENT, (PERIOD,)).fetchone()
        return -math.inf if row is None else float(row[1])

    def _use_periods(self, lines: Sequence[Line], latest: float) -> None:
        begins = max((line.begins for line in lines if line.begins is not None), default=-math.inf)
        if begins > latest:
            self._db.execute(KEEP_PERIOD, (PERIOD, repr(float(begins))))

    def _touch(self, line: Line, now: float) -> None:
        self._db.execute(
            "INSERT INTO accounts (key, scope, window, ends, cap_usd, cap_tokens, cap_calls, updated) VALUES "
            "(?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (key) DO UPDATE SET cap_usd = excluded.cap_usd, cap_tokens = excluded.cap_tokens, "
            "cap_calls = excluded.cap_calls",
            (line.key, line.scope, line.window, line.ends, *line.caps, now),
        )

    def _balances(self, keys: Sequence[str]) -> list[Balance]:
        found = []
        for key in keys:
            row = self._db.execute(f"SELECT {BALANCE} FROM accounts WHERE key = ?", (key,)).fetchone()
            if row is not None:
                found.append(balance_of(row))
        return found

    def _book(self, key: str, held: Amount, booked: Amount, actual: Amount, late: Amount, now: float) -> Balance | None:
        """Remove the hold and replace the booked amount by the actual one; None where there is no such account.

        An excess that breaks a cap closes the account. ``late``: what is added to what was charged for expired holds.
        """
        row = self._db.execute(BOOK, (*held, *_less(actual, booked), *late, now, key)).fetchone()
        if row is None:
            return None
        balance = balance_of(row)
        more = _less(actual, held if held != NOTHING else booked)
        if max(more) > 0 and (overrun := overrun_of(balance.overrun, more, balance.beyond)) is not None:
            self._db.execute(
                "UPDATE accounts SET overrun_usd = ?, overrun_tokens = ?, overrun_calls = ?, closed = 1 WHERE key = ?",
                (*overrun, key),
            )
            balance.overrun, balance.closed = overrun, True
        return balance

    def _expire(self, now: float, *, everything: bool = False) -> None:
        """Charge overdue holds, whose worker never settled them.

        Unless ``everything`` is set, charge only a few, because a call waits for the answer.
        """
        query = "SELECT id, keys, usd, tokens, calls FROM holds WHERE state = 'open' AND expires <= ? LIMIT ?"
        while rows := self._db.execute(query, (now, _EXPIRE_AT_ONCE)).fetchall():
            for hold, keys, usd, tokens, calls in rows:
                amount: Amount = (usd, tokens, calls)
                for key in json.loads(keys):
                    self._book(key, amount, NOTHING, amount, amount, now)
                self._db.execute("UPDATE holds SET state = 'expired', updated = ? WHERE id = ?", (now, hold))
            if not everything:
                return

    def _control(self) -> int:
        row = self._db.execute("SELECT version FROM documents WHERE name = ?", (CONTROL,)).fetchone()
        return row[0] if row is not None else 0


def _less(amount: Amount, other: Amount) -> Amount:
    return amount[0] - other[0], amount[1] - other[1], amount[2] - other[2]


def _is_stale(line: Line, now: float) -> bool:
    """Return whether the period of a line is over, or not yet begun."""
    return (line.ends is not None and now >= line.ends) or (line.begins is not None and now < line.begins)


# ---- The operations of a SQLite store beside reservations: marks, documents, records, claims and the purge.

_PURGE_AT_ONCE: Final = 2_000


class SqliteSession(SqliteHolds):
    """One connection with all operations of ``StoreSession``."""

    # ---- marks and documents ----------------------------------------------------------------------------------------

    def first(self, key: str, mark: str, percent: float, limit: Amount) -> bool:
        with self._write():
            return (
                self._db.execute(
                    "INSERT OR IGNORE INTO marks VALUES (?, ?, ?, ?)", (key, mark, percent, json.dumps(limit))
                ).rowcount
                == 1
            )

    def marks(self, key: str) -> dict[str, tuple[float, Amount]]:
        rows = self._rows("SELECT mark, percent, amounts FROM marks WHERE key = ?", (key,))
        return {mark: (percent, tuple(json.loads(amounts))) for mark, percent, amounts in rows}

    def unmark(self, key: str, marks: Sequence[str]) -> None:
        with self._write():
            self._db.executemany("DELETE FROM marks WHERE key = ? AND mark = ?", [(key, mark) for mark in marks])

    def get(self, name: str) -> tuple[int, str]:
        with mapped_errors(self._path):
            self._meet()
            row = self._db.execute(READ_DOCUMENT, (name,)).fetchone()
        return (row[0], row[1]) if row is not None else (0, "")

    def put(self, name: str, version: int, text: str) -> bool:
        with self._write():
            if version == 0:
                return self._db.execute("INSERT OR IGNORE INTO documents VALUES (?, 1, ?)", (name, text)).rowcount == 1
            return (
                self._db.execute(
                    "UPDATE documents SET version = version + 1, text = ? WHERE name = ? AND version = ?",
                    (text, name, version),
                ).rowcount
                == 1
            )

    def drop(self, name: str) -> None:
        with self._write():
            self._db.execute("DELETE FROM documents WHERE name = ?", (name,))

    def now(self) -> float:
        return time.time()  # noqa: TID251

    # ---- records ----------------------------------------------------------------------------------------------------

    def append(self, kind: str, ref: str, text: str) -> None:
        with self._write(count=False) as now:
            self._append((kind, ref, text), now)

    def page(self, kind: str, after: str, count: int) -> list[tuple[str, float, str, str]]:
        sql = "SELECT CAST(seq AS TEXT), at, ref, text FROM records WHERE kind = ? AND seq > ? ORDER BY seq LIMIT ?"
        return self._rows(sql, (kind, int(after or 0), count))

    def tail(self, kind: str, count: int) -> list[tuple[float, str, str]]:
        sql = "SELECT at, ref, text FROM records WHERE kind = ? ORDER BY seq DESC LIMIT ?"
        return self._rows(sql, (kind, count))[::-1]

    def about(self, kind: str, ref: str, *, last: int | None = None) -> list[tuple[float, str]]:
        sql = "SELECT at, text FROM records WHERE kind = ? AND ref = ? ORDER BY seq DESC LIMIT ?"
        return self._rows(sql, (kind, ref, -1 if last is None else last))[::-1]

    def beat(self, run: str, worker: str, text: str, *, ended: bool = False) -> int:
        with self._write(count=False) as now:
            self._db.execute(
                "INSERT INTO runs VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET worker = "
                "excluded.worker, beat = excluded.beat, "
                "ended = excluded.ended, text = excluded.text",
                (run, worker, now, int(ended), text),
            )
            return self._control()

    def running(self, within: float) -> list[tuple[str, str, float, str]]:
        sql = "SELECT id, worker, beat, text FROM runs WHERE ended = 0 AND beat >= ? ORDER BY beat"
        return self._rows(sql, (self.now() - within,))

    def claim(self, key: str, ttl: float) -> str:
        with self._write() as now:
            row = self._db.execute("SELECT state, expires FROM claims WHERE key = ?", (key,)).fetchone()
            if row is not None and (row[0] == "done" or row[1] > now):
                return str(row[0])
            self._db.execute("INSERT OR REPLACE INTO claims VALUES (?, 'pending', ?)", (key, now + ttl))
            return "yes"

    def finish(self, key: str, done: bool) -> None:
        with self._write() as now:
            if done:
                self._db.execute("INSERT OR REPLACE INTO claims VALUES (?, 'done', ?)", (key, now))
            else:
                self._db.execute("DELETE FROM claims WHERE key = ? AND state = 'pending'", (key,))

    def purge(self, older_than: float) -> None:
        """Delete in parts, so that other writers wait for one part at most. Walk each table once, in key order."""
        with self._write() as now:
            self._expire(now, everything=True)
        old = now - older_than
        self._purge_table("holds", "id", "state != 'open' AND updated < :old", old)
        self._purge_table("records", "seq", "at < :old", old)
        self._purge_table("runs", "id", "beat < :old", old)
        self._purge_table("claims", "key", "expires < :old", old)
        idle = "held_usd = 0 AND held_tokens = 0 AND held_calls = 0"
        self._purge_table(
            "accounts",
            "key",
            f"{idle} AND ((ends IS NOT NULL AND ends < :old) OR ((scope LIKE 'run%' OR scope LIKE 'session:%') "
            "AND updated < :old))",
            old,
        )
        with self._write():
            self._db.execute("DELETE FROM marks WHERE key NOT IN (SELECT key FROM accounts)")
        free = 1
        while free:  # return free pages to the file system
            with self._write():
                self._db.execute(f"PRAGMA incremental_vacuum({_PURGE_AT_ONCE})").fetchall()
            before, free = free, self._rows("PRAGMA freelist_count")[0][0]
            if free == before:  # it cannot shrink
                return

    def _purge_table(self, table: str, key: str, condition: str, old: float) -> None:
        last: Any = self._rows(f"SELECT min({key}) FROM {table}")[0][0]
        since = ">="
        while last is not None:
            with self._write(count=False):
                part = f"SELECT {key} FROM {table} WHERE {key} {since} :last ORDER BY {key} LIMIT {_PURGE_AT_ONCE}"
                end = self._db.execute(f"SELECT max({key}) FROM ({part})", {"last": last}).fetchone()[0]
                if end is not None:
                    self._db.execute(
                        f"DELETE FROM {table} WHERE {key} {since} :last AND {key} <= :end AND {condition}",
                        {"last": last, "end": end, "old": old},
                    )
            last, since = end, ">"


# ---- The URL of a SQLite store.


_OF_WINDOWS: Final = re.compile(r"/[a-z]:[\\/]|.*\\", re.IGNORECASE | re.DOTALL)


class SqliteStore:
    """``sqlite:///relative.db`` or ``sqlite:////absolute.db``.

    ``?synchronous=normal`` is faster, and a power cut may lose the last moments.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        path = unquote(parts.path)
        if "@" in parts.netloc:
            raise PolicyError(
                "store = 'sqlite://…': a file has no user and password; write 'sqlite:///relative/path.db' or "
                "'sqlite:////absolute/path.db'"
            )
        malformed = not url.startswith("sqlite:///") or parts.netloc or parts.fragment
        if malformed or path == "/" or "\0" in path:
            raise PolicyError(
                f"store = {url!r}: write 'sqlite:///relative/path.db' or 'sqlite:////absolute/path.db' (and "
                "%23 for a #)"
            )
        if os.name != "nt" and _OF_WINDOWS.match(path):
            raise PolicyError(
                f"store = {url!r}: this is a path of Windows, which would become the name of one file here; "
                "write 'sqlite:////absolute/path.db'"
            )
        if path.endswith(":memory:"):
            raise PolicyError(f"store = {url!r}: for accounts that live with the process use store = 'memory'")
        options = parse_qs(parts.query)
        self.synchronous = options.pop("synchronous", ["full"])[0].lower()
        if self.synchronous not in ("full", "normal") or options:
            raise PolicyError(
                f"store = {url!r}: the only option of a SQLite store is ?synchronous=full (default) or normal"
            )
        self.path = Path(path[1:]).expanduser().absolute()  # now: a program may change its directory
        self.name = f"sqlite:///{self.path}"
        self.seen = Seen(self.name)
        lost = (
            "a power cut loses nothing that was settled"
            if self.synchronous == "full"
            else "a power cut may lose the last moments"
        )
        self.durable = f"survives the end of any process; {lost}"

    def connect(self, timeout: float) -> SqliteSession:
        return SqliteSession(self.path, self.synchronous, timeout, self.seen)
