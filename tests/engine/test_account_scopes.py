"""Windows, scopes, amounts per scope, budgets of one run."""

import asyncio
from decimal import Decimal
from typing import Any

import pytest

from runguard.core.money import Budget
from runguard.engine import reserving
from tests.kit.accounts import CALL, Shop, soon, user_budget
from tests.kit.waiting import turns

# ---- windows --------------------------------------------------------------------------------------------------------


async def test_a_call_is_booked_in_the_period_in_which_it_was_let_through() -> None:
    shop = Shop(user_budget(1, window="1h"))
    asked = await shop.ask()
    before = shop.status()
    shop.now += 3_600
    shop.pay(asked)
    await shop.buy(400)
    assert shop.stand() == (Decimal("0.0004"), 0)
    after = shop.status()
    assert before.ends is not None
    assert after.ends is not None
    assert before.ends < after.ends
    (old,) = [account for account in asked.charge.lines.accounts if account.ends == before.ends]
    assert (old.spent_usd, old.held[0]) == (1_000_000, 0)


async def test_a_waiting_call_goes_on_in_the_next_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserving, "_LOOKS_S", 0.005)
    shop = Shop(user_budget(1, window="1h"))
    first = await shop.ask()
    waiting = await shop.asks_and_waits()
    shop.now += 3_600
    asked = await soon(waiting)
    assert asked.output == 1_000
    shop.pay(asked, 200)
    shop.pay(first, 1_000)  # booked where it was held
    assert shop.stand() == (Decimal("0.0002"), 0)


async def test_each_window_of_a_scope_has_an_account_of_its_own() -> None:
    shop = Shop(user_budget(2, window="1h"), user_budget(3, window="1d"), user_budget(10))
    await shop.buy(2_000)
    shop.now += 3_600
    assert (await shop.buy(1_000)).leave
    trip = (await shop.ask()).decision.trip
    assert trip is not None
    assert trip.limit == CALL * 3
    assert sorted(status.limit for status in shop.accounts.budgets("user:app/ann")) == [CALL * 2, CALL * 3, CALL * 10]


# ---- whose account --------------------------------------------------------------------------------------------------


async def test_a_name_that_looks_like_a_pattern_is_on_no_other_account() -> None:
    shop = Shop(Budget(calls=1, per="user:u*"), Budget(calls=2, per="user"))
    shop.open("one", user="u")
    shop.open("two", user="u/u*")
    await shop.buy(run="one")
    await shop.buy(run="two")
    assert {status.spent for status in shop.accounts.budgets()} == {1}


async def test_users_and_sessions_of_two_apps_do_not_share() -> None:
    shop = Shop(Budget(calls=1, per="user"), Budget(calls=1, per="session"))
    shop.open("one", app="a", user="x", session="y/z")
    shop.open("two", app="b", user="x", session="y/z")
    shop.open("three", app="a", user="x/y", session="z")
    for run in ("one", "two", "three"):
        await shop.buy(run=run)
    assert len(shop.accounts.budgets()) == 6


async def test_labels_share_a_budget_across_users() -> None:
    shop = Shop(Budget(calls=2, per="label:team"))
    for number, team in enumerate(["blue", "blue", "blue", "red", None]):
        shop.open(f"r{number}", user=f"u{number}", labels={"team": team} if team else None)
    served = []
    for number in range(5):
        asked = await shop.ask(run=f"r{number}")
        served.append(asked.leave)
        if asked.leave:
            shop.pay(asked)
    assert served == [True, True, False, True, True]


@pytest.mark.parametrize(
    "pattern", ["model:gemini-*", "model:Gemini-2.0-Flash", "model:models/gemini-2.0-flash", "model:vertex_ai/gemini*"]
)
async def test_a_model_is_the_same_in_all_its_spellings(pattern: str) -> None:
    shop = Shop(Budget(calls=2, per=pattern), max_wait_seconds=0)
    for model in ("gemini-2.0-flash", "models/gemini-2.0-flash"):
        assert (await shop.ask(model=model)).leave
    assert (await shop.ask(model="m")).leave
    assert not (await shop.ask(model="vertex_ai/gemini-2.0-flash")).leave


async def test_calls_made_inside_a_tool_are_on_the_tools_account() -> None:
    shop = Shop(Budget(calls=1, per="tool:sea*"))
    await shop.buy(tool="search")
    await shop.buy(tool="paint")
    await shop.buy()
    assert not (await shop.ask(tool="search")).leave


async def test_a_run_takes_its_accounts_with_it() -> None:
    shop = Shop(Budget(calls=9, per="run+agent"), Budget(calls=9, per="user"), max_usd=1)
    await shop.buy()
    shop.guard.end("run")
    assert [status.scope for status in shop.accounts.budgets()] == ["user:app/ann"]


# ---- amounts that depend on the scope -------------------------------------------------------------------------------


async def test_an_amount_may_be_a_function_of_the_scope() -> None:
    asked_for: list[str] = []

    def plan(scope: Any) -> Any:
        asked_for.append(scope.key)
        return {"ann": CALL * 2, "bob": CALL}.get(scope.user)

    shop = Shop(Budget(usd=plan, per="user"))
    shop.open("bobs", user="bob")
    shop.open("zoes", user="zoe")
    assert [(await shop.ask(5_000, run=run)).output for run in ("run", "bobs", "zoes")] == [2_000, 1_000, 5_000]
    assert set(asked_for) == {"user:app/ann", "user:app/bob", "user:app/zoe"}
    # None: no limit, no account
    assert [status.scope for status in shop.accounts.budgets()] == ["user:app/ann", "user:app/bob"]


async def test_a_cap_that_falls_below_what_is_spent_closes_nothing_for_good() -> None:
    plan = {"usd": CALL * 5}
    shop = Shop(Budget(usd=lambda scope: plan["usd"], per="user"))
    asked = await shop.ask(4_000)
    shop.open("second")
    shop.open("third")
    plan["usd"] = CALL
    second = asyncio.create_task(shop.ask(run="second"))
    await turns(5)
    shop.pay(asked, 4_000)  # what it held: no overrun, though far above the cap of now
    assert not (await soon(second)).leave
    assert (shop.status().limit, shop.status().closed, shop.status().overrun) == (CALL, False, 0)
    plan["usd"] = CALL * 50
    assert (await shop.ask(run="third")).leave


# ---- for one run alone ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "budgets", "flat", "gets"),
    [
        ({}, [], {"max_usd": 2_000_000}, 2_000),
        ({}, [], {"max_tokens": 1_500}, 1_500),
        ({"max_usd": CALL}, [], {"max_usd": 3_000_000}, 3_000),  # wider than the policy's: it replaces it
        ({"max_usd": CALL * 4}, [], {"max_usd": 500_000}, 500),
        ({"max_usd": CALL * 4}, [], {"max_tokens": 700}, 700),  # the other unit stays as it was
        ({"max_tokens": 900}, [], {"max_usd": 5_000_000}, 900),
        ({}, [Budget(usd=CALL)], {"max_usd": 2_000_000}, 2_000),
        # a user's budget is not the run's to change
        ({}, [Budget(usd=CALL, per="user")], {"max_usd": 2_000_000}, 1_000),
    ],
)
async def test_a_run_may_be_given_a_limit_of_its_own(
    policy: dict[str, Any], budgets: list[Any], flat: dict[str, Any], gets: int
) -> None:
    shop = Shop(*budgets, **policy)
    shop.open("special", user="ann", **flat)
    assert (await shop.ask(10_000, run="special")).output == gets


async def test_a_limit_of_one_run_is_no_other_runs() -> None:
    shop = Shop(max_usd=CALL * 3)
    shop.open("special", max_usd=1_000_000)
    assert (await shop.ask(10_000, run="run")).output == 3_000
    assert (await shop.ask(10_000, run="special")).output == 1_000
