"""Seed 004, termination conditions: the keywords of the proposal on ADK's own LoopAgent and Runner, after
``runguard.install()``.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import BaseAgent, LlmAgent, LoopAgent
from google.adk.agents.invocation_context import InvocationContext
from google.adk.events import Event, EventActions
from google.adk.runners import InMemoryRunner
from google.adk.sessions import InMemorySessionService
from google.adk.sessions.sqlite_session_service import SqliteSessionService
from google.genai import types

import runguard
from runguard import (
    AndTerminationCondition,
    ExternalTermination,
    FunctionCallTermination,
    MaxIterationsTermination,
    OrTerminationCondition,
    TerminationCondition,
    TextMentionTermination,
    TimeoutTermination,
    TokenUsageTermination,
    termination_reason,
)
from runguard.testing import ScriptedModel, call, run, text
from tests.kit.agents import scripted


@pytest.fixture(autouse=True)
def installed() -> None:
    runguard.install()


def work(n: int) -> dict[str, int]:
    """Work."""
    return {"n": n}


def writer(say: Callable[[int], types.Part] = lambda n: text(f"draft {n}")) -> LlmAgent:
    return LlmAgent(name="writer", model=ScriptedModel(lambda n, _: say(n), latency_s=0.001), tools=[work])


async def test_a_loop_ends_with_an_event_that_escalates_and_says_why() -> None:
    agent = writer(lambda n: text("TERMINATE" if n == 3 else f"draft {n}"))
    loop = LoopAgent(  # type: ignore[call-arg]
        name="loop",
        sub_agents=[agent],
        termination_condition=TextMentionTermination("TERMINATE") | MaxIterationsTermination(10),
    )
    result = await run(loop)
    last = result.events[-1]
    assert scripted(agent).calls == 3
    assert last.actions.escalate is True
    assert last.actions.termination_reason == "Text 'TERMINATE' mentioned"  # type: ignore[attr-defined]


@pytest.mark.parametrize("streamed", [True, False], ids=["run_async", "run"])
async def test_a_runner_takes_a_condition_for_one_run(streamed: bool) -> None:
    loop, condition = LoopAgent(name="loop", sub_agents=[writer()]), MaxIterationsTermination(4)
    runner = InMemoryRunner(agent=loop, app_name="app")
    session = await runner.session_service.create_session(app_name="app", user_id="u")
    asked: dict[str, Any] = {
        "user_id": "u",
        "session_id": session.id,
        "new_message": types.UserContent("go"),
        "termination_condition": condition,
    }
    for _ in range(2):  # conditions reset by themselves between runs
        events = (
            [event async for event in runner.run_async(**asked)]
            if streamed
            else await asyncio.to_thread(lambda: list(runner.run(**asked)))
        )
        # the last event has no content
        texts = [event.content.parts[0].text for event in events if event.content and event.content.parts]
        assert len(texts) == 4
        assert "4" in events[-1].actions.termination_reason  # type: ignore[attr-defined]


ENDS = {
    "MaxIterations": MaxIterationsTermination(5),
    "TextMention": TextMentionTermination("draft 2"),
    "Timeout": TimeoutTermination(0.05),
    "TokenUsage": TokenUsageTermination(max_total=5_000),
    "FunctionCall": FunctionCallTermination("work"),
    "Or": OrTerminationCondition(TextMentionTermination("never said"), MaxIterationsTermination(5)),
    "And": AndTerminationCondition(TextMentionTermination("draft 2"), MaxIterationsTermination(5)),
}


@pytest.mark.parametrize("condition", ENDS.values(), ids=ENDS)
async def test_every_condition_ends_an_endless_loop(condition: TerminationCondition) -> None:
    agent = writer(lambda n: call("work", n=n) if n % 3 == 0 else text(f"draft {n}"))
    result = await run(LoopAgent(name="loop", sub_agents=[agent], termination_condition=condition))  # type: ignore[call-arg]
    assert result.events[-1].actions.termination_reason  # type: ignore[attr-defined]


async def test_an_external_signal_ends_it_too() -> None:
    stop = ExternalTermination()

    def say(n: int) -> types.Part:
        if n == 3:
            stop.set()
        return text(f"draft {n}")

    agent = writer(say)
    result = await run(LoopAgent(name="loop", sub_agents=[agent], termination_condition=stop))  # type: ignore[call-arg]
    assert result.events[-1].actions.termination_reason == "External termination requested"  # type: ignore[attr-defined]
    assert scripted(agent).calls == 3


# ---- event.actions.termination_reason -------------------------------------------------------------------------------


async def test_every_event_has_a_reason_that_can_be_read_and_set() -> None:
    result = await run(writer())
    assert [event.actions.termination_reason for event in result.events] == [None]  # type: ignore[attr-defined]
    actions = EventActions(escalate=True, termination_reason="enough")  # type: ignore[call-arg]
    assert actions.termination_reason == "enough"  # type: ignore[attr-defined]
    assert actions.model_copy().termination_reason == "enough"  # type: ignore[attr-defined]
    actions.termination_reason = None  # type: ignore[attr-defined]
    assert actions.termination_reason is None  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="termination_raeson"):
        EventActions(termination_raeson="enough")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="termination_reason"):
        EventActions(termination_reason=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("service", ["memory", "database"])
async def test_a_stored_event_keeps_escalate_and_the_reason(service: str, tmp_path: Path) -> None:
    sessions = InMemorySessionService() if service == "memory" else SqliteSessionService(str(tmp_path / "adk.db"))
    loop = LoopAgent(name="loop", sub_agents=[writer()], termination_condition=MaxIterationsTermination(3))  # type: ignore[call-arg]
    result = await run(loop, session_service=sessions)
    facts = {"app_name": result.session.app_name, "user_id": result.session.user_id, "session_id": result.session.id}
    stored = await sessions.get_session(**facts)
    assert stored is not None
    last = stored.events[-1]
    reason = result.events[-1].actions.termination_reason  # type: ignore[attr-defined]
    assert "3" in reason
    assert (last.actions.escalate, last.actions.termination_reason) == (True, reason)  # type: ignore[attr-defined]


async def test_the_reason_of_an_own_event_is_stored_and_adk_alone_can_read_it() -> None:
    actions = EventActions(escalate=True, termination_reason="enough")  # type: ignore[call-arg]
    event = Event(author="mine", invocation_id="i", actions=actions)
    text = event.model_dump_json(exclude_none=True)
    again = Event.model_validate_json(text)
    assert (again.actions.escalate, again.actions.termination_reason) == (True, "enough")  # type: ignore[attr-defined]
    assert termination_reason(again) == "enough"
    runguard.uninstall()
    alone = Event.model_validate_json(text)
    assert alone.actions.escalate
    assert not hasattr(alone.actions, "termination_reason")
    with pytest.raises(ValueError, match="termination_reason"):
        EventActions(termination_reason="enough")  # type: ignore[call-arg]


class Saying(BaseAgent):
    """Sets the reason on an event that it has made."""

    async def _run_async_impl(self, ctx: InvocationContext) -> AsyncGenerator[Event, None]:
        event = Event(author=self.name, invocation_id=ctx.invocation_id, content=types.ModelContent("done"))
        event.custom_metadata = {"mine": 1, "runguard": {"notice": "kept"}}
        event.actions.escalate = True
        event.actions.termination_reason = "enough"  # type: ignore[attr-defined]
        yield event


async def test_a_reason_that_is_set_on_an_event_is_stored_with_it(tmp_path: Path) -> None:
    sessions = SqliteSessionService(str(tmp_path / "adk.db"))
    loop = LoopAgent(name="loop", sub_agents=[Saying(name="saying")], max_iterations=3)
    result = await run(loop, session_service=sessions)
    facts = {"app_name": result.session.app_name, "user_id": result.session.user_id, "session_id": result.session.id}
    stored = await sessions.get_session(**facts)
    assert stored is not None
    last = stored.events[-1]
    assert (last.actions.escalate, last.actions.termination_reason) == (True, "enough")  # type: ignore[attr-defined]
    assert last.custom_metadata is not None
    assert last.custom_metadata["mine"] == 1
    assert last.custom_metadata["runguard"]["notice"] == "kept"
