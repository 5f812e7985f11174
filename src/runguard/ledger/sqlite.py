"""Reservations and settlements on a SQLite file. Each operation is one transaction."""

import json
import operator
from collections.abc import Sequence
from typing import Final

from runguard.core.money import NOTHING, UNITS, Amount
from runguard.ledger.sqlite.connection import SqliteConnection
from runguard.ledger.sqlite.error_mapping import mapped_errors
from runguard.ledger.sqlite.statements import APPEND, BALANCE, CONTROL, RESERVE_ONE, SETTLE_ONE, balance_of
from runguard.ledger.store import (
    Balance,
    Line,
    Record,
    SettledCall,
    StoreReply,
    check_amounts,
    check_ttl,
    fits,
    overrun_of,
)

_EXPIRE_AT_ONCE: Final = 64


class SqliteHolds(SqliteConnection):
    """The operations on accounts."""

    def reserve(self, hold: str, ttl: float, lines: Sequence[Line], want: Amount, *, force: bool = False) -> StoreReply:
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
                return StoreReply(
                    self._balances([line.key for line in lines]), now, self._control(), ok=known[0] == "open"
                )
            if any(
                (line.ends is not None and now >= line.ends) or (line.begins is not None and now < line.begins)
                for line in lines
            ):
                return StoreReply((), now, self._control(), ok=False, stale=True)
            self._expire(now)
            for line in lines:
                self._touch(line, now)
            keys = [line.key for line in lines]
            balances = self._balances(keys)
            if not force and any(b.closed or not fits(b, want) for b in balances):
                return StoreReply(balances, now, self._control(), ok=False)
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
            return StoreReply(self._balances(keys), now, self._control())

    def _reserve_one(self, hold: str, ttl: float, line: Line, want: Amount, now: float) -> StoreReply | None:
        if (line.ends is not None and now >= line.ends) or (line.begins is not None and now < line.begins):
            return None
        facts = {
            "key": line.key, "hold": hold, "now": now, "cap0": line.caps[0], "cap1": line.caps[1], "cap2": line.caps[2],
            "want0": want[0], "want1": want[1], "want2": want[2],
        }  # fmt: skip
        rows = self._db.execute(RESERVE_ONE, facts).fetchall()
        if not rows:
            return None
        self._db.execute(
            "INSERT INTO holds VALUES (?, ?, 'open', ?, ?, ?, ?, ?)",
            (hold, json.dumps([line.key]), now + ttl, now, *want),
        )
        return StoreReply([balance_of(rows[0])], now, rows[0][-1] or 0)

    def settle(self, hold: str, lines: Sequence[Line], actual: Amount, record: Record | None = None) -> StoreReply:
        check_amounts(actual, lines)
        with self._write() as now:
            row = self._db.execute("SELECT keys, state, usd, tokens, calls FROM holds WHERE id = ?", (hold,)).fetchone()
            if row is None:  # the store lost it, or was away when it was reserved: book the spend anyway
                for line in lines:
                    self._touch(line, now)
                keys, state, amount = [line.key for line in lines], "unknown", NOTHING
            else:
                keys, state, amount = json.loads(row[0]), row[1], (row[2], row[3], row[4])
            if record is not None and not (state == "settled" and amount == actual):
                self._append(record, now)
            if row is not None:
                if state == "open" and len(keys) == 1 and all(map(operator.le, actual, amount)):
                    rows = self._db.execute(SETTLE_ONE, (*amount, *actual, now, keys[0])).fetchall()
                    if rows:
                        self._db.execute(
                            "UPDATE holds SET state = 'settled', updated = ?, usd = ?, tokens = ?, calls = ? "
                            "WHERE id = ?",
                            (now, *actual, hold),
                        )
                        return StoreReply([balance_of(rows[0])], now, rows[0][-1] or 0)
                if state == "released" and not keys:  # released before it was made: its accounts were not known
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
            return StoreReply(self._balances(keys), now, self._control())

    def settle_and_reserve(
        self, bill: SettledCall, hold: str, ttl: float, lines: Sequence[Line], want: Amount, *, force: bool = False
    ) -> tuple[StoreReply, StoreReply]:
        with self._step():
            settled = self.settle(bill.hold, bill.lines, bill.actual, bill.record)
            return settled, self.reserve(hold, ttl, lines, want, force=force)

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
            keys = json.loads(row[0])
            for key in keys:
                self._book(key, (row[1], row[2], row[3]), NOTHING, NOTHING, expired=False, now=now)
            self._db.execute("UPDATE holds SET state = 'released', updated = ? WHERE id = ?", (now, hold))
            return StoreReply(self._balances(keys), now, self._control())

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
        with mapped_errors(self._path):  # without the lock: reading must not block writers
            return [
                balance_of(row)
                for row in self._db.execute(f"SELECT {BALANCE} FROM accounts {where} ORDER BY key", facts)
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
            row = self._db.execute(f"SELECT {BALANCE} FROM accounts WHERE key = ?", (key,)).fetchone()
            if row is not None:
                found.append(balance_of(row))
        return found

    def _book(self, key: str, held: Amount, booked: Amount, actual: Amount, *, expired: bool, now: float) -> None:
        """Remove the hold and replace the booked amount by the actual one. An excess that breaks a cap closes the
        account.
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
        """Charge overdue holds, whose worker never settled them; only a few where a call waits for the answer."""
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

    def _control(self) -> int:
        row = self._db.execute("SELECT version FROM documents WHERE name = ?", (CONTROL,)).fetchone()
        return row[0] if row is not None else 0
