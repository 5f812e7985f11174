"""The threads of a shared ledger survive every exception, are started again when they end, and lose no settlement."""

import asyncio
import ctypes
import logging
import random
import sys
import threading
import time
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from unittest import mock

import pytest

from runguard import Budget
from runguard.adk import RunGuardPlugin
from runguard.ledger import remote
from runguard.ledger import write_queue as fact_writer
from runguard.ledger.ledger import Hold, Store, StoreError, StoreOutage, StoreSession
from runguard.testing import ScriptedModel, call, run, text
from tests.kit.money import PRICES
from tests.kit.shared_worker import agent
from tests.kit.stores import Place
from tests.kit.tools import step
from tests.kit.waiting import eventually

CALL = Decimal("0.02")
CENT = (10_000_000, 0, 1)
CAP = (10**12, 10**9, 10**6)
LONG = 20.0  # seconds, far beyond anything that works
UNFORESEEN = [KeyError, MemoryError, SystemExit, asyncio.CancelledError, GeneratorExit]


class Faulty:
    """A real store whose sessions raise what they are told to, before or after the real work."""

    def __init__(self, store: Store) -> None:
        self._store, self.name, self.durable = store, store.name, store.durable
        self.raised: list[str] = []
        self.slow: dict[str, float] = {}  # seconds by method
        self._plan: dict[str, list[tuple[BaseException, bool]]] = {}

    def plan(self, method: str, error: BaseException, *, after: bool = False, times: int = 1) -> None:
        self._plan.setdefault(method, []).extend([(error, after)] * times)

    def connect(self, timeout: float) -> StoreSession:
        return _FaultySession(self, self._store.connect(timeout))

    def meet(self, method: str, after: bool) -> None:
        if not after:
            time.sleep(self.slow.get(method, 0.0))
        planned = self._plan.get(method)
        if planned and planned[0][1] is after and threading.current_thread().name.startswith("runguard-store"):
            self.raised.append(method)
            raise planned.pop(0)[0]


class _FaultySession:
    def __init__(self, faulty: Faulty, session: StoreSession) -> None:
        self._faulty, self._session = faulty, session

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._session, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            self._faulty.meet(name, False)
            answer = method(*args, **kwargs)
            self._faulty.meet(name, True)
            return answer

        return called


@pytest.fixture
def faulty(place: Place) -> Faulty:
    if place.kind == "postgres":
        place.connect().close()  # the schema is made once, and not within the deadline of a call
    return Faulty(place.store())


@pytest.fixture
def ledger(faulty: Faulty) -> Iterator[remote.StoreLedger]:
    made = remote.StoreLedger(faulty, 5.0)
    yield made
    made.flush(2)


on_a_file = pytest.mark.parametrize("place", ["sqlite"], indirect=True)
unforeseen = pytest.mark.parametrize("error", UNFORESEEN, ids=lambda error: error.__name__)
of_two_kinds = pytest.mark.parametrize("error", [MemoryError, SystemExit], ids=lambda error: error.__name__)


def plugin_on(place: Place, faulty: Faulty) -> RunGuardPlugin:
    with mock.patch.dict(remote._open, {place.url: remote.StoreLedger(faulty, 5.0)}, clear=True):
        return RunGuardPlugin(
            prices=PRICES,
            tokens=lambda _: 1_000,
            store=place.url,
            store_timeout=5.0,
            budgets=[Budget(usd=1, per="user")],
        )


def balance(place: Place, scope: str) -> tuple[Decimal, Decimal, int]:
    session = place.connect()
    try:
        (found,) = session.read(scope)
    finally:
        session.close()
    return Decimal(found.spent[0]) / 10**9, Decimal(found.held[0]) / 10**9, found.spent[2]


async def held(ledger: remote.StoreLedger, scope: str = "user:app/alice") -> Hold:
    hold = await ledger.reserve([ledger.account(f"{scope}#", scope, None, None, CAP)], CENT)
    assert isinstance(hold, Hold)
    return hold


# ---- an exception inside of a thread --------------------------------------------------------------------------------


@of_two_kinds
@pytest.mark.parametrize("method", ["beat", "get"])
async def test_a_run_in_which_the_writer_meets_a_fault_is_booked_exactly_once(
    place: Place, faulty: Faulty, monkeypatch: pytest.MonkeyPatch, method: str, error: type[BaseException]
) -> None:
    """In its signs of life, or between two of them, when it looks for stops."""
    monkeypatch.setattr(fact_writer, "_BEAT_S", 0.02)
    plugin = plugin_on(place, faulty)
    faulty.slow["beat"] = 0.03  # so that it looks for stops in between
    faulty.plan(method, error("in the writer"))
    model = ScriptedModel(lambda n, _: call("step", q=n) if n < 4 else text("done"), latency_s=0.1)
    await run(agent(model, tools=[step]), plugins=[plugin], user_id="alice", session_id="s")
    assert faulty.raised == [method]
    assert plugin.flush(LONG)
    assert balance(place, "user:app/alice") == (model.calls * CALL, Decimal(0), model.calls)
    assert plugin.snapshot()["store"]["faults"] >= 1
    assert plugin.snapshot()["store"]["lost"] == 0


@of_two_kinds
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_settlement_that_met_a_fault_is_booked_exactly_once(
    place: Place, faulty: Faulty, ledger: remote.StoreLedger, error: type[BaseException], after: bool
) -> None:
    told: list[int] = []
    faulty.plan("settle", error("in the middle"), after=after)
    for number in range(3):
        ledger.settle(await held(ledger), CENT, lambda number=number: told.append(number))  # type: ignore[misc]
    assert ledger.flush(LONG)
    assert faulty.raised == ["settle"]
    assert balance(place, "user:app/alice") == (Decimal("0.03"), Decimal(0), 3)
    assert told == [0, 1, 2], "each is told once that it is booked"


@on_a_file
@unforeseen
async def test_a_fault_of_whoever_is_told_that_it_is_booked_loses_nothing(
    place: Place, faulty: Faulty, ledger: remote.StoreLedger, error: type[BaseException]
) -> None:
    told: list[str] = []

    def broken() -> None:
        told.append("broken")
        raise error("a threshold's callback")

    ledger.settle(await held(ledger), CENT, broken)
    ledger.settle(await held(ledger), CENT, lambda: told.append("next"))
    assert ledger.flush(LONG)
    assert told == ["broken", "next"]
    assert balance(place, "user:app/alice") == (Decimal("0.02"), Decimal(0), 2)
    assert ledger.health()["lost"] == 0


@on_a_file
@unforeseen
async def test_a_reservation_that_met_a_fault_is_refused_and_holds_nothing(
    place: Place, faulty: Faulty, ledger: remote.StoreLedger, error: type[BaseException]
) -> None:
    """On as many threads as there are: none of them may be gone afterwards."""
    ledger.settle(await held(ledger), CENT)
    for _ in range(8):
        faulty.plan("reserve", error("on an asking thread"), after=True)
        with pytest.raises((error, StoreOutage, StoreError)) as raised:
            await held(ledger)
        assert isinstance(raised.value, Exception), "an exit of a thread must not become an exit of the program"
        ledger.link.down_until = 0.0
    ledger.settle(await held(ledger), CENT)
    assert ledger.flush(LONG)
    assert balance(place, "user:app/alice") == (Decimal("0.02"), Decimal(0), 2)


@on_a_file
async def test_a_settlement_that_can_never_be_booked_is_counted_and_the_next_ones_are_booked(
    place: Place, faulty: Faulty, ledger: remote.StoreLedger, caplog: pytest.LogCaptureFixture
) -> None:
    first = await held(ledger)
    others = [await held(ledger) for _ in range(3)]
    faulty.plan("settle", LookupError("no such thing"), times=fact_writer.TRIES)
    with caplog.at_level(logging.ERROR, "runguard"):
        for hold in (first, *others):
            ledger.settle(hold, CENT)
        assert not ledger.flush(LONG), "it says that not everything is booked"
    assert ledger.health()["lost"] == 1
    assert ledger.health()["waiting"] == 0
    assert [record.getMessage() for record in caplog.records if "could not be booked" in record.getMessage()]
    assert balance(place, "user:app/alice") == (Decimal("0.03"), Decimal("0.01"), 3), (
        "its hold stays, and is charged when it expires"
    )


@on_a_file
async def test_a_record_that_met_a_fault_is_not_written_twice(
    place: Place, faulty: Faulty, ledger: remote.StoreLedger
) -> None:
    faulty.plan("append", SystemExit("after it was written"), after=True)
    for word in ("one", "two"):
        ledger.tell(lambda session, word=word: session.append("k", "ref", word))  # type: ignore[misc]
    eventually(lambda: ledger.health()["waiting"] == 0)
    session = place.connect()
    assert [word for _, _, word in session.tail("k", 10)] == ["one", "two"]
    session.close()


@on_a_file
async def test_a_logger_that_raises_does_not_end_the_writer(
    place: Place, faulty: Faulty, ledger: remote.StoreLedger
) -> None:
    def broken(_: logging.LogRecord) -> bool:
        raise SystemExit("a filter of the application")

    logging.getLogger("runguard").addFilter(broken)
    try:
        faulty.plan("settle", MemoryError("no room"), times=2)
        ledger.settle(await held(ledger), CENT)
        assert ledger.flush(LONG)
    finally:
        logging.getLogger("runguard").removeFilter(broken)
    assert balance(place, "user:app/alice") == (Decimal("0.01"), Decimal(0), 1)


# ---- a thread that is gone ------------------------------------------------------------------------------------------


@on_a_file
async def test_a_writer_that_ended_is_started_again_and_books_what_waits(
    place: Place, faulty: Faulty, ledger: remote.StoreLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(fact_writer.FactWriter, "work", lambda *_: ended.set())
        hold = await held(ledger)
        assert ended.wait(LONG)
        ledger._threads[-1].join(LONG)
        ended.clear()
        ledger.settle(hold, CENT)
        assert ended.wait(LONG), "the settlement has found out"
        ledger._threads[-1].join(LONG)
        assert not ledger.flush(0.05), "a flush does not say that what waits is booked"
        assert ledger.health()["waiting"] == 1
    assert ledger.flush(LONG)
    assert balance(place, "user:app/alice") == (Decimal("0.01"), Decimal(0), 1)
    assert ledger.health()["restarts"] >= 1


@on_a_file
async def test_asking_threads_that_ended_are_started_again(
    place: Place, faulty: Faulty, ledger: remote.StoreLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(remote.StoreLedger, "_answer_jobs", lambda _: None)
        ledger.tell(lambda session: session.now())
        assert ledger.flush(LONG)
        for thread in ledger._threads[:-1]:
            thread.join(LONG)
    ledger.settle(await held(ledger), CENT)
    assert ledger.flush(LONG)
    assert balance(place, "user:app/alice") == (Decimal("0.01"), Decimal(0), 1)


@on_a_file
async def test_where_no_thread_can_be_started_a_settlement_waits_and_a_reservation_is_an_outage(
    place: Place, faulty: Faulty, ledger: remote.StoreLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    accounts = [ledger.account("user:app/alice#", "user:app/alice", None, None, CAP)]

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        ledger.settle(ledger.book(accounts), CENT)
        with pytest.raises(StoreOutage, match="thread"):
            await held(ledger)
        assert not ledger.flush(0.05)
    assert ledger.flush(LONG)
    assert balance(place, "user:app/alice") == (Decimal("0.01"), Decimal(0), 1)


@pytest.mark.skipif(sys.gettrace() is not None, reason="a tracer slows the writer: every try of a settlement is struck")
@on_a_file
async def test_wherever_an_exception_strikes_the_writer_every_settlement_is_booked_once(
    place: Place, faulty: Faulty, ledger: remote.StoreLedger
) -> None:
    """Asynchronous exceptions between any two instructions of the writer's thread."""
    holds, struck, dice = [await held(ledger) for _ in range(300)], 0, random.Random(7)
    for hold in holds:
        ledger.settle(hold, CENT)
        if dice.random() < 0.3:
            writer = ledger._threads[-1]
            assert writer.ident is not None
            error = dice.choice([KeyError, MemoryError, SystemExit])
            struck += ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(writer.ident), ctypes.py_object(error))
            await asyncio.sleep(dice.random() * 0.003)
    assert struck > 50
    assert ledger.flush(LONG)
    assert balance(place, "user:app/alice") == (Decimal(3), Decimal(0), 300)
