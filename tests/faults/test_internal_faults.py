"""One exception in each function that a run reaches: whatever breaks inside RunGuard, the run does not notice."""

import random

import pytest

from .injection import Place
from .playing import Outcome, baseline, play_with_fault, table
from .reference_runs import REFERENCES, Reference

SAMPLE = 12  # faults per reference run, of about 500
SEED = 1


def sample(places: list[Place], is_long: bool, seed: str) -> list[tuple[Place, str]]:
    every = [(place, when) for place in places for when in ("first", "second", "every") if when != "second" or place.calls > 1]
    return every if is_long else random.Random(seed).sample(every, min(SAMPLE, len(every)))


async def outcomes_of(reference: Reference, is_long: bool, **policy: str) -> list[Outcome]:
    base = await baseline(reference, **policy)
    outcomes = [await play_with_fault(base, place, when) for place, when in sample(base.places, is_long, f"{SEED}{reference.name}")]
    print(reference.name, dict(table(outcomes)))
    return [outcome for outcome in outcomes if outcome.raised]


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("reference", [one for one in REFERENCES if not one.name.startswith("guard")], ids=lambda reference: reference.name)
async def test_a_fault_of_our_own_leaves_no_reservation_that_later_calls_wait_for(reference: Reference, is_long: bool) -> None:
    outcomes = await outcomes_of(reference, is_long)
    assert outcomes
    harmed = [str(outcome) for outcome in outcomes if any(harm.startswith(("hung", "leaked")) for harm in outcome.harm)]
    assert not harmed, "\n".join(harmed)
