"""Search grounding on real ADK: on the bill, and reserved before the call."""

from decimal import Decimal
from typing import Any

from google.adk.models.llm_response import LlmResponse
from google.genai import types

from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, text
from tests.kit.adk_runs import observe, play
from tests.kit.rule_agents import agent

PRICES = {"scripted-1": {"input": 10, "output": 0}}
LIMITS = {"max_output_tokens": 1_000}


def grounded(*queries: str) -> LlmResponse:
    usage = types.GenerateContentResponseUsageMetadata(
        prompt_token_count=1_000, candidates_token_count=10, total_token_count=1_010
    )
    found = types.GroundingMetadata(web_search_queries=list(queries)) if queries else None
    content = types.Content(role="model", parts=[types.Part(text="found")])
    return LlmResponse(content=content, usage_metadata=usage, grounding_metadata=found)


async def bill(**model: Any) -> dict[str, Any]:
    plugin = RunGuardPlugin(prices=PRICES, models={"scripted-*": {**LIMITS, **model}})
    await play(agent(ScriptedModel([grounded("a", "b", "c")])), plugins=[plugin])
    return plugin.spend()


async def test_searches_are_on_the_bill_at_their_price() -> None:
    spend = await bill(search_price="0.014")
    assert (spend["searches"], spend["searches_usd"]) == (3, Decimal("0.042"))
    assert spend["usd"] == Decimal("0.01") + Decimal("0.042")
    assert spend["by_agent"]["worker"]["searches_usd"] == Decimal("0.042")
    assert spend["by_model"]["scripted-1"]["searches"] == 3


async def test_searches_of_one_call_may_cost_as_much_as_one() -> None:
    spend = await bill(search_price="0.035", search_billing="call")
    assert (spend["searches"], spend["searches_usd"], spend["usd"]) == (3, Decimal("0.035"), Decimal("0.045"))


async def test_without_a_price_searches_are_counted_and_not_billed() -> None:
    spend = await bill()
    assert (spend["searches"], spend["searches_usd"], spend["usd"]) == (3, 0, Decimal("0.01"))


async def test_a_budget_refuses_a_call_whose_search_it_cannot_pay() -> None:
    policy: dict[str, Any] = {"prices": PRICES, "tokens": lambda _: 1_000, "max_usd": "0.04"}
    model = ScriptedModel([text("done")])
    seen = await observe(agent(model), models={"scripted-1": {**LIMITS, "search_price": "0.035"}}, **policy)
    assert (model.calls, [trip.rule for trip in seen.plugin.trips]) == (0, ["budget"])
    cheap = ScriptedModel([text("done")])
    seen = await observe(agent(cheap), models={"scripted-1": {**LIMITS, "search_price": "0.03"}}, **policy)
    assert (cheap.calls, seen.plugin.trips) == (1, [])
    assert (seen.plugin.spend()["usd"], seen.plugin.spend()["searches"]) == (Decimal("0.01"), 0)  # it did not search
