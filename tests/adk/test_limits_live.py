"""Hand-offs, depth, growth, plain limits and the kill switch."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from google.adk.agents import LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.apps import App
from google.adk.events import Event
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools.agent_tool import AgentTool
from google.genai import types
from pydantic import PrivateAttr

import runguard
from runguard import ToolRule
from runguard.adk import RunGuardPlugin
from runguard.testing import (
    FakeClock,
    ScriptedModel,
    assert_calls_answered,
    assert_stopped,
    call,
    calls,
    text,
    transfer,
)
from tests.kit.adk_runs import observe, play, prompts, told
from tests.kit.rule_agents import Tool, agent, always, ask_new, recover

# ---- hand-offs and depth --------------------------------------------------------------------------------------------


async def test_hand_offs_without_news_are_nudged_then_stopped() -> None:
    model = ScriptedModel(always(transfer("B"), transfer("A")))
    root = agent(model, name="A", sub_agents=[agent(model, name="B")])
    seen = await observe(root)
    assert seen.rules == [("nudge", "handoff"), ("stop", "handoff")], "one circle is told once"
    assert model.calls == 11  # the sixth A→B
    assert assert_stopped(seen.result, "handoff").observed == 6


async def test_the_hand_off_nudge_goes_into_the_next_request_and_not_into_the_history() -> None:
    model = ScriptedModel(lambda n, _: text("done") if n >= 9 else transfer("B") if n % 2 else transfer("A"))
    root = agent(model, name="A", sub_agents=[agent(model, name="B")])
    service = InMemorySessionService()
    seen = await observe(root, play_with={"session_service": service})
    said = {decision.for_model for decision in seen.decisions}
    heard = [sum(str(prompts([request])).count(words) for words in said) for request in model.requests]
    assert heard == [0] * 7 + [1, 0]
    again = await play(root, "more?", plugins=[RunGuardPlugin()], session_service=service)
    assert again.texts
    for words in said:
        assert words not in str(told(again.session.events))
        assert words not in str(prompts(model.requests[-1:]))


async def test_one_return_to_the_parent_is_normal() -> None:
    lead = ScriptedModel([transfer("B"), transfer("B"), text("done")])
    child = ScriptedModel([transfer("A")])
    seen = await observe(agent(lead, name="A", sub_agents=[agent(child, name="B")]), max_handoff_repeats=3)
    assert seen.decisions == []
    assert seen.result.texts == ["done"]


def _nest(depth: int) -> tuple[LlmAgent, list[ScriptedModel]]:
    """Agents that call each other as tools, ``depth`` delegations deep."""
    models = [ScriptedModel([text(f"a{depth} is done")])]
    inner = agent(models[0], name=f"a{depth}")
    for level in range(depth - 1, -1, -1):
        models.append(ScriptedModel([call(f"a{level + 1}", request="go on"), text(f"a{level} is done")]))
        inner = agent(models[-1], AgentTool(inner), name=f"a{level}")
    return inner, models[::-1]


async def test_the_sixth_delegation_is_refused_and_its_caller_goes_on() -> None:
    root, models = _nest(7)
    seen = await observe(root)
    assert seen.rules == [("block", "depth")]
    assert [model.calls for model in models] == [2, 2, 2, 2, 2, 2, 0, 0]
    assert seen.result.texts == ["a0 is done"]
    assert seen.plugin.trips == []


async def test_an_agent_that_calls_itself_is_held() -> None:
    model = ScriptedModel(lambda n, _: call("again", request=f"{n}") if n <= 3 else text("done"))
    root = agent(model, name="again")
    root.tools.append(AgentTool(root))
    seen = await observe(root, max_delegation_depth=2)
    assert [rule for rule in seen.rules if rule[0] == "block"] == [("block", "depth")]
    assert model.calls == 6  # three levels: each asks once and answers once
    assert seen.result.texts == ["done"]


async def test_a_transfer_ever_deeper_is_refused_where_the_model_hears_it() -> None:
    models = [ScriptedModel([transfer(f"c{level + 1}"), text(f"c{level} answers")]) for level in range(8)]
    below: LlmAgent | None = None
    for level in range(7, -1, -1):
        below = agent(models[level], name=f"c{level}", sub_agents=[below] if below else [])
    seen = await observe(below)
    assert seen.rules == [("block", "depth")]
    assert [model.calls for model in models] == [1, 1, 1, 1, 1, 2, 0, 0]
    assert seen.result.texts == ["c5 answers"]
    assert_calls_answered(seen.result.session)


# ---- growth ---------------------------------------------------------------------------------------------------------


async def test_max_event_cost_ratio_stops_at_its_ratio_and_the_snapshot_shows_it() -> None:
    ratios: list[Any] = []

    def dig(q: int) -> dict[str, int]:
        ratios.append(plugin.snapshot()["runs"][0]["growth"].get("worker"))
        return {"found": q}

    plugin = RunGuardPlugin(max_event_cost_ratio=3, cost_baseline_events=2)
    model = ScriptedModel(ask_new("dig"), prompt_tokens=lambda n: 1_000 * n)
    seen = await observe(agent(model, dig), plugin=plugin)
    assert model.calls == 5  # (4,000 + 5,000) / (1,000 + 2,000)
    trip = assert_stopped(seen.result, "growth")
    assert (trip.observed, trip.limit) == (3, 3)
    assert ratios == [None, None, None, 2.333, 3.0]
    assert_calls_answered(seen.result.session)


async def test_growth_does_not_stop_a_run_whose_last_answer_is_there() -> None:
    model = ScriptedModel(ask_new("dig", 4), prompt_tokens=lambda n: 1_000 * n)
    seen = await observe(
        agent(model, Tool("dig", lambda n: {"found": n})),
        max_event_cost_ratio=3,
        cost_baseline_events=2,
        on_stop="raise",
    )
    assert model.calls == 5  # the fifth answers and reaches the ratio: nothing is left to stop
    assert seen.result.texts == ["done"]
    assert seen.plugin.trips == []


# ---- plain limits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "stopped"), [(3, False), (4, True)])
async def test_max_fan_out_counts_the_branches_of_one_node(size: int, stopped: bool) -> None:
    model = ScriptedModel([text("x")])
    root = ParallelAgent(name="par", sub_agents=[agent(model, name=f"p{i}") for i in range(size)])
    seen = await observe(root, max_fan_out=3)
    assert model.calls == (0 if stopped else size)
    assert [trip.rule for trip in seen.plugin.trips] == (["fan_out"] if stopped else [])


async def test_max_tool_calls_allows_exactly_its_number() -> None:
    step, model = Tool("step", lambda n: {"n": n}), ScriptedModel(ask_new("step"))
    seen = await observe(agent(model, step), max_tool_calls=4)
    assert (step.runs, model.calls) == (4, 5)
    assert assert_stopped(seen.result, "tool_calls").limit == 4
    assert assert_calls_answered(seen.result.session) == 5
    step = Tool("step", lambda n: {"n": n})
    assert (await observe(agent(ask_new("step", 4), step), max_tool_calls=4)).decisions == []


async def test_max_tool_calls_within_one_response_answers_every_call() -> None:
    step, model = (
        Tool("step", lambda n: {"n": n}),
        ScriptedModel([calls(*(call("step", q=n) for n in range(10))), text("done")]),
    )
    seen = await observe(agent(model, step), max_tool_calls=4)
    assert (step.runs, model.calls) == (4, 1)
    assert len(seen.plugin.trips) == 1
    assert assert_calls_answered(seen.result.session) == 10


async def test_a_tools_own_limit_refuses_the_surplus_and_then_stops() -> None:
    step, model = Tool("step", lambda n: {"n": n}), ScriptedModel(ask_new("step"))
    seen = await observe(agent(model, step), tools={"step": ToolRule(max_calls=2)})
    assert seen.rules == [("block", "tool_limit"), ("stop", "tool_limit")]
    assert (step.runs, model.calls) == (2, 4)
    step, other = Tool("step", lambda n: {"n": n}), Tool("other", lambda n: {"n": n})
    script = [call("step", q=1), call("step", q=2), *(call("other", q=n) for n in range(5)), text("done")]
    assert (await observe(agent(script, step, other), tools={"step": ToolRule(max_calls=2)})).decisions == []


async def test_a_huge_answer_never_reaches_the_model() -> None:
    fetch, model = (
        Tool("fetch", ["x" * 3_000_000, "x" * 9_000]),
        ScriptedModel([call("fetch", q=1), call("fetch", q=2), text("done")]),
    )
    seen = await observe(agent(model, fetch), max_tool_result_chars=10_000)
    assert [decision.action.word for decision in seen.decisions] == ["block"]
    assert max(len(str(prompts([request]))) for request in model.requests) < 20_000
    assert len(str(told(seen.result.session.events))) < 40_000
    assert seen.answers[0]["status"] == "answer_left_out"
    assert seen.answers[0]["message"].startswith("'fetch' was executed; its answer was too large")
    assert seen.answers[1] == {"result": "x" * 9_000}, "up to the limit an answer is untouched"
    assert seen.result.texts == ["done"]


async def test_max_seconds_ends_an_async_tool_in_flight() -> None:
    ended: list[str] = []
    clock = FakeClock()  # only the wait inside the tool is real: what comes before it may be slow

    def thinks_long(n: int, _: Any) -> Any:
        clock.advance(59.9)
        return call("crawl", q=n)

    async def crawl(q: int) -> dict[str, int]:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            clock.advance(0.2)
            raise
        return {"q": q}

    model = ScriptedModel(thinks_long)
    seen = await observe(agent(model, crawl), max_seconds=60, clock=clock)
    assert (model.calls, ended) == (1, ["cancelled"])
    assert_stopped(seen.result, "deadline")
    assert assert_calls_answered(seen.result.session) == 1


async def test_max_seconds_judges_a_sync_tool_when_it_returns() -> None:
    clock = FakeClock()

    def crawl(q: int) -> dict[str, int]:
        clock.advance(61)
        return {"q": q}

    model = ScriptedModel(ask_new("crawl"))
    seen = await observe(agent(model, crawl), max_seconds=60, clock=clock)
    assert model.calls == 1
    trip = assert_stopped(seen.result, "deadline")
    assert (trip.observed, trip.limit) == (61, 60)
    assert seen.answers == [{"q": 1}], "the paid answer is kept"


async def test_max_seconds_does_not_stop_a_run_whose_last_answer_is_there() -> None:
    clock = FakeClock()

    def late(n: int, _: Any) -> Any:
        clock.advance(61)
        return text("done")

    seen = await observe(agent(late), max_seconds=60, clock=clock, on_stop="raise")
    assert seen.result.texts == ["done"]
    assert seen.plugin.trips == []
    assert not any(event.error_code for event in seen.result.events)


async def test_a_tools_own_time_ends_that_call_and_the_run_goes_on() -> None:
    async def crawl(q: int) -> dict[str, int]:
        await asyncio.sleep(30 if q == 1 else 0)
        return {"q": q}

    seen = await observe(agent(ask_new("crawl", 2), crawl), tools={"crawl": ToolRule(max_seconds=0.1)})
    assert "too long" in str(seen.answers[0])
    assert seen.answers[1] == {"q": 2}
    assert seen.result.texts == ["done"]
    assert seen.plugin.trips == []


async def test_a_tools_own_timeout_error_stays_its_own() -> None:
    async def crawl(q: int) -> dict[str, int]:
        raise TimeoutError("the server took too long")

    seen = await observe(
        agent(ask_new("crawl", 1), crawl, on_tool_error_callback=recover), tools={"crawl": ToolRule(max_seconds=10)}
    )
    assert seen.answers == [{"note": "something went wrong"}]
    assert seen.result.texts == ["done"]


# ---- The kill switch on a model call in flight: one stop event, in the stream and in the session --------------------


class EndlessLlm(BaseLlm):
    """A model that says two words and then nothing more."""

    model: str = "gemini-2.5-flash"
    _begun: asyncio.Event = PrivateAttr(default_factory=asyncio.Event)

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        if stream:
            content = types.Content(role="model", parts=[types.Part(text="I think")])
            yield LlmResponse(content=content, partial=True)
        self._begun.set()
        await asyncio.Event().wait()
        yield LlmResponse()


TOPOLOGIES: dict[str, Any] = {
    "alone": lambda agent: agent,
    "sequential": lambda agent: SequentialAgent(name="team", sub_agents=[agent]),
    "loop": lambda agent: LoopAgent(name="team", sub_agents=[agent], max_iterations=5),
}


@pytest.mark.parametrize("mode", [StreamingMode.NONE, StreamingMode.SSE])
@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_a_call_that_the_switch_ends_leaves_one_stop_event(topology: str, mode: StreamingMode) -> None:
    plugin, service = RunGuardPlugin(), InMemorySessionService()
    model = EndlessLlm()
    agent = TOPOLOGIES[topology](LlmAgent(name="worker", model=model))
    await service.create_session(app_name="shop", user_id="ann", session_id="s")
    runner = Runner(app=App(name="shop", root_agent=agent, plugins=[plugin]), session_service=service)
    message = types.Content(role="user", parts=[types.Part(text="go")])

    async def play() -> list[Event]:
        config = RunConfig(streaming_mode=mode)
        events = runner.run_async(user_id="ann", session_id="s", new_message=message, run_config=config)
        return [event async for event in events]

    running = asyncio.ensure_future(play())
    await model._begun.wait()
    plugin.stop("app:shop", actor="ops")
    events = await running
    stops = [event for event in events if event.error_code == "RUNGUARD_STOP"]
    assert len(stops) == 1
    trip = runguard.trip(stops[0])
    assert trip is not None
    assert trip.rule == "kill_switch"
    session = await service.get_session(app_name="shop", user_id="ann", session_id="s")
    assert session is not None
    assert [event.error_code for event in session.events if event.error_code] == ["RUNGUARD_STOP"]
