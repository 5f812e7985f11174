"""Windows, scopes, amounts per scope, budgets of one run, thresholds and extensions."""

import asyncio
from decimal import Decimal
from functools import partial
from typing import Any

import pytest

from runguard.core.events import ROOT_LANE
from runguard.core.money import Budget, BudgetStatus, Threshold
from runguard.engine import reserving
from runguard.errors import PolicyError
from tests.kit.accounts import CALL, Shop, soon, user_budget
from tests.kit.optional import present
from tests.kit.waiting import PATIENCE_S, loops_at_once, turns

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


# ---- thresholds -----------------------------------------------------------------------------------------------------


class Bell:
    """A callback that keeps what it was told."""

    def __init__(self) -> None:
        self.rung: list[BudgetStatus] = []

    def __call__(self, status: BudgetStatus) -> None:
        self.rung.append(status)

    def after(self, shop: Shop) -> int:
        assert shop.guard.outbox.flush(PATIENCE_S)
        return len(self.rung)


async def test_a_threshold_fires_once_per_period_and_scope() -> None:
    bell = Bell()
    shop = Shop(user_budget(10, window="1h", thresholds=[Threshold(0.5, bell)]))
    shop.open("bobs", user="bob")
    for _ in range(4):
        await shop.buy()
    assert bell.after(shop) == 0
    await shop.buy()  # exactly half
    assert bell.after(shop) == 1
    told = bell.rung[0]
    assert (told.scope, told.unit, told.spent, told.limit, told.utilization) == (
        "user:app/ann",
        "usd",
        CALL * 5,
        CALL * 10,
        0.5,
    )
    for _ in range(3):
        await shop.buy()
    shop.guard.end("run")
    shop.open("run")
    await shop.buy()
    assert bell.after(shop) == 1  # the scope is the user's, not the run's
    await shop.buy(9_000, run="bobs")
    assert bell.after(shop) == 2
    shop.now += 3_600
    await shop.buy(6_000)
    assert bell.after(shop) == 3


async def test_one_jump_over_several_thresholds_fires_them_all() -> None:
    bells = [Bell() for _ in range(4)]
    shop = Shop(
        user_budget(10, thresholds=[Threshold(p, bell) for p, bell in zip((0.1, 0.5, 0.9, 1), bells, strict=True)])
    )
    await shop.buy(9_500)
    assert [bell.after(shop) for bell in bells] == [1, 1, 1, 0]
    await shop.buy(500)
    assert [bell.after(shop) for bell in bells] == [1, 1, 1, 1]


@pytest.mark.parametrize(("percent", "calls"), [(0.07, 7), (0.55, 55), (0.29, 29), (0.57, 57), (1, 100)])
async def test_a_share_means_what_it_says_in_whole_calls(percent: float, calls: int) -> None:
    # In floats 0.07 * 100 is more than 7, and 0.55 * 100 more than 55.
    bell = Bell()
    shop = Shop(
        Budget(
            calls=100,
            per="user",
            thresholds=[Threshold(0.01), Threshold(percent, bell), Threshold(percent, action="stop")],
        )
    )
    for _ in range(calls - 1):
        await shop.buy(1)
    assert bell.after(shop) == 0
    await shop.buy(1)
    assert bell.after(shop) == 1
    trip = (await shop.ask(1)).decision.trip
    assert trip is not None
    assert (trip.rule, trip.unit, trip.limit) == ("budget", "calls", 100)


async def test_a_threshold_is_about_its_own_budget() -> None:
    bell = Bell()
    shop = Shop(
        Budget(usd=CALL * 10, per="user", thresholds=[]),
        Budget(tokens=100_000, per="user", thresholds=[Threshold(0.09, bell), Threshold(0.5, action="stop")]),
    )
    await shop.buy(8_000)  # 80 % of the dollars, 8 % of the tokens
    assert bell.after(shop) == 0
    await shop.buy(1_000)
    assert bell.after(shop) == 1
    assert (bell.rung[0].unit, bell.rung[0].limit) == ("tokens", 100_000)
    assert (await shop.ask(1_000)).leave


async def test_a_threshold_that_stops_refuses_the_next_call() -> None:
    shop = Shop(user_budget(10, thresholds=[Threshold(0.8, action="stop")]))
    await shop.buy(7_999)
    await shop.buy(1)
    asked = await shop.ask(1)
    assert not asked.leave
    trip = asked.decision.trip
    assert trip is not None
    assert (trip.scope_id, trip.limit) == ("user:app/ann", CALL * 10)
    assert "$0.008 of $0.01 spent, which is over its threshold of 80%" in trip.message
    shop.accounts.extend("user:app/ann", usd=CALL * 10)
    shop.open("next")
    assert (await shop.ask(1, run="next")).leave


async def test_a_threshold_that_nudges_has_a_word_for_the_model() -> None:
    shop = Shop(user_budget(10, thresholds=[Threshold(0.5, action="nudge")]))
    lane = shop.guard.runs["run"].lanes[ROOT_LANE]
    await shop.buy(5_000)
    assert "Finish now" in lane.notice
    lane.notice = ""
    await shop.buy(1_000)
    assert lane.notice == ""
    shop.accounts.extend("user:app/ann", usd=CALL * 10)  # 30 %: armed again
    await shop.buy(5_000)
    assert lane.notice


async def test_a_callback_that_fails_is_recorded_and_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def fails(status: BudgetStatus) -> None:
        raise ValueError("the pager is on fire")

    bell = Bell()
    shop = Shop(user_budget(10, thresholds=[Threshold(0.5, fails), Threshold(0.5, bell)]))
    await shop.buy(5_000)
    assert bell.after(shop) == 1
    assert shop.guard.snapshot()["callbacks_failed"] == 1
    assert "the pager is on fire" in caplog.text


async def test_an_extension_arms_what_is_above_the_new_level_again() -> None:
    bells = [Bell(), Bell()]
    shop = Shop(user_budget(10, thresholds=[Threshold(0.3, bells[0]), Threshold(0.8, bells[1])]))
    await shop.buy(8_000)
    shop.accounts.extend("user:app/ann", usd=CALL * 10)  # 40 %
    await shop.buy(1_000)
    assert [bell.after(shop) for bell in bells] == [1, 1]
    await shop.buy(7_000)  # 80 % of the new cap
    assert [bell.after(shop) for bell in bells] == [1, 2]
    assert bells[1].rung[1].limit == CALL * 20


async def test_an_extension_in_the_middle_of_a_settle_loses_no_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    bell = Bell()
    shop = Shop(user_budget(10, thresholds=[Threshold(0.5, bell)]))
    ledger = shop.accounts.ledger
    first = ledger.first

    def extended_meanwhile(*args: Any) -> bool | None:
        result = first(*args)
        monkeypatch.setattr(ledger, "first", first)
        shop.accounts.extend("user:app/ann", usd=CALL * 10)
        return result

    monkeypatch.setattr(ledger, "first", extended_meanwhile)
    await shop.buy(9_000)
    await shop.buy(9_000)
    assert bell.after(shop) == 2


def test_a_threshold_fires_once_also_under_threads() -> None:
    rung: list[float] = []
    shares = [n / 20 for n in range(1, 21)]
    thresholds = [Threshold(p, partial(lambda p, status: rung.append(p), p)) for p in shares]
    shop = Shop(
        Budget(calls=400, per="user", thresholds=thresholds),
        max_model_calls=10_000,
    )
    for number in range(8):
        shop.open(f"r{number}")

    async def work(number: int) -> None:
        for _ in range(50):
            await shop.buy(1, run=f"r{number}")

    loops_at_once([partial(work, number) for number in range(8)])
    assert shop.guard.outbox.flush(PATIENCE_S)
    assert sorted(rung) == shares
    assert shop.stand(unit="calls") == (400, 0)


# ---- extending ------------------------------------------------------------------------------------------------------


async def test_an_extension_moves_the_cap_and_the_spend_stays() -> None:
    shop = Shop(user_budget(2, window="1h"))
    await shop.buy(2_000)
    (status,) = shop.accounts.extend("user:app/ann", usd="0.001")
    assert (status.spent, status.limit, status.remaining) == (CALL * 2, CALL * 3, CALL)
    assert (await shop.ask(5_000)).output == 1_000


async def test_an_extension_is_for_the_current_period_only() -> None:
    shop = Shop(user_budget(2, window="1h"))
    await shop.buy(2_000)
    shop.accounts.extend("user:app/ann", usd=CALL)
    await shop.ask()  # still on its way when the period ends
    shop.now += 3_600
    (status,) = shop.accounts.extend("user:app/ann", usd=CALL * 5)
    assert status.ends is not None
    assert (status.limit, status.ends > shop.now) == (CALL * 7, True)
    shop.now += 3_600
    assert (await shop.ask(5_000)).output == 2_000


async def test_extensions_add_up_and_hold_for_later_runs() -> None:
    shop = Shop(Budget(usd=CALL, tokens=10_000, per="user"))
    shop.accounts.extend("user:app/ann", usd=CALL)
    shop.accounts.extend("user:app/ann", usd=CALL, tokens=5)
    shop.open("later")
    assert (await shop.ask(5_000, run="later")).output == 3_000
    assert shop.status(unit="tokens").limit == 10_005


async def test_a_scope_can_be_extended_before_it_has_spent_anything() -> None:
    shop = Shop(
        Budget(usd=CALL, per="user"),
        Budget(usd=CALL, per="agent"),
        Budget(usd=CALL, per="session"),
        Budget(usd=CALL, per="label:team"),
        max_usd=CALL,
    )
    shop.open("special", user="x/y", session="s", max_usd=3_000_000, labels={"team": "blue"})
    for scope in ("user:app/x%2Fy", "agent:app/agent", "session:app/x%2Fy/s", "label:team=blue"):
        assert [status.limit for status in shop.accounts.extend(scope, usd=CALL)] == [CALL * 2]
    assert [status.limit for status in shop.accounts.extend("run:special", usd=CALL)] == [CALL * 4]
    assert (await shop.ask(9_000, run="special")).output == 2_000


async def test_a_session_can_be_named_without_its_user_where_only_one_can_be_meant() -> None:
    shop = Shop(Budget(usd=CALL, per="session"))
    await shop.buy()
    assert [status.scope for status in shop.accounts.extend("session:app/s1", usd=CALL)] == ["session:app/ann/s1"]
    shop.open("bobs", user="bob")
    await shop.buy(run="bobs")
    with pytest.raises(PolicyError):
        shop.accounts.extend("session:app/s1", usd=CALL)


async def test_an_extension_does_not_ask_again_what_only_a_run_can_tell() -> None:
    shop = Shop(Budget(usd=lambda scope: CALL * 5 if present(scope.labels)["plan"] == "pro" else CALL, per="user"))
    shop.open("pro", labels={"plan": "pro"})
    await shop.buy(run="pro")
    assert [status.limit for status in shop.accounts.extend("user:app/ann", usd=CALL)] == [CALL * 6]


@pytest.mark.parametrize(
    ("scope", "by", "says"),
    [
        ("user:app/ann", {}, "by how much"),
        ("user:app/ann", {"tokens": 5}, "no budget limits tokens there"),
        ("app:app", {"usd": 1}, "count by run, user"),
        ("nonsense", {"usd": 1}, "no budget limits usd there"),
        ("", {"usd": 1}, "no budget limits usd there"),
        ("run:gone", {"usd": 1}, "no budget limits usd there"),
        ("user:app", {"usd": 1}, "no budget limits usd there"),
        (None, {"usd": 1}, "extend(None)"),
        ("user:app/ann", {"usd": -1}, "usd = -1"),
        ("user:app/ann", {"usd": 0}, "usd = 0"),
        ("user:app/ann", {"usd": float("nan")}, "usd = nan"),
        ("user:app/ann", {"usd": True}, "usd = True"),
        ("user:app/ann", {"calls": 1.5}, "calls = 1.5"),
    ],
)
async def test_an_extension_that_cannot_be_meant_is_an_error_that_says_why(
    scope: Any, by: dict[str, Any], says: str
) -> None:
    shop = Shop(user_budget(1))
    with pytest.raises(PolicyError) as error:
        shop.accounts.extend(scope, **by)
    assert says in str(error.value)
