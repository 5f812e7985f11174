"""A store that vanishes is noticed by its id."""

import asyncio
import contextlib
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from runguard.ledger.ledger import (
    IDENTITY,
    Line,
    Seen,
    StoreError,
    StoreOutage,
    StoreReplacedError,
    adopt,
    identity_of,
    new_id,
)
from runguard.ledger.sqlite import SqliteStore
from runguard.testing import ScriptedModel, text
from tests.kit.stores import Place
from tests.kit.vanishing_stores import (
    Ground,
    Make,
    play,
    store_command,
)
from tests.kit.waiting import until_async

ALICE = "user:app/alice"


# ---- ways in which a store vanishes ---------------------------------------------------------------------------------


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
    monkeypatch.setattr("runguard.adk.runs._WRITE_S", 1_000.0)  # longer than a test lasts
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
    await until_async(lambda: slow._in_flight)
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
    assert one.plugin.flush(0.2) is False
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
    assert one.ledger._guards.version == desk.ledger._guards.version == 1  # type: ignore[attr-defined]
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
