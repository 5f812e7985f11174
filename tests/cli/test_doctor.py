"""``runguard doctor``: what it looks at, what it finds wrong, and that its live test can fail."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import runguard as package
from runguard.adk import RunGuardPlugin
from runguard.calls import functions
from runguard.cli import doctor as examining
from tests.kit.commands import runguard, told

PRINTED = "an app may print what it likes"
AGENT = f"""
from google.adk.agents import LlmAgent, SequentialAgent
from google.adk.apps import App
from google.adk.plugins.logging_plugin import LoggingPlugin
from google.adk.tools.agent_tool import AgentTool
import runguard
from runguard.adk import GuardedLlm, RunGuardPlugin

print({PRINTED!r})
helper = LlmAgent(name="helper", model="claude-sonnet-4-5")
docs = LlmAgent(name="docs", model="gemini-2.5-flash", tools=[AgentTool(helper)])
root_agent = SequentialAgent(name="root", sub_agents=[docs])
"""


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    known, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    package.uninstall()
    for name in [name for name in sys.modules if name not in known and name.startswith("an_app")]:
        del sys.modules[name]


def agent(more: str = "", name: str = "an_app") -> str:
    folder = Path("agents") / name
    folder.mkdir(parents=True)
    (folder / "agent.py").write_text(AGENT + more)
    return str(folder)


def lines(*arguments: Any, code: int = 0) -> dict[str, Any]:
    beside = f"{PRINTED}\n" if "--app" in arguments else ""
    return {line["check"]: line for line in told("doctor", *arguments, code=code, beside=beside)["checks"]}


def states(*arguments: Any, code: int = 0) -> dict[str, str]:
    return {check: line["state"] for check, line in lines(*arguments, code=code).items()}


def test_all_is_well_here() -> None:
    found = lines()
    assert {check: line["state"] for check, line in found.items()} == dict.fromkeys(
        ("python", "runguard", "google-adk", "policy", "store", "price list", "prices", "self-test"), "ok"
    )
    assert "a limit of 3 model calls stopped after 3" in found["self-test"]["found"]
    assert (
        "the kill switch stopped a run before its first call; every tool call was answered"
        in found["self-test"]["found"]
    )
    shown = runguard("doctor")
    assert shown.exit_code == 0
    assert shown.stdout.splitlines()[-1] == "no problems, no warnings"


def test_the_self_test_ignores_the_policy_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNGUARD_MODE", "off")
    found = states()
    assert (found["policy"], found["self-test"]) == ("warning", "ok")


def test_a_guard_that_stops_nothing_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RunGuardPlugin.__init__
    monkeypatch.setattr(RunGuardPlugin, "__init__", lambda self, **policy: real(self, **{**policy, "mode": "shadow"}))
    line = lines(code=1)["self-test"]
    assert line["state"] == "problem"
    assert "a stop does not work here" in line["found"]


def test_without_adk_a_guarded_function_proves_that_a_stop_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examining, "has_adk", lambda: False)
    monkeypatch.setenv("RUNGUARD_MODE", "shadow")
    line = lines()["self-test"]
    assert (line["state"], os.environ["RUNGUARD_MODE"]) == ("ok", "shadow")
    assert line["found"].startswith("a guarded function was stopped after 3 calls by a limit of 3, and after 4 by a")
    monkeypatch.setattr(functions, "guard", lambda function, **_: function)
    assert "a stop does not work here" in lines(code=1)["self-test"]["found"]


@pytest.mark.parametrize(
    ("more", "state", "words"),
    [
        ("runguard.install(max_usd=2)", "ok", "guarded by runguard.install(), which puts its plugin first"),
        (
            "app = App(name='an_app', root_agent=root_agent, plugins=[RunGuardPlugin(), LoggingPlugin()])",
            "ok",
            "is the first of 2 plugins",
        ),
        (
            "app = App(name='an_app', root_agent=root_agent, plugins=[LoggingPlugin(), RunGuardPlugin()])",
            "problem",
            "comes after LoggingPlugin",
        ),
        (
            (
                "runguard.install(max_usd=3)\n"
                "app = App(name='an_app', root_agent=root_agent, plugins=[RunGuardPlugin(max_usd=8)])"
            ),
            "warning",
            "max_usd=8 applies, not 3. Give the plugin these settings, or leave the plugin out",
        ),
        ("", "problem", "is not guarded: it has no RunGuardPlugin"),
        (
            "root_agent = LlmAgent(name='a', model=GuardedLlm('gemini-2.5-flash', max_usd=1))",
            "ok",
            "is guarded by its models",
        ),
    ],
    ids=["install", "first", "second", "both", "none", "guarded model"],
)
def test_is_the_app_guarded_and_does_the_guard_stand_first(more: str, state: str, words: str) -> None:
    line = lines("--app", agent(more), code=1 if state == "problem" else 0)["plugins"]
    assert line["state"] == state
    assert words in line["found"]
    assert bool(line["do"]) == (state != "ok")


@pytest.mark.parametrize(
    ("rule", "hint"),
    [
        ("helpr", "tools.helpr: the app has no such tool; did you mean 'helper'?"),
        ("helper", ""),
        ("help*", ""),
        ("pay", ""),
    ],
)
def test_a_mistyped_tool_rule_gets_a_warning(rule: str, hint: str) -> None:
    """A rule for another app of the same policy gets none."""
    app = agent(f"package.install(tools={{{rule!r}: {{'once': True}}}})".replace("package", "runguard"))
    assert lines("--app", app).get("tools", {"found": ""})["found"] == hint


def test_an_app_by_module_and_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    agent(
        "app = App(name='an_app', root_agent=root_agent, plugins=[RunGuardPlugin(mode='shadow', max_usd=1)])",
        "an_app_by_name",
    )
    monkeypatch.chdir("agents")
    found = lines("--app", "an_app_by_name.agent:app")
    assert (found["plugins"]["state"], found["policy"]["state"]) == ("ok", "warning")
    assert "of the app's guard; mode shadow, which decides and records but stops nothing" in found["policy"]["found"]
    assert found["prices"]["found"] == "known for gemini-2.5-flash, claude-sonnet-4-5", (
        "those of agents called as tools, too"
    )
    del sys.modules["an_app_by_name.agent"]
    wrong = lines("--app", "an_app_by_name.agent:helper.name", code=1)["app"]
    assert "is a str; it must be an App, a Runner or an agent" in wrong["found"]


def test_an_app_that_cannot_be_loaded_names_the_line() -> None:
    folder = agent("import nowhere_to_be_found")
    line = lines("--app", folder, code=1)["app"]
    assert "No module named 'nowhere_to_be_found'" in line["found"]
    assert f"agent.py:{len(AGENT.splitlines()) + 1})" in line["found"]


def test_a_wrong_setting_names_the_line_of_the_app_that_gives_it() -> None:
    folder = agent("import runguard\n\nrunguard.install(max_dollars=3)")
    line = lines("--app", folder, code=1)["app"]
    assert "max_dollars: no such setting" in line["found"]
    assert f"agent.py:{len(AGENT.splitlines()) + 3})" in line["found"]


@pytest.mark.parametrize("target", ["agents/absent", "absent", "a/b:c"])
def test_an_app_that_is_not_there(target: str) -> None:
    ran = runguard("doctor", "--app", target)
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert ran.stderr == f"--app {target}: no such folder. Pass an agent folder as for adk web, or module:attribute\n"


def test_a_dead_store_and_one_that_is_not_there_yet() -> None:
    line = lines("--store", "redis://127.0.0.1:1/0", code=1)["store"]
    assert line["found"].startswith("redis://127.0.0.1:1: ")
    assert 'RunGuard allows no paid call (on_outage = "closed")' in line["do"]
    assert "the first run creates it" in lines("--store", "sqlite:///new.db")["store"]["found"]
    assert not Path("new.db").exists()
    assert lines("--store", "sqlite:///no/folder/new.db", code=1)["store"]["state"] == "problem"
    Path("damaged.db").write_text("no database at all")
    damaged = lines("--store", "sqlite:///damaged.db", code=1)["store"]
    assert "Move it away and keep it" in damaged["found"]
    assert damaged["do"].startswith("fix the file, or name another; until then"), "there is nothing to start"


def test_a_store_that_answers_and_the_models_seen_in_it(file_store: str) -> None:
    found = lines("--store", file_store)
    assert found["store"]["found"].endswith(
        "guard.db answers; what it holds survives the end of any process; a power cut loses nothing that was settled"
    )
    assert found["prices"]["found"] == "known for gemini-2.5-flash"


def test_a_wrong_policy_is_one_of_the_lines() -> None:
    Path("runguard.toml").write_text("max_model_cals = 3\n")
    line = lines(code=1)["policy"]
    assert "max_model_cals: no such setting; did you mean 'max_model_calls'?" in line["found"]


def test_an_unknown_price_is_a_problem_where_dollars_are_limited() -> None:
    assert states("--model", "acme-1")["prices"] == "warning"
    Path("runguard.toml").write_text("max_usd = 2\n")
    line = lines("--model", "acme-1", code=1)["prices"]
    assert (line["state"], line["do"]) == ("problem", "runguard prices acme-1 shows what to add")


def test_another_distribution_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip leaves it: a dist-info folder on the path."""
    info = tmp_path / "site" / "runguard-9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: runguard\nVersion: 9.9\n")
    (info / "RECORD").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "site")
    line = lines(code=1)["runguard"]
    assert "another distribution is installed under the name runguard: runguard 9.9" in line["found"]
    assert line["do"].startswith("pip uninstall runguard,")
