"""A fault of the wrapper around a model, before the call begins: the call is made all the same."""

import pytest
from google.adk.agents import LlmAgent

from runguard.adk import RunGuardPlugin, model_calls
from runguard.testing import ScriptedModel, text
from tests.kit.adk_runs import play


async def test_a_fault_before_the_call_begins_does_not_reach_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = RunGuardPlugin()
    agent = LlmAgent(name="writer", model=ScriptedModel(lambda n, request: text("done")))
    monkeypatch.setattr(model_calls, "SURROUNDINGS", None)
    recording = await play(agent, plugins=[plugin])
    assert recording.texts == ["done"]
    assert plugin.guard.guard_errors == 1
