"""Every durable store there is, each empty for each test.

Servers are started once per test process, and only if a test asks for them.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

from runguard.ledger.ledger import Ledger, Store, StoreSession
from runguard.ledger.memory import MemoryLedger
from runguard.ledger.remote import StoreLedger
from tests.kit.ledgers import Desk
from tests.kit.stores import KINDS, Place, Servers, empty_store, greet, missing
from tests.kit.waiting import PATIENCE_S


@pytest.fixture
def store(place: Place) -> Store:
    return place.store()


@pytest.fixture
def connect(place: Place) -> Iterator[Callable[..., StoreSession]]:
    """Makes sessions on the test's store, and closes them at its end."""
    made: list[StoreSession] = []

    def connected(timeout: float = PATIENCE_S) -> StoreSession:
        made.append(place.connect(timeout))
        return made[-1]

    yield connected
    for session in made:
        session.close()


@pytest.fixture
def session(connect: Callable[..., StoreSession]) -> StoreSession:
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
            greet(ledger)
        return ledger

    def _durable(self, kind: str) -> StoreLedger:
        about = KINDS[kind]
        made = StoreLedger(
            getattr(import_module(about.module), about.name)(empty_store(kind, self._servers, self._folder)), PATIENCE_S
        )
        made.stays_open = True  # type: ignore[attr-defined]
        return made


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
