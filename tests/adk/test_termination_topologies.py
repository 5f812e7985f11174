"""Conditions on every topology: scopes, answered calls, streaming."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.sessions import InMemorySessionService
from google.adk.sessions.sqlite_session_service import SqliteSessionService
from google.adk.tools.agent_tool import AgentTool
from google.adk.workflow import Workflow

import runguard
from runguard.adk import RunGuardPlugin, TerminationPlugin, terminate, termination_reason
from runguard.termination import (
    CostTermination,
    ExternalTermination,
    FunctionalTermination,
    MaxIterationsTermination,
    NoProgressTermination,
    TextMentionTermination,
    TimeoutTermination,
    TokenUsageTermination,
)
from runguard.testing import ScriptedModel, assert_calls_answered, call, calls, text
from tests.kit.adk_runs import play, prompts, told
from tests.kit.agents import scripted
from tests.kit.contents import parts
from tests.kit.terminating_agents import CALL, PRICES, SSE, assert_ended, is_third, speaker, worker
from tests.kit.topologies import (
    TOPOLOGIES,
    Team,
    agent_tool_of_parallel,
    agent_tools_at_once,
    custom_quiet_loop,
    loop_of_parallel,
    parallel,
    parallel_of_custom_loops,
    parallel_of_loops,
    sequential_with_parallel,
    single,
    single_turn_two_at_once,
    spread,
    step,
    workflow_dynamic_nodes_at_once,
    workflow_join,
    workflow_parallel_worker,
)

Topology = Callable[[Team], Any]


everywhere = pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology.__name__)


# Calls may be on their way together: the last ones have left before the first of them is counted.
AT_ONCE: dict[Topology, int] = {
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
        | FunctionalTermination(is_third)
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


@pytest.mark.parametrize(("topology", "guard_first"), spread(True, False))
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
    inner = LoopAgent(name="inner", sub_agents=[writer], termination_condition=MaxIterationsTermination(2))  # type: ignore[call-arg]
    result = await play(LoopAgent(name="outer", sub_agents=[inner, speaker("judge")], max_iterations=3))
    assert scripted(writer).calls == 6
    ended = [event for event in result.events if termination_reason(event)]
    assert [event.author for event in ended] == ["inner"] * 3
    assert [(event.actions.escalate, event.actions.termination_reason) for event in ended] == [  # type: ignore[attr-defined]
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
        asked = writer if kind == "loop" else worker("inner")
        inner = LoopAgent(name="inner", sub_agents=[writer]) if kind == "loop" else asked
        terminate(inner, MaxIterationsTermination(2), scope=scope)
        root = _around(shape, inner, after, slow)
        result = await play(root)
        assert scripted(asked).calls == {"loop": 2, "llm": 1}[kind] * (2 if (shape, scope) == ("loop", "loop") else 1)
        assert_calls_answered(result.session)
        if shape == "agent_tool":
            assert ("root is done" in result.texts) is (scope == "loop")
        else:
            assert (scripted(after).calls > 0) is (scope == "loop")
        if shape == "parallel":
            assert "slow 1" in result.texts, "a sibling's paid answer is kept"
        if scope == "run":
            last = result.events[-1]
            assert (termination_reason(last), last.actions.escalate) == (
                "Maximum of 2 events reached, current count: 2",
                True,
            )
            assert last.actions.termination_reason == termination_reason(last)  # type: ignore[attr-defined]


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
        position for position, content in enumerate(contents) if any(part.function_call for part in parts(content))
    )
    assert len([part for part in parts(contents[asked + 1]) if part.function_response]) == 2, (
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


# ---- streaming ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("usage_on", ["all", "last", "final"])
async def test_chunks_of_a_stream_count_once(usage_on: str) -> None:
    writer = speaker(chunks=5, usage_on=usage_on)
    root = LoopAgent(name="loop", sub_agents=[writer])
    result = await play(root, plugins=[TerminationPlugin(TokenUsageTermination(max_total=3 * CALL))], run_config=SSE)
    assert scripted(writer).calls == 3
    assert_ended(result, f"total token count: {3 * CALL}")
    writer = speaker(chunks=5, usage_on=usage_on)
    result = await play(
        LoopAgent(name="loop", sub_agents=[writer]),
        plugins=[TerminationPlugin(MaxIterationsTermination(2))],
        run_config=SSE,
    )
    assert scripted(writer).calls == 2


# ---- before the next paid call --------------------------------------------------------------------------------------


async def test_time_that_is_up_during_a_tool_spares_the_next_call() -> None:
    def slow(n: int) -> dict[str, int]:
        """Holds up the event loop."""
        time.sleep(0.6)
        return {"n": n}

    agent = LlmAgent(name="w", model=ScriptedModel(lambda n, _: call("slow", n=n)), tools=[slow])
    result = await play(agent, plugins=[TerminationPlugin(TimeoutTermination(0.5))])
    assert scripted(agent).calls == 1
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
    assert scripted(pressing).calls == 1
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
