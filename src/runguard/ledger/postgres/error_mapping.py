"""Postgres errors as store errors: an outage may pass by itself, an error needs a repair."""

import re
from typing import TYPE_CHECKING, Final

from runguard.ledger.identity import Seen, StoreReplacedError
from runguard.ledger.store import StoreError, StoreOutage

if TYPE_CHECKING:
    import psycopg

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
    """The store error for an error of psycopg. The password never appears in it."""
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
        return StoreError(f"{message}; check the address, the user, the password and the database")
    if code.startswith(_TRANSIENT) and code != "57P04":
        return StoreOutage(message)
    if code == "42501":
        return StoreError(
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
        return StoreError(f"{message}; check the user and the password")
    return StoreError(f"{message} ({code})")
