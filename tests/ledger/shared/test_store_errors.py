"""Errors of a store say what to do."""

import contextlib
import json
import logging
import sqlite3
import subprocess
import sys
import threading
import time
from unittest import mock
from urllib.parse import urlsplit

import pytest

from runguard import PolicyError
from runguard.adk import RunGuardPlugin
from runguard.ledger import remote
from runguard.testing import assert_stopped
from tests.kit.money import PRICES
from tests.kit.shared_stores import (
    DEADLINE,
    SOON,
    Make,
    Ticks,
    awake,  # noqa: F401 - an autouse fixture
    no_secret,
    on_a_file,
    outage_lines,
    play,
    thousand,
)
from tests.kit.shared_worker import steps
from tests.kit.stores import Place


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://root:hunter2@db/x", "no such store"),
        ("hunter2", "no such store"),
        ("sqlite://root:hunter2@db/x.db", "sqlite:///"),
        ("sqlite:", "sqlite:///"),
        ("redis:/:hunter2@host/0", "write redis:// with two slashes"),
        ("postgres:u:hunter2@host/db", "write postgres:// with two slashes"),
        ("redis://:hunter2@host:port/0", "cannot be read"),
        ("redis://u:hunter2@host/0?pool=1", "pool"),
        ("rediss://u:hunter2@host/zero", "number"),
        ("postgresql://u:hunter2@host:port/db", "not understood"),
        ("postgresql://u:hun@ter2@host/db?schema=pg_x", "schema"),
        ("", "store"),
    ],
)
def test_a_url_that_cannot_be_meant_is_refused_at_once_without_its_password(url: str, words: str) -> None:
    with pytest.raises(PolicyError) as raised:
        RunGuardPlugin(store=url)
    said = str(raised.value)
    assert words in said
    assert "ter2" not in said or url == "hunter2"
    assert raised.value.__cause__ is None or "ter2" not in str(raised.value.__cause__)


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [("redis://:hunter2@h/0", "redis", "redis"), ("postgresql://u:hunter2@h/d", "psycopg", "postgres")],
)
def test_a_missing_package_is_named_with_the_way_to_install_it(
    monkeypatch: pytest.MonkeyPatch, url: str, package: str, extra: str
) -> None:
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PolicyError) as raised:
        RunGuardPlugin(store=url)
    assert f"runguard-agents[{extra}]" in str(raised.value)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(("url", "package"), [("redis://h/0", "redis"), ("postgresql://h/d", "psycopg")])
def test_a_driver_is_imported_before_the_first_call_and_not_within_its_deadline(url: str, package: str) -> None:
    code = (
        f"import sys; from runguard.ledger.memory import open_ledger; open_ledger({url!r}, 1.0); assert {package!r} "
        "in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def _newer(place: Place) -> None:
    """What a later version would have left."""
    if place.kind == "sqlite":
        with contextlib.closing(sqlite3.connect(urlsplit(place.url).path[1:])) as db:
            db.execute("PRAGMA user_version=99")
    elif place.kind == "redis":
        import redis

        address, _, namespace = place.url.partition("?namespace=")
        with redis.Redis.from_url(address) as client:
            client.set(f"{{{namespace}}}:schema", "99")
    else:
        import psycopg

        address, _, schema = place.url.partition("?schema=")
        with psycopg.connect(address, autocommit=True) as link:
            link.execute(f'UPDATE "{schema}".runguard_schema SET version = 99')


async def test_a_store_of_a_newer_version_is_left_alone_and_says_so(
    place: Place, worker: Make, caplog: pytest.LogCaptureFixture
) -> None:
    place.connect().close()
    _newer(place)
    begun = time.monotonic()
    with pytest.raises(PolicyError, match="newer RunGuard") as told:  # before anything runs
        worker(usd="1")
    assert time.monotonic() - begun < SOON
    assert no_secret(caplog.text + str(told.value))


@on_a_file
async def test_a_worker_that_starts_while_another_writes_the_new_file_waits_for_it(place: Place, worker: Make) -> None:
    """SQLite itself does not wait when the journal of a new file is set up."""
    other = sqlite3.connect(urlsplit(place.url).path[1:], isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    released = threading.Timer(0.3, other.close)
    released.start()
    model = steps(1)
    result = await play(worker(usd="1"), model)
    released.join()
    assert (model.calls, result.trips) == (1, [])


@pytest.mark.parametrize(
    "url",
    ["redis://:hunter2@127.0.0.1:1/0", "postgresql://u:hunter2@127.0.0.1:1/db", "redis://:hunter2@192.0.2.1:6379/0"],
)
async def test_a_server_that_is_not_there_is_told_at_the_first_call_and_hangs_nobody(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "runguard")
    begun = time.monotonic()
    with mock.patch.dict(remote._open, clear=True):
        plugin = RunGuardPlugin(prices=PRICES, tokens=thousand, store=url, store_timeout=DEADLINE, max_usd="1")
    assert time.monotonic() - begun < SOON
    async with Ticks() as ticks:
        begun, model = time.monotonic(), steps(1)
        trip = assert_stopped(await play(plugin, model), "guard_error")
        assert time.monotonic() - begun < SOON
    assert ticks.longest < 0.8 * DEADLINE
    assert model.calls == 0
    assert "on_outage" in trip.resume, "what helps is said"
    assert len(outage_lines(caplog)) == 1
    for said in (
        caplog.text,
        json.dumps(trip.to_dict()),
        plugin.describe(),
        repr(plugin.guard.policy.digest),
        json.dumps(plugin.snapshot(), default=str),
    ):
        assert no_secret(said)
