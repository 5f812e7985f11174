"""The soak finds what grows; and the file of a store that is purged stays as it is."""

import asyncio
import os
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from runguard.core.events import RunInfo
from runguard.engine.guard import Guard
from runguard.ledger.sqlite import SqliteStore
from runguard.policy import Policy
from tests.kit.examples import each_row

from . import soak
from .soak import LIMITS, Look, Part, file_size, many_sessions, one_long_run, work


def soaked(*, memory: int = 0, threads: int = 0, descriptors: int = 0, file: int = 0) -> Part:
    """Looks at a process in which so much more of each is there with every look."""
    part = Part("made up")
    part.looks = [Look(n, 10**8 + n * memory, 5 + n * threads, 9 + n * descriptors, n * file) for n in range(40)]
    return part


@each_row("kind", ["memory", "threads", "descriptors", "file"])
def test_whatever_grows_is_named(kind: str) -> None:
    more = {"memory": 2**20, "file": 2**20}.get(kind, 1)
    (grown,) = soaked(**{kind: more}).grown()
    assert grown.startswith(f"{kind}: ")
    assert soaked().grown() == []


def test_a_look_counts_what_the_process_has(tmp_path: Path) -> None:
    store = tmp_path / "guard.db"
    part = Part("made up", store)
    part.look(0)
    store.write_bytes(b"x" * 4096)
    first, second = os.pipe()
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait)
    thread.start()
    part.look(1)
    is_over.set()
    thread.join()
    os.close(first)
    os.close(second)
    before, after = part.looks
    assert (after.threads, after.descriptors, after.file) == (before.threads + 1, before.descriptors + 2, 4096)
    assert after.memory > 10**6


def test_the_parts_of_a_short_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "_LOOKS", 8)  # each of them collects the garbage of a whole test process
    asyncio.run(many_sessions(40))  # what starts once has started now
    steps, sessions = asyncio.run(one_long_run(400)), asyncio.run(many_sessions(400))
    assert (len(steps.looks), len(sessions.looks)) == (8, 8)
    assert (steps.looks[-1].done, sessions.looks[-1].done) == (400, 400)
    # the memory of a test process has more reasons to grow
    assert [grown for part in (steps, sessions) for grown in part.grown() if not grown.startswith("memory")] == []


async def test_the_file_of_a_purged_store_does_not_grow(tmp_path: Path) -> None:
    path = tmp_path / "guard.db"
    guard = Guard(Policy.validated({**LIMITS, "store": f"sqlite:///{path}?synchronous=normal"}, ""))
    sizes = []
    for batch in range(4):
        for number in range(30):
            run = f"run {batch}.{number}"
            guard.start(RunInfo(run, "app", f"user {number}", run, at=guard.clock()))
            await work(guard, run, 0, 3)
            guard.end(run)
        assert await asyncio.to_thread(guard.flush, 60)
        session = SqliteStore(f"sqlite:///{path}").connect(timeout=10)
        session.purge(older_than=0)
        session.close()
        with closing(sqlite3.connect(path)) as db:
            assert db.execute("SELECT count(*) FROM records").fetchone() == (0,)
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        sizes.append(file_size(path))
    assert sizes[-1] <= sizes[0] + 16_384
