"""What all conditions have in common, and those that count, look for words or watch the clock."""

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from runguard.errors import PolicyError, RunGuardError
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
from tests.kit.conditions import (
    NAN,
    Holder,
    OwnTermination,
    answer,
    call,
    does,
    event,
    fires_at,
    say,
    top_level_function,
)
from tests.kit.examples import each_row

# ---- events ---------------------------------------------------------------------------------------------------------


def think(text: str) -> SimpleNamespace:
    return event(SimpleNamespace(text=text, thought=True))


# ---- what all have in common ----------------------------------------------------------------------------------------


def test_a_result_is_falsy_until_it_is_time_and_cannot_be_changed() -> None:
    assert not TerminationResult(False)
    result = TextMentionTermination("stop").check([say("please stop")])
    assert result
    assert result == TerminationResult(True, "Text 'stop' mentioned")
    with pytest.raises(AttributeError):
        result.reason = "other"  # type: ignore[misc]


def test_a_condition_remembers_that_and_why_it_fired_until_reset() -> None:
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
async def test_autogen_defect_a_finished_condition_raises_one_ordinary_exception_composites_included(
    finished: Any,
) -> None:
    condition = finished.for_run()
    assert condition.check([say("stop")])
    for ask in (lambda: condition.check([say("go")]), condition.check):
        with pytest.raises(TerminatedError, match="already fired"):
            ask()
    with pytest.raises(TerminatedError):
        await condition([])
    assert issubclass(TerminatedError, RunGuardError)
    assert issubclass(TerminatedError, Exception)


async def test_calling_it_gives_none_until_it_fires() -> None:
    condition = MaxIterationsTermination(2)
    assert await condition([say("x")]) is None
    assert await condition([say("x")]) == TerminationResult(True, "Maximum of 2 events reached, current count: 2")


def test_an_event_instead_of_a_list_of_events_is_told() -> None:
    with pytest.raises(TypeError, match="a list of events"):
        MaxIterationsTermination(2).check(say("x"))  # type: ignore[arg-type]


def test_any_iterable_of_events_will_do() -> None:
    assert MaxIterationsTermination(2).check(say("x") for _ in range(2))  # type: ignore[arg-type]


@each_row(
    "make",
    [
        lambda: MaxIterationsTermination(0),
        lambda: MaxIterationsTermination(-1),
        lambda: MaxIterationsTermination(True),
        lambda: MaxIterationsTermination(NAN),  # type: ignore[arg-type]
        lambda: MaxIterationsTermination("3"),  # type: ignore[arg-type]
        lambda: MaxIterationsTermination(2.5),  # type: ignore[arg-type]
        lambda: MaxMessageTermination(0),
        lambda: MaxMessageTermination(3, include_agent_event=1),  # type: ignore[arg-type]
        lambda: TextMentionTermination(""),
        lambda: TextMentionTermination(None),  # type: ignore[arg-type]
        lambda: TextMentionTermination("x", sources=[]),
        lambda: TextMentionTermination("x", sources=""),
        lambda: TextMentionTermination("x", sources=[1]),  # type: ignore[list-item]
        lambda: TextMentionTermination("x", sources=5),  # type: ignore[arg-type]
        lambda: TimeoutTermination(0),
        lambda: TimeoutTermination(-1),
        lambda: TimeoutTermination(True),
        lambda: TimeoutTermination(NAN),
        lambda: TimeoutTermination(math.inf),
        lambda: TimeoutTermination("1"),  # type: ignore[arg-type]
        lambda: TokenUsageTermination(),
        lambda: TokenUsageTermination(0),
        lambda: TokenUsageTermination(max_prompt=True),
        lambda: TokenUsageTermination(5, max_total_token=5),
        lambda: TokenUsageTermination(max_total_tokens=5, max_total_token=5),
        lambda: TokenUsageTermination(max_prompt_tokens=0),
        lambda: FunctionCallTermination(""),
        lambda: HandoffTermination(""),
        lambda: HandoffTermination(3),  # type: ignore[arg-type]
        lambda: FunctionalTermination(3),  # type: ignore[arg-type]
        lambda: FunctionalTermination(Holder),  # type: ignore[arg-type]
        lambda: CostTermination(0),
        lambda: CostTermination(True),
        lambda: CostTermination(NAN),
        lambda: CostTermination("much"),
        lambda: CostTermination(1, prices={"m": {"inptu": 1}}),
        lambda: CostTermination(1, prices=[1]),  # type: ignore[arg-type]
        lambda: CostTermination(1, model=""),
        lambda: RuleTermination("repetitoin"),
        lambda: RuleTermination("growth"),
        lambda: RuleTermination("repetition", stop=1),
        lambda: RuleTermination("repetition", stop=True),
        lambda: RuleTermination("repetition", stop=NAN),
        lambda: RuleTermination("repetition", stp=3),
        lambda: RuleTermination("cycle"),
        lambda: StateTermination(""),
        lambda: FinalAnswerTermination(sources=[""]),
        lambda: OrTerminationCondition(),
        lambda: AndTerminationCondition(MaxIterationsTermination(1), "x"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_meant_fails_at_construction(make: Callable[..., Any]) -> None:
    with pytest.raises(PolicyError):
        make()


def test_errors_name_the_argument_and_the_nearest_right_name() -> None:
    with pytest.raises(PolicyError, match=r"max_messages = 0: must be"):
        MaxMessageTermination(0)
    with pytest.raises(PolicyError, match="did you mean 'repetition'"):
        RuleTermination("repetitoin")
    with pytest.raises(PolicyError, match="did you mean 'stop'"):
        RuleTermination("repetition", stp=3)
    with pytest.raises(PolicyError, match="max_prompt_token = 0"):
        TokenUsageTermination(max_prompt_token=0)


def test_repr_reads_like_the_expression_that_made_it() -> None:
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


def test_something_else_cannot_be_combined_with_a_condition() -> None:
    with pytest.raises(TypeError):
        MaxIterationsTermination(1) | 5  # type: ignore[operator]
    with pytest.raises(TypeError):
        MaxIterationsTermination(1) & None  # type: ignore[operator]


@each_row(
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
def test_whether_it_may_fire_without_an_event_is_known(condition: Any, early: bool) -> None:
    assert condition.knows_early is early


def test_conditions_of_your_own_need_only_judge() -> None:
    condition = OwnTermination("boss") | MaxIterationsTermination(10)
    assert fires_at(condition, [say("x", author="boss")], [say("x")], [say("x", author="boss")]) == 3
    assert condition.reason == "boss twice"
    assert fires_at(condition.for_run(), [say("x", author="boss")]) is None


# ---- counts and words -----------------------------------------------------------------------------------------------


def test_iterations_are_events_chunks_aside() -> None:
    assert (
        fires_at(MaxIterationsTermination(3), [say("x")], [say("x", partial=True)] * 9, [think("x"), call("t", 1)]) == 3
    )
    assert fires_at(MaxIterationsTermination(3), [], [], [], [say("x")] * 3) == 4


def test_autogen_defect_a_tool_loop_is_unseen_by_messages_alone_and_seen_by_iterations() -> None:
    loop = [part for n in range(5) for part in (call("t", n), answer("t", n, {}))]
    assert fires_at(MaxMessageTermination(1), loop) is None
    assert fires_at(MaxMessageTermination(10, include_agent_event=True), loop) == 1
    assert fires_at(MaxIterationsTermination(10), loop) == 1


def test_messages_are_events_with_words() -> None:
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


def test_a_call_with_words_beside_it_is_a_message() -> None:
    both = event(
        SimpleNamespace(text="let me look"), SimpleNamespace(function_call=SimpleNamespace(name="t", args={}, id="1"))
    )
    assert fires_at(MaxMessageTermination(1), [both]) == 1


def test_words_are_found_with_case_and_across_parts_but_not_in_thoughts_or_chunks() -> None:
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


@each_row("sources", ["critic", ["critic"], ("critic", "editor"), {"critic", "editor"}])
def test_only_the_words_of_the_sources_count(sources: Any) -> None:
    condition = TextMentionTermination("OK", sources=sources)
    assert not condition.check([say("OK", author="writer")])
    assert not condition.check([say("OK", author="crit")])
    assert condition.check([say("OK", author="critic")])


def test_a_final_answer_has_words_and_is_final() -> None:
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


def test_a_function_counts_when_it_has_answered() -> None:
    condition = FunctionCallTermination("approve")
    assert fires_at(condition, [call("approve", 1)], [answer("other", 2, {})], [answer("approve", 1, {})]) == 3
    assert condition.reason == "Function 'approve' was executed"


def test_a_function_that_waits_for_leave_was_not_executed() -> None:
    waiting = answer("approve", 1, {"error": "needs confirmation"})
    waiting.actions = SimpleNamespace(requested_tool_confirmations={"c1": {}})
    assert fires_at(FunctionCallTermination("approve"), [waiting], [answer("approve", 1, {})]) == 2


def test_a_hand_off_is_one_to_that_agent() -> None:
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


def test_state_is_compared_or_has_to_be_true() -> None:
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


def test_a_value_that_cannot_be_compared_is_not_the_value() -> None:
    class Array:
        def __eq__(self, other: object) -> Any:
            return self

        def __bool__(self) -> bool:
            raise ValueError("ambiguous")

        __hash__ = None  # type: ignore[assignment]

    assert not StateTermination("k", 1).check([does(state_delta={"k": Array()})])
    assert not StateTermination("k").check([does(state_delta={"k": Array()})])


def test_a_long_value_makes_no_long_reason() -> None:
    condition = StateTermination("k")
    assert condition.check([does(state_delta={"k": "x" * 10_000})])
    assert len(condition.reason or "") < 200


# ---- time -----------------------------------------------------------------------------------------------------------


def test_autogen_defect_the_clock_starts_with_the_run_not_at_construction() -> None:
    condition = TimeoutTermination(10)
    run = condition.for_run(now=1_000.0)
    assert not run.check(now=1_009.9)
    assert run.check(now=1_010.0) == TerminationResult(True, "Timeout of 10 seconds reached")
    assert not condition.check(now=5_000.0)  # asked for the first time: starts now
    assert condition.check(now=5_010.0)


def test_autogen_defect_time_is_seen_without_a_message() -> None:
    run = (TimeoutTermination(10) | TextMentionTermination("never")).for_run(now=0)
    assert run.wake_at() == 10
    assert run.check((), now=10)
    assert run.wake_at() is None


def test_a_reset_starts_the_clock_again() -> None:
    condition = TimeoutTermination(10)
    condition.check(now=0)
    condition.reset(now=8)
    assert not condition.check(now=17)
    assert condition.check(now=18)


def test_without_a_time_the_monotonic_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    run = TimeoutTermination(10).for_run()
    now = 59.0
    assert not run.check()
    now = 60.0
    assert run.check()


def test_the_next_moment_is_the_nearest_of_those_still_open() -> None:
    run = ((TimeoutTermination(5) & TextMentionTermination("x")) | TimeoutTermination(20)).for_run(now=0)
    assert run.wake_at() == 5
    assert not run.check(now=6)
    assert run.wake_at() == 20
    settled = ((TimeoutTermination(5) | TextMentionTermination("x")) & TextMentionTermination("y")).for_run(now=0)
    assert not settled.check([say("x")], now=1)
    assert settled.wake_at() is None  # what the clock would say was said by words
    assert TextMentionTermination("x").wake_at() is None
    assert TimeoutTermination(5).wake_at() is None  # no clock runs yet
