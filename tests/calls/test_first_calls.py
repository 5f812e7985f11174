"""Concurrent calls, calls of unknown cost, calls that fail."""

import asyncio
import functools
from decimal import Decimal
from typing import Any

import pytest

from runguard import (
    BudgetExceededError,
    ContextOverflowError,
    UnpricedModelError,
    guard,
    guard_async,
)
from tests.kit.examples import each_row
from tests.kit.functions import DIME, Model, Status, held, in_threads, in_time, refused, swallowing
from tests.kit.waiting import PATIENCE_S, turns, until, until_async

# ---- what others get wrong: concurrency, swallowed errors, honest figures -------------------------------------------


async def test_fifty_calls_at_once_spend_the_cap_and_not_a_cent_more() -> None:
    model = Model(takes=0.05)
    call = guard_async(model.asynchronous, budget={"max_usd": 1.0})
    results = await asyncio.gather(*(call() for _ in range(50)), return_exceptions=True)
    assert model.calls == 10
    assert refused(results) == 40
    assert {type(result) for result in results} == {dict, BudgetExceededError}
    assert call.spend()["usd"] == 1
    [status] = call.budgets()
    assert (status.spent, status.reserved, status.limit) == (1, 0, 1)


def test_fifty_threads_at_once_spend_the_cap_and_not_a_cent_more() -> None:
    model = Model(takes=0.01)
    call = guard(model, budget={"max_usd": 1.0})
    results = in_threads([call] * 50)
    assert (model.calls, refused(results), call.spend()["usd"], held(call)) == (10, 40, 1, Decimal(0))


def test_a_loop_that_swallows_errors_reaches_the_provider_ten_times() -> None:
    model = Model()
    call = guard(model, budget={"max_usd": 1.0})
    results = swallowing(call, 30)
    assert model.calls == 10
    assert [type(result) for result in results] == [dict] * 10 + [BudgetExceededError] * 20
    assert call.spend()["usd"] == 1


def test_stopping_at_the_first_error_reports_what_was_really_spent() -> None:
    model = Model()
    call = guard(model, budget={"max_usd": 1.0})
    stopped = next(result for result in swallowing(call, 30) if isinstance(result, BudgetExceededError))
    assert (stopped.spent, stopped.limit, stopped.reserved) == (model.calls * DIME, Decimal(1), Decimal(0))
    assert stopped.scope == stopped.trip.scope_id == call.budgets()[0].scope
    assert call.spend()["usd"] == model.calls * DIME


@pytest.mark.parametrize("unit", ["max_calls", "max_tokens"])
def test_calls_and_tokens_are_capped_in_the_same_way(unit: str) -> None:
    model = Model({"tokens": 100}, takes=0.005)
    call = guard(model, budget={unit: 500 if unit == "max_tokens" else 5})
    assert refused(in_threads([call] * 20)) == 15
    assert model.calls == 5
    [status] = call.budgets()
    assert (status.spent, status.reserved) == (status.limit, 0)


def test_a_known_cost_lets_calls_go_at_once_up_to_the_cap() -> None:
    model = Model("no figures", takes=0.05)
    call = guard(model, budget={"max_usd": 1}, cost=0.1, max_wait_seconds=0)
    assert refused(in_threads([call] * 30)) == 20
    assert model.calls == 10
    assert model.most_at_once > 1
    assert call.spend()["usd"] == 1


def test_the_price_list_and_the_output_limit_bound_a_call_before_it_is_made() -> None:
    model = Model({"model": "m", "usage": {"prompt_tokens": 1, "completion_tokens": 1_000}})
    call = guard(model, budget={"max_usd": 0.0025}, prices={"m": {"input": 0.001, "output": 1}}, max_wait_seconds=0)
    results = [*swallowing(functools.partial(call, model="m", max_tokens=1_000), 4, "hi")]
    assert [type(result) for result in results] == [dict, dict, BudgetExceededError, BudgetExceededError]
    assert model.calls == 2  # the third would have fitted by what was spent, not by what it may take


# ---- one after the other until a cost is known ----------------------------------------------------------------------


def test_calls_of_unknown_cost_go_singly_and_then_hold_the_dearest() -> None:
    model = Model(OSError(), OSError(), {"usd": 0.3}, takes=0.02)
    beside: list[int] = []

    def counted() -> Any:
        beside.append(model.at_once)
        return model()

    call = guard(counted, budget={"max_usd": 1.0}, max_wait_seconds=0)
    results = in_threads([call] * 10)
    assert beside[:3] == [0, 0, 0]  # nothing was known yet
    assert model.calls == 5  # 0.9 of 1.0: the dearest seen does not fit a fourth time
    assert refused(results) == 5


@each_row("ends", [ConnectionError("away"), KeyboardInterrupt(), SystemExit(1), GeneratorExit()])
def test_when_the_first_call_fails_the_next_one_goes(ends: BaseException) -> None:
    model = Model(ends, {"usd": 0.1})
    call = guard(model, budget={"max_usd": 1.0})
    with pytest.raises(type(ends)):
        call()
    assert in_time(call) == {"usd": 0.1}
    assert held(call) == 0


def test_failing_first_calls_hand_over_to_those_who_wait() -> None:
    model = Model(*[OSError("away")] * 5, {"usd": 0.1}, takes=0.005)
    call = guard(model, budget={"max_usd": 10})
    results = in_threads([call] * 12)
    assert sum(isinstance(result, OSError) for result in results) == 5
    assert refused(results) == 0
    assert (model.calls, held(call)) == (12, Decimal(0))


async def test_a_cancelled_first_call_lets_the_next_one_go() -> None:
    model = Model(takes=5)
    call = guard_async(model.asynchronous, budget={"max_usd": 1.0})
    first = asyncio.create_task(call())
    waiting = asyncio.create_task(call())
    await until_async(lambda: model.calls == 1)
    await turns(20)  # the second one has asked, too
    assert model.calls == 1
    first.cancel()
    model.takes = 0
    assert await asyncio.wait_for(waiting, PATIENCE_S) == {"usd": 0.1}
    assert model.calls == 2


async def test_whoever_gives_up_waiting_disturbs_nobody() -> None:
    model = Model(takes=0.1)
    call = guard_async(model.asynchronous, budget={"max_usd": 1.0})
    first = asyncio.create_task(call())
    await until_async(lambda: model.calls == 1)
    gave_up = asyncio.create_task(call())
    stayed = asyncio.create_task(call())
    await turns(20)
    gave_up.cancel()
    assert await first == await stayed == {"usd": 0.1}
    assert model.calls == 2
    assert held(call) == 0


def test_a_refused_first_call_lets_the_next_one_go() -> None:
    call = guard(Model(), budget={"max_usd": 1.0}, context={"max_context_tokens": 10}, tokens=len)
    with pytest.raises(ContextOverflowError):
        call("x" * 11)
    call.reset()
    assert in_time(lambda: call("x")) == {"usd": 0.1}


@each_row("nonsense", [float("nan"), -1, True, "free", None, float("inf")])
def test_an_unknown_cost_is_not_zero_but_the_last_call(nonsense: Any) -> None:
    model = Model({"usd": nonsense})
    call = guard(model, budget={"max_usd": 1.0})
    results = swallowing(call, 4)
    assert [type(result) for result in results[1:]] == [UnpricedModelError] * 3
    assert model.calls == 1
    assert call.spend()["unpriced_calls"] == 1
    assert "usd" in str(results[1])


def test_after_one_known_cost_an_untold_one_is_booked_at_the_dearest() -> None:
    model = Model({"usd": 0.1}, {"usd": 0.3}, "nothing said")
    call = guard(model, budget={"max_usd": 1.0})
    swallowing(call, 10)
    assert model.calls == 4  # 0.1 + 0.3 + 0.3 + 0.3
    assert call.spend()["usd"] == 1
    assert call.spend()["estimated_calls"] == 2


def test_the_dearest_is_held_also_after_cheaper_ones() -> None:
    model = Model({"usd": 0.4}, {"usd": 0.1})
    call = guard(model, budget={"max_usd": 1.0}, max_wait_seconds=0)
    swallowing(call, 10)
    # what is left would not pay for another of the dearest
    assert (model.calls, call.spend()["usd"]) == (4, Decimal("0.7"))


def test_a_token_limit_without_usage_is_the_last_call() -> None:
    model = Model(object())
    call = guard(model, budget={"max_tokens": 100})
    assert [type(result).__name__ for result in swallowing(call, 3)] == [
        "object",
        "UnpricedModelError",
        "UnpricedModelError",
    ]
    assert model.calls == 1


# ---- calls that fail ------------------------------------------------------------------------------------------------


class Coded(Exception):  # noqa: N818
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@each_row("error", [Status(429), Status(500), Status(400), Coded(503)])
def test_what_the_provider_refused_is_free(error: Exception) -> None:
    call = guard(Model({"usd": 0.1}, error), budget={"max_usd": 1})
    call()
    for _ in range(20):
        with pytest.raises(type(error)):
            call()
    assert call.spend()["usd"] == DIME
    assert call.spend()["calls"] == 21
    assert held(call) == 0


def test_what_failed_on_the_way_is_booked_as_an_estimate() -> None:
    model = Model({"usd": 0.25}, TimeoutError())
    call = guard(model, budget={"max_usd": 1})
    results = swallowing(call, 10)
    assert [type(result) for result in results] == [dict] + [TimeoutError] * 3 + [BudgetExceededError] * 6
    assert model.calls == 4
    assert (call.spend()["usd"], call.spend()["estimated_calls"], held(call)) == (1, 3, Decimal(0))


@pytest.mark.parametrize("fixed", [0.5, Decimal("0.5")])
def test_a_fixed_cost_stands_for_what_failed_too(fixed: Any) -> None:
    model = Model(TimeoutError())
    call = guard(model, budget={"max_usd": 1}, cost=fixed)
    swallowing(call, 5)
    assert (model.calls, call.spend()["usd"]) == (2, 1)


def test_a_failure_of_unknown_cost_is_no_zero_in_the_figures() -> None:
    call = guard(Model(TimeoutError()), budget={"max_usd": 1})
    swallowing(call, 3)
    assert call.spend()["unpriced_calls"] == call.spend()["estimated_calls"] == 3


def test_the_own_error_of_the_function_comes_through_unchanged() -> None:
    error = ZeroDivisionError("mine")
    with pytest.raises(ZeroDivisionError) as raised:
        guard(Model(error), budget={"max_usd": 1})()
    assert raised.value is error
    assert raised.value.__cause__ is None


def test_an_interrupt_while_waiting_for_the_store_gives_back_what_came_too_late(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = guard(Model(), budget={"max_usd": 1}, cost=0.1, store=store)
    call()
    real = asyncio.run_coroutine_threadsafe
    struck: list[Any] = []

    def interrupted(job: Any, loop: Any) -> Any:
        future = real(job, loop)
        if struck:
            return future
        struck.append(True)
        until(future.done)
        result = future.result

        def strike_first(*args: Any) -> Any:
            if len(struck) > 1:
                return result(*args)
            struck.append(True)
            _interrupt()
            return None

        monkeypatch.setattr(future, "result", strike_first)
        return future

    monkeypatch.setattr("runguard.calls.surroundings.asyncio.run_coroutine_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call()
    assert call.spend()["reserved_usd"] == 0
    assert call.spend()["usd"] == DIME


def _interrupt() -> None:
    raise KeyboardInterrupt
