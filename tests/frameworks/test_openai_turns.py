"""One call of ``Runner.run`` and what resumes it is one run: approvals, hand-offs, sub-agents, threads, two guards."""

import asyncio
import copy
import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from agents import (
    Agent,
    GuardrailFunctionOutput,
    ModelProvider,
    RunConfig,
    RunContextWrapper,
    Runner,
    RunState,
    function_tool,
    handoff,
    input_guardrail,
    output_guardrail,
)
from agents.models.interface import Model
from agents.run import AgentRunner, get_default_agent_runner, set_default_agent_runner

import runguard
from runguard import Budget
from runguard.core.errors import PolicyError, RunGuardError
from runguard.openai_agents import AgentGuard, GuardedAgent, guarded
from tests.frameworks.openai_harness import played
from tests.frameworks.test_openai_tools import Steps, call, play, say

LOOK = call("look", "{}")
BY_NAME = pytest.mark.parametrize("by_name", [False, True], ids=["model", "name"])


@function_tool
def look() -> str:
    return "page"


@function_tool(needs_approval=True)
def delete(row: int = 1) -> str:
    return f"deleted {row}"


class Counting(Steps):
    """Deletes row after row, for ever."""

    def _next(self) -> list[Any]:
        self.calls += 1
        return [call("delete", json.dumps({"row": self.calls}))]


class Named(ModelProvider):
    """Knows these models, by name."""

    def __init__(self, **models: Model) -> None:
        self.models = models

    def get_model(self, model_name: str | None) -> Model:
        return self.models[model_name or ""]


def looking(name: str = "worker", **parts: Any) -> tuple[Agent[Any], Steps]:
    """An agent that looks again and again, and its model."""
    model = Steps([LOOK])
    return Agent(name=name, model=model, tools=[look], **parts), model


# ---- approvals ------------------------------------------------------------------------------------------------------


async def approve(
    agent: Agent[Any], result: Any, way: str, *, stored: bool = False, context: Any = None, **settings: Any
) -> Any:
    """Approve what the run waits for, and go on with it."""
    state: Any = result.to_state()
    if stored:
        state = await RunState.from_json(agent, json.loads(json.dumps(state.to_json())), context_override=context)
    for item in state.get_interruptions():
        state.approve(item)
    return await played(agent, state, way, max_turns=99, **settings)


@pytest.mark.parametrize("way", ["run", "run_streamed"])
@pytest.mark.parametrize("stored", [False, True], ids=["in memory", "stored"])
async def test_a_turn_with_many_approvals_is_one_run(stored: bool, way: str) -> None:
    model = Counting()
    agent = guarded(Agent(name="worker", model=model, tools=[delete]), max_model_calls=8, app="shop")
    result = await play(agent, way)
    for _ in range(60):
        if not result.interruptions:
            break
        assert not agent.runguard.guard.runs, "a run that waits is not open"
        result = await approve(agent, result, way, stored=stored)
    assert model.calls == 8
    [trip] = agent.runguard.trips
    assert result.final_output == agent.runguard.guard.stop_text(trip)
    assert agent.runguard.spent(result).calls == 8
    assert not agent.runguard.guard.runs


@pytest.mark.parametrize("in_blocks", [False, True])
async def test_a_turn_that_is_resumed_several_times_at_once_is_one_run(in_blocks: bool) -> None:
    model = Counting()
    agent = guarded(Agent(name="worker", model=model, tools=[delete]), max_model_calls=8)
    first = await Runner.run(agent, "go")

    async def go_on(result: Any) -> None:
        for _ in range(20):
            if not result.interruptions:
                return
            with runguard.run() if in_blocks else nullcontext():
                result = await approve(agent, result, "run", stored=True)

    await asyncio.gather(*[go_on(first) for _ in range(4)])
    assert (model.calls, agent.runguard.guard.guard_errors) == (8, 0)
    assert not agent.runguard.guard.runs


@pytest.mark.parametrize("user", ["ann", "bob"])
async def test_a_turn_goes_on_in_another_worker_for_its_own_user_only(user: str, tmp_path: Path) -> None:
    store, model = f"sqlite:///{tmp_path / 'guard.db'}", Counting()

    def worker(name: str) -> GuardedAgent[Any]:
        plain: Agent[Any] = Agent(name="worker", model=model, tools=[delete])
        return guarded(plain, max_model_calls=3, store=store, app="shop", user=name)

    first, second = worker("ann"), worker(user)
    result = await Runner.run(first, "go")
    assert first.runguard.flush(5)
    state: Any = await RunState.from_json(second, json.loads(json.dumps(result.to_state().to_json())))
    for _ in range(10):
        if not state.get_interruptions():
            break
        for item in state.get_interruptions():
            state.approve(item)
        state = (await Runner.run(second, state, max_turns=99)).to_state()
    assert model.calls == (3 if user == "ann" else 4)
    assert [trip.rule for trip in second.runguard.trips] == ["model_calls"]


async def test_a_call_that_a_human_rejects_costs_nothing_and_repeating_it_is_stopped() -> None:
    model = Steps([call("delete", "{}")])
    tools: Any = {"delete": {"price": "0.04"}}
    agent = guarded(Agent(name="worker", model=model, tools=[delete]), max_usd=1, tools=tools)
    result = await Runner.run(agent, "go")
    for _ in range(20):
        if not result.interruptions:
            break
        state = result.to_state()
        for item in state.get_interruptions():
            state.reject(item)
        result = await Runner.run(agent, state, max_turns=99)
    assert agent.runguard.spend()["tools_usd"] == 0
    assert [trip.tool for trip in agent.runguard.trips] == ["delete"]
    assert model.calls <= 10


@pytest.mark.parametrize("way", ["run", "run_streamed"])
@pytest.mark.parametrize("stored", [False, True], ids=["in memory", "stored"])
@BY_NAME
async def test_an_agent_as_a_tool_that_waits_for_approval_stays_in_the_run(
    by_name: bool, stored: bool, way: str
) -> None:
    inner_model, outer_model = Counting(), Steps([call("ask", '{"input": "x"}')])
    config = RunConfig(model_provider=Named(inner=inner_model, outer=outer_model))
    inner: Agent[Any] = Agent(name="inner", model="inner" if by_name else inner_model, tools=[delete])
    tools: list[Any] = [inner.as_tool("ask", "Ask.", max_turns=99)]
    plain: Agent[Any] = Agent(name="outer", model="outer" if by_name else outer_model, tools=tools)
    agent = guarded(plain, max_model_calls=6)
    result = await play(agent, way, run_config=config)
    for _ in range(20):
        if not result.interruptions:
            break
        result = await approve(agent, result, way, stored=stored, run_config=config)
    assert inner_model.calls + outer_model.calls == 6
    assert [trip.agent_path[-1] for trip in agent.runguard.trips] == ["inner"]
    assert not agent.runguard.guard.runs


async def test_a_stored_turn_goes_on_with_the_guarded_agent_that_it_was_handed_to() -> None:
    model = Counting()
    second: Agent[Any] = Agent(name="second", model=model, tools=[delete])
    lead: Agent[Any] = Agent(name="lead", model=Steps([call("transfer_to_second", "{}")]), handoffs=[handoff(second)])
    agent = guarded(lead, max_model_calls=5)
    result = await Runner.run(agent, "go", max_turns=99)
    for _ in range(20):
        if not result.interruptions:
            break
        result = await approve(agent, result, "run", stored=True)
    assert model.calls == 4
    assert [trip.rule for trip in agent.runguard.trips] == ["model_calls"]


async def test_a_run_that_reached_its_turn_limit_goes_on_from_its_state() -> None:
    plain, model = looking()
    agent = guarded(plain, max_model_calls=5)
    state: Any = None
    for _ in range(4):
        streamed = Runner.run_streamed(agent, state or "go", max_turns=99)
        async for event in streamed.stream_events():
            if event.type == "raw_response_event":
                streamed.cancel(mode="after_turn")
        if streamed.final_output is not None:
            break
        state = streamed.to_state()
    assert model.calls <= 5
    assert not agent.runguard.guard.runs


# ---- two guards -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [(100, 3), (3, 100)], ids=["outer", "inner"])
@pytest.mark.parametrize("way", ["run", "run_streamed"])
async def test_a_guard_around_a_guarded_agent_adds_to_it(way: str, limits: tuple[int, int]) -> None:
    plain, model = looking()
    inner = guarded(plain, max_model_calls=limits[0])
    outer = guarded(inner, max_model_calls=limits[1])
    await play(outer, way)
    assert model.calls == 3
    assert [len(one.runguard.trips) for one in (inner, outer)] == [limits[0] == 3, limits[1] == 3]
    assert [one.runguard.spend()["calls"] for one in (inner, outer)] == [3, 3]
    assert not inner.runguard.guard.runs
    assert not outer.runguard.guard.runs


@pytest.mark.parametrize("by", ["agent", "object"])
async def test_a_hand_off_to_an_agent_with_its_own_guard_stays_under_the_cap_around(by: str) -> None:
    plain, model = looking("second")
    second = guarded(plain, max_model_calls=100)
    target: Any = second if by == "agent" else handoff(second)
    lead = Agent[Any](name="lead", model=Steps([call("transfer_to_second", "{}")]), handoffs=[target])
    agent = guarded(lead, max_model_calls=6)
    await Runner.run(agent, "go", max_turns=99)
    assert model.calls == 5
    assert second.runguard.spend()["calls"] == 5
    assert agent.runguard.spend()["calls"] == 6


async def test_an_unguarded_agent_with_a_guarded_model_is_one_run() -> None:
    model = Steps([LOOK])
    owner = guarded(Agent(name="owner", model=model), max_model_calls=4)
    user: Agent[Any] = Agent(name="user", model=owner.model, tools=[look])
    await Runner.run(user, "go", max_turns=99)
    assert model.calls == 4
    assert [trip.rule for trip in owner.runguard.trips] == ["model_calls"]
    assert not owner.runguard.guard.runs


async def test_an_unguarded_agent_s_tools_are_seen_by_its_guarded_model() -> None:
    model = Steps(*([call("look", json.dumps({"page": page}))] for page in range(50)))

    @function_tool(name_override="look")
    def pages(page: int) -> str:
        return f"page {page}"

    owner = guarded(Agent(name="owner", model=model), max_tool_calls=3)
    await Runner.run(Agent[Any](name="user", model=owner.model, tools=[pages]), "go", max_turns=99)
    assert model.calls <= 5
    assert [trip.rule for trip in owner.runguard.trips] == ["tool_calls"]


# ---- agents inside of tools -----------------------------------------------------------------------------------------


def in_pool(run: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda _: run(), range(2)))


def in_thread(run: Callable[[], Any]) -> Any:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@pytest.mark.parametrize("start", [lambda run: run(), in_pool, in_thread], ids=["thread of the SDK", "pool", "thread"])
@pytest.mark.parametrize("inner_has_guard", [False, True])
def test_agents_that_a_tool_starts_in_threads_belong_to_the_run(start: Any, inner_has_guard: bool) -> None:
    plain, inner_model = looking("inner")
    inner = guarded(plain) if inner_has_guard else plain

    @function_tool
    def ask() -> str:
        start(lambda: Runner.run_sync(inner, "look it up", max_turns=30))
        return "done"

    outer_model = Steps([call("ask", "{}")])
    agent = guarded(Agent(name="outer", model=outer_model, tools=[ask]), max_model_calls=6)
    Runner.run_sync(agent, "go", max_turns=30)
    assert inner_model.calls + outer_model.calls == 6
    assert {trip.rule for trip in agent.runguard.trips} == {"model_calls"}


@BY_NAME
async def test_an_agent_that_a_guardrail_runs_belongs_to_the_run(by_name: bool) -> None:
    inner, inner_model = looking("inner")
    config = RunConfig(model_provider=Named(inner=inner_model))
    inner.model = "inner" if by_name else inner_model

    @output_guardrail
    async def review(*_: Any) -> GuardrailFunctionOutput:
        await Runner.run(inner, "is this fine?", max_turns=30, run_config=config)
        return GuardrailFunctionOutput(None, False)

    outer_model = Steps([say("done")])
    plain: Agent[Any] = Agent(name="outer", model=outer_model, output_guardrails=[review])
    agent = guarded(plain, max_model_calls=6)
    await Runner.run(agent, "go")
    assert (inner_model.calls, outer_model.calls) == (5, 1)
    assert not agent.runguard.guard.runs


@BY_NAME
async def test_an_agent_that_a_guardrail_runs_before_the_first_model_call_belongs_to_the_run(by_name: bool) -> None:
    inner, inner_model = looking("inner")
    config = RunConfig(model_provider=Named(inner=inner_model))
    inner.model = "inner" if by_name else inner_model

    @input_guardrail
    async def review(*_: Any) -> GuardrailFunctionOutput:
        await Runner.run(inner, "is this fine?", max_turns=30, run_config=config)
        return GuardrailFunctionOutput(None, False)

    outer, outer_model = looking("outer", input_guardrails=[review])
    agent = guarded(outer, max_model_calls=6)
    await Runner.run(agent, "go", max_turns=30)
    assert inner_model.calls + outer_model.calls == 6
    assert not agent.runguard.guard.runs


async def test_agents_outside_of_a_guarded_run_stay_as_they_are() -> None:
    agent, _ = looking("guarded")
    guarded(agent)
    plain, model = looking("plain")
    model.steps = ([LOOK], [say("done")])
    result = await Runner.run(plain, "go")
    assert result.last_agent is plain
    assert type(result.last_agent.model) is Steps


# ---- for whom, and what it has cost ---------------------------------------------------------------------------------


class Customer:
    def __init__(self, name: str) -> None:
        self.name = name


def customer(context: RunContextWrapper[Customer]) -> str:
    return context.context.name


@pytest.mark.parametrize("way", ["run", "run_streamed"])
async def test_a_budget_per_user_that_learns_no_user_calls_no_model(way: str) -> None:
    plain, model = looking()
    with pytest.raises(PolicyError, match="needs a user"):
        await play(guarded(plain, budgets=[Budget(calls=3, per="user")]), way)
    with pytest.raises(PolicyError, match="user= raised AttributeError"):
        await play(guarded(plain, user=customer, budgets=[Budget(calls=3, per="user")]), way)
    assert model.calls == 0


@pytest.mark.parametrize("way", ["run", "run_streamed"])
async def test_a_result_tells_what_its_run_has_cost(way: str) -> None:
    guard = AgentGuard(max_usd=5)
    plain, model = looking()
    model.steps = ([LOOK], [say("done")])
    results = [await play(guard.guarded(plain), way) for _ in range(2)]
    [first, second] = [guard.spent(result) for result in results]
    assert first.run != second.run
    assert (first.calls, second.calls) == (2, 1)
    assert first.usd is not None
    assert first.usd + (second.usd or 0) == guard.spend()["usd"]
    assert guard.spent(copy.copy(results[0])) == first
    assert guard.spent(object()).calls == 0


# ---- runners --------------------------------------------------------------------------------------------------------


async def test_a_runner_that_replaces_the_guard_s_is_noticed() -> None:
    plain, model = looking()
    agent, before = guarded(plain), get_default_agent_runner()
    set_default_agent_runner(AgentRunner())
    try:
        with pytest.raises(RunGuardError, match=r"set_default_agent_runner\(\) has replaced"):
            await Runner.run(agent, "go")
        assert model.calls == 0
        await Runner.run(guarded(plain, max_model_calls=2), "go")
        assert model.calls == 2
    finally:
        set_default_agent_runner(before)


async def test_in_shadow_mode_a_runner_that_replaces_the_guard_s_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, model = looking()
    model.steps = ([say("done")],)
    agent, before = guarded(plain, mode="shadow"), get_default_agent_runner()
    set_default_agent_runner(AgentRunner())
    try:
        with caplog.at_level(logging.WARNING, "runguard"):
            for _ in range(2):
                assert (await Runner.run(agent, "go")).final_output == "done"
    finally:
        set_default_agent_runner(before)
    assert sum("runguard.unguarded" in line for line in caplog.messages) == 1


async def test_a_runner_of_its_own_that_was_there_before_is_kept() -> None:
    class Own(AgentRunner):
        seen = 0

        async def run(self, *args: Any, **kwargs: Any) -> Any:
            Own.seen += 1
            return await super().run(*args, **kwargs)

    before = get_default_agent_runner()
    set_default_agent_runner(Own())
    try:
        plain, _ = looking()
        await Runner.run(guarded(plain, max_model_calls=2), "go")
        assert Own.seen == 1
        assert isinstance(get_default_agent_runner(), Own)
    finally:
        set_default_agent_runner(before)
