"""Guarded functions on budgets that wait: async code awaits, other threads block, an event loop is never blocked."""

import asyncio
import threading
from typing import Any

import pytest

from runguard import Budget, BudgetExceededError, guard, guard_async
from tests.kit.functions import Model
from tests.kit.virtual_time import VirtualLoop, run_virtually
from tests.kit.waiting import until


def per_minute(calls: int) -> Budget:
    return Budget(calls=calls, per="app", window="1m", on_exhausted="wait")


class Clock:
    """Moved by hand. A waiting call looks at it once a second."""

    def __init__(self) -> None:
        self.now = 1_000_020.0

    def __call__(self) -> float:
        return self.now


def test_async_calls_wait_in_line() -> None:
    loop, model = VirtualLoop(), Model()
    call = guard_async(model.asynchronous, budget=[per_minute(2)], clock=loop.clock, max_wait_seconds=600)

    async def go() -> list[Any]:
        return await asyncio.gather(*(call() for _ in range(5)))

    assert len(run_virtually(loop, go())) == 5
    assert 120 <= loop.passed < 121


def test_a_thread_waits_and_goes_on_when_there_is_room() -> None:
    model = Model()
    call = guard(model, budget=[per_minute(1)], clock=Clock(), max_wait_seconds=600)
    call()
    thread = threading.Thread(target=call)
    thread.start()
    until(lambda: call.snapshot()["runs"][0]["waiting"])
    assert model.calls == 1
    call.extend("app:Model", calls=1)
    thread.join(20)
    assert model.calls == 2


async def test_a_call_that_blocks_an_event_loop_is_refused_instead_of_waiting() -> None:
    model = Model()
    call = guard(model, budget=[per_minute(1)], clock=Clock(), max_wait_seconds=60)
    call()
    with pytest.raises(BudgetExceededError):
        call()
    assert model.calls == 1
