"""A store that refuses the worker after it has worked: a rotated password, a role without login, a missing right.

What was paid meanwhile is booked when the store accepts the worker again.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import runguard
from runguard import Budget, GuardFailedError, PolicyError
from runguard.alerts import Alert
from runguard.ledger import remote, write_queue
from tests.kit.postgres_server import PASSWORD, Server, server
from tests.kit.stores import missing
from tests.kit.valkey_server import Valkey, valkey_process
from tests.kit.waiting import eventually, until_async

OLD, NEW = PASSWORD, f"{PASSWORD}-rotated"
PRICE = Decimal("0.01")
CALLS = 1_000


class Rotation:
    """A store, and one way in which its operator locks the worker out and lets it in again."""

    def __init__(self, url: str, ask: Callable[[str], object], lock: list[str], unlock: list[str]) -> None:
        self.url, self._ask, self._lock, self._unlock = url, ask, lock, unlock

    def begin(self) -> None:
        for command in self._lock:
            self._ask(command)

    def end(self) -> None:
        for command in self._unlock:
            self._ask(command)


KICK = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'worker'"
WAYS = {
    "redis-password": (
        ["ACL SETUSER worker resetpass >" + NEW, "CLIENT KILL USER worker"],
        ["ACL SETUSER worker >" + OLD],
    ),
    "redis-off": (["ACL SETUSER worker off", "CLIENT KILL USER worker"], ["ACL SETUSER worker on"]),
    "redis-right": (["ACL SETUSER worker -@all"], ["ACL SETUSER worker +@all"]),
    "redis-keys": (["ACL SETUSER worker resetkeys ~other:*"], ["ACL SETUSER worker ~*"]),
    "postgres-password": ([f"ALTER ROLE worker PASSWORD '{NEW}'", KICK], [f"ALTER ROLE worker PASSWORD '{OLD}'"]),
    "postgres-login": (["ALTER ROLE worker NOLOGIN", KICK], ["ALTER ROLE worker LOGIN"]),
    "postgres-right": (["REVOKE ALL ON SCHEMA books FROM worker"], ["GRANT ALL ON SCHEMA books TO worker"]),
}


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    if reason := missing("redis"):
        pytest.skip(reason)
    with valkey_process() as started:
        yield started


@pytest.fixture(scope="module")
def pg() -> Iterator[Server]:
    if reason := missing("postgres"):
        pytest.skip(reason)
    with server() as cluster:
        yield cluster


@contextmanager
def on_valkey(valkey: Valkey, way: str) -> Iterator[Rotation]:
    import redis

    with redis.Redis.from_url(valkey.url) as raw:
        raw.flushall()
        raw.execute_command("ACL", "SETUSER", "worker", "reset", "on", f">{OLD}", "~*", "+@all")
        url = f"redis://worker:{OLD}@127.0.0.1:{valkey.port}/0"
        yield Rotation(url, lambda command: raw.execute_command(*command.split(" ")), *WAYS[way])


@contextmanager
def on_postgres(pg: Server, way: str) -> Iterator[Rotation]:
    import psycopg

    with psycopg.connect(pg.url, autocommit=True) as raw:
        raw.execute("DROP SCHEMA IF EXISTS books CASCADE; DROP ROLE IF EXISTS worker")
        raw.execute(f"CREATE ROLE worker LOGIN PASSWORD '{OLD}'; CREATE SCHEMA books")
        raw.execute("GRANT ALL ON SCHEMA books TO worker")
        yield Rotation(f"{pg.as_user('worker')}?schema=books", raw.execute, *WAYS[way])
        raw.execute(KICK)
        raw.execute("DROP SCHEMA books CASCADE; DROP ROLE worker")


@pytest.fixture(params=WAYS)
def rotation(request: pytest.FixtureRequest) -> Iterator[Rotation]:
    kind = request.param.partition("-")[0]
    made = on_valkey if kind == "redis" else on_postgres
    with (
        made(request.getfixturevalue("valkey" if kind == "redis" else "pg"), request.param) as rotation,
        mock.patch.dict(remote._open, clear=True),
    ):
        yield rotation
        for ledger in remote._open.values():
            ledger.close()


every_password = pytest.mark.parametrize("rotation", ["redis-password", "postgres-password"], indirect=True)


class Provider:
    """A model that bills every call."""

    def __init__(self) -> None:
        self.calls = 0
        self.answers = asyncio.Event()
        self.answers.set()

    @property
    def bill(self) -> Decimal:
        return self.calls * PRICE

    async def __call__(self, _: int) -> dict[str, Any]:
        self.calls += 1
        await self.answers.wait()
        return {"usd": PRICE}


def guarded(provider: Provider, url: str, **policy: Any) -> Any:
    async def ask(number: int) -> Any:
        return await provider(number)

    return runguard.guard_async(
        ask, budget=Budget(usd=100, per="app"), cost=PRICE, store=url, store_timeout=2, **policy
    )


async def ask(call: Any, number: int) -> Any:
    with runguard.run(app="shop"):
        return await call(number)


def books(call: Any) -> tuple[Decimal, Decimal]:
    (status,) = call.budgets("app:shop")
    return status.spent, status.reserved


async def test_calls_that_go_on_while_a_password_is_rotated_are_booked_afterwards(
    rotation: Rotation, caplog: pytest.LogCaptureFixture
) -> None:
    provider = Provider()
    call = guarded(provider, rotation.url, on_outage="open")
    await ask(call, 0)
    assert call.flush(10)
    await asyncio.to_thread(rotation.begin)
    for start in range(0, CALLS, 100):
        await asyncio.gather(*(ask(call, start + n) for n in range(100)))
    assert provider.calls == 1 + CALLS
    assert not await asyncio.to_thread(call.flush, 1.0)
    assert call.snapshot()["store"]["lost"] == 0
    await asyncio.to_thread(rotation.end)
    assert await asyncio.to_thread(call.flush, 30)
    assert await asyncio.to_thread(books, call) == (provider.bill, Decimal(0))
    assert OLD not in caplog.text


async def test_calls_in_flight_are_booked_after_the_rotation_and_new_ones_are_refused(rotation: Rotation) -> None:
    provider = Provider()
    call = guarded(provider, rotation.url)
    await ask(call, 0)
    provider.answers.clear()
    flying = [asyncio.create_task(ask(call, 1 + n)) for n in range(20)]
    await until_async(lambda: provider.calls == 21)
    await asyncio.to_thread(rotation.begin)
    for number in range(10):
        with pytest.raises(GuardFailedError):
            await ask(call, 100 + number)
    assert provider.calls == 21, "no paid call without a store"
    provider.answers.set()
    await asyncio.gather(*flying)
    assert not await asyncio.to_thread(call.flush, 1.0)
    await asyncio.to_thread(rotation.end)
    assert await asyncio.to_thread(call.flush, 30)
    assert await asyncio.to_thread(books, call) == (provider.bill, Decimal(0))
    async with asyncio.timeout(10):  # a process asks the store again within a second
        while provider.calls < 22:
            await asyncio.sleep(0.1)
            try:
                await ask(call, 200)
            except GuardFailedError:
                continue


@pytest.mark.parametrize("on_outage", ["open", "closed"])
def test_a_store_that_refuses_the_worker_from_the_start_is_a_mistake(rotation: Rotation, on_outage: str) -> None:
    rotation.begin()
    try:
        with pytest.raises(PolicyError, match="the store cannot be used") as raised:
            guarded(Provider(), rotation.url, on_outage=on_outage)
        assert OLD not in str(raised.value)
    finally:
        rotation.end()


async def test_a_worker_reads_the_new_password_from_its_password_file(pg: Server, tmp_path: Path) -> None:
    """The rotation is final: nobody brings the old password back."""
    file = tmp_path / "passwords"
    file.write_text(f"*:*:*:worker:{OLD}")
    file.chmod(0o600)
    provider = Provider()
    with on_postgres(pg, "postgres-password") as rotation, mock.patch.dict(remote._open, clear=True):
        call = guarded(provider, f"{rotation.url.replace(f':{OLD}', '')}&passfile={file}", on_outage="open")
        await ask(call, 0)
        assert call.flush(10)
        await asyncio.to_thread(rotation.begin)
        for number in range(10):
            await ask(call, 1 + number)
        assert not await asyncio.to_thread(call.flush, 1.0)
        file.write_text(f"*:*:*:worker:{NEW}")
        assert await asyncio.to_thread(call.flush, 30)
        assert await asyncio.to_thread(books, call) == (provider.bill, Decimal(0))
        for ledger in remote._open.values():
            ledger.close()


# ---- more than the queue holds --------------------------------------------------------------------------------------


@every_password
async def test_settlements_beyond_the_queue_are_told_once_with_their_dollars(
    rotation: Rotation, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_queue, "FACTS_KEPT", 20)
    sent: list[Alert] = []
    provider = Provider()
    call = guarded(provider, rotation.url, on_outage="open", alerts={"call": sent.append})
    await ask(call, 0)
    assert call.flush(10)
    await asyncio.to_thread(rotation.begin)
    for number in range(100):
        await ask(call, 1 + number)
    store = call.snapshot()["store"]
    assert store["dropped"] >= 80
    assert store["dropped_usd"] == store["dropped"] * PRICE
    assert not told(caplog), "the store is still away"
    await asyncio.to_thread(rotation.end)
    assert await asyncio.to_thread(eventually, lambda: told(caplog))
    assert not await asyncio.to_thread(call.flush, 10), "something could never be booked"
    spent, held = await asyncio.to_thread(books, call)
    assert (spent + store["dropped_usd"], held) == (provider.bill, Decimal(0))
    assert len(told(caplog)) == 1
    assert f"{store['dropped']} settlements of ${store['dropped_usd']:.2f}" in told(caplog)[0]
    (alert,) = [alert for alert in sent if "dropped" in alert.facts]
    assert alert.facts["dropped"] == store["dropped"]
    assert Decimal(str(alert.facts["usd"])) == store["dropped_usd"]
    assert not alert.resolved
    assert alert.severity == "critical"


@every_password
async def test_a_long_outage_is_told_again_only_when_the_number_has_doubled(
    rotation: Rotation, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_queue, "FACTS_KEPT", 5)
    monkeypatch.setattr(write_queue, "_TELL_S", 0.0)
    provider = Provider()
    call = guarded(provider, rotation.url, on_outage="open")
    await ask(call, 0)
    assert call.flush(10)
    await asyncio.to_thread(rotation.begin)
    for number in range(200):
        await ask(call, 1 + number)
        await asyncio.sleep(0.01)
    assert await asyncio.to_thread(eventually, lambda: told(caplog))
    assert len(told(caplog)) <= 9, "at most at 1, 2, 4, ... 256"
    await asyncio.to_thread(rotation.end)
    dropped = call.snapshot()["store"]["dropped"]
    assert await asyncio.to_thread(eventually, lambda: f" {dropped} settlements" in told(caplog)[-1])


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    return [line for line in lines if line.startswith("runguard.settlements_dropped")]
