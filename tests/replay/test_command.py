"""``runguard replay``: the table, JSON, the page, two policies, one run explained."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from runguard.cli.main import main
from tests.kit.recordings import looping, working


@pytest.fixture(autouse=True)
def an_early_policy(tmp_path: Path) -> None:
    (tmp_path / "runguard.toml").write_text("[rules]\nrepetition = { nudge = 3, block = 4, stop = 5 }\n")


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "runs.jsonl"
    runs = [
        looping("stuck"),
        working("fine"),
        looping("false-stop", success=True),
        looping("short", 3),
        looping("no-label", success=None),
    ]
    path.write_text("".join(json.dumps(run) + "\n" for run in runs) + "{broken\n")
    return path


def replay(*args: Any) -> Result:
    return CliRunner().invoke(main, ["replay", *map(str, args)])


def test_the_table_shows_who_would_have_been_touched_and_the_totals(recorded: Path) -> None:
    done = replay(recorded)
    assert done.exit_code == 0, done.output
    told = " ".join(done.output.split())
    assert "stop at call 5: repetition of look, 5 identical calls and answers" in told
    assert "fine" not in told.partition("in total")[0]
    assert "stopped although labelled a success: 1 false-stop" in told
    assert "1 records could not be read and were skipped" in told


def test_json_is_one_document_with_every_run(recorded: Path) -> None:
    done = replay(recorded, "--json")
    told = json.loads(done.stdout)
    assert [run["id"] for run in told["runs"]] == ["stuck", "fine", "false-stop", "short", "no-label"]
    assert told["runs"][0]["verdicts"][-1]["evidence"][0]["tool"] == "look"
    assert told["runs"][0]["after_stop"] == {
        "model_calls": 3,
        "tool_calls": 3,
        "tokens": 4950,
        "usd": told["runs"][0]["after_stop"]["usd"],
    }
    totals = told["totals"]
    assert (totals["runs"], totals["stopped"], totals["by_label"]["success"]["stopped"]) == (5, 3, 1)
    assert totals["false_stops"] == {"count": 1, "ids": ["false-stop"]}
    assert totals["by_rule"]["repetition"]["stop"] == 3
    assert told["skipped"]["count"] == 1


def test_a_policy_file_decides(recorded: Path, tmp_path: Path) -> None:
    policy = tmp_path / "strict.toml"
    policy.write_text("max_model_calls = 2\n")
    told = json.loads(replay(recorded, "--policy", policy, "--json").stdout)
    assert all(run["verdicts"][0]["rule"] == "model_calls" for run in told["runs"])
    assert told["policy"]["name"] == "strict.toml"


def test_two_policies_side_by_side(recorded: Path, tmp_path: Path) -> None:
    policy = tmp_path / "strict.toml"
    policy.write_text("max_model_calls = 2\n")
    told = json.loads(replay(recorded, "--against", policy, "--json").stdout)
    assert (told["totals"]["stopped"], told["against"]["stopped"]) == (3, 5)
    assert told["runs"][1]["against"]["verdicts"][0]["rule"] == "model_calls"
    table = replay(recorded, "--against", policy).output
    assert "under strict.toml" in table
    assert "under runguard.toml" in table


def test_explain_says_why_it_did_not_stop(recorded: Path) -> None:
    told = " ".join(replay(recorded, "--explain", "short").output.split())
    assert "would have been nudged by repetition of look: 3 identical calls and answers, limit 3" in told
    assert "3 of 5 needed to stop; reached its nudge" in told
    assert "fan_out: not evaluated" in told
    data = json.loads(replay(recorded, "--explain", "short", "--json").stdout)
    assert {near["rule"] for near in data["rules"]} >= {"repetition", "stall", "growth", "max_usd"}


def test_the_run_to_explain_may_be_named_by_its_beginning(recorded: Path) -> None:
    assert json.loads(replay(recorded, "--explain", "sho", "--json").stdout)["run"]["id"] == "short"
    several = replay(recorded, "--explain", "f")
    assert (several.exit_code, several.stderr) == (2, "'f' matches several runs: fine, false-stop\n")
    missing = replay(recorded, "--explain", "nobody")
    assert missing.exit_code == 2
    assert missing.stderr == (
        "'nobody': no run with this id. The first ones are stuck, fine, false-stop, short, no-label; --json lists all\n"
    )


@pytest.mark.parametrize(("option", "file"), [("--html", "page.html"), ("--against", "runguard.toml")])
def test_what_an_explanation_cannot_do_is_not_passed_over(recorded: Path, option: str, file: str) -> None:
    done = replay(recorded, "--explain", "short", option, file)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{option} is for all runs: use only one of them" in " ".join(done.stderr.split())
    assert not Path("page.html").exists()


@pytest.mark.parametrize("args", [("nowhere.jsonl",), ("{recorded}", "--policy", "nowhere.toml")])
def test_what_cannot_be_used_is_said_with_exit_code_2(recorded: Path, args: tuple[str, str, str] | tuple[str]) -> None:
    done = replay(*(arg.format(recorded=recorded) for arg in args))
    assert done.exit_code == 2
    assert "nowhere" in done.output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\n", "runs.db: contains no run"),
        ("", "runs.db: contains no run"),
        ("{broken\n", "runs.db: no run could be read, 1 record skipped; the first: "),
    ],
)
def test_a_source_in_which_nothing_can_be_read_is_an_error(tmp_path: Path, content: str, message: str) -> None:
    runs = tmp_path / "runs.db"
    runs.write_text(content)
    done = replay(runs, "--html", tmp_path / "page.html")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(message)
    assert done.stderr.endswith("`runguard replay --help` names what can be read\n") is bool(content.strip())
    assert not (tmp_path / "page.html").exists()
    answer = json.loads(replay(runs, "--json").stdout)
    assert (answer["ok"], answer["error"].startswith(message)) == (False, True)


def test_a_page_that_cannot_be_written_is_told_before_the_replay(recorded: Path) -> None:
    done = replay(recorded, "--html", "absent/page.html")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "absent/page.html: cannot be written: the folder absent does not exist; create it first\n"


@pytest.mark.parametrize("options", [[], ["--explain", "id\x1b[2J\nforged"]], ids=["table", "explain"])
def test_names_of_a_recording_are_shown_and_not_obeyed(tmp_path: Path, options: list[Any] | list[str]) -> None:
    run = looping("id\x1b[2J\nforged", model="acme\x1b[2J")
    for step in run["steps"]:
        step["tool"] = "t\x1b]0;owned\x07"
    (tmp_path / "runs.jsonl").write_text(json.dumps(run) + "\n")
    done = replay(tmp_path / "runs.jsonl", *options)
    assert done.exit_code == 0, done.output
    assert "t\\x1b]0;owned\\x07" in done.output
    assert "id\\x1b[2J\\nforged" in done.output
    assert not {"\x1b", "\x07"} & set(done.output)
    told = CliRunner().invoke(main, ["calibrate", str(tmp_path / "runs.jsonl")])
    assert "acme\\x1b[2J" in told.output
    assert "\x1b" not in told.output


def test_a_cost_that_nobody_knows_is_not_zero(tmp_path: Path) -> None:
    runs = tmp_path / "runs.jsonl"
    unknown, known = looping("unknown", model="acme-1", success=True), looping("known")
    runs.write_text(json.dumps(unknown) + "\n")
    told = json.loads(replay(runs, "--json").stdout)
    assert told["totals"]["usd"] is told["totals"]["after_stop"]["usd"] is told["runs"][0]["after_stop"]["usd"] is None
    assert told["totals"]["by_label"]["failure"]["usd"] == "0", "no call at all costs nothing"
    shown = replay(runs).output
    assert re.search(r"^cost +unknown *$", shown, re.MULTILINE)
    assert re.search(r"^money after the stops +unknown *$", shown, re.MULTILINE)
    runs.write_text(json.dumps(unknown) + "\n" + json.dumps(known) + "\n")
    told = json.loads(replay(runs, "--json").stdout)["totals"]
    assert (told["by_label"]["success"]["usd"], told["usd"]) == (None, told["by_label"]["failure"]["usd"])
    assert re.search(r"^cost +at least \$0\.03\d+ +unknown +at least", replay(runs).output, re.MULTILINE)


_BARE = """
import sys
for name in ("google", "google.adk", "sqlalchemy", "psycopg"):
    sys.modules[name] = None
from runguard.cli.main import main
main(["replay", sys.argv[1], "--json"])
"""


def test_replaying_lines_needs_no_framework(recorded: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _BARE, str(recorded)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["totals"]["runs"] == 5


def test_a_run_is_found_by_its_session_and_by_the_name_that_a_trip_gives_it(tmp_path: Path) -> None:
    calls = [{"function_call": {"id": f"c{n}", "name": "look", "args": {}}} for n in range(2)]
    events = [{"author": "user", "invocation_id": "inv-7", "content": {"parts": [{"text": "go"}]}}]
    events += [{"author": "a", "invocation_id": "inv-7", "content": {"parts": [part]}} for part in calls]
    path = tmp_path / "session.json"
    path.write_text(json.dumps({"id": "s1", "appName": "shop", "events": events}))
    for name in ("s1", "inv-7"):
        assert json.loads(replay(path, "--explain", name, "--json").stdout)["run"]["model_calls"] == 2
