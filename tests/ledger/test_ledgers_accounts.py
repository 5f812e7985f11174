"""The accounts and facts of a ledger, and any sequence of operations compared with a model."""

import asyncio
from functools import partial

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    run_state_machine_as_test,
)

from runguard.core.money import NOTHING
from runguard.ledger.ledger import Hold, Ledger, Refusal, Stale
from tests.kit.ledgers import CALL, FREE, AgainstPaper, Desk
from tests.kit.waiting import PATIENCE_S

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
