"""Windows, the kill switch, deadlines, loops, context windows, the breaker."""

import asyncio
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from runguard import (
    Budget,
    BudgetExceededError,
    CircuitOpenError,
    ContextOverflowError,
    DeadlineExceededError,
    LimitExceededError,
    LoopDetectedError,
    guard,
    guard_async,
    run,
)
from tests.kit.examples import each_row
from tests.kit.functions import Model, Status, in_threads, refused, swallowing
from tests.kit.virtual_time import VirtualLoop, run_virtually
from tests.kit.waiting import PATIENCE_S, until

# ---- windows, the switch, deadlines ---------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@each_row(("window", "seconds"), [("per_minute", 60), ("per_hour", 3_600), ("per_day", 86_400), ("per_week", 604_800)])
def test_a_window_that_begins_anew_lets_calls_through_again(window: str, seconds: int) -> None:
    clock, model = Clock(), Model()
    call = guard(model, budget={window: {"max_calls": 2}}, clock=clock)
    for made in (2, 4, 6):
        assert refused(swallowing(call, 4)) == 2
        assert model.calls == made
        clock.now += seconds


def test_a_window_in_dollars_counts_over_all_runs() -> None:
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


def test_a_run_budget_is_not_lifted_by_the_hour() -> None:
    clock, model = Clock(), Model()
    call = guard(model, budget={"max_calls": 2, "per_hour": {"max_calls": 5}}, clock=clock)
    swallowing(call, 4)
    clock.now += 7_200
    assert refused(swallowing(call, 3)) == 3
    assert model.calls == 2


@pytest.mark.parametrize("budget", [{"max_usd": 5}, [Budget(usd=5, per="run")]])
def test_the_budgets_of_both_settings_hold(budget: Any) -> None:
    model = Model()
    call = guard(model, budget=budget, budgets=[Budget(calls=3, per="user")])
    with run(user="ann"):
        assert refused(swallowing(call, 5)) == 2
    assert model.calls == 3
    assert [status.scope for status in call.budgets()] == ["user:Model/ann"]


def test_the_kill_switch_stops_and_lets_go_again() -> None:
    model = Model()
    call = guard(model, name="shop", budget={"max_usd": 5})
    call()
    inner = call.__runguard__.guard
    inner.operator_stops.throw("app:shop", "ops", "drill")
    assert refused(swallowing(call, 3)) == 3
    assert call.trips[-1].rule == "kill_switch"
    inner.operator_stops.release("app:shop")
    call()
    assert model.calls == 2


def test_a_deadline_is_final() -> None:
    clock, model = Clock(), Model()
    call = guard(model, max_seconds=10, clock=clock)
    call()
    clock.now += 11
    for _ in range(2):
        with pytest.raises(DeadlineExceededError):
            call()
    assert model.calls == 1


def test_the_limit_on_model_calls_of_the_policy_holds() -> None:
    model = Model()
    call = guard(model, max_model_calls=2)
    results = swallowing(call, 4)
    assert [type(result) for result in results[2:]] == [LimitExceededError] * 2
    assert model.calls == 2


# ---- loops ----------------------------------------------------------------------------------------------------------


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


@each_row("repeats", [2, 3, 5])
@each_row("period", range(1, 7))
def test_a_circle_of_any_length_is_found_in_its_last_round(period: int, repeats: int) -> None:
    names = tuple(f"step{n}" for n in range(period))
    made, error = loops(iter([{"sig": name} for name in names] * 10), repeats=repeats, max_cycle_len=6)
    assert error is not None
    assert made == period * repeats
    assert (error.pattern, error.repeats, error.limit) == (names, repeats, repeats)


def test_a_longer_circle_than_asked_for_is_none() -> None:
    made, error = loops(iter([{"sig": name} for name in "abcde"] * 20), repeats=3, max_cycle_len=4)
    assert (made, error) == (60, None)


def test_a_prelude_does_not_hide_a_circle() -> None:
    made, error = loops(iter([{"sig": s} for s in "xyz" + "ab" * 10]), repeats=3, max_cycle_len=4)
    assert error is not None
    assert made == 9
    assert error.pattern == ("a", "b")


def test_steps_without_a_sign_are_left_out() -> None:
    assert loops(({"sig": None} for _ in range(99)), repeats=2)[1] is None
    made, error = loops(iter([{"sig": "a"}, {"sig": None}] * 30), repeats=3)
    assert made == 5  # a, -, a, -, a
    assert error is not None


def test_tool_calls_of_a_response_are_its_sign() -> None:
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


def test_a_signature_function_says_what_a_step_was() -> None:
    model = Model(*[{"text": word} for word in ("Hi", "hi", "HI", "hi")])
    call = guard(model, loop={"repeats": 3}, signature=lambda result: result["text"].lower())
    assert refused(swallowing(call, 5)) == 2
    assert model.calls == 3


@pytest.mark.parametrize("sign", [lambda r: 1 / 0, lambda r: None])
def test_a_signature_that_fails_or_says_nothing_leaves_the_call_out(sign: Callable[[Any], Any]) -> None:
    tool = {"id": "1", "function": {"name": "search", "arguments": "{}"}}
    model = Model({"sig": "same", "response": {"choices": [{"message": {"tool_calls": [tool]}}]}})
    assert refused(swallowing(guard(model, loop={"repeats": 2}, signature=sign), 9)) == 0
    assert refused(swallowing(guard(model, loop={"repeats": 2}), 9)) == 7


@each_row("sign", [1, ("a", 1), {"tool": "x", "args": [1]}, b"raw", 2.5])
def test_signs_need_not_be_texts(sign: Any) -> None:
    made, error = loops(({"sig": sign} for _ in range(9)), repeats=3)
    assert made == 3
    assert error is not None
    assert pickle.loads(pickle.dumps(error)).pattern == error.pattern


# ---- the context ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["max_context_tokens", "maxContextTokens"])
def test_a_prompt_that_would_not_fit_is_not_sent(name: str) -> None:
    model = Model()
    call = guard(model, context={name: 1_000, "headroom": 100}, tokens=lambda messages, **_: len(messages))
    call("x" * 900, temperature=0)
    with pytest.raises(ContextOverflowError) as overflow:
        call("x" * 901)
    assert (overflow.value.projected_tokens, overflow.value.limit) == (901, 900)
    with pytest.raises(ContextOverflowError):
        call("x")  # sticky
    assert model.calls == 1


async def test_tokens_may_be_counted_by_a_coroutine() -> None:
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
def test_a_count_that_fails_is_replaced_by_an_estimate(
    count: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    call = guard(model, context={"max_context_tokens": 1_000}, tokens=count)
    call("short")
    assert "tokens_failed" in caplog.text
    with pytest.raises(ContextOverflowError):
        call("long " * 10_000)
    assert model.calls == 1


# ---- the breaker ----------------------------------------------------------------------------------------------------


def test_a_breaker_opens_probes_and_closes() -> None:
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


@each_row("fault", [Status(400), Status(401), Status(404), Status(422), KeyboardInterrupt()])
def test_what_is_not_the_providers_fault_opens_nothing(fault: BaseException) -> None:
    model = Model(fault)
    call = guard(model, breaker={"failures": 2})
    for _ in range(6):
        with pytest.raises(type(fault)):
            call()
    assert model.calls == 6


def test_a_refusal_of_an_inner_guard_opens_no_breaker() -> None:
    def agent() -> Any:
        return inner()

    inner = guard(Model(), budget={"max_calls": 1})
    call = guard(agent, breaker={"failures": 2})
    assert CircuitOpenError not in {type(result) for result in swallowing(call, 8)}


def test_one_failure_is_enough_where_that_is_asked_for() -> None:
    model = Model(OSError())
    assert refused(swallowing(guard(model, breaker={"failures": 1}), 4)) == 3
    assert model.calls == 1


def test_one_probe_at_a_time() -> None:
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


# ---- Guarded functions on budgets that wait: async code awaits, other threads block, an event loop is never blocked


def per_minute(calls: int) -> Budget:
    return Budget(calls=calls, per="app", window="1m", on_exhausted="wait")


class SleepingClock:
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
    call = guard(model, budget=[per_minute(1)], clock=SleepingClock(), max_wait_seconds=600)
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
    call = guard(model, budget=[per_minute(1)], clock=SleepingClock(), max_wait_seconds=60)
    call()
    with pytest.raises(BudgetExceededError):
        call()
    assert model.calls == 1
