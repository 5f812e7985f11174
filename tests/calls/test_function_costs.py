"""cost=, modes, faults of the guard itself, loops, threads, processes."""

import asyncio
import functools
import gc
import os
import subprocess
import sys
import textwrap
import tracemalloc
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import pytest

from runguard import (
    Budget,
    GuardFailedError,
    UnpricedModelError,
    guard,
    guard_async,
    run,
)
from runguard.calls import function_calls as booking
from runguard.calls.function_calls import Caller
from runguard.calls.function_settings import Costs
from tests.kit.examples import each_row
from tests.kit.functions import Model, in_threads, in_time, refused, swallowing
from tests.kit.waiting import until, until_async

# ---- what cost= may be ----------------------------------------------------------------------------------------------


class Euros(float):
    """A number of somebody's library, as numpy has them."""

    def __repr__(self) -> str:
        return f"Euros({float(self)})"


@each_row(
    "cost",
    [0.1, Decimal("0.1"), Euros(0.1), lambda _: 0.1, lambda _: Decimal("0.1"), lambda _: Euros(0.1), lambda _: "0.1"],
)
def test_a_cost_is_exact(cost: Any) -> None:
    model = Model("text")
    call = guard(model, budget={"max_usd": 1}, cost=cost)
    swallowing(call, 12)
    assert (model.calls, call.spend()["usd"]) == (10, 1)


def test_a_cost_of_input_and_output_tokens() -> None:
    model = Model({"input_tokens": 100, "output_tokens": 50})
    seen = []

    def cost(tokens_in: int, tokens_out: int) -> float:
        seen.append((tokens_in, tokens_out))
        return tokens_in * 0.001 + tokens_out * 0.002

    call = guard(model, budget={"max_usd": 0.6}, cost=cost)
    assert refused(swallowing(call, 5)) == 2
    assert set(seen) == {(100, 50)}
    assert call.spend()["usd"] == Decimal("0.6")


@each_row(
    ("usage", "output", "estimated"),
    [
        ({"prompt_tokens": 900}, 250, 1),
        ({"prompt_tokens": 900, "completion_tokens": 0}, 250, 1),
        ({"prompt_tokens": 900, "total_tokens": 900}, 0, 0),  # a total says that there was none
        ({"prompt_tokens": 900, "completion_tokens": 5}, 5, 0),
    ],
)
def test_an_output_that_is_not_reported_is_estimated_from_the_text(
    usage: dict[str, int], output: int, estimated: int
) -> None:
    answer = {"model": "gpt-4o", "choices": [{"message": {"content": "word " * 200}}], "usage": usage}
    call = guard(Model(answer), max_usd=1)
    call("question")
    spent = call.spend()
    assert (spent["input_tokens"], spent["output_tokens"], spent["estimated_calls"]) == (900, output, estimated)


def test_an_embedding_has_no_output_to_estimate() -> None:
    answer = {"model": "text-embedding-3-small", "data": [{"embedding": [0.1] * 10}], "usage": {"prompt_tokens": 900}}
    call = guard(Model(answer), max_usd=1)
    call("text")
    assert (call.spend()["output_tokens"], call.spend()["estimated_calls"]) == (0, 0)


@pytest.mark.parametrize(
    "cost", [lambda r: 1 / 0, lambda r: float("nan"), lambda r: -1, lambda r: True, lambda r: "much", lambda r: None]
)
def test_a_cost_that_fails_is_unknown(cost: Callable[[Any], Any], caplog: pytest.LogCaptureFixture) -> None:
    model = Model("text")
    call = guard(model, budget={"max_usd": 1}, cost=cost)
    assert [type(result) for result in swallowing(call, 3)] == [str, UnpricedModelError, UnpricedModelError]
    assert model.calls == 1
    assert "cost_failed" in caplog.text


def test_the_cost_that_is_given_wins_over_what_the_result_says() -> None:
    call = guard(Model({"usd": 9}), budget={"max_usd": 1}, cost=0.1)
    assert refused(swallowing(call, 11)) == 1
    assert call.spend()["usd"] == 1


# ---- modes and faults of our own ------------------------------------------------------------------------------------


def test_shadow_lets_everything_through_and_tells_what_would_have_happened() -> None:
    told: list[Any] = []
    model = Model({"usd": 0.5, "sig": "same"})
    call = guard(model, budget={"max_usd": 1}, loop={"repeats": 3}, breaker=True, mode="shadow", on_trip=told.append)
    assert refused(swallowing(call, 10)) == 0
    assert model.calls == 10
    assert call.spend()["usd"] == 5
    until(lambda: {trip.rule for trip in told} == {"budget", "cycle"})
    assert not any(trip.enforced for trip in told)


def test_shadow_does_not_serialise_calls_of_unknown_cost() -> None:
    model = Model(takes=0.05)
    in_threads([guard(model, budget={"max_usd": 1}, mode="shadow")] * 8)
    assert model.most_at_once > 1


def test_off_does_nothing_at_all() -> None:
    model = Model({"usd": 5, "sig": "same"})
    call = guard(model, budget={"max_usd": 1}, loop={"repeats": 2}, mode="off")
    assert refused(swallowing(call, 10)) == 0
    assert (model.calls, call.spend()["calls"], call.trips) == (10, 0, call.trips)
    with run(budget={"max_calls": 1}, mode="off") as around:
        assert refused(swallowing(guard(model), 5)) == 0
        assert around.caller is not None
        assert around.caller.spend()["calls"] == 0


@pytest.mark.parametrize("mode", ["allow", "block"])
def test_a_fault_of_the_guard_means_what_the_policy_says(
    mode: Literal["allow", "block"], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Caller, request: Any, *_: Any) -> Any:
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


def test_a_fault_in_booking_does_not_take_the_result_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(booking, "_book", lambda *_: 1 / 0)
    call = guard(Model(), budget={"max_usd": 1})
    assert in_time(call) == {"usd": 0.1}
    assert call.__runguard__.guard.guard_errors == 1


# ---- loops, threads and processes -----------------------------------------------------------------------------------


async def test_a_sync_guard_works_on_a_running_loop(store: str) -> None:
    for where in ("memory", store):
        model = Model()
        call = guard(model, budget={"max_usd": 0.3}, store=where)
        assert refused(swallowing(call, 5)) == 2
        assert model.calls == 3


async def test_a_sync_call_on_the_loop_does_not_wait_for_an_async_one_of_its_run() -> None:
    slow, quick = Model(takes=0.1), Model()
    waits, blocks = guard_async(slow.asynchronous), guard(quick)
    with run(budget={"max_usd": 1}):
        task = asyncio.create_task(waits())
        await until_async(lambda: slow.calls)
        assert blocks() == {"usd": 0.1}  # would block the loop that the other one needs
        assert await task == {"usd": 0.1}
        assert waits.spend()["calls"] == blocks.spend()["calls"] == 1


def test_two_loops_in_two_threads_share_one_cap(store: str) -> None:
    for where in ("memory", store):
        model = Model(takes=0.005)
        call = guard_async(model.asynchronous, budget={"max_usd": 1}, store=where)

        async def many(call: Any = call) -> int:
            return refused(await asyncio.gather(*(call() for _ in range(15)), return_exceptions=True))

        assert sum(in_threads([lambda many=many: asyncio.run(many())] * 2)) == 20  # type: ignore[misc]
        assert model.calls == 10
        assert call.spend()["usd"] == 1


def test_two_callers_on_one_store_share_a_users_budget(store: str) -> None:
    model = Model(takes=0.002)
    one = guard(model, budget=Budget(usd=1, per="user"), store=store)
    other = guard(model, budget=Budget(usd=1, per="user"), store=store)

    def job(call: Any) -> Any:
        with run(app="shop", user="alice"):
            return call()

    results = in_threads([functools.partial(job, call) for call in (one, other) * 10])
    assert (model.calls, refused(results)) == (10, 10)
    assert one.spend()["usd"] + other.spend()["usd"] == 1


def test_another_process_knows_what_was_spent(store: str) -> None:
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
def test_a_fork_while_the_first_call_is_under_way(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import os, threading, runguard
        begun, left = threading.Event(), threading.Event()
        def model(waits):
            if waits:
                begun.set()
                left.wait(20)
            return {"usd": 0.1}
        call = runguard.guard(model, budget={"max_usd": 0.2})
        thread = threading.Thread(target=call, args=(True,), daemon=True)
        thread.start()
        assert begun.wait(20)
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


def test_a_long_run_does_not_grow() -> None:
    call = guard(
        lambda n: {"usd": 0.00001, "sig": n, "tokens": 3}, budget={"max_usd": 100}, loop={"repeats": 3}, breaker=True
    )
    number = iter(range(10**9))

    def many(count: int) -> int:
        for _ in range(count):
            call(next(number) % 1_000)
        gc.collect(1)
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
