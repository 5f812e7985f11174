"""SQLite: a file, no server.

Many processes of one machine share it; lock files queue the writers, so that none starves.
"""

import contextlib
import json
import operator
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

from runguard.core.budget import NOTHING, UNITS, Amount
from runguard.core.exceptions import PolicyError
from runguard.ledger.identity import IDENTITY, Seen, StoreReplacedError, new_id
from runguard.ledger.store import (
    SCHEMA_VERSION,
    Balance,
    Line,
    Reply,
    StoreError,
    StoreOutage,
    check_amounts,
    check_ttl,
    fits,
    overrun_of,
)

try:
    import fcntl
except ImportError:  # a system without flock: SQLite's own busy handler is all there is
    fcntl = None  # type: ignore[assignment]

_CONTROL: Final = "control"
_APPLICATION: Final = 0x52474C47  # "RGLG" in the file's header: whose database it is
_EXPIRE_AT_ONCE: Final = 64
_PURGE_AT_ONCE: Final = 2_000
_CHECKPOINT_PAGES: Final = 4_000  # 16 MB
_TURN_S: Final = 0.003  # how long a writer may go on before it lets the next one in
_GLANCE_S: Final = 0.0002
_SCHEMA: Final = """
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
_BALANCE: Final = (
    "key, scope, window, ends, cap_usd, cap_tokens, cap_calls, spent_usd, spent_tokens, spent_calls, held_usd, "
    "held_tokens, held_calls, "
    "granted_usd, granted_tokens, granted_calls, overrun_usd, overrun_tokens, overrun_calls, expired_usd, "
    "expired_tokens, expired_calls, closed"
)

# One account is the common case and the hot one: then one statement does what otherwise takes six. It changes nothing
# when the account is new, closed or full, when the hold is known already or when others are overdue; what comes after
# it sees to those.
_RESERVE_ONE: Final = f"""
UPDATE accounts SET cap_usd = :cap0, cap_tokens = :cap1, cap_calls = :cap2, updated = :now,
  held_usd = held_usd + :want0, held_tokens = held_tokens + :want1, held_calls = held_calls + :want2
WHERE key = :key AND closed = 0 AND spent_usd + held_usd + :want0 <= :cap0 + granted_usd
  AND spent_tokens + held_tokens + :want1 <= :cap1 + granted_tokens
    AND spent_calls + held_calls + :want2 <= :cap2 + granted_calls
  AND NOT EXISTS (SELECT 1 FROM holds WHERE id = :hold) AND NOT EXISTS (SELECT 1 FROM holds WHERE state = 'open'
    AND expires <= :now)
RETURNING {_BALANCE}, (SELECT version FROM documents WHERE name = '{_CONTROL}')
"""
_SETTLE_ONE: Final = f"""
UPDATE accounts SET held_usd = held_usd - ?, held_tokens = held_tokens - ?, held_calls = held_calls - ?,
  spent_usd = spent_usd + ?, spent_tokens = spent_tokens + ?, spent_calls = spent_calls + ?, updated = ?
WHERE key = ? RETURNING {_BALANCE}, (SELECT version FROM documents WHERE name = '{_CONTROL}')
"""
_IS_CURRENT: Final = (
    "SELECT 1 FROM sqlite_master, documents AS d WHERE sqlite_master.name = 'records_about' AND d.name = ?"
)
_COUNT: Final = "UPDATE documents SET version = version + 1 WHERE name = ? RETURNING version, text"
_LOOK: Final = "SELECT version, text FROM documents WHERE name = ?"


class SqliteStore:
    """``sqlite:///relative.db``, ``sqlite:////absolute.db``; ``?synchronous=normal`` trades the last moments before a
    power cut for speed.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        path = unquote(parts.path)
        if "@" in parts.netloc:
            raise PolicyError(
                "store = 'sqlite://…': a file has no user and password; write 'sqlite:///relative/path.db' or 'sqlite:////absolute/path.db'"
            )
        if parts.netloc or parts.fragment or not path.startswith("/") or path == "/" or "\0" in path:
            raise PolicyError(
                f"store = {url!r}: write 'sqlite:///relative/path.db' or 'sqlite:////absolute/path.db' (and "
                "%23 for a #)"
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

    def connect(self, timeout: float) -> "SqliteSession":
        return SqliteSession(self.path, self.synchronous, timeout, self.seen)


class SqliteSession:
    """One connection. Every write is a transaction that takes the write lock at its beginning: a read that turns into a
    write fails in WAL mode.
    """

    def __init__(self, path: Path, synchronous: str, timeout: float, seen: Seen) -> None:
        self._path, self._timeout, self._place, self._seen = path, timeout, str(path), seen
        self._line: _Line | None = None
        self._wal = self._generation = 0
        with _translated(path):
            if seen.text:  # nothing is made: neither the file nor what belongs into it
                self._db = self._reopened()
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._db = sqlite3.connect(path, timeout=timeout, isolation_level=None, check_same_thread=False)
            try:
                if seen.text:
                    self._meet()
                is_new = not self._is_ours_now()
                if fcntl is not None:
                    self._line = _Line(path, timeout)
                self._inode = path.stat().st_ino
                if is_new:  # before anything is written to it
                    self._db.execute("PRAGMA auto_vacuum=INCREMENTAL")
                self._use_wal()
                self._db.execute(f"PRAGMA synchronous={synchronous}")
                # every commit is on the disk as it is: how often they are moved to their places is a matter of speed
                # alone
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
        """The file that this process has worked with, or one that may be it."""
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
            row = self._db.execute("SELECT version, text FROM documents WHERE name = ?", (IDENTITY,)).fetchone()
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorname", "") != "SQLITE_ERROR":
                raise
            row = None  # there is no such table
        generation, found = row or (0, "")
        self._seen.meet(expected, found, generation, floor)

    def _use_wal(self) -> None:
        """SQLite does not wait here, however long it was told to, when another session is writing the new file."""
        if self._db.execute("PRAGMA journal_mode").fetchone()[0] == "wal":  # and nobody has to stand in line for it
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
        """One look at one moment: another session may be making the schema."""
        self._db.execute("BEGIN")
        try:
            return self._is_ours()
        finally:
            if self._db.in_transaction:  # an error may have ended it
                self._db.execute("ROLLBACK")

    def _is_ours(self) -> bool:
        """Whether the schema is there; an error when the file is somebody else's, or of another version."""
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
        if self._is_ours_now() and self._db.execute(_IS_CURRENT, (IDENTITY,)).fetchone():
            return
        with self._transaction():
            if self._is_ours():
                # a file from before there was one
                self._db.execute("CREATE INDEX IF NOT EXISTS records_about ON records (kind, ref)")
                self._db.execute("INSERT OR IGNORE INTO documents VALUES (?, 1, ?)", (IDENTITY, new_id()))  # the same
                return
            for statement in _SCHEMA.split(";\n"):
                if statement.strip():
                    self._db.execute(statement)
            self._db.execute("INSERT INTO documents VALUES (?, 1, ?)", (IDENTITY, new_id()))
            self._db.execute(f"PRAGMA application_id={_APPLICATION}")
            self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    # ---- transactions -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _write(self, *, count: bool = True) -> Iterator[float]:
        """A change of the store that this process has seen, and of no other one.

        Records are not counted: the loss of some is no loss of money.
        """
        seen = self._seen
        with self._transaction(self._committed) as now:
            yield now
            rows = self._db.execute(_COUNT if count else _LOOK, (IDENTITY,)).fetchall()
            self._generation, found = rows[0] if rows else (0, "")
            seen.meet(seen.text, found, self._generation, seen.generation + count)

    def _committed(self) -> None:
        self._seen.changed(self._generation)

    @contextlib.contextmanager
    def _transaction(self, committed: Callable[[], None] = lambda: None) -> Iterator[float]:
        """A transaction with the store's clock.

        Writers of all processes stand in line at the lock files: SQLite's own waiting is unfair.
        """
        try:
            self._enter()
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield time.time()  # noqa: TID251 - one machine, one clock: it is the store's
                    self._db.execute("COMMIT")
                    committed()  # before others get their turn
                except BaseException:
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")
                    raise
            finally:
                self._leave()
        except (sqlite3.Error, OSError) as error:
            raise _told(self._path, error) from error

    def _enter(self) -> None:
        if self._line is None:
            return
        self._line.take()
        try:
            if _inode(self._place) != self._inode or (self._wal and _inode(f"{self._place}-wal") != self._wal):
                raise StoreOutage(
                    f"{self._path}: the file or its -wal file was removed or replaced while it was in use; "
                    "what is written now would be lost"
                )
        except BaseException:
            self._line.leave()
            raise

    def _leave(self) -> None:
        if self._line is not None:
            self._line.leave()

    # ---- accounts ---------------------------------------------------------------------------------------------------

    def reserve(self, hold: str, ttl: float, lines: Sequence[Line], want: Amount, *, force: bool = False) -> Reply:
        check_amounts(want, lines)
        check_ttl(ttl)
        lines = list({line.key: line for line in lines}.values())
        with self._write() as now:
            if (
                len(lines) == 1
                and not force
                and (reply := self._reserve_one(hold, ttl, lines[0], want, now)) is not None
            ):
                return reply
            known = self._db.execute("SELECT state FROM holds WHERE id = ?", (hold,)).fetchone()
            if known is not None:
                return Reply(self._balances([line.key for line in lines]), now, self._control(), ok=known[0] == "open")
            if any(
                (line.ends is not None and now >= line.ends) or (line.begins is not None and now < line.begins)
                for line in lines
            ):
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
                    "UPDATE accounts SET held_usd = held_usd + ?, held_tokens = held_tokens + ?, held_calls = "
                    "held_calls + ?, updated = ? WHERE key = ?",
                    (*want, now, key),
                )
            self._db.execute(
                "INSERT INTO holds VALUES (?, ?, 'open', ?, ?, ?, ?, ?)",
                (hold, json.dumps(keys), now + ttl, now, *want),
            )
            return Reply(self._balances(keys), now, self._control())

    def _reserve_one(self, hold: str, ttl: float, line: Line, want: Amount, now: float) -> Reply | None:
        if (line.ends is not None and now >= line.ends) or (line.begins is not None and now < line.begins):
            return None
        facts = {
            "key": line.key, "hold": hold, "now": now, "cap0": line.caps[0], "cap1": line.caps[1], "cap2": line.caps[2],
            "want0": want[0], "want1": want[1], "want2": want[2],
        }  # fmt: skip
        rows = self._db.execute(_RESERVE_ONE, facts).fetchall()
        if not rows:
            return None
        self._db.execute(
            "INSERT INTO holds VALUES (?, ?, 'open', ?, ?, ?, ?, ?)",
            (hold, json.dumps([line.key]), now + ttl, now, *want),
        )
        return Reply([_balance(rows[0])], now, rows[0][-1] or 0)

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
                if state == "open" and len(keys) == 1 and all(map(operator.le, actual, amount)):
                    rows = self._db.execute(_SETTLE_ONE, (*amount, *actual, now, keys[0])).fetchall()
                    if rows:
                        self._db.execute(
                            "UPDATE holds SET state = 'settled', updated = ?, usd = ?, tokens = ?, calls = ? "
                            "WHERE id = ?",
                            (now, *actual, hold),
                        )
                        return Reply([_balance(rows[0])], now, rows[0][-1] or 0)
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
                "keys = excluded.keys, state = 'settled', updated = excluded.updated, usd = excluded.usd, "
                "tokens = excluded.tokens, calls = excluded.calls",
                (hold, json.dumps(keys), now, now, *actual),
            )
            return Reply(self._balances(keys), now, self._control())

    def release(self, hold: str) -> Reply:
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
                "UPDATE accounts SET granted_usd = granted_usd + ?, granted_tokens = granted_tokens + ?, "
                "granted_calls = granted_calls + ? WHERE key = ?",
                (*more, line.key),
            )
            (balance,) = self._balances([line.key])
            closed = any(
                s + h > c + g
                for s, h, c, g in zip(balance.spent, balance.held, balance.caps, balance.granted, strict=True)
            )
            self._db.execute("UPDATE accounts SET closed = ? WHERE key = ?", (int(closed and balance.closed), line.key))
            return self._balances([line.key])[0]

    def read(self, scope: str | None = None) -> list[Balance]:
        with self._write() as now:
            self._expire(now, everything=True)
        where, facts = ("WHERE scope = ?", (scope,)) if scope is not None else ("", ())
        with _translated(self._path):  # outside of the lock: whoever only reads keeps nobody from writing
            return [
                _balance(row)
                for row in self._db.execute(f"SELECT {_BALANCE} FROM accounts {where} ORDER BY key", facts)
            ]

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
            row = self._db.execute(f"SELECT {_BALANCE} FROM accounts WHERE key = ?", (key,)).fetchone()
            if row is not None:
                found.append(_balance(row))
        return found

    def _book(self, key: str, held: Amount, booked: Amount, actual: Amount, *, expired: bool, now: float) -> None:
        """Take the hold away, put the actual amount in the place of what was booked; an excess that breaks a cap closes
        the account.
        """
        self._db.execute(
            "UPDATE accounts SET held_usd = held_usd - ?, held_tokens = held_tokens - ?, held_calls = held_calls - ?, "
            "spent_usd = spent_usd + ?, spent_tokens = spent_tokens + ?, spent_calls = spent_calls + ?, "
            "updated = ? WHERE key = ?",
            (*held, *(a - b for a, b in zip(actual, booked, strict=True)), now, key),
        )
        if expired:
            self._db.execute(
                "UPDATE accounts SET expired_usd = expired_usd - ?, expired_tokens = expired_tokens - ?, "
                "expired_calls = expired_calls - ? WHERE key = ?",
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
            self._db.execute(
                "UPDATE accounts SET overrun_usd = ?, overrun_tokens = ?, overrun_calls = ?, closed = 1 WHERE key = ?",
                (*overrun, key),
            )

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
            return (
                self._db.execute(
                    "INSERT OR IGNORE INTO marks VALUES (?, ?, ?, ?)", (key, mark, percent, json.dumps(limit))
                ).rowcount
                == 1
            )

    def marks(self, key: str) -> dict[str, tuple[float, Amount]]:
        with _translated(self._path):
            rows = self._db.execute("SELECT mark, percent, amounts FROM marks WHERE key = ?", (key,)).fetchall()
        return {mark: (percent, tuple(json.loads(amounts))) for mark, percent, amounts in rows}

    def unmark(self, key: str, marks: Sequence[str]) -> None:
        with self._write():
            self._db.executemany("DELETE FROM marks WHERE key = ? AND mark = ?", [(key, mark) for mark in marks])

    def get(self, name: str) -> tuple[int, str]:
        with _translated(self._path):
            self._meet()
            row = self._db.execute("SELECT version, text FROM documents WHERE name = ?", (name,)).fetchone()
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

    def _control(self) -> int:
        row = self._db.execute("SELECT version FROM documents WHERE name = ?", (_CONTROL,)).fetchone()
        return row[0] if row is not None else 0

    # ---- records ----------------------------------------------------------------------------------------------------

    def append(self, kind: str, ref: str, text: str) -> None:
        with self._write(count=False) as now:
            self._db.execute("INSERT INTO records (at, kind, ref, text) VALUES (?, ?, ?, ?)", (now, kind, ref, text))

    def tail(self, kind: str, count: int) -> list[tuple[float, str, str]]:
        with _translated(self._path):
            rows = self._db.execute(
                "SELECT at, ref, text FROM records WHERE kind = ? ORDER BY seq DESC LIMIT ?", (kind, count)
            ).fetchall()
        return rows[::-1]

    def about(self, kind: str, ref: str, *, last: int | None = None) -> list[tuple[float, str]]:
        with _translated(self._path):
            sql = "SELECT at, text FROM records WHERE kind = ? AND ref = ? ORDER BY seq DESC LIMIT ?"
            return self._db.execute(sql, (kind, ref, -1 if last is None else last)).fetchall()[::-1]

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
        with _translated(self._path):
            since = self.now() - within
            return self._db.execute(
                "SELECT id, worker, beat, text FROM runs WHERE ended = 0 AND beat >= ? ORDER BY beat", (since,)
            ).fetchall()

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
        """In parts: nobody waits for longer than one of them takes.

        Each table is walked once, in the order of its key.
        """
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
        while free:  # what is free goes back to the system
            with self._write():
                self._db.execute(f"PRAGMA incremental_vacuum({_PURGE_AT_ONCE})").fetchall()
            with _translated(self._path):
                before, free = free, self._db.execute("PRAGMA freelist_count").fetchone()[0]
            if free == before:  # a file from before there was such a thing
                return

    def _purge_table(self, table: str, key: str, condition: str, old: float) -> None:
        with _translated(self._path):
            last: Any = self._db.execute(f"SELECT min({key}) FROM {table}").fetchone()[0]
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

    def close(self) -> None:
        self._db.close()
        if self._line is not None:
            self._line.close()


class _Line:
    """Writers of all processes, one after another, in the order in which they came.

    Two locks of the kernel, which frees them when a process dies. ``turn`` is held for a transaction. ``next`` is held
    by the one who waits for the turn, and looks for it every moment; the others wait for ``next``, which the kernel
    hands out in order. Whoever has got the turn this way may take it again for a few milliseconds without standing in
    line: to change writers costs more than to write. So nobody waits longer than those few milliseconds for each writer
    before him.
    """

    def __init__(self, path: Path, timeout: float) -> None:
        self._path, self._timeout = path, timeout
        self._turn, self._next = Path(f"{path}-queue").open("a"), Path(f"{path}-next").open("a")  # noqa: SIM115 - for as long as the session
        self._until = 0.0  # of the turn
        self._mutex, self._got = threading.Lock(), threading.Event()
        self._waiting = self._wanted = self._closed = False

    def take(self) -> None:
        now = time.monotonic()
        if now < self._until and _locked(self._turn):
            return
        end = now + self._timeout
        try:
            if not _locked(self._next):
                # The kernel wakes the first in line, but whoever asks before that one runs gets the lock. So let him
                # run.
                time.sleep(min(_TURN_S, self._timeout / 10))
                self._wait(end)
            while not _locked(self._turn):
                if time.monotonic() > end:
                    raise self._too_long()
                time.sleep(_GLANCE_S)
        finally:
            fcntl.flock(self._next, fcntl.LOCK_UN)
        self._until = time.monotonic() + _TURN_S

    def leave(self) -> None:
        fcntl.flock(self._turn, fcntl.LOCK_UN)

    def _too_long(self) -> StoreOutage:
        advice = "raise store_timeout, or use Valkey or Postgres for so many workers"
        return StoreOutage(f"{self._path}: locked by other processes for more than {self._timeout:g} s; {advice}")

    def _wait(self, end: float) -> None:
        """A lock that the kernel hands out in order cannot be waited for with a limit of time, so a thread
        waits. One that its session has given up keeps the place for the session's next call, and passes the lock on if
        there is none."""
        with self._mutex:
            self._wanted = True
            if not self._waiting:
                self._got.clear()
                try:
                    threading.Thread(target=self._stand, name="runguard-sqlite", daemon=True).start()
                    self._waiting = True
                except RuntimeError:  # the interpreter is ending, or has no thread left: then without an order
                    while not _locked(self._next):
                        if time.monotonic() > end:
                            raise self._too_long() from None
                        time.sleep(_GLANCE_S)
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
        # the session's deadline reports it, and its next call starts another thread
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


def _inode(path: str) -> int:
    """0 when there is no such file."""
    try:
        return os.stat(path).st_ino  # noqa: PTH116 - pathlib takes twice as long
    except FileNotFoundError:
        return 0


def _locked(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _balance(row: tuple[Any, ...]) -> Balance:
    return Balance(
        row[0],
        row[1],
        row[2],
        row[3],
        row[4:7],
        row[7:10],
        row[10:13],
        row[13:16],
        row[16:19],
        row[19:22],
        bool(row[22]),
    )


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    """SQLite's errors in our terms: what may pass, and what somebody must repair."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise _told(path, error) from error


def _told(path: Path, error: Exception) -> StoreError | StoreOutage:
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL", "SQLITE_IOERR")):
        return StoreOutage(f"{path}: {error}")
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return StoreError(
            f"{path}: {error}; the file is damaged or no database. Move it away and keep it: it holds your accounts"
        )
    if name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH")):
        return StoreError(f"{path}: {error}; check that the file and its folder can be written")
    return StoreError(f"{path}: {error}")
