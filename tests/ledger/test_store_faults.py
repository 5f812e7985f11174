"""Exceptions that nobody expected from a store. With on_outage="closed" a call that cannot be accounted for is not
made, whatever on_guard_error says.

The damage is real: rows, keys, functions and replies of a real SQLite file, Valkey and Postgres. A standard call costs
$0.02, and so does its worst case.
"""

import asyncio
import contextlib
import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, urlsplit

import pytest

import runguard
from runguard import Budget, PolicyError, Threshold
from runguard.adk import RunGuardPlugin
from runguard.errors import GuardFailedError
from runguard.ledger import remote
from runguard.ledger.ledger import Store, StoreError, StoreOutage, StoreSession
from runguard.ledger.write_queue import StoreLink
from runguard.testing import Recording, ScriptedModel, call, run, text
from tests.kit.contents import parts
from tests.kit.money import PRICES
from tests.kit.shared_worker import agent, steps
from tests.kit.stores import Place
from tests.kit.tools import step

Make = Callable[..., RunGuardPlugin]


def link_of(plugin: RunGuardPlugin) -> StoreLink:
    """The connections of a plugin's ledger to its store."""
    ledger = plugin.guard.accounts.ledger
    assert isinstance(ledger, remote.StoreLedger)
    return ledger.link


@pytest.fixture
def worker(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes guards with a cap of two calls per user, each with a ledger of its own, as workers in different processes
    have.
    """
    monkeypatch.setattr("runguard.adk.runs._WRITE_S", 0.05)  # how long the end of a run waits for a broken store
    made: list[RunGuardPlugin] = []

    def make(store: Store | None = None, **policy: Any) -> RunGuardPlugin:
        known = {place.url: remote.StoreLedger(store, 5.0)} if store is not None else {}
        settings = {
            "prices": PRICES,
            "tokens": lambda _: 1_000,
            "store": place.url,
            "store_timeout": 5.0,
            "on_guard_error": "allow",
        }
        with mock.patch.dict(remote._open, known, clear=True):
            made.append(RunGuardPlugin(**{**settings, "budgets": [Budget(usd="0.04", per="user")], **policy}))
        return made[-1]

    if place.kind == "postgres":
        place.connect().close()  # the schema is made once, and not within the deadline of a call
    yield make
    for plugin in made:
        plugin.flush(0.2)


async def play(plugin: RunGuardPlugin, model: Any, *, session: str = "s", tools: Any = None) -> Recording:
    async with asyncio.timeout(30):
        return await run(agent(model, tools=tools or [step]), plugins=[plugin], user_id="alice", session_id=session)


# ---- damage ---------------------------------------------------------------------------------------------------------


class Damage:
    """Writes to a store as a foreign program would."""

    def __init__(self, place: Place) -> None:
        self.place, self.kind = place, place.kind
        parts = urlsplit(place.url)
        self._apart = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self._server, self._path = parts._replace(query="").geturl(), parts.path[1:]

    def file(self, *statements: str) -> None:
        with contextlib.closing(sqlite3.connect(self._path)) as db, db:
            for statement in statements:
                db.execute(statement)

    def server(self, *statements: str) -> None:
        import psycopg

        with psycopg.connect(self._server, autocommit=True) as db:
            for statement in statements:
                db.execute(statement.replace("runguard.", f'"{self._apart["schema"]}".'))

    def keys(self) -> tuple[Any, str]:
        import redis

        return redis.Redis.from_url(self._server), f"{{{self._apart['namespace']}}}:"

    def document(self, text: str) -> None:
        """The control document says something that RunGuard never wrote."""
        session = self.place.connect()
        version, _ = session.get("control")
        assert session.put("control", version, text)
        session.close()

    def version(self) -> None:
        """The version of the control document is not a number."""
        if self.kind == "sqlite":
            self.file(
                "DROP TABLE documents",
                "CREATE TABLE documents (name TEXT PRIMARY KEY, version, text)",
                "INSERT INTO documents VALUES ('control', 'many', '{}')",
            )
        elif self.kind == "redis":
            client, prefix = self.keys()
            client.mset({f"{prefix}v:control": "many", f"{prefix}t:control": "{}"})
        else:
            self.server(
                "INSERT INTO runguard.documents VALUES ('control', 5, '{}')",
                "ALTER TABLE runguard.documents ALTER COLUMN version TYPE text USING 'many'",
            )

    def half_a_document(self) -> None:
        """A version without its text."""
        if self.kind == "sqlite":
            self.file("INSERT INTO documents VALUES ('control', 3, CAST(x'ff00ff' AS TEXT))")
        elif self.kind == "redis":
            client, prefix = self.keys()
            client.set(f"{prefix}v:control", "3")
        else:
            self.server(
                "ALTER TABLE runguard.documents ALTER COLUMN text DROP NOT NULL",
                "INSERT INTO runguard.documents VALUES ('control', 3, NULL)",
            )

    def hold(self) -> None:
        """The holds cannot be read: every reservation looks for overdue ones."""
        if self.kind == "sqlite":
            self.file("INSERT INTO holds VALUES ('h', '{not a list', 'open', 1, 1, 5, 5, 1)")
        elif self.kind == "redis":
            client, prefix = self.keys()
            client.delete(f"{prefix}holds")
            client.set(f"{prefix}holds", "not a sorted set")
        else:
            self.server("ALTER TABLE runguard.holds DROP COLUMN keys")

    def account(self) -> None:
        """The row of the account holds words."""
        if self.kind == "sqlite":
            self.file("UPDATE accounts SET scope = CAST(x'ff00ff' AS TEXT)")
        elif self.kind == "redis":
            client, prefix = self.keys()
            for key in client.keys(f"{prefix}a:*"):
                client.hset(key, "overrun", "much")
        else:
            self.server("ALTER TABLE runguard.accounts DROP COLUMN granted_usd")

    def reply(self) -> None:
        """The answer of the store's own program is not what it was."""
        if self.kind == "sqlite":
            self.file("DROP TABLE holds", "CREATE TABLE holds (id, keys)", "INSERT INTO holds VALUES ('h', 5)")
        elif self.kind == "redis":
            client, prefix = self.keys()
            for key in client.keys(f"{prefix}a:*"):
                client.hset(key, "expired", "1 2")
        else:
            body = "RETURNS text LANGUAGE sql AS $$ SELECT 'nonsense' $$"
            self.server(
                "CREATE OR REPLACE FUNCTION runguard.reserve(p_hold text, p_ttl float8, p_names text[], "
                "p_times float8[], p_caps bigint[], p_want bigint[], "
                f"p_force boolean) {body}",
                "UPDATE runguard.accounts SET closed = true",  # so that the function is asked
            )


DOCUMENTS = {
    "cut off": "[1, 2",
    "a list": "[1, 2]",
    "stops are a list": '{"stops": ["all"]}',
    "a stop is a number": '{"stops": {"all": 5}}',
    "a stop without its facts": '{"stops": {"all": {"actor": "ops"}}}',
    "a stop with a word for its time": '{"stops": {"all": {"actor": "ops", "reason": "fire", "at": "noon"}}}',
    "breakers are a number": '{"breakers": 7}',
    "a breaker without its state": '{"breakers": {"step": {"state": "closed"}}}',
    "a breaker with a word for its probe": json.dumps(
        {
            "breakers": {
                "step": {
                    "state": "half_open",
                    "generation": 1,
                    "failures": 0,
                    "runs": [],
                    "opened_at": 1,
                    "probe_at": "noon",
                }
            }
        }
    ),
    "nested without end": "[" * 100_000,
}


def assert_refused(result: Recording, model: ScriptedModel, plugin: RunGuardPlugin, calls: int) -> None:
    assert (model.calls, [trip.rule for trip in result.trips]) == (calls, ["guard_error"])
    assert plugin.guard.guard_errors == 0, "a fault of the store is not one of the guard's"
    assert plugin.snapshot()["outages"]["closed"] >= 1


@pytest.mark.parametrize("what", ["version", "half_a_document", "hold", "account", "reply"])
async def test_a_damaged_store_lets_no_call_pass_its_cap(place: Place, worker: Make, what: str) -> None:
    plugin, model = worker(), steps(1)
    assert (await play(plugin, model)).trips == []
    assert plugin.flush(10)
    getattr(Damage(place), what)()
    for attempt in range(7):
        assert_refused(await play(plugin, model, session=f"damaged {attempt}"), model, plugin, 1)


@pytest.mark.parametrize("text", DOCUMENTS.values(), ids=DOCUMENTS)
async def test_a_damaged_control_document_lets_no_call_through(place: Place, worker: Make, text: str) -> None:
    """Who is stopped stands in it: as long as it cannot be read, anybody may be."""
    old, model = worker(), steps(1)
    assert (await play(old, model)).trips == []
    assert old.flush(10)
    Damage(place).document(text)
    for plugin in (old, worker()):  # one that knew an earlier document, and one that never saw any
        for attempt in range(3):
            assert_refused(await play(plugin, model, session=f"damaged {attempt}"), model, plugin, 1)
    with pytest.raises(StoreError, match="control document"):
        old.stop("all", actor="ops", reason="fire")
    session = place.connect()
    version, _ = session.get("control")
    assert session.put("control", version, "{}"), "repaired"
    session.close()
    assert old.flush(10)
    link_of(old).down_until = 0.0  # as a second later
    assert (await play(old, model, session="repaired")).trips == []
    assert model.calls == 2


@pytest.mark.parametrize("what", ["version", "half_a_document", "hold", "account", "reply"])
async def test_open_goes_on_over_a_damaged_store_as_over_one_that_is_away(
    place: Place, worker: Make, what: str
) -> None:
    plugin, model = worker(on_outage="open"), steps(1)
    assert (await play(plugin, model)).trips == []
    assert plugin.flush(10)
    getattr(Damage(place), what)()
    for attempt in range(3):
        assert (await play(plugin, model, session=f"damaged {attempt}")).trips == []
    assert (model.calls, plugin.guard.guard_errors) == (4, 0)
    assert plugin.snapshot()["outages"]["open"] == 3


@pytest.mark.parametrize("what", ["version", "account"])
def test_a_guarded_function_is_not_called_over_a_damaged_store(place: Place, what: str) -> None:
    made: list[int] = []

    def complete(prompt: str) -> dict[str, Any]:
        made.append(1)
        return {"usd": 0.02}

    with mock.patch.dict(remote._open, clear=True):
        guarded = runguard.guard(
            complete, budget={"max_usd": 1}, store=place.url, store_timeout=5.0, on_guard_error="allow"
        )
        guarded("hello")
        assert guarded.flush(10)
        getattr(Damage(place), what)()
        for _ in range(3):
            with pytest.raises(GuardFailedError):
                guarded("hello")
    assert len(made) == 1


# ---- exceptions of any kind, at any question ------------------------------------------------------------------------

on_a_file = pytest.mark.parametrize("place", ["sqlite"], indirect=True)


class Strange:
    """A store whose sessions raise instead of answering one question, from the n-th on."""

    def __init__(self, store: Store, method: str, error: BaseException, since: int = 1) -> None:
        self._store, self.name, self.durable = store, store.name, store.durable
        self._method, self._error, self._since, self.asked = method, error, since, 0

    def connect(self, timeout: float) -> StoreSession:
        self.meet("connect")
        return _StrangeSession(self, self._store.connect(timeout))

    def meet(self, method: str) -> None:
        if method == self._method:
            self.asked += 1
            if self.asked >= self._since:
                raise self._error


class _StrangeSession:
    def __init__(self, strange: Strange, session: StoreSession) -> None:
        self._strange, self._session = strange, session

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._session, name)

        def asked(*args: Any, **kwargs: Any) -> Any:
            self._strange.meet(name)
            return method(*args, **kwargs)

        return asked


ERRORS = [
    ValueError("x"),
    KeyError("x"),
    AttributeError("x"),
    MemoryError(),
    TimeoutError(),
    PolicyError("x"),
    SystemExit(3),
    asyncio.CancelledError(),
]


@on_a_file
@pytest.mark.parametrize("error", ERRORS, ids=[type(error).__name__ for error in ERRORS])
@pytest.mark.parametrize("method", ["connect", "reserve"])
async def test_whatever_a_store_raises_refuses_the_call(
    place: Place, worker: Make, method: str, error: BaseException
) -> None:
    model = steps(1)
    # construction connects, too
    plugin = worker(Strange(place.store(), method, error, since=2 if method == "connect" else 1))
    with contextlib.suppress(AttributeError):
        del link_of(plugin).local.session
    link_of(plugin).era += 1  # every thread connects anew
    for attempt in range(7):
        link_of(plugin).down_until = 0.0
        assert_refused(await play(plugin, model, session=f"{attempt}"), model, plugin, 0)


@on_a_file
@pytest.mark.parametrize(
    "error", [ValueError("x"), StoreError("x"), StoreOutage("x"), SystemExit(3)], ids=lambda error: type(error).__name__
)
async def test_a_side_effect_that_cannot_be_claimed_is_not_made(
    place: Place, worker: Make, error: BaseException
) -> None:
    paid: list[int] = []

    def pay(amount: int) -> dict[str, int]:
        """Pays."""
        paid.append(amount)
        return {"paid": amount}

    rule = {"tools": {"pay": {"once": True}}, "budgets": []}
    answers: list[Any] = []

    async def pays(plugin: RunGuardPlugin, session: str) -> None:
        model = ScriptedModel([call("pay", amount=5), text("done")])
        result = await play(plugin, model, session=session, tools=[pay])
        answers.append(
            [
                part.function_response.response
                for event in result.events
                for part in parts(event.content)
                if part.function_response
            ]
        )

    await pays(worker(Strange(place.store(), "claim", error), **rule), "closed")
    assert paid == []
    assert "cannot be checked" in json.dumps(answers[0])
    await pays(worker(Strange(place.store(), "claim", error), **rule, on_outage="open"), "open")
    assert paid == [5]


@on_a_file
@pytest.mark.parametrize("method", ["first", "beat", "get", "append"])
async def test_the_bookkeeping_survives_whatever_a_store_raises(place: Place, worker: Make, method: str) -> None:
    """Thresholds, signs of life, the look for stops and records: whatever fails there, settlements are booked
    afterwards.
    """
    thresholds = [Threshold(0.01, lambda _: None)]
    plugin = worker(
        Strange(place.store(), method, ValueError("x")),
        on_outage="open",
        budgets=[Budget(usd="1", per="user", thresholds=thresholds)],
    )
    await play(plugin, ScriptedModel([call("step", q=1), text("done")], latency_s=1.1))
    await play(plugin, steps(2), session="later")
    assert plugin.flush(10)
    session = place.connect()
    (found,) = session.read("user:app/alice")
    session.close()
    assert (found.spent[2], found.held) == (4, (0, 0, 0))


@on_a_file
async def test_a_process_that_cannot_start_a_thread_for_the_store_makes_no_call(
    place: Place, worker: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def full(thread: threading.Thread) -> None:
        if thread.name.startswith("runguard-store"):
            raise RuntimeError("can't start new thread")
        start(thread)

    model = steps(1)
    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", full)
        plugin = worker()
        for attempt in range(3):
            link_of(plugin).down_until = 0.0
            assert_refused(await play(plugin, model, session=f"{attempt}"), model, plugin, 0)
    link_of(plugin).down_until = 0.0
    assert (await play(plugin, model)).trips == []
    assert plugin.flush(10)
