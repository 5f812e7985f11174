"""An agent that asks another agent the same question again and gets the same answer in other words, live on ADK."""

import sys
from pathlib import Path

from google.adk.agents import LlmAgent
from google.adk.tools.agent_tool import AgentTool

from runguard.testing import ScriptedModel, assert_stopped, call, text
from tests.kit.adk_runs import observe

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from reworded import described

QUESTION = "Which office collects the taxes?"


def lead_of(rounds: int) -> LlmAgent:
    expert = LlmAgent(name="expert", model=ScriptedModel(lambda n, _: text(described(n))))
    script = ScriptedModel(lambda n, _: call("expert", request=QUESTION) if n <= rounds else text("the treasury"))
    return LlmAgent(name="lead", model=script, tools=[AgentTool(expert)])


async def test_one_question_to_an_agent_is_nudged_and_then_stopped() -> None:
    lead = lead_of(60)
    seen = await observe(lead)
    assert assert_stopped(seen.result).rule == "no_news"
    assert seen.rules[0] == ("nudge", "no_news")
    assert isinstance(lead.model, ScriptedModel)
    assert lead.model.calls <= 14
    assert "in other words" in str([request.contents for request in lead.model.requests])


async def test_four_opinions_are_left_alone() -> None:
    assert (await observe(lead_of(4))).rules == []
