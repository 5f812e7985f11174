"""A store that vanishes under its workers. Live workers make nothing in what they find in its place and make no call,
until the old store is back or an operator adopts the new one. The files, servers and databases are real.

A worker is a guard with a ledger of its own, as every process has one. A standard call costs $0.02, which is also its
worst case; the cap is five calls.
"""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol
from unittest import mock
from urllib.parse import parse_qs, urlsplit

import pytest
from click.testing import CliRunner

from runguard import Budget
from runguard.adk import RunGuardPlugin
from runguard.alerts import Alert
from runguard.cli.main import main
from runguard.ledger import remote
from runguard.ledger.identity import IDENTITY, Seen, StoreReplacedError, adopt, identity_of, new_id
from runguard.ledger.postgres import PostgresStore
from runguard.ledger.sqlite import SqliteStore
from runguard.ledger.store import Line, Session, Store, StoreError, StoreOutage
from runguard.testing import Recording, ScriptedModel, run, text

from .postgres_server import server as postgres_cluster
from .proxy import Proxy
from .shared_worker import PRICES, agent, step, steps
from .valkey_server import Valkey, valkey_process

CAP = 5
ALICE = "user:app/alice"


class Place(Protocol):
    kind: str
    url: str

    def store(self) -> Store: ...
    def connect(self, timeout: float = ...) -> Session: ...


@pytest.fixture(autouse=True)
def _own_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUNGUARD_MODE", "RUNGUARD_POLICY", "RUNGUARD_STORE"):
        monkeypatch.delenv(name, raising=False)


class Worker:
    """One worker, with the model that it pays."""

    def __init__(self, url: str, **policy: Any) -> None:
        self.alerts: list[Alert] = []
        settings = {
            "prices": PRICES,
            "tokens": lambda _: 1_000,
            "store": url,
            "store_timeout": 5.0,
            "budgets": [Budget(usd="0.10", per="user")],
        }
        with mock.patch.dict(remote._open, clear=True):
            self.plugin = RunGuardPlugin(**{**settings, "alerts": self.alerts.append, **policy})
        self.model, self.ledger = steps(1), self.plugin.guard.accounts.ledger

    async def calls(self, attempts: int) -> int:
        """How many of so many attempts became a call, each as if a second had passed since the last."""
        before = self.model.calls
        for _ in range(attempts):
            self.ledger._down_until = 0.0  # type: ignore[attr-defined]
            self.last = await play(self.plugin, self.model)
        assert self.plugin.guard.guard_errors == 0
        return self.model.calls - before

    @property
    def why(self) -> str:
        return self.plugin.trips[-1].message

    @property
    def id(self) -> str:
        return str(self.ledger._seen.text.partition(" ")[0])  # type: ignore[attr-defined]


async def play(plugin: RunGuardPlugin, model: ScriptedModel) -> Recording:
    async with asyncio.timeout(30):
        return await run(agent(model, tools=[step]), plugins=[plugin], user_id="alice")


Make = Callable[..., Worker]


@pytest.fixture
def worker(place: Place) -> Iterator[Make]:
    made: list[Worker] = []

    def make(**policy: Any) -> Worker:
        made.append(Worker(policy.pop("url", place.url), **policy))
        return made[-1]

    if place.kind == "postgres":
        place.connect().close()  # the schema is made once, and not within the deadline of a call
    yield make
    for one in made:
        if not one.ledger.is_away:
            one.plugin.flush(1)


def store_command(*arguments: str) -> dict[str, Any]:
    ran = CliRunner().invoke(main, ["store", *arguments, "--json"])
    assert ran.exit_code == 0, ran.output
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


# ---- ways in which a store vanishes ---------------------------------------------------------------------------------


class Ground:
    """What is under a store: looked at and changed past RunGuard."""

    def __init__(self, place: Place) -> None:
        self.place, self.kind = place, place.kind
        parts = urlsplit(place.url)
        self.apart = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self.server, self.path = (
            parts._replace(query="").geturl(),
            Path(parts.path[1:] if place.kind == "sqlite" else "/nowhere"),
        )

    def client(self) -> Any:
        import redis

        return redis.Redis.from_url(self.server)

    def sql(self, *statements: str) -> list[Any]:
        import psycopg

        with psycopg.connect(self.server, autocommit=True) as db:
            for statement in statements:
                # a worker may be writing at this moment, and the server ends one of two that wait for each other
                for _ in range(10):
                    with contextlib.suppress(psycopg.errors.DeadlockDetected):
                        answer = db.execute(statement.replace("runguard", self.apart["schema"]))  # type: ignore[arg-type]
                        break
            return answer.fetchall() if answer.description else []

    def things(self) -> list[str]:
        """Everything that somebody made there, by name."""
        if self.kind == "sqlite":
            if not self.path.exists():
                return sorted(file.name for file in self.path.parent.iterdir())
            with contextlib.closing(sqlite3.connect(self.path)) as db:
                names = [
                    str(name)
                    for (name,) in db.execute(
                        "SELECT name FROM sqlite_master UNION ALL SELECT key FROM accounts" if self._ours(db) else _ALL
                    )
                ]
                return sorted(names)
        if self.kind == "redis":
            return sorted(key.decode() for key in self.client().keys(f"{{{self.apart['namespace']}}}:*"))
        tables = self.sql(
            "SELECT relname FROM pg_class JOIN pg_namespace AS n ON n.oid = relnamespace WHERE nspname = 'runguard'"
        )
        return sorted(name for (name,) in tables)

    @staticmethod
    def _ours(db: sqlite3.Connection) -> bool:
        return bool(db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'accounts'").fetchone()[0])

    def files(self) -> list[Path]:
        return [self.path, self.path.with_name(f"{self.path.name}-wal"), self.path.with_name(f"{self.path.name}-shm")]

    # ---- ways -------------------------------------------------------------------------------------------------------

    def gone(self) -> None:
        """Removed, and nothing in its place."""
        if self.kind == "sqlite":
            for file in self.files():
                file.unlink(missing_ok=True)
        elif self.kind == "redis":
            self.client().eval(
                "for _, key in ipairs(redis.call('KEYS', ARGV[1])) do redis.call('DEL', key) end",
                0,
                f"{{{self.apart['namespace']}}}:*",
            )
        else:
            self.sql("DROP SCHEMA runguard CASCADE")

    def begun_anew(self) -> None:
        """Removed, and made again by a worker that was just started."""
        self.gone()
        self.place.connect().close()

    def emptied(self) -> None:
        """Everything is there but the rows."""
        if self.kind == "sqlite":
            with contextlib.closing(sqlite3.connect(self.path)) as db, db:
                for table in ("accounts", "holds", "marks", "documents", "claims", "records", "runs"):
                    db.execute(f"DELETE FROM {table}")
        elif self.kind == "redis":
            prefix = f"{{{self.apart['namespace']}}}:"
            self.client().delete(
                *[key for key in self.client().keys(f"{prefix}*") if key.decode() != f"{prefix}schema"]
            )
        else:
            self.sql(
                "TRUNCATE runguard.accounts, runguard.holds, runguard.marks, runguard.documents, "
                "runguard.claims, runguard.records, runguard.runs"
            )


_ALL = "SELECT name FROM sqlite_master"
WAYS = ["gone", "begun_anew", "emptied"]


@pytest.mark.parametrize("way", WAYS)
async def test_live_workers_make_no_call_and_nothing_else_in_what_they_find(
    place: Place, worker: Make, way: str
) -> None:
    one, two = worker(), worker()
    assert (await one.calls(1), await two.calls(1)) == (1, 1)
    assert one.id == two.id != ""
    assert one.plugin.flush(10)
    assert two.plugin.flush(10)
    ground = Ground(place)
    getattr(ground, way)()
    before = ground.things()
    for each in (one, two, one, two):
        assert await each.calls(3) == 0
        assert each.plugin.trips[-1].rule == "guard_error"
        assert f"runguard store adopt {each.id}" in each.why
    await asyncio.sleep(1.2)  # a writer looks for stops every second, too
    assert ground.things() == before


async def test_a_refused_run_does_not_wait_for_a_store_that_is_away(
    place: Place, worker: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runguard.adk.plugin._WRITE_S", 1_000.0)  # longer than a test lasts
    one = worker()
    assert await one.calls(1) == 1
    assert one.plugin.flush(10)
    Ground(place).gone()
    assert await one.calls(2) == 0


@pytest.mark.parametrize("way", WAYS)
async def test_an_adopted_store_is_accepted_without_a_restart(place: Place, worker: Make, way: str) -> None:
    one, two = worker(), worker()
    assert (await one.calls(1), await two.calls(1)) == (1, 1)
    for each in (one, two):
        assert each.plugin.flush(10)  # what is not booked yet would be booked in the adopted store
    getattr(Ground(place), way)()
    assert (await one.calls(1), await two.calls(1)) == (0, 0)
    old = one.id
    late = worker()  # started meanwhile: it accepts what it finds
    assert await late.calls(1) == 1
    assert late.id != old
    told = store_command("adopt", old, "--store", place.url)
    assert (told["id"], told["replaces"]) == (late.id, [old])
    assert [await each.calls(1) for each in (one, two, late, one)] == [1, 1, 1, 1], (
        "with the one of before, the new store's five"
    )
    assert [await each.calls(2) for each in (one, two, late)] == [0, 0, 0]
    assert one.plugin.trips[-1].rule == "budget"
    assert one.id == two.id == late.id
    assert store_command("--store", place.url)["replaces"] == [old]
    assert store_command("adopt", old, "--store", place.url)["replaces"] == [old], "again changes nothing"


async def test_a_store_that_is_moved_away_and_back_goes_on_with_its_accounts(place: Place, worker: Make) -> None:
    one = worker()
    assert await one.calls(2) == 2
    assert one.plugin.flush(10)
    with moved_away(Ground(place)):
        assert await one.calls(2) == 0
    assert await one.calls(6) == 3, "five in all"
    assert one.plugin.trips[-1].rule == "budget"


@contextlib.contextmanager
def moved_away(ground: Ground) -> Iterator[None]:
    """Not there for a while, then there again with everything that was in it."""
    if ground.kind == "sqlite":
        aside = ground.path.with_name("aside")
        aside.mkdir()
        files = [file for file in ground.files() if file.exists()]
        for file in files:
            file.rename(aside / file.name)
        yield
        for file in files:
            (aside / file.name).rename(file)
    elif ground.kind == "redis":
        client, prefix = ground.client(), f"{{{ground.apart['namespace']}}}:"
        dumps = {key: client.dump(key) for key in client.keys(f"{prefix}*")}
        client.delete(*dumps)
        yield
        for key, dump in dumps.items():
            client.restore(key, 0, dump, replace=True)
    else:
        ground.sql("ALTER SCHEMA runguard RENAME TO runguard_aside")
        yield
        ground.sql("ALTER SCHEMA runguard_aside RENAME TO runguard")


async def test_open_goes_on_over_a_replaced_store_and_books_in_the_adopted_one(place: Place, worker: Make) -> None:
    one = worker(on_outage="open")
    assert await one.calls(2) == 2
    assert one.plugin.flush(10)
    Ground(place).begun_anew()
    assert await one.calls(3) == 3
    session = place.connect()
    assert session.read() == [], "nothing is written to a store that nobody adopted"
    store_command("adopt", one.id, "--store", place.url)
    assert one.plugin.flush(10)
    assert [balance.spent[2] for balance in session.read(ALICE)] == [3]
    session.close()


async def test_a_call_on_its_way_is_booked_in_the_store_that_was_adopted(place: Place, worker: Make) -> None:
    one = worker()
    assert await one.calls(1) == 1
    slow = ScriptedModel([text("done")], latency_s=0.6)
    running = asyncio.create_task(play(one.plugin, slow))
    while not slow._in_flight:  # noqa: ASYNC110 - a model does not tell
        await asyncio.sleep(0.01)
    Ground(place).begun_anew()
    await running
    store_command("adopt", one.id, "--store", place.url)
    assert one.plugin.flush(10)
    session = place.connect()
    assert [balance.spent[2] for balance in session.read(ALICE)] == [1]
    session.close()


async def test_one_alert_names_the_command_and_another_says_when_it_is_over(
    place: Place, worker: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "runguard")
    one = worker()
    assert await one.calls(1) == 1
    Ground(place).begun_anew()
    assert await one.calls(4) == 0
    assert one.plugin.flush(10) is False
    (alert,) = [alert for alert in one.alerts if alert.kind in ("outage", "store_replaced")]
    assert (alert.kind, alert.severity, alert.facts["command"]) == (
        "store_replaced",
        "critical",
        f"runguard store adopt {one.id}",
    )
    assert f"runguard store adopt {one.id}" in alert.text
    lines = [
        record.getMessage() for record in caplog.records if record.getMessage().startswith("runguard.store_replaced")
    ]
    assert [line.partition(":")[0] for line in lines] == ["runguard.store_replaced"]
    assert f"runguard store adopt {one.id}" in lines[0]
    store_command("adopt", one.id, "--store", place.url)
    assert await one.calls(1) == 1
    assert one.plugin.flush(10)
    assert [(alert.kind, alert.resolved) for alert in one.alerts if alert.kind in ("outage", "store_replaced")] == [
        ("store_replaced", False),
        ("store_replaced", True),
    ]


async def test_the_stops_of_an_adopted_store_hold_although_its_document_has_the_same_version(
    place: Place, worker: Make
) -> None:
    one = worker()
    one.plugin.stop("user:app/bob", actor="ops", reason="old")
    assert await one.calls(1) == 1
    Ground(place).begun_anew()
    desk = worker()
    desk.plugin.stop(ALICE, actor="ops", reason="new")
    assert one.ledger.control == desk.ledger.control == 1  # type: ignore[attr-defined]
    store_command("adopt", one.id, "--store", place.url)
    assert await one.calls(1) == 0
    assert one.plugin.trips[-1].rule == "kill_switch"


# ---- the id itself --------------------------------------------------------------------------------------------------


def test_workers_that_open_a_new_store_at_the_same_moment_agree_on_its_id(place: Place) -> None:
    together = threading.Barrier(6)

    def first() -> str:
        together.wait(10)
        session = place.connect()
        try:
            return session.get(IDENTITY)[1]
        finally:
            session.close()

    with ThreadPoolExecutor(6) as pool:
        found = {job.result() for job in [pool.submit(first) for _ in range(6)]}
    assert len(found) == 1
    assert len(found.pop()) == 16


def test_a_store_from_before_there_were_ids_gets_one_and_keeps_its_accounts(place: Place) -> None:
    session = place.connect()
    line = Line("k#", ALICE, None, None, None, (10**9, 10**9, 5))
    session.settle("h", [line], (1, 1, 1))
    if place.kind != "sqlite":
        session.drop(IDENTITY)
    session.close()
    if place.kind == "sqlite":  # whose sessions do not let go of their id
        with contextlib.closing(sqlite3.connect(Ground(place).path)) as db, db:
            db.execute("DELETE FROM documents WHERE name = ?", (IDENTITY,))
    together = threading.Barrier(4)

    def opened() -> tuple[list[str], int]:
        together.wait(10)
        again = place.connect()
        try:
            return identity_of(again, "x"), again.read(ALICE)[0].spent[2]
        finally:
            again.close()

    with ThreadPoolExecutor(4) as pool:
        found = [job.result() for job in [pool.submit(opened) for _ in range(4)]]
    assert len({(*ids, spent) for ids, spent in found}) == 1
    assert found[0][1] == 1


def test_a_forked_child_knows_the_store_of_its_parent(place: Place) -> None:
    store = place.store()
    store.connect(5).close()
    Ground(place).begun_anew()
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            store.connect(5)
            os.write(write, b"accepted")
        except StoreReplacedError:
            os.write(write, b"refused")
        finally:
            os._exit(0)
    os.close(write)
    assert os.read(read, 100) == b"refused"
    os.close(read)
    os.wait()


def test_every_question_about_accounts_is_refused_by_a_session_that_was_open_all_the_time(place: Place) -> None:
    """In the same step as the question: there is no moment between the check and the change."""
    session = place.connect()
    line = Line("k#", ALICE, None, None, None, (10**9, 10**9, 5))
    pair = [line, Line("j#", "app:app", None, None, None, (10**9, 10**9, 5))]
    session.reserve("h", 60, [line], (1, 1, 1))
    Ground(place).emptied() if place.kind != "sqlite" else _put_over(Ground(place))
    before = Ground(place).things()
    questions: dict[str, Callable[[], Any]] = {
        "reserve": lambda: session.reserve("g", 60, [line], (1, 1, 1)),
        "reserve two": lambda: session.reserve("g2", 60, pair, (1, 1, 1)),
        "force": lambda: session.reserve("g3", 60, [line], (1, 1, 1), force=True),
        "settle": lambda: session.settle("h", [line], (1, 1, 1)),
        "settle two": lambda: session.settle("g2", pair, (1, 1, 1)),
        "release": lambda: session.release("h"),
        "extend": lambda: session.extend(line, (1, 1, 1)),
        "read": lambda: session.read(ALICE),
        "first": lambda: session.first("k#", "m", 0.5, (1, 1, 1)),
        "get": lambda: session.get("control"),
        "put": lambda: session.put("control", 0, "{}"),
        "append": lambda: session.append("call", "r", "t"),
        "beat": lambda: session.beat("r", "w", "t"),
        "claim": lambda: session.claim("c", 60),
        "finish": lambda: session.finish("c", True),
        "purge": lambda: session.purge(0),
    }
    for name, ask in questions.items():
        with pytest.raises(StoreReplacedError):
            pytest.fail(f"{name}: {ask()}")
    assert Ground(place).things() == before
    session.close()


def _put_over(ground: Ground) -> None:
    """Another store's content in the same file, by SQLite's own way to restore a backup."""
    other = ground.path.with_name("other.db")
    SqliteStore(f"sqlite:///{other}").connect(5).close()
    with (
        contextlib.closing(sqlite3.connect(other)) as source,
        contextlib.closing(sqlite3.connect(ground.path)) as target,
    ):
        source.backup(target)


@pytest.mark.parametrize("text", ["", "x", "0123456789abcdef ", "0123456789abcdef 0", "0123456789ABCDEF"])
async def test_a_damaged_id_is_an_error(place: Place, worker: Make, text: str) -> None:
    one = worker()
    assert await one.calls(1) == 1
    session = place.connect()
    version, _ = session.get(IDENTITY)
    with contextlib.suppress(StoreError, StoreOutage):
        session.put(IDENTITY, version, text)
    session.close()
    if place.kind == "sqlite":  # which looks at what it has written
        with contextlib.closing(sqlite3.connect(Ground(place).path)) as db, db:
            db.execute("UPDATE documents SET text = ? WHERE name = ?", (text, IDENTITY))
    assert await one.calls(2) == 0


def test_a_store_may_take_the_place_of_several_and_then_of_itself(place: Place) -> None:
    session = place.connect()
    (own,) = identity_of(session, "x")
    first, second = new_id(), new_id()
    assert adopt(session, "x", first) == [own, first]
    assert adopt(session, "x", second) == [own, second, first]
    fresh, *others = adopt(session, "x", own)
    assert fresh not in (own, first, second)
    assert others == [own, second, first]
    for _ in range(30):
        ids = adopt(session, "x", new_id())
    assert len(ids) == 21, "the oldest are forgotten"
    session.close()


def test_a_process_accepts_its_store_its_successors_and_nothing_else() -> None:
    a, b, c = new_id(), new_id(), new_id()
    seen = Seen("x")
    seen.meet("", a)
    seen.meet(a, a)
    for found in ("", b, f"{b} {c}"):
        with pytest.raises(StoreReplacedError):
            seen.meet(a, found)
    seen.meet(a, f"{b} {c} {a}")
    assert seen.text == f"{b} {c} {a}"
    seen.meet(seen.text, b)
    with pytest.raises(StoreReplacedError):
        seen.meet(seen.text, a)


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
    copy, seen = copied(path), one.ledger._seen  # type: ignore[attr-defined]
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


async def test_a_valkey_that_restarts_with_its_data_goes_on(own_valkey: Valkey) -> None:
    crowd = [Worker(own_valkey.url) for _ in range(2)]
    assert [await each.calls(2) for each in crowd] == [2, 2]
    for each in crowd:
        assert each.plugin.flush(10)
    own_valkey.stop()
    assert await crowd[0].calls(1) == 0
    own_valkey.start()
    assert sum([await each.calls(3) for each in crowd]) == 1


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
            db.execute(statement)  # type: ignore[arg-type]


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
