"""``runguard init``: a file that is valid as it is, and with every comment taken off."""

import re
from decimal import Decimal
from pathlib import Path

import pytest

from runguard.policy import Policy
from runguard.policy.settings import RULES, load_policy_file
from tests.kit.commands import runguard, told


@pytest.mark.parametrize(
    ("preset", "usd", "store"), [("development", "0.5", "memory"), ("production", "5", "sqlite:///guard.db")]
)
def test_the_written_file_passes_check(preset: str, usd: str, store: str) -> None:
    assert runguard("init", "--preset", preset).stdout.startswith(f"written: runguard.toml ({preset})")
    assert told("check")["ok"]
    policy = Policy.build()
    assert (policy.max_usd, policy.store, policy.mode) == (
        Decimal(usd),
        store.replace("///", f"///{Path.cwd()}/"),
        "enforce",
    )


@pytest.mark.parametrize("preset", ["development", "production"])
def test_every_commented_setting_may_be_taken_into_use(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever removes a # gets a valid file: names, values, and the order of keys and tables."""
    for name in ("SLACK_URL", "PAGERDUTY_KEY"):
        monkeypatch.setenv(
            name,
            "https://hooks.slack.com/services/T0/B0/x" if name == "SLACK_URL" else "0123456789abcdef0123456789abcdef",
        )
    runguard("init", "--preset", preset)
    text = Path("runguard.toml").read_text()
    taken = re.sub(r"^# (?=\[|[a-z_]+ = )", "", text, flags=re.MULTILINE)
    assert taken.count("\n#") < text.count("\n#") - 10
    Path("runguard.toml").write_text(taken)
    policy = Policy.build()
    assert set(policy.tools) == {"check_job", "send_*"}
    assert set(policy.prices) == {"my-model"}
    assert (policy.max_model_calls, policy.context_headroom, policy.budgets[0].per) == (60, 100_000, "user")
    assert policy.rules == {"repetition": {"stop": 6}, "growth": False}
    assert {receiver.kind for receiver in policy.alerts.receivers} >= {"slack", "pagerduty"}


def test_the_file_names_every_rule_and_no_file_of_the_repository() -> None:
    runguard("init")
    text = Path("runguard.toml").read_text()
    assert f"# {', '.join(RULES)}.\n" in text
    assert "docs/" not in text


def test_a_file_that_is_there_is_left_alone_without_force() -> None:
    path = Path("runguard.toml")
    path.write_text("max_tool_calls = 7\n")
    ran = runguard("init")
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert (
        ran.stderr
        == "runguard.toml already exists and was not changed; pass --force to replace it, or name another FILE\n"
    )
    assert path.read_text() == "max_tool_calls = 7\n"
    assert told("init", code=2)["ok"] is False
    assert runguard("init", "--force").exit_code == 0
    assert "max_usd" in load_policy_file(path)


def test_files_elsewhere_say_how_they_are_found() -> None:
    Path("deploy").mkdir()
    assert "runs started here use no policy file" in runguard("init", "deploy/runguard.toml").stdout
    assert "RUNGUARD_POLICY=deploy/strict.toml" in runguard("init", "deploy/strict.toml").stdout


def test_places_that_cannot_be_written() -> None:
    ran = runguard("init", "absent/runguard.toml")
    assert (ran.exit_code, ran.stderr) == (
        2,
        "absent/runguard.toml: cannot write the file: No such file or directory; create the folder absent first\n",
    )
    assert "[tool.runguard]" in runguard("init", "pyproject.toml").stderr


def test_for_machines() -> None:
    assert told("init", "--preset", "production") == {
        "ok": True,
        "file": "runguard.toml",
        "preset": "production",
        "notes": [],
    }
