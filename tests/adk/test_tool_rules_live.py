"""Rules and prices of tools, tools as workflow nodes, searches, and install()."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from typing import Any

import pytest
from google.adk.agents import LlmAgent, ParallelAgent
from google.adk.events import Event
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions import InMemorySessionService
from google.adk.tools import FunctionTool, LongRunningFunctionTool, ToolContext
from google.adk.tools.agent_tool import AgentTool
from google.adk.workflow import Workflow
from google.genai import types

import runguard
import runguard.testing
from runguard import Budget, ToolRule
from runguard.adk import RunGuardPlugin
from runguard.testing import (
    FakeClock,
    ScriptedModel,
    assert_calls_answered,
    assert_stopped,
    call,
    text,
)
from tests.kit.adk_runs import observe, play, told
from tests.kit.rule_agents import Tool, agent, ask_new
from tests.kit.virtual_time import VirtualLoop, run_virtually

# ---- what is said about a tool --------------------------------------------------------------------------------------


def _slow_job(clock: FakeClock, answers: Callable[[int], Any]) -> Tool:
    def answer(n: int) -> Any:
        clock.advance(200)
        return answers(n)

    return Tool("check_job", answer)


async def test_polling_is_judged_by_time_without_change() -> None:
    clock = FakeClock()
    job, model = _slow_job(clock, lambda n: {"status": "RUNNING"}), ScriptedModel([call("check_job", q=1)])
    seen = await observe(agent(model, job), tools={"check_*": ToolRule(polling=True)}, clock=clock)
    assert seen.rules == [("nudge", "polling"), ("stop", "polling")]
    assert (job.runs, model.calls) == (10, 10)
    assert assert_stopped(seen.result, "polling").observed == 1_800


async def test_polling_that_changes_now_and_then_is_left_alone() -> None:
    clock = FakeClock()
    job = _slow_job(clock, lambda n: {"status": "RUNNING", "step": n // 3})
    seen = await observe(
        agent([call("check_job", q=1)] * 30 + [text("done")], job),
        tools={"check_job": ToolRule(polling=True)},
        clock=clock,
    )
    assert seen.decisions == []


async def test_after_a_write_reading_again_is_no_repetition() -> None:
    def tools() -> list[Tool]:
        return [Tool("read", [{"value": 1}]), Tool("write", [{"ok": True}])]

    script = [step for _ in range(12) for step in (call("read"), call("write"))] + [text("done")]
    assert (await observe(agent(script, *tools()), tools={"write": ToolRule(writes=True)})).decisions == []
    assert assert_stopped((await observe(agent(script, *tools()))).result).rule == "no_news"


async def test_once_is_once_per_session_and_arguments() -> None:
    send, service = Tool("send_mail", [{"sent": True}]), InMemorySessionService()
    plugin = RunGuardPlugin(tools={"send_*": ToolRule(writes=True, once=True)})
    root = agent(
        [
            call("send_mail", q=1),
            call("send_mail", q=1),
            call("send_mail", q=2),
            text("done"),
            call("send_mail", q=1),
            text("done again"),
        ],
        send,
    )
    first = await play(root, plugins=[plugin], session_service=service)
    assert (send.runs, first.texts) == (2, ["done"])
    second = await play(root, "again", plugins=[plugin], session_service=service)
    assert (send.runs, second.texts) == (2, ["done again"])
    other = await play(
        agent([call("send_mail", q=1), text("done")], send), plugins=[plugin], session_service=service, session_id="s2"
    )
    assert (send.runs, other.texts, plugin.trips) == (3, ["done"], [])


async def test_exempt_leaves_a_tool_to_the_limits_alone() -> None:
    think = Tool("think", ["hm"])
    script = [call("think")] * 15 + [text("done")]
    assert (await observe(agent(script, think), tools={"think": ToolRule(exempt=True)})).decisions == []
    limited = await observe(
        agent(script, Tool("think", ["hm"])), tools={"think": ToolRule(exempt=True)}, max_tool_calls=10
    )
    assert_stopped(limited.result, "tool_calls")


async def test_a_rule_may_stand_beside_the_tool() -> None:
    sent: list[int] = []

    @runguard.tool(once=True)
    def send_mail(to: int) -> dict[str, bool]:
        sent.append(to)
        return {"sent": True}

    seen = await observe(agent([call("send_mail", to=1)] * 2 + [call("send_mail", to=2), text("done")], send_mail))
    assert sent == [1, 2]
    assert seen.rules == [("block", "once")]


async def test_the_policys_word_wins_over_the_one_beside_the_tool() -> None:
    @runguard.tool(exempt=True)
    def think() -> str:
        return "hm"

    assert (await observe(agent([call("think")] * 12 + [text("done")], think))).decisions == []
    seen = await observe(agent([call("think")], think), tools={"think": ToolRule(max_calls=2)})
    assert seen.plugin.trips


async def test_identity_and_volatile_arguments() -> None:
    look = Tool("look", ["same"])
    seen = await observe(agent(ask_new("look"), look), tools={"look": ToolRule(volatile=("q",))})
    assert_stopped(seen.result, "repetition")
    assert look.runs == 7


async def test_failed_says_what_a_failure_is() -> None:
    look = Tool("look", lambda n: {"verdict": "nope", "n": 7})
    seen = await observe(agent(ask_new("look"), look), tools={"look": ToolRule(failed={"verdict": ["nope"]})})
    assert_stopped(seen.result, "stall")
    assert (await observe(agent(ask_new("look", 9), Tool("look", [{"verdict": "nope"}])))).decisions == []


# ---- tools as nodes of a workflow -----------------------------------------------------------------------------------


def _tool_circle(tool: Tool, rounds: int) -> Workflow:
    """A Workflow that runs a tool without any agent, round and round."""
    done = 0

    def start(node_input: Any) -> dict[str, int]:
        return {"q": 0}

    def again(node_input: Any) -> Event:
        nonlocal done
        done += 1
        return Event(route="again" if done < rounds else "good", output={"q": done})

    def publish(node_input: Any) -> str:
        return "published"

    fetch = FunctionTool(tool)
    return Workflow(
        name="wf", edges=[("START", start), (start, fetch), (fetch, again), (again, {"again": fetch, "good": publish})]
    )


async def test_a_circle_of_tool_nodes_ends_at_its_limit() -> None:
    class Asked(BasePlugin):
        times = 0

        async def before_tool_callback(self, *, tool: Any, tool_args: Any, tool_context: Any) -> None:
            Asked.times += 1

    await play(_tool_circle(Tool("fetch", lambda n: {"n": n}), 1), plugins=[Asked(name="asked")])
    if not Asked.times:
        pytest.skip("this ADK tells no plugin about tool nodes")
    fetch = Tool("fetch", lambda n: {"n": n})
    seen = await observe(_tool_circle(fetch, 10_000), max_tool_calls=5)
    assert fetch.runs == 5
    assert assert_stopped(seen.result, "tool_calls").tool == "fetch"
    assert len(seen.result.events) < 40


async def test_tool_nodes_are_the_same_with_and_without_the_guard() -> None:
    seen = await observe(_tool_circle(Tool("fetch", lambda n: {"n": n}), 4))
    without = await play(_tool_circle(Tool("fetch", lambda n: {"n": n}), 4))
    assert seen.decisions == []
    assert told(seen.result.events) == told(without.events)


# ---- install --------------------------------------------------------------------------------------------------------


async def test_an_apps_own_plugin_wins_over_install() -> None:
    installed, own = runguard.install(max_model_calls=2), RunGuardPlugin(max_model_calls=4)
    model = ScriptedModel(ask_new("step", 9))
    result = await play(agent(model, Tool("step", lambda n: {"n": n})), plugins=[own])
    assert model.calls == 4
    assert assert_stopped(result).limit == 4
    assert (len(own.trips), installed.trips) == (1, [])


@pytest.mark.parametrize("include_plugins", [True, False])
async def test_install_reaches_every_agent_tool(include_plugins: bool) -> None:
    plugin = runguard.install(max_model_calls=5)
    outer, inner = ScriptedModel([call("inner", request="go")]), ScriptedModel(ask_new("step"))
    called = AgentTool(agent(inner, Tool("step", lambda n: {"n": n}), name="inner"), include_plugins=include_plugins)
    result = await play(agent(outer, called, name="outer"))
    assert (outer.calls, inner.calls) == (1, 4)
    assert_stopped(result, "model_calls")
    assert len(plugin.trips) == 1


async def test_a_tools_context_still_works_under_the_guard() -> None:
    def note(q: int, tool_context: ToolContext) -> dict[str, int]:
        tool_context.state[f"note_{q}"] = q
        return {"noted": q}

    seen = await observe(agent(ask_new("note", 3), note))
    assert {"note_1": 1, "note_2": 2, "note_3": 3}.items() <= seen.result.session.state.items()


# ---- Tools with a price on real ADK: refused before they run, on one bill with the model calls ----------------------


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
