"""The worst case of a call is reserved; a call that does not fit waits, is capped or refused. Holds are renewed."""

import asyncio
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runguard.core.decision import Action
from runguard.core.events import ROOT_LANE, ModelCall, RunInfo
from runguard.core.money import Budget, Threshold
from runguard.engine.downgrade import CachedPrompt, switch_costs
from runguard.engine.final_answer import Closing
from runguard.engine.guard import Guard
from runguard.engine.money import ASSUMED_OUTPUT
from runguard.engine.reserving import STANDING_S
from runguard.policy.settings import Policy
from runguard.pricing.rates import Band, Rates, Usage
from tests.kit.accounts import CALL, Shop, soon, user_budget
from tests.kit.stores import KINDS, Servers, empty_store, missing
from tests.kit.waiting import PATIENCE_S

# ---- the worst case -------------------------------------------------------------------------------------------------


async def test_the_worst_case_is_the_prompt_and_the_largest_answer() -> None:
    shop = Shop(Budget(usd=1, tokens=10**6, per="user"))
    asked = await shop.ask(700, input_tokens=300)
    assert asked.decision.action is Action.ALLOW
    assert shop.stand() == (0, CALL)
    assert shop.stand(unit="tokens") == (0, 1_000)
    assert shop.accounts.spend()["reserved_usd"] == CALL


@pytest.mark.parametrize(
    ("model", "limit"), [("gemini-2.0-flash", 8_192), ("small", 500), ("never-heard-of", ASSUMED_OUTPUT)]
)
async def test_a_request_without_a_limit_is_taken_to_use_what_its_model_can(model: str, limit: Any) -> None:
    shop = Shop(Budget(tokens=10**6, per="user"), models={"small": {"max_output_tokens": 500}})
    asked = await shop.ask(None, model=model, input_tokens=10)
    assert asked.output == limit
    assert shop.stand(unit="tokens") == (0, limit + 10)
    assert not asked.charge.lowered


async def test_what_was_not_used_is_free_again_and_spent_stands_apart_from_reserved() -> None:
    shop = Shop(user_budget(10))
    first, second = await shop.ask(), await shop.ask()
    shop.pay(first, 400)
    assert shop.stand() == (Decimal("0.0004"), CALL)
    assert shop.status().remaining == Decimal("0.0086")
    shop.pay(second, 0)
    assert shop.stand() == (Decimal("0.0004"), 0)


async def test_the_later_figure_replaces_the_earlier_everywhere() -> None:
    shop = Shop(user_budget(10))
    asked = await shop.ask()
    for output in (300, 900, 500):
        shop.pay(asked, output)
        assert shop.stand() == (Decimal(output) / 10**6, 0)
        assert shop.accounts.spend()["tokens"] == output
        assert shop.guard.runs["run"].spend.output_tokens == output
    assert shop.accounts.spend()["calls"] == 1


async def test_a_call_that_never_left_is_as_if_it_had_not_been_asked_for() -> None:
    shop = Shop(Budget(usd=1, calls=1, per="user"))
    for _ in range(3):
        asked = await shop.ask()
        assert asked.leave
        shop.guard.release(asked.charge)
        shop.guard.release(asked.charge)
        assert shop.nothing_is_held
    assert shop.accounts.spend()["calls"] == 0


async def test_a_call_that_was_released_and_left_after_all_is_billed_once() -> None:
    shop = Shop(user_budget(10))
    asked = await shop.ask()
    shop.guard.release(asked.charge)
    shop.pay(asked, 500)
    assert shop.stand() == (Decimal("0.0005"), 0)
    assert shop.nothing_is_held
    assert shop.accounts.spend()["usd"] == Decimal("0.0005")


# ---- waiting --------------------------------------------------------------------------------------------------------


async def test_a_call_waits_for_what_others_hold_and_is_then_let_through_in_full() -> None:
    shop = Shop(user_budget(2))
    first, _ = await shop.ask(), await shop.ask()
    waiting = await shop.asks_and_waits()
    shop.pay(first, 0)
    asked = await soon(waiting)
    assert asked.decision.action is Action.ALLOW
    assert (asked.output, asked.charge.lowered) == (1_000, False)


@pytest.mark.parametrize("how", ["release", "extend"])
async def test_a_waiting_call_goes_on_as_soon_as_there_is_room(how: str) -> None:
    shop = Shop(user_budget(1))
    first = await shop.ask()
    waiting = await shop.asks_and_waits()
    if how == "release":
        shop.guard.release(first.charge)
    else:
        shop.accounts.extend("user:app/ann", usd=CALL)
    assert (await soon(waiting)).output == 1_000


async def test_a_wait_is_bounded_and_then_the_answer_is_capped_to_what_is_left() -> None:
    shop = Shop(user_budget(2), max_wait_seconds=0.05)
    await shop.ask(1_700)
    began = asyncio.get_running_loop().time()
    asked = await asyncio.wait_for(shop.ask(), PATIENCE_S)
    assert asyncio.get_running_loop().time() - began >= 0.05
    assert (asked.output, asked.charge.lowered) == (300, True)
    assert shop.status().remaining == 0


async def test_a_cancelled_wait_gives_everything_back() -> None:
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


async def test_a_cancelled_wait_gives_its_place_among_the_calls_in_flight_back() -> None:
    shop = Shop(user_budget(1))
    await shop.ask()
    run = shop.guard.runs["run"]
    waiting = asyncio.create_task(
        shop.guard.reserve(ModelCall("run", ROOT_LANE, "agent", shop.now, "m", max_output_tokens=1_000))
    )
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(run.slots.holders) == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert len(run.slots.holders) == 0


async def test_a_run_that_is_stopped_meanwhile_lets_nobody_wait_on() -> None:
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


async def test_a_threshold_that_stops_holds_also_for_those_who_wait() -> None:
    shop = Shop(user_budget(10, thresholds=[Threshold(0.5, action="stop")]))
    holders = [await shop.ask() for _ in range(10)]
    waiting = await shop.asks_and_waits()
    for holder in holders[:9]:
        shop.pay(holder, 600)
    asked = await soon(waiting)
    assert not asked.leave
    assert asked.decision.trip is not None
    assert asked.decision.trip.rule == "budget"
    assert "threshold of 50%" in asked.decision.trip.message


async def test_the_deadline_of_the_run_holds_also_for_those_who_wait() -> None:
    shop = Shop(user_budget(1), max_seconds=10)
    first = await shop.ask()
    waiting = await shop.asks_and_waits()
    shop.now += 100
    shop.pay(first, 0)
    asked = await soon(waiting)
    assert asked.decision.trip is not None
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
async def test_an_answer_is_capped_down_to_a_useful_minimum_and_then_refused(
    spent: int, asks: int, gets: int | None
) -> None:
    shop = Shop(user_budget(10), min_output_tokens=100)
    await shop.buy(spent)
    asked = await shop.ask(asks)
    assert (asked.output if asked.leave else None) == gets
    if gets is None:
        assert asked.decision.trip is not None
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
async def test_the_prompt_is_paid_first(limit: dict[str, Any], gets: int | None) -> None:
    shop = Shop(Budget(**limit, per="user"))
    asked = await shop.ask(5_000, input_tokens=600)
    assert (asked.output if asked.leave else None) == gets


async def test_a_capped_answer_is_told_once_per_agent() -> None:
    shop = Shop(user_budget(10))
    first = await shop.ask(20_000)
    assert first.decision.finding is not None
    assert (first.decision.action, first.decision.finding.rule, first.output) == (Action.WARN, "budget", 10_000)
    shop.guard.release(first.charge)
    assert (await shop.ask(20_000)).decision.action is Action.ALLOW


async def test_a_refusal_names_the_tightest_scope_and_holds_nothing_anywhere() -> None:
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
    assert trip is not None
    assert (trip.scope, trip.scope_id, trip.unit) == ("user", "user:app/ann", "usd")
    assert (trip.spent_usd, trip.reserved_usd, trip.limit, trip.observed) == (CALL * 3, Decimal(0), CALL * 3, CALL * 4)
    assert "$0.003 spent and $0.00 reserved of $0.003, this call could take $0.001" in trip.message
    assert "extend('user:app/ann', usd=…)" in trip.resume
    assert "window resets at" in trip.resume
    assert shop.nothing_is_held
    assert shop.guard.runs["run"].spend.model_calls == 3


@pytest.mark.parametrize(
    ("per", "stops_run"),
    [("run", True), ("user", True), ("app", True), ("agent", False), ("model", False), ("run+agent", False)],
)
async def test_a_spent_budget_stops_all_who_share_it_and_nobody_else(per: str, stops_run: bool) -> None:
    shop = Shop(Budget(calls=1, per=per))
    run = shop.guard.runs["run"]
    for lane in ("left", "right"):
        shop.guard.open_lane(run, lane, ROOT_LANE, concurrent=True)
    await shop.buy(agent="a", lane="left")
    assert not (await shop.ask(agent="a", lane="left")).leave
    assert (run.stopped is not None) is stops_run
    assert (await shop.ask(agent="b", model="dear", lane="right")).leave is not stops_run


async def test_an_overrun_closes_the_scope_for_all_its_runs_until_it_is_extended() -> None:
    shop = Shop(user_budget(10))
    shop.open("other")
    asked = await shop.ask(5_000)
    shop.pay(asked, 12_000)
    status = shop.status()
    assert (status.spent, status.overrun, status.closed, status.remaining) == (CALL * 12, CALL * 2, True, 0)
    trip = (await shop.ask(1, run="other")).decision.trip
    assert trip is not None
    assert "closed by an overrun of $0.002" in trip.message
    shop.accounts.extend("user:app/ann", usd=CALL * 3)
    shop.open("third")
    assert (await shop.ask(1_000, run="third")).leave
    assert not shop.status().closed


async def test_usage_that_nobody_was_asked_about_counts_too() -> None:
    shop = Shop(user_budget(2))
    call = ModelCall("run", ROOT_LANE, "agent", shop.now, "m")
    shop.guard.settle(shop.accounts.open_settled(shop.guard.runs["run"].run_costs, call), Usage(500, 1_000))
    assert shop.stand() == (Decimal("0.0015"), 0)
    assert (await shop.ask(1_000)).output == 500


# ---- A call that fits its budgets is reserved without waiting, exactly as one that goes the long way


PRICES = {"m": {"input": 1, "output": 4}}


def opened(**policy: Any) -> Guard:
    guard = Guard(Policy(prices=PRICES, telemetry=False, **policy))
    guard.start(RunInfo("run", "app", "u", "s"))
    return guard


def call(model: str = "m", **more: Any) -> ModelCall:
    return ModelCall("run", "", "agent", 1.0, model, input_tokens=1_000, **more)


@pytest.mark.parametrize(
    ("policy", "more"),
    [
        pytest.param({}, {}, id="no budget"),
        pytest.param({"max_usd": 1}, {"max_output_tokens": 500}, id="limit of the request"),
        pytest.param({"max_usd": 1}, {}, id="limit of the model"),
        pytest.param({"max_tokens": 200_000}, {}, id="tokens"),
        pytest.param({"max_usd": 1}, {"max_output_tokens": 500, "candidates": 3}, id="several candidates"),
    ],
)
async def test_what_is_reserved_is_the_same(
    monkeypatch: pytest.MonkeyPatch, policy: dict[str, Any], more: dict[str, Any]
) -> None:
    waits, at_once = opened(**policy), opened(**policy)
    one, other = call(**more), call(**more)
    monkeypatch.setattr(waits.accounts.ledger, "hold_now", lambda *_: None)
    assert not await waits.reserve(one)
    assert not await at_once.reserve(other)
    for name in ("held", "max_output", "limited", "lowered", "input", "candidates"):
        assert getattr(other.charge, name) == getattr(one.charge, name), name
    assert at_once.runs["run"].run_costs.reserved == waits.runs["run"].run_costs.reserved
    assert [a.held for a in other.charge.lines.accounts] == [a.held for a in one.charge.lines.accounts]


@pytest.mark.parametrize(
    ("policy", "model"),
    [
        pytest.param({"max_usd": 1}, "a-model-without-a-price", id="no price"),
        pytest.param({"max_usd": "0.001"}, "m", id="too expensive"),
        pytest.param({"max_tokens": 1_000}, "m", id="too many tokens"),
    ],
)
async def test_a_call_that_may_be_refused_is_decided_in_full(policy: dict[str, Any], model: str) -> None:
    guard = opened(**policy)
    event = call(model)
    decision = await guard.reserve(event)
    assert decision.action.name == "STOP"
    assert event.charge is None
    assert guard.runs["run"].run_costs.reserved == 0


# ---- Whether a switch to a cheaper model saves money, against the same arithmetic in fractions


RATE = st.integers(0, 10**11)  # nano-USD per million tokens
TOKENS = st.integers(0, 10**7)


def by_hand(band: Band, plain: int, cached: int, write: int, output: int) -> int:
    total = plain * band.input + cached * band.cached + write * band.cache_write + output * band.output
    return math.ceil(Fraction(total, 1_000_000))


bands = st.builds(
    lambda i, o, c, w: Band(0, i, o, c, w, i, c, o), i=RATE, o=RATE, c=RATE, w=RATE
)  # text only: audio costs as much


@given(bands, bands, TOKENS, TOKENS, TOKENS, st.fractions(0, 1), st.fractions(0, 1))
def test_a_switch_is_made_only_where_the_call_costs_less_with_the_lost_cache(
    present: Band, other: Band, prompt: int, output: int, last: int, cached_share: Fraction, write_share: Fraction
) -> None:
    read = int(last * cached_share)
    written = int((last - read) * write_share)
    costs = switch_costs(
        Rates([present], "t"), Rates([other], "t"), prompt, output, CachedPrompt("m", last, read, written)
    )
    cached = prompt * read // last if last else 0
    write = min(prompt * written // last, prompt - cached) if last else 0
    assert costs.cached == cached
    assert costs.stay == by_hand(present, prompt - cached - write, cached, write, output)
    assert costs.switch == by_hand(other, prompt - cached - write, 0, cached + write, output)
    assert costs.saves == (costs.switch < costs.stay)


@given(bands, TOKENS, TOKENS, st.integers(1, 10**7))
def test_a_switch_to_the_same_prices_never_saves(band: Band, prompt: int, output: int, last: int) -> None:
    write = max(band.input, band.cached, band.cache_write)
    rates = Rates([band._replace(cache_write=write)], "t")
    assert not switch_costs(rates, rates, prompt, output, CachedPrompt("m", last, last // 2, 0)).saves
    assert not switch_costs(rates, rates, prompt, output).saves


# ---- The hold of a last answer lives as long as its run. A call that was never sent costs nothing, however late -----


HOLD_S = 0.4
POLICY: dict[str, Any] = {
    "budgets": [Budget(usd=1, per="user", window="1d")],
    "prices": {"m": {"input": 100, "output": 100}},
    "final_answer": True,
    "min_output_tokens": 100,
    "hold_seconds": HOLD_S,
}


@pytest.fixture(params=["memory", *KINDS])
def store(request: pytest.FixtureRequest, servers: Servers, tmp_path: Any) -> dict[str, Any]:
    if request.param == "memory":
        return {}
    if reason := missing(request.param):
        pytest.skip(reason)
    return {"store": empty_store(request.param, servers, tmp_path), "store_timeout": 10}


def office(store: dict[str, Any], **more: Any) -> Guard:
    guard = Guard(Policy.validated({**POLICY, **store, **more}, "keywords"), gives_last_answers=True)
    guard.start(RunInfo("run", "app", "ann", "s", at=guard.clock()))
    return guard


def shown(guard: Guard) -> tuple[Decimal | int, Decimal | int]:
    assert guard.accounts.ledger.flush(10)
    (status,) = guard.accounts.budgets()
    return status.spent, status.reserved


async def ask(guard: Guard) -> None:
    event = ModelCall("run", ROOT_LANE, "agent", guard.clock(), "m", 100, max_output_tokens=100)
    guard.check(event)
    assert not await guard.reserve(event, slot=False)
    guard.settle(event.charge, Usage(100, 100))


async def test_a_run_that_outlives_its_holds_pays_what_it_spent(store: dict[str, Any]) -> None:
    guard = office(store)
    await ask(guard)
    await asyncio.sleep(2 * HOLD_S)
    spent, reserved = shown(guard)
    assert spent == Decimal("0.02")
    assert reserved > 0  # for the last answer
    await ask(guard)
    guard.end("run")
    assert shown(guard) == (Decimal("0.04"), 0)


async def test_a_hold_is_renewed_in_time(store: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    guard = office(store)
    await ask(guard)
    closing = guard.runs["run"].set_aside
    assert isinstance(closing, Closing)
    first = closing.charge
    await ask(guard)
    assert closing.charge is first
    monkeypatch.setattr("runguard.engine.final_answer.STANDING_S", 10 * STANDING_S)  # all holds are old now
    await ask(guard)
    assert (closing.charge is first) is not guard.accounts.ledger.is_shared  # in memory none grows old
    guard.end("run")
    assert shown(guard) == (Decimal("0.06"), 0)


async def test_a_call_that_is_taken_back_late_costs_nothing(store: dict[str, Any]) -> None:
    guard = office(store, final_answer=False)
    event = ModelCall("run", ROOT_LANE, "agent", guard.clock(), "m", 100, max_output_tokens=100)
    assert not await guard.reserve(event, slot=False)
    await asyncio.sleep(2 * HOLD_S)
    guard.accounts.budgets()  # whoever looks finds the hold expired
    guard.release(event.charge)
    assert shown(guard) == (0, 0)
    await ask(guard)
    assert shown(guard) == (Decimal("0.02"), 0)
