"""Stores that go back in time: files, servers, processes."""

import asyncio
import contextlib
import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runguard import Budget
from runguard.ledger.ledger import IDENTITY
from runguard.ledger.postgres import PostgresStore
from tests.kit.postgres_server import server as postgres_cluster
from tests.kit.proxy import Proxy
from tests.kit.stores import Place
from tests.kit.valkey_server import Valkey, valkey_process
from tests.kit.vanishing_stores import (
    Ground,
    Make,
    Worker,
    store_command,
)

CAP = 5


# ---- a SQLite file that goes back in time ---------------------------------------------------------------------------


on_a_file = pytest.mark.parametrize("place", ["sqlite"], indirect=True)


def copied(path: Path) -> Path:
    """The file as it is now, whole."""
    copy = path.with_name("copy.db")
    copy.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(path)) as source, contextlib.closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    return copy


def _moved_over(path: Path, copy: Path) -> None:
    """As an operator does who restores a backup."""
    for end in ("-wal", "-shm"):
        path.with_name(f"{path.name}{end}").unlink(missing_ok=True)
    copy.rename(path)


def _moved_over_only(path: Path, copy: Path) -> None:
    """The same, but the -wal file of the old one was forgotten."""
    copy.rename(path)


def _restored_within(path: Path, copy: Path) -> None:
    with contextlib.closing(sqlite3.connect(copy)) as source, contextlib.closing(sqlite3.connect(path)) as target:
        source.backup(target)


def _without_wal(path: Path, _: Path) -> None:
    path.with_name(f"{path.name}-wal").unlink()


def _without_wal_and_shm(path: Path, _: Path) -> None:
    for end in ("-wal", "-shm"):
        path.with_name(f"{path.name}{end}").unlink()


BACK = [_moved_over, _moved_over_only, _restored_within, _without_wal, _without_wal_and_shm]


@on_a_file
@pytest.mark.parametrize("way", BACK, ids=lambda way: way.__name__.strip("_"))
@pytest.mark.parametrize("workers", [1, 2, 3])
async def test_a_file_that_goes_back_in_time_lets_nobody_pass_the_cap(
    place: Place, worker: Make, way: Callable[[Path, Path], None], workers: int
) -> None:
    """With copies of every age and a cap of five, live workers make five calls in all, or fewer."""
    path = Ground(place).path
    crowd = [worker() for _ in range(workers)]
    made = await crowd[0].calls(1)
    copy = copied(path)
    for each in crowd:
        made += await each.calls(1)
    for each in crowd:
        assert each.plugin.flush(10)
    way(path, copy)
    for _ in range(3):
        for each in crowd:
            made += await each.calls(2)
    assert made <= CAP, f"{made} calls"


@on_a_file
@pytest.mark.parametrize("lost", [1, 2, 7])
async def test_the_loss_of_a_single_change_is_noticed_and_can_be_accepted(
    place: Place, worker: Make, lost: int
) -> None:
    path, one = Ground(place).path, worker(budgets=[Budget(usd=1, per="user")])
    assert await one.calls(2) == 2
    assert one.plugin.flush(10)
    copy, seen = copied(path), one.ledger.link.seen  # type: ignore[attr-defined]
    while seen.generation < _generation(copy) + lost:  # a call makes two changes
        session = one.plugin.guard.accounts.ledger.call(lambda session: session)  # type: ignore[attr-defined]
        assert session.claim(f"c{seen.generation}", 60) == "yes"
    _moved_over(path, copy)
    assert await one.calls(3) == 0
    assert f"{lost} changes are missing" in one.why
    old = one.id
    told = store_command("adopt", old, "--store", place.url)
    assert told["id"] != old, "a store that replaces itself gets a new id"
    assert await one.calls(3) == 3
    assert one.id == told["id"]


def _generation(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(path)) as db:
        return int(db.execute("SELECT version FROM documents WHERE name = ?", (IDENTITY,)).fetchone()[0])


@on_a_file
async def test_a_copy_that_is_up_to_date_may_take_the_place_of_the_file(place: Place, worker: Make) -> None:
    path, one = Ground(place).path, worker()
    assert await one.calls(2) == 2
    assert one.plugin.flush(10)
    _moved_over(path, copied(path))
    assert await one.calls(6) == 3
    assert one.plugin.trips[-1].rule == "budget"


# ---- servers --------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_valkey() -> Iterator[Valkey]:
    with valkey_process("--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


def _flushed(server: Valkey) -> None:
    import redis

    redis.Redis.from_url(server.url).flushall()


def _replaced_by_an_empty_one(server: Valkey) -> None:
    server.stop()
    for file in server.folder.iterdir():
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    server.start()


@pytest.mark.parametrize("way", [_flushed, _replaced_by_an_empty_one], ids=["flushed", "empty"])
async def test_a_valkey_that_lost_its_data_is_not_an_unspent_budget(
    own_valkey: Valkey, way: Callable[[Valkey], None]
) -> None:
    crowd = [Worker(own_valkey.url) for _ in range(3)]
    assert [await each.calls(1) for each in crowd] == [1, 1, 1]
    for each in crowd:
        assert each.plugin.flush(10)
    way(own_valkey)
    assert [await each.calls(5) for each in crowd] == [0, 0, 0]
    import redis

    assert redis.Redis.from_url(own_valkey.url).keys("*") == []
    told = store_command("adopt", crowd[0].id, "--store", own_valkey.url)
    assert told["accounts"] == 0
    assert sum([await each.calls(3) for each in crowd]) == CAP


async def test_a_valkey_restored_from_a_snapshot_goes_on_with_what_the_snapshot_knows(own_valkey: Valkey) -> None:
    """The id is in the snapshot. What was spent after it is lost: documented."""
    import redis

    one = Worker(own_valkey.url)
    assert await one.calls(2) == 2
    assert one.plugin.flush(10)
    redis.Redis.from_url(own_valkey.url).save()
    snapshot = (own_valkey.folder / "dump.rdb").read_bytes()
    assert await one.calls(1) == 1
    assert one.plugin.flush(10)
    _replaced_by_an_empty_one(own_valkey)
    assert await one.calls(2) == 0
    own_valkey.stop()
    for file in own_valkey.folder.iterdir():
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    (own_valkey.folder / "dump.rdb").write_bytes(snapshot)
    own_valkey.options = ()  # with an append-only file the server would not look at the snapshot
    own_valkey.start()
    assert await one.calls(6) == 3, "two of five are in the snapshot"


async def test_a_failover_to_a_replica_that_lags_goes_on_and_loses_what_the_replica_had_not_received() -> None:
    import redis

    with valkey_process() as primary, valkey_process() as replica:
        clients, replication = Proxy(primary.port), Proxy(primary.port)
        second = redis.Redis.from_url(replica.url)
        second.replicaof("127.0.0.1", replication.port)
        crowd = [Worker(f"redis://127.0.0.1:{clients.port}/0") for _ in range(2)]
        assert [await each.calls(1) for each in crowd] == [1, 1]
        for each in crowd:
            assert each.plugin.flush(10)
        offset = redis.Redis.from_url(primary.url).info("replication")["master_repl_offset"]
        end = time.monotonic() + 10
        while second.info("replication").get("slave_repl_offset", -1) < offset:
            assert time.monotonic() < end
            await asyncio.sleep(0.02)
        replication.point(1)  # nobody listens there: the replica falls behind
        assert await crowd[0].calls(2) == 2
        assert crowd[0].plugin.flush(10)
        primary.stop()
        assert await crowd[1].calls(1) == 0
        second.replicaof("NO", "ONE")
        clients.point(replica.port)
        assert sum([await each.calls(4) for each in crowd]) == CAP - 2, (
            "the replica knows of two calls; the other two are lost"
        )
        assert {each.plugin.trips[-1].rule for each in crowd} == {"budget"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with postgres_cluster() as made:
        yield made


def _database(cluster: Any, *statements: str) -> None:
    import psycopg

    with psycopg.connect(cluster.url, autocommit=True) as db:
        for statement in statements:
            db.execute(statement)


def _tool(cluster: Any, program: str, *arguments: str, stdin: bytes | None = None) -> bytes:
    ran = subprocess.run(
        [str(cluster.bin / program), *arguments],
        input=stdin,
        capture_output=True,
        timeout=60,
        check=True,
        env={**os.environ, "LC_ALL": "C"},
    )
    return ran.stdout


async def test_a_postgres_database_that_is_dropped_and_restored_from_a_dump_goes_on(cluster: Any) -> None:
    _database(cluster, "DROP DATABASE IF EXISTS guard WITH (FORCE)", "CREATE DATABASE guard")
    url = cluster.as_user("postgres", database="guard")
    make_schema(url)
    crowd = [Worker(url) for _ in range(2)]
    assert [await each.calls(2) for each in crowd] == [2, 2]
    for each in crowd:
        assert each.plugin.flush(10)
    dump = _tool(cluster, "pg_dump", url)
    _database(cluster, "DROP DATABASE guard WITH (FORCE)")
    assert [await each.calls(2) for each in crowd] == [0, 0]
    _database(cluster, "CREATE DATABASE guard")
    assert [await each.calls(2) for each in crowd] == [0, 0]
    assert "runguard store adopt" in crowd[0].why
    assert (
        _tool(cluster, "psql", url, "-tAc", "SELECT count(*) FROM pg_namespace WHERE nspname = 'runguard'").strip()
        == b"0"
    ), "nothing was made"
    _tool(cluster, "psql", "-q", url, stdin=dump)
    assert sum([await each.calls(3) for each in crowd]) == 1


def make_schema(url: str) -> None:
    """Once, and not within the deadline of a call."""
    PostgresStore(url).connect(20).close()


async def test_a_postgres_database_that_comes_back_empty_has_to_be_adopted(cluster: Any) -> None:
    _database(cluster, "DROP DATABASE IF EXISTS guard WITH (FORCE)", "CREATE DATABASE guard")
    url = cluster.as_user("postgres", database="guard")
    make_schema(url)
    one = Worker(url)
    assert await one.calls(2) == 2
    assert one.plugin.flush(10)
    _database(cluster, "DROP DATABASE guard WITH (FORCE)", "CREATE DATABASE guard")
    make_schema(url)  # a worker that starts accepts what it finds
    assert await one.calls(3) == 0
    store_command("adopt", one.id, "--store", url)
    assert await one.calls(9) == CAP


# ---- processes ------------------------------------------------------------------------------------------------------


async def test_a_rolling_restart_changes_nothing(place: Place, worker: Make) -> None:
    """Each worker gives way to a new one while the others work. All have one store and one cap, and none is refused."""
    crowd, made = [worker() for _ in range(3)], 0
    for turn in range(6):
        made += await crowd[turn % 3].calls(1)
        assert crowd[turn % 3].plugin.flush(10)
        assert [trip.rule for trip in crowd[turn % 3].plugin.trips] == (["budget"] if turn == 5 else [])
        crowd[turn % 3] = worker()
    assert made == CAP


async def test_workers_that_restart_over_a_replaced_store_accept_it_and_those_that_live_do_not(
    place: Place, worker: Make
) -> None:
    one, two = worker(), worker()
    assert [await each.calls(2) for each in (one, two)] == [2, 2]
    Ground(place).gone()
    assert await one.calls(1) == 0
    two = worker()
    assert await two.calls(1) == 1, "a restart accepts what it finds"
    assert await one.calls(2) == 0
    assert two.id in one.why
