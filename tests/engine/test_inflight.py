"""A bounded number of model calls at once: never more, nobody forgotten, in the order of asking."""

import asyncio
import math
import threading
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runguard.engine import waiting as inflight
from runguard.engine.waiting import Turns, is_finished
from tests.kit.waiting import forever, turns

PATIENCE_S = 20  # far beyond anything that works


def me() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the regular look for free slots, whoever was not woken waits for ever."""
    monkeypatch.setattr(inflight, "_SWEEP_S", 10 * PATIENCE_S)


# ---- never more than the limit --------------------------------------------------------------------------------------


@dataclass
class Call:
    """One model call of a random schedule."""

    comes: int  # turns of the loop before it asks
    holds: int  # turns it takes
    gives_back: bool  # or just ends
    cancelled: int | None  # turns until somebody cancels it
    patience_s: float  # after which it gives up


schedules = st.lists(
    st.builds(
        Call,
        comes=st.integers(0, 6),
        holds=st.integers(0, 6),
        gives_back=st.booleans(),
        cancelled=st.none() | st.integers(0, 15),
        patience_s=st.sampled_from([math.inf, math.inf, 0.0, 0.001]),
    ),
    min_size=1,
    max_size=12,
)


@given(limit=st.integers(1, 4), calls=schedules)
@settings(max_examples=60)
def test_never_more_than_the_limit_and_everybody_has_a_turn(limit: int, calls: list[Any]) -> None:
    async def main() -> None:
        slots, flying, served = Turns(limit, is_finished), set(), set()

        async def work(number: int, call: Call) -> None:
            await turns(call.comes)
            if not await slots.wait(me(), call.patience_s):
                assert call.patience_s < math.inf
                slots.give_back(me())
                return
            flying.add(number)
            assert len(flying) <= limit
            assert len(slots.holders) <= limit
            served.add(number)
            try:
                await turns(call.holds)
            finally:
                flying.discard(number)
            if call.gives_back:
                slots.give_back(me())

        async def cancel(task: asyncio.Task[None], after: int) -> None:
            await turns(after)
            task.cancel()

        tasks = [asyncio.create_task(work(n, call)) for n, call in enumerate(calls)]
        cancels = [
            asyncio.create_task(cancel(task, call.cancelled))
            for task, call in zip(tasks, calls, strict=True)
            if call.cancelled is not None
        ]
        ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S)
        await asyncio.gather(*cancels)
        for number, result in enumerate(ends):
            assert result is None or isinstance(result, asyncio.CancelledError)
            assert number in served or calls[number].cancelled is not None or calls[number].patience_s < math.inf
        assert slots.busy() == 0
        assert not slots.waiting

    before = inflight._SWEEP_S
    inflight._SWEEP_S = 0.002
    try:
        asyncio.run(main())
    finally:
        inflight._SWEEP_S = before


async def test_a_task_that_holds_a_slot_goes_on_with_it() -> None:
    slots = Turns(1, is_finished)
    assert slots.take(me())
    assert slots.take(me())
    await asyncio.wait_for(slots.wait(me()), PATIENCE_S)
    assert len(slots.holders) == 1


# ---- tasks that end without a word ----------------------------------------------------------------------------------


async def test_a_finished_task_gives_its_slot_back() -> None:
    slots = Turns(1, is_finished)

    async def careless() -> None:
        slots.take(me())

    await asyncio.create_task(careless())
    assert slots.busy() == 0
    assert slots.take(me())


async def test_a_cancelled_task_gives_its_slot_back() -> None:
    slots, holder = Turns(1, is_finished), asyncio.create_task(forever())
    assert slots.take(holder)
    assert not slots.take(me())
    await end(holder)
    assert slots.take(me())


async def test_a_waiting_call_notices_that_a_holder_ended_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflight, "_SWEEP_S", 0.005)
    slots, holder = Turns(1, is_finished), asyncio.create_task(forever())
    slots.take(holder)
    waiting = asyncio.create_task(waits_for(slots))
    await turns(3)
    assert not waiting.done()
    await end(holder)
    await asyncio.wait_for(waiting, PATIENCE_S)


async def waits_for(slots: Turns[Any]) -> None:
    await slots.wait(me())


# ---- nobody is forgotten --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_second_look")
async def test_each_slot_given_back_wakes_one_that_waits() -> None:
    slots = Turns(3, is_finished)
    done: list[int] = []

    async def work(number: int) -> None:
        await slots.wait(me())
        await turns(2)
        done.append(number)
        slots.give_back(me())

    await asyncio.wait_for(asyncio.gather(*(work(n) for n in range(50))), PATIENCE_S)
    assert sorted(done) == list(range(50))


@pytest.mark.usefixtures("no_second_look")
async def test_a_waiter_cancelled_before_its_turn_passes_the_turn_on() -> None:
    slots, holder = Turns(1, is_finished), asyncio.create_task(forever())
    slots.take(holder)
    first, second = (asyncio.create_task(waits_for(slots)) for _ in range(2))
    await turns(3)
    await end(first)
    slots.give_back(holder)
    await asyncio.wait_for(second, 1)
    await end(holder)


@pytest.mark.usefixtures("no_second_look")
@pytest.mark.parametrize("later", [0, 1, 2, 3])
async def test_a_waiter_cancelled_in_the_moment_of_its_turn_passes_the_turn_on(later: int) -> None:
    slots, holder = Turns(1, is_finished), asyncio.create_task(forever())
    slots.take(holder)
    first, second = (asyncio.create_task(served(slots, [], n)) for n in range(2))
    await turns(3)
    slots.give_back(holder)
    await turns(later)
    first.cancel()
    await asyncio.wait((second,), timeout=1)
    got_it = second.done()
    await end(first, second, holder)
    assert got_it


# ---- in the order of asking -----------------------------------------------------------------------------------------


async def served(slots: Turns[Any], order: list[int], number: int) -> None:
    await slots.wait(me())
    order.append(number)
    try:
        await turns(2)
    finally:
        slots.give_back(me())


@pytest.mark.parametrize(("callers", "sweep_s", "pause_s"), [(10, None, 0), (4, 0.03, 0.02)], ids=["short", "long"])
async def test_waiting_calls_are_served_in_the_order_of_asking_however_long_they_wait(
    callers: int, sweep_s: float | None, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inflight, "_SWEEP_S", sweep_s or inflight._SWEEP_S)
    slots, holder = Turns(1, is_finished), asyncio.create_task(forever())
    order: list[int] = []
    slots.take(holder)
    tasks = []
    for n in range(callers):
        tasks.append(asyncio.create_task(served(slots, order, n)))
        await turns(2)
        await asyncio.sleep(pause_s)
    slots.give_back(holder)
    await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
    assert order == list(range(callers))
    await end(holder)


async def test_who_waits_too_long_or_is_woken_keeps_its_place_until_it_gives_it_up() -> None:
    slots: Turns[str] = Turns(1, lambda member, since: False)
    assert slots.take("holder")
    assert not slots.take("first", join=True)
    assert not await slots.wait("first", 0.001)
    second = asyncio.create_task(slots.wait("second"))
    waiting = asyncio.create_task(slots.wait("first"))
    await turns(3)
    slots.wake("first")
    assert not await waiting
    slots.give_back("holder")
    assert list(slots.holders) == ["first"]
    slots.give_back("first")
    assert await asyncio.wait_for(second, PATIENCE_S)


@pytest.mark.usefixtures("no_second_look")
async def test_a_higher_limit_lets_as_many_more_go_in_order() -> None:
    slots: Turns[int] = Turns(0, lambda member, since: False)
    tasks = [asyncio.create_task(slots.wait(n)) for n in range(5)]
    await turns(3)
    for limit in (1, 3, 5):
        slots.limit = limit
        slots.hand_on()
        assert list(slots.holders) == list(range(limit))
    assert await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S) == [True] * 5


# ---- several event loops --------------------------------------------------------------------------------------------


def test_two_loops_in_two_threads_share_the_slots() -> None:
    slots, lock = Turns(3, is_finished), threading.Lock()
    flying, most, done = 0, 0, 0

    async def work() -> None:
        nonlocal flying, most, done
        for _ in range(10):
            await slots.wait(me())
            with lock:
                flying += 1
                most = max(most, flying)
            await asyncio.sleep(0.0005)
            with lock:
                flying -= 1
                done += 1
            slots.give_back(me())

    async def main() -> None:
        await asyncio.wait_for(asyncio.gather(*(work() for _ in range(10))), PATIENCE_S)

    threads = [threading.Thread(target=asyncio.run, args=(main(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    assert done == 200
    assert most <= 3


async def test_a_loop_that_was_closed_while_waiting_holds_nobody_up() -> None:
    slots, holder = Turns(1, is_finished), asyncio.create_task(forever())
    slots.take(holder)

    async def give_up() -> None:
        await asyncio.wait_for(waits_for(slots), 0.01)

    def elsewhere() -> None:
        with pytest.raises(TimeoutError):
            asyncio.run(give_up())

    await asyncio.to_thread(elsewhere)
    waiting = asyncio.create_task(waits_for(slots))
    await turns(3)
    slots.give_back(holder)
    await asyncio.wait_for(waiting, PATIENCE_S)
    await end(holder)
