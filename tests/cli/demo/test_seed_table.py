"""``runguard demo --seed-table``: the seed's failure modes are stopped at its figures, and the docs page shows a real
run.
"""

import asyncio
import json
import re
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner

from runguard.cli import stories as seed_table
from runguard.cli.main import main
from runguard.cli.stories import SEED_VALUES, Row, SeedTable

PAGE = Path(__file__).parents[3] / "docs" / "contributing" / "seed-table.md"
IS_NEWEST = tuple(map(int, version("google-adk").split(".")[:2])) >= (2, 13)
CALLS = {
    "non_progress": (16, 5, 5, 11),
    "back_delegation": (6, 2, 6, 6),
    "inflation": (40, 21, 21, 40),
    "over_spawn": (402, 22, 22, 2),
}
GUARDS = {"seed_class": "`ADKCostBreaker`", "seed_install": "`install(...)`", "defaults": "defaults"}


@pytest.fixture(scope="module")
def table() -> SeedTable:
    return seed_table.play_table()


@pytest.fixture(scope="module")
def rows(table: SeedTable) -> dict[str, Row]:
    return {row.claim.story.key: row for row in table.rows}


def test_every_mode_makes_the_expected_calls(rows: dict[str, Row]) -> None:
    assert {key: _calls(row) for key, row in rows.items()} == CALLS


def _calls(row: Row) -> tuple[int, ...]:
    sides = (row.defaults.without, *(pair.guarded for pair in row.pairs().values()))
    return tuple(side.counter.model_calls for side in sides)


@pytest.mark.parametrize(
    ("mode", "below"), [("non_progress", 0), ("back_delegation", 3), ("inflation", 0), ("over_spawn", 4)]
)
def test_the_seeds_class_saves_what_the_seed_says(rows: dict[str, Row], mode: str, below: int) -> None:
    """To a few points: the sizes of documents and answers are ours.

    Twenty of 400 agents are 95 %, where the seed says 98.
    """
    row = rows[mode]
    assert row.seed_class.stopped
    assert row.seed_class.saved >= row.claim.saved - below


def test_no_run_ends_with_an_error_or_an_open_call(table: SeedTable) -> None:
    assert table.ok
    sides = [side for row in table.rows for pair in row.pairs().values() for side in (pair.without, pair.guarded)]
    assert [side.error for side in sides] == [""] * len(sides)
    assert all(side.answered for side in sides)


def test_growth_is_reported_though_the_default_does_not_stop_it(rows: dict[str, Row]) -> None:
    guarded = rows["inflation"].defaults.guarded
    assert guarded.trip is None
    assert [decision.finding.rule for decision in guarded.warnings if decision.finding] == ["growth"]


# ---- the command and the page ---------------------------------------------------------------------------------------


def test_the_command_shows_the_table(table: SeedTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seed_table, "play_table", lambda: table)
    ran = CliRunner().invoke(main, ["demo", "--seed-table"])
    assert (ran.exit_code, ran.stderr) == (0, "")
    assert re.search(
        r"^non-progress +ADKCostBreaker +16 → +5 +[\d,]+ → +[\d,]+ +8\d\.\d% +79%$", ran.stdout, re.MULTILINE
    )
    assert re.search(r"^ +defaults +402 → +2 +[\d,]+ → +180 +99\.\d%", ran.stdout, re.MULTILINE)
    assert all(row.claim.differs in ran.stdout for row in table.rows)


def test_the_command_for_machines(table: SeedTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seed_table, "play_table", lambda: table)
    ran = CliRunner().invoke(main, ["demo", "--seed-table", "--json"])
    assert (ran.exit_code, ran.stderr) == (0, "")
    result = json.loads(ran.stdout)
    assert [mode["seed"]["saved_percent"] for mode in result["modes"]] == [79, 84, 66, 98]
    assert {
        mode["mode"]: tuple(mode[side]["model_calls"] for side in ("without", *GUARDS)) for mode in result["modes"]
    } == CALLS
    assert result["modes"][0]["seed_install"]["settings"] == SEED_VALUES
    assert result["modes"][0]["defaults"]["settings"] == {}


def test_the_exit_code_is_one_when_a_mode_is_not_stopped(table: SeedTable, monkeypatch: pytest.MonkeyPatch) -> None:
    unstopped = [Row(row.claim, row.defaults, row.defaults, row.defaults) for row in table.rows]
    monkeypatch.setattr(seed_table, "play_table", lambda: SeedTable(unstopped, 0.0))
    assert CliRunner().invoke(main, ["demo", "--seed-table"]).exit_code == 1
    assert CliRunner().invoke(main, ["demo", "--seed-table", "--json"]).exit_code == 1


def test_the_calls_of_inflation_depend_on_the_sizes_that_the_page_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed gives no sizes. A larger instruction is a larger baseline, so the ratio is met later."""
    made: dict[int, int] = {}
    claim = next(claim for claim in seed_table.CLAIMS if claim.story.key == "inflation")
    for instruction in (300, 3_300, 8_000):
        monkeypatch.setattr(seed_table, "INSTRUCTION_TOKENS", instruction)
        pair = seed_table.Pair(claim.story, settings=SEED_VALUES)
        with seed_table.quiet():
            asyncio.run(seed_table.play_with(pair))
        made[instruction] = pair.guarded.counter.model_calls
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"{calls} of 40 calls with {tokens:,} tokens" in page for tokens, calls in made.items()), made


@pytest.mark.skipif(not IS_NEWEST, reason="the page shows the figures of the newest ADK")
def test_the_page_shows_a_real_run(table: SeedTable) -> None:
    text = PAGE.read_text(encoding="utf-8").partition("\n## ")[0]
    shown = [line for line in text.splitlines() if re.match(r"\| \w", line)][1:]
    assert shown == [_line(row, guard) for row in table.rows for guard in row.pairs()]


def _line(row: Row, guard: str) -> str:
    pair = row.pairs()[guard]
    before, after = pair.without.counter, pair.guarded.counter
    calls, tokens = f"{before.model_calls} → {after.model_calls}", f"{before.tokens:,} → {after.tokens:,}"
    return (
        f"| {row.claim.story.title} | {GUARDS[guard]} | {calls} | {tokens} | {pair.saved:.1f} % | {row.claim.saved} % |"
    )


def test_the_page_names_the_settings_and_every_difference(table: SeedTable) -> None:
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert all(f"{name}={value!r}" in page for name, value in SEED_VALUES.items())
    assert all(row.claim.differs in page for row in table.rows)
