"""Termination conditions end a run of every framework cleanly, or are rejected where they cannot fire."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

import runguard
from runguard import (
    CostTermination,
    ExternalTermination,
    FinalAnswerTermination,
    FunctionalTermination,
    FunctionCallTermination,
    HandoffTermination,
    MaxIterationsTermination,
    MaxMessageTermination,
    NoProgressTermination,
    PolicyError,
    RuleTermination,
    StateTermination,
    TextMentionTermination,
    TimeoutTermination,
    TokenUsageTermination,
    termination_reason,
)
from runguard.langchain import GuardedChatModel, RunGuardMiddleware
from runguard.termination import TerminatedError
from runguard.testing.conformance import MODEL, AgentSpec, Harness, Reply, begun
from tests.frameworks.harnesses import OTHERS
from tests.frameworks.langchain_harness import LangChainSession, ScriptedChat
from tests.frameworks.openai_harness import OpenAIAgentsHarness
from tests.frameworks.pydantic_harness import PydanticAIHarness, PydanticAISession

PRICES: Any = {MODEL: {"input": 0.0, "output": 1_000.0}}  # a call of 100 output tokens costs ten cents


@pytest.fixture(params=OTHERS, ids=lambda harness: harness.name)
def harness(request: pytest.FixtureRequest) -> Harness:
    found: Harness = request.param
    return found


def paging(last: int = 12) -> AgentSpec:
    """Healthy work of eleven tool calls: no rule of the guard stops it."""

    def step(n: int, newest: str) -> Reply:
        return Reply(calls=[("page", {"n": n})]) if n < last and newest != "thanks" else Reply("done")

    return AgentSpec(step, "reader", {"page": lambda n: f"page {n}"})


def same_page() -> AgentSpec:
    return AgentSpec(
        lambda n, _: Reply(calls=[("page", {"n": 1})]) if n < 30 else Reply("done"),
        "reader",
        {"page": lambda n: "page 1"},
    )


async def enough(events: Sequence[Any]) -> bool:
    await asyncio.sleep(0)
    return any(
        part.function_response and part.function_response.response == "page 3"
        for one in events
        for part in one.content.parts
    )


CONDITIONS: list[tuple[Callable[[], Any], int, str]] = [
    (lambda: MaxIterationsTermination(6), 3, "Maximum of 6 events"),
    (lambda: MaxMessageTermination(6, include_agent_event=True), 3, "Maximum number of messages 6"),
    (lambda: FunctionCallTermination("page"), 1, "Function 'page' was executed"),
    (lambda: TokenUsageTermination(max_total=3_300), 3, "total token count: 3300"),
    (lambda: CostTermination("0.30", prices=PRICES, model=MODEL), 3, "Cost limit of $0.3"),
    (lambda: FunctionalTermination(enough), 3, "Functional"),
    (lambda: MaxIterationsTermination(4) & FunctionCallTermination("page"), 2, "Maximum of 4 events"),
    (lambda: TextMentionTermination("never") | MaxIterationsTermination(6), 3, "Maximum of 6 events"),
]


@pytest.mark.parametrize(("make", "calls", "reason"), CONDITIONS, ids=[reason for _, _, reason in CONDITIONS])
async def test_a_condition_ends_the_run_before_its_next_model_call(
    harness: Harness, make: Callable[[], Any], calls: int, reason: str
) -> None:
    guard = harness.guard(termination_condition=make())
    session = harness.session(paging(), guard)
    result = await session.turn("read")
    assert (session.model_calls, result.error, result.open_calls) == (calls, None, [])
    assert reason in result.text
    assert guard.trips == [], "the end of the work is not a trip"
    assert (await session.turn("thanks")).text == "done", "the next turn is a run of its own"


@pytest.mark.parametrize("make", [lambda: NoProgressTermination(), lambda: RuleTermination("repetition", stop=3)])
async def test_a_rule_of_the_guard_as_a_condition(harness: Harness, make: Callable[[], Any]) -> None:
    guard = harness.guard(termination_condition=make(), mode="shadow")
    session = harness.session(same_page(), guard)
    result = await session.turn("read")
    assert session.model_calls < 12
    assert result.text.startswith("Rule ")


async def test_a_healthy_run_ends_by_itself(harness: Harness) -> None:
    condition = FinalAnswerTermination() | MaxIterationsTermination(1_000) | TimeoutTermination(60)
    session = harness.session(paging(), harness.guard(termination_condition=condition))
    plain = await harness.session(paging(), None).turn("read")
    assert (await session.turn("read")).events == plain.events


@pytest.mark.parametrize("make", [lambda: TimeoutTermination(0.05), lambda: ExternalTermination()])
async def test_time_and_signals_end_a_call_in_flight(harness: Harness, make: Callable[[], Any]) -> None:
    condition = make()
    guard = harness.guard(termination_condition=condition, max_usd=100, prices=PRICES)
    session = harness.session(AgentSpec(lambda n, _: Reply(waits=True)), guard)
    turn = asyncio.ensure_future(session.turn("go"))
    if isinstance(condition, ExternalTermination):
        await begun(session)
        await asyncio.to_thread(condition.set)
    result = await asyncio.wait_for(turn, 20)
    assert result.error is None
    assert "Timeout of 0.05 seconds" in result.text or "External termination" in result.text
    assert guard.spend()["reserved_usd"] == 0


async def test_tokens_of_a_nested_agent_count_and_its_texts_do_not(harness: Harness) -> None:
    inner = AgentSpec(lambda n, _: Reply("APPROVED by me"), "inner")
    calls = [Reply(calls=[("inner", {"request": f"task {n}"})]) for n in range(10)]
    outer = AgentSpec(lambda n, _: calls[n], "outer", agents=[inner])
    tokens = TokenUsageTermination(max_total=6_600) | TextMentionTermination("APPROVED")
    session = harness.session(outer, harness.guard(termination_condition=tokens))
    result = await session.turn("go")
    assert session.model_calls == 6
    assert "total token count: 6600" in result.text


async def test_structured_output_leaves_no_way_but_the_exception(harness: Harness) -> None:
    spec = paging()
    spec.structured = True
    result = await harness.session(spec, harness.guard(termination_condition=MaxIterationsTermination(4))).turn("go")
    assert isinstance(result.error, TerminatedError)
    assert "Maximum of 4 events" in str(result.error)


async def test_a_condition_that_raises_counts_as_not_fired(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(MaxIterationsTermination):
        def judge(self, events: Any, now: float) -> str | None:
            raise LookupError("a fault of the user's condition")

    session = harness.session(paging(), harness.guard(termination_condition=Broken(1)))
    assert (await session.turn("read")).text == "done"
    assert "runguard.termination_failed" in caplog.text


def test_conditions_that_could_never_fire_are_rejected(harness: Harness) -> None:
    with pytest.raises(PolicyError, match="only ADK has a session state"):
        harness.guard(termination_condition=MaxIterationsTermination(3) | StateTermination("done"))
    with pytest.raises(PolicyError, match="is not a termination condition"):
        harness.guard(termination_condition="done")
    for condition in (HandoffTermination("critic"), RuleTermination("handoff", stop=3)):
        if harness.name == "OpenAI Agents":
            harness.guard(termination_condition=condition)
        else:
            with pytest.raises(PolicyError, match=f"{harness.name} has no hand-offs"):
                harness.guard(termination_condition=condition)


async def test_a_hand_off_ends_the_run_of_openai_agents() -> None:
    harness = OpenAIAgentsHarness()
    second = AgentSpec(lambda n, _: Reply("never"), "second")
    first = AgentSpec(lambda n, _: Reply(hand_off="second"), "first", hand_offs=[second])
    session = harness.session(first, harness.guard(termination_condition=HandoffTermination("second")))
    result = await session.turn("go")
    assert (session.model_calls, result.text) == (1, "Handoff to second from first detected")


async def test_the_reason_can_be_read_from_what_is_stored() -> None:
    chain = LangChainSession(paging(), RunGuardMiddleware(termination_condition=MaxIterationsTermination(4)))
    await chain.turn("read")
    last = chain._messages()[-1]
    assert termination_reason(last) == last.content == "Maximum of 4 events reached, current count: 4"
    harness = PydanticAIHarness()
    session: Any = harness.session(paging(), harness.guard(termination_condition=MaxIterationsTermination(4)))
    await session.turn("read")
    assert isinstance(session, PydanticAISession)
    assert termination_reason(session._history[-1]) == "Maximum of 4 events reached, current count: 4"


async def test_a_guarded_chat_model_ends_with_its_condition() -> None:
    model = GuardedChatModel(
        ScriptedChat(lambda n, _: Reply(calls=[("page", {"n": n})]), [0]),
        termination_condition=TokenUsageTermination(max_total=2_200),
    )
    messages: list[Any] = [HumanMessage("read", id="turn")]
    with runguard.run():
        said = [(await model.ainvoke(messages)).content for _ in range(3)]
    assert said[:2] == ["", ""]
    assert "total token count: 2200" in str(said[2])
