"""Caps that a function gives. 0 is a cap, None is no limit; a function that fails never removes its cap.

One token costs a millionth of a dollar here, so a call of 1,000 tokens costs $0.001.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runguard import Budget, BudgetExceededError, GuardFailedError, Threshold, guard, guard_async
from runguard.core.money import Scope
from runguard.engine import budgets as caps
from runguard.errors import PolicyError
from tests.kit.accounts import CALL, Shop, soon
from tests.kit.examples import each_row

TEN_MINUTES = caps.KEPT_S


class Plan:
    """A cap function whose answer a test sets: an amount, or an exception to raise."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.asked = answer, 0

    def __call__(self, scope: Scope) -> Any:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def dime(*args: Any) -> dict[str, float]:
    return {"usd": 0.10}


def counted(calls: list[int], answer: dict[str, float]) -> Callable[[], dict[str, float]]:
    """A function that notes each of its calls and gives this answer."""

    def call() -> dict[str, float]:
        calls.append(1)
        return answer

    return call


# ---- guard and guard_async ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "budget", [Budget(usd=lambda scope: 0), {"max_usd": lambda scope: 0}, {"per_day": lambda scope: 0}]
)
def test_no_call_of_unknown_cost_fits_into_a_cap_of_0(budget: Budget | dict[str, Any]) -> None:
    calls: list[int] = []
    call = guard(counted(calls, dime()), budget=budget)
    for _ in range(3):
        with pytest.raises(BudgetExceededError):
            call()
    assert calls == []


@each_row("answer", [-1, float("nan"), float("inf"), "much", [1], KeyError("ann")])
def test_a_guarded_function_is_not_called_while_its_cap_is_unknown(answer: Any) -> None:
    plan = Plan(answer)
    calls: list[int] = []
    call = guard(counted(calls, dime()), budget=Budget(usd=plan), on_guard_error="allow")
    for _ in range(2):
        with pytest.raises(GuardFailedError, match="its cap is not known"):
            call()
    assert calls == []
    plan.answer = "0.20"
    call()
    call()
    with pytest.raises(BudgetExceededError):
        call()
    assert len(calls) == 2


async def test_guard_async_denies_them_too_however_many_run_at_once() -> None:
    calls = []

    async def model() -> dict[str, float]:
        calls.append(1)
        await asyncio.sleep(0)
        return dime()

    call = guard_async(model, budget=Budget(usd=Plan(KeyError("ann"))))
    results = await asyncio.gather(*(call() for _ in range(20)), return_exceptions=True)
    assert {type(result) for result in results} == {GuardFailedError}
    assert calls == []


def test_a_limit_of_a_run_block_is_asked_in_the_same_way() -> None:
    import runguard

    call = guard(dime)
    with runguard.run(budget=Budget(usd=Plan(-1))), pytest.raises(GuardFailedError):
        call()
    with runguard.run(budget=Budget(usd=Plan(0))), pytest.raises(BudgetExceededError):
        call()


# ---- the last cap ---------------------------------------------------------------------------------------------------


async def test_the_last_cap_counts_for_ten_minutes_of_the_guards_clock() -> None:
    plan = Plan(CALL * 100)
    shop = Shop(Budget(usd=plan, per="user"))
    await shop.buy()
    plan.answer = KeyError("ann")
    for number, (seconds, leave) in enumerate([(0, True), (TEN_MINUTES, True), (0.001, False), (10**6, False)]):
        shop.now += seconds
        shop.open(f"r{number}")
        assert (await shop.ask(run=f"r{number}")).leave is leave
    shop.now -= 10**6  # a clock that was set back does not bring an old cap back to life for longer
    shop.open("later")
    assert not (await shop.ask(run="later")).leave
    assert shop.status().spent == CALL


async def test_each_scope_has_its_own_last_cap() -> None:
    fails = False

    def plan(scope: Scope) -> Any:
        if fails:
            raise KeyError(scope.user)
        return CALL * 2

    shop = Shop(Budget(usd=plan, per="user"))
    await shop.buy()
    fails = True
    shop.open("ann2")
    shop.open("bobs", user="bob")
    assert (await shop.ask(run="ann2")).leave
    denied = await shop.ask(run="bobs")
    assert not denied.leave
    assert denied.decision.trip is not None
    assert (denied.decision.trip.rule, denied.decision.trip.scope_id) == ("guard_error", "user:app/bob")


async def test_last_caps_are_kept_for_a_bounded_number_of_scopes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caps, "_SCOPES_KEPT", 5)
    fails = False
    shop = Shop(Budget(usd=lambda scope: -1 if fails else CALL * 5, per="user"))
    for number in range(8):
        shop.open(f"r{number}", user=f"u{number}")
        await shop.buy(run=f"r{number}")
        shop.guard.end(f"r{number}")
    fails = True
    leaves = []
    for number in range(8):
        shop.open(f"s{number}", user=f"u{number}")
        leaves.append((await shop.ask(run=f"s{number}")).leave)
    assert leaves == [False] * 3 + [True] * 5
    functions = shop.accounts.cap_functions
    assert len(functions._given) == 5
    assert len(functions._failing) <= 5


async def test_a_run_that_knows_its_cap_keeps_it_while_another_one_cannot_learn_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(caps, "_SCOPES_KEPT", 0)  # the last cap is forgotten at once
    plan = Plan(CALL * 2)
    shop = Shop(Budget(usd=plan, per="user"))
    await shop.buy()
    plan.answer = -1
    shop.open("second")
    assert not (await shop.ask(run="second")).leave
    assert (await shop.ask(5_000)).output == 1_000, "the first run still has one call left, and no more"


async def test_a_call_that_waits_is_denied_when_its_cap_becomes_unknown() -> None:
    plan = Plan(CALL)
    shop = Shop(Budget(usd=plan, per="user", window="1m"))
    first = await shop.ask()
    waiting = await shop.asks_and_waits()
    plan.answer, shop.now = -1, shop.now + TEN_MINUTES + 60
    shop.pay(first, 10)
    denied = await soon(waiting)
    assert not denied.leave
    assert denied.decision.trip is not None
    assert denied.decision.trip.rule == "guard_error"
    assert shop.nothing_is_held


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ann", "bob"]),
            st.sampled_from([0, 1, 2, 5, None, -1, "x", KeyError("k")]),
            st.floats(0, 400),
        ),
        max_size=30,
    )
)
def test_a_function_never_opens_more_than_its_last_cap_of_ten_minutes(steps: list[tuple[str, Any, float]]) -> None:
    """Random answers over time, against a model: what a call is let through by, and that no cap is exceeded."""

    async def play() -> None:
        plan = Plan(None)
        shop = Shop(Budget(calls=plan, per="user"))
        last: dict[str, tuple[Any, float]] = {}
        spent = {"ann": 0, "bob": 0}
        for number, (user, answer, seconds) in enumerate(steps):
            shop.now += seconds
            plan.answer, run = answer, f"r{number}"
            shop.open(run, user=user)
            if answer is None or (isinstance(answer, int) and answer >= 0):
                last[user] = answer, shop.now
            cap, at = last.get(user, (-1, float("-inf")))
            allowed = shop.now - at <= TEN_MINUTES and (cap is None or spent[user] < cap)
            asked = await shop.ask(run=run)
            assert asked.leave is allowed, (number, user, answer, cap)
            if asked.leave:
                shop.pay(asked)
                booked = [status for status in shop.accounts.budgets(f"user:app/{user}") if status.unit == "calls"]
                spent[user] = int(booked[0].spent) if booked and cap is not None else spent[user]
            else:
                assert asked.decision.trip is not None
                assert asked.decision.trip.rule == ("budget" if shop.now - at <= TEN_MINUTES else "guard_error")
            shop.guard.end(run)

    asyncio.run(play())


# ---- thresholds, extensions, reports --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "threshold",
    [Threshold(0.5), Threshold(0.5, recurring=True), Threshold(0.01, action="stop"), Threshold(1, action="nudge")],
)
async def test_no_threshold_of_a_cap_of_0_is_reached_while_nothing_is_spent(
    threshold: Threshold, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop(
        Budget(usd=lambda scope: 0, per="user", thresholds=[threshold]), prices={"m": {"input": 0, "output": 0}}
    )
    with caplog.at_level(logging.INFO, "runguard"):
        for _ in range(3):
            await shop.buy()
    assert caplog.text == ""
    assert shop.guard.trips == shop.guard.trips.__class__()


async def test_a_stop_threshold_of_a_cap_of_0_holds_once_something_is_spent() -> None:
    plan = Plan(CALL * 10)
    shop = Shop(Budget(usd=plan, per="user", thresholds=[Threshold(0.9, action="stop")]))
    await shop.buy()
    plan.answer = 0
    shop.open("second")
    assert not (await shop.ask(run="second")).leave
    assert shop.status().utilization == 1.0


async def test_a_cap_of_0_can_be_extended() -> None:
    shop = Shop(Budget(usd=lambda scope: 0, per="user"))
    assert not (await shop.ask()).leave
    assert [status.limit for status in shop.accounts.extend("user:app/ann", usd=CALL)] == [CALL]
    shop.open("second")
    assert (await shop.buy(run="second")).leave
    assert [status.limit for status in shop.accounts.extend("user:app/bob", usd=CALL)] == [CALL]


async def test_an_extension_of_an_unknown_cap_says_why() -> None:
    caps: dict[str, int] = {}
    shop = Shop(Budget(usd=lambda scope: caps[scope.user], per="user"))
    with pytest.raises(PolicyError, match="the cap of user:app/ann is not known: the function for usd raised KeyError"):
        shop.accounts.extend("user:app/ann", usd=CALL)


def reports(caplog: Any) -> list[str]:
    return [record.getMessage() for record in caplog.records if "budget_function" in record.getMessage()]


async def test_a_failure_is_reported_once_per_scope_and_cause_and_its_end_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = Plan(KeyError("ann"))
    shop = Shop(Budget(usd=plan, per="user"))
    for number, answer in enumerate([KeyError("ann"), KeyError("ann"), -1, -2, CALL, CALL, KeyError("ann")]):
        plan.answer = answer
        shop.open(f"r{number}")
        asked = await shop.ask(run=f"r{number}")
        if asked.leave:
            shop.guard.release(asked.charge)
    assert [report.partition(":")[0] for report in reports(caplog)] == [
        "runguard.budget_function_failed",
        "runguard.budget_function_failed",
        "runguard.budget_function_back",
        "runguard.budget_function_failed",
    ]
    assert "raised KeyError" in reports(caplog)[0]
    assert "returned -1" in reports(caplog)[1]
    assert "counts for up to 10 minutes" in reports(caplog)[3]
    assert shop.guard.snapshot()["guard_errors"] == 5


async def test_a_function_that_fails_for_everybody_does_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop(Budget(usd=lambda scope: -1, per="user"))
    for number in range(300):
        shop.open(f"r{number}", user=f"u{number}")
        assert not (await shop.ask(run=f"r{number}")).leave
    assert len(reports(caplog)) == caps._REPORTS
    shop.now += 61
    shop.open("last", user="last")
    await shop.ask(run="last")
    assert len(reports(caplog)) == caps._REPORTS + 1
    assert f"{300 - caps._REPORTS} more scopes" in reports(caplog)[-1]


async def test_the_function_is_asked_once_per_run_while_it_works() -> None:
    plan = Plan(CALL * 10)
    shop = Shop(Budget(usd=plan, per="user"))
    for _ in range(3):
        await shop.buy()
    assert plan.asked == 1


async def test_many_threads_may_ask_at_once() -> None:
    shop = Shop(Budget(usd=lambda scope: CALL * 5 if int(scope.user) % 2 else -1, per="user"))
    leaves: dict[int, bool] = {}

    def work(number: int) -> None:
        shop.open(f"r{number}", user=str(number))
        leaves[number] = asyncio.run(shop.ask(run=f"r{number}")).leave

    threads = [threading.Thread(target=work, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert leaves == {number: bool(number % 2) for number in range(40)}
