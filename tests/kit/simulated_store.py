"""The SQLite store's own code on a database in memory and a virtual clock, also with a planted defect."""

import contextlib
import inspect
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from runguard.ledger import sqlite as holds


class VirtualTime:
    """Time that moves only when the simulation moves it."""

    def __init__(self) -> None:
        self.now = 1_000_000.0


def _code(module: ModuleType, changes: Sequence[tuple[str, str]]) -> str:
    text = inspect.getsource(module)
    for before, after in changes:
        if before in text:
            text = text.replace(before, after)
    return text


def _holds_class(changes: Sequence[tuple[str, str]]) -> type:
    """Return the class of the store's accounts with these changes of its text."""
    if not changes:
        return holds.SqliteHolds
    sources = inspect.getsource(holds)
    for before, _ in changes:
        assert before in sources, f"the store's code does not contain {before!r}"
    changed: dict[str, Any] = {"__name__": f"{holds.__name__}_changed"}
    exec(compile(_code(holds, changes), holds.__name__, "exec"), changed)
    found: type = changed["SqliteHolds"]
    return found


def simulated_store(time: VirtualTime, changes: Sequence[tuple[str, str]] = ()) -> Any:
    """Return a session of the store. Only its transactions are replaced: no file, no queue of writers, no clock."""

    class Session(_holds_class(changes)):  # type: ignore[misc]
        def __init__(self) -> None:
            self._path = Path("simulated")
            self._db = sqlite3.connect(":memory:", isolation_level=None)
            self._db.executescript(holds.SCHEMA)

        @contextlib.contextmanager
        def _write(self, *, count: bool = True) -> Iterator[float]:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield time.now
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

        def empty(self) -> None:
            for table in ("accounts", "holds"):
                self._db.execute(f"DELETE FROM {table}")

    return Session()
