"""One exception in each function that a run reaches: whatever breaks inside RunGuard, the run does not notice.

``RUNGUARD_FAULTS=long`` tries all of them, else a sample of each reference run. ``RUNGUARD_FAULTS_SEED`` takes another
sample.
"""

import os
import random

import pytest

from .injection import Place
from .playing import Baseline, Outcome, baseline, paid_past_cap, play_with_fault, table
from .reference_runs import REFERENCES, Reference, budget_for

SAMPLE = 4  # faults per reference run, of about 500
SEED = os.environ.get("RUNGUARD_FAULTS_SEED", "1")
IS_LONG = os.environ.get("RUNGUARD_FAULTS") == "long"
# together they enter the package through every door
ENTRIES = ("tool loop", "guarded model", "guard in pieces", "guard_async, entered")
DOORS = (*ENTRIES, "conditions")  # ADK iterates a condition of an agent itself
_learned: dict[str, Baseline] = {}  # by the name of a reference and its policy, in this process
everywhere = pytest.mark.parametrize("reference", REFERENCES, ids=lambda reference: reference.name)


@pytest.fixture(autouse=True)
async def outermost_functions() -> None:
    """Learn once which functions a framework calls: one run may call what is another one's outermost line."""
    for reference in REFERENCES:
        if reference.name in DOORS:
            await learned(reference)


async def learned(reference: Reference, **policy: str) -> Baseline:
    name = f"{reference.name} {policy}"
    if name not in _learned:
        _learned[name] = await baseline(reference, **policy)
    return _learned[name]


def sample(places: list[Place], is_long: bool, seed: str) -> list[tuple[Place, str]]:
    every = [
        (place, when)
        for place in places
        for when in ("first", "second", "every")
        if when != "second" or place.calls > 1
    ]
    return every if is_long else random.Random(seed).sample(every, min(SAMPLE, len(every)))


async def outcomes_of(reference: Reference, is_long: bool, **policy: str) -> list[Outcome]:
    base = await learned(reference, **policy)
    chosen = sample(base.places, is_long, f"{SEED} {reference.name} {policy}")
    outcomes = [await play_with_fault(base, place, when) for place, when in chosen]
    print(reference.name, dict(table(outcomes)))
    return [outcome for outcome in outcomes if outcome.raised]


@pytest.mark.timeout(3_600)
@everywhere
async def test_a_fault_of_our_own_harms_no_run(reference: Reference, is_long: bool) -> None:
    """No crash, no hang, nothing left held, the same events, every fault counted and logged. A stop stays clean."""
    outcomes = await outcomes_of(reference, is_long)
    assert outcomes
    harmed = [str(outcome) for outcome in outcomes if outcome.harm]
    assert not harmed, "\n".join(harmed)


@pytest.mark.timeout(3_600)
@everywhere
async def test_no_fault_of_our_own_lets_money_past_a_cap(reference: Reference, is_long: bool) -> None:
    """Between the question and the bill, a fault leads to a plain reservation or to no call."""
    base = await learned(reference)
    if not reference.make(budget_for(1, tight=True)).guards:
        pytest.skip("has no budget on a ledger")
    chosen = sample(base.places, is_long, f"{SEED} {reference.name} money")
    past = [why for place, when in chosen if (why := await paid_past_cap(base, place, when))]
    assert not past, "\n".join(past)


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize(
    "reference",
    [one for one in REFERENCES if IS_LONG or one.name in ENTRIES],  # a few are enough as a sample
    ids=lambda reference: reference.name,
)
async def test_where_a_fault_is_to_stop_the_run_the_stop_is_clean(reference: Reference, is_long: bool) -> None:
    """No crash, no hang, nothing left held, every call answered.

    What fails after the last call, or only tells of things, stops nothing.
    """
    outcomes = await outcomes_of(reference, is_long, on_guard_error="block")
    assert any(outcome.stopped for outcome in outcomes)
    harmed = [str(outcome) for outcome in outcomes if outcome.harm]
    assert not harmed, "\n".join(harmed)
