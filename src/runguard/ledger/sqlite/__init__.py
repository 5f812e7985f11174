"""SQLite as a store: one file, no server. Many processes of one machine share it.

``backend`` reads the URL, ``connection`` opens the file and runs transactions, ``holds`` reserves and settles,
``session`` has the other operations, ``writer_queue`` queues the writers of all processes so that none starves.
"""

from typing import TYPE_CHECKING

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.ledger.sqlite.backend import SqliteStore
    from runguard.ledger.sqlite.session import SqliteSession

_HOMES = {
    "SqliteStore": "runguard.ledger.sqlite.backend",
    "SqliteSession": "runguard.ledger.sqlite.session",
}

__all__ = ["SqliteSession", "SqliteStore"]

__getattr__, __dir__ = lazy(__name__, _HOMES)
