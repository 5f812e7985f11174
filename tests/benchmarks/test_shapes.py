"""The promise of the defaults, on made-up runs:
healthy work goes on untouched by anything but words, loops are ended.
"""

import pytest

from made_up import HEALTHY, LOOPS
from replays import Verdict, by_runguard
from runguard.policy import Policy
from runguard.replay.player import Judge
from shapes import Shape
from tests.kit.examples import each_row

PROMISED = {
    "polling with progress",
    "polling without visible progress",
    "polling beyond, declared",
    "paging",
    "batches",
    "edit-test-edit",
    "fan-out of equal calls",
    "lookup sweeps",
    "constant ok",
    "todo updates",
    "re-reads after compaction",
    "flaky-test re-runs",
    "retry with back-off",
}
# The first cannot be told from a lookup sweep, the others not from a batch or from work between tests.
ONLY_TOLD = {
    # What a model was asked is in no recording, so equal words may answer new questions. Live they are stopped.
    "same sentence without a call",
    "two agents with the same phrases",
    "rephrased search finds nothing",
    "two calls in turn with a counter in their arguments",
    "one long answer whatever is asked",
    "undeclared arguments around one question",
    "same long test run with other reads between",
    "plans rewritten without action",
    "one file written again with another line",
    "one query with another condition each time",
    "busy service with a fifth of good answers",
    "edits that change nothing",
    "parser that repeats its question while the search brings news",
}


def verdict(shape: Shape) -> Verdict:
    return by_runguard(Judge(Policy.validated({"tools": shape.tools}, "")), shape.run())


@each_row("shape", HEALTHY.values())
def test_a_look_alike_is_neither_stopped_nor_refused_a_call(shape: Shape) -> None:
    found = verdict(shape)
    assert found.letter in ".n", found.story


@each_row("shape", LOOPS.values())
def test_a_loop_is_ended(shape: Shape) -> None:
    found = verdict(shape)
    expected = "n" if shape.name in ONLY_TOLD else "S"
    assert found.letter == expected, found.story


def test_every_promised_look_alike_is_there() -> None:
    assert {shape.kind for shape in HEALTHY.values()} >= PROMISED


@pytest.mark.parametrize("name", ["fifty unchanged polls in eight minutes", "forty scrolls with a bare ack"])
def test_what_only_a_declaration_holds_is_stopped_without_it(name: str) -> None:
    shape = HEALTHY[name]
    assert verdict(Shape(shape.name, shape.kind, shape.steps)).letter == "S"
