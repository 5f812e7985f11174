"""``assert_within_budget`` in code and as a fixture of the pytest plugin."""

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent

from runguard import Policy
from runguard.gate import assert_within_budget
from runguard.testing import Recording, ScriptedModel, call, run, text
from tests.kit.recordings import sized, working, write

PRICES = Policy.build(prices={"scripted-1": {"input": 10, "output": 40}})
# An environment that was set up before the entry point existed does not load the plugin by itself.
LOAD = (
    ()
    if any(found.name == "runguard" for found in entry_points(group="pytest11"))
    else (
        "-p",
        "runguard.gate.pytest_plugin",
    )
)


def look(page: int) -> dict[str, int]:
    """Look at a page."""
    return {"page": page}


@pytest.fixture
async def recording() -> Recording:
    """Three model calls of two cents each, two tool calls."""
    agent = LlmAgent(
        name="clerk", model=ScriptedModel([call("look", page=1), call("look", page=2), text("done")]), tools=[look]
    )
    return await run(agent)


def test_a_run_within_its_limits(recording: Recording) -> None:
    result = assert_within_budget(
        recording, usd="0.06", tokens=3_750, model_calls=3, tool_calls=2, policy=PRICES, model="scripted-1"
    )
    assert (str(result.usd), result.tokens, result.model_calls, result.tool_calls) == ("0.06", 3_750, 3, 2)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"usd": "0.0599"}, r"\$0\.06\d*, limit \$0\.0599"),
        ({"tokens": 3_749}, "3,750 tokens, limit 3,749"),
        ({"model_calls": 2}, "3 model calls, limit 2"),
        ({"tool_calls": 1}, "2 tool calls, limit 1"),
    ],
)
def test_a_run_over_a_limit(recording: Recording, limit: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_within_budget(recording.session, policy=PRICES, model="scripted-1", **limit)


def test_an_unknown_price_is_over_every_dollar_limit(recording: Recording) -> None:
    with pytest.raises(AssertionError, match="cost unknown: 3 of 3 model calls have no price"):
        assert_within_budget(recording, usd=1_000, model="house-llm")


def test_every_run_of_a_file_counts(tmp_path: Path) -> None:
    runs = write(tmp_path / "runs.jsonl", sized("small", 10), sized("large", 90_000))
    assert assert_within_budget(runs, tokens=100_000).id == "large"
    with pytest.raises(AssertionError, match="large: 90,010 tokens, limit 50,000"):
        assert_within_budget(runs, tokens=50_000)


def test_a_damaged_file_is_not_within_a_budget(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="cannot be read"):
        assert_within_budget(write(tmp_path / "runs.jsonl", working(), "{broken"), tokens=10**9)


def test_a_budget_needs_a_limit_and_a_run(recording: Recording) -> None:
    with pytest.raises(ValueError, match="at least one of usd"):
        assert_within_budget(recording)
    with pytest.raises(TypeError, match="not dict"):
        assert_within_budget({}, tokens=1)


TEST_FILE = """
def test_cheap(assert_within_budget):
    assert assert_within_budget("runs.jsonl", tokens=100_000).id == "one"

def test_expensive(assert_within_budget):
    assert_within_budget("runs.jsonl", tokens=100)
"""


def pytest_run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_the_fixture_fails_a_test_and_reports_the_figures(tmp_path: Path) -> None:
    write(tmp_path / "runs.jsonl", sized("one", 1_000))
    (tmp_path / "test_costs.py").write_text(TEST_FILE)
    ran = pytest_run(*LOAD, "--junitxml", "out.xml")
    assert "1 failed, 1 passed" in ran.stdout, ran.stdout + ran.stderr
    assert "one: 1,010 tokens, limit 100" in ran.stdout
    assert '<property name="runguard.tokens" value="1010"' in (tmp_path / "out.xml").read_text()


def test_the_plugin_loads_nothing_at_the_start_of_pytest() -> None:
    script = (
        "import sys, pytest, runguard.gate.pytest_plugin; "
        "print(*(n for n in sys.modules if n.split('.')[0] in ('google', 'pydantic', 'rich', 'click') "
        "or n.startswith(('runguard.core', 'runguard.policy', 'runguard.replay'))))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "\n", "")
