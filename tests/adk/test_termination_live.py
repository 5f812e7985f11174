"""termination_condition= on LoopAgent and on the runner."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from google.adk.agents import LlmAgent, LoopAgent
from google.adk.sessions import InMemorySessionService

import runguard
from runguard.adk import TerminationPlugin, terminate
from runguard.errors import PolicyError
from runguard.termination import (
    CostTermination,
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
from runguard.testing import ScriptedModel, call, transfer
from tests.kit.adk_runs import play
from tests.kit.agents import scripted
from tests.kit.contents import parts
from tests.kit.terminating_agents import CALL, PRICES, assert_ended, is_third, message, runner_of, speaker, worker
from tests.kit.topologies import (
    step,
)

# ---- LoopAgent(..., termination_condition=...) ----------------------------------------------------------------------


async def test_the_loops_after_callback_still_runs() -> None:
    runguard.install()
    ended: list[str] = []
    root = LoopAgent(  # type: ignore[call-arg]
        name="loop",
        sub_agents=[speaker()],
        termination_condition=MaxIterationsTermination(2),
        after_agent_callback=lambda callback_context: ended.append(callback_context.agent_name),
    )
    await play(root)
    assert ended == ["loop"]


def test_without_install_the_keyword_says_what_to_do() -> None:
    condition = MaxIterationsTermination(3)
    for error in (PolicyError, ValueError):  # ADK's own error about keywords is a ValueError
        with pytest.raises(error, match=r"call runguard\.install\(\) before .*terminate\(loop_agent, condition\)"):
            LoopAgent(name="loop", sub_agents=[], termination_condition=condition)  # type: ignore[call-arg]
    LoopAgent(name="loop", sub_agents=[], termination_condition=None)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        LoopAgent(name="loop", sub_agents=[], terminationcondition=condition)  # type: ignore[call-arg]


async def test_the_condition_can_be_read_and_assigned() -> None:
    runguard.install()
    first, second = MaxIterationsTermination(2), MaxIterationsTermination(4)
    root: Any = LoopAgent(name="loop", sub_agents=[speaker()], max_iterations=6, termination_condition=first)  # type: ignore[call-arg]
    assert root.termination_condition is first
    assert root.clone().termination_condition is first
    result = await play(root)
    assert result.texts == ["writer 1", "writer 2"]
    assert_ended(result, "Maximum of 2 events reached", "loop")
    root.termination_condition = second
    assert root.termination_condition is second
    assert_ended(await play(root), "4", "loop")
    root.termination_condition = None
    assert root.termination_condition is None
    assert len((await play(root)).texts) == 6
    plain: Any = LoopAgent(name="plain", sub_agents=[speaker()])
    assert plain.termination_condition is None
    with pytest.raises(PolicyError, match=r"(no|not a) termination condition"):
        plain.termination_condition = "TERMINATE"
    assert plain.termination_condition is None
    plain.termination_condition = second
    assert_ended(await play(plain), "4", "plain")


@pytest.mark.parametrize("where", ["loop", "run"])
async def test_reading_final_responses_does_not_meet_the_terminating_event(where: str) -> None:
    """``if event.is_final_response(): … event.content.parts[0].text``, as many programs read a run."""
    runguard.install()
    condition = MaxIterationsTermination(3)
    root = LoopAgent(
        name="loop", sub_agents=[speaker()], **({"termination_condition": condition} if where == "loop" else {})
    )
    runner = await runner_of(root)
    options: dict[str, Any] = {"termination_condition": condition} if where == "run" else {}
    events = runner.run_async(user_id="u1", session_id="s1", new_message=message(), **options)
    read = [parts(event.content)[0].text async for event in events if event.is_final_response()]
    assert read == ["writer 1", "writer 2", "writer 3"]


@pytest.mark.parametrize("nonsense", ["TERMINATE", 5, TextMentionTermination])
async def test_what_is_no_condition_is_refused_at_once(nonsense: Any) -> None:
    runguard.install()
    with pytest.raises(PolicyError, match=r"(no|not a) termination condition"):
        LoopAgent(name="loop", sub_agents=[], termination_condition=nonsense)  # type: ignore[call-arg]
    with pytest.raises(PolicyError, match=r"(no|not a) termination condition"):
        TerminationPlugin(nonsense)
    with pytest.raises(PolicyError, match=r"(no|not a) termination condition"):
        terminate(speaker(), nonsense)
    runner = await runner_of(speaker())
    with pytest.raises(PolicyError, match=r"(no|not a) termination condition"):
        runner.run_async(user_id="u1", session_id="s1", new_message=message(), termination_condition=nonsense)  # type: ignore[call-arg]
    with pytest.raises(PolicyError, match=r"(no|not a) termination condition"):
        list(runner.run(user_id="u1", session_id="s1", new_message=message(), termination_condition=nonsense))  # type: ignore[call-arg]


def test_terminate_says_what_it_takes() -> None:
    with pytest.raises(PolicyError, match="scope = 'outer'"):
        terminate(speaker(), MaxIterationsTermination(1), scope="outer")
    with pytest.raises(PolicyError, match="give an agent or a Workflow"):
        terminate("agent", MaxIterationsTermination(1))
    agent = speaker()
    assert terminate(agent, MaxIterationsTermination(1)) is agent


# ---- runner.run_async(..., termination_condition=...) ---------------------------------------------------------------


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
        assert scripted(writer).calls == 2 * turn
        assert_ended(result, "Maximum of 2 events reached, current count: 2")
    assert not condition.terminated


def test_synchronous_runs_with_the_same_message_do_not_mix_their_conditions() -> None:
    runguard.install()
    shared = message()
    writers = [speaker(latency_s=0.02) for _ in range(4)]
    runners = [asyncio.run(runner_of(LoopAgent(name="loop", sub_agents=[writer]))) for writer in writers]
    gate = threading.Barrier(4)

    def one(number: int) -> None:
        gate.wait()
        list(
            runners[number].run(  # type: ignore[call-arg]
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
    assert [scripted(writer).calls for writer in writers] == [2, 3, 4, 5]


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
        assert scripted(writer).calls == turns
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
        FunctionalTermination(is_third),
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
