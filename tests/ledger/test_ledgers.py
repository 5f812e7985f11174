"""All ledgers reserve, settle, release and extend alike."""

import asyncio
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    run_state_machine_as_test,
)

from runguard.core.money import NOTHING, UNLIMITED, Amount
from runguard.ledger import remote, write_queue
from runguard.ledger.ledger import Account, Hold, Ledger, Refusal, Stale, StoreSession
from runguard.ledger.sqlite import SqliteStore
from tests.kit.ledgers import CALL, FREE, AgainstPaper, Desk, usd
from tests.kit.waiting import PATIENCE_S, loops_at_once, until_async

SHORT_S = 0.2  # a hold's time where it is to be over; a store needs less to hold it


# ---- reserve --------------------------------------------------------------------------------------------------------


async def test_a_hold_stands_beside_the_spend_and_never_on_it(desk: Desk) -> None:
    account = desk.account(caps=(100, 200, 3))
    await desk.spend([account], (30, 40, 1))
    hold = await desk.held([account], (10, 20, 1))
    assert (hold.amount, hold.booked, hold.is_open) == ((10, 20, 1), NOTHING, True)
    assert desk.books() == ((30, 40, 1), (10, 20, 1))
    assert (account.spent, account.held, account.room) == ((30, 40, 1), (10, 20, 1), (60, 140, 1)), (
        "whoever asked knows it too"
    )


@pytest.mark.parametrize("unit", range(3))
async def test_the_cap_itself_fits_and_one_more_does_not(desk: Desk, unit: int) -> None:
    caps, third, one = [UNLIMITED] * 3, [0, 0, 0], [0, 0, 0]
    caps[unit], third[unit], one[unit] = 300_000_000, 100_000_000, 1
    account = desk.account(caps=(caps[0], caps[1], caps[2]))
    for _ in range(3):
        await desk.held([account], (third[0], third[1], third[2]))
    refusal = await desk.refused([account], (one[0], one[1], one[2]))
    assert (refusal.account, refusal.unit) == (account, unit)
    assert refusal.held[unit] == 300_000_000
    others = tuple(0 if u == unit else 5 for u in range(3))
    await desk.held([account], (others[0], others[1], others[2]))  # what this cap does not count still fits


async def test_spend_and_holds_count_together_against_the_cap(desk: Desk) -> None:
    account = desk.account(caps=(UNLIMITED, UNLIMITED, 3))
    await desk.spend([account], CALL)
    await desk.held([account], CALL)
    await desk.refused([account], (0, 0, 2))
    await desk.held([account], CALL)
    await desk.refused([account], CALL)


@pytest.mark.parametrize("tight", range(3))
async def test_when_one_of_several_accounts_refuses_none_holds(desk: Desk, tight: int) -> None:
    for shift in range(3):  # wherever in line the tight one stands
        keys = [f"{shift}.{n}" for n in range(3)]
        accounts = [desk.account(key, usd(10 if n == tight else 1_000)) for n, key in enumerate(keys)]
        refusal = await desk.refused(accounts[shift:] + accounts[:shift], (11, 5, 1))
        assert refusal.account is accounts[tight]
        assert [desk.books(key) for key in keys] == [(NOTHING, NOTHING)] * 3
        await desk.held(accounts, (10, 5, 1))
        assert [desk.books(key)[1] for key in keys] == [(10, 5, 1)] * 3


async def test_several_accounts_hold_settle_and_release_together(desk: Desk) -> None:
    accounts = [desk.account(f"{n}", (100, 100, 9), user=f"u{n}") for n in range(4)]
    paid, given_back = await desk.held(accounts, (7, 8, 1)), await desk.held(accounts[1:], (1, 1, 1))
    desk.settle(paid, (5, 6, 1))
    assert [desk.books(f"{n}", f"u{n}") for n in range(4)] == [((5, 6, 1), NOTHING)] + [((5, 6, 1), (1, 1, 1))] * 3
    desk.release(given_back)
    assert [desk.books(f"{n}", f"u{n}") for n in range(4)] == [((5, 6, 1), NOTHING)] * 4


async def test_without_an_account_everything_fits(desk: Desk) -> None:
    before = len(desk.ledger.accounts())
    desk.settle(await desk.held([], (5, 5, 5)), (9, 9, 9))
    desk.release(await desk.held([], (5, 5, 5)))
    assert len(desk.ledger.accounts()) == before


async def test_what_is_not_limited_never_refuses(desk: Desk) -> None:
    account = desk.account(caps=FREE)
    for _ in range(3):
        await desk.spend([account], (10**14, 10**14, 10**14))
    assert (desk.find().spent, desk.find().caps, desk.find().closed) == ((3 * 10**14,) * 3, FREE, False)


async def test_the_tightest_is_named_and_the_room_is_what_all_have_together(desk: Desk) -> None:
    a, b, c = (
        desk.account(name, caps) for name, caps in [("a", (30, 500, 9)), ("b", (20, 900, 9)), ("c", (90, 50, 9))]
    )
    refusal = await desk.refused([a, b, c], (40, 60, 1))
    assert refusal.account is b  # 20 dollars left; c refuses too, but in tokens
    assert (refusal.unit, refusal.wanted, refusal.room) == (0, (40, 60, 1), (20, 50, 9))
    assert str(refusal) == f"{desk.scope} has no room for 40 usd"
    assert (await desk.refused([a, b, c], (10, 60, 1))).account is c


async def test_a_refusal_tells_how_things_stood(desk: Desk) -> None:
    account = desk.account(caps=(100, UNLIMITED, UNLIMITED))
    await desk.spend([account], (30, 1, 1))
    hold = await desk.held([account], (50, 2, 1))
    refusal = await desk.refused([account], (21, 0, 1))
    desk.release(hold)
    assert (refusal.spent, refusal.held, refusal.room) == ((30, 1, 1), (50, 2, 1), (20, UNLIMITED - 3, UNLIMITED - 2))


@pytest.mark.parametrize(
    ("spend", "hold_open", "helps"),
    [
        (0, 90, True),  # whoever holds it may take less
        (100, 0, False),  # spent is spent
        (50, 0, False),  # nobody else is on the way: nothing will change
        (50, 50, True),
    ],
)
async def test_waiting_helps_only_where_somebody_else_holds_what_is_missing(
    desk: Desk, spend: int, hold_open: int, helps: bool
) -> None:
    account = desk.account()
    await desk.spend([account], (spend, 0, 1))
    if hold_open:
        await desk.held([account], (hold_open, 0, 1))
    assert (await desk.refused([account], (60, 0, 1))).wait_helps is helps


async def test_waiting_does_not_help_when_one_of_two_accounts_is_spent(desk: Desk) -> None:
    busy, spent = desk.account("busy"), desk.account("spent")
    await desk.held([busy], (90, 0, 1))
    await desk.spend([spent], (100, 0, 1))
    assert not (await desk.refused([busy, spent], (50, 0, 1))).wait_helps
    assert (await desk.refused([busy], (50, 0, 1))).wait_helps


async def test_the_caps_are_those_that_were_told_last(desk: Desk) -> None:
    await desk.held([desk.account(caps=usd(50))], (50, 0, 1))
    await desk.refused([desk.account(caps=usd(50))], (1, 0, 1))
    await desk.held([desk.account(caps=usd(60))], (10, 0, 1))
    lowered = await desk.refused([desk.account(caps=usd(20))], (1, 0, 1))
    assert (lowered.held[0], lowered.room[0], lowered.wait_helps) == (60, 0, True)
    assert (desk.find().cap_usd, desk.find().closed) == (20, False)  # nobody billed beyond a hold
    await desk.held([desk.account(caps=usd(61))], (1, 0, 1))


@pytest.mark.parametrize("why", ["forced", "the cap fell"])
async def test_an_account_above_its_cap_refuses_also_what_costs_nothing_there(desk: Desk, why: str) -> None:
    """A model without a price, while more dollars are held than the cap allows: a refusal like any other."""
    hold = await desk.held([desk.account(caps=usd(500))], (200, 0, 1), force=why == "forced")
    refusal = await desk.refused([desk.account("other", FREE), desk.account()], (0, 10, 1))
    assert (refusal.account.key, refusal.unit, refusal.room[0], refusal.wait_helps) == (desk.account().key, 0, 0, True)
    desk.settle(hold, (100, 0, 1))
    await desk.held([desk.account()], (0, 10, 1))


# ---- settle ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("took", [(0, 0, 0), (30, 4, 1), (50, 9, 1), (80, 20, 2)])
async def test_a_settle_takes_the_hold_away_and_books_what_it_took(desk: Desk, took: Amount) -> None:
    """Below, equal and above the hold; none of it beyond the cap."""
    account = desk.account()
    hold = await desk.held([account], (50, 9, 1))
    desk.settle(hold, took)
    assert desk.books() == (took, NOTHING)
    assert (hold.booked, hold.is_open) == (took, False)
    assert (desk.find().closed, desk.find().overrun) == (False, NOTHING)
    assert (account.spent, account.held, account.room[0]) == (took, NOTHING, 100 - took[0])
    await desk.held([account], (100 - took[0], 0, 1))  # the rest is there again


@pytest.mark.parametrize("figures", [(10, 40, 20, 20), (40, 10), (0, 40, 0)])
async def test_the_later_figure_replaces_the_earlier(desk: Desk, figures: Sequence[int]) -> None:
    account = desk.account()
    hold = await desk.held([account], (50, 0, 1))
    other = await desk.held([account], (5, 0, 1))
    for took in figures:
        desk.settle(hold, (took, took, 1))
        assert desk.books() == ((took, took, 1), (5, 0, 1))
    desk.release(other)
    assert desk.books() == ((figures[-1], figures[-1], 1), NOTHING)


async def test_a_call_that_was_released_and_left_after_all_is_billed(desk: Desk) -> None:
    hold = await desk.held([desk.account()], (50, 0, 1))
    desk.release(hold)
    for took in (20, 30):
        desk.settle(hold, (took, 5, 1))
        assert desk.books() == ((took, 5, 1), NOTHING)
    desk.release(hold)
    assert desk.books() == ((30, 5, 1), NOTHING)


async def test_an_excess_that_breaks_the_cap_is_booked_and_closes_the_account_until_it_is_extended(desk: Desk) -> None:
    account, other = desk.account(), desk.account("other", usd(1_000))
    desk.settle(await desk.held([account, other], (90, 0, 1)), (120, 0, 1))
    found = desk.find()
    assert (found.spent, found.closed, found.overrun, found.room) == ((120, 0, 1), True, (20, 0, 0), NOTHING)
    assert (desk.find("other").spent, desk.find("other").closed, desk.find("other").overrun) == (
        (120, 0, 1),
        False,
        NOTHING,
    )
    refusal = await desk.refused([other, account], NOTHING)  # not even nothing
    assert (refusal.account, refusal.unit, refusal.wait_helps, refusal.room) == (account, 0, False, NOTHING)
    desk.ledger.extend(account, (10, 0, 0))
    assert desk.find().closed  # 120 of 110
    await desk.refused([desk.account()], NOTHING)
    desk.ledger.extend(desk.account(), (15, 0, 0))
    assert (desk.find().closed, desk.find().cap_usd) == (False, 125)
    await desk.held([desk.account()], (5, 0, 1))
    await desk.refused([desk.account()], (1, 0, 0))


async def test_a_wider_cap_alone_does_not_open_a_closed_account(desk: Desk) -> None:
    desk.settle(await desk.held([desk.account()], (90, 0, 1)), (120, 0, 1))
    assert (await desk.refused([desk.account(caps=usd(500))], (1, 0, 0))).unit == 0
    assert (await desk.refused([desk.account(caps=FREE)], (0, 0, 1))).unit == 0, (
        "what closed it, although nothing is limited now"
    )
    desk.ledger.extend(desk.account(caps=usd(500)), (1, 0, 0))
    await desk.held([desk.account(caps=usd(500))], (381, 0, 0))


async def test_a_settle_is_never_refused_however_full_or_closed_the_account_is(desk: Desk) -> None:
    account = desk.account(caps=(100, 10, 2))
    holds = [await desk.held([account], (50, 5, 1)) for _ in range(2)]
    for hold in holds:
        desk.settle(hold, (200, 50, 1))
    found = desk.find()
    assert (found.spent, found.held, found.closed, found.overrun) == ((400, 100, 2), NOTHING, True, (300, 90, 0))


async def test_overruns_of_several_calls_add_up_and_other_calls_holds_are_not_ours_to_spend(desk: Desk) -> None:
    account = desk.account()
    one, two = [await desk.held([account], (50, 0, 1)) for _ in range(2)]
    desk.settle(one, (60, 0, 1))
    assert desk.find().overrun == (10, 0, 0)
    desk.settle(two, (55, 0, 1))
    assert (desk.find().overrun, desk.books()) == ((15, 0, 0), ((115, 0, 2), NOTHING))


@pytest.mark.parametrize("why", ["forced", "the cap fell"])
async def test_a_call_that_bills_what_it_held_is_no_overrun_whatever_the_cap_says(desk: Desk, why: str) -> None:
    hold = await desk.held([desk.account()], (150, 0, 1) if why == "forced" else (80, 0, 1), force=why == "forced")
    await desk.refused([desk.account(caps=usd(50))], (1, 0, 0))
    desk.settle(hold, hold.amount)
    assert (desk.find().closed, desk.find().overrun) == (False, NOTHING)
    await desk.held([desk.account(caps=usd(500))], (100, 0, 1))  # the cap is raised again: nothing stands in the way


async def test_who_is_told_that_a_settlement_is_booked_finds_it_booked(desk: Desk) -> None:
    account, seen = desk.account(), []
    hold = await desk.held([account], (50, 0, 1))
    for took in (10, 20):
        desk.ledger.settle(hold, (took, 0, 1), lambda: seen.append((account.spent_usd, account.held)))
        desk.flush()
    assert seen == [(10, NOTHING), (20, NOTHING)]


# ---- release --------------------------------------------------------------------------------------------------------


async def test_a_release_gives_everything_back_once(desk: Desk) -> None:
    account = desk.account(caps=(100, 100, 2))
    mine, other = await desk.held([account], (60, 60, 1)), await desk.held([account], (40, 40, 1))
    await desk.refused([account], (1, 0, 0))
    for _ in range(3):
        desk.release(mine)
        assert not mine.is_open
        assert desk.books() == (NOTHING, (40, 40, 1))
    await desk.held([account], (60, 60, 1))
    await desk.refused([account], (1, 0, 0))
    desk.release(other)
    assert desk.books() == (NOTHING, (60, 60, 1))


async def test_of_a_settled_call_a_release_takes_nothing_back(desk: Desk) -> None:
    hold = await desk.held([desk.account()], (60, 0, 1))
    desk.settle(hold, (50, 0, 1))
    desk.release(hold)
    assert desk.books() == ((50, 0, 1), NOTHING)


# ---- holds that outlive their time ----------------------------------------------------------------------------------


async def overdue(desk: Desk, accounts: Sequence[Account], want: Amount) -> Hold:
    """A hold whose call takes longer than anybody waits for."""
    hold = await desk.ledger.reserve(accounts, want, ttl=SHORT_S)
    assert isinstance(hold, Hold)
    await asyncio.sleep(2 * SHORT_S)
    return hold


async def test_an_expired_hold_is_charged_on_all_its_accounts(desk: Desk) -> None:
    accounts = [desk.account(), desk.account("other")]
    await overdue(desk, accounts, (30, 5, 1))
    assert desk.books() == desk.books("other") == ((30, 5, 1), NOTHING)


async def test_an_expired_hold_makes_no_room_although_nobody_looked(desk: Desk) -> None:
    await overdue(desk, [desk.account()], (80, 0, 0))
    refusal = await desk.refused([desk.account()], (30, 0, 0))
    assert (refusal.spent, refusal.held, refusal.wait_helps) == ((80, 0, 0), NOTHING, False)
    assert isinstance(await desk.held([desk.account()], (20, 0, 0)), Hold)


@pytest.mark.parametrize("took", [NOTHING, (10, 1, 1), (30, 5, 1), (50, 9, 1)])
@pytest.mark.parametrize("looked", [True, False])
async def test_a_late_settlement_corrects_the_charge_of_an_expired_hold(desk: Desk, took: Amount, looked: bool) -> None:
    hold = await overdue(desk, [desk.account()], (30, 5, 1))
    if looked:
        assert desk.books() == ((30, 5, 1), NOTHING)
    desk.settle(hold, took)
    assert desk.books() == (took, NOTHING)
    assert not desk.find().closed


async def test_a_late_settlement_beyond_the_cap_is_an_overrun(desk: Desk) -> None:
    hold = await overdue(desk, [desk.account()], (90, 0, 0))
    assert desk.books() == ((90, 0, 0), NOTHING)
    desk.settle(hold, (120, 0, 0))
    assert (desk.find().spent, desk.find().overrun, desk.find().closed) == ((120, 0, 0), (20, 0, 0), True)


async def test_a_release_takes_back_what_was_charged_for_an_expired_hold(desk: Desk) -> None:
    hold = await overdue(desk, [desk.account()], (30, 5, 1))
    assert desk.books() == ((30, 5, 1), NOTHING)
    desk.release(hold)
    assert desk.books() == (NOTHING, NOTHING)
    desk.release(hold)
    assert desk.books() == (NOTHING, NOTHING)


async def test_what_was_settled_or_released_in_time_does_not_expire(desk: Desk) -> None:
    holds = [await desk.ledger.reserve([desk.account()], (30, 5, 1), ttl=SHORT_S) for _ in range(2)]
    assert isinstance(holds[0], Hold)
    assert isinstance(holds[1], Hold)
    desk.settle(holds[0], (10, 5, 1))
    desk.release(holds[1])
    await asyncio.sleep(2 * SHORT_S)
    assert desk.books() == ((10, 5, 1), NOTHING)


# ---- forced and booked ----------------------------------------------------------------------------------------------


async def test_a_closed_account_can_be_forced(desk: Desk) -> None:
    desk.settle(await desk.held([desk.account()], (90, 0, 1)), (120, 0, 1))
    desk.settle(await desk.held([desk.account()], (10, 0, 1), force=True), (10, 0, 1))
    assert (desk.books(), desk.find().closed, desk.find().overrun) == (((130, 0, 2), NOTHING), True, (20, 0, 0))


async def test_a_call_that_nobody_could_be_asked_about_is_booked_all_the_same(desk: Desk) -> None:
    account = desk.account()
    hold = desk.ledger.book([account])
    assert (hold.amount, hold.is_open) == (NOTHING, True)
    for took in (30, 40):
        desk.settle(hold, (took, 3, 1))
        assert desk.books() == ((took, 3, 1), NOTHING)
    assert not desk.find().closed
    desk.settle(desk.ledger.book([account]), (70, 0, 1))  # beyond the cap, and nobody had held it
    assert (desk.books(), desk.find().closed, desk.find().overrun) == (((110, 3, 2), NOTHING), True, (10, 0, 0))


async def test_a_booked_call_that_never_left_leaves_no_trace(desk: Desk) -> None:
    account = desk.account()
    await desk.spend([account], (10, 0, 1))
    hold = desk.ledger.book([account])
    desk.release(hold)
    assert desk.books() == ((10, 0, 1), NOTHING)
    desk.settle(hold, (20, 0, 1))  # it left after all
    assert desk.books() == ((30, 0, 2), NOTHING)


# ---- extend ---------------------------------------------------------------------------------------------------------


async def test_an_extension_of_one_account_leaves_the_others(desk: Desk) -> None:
    one, two = desk.account("one"), desk.account("two")
    await desk.held([one, two], (100, 0, 1))
    desk.ledger.extend(one, (10, 0, 0))
    assert (desk.find("one").cap_usd, desk.find("two").cap_usd) == (110, 100)
    assert (await desk.refused([desk.account("one"), desk.account("two")], (5, 0, 0))).account.key == two.key


@pytest.mark.parametrize("why", ["forced", "the cap fell"])
async def test_an_extension_does_not_close_what_was_open(desk: Desk, why: str) -> None:
    """More is held than the cap allows, and nobody billed beyond a hold: when it settles for less, there is room."""
    hold = await desk.held([desk.account(caps=usd(500))], (200, 0, 1), force=why == "forced")
    await desk.refused([desk.account()], (1, 0, 0))
    desk.ledger.extend(desk.account(), (10, 0, 0))
    assert not desk.find().closed
    desk.settle(hold, (60, 0, 1))
    await desk.held([desk.account()], (50, 0, 1))
    await desk.refused([desk.account()], (1, 0, 0))


# ---- thresholds -----------------------------------------------------------------------------------------------------


async def test_a_mark_is_first_once_per_account_and_mark(desk: Desk) -> None:
    one, two = desk.account("one"), desk.account("two")
    asked = [(one, "50"), (one, "80"), (two, "50"), (one, "50"), (two, "50"), (two, "80"), (one, "80")]
    assert [desk.first(account, mark) for account, mark in asked] == [True, True, True, False, False, True, False]


async def test_an_extension_arms_again_what_is_above_the_new_level(desk: Desk) -> None:
    account, other = desk.account(), desk.account("other")
    await desk.spend([account, other], (90, 0, 1))
    marks = {"30": 0.3, "45": 0.45, "46": 0.46, "80": 0.8}
    assert [desk.first(a, mark, share) for a in (account, other) for mark, share in marks.items()] == [True] * 8
    desk.ledger.extend(account, (100, 0, 0))  # 90 of 200 is 45 %
    assert [desk.first(account, mark, share) for mark, share in marks.items()] == [False, False, True, True]
    assert [desk.first(other, mark, share) for mark, share in marks.items()] == [False] * 4


def test_of_many_who_reach_a_mark_at_once_one_is_first(desk: Desk) -> None:
    account, firsts = desk.account(caps=FREE), list[tuple[str, bool | None]]()

    def ask(mark: str) -> None:
        firsts.append((mark, desk.ledger.first(account, mark, 0.5, (10, 10, 10))))

    async def work() -> None:
        for mark in range(10):
            hold = await desk.held([account], CALL)
            desk.ledger.settle(hold, CALL, partial(ask, f"{mark}"))

    loops_at_once([work] * 6)
    desk.flush()
    assert len(firsts) == 60
    assert sorted(mark for mark, is_first in firsts if is_first) == [f"{mark}" for mark in range(10)]


# ---- The accounts and facts of a ledger, and any sequence of operations compared with a model


# ---- which accounts there are ---------------------------------------------------------------------------------------


async def test_a_scope_lists_its_accounts_the_current_period_last(desk: Desk) -> None:
    now = desk.now()
    later, sooner = desk.account("b@1h", ends=now + 2_000), desk.account("a@1d", ends=now + 1_000)
    forever, other = desk.account("k"), desk.account("x", user="bob")
    for account in (later, forever, other, sooner):
        await desk.held([account], CALL)
    assert [account.key for account in desk.ledger.find(desk.scope)] == [forever.key, sooner.key, later.key]
    assert [account.key for account in desk.ledger.find(desk.scope_of("bob"))] == [other.key]
    assert desk.ledger.find(desk.scope_of("nobody")) == []
    mine = {later.key, sooner.key, forever.key, other.key}
    for listed in (desk.ledger.accounts(), desk.ledger.known()):
        assert sorted(account.key for account in listed if account.key.startswith(f"{desk.name}/")) == sorted(mine)


async def test_an_account_is_told_as_it_was_named(desk: Desk) -> None:
    now = desk.now()
    await desk.held([desk.account("p", (1, 2, 3), begins=now - 100, ends=now + 1_000)], NOTHING)
    found = desk.find("p")
    assert (found.scope, found.window, found.caps, found.granted, found.closed) == (
        desk.scope,
        "1h",
        (1, 2, 3),
        NOTHING,
        False,
    )
    assert found.ends == pytest.approx(now + 1_000, abs=1e-3)


async def test_two_periods_of_a_scope_are_counted_apart_and_a_call_settles_where_it_was_held(desk: Desk) -> None:
    now = desk.now()
    one = desk.account("k@1h/1", begins=now - 100, ends=now + 1_000)
    hold = await desk.held([one], (100, 0, 1))
    two = desk.account("k@1h/2", begins=now - 50, ends=now + 2_000)
    await desk.held([two], (100, 0, 1))
    desk.settle(hold, (70, 0, 1))
    assert desk.books("k@1h/1") == ((70, 0, 1), NOTHING)
    assert desk.books("k@1h/2") == (NOTHING, (100, 0, 1))


async def test_whoever_asks_again_with_the_period_of_the_ledgers_clock_gets_in_and_is_counted_once(desk: Desk) -> None:
    """A period that is over by the ledger's clock holds nothing.

    One that keeps no clock of its own goes by the caller's.
    """
    callers = desk.now() + 7_200  # a caller whose clock is wrong
    result: Hold | Refusal | Stale
    for attempt in range(3):
        at = callers if attempt == 0 else desk.ledger.now(callers)
        account = desk.account(f"k@1h/{int(at // 3600)}", begins=at - 1_000, ends=at + 1_000)
        result = await desk.reserve([account], CALL)
        if not isinstance(result, Stale):
            break
        assert desk.ledger.is_shared
        assert all(found.held == NOTHING for found in desk.ledger.find(desk.scope))
    assert isinstance(result, Hold)
    assert attempt == (1 if desk.ledger.is_shared else 0)
    assert [(found.key, found.held) for found in desk.ledger.find(desk.scope) if found.held != NOTHING] == [
        (account.key, CALL)
    ]


@pytest.mark.parametrize("force", [False, True])
async def test_a_period_that_is_over_for_one_account_is_over_for_the_whole_call(desk: Desk, force: bool) -> None:
    now = desk.now()
    past, good = desk.account("k@1h/1", begins=now - 2_000, ends=now - 1_000), desk.account("good")
    result = await desk.reserve([good, past], CALL, force=force)
    # in memory the caller's word on time is all there is
    assert isinstance(result, Stale if desk.ledger.is_shared else Hold)
    if isinstance(result, Hold):
        desk.release(result)
    assert all(found.held == NOTHING for found in desk.ledger.find(desk.scope))
    await desk.held([good], CALL)


async def test_a_forgotten_scope_is_not_known_any_more_and_its_calls_can_still_end(desk: Desk) -> None:
    """What a run's own accounts took matters to nobody after its end; what it took from others' does."""
    own, shared = desk.account("own", user="run"), desk.account("shared")
    paid, given_back = await desk.held([own, shared], (10, 0, 1)), await desk.held([own, shared], (20, 0, 1))
    for _ in range(2):
        desk.ledger.forget(desk.scope_of("run"))
    assert [account.key for account in desk.ledger.known() if account.key.startswith(f"{desk.name}/")] == [shared.key]
    desk.ledger.forget(desk.scope_of("nobody"))
    desk.settle(paid, (5, 0, 1))
    desk.release(given_back)
    assert desk.books("shared") == ((5, 0, 1), NOTHING)
    await desk.held([desk.account("own", user="run")], (80, 0, 1))  # the id is used again


# ---- facts ----------------------------------------------------------------------------------------------------------


async def test_after_a_flush_everything_handed_over_is_booked(desk: Desk) -> None:
    account, booked = desk.account(caps=FREE), list[int]()
    holds = await asyncio.gather(*(desk.held([account], (2, 2, 1)) for _ in range(40)))
    for number, hold in enumerate(holds):
        if number % 4:
            desk.ledger.settle(hold, (1, 1, 1), partial(booked.append, number))
        else:
            desk.ledger.release(hold)
    assert desk.ledger.flush(PATIENCE_S)
    assert booked == [number for number in range(40) if number % 4], "in the order in which they were handed over"
    assert desk.books() == ((30, 30, 30), NOTHING)
    assert desk.ledger.flush(0), "nothing is left to wait for"


def test_a_ledger_says_what_it_is(ledger: Ledger) -> None:
    assert ledger.name
    assert ledger.is_shared is (ledger.name != "memory")
    assert bool(ledger.worker) is ledger.is_shared
    ledger.check()  # it can be worked with


# ---- any sequence, against a model ----------------------------------------------------------------------------------


def test_whatever_happens_in_whatever_order_the_books_say_what_is_on_paper(desk: Desk) -> None:
    with asyncio.Runner() as runner:
        run_state_machine_as_test(
            lambda: AgainstPaper(desk, runner.get_loop()),  # type: ignore[arg-type]
            settings=settings(
                max_examples=25,
                stateful_step_count=30,
                # a failure is told as it was found: making it smaller takes minutes on a real store
                phases=[Phase.generate],
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


# ---- A reservation that reaches the store after its caller was cancelled: nothing is held, and nothing looks damaged


class LateStore:
    """A SQLite store that reserves only when ``let_go`` is set."""

    def __init__(self, path: Path) -> None:
        self._store = SqliteStore(f"sqlite:///{path}/guard.db")
        self.name, self.durable, self.reserving = self._store.name, self._store.durable, 0
        self.let_go, self.done = threading.Event(), threading.Event()

    def connect(self, timeout: float) -> StoreSession:
        session: Any = self._store.connect(timeout)
        reserve = session.reserve

        def late(*args: Any, **kwargs: Any) -> Any:
            self.reserving += 1
            assert self.let_go.wait(30)
            try:
                return reserve(*args, **kwargs)
            finally:
                self.done.set()

        session.reserve = late
        made: StoreSession = session
        return made


@pytest.mark.parametrize("known", [False, True], ids=["new accounts", "known account"])
async def test_it_holds_nothing_and_is_no_fault_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    store, faults = LateStore(tmp_path), list[BaseException]()

    def noted(name: str, error: BaseException) -> BaseException:
        faults.append(error)
        return error

    monkeypatch.setattr(write_queue, "fault_of", noted)
    ledger = remote.StoreLedger(store, 5.0)
    desk = Desk(ledger)
    accounts = [desk.account("a"), desk.account("b", user="bob")]
    if known:
        store.let_go.set()
        ledger.release(await desk.held(accounts[:1], (1, 0, 1)))
        store.let_go.clear()
        store.done.clear()
    before = store.reserving
    caller = asyncio.create_task(desk.reserve(accounts, (1, UNLIMITED // 10**6, 1)))
    await until_async(lambda: store.reserving > before)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ledger.flush(10)  # the release is in the store
    store.let_go.set()
    await until_async(store.done.is_set)
    assert await desk.held(accounts, (100, 0, 1)), "the whole cap is free"
    assert faults == []
    ledger.close()
