"""Reservations and settlements on a Postgres server."""

import contextlib
import json
import time
from collections.abc import Sequence
from typing import Any, Final

from runguard.core.money import Amount
from runguard.ledger.postgres.connection import PostgresConnection
from runguard.ledger.postgres.encoding import (
    balance_of,
    balance_of_line,
    balances_of,
    columns_of,
    in_lock_order,
    integers,
    reply_of,
    short_name,
    texts,
)
from runguard.ledger.postgres.error_mapping import DuplicateError
from runguard.ledger.store import Balance, Line, Record, SettledCall, StoreReply, check_amounts, check_ttl

_EXPIRE_AT_ONCE: Final = 64  # as in the SQL


class PostgresHolds(PostgresConnection):
    """The operations on accounts."""

    def reserve(self, hold: str, ttl: float, lines: Sequence[Line], want: Amount, *, force: bool = False) -> StoreReply:
        check_amounts(want, lines)
        check_ttl(ttl)
        hold, ordered, seconds = short_name(hold), in_lock_order(lines), repr(float(ttl))
        end, answer = self._end(), None
        if len(ordered) == 1 and not force:
            (line,) = ordered
            with contextlib.suppress(DuplicateError):
                for numbers, now, control, late in self._own(
                    self._reserve_one, {**_wanted(hold, seconds, line, want), "identity": self._seen.text}, end
                ):
                    if not late:
                        return StoreReply([balance_of_line(line, numbers, closed=False)], now, control or 0)
                    answer = f"[true,false,{now!r},{control or 0},true,[]]"
        if answer is None:
            names, times, caps = columns_of(ordered)
            answer = self._here_only(
                self._reserve, hold, seconds, names, times, caps, integers(want), "t" if force else "f", end=end
            )
        ok, stale, now, control, late, found = json.loads(answer)
        if late and not stale:
            found = self._charged(ordered, end)
        return StoreReply(balances_of(found, lines), now, control, ok, stale)

    def _charged(self, lines: Sequence[Line], end: float) -> Any:
        """The accounts after overdue holds were charged."""
        keys = texts([short_name(line.key) for line in lines])
        return json.loads(self._here_only(f'SELECT "{self._schema}".charged(%s::text[])', keys, end=end))

    def settle(self, hold: str, lines: Sequence[Line], actual: Amount, record: Record | None = None) -> StoreReply:
        check_amounts(actual, lines)
        hold = short_name(hold)
        names, times, caps = columns_of(in_lock_order(lines))
        if len(lines) != 1 and record is None:
            return reply_of(self._here_only(self._settle, hold, names, times, caps, integers(actual)), lines)
        facts: dict[str, str | None] = {
            "hold": hold, "names": names, "times": times, "caps": caps,
            "paid0": str(actual[0]), "paid1": str(actual[1]), "paid2": str(actual[2]),
        }  # fmt: skip
        if record is not None:
            facts |= {"kind": short_name(record[0]), "ref": record[1], "text": record[2]}
        end = self._end()

        def sent(sql: str) -> Any:
            return self._there(lambda: self._own(sql, {**facts, "identity": self._seen.text}, end), end)

        if len(lines) != 1:
            return reply_of(sent(self._settle_recorded)[0], lines)
        facts["key"] = short_name(lines[0].key)
        answer, numbers, closed, now, control = sent(self._settle_one if record is None else self._settle_one_recorded)
        return (
            StoreReply([balance_of_line(lines[0], numbers, closed=closed)], now, control or 0)
            if answer is None
            else reply_of(answer, lines)
        )

    def settle_and_reserve(
        self, bill: SettledCall, hold: str, ttl: float, lines: Sequence[Line], want: Amount, *, force: bool = False
    ) -> tuple[StoreReply, StoreReply]:
        """On one account that both share, one statement. Otherwise two, so that no statement locks more accounts than
        one operation does: the order of the locks holds within an operation.
        """
        if len(lines) == 1 and len(bill.lines) == 1 and lines[0].key == bill.lines[0].key and not force:
            (line,), (kind, ref, text), end = lines, bill.record or (None, None, None), self._end()
            check_amounts(bill.actual, bill.lines)
            check_amounts(want, lines)
            check_ttl(ttl)
            facts = _wanted(short_name(hold), repr(float(ttl)), line, want) | {
                "bill": short_name(bill.hold), "paid0": str(bill.actual[0]), "paid1": str(bill.actual[1]),
                "paid2": str(bill.actual[2]), "kind": None if kind is None else short_name(kind), "ref": ref,
                "text": text, "identity": self._seen.text,
            }  # fmt: skip
            with contextlib.suppress(DuplicateError):
                for numbers, now, control, late in self._own(self._settle_and_reserve_one, facts, end):
                    both = StoreReply([balance_of_line(line, numbers, closed=False)], now, control or 0)
                    if late:
                        both = StoreReply(balances_of(self._charged(lines, end), lines), now, control or 0)
                    return both, both
        settled = self.settle(bill.hold, bill.lines, bill.actual, bill.record)
        return settled, self.reserve(hold, ttl, lines, want, force=force)

    def release(self, hold: str) -> StoreReply:
        return reply_of(self._here_only(self._settle, short_name(hold), "{}", "{}", "{}", None), ())

    def extend(self, line: Line, more: Amount) -> Balance:
        check_amounts(more, [line])
        sql = f'SELECT "{self._schema}".extend(%s::text[], %s::float8[], %s::bigint[], %s::bigint[])'
        return balance_of(json.loads(self._here_only(sql, *columns_of([line]), integers(more))))

    def read(self, scope: str | None = None) -> list[Balance]:
        end = self._end()
        here = self._here.replace("%s", "%(identity)s")
        sql = (
            "SELECT (r).charged, (r).accounts, %(number)s::text FROM (SELECT "
            f'"{self._schema}".read(%(scope)s::text) AS r{here} OFFSET 0) AS it'
        )
        while True:
            charged, found = self._there(
                lambda: self._own(
                    sql, {"scope": None if scope is None else short_name(scope), "identity": self._seen.text}, end
                ),
                end,
            )
            if charged < _EXPIRE_AT_ONCE or time.monotonic() >= end - self._timeout / 2:
                return [balance_of(row) for row in json.loads(found)]


def _wanted(hold: str, seconds: str, line: Line, want: Amount) -> dict[str, str | None]:
    """What a reservation on one account sends."""
    return {
        "hold": hold, "ttl": seconds, "key": short_name(line.key),
        "begins": "-infinity" if line.begins is None else repr(float(line.begins)),
        "ends": "infinity" if line.ends is None else repr(float(line.ends)),
        "cap0": str(line.caps[0]), "cap1": str(line.caps[1]), "cap2": str(line.caps[2]),
        "want0": str(want[0]), "want1": str(want[1]), "want2": str(want[2]),
    }  # fmt: skip
