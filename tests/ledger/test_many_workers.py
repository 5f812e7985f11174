"""Sixty-four workers on a budget of five calls, round after round, on every ledger: never a sixth call, and exactly
five every time.

A worker is a thread with an event loop of its own; on a store, eight processes have eight of them each. All ask in the
same moment. Whoever is refused waits as long as waiting can help, and some who got leave give it back: their place must
find another.
"""

import asyncio
import threading
from multiprocessing.connection import Connection
from typing import Any

from runguard.core.money import NOTHING, UNLIMITED
from runguard.ledger.ledger import Account, Hold, Ledger, Refusal
from runguard.ledger.memory import MemoryLedger
from runguard.ledger.remote import StoreLedger
from tests.kit.conformance import WORKERS as FORKS

WORKERS = 64
PROCESSES = 8  # with a ledger of its own each
BUDGET = 5
ROUNDS = {"memory": 40, "redis": 20, "sqlite": 6, "postgres": 5}  # benchmarks/crowd.py makes 100 on each
PATIENCE_S = 50.0


def account_of(ledger: Ledger, turn: int) -> Account:
    return ledger.account(f"app:a/{turn}#", f"app:a/{turn}", None, None, (UNLIMITED, UNLIMITED, BUDGET))


async def call(ledger: Ledger, turn: int, fickle: bool) -> int:
    """How many calls this worker made in a round: one or none. A fickle one gives its leave back."""
    while True:
        result = await ledger.reserve([account_of(ledger, turn)], (0, 0, 1), ttl=300)
        if isinstance(result, Refusal):
            if not result.wait_helps:
                return 0
            await ledger.changed(result, 1.0)
            continue
        assert isinstance(result, Hold)
        await asyncio.sleep(0)
        if fickle:
            ledger.release(result)
            return 0
        ledger.settle(result, (0, 0, 1))
        return 1


def work(ledger: Ledger, number: int, rounds: int, together: Any, made: list[int], errors: list[str]) -> None:
    """One worker through all rounds."""
    try:
        with asyncio.Runner() as runner:
            for turn in range(rounds):
                together.wait(PATIENCE_S)
                made[turn] += runner.run(call(ledger, turn, (number + turn) % 8 == 0))
    except BaseException as error:  # told by whoever started us
        errors.append(repr(error))
        together.abort()


def crew(ledger: Ledger, numbers: range, rounds: int, together: Any) -> tuple[list[int], list[str]]:
    """Workers of one process: the calls of each round, and what went wrong."""
    books, errors = [[0] * rounds for _ in numbers], list[str]()
    threads = [
        threading.Thread(target=work, args=(ledger, n, rounds, together, made, errors), daemon=True)
        for n, made in zip(numbers, books, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    if any(thread.is_alive() for thread in threads):
        errors.append("somebody still waits")
    return [sum(of_round) for of_round in zip(*books, strict=True)], errors


def process(place: Any, numbers: range, rounds: int, together: Any, pipe: Connection) -> None:
    ledger = StoreLedger(place.store(), PATIENCE_S)
    made, errors = crew(ledger, numbers, rounds, together)
    if not ledger.flush(PATIENCE_S) or ledger.health()["lost"]:
        errors.append("settlements were not told")
    pipe.send((made, errors))


def test_on_the_ledger_of_one_process_exactly_five_calls_are_made_every_round() -> None:
    ledger, rounds = MemoryLedger(), ROUNDS["memory"]
    made, errors = crew(ledger, range(WORKERS), rounds, threading.Barrier(WORKERS))
    assert errors == []
    assert made == [BUDGET] * rounds
    assert [(account.spent, account.held) for account in ledger.accounts()] == [((0, 0, BUDGET), NOTHING)] * rounds


def test_on_a_store_that_processes_share_exactly_five_calls_are_made_every_round(place: Any) -> None:
    rounds, each = ROUNDS[place.kind], WORKERS // PROCESSES
    place.connect().close()  # the schema is made once
    together, pipes = FORKS.Barrier(WORKERS), list[Connection]()
    crews = []
    for first in range(0, WORKERS, each):
        ours, theirs = FORKS.Pipe()
        crews.append(
            FORKS.Process(
                target=process, args=(place, range(first, first + each), rounds, together, theirs), daemon=True
            )
        )
        crews[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        assert all(pipe.poll(PATIENCE_S) for pipe in pipes), "not a word from a worker"
        told = [pipe.recv() for pipe in pipes]
    finally:
        for one in crews:
            one.kill()
            one.join()
    assert [error for _, errors in told for error in errors] == []
    assert [sum(of_round) for of_round in zip(*(made for made, _ in told), strict=True)] == [BUDGET] * rounds
    session = place.connect()
    try:
        assert [(balance.spent, balance.held) for balance in session.read()] == [((0, 0, BUDGET), NOTHING)] * rounds
    finally:
        session.close()
