"""Many sessions and processes on one store."""

import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from runguard.core.money import NOTHING, UNLIMITED
from runguard.ledger.ledger import StoreSession
from tests.kit.conformance import (
    CALL,
    LONG_S,
    SHORT_S,
    THREADS,
    Connect,
    Worker,
    a_line,
    an_id,
    calls,
    of,
    past,
    the,
)
from tests.kit.waiting import PATIENCE_S, at_once

# ---- many at once ---------------------------------------------------------------------------------------------------


@pytest.fixture
def sessions(connect: Connect) -> list[StoreSession]:
    return [connect() for _ in range(THREADS)]


def test_sixteen_threads_on_a_budget_of_five_never_make_a_sixth_call(sessions: list[StoreSession]) -> None:
    """Who checks first and adds later overspends a small budget by three quarters."""
    for turn in range(10):
        line = a_line(f"{turn}#", calls(5))
        won = at_once(partial(lambda line, number: sessions[number].reserve(an_id(), LONG_S, [line], CALL).ok, line))
        assert sum(won) == 5
        assert the(sessions[0], line.key).held == (0, 0, 5)


def test_holds_that_are_settled_and_released_at_once_add_up_exactly(sessions: list[StoreSession]) -> None:
    line = a_line(caps=(400, UNLIMITED, UNLIMITED))

    def work(number: int) -> tuple[int, int]:
        spent = most = 0
        for turn in range(12):
            if (reply := sessions[number].reserve(hold := an_id(), LONG_S, [line], (10, 10, 1))).ok:
                most = max(most, of(reply).spent[0] + of(reply).held[0])
                if turn % 3 == 0:
                    sessions[number].release(hold)
                else:
                    sessions[number].settle(hold, [line], (number % 10, 1, 1))
                    spent += number % 10
        return spent, most

    results = at_once(work)
    balance = the(sessions[0])
    assert (balance.spent[0], balance.held) == (sum(spent for spent, _ in results), NOTHING)
    assert max(most for _, most in results) <= 400
    assert not balance.closed


def test_opposite_orders_of_lines_do_not_lock_each_other_out(sessions: list[StoreSession]) -> None:
    lines = [a_line("a#"), a_line("b#"), a_line("c#")]

    def work(number: int) -> None:
        mine = lines if number % 2 else lines[::-1]
        for _ in range(10):
            hold = an_id()
            assert sessions[number].reserve(hold, LONG_S, mine, CALL).ok
            sessions[number].settle(hold, mine, CALL)
            sessions[number].settle(an_id(), mine[::-1], CALL)

    at_once(work)
    assert [balance.spent for balance in sessions[0].read()] == [(0, 0, THREADS * 20)] * 3


def test_one_hold_settled_by_many_at_once_is_booked_once(sessions: list[StoreSession]) -> None:
    sessions[0].reserve("h", LONG_S, [a_line()], CALL)
    at_once(lambda number: sessions[number].settle("h", [a_line()], (7, 7, 1)))
    at_once(lambda number: sessions[number].settle("unknown", [a_line()], (7, 7, 1)))
    assert (the(sessions[0]).spent, the(sessions[0]).held) == ((14, 14, 2), NOTHING)


def test_one_id_reserved_by_many_at_once_holds_once(sessions: list[StoreSession]) -> None:
    assert all(at_once(lambda number: sessions[number].reserve("h", LONG_S, [a_line()], CALL).ok))
    assert the(sessions[0]).held == CALL


def test_an_expired_hold_that_many_find_at_once_is_charged_once(sessions: list[StoreSession]) -> None:
    for _ in range(5):
        past(sessions[0], a_line(), CALL)
    at_once(
        lambda number: (
            sessions[number].read() if number % 2 else sessions[number].reserve(an_id(), LONG_S, [a_line("b#")], CALL)
        )
    )
    assert (the(sessions[0]).spent, the(sessions[0]).expired, the(sessions[0]).held) == ((0, 0, 5), (0, 0, 5), NOTHING)


def test_put_loses_no_update(sessions: list[StoreSession]) -> None:
    def add(number: int) -> None:
        for _ in range(5):
            while True:
                version, text = sessions[number].get("sum")
                if sessions[number].put("sum", version, f"{int(text or 0) + 1}"):
                    break

    at_once(add)
    assert sessions[0].get("sum") == (THREADS * 5, f"{THREADS * 5}")


def test_a_claim_has_one_winner_also_when_the_last_ones_time_is_over(sessions: list[StoreSession]) -> None:
    for turn in range(5):
        if turn % 2:
            sessions[0].claim(f"c{turn}", SHORT_S)
            time.sleep(0.02)
        assert sorted(at_once(partial(lambda key, number: sessions[number].claim(key, LONG_S), f"c{turn}"))) == [
            "pending"
        ] * (THREADS - 1) + ["yes"]


def test_no_record_is_lost_when_many_write(sessions: list[StoreSession]) -> None:
    def write(number: int) -> None:
        for turn in range(5):
            sessions[number].append("alert", f"{number}", f"{turn}")

    at_once(write)
    told = sessions[0].tail("alert", 1000)
    assert sorted((ref, text) for _, ref, text in told) == sorted(
        (f"{n}", f"{turn}") for n in range(THREADS) for turn in range(5)
    )
    for number in range(THREADS):  # each writer's own records keep their order
        assert [text for _, ref, text in told if ref == f"{number}"] == [f"{turn}" for turn in range(5)]


# ---- other processes ------------------------------------------------------------------------------------------------


HOLDER = """
session = store.connect(20)
session.settle("before", [line("k#")], (1, 1, 1))
session.reserve("orphan", 2.0, [line("k#")], (10, 10, 1))
say("held")
time.sleep(60)
"""


def test_the_hold_of_a_killed_worker_is_charged_at_its_time_and_a_late_bill_corrects_it(
    place: Any, session: StoreSession
) -> None:
    """kill -9 between reserve and settle: one call too many is counted, never one too few."""
    with Worker(place, HOLDER) as doomed:
        assert doomed.told() == "held"
        held = the(session)
    assert (held.spent, held.held) == ((1, 1, 1), (10, 10, 1))
    deadline = time.monotonic() + PATIENCE_S
    while the(session).held != NOTHING and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (the(session).spent, the(session).held, the(session).expired) == ((11, 11, 2), NOTHING, (10, 10, 1))
    late = of(session.settle("orphan", [a_line()], (3, 3, 1)))
    assert (late.spent, late.expired) == ((4, 4, 2), NOTHING)


SPENDER = """
log, dice, number = os.open(bills, os.O_WRONLY | os.O_APPEND | os.O_CREAT), random.Random(os.getpid()), 0
pot, own = line("pot#", (UNLIMITED, cap, UNLIMITED)), line(f"own{os.getpid()}#")
session = store.connect(20)
while True:
    number += 1
    hold = f"{os.getpid()}.{number}"
    if session.reserve(hold, ttl, [pot, own], (0, 10, 1)).ok:
        took = dice.randint(1, 10)
        os.write(log, f"{took}\\n".encode())  # the provider's bill: it outlives any of us
        time.sleep(0.002)
        session.settle(hold, [pot, own], (0, took, 1))
"""


def test_workers_killed_at_random_overspend_nothing_and_lose_nothing(
    place: Any, session: StoreSession, tmp_path: Path
) -> None:
    cap, ttl, kills, dice, bills = 4_000, 0.8, 0, random.Random(3), tmp_path / "bills"
    facts = {"cap": cap, "ttl": ttl, "bills": str(bills)}
    spenders = [Worker(place, SPENDER, **facts) for _ in range(3)]
    try:
        end = time.monotonic() + 1.5
        while time.monotonic() < end or kills < 8:
            time.sleep(dice.choice([0.001, 0.03, 0.1, 0.2]))  # some die while they connect
            victim = dice.randrange(3)
            spenders[victim].kill()
            kills += 1
            spenders[victim] = Worker(place, SPENDER, **facts)
        while time.monotonic() < end + 20 and len(bills.read_text().split() if bills.exists() else ()) <= kills + 3:
            time.sleep(0.05)  # on a busy machine each was killed before it could work
    finally:
        for spender in spenders:
            spender.kill()
            kills += 1
    time.sleep(ttl + 0.1)
    pot = a_line("pot#", (UNLIMITED, cap, UNLIMITED))
    left = 0  # whoever comes after them spends the rest
    while session.reserve(hold := an_id(), LONG_S, [pot], (0, 10, 1)).ok:
        session.settle(hold, [pot], (0, 10, 1))
        left += 1
    billed = [int(bill) for bill in bills.read_text().split()]
    there = the(session, "pot#")
    assert len(billed) > kills, "they hardly worked"
    assert sum(billed) + 10 * left <= cap  # overspend: none
    assert cap - 10 < there.spent[1] <= cap
    assert there.held == NOTHING
    assert there.spent[1] >= sum(billed) + 10 * left  # what was billed is in the books
    assert there.spent[2] - len(billed) - left <= kills  # counted too much: at most one call for each kill
    assert there.expired[2] <= kills
    own = [balance for balance in session.read() if balance.key.startswith("own")]
    assert sum(balance.spent[2] for balance in own) == there.spent[2] - left  # all lines or none
    assert all(balance.held == NOTHING and not balance.closed for balance in own)
