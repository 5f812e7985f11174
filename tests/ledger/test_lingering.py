"""A settlement goes to the store together with the next reservation, and is booked exactly once whatever happens."""

import asyncio
import itertools
import sqlite3
import threading
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from runguard import Budget
from runguard.adk import RunGuardPlugin
from runguard.core.money import NOTHING, UNLIMITED, Amount
from runguard.ledger import write_queue as facts
from runguard.ledger.ledger import Balance, Hold, StoreError, StoreOutage, StoreSession
from runguard.ledger.remote import StoreLedger
from runguard.ledger.sqlite import SqliteStore
from runguard.testing import ScriptedModel, call, run, text
from tests.kit.money import PRICES
from tests.kit.shared_worker import agent
from tests.kit.tools import step
from tests.kit.waiting import PATIENCE_S, eventually

WANT, TOOK = (100, 10, 1), (60, 5, 1)
CAPS: Amount = (10_000, UNLIMITED, UNLIMITED)


class Watched(SqliteStore):
    """Notes the operations on accounts, and raises in the combined one what it is told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"sqlite:///{path}")
        self.calls: list[str] = []
        self.before: list[BaseException] = []
        self.after: list[BaseException] = []
        self.gate = threading.Event()
        self.gate.set()
        self.inside = threading.Event()

    def connect(self, timeout: float) -> Any:
        return _WatchedSession(self, super().connect(timeout))


class _WatchedSession:
    def __init__(self, watched: Watched, session: StoreSession) -> None:
        self._watched, self._session = watched, session

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._session, name)
        if name not in ("reserve", "settle", "settle_and_reserve", "release"):
            return method

        def called(*args: Any, **kwargs: Any) -> Any:
            watched = self._watched
            watched.calls.append(name)
            if name == "settle_and_reserve":
                watched.inside.set()
                assert watched.gate.wait(PATIENCE_S)
                if watched.before:
                    raise watched.before.pop()
            answer = method(*args, **kwargs)
            if name == "settle_and_reserve" and watched.after:
                raise watched.after.pop()
            return answer

        return called


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_LINGER_S", 600.0)  # a slow machine must not end the wait


@pytest.fixture
def store(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "a.db")


@pytest.fixture
def ledger(store: Watched) -> Iterator[StoreLedger]:
    made = StoreLedger(store, PATIENCE_S)
    yield made
    assert made.flush(PATIENCE_S)
    made.close()


async def hold_of(ledger: StoreLedger, caps: Amount = CAPS, key: str = "k#") -> Hold:
    found = await ledger.reserve([ledger.account(key, "user:ann", None, None, caps)], WANT)
    assert isinstance(found, Hold)
    return found


def the_account(store: SqliteStore, key: str = "k#") -> Balance:
    session = SqliteStore(store.name).connect(PATIENCE_S)
    try:
        (found,) = [balance for balance in session.read() if balance.key == key]
    finally:
        session.close()
    return found


async def test_the_next_reservation_takes_a_settlement_along(ledger: StoreLedger, store: Watched) -> None:
    for _ in range(3):
        ledger.settle(await hold_of(ledger), TOOK, may_wait=True)
    assert store.calls == ["reserve", "settle_and_reserve", "settle_and_reserve"]
    assert the_account(store).spent == (120, 10, 2)
    assert ledger.flush(PATIENCE_S)
    assert (the_account(store).spent, the_account(store).held) == ((180, 15, 3), NOTHING)
    assert store.calls[3:] == ["settle"]


async def test_a_settlement_that_nothing_follows_is_booked_soon(
    ledger: StoreLedger, store: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "_LINGER_S", 0.01)
    ledger.settle(await hold_of(ledger), TOOK, may_wait=True)
    await asyncio.to_thread(eventually, lambda: the_account(store).spent == TOOK)


async def test_a_reservation_on_other_accounts_takes_nothing_along(ledger: StoreLedger, store: Watched) -> None:
    ledger.settle(await hold_of(ledger), TOOK, may_wait=True)
    await hold_of(ledger, key="other#")
    assert store.calls == ["reserve", "reserve"]
    ledger.tell(lambda session: session.append("call", "r", "text"))  # a later fact: the order stays
    assert ledger.flush(PATIENCE_S)
    assert store.calls == ["reserve", "reserve", "settle"]


@pytest.mark.parametrize("error", [StoreOutage, StoreError, KeyError])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_step_that_fails_is_booked_once(
    ledger: StoreLedger, store: Watched, error: type[Exception], when: str
) -> None:
    ledger.settle(await hold_of(ledger), TOOK, may_wait=True)
    getattr(store, when).append(error("planned"))
    try:
        second = await hold_of(ledger)
    except (StoreOutage, StoreError):
        second = None
    assert second is not None or error is not StoreError  # the settlement may be at fault, which refuses no call
    if second is not None:
        ledger.settle(second, TOOK)
    assert ledger.flush(PATIENCE_S)
    booked = TOOK if second is None else (120, 10, 2)
    assert (the_account(store).spent, the_account(store).held) == (booked, NOTHING)


async def test_a_later_figure_is_booked_after_the_one_under_way(ledger: StoreLedger, store: Watched) -> None:
    first = await hold_of(ledger)
    ledger.settle(first, TOOK, may_wait=True)
    store.gate.clear()
    asked = asyncio.create_task(hold_of(ledger))
    await asyncio.to_thread(eventually, store.inside.is_set)
    ledger.settle(first, (70, 6, 1))  # the provider reports more
    assert "settle" not in store.calls
    store.gate.set()
    ledger.release(await asked)
    assert ledger.flush(PATIENCE_S)
    assert the_account(store).spent == (70, 6, 1)


@pytest.mark.parametrize(
    ("caps", "took"), [(CAPS, (101, 5, 1)), ((150, UNLIMITED, UNLIMITED), TOOK)], ids=["above its hold", "little room"]
)
async def test_a_settlement_that_others_would_notice_is_booked_at_once(
    ledger: StoreLedger, store: Watched, caps: Amount, took: Amount
) -> None:
    ledger.settle(await hold_of(ledger, caps), took, may_wait=True)
    await asyncio.to_thread(eventually, lambda: store.calls == ["reserve", "settle"])


async def test_a_threshold_that_others_helped_to_reach_fires(ledger: StoreLedger, store: Watched) -> None:
    first, fired = await hold_of(ledger), threading.Event()
    first.accounts[0].alert = (500, UNLIMITED, UNLIMITED)
    other = SqliteStore(store.name).connect(PATIENCE_S)
    other.settle("another worker's", [first.accounts[0].line], (490, 0, 1))  # type: ignore[attr-defined]
    other.close()
    ledger.settle(first, TOOK, fired.set, may_wait=True)
    await hold_of(ledger)
    await asyncio.to_thread(eventually, fired.is_set)


async def test_a_run_commits_once_for_each_model_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted on a real run: its first call apart, and what is no settlement, such as signs of life."""
    commits: list[tuple[int, str]] = []
    numbers = itertools.count()

    class Traced(sqlite3.Connection):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            number = next(numbers)
            self.set_trace_callback(lambda statement: commits.append((number, statement)))

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **kwargs: connect(*args, factory=Traced, **kwargs))
    plugin = RunGuardPlugin(
        prices=PRICES,
        tokens=lambda _: 1_000,
        store=f"sqlite:///{tmp_path}/a.db",
        budgets=[Budget(usd=100, per="user")],
        journal=False,
    )
    model = ScriptedModel(lambda n, _: call("step", q=n) if n < 9 else text("done"))
    await run(agent(model, tools=[step]), plugins=[plugin], user_id="alice", session_id="s")
    assert plugin.flush(PATIENCE_S)
    bookings = _transactions(commits, "accounts SET")
    settled, reserved = "spent_usd = spent_usd", "held_usd = held_usd + "
    together = [each for each in bookings if settled in each and reserved in each]
    assert len(together) >= model.calls - 2  # the first settlement finds the thresholds, the last one has no next call
    assert len(bookings) <= model.calls + 2
    assert max(each.count(";") for each in together) <= 9  # statements, with BEGIN and COMMIT
    session = SqliteStore(f"sqlite:///{tmp_path}/a.db").connect(PATIENCE_S)
    (found,) = session.read("user:app/alice")
    session.close()
    assert (Decimal(found.spent[0]) / 10**9, found.held) == (model.calls * Decimal("0.02"), NOTHING)


def _transactions(statements: list[tuple[int, str]], about: str) -> list[str]:
    """The statements of each transaction that has to do with something. Several connections work at the same time."""
    found: list[str] = []
    open_at: dict[int, int] = {}  # connection -> where its transaction is in ``found``
    for connection, statement in statements:
        if statement.startswith("BEGIN"):
            open_at[connection] = len(found)
            found.append("")
        if connection in open_at:
            found[open_at[connection]] += f"{' '.join(statement.split())};"
        if statement.startswith(("COMMIT", "ROLLBACK")):
            open_at.pop(connection, None)
    return [each for each in found if about in each]
