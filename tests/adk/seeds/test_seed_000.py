"""Seed 000, a cost breaker for ADK: its samples with ``from runguard import ADKCostBreaker`` in place of the class in
the article.

What had to change to run on ADK 2.x is marked with "seed:". ``docs/contributing/seed-table.md`` counts these lines.
"""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from google.adk.agents import LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.agents.run_config import RunConfig
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools.exit_loop_tool import exit_loop
from google.adk.tools.tool_context import ToolContext
from google.genai import types as genai_types

import runguard
from runguard import ADKCostBreaker, BreakerState
from runguard.testing import FakeClock, ScriptedModel, call, run, text, transfer
from tests.kit.contents import parts

# ---- the document pipeline ------------------------------------------------------------------------------------------


class Parser:
    """The external parser of the article: fails in part, or works from the given call on."""

    def __init__(self, works_from: int | None = None) -> None:
        self.calls, self.works_from = 0, works_from

    def parse(self, fragment: str, hint: str = "") -> SimpleNamespace:
        self.calls += 1
        ok = self.works_from is not None and self.calls >= self.works_from
        return SimpleNamespace(ok=ok, error_code="E42", structured_data={"total": 7})


def document_pipeline(breaker: ADKCostBreaker, document_parser_api: Parser) -> SequentialAgent:
    def parse_document_fragment(fragment: str, hint: str = "") -> dict[str, Any]:
        """Call external document parser. Returns structured data or error status."""
        response = document_parser_api.parse(fragment, hint=hint)
        if not response.ok:
            return {
                "status": "partial_parse_error",
                "data": None,
                "retry_hint": response.error_code,
            }
        return {"status": "success", "data": response.structured_data}

    def extract(n: int, request: Any) -> genai_types.Part:
        asked, answered = (
            any(f'"{word}"' in str(request.contents[-1].model_dump_json()) for word in words)
            for words in (("partial_parse_error",), ("success",))
        )
        if answered:
            return call("exit_loop")  # seed: "transfer to 'escalate'"; ADK leaves a loop by this tool
        return (
            text(f"Refined hint {n}.")
            if asked
            else call("parse_document_fragment", fragment="page 1", hint=f"hint {n}")
        )

    extraction_agent = LlmAgent(
        name="extraction_agent",
        model=ScriptedModel(extract),
        instruction="Extract structured data from document fragments.",
        tools=[parse_document_fragment, exit_loop],
    )
    breaker.install_on_agent(extraction_agent)
    classification_agent = LlmAgent(
        name="classification_agent",
        model=ScriptedModel([text("invoice")]),
        instruction="Classify the document type and prepare it for extraction.",
    )  # seed: sub_agents=[extraction_agent]; an agent has one parent on ADK, and the loop is it
    breaker.install_on_agent(classification_agent)
    loop_agent = LoopAgent(
        name="document_loop",
        sub_agents=[extraction_agent],
        max_iterations=8,  # hard ceiling; the breaker fires earlier on non-progress
    )
    return SequentialAgent(
        name="document_pipeline",
        sub_agents=[classification_agent, loop_agent],
    )


async def process_document(pipeline: SequentialAgent, breaker: ADKCostBreaker, document_text: str) -> str:
    result = "NO_OUTPUT"
    session_service = InMemorySessionService()
    session = await session_service.create_session(
        app_name="document_pipeline",
        user_id="batch_processor",
    )
    runner = Runner(
        agent=pipeline,
        app_name="document_pipeline",
        session_service=session_service,
    )
    try:
        async for event in runner.run_async(
            user_id="batch_processor",
            session_id=session.id,
            new_message=genai_types.Content(
                role="user",
                parts=[genai_types.Part(text=document_text)],
            ),
        ):
            # Record token counts for inflation monitoring
            if event.usage_metadata and event.usage_metadata.total_token_count:
                breaker.record_event_tokens(event.usage_metadata.total_token_count)
            if event.is_final_response() and event.content:
                # seed: returned here, which ends the pipeline at the first agent's answer
                result = str(parts(event.content)[0])
    except RuntimeError as e:
        return f"BREAKER_TRIPPED: {e}"
    finally:
        breaker.reset()
    return result


def document_breaker() -> ADKCostBreaker:
    return ADKCostBreaker(
        max_identical_tool_results=3,  # trip after 3 identical parse results
        max_delegation_depth=4,
        max_event_cost_ratio=3.0,
        max_concurrent_agents=15,
    )


async def test_the_document_pipeline_trips_at_the_third_equal_failure() -> None:
    breaker, parser = document_breaker(), Parser()
    result = await process_document(document_pipeline(breaker, parser), breaker, "an invoice")
    assert result.startswith("BREAKER_TRIPPED: stopped by stall of tool 'parse_document_fragment': 3 equal failures")
    assert parser.calls == 3
    assert breaker.state is BreakerState.CLOSED, "reset in the end"


async def test_the_document_pipeline_of_a_parser_that_works_is_left_alone() -> None:
    breaker, parser = document_breaker(), Parser(works_from=3)
    result = await process_document(document_pipeline(breaker, parser), breaker, "an invoice")
    assert "exit_loop" in result
    assert breaker.trips == []


def test_the_synchronous_runner_raises_too() -> None:
    breaker, parser = document_breaker(), Parser()
    service = InMemorySessionService()
    session = asyncio.run(service.create_session(app_name="app", user_id="u"))
    runner = Runner(agent=document_pipeline(breaker, parser), app_name="app", session_service=service)
    with pytest.raises(RuntimeError, match="3 equal failures"):
        list(runner.run(user_id="u", session_id=session.id, new_message=genai_types.UserContent("an invoice")))
    assert parser.calls == 3


# ---- the back-delegation --------------------------------------------------------------------------------------------


def research_pipeline(install: Callable[[LlmAgent], Any], levels: int) -> tuple[LlmAgent, ScriptedModel]:
    def route_to_specialist(task_type: str, task: str, tool_context: ToolContext) -> str:
        """Shared routing tool. If task_type == 'orchestrate', routes to orchestrator."""
        target = "orchestrator" if task_type == "orchestrate" else "research_specialist"
        tool_context.actions.transfer_to_agent = target  # seed: dispatch_to_agent(task_type, task)
        return f"routed to {target}"

    def route(n: int, request: Any) -> genai_types.Part:
        return (
            call("route_to_specialist", task_type="research" if n % 2 else "orchestrate", task=f"level {n}")
            if n < levels
            else text("done")
        )

    model = ScriptedModel(route)
    research_specialist = LlmAgent(
        name="research_specialist",
        model=model,
        instruction="Perform deep research on a topic.",
        tools=[route_to_specialist],
    )
    install(research_specialist)
    orchestrator = LlmAgent(
        name="orchestrator",
        model=model,
        instruction="Coordinate research tasks and delegate to research_specialist.",
        sub_agents=[research_specialist],
        tools=[route_to_specialist],
    )
    install(orchestrator)
    return orchestrator, model


async def run_research_pipeline(orchestrator: LlmAgent, cycle_breaker: ADKCostBreaker, query: str) -> str:
    session_service = InMemorySessionService()
    session = await session_service.create_session(
        app_name="research_pipeline",
        user_id="researcher",
    )
    runner = Runner(
        agent=orchestrator,
        app_name="research_pipeline",
        session_service=session_service,
    )
    try:
        async for event in runner.run_async(
            user_id="researcher",
            session_id=session.id,
            new_message=genai_types.Content(
                role="user",
                parts=[genai_types.Part(text=query)],
            ),
        ):
            if event.is_final_response():
                return parts(event.content)[0].text or ""
    except RuntimeError as e:
        return f"CYCLE_DETECTED: {e}"
    finally:
        cycle_breaker.reset()
    return "NO_OUTPUT"


async def test_the_back_delegation_trips_before_the_orchestrator_is_asked_again() -> None:
    cycle_breaker = ADKCostBreaker(max_delegation_depth=3, max_reentries=1)  # seed: always trips at the first re-entry
    orchestrator, model = research_pipeline(cycle_breaker.install_on_agent, levels=6)
    assert (await run_research_pipeline(orchestrator, cycle_breaker, "research it")).startswith(
        "CYCLE_DETECTED: stopped by reentry"
    )
    assert model.calls == 2


async def test_an_endless_back_delegation_trips_without_the_setting_too() -> None:
    cycle_breaker = ADKCostBreaker(max_delegation_depth=3)
    orchestrator, model = research_pipeline(cycle_breaker.install_on_agent, levels=500)
    assert (await run_research_pipeline(orchestrator, cycle_breaker, "research it")).startswith(
        "CYCLE_DETECTED: stopped by handoff"
    )
    assert model.calls == 11


async def test_four_callbacks_wired_by_hand_refuse_tools_and_not_the_model() -> None:
    breaker, parser = document_breaker(), Parser()

    def parse_document_fragment(hint: str) -> dict[str, Any]:
        """Parse."""
        parser.parse("page 1", hint)
        return {"status": "partial_parse_error"}

    model = ScriptedModel(lambda n, _: call("parse_document_fragment", hint=f"{n}"))
    agent = LlmAgent(
        name="extraction_agent",
        model=model,
        tools=[parse_document_fragment],
        before_tool_callback=breaker.before_tool_callback,
        after_tool_callback=breaker.after_tool_callback,
        before_agent_callback=breaker.before_agent_callback,
        after_agent_callback=breaker.after_agent_callback,
    )
    await run(agent, catch=True, run_config=RunConfig(max_llm_calls=20))
    assert (parser.calls, model.calls) == (3, 20)


# ---- inflation ------------------------------------------------------------------------------------------------------


def test_recorded_tokens_trip_at_the_ratio_of_the_article() -> None:
    breaker = ADKCostBreaker(max_event_cost_ratio=3.0, cost_baseline_events=5)
    for count in [800] * 5 + [2_400] * 4:
        breaker.record_event_tokens(count)
    with pytest.raises(RuntimeError, match=r"3\.0 times"):
        breaker.record_event_tokens(2_400)
    assert breaker.state is BreakerState.OPEN
    breaker.reset()
    assert (breaker.state, breaker.trip_reason) == (BreakerState.CLOSED, None)


async def test_the_soft_alert(capsys: pytest.CaptureFixture[str]) -> None:
    """seed: replaces ``_trip`` and slices ``_event_token_counts``; here ``mode="shadow"`` and ``growth_ratio``."""

    def look_up(key: str) -> dict[str, str]:
        """Look something up."""
        return {"value": key}

    model = ScriptedModel(
        lambda n, _: call("look_up", key=str(n)) if n < 20 else text("done"), prompt_tokens=lambda n: 400 * n
    )
    inflation_breaker = ADKCostBreaker(mode="shadow", on_trip=lambda reason: print(f"COST_ALERT: {reason}"))
    agent = inflation_breaker.install_on_agent(LlmAgent(name="researcher", model=model, tools=[look_up]))
    ratios = []
    for event in (await run(agent)).events:
        if event.usage_metadata and event.usage_metadata.total_token_count:
            inflation_breaker.record_event_tokens(event.usage_metadata.total_token_count)
            if inflation_breaker.growth_ratio is not None:
                ratios.append(inflation_breaker.growth_ratio)
    inflation_breaker._plugin.flush()
    assert model.calls == 20, "nothing was stopped"
    assert ratios == sorted(ratios)
    assert ratios[-1] > 3
    assert "COST_ALERT: " in capsys.readouterr().out


# ---- runguard.install() ---------------------------------------------------------------------------------------------


def install(alerts: list[str], **more: Any) -> Any:
    return runguard.install(
        max_identical_tool_results=3,
        max_delegation_depth=5,
        max_event_cost_ratio=3.0,
        max_concurrent_agents=20,
        on_trip=lambda reason: alerts.append(f"ADK breaker tripped: {reason}"),
        **more,
    )


async def test_install_guards_a_pipeline_without_a_change() -> None:
    alerts: list[str] = []
    plugin, parser = install(alerts), Parser()
    unguarded = SimpleNamespace(install_on_agent=lambda agent: agent)
    recording = await run(document_pipeline(unguarded, parser), "an invoice")  # type: ignore[arg-type]
    plugin.flush()
    assert parser.calls == 3
    assert recording.trips[0].rule == "stall"
    assert len(alerts) == 1
    assert alerts[0].startswith("ADK breaker tripped: stopped by stall")


async def test_install_refuses_the_surplus_of_an_over_spawn() -> None:
    install([])
    model = ScriptedModel([text("done")], latency_s=0.01)
    recording = await run(
        ParallelAgent(name="workers", sub_agents=[LlmAgent(name=f"item_{n}", model=model) for n in range(400)])
    )
    assert model.calls == 20
    assert recording.trips[0].rule == "fan_out"


async def test_a_normalizer_leaves_out_what_varies() -> None:
    requests = iter(range(1_000))

    def parse_document_fragment(fragment: str) -> dict[str, Any]:
        """Parse."""
        return {"status": "partial_parse_error", "request_id": next(requests)}

    install(
        [],
        tool_result_normalizer={"parse_document_fragment": lambda r: {k: v for k, v in r.items() if k != "request_id"}},
    )
    model = ScriptedModel(lambda n, _: call("parse_document_fragment", fragment=f"page {n}"))
    recording = await run(LlmAgent(name="extraction_agent", model=model, tools=[parse_document_fragment]))
    assert model.calls == 3
    assert recording.trips[0].rule == "stall"


async def test_existing_callbacks_stay() -> None:
    install([])
    seen: list[str] = []

    def look(n: int) -> dict[str, int]:
        """Look."""
        return {"n": n}

    agent = LlmAgent(
        name="worker",
        model=ScriptedModel([call("look", n=1), text("done")]),
        tools=[look],
        before_tool_callback=lambda tool, args, tool_context: seen.append("before tool"),
        after_tool_callback=lambda tool, args, tool_context, tool_response: seen.append("after tool"),
        before_agent_callback=lambda callback_context: seen.append("before agent"),
        after_agent_callback=lambda callback_context: seen.append("after agent"),
    )
    await run(agent)
    assert seen == ["before agent", "before tool", "after tool", "after agent"]


async def test_depth_counts_what_is_nested_and_not_what_follows() -> None:
    """Twenty specialists, one after the other, are two agents deep."""
    install([])
    specialists = [
        LlmAgent(
            name=f"specialist_{n}", mode="single_turn", description="Helps.", model=ScriptedModel([text(f"part {n}")])
        )
        for n in range(20)
    ]
    script = [call(agent.name, request="help") for agent in specialists]
    recording = await run(
        LlmAgent(name="orchestrator", model=ScriptedModel([*script, text("done")]), sub_agents=specialists)
    )
    assert recording.texts[-1] == "done"
    assert recording.trips == []


async def test_a_return_to_the_parent_is_not_a_cycle_by_default() -> None:
    """seed: trips at the first re-entry; on ADK this is how a sub-agent returns to its parent."""
    install([])
    helper = LlmAgent(name="helper", description="Helps.", model=ScriptedModel([transfer("desk")]))
    desk = LlmAgent(name="desk", model=ScriptedModel([transfer("helper"), text("done")]), sub_agents=[helper])
    assert (await run(desk)).texts == ["done"]


async def test_an_open_breaker_refuses_the_document_until_the_reset_time() -> None:
    clock = FakeClock()
    breaker, parser = ADKCostBreaker(half_open_reset_seconds=60, clock=clock), Parser()
    pipeline = document_pipeline(breaker, parser)
    for session in range(15):  # the article's re-submissions
        await run(pipeline, "an invoice", session_id=f"s{session}", catch=True)
    assert parser.calls == 3
    states = [breaker.state]
    clock.advance(61)
    states.append(breaker.state)
    assert states == [BreakerState.OPEN, BreakerState.HALF_OPEN]
