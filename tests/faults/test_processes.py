"""Workers and servers that are killed with kill -9, or stopped and continued later than anybody waits for them.

Workers are real processes on real ADK that share one budget. The cap holds all the time; what a worker reported as done
is booked; a call of a worker that was killed is charged at its estimate once its hold is over; nothing stays held.
``RUNGUARD_FAULTS_SEED`` chooses another schedule.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from runguard.core.money import NOTHING
from runguard.ledger.memory import store_of
from tests.kit import postgres_server, valkey_server
from tests.kit.processes import Process

from .crew import CALL_NANO, account

SEED = os.environ.get("RUNGUARD_FAULTS_SEED", "1")
HOLD_S = 0.6
LATENCY_S = 0.1
Make = Callable[[], Process]


def opened(make: Make, url: str, cap: int, **policy: Any) -> Process:
    worker = make()
    worker.do(
        "open", url=url, usd=str(cap * 0.02), hold_seconds=HOLD_S, on_outage="closed", max_wait_seconds=0.2, **policy
    )
    return worker


def booked(url: str) -> Any:
    """The account when every hold is over: settled, given back or charged."""
    time.sleep(HOLD_S + 0.1)
    return account(store_of(url).connect(10.0))


# ---- workers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["sqlite", "redis", "postgres"], indirect=True)
@pytest.mark.timeout(300)
def test_a_worker_that_is_stopped_longer_than_its_hold_lives_settles_late_and_is_counted_once(
    place: Any, process: Make, is_long: bool
) -> None:
    cap = 40 if is_long else 4
    place.connect().close()
    late, other = opened(process, place.url, cap), opened(process, place.url, cap)
    made = 0
    for turn in range(cap // 2):
        late.do("run", session=f"late {turn}", calls=1, latency=LATENCY_S, wait=False)
        while not late.do("made", session=f"late {turn}"):
            time.sleep(0.005)  # the call is under way: its money is held
        os.kill(late.pid, signal.SIGSTOP)
        try:
            time.sleep(HOLD_S + 0.1)
            made += other.do("run", session=f"other {turn}", calls=1)["calls"]
            assert other.do("flush", seconds=20)
            charged = account(place.connect())
            assert charged.held == NOTHING, "the hold is over: its call may have been billed"
            assert charged.spent[2] == made + 1
        finally:
            os.kill(late.pid, signal.SIGCONT)
        made += late.do("join", session=f"late {turn}")["calls"]
        assert late.do("flush", seconds=20)
    assert made == cap
    assert other.do("run", session="one too many", calls=1)["trips"], "the budget is spent"
    books = booked(place.url)
    assert (books.spent[0], books.spent[2], books.held) == (cap * CALL_NANO, cap, NOTHING)


@pytest.mark.parametrize("place", ["sqlite", "redis", "postgres"], indirect=True)
@pytest.mark.timeout(600)
def test_workers_that_are_killed_leave_a_budget_that_nobody_passes(place: Any, process: Make, is_long: bool) -> None:
    """Each round some of the workers are killed in the middle of a call.

    What they had under way is charged, one call at most for each lane.
    """
    chance, cap, lanes = random.Random(f"{SEED} {place.kind}"), 400 if is_long else 60, 2
    place.connect().close()
    crew, reported, killed = [opened(process, place.url, cap) for _ in range(3)], 0, 0
    for turn in range(12 if is_long else 3):
        for worker in crew:
            for lane in range(lanes):
                worker.do("run", session=f"{turn} {lane}", calls=2, latency=chance.uniform(0, LATENCY_S), wait=False)
        time.sleep(chance.uniform(0.02, LATENCY_S))
        for n, worker in enumerate(crew):
            if chance.random() < 0.4:
                worker.kill()
                killed += 1
                crew[n] = opened(process, place.url, cap)
            else:
                reported += sum(worker.do("join", session=f"{turn} {lane}")["calls"] for lane in range(lanes))
                assert worker.do("flush", seconds=20)
    books = booked(place.url)
    print(f"{place.kind}: {reported} calls reported, {killed} workers killed, {books.spent[2]} calls booked of {cap}")
    assert killed
    assert books.held == NOTHING
    assert reported <= books.spent[2] <= min(cap, reported + killed * lanes * 2), (
        "calls of killed workers count, and nothing else does"
    )
    assert books.spent[0] == books.spent[2] * CALL_NANO, "a call costs what was held for it"
    left = crew[0].do("run", session="the rest", calls=cap)["calls"]
    assert books.spent[2] + left == cap, "exactly the rest of the budget can be spent"


# ---- servers --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def durable_server(kind: str) -> Iterator[Any]:
    """A server that loses nothing that it confirmed when it is killed."""
    if kind == "redis":
        with valkey_server.valkey_process("--appendonly", "yes", "--appendfsync", "always") as server:
            yield server
    else:
        with postgres_server.server() as server:
            yield server


def kill(kind: str, server: Any) -> None:
    if kind == "redis":
        server.stop()  # kill -9
    else:
        for pid in server.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        (server.data / "postmaster.pid").unlink(missing_ok=True)


@pytest.mark.parametrize("kind", ["redis", "postgres"])
@pytest.mark.timeout(600)
def test_a_server_that_is_killed_or_stalled_under_its_workers_loses_no_settlement(
    kind: str, process: Make, is_long: bool
) -> None:
    chance, cap, made = random.Random(f"{SEED} {kind}"), 10_000, 0
    with durable_server(kind) as server:
        store_of(server.url).connect(10.0).close()
        crew = [opened(process, server.url, cap) for _ in range(2)]
        for turn in range(10 if is_long else 2):
            for worker in crew:
                worker.do("run", session=f"{turn}", calls=30, latency=0.01, wait=False)
            time.sleep(chance.uniform(0.05, 0.3))
            if turn % 2:
                with server.stalled():
                    time.sleep(chance.uniform(0.1, 2 * HOLD_S))
            else:
                kill(kind, server)
                time.sleep(chance.uniform(0, 0.3))
                server.start()
            made += sum(worker.do("join", session=f"{turn}")["calls"] for worker in crew)
            for worker in crew:
                assert worker.do("flush", seconds=30), "settlements are booked when the server is back"
        books = booked(server.url)
        print(f"{kind}: {made} calls made, {books.spent[2]} booked")
        assert made
        assert (books.spent[0], books.spent[2], books.held) == (made * CALL_NANO, made, NOTHING)
