"""What was spent, by whom, in shadow mode, without prices and without usage; and what it forecasts."""

import asyncio
import logging
import random
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runguard.core.decision import Action
from runguard.core.money import (
    LEAST_CALLS,
    Budget,
    Trend,
    Window,
    begin_of,
    budget_forecast,
    calls_until_size,
    calls_within,
    sum_of,
    trend_of,
)
from runguard.engine import spending
from tests.kit.accounts import CALL, Shop, user_budget
from tests.kit.examples import each_row
from tests.kit.waiting import PATIENCE_S, loops_at_once, turns

# ---- shadow ---------------------------------------------------------------------------------------------------------


async def test_a_shadow_only_looks_on() -> None:
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


async def test_a_shadow_that_had_to_wait_for_nothing_says_nothing() -> None:
    shop = Shop(user_budget(2), mode="shadow")
    made = [await shop.ask() for _ in range(4)]
    for asked in made:
        shop.pay(asked, 0)  # all of them take less than they held: enforcing would have made them one after another
    assert list(shop.guard.trips) == []


async def test_a_shadow_knows_that_a_shorter_answer_would_have_been_asked_for() -> None:
    shop = Shop(Budget(usd=CALL * 3 / 2, per="user", window="1d"), mode="shadow")
    shop.pay(await shop.ask())
    assert (await shop.ask()).output == 1_000  # enforcing lowers it to half
    assert list(shop.guard.trips) == []
    enforcing = Shop(Budget(usd=CALL * 3 / 2, per="user", window="1d"))
    enforcing.pay(await enforcing.ask())
    assert (await enforcing.ask()).charge.lowered


async def test_a_shadow_books_everything() -> None:
    shop = Shop(user_budget(2), mode="shadow")
    for _ in range(5):
        await shop.buy()
    status = shop.status()
    assert (status.spent, status.reserved, status.overrun, status.closed) == (CALL * 5, 0, 0, False)
    assert shop.accounts.spend("user:app/ann")["usd"] == CALL * 5
    shop.pay(await shop.ask(), 3_000)
    assert shop.status().overrun > 0  # this one billed more than it held


async def test_a_shadow_would_have_refused_an_unpriced_model_and_says_so() -> None:
    shop = Shop(user_budget(2), mode="shadow")
    assert (await shop.ask(model="never-heard-of")).leave
    assert [(trip.rule, trip.enforced) for trip in shop.guard.trips] == [("unpriced", False)]


# ---- models without a price -----------------------------------------------------------------------------------------


async def test_a_dollar_limit_refuses_a_model_whose_price_nobody_knows() -> None:
    shop = Shop(user_budget(10))
    asked = await shop.ask(model="never-heard-of")
    assert not asked.leave
    trip = asked.decision.trip
    assert trip is not None
    assert (trip.rule, trip.scope_id) == ("unpriced", "model 'never-heard-of'")
    assert 'prices={"never-heard-of"' in trip.resume
    assert shop.nothing_is_held


@pytest.mark.parametrize("budget", [Budget(tokens=10_000, per="user"), Budget(calls=5, per="user"), None])
async def test_without_a_dollar_limit_a_price_is_not_needed(budget: Budget | None) -> None:
    shop = Shop(*([budget] if budget else []))
    await shop.buy(model="never-heard-of")
    spend = shop.accounts.spend()
    assert (spend["usd"], spend["tokens"], spend["unpriced_calls"]) == (0, 1_000, 1)
    assert shop.guard.runs["run"].run_costs.spent_usd is None  # not zero: not known


async def test_a_rate_for_unknown_models_is_an_estimate() -> None:
    shop = Shop(user_budget(10), on_unpriced={"input": 2, "output": 2})
    await shop.buy(model="never-heard-of")
    await shop.buy(model="m")
    assert shop.stand() == (CALL * 3, 0)
    spend = shop.accounts.spend()
    assert (spend["usd"], spend["estimated_calls"], spend["unpriced_calls"]) == (CALL * 3, 1, 0)
    assert spend["by_model"]["m"]["estimated_calls"] == 0


async def test_counting_tokens_only_lets_an_unknown_model_through_a_dollar_limit() -> None:
    shop = Shop(Budget(usd=CALL, tokens=3_000, per="user"), on_unpriced="tokens")
    await shop.buy(2_000, model="never-heard-of")
    assert shop.stand() == (0, 0)
    assert shop.stand(unit="tokens") == (2_000, 0)
    assert (await shop.ask(5_000, model="never-heard-of")).output == 1_000
    assert shop.accounts.spend()["unpriced_calls"] == 1


# ---- calls that never told ------------------------------------------------------------------------------------------


async def test_a_call_that_left_and_never_told_its_usage_is_estimated_and_marked() -> None:
    shop = Shop(user_budget(10))
    asked = await shop.ask(5_000, input_tokens=200)
    shop.guard.abandon(asked.charge)
    # its prompt and 1,024 tokens, before any answer of that model was seen
    assert shop.stand() == (Decimal("0.001224"), 0)
    spend = shop.accounts.spend()
    assert (spend["estimated_calls"], spend["calls"], spend["input_tokens"]) == (1, 1, 200)


async def test_an_estimate_is_what_answers_of_that_model_are_like_and_never_more_than_was_held() -> None:
    shop = Shop(user_budget(100))
    for _ in range(3):
        await shop.buy(300)
    for output, expected in ((5_000, 300), (50, 50)):
        asked = await shop.ask(output)
        before = shop.status().spent
        shop.guard.abandon(asked.charge)
        assert (shop.status().spent - before) * 10**6 == expected
    asked = await shop.ask(5_000)  # an estimate teaches nothing
    assert shop.accounts.expectations.guess(asked.charge, 0, False).output == 300


async def test_a_broken_stream_took_what_it_said_so_far() -> None:
    shop = Shop(user_budget(10))
    asked = await shop.ask(5_000)
    shop.guard.abandon(asked.charge, streamed_tokens=70, streaming=True)
    assert shop.stand() == (Decimal("0.00007"), 0)


async def test_what_is_told_after_all_replaces_the_estimate_and_not_the_other_way_round() -> None:
    shop = Shop(user_budget(10))
    asked = await shop.ask(5_000)
    shop.guard.abandon(asked.charge)
    shop.pay(asked, 300)
    shop.guard.abandon(asked.charge)
    spend = shop.accounts.spend()
    assert (shop.stand(), spend["usd"], spend["estimated_calls"]) == ((Decimal("0.0003"), 0), Decimal("0.0003"), 0)


# ---- who spent what -------------------------------------------------------------------------------------------------


async def test_spend_is_told_per_agent_model_and_tool_also_without_any_limit() -> None:
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


async def test_runs_fold_into_their_session_user_and_app() -> None:
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


async def test_what_is_told_after_the_end_of_its_run_is_not_lost() -> None:
    shop = Shop(user_budget(10))
    asked = await shop.ask()
    shop.guard.end("run")
    for output in (400, 700):
        shop.pay(asked, output)
        for scope in ("run:run", "user:app/ann", None):
            spend = shop.accounts.spend(scope)
            assert (spend["usd"], spend["calls"], spend["reserved_usd"]) == (Decimal(output) / 10**6, 1, 0)
    assert shop.stand() == (Decimal("0.0007"), 0)


async def test_an_answer_by_a_model_without_a_price_is_an_estimate() -> None:
    shop = Shop(user_budget(100))
    shop.pay(await shop.ask(), model="never-heard-of")
    spend = shop.accounts.spend()
    assert (spend["usd"], spend["estimated_calls"]) == (CALL, 1)


async def test_the_lines_of_a_run_and_the_history_of_runs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spending, "LINES_KEPT", 5)
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


# ---- everybody at once ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
async def test_400_calls_on_a_budget_for_ten_never_break_it(seed: int, caplog: pytest.LogCaptureFixture) -> None:
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


def test_two_loops_in_two_threads_share_a_budget_to_the_last_call() -> None:
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

    loops_at_once([lambda: work(0), lambda: work(1)])
    assert len(admitted) == 40
    assert shop.nothing_is_held


# ---- Forecasts: how many calls still fit, and when a budget is used up ----------------------------------------------


LINEAR = [1_000 + 100 * n for n in range(20)]
SAWTOOTH = [1_000 + 500 * (n % 8) for n in range(24)]  # cut three times, at 4,500 tokens
HOUR, DAY = 3_600.0, 86_400.0


def test_linear_growth_is_continued_exactly() -> None:
    trend = trend_of(LINEAR)
    assert trend is not None
    assert sum_of(trend, 1) == 3_000  # the 21st
    assert sum_of(trend, 3) == 3_000 + 3_100 + 3_200
    assert calls_within(trend, 9_300) == 3
    assert calls_within(trend, 9_299) == 2
    assert calls_until_size(LINEAR, 3_900) == 10


def test_flat_prompts_never_reach_a_size() -> None:
    flat = [1_000] * 20
    assert calls_until_size(flat, 2_000) is None
    trend = trend_of(flat)
    assert trend is not None
    assert calls_within(trend, 10_500) == 10


def test_a_history_that_is_cut_is_expected_to_be_cut_again() -> None:
    assert calls_until_size(SAWTOOTH, 100_000) is None
    left = calls_until_size(SAWTOOTH[:-4], 4_500)
    assert left == (4_500 - SAWTOOTH[19]) // 500
    trend = trend_of(SAWTOOTH, is_flat=True)
    assert trend is not None
    assert calls_within(trend, 24 * sum(SAWTOOTH)) == 24 * 24


def test_there_is_no_figure_for_too_few_calls() -> None:
    few = LINEAR[: LEAST_CALLS - 1]
    assert trend_of(few) is None
    assert calls_until_size(few, 100_000) is None
    assert budget_forecast(500, 1_000, LEAST_CALLS - 1, 0, HOUR, DAY) is None
    assert trend_of(LINEAR[:LEAST_CALLS]) is not None


def test_a_series_that_falls_goes_on_at_its_later_half() -> None:
    assert trend_of([900] * 6 + [300] * 6) == Trend(1_800, 0, 6)


def test_calls_that_take_nothing_reach_no_cap() -> None:
    assert calls_within(Trend(0, 0, 1), 100) is None


@given(st.lists(st.integers(0, 10**12), min_size=LEAST_CALLS, max_size=32), st.integers(0, 10**13))
def test_the_calls_that_fit_are_the_most_that_fit(amounts: list[int], room: int) -> None:
    trend = trend_of(amounts)
    assert trend is not None
    left = calls_within(trend, room)
    if left is None:
        assert sum_of(trend, 1_000_000) == 0
        return
    level, growth, scale = trend

    def exact(calls: int) -> int:
        return 2 * calls * level + growth * calls * (calls - 1)

    assert exact(left) <= 2 * scale * room < exact(left + 1)


def test_a_day_is_used_up_at_the_pace_since_midnight() -> None:
    found = budget_forecast(40, 100, 50, 0, 6 * HOUR, DAY)
    assert found is not None
    assert (found.used_up_at, found.share_at_end) == (15 * HOUR, 1.6)


def test_a_burst_counts_less_the_longer_it_is_over() -> None:
    soon, later = (budget_forecast(40, 100, 50, 0, hours * HOUR, DAY) for hours in (1, 20))
    assert soon is not None
    assert soon.used_up_at == 2.5 * HOUR
    assert later is not None
    assert later.used_up_at is None


@each_row(
    ("window", "tz"),
    [("1m", None), ("6h", None), ("1d", None), ("1w", "Asia/Tokyo"), ("month", None), ("month", "America/New_York")],
)
def test_the_begin_of_a_period_is_found_from_its_end(window: str, tz: str | None) -> None:
    for month in range(1, 13):
        at = datetime(2026, month, 20, 13, 30, tzinfo=UTC).timestamp()
        _, begins, ends = Window.parse(window, tz).bounds(at)
        assert abs(begin_of(window, ends) - begins) <= HOUR  # daylight saving time
