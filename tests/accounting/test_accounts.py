"""Reserve, settle, release around every model call: who waits, who is capped, who is refused, and on whose account it
goes.

One token costs a millionth of a dollar here, so a call of 1,000 tokens costs $0.001.
"""

import asyncio
import logging
import random
import threading
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import pytest

from runguard.accounting import charges, spending
from runguard.accounting import lookup as finder
from runguard.accounting import reservation as reserving
from runguard.accounting.charges import Charge
from runguard.accounting.expectations import ASSUMED_OUTPUT
from runguard.conductor.guard import Guard
from runguard.core.budget import Budget, BudgetStatus
from runguard.core.decision import Action, Decision
from runguard.core.events import ROOT_LANE, ModelCall, RunInfo
from runguard.core.threshold import Threshold
from runguard.errors import PolicyError
from runguard.policy import Policy
from runguard.pricing.rates import Usage

PATIENCE_S = 20  # far beyond anything that works
PRICES = {"m": {"input": 1, "output": 1}, "dear": {"input": 10, "output": 10}}
CALL = Decimal("0.001")  # what 1,000 tokens cost


@dataclass
class Asked:
    """What came of asking for leave to make a call."""

    decision: Decision
    event: ModelCall
    charge: Charge = field(init=False)

    def __post_init__(self) -> None:
        self.charge = self.event.charge

    @property
    def leave(self) -> bool:
        return self.charge is not None

    @property
    def output(self) -> int:
        """The output limit it was given leave for."""
        return self.charge.max_output


class Shop:
    """One guard with a clock moved by hand, and runs that ask, pay and go."""

    def __init__(self, *budgets: Budget, **policy: Any) -> None:
        self.now = 1_000_000.0
        values = {
            "prices": PRICES,
            "budgets": budgets,
            "clock": lambda: self.now,
            "min_output_tokens": 100,
            "max_wait_seconds": PATIENCE_S,
            **policy,
        }
        self.guard = Guard(Policy.validated(values, "keywords"))
        self.accounts = self.guard.accounts
        self.open("run")

    def open(self, run: str, app: str = "app", user: str = "ann", session: str = "s1", **info: Any) -> None:
        self.guard.start(RunInfo(run, app, user, session, at=self.now, **info))

    async def ask(
        self, output: int | None = 1_000, *, input_tokens: int = 0, run: str = "run", agent: str = "agent", **call: Any
    ) -> Asked:
        event = ModelCall(
            run,
            call.pop("lane", ROOT_LANE),
            agent,
            self.now,
            call.pop("model", "m"),
            input_tokens,
            max_output_tokens=output,
            **call,
        )
        before = self.guard.check(event)
        if before.action is Action.STOP and before.enforced:
            return Asked(before, event)
        return Asked(await self.guard.reserve(event, slot=False), event)

    async def asks_and_waits(self, *args: Any, **kwargs: Any) -> "asyncio.Task[Asked]":
        """Somebody who cannot be served yet."""
        task = asyncio.create_task(self.ask(*args, **kwargs))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
        return task

    def pay(self, asked: Asked, output: int = 1_000, **how: Any) -> None:
        self.guard.settle(asked.charge, Usage(asked.charge.input, output), **how)

    async def buy(self, output: int = 1_000, **call: Any) -> Asked:
        asked = await self.ask(output, **call)
        assert asked.leave, asked.decision
        self.pay(asked, output)
        return asked

    def status(self, scope: str = "user:app/ann", unit: str = "usd") -> BudgetStatus:
        (found,) = [status for status in self.accounts.budgets(scope) if status.unit == unit]
        return found

    def stand(self, scope: str = "user:app/ann", unit: str = "usd") -> tuple[Any, Any]:
        status = self.status(scope, unit)
        return status.spent, status.reserved

    @property
    def nothing_is_held(self) -> bool:
        return (
            all(status.reserved == 0 for status in self.accounts.budgets())
            and self.accounts.spend()["reserved_usd"] == 0
        )


async def soon(task: "asyncio.Task[Asked]") -> Asked:
    return await asyncio.wait_for(task, PATIENCE_S / 2)


def user_budget(calls_worth: Any, **more: Any) -> Budget:
    return Budget(usd=CALL * calls_worth, per="user", **more)


# ---- the worst case -------------------------------------------------------------------------------------------------


async def test_the_worst_case_is_the_prompt_and_the_largest_answer():
    shop = Shop(Budget(usd=1, tokens=10**6, per="user"))
    asked = await shop.ask(700, input_tokens=300)
    assert asked.decision.action is Action.ALLOW
    assert shop.stand() == (0, CALL)
    assert shop.stand(unit="tokens") == (0, 1_000)
    assert shop.accounts.spend()["reserved_usd"] == CALL


@pytest.mark.parametrize(
    ("model", "limit"), [("gemini-2.0-flash", 8_192), ("small", 500), ("never-heard-of", ASSUMED_OUTPUT)]
)
async def test_a_request_without_a_limit_is_taken_to_use_what_its_model_can(model, limit):
    shop = Shop(Budget(tokens=10**6, per="user"), models={"small": {"max_output_tokens": 500}})
    asked = await shop.ask(None, model=model, input_tokens=10)
    assert asked.output == limit
    assert shop.stand(unit="tokens") == (0, limit + 10)
    assert not asked.charge.lowered


async def test_the_assumed_limit_is_65536():
    assert ASSUMED_OUTPUT == 65_536


async def test_what_was_not_used_is_free_again_and_spent_stands_apart_from_reserved():
    shop = Shop(user_budget(10))
    first, second = await shop.ask(), await shop.ask()
    shop.pay(first, 400)
    assert shop.stand() == (Decimal("0.0004"), CALL)
    assert shop.status().remaining == Decimal("0.0086")
    shop.pay(second, 0)
    assert shop.stand() == (Decimal("0.0004"), 0)


async def test_three_times_ten_cents_fit_into_thirty():
    shop = Shop(max_usd=0.3)
    for _ in range(3):
        await shop.buy(100_000)
    assert shop.stand("run:run") == (Decimal("0.3"), 0)
    assert not (await shop.ask(1)).leave


async def test_the_later_figure_replaces_the_earlier_everywhere():
    shop = Shop(user_budget(10))
    asked = await shop.ask()
    for output in (300, 900, 500):
        shop.pay(asked, output)
        assert shop.stand() == (Decimal(output) / 10**6, 0)
        assert shop.accounts.spend()["tokens"] == output
        assert shop.guard.runs["run"].spend.output_tokens == output
    assert shop.accounts.spend()["calls"] == 1


async def test_a_call_that_never_left_is_as_if_it_had_not_been_asked_for():
    shop = Shop(Budget(usd=1, calls=1, per="user"))
    for _ in range(3):
        asked = await shop.ask()
        assert asked.leave
        shop.guard.release(asked.charge)
        shop.guard.release(asked.charge)
        assert shop.nothing_is_held
    assert shop.accounts.spend()["calls"] == 0


async def test_a_call_that_was_released_and_left_after_all_is_billed_once():
    shop = Shop(user_budget(10))
    asked = await shop.ask()
    shop.guard.release(asked.charge)
    shop.pay(asked, 500)
    assert shop.stand() == (Decimal("0.0005"), 0)
    assert shop.nothing_is_held
    assert shop.accounts.spend()["usd"] == Decimal("0.0005")


# ---- waiting --------------------------------------------------------------------------------------------------------


async def test_a_call_waits_for_what_others_hold_and_is_then_let_through_in_full():
    shop = Shop(user_budget(2))
    first, _ = await shop.ask(), await shop.ask()
    waiting = await shop.asks_and_waits()
    shop.pay(first, 0)
    asked = await soon(waiting)
    assert asked.decision.action is Action.ALLOW
    assert (asked.output, asked.charge.lowered) == (1_000, False)


@pytest.mark.parametrize("how", ["release", "extend"])
async def test_a_waiting_call_goes_on_as_soon_as_there_is_room(how):
    shop = Shop(user_budget(1))
    first = await shop.ask()
    waiting = await shop.asks_and_waits()
    if how == "release":
        shop.guard.release(first.charge)
    else:
        shop.accounts.extend("user:app/ann", usd=CALL)
    assert (await soon(waiting)).output == 1_000


async def test_a_wait_is_bounded_and_then_the_answer_is_capped_to_what_is_left():
    shop = Shop(user_budget(2), max_wait_seconds=0.05)
    await shop.ask(1_700)
    began = asyncio.get_running_loop().time()
    asked = await asyncio.wait_for(shop.ask(), PATIENCE_S)
    assert asyncio.get_running_loop().time() - began >= 0.05
    assert (asked.output, asked.charge.lowered) == (300, True)
    assert shop.status().remaining == 0


async def test_without_patience_nobody_waits():
    shop = Shop(user_budget(2), max_wait_seconds=0)
    await shop.ask(1_700)
    assert (await asyncio.wait_for(shop.ask(), 1)).output == 300


async def test_nobody_waits_where_nobody_else_is_on_the_way():
    shop = Shop(user_budget(2), max_wait_seconds=3_600)
    await shop.buy(1_700)
    assert (await asyncio.wait_for(shop.ask(), PATIENCE_S)).output == 300
    shop = Shop(user_budget(1), max_wait_seconds=3_600)
    await shop.buy(1_000)
    assert not (await asyncio.wait_for(shop.ask(), PATIENCE_S)).leave


async def test_a_cancelled_wait_gives_everything_back():
    shop = Shop(user_budget(1), Budget(calls=5, per="app"))
    first = await shop.ask()
    waiting = await shop.asks_and_waits()
    run = shop.guard.runs["run"]
    assert run.spend.model_calls == 2
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert run.spend.model_calls == 1
    assert run.waiting == 0
    assert shop.stand("app:app", "calls") == (0, 1)
    shop.pay(first)
    assert shop.nothing_is_held


async def test_a_cancelled_wait_gives_its_place_among_the_calls_in_flight_back():
    shop = Shop(user_budget(1))
    await shop.ask()
    run = shop.guard.runs["run"]
    waiting = asyncio.create_task(
        shop.guard.reserve(ModelCall("run", ROOT_LANE, "agent", shop.now, "m", max_output_tokens=1_000))
    )
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(run.slots) == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert len(run.slots) == 0


async def test_a_run_that_is_stopped_meanwhile_lets_nobody_wait_on():
    shop = Shop(user_budget(1))
    first = await shop.ask()
    waiting = await shop.asks_and_waits()
    trip = shop.guard.fail("run", "guard_error", "it broke")
    shop.pay(first, 0)
    asked = await soon(waiting)
    assert not asked.leave
    assert asked.decision.trip is trip
    assert len(shop.guard.trips) == 1
    assert shop.nothing_is_held


async def test_a_threshold_that_stops_holds_also_for_those_who_wait():
    shop = Shop(user_budget(10, thresholds=[Threshold(0.5, action="stop")]))
    holders = [await shop.ask() for _ in range(10)]
    waiting = await shop.asks_and_waits()
    for holder in holders[:9]:
        shop.pay(holder, 600)
    asked = await soon(waiting)
    assert not asked.leave
    assert asked.decision.trip.rule == "budget"
    assert "threshold of 50%" in asked.decision.trip.message


async def test_the_deadline_of_the_run_holds_also_for_those_who_wait():
    shop = Shop(user_budget(1), max_seconds=10)
    first = await shop.ask()
    waiting = await shop.asks_and_waits()
    shop.now += 100
    shop.pay(first, 0)
    asked = await soon(waiting)
    assert asked.decision.trip.rule == "deadline"
    assert shop.nothing_is_held


# ---- capping and refusing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spent", "asks", "gets"),
    [
        (8_000, 3_000, 2_000),  # capped to the rest
        (9_900, 3_000, 100),  # exactly the useful minimum
        (9_901, 3_000, None),  # less than that is of no use
        (9_950, 50, 50),  # a request that is smaller by itself
        (9_951, 50, None),
        (9_000, 1_000, 1_000),  # exactly the rest
    ],
)
async def test_an_answer_is_capped_down_to_a_useful_minimum_and_then_refused(spent, asks, gets):
    shop = Shop(user_budget(10), min_output_tokens=100)
    await shop.buy(spent)
    asked = await shop.ask(asks)
    assert (asked.output if asked.leave else None) == gets
    if gets is None:
        assert asked.decision.trip.rule == "budget"
    else:
        assert asked.charge.lowered is (gets < asks)


@pytest.mark.parametrize(
    ("limit", "gets"),
    [
        ({"usd": CALL}, 400),
        ({"tokens": 1_000}, 400),
        ({"usd": CALL, "tokens": 900}, 300),
        ({"usd": CALL / 2, "tokens": 5_000}, None),  # the prompt alone is too dear
        ({"tokens": 600}, None),
        ({"calls": 1, "usd": CALL}, 400),
    ],
)
async def test_the_prompt_is_paid_first(limit, gets):
    shop = Shop(Budget(**limit, per="user"))
    asked = await shop.ask(5_000, input_tokens=600)
    assert (asked.output if asked.leave else None) == gets


async def test_a_capped_answer_is_told_once_per_agent():
    shop = Shop(user_budget(10))
    first = await shop.ask(20_000)
    assert (first.decision.action, first.decision.finding.rule, first.output) == (Action.WARN, "budget", 10_000)
    shop.guard.release(first.charge)
    assert (await shop.ask(20_000)).decision.action is Action.ALLOW


async def test_a_call_budget_is_never_capped_only_refused():
    shop = Shop(Budget(calls=2, per="user"))
    await shop.buy()
    await shop.buy()
    asked = await shop.ask()
    assert not asked.leave
    assert (asked.decision.trip.unit, asked.decision.trip.observed, asked.decision.trip.limit) == ("calls", 3, 2)


async def test_a_refusal_names_the_tightest_scope_and_holds_nothing_anywhere():
    shop = Shop(
        Budget(usd=CALL * 5, per="app"),
        Budget(usd=CALL * 3, per="user", window="1d"),
        Budget(usd=CALL * 4, per="session"),
        max_usd=CALL * 10,
    )
    for _ in range(3):
        await shop.buy()
    asked = await shop.ask()
    trip = asked.decision.trip
    assert (trip.scope, trip.scope_id, trip.unit) == ("user", "user:app/ann", "usd")
    assert (trip.spent_usd, trip.reserved_usd, trip.limit, trip.observed) == (CALL * 3, 0, CALL * 3, CALL * 4)
    assert "$0.003 spent and $0.00 reserved of $0.003, this call could take $0.001" in trip.message
    assert "extend('user:app/ann', usd=…)" in trip.resume
    assert "begins anew" in trip.resume
    assert shop.nothing_is_held
    assert shop.guard.runs["run"].spend.model_calls == 3


async def test_what_a_refusal_says_about_reserved_is_what_others_hold():
    shop = Shop(user_budget(2), max_wait_seconds=0)
    await shop.buy(500)
    await shop.ask(1_450)
    trip = (await shop.ask(1_000)).decision.trip
    assert (trip.spent_usd, trip.reserved_usd) == (Decimal("0.0005"), Decimal("0.00145"))


@pytest.mark.parametrize(
    ("per", "stops_run"),
    [("run", True), ("user", True), ("app", True), ("agent", False), ("model", False), ("run+agent", False)],
)
async def test_a_spent_budget_stops_all_who_share_it_and_nobody_else(per, stops_run):
    shop = Shop(Budget(calls=1, per=per))
    run = shop.guard.runs["run"]
    for lane in ("left", "right"):
        shop.guard.open_lane(run, lane, ROOT_LANE, concurrent=True)
    await shop.buy(agent="a", lane="left")
    assert not (await shop.ask(agent="a", lane="left")).leave
    assert (run.stopped is not None) is stops_run
    assert (await shop.ask(agent="b", model="dear", lane="right")).leave is not stops_run


async def test_an_overrun_closes_the_scope_for_all_its_runs_until_it_is_extended():
    shop = Shop(user_budget(10))
    shop.open("other")
    asked = await shop.ask(5_000)
    shop.pay(asked, 12_000)
    status = shop.status()
    assert (status.spent, status.overrun, status.closed, status.remaining) == (CALL * 12, CALL * 2, True, 0)
    trip = (await shop.ask(1, run="other")).decision.trip
    assert "closed by an overrun of $0.002" in trip.message
    shop.accounts.extend("user:app/ann", usd=CALL * 3)
    shop.open("third")
    assert (await shop.ask(1_000, run="third")).leave
    assert not shop.status().closed


async def test_usage_that_nobody_was_asked_about_counts_too():
    shop = Shop(user_budget(2))
    call = ModelCall("run", ROOT_LANE, "agent", shop.now, "m")
    shop.guard.settle(shop.accounts.open_settled(shop.guard.runs["run"].purse, call), Usage(500, 1_000))
    assert shop.stand() == (Decimal("0.0015"), 0)
    assert (await shop.ask(1_000)).output == 500


# ---- windows --------------------------------------------------------------------------------------------------------


async def test_a_new_period_begins_with_nothing_spent():
    shop = Shop(user_budget(1, window="1h"))
    await shop.buy()
    shop.now += 3_600
    await shop.buy()
    assert shop.stand() == (CALL, 0)


async def test_a_call_is_booked_in_the_period_in_which_it_was_let_through():
    shop = Shop(user_budget(1, window="1h"))
    asked = await shop.ask()
    before = shop.status()
    shop.now += 3_600
    shop.pay(asked)
    await shop.buy(400)
    assert shop.stand() == (Decimal("0.0004"), 0)
    assert before.ends < shop.status().ends
    (old,) = [account for account in asked.charge.lines.accounts if account.ends == before.ends]
    assert (old.spent_usd, old.held[0]) == (1_000_000, 0)


async def test_a_waiting_call_goes_on_in_the_next_period(monkeypatch):
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


async def test_each_window_of_a_scope_has_an_account_of_its_own():
    shop = Shop(user_budget(2, window="1h"), user_budget(3, window="1d"), user_budget(10))
    await shop.buy(2_000)
    shop.now += 3_600
    assert (await shop.buy(1_000)).leave
    trip = (await shop.ask()).decision.trip
    assert trip.limit == CALL * 3
    assert sorted(status.limit for status in shop.accounts.budgets("user:app/ann")) == [CALL * 2, CALL * 3, CALL * 10]


# ---- whose account --------------------------------------------------------------------------------------------------


async def test_a_pattern_beside_the_plain_scope_both_hold_and_count_once():
    for budgets in (
        [Budget(usd=CALL, per="agent:re*"), Budget(usd=CALL * 3, per="agent")],
        [Budget(usd=CALL * 3, per="agent"), Budget(usd=CALL, per="agent:re*")],
    ):
        shop = Shop(*budgets)
        await shop.buy(agent="research")
        assert sorted((s.limit, s.spent) for s in shop.accounts.budgets("agent:app/research")) == [
            (CALL, CALL),
            (CALL * 3, CALL),
        ]
        assert (await shop.ask(agent="writer", output=3_000)).leave
        assert (await shop.ask(agent="research")).decision.trip.limit == CALL


async def test_a_name_that_looks_like_a_pattern_is_on_no_other_account():
    shop = Shop(Budget(calls=1, per="user:u*"), Budget(calls=2, per="user"))
    shop.open("one", user="u")
    shop.open("two", user="u/u*")
    await shop.buy(run="one")
    await shop.buy(run="two")
    assert {status.spent for status in shop.accounts.budgets()} == {1}


async def test_users_and_sessions_of_two_apps_do_not_share():
    shop = Shop(Budget(calls=1, per="user"), Budget(calls=1, per="session"))
    shop.open("one", app="a", user="x", session="y/z")
    shop.open("two", app="b", user="x", session="y/z")
    shop.open("three", app="a", user="x/y", session="z")
    for run in ("one", "two", "three"):
        await shop.buy(run=run)
    assert len(shop.accounts.budgets()) == 6


async def test_a_combination_counts_each_pair_by_itself():
    shop = Shop(Budget(calls=1, per="run+agent"))
    shop.open("other")
    for run in ("run", "other"):
        for agent in ("a", "b"):
            shop.guard.open_lane(shop.guard.runs[run], agent, ROOT_LANE, concurrent=True)
            await shop.buy(run=run, agent=agent, lane=agent)
    assert (await shop.ask(agent="a", lane="a")).decision.trip.scope_id == "run+agent:run+app/a"


async def test_labels_share_a_budget_across_users():
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
async def test_a_model_is_the_same_in_all_its_spellings(pattern):
    shop = Shop(Budget(calls=2, per=pattern), max_wait_seconds=0)
    for model in ("gemini-2.0-flash", "models/gemini-2.0-flash"):
        assert (await shop.ask(model=model)).leave
    assert (await shop.ask(model="m")).leave
    assert not (await shop.ask(model="vertex_ai/gemini-2.0-flash")).leave


async def test_calls_made_inside_a_tool_are_on_the_tools_account():
    shop = Shop(Budget(calls=1, per="tool:sea*"))
    await shop.buy(tool="search")
    await shop.buy(tool="paint")
    await shop.buy()
    assert not (await shop.ask(tool="search")).leave


async def test_a_run_takes_its_accounts_with_it():
    shop = Shop(Budget(calls=9, per="run+agent"), Budget(calls=9, per="user"), max_usd=1)
    await shop.buy()
    shop.guard.end("run")
    assert [status.scope for status in shop.accounts.budgets()] == ["user:app/ann"]


# ---- amounts that depend on the scope -------------------------------------------------------------------------------


async def test_an_amount_may_be_a_function_of_the_scope():
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


async def test_a_cap_that_falls_below_what_is_spent_closes_nothing_for_good():
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
async def test_a_run_may_be_given_a_limit_of_its_own(policy, budgets, flat, gets):
    shop = Shop(*budgets, **policy)
    shop.open("special", user="ann", **flat)
    assert (await shop.ask(10_000, run="special")).output == gets


async def test_a_limit_of_one_run_is_no_other_runs():
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


async def test_a_threshold_fires_once_per_period_and_scope():
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


async def test_one_jump_over_several_thresholds_fires_them_all():
    bells = [Bell() for _ in range(4)]
    shop = Shop(
        user_budget(10, thresholds=[Threshold(p, bell) for p, bell in zip((0.1, 0.5, 0.9, 1), bells, strict=True)])
    )
    await shop.buy(9_500)
    assert [bell.after(shop) for bell in bells] == [1, 1, 1, 0]
    await shop.buy(500)
    assert [bell.after(shop) for bell in bells] == [1, 1, 1, 1]


async def test_two_thresholds_at_one_share_both_fire():
    bells = [Bell(), Bell()]
    shop = Shop(user_budget(10, thresholds=[Threshold(0.5, bells[0]), Threshold(0.5, bells[1])]))
    await shop.buy(6_000)
    assert [bell.after(shop) for bell in bells] == [1, 1]


async def test_a_recurring_threshold_fires_at_every_settle_at_or_above_it():
    bell = Bell()
    shop = Shop(user_budget(10, thresholds=[Threshold(0.3, bell, recurring=True)]))
    for rings in (0, 0, 1, 2, 3):
        await shop.buy()
        assert bell.after(shop) == rings


@pytest.mark.parametrize(("percent", "calls"), [(0.07, 7), (0.55, 55), (0.29, 29), (0.57, 57), (1, 100)])
async def test_a_share_means_what_it_says_in_whole_calls(percent, calls):
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
    assert (trip.rule, trip.unit, trip.limit) == ("budget", "calls", 100)


async def test_a_threshold_is_about_its_own_budget():
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


async def test_a_threshold_that_stops_refuses_the_next_call():
    shop = Shop(user_budget(10, thresholds=[Threshold(0.8, action="stop")]))
    await shop.buy(7_999)
    await shop.buy(1)
    asked = await shop.ask(1)
    assert not asked.leave
    trip = asked.decision.trip
    assert (trip.scope_id, trip.limit) == ("user:app/ann", CALL * 10)
    assert "$0.008 of $0.01 spent, which is over its threshold of 80%" in trip.message
    shop.accounts.extend("user:app/ann", usd=CALL * 10)
    shop.open("next")
    assert (await shop.ask(1, run="next")).leave


async def test_a_threshold_that_nudges_has_a_word_for_the_model():
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


async def test_a_callback_that_fails_is_recorded_and_hurts_nobody(caplog):
    def fails(status: BudgetStatus) -> None:
        raise ValueError("the pager is on fire")

    bell = Bell()
    shop = Shop(user_budget(10, thresholds=[Threshold(0.5, fails), Threshold(0.5, bell)]))
    await shop.buy(5_000)
    assert bell.after(shop) == 1
    assert shop.guard.snapshot()["callbacks_failed"] == 1
    assert "the pager is on fire" in caplog.text


async def test_an_extension_arms_what_is_above_the_new_level_again():
    bells = [Bell(), Bell()]
    shop = Shop(user_budget(10, thresholds=[Threshold(0.3, bells[0]), Threshold(0.8, bells[1])]))
    await shop.buy(8_000)
    shop.accounts.extend("user:app/ann", usd=CALL * 10)  # 40 %
    await shop.buy(1_000)
    assert [bell.after(shop) for bell in bells] == [1, 1]
    await shop.buy(7_000)  # 80 % of the new cap
    assert [bell.after(shop) for bell in bells] == [1, 2]
    assert bells[1].rung[1].limit == CALL * 20


async def test_an_extension_looks_at_the_thresholds_own_budget():
    bell = Bell()
    shop = Shop(
        Budget(calls=2, per="user", thresholds=[]), Budget(usd=CALL * 10, per="user", thresholds=[Threshold(0.5, bell)])
    )
    await shop.buy(6_000)
    shop.accounts.extend("user:app/ann", usd=CALL * 10)  # 30 % of the dollars, though half of the calls
    await shop.buy(6_000)
    assert bell.after(shop) == 2


async def test_an_extension_in_the_middle_of_a_settle_loses_no_threshold(monkeypatch):
    bell = Bell()
    shop = Shop(user_budget(10, thresholds=[Threshold(0.5, bell)]))
    ledger = shop.accounts.ledger
    first = ledger.first

    def extended_meanwhile(*args: Any) -> bool:
        result = first(*args)
        monkeypatch.setattr(ledger, "first", first)
        shop.accounts.extend("user:app/ann", usd=CALL * 10)
        return result

    monkeypatch.setattr(ledger, "first", extended_meanwhile)
    await shop.buy(9_000)
    await shop.buy(9_000)
    assert bell.after(shop) == 2


def test_a_threshold_fires_once_also_under_threads():
    rung: list[float] = []
    shares = [n / 20 for n in range(1, 21)]
    shop = Shop(
        Budget(calls=400, per="user", thresholds=[Threshold(p, lambda status, p=p: rung.append(p)) for p in shares]),
        max_model_calls=10_000,
    )
    for number in range(8):
        shop.open(f"r{number}")

    async def work(number: int) -> None:
        for _ in range(50):
            await shop.buy(1, run=f"r{number}")

    in_threads([work(number) for number in range(8)])
    assert shop.guard.outbox.flush(PATIENCE_S)
    assert sorted(rung) == shares
    assert shop.stand(unit="calls") == (400, 0)


def in_threads(works: list[Any]) -> None:
    failures: list[BaseException] = []

    def run(work: Any) -> None:
        try:
            asyncio.run(asyncio.wait_for(work, 2 * PATIENCE_S))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * PATIENCE_S)
    assert failures == []


# ---- extending ------------------------------------------------------------------------------------------------------


async def test_an_extension_moves_the_cap_and_the_spend_stays():
    shop = Shop(user_budget(2, window="1h"))
    await shop.buy(2_000)
    (status,) = shop.accounts.extend("user:app/ann", usd="0.001")
    assert (status.spent, status.limit, status.remaining) == (CALL * 2, CALL * 3, CALL)
    assert (await shop.ask(5_000)).output == 1_000


async def test_an_extension_is_for_the_current_period_only():
    shop = Shop(user_budget(2, window="1h"))
    await shop.buy(2_000)
    shop.accounts.extend("user:app/ann", usd=CALL)
    await shop.ask()  # still on its way when the period ends
    shop.now += 3_600
    (status,) = shop.accounts.extend("user:app/ann", usd=CALL * 5)
    assert (status.limit, status.ends > shop.now) == (CALL * 7, True)
    shop.now += 3_600
    assert (await shop.ask(5_000)).output == 2_000


async def test_extensions_add_up_and_hold_for_later_runs():
    shop = Shop(Budget(usd=CALL, tokens=10_000, per="user"))
    shop.accounts.extend("user:app/ann", usd=CALL)
    shop.accounts.extend("user:app/ann", usd=CALL, tokens=5)
    shop.open("later")
    assert (await shop.ask(5_000, run="later")).output == 3_000
    assert shop.status(unit="tokens").limit == 10_005


async def test_a_scope_can_be_extended_before_it_has_spent_anything():
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


async def test_a_session_can_be_named_without_its_user_where_only_one_can_be_meant():
    shop = Shop(Budget(usd=CALL, per="session"))
    await shop.buy()
    assert [status.scope for status in shop.accounts.extend("session:app/s1", usd=CALL)] == ["session:app/ann/s1"]
    shop.open("bobs", user="bob")
    await shop.buy(run="bobs")
    with pytest.raises(PolicyError):
        shop.accounts.extend("session:app/s1", usd=CALL)


async def test_an_extension_does_not_ask_again_what_only_a_run_can_tell():
    shop = Shop(Budget(usd=lambda scope: CALL * 5 if scope.labels["plan"] == "pro" else CALL, per="user"))
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
async def test_an_extension_that_cannot_be_meant_is_an_error_that_says_why(scope, by, says):
    shop = Shop(user_budget(1))
    with pytest.raises(PolicyError) as error:
        shop.accounts.extend(scope, **by)
    assert says in str(error.value)


# ---- shadow ---------------------------------------------------------------------------------------------------------


async def test_a_shadow_only_looks_on():
    shop = Shop(user_budget(2), mode="shadow", max_wait_seconds=3_600)
    made = []
    for _ in range(4):  # all at once: the third and the fourth would have had to wait
        asked = await asyncio.wait_for(shop.ask(), PATIENCE_S)
        assert (asked.leave, asked.output, asked.charge.lowered) == (True, 1_000, False)
        assert asked.decision.action is Action.ALLOW
        made.append(asked)
    assert shop.stand() == (0, CALL * 4)
    for asked in made[:3]:
        assert list(shop.guard.trips) == []  # nobody knows yet: they may take less than they hold
        shop.pay(asked)
    (trip,) = shop.guard.trips
    assert (trip.enforced, trip.rule, trip.scope_id, trip.limit) == (False, "budget", "user:app/ann", CALL * 2)
    assert trip.reserved_usd == CALL * 2  # what others hold, without this call
    assert shop.guard.runs["run"].stopped is None


async def test_a_shadow_that_had_to_wait_for_nothing_says_nothing():
    shop = Shop(user_budget(2), mode="shadow")
    made = [await shop.ask() for _ in range(4)]
    for asked in made:
        shop.pay(asked, 0)  # all of them take less than they held: enforcing would have made them one after another
    assert list(shop.guard.trips) == []


async def test_a_shadow_knows_that_a_shorter_answer_would_have_been_asked_for():
    shop = Shop(Budget(usd=CALL * 3 / 2, per="user", window="1d"), mode="shadow")
    shop.pay(await shop.ask())
    assert (await shop.ask()).output == 1_000  # enforcing lowers it to half
    assert list(shop.guard.trips) == []
    enforcing = Shop(Budget(usd=CALL * 3 / 2, per="user", window="1d"))
    enforcing.pay(await enforcing.ask())
    assert (await enforcing.ask()).charge.lowered


async def test_a_shadow_books_everything():
    shop = Shop(user_budget(2), mode="shadow")
    for _ in range(5):
        await shop.buy()
    status = shop.status()
    assert (status.spent, status.reserved, status.overrun, status.closed) == (CALL * 5, 0, 0, False)
    assert shop.accounts.spend("user:app/ann")["usd"] == CALL * 5
    shop.pay(await shop.ask(), 3_000)
    assert shop.status().overrun > 0  # this one billed more than it held


async def test_a_shadow_would_have_refused_an_unpriced_model_and_says_so():
    shop = Shop(user_budget(2), mode="shadow")
    assert (await shop.ask(model="never-heard-of")).leave
    assert [(trip.rule, trip.enforced) for trip in shop.guard.trips] == [("unpriced", False)]


# ---- models without a price -----------------------------------------------------------------------------------------


async def test_a_dollar_limit_refuses_a_model_whose_price_nobody_knows():
    shop = Shop(user_budget(10))
    asked = await shop.ask(model="never-heard-of")
    assert not asked.leave
    trip = asked.decision.trip
    assert (trip.rule, trip.scope_id) == ("unpriced", "model 'never-heard-of'")
    assert 'prices={"never-heard-of"' in trip.resume
    assert shop.nothing_is_held


@pytest.mark.parametrize("budget", [Budget(tokens=10_000, per="user"), Budget(calls=5, per="user"), None])
async def test_without_a_dollar_limit_a_price_is_not_needed(budget):
    shop = Shop(*([budget] if budget else []))
    await shop.buy(model="never-heard-of")
    spend = shop.accounts.spend()
    assert (spend["usd"], spend["tokens"], spend["unpriced_calls"]) == (0, 1_000, 1)
    assert shop.guard.runs["run"].purse.spent_usd is None  # not zero: not known


async def test_a_rate_for_unknown_models_is_an_estimate():
    shop = Shop(user_budget(10), on_unpriced={"input": 2, "output": 2})
    await shop.buy(model="never-heard-of")
    await shop.buy(model="m")
    assert shop.stand() == (CALL * 3, 0)
    spend = shop.accounts.spend()
    assert (spend["usd"], spend["estimated_calls"], spend["unpriced_calls"]) == (CALL * 3, 1, 0)
    assert spend["by_model"]["m"]["estimated_calls"] == 0


async def test_counting_tokens_only_lets_an_unknown_model_through_a_dollar_limit():
    shop = Shop(Budget(usd=CALL, tokens=3_000, per="user"), on_unpriced="tokens")
    await shop.buy(2_000, model="never-heard-of")
    assert shop.stand() == (0, 0)
    assert shop.stand(unit="tokens") == (2_000, 0)
    assert (await shop.ask(5_000, model="never-heard-of")).output == 1_000
    assert shop.accounts.spend()["unpriced_calls"] == 1


# ---- calls that never told ------------------------------------------------------------------------------------------


async def test_a_call_that_left_and_never_told_its_usage_is_estimated_and_marked():
    shop = Shop(user_budget(10))
    asked = await shop.ask(5_000, input_tokens=200)
    shop.guard.abandon(asked.charge)
    # its prompt and 1,024 tokens, before any answer of that model was seen
    assert shop.stand() == (Decimal("0.001224"), 0)
    spend = shop.accounts.spend()
    assert (spend["estimated_calls"], spend["calls"], spend["input_tokens"]) == (1, 1, 200)


async def test_an_estimate_is_what_answers_of_that_model_are_like_and_never_more_than_was_held():
    shop = Shop(user_budget(100))
    for _ in range(3):
        await shop.buy(300)
    for output, expected in ((5_000, 300), (50, 50)):
        asked = await shop.ask(output)
        before = shop.status().spent
        shop.guard.abandon(asked.charge)
        assert (shop.status().spent - before) * 10**6 == expected
    asked = await shop.ask(5_000)  # an estimate teaches nothing
    assert shop.accounts.guess(asked.charge, 0, False).output == 300


async def test_a_broken_stream_took_what_it_said_so_far():
    shop = Shop(user_budget(10))
    asked = await shop.ask(5_000)
    shop.guard.abandon(asked.charge, streamed_tokens=70, streaming=True)
    assert shop.stand() == (Decimal("0.00007"), 0)


async def test_a_call_that_the_provider_refused_costs_nothing():
    shop = Shop(user_budget(10))
    asked = await shop.ask(5_000, input_tokens=200)
    shop.guard.abandon(asked.charge, refused=True)
    spend = shop.accounts.spend()
    assert (shop.stand(), spend["calls"], spend["estimated_calls"], spend["unpriced_calls"]) == ((0, 0), 1, 0, 0)


async def test_what_is_told_after_all_replaces_the_estimate_and_not_the_other_way_round():
    shop = Shop(user_budget(10))
    asked = await shop.ask(5_000)
    shop.guard.abandon(asked.charge)
    shop.pay(asked, 300)
    shop.guard.abandon(asked.charge)
    spend = shop.accounts.spend()
    assert (shop.stand(), spend["usd"], spend["estimated_calls"]) == ((Decimal("0.0003"), 0), Decimal("0.0003"), 0)


# ---- who spent what -------------------------------------------------------------------------------------------------


async def test_spend_is_told_per_agent_model_and_tool_also_without_any_limit():
    shop = Shop()
    await shop.buy(1_000, agent="a", input_tokens=500)
    await shop.buy(2_000, agent="a", model="dear", tool="search")
    await shop.buy(3_000, agent="b", tool="search")
    spend = shop.accounts.spend()
    assert (spend["usd"], spend["calls"], spend["input_tokens"], spend["output_tokens"], spend["tokens"]) == (
        Decimal("0.0245"),
        3,
        500,
        6_000,
        6_500,
    )
    assert {name: line["usd"] for name, line in spend["by_agent"].items()} == {
        "a": Decimal("0.0215"),
        "b": Decimal("0.003"),
    }
    assert {name: line["usd"] for name, line in spend["by_model"].items()} == {
        "m": Decimal("0.0045"),
        "dear": Decimal("0.02"),
    }
    assert {name: line["calls"] for name, line in spend["by_tool"].items()} == {"search": 2}
    assert shop.accounts.budgets() == []


async def test_runs_fold_into_their_session_user_and_app():
    shop = Shop()
    shop.open("same session")
    shop.open("same user", session="s2")
    shop.open("same app", user="bob")
    shop.open("elsewhere", app="other")
    for run in ("run", "same session", "same user", "same app", "elsewhere"):
        await shop.buy(run=run)

    def told() -> list[int]:
        scopes = ["run:run", "session:app/ann/s1", "user:app/ann", "app:app", None, "app:nobody"]
        return [shop.accounts.spend(scope)["calls"] for scope in scopes]

    while_running = told()
    assert while_running == [1, 2, 3, 4, 5, 0]
    for run in ("run", "same user", "elsewhere"):
        shop.guard.end(run)
        assert told() == while_running
    shop.open("run")  # the same id again goes on from there
    await shop.buy(run="run")
    assert told() == [2, 3, 4, 5, 6, 0]


async def test_what_is_told_after_the_end_of_its_run_is_not_lost():
    shop = Shop(user_budget(10))
    asked = await shop.ask()
    shop.guard.end("run")
    for output in (400, 700):
        shop.pay(asked, output)
        for scope in ("run:run", "user:app/ann", None):
            spend = shop.accounts.spend(scope)
            assert (spend["usd"], spend["calls"], spend["reserved_usd"]) == (Decimal(output) / 10**6, 1, 0)
    assert shop.stand() == (Decimal("0.0007"), 0)


async def test_the_model_that_answered_wins_over_the_one_that_was_asked():
    shop = Shop(user_budget(100))
    asked = await shop.ask()
    shop.pay(asked, model="dear")
    assert shop.stand() == (CALL * 10, 0)
    assert list(shop.accounts.spend()["by_model"]) == ["dear"]
    shop.pay(asked, model="m")  # told again: no empty line stays behind
    assert {name: line["calls"] for name, line in shop.accounts.spend()["by_model"].items()} == {"m": 1}


async def test_an_answer_by_a_model_without_a_price_is_an_estimate():
    shop = Shop(user_budget(100))
    shop.pay(await shop.ask(), model="never-heard-of")
    spend = shop.accounts.spend()
    assert (spend["usd"], spend["estimated_calls"]) == (CALL, 1)


async def test_the_lines_of_a_run_and_the_history_of_runs_are_bounded(monkeypatch):
    monkeypatch.setattr(finder, "LINES_KEPT", 5)
    monkeypatch.setattr(spending, "LINES_KEPT", 5)
    monkeypatch.setattr(charges, "LINES_KEPT", 5)
    monkeypatch.setattr(spending, "_HISTORY_KEPT", 6)
    shop = Shop(max_model_calls=1_000)
    for number in range(20):
        await shop.buy(agent=f"made up {number}")
    spend = shop.accounts.spend("run:run")
    assert spend["calls"] == 20  # nothing is lost, the late names share one line
    assert spend["by_agent"]["(others)"]["calls"] == 15
    assert len(spend["by_agent"]) == 6
    for number in range(20):
        shop.open(f"r{number}", user=f"u{number}")
        await shop.buy(run=f"r{number}")
        shop.guard.end(f"r{number}")
    assert len(shop.accounts.spending.history) <= 6
    assert shop.accounts.spend()["calls"] == 40  # the sum of all is never dropped
    assert shop.accounts.spend("user:app/u0")["calls"] == 0


async def test_the_snapshot_of_a_run_tells_spent_and_reserved_apart():
    shop = Shop(user_budget(10))
    await shop.buy()
    await shop.ask()
    (run,) = shop.guard.snapshot()["runs"]
    assert (run["spent_usd"], run["reserved_usd"]) == (CALL, CALL)


# ---- everybody at once ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
async def test_400_calls_on_a_budget_for_ten_never_break_it(seed, caplog):
    """Each call pays, fails, never leaves or is cancelled,
    at any point; and what others gave back is used to the last.
    """
    caplog.set_level(logging.CRITICAL, "runguard")
    dice = random.Random(seed)
    kind = ("exact", "cheaper", "calls")[seed % 3]
    budget = Budget(calls=10, per="user") if kind == "calls" else user_budget(10)
    shop = Shop(budget, min_output_tokens=1_000, max_model_calls=10_000)  # full answers or none
    for number in range(4):
        shop.open(f"r{number}")
    bills: list[int] = []
    in_flight = most = 0

    def check() -> None:
        for status in shop.accounts.budgets():
            assert status.spent + status.reserved <= status.limit
            assert not status.closed

    async def work(number: int, pace: list[int], fate: float, bill: int) -> None:
        nonlocal in_flight, most
        await turns(pace[0])
        asked = await shop.ask(run=f"r{number % 4}")
        check()
        if not asked.leave:
            return
        in_flight += 1
        most = max(most, in_flight)
        try:
            await turns(pace[1])
            if fate < 0.2:
                raise ConnectionError("it never left")
        except BaseException:
            shop.guard.release(asked.charge)
            raise
        finally:
            in_flight -= 1
            check()
        shop.pay(asked, bill)
        bills.append(bill)
        check()

    tasks = []
    for number in range(400):
        bill = 1_000 if kind == "exact" else dice.randint(0, 1_000)
        tasks.append(asyncio.create_task(work(number, [dice.randint(0, 5), dice.randint(0, 5)], dice.random(), bill)))
    for task in dice.sample(tasks, 60):
        await turns(dice.randint(0, 1))
        task.cancel()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S)
    assert all(r is None or isinstance(r, ConnectionError | asyncio.CancelledError) for r in results), [
        r for r in results if isinstance(r, AssertionError)
    ]
    assert most <= 10 or kind == "cheaper"
    assert shop.nothing_is_held
    if kind == "cheaper":
        assert 9_000 < sum(bills) <= 10_000  # nobody was sent away while a full call still fitted
        assert shop.stand() == (Decimal(sum(bills)) / 10**6, 0)
    else:
        assert len(bills) == 10
    assert shop.accounts.spend("user:app/ann")["calls"] == len(bills)
    assert all(run.waiting == 0 for run in shop.guard.runs.values())


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def test_two_loops_in_two_threads_share_a_budget_to_the_last_call():
    shop = Shop(Budget(calls=40, per="user"), max_model_calls=10_000)
    for number in range(4):
        shop.open(f"r{number}")
    admitted: list[int] = []

    async def one(number: int) -> None:
        asked = await shop.ask(1, run=f"r{number % 4}")
        if asked.leave:
            await asyncio.sleep(0)
            if number % 3:
                shop.pay(asked, 1)
                admitted.append(number)
            else:
                shop.guard.release(asked.charge)  # somebody in the other thread may wait for just this

    async def work(thread: int) -> None:
        await asyncio.gather(*(one(2 * number + thread) for number in range(60)))

    in_threads([work(0), work(1)])
    assert len(admitted) == 40
    assert shop.nothing_is_held
