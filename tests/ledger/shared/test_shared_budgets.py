"""One budget over several processes, expired holds and clocks."""

import asyncio
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import ParallelAgent

from runguard import Threshold
from runguard.ledger import remote
from runguard.testing import ScriptedModel, assert_stopped, run, text
from tests.kit.processes import Process
from tests.kit.shared_stores import ALICE, CALL, Make, _in_flight, balance, play
from tests.kit.shared_worker import agent, steps
from tests.kit.stores import Place
from tests.kit.waiting import eventually

# ---- V12: one cap over processes ------------------------------------------------------------------------------------


def test_v12_a_users_cap_holds_over_processes_to_the_cent_and_thresholds_fire_once(
    place: Place, process: Callable[[], Process], tmp_path: Path
) -> None:
    fired = tmp_path / "fired"
    one, two = process(), process()
    for each in (one, two):
        each.do("open", url=place.url, usd="0.10", percents=[0.5, 1.0], fired=str(fired))
    for session in ("s1", "s2"):
        one.do("run", session=session, latency=0.02, wait=False)
    two.do("run", session="s3", latency=0.02, wait=False)
    bob = two.do("run", user="bob", session="b")
    made = [one.do("join", session="s1"), one.do("join", session="s2"), two.do("join", session="s3")]
    assert sum(result["calls"] for result in made) == 5
    assert {result["last"] for result in made} == {"RUNGUARD_STOP"}
    assert (bob["calls"], bob["trips"], bob["texts"]) == (5, [], ["done"])
    fourth = one.do("run", session="s4")
    assert (fourth["calls"], fourth["trips"]) == (0, [["budget", "user", ALICE]])
    assert [one.do("flush", seconds=10), two.do("flush", seconds=10)] == [True, True]
    assert balance(place) == (Decimal("0.10"), Decimal(0), 5)
    assert balance(place, "user:app/bob") == (Decimal("0.10"), Decimal(0), 5)
    told = sorted(fired.read_text().splitlines())
    assert [line.rpartition(" ")[0] for line in told] == [
        f"{ALICE} 0.5",
        f"{ALICE} 1.0",
        "user:app/bob 0.5",
        "user:app/bob 1.0",
    ]


def test_v12_a_worker_killed_in_a_call_leaves_exact_accounts_to_the_next_one(
    place: Place, process: Callable[[], Process], tmp_path: Path
) -> None:
    """Two calls settled and one on its way when the process dies: its successor gets two more, and the lost one is
    charged.
    """
    fired = tmp_path / "fired"
    policy = {
        "url": place.url,
        "usd": "0.10",
        "percents": [0.2, 0.8],
        "fired": str(fired),
        "hold_seconds": 1.5,
        "max_wait_seconds": 0,
    }
    first = process()
    first.do("open", **policy)
    first.do("run", latency=0.3, wait=False)
    assert eventually(lambda: first.do("made", session="s") == 3)
    assert eventually(lambda: balance(place) == (Decimal("0.04"), CALL, 2))
    first.kill()
    second = process()
    second.do("open", **policy)
    result = second.do("run", session="after the restart")
    assert (result["calls"], result["trips"]) == (2, [["budget", "user", ALICE]])
    assert eventually(lambda: balance(place) == (Decimal("0.10"), Decimal(0), 5)), (
        "the provider may have billed the lost call: it counts"
    )
    third = process()
    third.do("open", **policy)
    assert third.do("run", session="full")["calls"] == 0
    assert [line.split()[1] for line in fired.read_text().splitlines()] == ["0.2", "0.8"], (
        "once, whoever fires and however often workers start"
    )
    third.do("extend", scope=ALICE, usd="0.04")
    assert second.do("run", session="extended")["calls"] == 2, "extended by one process, spent by another"
    assert second.do("flush", seconds=10)
    assert balance(place) == (Decimal("0.14"), Decimal(0), 7)
    assert [line.split()[1:] for line in fired.read_text().splitlines()][2:] == [["0.8", "0.12"]], (
        "the extension has armed one again"
    )


def test_v12_every_window_begins_with_the_whole_cap_in_every_process(
    place: Place, process: Callable[[], Process]
) -> None:
    """Two seconds stand for a day."""
    one, two, session = process(), process(), place.connect()
    for each in (one, two):
        each.do("open", url=place.url, usd="0.10", window="2s")
    for attempt in range(10):  # a slow machine may not do all of it within one window
        user = f"user{attempt}"
        assert eventually(lambda: session.now() % 2 < 0.2)
        period = session.now() // 2
        made = [
            one.do("run", user=user, calls=3)["calls"],
            two.do("run", user=user)["calls"],
            one.do("run", user=user)["calls"],
        ]
        if session.now() // 2 == period:
            break
    assert made == [3, 2, 0]
    assert eventually(lambda: session.now() // 2 > period)
    assert two.do("run", user=user)["calls"] == 5
    session.close()


def test_an_extension_rearms_its_thresholds_for_every_worker(place: Place, worker: Make) -> None:
    fired: list[tuple[str, Decimal]] = []
    one = worker(usd="0.10", thresholds=[Threshold(0.8, lambda status: fired.append(("one", status.spent)))])
    two = worker(usd="0.10", thresholds=[Threshold(0.8, lambda status: fired.append(("two", status.spent)))])
    asyncio.run(play(one, steps(5)))
    assert one.flush(10)
    assert fired == [("one", Decimal("0.08"))]
    two.extend(ALICE, usd="0.10")
    asyncio.run(play(two, steps(5), session="more"))
    assert two.flush(10)
    assert fired == [("one", Decimal("0.08")), ("two", Decimal("0.16"))]


def test_branches_that_hold_more_than_they_spend_get_all_the_cap_pays_and_meet_no_fault(
    place: Place, worker: Make
) -> None:
    """Replies overtake each other: a refusal may be looked at when the balances that refused are already history."""
    for number in range(2):
        plugin = worker(usd="0.50", tokens=lambda _: 3_000, max_fan_out=100)
        model = ScriptedModel([text("x")], latency_s=0.005)
        crowd = ParallelAgent(name="crowd", sub_agents=[agent(model, f"p{n}") for n in range(50)])
        asyncio.run(run(crowd, plugins=[plugin], user_id=f"user{number}"))
        assert plugin.flush(10)
        assert plugin.guard.guard_errors == 0
        assert [trip.rule for trip in plugin.trips] == ["budget"]
        assert model.calls == 24, "the 25th would hold $0.04, and $0.02 is left"
        assert balance(place, f"user:app/user{number}") == (Decimal("0.48"), Decimal(0), 24)


# ---- holds of those who do not come back ----------------------------------------------------------------------------


async def test_a_hold_that_outlives_its_time_is_charged_and_a_late_answer_corrects_it(
    place: Place, worker: Make
) -> None:
    plugin = worker(usd="1", tokens=lambda _: 2_000, hold_seconds=0.5)  # holds $0.03 for what costs $0.02
    model = ScriptedModel([text("late")], latency_s=1.2)
    running = asyncio.create_task(play(plugin, model))
    await _in_flight(model)
    assert balance(place) == (Decimal(0), Decimal("0.03"), 0)
    await asyncio.sleep(0.7)
    assert balance(place) == (Decimal("0.03"), Decimal(0), 1)
    assert (await running).texts == ["late"]
    assert plugin.flush(10)
    assert balance(place) == (CALL, Decimal(0), 1)


# ---- clocks ---------------------------------------------------------------------------------------------------------


class _Clock:
    """The time module of a machine whose clock is wrong."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def time(self) -> float:
        return time.time() + self._seconds  # noqa: TID251

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@pytest.mark.parametrize("minutes", [90, -90])
async def test_a_worker_whose_clock_is_wrong_counts_in_the_stores_periods(
    place: Place, worker: Make, monkeypatch: pytest.MonkeyPatch, minutes: int
) -> None:
    """In its spend, in what it shows and in what it extends.

    Ninety minutes lead into another of these windows at any time.
    """
    wrong_clock, window = _Clock(60.0 * minutes), "1h"
    session = place.connect()
    if session.now() % 3_600 > 3_585:  # not over the end of a window
        await asyncio.sleep(16)
    session.close()
    right = worker(usd="0.10", window=window)
    await play(right, steps(2), user="carol")
    assert right.flush(10)
    monkeypatch.setattr(remote, "time", wrong_clock)
    wrong = worker(usd="0.10", window=window, clock=wrong_clock.time)
    assert [(s.spent, s.limit) for s in wrong.budgets("user:app/carol")] == [(2 * CALL, Decimal("0.10"))], (
        "seen before its first call"
    )
    model = steps(5)
    assert_stopped(await play(wrong, model, user="carol", session="wrong"), "budget")
    assert model.calls == 3
    assert wrong.flush(10)
    assert [(s.spent, s.limit) for s in wrong.budgets("user:app/carol")] == [(Decimal("0.10"), Decimal("0.10"))]
    (extended,) = wrong.extend("user:app/carol", usd="0.04")
    assert (extended.spent, extended.limit) == (Decimal("0.10"), Decimal("0.14"))
    monkeypatch.undo()
    model = steps(5)
    await play(right, model, user="carol", session="right")
    assert model.calls == 2, "the extension is in the period that is now"
