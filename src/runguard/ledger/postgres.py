"""PostgreSQL as a store: one schema, and the server's clock is the only one. ``ledger/memory`` opens it for its URL.

Every operation is one statement or one call of a function there (``scripts/postgres.sql``), so one round trip and one
commit. ``PostgresStore`` reads the URL, ``PostgresConnection`` sends statements, ``PostgresSchema`` creates and checks
the schema, ``PostgresSession`` has the operations.
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
from collections.abc import Generator, Iterator, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import unquote, urlsplit

from runguard.core.errors import PolicyError
from runguard.core.money import Amount
from runguard.ledger.ledger import (
    IDENTITY,
    SCHEMA_VERSION,
    Balance,
    Line,
    Record,
    Seen,
    SettledCall,
    StoreDeniedError,
    StoreError,
    StoreOutage,
    StoreReplacedError,
    StoreReply,
    check_amounts,
    check_ttl,
    check_version,
    new_id,
)

if TYPE_CHECKING:
    import psycopg

# ---- The SQL of the Postgres store for one account, which is the common and hot case.
# There a plain statement does the work at half the cost of a function. The functions (``scripts/postgres.sql``) are for
# the other cases: a new account, a full or closed one, a period that is over, a call that billed more than it held. A
# reservation that meets such a case writes nothing and is repeated with the function. A settlement calls the function
# within the same statement, because its hold may be written already.

_NUMBERS: Final = """ARRAY[cap_usd, cap_tokens, cap_calls, spent_usd, spent_tokens, spent_calls, held_usd,
  held_tokens, held_calls,
    granted_usd, granted_tokens, granted_calls, overrun_usd, overrun_tokens, overrun_calls, expired_usd,
      expired_tokens, expired_calls]::bigint[]::text"""
RESERVE_ONE: Final = f"""
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
SETTLE_ONE: Final = f"""
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

# A settlement and its record in one statement. The row of the hold is locked before it is read, so a settlement that
# is repeated while the first one is still under way appends no second record.
_RECORD: Final = """
WITH before AS (
  SELECT state, paid_usd, paid_tokens, paid_calls FROM runguard.holds WHERE id = %(hold)s::text FOR UPDATE
), record AS (
  INSERT INTO runguard.records (at, kind, ref, text)
  SELECT runguard.clock(), %(kind)s::text, %(ref)s::text, %(text)s::text
  WHERE EXISTS (SELECT FROM runguard.documents WHERE name = 'identity' AND text = %(identity)s::text)
    AND NOT EXISTS (SELECT FROM before WHERE state = 'settled'
      AND paid_usd = %(paid0)s::bigint AND paid_tokens = %(paid1)s::bigint AND paid_calls = %(paid2)s::bigint)
  RETURNING seq
)"""
_AFTER_RECORD: Final = "(SELECT count(*) FROM record) >= 0"  # the function changes the hold: the record reads it first
SETTLE_ONE_RECORDED: Final = SETTLE_ONE.replace("WITH hold AS", f"{_RECORD}, hold AS", 1).replace(
    "WHEN numbers IS NULL THEN", f"WHEN numbers IS NULL AND {_AFTER_RECORD} THEN", 1
)
SETTLE_RECORDED: Final = f"""{_RECORD}
SELECT CASE WHEN {_AFTER_RECORD} THEN runguard.settle(%(hold)s::text, %(names)s::text[], %(times)s::float8[],
  %(caps)s::bigint[], ARRAY[%(paid0)s::bigint, %(paid1)s::bigint, %(paid2)s::bigint]) END, %(number)s::text
FROM runguard.documents WHERE name = 'identity' AND text = %(identity)s::text
"""

# The settlement of one call and the reservation of the next on the same account: the row of the account is written
# once. It writes nothing unless the hold is open and covers the bill, and the next call fits. The two operations then
# handle the other cases one after the other.
SETTLE_AND_RESERVE_ONE: Final = f"""
WITH before AS (
  SELECT usd, tokens, calls FROM runguard.holds
  WHERE id = %(bill)s::text AND state = 'open' AND keys = ARRAY[%(key)s::text]
    AND usd >= %(paid0)s::bigint AND tokens >= %(paid1)s::bigint AND calls >= %(paid2)s::bigint
    AND EXISTS (SELECT FROM runguard.documents WHERE name = 'identity' AND text = %(identity)s::text)
  FOR UPDATE
), account AS (
  UPDATE runguard.accounts AS a SET cap_usd = %(cap0)s::bigint, cap_tokens = %(cap1)s::bigint,
    cap_calls = %(cap2)s::bigint, updated = runguard.clock(),
    spent_usd = least(spent_usd + %(paid0)s::bigint, 4611686018427387903),
      spent_tokens = least(spent_tokens + %(paid1)s::bigint, 4611686018427387903),
    spent_calls = least(spent_calls + %(paid2)s::bigint, 4611686018427387903),
    held_usd = least(greatest(held_usd - usd, 0) + %(want0)s::bigint, 4611686018427387903),
      held_tokens = least(greatest(held_tokens - tokens, 0) + %(want1)s::bigint, 4611686018427387903),
    held_calls = least(greatest(held_calls - calls, 0) + %(want2)s::bigint, 4611686018427387903)
  FROM before WHERE key = %(key)s::text AND NOT closed
    AND %(want0)s::bigint <= %(cap0)s::bigint + granted_usd - spent_usd - %(paid0)s::bigint
      - greatest(held_usd - usd, 0)
    AND %(want1)s::bigint <= %(cap1)s::bigint + granted_tokens - spent_tokens - %(paid1)s::bigint
      - greatest(held_tokens - tokens, 0)
    AND %(want2)s::bigint <= %(cap2)s::bigint + granted_calls - spent_calls - %(paid2)s::bigint
      - greatest(held_calls - calls, 0)
    AND runguard.clock() >= %(begins)s::float8 AND runguard.clock() < %(ends)s::float8
  RETURNING {_NUMBERS} AS numbers, a.updated
), settled AS (
  UPDATE runguard.holds AS h SET state = 'settled', updated = account.updated, paid_usd = %(paid0)s::bigint,
    paid_tokens = %(paid1)s::bigint, paid_calls = %(paid2)s::bigint
  FROM account WHERE id = %(bill)s::text
), record AS (
  INSERT INTO runguard.records (at, kind, ref, text)
  SELECT updated, %(kind)s::text, %(ref)s::text, %(text)s::text FROM account WHERE %(kind)s::text IS NOT NULL
), hold AS (
  INSERT INTO runguard.holds SELECT %(hold)s::text, ARRAY[%(key)s::text], 'open', updated + %(ttl)s::float8, updated,
    %(want0)s::bigint, %(want1)s::bigint, %(want2)s::bigint FROM account
)
SELECT numbers, updated, (SELECT version FROM runguard.documents WHERE name = 'control'),
  EXISTS (SELECT FROM runguard.holds WHERE state = 'open' AND expires <= account.updated AND id <> %(bill)s::text),
  %(number)s::text
FROM account
"""


def in_schema(sql: str, schema: str) -> str:
    """Return a statement for another schema than ``runguard``."""
    return re.sub(r"\brunguard\.", f'"{schema}".', sql)


# ---- Postgres errors as store errors: an outage may pass by itself, an error needs a repair.

# Codes of states that may pass: no connection, interference, no resources, operator or system, read-only (a standby
# before its promotion).
_TRANSIENT: Final = ("08", "40", "53", "57", "58", "55P03", "25006", "25P03", "25P04")
# A server that refuses a connection sends no code.
_REFUSED: Final = re.compile(
    r"authentication failed|no password supplied|pg_hba\.conf|(role|database|user) \"?.*\"? does not exist"
    r"|permission denied|not permitted to log in|"
    r"not currently accepting connections|(server|root) certificate|certificate verify failed"
    r"|server does not support SSL|unsupported startup parameter|"
    r"unrecognized configuration parameter|invalid value for parameter|invalid connection option|invalid .* value",
    re.IGNORECASE,
)
_NO_DATABASE: Final = re.compile(r"database \"?.*\"? does not exist", re.IGNORECASE)
MISSING: Final = ("3F000", "42P01", "42883")  # a schema, a table, a function


class DuplicateError(StoreOutage):
    """A row with this id exists already, or was inserted at the same moment."""


class DeadlineError(Exception):
    """The deadline of a call has passed."""


def store_error_of(
    error: "psycopg.Error", name: str, schema: str, user: str, password: str, seen: Seen
) -> StoreError | StoreOutage:
    """Return the store error for an error of psycopg. The password never appears in it."""
    import psycopg

    code = error.sqlstate
    text = " ".join((error.diag.message_primary or str(error)).split()) or type(error).__name__
    if password:
        text = text.replace(password, "***")
    message = f"{name}: {text}"
    if seen.text and _NO_DATABASE.search(text):
        return StoreReplacedError(name, "the database was removed", seen.text.partition(" ")[0])
    if code is None:
        # A plain DatabaseError or an InternalError means that libpq could not parse the bytes: a fault of the
        # connection, not of the server.
        transient = (
            isinstance(error, psycopg.OperationalError | psycopg.InterfaceError | psycopg.InternalError)
            or type(error) is psycopg.DatabaseError
        )
        if transient and not _REFUSED.search(text):
            return StoreOutage(message)
        if isinstance(error, psycopg.DataError):
            return StoreError(f"{message}; nothing was written")
        kind = StoreDeniedError if transient else StoreError
        return kind(f"{message}; check the address, the user, the password and the database")
    if code.startswith(_TRANSIENT) and code != "57P04":
        return StoreOutage(message)
    if code == "42501":
        return StoreDeniedError(
            f'{message}; let a user with that right run: CREATE SCHEMA IF NOT EXISTS "{schema}" AUTHORIZATION '
            f'"{user or "<user>"}", '
            "or grant USAGE on the schema and all rights on its tables"
        )
    if code in ("26000", "42P05"):
        return StoreError(
            f"{message}; a connection pooler in between does not keep prepared statements: connect to the "
            "server itself, or pool by session"
        )
    if code.startswith(("42", "3F")):
        return StoreError(
            f"{message}; the schema {schema!r} is damaged or incomplete. Restore it, or choose another "
            "one with ?schema=name"
        )
    if code.startswith("28"):
        return StoreDeniedError(f"{message}; check the user and the password")
    return StoreError(f"{message} ({code})")


# ---- Values as they travel to and from the Postgres server: array literals, short names, rows of accounts.

_LONG: Final = 500  # characters: an index entry has room for 2,700 bytes, and two names may share one


def short_name(name: str) -> str:
    """Return a name that fits into an index: of a very long name its beginning and its digest."""
    return name if len(name) <= _LONG else f"{name[:100]}… {hashlib.sha256(name.encode()).hexdigest()}"


def long_name(name: str) -> str | None:
    return name if len(name) > _LONG else None


def in_lock_order(lines: Sequence[Line]) -> Sequence[Line]:
    """Return lines in the order in which accounts are locked, none twice.

    That is by code points, as the server's "C" collation does.
    """
    if len(lines) < 2:
        return lines
    by_key = {short_name(line.key): line for line in lines}
    return [by_key[key] for key in sorted(by_key)]


def columns_of(lines: Sequence[Line]) -> tuple[str, str, str]:
    """Return names, times and caps of all lines, as array literals."""
    keys, scopes = [line.key for line in lines], [line.scope for line in lines]
    names = [
        *map(short_name, keys),
        *map(short_name, scopes),
        *[line.window for line in lines],
        *map(long_name, keys),
        *map(long_name, scopes),
    ]
    times = [*[line.begins for line in lines], *[line.ends for line in lines]]
    return texts(names), numbers_of(times), integers([cap for line in lines for cap in line.caps])


def texts(values: Sequence[str | None]) -> str:
    return (
        "{"
        + ",".join(["NULL" if v is None else '"' + v.replace("\\", "\\\\").replace('"', '\\"') + '"' for v in values])
        + "}"
    )


def numbers_of(values: Sequence[float | None]) -> str:
    return "{" + ",".join(["NULL" if v is None else repr(float(v)) for v in values]) + "}"


def integers(values: Sequence[int]) -> str:
    return "{" + ",".join(map(str, values)) + "}"


def reply_of(answer: str, lines: Sequence[Line]) -> StoreReply:
    _, _, now, control, _, found = json.loads(answer)
    return StoreReply(balances_of(found, lines), now, control)


def balances_of(rows: Sequence[Sequence[Any]], lines: Sequence[Line]) -> list[Balance]:
    if len(rows) > 1:  # in the order of the caller's lines
        found = {row[0]: row for row in rows}
        known = [line.key for line in lines if line.key in found]
        rows = [found[key] for key in dict.fromkeys((*known, *found))]
    return [balance_of(row) for row in rows]


def balance_of(row: Sequence[Any]) -> Balance:
    key, scope, window, ends, *numbers, closed = row
    return _with_amounts(key, scope, window, None if ends is None else float(ends), numbers, closed=closed)


def balance_of_line(line: Line, numbers: str, *, closed: bool) -> Balance:
    """Return the account of a line, of which the server sent only the numbers."""
    amounts = list(map(int, numbers[1:-1].split(",")))
    return _with_amounts(line.key, line.scope, line.window, line.ends, amounts, closed=closed)


def _with_amounts(
    key: str, scope: str, window: str | None, ends: float | None, numbers: Sequence[int], *, closed: bool
) -> Balance:
    """Return an account.

    ``numbers``: caps, spent, held, granted, overrun and expired, each as dollars, tokens and calls.
    """
    caps, spent, held, granted, overrun, expired = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
    return Balance(key, scope, window, ends, caps, spent, held, granted, overrun, expired, closed)


# ---- The schema of a Postgres store: creating it, checking its version, and the identity of the store in it.

CREATION_S: Final = 5.0  # creating the schema happens once; it may take longer than a call


class PostgresSchema:
    """One schema of one database. ``name`` is the store's name, for messages."""

    def __init__(self, name: str, schema: str, seen: Seen) -> None:
        self._name, self._schema, self._seen = name, schema, seen

    def meet(self, connection: "psycopg.Connection[tuple[Any, ...]]") -> None:
        """Find out which store this is. A process that has seen one before creates nothing, not even missing parts."""
        import psycopg

        expected = self._seen.text
        if not expected:
            self._create(connection)
        select = f'SELECT text FROM "{self._schema}".documents WHERE name = %s'
        try:
            rows = connection.execute(select, (IDENTITY,)).fetchall()
            if expected:
                self._check(connection.execute(f'SELECT version FROM "{self._schema}".runguard_schema').fetchall())
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
            rows = []
        if not rows and not expected:  # a new store, or one that was emptied
            connection.execute(
                f'INSERT INTO "{self._schema}".documents VALUES (%s, 1, %s) ON CONFLICT (name) DO NOTHING',
                (IDENTITY, new_id()),
            )
            rows = connection.execute(select, (IDENTITY,)).fetchall()
        self._seen.meet(expected, rows[0][0] if rows else "")

    def _create(self, connection: "psycopg.Connection[tuple[Any, ...]]") -> None:
        import psycopg

        known = f'SELECT version FROM "{self._schema}".runguard_schema'
        with contextlib.suppress(
            psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName, psycopg.errors.UndefinedColumn
        ):
            self._check(connection.execute(known).fetchall())
            return
        connection.end = max(connection.end, time.monotonic() + CREATION_S)  # type: ignore[attr-defined]
        with connection.transaction():
            limit = round(CREATION_S * 1000)
            connection.execute(f"SET LOCAL statement_timeout = {limit}; SET LOCAL lock_timeout = {limit}")
            # one process at a time
            connection.execute(
                "SELECT pg_advisory_xact_lock(hashtextextended('runguard:' || %s::text, 0))", (self._schema,)
            )
            made = connection.execute(
                "SELECT to_regclass(%s) IS NOT NULL, (SELECT count(*) FROM pg_class WHERE relnamespace = n.oid) + "
                "(SELECT count(*) FROM pg_proc WHERE pronamespace = n.oid) FROM pg_namespace AS n WHERE nspname = %s",
                (f'"{self._schema}".runguard_schema', self._schema),
            ).fetchone()
            if made is None:
                # IF NOT EXISTS needs the right to create even where the schema exists
                connection.execute(f'CREATE SCHEMA "{self._schema}"')
            elif made[0]:
                self._check(connection.execute(known).fetchall())
                return
            elif made[1]:
                self._check([])
            script = files("runguard.ledger").joinpath("scripts/postgres.sql").read_text(encoding="utf-8")
            connection.execute(in_schema(script, self._schema).encode())
            connection.execute(f'INSERT INTO "{self._schema}".runguard_schema VALUES ({SCHEMA_VERSION})')

    def _check(self, rows: Sequence[Sequence[Any]]) -> None:
        version = rows[0][0] if len(rows) == 1 and isinstance(rows[0][0], int) else 0
        foreign = f"the schema {self._schema!r} belongs to something else (schema version {version}); choose another "
        check_version(self._name, version, f"{foreign}one with ?schema=name")


# ---- Connecting to a Postgres server, and waiting for it, within a deadline.

_PAUSE: Final = 0.05  # share of the remaining time after which the clock is checked again
_SHORTEST_PAUSE_S: Final = 0.005
_LONGEST_PAUSE_S: Final = 0.25


@functools.cache
def connection_class() -> "type[psycopg.Connection[tuple[Any, ...]]]":
    import psycopg

    class Bounded(psycopg.Connection[tuple[Any, ...]]):
        """Waits for the server until ``end`` and not longer: keepalive probes do not find a stalled server."""

        end = math.inf

        def wait(self, gen: Any, *_args: Any, **_options: Any) -> Any:
            # The clock is checked after each pause, so pauses must be short: one as long as the remaining time that
            # ends a moment early would be waited for twice.
            pause = (self.end - time.monotonic()) * _PAUSE
            return super().wait(_until(gen, self.end), min(max(pause, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))

    return Bounded


def _until(gen: Generator[Any, Any, Any], end: float) -> Generator[Any, Any, Any]:
    """Run psycopg's exchange with a socket, and raise DeadlineError when the socket is silent at ``end``."""
    try:
        state = next(gen)
        while True:
            ready = yield state
            if not ready and time.monotonic() >= end:
                raise DeadlineError
            state = gen.send(ready)
    except StopIteration as done:
        return done.value


def dial(params: dict[str, Any], end: float) -> "psycopg.Connection[tuple[Any, ...]]":
    """Connect on a thread, because only that ends in time: libpq counts whole seconds, the resolver has no limit."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    late = threading.Event()

    def connect() -> None:
        try:
            answers.put(connection_class().connect(**params, autocommit=True))
        except BaseException as error:
            answers.put(error)
        if late.is_set():
            with contextlib.suppress(queue.Empty):
                discard(answers.get_nowait())

    threading.Thread(target=connect, name="runguard-postgres", daemon=True).start()
    try:
        answer = answers.get(timeout=max(end - time.monotonic(), 0.001))
    except queue.Empty:
        late.set()
        with contextlib.suppress(queue.Empty):
            discard(answers.get_nowait())
        raise DeadlineError from None
    if isinstance(answer, BaseException):
        raise answer
    connection: psycopg.Connection[tuple[Any, ...]] = answer
    return connection


def discard(connection: Any) -> None:
    with contextlib.suppress(Exception):
        connection.close()


def socket_limits(timeout: float) -> dict[str, Any]:
    """Return time limits of libpq and the operating system. A URL may override them."""
    seconds = max(math.ceil(timeout), 1)
    return {
        "connect_timeout": max(seconds, 2),  # libpq's minimum
        "tcp_user_timeout": _milliseconds(timeout),
        "keepalives_idle": seconds,
        "keepalives_interval": seconds,
        "keepalives_count": 2,
        "fallback_application_name": "runguard",
    }


def server_settings(timeout: float, more: object) -> str:
    """Return the settings of the server, as an option of the connection.

    The server gives up before the client does, so that its answer still arrives and the connection can be kept.
    ``more``: options of the URL, which come last and win.
    """
    settings = {
        "statement_timeout": _milliseconds(timeout * 0.9),
        "lock_timeout": _milliseconds(timeout * 0.8),
        # ends the transaction of a worker that vanished while it created the schema
        "idle_in_transaction_session_timeout": _milliseconds(max(timeout, CREATION_S) * 2),
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


# ---- One connection to a Postgres server: sending statements within a deadline, and reconnecting.


class PostgresConnection:
    """One connection. After a loss the next call makes a new one.

    Whether a call took effect before the loss is unknown; each operation may be repeated. No operation takes longer
    than its deadline, however many round trips it needs: the server ends statements and lock waits before the deadline,
    and the client gives up after it.
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
        self._here = f" FROM \"{schema}\".documents WHERE name = '{IDENTITY}' AND text = %(identity)s::text"
        self._reserve_one, self._settle_one = in_schema(RESERVE_ONE, schema), in_schema(SETTLE_ONE, schema)
        self._settle_one_recorded = in_schema(SETTLE_ONE_RECORDED, schema)
        self._settle_recorded = in_schema(SETTLE_RECORDED, schema)
        self._settle_and_reserve_one = in_schema(SETTLE_AND_RESERVE_ONE, schema)
        self._described = PostgresSchema(name, schema, seen)
        with self._mapped_errors():
            self._open(time.monotonic() + timeout)

    def _end(self) -> float:
        return time.monotonic() + self._timeout

    def _ask(self, sql: str, facts: dict[str, str | None], end: float | None = None) -> list[Any]:
        """Make one round trip and return its rows.

        All parameters are texts with a type in the statement, so that each statement is prepared once. Its last column
        is the number of this request, so that the answer to another request is noticed. ``end``: the deadline of the
        operation that this is a part of.
        """
        if end is None:
            end = self._end()
        self._asked += 1
        number = str(self._asked)
        with self._mapped_errors():
            db = self._db
            if db is None or self._process != os.getpid():
                db = self._open(end)
            db.connection.end = end  # type: ignore[attr-defined]
            rows = db.execute(sql, {**facts, "identity": self._seen.text, "number": number}, prepare=True).fetchall()
        for row in rows:
            if row[-1] != number:
                self._other_answer()
        return [row[:-1] for row in rows]

    def _some(self, sql: str, facts: dict[str, str | None], end: float | None = None) -> list[Any]:
        """Return the rows of a statement whose answer always has one.

        An answer without rows belongs to another request.
        """
        return self._ask(sql, facts, end) or self._other_answer()

    def _rows(self, columns: str, query: str, facts: dict[str, str | None], order: str = "1") -> list[Any]:
        """Return the rows of a query, as ``columns``, of which the first is never NULL.

        A query without rows is answered by one row of NULLs, because an answer must carry the number of its request.
        """
        sql = (
            f"SELECT {columns}, %(number)s::text FROM (SELECT) AS one LEFT JOIN ({query}) AS found ON true "
            f"ORDER BY {order}"
        )
        return [row for row in self._some(sql, facts) if row[0] is not None]

    def _other_answer(self) -> NoReturn:
        self._drop()
        raise StoreOutage(f"{self._name}: the server sent the answer to another request")

    def _one(self, sql: str, facts: dict[str, str | None], end: float | None = None) -> Any:
        """Return the one row of a statement that has none in another store than the one that this process has seen.

        Another identity is accepted if it was adopted.
        """
        if end is None:
            end = self._end()
        rows = self._ask(sql, facts, end)
        if not rows:
            self._meet(end)
            rows = self._ask(sql, facts, end)
        if not rows:
            raise StoreOutage(f"{self._name}: the id of the store changes while it is asked")
        return rows[0]

    def _do(self, function: str, types: str, *values: str | None, end: float | None = None) -> Any:
        """Return what a function of the schema answers, with arguments of these types."""
        arguments = ", ".join([f"%(a{n})s::{kind}" for n, kind in enumerate(types.split())])
        sql = f'SELECT "{self._schema}".{function}({arguments}), %(number)s::text{self._here}'
        return self._one(sql, {f"a{n}": value for n, value in enumerate(values)}, end)[0]

    def _meet(self, end: float) -> None:
        """Find out which store this is. Raise when it is another one than before."""
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
        """Raise when the whole store was removed while in use. ``error`` says that a part of the schema is missing."""
        import psycopg

        if self._seen.text and self._db is not None and error.sqlstate in MISSING:
            with contextlib.suppress(psycopg.Error):
                self._described.meet(self._db.connection)


# ---- All operations of a Postgres store: reservations and settlements, marks, documents, records, claims, purge.

_EXPIRE_AT_ONCE: Final = 64  # as in the SQL
_PURGE_AT_ONCE: Final = 1_000
_SETTLE: Final = "text text[] float8[] bigint[] bigint[]"  # types of the arguments of settle()


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
                for numbers, now, control, late in self._ask(
                    self._reserve_one, _wanted(hold, seconds, line, want), end
                ):
                    if not late:
                        return StoreReply([balance_of_line(line, numbers, closed=False)], now, control or 0)
                    answer = f"[true,false,{now!r},{control or 0},true,[]]"
        if answer is None:
            names, times, caps = columns_of(ordered)
            types = "text float8 text[] float8[] bigint[] bigint[] boolean"
            given = hold, seconds, names, times, caps, integers(want), "t" if force else "f"
            answer = self._do("reserve", types, *given, end=end)
        ok, stale, now, control, late, found = json.loads(answer)
        if late and not stale:
            found = self._charged(ordered, end)
        return StoreReply(balances_of(found, lines), now, control, ok, stale)

    def _charged(self, lines: Sequence[Line], end: float) -> Any:
        """Return the accounts after overdue holds were charged."""
        keys = texts([short_name(line.key) for line in lines])
        return json.loads(self._do("charged", "text[]", keys, end=end))

    def settle(self, hold: str, lines: Sequence[Line], actual: Amount, record: Record | None = None) -> StoreReply:
        check_amounts(actual, lines)
        hold = short_name(hold)
        names, times, caps = columns_of(in_lock_order(lines))
        if len(lines) != 1 and record is None:
            return reply_of(self._do("settle", _SETTLE, hold, names, times, caps, integers(actual)), lines)
        facts: dict[str, str | None] = {
            "hold": hold, "names": names, "times": times, "caps": caps,
            "paid0": str(actual[0]), "paid1": str(actual[1]), "paid2": str(actual[2]),
        }  # fmt: skip
        if record is not None:
            facts |= {"kind": short_name(record[0]), "ref": record[1], "text": record[2]}
        if len(lines) != 1:
            return reply_of(self._one(self._settle_recorded, facts)[0], lines)
        facts["key"] = short_name(lines[0].key)
        sql = self._settle_one if record is None else self._settle_one_recorded
        answer, numbers, closed, now, control = self._one(sql, facts)
        return (
            StoreReply([balance_of_line(lines[0], numbers, closed=closed)], now, control or 0)
            if answer is None
            else reply_of(answer, lines)
        )

    def settle_and_reserve(
        self, bill: SettledCall, hold: str, ttl: float, lines: Sequence[Line], want: Amount, *, force: bool = False
    ) -> tuple[StoreReply, StoreReply]:
        """Settle and reserve in one statement on one account that both share, otherwise in two.

        With two, no statement locks more accounts than one operation does: the order of the locks holds within an
        operation.
        """
        if len(lines) == 1 and len(bill.lines) == 1 and lines[0].key == bill.lines[0].key and not force:
            (line,), (kind, ref, text), end = lines, bill.record or (None, None, None), self._end()
            check_amounts(bill.actual, bill.lines)
            check_amounts(want, lines)
            check_ttl(ttl)
            facts = _wanted(short_name(hold), repr(float(ttl)), line, want) | {
                "bill": short_name(bill.hold), "paid0": str(bill.actual[0]), "paid1": str(bill.actual[1]),
                "paid2": str(bill.actual[2]), "kind": None if kind is None else short_name(kind), "ref": ref,
                "text": text,
            }  # fmt: skip
            with contextlib.suppress(DuplicateError):
                for numbers, now, control, late in self._ask(self._settle_and_reserve_one, facts, end):
                    both = StoreReply([balance_of_line(line, numbers, closed=False)], now, control or 0)
                    if late:
                        both = StoreReply(balances_of(self._charged(lines, end), lines), now, control or 0)
                    return both, both
        settled = self.settle(bill.hold, bill.lines, bill.actual, bill.record)
        return settled, self.reserve(hold, ttl, lines, want, force=force)

    def release(self, hold: str) -> StoreReply:
        return reply_of(self._do("settle", _SETTLE, short_name(hold), "{}", "{}", "{}", None), ())

    def extend(self, line: Line, more: Amount) -> Balance:
        check_amounts(more, [line])
        given = *columns_of([line]), integers(more)
        return balance_of(json.loads(self._do("extend", "text[] float8[] bigint[] bigint[]", *given)))

    def read(self, scope: str | None = None) -> list[Balance]:
        end = self._end()
        sql = (
            "SELECT (r).charged, (r).accounts, %(number)s::text FROM (SELECT "
            f'"{self._schema}".read(%(scope)s::text) AS r{self._here} OFFSET 0) AS it'
        )
        while True:
            charged, found = self._one(sql, {"scope": None if scope is None else short_name(scope)}, end)
            if charged < _EXPIRE_AT_ONCE or time.monotonic() >= end - self._timeout / 2:
                return [balance_of(row) for row in json.loads(found)]

    # ---- marks and documents ----------------------------------------------------------------------------------------

    def first(self, key: str, mark: str, percent: float, limit: Amount) -> bool:
        columns = "%(key)s::text, %(mark)s::text, %(percent)s::float8, %(limit)s::text, %(long)s::text"
        values = f"SELECT {columns}{self._here}"
        sql = (
            f'INSERT INTO "{self._schema}".marks {values} ON CONFLICT (key, mark) DO NOTHING RETURNING %(number)s::text'
        )
        facts = {
            "key": short_name(key), "mark": short_name(mark), "percent": repr(float(percent)),
            "limit": json.dumps(limit), "long": long_name(mark),
        }  # fmt: skip
        end = self._end()
        made = self._ask(sql, facts, end)
        if not made:
            self._meet(end)  # it was marked before, or this is another store
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
        query = f'SELECT * FROM "{self._schema}".documents WHERE name IN (%(id)s::text, %(name)s::text)'
        rows = self._rows("name, version, text", query, {"id": IDENTITY, "name": short_name(name)})
        found = {key: (version, text) for key, version, text in rows}
        self._seen.meet(expected, found.get(IDENTITY, (0, ""))[1])
        return found.get(short_name(name), (0, ""))

    def put(self, name: str, version: int, text: str) -> bool:
        return bool(self._do("put", "text bigint text", short_name(name), str(version), text))

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
        values = f'SELECT "{self._schema}".clock(), %(kind)s::text, %(ref)s::text, %(text)s::text{self._here}'
        sql = f'INSERT INTO "{self._schema}".records (at, kind, ref, text) {values} RETURNING %(number)s::text'
        self._one(sql, {"kind": short_name(kind), "ref": ref, "text": text})

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
        given = short_name(run), worker, text, "t" if ended else "f", long_name(run)
        return int(self._do("beat", "text text text boolean text", *given))

    def running(self, within: float) -> list[tuple[str, str, float, str]]:
        since = f'(SELECT "{self._schema}".clock() - %(within)s::float8)'
        query = f'SELECT * FROM "{self._schema}".runs WHERE NOT ended AND beat >= {since}'
        return self._rows("coalesce(long_id, id), worker, beat, text", query, {"within": repr(float(within))}, "beat")

    def claim(self, key: str, ttl: float) -> str:
        return str(self._do("claim", "text float8", short_name(key), repr(float(ttl))))

    def finish(self, key: str, done: bool) -> None:
        self._do("finish", "text boolean", short_name(key), "t" if done else "f")

    def purge(self, older_than: float) -> None:
        """Delete in parts, for at most half of the deadline. The next purge continues."""
        end = self._end()
        old = repr(self._clock(end) - older_than)
        while time.monotonic() < end - self._timeout / 2:
            if not self._do("purge", "float8 int", old, str(_PURGE_AT_ONCE), end=end):
                return


def _wanted(hold: str, seconds: str, line: Line, want: Amount) -> dict[str, str | None]:
    """Return what a reservation on one account sends."""
    return {
        "hold": hold, "ttl": seconds, "key": short_name(line.key),
        "begins": "-infinity" if line.begins is None else repr(float(line.begins)),
        "ends": "infinity" if line.ends is None else repr(float(line.ends)),
        "cap0": str(line.caps[0]), "cap1": str(line.caps[1]), "cap2": str(line.caps[2]),
        "want0": str(want[0]), "want1": str(want[1]), "want2": str(want[2]),
    }  # fmt: skip


# ---- The URL of a Postgres store.

_DEFAULT_SCHEMA: Final = "runguard"
_SCHEMA_NAME: Final = re.compile(r"(?!pg_)[A-Za-z_][A-Za-z0-9_]{0,62}")
_HOSTS: Final = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\[\]:,@/]*)(:\d*)?(,(\[[0-9A-Fa-f:.%]+\]|[^\[\]:,@/]*)(:\d*)?)*")
_SYNCHRONOUS: Final = re.compile(r"synchronous_commit\s*=\s*(\w+)")


class PostgresStore:
    """``postgresql://user:password@host:5432/database``.

    ``?schema=name`` sets another schema than "runguard". Other options go to libpq.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
        except ValueError:
            parts = urlsplit("postgresql://#")._replace(fragment="?")  # refused below
        hosts, query = parts.netloc.rpartition("@")[2], [part for part in parts.query.split("&") if part]
        # A message never repeats a URL that cannot be parsed: any part of it may be the password.
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
        commits = _SYNCHRONOUS.findall(options.get("options", ""))
        survives = "survives the end of any process"
        if commits and commits[-1].lower() in ("off", "false", "no", "0"):
            self.durable = f"{survives}; a crash of the server may lose the last moments (synchronous_commit = off)"
        else:
            self.durable = (
                f"{survives}, of the server too; a power cut loses nothing that was settled, as long as the server "
                "runs with fsync"
            )

    def connect(self, timeout: float) -> PostgresSession:
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
