"""The schema of a Postgres store: creating it, checking its version, and the identity of the store in it."""

import contextlib
import time
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from runguard.ledger.identity import IDENTITY, Seen, new_id
from runguard.ledger.postgres.statements import in_schema
from runguard.ledger.store import SCHEMA_VERSION, StoreError

if TYPE_CHECKING:
    import psycopg

MIGRATION_S: Final = 5.0  # creating the schema happens once; it may take longer than a call


class PostgresSchema:
    """One schema of one database. ``name`` is the store's name, for messages."""

    def __init__(self, name: str, schema: str, seen: Seen) -> None:
        self._name, self._schema, self._seen = name, schema, seen

    def meet(self, connection: "psycopg.Connection[tuple[Any, ...]]") -> None:
        """Find out which store this is. A process that has seen one before creates nothing, not even missing parts."""
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
        if not rows and not expected:  # a new store, or one from a version without ids
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
        connection.end = max(connection.end, time.monotonic() + MIGRATION_S)  # type: ignore[attr-defined]
        with connection.transaction():
            connection.execute(
                f"SET LOCAL statement_timeout = {round(MIGRATION_S * 1000)}; SET LOCAL lock_timeout = "
                f"{round(MIGRATION_S * 1000)}"
            )
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

    def _add_index(self, connection: "psycopg.Connection[tuple[Any, ...]]") -> None:
        """Add an index that a schema of an older version lacks.

        A user without the right to do so, or one that finds the table busy, works without it, more slowly.
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
