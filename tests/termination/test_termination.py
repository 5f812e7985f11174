"""Termination conditions without a framework: each by itself, the algebra of | and &, copies for runs, saving and
loading.
"""

import asyncio
import copy
import gc
import json
import logging
import math
import threading
from collections.abc import Sequence
from decimal import Decimal
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runguard.errors import PolicyError, RunGuardError
from runguard.pricing.given import Price
from runguard.pricing.rates import Usage
from runguard.termination import (
    AndTerminationCondition,
    CostTermination,
    ExternalTermination,
    FinalAnswerTermination,
    FunctionalTermination,
    FunctionCallTermination,
    HandoffTermination,
    MaxIterationsTermination,
    MaxMessageTermination,
    NoProgressTermination,
    OrTerminationCondition,
    RuleTermination,
    StateTermination,
    TerminatedError,
    TerminationCondition,
    TerminationResult,
    TextMentionTermination,
    TimeoutTermination,
    TokenUsageTermination,
)

NAN = math.nan
PRICES = {"toy": {"input": 1, "output": 2}}  # USD per million tokens


# ---- events ---------------------------------------------------------------------------------------------------------


def event(*parts: Any, author: str = "a", **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(author=author, content=SimpleNamespace(parts=list(parts)), **fields)


def say(*texts: str, author: str = "a", **fields: Any) -> SimpleNamespace:
    return event(*(SimpleNamespace(text=text) for text in texts), author=author, **fields)


def think(text: str) -> SimpleNamespace:
    return event(SimpleNamespace(text=text, thought=True))


def call(name: str, number: int, **args: Any) -> SimpleNamespace:
    return event(SimpleNamespace(function_call=SimpleNamespace(name=name, args=args, id=f"c{number}")), id=f"e{number}")


def answer(name: str, number: int, response: Any) -> SimpleNamespace:
    return event(SimpleNamespace(function_response=SimpleNamespace(name=name, response=response, id=f"c{number}")))


def took(prompt: int, output: int, **fields: Any) -> SimpleNamespace:
    usage = SimpleNamespace(prompt_token_count=prompt, candidates_token_count=output, total_token_count=prompt + output)
    return say("x", usage_metadata=usage, **fields)


def does(**actions: Any) -> SimpleNamespace:
    return event(actions=SimpleNamespace(**actions))


def fires_at(condition: TerminationCondition, *deltas: Sequence[Any]) -> int | None:
    """Which delta, counted from one, makes it fire."""
    return next((number for number, delta in enumerate(deltas, 1) if condition.check(delta, now=0.0)), None)


def top_level_function(events: Sequence[Any]) -> bool:
    return any(e.author == "boss" for e in events)


class Holder:
    def method(self, events: Sequence[Any]) -> bool:
        return True


class OwnTermination(TerminationCondition):
    """What a user writes."""

    def __init__(self, author: str) -> None:
        self.author, self.seen = author, 0

    def judge(self, events: Sequence[Any], now: float) -> str | None:
        self.seen += sum(e.author == self.author for e in events)
        return f"{self.author} twice" if self.seen >= 2 else None

    def clear(self, now: float) -> None:
        self.seen = 0

    def settings(self) -> dict[str, Any]:
        return {"author": self.author}


# ---- what all have in common ----------------------------------------------------------------------------------------


def test_a_result_is_falsy_until_it_is_time_and_cannot_be_changed():
    assert not TerminationResult(False)
    result = TextMentionTermination("stop").check([say("please stop")])
    assert result
    assert result == TerminationResult(True, "Text 'stop' mentioned")
    with pytest.raises(AttributeError):
        result.reason = "other"  # type: ignore[misc]


def test_a_condition_remembers_that_and_why_it_fired_until_reset():
    condition = TextMentionTermination("stop")
    assert (condition.terminated, condition.reason) == (False, None)
    assert condition.check([say("go")]) == TerminationResult(False, "")
    condition.check([say("stop")])
    assert (condition.terminated, condition.reason) == (True, "Text 'stop' mentioned")
    condition.reset()
    assert (condition.terminated, condition.reason) == (False, None)
    assert condition.check([say("stop")])


@pytest.mark.parametrize(
    "finished",
    [
        TextMentionTermination("stop"),
        MaxIterationsTermination(1),
        TextMentionTermination("stop") | TextMentionTermination("never"),
        TextMentionTermination("stop") & MaxIterationsTermination(1),
    ],
    ids=["leaf", "count", "or", "and"],
)
async def test_autogen_defect_a_finished_condition_raises_one_ordinary_exception_composites_included(finished):
    condition = finished.for_run()
    assert condition.check([say("stop")])
    for ask in (lambda: condition.check([say("go")]), condition.check):
        with pytest.raises(TerminatedError, match="already fired"):
            ask()
    with pytest.raises(TerminatedError):
        await condition([])
    assert issubclass(TerminatedError, RunGuardError)
    assert issubclass(TerminatedError, Exception)


async def test_calling_it_gives_none_until_it_fires():
    condition = MaxIterationsTermination(2)
    assert await condition([say("x")]) is None
    assert await condition([say("x")]) == TerminationResult(True, "Maximum of 2 events reached, current count: 2")


def test_an_event_instead_of_a_list_of_events_is_told():
    with pytest.raises(TypeError, match="a list of events"):
        MaxIterationsTermination(2).check(say("x"))  # type: ignore[arg-type]


def test_any_iterable_of_events_will_do():
    assert MaxIterationsTermination(2).check(say("x") for _ in range(2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: MaxIterationsTermination(0),
        lambda: MaxIterationsTermination(-1),
        lambda: MaxIterationsTermination(True),
        lambda: MaxIterationsTermination(NAN),
        lambda: MaxIterationsTermination("3"),
        lambda: MaxIterationsTermination(2.5),
        lambda: MaxMessageTermination(0),
        lambda: MaxMessageTermination(3, include_agent_event=1),
        lambda: TextMentionTermination(""),
        lambda: TextMentionTermination(None),
        lambda: TextMentionTermination("x", sources=[]),
        lambda: TextMentionTermination("x", sources=""),
        lambda: TextMentionTermination("x", sources=[1]),
        lambda: TextMentionTermination("x", sources=5),
        lambda: TimeoutTermination(0),
        lambda: TimeoutTermination(-1),
        lambda: TimeoutTermination(True),
        lambda: TimeoutTermination(NAN),
        lambda: TimeoutTermination(math.inf),
        lambda: TimeoutTermination("1"),
        lambda: TokenUsageTermination(),
        lambda: TokenUsageTermination(0),
        lambda: TokenUsageTermination(max_prompt=True),
        lambda: TokenUsageTermination(5, max_total_token=5),
        lambda: TokenUsageTermination(max_total_tokens=5, max_total_token=5),
        lambda: TokenUsageTermination(max_prompt_tokens=0),
        lambda: FunctionCallTermination(""),
        lambda: HandoffTermination(""),
        lambda: HandoffTermination(3),
        lambda: FunctionalTermination(3),
        lambda: FunctionalTermination(Holder),
        lambda: CostTermination(0),
        lambda: CostTermination(True),
        lambda: CostTermination(NAN),
        lambda: CostTermination("much"),
        lambda: CostTermination(1, prices={"m": {"inptu": 1}}),
        lambda: CostTermination(1, prices=[1]),
        lambda: CostTermination(1, model=""),
        lambda: RuleTermination("repetitoin"),
        lambda: RuleTermination("growth"),
        lambda: RuleTermination("repetition", stop=1),
        lambda: RuleTermination("repetition", stop=True),
        lambda: RuleTermination("repetition", stop=NAN),
        lambda: RuleTermination("repetition", stp=3),
        lambda: RuleTermination("empty"),
        lambda: RuleTermination("cycle"),
        lambda: StateTermination(""),
        lambda: FinalAnswerTermination(sources=[""]),
        lambda: OrTerminationCondition(),
        lambda: AndTerminationCondition(MaxIterationsTermination(1), "x"),
    ],
)
def test_what_cannot_be_meant_fails_at_construction(make):
    with pytest.raises(PolicyError):
        make()


def test_errors_name_the_argument_and_the_nearest_right_name():
    with pytest.raises(PolicyError, match=r"max_messages = 0: must be"):
        MaxMessageTermination(0)
    with pytest.raises(PolicyError, match="did you mean 'repetition'"):
        RuleTermination("repetitoin")
    with pytest.raises(PolicyError, match="did you mean 'stop'"):
        RuleTermination("repetition", stp=3)
    with pytest.raises(PolicyError, match="max_prompt_token = 0"):
        TokenUsageTermination(max_prompt_token=0)


def test_repr_reads_like_the_expression_that_made_it():
    text, count, clock = (
        TextMentionTermination("stop", sources="critic"),
        MaxIterationsTermination(3),
        TimeoutTermination(1.5),
    )
    assert repr(text) == "TextMentionTermination(text='stop', sources=['critic'])"
    assert repr(text | count | clock) == f"{text!r} | {count!r} | {clock!r}"
    assert repr((text | count) & clock) == f"({text!r} | {count!r}) & {clock!r}"
    assert repr(OrTerminationCondition(count)) == f"OrTerminationCondition({count!r})"
    assert repr(FunctionalTermination(top_level_function)) == "FunctionalTermination(top_level_function)"
    assert repr(ExternalTermination()) == "ExternalTermination()"


def test_something_else_cannot_be_combined_with_a_condition():
    with pytest.raises(TypeError):
        MaxIterationsTermination(1) | 5  # type: ignore[operator]
    with pytest.raises(TypeError):
        MaxIterationsTermination(1) & None  # type: ignore[operator]


@pytest.mark.parametrize(
    ("condition", "early"),
    [
        (TimeoutTermination(1), True),
        (ExternalTermination(), True),
        (TokenUsageTermination(1), True),
        (CostTermination(1), True),
        (TextMentionTermination("x"), False),
        (MaxIterationsTermination(1), False),
        (FunctionalTermination(top_level_function), False),
        (NoProgressTermination(), False),
        (TextMentionTermination("x") | TimeoutTermination(1), True),
        (TextMentionTermination("x") & TimeoutTermination(1), True),
        (TextMentionTermination("x") & MaxIterationsTermination(1), False),
    ],
)
def test_whether_it_may_fire_without_an_event_is_known(condition, early):
    assert condition.knows_early is early


def test_conditions_of_your_own_need_only_judge():
    condition = OwnTermination("boss") | MaxIterationsTermination(10)
    assert fires_at(condition, [say("x", author="boss")], [say("x")], [say("x", author="boss")]) == 3
    assert condition.reason == "boss twice"
    assert fires_at(condition.for_run(), [say("x", author="boss")]) is None


# ---- counts and words -----------------------------------------------------------------------------------------------


def test_iterations_are_events_chunks_aside():
    assert (
        fires_at(MaxIterationsTermination(3), [say("x")], [say("x", partial=True)] * 9, [think("x"), call("t", 1)]) == 3
    )
    assert fires_at(MaxIterationsTermination(3), [], [], [], [say("x")] * 3) == 4


def test_autogen_defect_a_tool_loop_is_unseen_by_messages_alone_and_seen_by_iterations():
    loop = [part for n in range(5) for part in (call("t", n), answer("t", n, {}))]
    assert fires_at(MaxMessageTermination(1), loop) is None
    assert fires_at(MaxMessageTermination(10, include_agent_event=True), loop) == 1
    assert fires_at(MaxIterationsTermination(10), loop) == 1


def test_messages_are_events_with_words():
    silent = [
        say(""),
        say("  \n"),
        think("hm"),
        call("t", 1),
        answer("t", 1, {}),
        say("x", partial=True),
        SimpleNamespace(),
        SimpleNamespace(content=None),
    ]
    condition = MaxMessageTermination(2)
    assert fires_at(condition, silent, [say("one")], silent, [say("two")]) == 4
    assert condition.reason == "Maximum number of messages 2 reached, current message count: 2"


def test_a_call_with_words_beside_it_is_a_message():
    both = event(
        SimpleNamespace(text="let me look"), SimpleNamespace(function_call=SimpleNamespace(name="t", args={}, id="1"))
    )
    assert fires_at(MaxMessageTermination(1), [both]) == 1


def test_words_are_found_with_case_and_across_parts_but_not_in_thoughts_or_chunks():
    def mentions(*events: Any) -> bool:
        return bool(TextMentionTermination("DONE").check(events))

    assert mentions(say("all DONE now"))
    assert mentions(say("all DO", "NE"))
    assert not mentions(say("done"))
    assert not mentions(say("DO"), say("NE"))
    assert not mentions(think("DONE"))
    assert not mentions(event(SimpleNamespace(text="DO"), SimpleNamespace(text="x", thought=True)))
    assert mentions(
        event(SimpleNamespace(text="DO"), SimpleNamespace(text="hm", thought=True), SimpleNamespace(text="NE"))
    )
    assert not mentions(say("DONE", partial=True))
    assert not mentions(answer("DONE", 1, {"result": "DONE"}))


@pytest.mark.parametrize("sources", ["critic", ["critic"], ("critic", "editor"), {"critic", "editor"}])
def test_only_the_words_of_the_sources_count(sources):
    condition = TextMentionTermination("OK", sources=sources)
    assert not condition.check([say("OK", author="writer")])
    assert not condition.check([say("OK", author="crit")])
    assert condition.check([say("OK", author="critic")])


def test_a_final_answer_has_words_and_is_final():
    final = partial(say, is_final_response=lambda: True)
    condition = FinalAnswerTermination(sources=["a"])
    assert (
        fires_at(
            condition,
            [say("x", is_final_response=lambda: False)],
            [final("")],
            [final("x", author="b")],
            [say("x")],
            [final("x")],
        )
        == 5
    )
    assert condition.reason == "Final answer of a"


def test_a_function_counts_when_it_has_answered():
    condition = FunctionCallTermination("approve")
    assert fires_at(condition, [call("approve", 1)], [answer("other", 2, {})], [answer("approve", 1, {})]) == 3
    assert condition.reason == "Function 'approve' was executed"


def test_a_function_that_waits_for_leave_was_not_executed():
    waiting = answer("approve", 1, {"error": "needs confirmation"})
    waiting.actions = SimpleNamespace(requested_tool_confirmations={"c1": {}})
    assert fires_at(FunctionCallTermination("approve"), [waiting], [answer("approve", 1, {})]) == 2


def test_a_hand_off_is_one_to_that_agent():
    condition = HandoffTermination("human")
    assert (
        fires_at(
            condition,
            [does(transfer_to_agent="bot")],
            [does(transfer_to_agent=None)],
            [does(transfer_to_agent="human")],
        )
        == 3
    )
    assert condition.reason == "Handoff to human from a detected"


def test_state_is_compared_or_has_to_be_true():
    def fires(condition: TerminationCondition, value: Any, key: str = "done") -> bool:
        return bool(condition.check([does(state_delta={key: value})]))

    assert fires(StateTermination("done"), "yes")
    assert not fires(StateTermination("done"), "")
    assert not fires(StateTermination("done"), True, key="other")
    assert fires(StateTermination("done", None), None)
    assert fires(StateTermination("done", 3), 3.0)
    assert fires(StateTermination("done", {"a": [1]}), {"a": [1]})
    assert not fires(StateTermination("done", True), 1)
    assert not fires(StateTermination("done", 1), True)
    assert not fires(StateTermination("done", "yes"), "no")


def test_a_value_that_cannot_be_compared_is_not_the_value():
    class Array:
        def __eq__(self, other: object) -> Any:
            return self

        def __bool__(self) -> bool:
            raise ValueError("ambiguous")

        __hash__ = None  # type: ignore[assignment]

    assert not StateTermination("k", 1).check([does(state_delta={"k": Array()})])
    assert not StateTermination("k").check([does(state_delta={"k": Array()})])


def test_a_long_value_makes_no_long_reason():
    condition = StateTermination("k")
    assert condition.check([does(state_delta={"k": "x" * 10_000})])
    assert len(condition.reason or "") < 200


# ---- time -----------------------------------------------------------------------------------------------------------


def test_autogen_defect_the_clock_starts_with_the_run_not_at_construction():
    condition = TimeoutTermination(10)
    run = condition.for_run(now=1_000.0)
    assert not run.check(now=1_009.9)
    assert run.check(now=1_010.0) == TerminationResult(True, "Timeout of 10 seconds reached")
    assert not condition.check(now=5_000.0)  # asked for the first time: starts now
    assert condition.check(now=5_010.0)


def test_autogen_defect_time_is_seen_without_a_message():
    run = (TimeoutTermination(10) | TextMentionTermination("never")).for_run(now=0)
    assert run.wake_at() == 10
    assert run.check((), now=10)
    assert run.wake_at() is None


def test_a_reset_starts_the_clock_again():
    condition = TimeoutTermination(10)
    condition.check(now=0)
    condition.reset(now=8)
    assert not condition.check(now=17)
    assert condition.check(now=18)


def test_without_a_time_the_monotonic_clock_is_read(monkeypatch):
    now = 50.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    run = TimeoutTermination(10).for_run()
    now = 59.0
    assert not run.check()
    now = 60.0
    assert run.check()


def test_the_next_moment_is_the_nearest_of_those_still_open():
    run = ((TimeoutTermination(5) & TextMentionTermination("x")) | TimeoutTermination(20)).for_run(now=0)
    assert run.wake_at() == 5
    assert not run.check(now=6)
    assert run.wake_at() == 20
    settled = ((TimeoutTermination(5) | TextMentionTermination("x")) & TextMentionTermination("y")).for_run(now=0)
    assert not settled.check([say("x")], now=1)
    assert settled.wake_at() is None  # what the clock would say was said by words
    assert TextMentionTermination("x").wake_at() is None
    assert TimeoutTermination(5).wake_at() is None  # no clock runs yet


# ---- tokens and money -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "at"),
    [
        ({"max_total": 36}, 3),
        ({"max_total": 37}, None),
        ({"max_prompt": 30}, 3),
        ({"max_completion": 4}, 2),
        ({"max_prompt": 1000, "max_completion": 6}, 3),
        ({"max_total_token": 24}, 2),
        ({"max_total_tokens": 24}, 2),
        ({"max_prompt_token": 10}, 1),
        ({"max_completion_token": 6}, 3),
    ],
)
def test_tokens_are_summed_over_calls(limit, at):
    assert fires_at(TokenUsageTermination(**limit), [took(10, 2)], [say("no usage"), took(10, 2)], [took(10, 2)]) == at


def test_thinking_and_tool_prompts_are_tokens_too():
    usage = SimpleNamespace(
        prompt_token_count=10,
        tool_use_prompt_token_count=5,
        candidates_token_count=2,
        thoughts_token_count=3,
        total_token_count=20,
    )
    condition = TokenUsageTermination(max_prompt=15)
    assert condition.check([say("x", usage_metadata=usage)])
    assert (
        condition.reason
        == "Token usage limit reached, total token count: 20, prompt token count: 15, completion token count: 5"
    )


def stream(*usages: tuple[int, int] | None, closing: tuple[int, int] | None, **fields: Any) -> list[Any]:
    chunks = [took(*usage, partial=True, **fields) if usage else say("x", partial=True, **fields) for usage in usages]
    return [*chunks, took(*closing, **fields) if closing else say("x", **fields)]


@pytest.mark.parametrize(
    "events",
    [
        stream((10, 1), (10, 2), (10, 3), closing=(10, 3)),
        stream(None, None, (10, 3), closing=None),
        stream(None, None, closing=(10, 3)),
        stream((10, 1), (10, 3), closing=None),
        stream((10, 1), None, closing=(10, 3)),
    ],
    ids=["everywhere", "last chunk", "closing event", "chunks only", "first and closing"],
)
def test_the_last_usage_of_a_stream_counts_once(events):
    assert fires_at(TokenUsageTermination(max_total=13), events) == 1
    assert fires_at(TokenUsageTermination(max_total=14), events) is None
    assert fires_at(TokenUsageTermination(max_total=26), events, events) == 2
    assert fires_at(TokenUsageTermination(max_total=27), events, events) is None


def test_a_stream_that_is_closed_by_words_and_then_by_a_call_is_one_model_call():
    # ADK's older streaming: the same prompt, no chunk between
    events = [*stream((10, 1), closing=(10, 2)), took(10, 5)]
    assert fires_at(TokenUsageTermination(max_total=15), events) == 1
    assert fires_at(TokenUsageTermination(max_total=16), events) is None
    assert fires_at(CostTermination("0.00002", prices=PRICES, model="toy"), events) == 1
    assert fires_at(CostTermination("0.000021", prices=PRICES, model="toy"), events) is None


@pytest.mark.parametrize("another", [(20, 2), (10, 1)], ids=["longer prompt", "shorter answer"])
def test_a_whole_call_after_a_stream_is_a_call_of_its_own(another):
    events = [*stream((10, 1), closing=(10, 2)), took(*another)]
    assert fires_at(TokenUsageTermination(max_total=12 + sum(another)), events) == 1


def test_equal_calls_that_did_not_stream_are_all_counted():
    assert fires_at(TokenUsageTermination(max_total=24), [took(10, 2)], [took(10, 2)]) == 2


def test_the_same_prompt_after_an_answer_is_another_call():
    events = [*stream((10, 2), closing=(10, 2)), answer("t", 1, {}), took(10, 2)]
    assert fires_at(TokenUsageTermination(max_total=24), events) == 1


def test_autogen_defect_all_speakers_of_a_fan_out_are_counted():
    branches = [stream((500, 100), (1_000, 400), closing=None, author=f"w{n}", branch=f"fan.w{n}") for n in range(5)]
    interleaved = [branch[step] for step in range(3) for branch in branches]
    assert fires_at(TokenUsageTermination(max_total=7_000), *[[e] for e in interleaved]) == 15
    assert fires_at(TokenUsageTermination(max_total=7_001), interleaved) is None


def test_branches_of_one_author_do_not_mix():
    left, right = (stream((10, 1), closing=None, branch=name) for name in ("left", "right"))
    assert fires_at(TokenUsageTermination(max_total=22), [left[0], right[0]], [left[1]], [right[1]]) == 3


def test_authors_of_one_branch_do_not_mix():
    left, right = (stream((10, 1), closing=None, author=name) for name in ("left", "right"))
    assert fires_at(TokenUsageTermination(max_total=22), [left[0], right[0]], [left[1]], [right[1]]) == 3


def test_autogen_defect_calls_that_no_event_shows_are_counted_and_seen_at_once():
    condition = (TokenUsageTermination(max_total=100) | CostTermination(1, prices=PRICES)).for_run()
    condition.count(60, 10)
    assert not condition.leaves()[0].check()
    condition.count(20, 10, model="toy")
    assert condition.leaves()[0].check()


@pytest.mark.parametrize(
    "report",
    [
        {},
        {"prompt_token_count": None},
        {"prompt_token_count": 0, "candidates_token_count": 0, "total_token_count": 0},
        {"prompt_token_count": -5, "total_token_count": 3},
        {"prompt_token_count": "many"},
    ],
)
def test_usage_that_reports_nothing_is_estimated_from_the_words_so_far(report):
    events = [say("ask " * 30, author="user"), say("word " * 40, usage_metadata=SimpleNamespace(**report))]
    condition = TokenUsageTermination(max_total=90)  # 120 bytes of prompt at three per token, 200 of answer at four
    assert fires_at(condition, *([event] for event in events)) == 2
    assert (
        condition.reason
        == "Token usage limit reached, total token count: 90, prompt token count: 40, completion token count: 50"
    )


def test_the_input_alone_is_estimated_where_only_the_output_is_reported():
    events = [say("ask " * 30, author="user"), took(0, 7)]
    condition = TokenUsageTermination(max_prompt=40)
    assert fires_at(condition, *([event] for event in events)) == 2
    assert (
        condition.reason
        == "Token usage limit reached, total token count: 47, prompt token count: 40, completion token count: 7"
    )


def test_a_last_chunk_of_zeros_takes_nothing_back():
    events = [took(4_000, 1_000, partial=True), took(0, 0)]
    assert fires_at(TokenUsageTermination(max_total=5_000), *([event] for event in events)) == 2


def test_money_is_exact_and_reached_not_exceeded():
    # 0.1 + 0.2 dollars are 0.3 dollars: 100,000 and 200,000 input tokens at a dollar per million
    condition = CostTermination("0.3", prices=PRICES, model="toy")
    assert fires_at(condition, [took(100_000, 0)], [took(199_999, 0)], [took(1, 0)]) == 3
    assert condition.reason == "Cost limit of $0.30 reached, $0.30 spent"


def test_the_price_is_that_of_the_model_the_event_names():
    prices = {"toy": {"input": 1, "output": 2}, "dear": Price(input=100, output=100)}
    condition = CostTermination(1, prices=prices, model="toy")
    assert fires_at(condition, [took(10_000, 0)], [took(10_000, 0, model_version="dear")]) == 2


def test_the_day_of_the_event_decides_which_price_holds():
    prices = {"m": [{"input": 1, "output": 1}, {"input": 100, "output": 1, "since": "2026-01-01"}]}
    before, after = 1_760_000_000.0, 1_770_000_000.0  # October 2025, February 2026
    assert fires_at(CostTermination(1, prices=prices), [took(10_000, 0, model_version="m", timestamp=before)]) is None
    assert fires_at(CostTermination(1, prices=prices), [took(10_000, 0, model_version="m", timestamp=after)]) == 1


def test_a_model_named_by_a_chunk_counts_for_its_stream():
    events = [took(999_998, 1, partial=True, model_version="toy"), say("x")]
    condition = CostTermination(1, prices=PRICES)
    assert fires_at(condition, events) == 1
    assert condition.reason == "Cost limit of $1.00 reached, $1.00 spent"


@pytest.mark.parametrize(("model", "said"), [("no-such-model-9", "no-such-model-9"), (None, "model=")])
def test_an_unknown_price_is_never_zero(model, said):
    condition = CostTermination(1000, prices=PRICES)
    assert condition.check([took(1, 0, model_version=model)])
    assert "Cost cannot be known" in (condition.reason or "")
    assert said in (condition.reason or "")


def test_an_unknown_price_is_forgotten_with_the_rest():
    condition = CostTermination(1000, prices=PRICES)
    assert condition.check([took(1, 0, model_version="no-such-model-9")])
    assert not condition.for_run().check()
    condition.reset()
    assert not condition.check()


def test_a_stream_of_one_run_is_not_closed_by_another():
    chunk, closing = stream((10, 2), closing=None)
    condition = TokenUsageTermination(max_total=12)
    condition.check([chunk])
    one, two = condition.for_run(), condition.for_run()
    one.check([chunk])
    assert not two.check([closing])
    assert one.check([closing])
    condition.reset()
    assert not condition.check([closing])


def test_calls_told_directly_cost_money_too_and_unknown_ones_fire():
    condition = CostTermination(1, prices=PRICES).for_run()
    condition.count(500_000, 0, model="toy")
    assert not condition.check()
    condition.count(0, 0, model="toy", usage=Usage(input=500_000))
    assert condition.check()
    condition.reset()
    condition.count(1, 1, model="unheard-of")
    assert condition.check()


def test_a_call_is_counted_once_by_a_condition_that_stands_in_two_places():
    tokens, other, third = TokenUsageTermination(max_total=20), TextMentionTermination("x"), TextMentionTermination("y")
    condition = ((tokens & other) | (tokens & third)).for_run()
    assert len(condition.leaves()) == 3  # one instance in the copy, too
    condition.count(10, 0)
    assert not condition.check([say("xy")])
    assert not condition.check([took(9, 0)])
    assert condition.check([took(1, 0)])


# ---- signals and functions ------------------------------------------------------------------------------------------


def test_a_signal_ends_every_run_under_way_and_none_that_begins_later():
    button = ExternalTermination()
    condition = button | MaxIterationsTermination(100)
    one, two = condition.for_run(), condition.for_run()
    assert not one.check()
    button.set()
    later = condition.for_run()
    assert one.check() == TerminationResult(True, "External termination requested")
    assert two.check([say("x")])
    assert not later.check()
    assert not later.check([say("x")])
    button.set()
    assert later.check()


def test_a_signal_is_seen_by_the_instance_itself_and_gone_after_reset():
    button = ExternalTermination()
    button.set()
    assert not button.terminated  # as with AutoGen: known when it is asked
    assert button.check()
    button.reset()
    assert not button.check()


def test_a_copy_can_give_the_signal_for_all():
    button = ExternalTermination()
    one, two = button.for_run(), button.for_run()
    one.set()
    assert two.check()


def test_autogen_defect_whoever_subscribes_is_told_at_once_from_any_thread():
    button = ExternalTermination()
    run = ((button | TextMentionTermination("x")) & MaxIterationsTermination(1)).for_run()
    told: list[str] = []
    unsubscribe = run.on_set(lambda: told.append(threading.current_thread().name))
    thread = threading.Thread(target=button.set, name="operator")
    thread.start()
    thread.join()
    assert told == ["operator"]
    unsubscribe()
    unsubscribe()
    button.set()
    assert told == ["operator"]


def test_a_subscriber_that_fails_keeps_nobody_from_being_told(caplog):
    button, told = ExternalTermination(), []
    button.on_set(lambda: 1 / 0)
    button.on_set(lambda: told.append(1))
    with caplog.at_level(logging.ERROR, "runguard"):
        button.set()
    assert told == [1]
    assert "on_set_failed" in caplog.text


def test_a_subscriber_may_unsubscribe_and_set_again():
    button = ExternalTermination()
    calls: list[int] = []

    def once() -> None:
        calls.append(1)
        unsubscribe()
        button.set()

    unsubscribe = button.on_set(once)
    button.set()
    assert calls == [1]


def test_conditions_without_a_signal_take_subscribers_and_never_call():
    MaxIterationsTermination(1).on_set(lambda: pytest.fail("no signal here"))()


def test_a_deep_copy_keeps_the_signal():
    button = ExternalTermination()
    twin = copy.deepcopy(button | MaxIterationsTermination(3))
    button.set()
    assert twin.check()


def test_many_threads_lose_no_signal():
    button = ExternalTermination()
    told: list[int] = []
    button.on_set(lambda: told.append(1))
    threads = [threading.Thread(target=lambda: [button.set() for _ in range(50)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 400
    assert button._signal.given == 400


@pytest.mark.parametrize("value", [1, "yes", [1], None, False, object()])
def test_only_true_itself_counts(value):
    assert not FunctionalTermination(lambda events: value).check([say("x")])
    assert FunctionalTermination(lambda events: True).check([say("x")])


def test_a_function_sees_the_new_events_and_is_not_asked_without_any():
    seen: list[int] = []

    def look(events: Sequence[Any]) -> bool:
        seen.append(len(events))
        return False

    condition = FunctionalTermination(look)
    for delta in ([say("x")], [], [say("x"), say("y")]):
        condition.check(delta)
    assert seen == [1, 2]


async def _slow_true(events: Sequence[Any]) -> bool:
    await asyncio.sleep(0)
    return True


class AsyncCallable:
    async def __call__(self, events: Sequence[Any]) -> bool:
        return True


@pytest.mark.parametrize(
    "func",
    [_slow_true, AsyncCallable(), lambda events: _slow_true(events), partial(_slow_true)],
    ids=["def", "object", "lambda", "partial"],
)
async def test_async_functions_are_awaited_and_check_says_so(func):
    condition = FunctionalTermination(func) | MaxIterationsTermination(100)
    with pytest.raises(RunGuardError, match="await condition"):
        condition.check([say("x")])
    assert not condition.terminated
    assert await condition([say("x")]) == TerminationResult(True, "Functional termination condition met")


def test_what_check_cannot_await_is_closed(recwarn):
    with pytest.raises(RunGuardError, match="await"):
        FunctionalTermination(lambda events: _slow_true(events)).check([say("x")])
    gc.collect()
    assert [str(warning.message) for warning in recwarn if "never awaited" in str(warning.message)] == []


def test_check_on_an_async_function_leaves_its_neighbours_uncounted():
    count = MaxIterationsTermination(2)
    condition = count | FunctionalTermination(_slow_true)
    for _ in range(3):
        with pytest.raises(RunGuardError, match="await"):
            condition.check([say("x")])
    assert not count.check([say("x")])


async def test_a_function_that_raises_is_logged_once_and_means_no(caplog):
    async def broken(events: Sequence[Any]) -> bool:
        raise KeyError("mine")

    for func, ask_async in ((lambda events: 1 / 0, False), (broken, True)):
        caplog.clear()
        condition = FunctionalTermination(func) | MaxIterationsTermination(3)
        with caplog.at_level(logging.ERROR, "runguard"):
            results = [await condition([say("x")]) if ask_async else condition.check([say("x")]) for _ in range(3)]
        assert [bool(result) for result in results] == [False, False, True]
        assert caplog.text.count("runguard.termination_failed") == 1
        assert "KeyError" in caplog.text or "ZeroDivisionError" in caplog.text


async def test_a_cancellation_inside_a_function_is_no_fault():
    async def cancelled(events: Sequence[Any]) -> bool:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await FunctionalTermination(cancelled)([say("x")])


# ---- rules ----------------------------------------------------------------------------------------------------------


def rounds(
    count: int,
    *,
    response: Any = {"rows": [1, 2]},  # noqa: B006
    tool: str = "t",
    start: int = 0,
    branch: str | None = None,
    **args: Any,
) -> list[Any]:
    events = []
    for number in range(start, start + count):
        for one in (
            call(tool, number, **{k: v(number) if callable(v) else v for k, v in args.items()}),
            answer(tool, number, response),
        ):
            one.branch = branch
            events.append(one)
    return events


def each(events: Sequence[Any]) -> list[list[Any]]:
    return [[one] for one in events]


def test_repetition_fires_where_the_guard_would_stop():
    assert fires_at(RuleTermination("repetition"), *each(rounds(12))) == 18  # the ninth answer
    condition = RuleTermination("repetition", stop=3)
    assert fires_at(condition, *each(rounds(9))) == 6
    assert condition.reason == "Rule repetition of tool 't': 3 identical calls and answers, limit 3"


def test_the_answer_fires_and_never_the_call_which_would_stay_unanswered():
    for rungs in ({"stop": 2}, {"block": 2}, {}):
        events = rounds(9)
        at = fires_at(RuleTermination("repetition", **rungs), *each(events))
        assert at is not None
        assert at % 2 == 0


def test_other_arguments_are_no_repetition():
    assert fires_at(RuleTermination("repetition", stop=3), rounds(9, page=lambda n: n)) is None


@pytest.mark.parametrize(
    ("rule", "rungs", "events", "at"),
    [
        ("stall", {}, rounds(9, response={"error": "bad format"}, page=lambda n: n), 12),
        ("stall", {"stop": 2}, rounds(9, response={"error": "bad format"}, page=lambda n: n), 4),
        (
            "tool_failures",
            {"stop": 3},
            [e for n in range(5) for e in rounds(1, response={"error": f"fault {'abcde'[n]} x"}, page=n, start=n)],
            6,
        ),
        ("empty", {"stop": 3}, rounds(5, response={"result": []}, page=lambda n: n), 6),
        (
            "same_call",
            {"stop": 4},
            [e for n in range(6) for e in rounds(1, response={"value": "abcdef"[n]}, start=n)],
            8,
        ),
        ("no_news", {"stop": 3}, rounds(9), 10),
        ("cycle", {"stop": 3}, [e for n in range(8) for e in rounds(1, tool="ab"[n % 2], start=n)], 12),
        ("handoff", {"stop": 3}, [does(transfer_to_agent="b") for _ in range(5)], 3),
    ],
)
def test_every_rule_that_events_can_show_is_a_condition(rule, rungs, events, at):
    condition = RuleTermination(rule, **rungs)
    assert fires_at(condition, *each(events)) == at
    assert f"Rule {rule}" in (condition.reason or "")


def test_no_progress_is_any_of_them():
    assert fires_at(NoProgressTermination(), *each(rounds(12))) == 18
    failing = rounds(12, response={"error": "bad format"}, page=lambda n: n)
    assert fires_at(NoProgressTermination(), *each(failing)) == 12
    assert fires_at(NoProgressTermination(), *each([does(transfer_to_agent="b") for _ in range(9)])) == 6
    working = [e for n in range(60) for e in rounds(1, response={"line": f"text {'x' * n}"}, page=n, start=n)]
    assert fires_at(NoProgressTermination(), working) is None


def test_hand_offs_of_an_agent_called_inside_of_its_own_call_are_counted_together():
    events, branch = [], ""
    for n in range(1, 8):
        asked = call("helper", n, request="room")
        asked.branch = branch
        branch = f"{branch}.helper@c{n}".lstrip(".")
        passed = does(transfer_to_agent="lead")
        passed.branch = branch
        events += [asked, passed]
    assert fires_at(RuleTermination("handoff"), *each(events)) == 12


def test_branches_are_lanes_of_their_own():
    left, right = rounds(2, branch="p.left"), rounds(2, branch="p.right", start=10)
    interleaved = [e for pair in zip(left, right, strict=True) for e in pair]
    assert fires_at(RuleTermination("repetition", stop=3), interleaved) is None
    assert fires_at(RuleTermination("repetition", stop=2), interleaved) == 1


def test_calls_of_one_response_are_one_observation():
    ask = event(
        *(SimpleNamespace(function_call=SimpleNamespace(name="t", args={}, id=f"c{n}")) for n in range(4)), id="e"
    )
    told = event(
        *(SimpleNamespace(function_response=SimpleNamespace(name="t", response={"v": 1}, id=f"c{n}")) for n in range(4))
    )
    assert fires_at(RuleTermination("repetition", stop=2), [ask, told]) is None
    one_by_one = [answer("t", n, {"v": 1}) for n in range(4)]
    assert fires_at(RuleTermination("repetition", stop=2), [ask, *one_by_one]) is None


def test_calls_without_ids_are_paired_by_name():
    def nameless(e: Any) -> Any:
        for part in e.content.parts:
            (getattr(part, "function_call", None) or part.function_response).id = None
        return e

    assert fires_at(RuleTermination("repetition", stop=3), *each([nameless(e) for e in rounds(4)])) == 6
    left, right = rounds(2, branch="left"), rounds(2, branch="right", page=lambda n: n)
    interleaved = [nameless(e) for pair in zip(left, right, strict=True) for e in pair]
    assert fires_at(RuleTermination("repetition", stop=2), interleaved) == 1


def test_steering_tools_chunks_and_answers_without_a_call_are_no_work():
    for tool in ("transfer_to_agent", "exit_loop", "adk_request_credential"):
        assert fires_at(NoProgressTermination(), rounds(20, tool=tool)) is None
    assert fires_at(NoProgressTermination(), [answer("t", n, {"v": 1}) for n in range(20)]) is None
    chunks = [*rounds(20)]
    for one in chunks:
        one.partial = True
    assert fires_at(NoProgressTermination(), chunks) is None


def test_new_words_at_the_end_of_a_turn_are_news():
    events = [e for n in range(6) for e in (*rounds(2, start=2 * n), say(f"draft {n} {'x' * n}"))]
    assert fires_at(RuleTermination("no_news", stop=3), events) is None
    assert (
        fires_at(RuleTermination("no_news", stop=3), [e for e in events if not e.content.parts[0].__dict__.get("text")])
        == 1
    )


def test_a_rule_writes_no_log_of_stops_and_heeds_no_policy_from_outside(caplog, monkeypatch, tmp_path):
    (tmp_path / "runguard.toml").write_text('mode = "off"\n[rules]\nrepetition = false\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNGUARD_MODE", "off")
    with caplog.at_level(logging.INFO, "runguard"):
        assert fires_at(RuleTermination("repetition", stop=3), rounds(5)) == 1
    assert caplog.text == ""


def test_a_rule_begins_anew_after_reset_and_for_each_run():
    condition = RuleTermination("repetition", stop=3)
    assert fires_at(condition, rounds(2)) is None
    assert fires_at(condition.for_run(), rounds(2)) is None
    condition.reset()
    assert fires_at(condition, rounds(2)) is None
    assert fires_at(condition, rounds(1)) == 1


# ---- the algebra, by example ----------------------------------------------------------------------------------------


def test_autogen_defect_chains_are_flat_and_mixtures_nest():
    a, b, c, d = (TextMentionTermination(letter) for letter in "abcd")
    assert (a | b | c).conditions == (a, b, c)
    assert (a | (b | c)).conditions == (a, b, c)
    assert OrTerminationCondition(a | b, c | d).conditions == (a, b, c, d)
    assert (a & b & c).conditions == (a, b, c)
    mixed = (a & b) | c
    assert [type(one) for one in mixed.conditions] == [AndTerminationCondition, TextMentionTermination]


def test_or_tells_all_children_and_joins_the_reasons_of_those_that_fired_now():
    a, b, count = TextMentionTermination("a"), TextMentionTermination("b"), MaxIterationsTermination(3)
    either = a | b | count
    assert not either.check([say("x"), say("y")])
    result = either.check([say("b a")])
    assert result.reason == "Text 'a' mentioned, Text 'b' mentioned, Maximum of 3 events reached, current count: 3"
    either.reset()
    assert either.check([say("b")]).reason == "Text 'b' mentioned"
    assert (a.terminated, b.terminated) == (False, True)


def test_and_waits_for_the_last_and_keeps_the_order_of_the_children():
    both = TextMentionTermination("a") & TextMentionTermination("b")
    assert not both.check([say("b")])
    assert (both.terminated, both.reason) == (False, None)
    assert both.check([say("a")]).reason == "Text 'a' mentioned, Text 'b' mentioned"


def test_and_asks_no_child_that_has_fired():
    asked: list[int] = []

    def once(events: Sequence[Any]) -> bool:
        asked.append(1)
        return True

    both = FunctionalTermination(once) & TextMentionTermination("b")
    for _ in range(3):
        assert not both.check([say("x")])
    assert asked == [1]


def test_a_child_asked_on_its_own_counts_for_its_composites():
    a, b = TextMentionTermination("a"), TextMentionTermination("b")
    either, both = a | b, a & b
    a.check([say("a")])
    assert (either.terminated, either.reason) == (True, "Text 'a' mentioned")
    assert (both.terminated, both.reason) == (False, None)
    with pytest.raises(TerminatedError):
        either.check([say("b")])
    assert both.check([say("b")]).reason == "Text 'a' mentioned, Text 'b' mentioned"


def test_an_instance_with_itself_is_itself():
    count = MaxIterationsTermination(3)
    for twice in (count | count, count & count):
        assert twice.conditions == (count,)
        assert fires_at(twice.for_run(), *[[say("x")]] * 4) == 3


def test_reset_resets_everything_within():
    a, b, count = TextMentionTermination("a"), TextMentionTermination("b"), MaxIterationsTermination(2)
    condition = (a & b) | count
    condition.check([say("a")])
    condition.reset()
    assert not a.terminated
    assert not condition.check([say("b")])
    assert condition.check([say("a")])


def test_the_reason_does_not_change_after_the_end():
    a, b = TextMentionTermination("a"), TextMentionTermination("b")
    condition = (a | b) & TextMentionTermination("c")
    either = condition.conditions[0]
    condition.check([say("a")])
    b.check([say("b")])  # somebody asks it elsewhere
    assert either.reason == "Text 'a' mentioned"


def test_a_finished_condition_gives_fresh_copies():
    condition = MaxIterationsTermination(1) | TextMentionTermination("x")
    condition.check([say("x")])
    run = condition.for_run()
    assert not run.terminated
    assert run.check([say("x")])


# ---- the algebra, by chance -----------------------------------------------------------------------------------------

_leaves = [
    lambda: TextMentionTermination("a"),
    lambda: TextMentionTermination("b", sources="boss"),
    lambda: MaxIterationsTermination(3),
    lambda: MaxMessageTermination(2),
    lambda: TokenUsageTermination(max_total=30),
    lambda: TokenUsageTermination(max_completion=6),
    lambda: CostTermination("0.00004", prices=PRICES, model="toy"),
    lambda: FunctionCallTermination("t"),
    lambda: HandoffTermination("boss"),
    lambda: StateTermination("k"),
    lambda: StateTermination("k", [2]),
    lambda: TimeoutTermination(3),
    lambda: RuleTermination("repetition", stop=2),
    lambda: FunctionalTermination(top_level_function),
    lambda: OwnTermination("boss"),
    lambda: ExternalTermination(),
]
_leaf = st.integers(0, len(_leaves) - 1)
_tree = st.recursive(
    _leaf, lambda inner: st.tuples(st.sampled_from("|&"), st.lists(inner, min_size=1, max_size=3)), max_leaves=8
)
_author = st.sampled_from(["a", "boss"])
_event = st.one_of(
    st.builds(lambda text, author: say(text, author=author), st.sampled_from(["", "a", "b", "ab", "zz"]), _author),
    st.builds(
        lambda prompt, output, author, chunk: took(prompt, output, author=author, partial=chunk),
        st.integers(0, 9),
        st.integers(0, 3),
        _author,
        st.booleans(),
    ),
    st.builds(lambda name, n: call(name, n), st.sampled_from(["t", "u"]), st.integers(0, 2)),
    st.builds(lambda name, n: answer(name, n, {"v": 1}), st.sampled_from(["t", "u"]), st.integers(0, 2)),
    st.builds(lambda target: does(transfer_to_agent=target), _author),
    st.builds(lambda value: does(state_delta={"k": value}), st.sampled_from([0, "x", [2]])),
)
_deltas = st.lists(st.lists(_event, max_size=3), min_size=4, max_size=12)  # long enough that many of them fire
Tree = int | tuple[str, list[Any]]


def build(tree: Tree, shared: dict[int, TerminationCondition] | None = None) -> TerminationCondition:
    """The condition; with ``shared``, equal leaves are one instance."""
    if isinstance(tree, int):
        return _leaves[tree]() if shared is None else shared.setdefault(tree, _leaves[tree]())
    kind = OrTerminationCondition if tree[0] == "|" else AndTerminationCondition
    return kind(*(build(inner, shared) for inner in tree[1]))


def play(condition: TerminationCondition, deltas: Sequence[Sequence[Any]]) -> tuple[int | None, str]:
    """When it fires and why; the clock goes on by one with each delta."""
    for number, delta in enumerate(deltas):
        result = condition.check(delta, now=float(number))
        if result:
            assert condition.terminated
            assert condition.reason == result.reason
            return number, result.reason
        assert not condition.terminated
        assert condition.reason is None
    return None, ""


def expected(tree: Tree, deltas: Sequence[Sequence[Any]]) -> tuple[int | None, str]:
    """What must come out, from each leaf played alone: | is the earliest, & the latest."""
    if isinstance(tree, int):
        return play(_leaves[tree]().for_run(now=0), deltas)
    parts = [expected(inner, deltas) for inner in tree[1]]
    moments = [moment for moment, _ in parts if moment is not None]
    if not moments or (tree[0] == "&" and len(moments) < len(parts)):
        return None, ""
    when = min(moments) if tree[0] == "|" else max(moments)
    return when, ", ".join(reason for moment, reason in parts if moment is not None and moment <= when)


def reasons(outcome: tuple[int | None, str]) -> tuple[int | None, set[str]]:
    return outcome[0], set(outcome[1].split(", "))


def mirrored(tree: Tree) -> Tree:
    return tree if isinstance(tree, int) else (tree[0], [mirrored(inner) for inner in reversed(tree[1])])


def regrouped(tree: Tree) -> Tree:
    """(x | y) | z as x | (y | z), everywhere."""
    if isinstance(tree, int):
        return tree
    sign, (first, *rest) = tree[0], [regrouped(inner) for inner in tree[1]]
    return (sign, [first, (sign, rest)]) if rest else (sign, [first])


def nested(tree: Tree) -> TerminationCondition:
    """Built pairwise with the operators."""
    if isinstance(tree, int):
        return build(tree)
    made = [nested(inner) for inner in tree[1]]
    result = made[0]
    for one in made[1:]:
        result = result | one if tree[0] == "|" else result & one
    return result


@given(_tree, _deltas)
def test_or_fires_with_the_first_and_and_with_the_last_of_its_children(tree, deltas):
    assert play(build(tree).for_run(now=0), deltas) == expected(tree, deltas)


@given(_tree, _deltas)
def test_order_and_grouping_change_nothing_but_the_order_of_reasons(tree, deltas):
    outcome = reasons(play(build(tree).for_run(now=0), deltas))
    assert reasons(play(build(mirrored(tree)).for_run(now=0), deltas)) == outcome
    assert reasons(play(build(regrouped(tree)).for_run(now=0), deltas)) == outcome
    assert reasons(play(nested(tree).for_run(now=0), deltas)) == outcome


@given(_tree, _deltas)
def test_one_instance_in_many_places_is_told_of_each_delta_once(tree, deltas):
    assert reasons(play(build(tree, {}).for_run(now=0), deltas)) == reasons(expected(tree, deltas))
    condition = build(tree, {})
    condition.reset(now=0)
    assert reasons(play(condition, deltas)) == reasons(expected(tree, deltas))


@given(_tree, _deltas, st.integers(1, 4))
def test_latching_is_idempotent(tree, deltas, times):
    condition = build(tree).for_run(now=0)
    when, reason = play(condition, deltas)
    for _ in range(times if when is not None else 0):
        with pytest.raises(TerminatedError):
            condition.check([say("a")], now=99.0)
        assert (condition.terminated, condition.reason) == (True, reason)


@given(_tree, _deltas, _deltas)
def test_a_reset_forgets_everything(tree, before, deltas):
    condition = build(tree)
    condition.reset(now=0)
    play(condition, before)
    condition.reset(now=0)
    assert play(condition, deltas) == expected(tree, deltas)


@given(_tree, _deltas, _deltas, st.booleans())
def test_copies_for_runs_never_influence_one_another(tree, left, right, are_shared):
    condition = build(tree, {} if are_shared else None)
    alone = [play(condition.for_run(now=0), deltas) for deltas in (left, right)]
    runs = [condition.for_run(now=0), condition.for_run(now=0)]
    outcome: list[tuple[int | None, str]] = [(None, ""), (None, "")]
    for number in range(max(len(left), len(right))):
        for side, deltas in enumerate((left, right)):
            if (
                number < len(deltas)
                and not runs[side].terminated
                and (result := runs[side].check(deltas[number], now=float(number)))
            ):
                outcome[side] = number, result.reason
    assert outcome == alone
    assert not condition.terminated


@given(_tree, _deltas)
def test_saved_and_loaded_it_behaves_the_same(tree, deltas):
    condition = build(tree)
    loaded = TerminationCondition.from_dict(json.loads(json.dumps(condition.to_dict())))
    assert loaded.to_dict() == condition.to_dict()
    assert repr(loaded) == repr(condition)
    assert play(loaded.for_run(now=0), deltas) == play(condition.for_run(now=0), deltas)


@given(_tree, _deltas)
def test_awaiting_is_checking(tree, deltas):
    async def awaited() -> tuple[int | None, str]:
        condition = build(tree).for_run(now=0)
        for number, delta in enumerate(deltas):
            if (result := await condition(delta, now=float(number))) is not None:
                return number, result.reason
        return None, ""

    assert asyncio.run(awaited()) == play(build(tree).for_run(now=0), deltas)


@given(_tree, _deltas)
def test_how_events_are_cut_into_deltas_does_not_matter(tree, deltas):
    one_by_one = [[one] for delta in deltas for one in delta]
    with_all = [one for delta in deltas for one in delta]

    def at(parts: Sequence[Sequence[Any]]) -> bool:
        condition = build(tree).for_run(now=0)
        return any(condition.check(part, now=0.0) for part in parts)

    assert at(one_by_one) == at([with_all]) == at(deltas)


@given(_tree)
def test_what_cannot_know_early_never_fires_without_events(tree):
    condition = build(tree).for_run(now=0)
    condition.count(10**9, 10**9, model="toy")
    for external in condition.leaves():
        if isinstance(external, ExternalTermination):
            external.set()
    if condition.check(now=10.0**6):
        assert condition.knows_early


# ---- saving ---------------------------------------------------------------------------------------------------------


def test_saved_conditions_are_plain_and_versioned():
    condition = (
        TextMentionTermination("DONE", sources=["critic", "editor"]) | TimeoutTermination(2.5)
    ) & MaxMessageTermination(3, include_agent_event=True)
    assert condition.to_dict() == {
        "version": 1,
        "type": "AndTerminationCondition",
        "conditions": [
            {
                "type": "OrTerminationCondition",
                "conditions": [
                    {"type": "TextMentionTermination", "text": "DONE", "sources": ["critic", "editor"]},
                    {"type": "TimeoutTermination", "timeout_seconds": 2.5},
                ],
            },
            {"type": "MaxMessageTermination", "max_messages": 3, "include_agent_event": True},
        ],
    }


def test_autogen_defect_sources_survive_saving():
    condition = TextMentionTermination("x", sources="critic")
    loaded = TextMentionTermination.from_dict(condition.to_dict())
    assert not loaded.check([say("x", author="writer")])
    assert loaded.check([say("x", author="critic")])


def test_autogen_defect_functions_are_saved_by_the_name_they_are_imported_by():
    saved = FunctionalTermination(top_level_function).to_dict()
    assert saved["func"] == f"{__name__}:top_level_function"
    assert TerminationCondition.from_dict(saved).check([say("x", author="boss")])


def local_function() -> Any:
    def inner(events: Sequence[Any]) -> bool:
        return True

    return inner


@pytest.mark.parametrize(
    "func", [lambda events: True, local_function(), Holder().method, partial(top_level_function), AsyncCallable()]
)
def test_functions_that_cannot_be_imported_cannot_be_saved(func):
    condition = FunctionalTermination(func)
    with pytest.raises(PolicyError, match=r"func = .*cannot be saved"):
        (condition | MaxIterationsTermination(1)).to_dict()


def test_prices_and_amounts_survive_saving_exactly():
    prices = {
        "m": [
            {"input": "0.1", "output": "0.3", "tiers": [{"above": 10, "input": "0.7", "output": 1}]},
            {"input": 5, "output": 6, "since": "2030-01-01"},
        ],
        "n*": {"input": Decimal("0.000001"), "output": 0},
    }
    condition = CostTermination(Decimal("0.000000001"), prices=prices, model="m")
    data = json.loads(json.dumps(condition.to_dict()))
    assert data["max_usd"] == "0.000000001"
    loaded = CostTermination.from_dict(data)
    assert loaded._prices == condition._prices
    assert loaded.to_dict() == condition.to_dict()


@pytest.mark.parametrize("value", [(1, 2), NAN, {1: 2}, object(), {1}])
def test_values_that_json_would_change_cannot_be_saved(value):
    with pytest.raises(PolicyError, match="value = "):
        StateTermination("k", value).to_dict()


@pytest.mark.parametrize("value", [None, False, 0, "", [1], {"a": None}])
def test_values_that_mean_nothing_elsewhere_are_kept(value):
    loaded = TerminationCondition.from_dict(StateTermination("k", value).to_dict())
    assert loaded.check([does(state_delta={"k": value})])
    assert "value" not in StateTermination("k").to_dict()


@pytest.mark.parametrize("name", ["RuleTermination", "NoProgressTermination"])
def test_rules_are_saved_with_their_rungs(name):
    condition = RuleTermination("stall", nudge=2, stop=4) if name == "RuleTermination" else NoProgressTermination()
    loaded = TerminationCondition.from_dict(json.loads(json.dumps(condition.to_dict())))
    assert type(loaded).__name__ == name
    assert repr(loaded) == repr(condition)
    failing = rounds(12, response={"error": "bad format"}, page=lambda n: n)
    assert fires_at(loaded, *each(failing)) == fires_at(condition, *each(failing)) is not None


def test_the_names_that_autogen_uses_can_be_loaded():
    loaded = TerminationCondition.from_dict({"version": 1, "type": "TokenUsageTermination", "max_total_token": 5})
    assert loaded.to_dict() == {"version": 1, "type": "TokenUsageTermination", "max_total": 5}


def test_conditions_of_your_own_are_saved_by_where_they_are():
    saved = (OwnTermination("boss") | MaxIterationsTermination(9)).to_dict()
    assert saved["conditions"][0] == {"type": f"{__name__}:OwnTermination", "author": "boss"}
    assert fires_at(TerminationCondition.from_dict(saved), [say("x", author="boss")] * 2) == 1


def _or(*conditions: Any) -> dict[str, Any]:
    return {"version": 1, "type": "OrTerminationCondition", "conditions": list(conditions)}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"type": "ExternalTermination"}, "version: missing"),
        ({"version": 2, "type": "ExternalTermination"}, "version = 2: this release reads version 1"),
        ({"version": True, "type": "ExternalTermination"}, "version = True"),
        ({"version": 1}, "type: missing"),
        (
            {"version": 1, "type": "TextMentionTerminaton", "text": "x"},
            "type = 'TextMentionTerminaton': no such condition; did you mean 'TextMentionTermination'",
        ),
        ({"version": 1, "type": "TerminationCondition"}, "no such condition"),
        ({"version": 1, "type": 5}, "type = 5"),
        (
            {"version": 1, "type": "TextMentionTermination", "txt": "x"},
            "txt: no such setting of TextMentionTermination; did you mean 'text'",
        ),
        ({"version": 1, "type": "TextMentionTermination"}, "text: missing"),
        (_or({"type": "MaxIterationsTermination", "max_iterations": 0}), "conditions.0.max_iterations = 0: must be"),
        (
            _or({"type": "ExternalTermination"}, _or({"type": "TextMentionTermination", "text": "x", "sorces": []})),
            "conditions.1.conditions.0.sorces: no such",
        ),
        (
            _or({"type": "ExternalTermination"}, {"type": "Timeout"}),
            "conditions.1.type = 'Timeout': no such condition; did you mean 'TimeoutTermination'",
        ),
        (_or({"version": 3, "type": "ExternalTermination"}), "conditions.0.version = 3"),
        (_or(), r"conditions = \[\]: give a list"),
        (_or("x"), "conditions.0 = 'x': give a mapping"),
        ({"version": 1, "type": "OrTerminationCondition", "conditions": {}}, "conditions = {}"),
        ({"version": 1, "type": "OrTerminationCondition"}, "conditions: missing"),
        (
            {"version": 1, "type": "RuleTermination", "rule": "stall", "stp": 3},
            "stp: no such setting of RuleTermination; did you mean 'stop'",
        ),
        (
            {"version": 1, "type": "FunctionalTermination", "func": "no_such_module_x:f"},
            "func = 'no_such_module_x:f': its module cannot be imported",
        ),
        (
            {"version": 1, "type": "FunctionalTermination", "func": "json:nothing"},
            "func = 'json:nothing': there is no such name",
        ),
        (_or({"type": "FunctionalTermination", "func": "json"}), "conditions.0.func = 'json': give 'module:name'"),
        ({"version": 1, "type": "json:JSONDecoder"}, "type = 'json:JSONDecoder': is no termination condition"),
        ([], "condition = \\[\\]: give a mapping"),
    ],
)
def test_faults_in_saved_conditions_are_told_with_their_path_and_the_nearest_name(data, message):
    with pytest.raises(PolicyError, match=message):
        TerminationCondition.from_dict(data)


def test_loading_another_kind_than_asked_for_is_told():
    with pytest.raises(PolicyError, match="is no TimeoutTermination"):
        TimeoutTermination.from_dict(ExternalTermination().to_dict())


def test_nesting_without_end_is_refused():
    data: dict[str, Any] = {"type": "ExternalTermination"}
    for _ in range(5_000):
        data = {"type": "OrTerminationCondition", "conditions": [data]}
    with pytest.raises(PolicyError, match="nested too deeply"):
        TerminationCondition.from_dict({"version": 1, **data})


def test_each_name_of_the_package_is_there():
    from runguard import termination

    assert all(getattr(termination, name) for name in termination.__all__)
    assert termination.__all__ == sorted(termination.__all__)
