"""A run that is cancelled at the n-th step of the event loop, for n = 1, 2, 3 …: through the plugin, a guarded model
and guarded functions.

Nothing stays held, the next run works and sees what it would have seen, and what the books say lies between the calls
that were answered and the calls that were made: a call that was under way is booked as an estimate.
"""

import asyncio
from decimal import Decimal
from typing import Any

import pytest

from runguard import Budget
from runguard.errors import RunGuardError

from .playing import TURN_S, leaks
from .reference_runs import CALL_USD, HELD_USD, REFERENCES, Play, Reference

CANCELLED = (
    "tool loop",
    "parallel",
    "agent tool",
    "streaming",
    "workflow",
    "a store",
    "guarded model",
    "guard_async",
    "guard_async in pieces",
    "guard_async, entered",
)
MOST_STEPS = 2_000  # far more than any of these runs has
SAMPLE = 12
AT_ONCE = 3  # calls that can be under way when a run is cancelled


async def cancelled_at(play: Play, number: int) -> bool:
    """Cancel a turn after so many steps of the loop. Whether the turn was still running."""
    turn = asyncio.ensure_future(play.turn(lambda: None))
    for _ in range(number):
        await asyncio.sleep(0)
        if turn.done():
            break
    running = turn.cancel()
    await asyncio.wait((turn,), timeout=TURN_S)
    assert turn.done(), f"hung when it was cancelled at step {number}"
    if not turn.cancelled():
        error = turn.exception()
        assert error is None, f"{error!r} when it was cancelled at step {number}"
    return running and turn.cancelled()


async def steps_of(reference: Reference, settings: dict[str, Any]) -> int:
    """How many steps of the loop a whole turn takes; a thread that works for it makes that a matter of luck."""
    play = reference.make(settings)
    turn, steps = asyncio.ensure_future(play.turn(lambda: None)), 0
    while not turn.done() and steps < MOST_STEPS:
        await asyncio.sleep(0)
        steps += 1
    await turn
    return steps


def booked(play: Play) -> tuple[Decimal, int]:
    spend = play.guards[0].accounts.spend()
    return Decimal(str(spend["usd"])), spend["calls"]


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize(
    "reference", [one for one in REFERENCES if one.name in CANCELLED], ids=lambda reference: reference.name
)
async def test_wherever_a_run_is_cancelled_nothing_stays_held_and_the_next_one_works(
    reference: Reference, is_long: bool
) -> None:
    settings = {"budgets": [Budget(usd=10, per="app")]}
    steps = await steps_of(reference, settings)
    numbers = (
        range(1, steps + 1, 1 + steps // 200) if is_long else sorted({1 + n * steps // SAMPLE for n in range(SAMPLE)})
    )
    stopped = 0
    for number in numbers:
        play = reference.make(settings)
        stopped += await cancelled_at(play, number)
        for _ in range(3):  # what ADK still does for a run that was cancelled
            await asyncio.sleep(0)
        assert leaks(play) == [], f"cancelled at step {number} of {steps}"
        made = play.calls()
        usd, counted = booked(play)
        assert counted == made, f"cancelled at step {number} of {steps}"
        assert Decimal(str(CALL_USD)) * (made - AT_ONCE) <= usd <= Decimal(str(HELD_USD)) * made, (
            f"cancelled at step {number} of {steps}"
        )
        try:
            seen = await asyncio.wait_for(play.turn(lambda: None), TURN_S)
        except RunGuardError as error:
            pytest.fail(f"after a run that was cancelled at step {number} of {steps}: {error!r}")
        assert seen, f"cancelled at step {number} of {steps}"
        assert leaks(play) == []
        assert booked(play)[1] == play.calls()
        assert all(guard.snapshot()["guard_errors"] == 0 and not guard.trips for guard in play.guards)
    print(f"{reference.name}: cancelled at {stopped} of {len(numbers)} steps; a whole turn has {steps}")
    assert stopped
