"""All operations of a Postgres store: reservations and settlements, marks, documents, records, claims, purge."""

import contextlib
import json
import time
from collections.abc import Sequence
from typing import Any, Final

from runguard.core.money import Amount
from runguard.ledger.identity import IDENTITY
from runguard.ledger.postgres.connection import PostgresConnection
from runguard.ledger.postgres.encoding import (
    balance_of,
    balance_of_line,
    balances_of,
    columns_of,
    in_lock_order,
    integers,
    long_name,
    reply_of,
    short_name,
    texts,
)
from runguard.ledger.postgres.error_mapping import DuplicateError
from runguard.ledger.store import Balance, Line, Record, SettledCall, StoreReply, check_amounts, check_ttl

_EXPIRE_AT_ONCE: Final = 64  # as in the SQL
_PURGE_AT_ONCE: Final = 1_000


class PostgresSession(PostgresConnection):
    """One connection with all operations of ``StoreSession``."""

    # ---- accounts ---------------------------------------------------------------------------------------------------

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

    # ---- marks and documents ----------------------------------------------------------------------------------------

    def first(self, key: str, mark: str, percent: float, limit: Amount) -> bool:
        here = self._here.replace("%s", "%(identity)s")
        values = f"SELECT %(key)s::text, %(mark)s::text, %(percent)s::float8, %(limit)s::text, %(long)s::text{here}"
        sql = (
            f'INSERT INTO "{self._schema}".marks {values} ON CONFLICT (key, mark) DO NOTHING RETURNING %(number)s::text'
        )
        facts = {
            "key": short_name(key), "mark": short_name(mark), "percent": repr(float(percent)),
            "limit": json.dumps(limit), "long": long_name(mark), "identity": self._seen.text,
        }  # fmt: skip
        end = self._end()
        made = self._own(sql, facts, end)
        if not made:
            self._meet(end)  # it was marked before, or is another store
        return bool(made)

    def marks(self, key: str) -> dict[str, tuple[float, Amount]]:
        query = f'SELECT * FROM "{self._schema}".marks WHERE key = %(key)s::text'
        rows = self._rows("coalesce(long_mark, mark), percent, amounts", query, {"key": short_name(key)})
        return {mark: (percent, tuple(json.loads(amounts))) for mark, percent, amounts in rows}

    def unmark(self, key: str, marks: Sequence[str]) -> None:
        names = texts([short_name(mark) for mark in marks])
        self._delete(
            "marks WHERE key = %(key)s::text AND mark = ANY (%(marks)s::text[])", key=short_name(key), marks=names
        )

    def get(self, name: str) -> tuple[int, str]:
        expected = self._seen.text
        query = f'SELECT * FROM "{self._schema}".documents WHERE name IN (%(identity)s::text, %(name)s::text)'
        rows = self._rows("name, version, text", query, {"identity": IDENTITY, "name": short_name(name)})
        found = {key: (version, text) for key, version, text in rows}
        self._seen.meet(expected, found.get(IDENTITY, (0, ""))[1])
        return found.get(short_name(name), (0, ""))

    def put(self, name: str, version: int, text: str) -> bool:
        return bool(
            self._here_only(
                f'SELECT "{self._schema}".put(%s::text, %s::bigint, %s::text)', short_name(name), str(version), text
            )
        )

    def drop(self, name: str) -> None:
        self._delete("documents WHERE name = %(name)s::text", name=short_name(name))

    def _delete(self, what: str, **params: str) -> None:
        sql = f'WITH gone AS (DELETE FROM "{self._schema}".{what}) SELECT %(number)s::text'
        self._some(sql, dict(params))

    def now(self) -> float:
        return self._clock(None)

    def _clock(self, end: float | None) -> float:
        return float(self._some(f'SELECT "{self._schema}".clock(), %(number)s::text', {}, end)[0][0])

    # ---- records ----------------------------------------------------------------------------------------------------

    def append(self, kind: str, ref: str, text: str) -> None:
        here = self._here.replace("%s", "%(identity)s")
        values = f'SELECT "{self._schema}".clock(), %(kind)s::text, %(ref)s::text, %(text)s::text{here}'
        sql = f'INSERT INTO "{self._schema}".records (at, kind, ref, text) {values} RETURNING %(number)s::text'
        facts = {"kind": short_name(kind), "ref": ref, "text": text}
        end = self._end()
        self._there(lambda: self._own(sql, {**facts, "identity": self._seen.text}, end), end)

    def tail(self, kind: str, count: int) -> list[tuple[float, str, str]]:
        query = (
            f'SELECT * FROM "{self._schema}".records WHERE kind = %(kind)s::text '
            "ORDER BY seq DESC LIMIT %(count)s::bigint"
        )
        return self._rows("at, ref, text", query, {"kind": short_name(kind), "count": str(count)}, "seq")

    def page(self, kind: str, after: str, count: int) -> list[tuple[str, float, str, str]]:
        query = (
            f'SELECT * FROM "{self._schema}".records WHERE kind = %(kind)s::text AND seq > %(after)s::bigint '
            "ORDER BY seq LIMIT %(count)s::bigint"
        )
        facts: dict[str, str | None] = {"kind": short_name(kind), "after": after or "0", "count": str(count)}
        return self._rows("seq::text, at, ref, text", query, facts, "found.seq")

    def about(self, kind: str, ref: str, *, last: int | None = None) -> list[tuple[float, str]]:
        same = "hashtextextended(ref, 0) = hashtextextended(%(ref)s::text, 0) AND ref = %(ref)s::text"
        query = (
            f'SELECT * FROM "{self._schema}".records WHERE kind = %(kind)s::text AND {same} '
            "ORDER BY seq DESC LIMIT %(last)s::int"
        )
        facts = {"kind": short_name(kind), "ref": ref, "last": None if last is None else str(last)}
        return self._rows("at, text", query, facts, "seq")

    def beat(self, run: str, worker: str, text: str, *, ended: bool = False) -> int:
        sql = f'SELECT "{self._schema}".beat(%s::text, %s::text, %s::text, %s::boolean, %s::text)'
        return int(self._here_only(sql, short_name(run), worker, text, "t" if ended else "f", long_name(run)))

    def running(self, within: float) -> list[tuple[str, str, float, str]]:
        since = f'(SELECT "{self._schema}".clock() - %(within)s::float8)'
        query = f'SELECT * FROM "{self._schema}".runs WHERE NOT ended AND beat >= {since}'
        return self._rows("coalesce(long_id, id), worker, beat, text", query, {"within": repr(float(within))}, "beat")

    def claim(self, key: str, ttl: float) -> str:
        return str(
            self._here_only(f'SELECT "{self._schema}".claim(%s::text, %s::float8)', short_name(key), repr(float(ttl)))
        )

    def finish(self, key: str, done: bool) -> None:
        self._here_only(f'SELECT "{self._schema}".finish(%s::text, %s::boolean)', short_name(key), "t" if done else "f")

    def purge(self, older_than: float) -> None:
        """Delete in parts, for at most half of the deadline. The next purge continues."""
        end = self._end()
        old = repr(self._clock(end) - older_than)
        while time.monotonic() < end - self._timeout / 2:
            if not self._here_only(
                f'SELECT "{self._schema}".purge(%s::float8, %s::int)', old, str(_PURGE_AT_ONCE), end=end
            ):
                return


def _wanted(hold: str, seconds: str, line: Line, want: Amount) -> dict[str, str | None]:
    """What a reservation on one account sends."""
    return {
        "hold": hold, "ttl": seconds, "key": short_name(line.key),
        "begins": "-infinity" if line.begins is None else repr(float(line.begins)),
        "ends": "infinity" if line.ends is None else repr(float(line.ends)),
        "cap0": str(line.caps[0]), "cap1": str(line.caps[1]), "cap2": str(line.caps[2]),
        "want0": str(want[0]), "want1": str(want[1]), "want2": str(want[2]),
    }  # fmt: skip
