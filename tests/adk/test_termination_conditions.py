"""Termination conditions on ADK's own events: made by hand, and as real runs yield them."""

from collections.abc import Sequence
from typing import Any

import pytest
from google.adk.agents import LlmAgent, LoopAgent, ParallelAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.events import Event, EventActions
from google.genai import types

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
    RuleTermination,
    StateTermination,
    TerminationCondition,
    TextMentionTermination,
    TimeoutTermination,
    TokenUsageTermination,
)
from runguard.testing import ScriptedModel, call, run, text
from tests.kit.examples import each_row

PRICES = {"toy": {"input": 1, "output": 2}, "scripted-1": {"input": 1, "output": 2}}


def event(*parts: types.Part, author: str = "writer", **fields: Any) -> Event:
    return Event(author=author, content=types.Content(role="model", parts=list(parts)), **fields)


def say(*texts: str, **fields: Any) -> Event:
    return event(*(types.Part(text=one) for one in texts), **fields)


def called(name: str, number: int, **args: Any) -> Event:
    return event(types.Part(function_call=types.FunctionCall(id=f"c{number}", name=name, args=args)))


def answered(name: str, number: int, response: dict[str, Any], **fields: Any) -> Event:
    return event(
        types.Part(function_response=types.FunctionResponse(id=f"c{number}", name=name, response=response)), **fields
    )


def usage(
    prompt: int, candidates: int, total: int | None = None, **more: int
) -> types.GenerateContentResponseUsageMetadata:
    total = prompt + candidates + sum(more.values()) if total is None else total
    return types.GenerateContentResponseUsageMetadata(
        prompt_token_count=prompt, candidates_token_count=candidates, total_token_count=total, **more
    )


def first_fired(condition: TerminationCondition, events: Sequence[Event]) -> int | None:
    """The event, counted from one, that makes a copy of it fire."""
    copy = condition.for_run(now=0)
    return next((number for number, one in enumerate(events, 1) if copy.check([one], now=0)), None)


# ---- events made by hand --------------------------------------------------------------------------------------------

THOUGHT = event(types.Part(text="APPROVED", thought=True))
CHUNK = say("APPROVED", partial=True)
CALL = called("look", 1, q="x")
ANSWER = answered("look", 1, {"rows": 3})


@each_row(
    ("condition", "events", "at"),
    [
        (TextMentionTermination("APPROVED"), [THOUGHT, CHUNK, say("approved"), say("APP", "ROVED")], 4),
        (TextMentionTermination("APPROVED", sources="critic"), [say("APPROVED"), say("APPROVED", author="critic")], 2),
        (MaxIterationsTermination(3), [THOUGHT, CHUNK, CHUNK, CALL, ANSWER], 5),
        (MaxMessageTermination(2), [THOUGHT, CHUNK, CALL, ANSWER, say("one"), Event(author="x"), say("two")], 7),
        (MaxMessageTermination(2, include_agent_event=True), [CHUNK, THOUGHT, CALL], 3),
        (FunctionCallTermination("look"), [CALL, answered("other", 2, {}), ANSWER], 3),
        (
            HandoffTermination("human"),
            [
                say("human"),
                event(actions=EventActions(transfer_to_agent="bot")),
                event(actions=EventActions(transfer_to_agent="human")),
            ],
            3,
        ),
        (
            StateTermination("done"),
            [
                event(actions=EventActions(state_delta={"done": False})),
                event(actions=EventActions(state_delta={"done": "yes"})),
            ],
            2,
        ),
        (
            StateTermination("done", 3),
            [
                event(actions=EventActions(state_delta={"done": True})),
                event(actions=EventActions(state_delta={"done": 3})),
            ],
            2,
        ),
        (FinalAnswerTermination(), [CHUNK, CALL, ANSWER, THOUGHT, say("the answer")], 5),
        (FinalAnswerTermination(sources=["critic"]), [say("x"), say("x", author="critic")], 2),
        (FunctionalTermination(lambda events: events[0].author == "critic"), [say("x"), say("x", author="critic")], 2),
        (
            TokenUsageTermination(max_total=20),
            [say("x", usage_metadata=usage(9, 1)), say("x"), say("x", usage_metadata=usage(9, 1))],
            3,
        ),
        (CostTermination("0.000011", prices=PRICES), [say("x", usage_metadata=usage(9, 1), model_version="toy")], 1),
        (CostTermination("0.000012", prices=PRICES), [say("x", usage_metadata=usage(9, 1), model_version="toy")], None),
        (CostTermination(1000), [say("x", usage_metadata=usage(1, 1), model_version="no-such-model-9")], 1),
        (
            NoProgressTermination(),
            [one for n in range(12) for one in (called("look", n, q="x"), answered("look", n, {"rows": 3}))],
            18,
        ),
        (
            RuleTermination("handoff", stop=2),
            [event(actions=EventActions(transfer_to_agent="b")), event(actions=EventActions(transfer_to_agent="b"))],
            2,
        ),
    ],
)
def test_every_condition_reads_adk_events(condition: Any, events: list[Any], at: int | None) -> None:
    assert first_fired(condition, events) == at


@each_row(
    ("told", "prompt", "completion"),
    [
        (usage(10, 2), 10, 2),
        (usage(10, 2, thoughts_token_count=3), 10, 5),
        (usage(10, 2, tool_use_prompt_token_count=4), 14, 2),
        (usage(10, 5, total=15, thoughts_token_count=3), 10, 5),  # a model whose candidates include its thoughts
        (
            types.GenerateContentResponseUsageMetadata(
                prompt_token_count=10, candidates_token_count=2, thoughts_token_count=3
            ),
            10,
            5,
        ),
        (types.GenerateContentResponseUsageMetadata(prompt_token_count=10), 10, 1),  # estimated from the answer
    ],
)
def test_tokens_are_those_that_the_bill_has(told: Any, prompt: int, completion: int) -> None:
    events = [say("x", usage_metadata=told)]
    assert first_fired(TokenUsageTermination(max_prompt=prompt), events) == 1
    assert first_fired(TokenUsageTermination(max_prompt=prompt + 1), events) is None
    assert first_fired(TokenUsageTermination(max_completion=completion + 1), events) is None
    assert first_fired(TokenUsageTermination(max_total=prompt + completion), events) == 1
    assert first_fired(TokenUsageTermination(max_total=prompt + completion + 1), events) is None


def test_a_tool_that_waits_for_confirmation_was_not_executed() -> None:
    from google.adk.tools.tool_confirmation import ToolConfirmation

    asks = EventActions(requested_tool_confirmations={"c1": ToolConfirmation(hint="sure?")})
    waiting = answered("pay", 1, {"error": "This tool call requires confirmation"}, actions=asks)
    assert first_fired(FunctionCallTermination("pay"), [waiting, answered("pay", 1, {"paid": True})]) == 2
    again = [one for n in range(9) for one in (called("pay", 1), waiting)]
    assert first_fired(NoProgressTermination(), again) is None


def test_events_without_anything_break_nothing() -> None:
    bare = [
        Event(author="x"),
        Event(author="x", content=types.Content(role="model")),
        Event(author="x", error_code="500"),
        event(types.Part()),
    ]
    everything = (
        TextMentionTermination("x")
        | MaxMessageTermination(1)
        | TokenUsageTermination(1)
        | CostTermination(1)
        | FunctionCallTermination("x")
        | HandoffTermination("x")
        | StateTermination("x")
        | FinalAnswerTermination()
        | NoProgressTermination()
        | TimeoutTermination(1)
        | ExternalTermination()
    )
    assert first_fired(everything, bare) is None


# ---- as runs yield them ---------------------------------------------------------------------------------------------


def look(q: str) -> dict[str, Any]:
    """Look something up."""
    return {"rows": [1, 2, 3]}


def agent(name: str, *script: Any, **options: Any) -> LlmAgent:
    return LlmAgent(name=name, model=ScriptedModel(list(script), **options.pop("model", {})), **options)


async def test_a_run_that_repeats_itself_fires_at_an_answer_and_leaves_no_call_open() -> None:
    recording = await run(agent("worker", *[call("look", q="x")] * 10, text("gave up"), tools=[look]))
    at = first_fired(RuleTermination("repetition", stop=3), recording.events)
    assert at == 6
    assert recording.events[at - 1].get_function_responses()
    assert first_fired(NoProgressTermination(), recording.events) == 18
    assert first_fired(FinalAnswerTermination(), recording.events) == len(recording.events) == 21
    assert first_fired(FunctionCallTermination("look"), recording.events) == 2


@pytest.mark.parametrize("told_on", ["all", "last", "final"])
async def test_streamed_and_whole_runs_take_the_same_tokens_and_money(told_on: str) -> None:
    for streaming in (StreamingMode.NONE, StreamingMode.SSE):
        worker = agent(
            "worker", call("look", q="x"), text("done"), tools=[look], model={"chunks": 4, "usage_on": told_on}
        )
        recording = await run(worker, run_config=RunConfig(streaming_mode=streaming))
        assert (len(recording.events) > 3) is (streaming is StreamingMode.SSE)
        exact = 2 * (1_000 + 250)
        assert first_fired(TokenUsageTermination(max_total=exact), recording.events) == len(recording.events)
        assert first_fired(TokenUsageTermination(max_total=exact + 1), recording.events) is None
        # 2,000 tokens at 1 and 500 at 2 dollars per million
        money = CostTermination("0.003", prices=PRICES, model="scripted-1")
        assert first_fired(money, recording.events) == len(recording.events)
        assert first_fired(CostTermination("0.003000001", prices=PRICES, model="scripted-1"), recording.events) is None
        assert first_fired(MaxMessageTermination(1), recording.events) == len(recording.events)


async def test_parallel_branches_are_all_counted_and_kept_apart() -> None:
    workers = [agent(f"w{n}", call("look", q="x"), text("done"), tools=[look], model={"chunks": 3}) for n in range(3)]
    recording = await run(
        ParallelAgent(name="fan", sub_agents=workers), run_config=RunConfig(streaming_mode=StreamingMode.SSE)
    )
    assert len({one.branch for one in recording.events}) == 3
    assert first_fired(TokenUsageTermination(max_total=6 * 1_250), recording.events) is not None
    assert first_fired(TokenUsageTermination(max_total=6 * 1_250 + 1), recording.events) is None
    # one call each, though the same one
    assert first_fired(RuleTermination("repetition", stop=2), recording.events) is None


async def test_each_round_of_a_loop_is_a_call_of_its_own_although_its_usage_is_equal() -> None:
    loop = LoopAgent(
        name="loop", sub_agents=[agent("writer", text("draft"), include_contents="none")], max_iterations=4
    )
    recording = await run(loop)
    assert first_fired(TokenUsageTermination(max_total=4 * 1_250), recording.events) == 4
    assert first_fired(MaxMessageTermination(3), recording.events) == 3


async def test_awaited_on_a_stream_it_ends_where_check_does() -> None:
    recording = await run(agent("worker", *[call("look", q="x")] * 10, text("gave up"), tools=[look]))
    condition = NoProgressTermination() | TimeoutTermination(60)
    copy = condition.for_run()
    fired = [number for number, one in enumerate(recording.events, 1) if not copy.terminated and await copy([one])]
    assert fired == [first_fired(condition, recording.events)] == [18]
