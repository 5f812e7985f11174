"""Guarded calls inside guarded calls, and runs."""

import asyncio
import functools
import threading
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from runguard import (
    Budget,
    BudgetExceededError,
    LoopDetectedError,
    guard,
    guard_async,
    run,
)
from runguard.calls import function_calls as opening
from runguard.calls.function_calls import Caller
from runguard.core.money import Scope
from tests.kit.functions import DIME, Model, caught, held, in_threads, in_time, refused, swallowing
from tests.kit.waiting import PATIENCE_S, until

# ---- calls inside of calls ------------------------------------------------------------------------------------------


def test_recursion_with_a_known_cost_stays_within_the_cap() -> None:
    made = []

    def descend(depth: int) -> Any:
        made.append(depth)
        if depth:
            swallowing(call, 1, depth - 1)
        return {"usd": 0.1}

    call = guard(descend, budget={"max_usd": 1}, cost=0.1, max_wait_seconds=0.05)
    in_time(lambda: call(50))
    assert len(made) == 10
    assert (call.spend()["usd"], held(call)) == (1, Decimal(0))


def test_recursion_without_a_known_cost_neither_hangs_nor_closes_the_budget() -> None:
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
    assert (len(made), call.spend()["usd"], held(call)) == (10, 1, Decimal(0))


async def test_tasks_inside_of_the_first_call_do_not_wait_for_it() -> None:
    async def fan_out(width: int) -> Any:
        await asyncio.gather(*(call(0) for _ in range(width)))
        return {"usd": 0.1}

    call = guard_async(fan_out, budget={"max_usd": 1})
    await asyncio.wait_for(call(3), PATIENCE_S)
    assert (call.spend()["calls"], call.spend()["usd"], held(call)) == (4, Decimal("0.4"), Decimal(0))


def test_two_that_call_each_other_do_not_wait_for_ever() -> None:
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


async def test_a_task_that_outlives_the_call_it_began_in_is_held_to_the_cap() -> None:
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


def test_stacked_guards_each_count_a_call_once() -> None:
    model = Model()
    inner = guard(model, budget={"max_usd": 5})
    outer = guard(inner, budget={"max_usd": 0.5})
    assert refused(swallowing(outer, 10)) == 5
    assert model.calls == 5
    assert inner.spend()["usd"] == outer.spend()["usd"] == Decimal("0.5")


def test_a_refusal_of_the_inner_guard_costs_the_outer_one_nothing() -> None:
    model = Model()
    outer = guard(guard(model, budget={"max_usd": 0.2}), budget={"max_usd": 5})
    assert refused(swallowing(outer, 10)) == 8
    assert (model.calls, outer.spend()["usd"], outer.spend()["calls"], held(outer)) == (
        2,
        Decimal("0.2"),
        2,
        Decimal(0),
    )


def test_a_stack_of_guards_is_one_call_for_the_run_around_it() -> None:
    model = Model()
    stacked = guard(guard(guard(model)))
    with run(budget={"max_calls": 3, "max_usd": 1}) as around:
        assert refused(swallowing(stacked, 5)) == 2
        assert around.caller is not None
        assert (around.caller.spend()["calls"], around.caller.spend()["usd"]) == (3, Decimal("0.3"))
    assert model.calls == 3


async def test_an_async_stack_of_guards_is_one_call_for_the_run_around_it() -> None:
    model = Model()
    stacked = guard_async(guard_async(model.asynchronous))
    with run(budget={"max_calls": 3}):
        results = [await asyncio.gather(stacked(), return_exceptions=True) for _ in range(5)]
    assert (model.calls, sum(refused(result) for result in results)) == (3, 2)


def test_each_attempt_of_a_retry_between_two_guards_is_a_call_for_the_run() -> None:
    model = Model(ConnectionError(), ConnectionError(), {"usd": 0.1})
    inner = guard(model)

    @functools.wraps(inner)
    def retried() -> Any:
        return next(result for result in swallowing(inner, 5) if isinstance(result, dict))

    with run(budget={"max_calls": 10}) as around:
        swallowing(guard(retried), 1)
        assert around.caller is not None
        assert around.caller.spend()["calls"] == model.calls == 5


def test_guards_on_one_store_count_a_call_once(store: str) -> None:
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


async def test_a_task_that_outlives_its_guard_pays_on_their_common_account_itself(store: str) -> None:
    model, begun, over = Model(), [], asyncio.Event()

    async def agent() -> Any:
        begun.append(asyncio.create_task(later()))
        return await model.asynchronous()

    async def later() -> list[Any]:
        await over.wait()
        return [await caught(inner) for _ in range(5)]

    inner = guard_async(model.asynchronous, budget=Budget(calls=3, per="user"), store=store)
    outer = guard_async(agent, budget=Budget(calls=3, per="user"), store=store)
    with run(app="shop", user="alice"):
        await outer()
        over.set()
        assert refused(await begun[0]) == 3
    assert model.calls == 3


# ---- runs -----------------------------------------------------------------------------------------------------------


def test_limits_of_a_run_hold_for_all_guarded_calls_in_it() -> None:
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


def test_what_the_inner_layer_refuses_is_given_back_to_the_outer_one() -> None:
    call = guard(Model(), budget={"max_calls": 1})
    with run(budget={"max_usd": 1, "max_calls": 9}, cost=0.1) as around:
        assert refused(swallowing(call, 5)) == 4
        assert around.caller is not None
        spend = around.caller.spend()
        assert (spend["usd"], spend["calls"], spend["reserved_usd"], held(around.caller)) == (DIME, 1, 0, Decimal(0))


def test_a_run_inside_of_a_run_does_not_lift_its_limits() -> None:
    model = Model()
    call = guard(model)
    results = []
    with run(budget={"max_calls": 2}):
        for _ in range(5):
            with run(user="alice", budget={"max_calls": 9}):
                results += swallowing(call, 1)
    assert (model.calls, refused(results)) == (2, 3)


def test_the_account_of_a_user_goes_over_runs_and_sessions() -> None:
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


def test_labels_have_budgets_too() -> None:
    model = Model()
    call = guard(model, budget=Budget(calls=1, per="label:team"))
    for _ in range(2):
        with run(labels={"team": "red"}):
            swallowing(call, 1)
    with run(labels={"team": "blue"}):
        call()
    assert model.calls == 2


def test_a_run_that_is_left_in_another_context_is_still_over() -> None:
    import contextvars

    model = Model()
    call = guard(model)
    block = run(budget={"max_calls": 1})
    around = contextvars.copy_context().run(block.__enter__)
    block.__exit__(None, None, None)
    assert around.ended
    call()


def test_reset_starts_afresh() -> None:
    model = Model({"usd": 0.1, "sig": "same"})
    call = guard(model, budget={"max_usd": 0.5}, loop={"repeats": 3})
    assert refused(swallowing(call, 5)) == 2
    call.reset()
    assert refused(swallowing(call, 5)) == 2
    assert model.calls == 6
    assert call.spend()["usd"] == Decimal("0.6")  # what was spent stays spent


def test_a_call_whose_run_is_reset_meanwhile_belongs_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    model, opened = Model(), opening._open
    resets: list[Any] = []

    async def interfered(call: Any, *how: Any) -> None:
        if not resets:
            resets.append(call.caller.reset())
        await opened(call, *how)

    monkeypatch.setattr(opening, "_open_at_once", lambda call, owners: False)  # the long way
    call = guard(model, budget={"max_calls": 1}, on_guard_error="allow")
    call()
    call.reset()
    monkeypatch.setattr(opening, "_open", interfered)
    assert refused(swallowing(call, 3)) == 2
    assert model.calls == 2


def test_many_threads_that_start_at_once_share_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Caller._begin

    def slow(self: Caller, *given: Any) -> Any:
        time.sleep(0.01)
        return begin(self, *given)

    monkeypatch.setattr(Caller, "_begin", slow)
    model = Model()
    call = guard(model, budget={"max_calls": 3})
    assert refused(in_threads([call] * 12)) == 9
    assert model.calls == 3


def test_extend_moves_the_cap_and_lets_the_run_go_on() -> None:
    model = Model()
    call = guard(model, budget={"max_usd": 0.2})
    assert refused(swallowing(call, 4)) == 2
    [status] = call.extend(usd=0.1)
    assert (status.spent, status.limit) == (Decimal("0.2"), Decimal("0.3"))
    assert refused(swallowing(call, 4)) == 3
    assert model.calls == 3


def test_extend_does_not_lift_a_loop() -> None:
    call = guard(Model({"usd": 0.01, "sig": "same"}), budget={"max_usd": 1}, loop={"repeats": 2})
    swallowing(call, 3)
    call.extend(usd=5)
    with pytest.raises(LoopDetectedError):
        call()


def test_on_trip_that_raises_changes_nothing() -> None:
    def broken(trip: Any) -> None:
        raise ZeroDivisionError

    model = Model()
    call = guard(model, budget={"max_calls": 1}, on_trip=broken)
    assert refused(swallowing(call, 3)) == 2
    assert model.calls == 1


# ---- Code of the user that runs while a call is asked for: it keeps nobody else waiting, and may make guarded calls


def in_thread(do: Any, seconds: float = 20.0) -> Any:
    """Return what ``do`` returns; fail where it takes longer, as a call that waits for itself does."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(do()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, "the call did not come back"
    return results[0]


def test_a_cap_function_may_make_a_guarded_call(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/guard.db"
    plans = guard(lambda: {"usd": 0.01}, budget={"max_usd": 1}, store=store)

    def cap(_: Scope) -> float:
        plans()
        return 5.0

    ask = guard(lambda: {"usd": 0.01}, budget=[Budget(usd=cap, per="app")], store=store)
    assert in_thread(ask) == {"usd": 0.01}
    assert plans.spend()["calls"] == 1


def test_a_slow_cap_function_keeps_no_other_guard_waiting(tmp_path: Path) -> None:
    others_are_done, is_asked = threading.Event(), threading.Event()

    def cap(_: Scope) -> float:
        is_asked.set()
        assert others_are_done.wait(20)
        return 5.0

    slow = guard(lambda: {"usd": 0.01}, budget=[Budget(usd=cap, per="app")], store=f"sqlite:///{tmp_path}/slow.db")
    quick = guard(lambda: {"usd": 0.01}, budget={"max_usd": 1}, store=f"sqlite:///{tmp_path}/quick.db")
    waiting = threading.Thread(target=slow, daemon=True)
    waiting.start()
    assert is_asked.wait(20)
    for _ in range(3):
        in_thread(quick)
    others_are_done.set()
    waiting.join(20)
    assert slow.spend()["calls"] == 1
