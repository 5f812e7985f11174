"""The operations of a SQLite store beside reservations: marks, documents, records, claims and the purge."""

import json
import time
from collections.abc import Sequence
from typing import Any, Final

from runguard.core.money import Amount
from runguard.ledger.sqlite.error_mapping import mapped_errors
from runguard.ledger.sqlite.holds import SqliteHolds
from runguard.ledger.sqlite.statements import READ_DOCUMENT

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
        with mapped_errors(self._path):
            rows = self._db.execute("SELECT mark, percent, amounts FROM marks WHERE key = ?", (key,)).fetchall()
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
        with mapped_errors(self._path):
            sql = "SELECT CAST(seq AS TEXT), at, ref, text FROM records WHERE kind = ? AND seq > ? ORDER BY seq LIMIT ?"
            return self._db.execute(sql, (kind, int(after or 0), count)).fetchall()

    def tail(self, kind: str, count: int) -> list[tuple[float, str, str]]:
        with mapped_errors(self._path):
            rows = self._db.execute(
                "SELECT at, ref, text FROM records WHERE kind = ? ORDER BY seq DESC LIMIT ?", (kind, count)
            ).fetchall()
        return rows[::-1]

    def about(self, kind: str, ref: str, *, last: int | None = None) -> list[tuple[float, str]]:
        with mapped_errors(self._path):
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
        with mapped_errors(self._path):
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
            with mapped_errors(self._path):
                before, free = free, self._db.execute("PRAGMA freelist_count").fetchone()[0]
            if free == before:  # a file from an older version cannot shrink
                return

    def _purge_table(self, table: str, key: str, condition: str, old: float) -> None:
        with mapped_errors(self._path):
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
