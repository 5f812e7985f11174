"""Tools with a price on real ADK: refused before they run, on one bill with the model calls."""

import asyncio
from contextlib import suppress
from decimal import Decimal
from typing import Any

import pytest
from google.adk.agents import LlmAgent, ParallelAgent
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.tools import FunctionTool, LongRunningFunctionTool
from google.adk.tools.agent_tool import AgentTool
from google.genai import types

import runguard
import runguard.testing
from runguard import Budget, ToolRule
from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, assert_calls_answered, call, text
from tests.kit.adk_runs import observe, play
from tests.kit.rule_agents import Tool, agent
from tests.kit.virtual_time import VirtualLoop, run_virtually

FREE = {"scripted-1": {"input": 0, "output": 0}}
SEARCH = {"search": ToolRule(price="0.008")}


def searches(times: int) -> list[Any]:
    return [*[call("search", q=n) for n in range(times)], text("done")]


async def test_the_price_is_on_the_bill_beside_the_models() -> None:
    search = Tool("search", lambda n: {"hit": n})
    model = ScriptedModel(searches(3), prompt_tokens=100, output_tokens=10)
    plugin = RunGuardPlugin(tools=SEARCH, prices={"scripted-1": {"input": 10, "output": 100}})
    await play(agent(model, search), plugins=[plugin])
    spend = plugin.spend()
    assert spend["usd"] == Decimal("0.024") + 4 * Decimal("0.002")
    assert (spend["calls"], spend["paid_tool_calls"], spend["tools_usd"]) == (4, 3, Decimal("0.024"))
    assert spend["by_tool"]["search"]["usd"] == Decimal("0.024")
    assert spend["by_tool"]["search"]["calls"] == 0
    assert spend["by_model"]["scripted-1"]["usd"] == Decimal("0.008")
    assert spend["by_agent"]["worker"]["usd"] == Decimal("0.032")
    assert spend["reserved_usd"] == 0


async def test_a_budget_refuses_the_tool_before_it_runs() -> None:
    search = Tool("search", lambda n: {"hit": n})
    model = ScriptedModel(searches(3))
    seen = await observe(agent(model, search), tools=SEARCH, prices=FREE, max_usd="0.016")
    assert search.runs == 2
    assert [rule for rule in seen.rules if rule[0] != "warn"] == [("block", "budget")]
    assert seen.plugin.spend()["usd"] == Decimal("0.016")
    assert seen.plugin.trips == []
    assert model.calls == 4  # the model could finish
    (refused,) = [
        answer
        for event in seen.result.events
        for answer in event.get_function_responses()
        if "does not pay for 'search'" in str(answer.response)
    ]
    assert refused.name == "search"
    assert_calls_answered(seen.result)


async def test_asking_again_in_a_later_response_stops() -> None:
    search = Tool("search", lambda n: {"hit": n})
    seen = await observe(agent(ScriptedModel(searches(9)), search), tools=SEARCH, prices=FREE, max_usd="0.008")
    assert search.runs == 1
    assert [rule for rule in seen.rules if rule[0] != "warn"] == [("block", "budget"), ("stop", "budget")]
    (trip,) = seen.plugin.trips
    assert (trip.rule, trip.tool, trip.limit, trip.spent_usd) == (
        "budget",
        "search",
        Decimal("0.008"),
        Decimal("0.008"),
    )


async def test_in_shadow_mode_the_call_is_made_and_reported() -> None:
    search = Tool("search", lambda n: {"hit": n})
    seen = await observe(
        agent(ScriptedModel(searches(3)), search), tools=SEARCH, prices=FREE, max_usd="0.016", mode="shadow"
    )
    assert search.runs == 3
    assert ("block", "budget") in seen.rules
    assert seen.plugin.spend()["usd"] == Decimal("0.024")


async def test_a_function_is_reserved_at_its_bound_and_settled_at_its_value() -> None:
    search = Tool("search", lambda n: {"credits": n})
    rule = ToolRule(price=lambda args, answer: answer["credits"] * 0.001, price_bound=lambda args: "0.01")
    seen = await observe(
        agent(ScriptedModel(searches(4)), search), tools={"search": rule}, prices=FREE, max_usd="0.0125"
    )
    assert search.runs == 2  # 0.003 is spent, and the bound of 0.01 does not fit beside it
    assert seen.plugin.spend()["usd"] == Decimal("0.003")


async def test_a_tool_that_raised_is_paid_unless_its_function_says_otherwise() -> None:
    def failing() -> Tool:
        return Tool("search", [ValueError("backend"), {"ok": True}])

    paid = RunGuardPlugin(tools=SEARCH)
    with pytest.raises(ValueError, match="backend"):
        await play(agent(searches(1), failing()), plugins=[paid])
    assert paid.spend()["usd"] == Decimal("0.008")
    free = ToolRule(price=lambda args, answer: 0 if isinstance(answer, Exception) else 1, price_bound=1)
    unpaid = RunGuardPlugin(tools={"search": free})
    with pytest.raises(ValueError, match="backend"):
        await play(agent(searches(1), failing()), plugins=[unpaid])
    assert unpaid.spend()["usd"] == 0
    assert unpaid.spend()["paid_tool_calls"] == 1


async def test_refused_and_unexecuted_calls_cost_nothing() -> None:
    class Cache(BasePlugin):
        async def before_tool_callback(self, **_: Any) -> dict[str, Any]:
            return {"cached": True}

    search = Tool("search", lambda n: {"hit": n})
    plugin = RunGuardPlugin(tools=SEARCH)
    await play(agent(searches(2), search), plugins=[plugin, Cache("cache")])
    assert (search.runs, plugin.spend()["usd"], plugin.spend()["reserved_usd"]) == (0, 0, 0)

    mail = Tool("send", [{"sent": True}])
    plugin = RunGuardPlugin(tools={"send": ToolRule(price=1, once=True)})
    await play(agent([call("send", q=1), call("send", q=1), text("done")], mail), plugins=[plugin])
    assert (mail.runs, plugin.spend()["usd"]) == (1, 1)

    plugin = RunGuardPlugin(tools={"*": ToolRule(price=1)})  # the model invents a tool
    with suppress(ValueError):  # older versions of ADK raise it
        await play(agent([call("nothing_like_it"), text("done")], mail), plugins=[plugin])
    assert plugin.spend()["usd"] == 0


async def test_a_call_that_waits_for_confirmation_is_not_paid() -> None:
    search = Tool("search", [{"hit": 1}])
    plugin = RunGuardPlugin(tools=SEARCH)
    await play(agent([call("search", q=1)], FunctionTool(search, require_confirmation=True)), plugins=[plugin])
    assert (search.runs, plugin.spend()["usd"], plugin.spend()["reserved_usd"]) == (0, 0, 0)


async def test_a_long_running_tool_is_paid_when_it_has_started() -> None:
    def rent() -> dict[str, Any]:
        """Rents a machine."""
        return {"status": "pending"}

    plugin = RunGuardPlugin(tools={"rent": ToolRule(price=2)})
    await play(agent([call("rent"), text("rented")], LongRunningFunctionTool(rent)), plugins=[plugin])
    assert plugin.spend()["usd"] == 2


async def test_parallel_branches_never_pass_the_cap() -> None:
    done: list[int] = []

    async def scrape(q: int) -> dict[str, Any]:
        """Scrapes."""
        done.append(q)
        await asyncio.sleep(0.001)
        return {"page": q}

    def branch(n: int) -> LlmAgent:
        return LlmAgent(name=f"w{n}", model=ScriptedModel([call("scrape", q=n), text("done")]), tools=[scrape])

    team = ParallelAgent(name="team", sub_agents=[branch(n) for n in range(40)])
    plugin = RunGuardPlugin(tools={"scrape": ToolRule(price="0.01")}, max_usd="0.10", prices=FREE, max_wait_seconds=2)
    await play(team, plugins=[plugin])
    assert len(done) == 10
    assert plugin.spend()["usd"] == Decimal("0.1")


async def test_a_price_beside_the_tool_and_a_budget_of_the_tool() -> None:
    @runguard.tool(price=0.25)
    def scan(q: int) -> dict[str, int]:
        """Scans."""
        return {"q": q}

    plugin = RunGuardPlugin(budgets=[Budget(usd=0.5, per="tool:scan", window="1d")], prices=FREE)
    root = agent([call("scan", q=1), call("scan", q=2), call("scan", q=3), text("done")], scan)
    await play(root, plugins=[plugin])
    assert plugin.spend()["by_tool"]["scan"]["usd"] == Decimal("0.5")
    (status,) = plugin.budgets()
    assert (status.spent, status.limit) == (Decimal("0.5"), Decimal("0.5"))


def test_an_agent_in_a_paid_tool_does_not_wait_for_the_money_that_is_held_for_it() -> None:
    loop = VirtualLoop()
    inner = LlmAgent(name="inner", model=ScriptedModel(lambda n, _: text("found")))
    outer = LlmAgent(
        name="outer", model=ScriptedModel([call("inner", request="q"), text("done")]), tools=[AgentTool(inner)]
    )
    plugin = RunGuardPlugin(
        tools={"inner": ToolRule(price="0.4")},
        prices={"scripted-1": {"input": 0, "output": 1}},
        models={"scripted-1": {"max_output_tokens": 200_000}},
        min_output_tokens=150_000,
        budgets=[Budget(usd="0.5", per="app", window="1h", on_exhausted="wait")],
        max_wait_seconds=60,
        clock=loop.clock,
    )
    result = run_virtually(loop, runguard.testing.run(outer, plugins=[plugin]))
    assert [trip.rule for trip in result.trips] == ["budget"]
    assert loop.passed < 1, "nothing that it could wait for comes back"


# ---- Search grounding on real ADK: on the bill, and reserved before the call


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
