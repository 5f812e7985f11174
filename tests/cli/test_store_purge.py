"""``runguard store purge`` deletes what is old and keeps what calls cost."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from runguard.core.events import ModelCall, RunInfo
from runguard.engine.guard import Guard
from runguard.policy import Policy
from runguard.pricing.rates import Usage
from tests.kit.commands import runguard, told

DAY = 86_400


@pytest.fixture
async def store(tmp_path: Path) -> str:
    """A store with two runs. The first one is ten days old."""
    path = tmp_path / "guard.db"
    guard = Guard(
        Policy.validated({"store": f"sqlite:///{path}", "prices": {"made-up": {"input": 1_000, "output": 0}}}, "")
    )
    for run in ("old", "new"):
        guard.start(RunInfo(run, "docs", "alice", run, at=guard.clock()))
        event = ModelCall(run, "", "writer", guard.clock(), "made-up", 1_000, max_output_tokens=10)
        assert not guard.check(event)
        assert not await guard.reserve(event)
        guard.settle(event.charge, Usage(1_000, 0))
        guard.end(run)
        assert await asyncio.to_thread(guard.flush, 30)
        if run == "old":
            with closing(sqlite3.connect(path)) as db, db:
                db.execute("UPDATE records SET at = at - ?", (10 * DAY,))
    return f"sqlite:///{path}"


def records(store: str) -> set[str]:
    with closing(sqlite3.connect(store.removeprefix("sqlite:///"))) as db:
        return {ref for (ref,) in db.execute("SELECT ref FROM records WHERE kind = 'call'")}


def test_old_records_go_and_the_bill_stays(store: str) -> None:
    before = told("spend", "--store", store, "--since", "30d", "--by", "user")["rows"]
    assert records(store) == {"old", "new"}
    assert told("store", "purge", "--older-than", "7d", "--store", store)["older_than_seconds"] == 7 * DAY
    assert records(store) == {"new"}
    assert told("spend", "--store", store, "--since", "30d", "--by", "user")["rows"] == before
    assert [(row["user"], row["calls"], row["usd"]) for row in before] == [("alice", 2, "2")]


def test_the_last_minute_is_kept(store: str) -> None:
    told("store", "purge", "--older-than", "1s", "--store", store)
    assert records(store) == {"new"}


def test_wrong_ages_are_refused(store: str) -> None:
    assert "not a time" in runguard("store", "purge", "--older-than", "soon", "--store", store).stderr
    assert "in the future" in runguard("store", "purge", "--older-than", "2100-01-01", "--store", store).stderr
    assert records(store) == {"old", "new"}
