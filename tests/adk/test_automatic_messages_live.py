"""A loop whose turns are started by a program, on ADK."""

from typing import Any

import pytest
from google.adk.agents import LlmAgent, RunConfig
from google.adk.runners import InMemoryRunner
from google.genai import types

from runguard import RunGuardPlugin
from runguard.testing import ScriptedModel, call, text


async def turns(message: Any, count: int, config: RunConfig | None = None) -> int:
    """How many calls of a failing tool are made in so many turns."""
    made: list[str] = []

    def parse(fragment: str) -> dict[str, Any]:
        made.append(fragment)
        return {"status": "partial_parse_error"}

    def speak(number: int, _: Any) -> types.Part:
        return call("parse", fragment=f"part-{number}") if number % 2 else text("Shall I go on?")

    agent = LlmAgent(name="worker", model=ScriptedModel(speak), tools=[parse])
    runner = InMemoryRunner(agent=agent, app_name="app", plugins=[RunGuardPlugin()])
    session = await runner.session_service.create_session(app_name="app", user_id="u")
    for n in range(count):
        said = types.Content(role="user", parts=[types.Part(text=message(n))])
        async for _ in runner.run_async(
            user_id="u", session_id=session.id, new_message=said, run_config=config or RunConfig()
        ):
            pass
    return len(made)


async def test_please_proceed_starts_no_count_anew() -> None:
    assert await turns(lambda n: "Please proceed to the next step.", 14) < 9


async def test_the_messages_of_a_person_do() -> None:
    assert await turns(lambda n: "any news?", 14) == 14


@pytest.mark.parametrize("automatic", [True, False])
async def test_an_app_marks_its_own_messages(automatic: bool) -> None:
    config = RunConfig(custom_metadata={"runguard": {"automatic": automatic}})
    made = await turns(lambda n: f"text about {'abcdefghijklmn'[n] * 4}", 14, config)
    assert (made < 9) is automatic
