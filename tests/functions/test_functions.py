"""``guard``, ``guard_async`` and ``run`` around plain functions: who may call, what it is booked at, and what stops it.

The wrapped functions count how often they were really called: a refusal that reached the provider is no refusal.
"""

import asyncio
import functools
import gc
import inspect
import logging
import os
import pickle
import re
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import runguard
from runguard import (
    Budget,
    BudgetExceededError,
    CircuitOpenError,
    ContextOverflowError,
    DeadlineExceededError,
    GuardFailedError,
    LimitExceededError,
    LoopDetectedError,
    PolicyError,
    RunStoppedError,
    UnpricedModelError,
    guard,
    guard_async,
    run,
)
from runguard.functions.calls import Caller
from runguard.functions.costs import Costs

PATIENCE_S = 10  # far beyond anything that works
DIME = Decimal("0.1")


class Model:
    """A provider that counts: how often it was called, and how many at once."""

    def __init__(self, *answers: Any, takes: float = 0.0) -> None:
        self.answers, self.takes = answers or ({"usd": 0.10},), takes
        self.calls = self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()

    def _enter(self) -> Any:
        with self._lock:
            answer = self.answers[min(self.calls, len(self.answers) - 1)]
            self.calls += 1
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        return answer

    def _leave(self, answer: Any) -> Any:
        with self._lock:
            self.at_once -= 1
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        answer = self._enter()
        if self.takes:
            time.sleep(self.takes)
        return self._leave(answer)

    async def asynchronous(self, *args: Any, **kwargs: Any) -> Any:
        answer = self._enter()
        try:
            await asyncio.sleep(self.takes)
        except BaseException:
            self._leave(None)
            raise
        return self._leave(answer)


def swallowing(call: Callable[..., Any], times: int, *args: Any) -> list[Any]:
    """Call again and again as a careless loop does: whatever is raised is kept and ignored."""
    results: list[Any] = []
    for _ in range(times):
        try:
            results.append(call(*args))
        except Exception as error:
            results.append(error)
    return results


def in_threads(jobs: list[Callable[[], Any]]) -> list[Any]:
    """All at once; a job that does not come back fails the test instead of hanging it."""
    results: list[Any] = [None] * len(jobs)

    def work(place: int) -> None:
        try:
            results[place] = jobs[place]()
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a guarded call never came back"
    return results


def in_time(job: Callable[[], Any]) -> Any:
    [result] = in_threads([job])
    if isinstance(result, BaseException):
        raise result
    return result


def held(guarded: Any) -> Decimal:
    return sum((status.reserved for status in guarded.budgets()), Decimal(0))


def refused(results: list[Any]) -> int:
    return sum(isinstance(result, RunStoppedError) for result in results)


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/budgets.db"


def until(met: Callable[[], Any], seconds: float = PATIENCE_S) -> None:
    """Wait for what another thread does."""
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


# ---- what others get wrong: concurrency, swallowed errors, honest figures --------------------------------------------


async def test_fifty_calls_at_once_spend_the_cap_and_not_a_cent_more():
    model = Model(takes=0.05)
    call = guard_async(model.asynchronous, budget={"max_usd": 1.0})
    results = await asyncio.gather(*(call() for _ in range(50)), return_exceptions=True)
    assert model.calls == 10
    assert refused(results) == 40
    assert {type(result) for result in results} == {dict, BudgetExceededError}
    assert call.spend()["usd"] == 1
    [status] = call.budgets()
    assert (status.spent, status.reserved, status.limit) == (1, 0, 1)


def test_fifty_threads_at_once_spend_the_cap_and_not_a_cent_more():
    model = Model(takes=0.01)
    call = guard(model, budget={"max_usd": 1.0})
    results = in_threads([call] * 50)
    assert (model.calls, refused(results), call.spend()["usd"], held(call)) == (10, 40, 1, 0)


def test_a_loop_that_swallows_errors_reaches_the_provider_ten_times():
    model = Model()
    call = guard(model, budget={"max_usd": 1.0})
    results = swallowing(call, 30)
    assert model.calls == 10
    assert [type(result) for result in results] == [dict] * 10 + [BudgetExceededError] * 20
    assert call.spend()["usd"] == 1


async def test_an_async_loop_that_swallows_errors_reaches_the_provider_ten_times():
    model = Model()
    call = guard_async(model.asynchronous, budget={"max_usd": 1.0})
    for _ in range(30):
        try:
            await call()
        except BudgetExceededError:
            continue
    assert (model.calls, call.spend()["usd"]) == (10, 1)


def test_stopping_at_the_first_error_reports_what_was_really_spent():
    model = Model()
    call = guard(model, budget={"max_usd": 1.0})
    stopped = next(result for result in swallowing(call, 30) if isinstance(result, BudgetExceededError))
    assert (stopped.spent, stopped.limit, stopped.reserved) == (model.calls * DIME, 1, 0)
    assert stopped.scope == stopped.trip.scope_id == call.budgets()[0].scope
    assert call.spend()["usd"] == model.calls * DIME


@pytest.mark.parametrize("unit", ["max_calls", "max_tokens"])
def test_calls_and_tokens_are_capped_in_the_same_way(unit: str):
    model = Model({"tokens": 100}, takes=0.005)
    call = guard(model, budget={unit: 500 if unit == "max_tokens" else 5})
    assert refused(in_threads([call] * 20)) == 15
    assert model.calls == 5
    [status] = call.budgets()
    assert (status.spent, status.reserved) == (status.limit, 0)


def test_a_known_cost_lets_calls_go_at_once_up_to_the_cap():
    model = Model("no figures", takes=0.05)
    call = guard(model, budget={"max_usd": 1}, cost=0.1, max_wait_seconds=0)
    assert refused(in_threads([call] * 30)) == 20
    assert model.calls == 10
    assert model.most_at_once > 1
    assert call.spend()["usd"] == 1


def test_the_price_list_and_the_output_limit_bound_a_call_before_it_is_made():
    model = Model({"model": "m", "usage": {"prompt_tokens": 1, "completion_tokens": 1_000}})
    call = guard(model, budget={"max_usd": 0.0025}, prices={"m": {"input": 0.001, "output": 1}}, max_wait_seconds=0)
    results = [*swallowing(functools.partial(call, model="m", max_tokens=1_000), 4, "hi")]
    assert [type(result) for result in results] == [dict, dict, BudgetExceededError, BudgetExceededError]
    assert model.calls == 2  # the third would have fitted by what was spent, not by what it may take


# ---- one after the other until a cost is known -----------------------------------------------------------------------


def test_calls_of_unknown_cost_go_singly_and_then_hold_the_dearest():
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


@pytest.mark.parametrize("ends", [ConnectionError("away"), KeyboardInterrupt(), SystemExit(1), GeneratorExit()])
def test_when_the_first_call_fails_the_next_one_goes(ends: BaseException):
    model = Model(ends, {"usd": 0.1})
    call = guard(model, budget={"max_usd": 1.0})
    with pytest.raises(type(ends)):
        call()
    assert in_time(call) == {"usd": 0.1}
    assert held(call) == 0


def test_failing_first_calls_hand_over_to_those_who_wait():
    model = Model(*[OSError("away")] * 5, {"usd": 0.1}, takes=0.005)
    call = guard(model, budget={"max_usd": 10})
    results = in_threads([call] * 12)
    assert sum(isinstance(result, OSError) for result in results) == 5
    assert refused(results) == 0
    assert (model.calls, held(call)) == (12, 0)


async def test_a_cancelled_first_call_lets_the_next_one_go():
    model = Model(takes=5)
    call = guard_async(model.asynchronous, budget={"max_usd": 1.0})
    first = asyncio.create_task(call())
    waiting = asyncio.create_task(call())
    await asyncio.sleep(0.02)
    assert model.calls == 1
    first.cancel()
    model.takes = 0
    assert await asyncio.wait_for(waiting, PATIENCE_S) == {"usd": 0.1}
    assert model.calls == 2


async def test_whoever_gives_up_waiting_disturbs_nobody():
    model = Model(takes=0.1)
    call = guard_async(model.asynchronous, budget={"max_usd": 1.0})
    first = asyncio.create_task(call())
    await asyncio.sleep(0.01)
    gave_up = asyncio.create_task(call())
    stayed = asyncio.create_task(call())
    await asyncio.sleep(0.01)
    gave_up.cancel()
    assert await first == await stayed == {"usd": 0.1}
    assert model.calls == 2
    assert held(call) == 0


def test_a_refused_first_call_lets_the_next_one_go():
    call = guard(Model(), budget={"max_usd": 1.0}, context={"max_context_tokens": 10}, tokens=len)
    with pytest.raises(ContextOverflowError):
        call("x" * 11)
    call.reset()
    assert in_time(lambda: call("x")) == {"usd": 0.1}


@pytest.mark.parametrize("nonsense", [float("nan"), -1, True, "free", None, float("inf")])
def test_an_unknown_cost_is_not_zero_but_the_last_call(nonsense: Any):
    model = Model({"usd": nonsense})
    call = guard(model, budget={"max_usd": 1.0})
    results = swallowing(call, 4)
    assert [type(result) for result in results[1:]] == [UnpricedModelError] * 3
    assert model.calls == 1
    assert call.spend()["unpriced_calls"] == 1
    assert "usd" in str(results[1])


def test_after_one_known_cost_an_untold_one_is_booked_at_the_dearest():
    model = Model({"usd": 0.1}, {"usd": 0.3}, "nothing said")
    call = guard(model, budget={"max_usd": 1.0})
    swallowing(call, 10)
    assert model.calls == 4  # 0.1 + 0.3 + 0.3 + 0.3
    assert call.spend()["usd"] == 1
    assert call.spend()["estimated_calls"] == 2


def test_the_dearest_is_held_also_after_cheaper_ones():
    model = Model({"usd": 0.4}, {"usd": 0.1})
    call = guard(model, budget={"max_usd": 1.0}, max_wait_seconds=0)
    swallowing(call, 10)
    # what is left would not pay for another of the dearest
    assert (model.calls, call.spend()["usd"]) == (4, Decimal("0.7"))


def test_a_token_limit_without_usage_is_the_last_call():
    model = Model(object())
    call = guard(model, budget={"max_tokens": 100})
    assert [type(result).__name__ for result in swallowing(call, 3)] == [
        "object",
        "UnpricedModelError",
        "UnpricedModelError",
    ]
    assert model.calls == 1


def test_without_a_dollar_limit_nobody_asks_for_dollars():
    model = Model("nothing said")
    call = guard(model, budget={"max_calls": 3})
    assert refused(swallowing(call, 5)) == 2
    assert model.calls == 3


def test_tokens_count_where_the_policy_says_so_for_models_without_a_price():
    model = Model("nothing said")
    call = guard(model, budget={"max_usd": 1, "max_calls": 4}, on_unpriced="tokens")
    assert refused(swallowing(call, 6)) == 2
    assert model.calls == 4


# ---- calls that fail -------------------------------------------------------------------------------------------------


class Status(Exception):  # noqa: N818 - as the providers' libraries name theirs
    def __init__(self, status_code: int) -> None:
        super().__init__(status_code)
        self.status_code = status_code


class Coded(Exception):  # noqa: N818
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@pytest.mark.parametrize("error", [Status(429), Status(500), Status(400), Coded(503)])
def test_what_the_provider_refused_is_free(error: Exception):
    call = guard(Model({"usd": 0.1}, error), budget={"max_usd": 1})
    call()
    for _ in range(20):
        with pytest.raises(type(error)):
            call()
    assert call.spend()["usd"] == DIME
    assert call.spend()["calls"] == 21
    assert held(call) == 0


def test_what_failed_on_the_way_is_booked_as_an_estimate():
    model = Model({"usd": 0.25}, TimeoutError())
    call = guard(model, budget={"max_usd": 1})
    results = swallowing(call, 10)
    assert [type(result) for result in results] == [dict] + [TimeoutError] * 3 + [BudgetExceededError] * 6
    assert model.calls == 4
    assert (call.spend()["usd"], call.spend()["estimated_calls"], held(call)) == (1, 3, 0)


@pytest.mark.parametrize("fixed", [0.5, Decimal("0.5")])
def test_a_fixed_cost_stands_for_what_failed_too(fixed: Any):
    model = Model(TimeoutError())
    call = guard(model, budget={"max_usd": 1}, cost=fixed)
    swallowing(call, 5)
    assert (model.calls, call.spend()["usd"]) == (2, 1)


def test_a_failure_of_unknown_cost_is_no_zero_in_the_figures():
    call = guard(Model(TimeoutError()), budget={"max_usd": 1})
    swallowing(call, 3)
    assert call.spend()["unpriced_calls"] == call.spend()["estimated_calls"] == 3


def test_the_own_error_of_the_function_comes_through_unchanged():
    error = ZeroDivisionError("mine")
    with pytest.raises(ZeroDivisionError) as raised:
        guard(Model(error), budget={"max_usd": 1})()
    assert raised.value is error
    assert raised.value.__cause__ is None


def test_the_result_comes_through_unchanged():
    answer = {"usd": 0.1, "sig": "x", "response": object()}
    assert guard(lambda: answer, budget={"max_usd": 1}, loop=True)() is answer


def test_an_interrupt_while_waiting_for_the_store_gives_back_what_came_too_late(
    store: str, monkeypatch: pytest.MonkeyPatch
):
    call = guard(Model(), budget={"max_usd": 1}, cost=0.1, store=store)
    call()
    real, struck = asyncio.run_coroutine_threadsafe, []

    def interrupted(job: Any, loop: Any) -> Any:
        future = real(job, loop)
        if struck:
            return future
        struck.append(True)
        until(future.done)
        result = future.result
        monkeypatch.setattr(
            future, "result", lambda *args: result(*args) if len(struck) > 1 else (struck.append(True), _interrupt())[0]
        )
        return future

    monkeypatch.setattr("runguard.functions.sync.asyncio.run_coroutine_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call()
    assert call.spend()["reserved_usd"] == 0
    assert call.spend()["usd"] == DIME


def _interrupt() -> None:
    raise KeyboardInterrupt


# ---- calls inside of calls -------------------------------------------------------------------------------------------


def test_recursion_with_a_known_cost_stays_within_the_cap():
    made = []

    def descend(depth: int) -> Any:
        made.append(depth)
        if depth:
            swallowing(call, 1, depth - 1)
        return {"usd": 0.1}

    call = guard(descend, budget={"max_usd": 1}, cost=0.1, max_wait_seconds=0.05)
    in_time(lambda: call(50))
    assert len(made) == 10
    assert (call.spend()["usd"], held(call)) == (1, 0)


def test_recursion_without_a_known_cost_neither_hangs_nor_closes_the_budget():
    made = []

    def descend(depth: int) -> Any:
        made.append(depth)
        if depth:
            call(depth - 1)
        return {"usd": 0.1}

    call = guard(descend, budget={"max_usd": 1})
    in_time(lambda: call(3))
    assert len(made) == 4
    assert refused(swallowing(call, 10, 0)) == 4  # four were spent inside the first, six are left
    assert (len(made), call.spend()["usd"], held(call)) == (10, 1, 0)


async def test_tasks_inside_of_the_first_call_do_not_wait_for_it():
    async def fan_out(width: int) -> Any:
        await asyncio.gather(*(call(0) for _ in range(width)))
        return {"usd": 0.1}

    call = guard_async(fan_out, budget={"max_usd": 1})
    await asyncio.wait_for(call(3), PATIENCE_S)
    assert (call.spend()["calls"], call.spend()["usd"], held(call)) == (4, Decimal("0.4"), 0)


def test_two_that_call_each_other_do_not_wait_for_ever():
    meet = threading.Barrier(2)

    def ping(deeper: bool) -> Any:
        if deeper:
            meet.wait(PATIENCE_S)
            guarded_pong(False)
        return {"usd": 0.1}

    def pong(deeper: bool) -> Any:
        if deeper:
            meet.wait(PATIENCE_S)
            guarded_ping(False)
        return {"usd": 0.1}

    guarded_ping = guard(ping, budget={"max_usd": 1})
    guarded_pong = guard(pong, budget={"max_usd": 1})
    results = in_threads([lambda: guarded_ping(True), lambda: guarded_pong(True)])
    assert results == [{"usd": 0.1}] * 2
    assert guarded_ping.spend()["calls"] == guarded_pong.spend()["calls"] == 2


async def test_a_task_that_outlives_the_call_it_began_in_is_held_to_the_cap():
    model, begun = Model(takes=0.01), []

    async def agent(starts: bool) -> Any:
        if starts:
            begun.append(asyncio.create_task(later()))
        return await model.asynchronous()

    async def later() -> Any:
        await asyncio.sleep(0.05)
        return await asyncio.gather(*(call(False) for _ in range(50)), return_exceptions=True)

    call = guard_async(agent, budget={"max_usd": 1}, cost=0.1)
    await call(True)
    assert refused(await begun[0]) == 41
    assert (model.calls, call.spend()["usd"]) == (10, 1)


def test_stacked_guards_each_count_a_call_once():
    model = Model()
    inner = guard(model, budget={"max_usd": 5})
    outer = guard(inner, budget={"max_usd": 0.5})
    assert refused(swallowing(outer, 10)) == 5
    assert model.calls == 5
    assert inner.spend()["usd"] == outer.spend()["usd"] == Decimal("0.5")


def test_a_refusal_of_the_inner_guard_costs_the_outer_one_nothing():
    model = Model()
    outer = guard(guard(model, budget={"max_usd": 0.2}), budget={"max_usd": 5})
    assert refused(swallowing(outer, 10)) == 8
    assert (model.calls, outer.spend()["usd"], outer.spend()["calls"], held(outer)) == (2, Decimal("0.2"), 2, 0)


def test_a_stack_of_guards_is_one_call_for_the_run_around_it():
    model = Model()
    stacked = guard(guard(guard(model)))
    with run(budget={"max_calls": 3, "max_usd": 1}) as around:
        assert refused(swallowing(stacked, 5)) == 2
        assert around.caller is not None
        assert (around.caller.spend()["calls"], around.caller.spend()["usd"]) == (3, Decimal("0.3"))
    assert model.calls == 3


async def test_an_async_stack_of_guards_is_one_call_for_the_run_around_it():
    model = Model()
    stacked = guard_async(guard_async(model.asynchronous))
    with run(budget={"max_calls": 3}):
        results = [await asyncio.gather(stacked(), return_exceptions=True) for _ in range(5)]
    assert (model.calls, sum(refused(result) for result in results)) == (3, 2)


def test_each_attempt_of_a_retry_between_two_guards_is_a_call_for_the_run():
    model = Model(ConnectionError(), ConnectionError(), {"usd": 0.1})
    inner = guard(model)

    @functools.wraps(inner)
    def retried() -> Any:
        return next(result for result in swallowing(inner, 5) if isinstance(result, dict))

    with run(budget={"max_calls": 10}) as around:
        swallowing(guard(retried), 1)
        assert around.caller is not None
        assert around.caller.spend()["calls"] == model.calls == 5


def test_guards_on_one_store_count_a_call_once(store: str):
    def budgets() -> Budget:
        return Budget(usd=1, per="user")

    model = Model()
    inner = guard(model, budget=budgets(), store=store)
    outer = guard(inner, budget=budgets(), store=store)
    with run(app="shop", user="alice"):
        results = swallowing(outer, 15)
    assert (model.calls, refused(results)) == (10, 5)
    with run(app="shop", user="bob"):
        outer()
    until(lambda: {s.scope: s.spent for s in outer.budgets()} == {"user:shop/alice": 1, "user:shop/bob": DIME})


async def test_a_task_that_outlives_its_guard_pays_on_their_common_account_itself(store: str):
    model, begun, over = Model(), [], asyncio.Event()

    async def agent() -> Any:
        begun.append(asyncio.create_task(later()))
        return await model.asynchronous()

    async def later() -> list[Any]:
        await over.wait()
        return [await _caught(inner) for _ in range(5)]

    inner = guard_async(model.asynchronous, budget=Budget(calls=3, per="user"), store=store)
    outer = guard_async(agent, budget=Budget(calls=3, per="user"), store=store)
    with run(app="shop", user="alice"):
        await outer()
        over.set()
        assert refused(await begun[0]) == 3
    assert model.calls == 3


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_a_stop_stays_in_its_run():
    model = Model()
    call = guard(model, budget={"max_calls": 2})
    for _ in range(3):
        with run():
            assert refused(swallowing(call, 5)) == 3
    assert model.calls == 6
    assert refused(swallowing(call, 5)) == 3  # outside: the callable's own run


def test_limits_of_a_run_hold_for_all_guarded_calls_in_it():
    model = Model()
    one, other = guard(model), guard(model)
    with run(budget={"max_calls": 3}):
        one()
        other()
        one()
        for call in (one, other):
            with pytest.raises(BudgetExceededError):
                call()
    assert model.calls == 3
    one()  # the run is over


def test_what_the_inner_layer_refuses_is_given_back_to_the_outer_one():
    call = guard(Model(), budget={"max_calls": 1})
    with run(budget={"max_usd": 1, "max_calls": 9}, cost=0.1) as around:
        assert refused(swallowing(call, 5)) == 4
        assert around.caller is not None
        spend = around.caller.spend()
        assert (spend["usd"], spend["calls"], spend["reserved_usd"], held(around.caller)) == (DIME, 1, 0, 0)


def test_a_run_inside_of_a_run_does_not_lift_its_limits():
    model = Model()
    call = guard(model)
    results = []
    with run(budget={"max_calls": 2}):
        for _ in range(5):
            with run(user="alice", budget={"max_calls": 9}):
                results += swallowing(call, 1)
    assert (model.calls, refused(results)) == (2, 3)


async def test_tasks_of_one_run_share_its_limits_and_other_runs_do_not():
    model = Model(takes=0.01)
    call = guard_async(model.asynchronous)

    async def session() -> int:
        with run(budget={"max_calls": 5}):
            return refused(await asyncio.gather(*(call() for _ in range(8)), return_exceptions=True))

    assert await asyncio.gather(*(session() for _ in range(4))) == [3, 3, 3, 3]
    assert model.calls == 20


def test_the_account_of_a_user_goes_over_runs_and_sessions():
    model = Model()
    call = guard(model, budget=Budget(usd=0.3, per="user"))
    results = []
    for session in ("monday", "tuesday"):
        with run(app="shop", user="alice", session=session):
            results += swallowing(call, 2)
    assert [type(result) for result in results] == [dict, dict, dict, BudgetExceededError]
    assert results[-1].scope == "user:shop/alice"
    assert (results[-1].trip.user_id, results[-1].trip.session_id) == ("alice", "tuesday")
    with run(app="shop", user="bob"):
        call()
    assert call.spend("user:shop/bob")["usd"] == DIME


def test_labels_have_budgets_too():
    model = Model()
    call = guard(model, budget=Budget(calls=1, per="label:team"))
    for _ in range(2):
        with run(labels={"team": "red"}):
            swallowing(call, 1)
    with run(labels={"team": "blue"}):
        call()
    assert model.calls == 2


def test_a_run_that_is_left_in_another_context_is_still_over():
    import contextvars

    model = Model()
    call = guard(model)
    block = run(budget={"max_calls": 1})
    around = contextvars.copy_context().run(block.__enter__)
    block.__exit__(None, None, None)
    assert around.ended
    call()


def test_an_error_in_the_block_ends_the_run():
    with pytest.raises(ZeroDivisionError), run(budget={"max_calls": 1}) as around:
        raise ZeroDivisionError
    assert around.ended
    assert not around.states


def test_reset_starts_afresh():
    model = Model({"usd": 0.1, "sig": "same"})
    call = guard(model, budget={"max_usd": 0.5}, loop={"repeats": 3})
    assert refused(swallowing(call, 5)) == 2
    call.reset()
    assert refused(swallowing(call, 5)) == 2
    assert model.calls == 6
    assert call.spend()["usd"] == Decimal("0.6")  # what was spent stays spent


def test_a_call_whose_run_is_reset_meanwhile_belongs_to_the_next(monkeypatch: pytest.MonkeyPatch):
    model, opened, resets = Model(), Caller._open, []

    async def interfered(self: Caller, call: Any, *how: bool) -> None:
        if not resets:
            resets.append(self.reset())
        await opened(self, call, *how)

    monkeypatch.setattr(Caller, "open_now", lambda self, request: None)  # the long way
    call = guard(model, budget={"max_calls": 1}, on_guard_error="allow")
    call()
    call.reset()
    monkeypatch.setattr(Caller, "_open", interfered)
    assert refused(swallowing(call, 3)) == 2
    assert model.calls == 2


def test_many_threads_that_start_at_once_share_one_run(monkeypatch: pytest.MonkeyPatch):
    begin = Caller._begin

    def slow(self: Caller, context: Any) -> Any:
        time.sleep(0.01)
        return begin(self, context)

    monkeypatch.setattr(Caller, "_begin", slow)
    model = Model()
    call = guard(model, budget={"max_calls": 3})
    assert refused(in_threads([call] * 12)) == 9
    assert model.calls == 3


def test_extend_moves_the_cap_and_lets_the_run_go_on():
    model = Model()
    call = guard(model, budget={"max_usd": 0.2})
    assert refused(swallowing(call, 4)) == 2
    [status] = call.extend(usd=0.1)
    assert (status.spent, status.limit) == (Decimal("0.2"), Decimal("0.3"))
    assert refused(swallowing(call, 4)) == 3
    assert model.calls == 3


def test_extend_does_not_lift_a_loop():
    call = guard(Model({"usd": 0.01, "sig": "same"}), budget={"max_usd": 1}, loop={"repeats": 2})
    swallowing(call, 3)
    call.extend(usd=5)
    with pytest.raises(LoopDetectedError):
        call()


def test_trips_are_told_once_and_kept():
    told: list[Any] = []
    call = guard(Model(), budget={"max_calls": 1}, on_trip=told.append)
    swallowing(call, 5)
    until(lambda: told)
    assert [trip.rule for trip in told] == [trip.rule for trip in call.trips] == ["budget"]


def test_on_trip_that_raises_changes_nothing():
    def broken(trip: Any) -> None:
        raise ZeroDivisionError

    model = Model()
    call = guard(model, budget={"max_calls": 1}, on_trip=broken)
    assert refused(swallowing(call, 3)) == 2
    assert model.calls == 1


# ---- windows, the switch, deadlines
# ------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("window", "seconds"), [("per_minute", 60), ("per_hour", 3_600), ("per_day", 86_400), ("per_week", 604_800)]
)
def test_a_window_that_begins_anew_lets_calls_through_again(window: str, seconds: int):
    clock, model = Clock(), Model()
    call = guard(model, budget={window: {"max_calls": 2}}, clock=clock)
    for made in (2, 4, 6):
        assert refused(swallowing(call, 4)) == 2
        assert model.calls == made
        clock.now += seconds


def test_a_window_in_dollars_counts_over_all_runs():
    clock, model = Clock(), Model()
    call = guard(model, budget={"per_hour": 0.3, "max_usd": 0.2}, clock=clock)
    results = []
    for _ in range(3):
        with run():
            results.append(refused(swallowing(call, 3)))
    assert results == [1, 2, 3]
    clock.now += 3_600
    with run():
        assert refused(swallowing(call, 3)) == 1


async def test_a_window_begins_anew_also_after_many_were_refused_at_once():
    clock, model = Clock(), Model(takes=0.01)
    call = guard_async(model.asynchronous, budget={"per_hour": 0.2}, cost=0.1, clock=clock, max_wait_seconds=1)
    await asyncio.gather(*(call() for _ in range(8)), return_exceptions=True)
    assert model.calls == 2
    clock.now += 3_600
    assert await call() == {"usd": 0.1}


def test_a_run_budget_is_not_lifted_by_the_hour():
    clock, model = Clock(), Model()
    call = guard(model, budget={"max_calls": 2, "per_hour": {"max_calls": 5}}, clock=clock)
    swallowing(call, 4)
    clock.now += 7_200
    assert refused(swallowing(call, 3)) == 3
    assert model.calls == 2


def test_the_kill_switch_stops_and_lets_go_again():
    model = Model()
    call = guard(model, name="shop", budget={"max_usd": 5})
    call()
    inner = call.__runguard__.guard
    inner.throw_switch("app:shop", "ops", "drill")
    assert refused(swallowing(call, 3)) == 3
    assert call.trips[-1].rule == "kill_switch"
    inner.release_switch("app:shop")
    call()
    assert model.calls == 2


def test_a_deadline_is_final():
    clock, model = Clock(), Model()
    call = guard(model, max_seconds=10, clock=clock)
    call()
    clock.now += 11
    for _ in range(2):
        with pytest.raises(DeadlineExceededError):
            call()
    assert model.calls == 1


def test_the_limit_on_model_calls_of_the_policy_holds():
    model = Model()
    call = guard(model, max_model_calls=2)
    results = swallowing(call, 4)
    assert [type(result) for result in results[2:]] == [LimitExceededError] * 2
    assert model.calls == 2


# ---- loops -----------------------------------------------------------------------------------------------------------


def loops(signs: Iterator[Any], calls: int = 60, **loop: Any) -> tuple[int, LoopDetectedError | None]:
    """After how many real calls it was found, and the error."""
    made = 0

    def model() -> Any:
        nonlocal made
        made += 1
        return next(signs)

    call = guard(model, loop=loop)
    for _ in range(calls):
        try:
            call()
        except LoopDetectedError as error:
            with pytest.raises(LoopDetectedError):
                call()
            return made, error
    return made, None


@pytest.mark.parametrize("repeats", [2, 3, 5])
@pytest.mark.parametrize("period", range(1, 7))
def test_a_circle_of_any_length_is_found_in_its_last_round(period: int, repeats: int):
    names = tuple(f"step{n}" for n in range(period))
    made, error = loops(iter([{"sig": name} for name in names] * 10), repeats=repeats, max_cycle_len=6)
    assert error is not None
    assert made == period * repeats
    assert (error.pattern, error.repeats, error.limit) == (names, repeats, repeats)


def test_a_longer_circle_than_asked_for_is_none():
    made, error = loops(iter([{"sig": name} for name in "abcde"] * 20), repeats=3, max_cycle_len=4)
    assert (made, error) == (60, None)


def test_a_prelude_does_not_hide_a_circle():
    made, error = loops(iter([{"sig": s} for s in "xyz" + "ab" * 10]), repeats=3, max_cycle_len=4)
    assert error is not None
    assert made == 9
    assert error.pattern == ("a", "b")


@pytest.mark.parametrize("result", [lambda n: n, lambda n: f"page {n}", lambda n: {"rows": [n]}])
def test_changing_results_are_progress(result: Callable[[int], Any]):
    assert loops(({"sig": "next_page", "result": result(n)} for n in range(1_000)), repeats=3)[1] is None


def test_equal_results_are_none():
    made, error = loops(({"sig": "search", "result": {"rows": []}} for _ in range(99)), repeats=3)
    assert made == 3
    assert error is not None


def test_steps_without_a_sign_are_left_out():
    assert loops(({"sig": None} for _ in range(99)), repeats=2)[1] is None
    made, error = loops(iter([{"sig": "a"}, {"sig": None}] * 30), repeats=3)
    assert made == 5  # a, -, a, -, a
    assert error is not None


def test_tool_calls_of_a_response_are_its_sign():
    def answer(args: str) -> Any:
        function = {"name": "search", "arguments": args}
        return {
            "choices": [
                {"message": {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}}
            ]
        }

    made, error = loops((answer('{"q": "same"}') for _ in range(99)), repeats=3)
    assert made == 3
    assert error is not None
    assert error.pattern == ("search",)
    assert loops((answer(f'{{"q": {n}}}') for n in range(99)), repeats=3)[1] is None


def test_a_signature_function_says_what_a_step_was():
    model = Model(*[{"text": word} for word in ("Hi", "hi", "HI", "hi")])
    call = guard(model, loop={"repeats": 3}, signature=lambda result: result["text"].lower())
    assert refused(swallowing(call, 5)) == 2
    assert model.calls == 3


@pytest.mark.parametrize("sign", [lambda r: 1 / 0, lambda r: None])
def test_a_signature_that_fails_or_says_nothing_leaves_the_call_out(sign: Callable[[Any], Any]):
    tool = {"id": "1", "function": {"name": "search", "arguments": "{}"}}
    model = Model({"sig": "same", "response": {"choices": [{"message": {"tool_calls": [tool]}}]}})
    assert refused(swallowing(guard(model, loop={"repeats": 2}, signature=sign), 9)) == 0
    assert refused(swallowing(guard(model, loop={"repeats": 2}), 9)) == 7


@pytest.mark.parametrize("sign", [1, ("a", 1), {"tool": "x", "args": [1]}, b"raw", 2.5])
def test_signs_need_not_be_texts(sign: Any):
    made, error = loops(({"sig": sign} for _ in range(9)), repeats=3)
    assert made == 3
    assert error is not None
    assert pickle.loads(pickle.dumps(error)).pattern == error.pattern


def test_without_loop_nothing_is_looked_for():
    assert refused(swallowing(guard(Model({"sig": "same"})), 30)) == 0
    assert refused(swallowing(guard(Model({"sig": "same"}), loop=False), 30)) == 0
    assert refused(swallowing(guard(Model({"sig": "same"}), loop=True), 30)) == 27


# ---- the context -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["max_context_tokens", "maxContextTokens"])
def test_a_prompt_that_would_not_fit_is_not_sent(name: str):
    model = Model()
    call = guard(model, context={name: 1_000, "headroom": 100}, tokens=lambda messages, **_: len(messages))
    call("x" * 900, temperature=0)
    with pytest.raises(ContextOverflowError) as overflow:
        call("x" * 901)
    assert (overflow.value.projected_tokens, overflow.value.limit) == (901, 900)
    with pytest.raises(ContextOverflowError):
        call("x")  # sticky
    assert model.calls == 1


async def test_tokens_may_be_counted_by_a_coroutine():
    async def count(messages: str) -> int:
        await asyncio.sleep(0)
        return len(messages)

    call = guard_async(Model().asynchronous, context={"max_context_tokens": 10}, tokens=count)
    await call("x" * 10)
    with pytest.raises(ContextOverflowError):
        await call("x" * 11)


@pytest.mark.parametrize(
    "count",
    [lambda m: 1 / 0, lambda m: 0, lambda m: -5, lambda m: True, lambda m: "9", lambda m: None, lambda m: float("nan")],
)
def test_a_count_that_fails_is_replaced_by_an_estimate(count: Callable[[Any], Any], caplog: pytest.LogCaptureFixture):
    model = Model()
    call = guard(model, context={"max_context_tokens": 1_000}, tokens=count)
    call("short")
    assert "tokens_failed" in caplog.text
    with pytest.raises(ContextOverflowError):
        call("long " * 10_000)
    assert model.calls == 1


# ---- the breaker -----------------------------------------------------------------------------------------------------


def test_a_breaker_opens_probes_and_closes():
    clock, model = Clock(), Model(*[ConnectionError("away")] * 4, {"usd": 0})
    call = guard(model, breaker={"failures": 3, "reset_seconds": 30}, clock=clock)
    results = swallowing(call, 6)
    assert [type(result) for result in results] == [ConnectionError] * 3 + [CircuitOpenError] * 3
    assert model.calls == 3
    clock.now += 10
    with pytest.raises(CircuitOpenError) as refusal:
        call()
    assert refusal.value.retry_after == 20
    clock.now += 20
    assert [type(result) for result in swallowing(call, 2)] == [ConnectionError, CircuitOpenError]  # the probe failed
    clock.now += 30
    assert [type(result) for result in swallowing(call, 3)] == [dict] * 3
    assert model.calls == 7


@pytest.mark.parametrize("fault", [Status(400), Status(401), Status(404), Status(422), KeyboardInterrupt()])
def test_what_is_not_the_providers_fault_opens_nothing(fault: BaseException):
    model = Model(fault)
    call = guard(model, breaker={"failures": 2})
    for _ in range(6):
        with pytest.raises(type(fault)):
            call()
    assert model.calls == 6


def test_a_refusal_of_an_inner_guard_opens_no_breaker():
    def agent() -> Any:
        return inner()

    inner = guard(Model(), budget={"max_calls": 1})
    call = guard(agent, breaker={"failures": 2})
    assert CircuitOpenError not in {type(result) for result in swallowing(call, 8)}


def test_one_failure_is_enough_where_that_is_asked_for():
    model = Model(OSError())
    assert refused(swallowing(guard(model, breaker={"failures": 1}), 4)) == 3
    assert model.calls == 1


def test_a_success_between_keeps_it_closed():
    model = Model(*[OSError(), OSError(), {"usd": 0}] * 6)
    call = guard(model, breaker={"failures": 3})
    swallowing(call, 18)
    assert model.calls == 18


def test_one_probe_at_a_time():
    clock, model = Clock(), Model(OSError(), OSError(), {"usd": 0})
    under_way, come_back = threading.Event(), threading.Event()

    def slow() -> Any:
        if model.calls == 2:
            under_way.set()
            come_back.wait(PATIENCE_S)
        return model()

    call = guard(slow, breaker={"failures": 2, "reset_seconds": 5}, clock=clock)
    swallowing(call, 3)
    clock.now += 5
    probe = threading.Thread(target=call, daemon=True)
    probe.start()
    assert under_way.wait(PATIENCE_S)
    assert [type(result) for result in in_threads([call] * 5)] == [CircuitOpenError] * 5
    come_back.set()
    probe.join(PATIENCE_S)
    assert call() == {"usd": 0}
    assert model.calls == 4


# ---- what cost= may be
# -------------------------------------------------------------------------------------------------


class Euros(float):
    """A number of somebody's library, as numpy has them."""

    def __repr__(self) -> str:
        return f"Euros({float(self)})"


@pytest.mark.parametrize(
    "cost", [0.1, Decimal("0.1"), Euros(0.1), lambda _: 0.1, lambda _: Decimal("0.1"), lambda _: Euros(0.1)]
)
def test_a_cost_is_exact(cost: Any):
    model = Model("text")
    call = guard(model, budget={"max_usd": 1}, cost=cost)
    swallowing(call, 12)
    assert (model.calls, call.spend()["usd"]) == (10, 1)


def test_a_cost_of_input_and_output_tokens():
    model = Model({"input_tokens": 100, "output_tokens": 50})
    seen = []

    def cost(tokens_in: int, tokens_out: int) -> float:
        seen.append((tokens_in, tokens_out))
        return tokens_in * 0.001 + tokens_out * 0.002

    call = guard(model, budget={"max_usd": 0.6}, cost=cost)
    assert refused(swallowing(call, 5)) == 2
    assert set(seen) == {(100, 50)}
    assert call.spend()["usd"] == Decimal("0.6")


@pytest.mark.parametrize(
    "cost", [lambda r: 1 / 0, lambda r: float("nan"), lambda r: -1, lambda r: True, lambda r: "0.1", lambda r: None]
)
def test_a_cost_that_fails_is_unknown(cost: Callable[[Any], Any], caplog: pytest.LogCaptureFixture):
    model = Model("text")
    call = guard(model, budget={"max_usd": 1}, cost=cost)
    assert [type(result) for result in swallowing(call, 3)] == [str, UnpricedModelError, UnpricedModelError]
    assert model.calls == 1
    assert "cost_failed" in caplog.text


def test_the_cost_that_is_given_wins_over_what_the_result_says():
    call = guard(Model({"usd": 9}), budget={"max_usd": 1}, cost=0.1)
    assert refused(swallowing(call, 11)) == 1
    assert call.spend()["usd"] == 1


# ---- modes and faults of our own
# ---------------------------------------------------------------------------------------


def test_shadow_lets_everything_through_and_tells_what_would_have_happened():
    told: list[Any] = []
    model = Model({"usd": 0.5, "sig": "same"})
    call = guard(model, budget={"max_usd": 1}, loop={"repeats": 3}, breaker=True, mode="shadow", on_trip=told.append)
    assert refused(swallowing(call, 10)) == 0
    assert model.calls == 10
    assert call.spend()["usd"] == 5
    until(lambda: {trip.rule for trip in told} == {"budget", "cycle"})
    assert not any(trip.enforced for trip in told)


def test_shadow_does_not_serialise_calls_of_unknown_cost():
    model = Model(takes=0.05)
    in_threads([guard(model, budget={"max_usd": 1}, mode="shadow")] * 8)
    assert model.most_at_once > 1


def test_off_does_nothing_at_all():
    model = Model({"usd": 5, "sig": "same"})
    call = guard(model, budget={"max_usd": 1}, loop={"repeats": 2}, mode="off")
    assert refused(swallowing(call, 10)) == 0
    assert (model.calls, call.spend()["calls"], call.trips) == (10, 0, call.trips)
    with run(budget={"max_calls": 1}, mode="off") as around:
        assert refused(swallowing(guard(model), 5)) == 0
        assert around.caller is not None
        assert around.caller.spend()["calls"] == 0


@pytest.mark.parametrize("mode", ["allow", "block"])
def test_a_fault_of_the_guard_means_what_the_policy_says(mode: str, monkeypatch: pytest.MonkeyPatch):
    def broken(self: Caller, request: Any) -> Any:
        if armed:
            raise ZeroDivisionError
        return 0, 0

    armed: list[bool] = []
    monkeypatch.setattr(Costs, "bound", broken)
    model = Model()
    call = guard(model, budget={"max_calls": 9}, on_guard_error=mode)
    call()
    armed.append(True)
    results = in_threads([lambda: swallowing(call, 3)])[0]
    assert [type(result) for result in results] == ([dict] if mode == "allow" else [GuardFailedError]) * 3
    assert model.calls == (4 if mode == "allow" else 1)
    armed.clear()
    call()  # it works again


def test_a_fault_in_booking_does_not_take_the_result_away(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Caller, "_book", lambda self, call, told, result: 1 / 0)
    call = guard(Model(), budget={"max_usd": 1})
    assert in_time(call) == {"usd": 0.1}
    assert call.__runguard__.guard.guard_errors == 1


# ---- loops, threads and processes
# ----------------------------------------------------------------------------------------


async def test_a_sync_guard_works_on_a_running_loop(store: str):
    for where in ("memory", store):
        model = Model()
        call = guard(model, budget={"max_usd": 0.3}, store=where)
        assert refused(swallowing(call, 5)) == 2
        assert model.calls == 3


async def test_a_sync_call_on_the_loop_does_not_wait_for_an_async_one_of_its_run():
    slow, quick = Model(takes=0.1), Model()
    waits, blocks = guard_async(slow.asynchronous), guard(quick)
    with run(budget={"max_usd": 1}):
        task = asyncio.create_task(waits())
        await asyncio.sleep(0.02)
        assert blocks() == {"usd": 0.1}  # would block the loop that the other one needs
        assert await task == {"usd": 0.1}
        assert waits.spend()["calls"] == blocks.spend()["calls"] == 1


def test_two_loops_in_two_threads_share_one_cap(store: str):
    for where in ("memory", store):
        model = Model(takes=0.005)
        call = guard_async(model.asynchronous, budget={"max_usd": 1}, store=where)

        async def many(call: Any = call) -> int:
            return refused(await asyncio.gather(*(call() for _ in range(15)), return_exceptions=True))

        assert sum(in_threads([lambda many=many: asyncio.run(many())] * 2)) == 20  # type: ignore[misc]
        assert model.calls == 10
        assert call.spend()["usd"] == 1


def test_one_guard_on_one_loop_after_the_other():
    model = Model()
    call = guard_async(model.asynchronous, budget={"max_calls": 4})
    results = [asyncio.run(asyncio.wait_for(_caught(call), PATIENCE_S)) for _ in range(6)]
    assert refused(results) == 2
    assert model.calls == 4


async def _caught(call: Callable[..., Any]) -> Any:
    try:
        return await call()
    except RunStoppedError as error:
        return error


def test_two_callers_on_one_store_share_a_users_budget(store: str):
    model = Model(takes=0.002)
    one = guard(model, budget=Budget(usd=1, per="user"), store=store)
    other = guard(model, budget=Budget(usd=1, per="user"), store=store)

    def job(call: Any) -> Any:
        with run(app="shop", user="alice"):
            return call()

    results = in_threads([functools.partial(job, call) for call in (one, other) * 10])
    assert (model.calls, refused(results)) == (10, 10)
    assert one.spend()["usd"] + other.spend()["usd"] == 1


def test_another_process_knows_what_was_spent(store: str):
    model = Model()
    call = guard(model, budget=Budget(usd=0.3, per="user"), store=store)
    with run(app="shop", user="alice"):
        swallowing(call, 2)
    script = textwrap.dedent(f"""
        import logging, runguard
        logging.disable(logging.CRITICAL)
        made = []
        budget = runguard.Budget(usd=0.3, per="user")
        call = runguard.guard(lambda: made.append(1) or {{"usd": 0.1}}, budget=budget, store={store!r})
        with runguard.run(app="shop", user="alice"):
            for _ in range(3):
                try:
                    call()
                except runguard.BudgetExceededError:
                    pass
        raise SystemExit(len(made))
    """)
    until(lambda: {status.spent for status in call.budgets()} == {Decimal("0.2")})
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_while_the_first_call_is_under_way(tmp_path: Path):
    script = textwrap.dedent("""
        import os, threading, time, runguard
        left = threading.Event()
        def model(waits):
            if waits:
                left.wait(20)
            return {"usd": 0.1}
        call = runguard.guard(model, budget={"max_usd": 0.2})
        thread = threading.Thread(target=call, args=(True,), daemon=True)
        thread.start()
        time.sleep(0.1)
        child = os.fork()
        if child == 0:
            done = threading.Thread(target=call, args=(False,), daemon=True)
            done.start()
            done.join(10)
            os._exit(1 if done.is_alive() else 0)
        _, status = os.waitpid(child, 0)
        left.set()
        thread.join()
        assert call.spend()["calls"] == 1
        raise SystemExit(os.waitstatus_to_exitcode(status))
    """)
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


def test_a_long_run_does_not_grow():
    call = guard(
        lambda n: {"usd": 0.00001, "sig": n, "tokens": 3}, budget={"max_usd": 100}, loop={"repeats": 3}, breaker=True
    )
    number = iter(range(10**9))

    def many(count: int) -> int:
        for _ in range(count):
            call(next(number) % 1_000)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = many(1_050)  # every sign was seen by then
        assert many(450) - before < 25_000
    finally:
        tracemalloc.stop()
    objects = len(gc.get_objects())
    many(1_500)
    assert len(gc.get_objects()) - objects < 500
    assert call.spend()["calls"] == 3_000


def test_runs_leave_nothing_behind():
    call = guard(Model({"usd": 0.01}))
    for _ in range(50):
        with run(app="left behind", budget={"max_usd": 1}):
            call()
    assert not call.__runguard__.guard.runs
    gc.collect()
    assert sum(type(thing) is Caller and thing.name == "left behind" for thing in gc.get_objects()) <= 1


# ---- errors are data
# -----------------------------------------------------------------------------------------------------


def _stopped(call: Callable[..., Any], *args: Any) -> RunStoppedError:
    return next(result for result in swallowing(call, 9, *args) if isinstance(result, RunStoppedError))


ERRORS: dict[str, tuple[Callable[[], RunStoppedError], type[RunStoppedError], tuple[str, ...]]] = {
    "budget": (
        lambda: _stopped(guard(Model(), budget={"max_usd": 0.2})),
        BudgetExceededError,
        ("spent", "limit", "scope", "reserved"),
    ),
    "tokens": (
        lambda: _stopped(guard(Model({"tokens": 5}), budget={"max_tokens": 9})),
        BudgetExceededError,
        ("spent", "limit", "scope", "reserved"),
    ),
    "loop": (
        lambda: _stopped(guard(Model({"sig": "a"}), loop=True)),
        LoopDetectedError,
        ("pattern", "repeats", "limit"),
    ),
    "context": (
        lambda: _stopped(guard(Model(), context={"max_context_tokens": 5}, tokens=len), "x" * 6),
        ContextOverflowError,
        ("projected_tokens", "limit"),
    ),
    "breaker": (lambda: _stopped(guard(Model(OSError()), breaker={"failures": 2})), CircuitOpenError, ("retry_after",)),
    "unpriced": (lambda: _stopped(guard(Model("?"), budget={"max_usd": 1})), UnpricedModelError, ("spent", "scope")),
    "calls": (lambda: _stopped(guard(Model(), max_model_calls=1)), LimitExceededError, ("observed", "limit")),
}


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_tells_its_figures_and_survives_pickling(name: str):
    make, kind, figures = ERRORS[name]
    error = make()
    assert type(error) is kind
    assert isinstance(error, RuntimeError)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(error, protocol))
        assert type(copy) is kind
        assert str(copy) == str(error) == error.trip.message
        assert copy.trip == error.trip
        assert [getattr(copy, figure) for figure in figures] == [getattr(error, figure) for figure in figures]
    assert all(getattr(error, figure) is not None for figure in figures)
    assert error.trip.rule in str(error)


def test_a_budget_error_names_what_is_held():
    error: list[BudgetExceededError] = []

    def model() -> Any:
        if not error:
            error.append(None)  # type: ignore[arg-type]
            error[0] = _stopped(lambda: in_time(call))  # type: ignore[call-overload]
        return {"usd": 0.1}

    call = guard(model, budget={"max_usd": 0.15}, cost=0.1, max_wait_seconds=0)
    call()
    assert (error[0].spent, error[0].reserved, error[0].limit) == (0, DIME, Decimal("0.15"))


# ---- what it looks like
# ----------------------------------------------------------------------------------------------------


def test_the_bare_decorator():
    @guard
    def call_model(prompt: str, *, temperature: float = 0.5) -> str:
        """Asks."""
        return prompt

    assert call_model("hi", temperature=1) == "hi"
    assert (call_model.__name__, call_model.__doc__, call_model.__module__) == ("call_model", "Asks.", __name__)
    assert str(inspect.signature(call_model)) == "(prompt: str, *, temperature: float = 0.5) -> str"
    assert call_model.__wrapped__("x") == "x"  # type: ignore[attr-defined]


def test_the_decorator_with_settings_makes_one_run_per_function():
    settings = guard(budget={"max_calls": 1})
    one, other = settings(Model()), settings(Model())
    assert refused(swallowing(one, 3)) == refused(swallowing(other, 3)) == 2


def test_methods_are_guarded_too():
    class Agent:
        made = 0

        @guard(budget={"max_calls": 2})
        def ask(self, word: str) -> Any:
            self.made += 1
            return self, word

        @staticmethod
        @guard(budget={"max_calls": 1})
        def still(word: str) -> str:
            return word

        @classmethod
        @guard(budget={"max_calls": 1})
        def of_all(cls) -> Any:
            return cls

        @guard_async(budget={"max_calls": 1})
        async def later(self) -> Any:
            return self

    agent = Agent()
    assert agent.ask("hi") == (agent, "hi")
    assert refused(swallowing(agent.ask, 3, "again")) == 2
    assert agent.made == 2
    assert agent.ask.spend()["calls"] == 2  # type: ignore[attr-defined]
    assert (Agent.still("x"), Agent.of_all()) == ("x", Agent)
    assert asyncio.run(agent.later()) is agent
    assert inspect.iscoroutinefunction(agent.later)


@pytest.mark.parametrize("what", ["partial", "bound method", "object", "builtin", "lambda"])
def test_whatever_can_be_called_can_be_guarded(what: str):
    model = Model()
    kinds: dict[str, Callable[..., Any]] = {
        "partial": functools.partial(model, 1),
        "bound method": model.__call__,
        "object": model,
        "builtin": len,
        "lambda": lambda *args: model(),
    }
    call = guard(kinds[what], budget={"max_calls": 1})
    assert refused(swallowing(call, 3, "x")) == 2


async def test_what_async_code_can_be():
    async def coroutine() -> Any:
        return 1

    class Client:
        async def __call__(self) -> Any:
            return 1

    for fn in (coroutine, functools.partial(coroutine), Client(), lambda: coroutine(), lambda: 1):
        call = guard_async(fn, budget={"max_calls": 1})
        assert inspect.iscoroutinefunction(call)
        assert await call() == 1
        with pytest.raises(BudgetExceededError):
            await call()


def test_mixing_up_the_two_is_told():
    async def coroutine() -> None: ...

    async def generator() -> Any:
        yield 1

    def plain() -> Any:
        yield 1

    for fn in (coroutine, generator, functools.partial(coroutine)):
        with pytest.raises(PolicyError, match="guard_async"):
            guard(fn)
    with pytest.raises(PolicyError, match=r"use guard$"):
        guard_async(plain)
    hidden = guard(lambda: coroutine(), budget={"max_calls": 5})
    with pytest.raises(PolicyError, match="guard_async"):
        hidden()
    assert (hidden.spend()["calls"], held(hidden)) == (0, 0)
    for wrong in ({"max_usd": 1}, 3, "text"):
        with pytest.raises(PolicyError, match="keyword"):
            guard(wrong)  # type: ignore[call-overload]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"budget": {"max_ussd": 1}}, r"budget\.max_ussd: .*'max_usd'"),
    ({"budget": {"max_usd": -1}}, r"budget\.max_usd = -1"),
    ({"budget": {"max_usd": float("nan")}}, r"budget\.max_usd = nan"),
    ({"budget": {"max_usd": True}}, r"budget\.max_usd = True"),
    ({"budget": {"max_tokens": 0}}, r"budget\.max_tokens = 0"),
    ({"budget": {"max_calls": 1.5}}, r"budget\.max_calls = 1\.5"),
    ({"budget": {"per_hour": {}}}, r"budget\.per_hour = \{\}"),
    ({"budget": {"per_hour": "lots"}}, r"budget\.per_hour\.max_usd = 'lots'"),
    ({"budget": {"per_hour": {"max_usdd": 1}}}, r"budget\.per_hour\.max_usdd: .*'max_usd'"),
    ({"budget": {"perHour": 1, "per_hour": 2}}, r"budget\.per_hour: given twice"),
    ({"budget": {7: 1}}, r"budget\.7"),
    ({"budget": 3}, r"budget = 3"),
    ({"budget": [1]}, r"budget = \[1\]"),
    ({"loop": {"repeat": 3}}, r"loop\.repeat: .*'repeats'"),
    ({"loop": {"repeats": 1}}, r"loop\.repeats = 1"),
    ({"loop": {"max_cycle_len": 0}}, r"loop\.max_cycle_len = 0"),
    ({"loop": 3}, r"loop = 3"),
    ({"context": {"max_tokens": 5}}, r"context\.max_tokens: .*'max_context_tokens'"),
    ({"context": {"maxContextTokens": 10, "headroom": 10}}, r"context\.headroom = 10"),
    ({"context": {"max_context_tokens": -1}}, r"context\.max_context_tokens = -1"),
    ({"breaker": {"failure": 1}}, r"breaker\.failure: .*'failures'"),
    ({"breaker": {"failures": 0}}, r"breaker\.failures = 0"),
    ({"breaker": {"reset_seconds": -1}}, r"breaker\.reset_seconds = -1"),
    ({"tokens": 5}, r"tokens = 5"),
    ({"signature": "x"}, r"signature = 'x'"),
    ({"cost": -1}, r"cost = -1"),
    ({"cost": True}, r"cost = True"),
    ({"cost": float("nan")}, r"cost = nan"),
    ({"cost": lambda a, b, c: 1}, r"cost takes 3 arguments"),
    ({"on_trip": 3}, r"on_trip = 3"),
    ({"store": "files:///x"}, r"store = 'files:…'"),
    ({"mode": "enforced"}, r"mode = 'enforced'"),
    ({"budgt": {}}, r"budgt: .*'budget'"),
    ({"lop": True}, r"lop: .*'loop'"),
    ({"cycle_repeats": 3}, r"cycle_repeats: say loop=\{'repeats'"),
    ({"max_context_tokens": 3}, r"max_context_tokens: say context="),
    ({"rules": {"cycle": False}}, r"rules: .*loop="),
]


@pytest.mark.parametrize(("keywords", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_cannot_be_meant_fails_before_the_first_call(keywords: dict[str, Any], message: str):
    for make in (guard, guard_async, lambda **given: guard(Model(), **given), lambda **given: run(**given).__enter__()):
        with pytest.raises(PolicyError, match=message):
            make(**keywords)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [({"usr": "x"}, "'user'"), ({"user": 3}, "user = 3"), ({"labels": {"a": 1}}, "labels"), ({"labels": 3}, "labels")],
)
def test_a_run_of_nobody_is_refused(keywords: dict[str, Any], message: str):
    with pytest.raises(PolicyError, match=message), run(**keywords):
        pass


def test_type_checkers_see_the_functions_own_signature(tmp_path: Path):
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        from runguard.functions.wrappers import guard, guard_async

        @guard
        def bare(x: int) -> str: ...

        @guard(budget={"max_usd": 2.0})
        def told(x: int) -> str: ...

        @guard_async(loop=True)
        async def later(x: int) -> str: ...

        reveal_type(bare)
        reveal_type(told)
        reveal_type(later)
        bare("wrong")
        """)
    )
    home = Path(runguard.__file__).parent
    checked = subprocess.run(  # the rest of the package is left aside: reading it takes half a minute
        [
            sys.executable,
            "-m",
            "mypy",
            "--follow-imports=skip",
            "--config-file=",
            str(program),
            str(home / "functions" / "wrappers.py"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(home.parent)},
    ).stdout
    told = [line for line in checked.replace("builtins.", "").splitlines() if "program.py" in line]
    assert sum("def (x: int) -> str" in line for line in told) == 2, checked
    assert sum("def (x: int) -> " in line and "Coroutine[Any, Any, str]" in line for line in told) == 1, checked
    assert sum("[arg-type]" in line for line in told) == 1, checked


def test_names_stand_in_trips_and_figures():
    call = guard(Model(), name="planner", budget={"max_calls": 1})
    error = _stopped(call)
    assert error.trip.agent_path == ("planner",)
    assert error.trip.app == "planner"
    assert list(call.spend()["by_agent"]) == ["planner"]


def test_nothing_of_the_answers_is_logged(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    call = guard(Model({"usd": 0.1, "sig": "s", "result": "a secret"}), budget={"max_usd": 0.2}, loop=True)
    swallowing(call, 4, "another secret")
    assert "runguard.trip" in caplog.text
    assert "secret" not in caplog.text


# ---- what to do next
# -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "result", "advice"),
    [
        ({"loop": {"repeats": 2}}, {"sig": "a"}, r"loop=\{'repeats'"),
        ({"budget": {"max_usd": 1}}, {"answer": "x"}, r"cost=.*prices="),
        ({"budget": {"max_usd": 0.1}}, {"usd": 0.1}, r"fresh budget"),
        (
            {"context": {"max_context_tokens": 10}, "tokens": lambda: 11},
            {"usd": 0.1},
            r"context=\{'max_context_tokens'",
        ),
    ],
)
def test_a_stop_says_what_to_do_in_the_words_of_guard(keywords: dict[str, Any], result: dict[str, Any], advice: str):
    trip = _stopped(guard(Model(result), **keywords)).trip
    assert re.search(advice, trip.resume)
    assert "rules." not in trip.resume
    assert "plugin" not in trip.resume


def test_an_unknown_model_is_named_with_the_line_that_gives_it_a_price():
    call = guard(
        Model({"model": "acme-1", "usage": {"prompt_tokens": 10, "completion_tokens": 5}}), budget={"max_usd": 1}
    )
    stopped = _stopped(call)
    assert isinstance(stopped, UnpricedModelError)
    assert "'acme-1' has no known price" in str(stopped)
    assert "prices={'acme-1'" in str(stopped)
    assert stopped.trip.tokens == 15


def test_reset_inside_of_a_run_begins_afresh_there():
    call = guard(Model(), budget={"max_calls": 1})
    with run(user="alice"):
        assert refused(swallowing(call, 3)) == 2
        call.reset()
        assert refused(swallowing(call, 3)) == 2


def test_what_another_worker_has_granted_lets_a_stopped_one_go_on(tmp_path: Path):
    one, two = (
        guard(Model(), budget=Budget(calls=1, per="user"), store=f"sqlite:///{tmp_path}/guard.db") for _ in range(2)
    )
    with run(user="alice", app="chat"):
        assert refused(swallowing(one, 3)) == 2
        two.extend("user:chat/alice", calls=1)
        assert two.flush(5)
        assert refused(swallowing(one, 3)) == 2


def test_a_free_first_call_does_not_let_everybody_in():
    costs = iter([0.0, *[0.5] * 99])
    call = guard(lambda: {"usd": next(costs)}, budget={"max_usd": 1})
    results = in_threads([lambda: swallowing(call, 1)] * 20)
    assert sum(isinstance(result, dict) for results_of_one in results for result in results_of_one) == 3
    assert call.spend()["usd"] == 1


def test_a_fan_out_inside_of_a_call_that_goes_alone_stays_within_its_cap():
    async def model() -> dict[str, float]:
        await asyncio.sleep(0.01)
        return {"usd": 0.5}

    inner = guard_async(model, budget={"max_usd": 1}, max_wait_seconds=5)

    async def agent() -> dict[str, float]:
        await asyncio.gather(*(inner() for _ in range(20)), return_exceptions=True)
        return {"usd": 0.1}

    asyncio.run(guard_async(agent, budget={"max_usd": 100})())
    assert inner.spend()["usd"] == 1


def test_a_stricter_layer_on_a_shared_account_is_heard(tmp_path: Path):
    store = f"sqlite:///{tmp_path}/guard.db"
    call = guard(Model({"usd": 0.5}), budget={"per_day": 1}, store=store, name="chat")
    for around in ({"budget": {"per_day": 100}}, {"budget": {"per_day": 1}, "mode": "shadow"}):
        with run(app="chat", store=store, **around):
            for _ in range(5):
                swallowing(call, 1)
                assert call.flush(5)
    assert call.spend()["usd"] == 1


def test_a_signature_that_is_content_is_in_no_trip():
    secret = "my password is hunter2"
    trip = _stopped(guard(Model({"sig": secret}), loop={"repeats": 2})).trip
    assert "hunter2" not in repr(trip)
    assert _stopped(guard(Model({"sig": "search.web"}), loop={"repeats": 2})).pattern == ("search.web",)


@pytest.mark.parametrize("mode", ["enforce", "shadow"])
def test_a_refusal_of_an_open_breaker_is_told_like_every_decision(mode: str):
    heard: list[Any] = []

    def away() -> None:
        raise ConnectionError("away")

    call = guard(away, breaker={"failures": 1, "reset_seconds": 60}, on_decision=heard.append, mode=mode)
    assert len(swallowing(call, 3)) == 3
    assert call.flush(5)
    assert {(decision.action.word, decision.finding.rule, decision.enforced) for decision in heard} == {
        ("block", "breaker", mode == "enforce")
    }
