"""The figures on the page about detection are those of the benchmark."""

import json

import pytest

from detection_figures import OWN
from detection_page import FIGURES, NOTES, PAGE, updated
from made_up import HEALTHY, LOOPS
from replays import by_runguard
from runguard.policy import Policy
from runguard.replay.player import Judge

figures = json.loads(FIGURES.read_text(encoding="utf-8"))
page, notes = PAGE.read_text(encoding="utf-8"), NOTES.read_text(encoding="utf-8")


def test_the_tables_of_the_page_are_made_from_the_stored_figures() -> None:
    assert updated(page, figures) == page
    assert updated(notes, figures) == notes
    assert (page.count("<!-- figures: "), notes.count("<!-- figures: ")) == (1, 2)
    assert len(page.splitlines()) <= 55


def test_changed_figures_change_the_page() -> None:
    changed = json.loads(FIGURES.read_text(encoding="utf-8"))
    changed["groups"]["all runs"][OWN]["saved"][0] += 1
    assert updated(page, changed) != page
    assert updated(notes, changed) != notes


@pytest.mark.parametrize(("kind", "shapes"), [("loops", LOOPS), ("look-alikes", HEALTHY)])
def test_the_stored_figures_of_the_made_up_runs_are_todays(kind: str, shapes: dict[str, object]) -> None:
    letters = "".join(
        by_runguard(Judge(Policy.validated({"tools": shape.tools}, "")), shape.run()).letter
        for shape in (LOOPS if kind == "loops" else HEALTHY).values()
    )
    assert figures["made_up"][kind][OWN] == letters
    assert len(letters) == len(shapes)


def test_there_are_as_many_made_up_runs_as_promised() -> None:
    assert len(LOOPS) >= 110
    assert len(HEALTHY) >= 170
