"""``budget_notice``: the model is told what is left, at stated shares of its limits."""

from typing import Any

import pytest
from google.adk.agents import LlmAgent

from runguard import Budget, PolicyError, Threshold
from runguard.adk import RunGuardPlugin
from runguard.calls.model_calls import ModelRequest, Permission
from runguard.calls.run import AgentRun
from runguard.calls.tool_calls import ToolUse
from runguard.engine.guard import Guard
from runguard.policy.settings import Policy
from runguard.pricing.rates import Usage
from runguard.testing import ScriptedModel, call, run, text
from tests.kit.examples import each_row

PRICES = {"m": {"input": 0.0, "output": 1.0}}  # dollars per million tokens


async def notices(calls: int, output: int = 1_000, **settings: Any) -> list[str]:
    """What each of so many calls is told, each of ``output`` tokens."""
    models = {"m": {"max_output_tokens": 1_000}}
    guard = Guard(Policy.build(**{"prices": PRICES, "models": models, **settings}))
    agent, told = AgentRun.start(guard, "agent", app="shop", user="ann", session="s"), []
    for number in range(calls):
        reply = await agent.ask(lambda: ModelRequest.of("m", "hello"))
        assert isinstance(reply, Permission)
        told.append(reply.notice)
        use = ToolUse(f"c-{number}", "look", {"n": number})
        reply.settle(Usage(1, output), calls=[use])
        agent.tools.saw(use, f"page {number} of the book about {number * 7}")
    agent.end()
    return told


async def test_each_share_of_a_dollar_limit_is_told_once() -> None:
    told = await notices(10, max_usd="0.010", budget_notice=True)
    assert [bool(text) for text in told] == [False] * 5 + [True] + [False] * 2 + [True] + [False]
    assert told[5] == ("What is left for this work: $0.005 of $0.01. Plan the remaining steps so that it is enough.")
    assert "$0.002 of $0.01" in told[8]


async def test_steps_and_other_limits_stand_in_one_line() -> None:
    told = await notices(6, max_model_calls=10, budgets=[Budget(calls=10, per="user")], budget_notice=[0.4])
    assert told[:4] == [""] * 4
    assert "6 of 10 model calls" in told[4]
    assert "6 calls of 10 calls" in told[4]
    assert told[5] == ""


async def test_without_the_setting_nothing_is_told() -> None:
    assert not any(await notices(9, max_usd="0.010", max_model_calls=10))
    assert not any(await notices(9, max_usd="0.010", budget_notice=True, mode="shadow"))


@each_row("given", [[], [0], [1.5], "often", [True]])
def test_shares_that_are_none_are_rejected(given: Any) -> None:
    with pytest.raises(PolicyError, match="budget_notice"):
        Policy.build(budget_notice=given)


async def test_a_nudge_says_how_much_is_left() -> None:
    thresholds = [Threshold(0.5, action="nudge")]
    told = await notices(6, budgets=[Budget(usd="0.010", thresholds=thresholds)])
    assert told[5].startswith("Little is left of what may be used in this turn: $0.0050 of $0.0100. Finish now")


async def test_the_model_of_an_adk_agent_is_told() -> None:
    def look(page: int) -> str:
        return f"page {page} tells of {page * 31}"

    model = ScriptedModel(lambda n, _: call("look", page=n) if n < 6 else text("done"))
    agent = LlmAgent(name="reader", model=model, tools=[look])
    await run(agent, plugins=[RunGuardPlugin(max_model_calls=6, budget_notice=[0.5])])
    told = [
        part.text
        for request in model.requests
        for part in (request.contents[-1].parts or [])
        if part.text and part.text.startswith("What is left")
    ]
    assert told == ["What is left for this work: 3 of 6 model calls. Plan the remaining steps so that it is enough."]
