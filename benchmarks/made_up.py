"""All made-up runs: loops that should be ended, and healthy work that looks like them."""

import cut_off
import growing
import hidden_failures
import idle_words
import long_answers
import lookalikes
import loops
import noise
import orders
import reworded
import talk
import told_again
import try_again
import unseen_failures
import wandering_numbers
import work_between
from shapes import Shapes

_FAMILIES = (
    *(long_answers, unseen_failures, cut_off, noise, growing, orders, talk, reworded, try_again, told_again),
    *(hidden_failures, work_between, wandering_numbers, idle_words),
)


def _all(first: Shapes, *more: Shapes) -> Shapes:
    found = Shapes(first)
    for shapes in more:
        twice = found.keys() & shapes.keys()
        assert not twice, f"two made-up runs have one name: {twice}"
        found.update(shapes)
    return found


LOOPS = _all(loops.LOOPS, *(family.LOOPS for family in _FAMILIES))
HEALTHY = _all(lookalikes.HEALTHY, *(family.HEALTHY for family in _FAMILIES))
