"""Failures, and searches that find nothing."""

from collections.abc import Callable
from typing import Any

import pytest

from runguard.core.decision import Action, Rungs, text_for_model
from runguard.core.events import (
    Answer,
    ModelResult,
    Outcome,
    ToolResults,
)
from runguard.core.rules.failures import Stall, ToolFailures, TruncatedCalls, lacks_arguments
from tests.kit.detectors import answer, failing, only, results, word, words
from tests.kit.driver import Driver
from tests.kit.examples import each_row

STALLED = ["allow", "allow", "nudge", "allow", "block", "stop"]  # of a stall with ever new arguments


# ---- failures -------------------------------------------------------------------------------------------------------


def test_the_same_failure_with_any_arguments_is_nudged_blocked_and_stopped(drive: type[Driver]) -> None:
    d = drive()
    steps = [d.tool(args={"hint": n}, says={"status": "partial_parse_error"}) for n in range(6)]
    assert words(steps) == STALLED
    assert d.rules_tripped == ["stall"]


def test_the_first_three_retries_of_calls_that_failed_are_no_stall_yet(drive: type[Driver]) -> None:
    d = drive(rules={"repetition": False, "no_news": False})
    for n in (1, 2, 1, 2, 1):  # two attempts, three retries
        assert d.tool(args={"hint": n}, says="Error: boom").word == "allow"
    assert words(d.tool(args={"hint": 2}, says="Error: boom") for _ in range(4)) == ["nudge", "allow", "block", "stop"]


def test_retries_count_when_the_rungs_are_explicit(drive: type[Driver]) -> None:
    for policy in ({"max_identical_tool_results": 3}, {"rules": {"stall": {"stop": 3}}}):
        d = drive(**policy)
        assert words(d.tool(says="Error: boom") for _ in range(3))[-1] == "stop", policy


def test_the_third_equal_failure_stops_when_three_are_the_limit(drive: type[Driver]) -> None:
    d = drive(max_identical_tool_results=3)
    steps = [d.tool(args={"hint": n}, says={"status": "partial_parse_error", "data": None}) for n in range(3)]
    assert words(steps) == ["allow", "allow", "stop"]
    assert d.guard.trips[0].tool == "look"


def test_the_same_failure_about_other_particulars_is_the_same(drive: type[Driver]) -> None:
    d = drive()
    steps = [
        d.tool(args={"path": n}, says=f"Error: cannot read '/data/{n}.csv' (request_id={n * 7})") for n in range(9)
    ]
    assert words(steps)[-1] == "stop"


def test_an_exception_is_a_failure_like_any_other(drive: type[Driver]) -> None:
    d = drive()
    assert (
        words(d.tool(args={"n": n}, says="ConnectionError: refused", outcome=Outcome.ERROR) for n in range(9))[-1]
        == "stop"
    )


def test_a_block_after_failures_refuses_the_tool_whatever_the_arguments(drive: type[Driver]) -> None:
    d = drive()
    for n in range(4):
        d.tool("parse", {"hint": n}, says="Error: boom")
    assert not d.tool("parse", {"hint": "quite another"}).ran
    assert d.tool("other", says="fine").ran


def test_a_new_good_answer_of_any_tool_ends_the_stall(drive: type[Driver]) -> None:
    d = drive(**only("stall", stop=3))
    for n in range(20):
        assert words(
            [d.tool("parse", {"n": n}, says="Error: boom"), d.tool("parse", {"m": n}, says="Error: boom")]
        ) == ["allow", "allow"]
        d.tool("read", {"n": n}, says=f"fact {n}")


def test_a_good_answer_known_before_does_not_end_the_stall(drive: type[Driver]) -> None:
    d = drive(**only("stall", stop=3))
    d.tool("read")
    steps = []
    for n in range(3):
        steps += [d.tool("parse", {"n": n}, says="Error: boom"), d.tool("read")]
    assert words(steps) == ["allow"] * 4 + ["stop", "stop"]


def test_equal_failures_of_one_batch_count_once(drive: type[Driver]) -> None:
    d = drive()
    assert words([d.batch([("parse", {"n": n}, "Error: boom") for n in range(10)])]) == ["allow"]
    assert words([d.batch([("parse", {"n": n}, "Error: boom") for n in range(10, 20)])]) == ["allow"]


def test_failures_of_two_tools_are_two_rows() -> None:
    stall = Stall(Rungs(stop=3))
    seen = [word(stall.observe(results(failing(tool="ab"[n % 2]), batch=str(n)))) for n in range(6)]
    assert seen == ["-"] * 4 + ["stop", "stop"]


def test_another_failure_starts_another_row_for_stall_but_not_for_failures_in_a_row() -> None:
    stall, row = Stall(Rungs(stop=3)), ToolFailures(Rungs(stop=3))
    events = [results(failing(f"failure {n}"), batch=str(n)) for n in range(3)]
    assert [word(stall.observe(event)) for event in events] == ["-", "-", "-"]
    assert [word(row.observe(event)) for event in events] == ["-", "-", "stop"]


def test_failures_with_a_success_of_the_same_tool_between_are_not_in_a_row() -> None:
    row = ToolFailures(Rungs(stop=3))
    seen = []
    for n in range(10):
        seen.append(word(row.observe(results(failing(f"failure {n}"), batch=f"f{n}"))))
        # worked, though it brought nothing new
        seen.append(word(row.observe(results(answer("known"), batch=f"ok{n}"))))
    assert set(seen) == {"-"}


def test_a_refusal_is_no_failure() -> None:
    stall = Stall(Rungs(stop=2))
    assert {word(stall.observe(results(answer(outcome=Outcome.REFUSED), batch=str(n)))) for n in range(10)} == {"-"}


@pytest.mark.parametrize("allowed", [1, 2, 5, 20])
def test_max_tool_failures_allows_exactly_that_many(drive: type[Driver], allowed: int) -> None:
    d = drive(max_tool_failures=allowed, rules={"stall": False, "repetition": False, "no_news": False})
    steps = [d.tool(args={"n": n}, says=f"Error: kind {'x' * n}", outcome=Outcome.FAILED) for n in range(allowed + 2)]
    assert [step.ran for step in steps] == [True] * allowed + [False, False]
    assert words(steps)[-2:] == ["block", "stop"]


def test_an_unknown_tool_is_a_failure(drive: type[Driver]) -> None:
    d = drive()
    steps = [
        d.tool(f"tool_{'x' * (n % 2)}", {"n": n}, says="unknown tool", outcome=Outcome.UNKNOWN_TOOL) for n in range(18)
    ]
    assert "stop" in words(steps)


# ---- nothing found --------------------------------------------------------------------------------------------------


def test_a_lookup_sweep_is_nudged_and_never_stopped(drive: type[Driver]) -> None:
    d = drive()
    steps = [d.tool("search", {"q": n}, says="No results found.") for n in range(60)]
    assert [n for n, w in enumerate(words(steps), 1) if w != "allow"] == [6]
    assert steps[5].word == "nudge"


def test_a_hit_ends_the_sweep(drive: type[Driver]) -> None:
    d = drive()
    for n in range(40):
        assert d.tool("search", {"q": n}, says="3 hits" if n % 5 == 4 else []).word == "allow"


def test_empty_answers_of_one_batch_count_once(drive: type[Driver]) -> None:
    d = drive()
    assert words(d.batch([("search", {"q": (n, i)}, []) for i in range(10)]) for n in range(5)) == ["allow"] * 5


def test_an_explicit_stop_for_sweeps_is_obeyed(drive: type[Driver]) -> None:
    d = drive(rules={"empty": {"stop": 4}})
    assert words(d.tool("search", {"q": n}, says=None) for n in range(4)) == ["allow"] * 3 + ["stop"]


# ---- Failures that come back while other tools succeed; and empty answers without end


MANY = {"max_nudges": 100, "max_tool_calls": 10_000}


def after_each_edit(
    rounds: int, says: Callable[[int], Any], tool: str = "validate", args: Any = None, **policy: Any
) -> list[str]:
    """What is said to a call that is made after each of so many edits."""
    d, said = Driver(**MANY, **policy), []
    for n in range(rounds):
        edited = d.tool("edit", {"line": n}, says=f"replaced line {n}").word
        said.append(d.tool(tool, {"path": "a"} if args is None else args, says=says(n)).word)
        assert edited == "allow" or "stop" in said
    return said


def test_one_call_that_fails_alike_after_each_edit_is_nudged_at_eight_and_stopped_at_fifty() -> None:
    words = after_each_edit(52, lambda n: f"checked {n} keys\nError: 'name' is required")
    assert (words.index("nudge"), words.index("stop")) == (7, 49)


def test_a_success_of_the_call_starts_anew() -> None:
    assert set(after_each_edit(60, lambda n: "Error: broken" if n % 4 else f"fine at {n}")) == {"allow"}


def test_another_last_line_starts_anew() -> None:
    last = ["abcdefgh"[n // 3 % 8] * 5 for n in range(60)]
    assert set(after_each_edit(60, lambda n: f"checked it\nError: {last[n]} is required")) == {"allow"}


def test_a_tool_that_fails_alike_with_ever_new_arguments_while_others_work_is_stopped(drive: type[Driver]) -> None:
    d = drive(**MANY)
    words = []
    for n in range(376):
        d.tool("search", {"q": n}, says=f"fragment {n}")
        words.append(d.tool("parse", {"fragment": n}, says={"status": "partial_parse_error"}).word)
    assert words.index("nudge") == 11
    assert words.index("stop") == 59


def test_a_failure_within_a_batch_of_good_answers_counts_once_per_response(drive: type[Driver]) -> None:
    d = drive(**MANY)
    words = []
    for n in range(14):
        calls: list[tuple[str, Any, Any]] = [("weather", {"day": n}, f"{n} degrees")]
        calls += [("tides", {"day": day}, {"error": "403 forbidden"}) for day in (n, -n - 1)]
        words.append(d.batch(calls).word)
    assert words.index("nudge") == 11


def test_a_tool_that_also_succeeds_is_left_alone(drive: type[Driver]) -> None:
    d = drive(**MANY)
    for n in range(200):
        assert d.tool("upload", {"n": n}, says=f"uploaded {n}").word == "allow"
        says: Any = {"error": "unsupported codec"} if n % 3 else {"converted": n}
        assert d.tool("convert", {"n": n}, says=says).word == "allow"


def test_explicit_rungs_of_stall_are_all_there_is() -> None:
    assert set(after_each_edit(100, lambda n: "Error: broken", rules={"stall": {"stop": 3}})) == {"allow"}


def test_hundred_empty_answers_to_new_questions_are_stopped(drive: type[Driver]) -> None:
    d = drive(**MANY)
    words = [d.tool("search", {"q": n}, says={"results": []}).word for n in range(101)]
    assert words.index("nudge") == 5
    assert words.index("stop") == 99


def test_one_find_among_many_empty_answers_starts_anew(drive: type[Driver]) -> None:
    d = drive(**MANY)
    words = [d.tool("search", {"q": n}, says={"results": [] if n % 90 else [n]}).word for n in range(300)]
    assert "stop" not in words


def test_a_call_without_arguments_whose_log_ends_in_an_error_was_executed() -> None:
    words = after_each_edit(8, lambda n: f"checked {n} keys\nError: 'name' is a required property", args={})
    assert words == ["allow"] * 7 + ["nudge"]


def test_a_nudge_that_was_given_does_not_hide_another_one() -> None:
    words = after_each_edit(8, lambda n: "Error: missing required argument: text", tool="write", args={})
    assert [n for n, word in enumerate(words, 1) if word == "nudge"] == [2, 8]


# ---- Calls whose arguments did not arrive: the model hears why at the second one


ADK = "Invoking `w()` failed as the following mandatory input parameters are not present:\npath"


def rejected(tool: str = "write", *, lacks: bool = True, outcome: Outcome = Outcome.FAILED) -> ToolResults:
    answer = Answer(tool, b"c", outcome=outcome, lacks_arguments=lacks)
    return ToolResults("r", "", "a", 0.0, "", [answer], failures=outcome is Outcome.FAILED)


def result(*, cut: bool) -> ModelResult:
    return ModelResult("r", "", "a", 0.0, is_cut=cut)


def test_the_second_call_without_its_arguments_is_nudged_with_the_cause_and_the_way_out() -> None:
    rule = TruncatedCalls()
    assert rule.observe(rejected()) is None
    found = rule.observe(rejected())
    assert found is not None
    assert (found.rule, found.action, found.observed, found.tool) == ("stall", Action.NUDGE, 2, "write")
    assert found.detail == "required arguments are missing"
    said = text_for_model(found)
    assert "empty or cut off" in said
    assert "Send less per call" in said


def test_a_response_at_its_output_limit_is_the_cause_of_any_failure() -> None:
    rule = TruncatedCalls()
    for _ in range(2):
        rule.observe(result(cut=True))
        found = rule.observe(rejected(lacks=False))
    assert found is not None
    assert found.detail == "the response hit its output limit"


@pytest.mark.parametrize("between", [rejected(outcome=Outcome.OK, lacks=False), rejected(lacks=False)])
def test_a_call_that_was_not_rejected_begins_anew(between: ToolResults) -> None:
    rule = TruncatedCalls()
    assert [rule.observe(event) for event in (rejected(), between, rejected())] == [None] * 3


def test_other_tools_do_not_count_together() -> None:
    rule = TruncatedCalls()
    assert [rule.observe(rejected(tool)) for tool in "abcabd"[:3]] == [None] * 3


@each_row(
    ("args", "said", "expected"),
    [
        ({"path": "a"}, ADK, True),
        ({}, ADK, True),
        ({}, "2 validation errors: path Field required", True),
        ({"path": "", "text": None}, "'text' is a required property", True),
        ({"code": "f()"}, "TypeError: f() missing 1 required positional argument", False),
        ({}, "Error: disk full", False),
        (None, "missing required argument: path", True),
    ],
)
def test_what_says_that_arguments_are_missing(args: object, said: str, expected: bool) -> None:
    assert lacks_arguments(args, said) is expected


def test_memory_is_bounded() -> None:
    rule = TruncatedCalls()
    for n in range(1_000):
        rule.observe(rejected(f"tool {n}"))
    assert len(rule.record) <= 64
