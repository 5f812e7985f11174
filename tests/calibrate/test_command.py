"""``runguard calibrate``: what it prints, what it writes, and that replay agrees with it."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from runguard.calibrate import calibrate
from runguard.cli.main import main
from runguard.policy import Policy
from runguard.policy.settings import load_policy_file
from runguard.replay import open_sources
from tests.kit.recordings import repeating, rungs_of, sized, working, write


def good(many: int) -> list[dict[str, Any]]:
    return [working(f"good-{n}", 1) for n in range(many)]


def bad(many: int) -> list[dict[str, Any]]:
    return [repeating(f"bad-{n}", int(rungs_of("repetition").stop or 0)) for n in range(many)]


def command(*args: Any) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Successes of many sizes, one of them a giant; failures that loop; a runaway; a line that is broken."""
    fine = [sized(f"run-{n}", prompt=100 * (n + 1), calls=n % 3 + 1) for n in range(80)]
    rest = [
        sized("giant", prompt=50_000, calls=4),
        sized("away", prompt=90_000, calls=40, success=False),
        *bad(6),
        sized("who", prompt=500, success=None),
    ]
    return write(tmp_path / "runs.jsonl", *fine, *rest, "{broken")


def test_the_table_and_the_file_are_printed(recorded: Path) -> None:
    done = command("calibrate", recorded)
    assert done.exit_code == 0, done.output
    told = " ".join(done.output.replace("# ", "").split())
    assert (
        "89 recordings: 81 labelled a success, 7 labelled a failure, 1 without a label. Limits are based on the 81 "
        "successful ones" in told
    )
    assert "max_usd" in told
    assert "Successful among them: giant" in told
    assert "Fitted on one half, counted on the other: of 81 held-out successful recordings" in told
    assert "1 records could not be read and were skipped" in told
    toml = done.output.partition("# Proposed by")[2]
    assert "max_tokens = " in toml


def test_the_written_file_loads_and_replay_agrees_with_what_was_said(recorded: Path, tmp_path: Path) -> None:
    target = tmp_path / "proposed.toml"
    done = command("calibrate", recorded, "--write", target, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    policy = Policy.validated(load_policy_file(target), str(target))
    assert policy.max_tokens == told["limits"]["max_tokens"]["value"]
    assert float(policy.max_usd or 0) == told["limits"]["max_usd"]["value"]
    assert target.read_text() == told["toml"]

    totals = json.loads(command("replay", recorded, "--policy", target, "--json").stdout)["totals"]
    for label, said in told["proposed"].items():
        seen = totals["by_label"][label]
        assert (said["recordings"], said["stopped"], said["nudged"], said["refused"]) == (
            seen["runs"],
            seen["stopped"],
            seen["nudged"],
            seen["blocked"],
        )
        assert said["tokens_after"] == seen["after_stop"]["tokens"]
        assert said["usd_after"] == pytest.approx(float(seen["after_stop"]["usd"]))
    assert told["proposed"]["success"]["stopped"] >= 1
    now = json.loads(command("replay", recorded, "--json").stdout)["totals"]
    assert {label: said["stopped"] for label, said in told["now"].items()} == {
        label: seen["stopped"] for label, seen in now["by_label"].items()
    }


def test_replay_agrees_on_each_limit_alone(recorded: Path, tmp_path: Path) -> None:
    told = json.loads(command("calibrate", recorded, "--json").stdout)["limits"]
    rules = {
        "max_usd": "budget",
        "max_tokens": "budget",
        "max_model_calls": "model_calls",
        "max_tool_calls": "tool_calls",
        "max_seconds": "deadline",
    }
    for setting, rule in rules.items():
        limit = told[setting]
        alone = tmp_path / "alone.toml"
        alone.write_text(f"{setting} = {limit['value']}\n")
        runs = json.loads(command("replay", recorded, "--policy", alone, "--json").stdout)["runs"]
        stops = [
            (run, v)
            for run in runs
            for v in run["verdicts"]
            if v["action"] == "stop" and v["rule"] == rule and not v["moot"]
        ]
        assert len(stops) == sum(limit["cut"]["recordings"].values()) > 0
        assert sum(verdict["after"]["tokens"] for _, verdict in stops) == limit["cut"]["tokens_after"]
        assert [run["id"] for run, _ in stops if run["success"]] == limit["cut"]["successful"]


def test_a_file_is_replaced_only_when_forced(tmp_path: Path) -> None:
    recorded = write(tmp_path / "runs.jsonl", *(sized(f"run-{n}", prompt=100) for n in range(75)))
    target = tmp_path / "kept.toml"
    target.write_text("max_model_calls = 7\n")
    refused = command("calibrate", recorded, "--write", target)
    assert (refused.exit_code, target.read_text()) == (2, "max_model_calls = 7\n")
    assert "already exists; pass --force to replace it" in refused.output
    assert command("calibrate", recorded, "--write", target, "--force").exit_code == 0
    assert "# Proposed by" in target.read_text()


def test_a_place_that_cannot_be_written_is_told_before_the_work(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runguard.calibrate.proposal.calibrate", lambda *_, **__: pytest.fail("it has begun"))
    missing = command("calibrate", recorded, "--write", "absent/x.toml")
    assert (missing.exit_code, missing.stdout) == (2, "")
    assert missing.stderr == "absent/x.toml: cannot be written: the folder absent does not exist; create it first\n"


def test_what_the_policy_said_before_is_kept_and_secrets_are_not_printed(tmp_path: Path) -> None:
    recorded = write(tmp_path / "runs.jsonl", *(sized(f"run-{n}", prompt=100) for n in range(75)))
    now = tmp_path / "now.toml"
    now.write_text(
        'mode = "shadow"\nstore = "redis://:s3cret@host/0"\nmax_context_tokens = 90000\nmax_nudges = '
        "1\n[rules]\nhandoff = { stop = 9 }\nempty = false\n"
        '[tools."look*"]\nvolatile = ["when"]\n[prices."in-house"]\ninput = 1.5\noutput = 2\n[[budgets]]\nusd '
        '= 500\nper = "user"\nwindow = "1d"\n'
    )
    target = tmp_path / "next.toml"
    done = command("calibrate", recorded, "--policy", now, "--write", target)
    assert done.exit_code == 0, done.output
    before, after = (Policy.validated(load_policy_file(path), "") for path in (now, target))
    kept = {"mode", "max_context_tokens", "max_nudges", "tools", "prices", "budgets"}
    assert after.model_dump(mode="json", include=kept) == before.model_dump(mode="json", include=kept)
    assert (after.rungs("handoff"), after.rungs("empty")) == (before.rungs("handoff"), None)
    assert after.max_tokens is not None
    assert "s3cret" not in target.read_text() + done.output
    assert "store and alerts are not copied" in target.read_text()


def test_names_in_the_recordings_cannot_become_settings(tmp_path: Path) -> None:
    runs = [sized(f"run-{n}", prompt=100) for n in range(73)]
    evil = 'evil\nmax_model_calls = 1\r\n[rules]\u2028mode = "off"\x00[red]'
    target = tmp_path / "out.toml"
    done = command(
        "calibrate", write(tmp_path / "runs.jsonl", *runs, sized(evil, prompt=90_000, calls=9)), "--write", target
    )
    assert done.exit_code == 0, done.output
    values = load_policy_file(target)
    assert "mode" not in values
    assert values["max_model_calls"] == 3
    assert "evil" in target.read_text()


def test_nothing_to_advise_is_exit_code_1_and_no_file(tmp_path: Path) -> None:
    target = tmp_path / "out.toml"
    done = command("calibrate", write(tmp_path / "runs.jsonl", *good(20)), "--write", target)
    assert done.exit_code == 1
    assert "nothing to propose" in done.output
    assert "20 successful recordings, 72 are needed" in " ".join(done.output.split())
    assert not target.exists()
    told = json.loads(command("calibrate", tmp_path / "runs.jsonl", "--json").stdout)
    assert told["proposal"] == {}


@pytest.mark.parametrize("content", ["", "\n\n", "{broken\n[1, 2]\n"])
def test_a_source_without_a_run_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(content)
    done = command("calibrate", path)
    assert (done.exit_code, done.stdout) == (2, "")
    why = "no run could be read, 2 records skipped; the first: runs.jsonl at byte 0" if content.strip() else "no run"
    assert why in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "args",
    [
        ["nowhere.jsonl"],
        ["mysql://host/db"],
        ["x.db"],
        ["runs.jsonl", "--policy", "none.toml"],
    ],
)
def test_what_cannot_be_used_is_said_with_exit_code_2(tmp_path: Path, args: list[str]) -> None:
    write(tmp_path / "runs.jsonl", *good(3))
    (tmp_path / "x.db").write_bytes(b"SQLite format 3\x00 and nothing more")
    done = command("calibrate", *args)
    assert done.exit_code == 2
    assert done.output
    assert "Traceback" not in done.output


def test_several_processes_say_the_same(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runguard.replay.sources._PART", 30_000)
    # fewer are worked on here
    assert len([piece for source in open_sources(str(recorded)) for piece in source.pieces()]) > 2
    budgets = [
        {"tokens": 9_000, "calls": 30, "per": "session"},
        {"usd": 5, "per": "user", "window": "1h", "thresholds": [0.5]},
    ]
    policy = Policy.validated({"budgets": budgets, "mode": "shadow"}, "")
    here, there = calibrate(recorded, policy), calibrate(recorded, policy, workers=2)
    assert here.to_dict() == there.to_dict()
    assert here.now["success"].stopped > 0  # the budget counts
