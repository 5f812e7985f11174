"""Prompts that grow with the history of a session: the warning, and the limit that holds across turns."""

import logging
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService

from runguard.adk import RunGuardPlugin
from runguard.alerts import Alert
from runguard.testing import ScriptedModel, call, text

from .helpers import play


def look_up(key: int) -> dict[str, int]:
    """Look something up."""
    return {"value": key}


def runner_of(agent: Any, plugin: RunGuardPlugin) -> Runner:
    return Runner(app=App(name="app", root_agent=agent, plugins=[plugin]), session_service=InMemorySessionService())


# ---- the warning ----------------------------------------------------------------------------------------------------


async def test_growth_is_logged_as_a_warning_and_sent_to_alerts_once_per_session(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Alert] = []
    plugin = RunGuardPlugin(alerts=heard.append)
    model = ScriptedModel(lambda n, _: call("look_up", key=n) if n % 30 else text("done"), prompt_tokens=lambda n: 1_000 * (1 + n % 30))
    runner = runner_of(LlmAgent(name="researcher", model=model, tools=[look_up]), plugin)
    with caplog.at_level(logging.INFO, logger="runguard"):
        for turn in range(2):
            await play(None, f"turn {turn}", runner=runner)
    assert model.calls == 60
    lines = [record for record in caplog.records if "growth" in record.getMessage()]
    assert [record.levelname for record in lines] == ["WARNING"]
    assert "researcher" in lines[0].getMessage()
    assert plugin.flush()
    (alert,) = [alert for alert in heard if alert.kind == "growth"]
    assert (alert.severity, alert.facts["session"], alert.facts["agent"]) == ("warning", "s1", "researcher")
    assert plugin.trips == []


async def test_each_session_is_warned_of_by_itself() -> None:
    heard: list[Alert] = []
    plugin = RunGuardPlugin(alerts=heard.append)
    for session in ("s1", "s2"):
        model = ScriptedModel(lambda n, _: call("look_up", key=n) if n < 20 else text("done"), prompt_tokens=lambda n: 1_000 * n)
        await play(LlmAgent(name="researcher", model=model, tools=[look_up]), plugins=[plugin], session_id=session)
    assert plugin.flush()
    assert [alert.facts["session"] for alert in heard if alert.kind == "growth"] == ["s1", "s2"]
