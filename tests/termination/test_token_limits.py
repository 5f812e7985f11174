"""Conditions on tokens and money."""

from types import SimpleNamespace
from typing import Any

import pytest

from runguard.pricing.book import Price
from runguard.pricing.rates import Usage
from runguard.termination import (
    CostTermination,
    TextMentionTermination,
    TokenUsageTermination,
)
from tests.kit.conditions import PRICES, answer, fires_at, say, took
from tests.kit.examples import each_row


@each_row(
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
def test_tokens_are_summed_over_calls(limit: dict[str, Any], at: int | None) -> None:
    assert fires_at(TokenUsageTermination(**limit), [took(10, 2)], [say("no usage"), took(10, 2)], [took(10, 2)]) == at


def test_thinking_and_tool_prompts_are_tokens_too() -> None:
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


@each_row(
    "events",
    [
        stream((10, 1), (10, 2), (10, 3), closing=(10, 3)),
        stream(None, None, (10, 3), closing=None),
        stream(None, None, closing=(10, 3)),
        stream((10, 1), (10, 3), closing=None),
        stream((10, 1), None, closing=(10, 3)),
    ],
)
def test_the_last_usage_of_a_stream_counts_once(events: Any) -> None:
    assert fires_at(TokenUsageTermination(max_total=13), events) == 1
    assert fires_at(TokenUsageTermination(max_total=14), events) is None
    assert fires_at(TokenUsageTermination(max_total=26), events, events) == 2
    assert fires_at(TokenUsageTermination(max_total=27), events, events) is None


def test_a_stream_that_is_closed_by_words_and_then_by_a_call_is_one_model_call() -> None:
    # ADK's older streaming: the same prompt, no chunk between
    events = [*stream((10, 1), closing=(10, 2)), took(10, 5)]
    assert fires_at(TokenUsageTermination(max_total=15), events) == 1
    assert fires_at(TokenUsageTermination(max_total=16), events) is None
    assert fires_at(CostTermination("0.00002", prices=PRICES, model="toy"), events) == 1
    assert fires_at(CostTermination("0.000021", prices=PRICES, model="toy"), events) is None


@pytest.mark.parametrize("another", [(20, 2), (10, 1)], ids=["longer prompt", "shorter answer"])
def test_a_whole_call_after_a_stream_is_a_call_of_its_own(another: tuple[int, int]) -> None:
    events = [*stream((10, 1), closing=(10, 2)), took(*another)]
    assert fires_at(TokenUsageTermination(max_total=12 + sum(another)), events) == 1


def test_equal_calls_that_did_not_stream_are_all_counted() -> None:
    assert fires_at(TokenUsageTermination(max_total=24), [took(10, 2)], [took(10, 2)]) == 2


def test_the_same_prompt_after_an_answer_is_another_call() -> None:
    events = [*stream((10, 2), closing=(10, 2)), answer("t", 1, {}), took(10, 2)]
    assert fires_at(TokenUsageTermination(max_total=24), events) == 1


def test_autogen_defect_all_speakers_of_a_fan_out_are_counted() -> None:
    branches = [stream((500, 100), (1_000, 400), closing=None, author=f"w{n}", branch=f"fan.w{n}") for n in range(5)]
    interleaved = [branch[step] for step in range(3) for branch in branches]
    assert fires_at(TokenUsageTermination(max_total=7_000), *[[e] for e in interleaved]) == 15
    assert fires_at(TokenUsageTermination(max_total=7_001), interleaved) is None


def test_branches_of_one_author_do_not_mix() -> None:
    left, right = (stream((10, 1), closing=None, branch=name) for name in ("left", "right"))
    assert fires_at(TokenUsageTermination(max_total=22), [left[0], right[0]], [left[1]], [right[1]]) == 3


def test_authors_of_one_branch_do_not_mix() -> None:
    left, right = (stream((10, 1), closing=None, author=name) for name in ("left", "right"))
    assert fires_at(TokenUsageTermination(max_total=22), [left[0], right[0]], [left[1]], [right[1]]) == 3


def test_autogen_defect_calls_that_no_event_shows_are_counted_and_seen_at_once() -> None:
    condition = (TokenUsageTermination(max_total=100) | CostTermination(1, prices=PRICES)).for_run()
    condition.count(60, 10)
    assert not condition.leaves()[0].check()
    condition.count(20, 10, model="toy")
    assert condition.leaves()[0].check()


@each_row(
    "report",
    [
        {},
        {"prompt_token_count": None},
        {"prompt_token_count": 0, "candidates_token_count": 0, "total_token_count": 0},
        {"prompt_token_count": -5, "total_token_count": 3},
        {"prompt_token_count": "many"},
    ],
)
def test_usage_that_reports_nothing_is_estimated_from_the_words_so_far(report: dict[str, Any]) -> None:
    events = [say("ask " * 30, author="user"), say("word " * 40, usage_metadata=SimpleNamespace(**report))]
    condition = TokenUsageTermination(max_total=90)  # 120 bytes of prompt at three per token, 200 of answer at four
    assert fires_at(condition, *([event] for event in events)) == 2
    assert (
        condition.reason
        == "Token usage limit reached, total token count: 90, prompt token count: 40, completion token count: 50"
    )


def test_the_input_alone_is_estimated_where_only_the_output_is_reported() -> None:
    events = [say("ask " * 30, author="user"), took(0, 7)]
    condition = TokenUsageTermination(max_prompt=40)
    assert fires_at(condition, *([event] for event in events)) == 2
    assert (
        condition.reason
        == "Token usage limit reached, total token count: 47, prompt token count: 40, completion token count: 7"
    )


def test_a_last_chunk_of_zeros_takes_nothing_back() -> None:
    events = [took(4_000, 1_000, partial=True), took(0, 0)]
    assert fires_at(TokenUsageTermination(max_total=5_000), *([event] for event in events)) == 2


def test_money_is_exact_and_reached_not_exceeded() -> None:
    # 0.1 + 0.2 dollars are 0.3 dollars: 100,000 and 200,000 input tokens at a dollar per million
    condition = CostTermination("0.3", prices=PRICES, model="toy")
    assert fires_at(condition, [took(100_000, 0)], [took(199_999, 0)], [took(1, 0)]) == 3
    assert condition.reason == "Cost limit of $0.30 reached, $0.30 spent"


def test_the_price_is_that_of_the_model_the_event_names() -> None:
    prices: dict[str, Any] = {"toy": {"input": 1, "output": 2}, "dear": Price(input=100, output=100)}
    condition = CostTermination(1, prices=prices, model="toy")
    assert fires_at(condition, [took(10_000, 0)], [took(10_000, 0, model_version="dear")]) == 2


def test_the_day_of_the_event_decides_which_price_holds() -> None:
    prices: dict[str, Any] = {"m": [{"input": 1, "output": 1}, {"input": 100, "output": 1, "since": "2026-01-01"}]}
    before, after = 1_760_000_000.0, 1_770_000_000.0  # October 2025, February 2026
    assert fires_at(CostTermination(1, prices=prices), [took(10_000, 0, model_version="m", timestamp=before)]) is None
    assert fires_at(CostTermination(1, prices=prices), [took(10_000, 0, model_version="m", timestamp=after)]) == 1


def test_a_model_named_by_a_chunk_counts_for_its_stream() -> None:
    events = [took(999_998, 1, partial=True, model_version="toy"), say("x")]
    condition = CostTermination(1, prices=PRICES)
    assert fires_at(condition, events) == 1
    assert condition.reason == "Cost limit of $1.00 reached, $1.00 spent"


@pytest.mark.parametrize(("model", "said"), [("no-such-model-9", "no-such-model-9"), (None, "model=")])
def test_an_unknown_price_is_never_zero(model: str | None, said: str) -> None:
    condition = CostTermination(1000, prices=PRICES)
    assert condition.check([took(1, 0, model_version=model)])
    assert "Cost cannot be known" in (condition.reason or "")
    assert said in (condition.reason or "")


def test_an_unknown_price_is_forgotten_with_the_rest() -> None:
    condition = CostTermination(1000, prices=PRICES)
    assert condition.check([took(1, 0, model_version="no-such-model-9")])
    assert not condition.for_run().check()
    condition.reset()
    assert not condition.check()


def test_a_stream_of_one_run_is_not_closed_by_another() -> None:
    chunk, closing = stream((10, 2), closing=None)
    condition = TokenUsageTermination(max_total=12)
    condition.check([chunk])
    one, two = condition.for_run(), condition.for_run()
    one.check([chunk])
    assert not two.check([closing])
    assert one.check([closing])
    condition.reset()
    assert not condition.check([closing])


def test_calls_told_directly_cost_money_too_and_unknown_ones_fire() -> None:
    condition = CostTermination(1, prices=PRICES).for_run()
    condition.count(500_000, 0, model="toy")
    assert not condition.check()
    condition.count(0, 0, model="toy", usage=Usage(input=500_000))
    assert condition.check()
    condition.reset()
    condition.count(1, 1, model="unheard-of")
    assert condition.check()


def test_a_call_is_counted_once_by_a_condition_that_stands_in_two_places() -> None:
    tokens, other, third = TokenUsageTermination(max_total=20), TextMentionTermination("x"), TextMentionTermination("y")
    condition = ((tokens & other) | (tokens & third)).for_run()
    assert len(condition.leaves()) == 3  # one instance in the copy, too
    condition.count(10, 0)
    assert not condition.check([say("xy")])
    assert not condition.check([took(9, 0)])
    assert condition.check([took(1, 0)])
