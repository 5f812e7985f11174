"""A read-only SQLite store: it creates, queues and charges nothing, and read permission is enough."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

from runguard.ledger.ledger import StoreError
from runguard.ledger.sqlite import SqliteSession, mapped_errors

_BESIDE: Final = (
    "while no run has the file open, SQLite must create another file next to it to read it: get write permission for "
    "its folder, or read a copy"
)


def _text(raw: bytes) -> str:
    """Decode a text; "" if it is damaged, because SQLite's own message would repeat all of it."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return ""


class SqliteLook(SqliteSession):
    """One read-only connection.

    Expired reservations are shown as reserved; the next guarded call charges them.
    """

    def __init__(self, path: Path, timeout: float) -> None:
        self._path, self._timeout, self._place, self._queue = path, timeout, str(path), None
        with mapped_errors(path):
            self._inode = path.stat().st_ino
            self._db = sqlite3.connect(
                f"file:{quote(str(path))}?mode=ro",
                timeout=timeout,
                isolation_level=None,
                check_same_thread=False,
                uri=True,
            )
            self._db.text_factory = _text
            try:
                if not self._is_ours():
                    raise StoreError(f"{path}: the store is empty; the first guarded run fills it")
            except sqlite3.OperationalError as error:
                self.close()
                if getattr(error, "sqlite_errorname", "").startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY")):
                    raise StoreError(f"{path}: {error}; {_BESIDE}") from error
                raise
            except BaseException:
                self.close()
                raise

    def is_of(self, path: Path) -> bool:
        """Return whether the file is still the one that was opened."""
        return path.stat().st_ino == self._inode

    @contextmanager
    def _write(self, *, count: bool = True) -> Iterator[float]:
        yield self.now()

    def _meet(self) -> None:
        """Skip the check of the store's id: any store may be read."""

    def _expire(self, now: float, *, everything: bool = False) -> None:
        pass
