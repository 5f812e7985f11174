"""The command line: what it says, what it returns, and what it does not load."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from runguard import __version__
from runguard.cli.main import main
from runguard.policy.settings import RULES


@pytest.fixture(autouse=True)
def clean_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No policy of the environment or of the checkout."""
    monkeypatch.chdir(tmp_path)
    for name in ("RUNGUARD_MODE", "RUNGUARD_POLICY"):
        monkeypatch.delenv(name, raising=False)


def runguard(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def python(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)


def test_version() -> None:
    assert runguard("--version").output == f"runguard {__version__}\n"


WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
from runguard.cli.main import main
main({arguments})
"""


@pytest.mark.parametrize(
    ("name", "reason", "arguments"),
    [
        ("google", "which is not installed", ["demo"]),
        ("google.adk", "which is not installed", ["demo", "--json"]),
        ("google.adk.apps", "the installed one lacks google.adk.apps", ["demo"]),
    ],
)
def test_the_demo_without_adk_says_how_to_get_it(name: str, reason: str, arguments: list[str]) -> None:
    ran = python(WITHOUT.format(name=name, arguments=arguments))
    message = f"runguard demo needs google-adk 2.3 or newer, {reason}: pip install -U 'runguard-agents[adk]'"
    assert ran.returncode == 2
    if "--json" in arguments:
        assert json.loads(ran.stdout) == {"ok": False, "error": message}
    else:
        assert (ran.stdout, ran.stderr) == ("", message + "\n")


# ---- check ----------------------------------------------------------------------------------------------------------

GOOD = """
mode = "shadow"
max_model_calls = 40
max_identical_tool_results = 3
[rules]
growth = false
[tools."check_*"]
polling = true
"""
BAD = """
mod = "shadow"
max_model_calls = 0
[tools.x]
pollling = true
"""


def default_of(rule: str) -> list[str]:
    rungs = RULES[rule][0]
    told = [
        f"{name} {number:g}"
        for name in ("warn", "nudge", "block", "stop")
        if (number := getattr(rungs, name)) is not None
    ]
    return f"(default {', '.join(told)})".split()


def test_check_shows_what_a_policy_changes(tmp_path: Path) -> None:
    (tmp_path / "runguard.toml").write_text(GOOD)
    ran = runguard("check", "runguard.toml")
    assert ran.exit_code == 0
    assert [line.split() for line in ran.stdout.splitlines()] == [
        ["ok:", "runguard.toml"],
        ["mode", "shadow", "(default", "enforce)"],
        ["max_model_calls", "40", "(default", "none)"],
        ["max_identical_tool_results", "3", "(default", "none)"],
        ["rules.repetition", "stop", "3", *default_of("repetition")],
        ["rules.stall", "stop", "3", *default_of("stall")],
        ["rules.growth", "off", "(default", "warn", "3)"],
        ["tools.check_*", "polling", "true"],
    ]


def test_check_finds_the_file_that_a_run_here_would_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.runguard]\nmax_tool_calls = 7\n")
    below = tmp_path / "below"
    below.mkdir()
    monkeypatch.chdir(below)
    ran = runguard("check")
    assert ran.exit_code == 0
    assert "pyproject.toml" in ran.stdout
    assert "max_tool_calls  7  (default 1000)" in ran.stdout


def test_check_says_when_a_pyproject_has_no_table_of_ours(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text("[tool.other]\nx = 1\n")
    ran = runguard("check", "pyproject.toml")
    assert ran.exit_code == 1
    assert (
        ran.stdout
        == "pyproject.toml: no [tool.runguard] table, so this file sets nothing\n  every setting at its default\n"
    )
    assert json.loads(runguard("check", "pyproject.toml", "--json").stdout)["ok"] is False
    assert runguard("check").stdout.startswith("ok: no policy file in this folder or its parents"), (
        "and it is not taken for one"
    )
    file.write_text("[tool.runguard]\n")
    assert runguard("check", "pyproject.toml").exit_code == 0


def test_check_without_any_file() -> None:
    ran = runguard("check")
    assert ran.exit_code == 0
    assert ran.stdout == "ok: no policy file in this folder or its parents\n  every setting at its default\n"


def test_check_names_the_environment_that_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNGUARD_MODE", "off")
    assert "RUNGUARD_MODE=off overrides the mode" in runguard("check").stdout


def test_check_names_the_receivers_of_alerts_and_no_secret(tmp_path: Path) -> None:
    (tmp_path / "runguard.toml").write_text(
        '[alerts]\nlog = "warning"\nslack_webhook = "https://hooks.slack.com/services/T0/B0/hunter2"\n'
    )
    for options in ([], ["--json"]):
        ran = runguard("check", *options)
        assert ran.exit_code == 0
        assert "slack" in ran.stdout
        assert "hunter2" not in ran.stdout


def test_check_explains_every_fault_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(BAD)
    ran = runguard("check", "bad.toml")
    assert ran.exit_code == 2
    assert ran.stdout == ""
    assert "the policy (bad.toml) is not valid:" in ran.stderr
    assert "mod: no such setting; did you mean 'mode'?" in ran.stderr
    assert "max_model_calls = 0: input should be greater than or equal to 1" in ran.stderr
    assert "tools.x.pollling: no such setting; did you mean 'polling'?" in ran.stderr


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("broken.toml", "mode = ", "broken.toml: not valid TOML"),
        ("absent.toml", None, "absent.toml: no such policy file"),
    ],
)
def test_check_of_a_file_that_cannot_be_read(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    ran = runguard("check", name)
    assert ran.exit_code == 2
    assert ran.stderr.startswith(message)


def test_check_for_machines(tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text(GOOD)
    (tmp_path / "bad.toml").write_text(BAD)
    good, bad = runguard("check", "--json", "good.toml"), runguard("check", "--json", "bad.toml")
    assert (good.exit_code, bad.exit_code) == (0, 2)
    told = json.loads(good.stdout)
    assert (told["ok"], told["file"]) == (True, "good.toml")
    assert told["settings"]["mode"] == {"value": "shadow", "default": "enforce"}
    assert told["settings"]["rules.growth"] == {"value": False, "default": {"warn": 3}}
    assert told["settings"]["tools.check_*"] == {"value": {"polling": True}, "default": {}}
    refused = json.loads(bad.stdout)
    assert (refused["ok"], refused["file"]) == (False, "bad.toml")
    assert "mod: no such setting" in refused["error"]


def test_the_schema_knows_every_setting() -> None:
    from runguard.policy.settings import PolicyFile

    ran = runguard("check", "--schema")
    assert ran.exit_code == 0
    assert set(json.loads(ran.stdout)["properties"]) == set(PolicyFile.model_fields)


def test_check_tells_budgets_prices_and_a_store_without_its_password(tmp_path: Path) -> None:
    file = tmp_path / "runguard.toml"
    file.write_text(
        'store = "redis://:hunter2@127.0.0.1:6379/0"\nmax_usd = 2\n[[budgets]]\nusd = 5\nper = '
        '"user"\n[prices.acme]\ninput = 1\noutput = 2\n'
    )
    for options in ([], ["--json"]):
        ran = CliRunner().invoke(main, ["check", str(file), *options])
        assert ran.exit_code == 0, ran.output
        assert "hunter2" not in ran.output
        assert all(word in ran.output for word in ("max_usd", "budgets", "acme", "redis://127.0.0.1:6379"))
