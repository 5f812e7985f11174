"""SQLite: a file, no server. Many processes of one machine share it; a lock file queues the writers, so that none starves."""

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

from runguard.budget import NOTHING, UNITS, Amount
from runguard.errors import PolicyError
from runguard.ledger.store import SCHEMA_VERSION, Balance, Line, Reply, StoreError, StoreOutage, check_amounts, check_ttl, fits, overrun_of

try:
    import fcntl
except ImportError:  # a system without flock: SQLite's own busy handler is all there is
    fcntl = None  # type: ignore[assignment]

_CONTROL: Final = "control"
_APPLICATION: Final = 0x52474C47  # "RGLG" in the file's header: whose database it is
_EXPIRE_AT_ONCE: Final = 64
_SCHEMA: Final = """
CREATE TABLE accounts (
  key TEXT PRIMARY KEY, scope TEXT NOT NULL, window TEXT, ends REAL,
  cap_usd INTEGER NOT NULL, cap_tokens INTEGER NOT NULL, cap_calls INTEGER NOT NULL,
  spent_usd INTEGER NOT NULL DEFAULT 0, spent_tokens INTEGER NOT NULL DEFAULT 0, spent_calls INTEGER NOT NULL DEFAULT 0,
  held_usd INTEGER NOT NULL DEFAULT 0, held_tokens INTEGER NOT NULL DEFAULT 0, held_calls INTEGER NOT NULL DEFAULT 0,
  granted_usd INTEGER NOT NULL DEFAULT 0, granted_tokens INTEGER NOT NULL DEFAULT 0, granted_calls INTEGER NOT NULL DEFAULT 0,
  overrun_usd INTEGER NOT NULL DEFAULT 0, overrun_tokens INTEGER NOT NULL DEFAULT 0, overrun_calls INTEGER NOT NULL DEFAULT 0,
  expired_usd INTEGER NOT NULL DEFAULT 0, expired_tokens INTEGER NOT NULL DEFAULT 0, expired_calls INTEGER NOT NULL DEFAULT 0,
  closed INTEGER NOT NULL DEFAULT 0, updated REAL NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX accounts_scope ON accounts (scope);
CREATE TABLE holds (
  id TEXT PRIMARY KEY, keys TEXT NOT NULL, state TEXT NOT NULL, expires REAL NOT NULL, updated REAL NOT NULL,
  usd INTEGER NOT NULL, tokens INTEGER NOT NULL, calls INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX holds_open ON holds (expires) WHERE state = 'open';
CREATE TABLE marks (key TEXT NOT NULL, mark TEXT NOT NULL, percent REAL NOT NULL, amounts TEXT NOT NULL, PRIMARY KEY (key, mark)) STRICT, WITHOUT ROWID;
CREATE TABLE documents (name TEXT PRIMARY KEY, version INTEGER NOT NULL, text TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE claims (key TEXT PRIMARY KEY, state TEXT NOT NULL, expires REAL NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE records (seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, ref TEXT NOT NULL, text TEXT NOT NULL) STRICT;
CREATE INDEX records_kind ON records (kind, seq);
CREATE TABLE runs (id TEXT PRIMARY KEY, worker TEXT NOT NULL, beat REAL NOT NULL, ended INTEGER NOT NULL, text TEXT NOT NULL) STRICT, WITHOUT ROWID;
"""
_BALANCE: Final = (
    "key, scope, window, ends, cap_usd, cap_tokens, cap_calls, spent_usd, spent_tokens, spent_calls, held_usd, held_tokens, held_calls, "
    "granted_usd, granted_tokens, granted_calls, overrun_usd, overrun_tokens, overrun_calls, expired_usd, expired_tokens, expired_calls, closed"
)


class SqliteStore:
    """``sqlite:///relative.db``, ``sqlite:////absolute.db``; ``?synchronous=normal`` trades the last moments before a power cut for speed."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        path = unquote(parts.path)
        if "@" in parts.netloc:
            raise PolicyError("store = 'sqlite://…': a file has no user and password; write 'sqlite:///relative/path.db' or 'sqlite:////absolute/path.db'")
        if parts.netloc or parts.fragment or not path.startswith("/") or path == "/" or "\0" in path:
            raise PolicyError(f"store = {url!r}: write 'sqlite:///relative/path.db' or 'sqlite:////absolute/path.db' (and %23 for a #)")
        if path.endswith(":memory:"):
            raise PolicyError(f"store = {url!r}: for accounts that live with the process use store = 'memory'")
        options = parse_qs(parts.query)
        self.synchronous = options.pop("synchronous", ["full"])[0].lower()
        if self.synchronous not in ("full", "normal") or options:
            raise PolicyError(f"store = {url!r}: the only option of a SQLite store is ?synchronous=full (default) or normal")
        self.path = Path(path[1:]).expanduser().absolute()  # now: a program may change its directory
        self.name = f"sqlite:///{self.path}"
        lost = "a power cut loses nothing that was settled" if self.synchronous == "full" else "a power cut may lose the last moments"
        self.durable = f"survives the end of any process; {lost}"

    def connect(self, timeout: float) -> "SqliteSession":
        return SqliteSession(self.path, self.synchronous, timeout)


class SqliteSession:
    """One connection. Every write is a transaction that takes the write lock at its beginning: a read that turns into a write fails in WAL mode."""

    def __init__(self, path: Path, synchronous: str, timeout: float) -> None:
        self._path, self._timeout = path, timeout
        self._queue: Any = None
        with _translated(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=timeout, isolation_level=None, check_same_thread=False)
            try:
                self._db.execute("BEGIN")  # one look at one moment, before anything is changed
                try:
                    self._is_ours()
                finally:
                    self._db.execute("ROLLBACK")
                if fcntl is not None:
                    self._queue = Path(f"{path}-queue").open("a")  # noqa: SIM115 - open for as long as the session
                self._inode = path.stat().st_ino
                self._use_wal()
                self._db.execute(f"PRAGMA synchronous={synchronous}")
                self._migrate()
            except BaseException:
                self.close()
                raise

    def _use_wal(self) -> None:
        """SQLite does not wait here, however long it was told to, when another session is writing the new file."""
        end = time.monotonic() + self._timeout
        while True:
            try:
                with self._in_line():
                    self._db.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as error:
                if not str(getattr(error, "sqlite_errorname", "")).startswith("SQLITE_BUSY") or time.monotonic() > end:
                    raise
                time.sleep(0.01)

    def _is_ours(self) -> bool:
        """Whether the schema is there; an error when the file is somebody else's, or of another version."""
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        owner = self._db.execute("PRAGMA application_id").fetchone()[0]
        if owner == _APPLICATION and version == SCHEMA_VERSION:
            return True
        if owner == _APPLICATION and version > SCHEMA_VERSION:
            raise StoreError(
                f"{self._path}: its schema is version {version}, made by a newer RunGuard; this one knows version {SCHEMA_VERSION}. Upgrade runguard-agents"
            )
        if owner or version or self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise StoreError(f"{self._path}: this database belongs to something else (schema version {version}); choose another file")
        return False

    def _migrate(self) -> None:
        with self._write():
            if self._is_ours():
                return
            for statement in _SCHEMA.split(";\n"):
                if statement.strip():
                    self._db.execute(statement)
            self._db.execute(f"PRAGMA application_id={_APPLICATION}")
            self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    # ---- transactions -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _write(self) -> Iterator[float]:
        """A transaction with the store's clock. Writers of all processes stand in line at the lock file: SQLite's own waiting is unfair."""
        with _translated(self._path), self._in_line():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield time.time()  # noqa: TID251 - one machine, one clock: it is the store's
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _in_line(self) -> Iterator[None]:
        if self._queue is None:
            yield
            return
        end = time.monotonic() + self._timeout
        while True:
            try:
                fcntl.flock(self._queue, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise StoreOutage(f"{self._path}: locked by another process for more than {self._timeout:g} s") from None
                time.sleep(0.0005)
        try:
            if self._path.stat().st_ino != self._inode:
                raise StoreError(f"{self._path}: the file was replaced while it was in use; what is written now would be lost")
            yield
        finally:
            fcntl.flock(self._queue, fcntl.LOCK_UN)

    # ---- accounts ---------------------------------------------------------------------------------------------------

    def reserve(self, hold: str, ttl: float, lines: Sequence[Line], want: Amount, *, force: bool = False) -> Reply:
        check_amounts(want, lines)
        check_ttl(ttl)
        lines = list({line.key: line for line in lines}.values())
        with self._write() as now:
            known = self._db.execute("SELECT state FROM holds WHERE id = ?", (hold,)).fetchone()
            if known is not None:
                return Reply(self._balances([line.key for line in lines]), now, self._control(), ok=known[0] == "open")
            if any((line.ends is not None and now >= line.ends) or (line.begins is not None and now < line.begins) for line in lines):
                return Reply((), now, self._control(), ok=False, stale=True)
            self._expire(now)
            for line in lines:
                self._touch(line, now)
            keys = [line.key for line in lines]
            balances = self._balances(keys)
            if not force and any(b.closed or not fits(b, want) for b in balances):
                return Reply(balances, now, self._control(), ok=False)
            for key in keys:
                self._db.execute(
                    "UPDATE accounts SET held_usd = held_usd + ?, held_tokens = held_tokens + ?, held_calls = held_calls + ?, updated = ? WHERE key = ?",
                    (*want, now, key),
                )
            self._db.execute("INSERT INTO holds VALUES (?, ?, 'open', ?, ?, ?, ?, ?)", (hold, json.dumps(keys), now + ttl, now, *want))
            return Reply(self._balances(keys), now, self._control())

    def settle(self, hold: str, lines: Sequence[Line], actual: Amount) -> Reply:
        check_amounts(actual, lines)
        with self._write() as now:
            row = self._db.execute("SELECT keys, state, usd, tokens, calls FROM holds WHERE id = ?", (hold,)).fetchone()
            if row is None:  # the store forgot it, or was away when it was made: the spend is a fact all the same
                for line in lines:
                    self._touch(line, now)
                keys, state, amount = [line.key for line in lines], "unknown", NOTHING
            else:
                keys, state, amount = json.loads(row[0]), row[1], (row[2], row[3], row[4])
                if state == "released" and not keys:  # released before it was made: nobody knew its accounts
                    keys = [line.key for line in lines]
                there = {balance.key for balance in self._balances(keys)}
                for line in lines:  # dropped by a purge meanwhile
                    if line.key in keys and line.key not in there:
                        self._touch(line, now)
            held = amount if state == "open" else NOTHING
            booked = amount if state in ("settled", "expired") else NOTHING
            for key in keys:
                self._book(key, held, booked, actual, expired=state == "expired", now=now)
            self._db.execute(
                "INSERT INTO holds VALUES (?, ?, 'settled', ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
                "keys = excluded.keys, state = 'settled', updated = excluded.updated, usd = excluded.usd, tokens = excluded.tokens, calls = excluded.calls",
                (hold, json.dumps(keys), now, now, *actual),
            )
            return Reply(self._balances(keys), now, self._control())

    def release(self, hold: str) -> Reply:
        with self._write() as now:
            row = self._db.execute("SELECT keys, usd, tokens, calls FROM holds WHERE id = ? AND state = 'open' AND expires > ?", (hold, now)).fetchone()
            if row is None:
                # A reservation that is still on its way must not hold anything when it arrives.
                self._db.execute("INSERT OR IGNORE INTO holds VALUES (?, '[]', 'released', ?, ?, 0, 0, 0)", (hold, now, now))
                return Reply((), now, self._control())
            keys = json.loads(row[0])
            for key in keys:
                self._book(key, (row[1], row[2], row[3]), NOTHING, NOTHING, expired=False, now=now)
            self._db.execute("UPDATE holds SET state = 'released', updated = ? WHERE id = ?", (now, hold))
            return Reply(self._balances(keys), now, self._control())

    def extend(self, line: Line, more: Amount) -> Balance:
        check_amounts(more, [line])
        with self._write() as now:
            self._touch(line, now)
            self._db.execute(
                "UPDATE accounts SET granted_usd = granted_usd + ?, granted_tokens = granted_tokens + ?, granted_calls = granted_calls + ? WHERE key = ?",
                (*more, line.key),
            )
            (balance,) = self._balances([line.key])
            closed = any(s + h > c + g for s, h, c, g in zip(balance.spent, balance.held, balance.caps, balance.granted, strict=True))
            self._db.execute("UPDATE accounts SET closed = ? WHERE key = ?", (int(closed and balance.closed), line.key))
            return self._balances([line.key])[0]

    def read(self, scope: str | None = None) -> list[Balance]:
        with self._write() as now:
            self._expire(now, everything=True)
            where, facts = ("WHERE scope = ?", (scope,)) if scope is not None else ("", ())
            return [_balance(row) for row in self._db.execute(f"SELECT {_BALANCE} FROM accounts {where} ORDER BY key", facts)]

    def _touch(self, line: Line, now: float) -> None:
        self._db.execute(
            "INSERT INTO accounts (key, scope, window, ends, cap_usd, cap_tokens, cap_calls, updated) VALUES (?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (key) DO UPDATE SET cap_usd = excluded.cap_usd, cap_tokens = excluded.cap_tokens, cap_calls = excluded.cap_calls",
            (line.key, line.scope, line.window, line.ends, *line.caps, now),
        )

    def _balances(self, keys: Sequence[str]) -> list[Balance]:
        found = []
        for key in keys:
            row = self._db.execute(f"SELECT {_BALANCE} FROM accounts WHERE key = ?", (key,)).fetchone()
            if row is not None:
                found.append(_balance(row))
        return found

    def _book(self, key: str, held: Amount, booked: Amount, actual: Amount, *, expired: bool, now: float) -> None:
        """Take the hold away, put the actual amount in the place of what was booked; an excess that breaks a cap closes the account."""
        self._db.execute(
            "UPDATE accounts SET held_usd = held_usd - ?, held_tokens = held_tokens - ?, held_calls = held_calls - ?, "
            "spent_usd = spent_usd + ?, spent_tokens = spent_tokens + ?, spent_calls = spent_calls + ?, updated = ? WHERE key = ?",
            (*held, *(a - b for a, b in zip(actual, booked, strict=True)), now, key),
        )
        if expired:
            self._db.execute(
                "UPDATE accounts SET expired_usd = expired_usd - ?, expired_tokens = expired_tokens - ?, expired_calls = expired_calls - ? WHERE key = ?",
                (*booked, key),
            )
        before = held if held != NOTHING else booked
        more = tuple(a - b for a, b in zip(actual, before, strict=True))
        if max(more) <= 0:
            return
        found = self._balances([key])
        if not found:
            return
        overrun, closed = overrun_of(found[0], (more[0], more[1], more[2]))
        if closed:
            self._db.execute("UPDATE accounts SET overrun_usd = ?, overrun_tokens = ?, overrun_calls = ?, closed = 1 WHERE key = ?", (*overrun, key))

    def _expire(self, now: float, *, everything: bool = False) -> None:
        """Charge holds whose worker never came back; a few at a time where a call waits for the answer."""
        query = "SELECT id, keys, usd, tokens, calls FROM holds WHERE state = 'open' AND expires <= ? LIMIT ?"
        while rows := self._db.execute(query, (now, _EXPIRE_AT_ONCE)).fetchall():
            for hold, keys, usd, tokens, calls in rows:
                amount: Amount = (usd, tokens, calls)
                for key in json.loads(keys):
                    self._book(key, amount, NOTHING, amount, expired=False, now=now)
                    expired = ", ".join(f"expired_{unit} = expired_{unit} + ?" for unit in UNITS)
                    self._db.execute(f"UPDATE accounts SET {expired} WHERE key = ?", (*amount, key))
                self._db.execute("UPDATE holds SET state = 'expired', updated = ? WHERE id = ?", (now, hold))
            if not everything:
                return

    # ---- marks and documents ----------------------------------------------------------------------------------------

    def first(self, key: str, mark: str, percent: float, limit: Amount) -> bool:
        with self._write():
            return self._db.execute("INSERT OR IGNORE INTO marks VALUES (?, ?, ?, ?)", (key, mark, percent, json.dumps(limit))).rowcount == 1

    def marks(self, key: str) -> dict[str, tuple[float, Amount]]:
        with _translated(self._path):
            rows = self._db.execute("SELECT mark, percent, amounts FROM marks WHERE key = ?", (key,)).fetchall()
        return {mark: (percent, tuple(json.loads(amounts))) for mark, percent, amounts in rows}

    def unmark(self, key: str, marks: Sequence[str]) -> None:
        with self._write():
            self._db.executemany("DELETE FROM marks WHERE key = ? AND mark = ?", [(key, mark) for mark in marks])

    def get(self, name: str) -> tuple[int, str]:
        with _translated(self._path):
            row = self._db.execute("SELECT version, text FROM documents WHERE name = ?", (name,)).fetchone()
        return (row[0], row[1]) if row is not None else (0, "")

    def put(self, name: str, version: int, text: str) -> bool:
        with self._write():
            if version == 0:
                return self._db.execute("INSERT OR IGNORE INTO documents VALUES (?, 1, ?)", (name, text)).rowcount == 1
            return self._db.execute("UPDATE documents SET version = version + 1, text = ? WHERE name = ? AND version = ?", (text, name, version)).rowcount == 1

    def now(self) -> float:
        return time.time()  # noqa: TID251

    def _control(self) -> int:
        row = self._db.execute("SELECT version FROM documents WHERE name = ?", (_CONTROL,)).fetchone()
        return row[0] if row is not None else 0

    # ---- records ----------------------------------------------------------------------------------------------------

    def append(self, kind: str, ref: str, text: str) -> None:
        with self._write() as now:
            self._db.execute("INSERT INTO records (at, kind, ref, text) VALUES (?, ?, ?, ?)", (now, kind, ref, text))

    def tail(self, kind: str, count: int) -> list[tuple[float, str, str]]:
        with _translated(self._path):
            rows = self._db.execute("SELECT at, ref, text FROM records WHERE kind = ? ORDER BY seq DESC LIMIT ?", (kind, count)).fetchall()
        return rows[::-1]

    def beat(self, run: str, worker: str, text: str, *, ended: bool = False) -> int:
        with self._write() as now:
            self._db.execute(
                "INSERT INTO runs VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET worker = excluded.worker, beat = excluded.beat, "
                "ended = excluded.ended, text = excluded.text",
                (run, worker, now, int(ended), text),
            )
            return self._control()

    def running(self, within: float) -> list[tuple[str, str, float, str]]:
        with _translated(self._path):
            since = self.now() - within
            return self._db.execute("SELECT id, worker, beat, text FROM runs WHERE ended = 0 AND beat >= ? ORDER BY beat", (since,)).fetchall()

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
        with self._write() as now:
            self._expire(now, everything=True)
            old = now - older_than
            self._db.execute("DELETE FROM holds WHERE state != 'open' AND updated < ?", (old,))
            self._db.execute("DELETE FROM records WHERE at < ?", (old,))
            self._db.execute("DELETE FROM runs WHERE beat < ?", (old,))
            self._db.execute("DELETE FROM claims WHERE expires < ?", (old,))
            idle = "held_usd = 0 AND held_tokens = 0 AND held_calls = 0"
            past = f"SELECT key FROM accounts WHERE {idle} AND ((ends IS NOT NULL AND ends < ?) OR (scope LIKE 'run%' AND updated < ?))"
            self._db.execute(f"DELETE FROM marks WHERE key IN ({past})", (old, old))
            self._db.execute(f"DELETE FROM accounts WHERE key IN ({past})", (old, old))

    def close(self) -> None:
        self._db.close()
        if self._queue is not None:
            self._queue.close()


def _balance(row: Sequence[Any]) -> Balance:
    key, scope, window, ends, *n, closed = row
    caps, spent, held, granted, overrun, expired = ((n[i], n[i + 1], n[i + 2]) for i in range(0, 18, 3))
    return Balance(key, scope, window, ends, caps, spent, held, granted, overrun, expired, bool(closed))


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    """SQLite's errors in our terms: what may pass, and what somebody must repair."""
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "") or ""
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL", "SQLITE_IOERR")):
            raise StoreOutage(f"{path}: {error}") from error
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            raise StoreError(f"{path}: {error}; the file is damaged or no database. Move it away and keep it: it holds your accounts") from error
        if name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH")):
            raise StoreError(f"{path}: {error}; check that the file and its folder can be written") from error
        raise StoreError(f"{path}: {error}") from error
    except OSError as error:
        raise StoreError(f"{path}: {error}") from error
