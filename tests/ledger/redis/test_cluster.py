"""A real cluster of two servers: a namespace lives on one of them. RunGuard works with that one."""

import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis

from runguard.ledger.ledger import StoreError
from runguard.ledger.redis import RedisStore
from tests.kit.redis_stores import CALL, a_line
from tests.kit.valkey_server import Valkey, free_port, valkey_process

_SLOTS = ((0, 8_191), (8_192, 16_383))


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[Valkey, Valkey]]:
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(valkey_process("--cluster-enabled", "yes", "--cluster-port", str(free_port())))
            for _ in _SLOTS
        )
        desks: list[Any] = [
            stack.enter_context(redis.Redis.from_url(server.url, decode_responses=True)) for server in (first, second)
        ]
        for desk, (begin, end) in zip(desks, _SLOTS, strict=True):
            desk.execute_command("CLUSTER ADDSLOTSRANGE", begin, end)
        desks[0].execute_command("CLUSTER MEET", "127.0.0.1", second.port, second.options[-1])
        until = time.monotonic() + 30
        while any(desk.execute_command("CLUSTER INFO")["cluster_state"] != "ok" for desk in desks):
            assert time.monotonic() < until, "the cluster did not form"
            time.sleep(0.05)
        yield first, second


def owner(cluster: tuple[Valkey, Valkey], namespace: str) -> tuple[Valkey, Valkey]:
    """Return the server that has the keys of a namespace, and the other one."""
    with redis.Redis.from_url(cluster[0].url) as desk:
        slot: Any = desk.execute_command("CLUSTER KEYSLOT", f"{{{namespace}}}:")
    return cluster if slot <= _SLOTS[0][1] else (cluster[1], cluster[0])


@pytest.fixture(params=_SLOTS, ids=["first", "second"])
def namespace(request: pytest.FixtureRequest, cluster: tuple[Valkey, Valkey]) -> str:
    """Return a namespace of each server in turn."""
    wanted = cluster[_SLOTS.index(request.param)]
    names = (f"n{uuid.uuid4().hex}" for _ in range(1_000))
    return next(name for name in names if owner(cluster, name)[0] is wanted)


def test_the_server_that_has_the_namespace_does_everything(cluster: tuple[Valkey, Valkey], namespace: str) -> None:
    mine, _ = owner(cluster, namespace)
    session = RedisStore(f"{mine.url}?namespace={namespace}").connect(5)
    lines = [a_line("run:1"), a_line("user:ann"), a_line("app:shop")]
    assert session.reserve("h", 60, lines, CALL).ok
    assert [balance.spent for balance in session.settle("h", lines, CALL).balances] == [CALL] * 3
    assert session.put("control", 0, "stop")
    assert session.get("control") == (1, "stop")
    session.append("k", "r", "t")
    session.beat("r", "w", "t")
    assert session.claim("c", 60) == "yes"
    assert len(session.read()) == 3
    session.purge(0)


def test_another_server_of_the_cluster_names_the_right_one(cluster: tuple[Valkey, Valkey], namespace: str) -> None:
    mine, other = owner(cluster, namespace)
    with pytest.raises(StoreError, match=rf"a cluster, and 127\.0\.0\.1:{mine.port} has this namespace"):
        RedisStore(f"{other.url}?namespace={namespace}").connect(5)
