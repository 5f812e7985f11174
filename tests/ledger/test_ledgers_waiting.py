"""Callers that wait for a ledger, and many at once."""

import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from runguard.core.money import NOTHING, UNLIMITED, Amount
from runguard.ledger.ledger import Account, Hold, Refusal, Stale
from tests.kit.ledgers import FREE, Desk, usd
from tests.kit.waiting import PATIENCE_S, loops_at_once

# ---- waiting --------------------------------------------------------------------------------------------------------


async def full(desk: Desk) -> tuple[Account, Hold, Refusal]:
    account = desk.account()
    hold = await desk.held([account], (100, 0, 1))
    return account, hold, await desk.refused([account], (10, 0, 1))


def change(desk: Desk, how: str, account: Account, hold: Hold) -> None:
    if how == "settle":
        desk.ledger.settle(hold, (1, 0, 1))
    elif how == "release":
        desk.ledger.release(hold)
    else:
        desk.ledger.extend(account, (10, 0, 0))


async def patiently(desk: Desk, want: Amount) -> Hold:
    """As the guard waits: ask, wait for a change, ask again."""
    while isinstance(result := await desk.reserve([desk.account()], want), Refusal):
        assert result.wait_helps
        assert await desk.ledger.changed(result, PATIENCE_S), "nobody woke it"
    assert isinstance(result, Hold)
    return result


@pytest.mark.parametrize("how", ["settle", "release", "extend"])
async def test_whoever_waits_gets_in_after_a(desk: Desk, how: str) -> None:
    account, hold, _ = await full(desk)
    waiting = asyncio.create_task(patiently(desk, (10, 0, 1)))
    await asyncio.sleep(0.15)
    assert not waiting.done()
    change(desk, how, account, hold)
    assert (await asyncio.wait_for(waiting, PATIENCE_S / 2)).amount == (10, 0, 1)


@pytest.mark.parametrize("how", ["settle", "release", "extend"])
async def test_what_changed_between_the_refusal_and_the_wait_is_not_waited_for(desk: Desk, how: str) -> None:
    account, hold, refusal = await full(desk)
    change(desk, how, account, hold)
    desk.flush()
    assert await asyncio.wait_for(desk.ledger.changed(refusal, PATIENCE_S), PATIENCE_S / 2)
    await desk.held([desk.account()], (10, 0, 1))


async def test_a_wait_ends_when_its_time_is_over(desk: Desk) -> None:
    _, _, refusal = await full(desk)
    began = time.monotonic()
    # a store is looked at again soon in any case
    await asyncio.wait_for(desk.ledger.changed(refusal, 0.02), PATIENCE_S)
    assert 0.015 < time.monotonic() - began < PATIENCE_S / 4
    await desk.refused([desk.account()], (10, 0, 1))


async def test_whoever_waits_does_not_ask_all_the_time(desk: Desk) -> None:
    _, hold, _ = await full(desk)
    asked, reserve = [0], desk.reserve

    async def counted(*args: Any, **options: Any) -> Hold | Refusal | Stale:
        asked[0] += 1
        return await reserve(*args, **options)

    desk.reserve = counted  # type: ignore[method-assign]
    waiting = asyncio.create_task(patiently(desk, (10, 0, 1)))
    await asyncio.sleep(0.5)
    assert asked[0] <= 20  # a look at others' settlements now and then, and no storm
    desk.settle(hold, (1, 0, 1))
    await asyncio.wait_for(waiting, PATIENCE_S / 2)


async def test_whoever_is_cancelled_while_it_waits_holds_nothing_and_takes_nobodys_turn(desk: Desk) -> None:
    _, hold, _ = await full(desk)
    doomed = [asyncio.create_task(patiently(desk, (60, 0, 1))) for _ in range(3)]
    patient = asyncio.create_task(patiently(desk, (60, 0, 1)))
    await asyncio.sleep(0.05)
    for task in doomed:
        task.cancel()
    await asyncio.gather(*doomed, return_exceptions=True)
    assert all(task.cancelled() for task in doomed)
    desk.settle(hold, (1, 0, 1))
    assert (await asyncio.wait_for(patient, PATIENCE_S / 2)).amount == (60, 0, 1)
    desk.flush()
    assert desk.books() == ((1, 0, 1), (60, 0, 1))


async def test_calls_that_are_cancelled_on_their_way_leave_nothing_held(desk: Desk) -> None:
    """Some before they were asked, some while they are asked, some when they have their hold."""
    account = desk.account(caps=FREE)

    async def call() -> None:
        hold = await desk.held([account], (1, 1, 1))
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            desk.ledger.release(hold)

    for turns in range(12):
        tasks = [asyncio.create_task(call()) for _ in range(4)]
        for _ in range(turns):
            await asyncio.sleep(0.0005 if turns % 2 else 0)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
    await desk.spend([account], (5, 5, 1))
    assert desk.books() == ((5, 5, 1), NOTHING)


def test_no_wake_up_is_lost_between_loops_in_several_threads(desk: Desk) -> None:
    """One place, passed to and fro: whoever misses a single wake-up waits beyond all patience."""
    turns: list[int] = []

    async def play(player: int) -> None:
        for _ in range(8):
            hold = await patiently(desk, (100, 0, 0))
            turns.append(player)
            await asyncio.sleep(0)
            desk.ledger.settle(hold, NOTHING)

    async def both() -> None:
        await asyncio.gather(play(1), play(2))

    loops_at_once([both, both])
    desk.flush()
    assert len(turns) == 32
    assert desk.books() == (NOTHING, NOTHING)


# ---- many at once ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def watched(desk: Desk, key: str) -> Iterator[list[Amount]]:
    """Looks at an account all the time; what was above its cap is told."""
    broken, looks, over = list[Amount](), [0], threading.Event()

    def watch() -> None:
        while not over.is_set():
            for account in desk.ledger.find(desk.scope):
                if account.key == f"{desk.name}/{key}#":
                    looks[0] += 1
                    if (
                        account.due_usd > account.cap_usd
                        or account.due_tokens > account.cap_tokens
                        or account.due_calls > account.cap_calls
                    ):
                        broken.append((account.due_usd, account.due_tokens, account.due_calls))
            time.sleep(0.002)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield broken
    finally:
        over.set()
        watcher.join(PATIENCE_S)
    assert looks[0], "nobody looked"


class Crowd:
    """Callers on one shared budget and one of their own. Bills never exceed holds."""

    def __init__(self, desk: Desk, callers: int, calls: int) -> None:
        self.desk, self.calls = desk, calls
        self.took, self.refused = [0] * callers, [0] * callers

    async def work(self, number: int) -> None:
        desk, dice = self.desk, random.Random(number)
        for _ in range(self.calls):
            want = (dice.randint(1, 300), dice.randint(1, 200), 1)
            accounts = [
                desk.account(f"own{number}", usd(2_000), user=f"u{number}"),
                desk.account("shared", (self.cap, UNLIMITED, UNLIMITED)),
            ]
            result = await desk.reserve(accounts if number % 2 else accounts[::-1], want)
            if not isinstance(result, Hold):
                self.refused[number] += 1
                continue
            fate = dice.random()
            if fate < 0.2:
                desk.ledger.release(result)
                continue
            await asyncio.sleep(0.001)  # the provider thinks
            bill = dice.randint(want[0] // 2, want[0])
            desk.ledger.settle(result, (bill, dice.randint(0, want[1]), 1))
            if fate > 0.8:  # a second figure; not above the first, as what was given back may be gone
                bill = dice.randint(0, bill)
                desk.ledger.settle(result, (bill, 0, 1))
            self.took[number] += bill

    @property
    def cap(self) -> int:
        """About half of what all of them ask for."""
        return len(self.took) * self.calls * 60

    def check(self, broken: list[Amount]) -> None:
        self.desk.flush()
        assert broken == []
        shared = self.desk.find("shared")
        assert (shared.spent_usd, shared.held, shared.closed, shared.overrun) == (
            sum(self.took),
            NOTHING,
            False,
            NOTHING,
        )
        assert [self.desk.books(f"own{n}", f"u{n}") for n in range(len(self.took))] == [
            (
                (took, self.desk.find(f"own{n}", f"u{n}").spent_tokens, self.desk.find(f"own{n}", f"u{n}").spent_calls),
                NOTHING,
            )
            for n, took in enumerate(self.took)
        ]
        assert sum(self.refused) > 0, "it was no tight budget"
        assert self.cap * 0.4 < sum(self.took) <= self.cap, "much of it was used, and not more than there was"


def test_many_threads_with_loops_of_their_own_never_break_a_budget_and_leave_nothing_held(desk: Desk) -> None:
    crowd = Crowd(desk, 12, 20)
    with watched(desk, "shared") as broken:
        loops_at_once([lambda number=number: crowd.work(number) for number in range(12)])  # type: ignore[misc]
    crowd.check(broken)


def test_the_control_document_loses_no_change(desk: Desk) -> None:
    """Whoever changes it at the same time: each gets back what is in it with the own change."""
    mine = [f"{desk.name}.{number}" for number in range(12)]
    told: list[tuple[str, str]] = []

    async def work(word: str) -> None:
        told.append(
            (
                word,
                await asyncio.to_thread(
                    desk.ledger.change_control, lambda text: json.dumps({**json.loads(text or "{}"), word: 1})
                ),
            )
        )

    loops_at_once([lambda word=word: work(word) for word in mine])  # type: ignore[misc]
    assert all(word in json.loads(text) for word, text in told)
    assert {
        word for word in json.loads(desk.ledger.change_control(lambda text: text)) if word.startswith(f"{desk.name}.")
    } == set(mine)
