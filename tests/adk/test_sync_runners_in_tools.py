"""A sync tool that runs an agent with ``Runner.run``: ADK starts a thread for it, without the context of the tool."""

from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.runners import InMemoryRunner
from google.genai import types

import runguard
from runguard import RunStoppedError
from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, call, text
from tests.kit.adk_runs import play

GUARDS = pytest.mark.parametrize("guard", ["plugin", "install"])
MESSAGE = types.Content(role="user", parts=[types.Part(text="go")])


async def orchestrator(inner: Any, calls: int, raised: list[RunStoppedError] | None = None) -> LlmAgent:
    """An agent whose sync tool asks another agent, in a Runner of its own without plugins."""
    raised = [] if raised is None else raised
    runner = InMemoryRunner(agent=LlmAgent(name="adviser", model=inner), app_name="inner")
    for number in range(calls):
        await runner.session_service.create_session(app_name="inner", user_id="u", session_id=f"s{number}")
    asked = iter(range(calls))

    def consult(topic: str) -> dict[str, str]:
        """Ask the adviser."""
        try:
            events = list(runner.run(user_id="u", session_id=f"s{next(asked)}", new_message=MESSAGE))
        except RunStoppedError as error:
            raised.append(error)
            raise
        words = [part.text for event in events for part in (event.content.parts if event.content else None) or ()]
        return {"advice": " ".join(word for word in words if word)}

    script = ScriptedModel([*(call("consult", topic=f"t{n}") for n in range(calls)), text("done")])
    return LlmAgent(name="orchestrator", model=script, tools=[consult])


def plugins_of(guard: str, **policy: Any) -> tuple[RunGuardPlugin, list[RunGuardPlugin]]:
    if guard == "install":
        return runguard.install(**policy), []
    plugin = RunGuardPlugin(**policy)
    return plugin, [plugin]


@GUARDS
async def test_its_model_calls_are_on_the_account_of_the_run(guard: str) -> None:
    plugin, plugins = plugins_of(guard)
    recording = await play(await orchestrator(ScriptedModel([text("sell")] * 2), calls=2), plugins=plugins)
    assert recording.texts[-1] == "done"
    assert plugin.spend()["calls"] == 5
    assert plugin.snapshot()["runs"] == []


@GUARDS
async def test_a_limit_stops_it_before_its_next_model_call(guard: str) -> None:
    plugin, plugins = plugins_of(guard, max_model_calls=3)
    inner = ScriptedModel([text("sell")] * 5)
    await play(await orchestrator(inner, calls=5), plugins=plugins)
    assert [trip.rule for trip in plugin.trips] == ["model_calls"]
    assert plugin.spend()["calls"] == 3


async def test_the_error_of_a_stop_is_raised_to_the_caller_of_the_run_and_not_to_the_tool() -> None:
    plugin = runguard.install(max_model_calls=3, on_stop="raise")
    raised: list[Any] = []
    with pytest.raises(RunStoppedError):
        await play(await orchestrator(ScriptedModel([text("sell")] * 5), 5, raised))
    assert len(plugin.trips) == 1
    assert raised == []
