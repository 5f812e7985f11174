"""PostgreSQL as a store: one schema; every operation is one call of a function there, so one round trip and one commit.

The server's clock is the only one. No operation takes longer than its deadline, however many round trips it needs: the
server ends statements and lock waits before the deadline, and the client gives up after it.

``backend`` reads the URL, ``dialing`` connects within a deadline, ``connection`` sends statements, ``schema`` creates
and checks the schema, ``holds`` reserves and settles, ``session`` has the other operations.
"""

from typing import TYPE_CHECKING

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.ledger.postgres.backend import PostgresStore
    from runguard.ledger.postgres.session import PostgresSession

_HOMES = {
    "PostgresStore": "runguard.ledger.postgres.backend",
    "PostgresSession": "runguard.ledger.postgres.session",
}

__all__ = ["PostgresSession", "PostgresStore"]

__getattr__, __dir__ = lazy(__name__, _HOMES)
