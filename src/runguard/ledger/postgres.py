"""PostgreSQL: one schema of its own; every operation is one call of a function there, so one round trip and one commit.

The server's clock is the only one. No operation outlasts the time it was given, whatever number of round trips it
takes: the server ends statements and lock waits before that, the client gives up after it.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from runguard.core.budget import Amount
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
)

if TYPE_CHECKING:
    import psycopg

_DEFAULT_SCHEMA: Final = "runguard"
_SCHEMA_NAME: Final = re.compile(r"(?!pg_)[A-Za-z_][A-Za-z0-9_]{0,62}")
_HOSTS: Final = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\[\]:,@/]*)(:\d*)?(,(\[[0-9A-Fa-f:.%]+\]|[^\[\]:,@/]*)(:\d*)?)*")
_SYNCHRONOUS: Final = re.compile(r"synchronous_commit\s*=\s*(\w+)")
_LONG: Final = 500  # characters: an index entry has room for 2,700 bytes, and two names may share one
_EXPIRE_AT_ONCE: Final = 64  # as in the SQL
_PURGE_AT_ONCE: Final = 1_000
_PAUSE: Final = 0.05  # of the time that is left: after it a silent server is looked at again
_SHORTEST_PAUSE_S: Final = 0.005
_LONGEST_PAUSE_S: Final = 0.25
_MIGRATION: Final = 5.0  # making the schema happens once; it may take longer than a call

# What may pass by itself: no connection, interference, no resources, operator or system, read-only (a standby before
# its promotion).
_PASSING: Final = ("08", "40", "53", "57", "58", "55P03", "25006", "25P03", "25P04")
# The server refuses a connection before it has a way to say why in codes.
_REFUSED: Final = re.compile(
    r"authentication failed|no password supplied|pg_hba\.conf|(role|database|user) \"?.*\"? does not exist"
    r"|permission denied|not permitted to log in|"
    r"not currently accepting connections|(server|root) certificate|certificate verify failed"
    r"|server does not support SSL|unsupported startup parameter|"
    r"unrecognized configuration parameter|invalid value for parameter|invalid connection option|invalid .* value",
    re.IGNORECASE,
)
_NO_DATABASE: Final = re.compile(r"database \"?.*\"? does not exist", re.IGNORECASE)
_MISSING: Final = ("3F000", "42P01", "42883")  # a schema, a table, a function

# One line is the common case and the hot one. There a plain statement does the work at half the cost of the function,
# which is for a new account, one that has no room or is closed, a period that is over, a call that billed more than it
# held. A reservation that finds such a thing writes nothing and is asked for again; a settlement goes on within the
# same statement, because its hold may be written already.
_NUMBERS: Final = """ARRAY[cap_usd, cap_tokens, cap_calls, spent_usd, spent_tokens, spent_calls, held_usd,
  held_tokens, held_calls,
    granted_usd, granted_tokens, granted_calls, overrun_usd, overrun_tokens, overrun_calls, expired_usd,
      expired_tokens, expired_calls]::bigint[]::text"""
_RESERVE_ONE: Final = f"""
WITH account AS (
  UPDATE runguard.accounts SET cap_usd = %(cap0)s::bigint, cap_tokens = %(cap1)s::bigint,
    cap_calls = %(cap2)s::bigint, updated = runguard.clock(),
    held_usd = least(held_usd + %(want0)s::bigint, 4611686018427387903),
      held_tokens = least(held_tokens + %(want1)s::bigint, 4611686018427387903),
    held_calls = least(held_calls + %(want2)s::bigint, 4611686018427387903)
  WHERE key = %(key)s::text AND NOT closed
    AND %(want0)s::bigint <= %(cap0)s::bigint + granted_usd - spent_usd - held_usd
    AND %(want1)s::bigint <= %(cap1)s::bigint + granted_tokens - spent_tokens - held_tokens
    AND %(want2)s::bigint <= %(cap2)s::bigint + granted_calls - spent_calls - held_calls
    AND runguard.clock() >= %(begins)s::float8 AND runguard.clock() < %(ends)s::float8
    AND EXISTS (SELECT FROM runguard.documents WHERE name = 'identity' AND text = %(identity)s::text)
  RETURNING {_NUMBERS} AS numbers, updated
), hold AS (
  INSERT INTO runguard.holds SELECT %(hold)s::text, ARRAY[%(key)s::text], 'open', updated + %(ttl)s::float8, updated,
    %(want0)s::bigint, %(want1)s::bigint, %(want2)s::bigint FROM account
)
SELECT numbers, updated, (SELECT version FROM runguard.documents WHERE name = 'control'),
  EXISTS (SELECT FROM runguard.holds WHERE state = 'open' AND expires <= account.updated), %(number)s::text
FROM account
"""
_SETTLE_ONE: Final = f"""
WITH hold AS (
  UPDATE runguard.holds SET state = 'settled', updated = runguard.clock(), paid_usd = %(paid0)s::bigint,
    paid_tokens = %(paid1)s::bigint,
    paid_calls = %(paid2)s::bigint
  WHERE id = %(hold)s::text AND state = 'open' AND keys = ARRAY[%(key)s::text]
    AND usd >= %(paid0)s::bigint AND tokens >= %(paid1)s::bigint AND calls >= %(paid2)s::bigint
    AND EXISTS (SELECT FROM runguard.documents WHERE name = 'identity' AND text = %(identity)s::text)
  RETURNING usd, tokens, calls, updated
), account AS (
  UPDATE runguard.accounts AS a SET updated = hold.updated,
    held_usd = greatest(held_usd - usd, 0), held_tokens = greatest(held_tokens - tokens, 0),
      held_calls = greatest(held_calls - calls, 0),
    spent_usd = least(spent_usd + %(paid0)s::bigint, 4611686018427387903),
      spent_tokens = least(spent_tokens + %(paid1)s::bigint, 4611686018427387903),
    spent_calls = least(spent_calls + %(paid2)s::bigint, 4611686018427387903)
  FROM hold WHERE key = %(key)s::text RETURNING {_NUMBERS} AS numbers, closed, a.updated
)
SELECT CASE WHEN numbers IS NULL THEN runguard.settle(%(hold)s::text, %(names)s::text[], %(times)s::float8[],
  %(caps)s::bigint[],
    ARRAY[%(paid0)s::bigint, %(paid1)s::bigint, %(paid2)s::bigint]) END,
  numbers, closed, updated, (SELECT version FROM runguard.documents WHERE name = 'control'), %(number)s::text
FROM (SELECT FROM runguard.documents WHERE name = 'identity'
  AND text = %(identity)s::text) AS here LEFT JOIN account ON true
"""


class PostgresStore:
    """``postgresql://user:password@host:5432/database``;

    ``?schema=name`` for another schema than "runguard". Other options go to libpq.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
        except ValueError:
            parts = urlsplit("postgresql://#")._replace(fragment="?")  # refused below
        hosts, query = parts.netloc.rpartition("@")[2], [part for part in parts.query.split("&") if part]
        # A message never repeats the URL: where it is not understood, nobody knows which part of it is the password.
        if parts.scheme not in ("postgresql", "postgres"):
            raise PolicyError("a PostgreSQL store is 'postgresql://user:password@host:5432/database'")
        if parts.fragment or "@" in parts.path or not _HOSTS.fullmatch(hosts) or any("=" not in part for part in query):
            raise PolicyError(
                "store = 'postgresql://…': not understood; write 'postgresql://user:password@host:5432/database' "
                "and any of @ : / ? # % in the user or password as %40 %3A %2F %3F %23 %25"
            )
        options = {name: unquote(value) for name, _, value in (part.partition("=") for part in query)}
        self.schema = options.get("schema", _DEFAULT_SCHEMA)
        if not _SCHEMA_NAME.fullmatch(self.schema):
            raise PolicyError(
                f"store = 'postgresql://…?schema={self.schema}': a schema's name has letters, digits and "
                "underscores, and no pg_ in front"
            )
        kept = [
            f"{name}={value.replace('=', '%3D')}"
            for name, _, value in (part.partition("=") for part in query)
            if name != "schema"
        ]
        self._url = parts._replace(query="&".join(kept)).geturl()
        if not parts.netloc:  # urlunsplit drops the empty authority, which libpq needs
            self._url = f"{parts.scheme}://{self._url.removeprefix(f'{parts.scheme}:').removeprefix('//')}"
        shown = {"host": options.get("host"), "schema": self.schema if self.schema != _DEFAULT_SCHEMA else None}
        extra = "&".join(f"{name}={value}" for name, value in shown.items() if value)
        self.name = f"postgresql://{hosts}{parts.path}" + (f"?{extra}" if extra else "")
        self.seen = Seen(self.name)
        said = _SYNCHRONOUS.findall(options.get("options", ""))
        survives = "survives the end of any process"
        if said and said[-1].lower() in ("off", "false", "no", "0"):
            self.durable = f"{survives}; a crash of the server may lose the last moments (synchronous_commit = off)"
        else:
            self.durable = (
                f"{survives}, of the server too; a power cut loses nothing that was settled, as long as the server "
                "runs with fsync"
            )

    def connect(self, timeout: float) -> "PostgresSession":
        try:
            import psycopg
        except ImportError:
            raise PolicyError(
                "store = 'postgresql://…' needs psycopg: pip install 'runguard-agents[postgres]'"
            ) from None
        try:
            params = psycopg.conninfo.conninfo_to_dict(self._url)
        except psycopg.Error:  # its message may quote the URL
            raise PolicyError(
                f"store = {self.name!r}: libpq does not understand an option after the question mark, or a "
                "part before it"
            ) from None
        return PostgresSession(self.name, self.schema, params, timeout, self.seen)


class PostgresSession:
    """One connection, made again at the next call when it was lost.

    What was under way then is unknown; each operation may be repeated.
    """

    def __init__(self, name: str, schema: str, params: dict[str, Any], timeout: float, seen: Seen) -> None:
        self._name, self._schema, self._timeout, self._seen = name, schema, timeout, seen
        self._params = {
            **_patience(timeout),
            **params,
            "client_encoding": "UTF8",
            "options": _settings(timeout, params.get("options")),
        }
        self._secret = str(params.get("password") or "")
        self._db: psycopg.Cursor[tuple[Any, ...]] | None = None
        self._process = os.getpid()
        self._closed, self._asked = False, 0
        # one row in the store that was seen, none elsewhere
        self._here = f" FROM \"{schema}\".documents WHERE name = '{IDENTITY}' AND text = %s::text"
        self._reserve = (
            f'SELECT "{schema}".reserve(%s::text, %s::float8, %s::text[], %s::float8[], %s::bigint[], '
            "%s::bigint[], %s::boolean)"
        )
        self._settle = f'SELECT "{schema}".settle(%s::text, %s::text[], %s::float8[], %s::bigint[], %s::bigint[])'
        self._reserve_one, self._settle_one = _in_schema(_RESERVE_ONE, schema), _in_schema(_SETTLE_ONE, schema)
        with self._translated():
            self._open(time.monotonic() + timeout)

    # ---- accounts ---------------------------------------------------------------------------------------------------

    def reserve(self, hold: str, ttl: float, lines: Sequence[Line], want: Amount, *, force: bool = False) -> Reply:
        check_amounts(want, lines)
        check_ttl(ttl)
        hold, ordered, seconds = _short(hold), _sorted(lines), repr(float(ttl))
        end, answer = self._end(), None
        if len(ordered) == 1 and not force:
            (line,) = ordered
            with contextlib.suppress(_TwinError):
                for numbers, now, control, late in self._own(
                    self._reserve_one,
                    {
                        "hold": hold, "ttl": seconds, "key": _short(line.key),
                        "begins": "-infinity" if line.begins is None else repr(float(line.begins)),
                        "ends": "infinity" if line.ends is None else repr(float(line.ends)),
                        "cap0": str(line.caps[0]), "cap1": str(line.caps[1]), "cap2": str(line.caps[2]),
                        "want0": str(want[0]), "want1": str(want[1]), "want2": str(want[2]),
                          "identity": self._seen.text,
                    },
                    end,
                ):  # fmt: skip
                    if not late:
                        return Reply([_numbered(line, numbers, closed=False)], now, control or 0)
                    answer = f"[true,false,{now!r},{control or 0},true,[]]"
        if answer is None:
            names, times, caps = _columns(ordered)
            answer = self._here_only(
                self._reserve, hold, seconds, names, times, caps, _whole(want), "t" if force else "f", end=end
            )
        ok, stale, now, control, late, found = json.loads(answer)
        if late and not stale:
            charged = self._here_only(
                f'SELECT "{self._schema}".charged(%s::text[])', _texts([_short(line.key) for line in ordered]), end=end
            )
            found = json.loads(charged)
        return Reply(_balances(found, lines), now, control, ok, stale)

    def settle(self, hold: str, lines: Sequence[Line], actual: Amount) -> Reply:
        check_amounts(actual, lines)
        hold = _short(hold)
        names, times, caps = _columns(_sorted(lines))
        if len(lines) != 1:
            return _settled(self._here_only(self._settle, hold, names, times, caps, _whole(actual)), lines)
        facts: dict[str, str | None] = {
            "hold": hold, "key": _short(lines[0].key), "names": names, "times": times, "caps": caps,
            "paid0": str(actual[0]), "paid1": str(actual[1]), "paid2": str(actual[2]),
        }  # fmt: skip
        end = self._end()
        answer, numbers, closed, now, control = self._there(
            lambda: self._own(self._settle_one, {**facts, "identity": self._seen.text}, end), end
        )
        return (
            Reply([_numbered(lines[0], numbers, closed=closed)], now, control or 0)
            if answer is None
            else _settled(answer, lines)
        )

    def release(self, hold: str) -> Reply:
        return _settled(self._here_only(self._settle, _short(hold), "{}", "{}", "{}", None), ())

    def extend(self, line: Line, more: Amount) -> Balance:
        check_amounts(more, [line])
        sql = f'SELECT "{self._schema}".extend(%s::text[], %s::float8[], %s::bigint[], %s::bigint[])'
        return _balance(json.loads(self._here_only(sql, *_columns([line]), _whole(more))))

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
                    sql, {"scope": None if scope is None else _short(scope), "identity": self._seen.text}, end
                ),
                end,
            )
            if charged < _EXPIRE_AT_ONCE or time.monotonic() >= end - self._timeout / 2:
                return [_balance(row) for row in json.loads(found)]

    # ---- marks and documents ----------------------------------------------------------------------------------------

    def first(self, key: str, mark: str, percent: float, limit: Amount) -> bool:
        values = f"SELECT %s::text, %s::text, %s::float8, %s::text, %s::text{self._here}"
        sql = f'INSERT INTO "{self._schema}".marks {values} ON CONFLICT (key, mark) DO NOTHING RETURNING 1'
        end = self._end()
        made = self._call(
            sql, (_short(key), _short(mark), repr(float(percent)), json.dumps(limit), _long(mark), self._seen.text), end
        )
        if not made:
            self._meet(end)  # it was marked before, or is another store
        return bool(made)

    def marks(self, key: str) -> dict[str, tuple[float, Amount]]:
        sql = f'SELECT coalesce(long_mark, mark), percent, amounts FROM "{self._schema}".marks WHERE key = %s::text'
        return {
            mark: (percent, tuple(json.loads(amounts))) for mark, percent, amounts in self._call(sql, (_short(key),))
        }

    def unmark(self, key: str, marks: Sequence[str]) -> None:
        sql = f'DELETE FROM "{self._schema}".marks WHERE key = %s::text AND mark = ANY (%s::text[]) RETURNING 1'
        self._call(sql, (_short(key), _texts([_short(mark) for mark in marks])))

    def get(self, name: str) -> tuple[int, str]:
        expected = self._seen.text
        sql = f'SELECT name, version, text FROM "{self._schema}".documents WHERE name IN (%s::text, %s::text)'
        found = {key: (version, text) for key, version, text in self._call(sql, (IDENTITY, _short(name)))}
        self._seen.meet(expected, found.get(IDENTITY, (0, ""))[1])
        return found.get(_short(name), (0, ""))

    def put(self, name: str, version: int, text: str) -> bool:
        return bool(
            self._here_only(
                f'SELECT "{self._schema}".put(%s::text, %s::bigint, %s::text)', _short(name), str(version), text
            )
        )

    def drop(self, name: str) -> None:
        self._call(f'DELETE FROM "{self._schema}".documents WHERE name = %s::text RETURNING 1', (_short(name),))

    def now(self) -> float:
        return self._clock(None)

    def _clock(self, end: float | None) -> float:
        return float(self._call(f'SELECT "{self._schema}".clock()', (), end)[0][0])

    # ---- records ----------------------------------------------------------------------------------------------------

    def append(self, kind: str, ref: str, text: str) -> None:
        values = f'SELECT "{self._schema}".clock(), %s::text, %s::text, %s::text{self._here}'
        sql = f'INSERT INTO "{self._schema}".records (at, kind, ref, text) {values} RETURNING 1'
        end = self._end()
        self._there(lambda: self._call(sql, (_short(kind), ref, text, self._seen.text), end), end)

    def tail(self, kind: str, count: int) -> list[tuple[float, str, str]]:
        sql = (
            f'SELECT at, ref, text FROM "{self._schema}".records WHERE kind = %s::text ORDER BY seq DESC LIMIT '
            "%s::bigint"
        )
        return self._call(sql, (_short(kind), str(count)))[::-1]

    def about(self, kind: str, ref: str, *, last: int | None = None) -> list[tuple[float, str]]:
        same = "hashtextextended(ref, 0) = hashtextextended(%(ref)s::text, 0) AND ref = %(ref)s::text"
        sql = (
            f'SELECT at, text FROM "{self._schema}".records WHERE kind = %(kind)s::text AND {same} ORDER BY seq '
            "DESC LIMIT %(last)s::int"
        )
        return self._call(sql, {"kind": _short(kind), "ref": ref, "last": None if last is None else str(last)})[::-1]

    def beat(self, run: str, worker: str, text: str, *, ended: bool = False) -> int:
        sql = f'SELECT "{self._schema}".beat(%s::text, %s::text, %s::text, %s::boolean, %s::text)'
        return int(self._here_only(sql, _short(run), worker, text, "t" if ended else "f", _long(run)))

    def running(self, within: float) -> list[tuple[str, str, float, str]]:
        since = f'(SELECT "{self._schema}".clock() - %s::float8)'
        sql = (
            f'SELECT coalesce(long_id, id), worker, beat, text FROM "{self._schema}".runs WHERE NOT ended AND beat '
            f">= {since} ORDER BY beat"
        )
        return self._call(sql, (repr(float(within)),))

    def claim(self, key: str, ttl: float) -> str:
        return str(
            self._here_only(f'SELECT "{self._schema}".claim(%s::text, %s::float8)', _short(key), repr(float(ttl)))
        )

    def finish(self, key: str, done: bool) -> None:
        self._here_only(f'SELECT "{self._schema}".finish(%s::text, %s::boolean)', _short(key), "t" if done else "f")

    def purge(self, older_than: float) -> None:
        """In parts, as far as half of the time goes; the rest is for the next time."""
        end = self._end()
        old = repr(self._clock(end) - older_than)
        while time.monotonic() < end - self._timeout / 2:
            if not self._here_only(
                f'SELECT "{self._schema}".purge(%s::float8, %s::int)', old, str(_PURGE_AT_ONCE), end=end
            ):
                return

    def close(self) -> None:
        self._closed = True
        self._drop()

    # ---- the connection ---------------------------------------------------------------------------------------------

    def _end(self) -> float:
        return time.monotonic() + self._timeout

    def _call(
        self, sql: str, params: "tuple[str | None, ...] | dict[str, str | None]", end: float | None = None
    ) -> list[Any]:
        """One round trip. All parameters are texts with a type in the statement, so that each statement is
        prepared once.

        ``end``: of the operation that this is a part of.
        """
        if end is None:
            end = self._end()
        with self._translated():
            db = self._db
            if db is None or self._process != os.getpid():
                db = self._open(end)
            db.connection.end = end  # type: ignore[attr-defined]
            return db.execute(sql, params, prepare=True).fetchall()

    def _own(self, sql: str, params: dict[str, str | None], end: float) -> list[Any]:
        """The rows that answer this very request.

        The last column of the statement is its number, so that the answer to another one is noticed.
        """
        self._asked += 1
        number = str(self._asked)
        return self._checked(self._call(sql, {**params, "number": number}, end), number)

    def _checked(self, rows: list[Any], number: str) -> list[Any]:
        if any(row[-1] != number for row in rows):
            self._drop()
            raise StoreOutage(f"{self._name}: the server sent the answer to another request")
        return [row[:-1] for row in rows]

    def _here_only(self, sql: str, *params: str | None, end: float | None = None) -> Any:
        """The answer of a function that is called in the store that this process has seen, and in no other one."""
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
        """The one row of an answer. None: the store has another identity, which is accepted if it was adopted."""
        rows = ask()
        if not rows:
            self._meet(end)
            rows = ask()
        if not rows:
            raise StoreOutage(f"{self._name}: the id of the store changes while it is asked")
        return rows[0]

    def _meet(self, end: float) -> None:
        """Look which store this is; raises when it is another one than before."""
        expected = self._seen.text
        sql = f'SELECT (SELECT text FROM "{self._schema}".documents WHERE name = %(name)s::text), %(number)s::text'
        self._seen.meet(expected, self._own(sql, {"name": IDENTITY}, end)[0][0] or "")

    def _open(self, end: float) -> "psycopg.Cursor[tuple[Any, ...]]":
        if self._closed:
            raise StoreError(f"{self._name}: this session is closed")
        if self._process != os.getpid():
            self._db, self._process = None, os.getpid()  # the connection is the parent process's
        connection = self._dial(end)
        try:
            connection.end = end  # type: ignore[attr-defined]
            self._greet(connection)
        except BaseException:
            connection.close()
            raise
        self._db = connection.cursor()
        return self._db

    def _dial(self, end: float) -> "psycopg.Connection[tuple[Any, ...]]":
        """In a thread, because nothing else ends in time whatever happens: libpq knows no fractions of a second, the
        resolver no limit.
        """
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        late = threading.Event()

        def dial() -> None:
            try:
                answers.put(_connection_class().connect(**self._params, autocommit=True))
            except BaseException as error:
                answers.put(error)
            if late.is_set():
                with contextlib.suppress(queue.Empty):
                    _discard(answers.get_nowait())

        threading.Thread(target=dial, name="runguard-postgres", daemon=True).start()
        try:
            answer = answers.get(timeout=max(end - time.monotonic(), 0.001))
        except queue.Empty:
            late.set()
            with contextlib.suppress(queue.Empty):
                _discard(answers.get_nowait())
            raise _LateError from None
        if isinstance(answer, BaseException):
            raise answer
        connection: psycopg.Connection[tuple[Any, ...]] = answer
        return connection

    def _drop(self) -> None:
        db, self._db = self._db, None
        if db is not None and self._process == os.getpid():
            _discard(db.connection)

    # ---- the schema -------------------------------------------------------------------------------------------------

    def _greet(self, connection: "psycopg.Connection[tuple[Any, ...]]") -> None:
        """Look which store this is.

        A process that has seen one makes nothing: neither a schema nor what is missing in it.
        """
        import psycopg

        expected = self._seen.text
        if not expected:
            self._migrate(connection)
        select = f'SELECT text FROM "{self._schema}".documents WHERE name = %s'
        try:
            rows = connection.execute(select, (IDENTITY,)).fetchall()
            if expected:
                self._check(connection.execute(f'SELECT version FROM "{self._schema}".runguard_schema').fetchall())
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
            rows = []
        if not rows and not expected:  # a store from before there was an id, or a new one
            connection.execute(
                f'INSERT INTO "{self._schema}".documents VALUES (%s, 1, %s) ON CONFLICT (name) DO NOTHING',
                (IDENTITY, new_id()),
            )
            rows = connection.execute(select, (IDENTITY,)).fetchall()
        self._seen.meet(expected, rows[0][0] if rows else "")

    def _migrate(self, connection: "psycopg.Connection[tuple[Any, ...]]") -> None:
        import psycopg

        known = (
            f"SELECT version, to_regclass('\"{self._schema}\".records_about') IS NOT NULL FROM "
            f'"{self._schema}".runguard_schema'
        )
        with contextlib.suppress(
            psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName, psycopg.errors.UndefinedColumn
        ):
            rows = connection.execute(known).fetchall()
            self._check(rows)
            if not rows[0][1]:
                self._add_index(connection)
            return
        connection.end = max(connection.end, time.monotonic() + _MIGRATION)  # type: ignore[attr-defined]
        with connection.transaction():
            connection.execute(
                f"SET LOCAL statement_timeout = {round(_MIGRATION * 1000)}; SET LOCAL lock_timeout = "
                f"{round(_MIGRATION * 1000)}"
            )
            # one at a time
            connection.execute(
                "SELECT pg_advisory_xact_lock(hashtextextended('runguard:' || %s::text, 0))", (self._schema,)
            )
            made = connection.execute(
                "SELECT to_regclass(%s) IS NOT NULL, (SELECT count(*) FROM pg_class WHERE relnamespace = n.oid) + "
                "(SELECT count(*) FROM pg_proc WHERE pronamespace = n.oid) FROM pg_namespace AS n WHERE nspname = %s",
                (f'"{self._schema}".runguard_schema', self._schema),
            ).fetchone()
            if made is None:
                # IF NOT EXISTS asks for a right even where there is nothing to do
                connection.execute(f'CREATE SCHEMA "{self._schema}"')
            elif made[0]:
                self._check(connection.execute(known).fetchall())
                return
            elif made[1]:
                self._check([])
            script = files("runguard.ledger").joinpath("scripts/postgres.sql").read_text(encoding="utf-8")
            connection.execute(_in_schema(script, self._schema).encode())
            connection.execute(f'INSERT INTO "{self._schema}".runguard_schema VALUES ({SCHEMA_VERSION})')

    def _add_index(self, connection: "psycopg.Connection[tuple[Any, ...]]") -> None:
        """A schema from before there was one.

        Whoever may not add it, or finds the table busy for too long, does without: it is slower, and works.
        """
        import psycopg

        with contextlib.suppress(
            psycopg.errors.InsufficientPrivilege, psycopg.errors.QueryCanceled, psycopg.errors.LockNotAvailable
        ):
            connection.execute(
                f'CREATE INDEX IF NOT EXISTS records_about ON "{self._schema}".records (hashtextextended(ref, '
                "0), kind, seq)"
            )

    def _check(self, rows: Sequence[Sequence[Any]]) -> None:
        version = rows[0][0] if len(rows) == 1 else None
        if version == SCHEMA_VERSION:
            return
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise StoreError(
                f"{self._name}: its schema is version {version}, made by a newer RunGuard; this one knows "
                f"version {SCHEMA_VERSION}. Upgrade runguard-agents"
            )
        raise StoreError(
            f"{self._name}: the schema {self._schema!r} belongs to something else (schema version {version or 0}); "
            "choose another one with ?schema=name"
        )

    # ---- errors -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        import psycopg

        try:
            yield
        except _LateError:
            self._drop()
            raise StoreOutage(f"{self._name}: no answer within {self._timeout:g} s") from None
        except psycopg.errors.UniqueViolation as error:
            raise _TwinError(f"{self._name}: {error.diag.message_primary}") from None
        except psycopg.Error as error:
            if self._db is not None and (
                self._db.connection.closed or self._db.connection.info.transaction_status != 0
            ):
                self._drop()
            self._look_whether_gone(error)
            raise self._named(error) from None
        except BaseException:  # an interrupt in the middle of a statement: its answer must not become the next one's
            self._drop()
            raise

    def _look_whether_gone(self, error: "psycopg.Error") -> None:
        """Something is missing in the schema: raises when all of it is, because the store was removed under this
        process.
        """
        import psycopg

        if self._seen.text and self._db is not None and error.sqlstate in _MISSING:
            with contextlib.suppress(psycopg.Error):
                self._greet(self._db.connection)

    def _named(self, error: "psycopg.Error") -> StoreError | StoreOutage:
        import psycopg

        code = error.sqlstate
        text = " ".join((error.diag.message_primary or str(error)).split()) or type(error).__name__
        if self._secret:
            text = text.replace(self._secret, "***")
        said = f"{self._name}: {text}"
        if self._seen.text and _NO_DATABASE.search(text):
            return StoreReplacedError(self._name, "the database was removed", self._seen.text.partition(" ")[0])
        if code is None:
            # A plain DatabaseError or an InternalError is libpq's word for bytes that make no sense: the connection is
            # to blame, not the server.
            passing = (
                isinstance(error, psycopg.OperationalError | psycopg.InterfaceError | psycopg.InternalError)
                or type(error) is psycopg.DatabaseError
            )
            if passing and not _REFUSED.search(text):
                return StoreOutage(said)
            if isinstance(error, psycopg.DataError):
                return StoreError(f"{said}; nothing was written")
            return StoreError(f"{said}; check the address, the user, the password and the database")
        if code.startswith(_PASSING) and code != "57P04":
            return StoreOutage(said)
        if code == "42501":
            role = self._params.get("user") or "<user>"
            return StoreError(
                f'{said}; let somebody who may run: CREATE SCHEMA IF NOT EXISTS "{self._schema}" AUTHORIZATION '
                f'"{role}", '
                "or grant USAGE on the schema and all rights on its tables"
            )
        if code in ("26000", "42P05"):
            return StoreError(
                f"{said}; a connection pooler in between does not keep prepared statements: connect to the "
                "server itself, or pool by session"
            )
        if code.startswith(("42", "3F")):
            return StoreError(
                f"{said}; the schema {self._schema!r} is damaged or incomplete. Restore it, or choose another "
                "one with ?schema=name"
            )
        if code.startswith("28"):
            return StoreError(f"{said}; check the user and the password")
        return StoreError(f"{said} ({code})")


class _TwinError(StoreOutage):
    """A row with this id is there already, or was made at the same moment."""


class _LateError(Exception):
    """The time of a call is over."""


@functools.cache
def _connection_class() -> "type[psycopg.Connection[tuple[Any, ...]]]":
    import psycopg

    class Bounded(psycopg.Connection[tuple[Any, ...]]):
        """Waits for the server until ``end`` and not longer: a stalled one answers no keepalive probe wrongly, and
        sends nothing.
        """

        end = math.inf

        def wait(self, gen: Any, *_args: Any, **_options: Any) -> Any:
            # The clock is looked at after each pause, so a pause must be short: one as long as the time itself, begun
            # or ended a moment too early, would be waited for twice.
            pause = (self.end - time.monotonic()) * _PAUSE
            return super().wait(_until(gen, self.end), min(max(pause, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))

    return Bounded


def _until(gen: Generator[Any, Any, Any], end: float) -> Generator[Any, Any, Any]:
    """psycopg's conversation with a socket, ended when the socket is silent for too long."""
    try:
        state = next(gen)
        while True:
            ready = yield state
            if not ready and time.monotonic() >= end:
                raise _LateError
            state = gen.send(ready)
    except StopIteration as done:
        return done.value


def _in_schema(sql: str, schema: str) -> str:
    return re.sub(r"\brunguard\.", f'"{schema}".', sql)


def _discard(connection: Any) -> None:
    with contextlib.suppress(Exception):
        connection.close()


def _patience(timeout: float) -> dict[str, Any]:
    """What libpq and the operating system know of limits; a URL may say otherwise."""
    seconds = max(math.ceil(timeout), 1)
    return {
        "connect_timeout": max(seconds, 2),  # libpq knows no less
        "tcp_user_timeout": _milliseconds(timeout),
        "keepalives_idle": seconds,
        "keepalives_interval": seconds,
        "keepalives_count": 2,
        "fallback_application_name": "runguard",
    }


def _settings(timeout: float, more: object) -> str:
    """The server gives up before the client does: then its answer still comes, and the connection can be kept. What a
    URL adds comes last and wins.
    """
    settings = {
        "statement_timeout": _milliseconds(timeout * 0.9),
        "lock_timeout": _milliseconds(timeout * 0.8),
        # of a worker that vanished while it made the schema
        "idle_in_transaction_session_timeout": _milliseconds(max(timeout, _MIGRATION) * 2),
        "synchronous_commit": "on",
        # each statement sees what was committed while it waited for a lock
        "default_transaction_isolation": "read\\ committed",
        "plan_cache_mode": "force_generic_plan",
        "enable_seqscan": "off",  # plans are made while the tables are small, and kept
        "jit": "off",
    }
    return " ".join([*(f"-c {name}={value}" for name, value in settings.items()), *([str(more)] if more else [])])


def _milliseconds(seconds: float) -> int:
    return min(max(round(seconds * 1000), 1), 2**31 - 1)


# ---- to and from the server -----------------------------------------------------------------------------------------


def _short(name: str) -> str:
    """A name that an index takes: the beginning of a very long one, and its digest."""
    return name if len(name) <= _LONG else f"{name[:100]}… {hashlib.sha256(name.encode()).hexdigest()}"


def _long(name: str) -> str | None:
    return name if len(name) > _LONG else None


def _sorted(lines: Sequence[Line]) -> Sequence[Line]:
    """In the order in which accounts are locked: by code points, as the server's "C" collation; none twice."""
    if len(lines) < 2:
        return lines
    by_key = {_short(line.key): line for line in lines}
    return [by_key[key] for key in sorted(by_key)]


def _columns(lines: Sequence[Line]) -> tuple[str, str, str]:
    """Names, times and caps of all lines, as array literals."""
    keys, scopes = [line.key for line in lines], [line.scope for line in lines]
    names = [
        *map(_short, keys),
        *map(_short, scopes),
        *[line.window for line in lines],
        *map(_long, keys),
        *map(_long, scopes),
    ]
    times = [*[line.begins for line in lines], *[line.ends for line in lines]]
    return _texts(names), _numbers(times), _whole([cap for line in lines for cap in line.caps])


def _texts(values: Sequence[str | None]) -> str:
    return (
        "{"
        + ",".join(["NULL" if v is None else '"' + v.replace("\\", "\\\\").replace('"', '\\"') + '"' for v in values])
        + "}"
    )


def _numbers(values: Sequence[float | None]) -> str:
    return "{" + ",".join(["NULL" if v is None else repr(float(v)) for v in values]) + "}"


def _whole(values: Sequence[int]) -> str:
    return "{" + ",".join(map(str, values)) + "}"


def _settled(answer: str, lines: Sequence[Line]) -> Reply:
    _, _, now, control, _, found = json.loads(answer)
    return Reply(_balances(found, lines), now, control)


def _balances(rows: Sequence[Sequence[Any]], lines: Sequence[Line]) -> list[Balance]:
    if len(rows) > 1:  # as the caller has them
        found = {row[0]: row for row in rows}
        known = [line.key for line in lines if line.key in found]
        rows = [found[key] for key in dict.fromkeys((*known, *found))]
    return [_balance(row) for row in rows]


def _balance(row: Sequence[Any]) -> Balance:
    key, scope, window, ends, *numbers, closed = row
    return _with_amounts(key, scope, window, None if ends is None else float(ends), numbers, closed=closed)


def _numbered(line: Line, numbers: str, *, closed: bool) -> Balance:
    """The account of a line, of which only the numbers came back."""
    amounts = [int(number) for number in numbers[1:-1].split(",")]
    return _with_amounts(line.key, line.scope, line.window, line.ends, amounts, closed=closed)


def _with_amounts(
    key: str, scope: str, window: str | None, ends: float | None, numbers: Sequence[int], *, closed: bool
) -> Balance:
    """``numbers``: caps, spent, held, granted, overrun and expired, each as dollars, tokens and calls."""
    caps, spent, held, granted, overrun, expired = (
        (numbers[i], numbers[i + 1], numbers[i + 2]) for i in range(0, 18, 3)
    )
    return Balance(key, scope, window, ends, caps, spent, held, granted, overrun, expired, closed)
