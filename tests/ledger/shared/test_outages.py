"""Stores that are away or answer incorrectly."""

import asyncio
import json
import sqlite3
import threading
import time
from decimal import Decimal
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import pytest

from runguard import Budget, Threshold
from runguard.adk import RunGuardPlugin
from runguard.ledger import remote
from runguard.ledger.ledger import StoreOutage
from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, run, text
from tests.kit.money import PRICES
from tests.kit.proxy import Proxy
from tests.kit.shared_stores import (
    ALICE,
    CALL,
    DEADLINE,
    SOON,
    Make,
    Ticks,
    _in_flight,
    balance,
    ledger,
    no_secret,
    on_a_file,
    outage_lines,
    play,
    thousand,
)
from tests.kit.shared_worker import agent, steps
from tests.kit.stores import Odd, Place, greet
from tests.kit.waiting import eventually, until_async

# ---- outages --------------------------------------------------------------------------------------------------------


class Trouble:
    """A store that can be taken away and given back."""

    def __init__(self, place: Place, way: str) -> None:
        self._way, self.url = way, place.url
        self._lock: sqlite3.Connection | None = None
        if way != "locked":
            self._wire, self.url = Proxy.before(place.url)
        self.path = urlsplit(place.url).path[1:]

    def begin(self) -> None:
        if self._way == "locked":
            self._lock = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            self._lock.execute("BEGIN IMMEDIATE")
        elif self._way == "stalls":
            self._wire.stall()
        else:
            self._wire.cut()

    def end(self) -> None:
        if self._lock is not None:
            self._lock.close()
        else:
            self._wire.mend()


@pytest.fixture
def trouble(place: Place, request: pytest.FixtureRequest) -> Trouble:
    return Trouble(place, request.param)


_WAYS = [
    ("sqlite", "locked"),
    ("redis", "refuses"),
    ("redis", "stalls"),
    ("postgres", "refuses"),
    ("postgres", "stalls"),
]


every_way = pytest.mark.parametrize(("place", "trouble"), _WAYS, indirect=True, ids=["-".join(way) for way in _WAYS])


@every_way
async def test_a_store_that_goes_away_makes_no_paid_call_and_comes_back(
    place: Place, trouble: Trouble, worker: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """on_outage="closed", the default:

    in the middle of a run, at the beginning of the next, and over with the outage.
    """
    plugin = worker(url=trouble.url, usd="1", store_timeout=DEADLINE)
    greet(ledger(plugin))
    model = steps(5)

    async def last_step(q: int) -> dict[str, int]:
        if q == 2:
            await asyncio.to_thread(trouble.begin)
        return {"done": q}

    last_step.__name__ = "step"
    async with Ticks() as ticks:
        begun = time.monotonic()
        result = await play(plugin, model, tools=[last_step])
        assert time.monotonic() - begun < SOON
        trip = assert_stopped(result, "guard_error")
        assert (model.calls, trip.scope) == (2, "run")
        assert_calls_answered(result.session)
        refused, begun = steps(1), time.monotonic()
        assert_stopped(await play(plugin, refused, session="new"), "guard_error")
        assert time.monotonic() - begun < SOON
        assert refused.calls == 0
    assert ticks.longest < 0.8 * DEADLINE, "nobody waits for a store on the event loop"
    assert plugin.guard.accounts.outages == {"closed": 2, "open": 0}
    trouble.end()
    assert await asyncio.to_thread(eventually, lambda: asyncio.run(_works(plugin)))
    assert plugin.flush(10)
    again = steps(3)
    assert (await play(plugin, again, session="again", user="bob")).texts == ["done"]
    assert plugin.flush(10)
    spent, held, calls = balance(place)
    assert (held, spent) == (Decimal(0), calls * CALL), "what was made is booked, what was not is not held"
    assert calls >= 3
    assert balance(place, "user:app/bob") == (3 * CALL, Decimal(0), 3)
    assert len(outage_lines(caplog)) == 1
    assert no_secret(caplog.text)
    assert no_secret(json.dumps(trip.to_dict()))


async def _works(plugin: RunGuardPlugin) -> bool:
    model = steps(1)
    await play(plugin, model, session="does it work")
    return model.calls == 1


@every_way
async def test_a_store_that_goes_away_is_told_later_what_was_spent_meanwhile(
    place: Place, trouble: Trouble, worker: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """on_outage="open": the run goes on, and every call of it is on the account in the end."""
    plugin = worker(url=trouble.url, usd="1", store_timeout=DEADLINE, on_outage="open")
    greet(ledger(plugin))
    model = steps(5)

    async def last_step(q: int) -> dict[str, int]:
        if q == 2:
            await asyncio.to_thread(trouble.begin)
        return {"done": q}

    last_step.__name__ = "step"
    async with Ticks() as ticks:
        begun = time.monotonic()
        result = await play(plugin, model, tools=[last_step])
        assert time.monotonic() - begun < SOON
        assert (model.calls, result.texts, result.trips) == (5, ["done"], [])
        assert (await play(plugin, steps(2), session="new")).texts == ["done"]
    assert ticks.longest < 0.8 * DEADLINE
    assert plugin.guard.accounts.outages == {"closed": 0, "open": 5}
    assert not plugin.flush(0.1), "there is something left to tell"
    trouble.end()
    assert plugin.flush(15)
    assert eventually(lambda: balance(place) == (7 * CALL, Decimal(0), 7)), balance(place)
    assert ledger(plugin).health()["lost"] == 0
    assert len(outage_lines(caplog)) == 1
    assert no_secret(caplog.text)


@pytest.mark.parametrize("place", ["redis"], indirect=True)
@pytest.mark.parametrize("on_outage", ["closed", "open"])
async def test_a_real_server_that_stalls_keeps_nothing_reserved(place: Place, on_outage: str) -> None:
    """It reads and carries out what its clients sent before they gave up, as soon as it can again."""
    from tests.kit.valkey_server import valkey_process

    with valkey_process() as server, mock.patch.dict(remote._open, clear=True):
        policy: dict[str, Any] = {
            "prices": PRICES,
            "tokens": thousand,
            "store": server.url,
            "store_timeout": DEADLINE,
            "on_outage": on_outage,
        }
        plugin = RunGuardPlugin(budgets=[Budget(usd=1, per="user")], **policy)
        greet(ledger(plugin))
        await play(plugin)
        assert plugin.flush(5)
        with server.stalled():
            await asyncio.sleep(0.1)
            model = steps(1)
            await play(plugin, model)
            assert model.calls == (1 if on_outage == "open" else 0)
        assert plugin.flush(10)
        await asyncio.sleep(0.5)
        assert plugin.flush(10)
        (status,) = plugin.budgets(ALICE)
        assert (status.spent, status.reserved) == ((1 + model.calls) * CALL, 0)


@pytest.mark.parametrize("place", ["redis"], indirect=True)
async def test_a_server_that_crashes_and_comes_back_with_its_data_is_told_the_rest(place: Place) -> None:
    from tests.kit.valkey_server import valkey_process

    with (
        valkey_process("--appendonly", "yes", "--appendfsync", "always") as server,
        mock.patch.dict(remote._open, clear=True),
    ):
        policy: dict[str, Any] = {
            "prices": PRICES,
            "tokens": thousand,
            "store": server.url,
            "store_timeout": DEADLINE,
            "on_outage": "open",
        }
        plugin = RunGuardPlugin(budgets=[Budget(usd=1, per="user")], **policy)
        greet(ledger(plugin))
        await play(plugin, steps(3))
        assert plugin.flush(5)
        server.stop()
        await play(plugin, steps(2))
        server.start()
        assert plugin.flush(10)
        assert await asyncio.to_thread(
            eventually, lambda: [(s.spent, s.reserved) for s in plugin.budgets(ALICE)] == [(5 * CALL, 0)]
        )


@pytest.mark.parametrize("place", ["redis", "postgres"], indirect=True)
async def test_a_long_outage_is_logged_once_although_a_run_goes_on_beating(
    place: Place, worker: Make, caplog: pytest.LogCaptureFixture
) -> None:
    trouble = Trouble(place, "refuses")
    plugin = worker(url=trouble.url, usd="1", store_timeout=DEADLINE)
    greet(ledger(plugin))
    model = ScriptedModel([text("done")], latency_s=2.3)
    running = asyncio.create_task(play(plugin, model))
    await _in_flight(model)
    trouble.begin()
    assert (await running).texts == ["done"], "a call that was let through is answered whatever the store does"
    assert len(outage_lines(caplog)) == 1
    trouble.end()
    assert plugin.flush(10)
    assert balance(place) == (CALL, Decimal(0), 1)


@pytest.mark.parametrize("place", ["redis", "postgres"], indirect=True)
async def test_whoever_looks_in_while_the_store_is_away_gets_an_answer(worker: Make, place: Place) -> None:
    """A snapshot is for monitors: it says what this process knows, now."""
    trouble = Trouble(place, "refuses")
    plugin = worker(url=trouble.url, usd="1", store_timeout=DEADLINE)
    await play(plugin, steps(2))
    assert plugin.flush(5)
    trouble.begin()
    begun = time.monotonic()
    snapshot = plugin.snapshot()
    assert time.monotonic() - begun < SOON
    assert (snapshot["runs"], snapshot["guard_errors"]) == ([], 0)
    begun = time.monotonic()
    with pytest.raises(StoreOutage) as raised:  # a stop that nobody heard must not look like one
        plugin.stop("all", actor="ops", reason="fire")
    assert time.monotonic() - begun < SOON
    assert no_secret(str(raised.value))
    trouble.end()


# ---- stores that answer oddly: what the ledger makes of it is the same for every store ------------------------------


@on_a_file
async def test_a_reservation_that_is_granted_after_the_deadline_is_given_back(place: Place, worker: Make) -> None:
    goes_on = threading.Event()

    def hang(number: int) -> None:
        if number == 2:
            goes_on.wait(30)

    odd = Odd(place.store(), reserve=hang)
    plugin = worker(odd, usd="1", store_timeout=0.4)
    greet(ledger(plugin))
    await play(plugin)
    begun, model = time.monotonic(), steps(1)
    assert_stopped(await play(plugin, model, session="late"), "guard_error")
    assert time.monotonic() - begun < 0.8 + SOON
    assert model.calls == 0
    goes_on.set()
    await until_async(lambda: odd.answered["reserve"] == 2)
    assert plugin.flush(10)
    assert balance(place) == (CALL, Decimal(0), 1)


@on_a_file
async def test_a_reservation_whose_caller_was_cancelled_is_given_back(place: Place, worker: Make) -> None:
    goes_on = threading.Event()

    def hang(number: int) -> None:
        goes_on.wait(30)

    odd = Odd(place.store(), reserve=hang)
    plugin = worker(odd, usd="1")
    greet(ledger(plugin))
    model = steps(1)
    running = asyncio.create_task(play(plugin, model))
    await until_async(lambda: odd.asked["reserve"])
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    goes_on.set()
    await until_async(lambda: odd.answered["reserve"])
    assert plugin.flush(10)
    assert model.calls == 0
    assert balance(place) == (Decimal(0), Decimal(0), 0)


@on_a_file
async def test_a_threshold_that_could_not_be_asked_about_fires_with_the_next_call(place: Place, worker: Make) -> None:
    """The store was away between the settlement that reached it and the question who tells."""

    def away(number: int) -> None:
        if number == 1:
            raise StoreOutage("away for a moment")

    fired: list[Decimal] = []
    odd = Odd(place.store(), first=away)
    plugin = worker(
        odd, usd="0.20", thresholds=[Threshold(0.3, lambda status: fired.append(status.spent))], on_outage="open"
    )
    await play(plugin, steps(5))
    assert plugin.flush(10)
    assert odd.asked["first"] >= 2
    assert fired == [Decimal("0.08")]


@on_a_file
async def test_a_fault_in_what_the_heart_tells_does_not_end_the_bookkeeping(place: Place, worker: Make) -> None:
    """The writer asks the guards for their runs, whose state changes under its eyes; whatever that raises, it must go
    on booking.
    """
    asked: list[str] = []

    def clock() -> float:
        if model.calls == 1 and threading.current_thread().name.startswith("runguard-store"):
            asked.append("by the writer")
            raise RuntimeError("a clock that belongs to another thread")
        return time.time()  # noqa: TID251

    plugin, model = worker(usd="1", clock=clock), ScriptedModel([call("step", q=1), text("done")], latency_s=1.2)
    result = await play(plugin, model)
    assert result.texts == ["done"]
    assert asked, "the heart has beaten"
    await play(plugin, steps(2), session="later")
    assert plugin.flush(10)
    assert balance(place) == (4 * CALL, Decimal(0), 4)


@on_a_file
async def test_a_side_effect_that_failed_can_be_tried_again_at_once_however_slow_the_records_are(
    place: Place, worker: Make
) -> None:
    done: list[int] = []

    def pay(amount: int) -> dict[str, int]:
        """Pays."""
        done.append(amount)
        if len(done) == 1:
            raise ConnectionError("the line broke")
        return {"paid": amount}

    plugin = worker(Odd(place.store(), append=lambda _: time.sleep(0.3)), tools={"pay": {"once": True}})
    model = ScriptedModel([call("pay", amount=5), call("pay", amount=5), call("pay", amount=5), text("done")])
    root = agent(
        model, tools=[pay], on_tool_error_callback=lambda tool, args, tool_context, error: {"error": str(error)}
    )
    await run(root, plugins=[plugin])
    assert done == [5, 5], "failed, then done; the third is refused"
