"""Results on a terminal, wide or narrow, and in a pipe."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.kit.commands import on_a_terminal, runguard, told
from tests.kit.recordings import looping as looping_lines

LONG = "e-7b1931b3-2477-49aa-b62d-ed1346abd2be:smile:[red]"
VERDICTS = [
    "nudge at call 4: repetition of look",
    "block at call 8: repetition of look",
    "stop at call 9: repetition of look",
]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A long id that a screen library could read as markup and as an emoji."""
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(looping_lines(LONG, 12, success=True)) + "\n")
    return path


def test_colour_is_for_terminals(file_store: str) -> None:
    assert "\x1b[36m" in on_a_terminal("trips", "--store", file_store), "shadow ones are marked in colour"
    plain = on_a_terminal("trips", "--store", file_store, NO_COLOR="1")
    assert "\x1b[3" not in plain
    assert max(len(line) for line in plain.splitlines()) <= 100


def test_a_pipe_gets_whole_lines_without_colour(file_store: str) -> None:
    """One line for each stop, nothing cut or folded at 80 columns."""
    ran = runguard("trips", "--store", file_store)
    (line,) = [line for line in ran.stdout.splitlines() if "repetition" in line and "shadow" in line]
    assert "look: 4 identical calls and answers, limit 4" in line
    assert "shadow: not enforced" in line
    assert "\x1b" not in ran.stdout
    (alice,) = told("trips", "--store", file_store, "--user", "alice")["trips"]
    assert alice["message"] in runguard("trips", "show", alice["id"], "--store", file_store).stdout


def as_on_a_terminal(columns: int, *arguments: Any) -> str:
    """What a command writes where a terminal is so wide."""
    return runguard(*arguments, COLUMNS=str(columns), TTY_COMPATIBLE="1", TERM="xterm-256color").stdout


def plain(shown: str) -> list[str]:
    return [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).rstrip() for line in shown.splitlines()]


@pytest.mark.parametrize("columns", [160, 80, 40])
def test_replay_keeps_its_figures_and_ids_on_any_terminal(recorded: Path, columns: int) -> None:
    lines = plain(as_on_a_terminal(columns, "replay", recorded))
    assert any(LONG in line for line in lines) or columns < len(LONG)
    assert any("after the stop" in line for line in lines)
    assert len([line for line in lines if re.search(r"[\dk] \$0\.\d{4}$", line)]) == 1, (
        "what came after the stop, whole"
    )
    assert max(map(len, lines)) <= columns or columns < len(LONG)


@pytest.mark.parametrize("columns", [80, 50])
def test_two_policies_on_a_narrow_terminal(recorded: Path, columns: int) -> None:
    Path("strict.toml").write_text("max_model_calls = 2\n")
    lines = plain(as_on_a_terminal(columns, "replay", recorded, "--against", "strict.toml"))
    assert len([line for line in lines if line.startswith("  after the stop: ")]) == 2
    assert any(line.startswith("  under strict.toml: stop at call 2:") for line in lines)


def test_replay_in_a_pipe_has_one_whole_line_for_each_run(recorded: Path) -> None:
    Path("strict.toml").write_text("max_model_calls = 2\n")
    for options in ([], ["--against", "strict.toml"]):
        lines = runguard("replay", recorded, *options).stdout.splitlines()
        (row,) = [line for line in lines if line.startswith(LONG)]
        assert all(verdict in row for verdict in VERDICTS)
        assert len(re.findall(r"[\dk] \$0\.\d{4}", row)) == (2 if options else 1)
    assert f"  {LONG}" in lines, "in the list of stopped successes"


def test_calibrate_and_an_explanation_in_a_pipe_are_not_folded(recorded: Path) -> None:
    ran = runguard("calibrate", recorded)
    assert re.search(r"^# max_usd: no proposal\. 1 successful recording.*$", ran.stdout, re.MULTILINE), ran.stdout
    explained = runguard("replay", recorded, "--explain", LONG).stdout
    assert re.search(
        r"^context .* no prompt came near the model's window, or the window is unknown *$", explained, re.MULTILINE
    )
    assert explained.startswith(f"{LONG}: ")
