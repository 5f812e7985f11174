"""Failures, and searches that find nothing."""

import pytest

from runguard.core.decision import Rungs
from runguard.core.events import (
    Outcome,
)
from runguard.core.rules.failures import Stall, ToolFailures
from tests.kit.detectors import answer, failing, only, results, word, words
from tests.kit.driver import Driver

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
