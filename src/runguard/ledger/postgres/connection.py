"""One connection to a Postgres server: sending statements within a deadline, and reconnecting."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from runguard.ledger.identity import IDENTITY, Seen
from runguard.ledger.postgres.dialing import dial, discard, server_settings, socket_limits
from runguard.ledger.postgres.error_mapping import MISSING, DeadlineError, DuplicateError, store_error_of
from runguard.ledger.postgres.schema import PostgresSchema
from runguard.ledger.postgres.statements import (
    RESERVE_ONE,
    SETTLE_AND_RESERVE_ONE,
    SETTLE_ONE,
    SETTLE_ONE_RECORDED,
    SETTLE_RECORDED,
    in_schema,
)
from runguard.ledger.store import StoreError, StoreOutage

if TYPE_CHECKING:
    import psycopg


class PostgresConnection:
    """One connection. After a loss the next call makes a new one.

    Whether a call took effect before the loss is unknown; each operation may be repeated.
    """

    def __init__(self, name: str, schema: str, params: dict[str, Any], timeout: float, seen: Seen) -> None:
        self._name, self._schema, self._timeout, self._seen = name, schema, timeout, seen
        self._params = {
            **socket_limits(timeout),
            **params,
            "client_encoding": "UTF8",
            "options": server_settings(timeout, params.get("options")),
        }
        self._secret = str(params.get("password") or "")
        self._db: psycopg.Cursor[tuple[Any, ...]] | None = None
        self._process = os.getpid()
        self._closed, self._asked = False, 0
        # selects one row in the store that this process has seen, and none in another store
        self._here = f" FROM \"{schema}\".documents WHERE name = '{IDENTITY}' AND text = %s::text"
        self._reserve = (
            f'SELECT "{schema}".reserve(%s::text, %s::float8, %s::text[], %s::float8[], %s::bigint[], '
            "%s::bigint[], %s::boolean)"
        )
        self._settle = f'SELECT "{schema}".settle(%s::text, %s::text[], %s::float8[], %s::bigint[], %s::bigint[])'
        self._reserve_one, self._settle_one = in_schema(RESERVE_ONE, schema), in_schema(SETTLE_ONE, schema)
        self._settle_one_recorded = in_schema(SETTLE_ONE_RECORDED, schema)
        self._settle_recorded = in_schema(SETTLE_RECORDED, schema)
        self._settle_and_reserve_one = in_schema(SETTLE_AND_RESERVE_ONE, schema)
        self._described = PostgresSchema(name, schema, seen)
        with self._mapped_errors():
            self._open(time.monotonic() + timeout)

    def _end(self) -> float:
        return time.monotonic() + self._timeout

    def _call(
        self, sql: str, params: "tuple[str | None, ...] | dict[str, str | None]", end: float | None = None
    ) -> list[Any]:
        """One round trip. All parameters are texts with a type in the statement, so that each statement is prepared
        once.

        ``end``: the deadline of the operation that this is a part of.
        """
        if end is None:
            end = self._end()
        with self._mapped_errors():
            db = self._db
            if db is None or self._process != os.getpid():
                db = self._open(end)
            db.connection.end = end  # type: ignore[attr-defined]
            return db.execute(sql, params, prepare=True).fetchall()

    def _own(self, sql: str, params: dict[str, str | None], end: float) -> list[Any]:
        """The rows that answer this request. The last column of the statement is the request's number, so that the
        answer to another request is noticed.
        """
        self._asked += 1
        number = str(self._asked)
        return self._checked(self._call(sql, {**params, "number": number}, end), number)

    def _some(self, sql: str, params: dict[str, str | None], end: float | None = None) -> list[Any]:
        """``_own`` for a statement whose answer always has a row. One without rows answers another request."""
        rows = self._own(sql, params, end if end is not None else self._end())
        return rows or self._other_answer()

    def _rows(self, columns: str, query: str, params: dict[str, str | None], order: str = "1") -> list[Any]:
        """The rows of a query, as ``columns``, of which the first is never NULL.

        A query without rows is answered by one row of NULLs, because an answer must carry the number of its request.
        """
        sql = (
            f"SELECT {columns}, %(number)s::text FROM (SELECT) AS one LEFT JOIN ({query}) AS found ON true "
            f"ORDER BY {order}"
        )
        return [row for row in self._some(sql, params) if row[0] is not None]

    def _checked(self, rows: list[Any], number: str) -> list[Any]:
        if any(row[-1] != number for row in rows):
            self._other_answer()
        return [row[:-1] for row in rows]

    def _other_answer(self) -> NoReturn:
        self._drop()
        raise StoreOutage(f"{self._name}: the server sent the answer to another request")

    def _here_only(self, sql: str, *params: str | None, end: float | None = None) -> Any:
        """The answer of a function that is called in the store this process has seen, and in no other store."""
        end = end if end is not None else self._end()
        self._asked += 1
        number = str(self._asked)
        return self._there(
            lambda: self._checked(
                self._call(f"{sql}, %s::text{self._here}", (*params, number, self._seen.text), end), number
            ),
            end,
        )[0]

    def _there(self, ask: Callable[[], list[Any]], end: float) -> Any:
        """The one row of an answer. No row: the store has another identity, which is accepted if it was adopted."""
        rows = ask()
        if not rows:
            self._meet(end)
            rows = ask()
        if not rows:
            raise StoreOutage(f"{self._name}: the id of the store changes while it is asked")
        return rows[0]

    def _meet(self, end: float) -> None:
        """Find out which store this is; raises when it is another one than before."""
        expected = self._seen.text
        sql = f'SELECT (SELECT text FROM "{self._schema}".documents WHERE name = %(name)s::text), %(number)s::text'
        self._seen.meet(expected, self._some(sql, {"name": IDENTITY}, end)[0][0] or "")

    def _open(self, end: float) -> "psycopg.Cursor[tuple[Any, ...]]":
        if self._closed:
            raise StoreError(f"{self._name}: this session is closed")
        if self._process != os.getpid():
            self._db, self._process = None, os.getpid()  # the connection belongs to the parent process
        connection = dial(self._params, end)
        try:
            connection.end = end  # type: ignore[attr-defined]
            self._described.meet(connection)
        except BaseException:
            connection.close()
            raise
        self._db = connection.cursor()
        return self._db

    def _drop(self) -> None:
        db, self._db = self._db, None
        if db is not None and self._process == os.getpid():
            discard(db.connection)

    def close(self) -> None:
        self._closed = True
        self._drop()

    @contextlib.contextmanager
    def _mapped_errors(self) -> Iterator[None]:
        import psycopg

        try:
            yield
        except DeadlineError:
            self._drop()
            raise StoreOutage(f"{self._name}: no answer within {self._timeout:g} s") from None
        except psycopg.errors.UniqueViolation as error:
            raise DuplicateError(f"{self._name}: {error.diag.message_primary}") from None
        except psycopg.Error as error:
            # without a code the error is not the server's: what arrives next may belong to another request
            if self._db is not None and (
                error.sqlstate is None or self._db.connection.closed or self._db.connection.info.transaction_status != 0
            ):
                self._drop()
            self._check_whether_gone(error)
            user = str(self._params.get("user") or "")
            raise store_error_of(error, self._name, self._schema, user, self._secret, self._seen) from None
        except BaseException:  # an interrupt during a statement: its answer must not be read as the next one's
            self._drop()
            raise

    def _check_whether_gone(self, error: "psycopg.Error") -> None:
        """Something is missing in the schema. Raises when all of it is: the store was removed while in use."""
        import psycopg

        if self._seen.text and self._db is not None and error.sqlstate in MISSING:
            with contextlib.suppress(psycopg.Error):
                self._described.meet(self._db.connection)
