"""Rules about single tools, and the typed exception of a stop, hold on every adapter."""

import pytest

from runguard import ToolRule
from runguard.testing.conformance import AgentSpec, Harness, Reply
from tests.frameworks.adk_harness import AdkHarness
from tests.frameworks.langchain_harness import LangChainHarness
from tests.frameworks.newest import NEWEST
from tests.frameworks.openai_harness import OpenAIAgentsHarness


async def test_a_side_effect_is_made_once(harness: Harness) -> None:
    paid: list[str] = []

    def pay(order: str) -> str:
        paid.append(order)
        return f"paid {order}"

    def script(n: int, _: str) -> Reply:
        return Reply(calls=[("pay", {"order": "7" if n < 3 else "8"})]) if n < 4 else Reply("done")

    guard = harness.guard(tools={"pay": ToolRule(once=True)})
    result = await harness.session(AgentSpec(script, "worker", {"pay": pay}), guard).turn("pay")
    assert result.text == "done"
    assert result.open_calls == []
    assert paid == ["7", "8"]


async def test_a_tool_that_fails_in_several_runs_is_taken_out_of_service(harness: Harness) -> None:
    tries: list[int] = []

    def fetch(page: int) -> str:
        tries.append(page)
        raise ConnectionError("the service is down")

    def script(n: int, _: str) -> Reply:
        return Reply(calls=[("fetch", {"page": n})]) if n % 2 else Reply("done")

    guard = harness.guard(max_tool_failures=2, half_open_reset_seconds=3_600)
    for _ in range(4):
        await harness.session(AgentSpec(script, "worker", {"fetch": fetch}), guard).turn("go")
    assert len(tries) == 2, "the breaker opened after two failures and let no later run try"


@pytest.mark.parametrize(
    "drops",
    [AdkHarness(), LangChainHarness(), OpenAIAgentsHarness(), *(made() for made in NEWEST if made.name == "Strands")],
    ids=lambda drops: drops.name,
)
async def test_an_argument_that_the_tool_never_receives_makes_no_other_call(drops: Harness) -> None:
    asked: list[str] = []

    def search(q: str) -> str:
        asked.append(q)
        return "a moon"

    def script(n: int, _: str) -> Reply:
        return Reply(calls=[("search", {"q": "moon", "x": n})]) if n <= 40 else Reply("done")

    guard = drops.guard()
    await drops.session(AgentSpec(script, "worker", {"search": search}), guard).turn("look")
    assert [trip.rule for trip in guard.trips] == ["repetition"]
    assert len(asked) == 7
