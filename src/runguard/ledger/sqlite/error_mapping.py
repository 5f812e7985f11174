"""SQLite's errors as store errors: an outage may pass by itself, an error needs a repair."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from runguard.ledger.store import StoreError, StoreOutage


@contextlib.contextmanager
def mapped_errors(path: Path) -> Iterator[None]:
    """Raise SQLite's and the system's errors as ``StoreOutage`` or ``StoreError``."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise store_error_of(path, error) from error


def store_error_of(path: Path, error: Exception) -> StoreError | StoreOutage:
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL", "SQLITE_IOERR")):
        return StoreOutage(f"{path}: {error}")
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return StoreError(
            f"{path}: {error}; the file is damaged or no database. Move it away and keep it: it holds your accounts"
        )
    if name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH")):
        return StoreError(f"{path}: {error}; check that the file and its folder can be written")
    return StoreError(f"{path}: {error}")
