"""An app that classifies its tools' answers for ADK's logging plugins has told RunGuard, too."""

from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.plugins import logging_plugin

from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, assert_stopped, call, text
from tests.kit.adk_runs import play

plugins = pytest.importorskip("google.adk.plugins")
if not hasattr(plugins, "ToolResultClassification"):
    pytest.skip("this ADK has no tool_result_classifier", allow_module_level=True)


def lookup(n: int) -> dict[str, str]:
    """Looks something up."""
    return {"verdict": "nope, gate 7", "error": ""}


def broken(n: int) -> dict[str, Any]:
    """Answers with a field that looks like an error."""
    return {"error": "E7 is the code that was asked for"}


def classify(*, tool: Any, tool_args: Any, tool_context: Any, result: Any) -> Any:
    if tool.name == "lookup":
        return plugins.ToolResultClassification(status="ERROR", error_message="gate")
    return plugins.ToolResultClassification(status="OK")


def bad(*, tool: Any, tool_args: Any, tool_context: Any, result: Any) -> Any:
    raise RuntimeError("out of order")


def worker(tool: Any) -> LlmAgent:
    steps = [call(tool.__name__, n=n) for n in range(12)]
    return LlmAgent(name="worker", model=ScriptedModel([*steps, text("done")]), tools=[tool])


def logs(classifier: Any) -> Any:
    return logging_plugin.LoggingPlugin(tool_result_classifier=classifier)


@pytest.mark.parametrize("guard_first", [True, False])
async def test_what_the_app_calls_a_failure_is_one(guard_first: bool) -> None:
    both = [RunGuardPlugin(), logs(classify)]
    result = await play(worker(lookup), plugins=both if guard_first else both[::-1])
    assert assert_stopped(result, "stall").tool == "lookup"


async def test_what_the_app_calls_ok_is_no_failure() -> None:
    result = await play(worker(broken), plugins=[RunGuardPlugin(), logs(classify)])
    assert result.texts == ["done"]
    assert_stopped(await play(worker(broken), plugins=[RunGuardPlugin()]), "stall")


async def test_a_classifier_that_raises_leaves_the_judgement_to_runguard(caplog: pytest.LogCaptureFixture) -> None:
    result = await play(worker(broken), plugins=[RunGuardPlugin(), logs(bad)])
    assert_stopped(result, "stall")
    assert caplog.text.count("runguard.classifier_failed") == 1
    assert "out of order" not in "".join(r.message for r in caplog.records if r.name == "runguard")
