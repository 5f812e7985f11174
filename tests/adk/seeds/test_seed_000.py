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
from google.adk.apps import App
from google.adk.code_executors.base_code_executor import BaseCodeExecutor
from google.adk.code_executors.code_execution_utils import CodeExecutionResult
from google.adk.runners import InMemoryRunner, Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools.agent_tool import AgentTool
from google.adk.tools.exit_loop_tool import exit_loop
from google.adk.tools.tool_context import ToolContext
from google.genai import types as genai_types

import runguard
from runguard import ADKCostBreaker, BreakerState
from runguard.adk import GuardedLlm, RunGuardPlugin
from runguard.testing import FakeClock, ScriptedModel, assert_calls_answered, call, run, text
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


# ---- equal answers of one tool --------------------------------------------------------------------------------------


OTHER_WORDS = {
    "low confidence": lambda n: {"status": "low confidence"},
    "the same page of hits": lambda n: {"hits": ["a", "b", "c"], "page": 1},
    "a text": lambda n: "See the manual.",
    "an empty list": lambda n: [],
    "hits with a status": lambda n: {"status": "ok", "hits": [{"id": 17}, {"id": 4}]},
    "no hits with a status": lambda n: {"status": "ok", "hits": []},
    "times differ": lambda n: {"verdict": "unclear", "at": f"2026-01-01T10:{n:02}:00Z"},
}


async def ask_forty_questions(answers: Callable[[int], Any], **settings: Any) -> tuple[ScriptedModel, list[Any]]:
    made: list[str] = []

    def search(query: str) -> Any:
        """Search."""
        made.append(query)
        return answers(len(made))

    model = ScriptedModel(lambda n, _: call("search", query=f"question {n}") if n <= 40 else text("done"))
    recording = await run(
        LlmAgent(name="a", model=model, tools=[search]),
        plugins=[RunGuardPlugin(max_identical_tool_results=3, **settings)],
    )
    return model, recording.trips


@pytest.mark.parametrize("answers", OTHER_WORDS.values(), ids=OTHER_WORDS)
async def test_equal_answers_to_ever_new_questions_count_under_an_explicit_limit(answers: Any) -> None:
    model, trips = await ask_forty_questions(answers)
    assert [(trip.rule, trip.observed) for trip in trips] == [("stall", 3)]
    assert model.calls == 3


ACKNOWLEDGED = [
    {"ok": True},
    {"status": "ok"},
    {"status": "success", "rows": 12},
    {"inserted": 1},
    "Saved.",
    True,
    {"result": {"status": "done", "error": None}},
    {"content": [{"type": "text", "text": '{"status": "ok"}'}], "isError": False},
    [{"ok": True}, {"ok": True}],
]


@pytest.mark.parametrize("answer", ACKNOWLEDGED, ids=str)
async def test_acknowledgements_are_free_under_an_explicit_limit(answer: Any) -> None:
    model, trips = await ask_forty_questions(lambda n: answer)
    assert (model.calls, trips) == (41, [])


class Sandbox(BaseCodeExecutor):
    """Prints the same whatever it runs."""

    def execute_code(self, invocation_context: Any, code_execution_input: Any) -> CodeExecutionResult:
        return CodeExecutionResult(stdout="no rows")


@pytest.mark.parametrize(("settings", "calls"), [({"max_identical_tool_results": 3}, 3), ({}, 9)], ids=["set", "unset"])
async def test_equal_code_executions_count_under_an_explicit_limit(settings: dict[str, Any], calls: int) -> None:
    model = ScriptedModel(
        lambda n, _: text(f"```tool_code\nprint(query({n}))\n```") if n <= 8 else text("nothing found")
    )
    agent = LlmAgent(name="a", model=model, code_executor=Sandbox())
    plugin = RunGuardPlugin(**settings)
    runner = InMemoryRunner(app=App(name="app", root_agent=agent, plugins=[plugin]))  # it has a store for artifacts
    session = await runner.session_service.create_session(app_name="app", user_id="u")
    message = genai_types.UserContent("How many?")
    async for _ in runner.run_async(user_id="u", session_id=session.id, new_message=message):
        pass
    assert model.calls == calls
    assert [(trip.rule, trip.tool, trip.observed) for trip in plugin.trips] == (
        [("stall", "code_execution", 3)] if settings else []
    )


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
    cycle_breaker = ADKCostBreaker(max_delegation_depth=3)
    orchestrator, model = research_pipeline(cycle_breaker.install_on_agent, levels=6)
    assert (await run_research_pipeline(orchestrator, cycle_breaker, "research it")).startswith(
        "CYCLE_DETECTED: stopped by reentry"
    )
    assert model.calls == 2


# ---- the four callbacks of the article, wired by hand ---------------------------------------------------------------


def wired_by_hand(breaker: ADKCostBreaker, agent: LlmAgent) -> LlmAgent:
    agent.before_tool_callback = breaker.before_tool_callback
    agent.after_tool_callback = breaker.after_tool_callback
    agent.before_agent_callback = breaker.before_agent_callback
    agent.after_agent_callback = breaker.after_agent_callback
    return agent


def stuck_agent(name: str = "extraction_agent") -> tuple[LlmAgent, ScriptedModel]:
    def parse_document_fragment(hint: str) -> dict[str, Any]:
        """Parse."""
        return {"status": "partial_parse_error"}

    model = ScriptedModel(lambda n, _: call("parse_document_fragment", hint=f"{n}"))
    return LlmAgent(name=name, model=model, tools=[parse_document_fragment]), model


SHAPES: dict[str, Callable[[LlmAgent], Any]] = {
    "alone": lambda agent: agent,
    "loop": lambda agent: LoopAgent(name="loop", sub_agents=[agent]),
    "parallel": lambda agent: ParallelAgent(name="all", sub_agents=[agent]),
    "as a tool": lambda agent: LlmAgent(
        name="root", model=ScriptedModel(lambda n, _: call(agent.name, request="go")), tools=[AgentTool(agent)]
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("on_stop", ["raise", "stop"])
async def test_four_callbacks_wired_by_hand_end_the_run_that_trips(shape: str, on_stop: Any) -> None:
    breaker = ADKCostBreaker(on_stop=on_stop)
    agent, model = stuck_agent()
    root = SHAPES[shape](wired_by_hand(breaker, agent))
    if root.name == "root":
        wired_by_hand(breaker, root)
    before = [getattr(agent, name) for name in LlmAgent.model_fields if name.endswith("callback")]
    recording = await run(root, catch=True, run_config=RunConfig(max_llm_calls=30))
    assert model.calls == 3
    assert breaker.trips[0].rule == "stall"
    assert type(recording.error) is (runguard.LoopDetectedError if on_stop == "raise" else type(None))
    assert recording.events[-1].error_code == "RUNGUARD_STOP" or on_stop == "raise"
    assert assert_calls_answered(recording.session) == (1 if shape == "as a tool" else 3)
    assert before == [getattr(agent, name) for name in LlmAgent.model_fields if name.endswith("callback")]


async def test_four_callbacks_wired_by_hand_end_a_back_delegation() -> None:
    breaker = ADKCostBreaker()
    orchestrator, model = research_pipeline(lambda agent: wired_by_hand(breaker, agent), levels=500)
    recording = await run(orchestrator, catch=True, run_config=RunConfig(max_llm_calls=30))
    assert isinstance(recording.error, runguard.LoopDetectedError)
    assert (recording.error.trip.rule, model.calls) == ("reentry", 2)


async def test_four_callbacks_wired_by_hand_end_an_over_spawn() -> None:
    breaker, model = ADKCostBreaker(max_concurrent_agents=20), ScriptedModel([text("x")], latency_s=0.05)
    leaves = [wired_by_hand(breaker, LlmAgent(name=f"item_{n}", model=model)) for n in range(400)]
    recording = await run(ParallelAgent(name="all", sub_agents=leaves), catch=True)
    assert isinstance(recording.error, runguard.LimitExceededError)
    assert (recording.error.trip.rule, recording.error.trip.observed, model.calls) == ("fan_out", 21, 20)


async def test_in_shadow_mode_four_callbacks_wired_by_hand_end_nothing() -> None:
    breaker = ADKCostBreaker(mode="shadow")
    agent, model = stuck_agent()
    await run(wired_by_hand(breaker, agent), catch=True, run_config=RunConfig(max_llm_calls=20))
    assert (model.calls, breaker.trips[0].enforced) == (20, False)


# ---- the back-delegation, however the orchestrator is entered again -------------------------------------------------


class Circle:
    """An orchestrator and a specialist, each of which has the other one work again and again."""

    def __init__(self, kind: str, install: Callable[[LlmAgent], Any] = lambda agent: agent) -> None:
        self.kind, self.install, self.levels = kind, install, 0

        def step(name: str) -> ScriptedModel:
            return ScriptedModel(lambda n, _: self._pass_on(name))

        self.models = {name: step(name) for name in ("orchestrator", "research_specialist")}
        self.root = self._agent("orchestrator", 0)

    def _pass_on(self, name: str) -> genai_types.Part:
        self.levels += 1
        if self.levels > 12:
            return text("done")
        other = "research_specialist" if name == "orchestrator" else "orchestrator"
        if self.kind == "AgentTool":
            return call(other, request=f"level {self.levels}")
        return call("route_to_specialist", task_type=other, task=f"level {self.levels}")

    def _agent(self, name: str, level: int) -> LlmAgent:
        other = "research_specialist" if name == "orchestrator" else "orchestrator"

        async def route_to_specialist(task_type: str, task: str) -> str:
            """Shared routing tool: it dispatches the task to the agent in charge."""
            runner = InMemoryRunner(agent=self._agent(task_type, 0), app_name="inner")
            session = await runner.session_service.create_session(app_name="inner", user_id="u")
            words = ""
            async for event in runner.run_async(
                user_id="u", session_id=session.id, new_message=genai_types.UserContent(task)
            ):
                words = next((p.text for p in (event.content.parts if event.content else None) or () if p.text), words)
            return words

        tools: list[Any] = [route_to_specialist]
        if self.kind == "AgentTool":
            tools = [AgentTool(self._agent(other, level + 1))] if level < 12 else []
        agent = LlmAgent(name=name, description="Works.", model=self.models[name], tools=tools)
        self.install(agent)
        return agent

    @property
    def calls(self) -> int:
        return sum(model.calls for model in self.models.values())


KINDS = pytest.mark.parametrize("kind", ["AgentTool", "Runner in a tool"])


@KINDS
async def test_the_breaker_trips_before_the_orchestrator_is_asked_again_however_it_got_there(kind: str) -> None:
    breaker = ADKCostBreaker(max_delegation_depth=3)
    circle = Circle(kind, breaker.install_on_agent)
    recording = await run(circle.root, "research it", catch=True)
    assert isinstance(recording.error, runguard.LoopDetectedError)
    trip = recording.error.trip
    assert (trip.rule, circle.calls) == ("reentry", 2)
    assert trip.agent_path == ("orchestrator", "research_specialist", "orchestrator")


@KINDS
@pytest.mark.parametrize("guard", ["install", "plugin"])
async def test_max_reentries_counts_re_entries_however_they_come(kind: str, guard: str) -> None:
    for limit, paid in ((1, 2), (3, 4)):
        runguard.uninstall()
        plugins = [RunGuardPlugin(max_reentries=limit)] if guard == "plugin" else []
        if not plugins:
            runguard.install(max_reentries=limit)
        circle = Circle(kind)
        recording = await run(circle.root, "research it", plugins=plugins)
        assert [(trip.rule, trip.observed) for trip in recording.trips] == [("reentry", limit)]
        assert circle.calls == paid


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


def growing(n: int) -> int:
    return 1_000 * n


def researcher(breaker: ADKCostBreaker, prompt: Callable[[int], int] = lambda n: 100_000) -> LlmAgent:
    """A research agent of twelve model calls."""

    def look_up(key: str) -> dict[str, str]:
        """Look something up."""
        return {"value": key}

    model = ScriptedModel(
        lambda n, _: call("look_up", key=str(n)) if n < 12 else text("done"), prompt_tokens=prompt, latency_s=0.001
    )
    agent = LlmAgent(name="researcher", model=model, tools=[look_up])
    breaker.install_on_agent(agent)
    return agent


async def research(agent: LlmAgent, record: Callable[[int, str], None], document: str) -> str:
    runner = InMemoryRunner(agent=agent, app_name="app")
    session = await runner.session_service.create_session(app_name="app", user_id="u", session_id=document)
    result = ""
    try:
        async for event in runner.run_async(
            user_id="u", session_id=session.id, new_message=genai_types.UserContent(document)
        ):
            if event.usage_metadata and event.usage_metadata.total_token_count:
                record(event.usage_metadata.total_token_count, document)
            if event.is_final_response() and event.content:
                result = parts(event.content)[0].text or ""
    except RuntimeError as error:
        return f"BREAKER_TRIPPED: {error}"
    return result


async def test_where_the_events_come_from_elsewhere_the_caller_names_the_session() -> None:
    breaker = ADKCostBreaker(rules={"growth": False})
    inbox: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
    reports: list[str] = []

    async def account() -> None:
        while True:
            count, document = await inbox.get()
            try:
                breaker.record_event_tokens(count, session=("app", "u", document))
            except RuntimeError as error:
                reports.append(str(error))

    accountant = asyncio.create_task(account())
    results = await asyncio.gather(
        *(
            research(researcher(breaker, prompt), lambda count, of: inbox.put_nowait((count, of)), f"document {n}")
            for n, prompt in enumerate((lambda n: 100_000, growing, lambda n: 100_000))
        )
    )
    accountant.cancel()
    assert [result.startswith("BREAKER_TRIPPED") for result in results] == [False, True, False]
    assert "growth" in reports[0]


async def test_tokens_of_no_known_session_only_warn(caplog: pytest.LogCaptureFixture) -> None:
    breaker = ADKCostBreaker(rules={"growth": False})
    has_begun = asyncio.Event()
    running = asyncio.create_task(research(researcher(breaker), lambda count, _: has_begun.set(), "document"))
    await has_begun.wait()
    for count in [800] * 5 + [2_400] * 10:
        breaker.record_event_tokens(count)
    assert await running == "done"
    assert breaker.trips == []
    assert [r.message.split(":")[0] for r in caplog.records if "growth" in r.message] == [
        "runguard.growth_of_no_session"
    ]


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


# ---- the same document again ----------------------------------------------------------------------------------------


def failing_pipeline(parsed: list[str]) -> LlmAgent:
    def parse_document_fragment(hint: str) -> dict[str, Any]:
        """Parse."""
        parsed.append(hint)
        return {"status": "partial_parse_error", "data": None, "retry_hint": "E42"}

    model = ScriptedModel(lambda n, _: call("parse_document_fragment", hint=f"hint {n}"))
    return LlmAgent(name="extraction_agent", model=model, tools=[parse_document_fragment])


@pytest.mark.parametrize("guard", ["install", "plugin"])
async def test_the_parent_that_submits_its_document_fourteen_times_is_refused(guard: str) -> None:
    settings: dict[str, Any] = {"max_identical_tool_results": 3, "max_resubmissions": 2, "on_stop": "raise"}
    plugins = [RunGuardPlugin(**settings)] if guard == "plugin" else []
    plugin = plugins[0] if plugins else runguard.install(**settings)
    parsed: list[str] = []
    errors = []
    for attempt in range(14):
        agent = failing_pipeline(parsed)
        recording = await run(agent, "the invoice", session_id=f"s{attempt}", plugins=plugins, catch=True)
        errors.append(type(recording.error).__name__)
    assert errors == ["LoopDetectedError"] * 3 + ["CircuitOpenError"] * 11
    assert len(parsed) == 9
    assert {trip.rule for trip in plugin.trips} == {"stall", "resubmission"}
    other = await run(failing_pipeline(parsed), "another invoice", session_id="other", plugins=plugins, catch=True)
    assert type(other.error) is runguard.LoopDetectedError


async def test_a_guarded_model_refuses_the_document_too() -> None:
    model, parsed = ScriptedModel(lambda n, _: call("parse_document_fragment", hint=f"hint {n}")), list[str]()
    agent = failing_pipeline(parsed)
    agent.model = GuardedLlm(model, max_identical_tool_results=3, max_resubmissions=1)
    for attempt in range(4):
        recording = await run(agent, "the invoice", session_id=f"s{attempt}", catch=True)
    assert type(recording.error) is runguard.CircuitOpenError
    assert (model.calls, len(parsed)) == (6, 6)
    await run(agent, "another invoice", session_id="other", catch=True)
    assert model.calls == 9


async def test_an_outer_loop_in_one_session_is_refused_and_a_chat_is_not() -> None:
    service, parsed = InMemorySessionService(), list[str]()
    plugin = RunGuardPlugin(max_identical_tool_results=3, max_resubmissions=1)
    task = "Extract all fields of the attached invoice and store them."
    for _ in range(5):
        await run(failing_pipeline(parsed), task, session_service=service, plugins=[plugin])
    assert [trip.rule for trip in plugin.trips] == ["stall"] * 2 + ["resubmission"] * 3
    for _ in range(5):
        await run(failing_pipeline(parsed), "continue", session_service=service, plugins=[plugin])
    assert [trip.rule for trip in plugin.trips][5:] == ["stall"] * 5, "what it means depends on what was said before"


async def test_documents_that_work_and_retries_after_an_outage_are_free() -> None:
    plugin = RunGuardPlugin(max_resubmissions=0)

    def parse_document_fragment(hint: str) -> dict[str, Any]:
        """Parse."""
        raise ConnectionError("the parser is away")

    async def recover(tool: Any, args: Any, tool_context: Any, error: Exception) -> dict[str, str]:
        return {"error": str(error)}

    away = LlmAgent(
        name="extraction_agent",
        model=ScriptedModel(lambda n, _: call("parse_document_fragment", hint=f"hint {n}")),
        tools=[parse_document_fragment],
        on_tool_error_callback=recover,
    )
    for attempt in range(3):
        await run(away, "the invoice", session_id=f"a{attempt}", plugins=[plugin], catch=True)
    fine = LlmAgent(name="extraction_agent", model=ScriptedModel(lambda n, _: text("parsed")))
    for attempt in range(3):
        await run(fine, "the invoice", session_id=f"b{attempt}", plugins=[plugin])
    assert "resubmission" not in {trip.rule for trip in plugin.trips}
