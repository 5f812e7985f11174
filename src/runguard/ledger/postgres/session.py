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
