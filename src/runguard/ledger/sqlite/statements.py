"""The SQL of the SQLite store, and the form of an account's row."""

from typing import Any, Final

from runguard.ledger.store import Balance

CONTROL: Final = "control"
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
# account is new, closed or full, when the hold is already known, or when other holds are overdue. The general path
# then handles those cases.
RESERVE_ONE: Final = f"""
UPDATE accounts SET cap_usd = :cap0, cap_tokens = :cap1, cap_calls = :cap2, updated = :now,
  held_usd = held_usd + :want0, held_tokens = held_tokens + :want1, held_calls = held_calls + :want2
WHERE key = :key AND closed = 0 AND spent_usd + held_usd + :want0 <= :cap0 + granted_usd
  AND spent_tokens + held_tokens + :want1 <= :cap1 + granted_tokens
    AND spent_calls + held_calls + :want2 <= :cap2 + granted_calls
  AND NOT EXISTS (SELECT 1 FROM holds WHERE id = :hold) AND NOT EXISTS (SELECT 1 FROM holds WHERE state = 'open'
    AND expires <= :now)
RETURNING {BALANCE}, (SELECT version FROM documents WHERE name = '{CONTROL}')
"""
SETTLE_ONE: Final = f"""
UPDATE accounts SET held_usd = held_usd - ?, held_tokens = held_tokens - ?, held_calls = held_calls - ?,
  spent_usd = spent_usd + ?, spent_tokens = spent_tokens + ?, spent_calls = spent_calls + ?, updated = ?
WHERE key = ? RETURNING {BALANCE}, (SELECT version FROM documents WHERE name = '{CONTROL}')
"""
IS_CURRENT: Final = (
    "SELECT 1 FROM sqlite_master, documents AS d WHERE sqlite_master.name = 'records_about' AND d.name = ?"
)
COUNT_CHANGE: Final = "UPDATE documents SET version = version + 1 WHERE name = ? RETURNING version, text"
# The number of a record grows for ever, also after a purge that left none: it is at least the time in microseconds.
APPEND: Final = """
INSERT INTO records (seq, at, kind, ref, text)
VALUES (max(?, coalesce((SELECT max(seq) FROM records), 0) + 1), ?, ?, ?, ?)
"""
READ_DOCUMENT: Final = "SELECT version, text FROM documents WHERE name = ?"


def balance_of(row: tuple[Any, ...]) -> Balance:
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
