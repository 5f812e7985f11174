"""The operations of a Postgres store beside reservations: marks, documents, records, claims and the purge."""

import json
import time
from collections.abc import Sequence
from typing import Final

from runguard.core.money import Amount
from runguard.ledger.identity import IDENTITY
from runguard.ledger.postgres.encoding import long_name, short_name, texts
from runguard.ledger.postgres.holds import PostgresHolds

_PURGE_AT_ONCE: Final = 1_000


class PostgresSession(PostgresHolds):
    """One connection with all operations of ``Session``."""

    # ---- marks and documents ----------------------------------------------------------------------------------------

    def first(self, key: str, mark: str, percent: float, limit: Amount) -> bool:
        values = f"SELECT %s::text, %s::text, %s::float8, %s::text, %s::text{self._here}"
        sql = f'INSERT INTO "{self._schema}".marks {values} ON CONFLICT (key, mark) DO NOTHING RETURNING 1'
        end = self._end()
        made = self._call(
            sql,
            (
                short_name(key),
                short_name(mark),
                repr(float(percent)),
                json.dumps(limit),
                long_name(mark),
                self._seen.text,
            ),
            end,
        )
        if not made:
            self._meet(end)  # it was marked before, or is another store
        return bool(made)

    def marks(self, key: str) -> dict[str, tuple[float, Amount]]:
        sql = f'SELECT coalesce(long_mark, mark), percent, amounts FROM "{self._schema}".marks WHERE key = %s::text'
        return {
            mark: (percent, tuple(json.loads(amounts)))
            for mark, percent, amounts in self._call(sql, (short_name(key),))
        }

    def unmark(self, key: str, marks: Sequence[str]) -> None:
        sql = f'DELETE FROM "{self._schema}".marks WHERE key = %s::text AND mark = ANY (%s::text[]) RETURNING 1'
        self._call(sql, (short_name(key), texts([short_name(mark) for mark in marks])))

    def get(self, name: str) -> tuple[int, str]:
        expected = self._seen.text
        sql = f'SELECT name, version, text FROM "{self._schema}".documents WHERE name IN (%s::text, %s::text)'
        found = {key: (version, text) for key, version, text in self._call(sql, (IDENTITY, short_name(name)))}
        self._seen.meet(expected, found.get(IDENTITY, (0, ""))[1])
        return found.get(short_name(name), (0, ""))

    def put(self, name: str, version: int, text: str) -> bool:
        return bool(
            self._here_only(
                f'SELECT "{self._schema}".put(%s::text, %s::bigint, %s::text)', short_name(name), str(version), text
            )
        )

    def drop(self, name: str) -> None:
        self._call(f'DELETE FROM "{self._schema}".documents WHERE name = %s::text RETURNING 1', (short_name(name),))

    def now(self) -> float:
        return self._clock(None)

    def _clock(self, end: float | None) -> float:
        return float(self._call(f'SELECT "{self._schema}".clock()', (), end)[0][0])

    # ---- records ----------------------------------------------------------------------------------------------------

    def append(self, kind: str, ref: str, text: str) -> None:
        values = f'SELECT "{self._schema}".clock(), %s::text, %s::text, %s::text{self._here}'
        sql = f'INSERT INTO "{self._schema}".records (at, kind, ref, text) {values} RETURNING 1'
        end = self._end()
        self._there(lambda: self._call(sql, (short_name(kind), ref, text, self._seen.text), end), end)

    def tail(self, kind: str, count: int) -> list[tuple[float, str, str]]:
        sql = (
            f'SELECT at, ref, text FROM "{self._schema}".records WHERE kind = %s::text ORDER BY seq DESC LIMIT '
            "%s::bigint"
        )
        return self._call(sql, (short_name(kind), str(count)))[::-1]

    def about(self, kind: str, ref: str, *, last: int | None = None) -> list[tuple[float, str]]:
        same = "hashtextextended(ref, 0) = hashtextextended(%(ref)s::text, 0) AND ref = %(ref)s::text"
        sql = (
            f'SELECT at, text FROM "{self._schema}".records WHERE kind = %(kind)s::text AND {same} ORDER BY seq '
            "DESC LIMIT %(last)s::int"
        )
        return self._call(sql, {"kind": short_name(kind), "ref": ref, "last": None if last is None else str(last)})[
            ::-1
        ]

    def beat(self, run: str, worker: str, text: str, *, ended: bool = False) -> int:
        sql = f'SELECT "{self._schema}".beat(%s::text, %s::text, %s::text, %s::boolean, %s::text)'
        return int(self._here_only(sql, short_name(run), worker, text, "t" if ended else "f", long_name(run)))

    def running(self, within: float) -> list[tuple[str, str, float, str]]:
        since = f'(SELECT "{self._schema}".clock() - %s::float8)'
        sql = (
            f'SELECT coalesce(long_id, id), worker, beat, text FROM "{self._schema}".runs WHERE NOT ended AND beat '
            f">= {since} ORDER BY beat"
        )
        return self._call(sql, (repr(float(within)),))

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
