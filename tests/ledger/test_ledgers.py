"""All ledgers reserve, settle, release and extend alike."""

import asyncio
import threading
from functools import partial
from pathlib import Path

import pytest

from runguard.core.money import NOTHING, UNLIMITED
from runguard.ledger import remote, write_queue
from runguard.ledger.ledger import Hold, Ledger, Refusal, Stale
from runguard.ledger.sqlite import SqliteStore
from tests.kit.ledgers import CALL, FREE, Desk, agree_with_paper, usd
from tests.kit.stores import Odd
from tests.kit.waiting import PATIENCE_S, loops_at_once, until_async

# ---- reserve --------------------------------------------------------------------------------------------------------


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


async def test_without_an_account_everything_fits(desk: Desk) -> None:
    before = len(desk.ledger.accounts())
    desk.settle(await desk.held([], (5, 5, 5)), (9, 9, 9))
    desk.release(await desk.held([], (5, 5, 5)))
    assert len(desk.ledger.accounts()) == before


async def test_the_tightest_is_named_and_the_room_is_what_all_have_together(desk: Desk) -> None:
    a, b, c = (
        desk.account(name, caps) for name, caps in [("a", (30, 500, 9)), ("b", (20, 900, 9)), ("c", (90, 50, 9))]
    )
    refusal = await desk.refused([a, b, c], (40, 60, 1))
    assert refusal.account is b  # 20 dollars left; c refuses too, but in tokens
    assert (refusal.unit, refusal.wanted, refusal.room) == (0, (40, 60, 1), (20, 50, 9))
    assert str(refusal) == f"{desk.scope} has no room for 40 usd"
    assert (await desk.refused([a, b, c], (10, 60, 1))).account is c


# ---- settle ---------------------------------------------------------------------------------------------------------


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


async def test_overruns_of_several_calls_add_up_and_other_calls_holds_are_not_ours_to_spend(desk: Desk) -> None:
    account = desk.account(caps=(100, 100, 10))
    one, two = [await desk.held([account], (50, 50, 5)) for _ in range(2)]
    desk.settle(one, (60, 70, 6))
    assert desk.find().overrun == (10, 20, 1)
    desk.settle(two, (55, 57, 7))
    assert (desk.find().overrun, desk.books()) == ((15, 27, 3), ((115, 127, 13), NOTHING))


async def test_a_release_takes_back_what_was_charged_for_an_expired_hold(desk: Desk) -> None:
    hold = await desk.ledger.reserve([desk.account()], (30, 5, 1), ttl=0.05)
    assert isinstance(hold, Hold)
    await asyncio.sleep(0.1)
    assert desk.books() == ((30, 5, 1), NOTHING)
    desk.release(hold)
    assert desk.books() == (NOTHING, NOTHING)
    desk.release(hold)
    assert desk.books() == (NOTHING, NOTHING)


async def test_who_is_told_that_a_settlement_is_booked_finds_it_booked(desk: Desk) -> None:
    account, seen = desk.account(), []
    hold = await desk.held([account], (50, 0, 1))
    for took in (10, 20):
        desk.ledger.settle(hold, (took, 0, 1), lambda: seen.append((account.spent_usd, account.held)))
        desk.flush()
    assert seen == [(10, NOTHING), (20, NOTHING)]


# ---- holds that outlive their time ----------------------------------------------------------------------------------


# ---- extend ---------------------------------------------------------------------------------------------------------


# ---- thresholds -----------------------------------------------------------------------------------------------------


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
    """Reservations that fit, are refused, forced or never settled; settlements and releases, early, late and repeated;
    extensions, new caps and thresholds.
    """
    agree_with_paper(desk.ledger, 100 if desk.ledger.name == "memory" else 25, 30)


# ---- A reservation that reaches the store after its caller was cancelled: nothing is held, and nothing looks damaged


@pytest.mark.parametrize("known", [False, True], ids=["new accounts", "known account"])
async def test_it_holds_nothing_and_is_no_fault_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    let_go, faults = threading.Event(), list[BaseException]()
    store = Odd(SqliteStore(f"sqlite:///{tmp_path}/guard.db"), reserve=lambda _: let_go.wait(30))

    def noted(name: str, error: BaseException) -> BaseException:
        faults.append(error)
        return error

    monkeypatch.setattr(write_queue, "fault_of", noted)
    ledger = remote.StoreLedger(store, 5.0)
    desk = Desk(ledger)
    accounts = [desk.account("a"), desk.account("b", user="bob")]
    if known:
        let_go.set()
        ledger.release(await desk.held(accounts[:1], (1, 0, 1)))
        let_go.clear()
    before = store.asked["reserve"]
    caller = asyncio.create_task(desk.reserve(accounts, (1, UNLIMITED // 10**6, 1)))
    await until_async(lambda: store.asked["reserve"] > before)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ledger.flush(10)  # the release is in the store
    let_go.set()
    await until_async(lambda: store.answered["reserve"] > before)
    assert await desk.held(accounts, (100, 0, 1)), "the whole cap is free"
    assert faults == []
    ledger.close()
