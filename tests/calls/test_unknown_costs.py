"""Guarded functions whose cost nobody knows before the call:
how many may run at once, and how far a cap can be passed.
"""

import asyncio
import contextlib
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import runguard
from runguard import Budget, BudgetExceededError, guard, guard_async
from runguard.calls.function_settings import ENOUGH_SEEN
from tests.kit.examples import examples

PATIENCE_S = 20
NEARLY_NOTHING = 0.000001


class Provider:
    """Costs by the number of the call; counts how many run at once. Each call ends when the loop has turned a few
    times.
    """

    def __init__(self, costs: Any, unit: str = "usd", turns: int = 5) -> None:
        self.costs, self.unit, self.turns = costs, unit, turns
        self.calls = self.at_once = 0
        self.widths: list[int] = []
        self.spent = 0

    def cost(self, number: int) -> Any:
        return self.costs(number) if callable(self.costs) else self.costs[min(number, len(self.costs) - 1)]

    async def call(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        cost = self.cost(self.calls)
        self.calls += 1
        self.at_once += 1
        self.widths.append(self.at_once)
        try:
            for _ in range(self.turns):
                await asyncio.sleep(0)
        finally:
            self.at_once -= 1
        self.spent += cost
        return {self.unit: cost}


async def fan_out(call: Any, width: int, *args: Any, **kwargs: Any) -> list[Any]:
    return await asyncio.wait_for(
        asyncio.gather(*(call(*args, **kwargs) for _ in range(width)), return_exceptions=True), PATIENCE_S
    )


# ---- how far a cap can be passed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cheap", [1, 2, 3])
@pytest.mark.parametrize(
    ("unit", "little", "much", "cap"), [("usd", NEARLY_NOTHING, 0.5, 2), ("usd", 0, 0.5, 2), ("tokens", 1, 500, 2_000)]
)
async def test_a_wide_fan_out_after_nearly_free_calls_passes_the_cap_by_one_call_at_most(
    cheap: int, unit: str, little: Any, much: Any, cap: int
) -> None:
    provider = Provider(lambda number: little if number < cheap else much, unit)
    call = guard_async(provider.call, budget={f"max_{unit}": cap})
    for _ in range(cheap):
        await call()
    results = await fan_out(call, 100)
    assert provider.spent <= cap + much
    assert {type(result) for result in results} == {dict, BudgetExceededError}
    assert provider.spent >= cap - much, "what fits is made"


async def test_the_same_in_threads() -> None:
    lock = threading.Lock()
    made: list[Any] = []

    def model() -> dict[str, float]:
        with lock:
            made.append(NEARLY_NOTHING if not made else 0.5)
            cost = made[-1]
        return {"usd": cost}

    call = guard(model, budget={"max_usd": 2})
    call()

    def careless(_: int) -> None:
        with contextlib.suppress(BudgetExceededError):
            call()

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(careless, range(100), timeout=PATIENCE_S))
    assert sum(made) <= 2.5


async def test_the_limits_of_a_run_block_hold_over_all_functions_in_it() -> None:
    provider = Provider(lambda number: NEARLY_NOTHING if number == 0 else 0.5)
    calls = [guard_async(provider.call) for _ in range(5)]
    with runguard.run(budget={"max_usd": 2}):
        await calls[0]()
        await asyncio.wait_for(
            asyncio.gather(*(calls[n % 5]() for n in range(100)), return_exceptions=True), PATIENCE_S
        )
    assert provider.spent <= 2.5


async def test_a_call_far_dearer_than_all_before_is_let_out_alone_again() -> None:
    provider = Provider(lambda number: 0.01 if number < 40 else 1.0)
    call = guard_async(provider.call, budget={"max_usd": 100})
    await fan_out(call, 40)
    widest = max(provider.widths)
    assert widest > 4
    await fan_out(call, widest)
    provider.widths.clear()
    await fan_out(call, 2)
    assert provider.widths == [1, 1] or max(provider.widths) <= 2
    before = provider.calls
    await fan_out(call, 30)
    assert provider.calls == before + 30, "and it opens again"


COST = st.integers(0, 100)


@examples(150)
@given(
    costs=st.lists(COST, min_size=1, max_size=60),
    cap=st.integers(1, 2_000),
    waves=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    data=st.data(),
)
def test_random_costs_and_widths_pass_the_cap_by_no_more_than_what_was_not_known(
    costs: list[int], cap: int, waves: list[int], data: st.DataObject
) -> None:
    """In cents. What passes the cap is at most one call dearer than its hold, and as many more as were let out together
    on experience.
    """

    async def play() -> None:
        provider = Provider([Decimal(cost) / 100 for cost in costs], turns=data.draw(st.integers(1, 4)))
        call = guard_async(provider.call, budget={"max_usd": Decimal(cap) / 100}, max_wait_seconds=0.05)
        seen = 0
        for width in waves:
            provider.widths.clear()
            before = provider.calls
            await fan_out(call, width)
            made = provider.calls - before
            assert max(provider.widths, default=0) <= max(1, (seen + made) // 2)
            seen += made
        dearest = max((provider.cost(number) for number in range(provider.calls)), default=0)
        together = max(1, provider.calls // 2)
        assert provider.spent <= Decimal(cap) / 100 + dearest * together
        if provider.calls < 4 or len(set(costs)) == 1:
            assert provider.spent <= Decimal(cap) / 100 + dearest
        assert call.spend()["reserved_usd"] == 0

    asyncio.run(play())


@examples(100)
@given(
    first=st.integers(0, 100),
    cost=st.integers(1, 100),
    cap=st.integers(1, 1_000),
    widths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
)
def test_after_any_first_call_a_fan_out_of_equal_calls_passes_the_cap_by_one_call_at_most(
    first: int, cost: int, cap: int, widths: list[int]
) -> None:
    async def play() -> None:
        provider = Provider(lambda number: Decimal(cost if number else first) / 100)
        call = guard_async(provider.call, budget={"max_usd": Decimal(cap) / 100}, max_wait_seconds=0.05)
        for width in widths:
            await fan_out(call, width)
        assert provider.spent <= Decimal(cap + max(first, cost)) / 100
        assert call.spend()["reserved_usd"] == 0

    asyncio.run(play())


# ---- and that healthy calls are not held up -------------------------------------------------------------------------


async def test_the_first_calls_go_one_by_one_and_then_more_and_more_at_once() -> None:
    provider = Provider([0.01])
    call = guard_async(provider.call, budget={"max_usd": 1_000})
    results = await fan_out(call, 200)
    assert {type(result) for result in results} == {dict}
    assert provider.widths[:4] == [1, 1, 1, 1]
    assert max(provider.widths) > 20
    provider.widths.clear()
    await fan_out(call, 200)
    assert max(provider.widths) == 200, "from then on nobody waits"


async def test_calls_that_cost_nothing_are_not_kept_in_line_for_ever() -> None:
    provider = Provider([0])
    call = guard_async(provider.call, budget={"max_usd": 1})
    await fan_out(call, 200)
    assert max(provider.widths) > 20


async def test_a_known_bound_lets_all_go_at_once_from_the_first_call() -> None:
    provider = Provider([0.01])
    call = guard_async(provider.call, budget={"max_usd": 100}, cost=lambda result: 0.01, prices={})
    await fan_out(call, 4)
    assert max(provider.widths) == 1
    provider = Provider([0.01])
    call = guard_async(provider.call, budget={"max_usd": 100}, cost=0.01)
    await fan_out(call, 50)
    assert max(provider.widths) == 50


def priced(**more: Any) -> dict[str, Any]:
    return {
        "prices": {"m": {"input": 1, "output": 1}},
        "models": {"m": {"context_window": 10_000, "max_output_tokens": 1_000}},
        **more,
    }


class Answering(Provider):
    """Tells its usage: the prompt, and so many output tokens."""

    async def call(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        told = await super().call()
        return {"model": "m", "usage": {"prompt_tokens": 10, "completion_tokens": told["usd"]}}


async def test_what_is_known_of_the_model_bounds_a_call() -> None:
    """The prompt and the longest answer of the model: with room for all of them, nobody waits."""
    provider = Answering([100])
    call = guard_async(provider.call, budget={"max_usd": 1}, **priced())
    await fan_out(call, 50, "hi", model="m")
    assert max(provider.widths) == 50


async def test_where_that_does_not_fit_calls_begin_one_by_one() -> None:
    provider = Answering(lambda number: 1 if number == 0 else 900)
    call = guard_async(provider.call, budget={"max_usd": 0.002}, **priced())
    await fan_out(call, 30, "hi", model="m")
    assert call.spend()["usd"] <= Decimal("0.002") + Decimal("0.00091")
    assert provider.calls >= 3


async def test_a_model_that_is_free_runs_under_a_cap_of_0() -> None:
    provider = Answering([100])
    call = guard_async(provider.call, budget=Budget(usd=lambda scope: 0), prices={"m": {"input": 0, "output": 0}})
    results = await fan_out(call, 20, "hi", model="m")
    assert {type(result) for result in results} == {dict}
    assert call.spend()["usd"] == 0


def test_a_stricter_cap_inside_is_not_refused_for_all_that_the_outer_one_holds(tmp_path: Any) -> None:
    store = f"sqlite:///{tmp_path}/guard.db"
    call = guard(lambda: {"usd": 0.4}, budget={"per_day": 1}, store=store, name="chat")
    made = 0
    with runguard.run(app="chat", store=store, budget={"per_day": 100}):
        for _ in range(5):
            with contextlib.suppress(BudgetExceededError):
                made += bool(call())
            assert call.flush(5)
    assert (made, call.spend()["usd"]) == (2, Decimal("0.8"))


# ---- nothing is left behind -----------------------------------------------------------------------------------------


async def test_whoever_gives_up_in_line_keeps_nobody_from_going() -> None:
    provider = Provider([0.01], turns=50)
    call = guard_async(provider.call, budget={"max_usd": 100})
    tasks = [asyncio.create_task(call()) for _ in range(40)]
    for turn in range(200):
        await asyncio.sleep(0)
        if turn % 3 == 0 and turn // 3 < 40:
            tasks[39 - turn // 3].cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S)
    assert {type(result) for result in await fan_out(call, 10)} == {dict}
    assert call.spend()["reserved_usd"] == 0


async def test_calls_that_fail_hand_over_to_those_in_line() -> None:
    made = 0

    async def model() -> dict[str, float]:
        nonlocal made
        made += 1
        await asyncio.sleep(0)
        if made % 2:
            raise ConnectionResetError("away")
        return {"usd": 0.01}

    call = guard_async(model, budget={"max_usd": 100})
    results = await fan_out(call, 60)
    assert made == 60
    assert {type(result) for result in results} == {dict, ConnectionResetError}


def test_a_loop_that_is_thrown_away_takes_its_places_along() -> None:
    provider = Provider([0.01])
    call = guard_async(provider.call, budget={"max_usd": 100})
    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(call()) for _ in range(10)]
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    del tasks, task
    gc.collect(1)
    assert {type(result) for result in asyncio.run(fan_out(call, 10))} == {dict}


async def test_after_enough_calls_no_line_is_kept() -> None:
    provider = Provider([0.01])
    call = guard_async(provider.call, budget={"max_usd": 100})
    await fan_out(call, ENOUGH_SEEN + 10)
    turns = call.__runguard__.turns
    assert not turns.holders
    assert not turns.waiting
