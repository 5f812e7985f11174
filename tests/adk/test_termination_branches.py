"""Conditions over parallel branches, with signals and clocks, and over many runs."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import pytest
from google.adk.agents import BaseAgent, LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.agents.invocation_context import InvocationContext
from google.adk.events import Event
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins import BasePlugin
from google.adk.tools.agent_tool import AgentTool
from google.adk.workflow import Workflow
from google.genai import types

import runguard
from runguard.adk import RunGuardPlugin, TerminationPlugin, termination_reason
from runguard.termination import (
    CostTermination,
    ExternalTermination,
    FunctionalTermination,
    MaxIterationsTermination,
    MaxMessageTermination,
    TerminationCondition,
    TextMentionTermination,
    TimeoutTermination,
    TokenUsageTermination,
)
from runguard.testing import ScriptedModel, assert_calls_answered, call, calls, text, transfer
from tests.kit.adk_runs import play
from tests.kit.agents import scripted
from tests.kit.optional import present
from tests.kit.terminating_agents import CALL, PRICES, SSE, assert_ended, is_third, message, runner_of, speaker, worker
from tests.kit.waiting import until_async

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
        await until_async(lambda: scripted(sibling).calls >= 2)

    first.before_model_callback = not_before_the_sibling
    root = ParallelAgent(name="par", sub_agents=[first, _behind_tool(sibling)])  # a run of its own waits for nobody
    runner = await runner_of(root, TerminationPlugin(TextMentionTermination("DONE")))
    events, made = [], 0
    async for event in runner.run_async(user_id="u1", session_id="s1", new_message=message()):
        events.append(event)
        if event.author == "first":
            made = scripted(sibling).calls
            await asyncio.sleep(0.3)  # time enough for the sibling to go on
    assert scripted(sibling).calls <= made + 1, "one may have been on its way"
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
        assert (scripted(outer).calls, scripted(inner).calls) == (3, 3)
        assert_ended(result, f"total token count: {6 * CALL}")


async def test_cost_of_agents_behind_tools_counts() -> None:
    inner = speaker("inner")
    outer = LlmAgent(
        name="outer", model=ScriptedModel(lambda n, _: call("inner", request=f"{n}")), tools=[AgentTool(inner)]
    )
    result = await play(outer, plugins=[TerminationPlugin(CostTermination("0.006", PRICES, model="scripted-1"))])
    assert (scripted(outer).calls, scripted(inner).calls) == (2, 2)
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
    assert (scripted(agent).calls, adviser.calls) == (3, 3)
    assert_ended(result, f"total token count: {6 * CALL}")


async def test_events_that_an_agent_holds_back_and_gives_later_count_once() -> None:
    class Later(BaseAgent):
        async def _run_async_impl(self, ctx: InvocationContext) -> AsyncGenerator[Event, None]:
            held = [event for _ in range(3) for event in [one async for one in self.sub_agents[0].run_async(ctx)]]
            for event in held:
                yield event

    seen: list[int] = []

    def look(events: Sequence[Any]) -> bool:
        seen.extend(len(events) for _ in events)
        return False

    spy = FunctionalTermination(look)
    for limit, fires in ((3 * CALL, True), (3 * CALL + 2, False)):
        writer = speaker()
        root = SequentialAgent(
            name="root",
            sub_agents=[Later(name="later", sub_agents=[writer]), speaker("last", prompt_tokens=1, output_tokens=0)],
        )
        result = await play(root, plugins=[TerminationPlugin(TokenUsageTermination(max_total=limit) | spy)])
        assert scripted(writer).calls == 3
        assert any(termination_reason(event) for event in result.events) is fires
        assert ("last 1" in result.texts) is not fires
    assert seen, "the function is told of events all the same"


async def test_a_runner_inside_of_a_tool_has_a_condition_of_its_own() -> None:
    runguard.install()
    inner = worker("inner")

    async def delegate(n: int) -> dict[str, Any]:
        """Runs an agent."""
        runner, condition = await runner_of(inner), TokenUsageTermination(max_total=3 * CALL)
        stream = runner.run_async(user_id="u1", session_id="s1", new_message=message(), termination_condition=condition)  # type: ignore[call-arg]
        return {"why": termination_reason([event async for event in stream][-1])}

    result = await play(
        LlmAgent(name="outer", model=ScriptedModel([call("delegate", n=1), text("done")]), tools=[delegate])
    )
    assert scripted(inner).calls == 3
    assert result.texts == ["done"], "the run around it goes on"
    (answer,) = [response.response for event in result.events for response in event.get_function_responses()]
    assert f"total token count: {3 * CALL}" in present(answer)["why"]


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

    def plugins() -> list[BasePlugin]:
        return [*([RunGuardPlugin()] if guarded else []), TerminationPlugin(stop)]

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
    assert present(asyncio.current_task()).cancelling() == 0


@pytest.mark.parametrize("kind", ["model", "tool", "parallel", "workflow", "behind a tool", "custom"])
@pytest.mark.parametrize(
    "condition",
    [TimeoutTermination(0.2), TimeoutTermination(0.05) & TimeoutTermination(0.2), FunctionalTermination(is_third)],
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
    result = await play(_stuck(), plugins=[TerminationPlugin(FunctionalTermination(is_third) | stop)])
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
    stops: list[ExternalTermination] = []

    async def stubborn(n: int) -> dict[str, int]:
        """Will not be cancelled."""
        asyncio.get_running_loop().call_later(0.05, stops[-1].set)
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            return {"n": n}
        return {"n": 0}

    for root in (lambda agent: agent, lambda agent: SequentialAgent(name="seq", sub_agents=[agent])):
        stops.append(ExternalTermination())
        agent = LlmAgent(name="w", model=ScriptedModel(lambda n, _: call("stubborn", n=n)), tools=[stubborn])
        result = await play(root(agent), plugins=[TerminationPlugin(stops[-1])], seconds=20)
        assert scripted(agent).calls == 1
        assert_ended(result, "External termination requested")
        assert present(asyncio.current_task()).cancelling() == 0


async def test_an_agent_that_swallows_its_end_leaves_no_trace_of_it() -> None:
    class Stubborn(BaseAgent):
        async def _run_async_impl(self, ctx: InvocationContext) -> AsyncGenerator[Event, None]:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                yield Event(author=self.name, invocation_id=ctx.invocation_id)

    result = await play(Stubborn(name="stubborn"), plugins=[TerminationPlugin(TimeoutTermination(0.1))])
    assert_ended(result, "Timeout of 0.1 seconds")
    assert present(asyncio.current_task()).cancelling() == 0


async def test_a_callers_own_cancellation_is_passed_on() -> None:
    agent = _stuck()
    run = asyncio.create_task(
        play(agent, plugins=[TerminationPlugin(ExternalTermination() | TimeoutTermination(60))], seconds=20)
    )
    await until_async(lambda: scripted(agent).calls)
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
    assert [scripted(writer).calls for writer in writers] == [4] * 12
    for result in results:
        assert_ended(result, f"total token count: {4 * CALL}")


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
