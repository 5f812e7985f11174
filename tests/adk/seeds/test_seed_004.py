"""Seed 004, termination conditions: the keywords of the proposal on ADK's own LoopAgent and Runner, after
``runguard.install()``.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from google.adk.agents import LlmAgent, LoopAgent
from google.adk.runners import InMemoryRunner
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


def test_the_operators_build_the_composites() -> None:
    one, other = MaxIterationsTermination(5), TextMentionTermination("x")
    assert isinstance(one | other, OrTerminationCondition)
    assert isinstance(one & other, AndTerminationCondition)
