"""``benchmarks/seed_table.py``: the seed's failure modes are stopped at its figures, and the page shows a real run."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

import seed_table
from seed_table import CLAIMS, CLASS, DEFAULTS, SEED_VALUES, Row

PAGE = Path(__file__).parents[2] / "docs" / "contributing" / "seed-table.md"
IS_NEWEST = tuple(map(int, version("google-adk").split(".")[:2])) >= (2, 13)
CALLS = {
    "non_progress": (16, 5, 5, 11),
    "back_delegation": (6, 2, 6, 6),
    "inflation": (40, 21, 21, 40),
    "over_spawn": (402, 22, 22, 2),
}


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {row.claim.story.key: row for row in seed_table.play_table()}


def test_every_mode_makes_the_expected_calls(rows: dict[str, Row]) -> None:
    assert {key: _calls(row) for key, row in rows.items()} == CALLS


def _calls(row: Row) -> tuple[int, ...]:
    return tuple(side.counter.model_calls for side in (row.without, *row.guarded.values()))


@pytest.mark.parametrize(
    ("mode", "below"), [("non_progress", 0), ("back_delegation", 3), ("inflation", 0), ("over_spawn", 4)]
)
def test_the_seeds_class_saves_what_the_seed_says(rows: dict[str, Row], mode: str, below: int) -> None:
    """To a few points: the sizes of documents and answers are ours.

    Twenty of 400 agents are 95 %, where the seed says 98.
    """
    row = rows[mode]
    assert row.guarded[CLASS].trip is not None
    assert row.saved(CLASS) >= row.claim.saved - below


def test_no_run_ends_with_an_error_or_an_open_call(rows: dict[str, Row]) -> None:
    sides = [side for row in rows.values() for side in (row.without, *row.guarded.values())]
    assert [side.error for side in sides] == [""] * len(sides)
    assert all(side.answered for side in sides)


def test_growth_is_reported_though_the_default_does_not_stop_it(rows: dict[str, Row]) -> None:
    guarded = rows["inflation"].guarded[DEFAULTS]
    assert guarded.trip is None
    assert [decision.finding.rule for decision in guarded.warnings if decision.finding] == ["growth"]


@pytest.mark.skipif(not IS_NEWEST, reason="the page shows the figures of the newest ADK")
def test_the_page_shows_a_real_run(rows: dict[str, Row]) -> None:
    text = PAGE.read_text(encoding="utf-8").partition("\n## ")[0]
    shown = [line for line in text.splitlines() if re.match(r"\| \w", line)][1:]
    assert shown == [line for row in rows.values() for line in seed_table.lines(row)]


def test_the_page_names_the_settings_and_every_difference() -> None:
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert all(f"{name}={value!r}" in page for name, value in SEED_VALUES.items())
    assert all(claim.differs in page for claim in CLAIMS)
