"""Redis: URLs, the data on the server, faults."""

import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from runguard.core.money import NOTHING
from runguard.errors import PolicyError
from runguard.ledger.ledger import StoreDeniedError, StoreError, StoreOutage
from runguard.ledger.redis import RedisSession, RedisStore
from tests.kit.examples import each_row
from tests.kit.redis_stores import CALL, a_line, key_of
from tests.kit.valkey_server import Valkey, valkey_process

AOF = ("--appendonly", "yes", "--appendfsync", "always")


@pytest.fixture
def own_server() -> Iterator[Valkey]:
    """A server that the test may maltreat."""
    with valkey_process(*AOF) as server:
        yield server


# ---- the URL --------------------------------------------------------------------------------------------------------


@each_row(
    ("url", "name"),
    [
        ("redis://localhost", "redis://localhost:6379"),
        ("redis://ann:s3cret@db.example:7000/3", "redis://db.example:7000/3"),
        ("rediss://:s3cret@db.example?namespace=shop&ssl_cert_reqs=none", "rediss://db.example:6379?namespace=shop"),
        ("valkey://[::1]:6380/0", "valkey://[::1]:6380"),
        ("valkeys://db.example", "valkeys://db.example:6379"),
        ("unix:///run/valkey.sock?db=2&namespace=a.b", "unix:///run/valkey.sock?db=2&namespace=a.b"),
        ("unix://:s3cret@/run/valkey.sock", "unix:///run/valkey.sock"),
    ],
)
def test_the_name_tells_the_place_and_no_password(url: str, name: str) -> None:
    store = RedisStore(url)
    assert store.name == name
    assert "s3cret" not in repr(store) + store.durable


@each_row(
    ("url", "told"),
    [
        ("redis://:s3cret@host?socket_timeout=3", "'socket_timeout' is not one of"),
        ("redis://:s3cret@host?retry_on_timeout=1", "'retry_on_timeout' is not one of"),
        ("redis://host?password=s3cret", "'password' is not one of"),
        ("redis://host?ssl_cert_reqs=none", "'ssl_cert_reqs' is not one of"),
        ("redis://:s3cret@host?namespace=a{b}", "letters, digits"),
        ("redis://:s3cret@host?namespace=", "letters, digits"),
        ("redis://:s3cret@host?namespace=a&namespace=b", "given twice"),
        ("redis://:s3cret@host/shop", "the database is a number"),
        ("redis://:s3cret@host:port", "cannot be read"),
        ("redis://:s3cret@host?namespace", "cannot be read"),
        ("unix://s3cret", "write 'unix:///path"),
        ("memcached://:s3cret@host", "write redis://"),
    ],
)
def test_a_url_that_cannot_be_meant_is_refused_without_its_password(url: str, told: str) -> None:
    with pytest.raises(PolicyError, match=told.replace("(", r"\(")) as error:
        RedisStore(url)
    assert "s3cret" not in str(error.value)


def test_a_unix_socket_works_too(own_server: Valkey) -> None:
    session = RedisStore(f"unix://{own_server.socket}?namespace=u").connect(5)
    assert session.reserve("h", 60, [a_line()], CALL).ok
    session.close()


# ---- the server's data ----------------------------------------------------------------------------------------------


def test_namespaces_do_not_see_each_other(url: str) -> None:
    one, two = (RedisStore(f"{url}?namespace={name}{uuid.uuid4().hex}").connect(5) for name in "ab")
    one.settle("h", [a_line()], CALL)
    one.put("control", 0, "stop")
    one.beat("r", "w", "")
    one.append("k", "r", "t")
    assert (two.read(), two.get("control"), two.running(60), two.tail("k", 9)) == ([], (0, ""), [], [])
    assert two.settle("h", [a_line()], CALL).balances[0].spent == CALL
    two.purge(0)
    assert one.read()[0].spent == CALL


def test_all_keys_carry_one_hash_tag(own_server: Valkey) -> None:
    """So that a cluster keeps them in one slot."""
    session = RedisStore(f"{own_server.url}?namespace=tagged").connect(5)
    session.reserve("h", 60, [a_line("run:1"), a_line("user:{x}", ends=4e9)], CALL)
    session.settle("g", [a_line()], CALL)
    session.first("user:ann", "m", 0.5, CALL)
    session.put("control", 0, "x")
    session.append("k", "r", "t")
    session.beat("r", "w", "t")
    session.claim("c", 60)
    with redis.Redis.from_url(own_server.url, decode_responses=True) as raw:
        made = raw.keys("*")
    assert len(made) > 15
    assert all(key.startswith("{tagged}:") for key in made)


@pytest.mark.parametrize(
    ("version", "told"),
    [("2", "newer RunGuard"), ("0", "belongs to something else"), ("x", "belongs to something else")],
)
def test_another_schema_is_refused(session: RedisSession, space: str, raw: Any, version: str, told: str) -> None:
    raw.set(key_of(session, "schema"), version)
    with pytest.raises(StoreError, match=told):
        RedisStore(space).connect(5)


def test_data_without_a_schema_is_refused(space: str, raw: Any) -> None:
    raw.zadd("{" + space.partition("=")[2] + "}:accounts", {"a": 1})
    with pytest.raises(StoreError, match="belongs to something else"):
        RedisStore(space).connect(5)


@pytest.mark.parametrize("key", ["a:user:bob", "holds", "accounts", "s:user:bob"])
def test_a_key_of_another_type_is_an_error_that_says_so_and_nothing_is_written(
    session: RedisSession, raw: Any, key: str
) -> None:
    session.settle("h", [a_line()], CALL)
    at, both = key_of(session, key), [a_line(), a_line("user:bob")]
    raw.delete(at)
    raw.set(at, "somebody else's")

    def accounts() -> dict[str, Any]:
        return {name: raw.hgetall(name) for name in raw.keys(key_of(session, "a:*")) if raw.type(name) == "hash"}

    before = accounts()
    calls: list[Callable[[], object]] = [
        lambda: session.reserve("g", 60, both, CALL),
        lambda: session.settle("g", both, CALL),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="not of the right type"):
            call()
    assert accounts() == before
    raw.delete(at)
    assert [balance.spent for balance in session.settle("g", both, CALL).balances] == [(200, 20, 2), CALL]


@pytest.mark.parametrize("field", ["caps", "spent", "held", "granted"])
def test_a_damaged_account_is_an_error_and_does_not_stop_others(session: RedisSession, raw: Any, field: str) -> None:
    both = [a_line(), a_line("user:bob")]
    session.reserve("h", 0.02, both, CALL)
    raw.hset(key_of(session, "a:user:bob"), field, "nan -5 0x10")
    time.sleep(0.03)
    # an expired hold on the damaged account is in the way of nobody
    assert session.reserve("g", 60, [a_line()], CALL).ok
    if field != "caps":
        with pytest.raises(StoreError, match="damaged"):
            session.reserve("f", 60, both, CALL)


def test_scripts_are_loaded_again_after_the_server_forgot_them(session: RedisSession, raw: Any) -> None:
    assert session.reserve("a", 60, [a_line()], CALL).ok
    raw.script_flush()
    assert session.reserve("b", 60, [a_line()], CALL).ok
    raw.script_flush()
    assert session.settle("a", [a_line()], CALL).balances[0].held == CALL


# ---- faults ---------------------------------------------------------------------------------------------------------


def test_everything_acknowledged_survives_a_crash_with_an_append_only_file(own_server: Valkey) -> None:
    session = RedisStore(own_server.url).connect(5)
    line = a_line()
    session.reserve("open", 60, [line], CALL)
    session.settle("done", [line], (7, 7, 7))
    session.put("control", 0, "stop")
    session.append("k", "r", "t")
    own_server.stop()
    with pytest.raises(StoreOutage):
        session.reserve("x", 60, [line], CALL)
    own_server.start()
    again = session.settle("open", [line], CALL).balances[0]  # the same session: it finds its way back
    assert (again.spent, again.held) == ((107, 17, 8), NOTHING)
    assert session.settle("done", [line], (7, 7, 7)).balances[0].spent == (107, 17, 8)
    assert not session.reserve("done", 60, [line], CALL).ok
    assert session.get("control") == (1, "stop")
    assert [record[1:] for record in session.tail("k", 9)] == [("r", "t")]


def test_a_cut_connection_is_made_again(session: RedisSession, raw: Any) -> None:
    assert session.reserve("a", 60, [a_line()], CALL).ok
    raw.client_kill_filter(_type="normal", skipme=True)
    assert session.settle("a", [a_line()], CALL).balances[0].spent == CALL


def test_an_answer_that_is_cut_in_the_middle_is_asked_for_again_and_booked_once(url: str) -> None:
    """A door in front of the server that closes after a number of bytes.

    What must not be said twice is an outage then.
    """
    host, port = "127.0.0.1", int(url.rpartition(":")[2].partition("/")[0])
    door = socket.create_server((host, 0))
    cut = threading.Event()

    def serve() -> None:
        while True:
            try:
                link, _ = door.accept()
            except OSError:
                return
            with link, socket.create_connection((host, port)) as server:
                while data := link.recv(65_536):
                    server.sendall(data)
                    answer = server.recv(65_536)
                    if cut.is_set():
                        cut.clear()
                        link.sendall(answer[:9])
                        break
                    link.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    session = RedisStore(f"redis://{host}:{door.getsockname()[1]}?namespace=c{uuid.uuid4().hex}").connect(5)
    cut.set()
    # booked once, although the first answer was lost
    assert session.settle("h", [a_line()], CALL).balances[0].spent == CALL
    cut.set()
    with pytest.raises(StoreOutage):
        session.extend(a_line(), CALL)
    assert session.settle("h", [a_line()], CALL).balances[0].spent == CALL  # and the next call is not confused
    session.close()
    door.close()


@pytest.mark.parametrize("connected", [True, False])
def test_a_stalled_server_costs_no_more_than_the_timeout(own_server: Valkey, connected: bool) -> None:
    store = RedisStore(own_server.url)
    session = store.connect(0.8)
    session.settle("h", [a_line()], CALL)
    if not connected:
        session._client.connection_pool.disconnect()
    with own_server.stalled():
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(StoreOutage):
                session.reserve("slow", 60, [a_line()], CALL)
            assert time.monotonic() - began < 1.5
        began = time.monotonic()
        with pytest.raises(StoreOutage):
            store.connect(0.8)
        assert time.monotonic() - began < 1.5
    # no late answer of an earlier call is taken for this one's
    reply = session.reserve("after", 60, [a_line("user:bob")], CALL)
    assert [balance.key for balance in reply.balances] == ["user:bob"]


def test_a_refused_port_is_an_outage_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(StoreOutage) as error:
        RedisStore(f"redis://ann:s3cret@127.0.0.1:{port}").connect(5)
    assert time.monotonic() - began < 4
    assert "s3cret" not in str(error.value)


def test_a_full_server_is_an_outage_and_nothing_is_half_written(own_server: Valkey) -> None:
    session = RedisStore(own_server.url).connect(5)
    session.reserve("h", 60, [a_line(), a_line("user:bob")], CALL)
    before = session.read()
    with redis.Redis.from_url(own_server.url) as raw:
        raw.config_set("maxmemory", 1)
        for call in (
            lambda: session.reserve("g", 60, [a_line(), a_line("user:new")], CALL),
            lambda: session.settle("h", [a_line(), a_line("user:bob")], CALL),
            lambda: session.settle("u", [a_line("user:new")], CALL),
            lambda: session.put("control", 0, "x"),
        ):
            with pytest.raises(StoreOutage, match="maxmemory"):
                call()
        assert session.read() == before
        raw.config_set("maxmemory", 0)
    assert session.settle("h", [], CALL).balances[0].spent == CALL


EVICTING = [
    "allkeys-lru",
    "allkeys-lfu",
    "allkeys-random",
    "volatile-lru",
    "volatile-lfu",
    "volatile-random",
    "volatile-ttl",
]


def test_a_server_that_may_delete_keys_is_refused(own_server: Valkey) -> None:
    with redis.Redis.from_url(own_server.url) as raw:
        for policy in EVICTING:
            raw.config_set("maxmemory-policy", policy)
            raw.config_set("maxmemory", 0)
            RedisStore(own_server.url).connect(5).close()  # without a limit nothing is ever deleted
            raw.config_set("maxmemory", "1gb")
            with pytest.raises(StoreError, match=f"maxmemory-policy is {policy}.*Set maxmemory-policy noeviction"):
                RedisStore(own_server.url).connect(5)
        raw.config_set("maxmemory-policy", "noeviction")
        RedisStore(own_server.url).connect(5).close()


@pytest.mark.parametrize("policy", ["volatile-ttl", "allkeys-lru"])
def test_a_claim_is_never_made_where_it_could_be_deleted(own_server: Valkey, policy: str) -> None:
    """Between two workers the server ran out of memory: the second must not do again what the first has done."""
    with redis.Redis.from_url(own_server.url) as raw:
        raw.config_set("maxmemory-policy", policy)
        raw.config_set("maxmemory", "20mb")
        with pytest.raises(StoreError):
            RedisStore(own_server.url).connect(5).claim("pay", 3_600)


@pytest.mark.parametrize(
    ("rights", "asks"), [(("+info",), True), (("+config|get",), True), ((), False)], ids=["info", "config", "neither"]
)
def test_a_user_who_may_not_ask_about_memory_is_warned_once(
    own_server: Valkey, caplog: pytest.LogCaptureFixture, rights: tuple[str, ...], asks: bool
) -> None:
    url = own_server.url.replace("redis://", "redis://few:pw@")
    with redis.Redis.from_url(own_server.url) as raw:
        raw.execute_command(
            "ACL", "SETUSER", "few", "on", ">pw", "~{runguard}:*", "+@read", "+@write", "+@scripting", "+time", *rights
        )
        raw.config_set("maxmemory-policy", "volatile-lru")
        raw.config_set("maxmemory", "1gb")
        if asks:
            with pytest.raises(StoreError, match="volatile-lru"):
                RedisStore(url).connect(5)
            raw.config_set("maxmemory-policy", "noeviction")
    for _ in range(3):
        RedisStore(url).connect(5).close()
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == (0 if asks else 1)
    assert all("noeviction" in text and "+info" in text and "pw" not in text for text in warned)


def test_a_replica_is_an_outage(own_server: Valkey) -> None:
    session = RedisStore(own_server.url).connect(5)
    with redis.Redis.from_url(own_server.url) as raw:
        raw.replicaof("127.0.0.1", "1")
        with pytest.raises(StoreOutage):
            session.reserve("h", 60, [a_line()], CALL)
        raw.replicaof("NO", "ONE")
    assert session.reserve("h", 60, [a_line()], CALL).ok


@pytest.mark.parametrize("user", ["", ":wr0ng@", "ann:wr0ng@"])
def test_a_wrong_password_is_denied_and_not_told(own_server: Valkey, user: str) -> None:
    with redis.Redis.from_url(own_server.url) as raw:
        raw.config_set("requirepass", "s3cret")
    place = own_server.url.partition("://")[2]
    with pytest.raises(
        StoreDeniedError, match="wants another user name or password; write redis://:password@host"
    ) as error:
        RedisStore(f"redis://{user}{place}").connect(5)
    assert "wr0ng" not in str(error.value) + repr(error.value.__cause__)
    RedisStore(f"redis://:s3cret@{place}").connect(5).close()


def test_a_user_with_few_rights_is_told_which_it_needs(own_server: Valkey) -> None:
    place = own_server.url.partition("://")[2]
    with redis.Redis.from_url(own_server.url) as raw:
        raw.execute_command(
            "ACL", "SETUSER", "few", "on", ">pw", "~{runguard}:*", "+@read", "+@write", "+@scripting", "+time"
        )
        raw.execute_command("ACL", "SETUSER", "none", "on", ">pw", "~other:*", "+@all")
    session = RedisStore(f"redis://few:pw@{place}").connect(5)  # it may not ask for INFO, and need not
    assert session.reserve("h", 60, [a_line()], CALL).ok
    with pytest.raises(StoreDeniedError, match="needs the keys"):
        RedisStore(f"redis://none:pw@{place}").connect(5)
