"""Seed 002, classes of google-adk: every sample runs with RunGuard installed, does what the seed says, and is left
alone.

What the seed gets wrong about ADK is right here and marked with "seed:". Its three samples for Google Cloud (Vertex AI
sessions and memory) need an account; here the same code runs on the services in memory.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import pytest
from google.adk.agents import LlmAgent, LoopAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import (
    LlmCallsLimitExceededError,
)
from google.adk.agents.run_config import RunConfig
from google.adk.apps.app import App, EventsCompactionConfig
from google.adk.events.ui_widget import UiWidget
from google.adk.memory.in_memory_memory_service import InMemoryMemoryService
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.sessions.base_session_service import GetSessionConfig
from google.adk.sessions.database_session_service import DatabaseSessionService
from google.adk.sessions.state import StateSchemaError
from google.adk.tools.tool_context import ToolContext
from google.genai import types
from pydantic import BaseModel

import runguard
from runguard.core.decision import Decision
from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, run, text
from tests.kit.agents import scripted
from tests.kit.contents import parts
from tests.kit.optional import present


@pytest.fixture(autouse=True)
def left_alone(interventions: list[Decision]) -> Any:
    yield
    assert interventions == []


def message(words: str) -> types.Content:
    return types.Content(role="user", parts=[types.Part(text=words)])


# ---- modes of LlmAgent ----------------------------------------------------------------------------------------------


async def test_a_coordinator_with_a_task_and_a_single_turn_agent(tmp_path: Path) -> None:
    researcher = LlmAgent(
        name="researcher",
        mode="task",
        description="Researches.",
        instruction=(
            "You are a research assistant. When you receive a research task, gather information and call "
            "finish_task when complete."
        ),
        model=ScriptedModel([text("I read."), call("finish_task", result="the moon is far")]),
    )
    formatter = LlmAgent(
        name="formatter",
        mode="single_turn",
        description="Formats.",
        instruction="Format the provided content as structured Markdown.",
        disallow_transfer_to_parent=True,
        disallow_transfer_to_peers=False,
        model=ScriptedModel([text("# The moon is far")]),
    )
    coordinator = LlmAgent(
        name="coordinator",
        mode="chat",
        instruction="Orchestrate research and formatting.",
        model=ScriptedModel(
            [call("researcher", request="the moon"), call("formatter", request="the moon is far"), text("Done.")]
        ),
        sub_agents=[researcher, formatter],
    )
    service = DatabaseSessionService(f"sqlite+aiosqlite:///{tmp_path}/sessions.db")
    runner = Runner(app=App(name="research-app", root_agent=coordinator), session_service=service)
    first = await run(coordinator, "Research the moon.", runner=runner)
    # a task waits for its user after words without finish_task
    second = await run(coordinator, "Go on.", runner=runner)
    assert "I read." in first.texts
    assert second.texts[-1] == "Done."
    assert_calls_answered(second.session)
    await service.db_engine.dispose()


async def test_an_output_schema_and_an_output_key() -> None:
    class AnalysisResult(BaseModel):
        summary: str
        confidence: float
        keywords: list[str]

    analyst = LlmAgent(
        name="analyst",
        instruction="Analyse the text and return structured output.",
        output_schema=AnalysisResult,
        output_key="analysis",
        model=ScriptedModel([text('{"summary": "short", "confidence": 0.9, "keywords": ["moon"]}')]),
    )
    result = await run(analyst, "The moon.")
    assert AnalysisResult.model_validate(result.session.state["analysis"]).confidence == 0.9


async def test_a_callback_that_changes_the_request() -> None:
    def inject_system_info(callback_context: CallbackContext, llm_request: LlmRequest) -> LlmResponse | None:
        if llm_request.config:
            current_time = datetime.now(UTC).isoformat()  # noqa: TID251
            llm_request.config.system_instruction = f"Server time: {current_time}\n" + str(
                llm_request.config.system_instruction or ""
            )
        return None

    model = ScriptedModel([text("It is late.")])
    agent = LlmAgent(
        name="time_aware",
        instruction="Always mention the current server time.",
        model=model,
        before_model_callback=inject_system_info,
    )
    assert (await run(agent)).texts == ["It is late."]
    assert str(model.requests[0].config.system_instruction).startswith("Server time: ")


# ---- cache, state, sessions, memory ---------------------------------------------------------------------------------


async def test_a_state_schema() -> None:
    class AppState(BaseModel):
        user_name: str = ""
        request_count: int = 0
        last_query: str | None = None

    async def update_count(value: str, tool_context: ToolContext) -> str:
        """Count the requests."""
        tool_context.state["request_count"] = int(value) if value.isdigit() else value
        tool_context.state["user:prefs"] = {"theme": "dark"}  # prefixed keys are not checked
        return "Counted."

    def counter(value: str) -> LlmAgent:
        model = ScriptedModel([call("update_count", value=value), text("done")])
        return LlmAgent(name="counter", model=model, tools=[update_count], state_schema=AppState)

    assert (await run(counter("1"))).session.state["request_count"] == 1
    # seed: raised inside the tool; ADK checks when the tool has answered
    with pytest.raises(StateSchemaError, match="request_count"):
        await run(counter("oops"))


async def test_a_database_of_sessions(tmp_path: Path) -> None:
    service = DatabaseSessionService(f"sqlite+aiosqlite:///{tmp_path}/my_sessions.db")
    agent = LlmAgent(name="assistant", model=ScriptedModel([text("hello")]))
    runner = Runner(app=App(name="my-app", root_agent=agent), session_service=service, auto_create_session=True)
    await service.create_session(app_name="my-app", user_id="u1", session_id="s1", state={"onboarded": True})
    async for _ in runner.run_async(user_id="u1", session_id="s1", new_message=message("hi")):
        pass
    session = await service.get_session(
        app_name="my-app", user_id="u1", session_id="s1", config=GetSessionConfig(num_recent_events=1)
    )
    assert session is not None
    assert [event.author for event in session.events] == ["assistant"]
    listed = await service.list_sessions(app_name="my-app", user_id="u1")
    assert [one.id for one in listed.sessions] == ["s1"]  # seed: session_id
    await service.delete_session(app_name="my-app", user_id="u1", session_id="s1")
    assert (await service.list_sessions(app_name="my-app", user_id="u1")).sessions == []
    await service.db_engine.dispose()


async def test_memory_that_a_tool_searches() -> None:
    async def recall_facts(query: str, tool_context: ToolContext) -> dict[str, Any]:
        """Find facts."""
        response = await tool_context.search_memory(query)
        return {"facts": [parts(entry.content)[0].text for entry in response.memories]}

    model = ScriptedModel(lambda n, _: call("recall_facts", query="moon") if n == 2 else text("The moon is far."))
    agent = LlmAgent(
        name="memory_agent", instruction="Use recall_facts before answering.", model=model, tools=[recall_facts]
    )
    memory = InMemoryMemoryService()
    runner = Runner(
        app=App(name="memory-app", root_agent=agent), session_service=InMemorySessionService(), memory_service=memory
    )
    first = await run(agent, "Where is the moon?", runner=runner)
    await memory.add_events_to_memory(app_name="memory-app", user_id="u1", events=first.session.events[-2:])
    second = await run(agent, "Where?", runner=runner, session_id="s2")
    answers = [
        present(part.function_response.response)
        for event in second.events
        for part in parts(event.content)
        if part.function_response
    ]
    assert "The moon is far." in answers[0]["facts"]


# ---- events and actions ---------------------------------------------------------------------------------------------


async def test_tools_that_set_actions() -> None:
    def route_to_specialist(topic: str, tool_context: ToolContext) -> str:
        """Hand over."""
        tool_context.actions.transfer_to_agent = "specialist_agent"
        return f"Routing to specialist for: {topic}"

    def escalate_issue(reason: str, tool_context: ToolContext) -> str:
        """Give up."""
        tool_context.actions.escalate = True
        return f"Escalated: {reason}"

    def show_chart(title: str, tool_context: ToolContext) -> str:
        """Show a chart."""
        widget = UiWidget(id="chart", provider="charts", payload={"title": title})  # seed: iframe_url, title
        tool_context.actions.render_ui_widgets = [*(tool_context.actions.render_ui_widgets or []), widget]
        return "Chart rendered."

    specialist = LlmAgent(
        name="specialist_agent",
        description="Knows.",
        model=ScriptedModel(
            [call("show_chart", title="Analytics"), call("escalate_issue", reason="unknown"), text("I cannot help.")]
        ),
        tools=[show_chart, escalate_issue],
    )
    desk = LlmAgent(
        name="desk",
        model=ScriptedModel([call("route_to_specialist", topic="tax")]),
        tools=[route_to_specialist],
        sub_agents=[specialist],
    )
    result = await run(LoopAgent(name="loop", sub_agents=[desk], max_iterations=5))
    assert [event.actions.transfer_to_agent for event in result.events if event.actions.transfer_to_agent] == [
        "specialist_agent"
    ]
    assert any(event.actions.render_ui_widgets for event in result.events)
    assert any(event.actions.escalate for event in result.events)
    assert scripted(desk).calls == 1, "the escalation ended the loop"


async def test_a_compaction() -> None:
    agent = LlmAgent(name="talker", model=ScriptedModel(lambda n, _: text(f"answer {n}")))
    app = App(
        name="talk",
        root_agent=agent,
        events_compaction_config=EventsCompactionConfig(compaction_interval=2, overlap_size=0),
    )
    runner = Runner(app=app, session_service=InMemorySessionService())
    for words in ("one", "two", "three"):
        result = await run(agent, words, runner=runner)
    compactions = [event.actions.compaction for event in result.session.events if event.actions.compaction]
    assert compactions
    assert compactions[0].start_timestamp <= compactions[0].end_timestamp
    assert compactions[0].compacted_content.parts[0].text.startswith("answer")


# ---- contexts and limits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_stop", ["stop", "raise"])
async def test_a_limit_of_model_calls(on_stop: Literal["stop", "raise"], interventions: list[Decision]) -> None:
    """The limit holds for the whole tree and ends with RunGuard's stop; under "raise" the error is also ADK's."""
    runguard.uninstall()
    runguard.install(on_stop=on_stop)

    def work(n: int) -> dict[str, int]:
        """Do one thing."""
        return {"done": n}

    model = ScriptedModel(lambda n, _: call("work", n=n))
    result = await run(
        LlmAgent(name="doer", model=model, tools=[work]),
        "Do 20 things.",
        run_config=RunConfig(max_llm_calls=10),
        catch=True,
    )
    assert model.calls == 10
    assert assert_stopped(result, "model_calls").limit == 10
    assert isinstance(result.error, LlmCallsLimitExceededError) is (on_stop == "raise")
    assert isinstance(result.error, runguard.RunStoppedError) is (on_stop == "raise")
    assert_calls_answered(result.session)
