"""Termination conditions at work on real ADK: where they end a run or a loop, how cleanly, and that they leave healthy
runs alone.
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import BaseAgent, LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.agents.invocation_context import InvocationContext
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.apps import App
from google.adk.events import Event
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.sessions.sqlite_session_service import SqliteSessionService
from google.adk.tools.agent_tool import AgentTool
from google.adk.workflow import Workflow
from google.genai import types

import runguard
from runguard.accounting.cumulative import BudgetPolicy
from runguard.adk import RunGuardPlugin, TerminationPlugin, terminate, termination_reason
from runguard.adk.budget_plugin import BudgetPlugin
from runguard.errors import PolicyError
from runguard.termination import (
    CostTermination,
    ExternalTermination,
    FinalAnswerTermination,
    FunctionalTermination,
    FunctionCallTermination,
    HandoffTermination,
    MaxIterationsTermination,
    MaxMessageTermination,
    NoProgressTermination,
    StateTermination,
    TerminationCondition,
    TextMentionTermination,
    TimeoutTermination,
    TokenUsageTermination,
)
from runguard.testing import Recording, ScriptedModel, assert_calls_answered, call, calls, text, transfer

from .helpers import play, prompts, told
from .topologies import (
    TOPOLOGIES,
    Team,
    agent_tool,
    agent_tool_of_loop,
    agent_tool_of_parallel,
    agent_tool_two_deep,
    agent_tools_at_once,
    custom_quiet_loop,
    loop,
    loop_of_parallel,
    parallel,
    parallel_of_custom_loops,
    parallel_of_loops,
    sequential_with_parallel,
    single,
    single_turn_two_at_once,
    step,
    workflow_cycle,
    workflow_dynamic_nodes_at_once,
    workflow_join,
    workflow_parallel_worker,
)

CALL = 1_250  # tokens of one call of a scripted model
PRICES = {"scripted-1": {"input": 1, "output": 2}}  # 0.0015 USD a call
SSE = RunConfig(streaming_mode=StreamingMode.SSE)
Topology = Callable[[Team], Any]
everywhere = pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology.__name__)
# Calls may be on their way together: the last ones have left before the first of them is counted.
AT_ONCE = {
    single_turn_two_at_once: 2,
    agent_tools_at_once: 2,
    agent_tool_of_parallel: 3,
    parallel: 3,
    parallel_of_loops: 2,
    loop_of_parallel: 2,
    sequential_with_parallel: 2,
    workflow_join: 2,
    workflow_parallel_worker: 3,
    workflow_dynamic_nodes_at_once: 2,
    parallel_of_custom_loops: 3,
}
# What an agent keeps to itself, or does in a run of its own inside of a tool, is no event of the run.
UNSEEN = (agent_tool_two_deep, agent_tool_of_loop, agent_tool_of_parallel, custom_quiet_loop)


def speaker(name: str = "writer", say: Callable[[int], str] | None = None, **options: Any) -> LlmAgent:
    return LlmAgent(
        name=name, description=name, model=ScriptedModel(lambda n, _: text(say(n) if say else f"{name} {n}"), **options)
    )


def worker(name: str = "worker", **options: Any) -> LlmAgent:
    """Calls a tool for ever."""
    return LlmAgent(
        name=name, description=name, model=ScriptedModel(lambda n, _: call("step", n=n), **options), tools=[step]
    )


def assert_ended(result: Recording, reason: str, author: str | None = None) -> Event:
    """It ended by this condition, said so once and last, and left a history that a provider takes."""
    last = result.events[-1]
    assert reason in (termination_reason(last) or "nothing")
    assert last.actions.termination_reason == termination_reason(last)
    assert last.actions.escalate is True
    assert last.content is None, "the reason is no agent's answer"
    assert not last.is_final_response(), "a reader of final responses would read its content"
    assert last.invocation_id == result.events[0].invocation_id
    assert last.author == (author or last.author)
    assert [event for event in result.events if termination_reason(event)] == [last]
    stored = result.session.events[-1]
    assert (stored.id, termination_reason(stored)) == (last.id, termination_reason(last))
    assert_calls_answered(result.session)
    return last


async def runner_of(root: Any, *plugins: Any, session: str = "s1") -> Runner:
    service = InMemorySessionService()
    await service.create_session(app_name="app", user_id="u1", session_id=session)
    return Runner(app=App(name="app", root_agent=root, plugins=list(plugins)), session_service=service)


def message(words: str = "go") -> types.Content:
    return types.Content(role="user", parts=[types.Part(text=words)])


# ---- LoopAgent(..., termination_condition=...) ----------------------------------------------------------------------


async def test_a_loop_agents_condition_stops_the_loop() -> None:
    runguard.install()
    writer = speaker()
    result = await play(LoopAgent(name="loop", sub_agents=[writer], termination_condition=MaxIterationsTermination(3)))
    assert writer.model.calls == 3
    assert result.texts == ["writer 1", "writer 2", "writer 3"]
    assert_ended(result, "Maximum of 3 events reached", "loop")


async def test_a_loop_agents_condition_hears_a_keyword() -> None:
    runguard.install()
    writer = speaker(say=lambda n: "TERMINATE" if n == 4 else "go on")
    result = await play(
        LoopAgent(name="loop", sub_agents=[writer], termination_condition=TextMentionTermination("TERMINATE"))
    )
    assert result.texts == ["go on"] * 3 + ["TERMINATE"]
    assert_ended(result, "Text 'TERMINATE' mentioned", "loop")


async def test_a_loop_agents_condition_begins_anew_with_every_run() -> None:
    runguard.install()
    writer, condition, service = speaker(), MaxIterationsTermination(3), InMemorySessionService()
    root = LoopAgent(name="loop", sub_agents=[writer], termination_condition=condition)
    for turn in (1, 2, 3):
        result = await play(root, session_service=service)
        assert writer.model.calls == 3 * turn
        assert_ended(result, "current count: 3")
    assert not condition.terminated, "the instance that was given is nobody's run"


async def test_a_loop_that_ends_by_itself_does_so_with_a_condition_too() -> None:
    runguard.install()
    bare, watched = Team(endless=False), Team(endless=False)
    without = await play(loop(bare))
    root = LoopAgent(
        name="loop",
        sub_agents=[loop(watched).sub_agents[0].clone()],
        termination_condition=MaxIterationsTermination(100),
    )
    assert told((await play(root)).events) == told(without.events)


async def test_a_loop_keeps_its_own_limit_beside_a_condition() -> None:
    runguard.install()
    writer = speaker()
    result = await play(
        LoopAgent(name="loop", sub_agents=[writer], max_iterations=2, termination_condition=MaxIterationsTermination(5))
    )
    assert writer.model.calls == 2
    assert not any(termination_reason(event) for event in result.events)


async def test_the_loops_after_callback_still_runs() -> None:
    runguard.install()
    ended: list[str] = []
    root = LoopAgent(
        name="loop",
        sub_agents=[speaker()],
        termination_condition=MaxIterationsTermination(2),
        after_agent_callback=lambda callback_context: ended.append(callback_context.agent_name),
    )
    await play(root)
    assert ended == ["loop"]


def test_the_keyword_comes_and_goes_with_install() -> None:
    runguard.uninstall()
    plain = LoopAgent.__init__
    runguard.install()
    LoopAgent(name="loop", sub_agents=[], termination_condition=MaxIterationsTermination(3))
    runguard.uninstall()
    assert LoopAgent.__init__ is plain
    assert not hasattr(LoopAgent, "termination_condition")


def test_without_install_the_keyword_says_what_to_do() -> None:
    condition = MaxIterationsTermination(3)
    for error in (PolicyError, ValueError):  # ADK's own error about keywords is a ValueError
        with pytest.raises(error, match=r"call runguard\.install\(\) before .*terminate\(loop_agent, condition\)"):
            LoopAgent(name="loop", sub_agents=[], termination_condition=condition)
    LoopAgent(name="loop", sub_agents=[], termination_condition=None)
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        LoopAgent(name="loop", sub_agents=[], terminationcondition=condition)


def test_a_field_of_this_name_in_a_class_of_ones_own_is_left_alone() -> None:
    class Loop(LoopAgent):
        termination_condition: Any = None

    condition = MaxIterationsTermination(3)
    assert Loop(name="loop", sub_agents=[], termination_condition=condition).termination_condition is condition


async def test_the_condition_can_be_read_and_assigned() -> None:
    runguard.install()
    first, second = MaxIterationsTermination(2), MaxIterationsTermination(4)
    root = LoopAgent(name="loop", sub_agents=[speaker()], max_iterations=6, termination_condition=first)
    assert root.termination_condition is first
    assert root.clone().termination_condition is first
    assert len((await play(root)).texts) == 2
    root.termination_condition = second
    assert root.termination_condition is second
    assert_ended(await play(root), "4", "loop")
    root.termination_condition = None
    assert root.termination_condition is None
    assert len((await play(root)).texts) == 6
    plain = LoopAgent(name="plain", sub_agents=[])
    assert plain.termination_condition is None
    with pytest.raises(PolicyError, match="no termination condition"):
        plain.termination_condition = "TERMINATE"
    assert plain.termination_condition is None


async def test_an_assigned_condition_of_a_new_loop_ends_it() -> None:
    runguard.install()
    root = LoopAgent(name="loop", sub_agents=[speaker()])
    root.termination_condition = MaxIterationsTermination(3)
    assert_ended(await play(root), "3", "loop")


@pytest.mark.parametrize("where", ["loop", "run"])
async def test_reading_final_responses_does_not_meet_the_terminating_event(where: str) -> None:
    """``if event.is_final_response(): … event.content.parts[0].text``, as many programs read a run."""
    runguard.install()
    condition = MaxIterationsTermination(3)
    root = LoopAgent(
        name="loop", sub_agents=[speaker()], **({"termination_condition": condition} if where == "loop" else {})
    )
    runner = await runner_of(root)
    options = {"termination_condition": condition} if where == "run" else {}
    events = runner.run_async(user_id="u1", session_id="s1", new_message=message(), **options)
    read = [event.content.parts[0].text async for event in events if event.is_final_response()]
    assert read == ["writer 1", "writer 2", "writer 3"]


@pytest.mark.parametrize("nonsense", ["TERMINATE", 5, TextMentionTermination])
async def test_what_is_no_condition_is_refused_at_once(nonsense: Any) -> None:
    runguard.install()
    with pytest.raises(PolicyError, match="no termination condition"):
        LoopAgent(name="loop", sub_agents=[], termination_condition=nonsense)
    with pytest.raises(PolicyError, match="no termination condition"):
        TerminationPlugin(nonsense)
    with pytest.raises(PolicyError, match="no termination condition"):
        terminate(speaker(), nonsense)
    runner = await runner_of(speaker())
    with pytest.raises(PolicyError, match="no termination condition"):
        runner.run_async(user_id="u1", session_id="s1", new_message=message(), termination_condition=nonsense)
    with pytest.raises(PolicyError, match="no termination condition"):
        list(runner.run(user_id="u1", session_id="s1", new_message=message(), termination_condition=nonsense))


def test_terminate_says_what_it_takes() -> None:
    with pytest.raises(PolicyError, match="scope = 'outer'"):
        terminate(speaker(), MaxIterationsTermination(1), scope="outer")
    with pytest.raises(PolicyError, match="give an agent or a Workflow"):
        terminate("agent", MaxIterationsTermination(1))
    agent = speaker()
    assert terminate(agent, MaxIterationsTermination(1)) is agent


# ---- runner.run_async(..., termination_condition=...) ---------------------------------------------------------------


async def test_a_run_without_a_condition_goes_on_to_its_own_end() -> None:
    runguard.install()
    writer = speaker()
    result = await play(LoopAgent(name="loop", sub_agents=[writer], max_iterations=6))
    assert (writer.model.calls, len(result.events)) == (6, 6)
    assert not any(termination_reason(event) or event.actions.escalate for event in result.events)


async def test_a_condition_stops_the_run() -> None:
    runguard.install()
    writer = speaker()
    result = await play(
        LoopAgent(name="loop", sub_agents=[writer], max_iterations=6), termination_condition=MaxIterationsTermination(2)
    )
    assert writer.model.calls == 2
    assert_ended(result, "Maximum of 2 events reached", "loop")


@pytest.mark.parametrize(("keyword", "turns"), [("writer 3", 3), ("absent", 6)])
async def test_a_keyword_stops_the_run_where_it_is_said_and_nowhere_else(keyword: str, turns: int) -> None:
    runguard.install()
    writer = speaker()
    result = await play(
        LoopAgent(name="loop", sub_agents=[writer], max_iterations=6),
        termination_condition=TextMentionTermination(keyword),
    )
    assert writer.model.calls == turns
    assert any(termination_reason(event) for event in result.events) is (turns < 6)


async def test_a_runs_condition_begins_anew_with_every_run() -> None:
    runguard.install()
    writer, condition, service = (
        speaker(),
        MaxIterationsTermination(2) | TokenUsageTermination(max_total=10 * CALL),
        InMemorySessionService(),
    )
    root = LoopAgent(name="loop", sub_agents=[writer], max_iterations=6)
    for turn in (1, 2, 3):
        result = await play(root, session_service=service, termination_condition=condition)
        assert writer.model.calls == 2 * turn
        assert_ended(result, "Maximum of 2 events reached, current count: 2")
    assert not condition.terminated


def test_the_synchronous_runner_takes_a_condition_too() -> None:
    runguard.install()
    writer = speaker()
    runner = asyncio.run(runner_of(LoopAgent(name="loop", sub_agents=[writer])))
    for turn in (1, 2):
        events = list(
            runner.run(
                user_id="u1", session_id="s1", new_message=message(), termination_condition=MaxIterationsTermination(3)
            )
        )
        assert writer.model.calls == 3 * turn
        assert termination_reason(events[-1]) == "Maximum of 3 events reached, current count: 3"
        assert (events[-1].actions.escalate, events[-1].actions.termination_reason) == (
            True,
            termination_reason(events[-1]),
        )


def test_synchronous_runs_with_the_same_message_do_not_mix_their_conditions() -> None:
    runguard.install()
    shared = message()
    writers = [speaker(latency_s=0.02) for _ in range(4)]
    runners = [asyncio.run(runner_of(LoopAgent(name="loop", sub_agents=[writer]))) for writer in writers]
    gate = threading.Barrier(4)

    def one(number: int) -> None:
        gate.wait()
        list(
            runners[number].run(
                user_id="u1",
                session_id="s1",
                new_message=shared,
                termination_condition=MaxIterationsTermination(number + 2),
            )
        )

    threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [writer.model.calls for writer in writers] == [2, 3, 4, 5]


async def test_a_condition_given_with_the_call_and_one_of_a_plugin_hold_both() -> None:
    runguard.install()
    for given, of_plugin, turns in ((3, 5, 3), (5, 3, 3)):
        writer = speaker()
        plugin = TerminationPlugin(MaxIterationsTermination(of_plugin))
        result = await play(
            LoopAgent(name="loop", sub_agents=[writer]),
            plugins=[plugin],
            termination_condition=MaxIterationsTermination(given),
        )
        assert writer.model.calls == turns
        assert_ended(result, f"Maximum of {turns} events")


# ---- each condition on a real run -----------------------------------------------------------------------------------


def _hand_over() -> Any:
    return LlmAgent(name="lead", model=ScriptedModel([transfer("expert")]), sub_agents=[worker("expert")])


def _stateful() -> Any:
    def mark(tool_context: Any, n: int) -> dict[str, int]:
        tool_context.state["approved"] = n == 3
        return {"n": n}

    mark.__annotations__.pop("tool_context")
    return LlmAgent(name="w", model=ScriptedModel(lambda n, _: call("mark", n=n)), tools=[mark])


def _in_circles() -> Any:
    return LlmAgent(name="w", model=ScriptedModel([call("step", n=1)]), tools=[step])


async def _is_third(events: Any) -> bool:
    await asyncio.sleep(0)
    return any(part.text == "writer 3" for event in events for part in (event.content.parts if event.content else []))


def _loop_of(writer: LlmAgent) -> LoopAgent:
    return LoopAgent(name="loop", sub_agents=[writer])


CASES: dict[str, tuple[Callable[[], Any], TerminationCondition, str]] = {
    "messages": (lambda: _loop_of(speaker()), MaxMessageTermination(3), "Maximum number of messages 3"),
    "tokens": (lambda: _loop_of(speaker()), TokenUsageTermination(max_total=3 * CALL), "total token count: 3750"),
    "prompt": (lambda: _loop_of(speaker()), TokenUsageTermination(max_prompt=2_000), "prompt token count: 2000"),
    "cost": (lambda: _loop_of(speaker()), CostTermination("0.0045", PRICES, model="scripted-1"), "Cost limit"),
    "unpriced": (lambda: _loop_of(speaker()), CostTermination(1), "Cost cannot be known"),
    "time": (lambda: _loop_of(speaker(latency_s=0.02)), TimeoutTermination(0.1), "Timeout of 0.1 seconds"),
    "function": (worker, FunctionCallTermination("step"), "Function 'step' was executed"),
    "hand-off": (_hand_over, HandoffTermination("expert"), "Handoff to expert from lead"),
    "final answer": (lambda: _loop_of(speaker()), FinalAnswerTermination(sources="writer"), "Final answer of writer"),
    "state": (_stateful, StateTermination("approved"), "State 'approved' is True"),
    "async function": (
        lambda: _loop_of(speaker()),
        FunctionalTermination(_is_third),
        "Functional termination condition met",
    ),
    "no progress": (_in_circles, NoProgressTermination(), "of tool 'step'"),
    "and": (
        lambda: _loop_of(speaker()),
        TextMentionTermination("writer 2") & MaxIterationsTermination(4),
        "Text 'writer 2' mentioned, Maximum of 4",
    ),
    "or": (
        lambda: _loop_of(speaker()),
        TextMentionTermination("writer 2") | MaxIterationsTermination(4),
        "Text 'writer 2' mentioned",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", ["plugin", "call", "agent"])
async def test_every_condition_ends_a_real_run_in_every_way(case: str, way: str) -> None:
    make, condition, reason = CASES[case]
    root = make()
    if way == "call":
        runguard.install(mode="shadow")
        result = await play(root, termination_condition=condition)
    elif way == "plugin":
        result = await play(root, plugins=[TerminationPlugin(condition)])
    else:
        result = await play(terminate(root, condition))
    assert_ended(result, reason, root.name)


# ---- on every topology ----------------------------------------------------------------------------------------------


@everywhere
async def test_tokens_end_every_topology_before_the_next_paid_call_and_the_next_turn_works(topology: Topology) -> None:
    team, service, plugin = (
        Team(endless=True),
        InMemorySessionService(),
        TerminationPlugin(TokenUsageTermination(max_total=5 * CALL)),
    )
    root = topology(team)
    result = await play(root, plugins=[plugin], session_service=service)
    assert 5 <= team.calls < 5 + AT_ONCE.get(topology, 1)
    assert_ended(result, "Token usage limit reached", root.name)
    made = team.calls

    team.calm = True
    second = await play(root, "and now?", plugins=[plugin], session_service=service)
    assert team.calls > made
    assert second.texts or second.events[-1].output is not None or second.events[-1].actions.escalate
    assert not any(termination_reason(event) or event.error_code for event in second.events)
    assert_calls_answered(second.session)
    assert "termination" not in str(prompts(team.requests))


@pytest.mark.parametrize(
    "topology", [topology for topology in TOPOLOGIES if topology not in UNSEEN], ids=lambda topology: topology.__name__
)
async def test_events_end_every_topology_that_shows_them(topology: Topology) -> None:
    runguard.install()
    team = Team(endless=True)
    root = topology(team)
    result = await play(root, termination_condition=MaxIterationsTermination(4))
    assert_ended(result, "Maximum of 4 events reached, current count: 4", root.name)
    asked = sum(event.usage_metadata is not None for event in result.events)
    kept = team.calls - asked  # inside of tools
    assert kept == 0 or topology.__name__.startswith("agent_tool")
    assert asked <= 4 + AT_ONCE.get(topology, 1)


@everywhere
async def test_a_condition_on_the_root_ends_every_topology(topology: Topology) -> None:
    team = Team(endless=True)
    result = await play(terminate(topology(team), TokenUsageTermination(max_total=4 * CALL)))
    assert 4 <= team.calls < 4 + AT_ONCE.get(topology, 1)
    assert_ended(result, "Token usage limit reached")


@everywhere
async def test_a_healthy_run_is_the_same_with_and_without_a_condition(topology: Topology) -> None:
    never = (
        MaxIterationsTermination(1_000)
        | TextMentionTermination("never")
        | TimeoutTermination(100)
        | TokenUsageTermination(max_total=10**9)
    )
    never |= (
        ExternalTermination()
        | FunctionalTermination(_is_third)
        | NoProgressTermination()
        | CostTermination(100, PRICES, model="scripted-1")
    )
    bare, watched = Team(endless=False), Team(endless=False)
    without = await play(topology(bare))
    result = await play(terminate(topology(watched), never, scope="run"), plugins=[TerminationPlugin(never)])
    assert told(result.events) == told(without.events)
    assert told(result.session.events) == told(without.session.events)
    assert result.session.state == without.session.state
    assert prompts(watched.requests) == prompts(bare.requests)


@everywhere
@pytest.mark.parametrize("guard_first", [True, False])
async def test_beside_the_guard_accounts_are_settled_at_what_was_really_called(
    topology: Topology, guard_first: bool
) -> None:
    team = Team(endless=True)
    guard = RunGuardPlugin(max_usd=50, prices=PRICES, tokens=lambda request: 1_000)
    both = [guard, TerminationPlugin(TokenUsageTermination(max_total=5 * CALL))]
    result = await play(topology(team), plugins=both if guard_first else both[::-1])
    assert_ended(result, "Token usage limit reached")
    assert guard.flush()
    spent = guard.spend()
    assert (spent["calls"], spent["tokens"], spent["estimated_calls"], spent["reserved_usd"]) == (
        team.calls,
        team.calls * CALL,
        0,
        0,
    )
    assert [(status.spent, status.reserved) for status in guard.budgets() if status.reserved] == []
    assert (guard.trips, guard.snapshot()["runs"], guard.snapshot()["guard_errors"]) == ([], [], 0)


@pytest.mark.parametrize(
    "topology", [single, agent_tool, loop, parallel, workflow_cycle, custom_quiet_loop], ids=lambda t: t.__name__
)
async def test_beside_a_token_budget_each_keeps_its_own_limit(topology: Topology) -> None:
    for budget, limit, by_condition in ((1_000_000, 4, True), (4 * CALL, 100, False)):
        team = Team(endless=True)
        plugin = BudgetPlugin(BudgetPolicy(budget).with_threshold(1.0, action="stop"))
        result = await play(
            topology(team), plugins=[plugin, TerminationPlugin(TokenUsageTermination(max_total=limit * CALL))]
        )
        assert any(termination_reason(event) for event in result.events) is by_condition
        assert plugin.monitor_for(app_name="app", user_id="u1", session_id="s1").current_tokens == team.calls * CALL
        assert 4 <= team.calls < 4 + AT_ONCE.get(topology, 1)


async def test_a_guards_stop_and_a_condition_do_not_get_in_each_others_way() -> None:
    guard, team = RunGuardPlugin(max_model_calls=3), Team(endless=True)
    result = await play(single(team), plugins=[guard, TerminationPlugin(TokenUsageTermination(max_total=100 * CALL))])
    assert (team.calls, [trip.rule for trip in guard.trips]) == (3, ["model_calls"])
    assert not any(termination_reason(event) for event in result.events)
    assert_calls_answered(result.session)


# ---- scopes ---------------------------------------------------------------------------------------------------------


async def test_an_inner_loop_ends_alone_and_begins_anew_each_time_round() -> None:
    runguard.install()
    writer = speaker()
    inner = LoopAgent(name="inner", sub_agents=[writer], termination_condition=MaxIterationsTermination(2))
    result = await play(LoopAgent(name="outer", sub_agents=[inner, speaker("judge")], max_iterations=3))
    assert writer.model.calls == 6
    ended = [event for event in result.events if termination_reason(event)]
    assert [event.author for event in ended] == ["inner"] * 3
    assert [(event.actions.escalate, event.actions.termination_reason) for event in ended] == [
        (True, "Maximum of 2 events reached, current count: 2")
    ] * 3
    assert [event.author for event in result.events].count("judge") == 3


def _around(shape: str, inner: Any, after: LlmAgent, slow: LlmAgent) -> Any:
    if shape == "loop":
        return LoopAgent(name="root", sub_agents=[inner, after], max_iterations=2)
    if shape == "sequence":
        return SequentialAgent(name="root", sub_agents=[inner, after])
    if shape == "parallel":
        return SequentialAgent(name="root", sub_agents=[ParallelAgent(name="par", sub_agents=[inner, slow]), after])
    if shape == "workflow":
        return Workflow(name="root", edges=[("START", inner), (inner, after)])
    return LlmAgent(
        name="root", model=ScriptedModel([call("inner", request="go"), text("root is done")]), tools=[AgentTool(inner)]
    )


@pytest.mark.parametrize("shape", ["loop", "sequence", "parallel", "workflow", "agent_tool"])
@pytest.mark.parametrize("kind", ["loop", "llm"])
async def test_the_scope_says_whether_the_run_ends_with_the_agent(shape: str, kind: str) -> None:
    for scope in ("loop", "run"):
        writer, after, slow = speaker(), speaker("after"), speaker("slow", latency_s=0.1)
        inner = LoopAgent(name="inner", sub_agents=[writer]) if kind == "loop" else worker("inner")
        terminate(inner, MaxIterationsTermination(2), scope=scope)
        root = _around(shape, inner, after, slow)
        result = await play(root)
        made = writer.model.calls if kind == "loop" else inner.model.calls
        assert made == {"loop": 2, "llm": 1}[kind] * (2 if (shape, scope) == ("loop", "loop") else 1)
        assert_calls_answered(result.session)
        if shape == "agent_tool":
            assert ("root is done" in result.texts) is (scope == "loop")
        else:
            assert (after.model.calls > 0) is (scope == "loop")
        if shape == "parallel":
            assert "slow 1" in result.texts, "a sibling's paid answer is kept"
        if scope == "run":
            last = result.events[-1]
            assert (termination_reason(last), last.actions.escalate) == (
                "Maximum of 2 events reached, current count: 2",
                True,
            )
            assert last.actions.termination_reason == termination_reason(last)


async def test_the_same_condition_on_a_loop_and_on_the_run() -> None:
    runguard.install()
    condition, writer = MaxIterationsTermination(3), speaker()
    inner = LoopAgent(name="inner", sub_agents=[writer], termination_condition=condition)
    result = await play(
        SequentialAgent(name="root", sub_agents=[inner, speaker("after")]), termination_condition=condition
    )
    assert writer.model.calls == 3
    assert termination_reason(result.events[-1])
    assert "after 1" not in result.texts


async def test_a_clone_has_the_condition_too() -> None:
    writer = speaker()
    result = await play(
        terminate(LoopAgent(name="first", sub_agents=[writer]), MaxIterationsTermination(2)).clone({"name": "second"})
    )
    assert_ended(result, "Maximum of 2", "second")


# ---- every call is answered -----------------------------------------------------------------------------------------


async def test_open_calls_are_answered_together_and_the_next_prompt_is_balanced() -> None:
    model = ScriptedModel([calls(call("step", n=1), call("step", n=2)), text("fine")])
    agent = LlmAgent(name="w", model=model, tools=[step])
    service, plugin = InMemorySessionService(), TerminationPlugin(MaxIterationsTermination(1))
    result = await play(agent, plugins=[plugin], session_service=service)
    assert_ended(result, "Maximum of 1 events")
    _, answer, _ = result.events
    assert [response.response for response in answer.get_function_responses()] == [
        {"status": "not_executed", "message": "Not executed: this part had already ended."}
    ] * 2

    await play(agent, "and now?", plugins=[plugin], session_service=service)
    contents = model.requests[-1].contents
    asked = next(
        position for position, content in enumerate(contents) if any(part.function_call for part in content.parts)
    )
    assert len([part for part in contents[asked + 1].parts if part.function_response]) == 2, (
        "the answers follow the calls at once"
    )


async def test_a_long_running_call_stays_open_for_whoever_will_answer_it() -> None:
    from google.adk.tools import LongRunningFunctionTool

    def ask_boss(question: str) -> None:
        """Somebody answers later."""

    agent = LlmAgent(
        name="w", model=ScriptedModel([call("ask_boss", question="may I?")]), tools=[LongRunningFunctionTool(ask_boss)]
    )
    result = await play(agent, plugins=[TerminationPlugin(MaxIterationsTermination(1))])
    assert termination_reason(result.events[-1])
    assert_calls_answered(result.session, open_calls=1)


async def test_a_stored_stop_is_read_again_by_its_reason(tmp_path: Path) -> None:
    service = SqliteSessionService(str(tmp_path / "sessions.db"))
    plugin = TerminationPlugin(MaxIterationsTermination(3))
    result = await play(worker(), plugins=[plugin], session_service=service)
    assert termination_reason(result.session.events[-1]) == "Maximum of 3 events reached, current count: 3"
    assert result.session.events[-1].actions.escalate is True
    assert_calls_answered(result.session)
    assert termination_reason(result.session.events[-1].model_dump(mode="json")) == termination_reason(
        result.events[-1]
    )
    assert termination_reason(result.session.events[-1].model_dump(mode="json", by_alias=True)) == termination_reason(
        result.events[-1]
    )
    assert_calls_answered((await play(worker(), "again", plugins=[plugin], session_service=service)).session)


@pytest.mark.parametrize(
    "other", [None, {}, {"custom_metadata": {"runguard": {"id": "t1"}}}, Event(author="a"), object()]
)
def test_other_events_have_no_reason(other: Any) -> None:
    assert termination_reason(other) is None


# ---- branches -------------------------------------------------------------------------------------------------------


async def test_all_branches_of_a_fan_out_count() -> None:
    """Five branches, 7,000 tokens: a limit of 7,000 fires, one of 7,001 does not."""
    sizes = [1_000, 1_200, 1_400, 1_600, 1_800]  # prompt and 0 output
    for limit, fires in ((7_000, True), (7_001, False)):
        branches = [speaker(f"b{size}", latency_s=0.02, prompt_tokens=size, output_tokens=0) for size in sizes]
        root = SequentialAgent(
            name="root",
            sub_agents=[
                ParallelAgent(name="par", sub_agents=branches),
                speaker("after", prompt_tokens=0, output_tokens=0),
            ],
        )
        result = await play(root, plugins=[TerminationPlugin(TokenUsageTermination(max_total=limit))])
        assert ("after 1" in result.texts) is not fires
        assert ("total token count: 7000" in str(termination_reason(result.events[-1]))) is fires


@pytest.mark.parametrize("slow", [0.05, 0.5])
async def test_paid_answers_of_siblings_are_kept(slow: float) -> None:
    first, siblings = speaker("first", say=lambda n: "DONE"), [speaker(f"s{n}", latency_s=slow) for n in range(6)]
    root = ParallelAgent(name="par", sub_agents=[first, *siblings])
    result = await play(root, plugins=[TerminationPlugin(TextMentionTermination("DONE"))])
    assert sorted(result.texts) == ["DONE", *(f"s{n} 1" for n in range(6))]
    assert_ended(result, "Text 'DONE' mentioned", "par")


async def test_siblings_make_no_further_call_once_it_has_fired_however_slow_the_caller_is() -> None:
    first, sibling = speaker("first", say=lambda n: "DONE"), worker("sibling", latency_s=0.02)

    async def not_before_the_sibling(callback_context: Any, llm_request: Any) -> None:
        while sibling.model.calls < 2:  # noqa: ASYNC110 - the model has no event to wait for
            await asyncio.sleep(0.005)

    first.before_model_callback = not_before_the_sibling
    root = ParallelAgent(name="par", sub_agents=[first, _behind_tool(sibling)])  # a run of its own waits for nobody
    runner = await runner_of(root, TerminationPlugin(TextMentionTermination("DONE")))
    events, made = [], 0
    async for event in runner.run_async(user_id="u1", session_id="s1", new_message=message()):
        events.append(event)
        if event.author == "first":
            made = sibling.model.calls
            await asyncio.sleep(0.3)  # time enough for the sibling to go on
    assert sibling.model.calls <= made + 1, "one may have been on its way"
    assert termination_reason(events[-1])


async def test_tokens_of_agents_behind_tools_count_once() -> None:
    for include_plugins in (True, False):
        inner = speaker("inner")
        outer = LlmAgent(
            name="outer",
            model=ScriptedModel(lambda n, _: call("inner", request=f"{n}")),
            tools=[AgentTool(inner, include_plugins=include_plugins)],
        )
        result = await play(outer, plugins=[TerminationPlugin(TokenUsageTermination(max_total=6 * CALL))])
        assert (outer.model.calls, inner.model.calls) == (3, 3)
        assert_ended(result, f"total token count: {6 * CALL}")


async def test_cost_of_agents_behind_tools_counts() -> None:
    inner = speaker("inner")
    outer = LlmAgent(
        name="outer", model=ScriptedModel(lambda n, _: call("inner", request=f"{n}")), tools=[AgentTool(inner)]
    )
    result = await play(outer, plugins=[TerminationPlugin(CostTermination("0.006", PRICES, model="scripted-1"))])
    assert (outer.model.calls, inner.model.calls) == (2, 2)
    assert_ended(result, "0.006")


@pytest.mark.parametrize("guarded", [True, False])
async def test_a_model_that_a_tool_consults_counts(guarded: bool) -> None:
    adviser = ScriptedModel([text("do it")])

    async def consult(n: int) -> dict[str, int]:
        """Asks another model."""
        async for _ in adviser.generate_content_async(LlmRequest(model="scripted-1", contents=[message()])):
            pass
        return {"n": n}

    agent = LlmAgent(name="w", model=ScriptedModel(lambda n, _: call("consult", n=n)), tools=[consult])
    plugins = [*([RunGuardPlugin()] if guarded else []), TerminationPlugin(TokenUsageTermination(max_total=6 * CALL))]
    result = await play(agent, plugins=plugins)
    assert (agent.model.calls, adviser.calls) == (3, 3)
    assert_ended(result, f"total token count: {6 * CALL}")


async def test_events_that_an_agent_holds_back_and_gives_later_count_once() -> None:
    class Later(BaseAgent):
        async def _run_async_impl(self, ctx: InvocationContext) -> AsyncGenerator[Event, None]:
            held = [event for _ in range(3) for event in [one async for one in self.sub_agents[0].run_async(ctx)]]
            for event in held:
                yield event

    seen: list[int] = []
    spy = FunctionalTermination(lambda events: bool(seen.extend(len(events) for _ in events)))
    for limit, fires in ((3 * CALL, True), (3 * CALL + 2, False)):
        writer = speaker()
        root = SequentialAgent(
            name="root",
            sub_agents=[Later(name="later", sub_agents=[writer]), speaker("last", prompt_tokens=1, output_tokens=0)],
        )
        result = await play(root, plugins=[TerminationPlugin(TokenUsageTermination(max_total=limit) | spy)])
        assert writer.model.calls == 3
        assert any(termination_reason(event) for event in result.events) is fires
        assert ("last 1" in result.texts) is not fires
    assert seen, "the function is told of events all the same"


async def test_a_runner_inside_of_a_tool_has_a_condition_of_its_own() -> None:
    runguard.install()
    inner = worker("inner")

    async def delegate(n: int) -> dict[str, Any]:
        """Runs an agent."""
        runner, condition = await runner_of(inner), TokenUsageTermination(max_total=3 * CALL)
        stream = runner.run_async(user_id="u1", session_id="s1", new_message=message(), termination_condition=condition)
        return {"why": termination_reason([event async for event in stream][-1])}

    result = await play(
        LlmAgent(name="outer", model=ScriptedModel([call("delegate", n=1), text("done")]), tools=[delegate])
    )
    assert inner.model.calls == 3
    assert result.texts == ["done"], "the run around it goes on"
    (answer,) = [response.response for event in result.events for response in event.get_function_responses()]
    assert f"total token count: {3 * CALL}" in answer["why"]


# ---- streaming ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("usage_on", ["all", "last", "final"])
async def test_chunks_of_a_stream_count_once(usage_on: str) -> None:
    writer = speaker(chunks=5, usage_on=usage_on)
    root = LoopAgent(name="loop", sub_agents=[writer])
    result = await play(root, plugins=[TerminationPlugin(TokenUsageTermination(max_total=3 * CALL))], run_config=SSE)
    assert writer.model.calls == 3
    assert_ended(result, f"total token count: {3 * CALL}")
    writer = speaker(chunks=5, usage_on=usage_on)
    result = await play(
        LoopAgent(name="loop", sub_agents=[writer]),
        plugins=[TerminationPlugin(MaxIterationsTermination(2))],
        run_config=SSE,
    )
    assert writer.model.calls == 2


# ---- before the next paid call --------------------------------------------------------------------------------------


async def test_time_that_is_up_during_a_tool_spares_the_next_call() -> None:
    def slow(n: int) -> dict[str, int]:
        """Holds up the event loop."""
        time.sleep(0.6)
        return {"n": n}

    agent = LlmAgent(name="w", model=ScriptedModel(lambda n, _: call("slow", n=n)), tools=[slow])
    result = await play(agent, plugins=[TerminationPlugin(TimeoutTermination(0.5))])
    assert agent.model.calls == 1
    assert_ended(result, "Timeout of 0.5 seconds")


async def test_a_signal_given_before_the_first_call_of_a_run_is_not_for_it_and_one_during_it_is() -> None:
    stop, agent = ExternalTermination(), worker()
    stop.set()

    def press(n: int) -> dict[str, int]:
        """Somebody presses the button."""
        stop.set()
        return {"n": n}

    pressing = LlmAgent(name="w", model=ScriptedModel(lambda n, _: call("press", n=n)), tools=[press])
    result = await play(pressing, plugins=[TerminationPlugin(stop)])
    assert pressing.model.calls == 1
    assert_ended(result, "External termination requested")
    result = await play(agent, plugins=[TerminationPlugin(stop | MaxIterationsTermination(4))])
    assert_ended(result, "Maximum of 4")


async def test_a_call_that_is_refused_spins_no_loop() -> None:
    """Agents that ask again and again, whatever they are answered, are ended; those beside them keep what was paid."""
    team = Team(endless=True)
    asked = asyncio.get_running_loop().time()
    await play(custom_quiet_loop(team), plugins=[TerminationPlugin(TokenUsageTermination(max_total=2 * CALL))])
    assert team.calls == 2
    assert asyncio.get_running_loop().time() - asked < 2


# ---- signals and clocks ---------------------------------------------------------------------------------------------


class Trickle(BaseLlm):
    """A stream that never ends."""

    model: str = "trickle"

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        while True:
            yield LlmResponse(content=types.Content(role="model", parts=[types.Part(text="…")]), partial=True)
            await asyncio.sleep(0.01)


async def wait(n: int) -> dict[str, int]:
    """A tool that takes half a minute."""
    await asyncio.sleep(30)
    return {"n": n}


class Idle(BaseAgent):
    """Waits without asking anybody."""

    async def _run_async_impl(self, ctx: InvocationContext) -> AsyncGenerator[Event, None]:
        await asyncio.sleep(30)
        yield Event(author=self.name, invocation_id=ctx.invocation_id)


def _stuck(name: str = "stuck") -> LlmAgent:
    return speaker(name, latency_s=30)


def _in_tool(name: str = "tooled") -> LlmAgent:
    return LlmAgent(name=name, description=name, model=ScriptedModel([call("wait", n=1)]), tools=[wait])


def _behind_tool(inner: Any) -> LlmAgent:
    return LlmAgent(name="outer", model=ScriptedModel([call(inner.name, request="go")]), tools=[AgentTool(inner)])


KINDS: dict[str, Callable[[], Any]] = {
    "model": _stuck,
    "tool": _in_tool,
    "two tools": lambda: LlmAgent(
        name="both", model=ScriptedModel([calls(call("wait", n=1), call("wait", n=2))]), tools=[wait]
    ),
    "stream": lambda: LlmAgent(name="streaming", model=Trickle()),
    "sequence": lambda: SequentialAgent(name="seq", sub_agents=[speaker("first"), _stuck()]),
    "sequence in a tool": lambda: SequentialAgent(name="seq", sub_agents=[_in_tool()]),
    "loop": lambda: LoopAgent(name="loop", sub_agents=[_stuck()]),
    "parallel": lambda: ParallelAgent(
        name="par", sub_agents=[speaker("quick"), _stuck(), _in_tool(), LlmAgent(name="streaming", model=Trickle())]
    ),
    "parallel of parallel": lambda: ParallelAgent(
        name="par", sub_agents=[ParallelAgent(name="in", sub_agents=[_stuck("a"), _in_tool("b")])]
    ),
    "workflow": lambda: Workflow(name="wf", edges=[("START", first := speaker("first")), (first, _stuck())]),
    "workflow in a tool": lambda: Workflow(name="wf", edges=[("START", _in_tool())]),
    "behind a tool": lambda: _behind_tool(_stuck()),
    "tool behind a tool": lambda: _behind_tool(_in_tool()),
    "custom": lambda: Idle(name="idle"),
    "transfer": lambda: LlmAgent(name="lead", model=ScriptedModel([transfer("stuck")]), sub_agents=[_stuck()]),
}


@pytest.mark.parametrize("guarded", [False, True])
async def test_a_signal_ends_all_runs_under_way(guarded: bool) -> None:
    stop = ExternalTermination()
    plugins = lambda: [*([RunGuardPlugin()] if guarded else []), TerminationPlugin(stop)]  # noqa: E731
    runs = [asyncio.create_task(play(make(), plugins=plugins(), run_config=SSE)) for make in KINDS.values()]
    await asyncio.sleep(1.0)
    assert not any(run.done() for run in runs)
    began = time.monotonic()
    threading.Thread(target=stop.set).start()
    results = await asyncio.gather(*runs)
    assert time.monotonic() - began < 15
    for kind, result in zip(KINDS, results, strict=True):
        last = result.events[-1]
        assert (kind, termination_reason(last), last.actions.escalate) == (kind, "External termination requested", True)
        assert last.invocation_id == result.session.events[-1].invocation_id == result.session.events[0].invocation_id
        assert_calls_answered(result.session)
    assert asyncio.current_task().cancelling() == 0


@pytest.mark.parametrize("kind", ["model", "tool", "parallel", "workflow", "behind a tool", "custom"])
@pytest.mark.parametrize(
    "condition",
    [TimeoutTermination(0.2), TimeoutTermination(0.05) & TimeoutTermination(0.2), FunctionalTermination(_is_third)],
)
async def test_the_clock_ends_what_waits(kind: str, condition: TerminationCondition) -> None:
    began = time.monotonic()
    condition = condition | TimeoutTermination(0.2)
    result = await play(KINDS[kind](), plugins=[TerminationPlugin(condition)], run_config=SSE)
    assert 0.2 <= time.monotonic() - began < 15
    assert "Timeout of 0.2 seconds reached" in (termination_reason(result.events[-1]) or "")
    assert_calls_answered(result.session)


async def test_a_signal_beside_an_async_function_ends_a_call_under_way() -> None:
    stop = ExternalTermination()
    asyncio.get_running_loop().call_later(0.1, stop.set)
    result = await play(_stuck(), plugins=[TerminationPlugin(FunctionalTermination(_is_third) | stop)])
    assert termination_reason(result.events[-1]) == "External termination requested"


async def test_a_signal_ends_the_wait_for_paid_answers() -> None:
    stop = ExternalTermination()
    asyncio.get_running_loop().call_later(0.4, stop.set)
    began = time.monotonic()
    root = ParallelAgent(name="par", sub_agents=[speaker("first", say=lambda n: "DONE"), _stuck()])
    result = await play(root, plugins=[TerminationPlugin(TextMentionTermination("DONE") | stop)])
    assert 0.35 < time.monotonic() - began < 15, "it waits for the answer that was paid, until there is no more time"
    assert_ended(result, "Text 'DONE' mentioned")


async def test_a_signal_given_between_two_events_is_heard() -> None:
    stop = ExternalTermination()
    root = ParallelAgent(name="par", sub_agents=[speaker("first"), _stuck()])
    runner, events = await runner_of(root, TerminationPlugin(stop)), []
    async with asyncio.timeout(3):
        async for event in runner.run_async(user_id="u1", session_id="s1", new_message=message()):
            events.append(event)
            stop.set()
    assert [termination_reason(event) for event in events] == [None, "External termination requested"]


async def test_a_signal_that_is_one_half_of_an_and_ends_nothing_alone() -> None:
    stop = ExternalTermination()
    asyncio.get_running_loop().call_later(0.05, stop.set)
    agent = speaker(latency_s=0.2)
    result = await play(agent, plugins=[TerminationPlugin(stop & TextMentionTermination("writer 1"))])
    assert result.texts == ["writer 1"], "the call went on to its end"
    assert_ended(result, "External termination requested, Text 'writer 1' mentioned")


async def test_a_tool_that_swallows_its_end_does_not_save_the_run() -> None:
    async def stubborn(n: int) -> dict[str, int]:
        """Will not be cancelled."""
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            return {"n": n}
        return {"n": 0}

    for root in (lambda agent: agent, lambda agent: SequentialAgent(name="seq", sub_agents=[agent])):
        stop, agent = (
            ExternalTermination(),
            LlmAgent(name="w", model=ScriptedModel(lambda n, _: call("stubborn", n=n)), tools=[stubborn]),
        )
        asyncio.get_running_loop().call_later(0.1, stop.set)
        result = await play(root(agent), plugins=[TerminationPlugin(stop)], seconds=5)
        assert agent.model.calls == 1
        assert_ended(result, "External termination requested")
        assert asyncio.current_task().cancelling() == 0


async def test_an_agent_that_swallows_its_end_leaves_no_trace_of_it() -> None:
    class Stubborn(BaseAgent):
        async def _run_async_impl(self, ctx: InvocationContext) -> AsyncGenerator[Event, None]:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                yield Event(author=self.name, invocation_id=ctx.invocation_id)

    result = await play(Stubborn(name="stubborn"), plugins=[TerminationPlugin(TimeoutTermination(0.1))])
    assert_ended(result, "Timeout of 0.1 seconds")
    assert asyncio.current_task().cancelling() == 0


async def test_a_callers_own_cancellation_is_passed_on() -> None:
    run = asyncio.create_task(
        play(_stuck(), plugins=[TerminationPlugin(ExternalTermination() | TimeoutTermination(60))], seconds=20)
    )
    await asyncio.sleep(0.1)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run


async def test_errors_of_agents_are_passed_on() -> None:
    agent = LlmAgent(name="w", model=ScriptedModel([ValueError("no such model")]))
    with pytest.raises(ValueError, match="no such model"):
        await play(agent, plugins=[TerminationPlugin(MaxIterationsTermination(5))])


# ---- one instance, many runs ----------------------------------------------------------------------------------------


async def test_one_instance_serves_runs_at_once_without_mixing_them() -> None:
    condition = TokenUsageTermination(max_total=4 * CALL) | MaxMessageTermination(9)
    plugin, writers = TerminationPlugin(condition), [speaker(latency_s=0.005 * (n % 3)) for n in range(12)]
    results = await asyncio.gather(
        *(
            play(LoopAgent(name="loop", sub_agents=[w]), plugins=[plugin], session_id=f"s{n}")
            for n, w in enumerate(writers)
        )
    )
    assert [writer.model.calls for writer in writers] == [4] * 12
    for result in results:
        assert_ended(result, f"total token count: {4 * CALL}")


async def test_one_instance_serves_several_loops_of_one_run() -> None:
    condition = MaxIterationsTermination(3)
    writers = [speaker(f"w{n}", latency_s=0.01) for n in range(3)]
    loops = [terminate(LoopAgent(name=f"loop{n}", sub_agents=[writer]), condition) for n, writer in enumerate(writers)]
    result = await play(ParallelAgent(name="par", sub_agents=loops))
    assert [writer.model.calls for writer in writers] == [3, 3, 3]
    ended = [event for event in result.events if termination_reason(event)]
    assert sorted(event.author for event in ended) == ["loop0", "loop1", "loop2"]
    assert all(event.actions.escalate for event in ended)
    assert not any(event.actions.escalate for event in result.session.events), (
        "inside, it would end the branches beside it"
    )


async def test_work_that_a_tool_left_behind_is_not_refused_after_a_run_that_ended_by_itself() -> None:
    left: list[asyncio.Task[Any]] = []
    helper = speaker("helper", latency_s=1.2)

    async def start(n: int) -> dict[str, int]:
        """Starts something and does not wait for it."""
        left.append(asyncio.create_task(play(helper, session_id="background")))
        await asyncio.sleep(0)
        return {"n": n}

    agent = LlmAgent(name="w", model=ScriptedModel([call("start", n=1), text("started")]), tools=[start])
    await play(agent, plugins=[TerminationPlugin(TokenUsageTermination(max_total=3 * CALL) | TimeoutTermination(1))])
    assert (await left[0]).texts == ["helper 1"]
