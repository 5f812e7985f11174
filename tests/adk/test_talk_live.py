"""Agents that talk without a step, live on ADK."""

from collections.abc import AsyncGenerator, Callable
from typing import Any

from google.adk.agents import BaseAgent, LlmAgent, LoopAgent, SequentialAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.events import Event, EventActions
from google.adk.workflow import Workflow

from runguard.testing import ScriptedModel, assert_stopped, text
from tests.kit.adk_runs import observe
from tests.kit.agents import scripted

_SAID = ["I think the plan is good", "the plan seems fine to me", "we agree that the plan is good", "yes, a fine plan"]
ROUNDS = 60


class Limit(BaseAgent):
    """Ends a loop in code, so that a test ends without ``max_iterations``."""

    rounds: int = ROUNDS

    async def _run_async_impl(self, ctx: InvocationContext) -> AsyncGenerator[Event, None]:
        self.rounds -= 1
        if self.rounds <= 0:
            yield Event(author=self.name, actions=EventActions(escalate=True))


def speaker(name: str, say: Callable[[int], str] = lambda n: _SAID[n % 4] + f", say {n}", **options: Any) -> LlmAgent:
    return LlmAgent(name=name, model=ScriptedModel(lambda n, _: text(say(n))), **options)


def calls_of(*agents: Any) -> int:
    return sum(agent.model.calls for agent in agents)


async def test_two_agents_that_paraphrase_each_other_are_nudged_and_stopped() -> None:
    a, b = speaker("a"), speaker("b")
    seen = await observe(LoopAgent(name="loop", sub_agents=[a, b, Limit(name="limit")]))
    assert assert_stopped(seen.result).rule == "talk"
    assert seen.rules[0] == ("nudge", "talk")
    assert calls_of(a, b) <= 50
    assert "nothing was done" in str([request.contents for request in [*scripted(a).requests, *scripted(b).requests]])


async def test_a_graph_that_goes_round_in_words_is_stopped() -> None:
    writer, rounds = speaker("writer"), iter(range(1, 100))

    def review(node_input: Any) -> Event:
        return Event(route="again" if next(rounds) < 90 else "end", output="reviewed")

    def end(node_input: Any) -> str:
        return "done"

    edges = [("START", writer), (writer, review), (review, {"again": writer, "end": end})]
    assert assert_stopped((await observe(Workflow(name="wf", edges=edges))).result).rule == "talk"


async def test_a_debate_of_fifteen_rounds_is_not_stopped() -> None:
    a, b = speaker("a"), speaker("b")
    seen = await observe(LoopAgent(name="loop", sub_agents=[a, b, Limit(name="limit", rounds=15)]))
    assert seen.result.trips == []


async def test_a_chain_of_many_agents_is_not_a_talk() -> None:
    seen = await observe(SequentialAgent(name="chain", sub_agents=[speaker(f"a{n}") for n in range(50)]))
    assert seen.rules == []


async def test_state_that_changes_is_a_step() -> None:
    def count(callback_context: CallbackContext) -> None:
        callback_context.state["round"] = callback_context.state.get("round", 0) + 1

    a, b = speaker("a", after_agent_callback=count), speaker("b")
    seen = await observe(LoopAgent(name="loop", sub_agents=[a, b, Limit(name="limit")]))
    assert seen.rules == []
