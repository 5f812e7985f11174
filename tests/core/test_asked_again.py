"""Answers that look like success and ask to try again."""

from typing import Any

from runguard.core.decision import Action, Rungs, text_for_model
from runguard.core.events import Answer, Outcome
from runguard.core.outcomes import classify, was_done
from runguard.core.rules.failures import RetryRequests, Stall
from tests.core.test_every_rule import weigh
from tests.kit.detectors import answer, failing, results, word
from tests.kit.examples import each_row

ASKING = [
    {"status": "retry later"},
    {"status": "retry_later", "url": "https://example.org/7"},
    {"result": None, "status": "retry"},
    {"status": "ok", "message": "The service is busy, please try again."},
    {"result": "Server busy, retry later"},
    {"content": [{"type": "text", "text": '{"status": "try_again"}'}], "isError": False},
    "Service is busy, try again",
    "Rate limit reached, try again in 20 s",
    "Sorry, something went wrong.",
    "The page could not be loaded. Try again later.",
    '{"message": "temporarily unavailable"}',
]
RESULTS = [
    {"status": "pending"},
    {"status": "accepted", "message": "Queued; try again later to see the result."},
    {"status": "busy"},
    {"status": "retry", "rows": [1, 2]},
    {"from": "Ann", "text": "I was out, please try again later"},
    "ok",
    "The report is not ready yet, try again later.",
    "Wrong code, try again.",
    "Seat 7 is held by another customer, try again later.",
    "I will try again later, said Ann.",
    "Retry policy: exponential. The service may be busy at night. " * 5,
]


@each_row("value", ASKING)
def test_an_answer_that_asks_to_try_again_has_a_class(value: object) -> None:
    outcome, asks = classify(value)
    assert outcome is Outcome.OK
    assert asks
    assert was_done(value)  # a side effect may have happened: `once` does not let it happen again


@each_row("value", RESULTS)
def test_a_result_is_not_taken_for_a_request_to_try_again(value: object) -> None:
    assert classify(value) == (Outcome.OK, "")


def test_the_class_is_the_same_for_other_particulars() -> None:
    assert len({classify(f"Rate limit reached, try again in {n} s") for n in range(20)}) == 1


def asking(call: int, says: str = "busy", tool: str = "t") -> Answer:
    return answer(f"call {call}", says, tool=tool, failure=says)


def rule() -> RetryRequests:
    return RetryRequests(Rungs(nudge=3, stop=6))


def test_new_calls_are_counted_until_the_run_is_stopped() -> None:
    one = rule()
    found = [one.observe(results(asking(n))) for n in range(6)]
    assert [word(finding) for finding in found] == ["-", "-", "nudge", "nudge", "nudge", "stop"]
    assert found[2] is not None
    assert text_for_model(found[2]).startswith("3 answers have only asked to try again")


def test_a_retry_is_not_counted_and_does_not_end_the_row() -> None:
    one = rule()
    for _ in range(20):
        assert one.observe(results(asking(0), asking(1))) is None
    assert word(one.observe(results(asking(2)))) == "nudge"


def test_a_result_ends_the_row_for_a_stop_and_makes_up_for_three_for_a_nudge() -> None:
    one = rule()
    for n in range(100):
        works = n % 5 == 4
        found = one.observe(results(answer(f"call {n}") if works else asking(n), progress=works))
        assert found is None or found.action is Action.NUDGE


def test_calls_of_one_response_count_once() -> None:
    one = rule()
    assert one.observe(results(*(asking(n) for n in range(30)), batch="a")) is None
    assert one.observe(results(*(asking(n) for n in range(30, 60)), batch="b")) is None


def test_a_tool_that_says_something_else_each_time_is_left_alone() -> None:
    one = RetryRequests(Rungs(nudge=5, stop=20))
    assert [one.observe(results(asking(n, f"text {n}"))) for n in range(100)] == [None] * 100


def test_failures_between_are_still_in_a_row() -> None:
    stall = Stall(Rungs(stop=3))
    steps = [failing(), asking(1), failing(), asking(2), failing()]
    assert [word(stall.observe(results(step))) for step in steps] == ["-", "-", "-", "-", "stop"]


def test_the_state_is_bounded() -> None:
    one = RetryRequests(Rungs(nudge=5, stop=20))
    for n in range(5_000):
        one.observe(results(asking(n, f"text {n % 3}", tool=f"tool {n % 100}")))
    assert weigh(one)[0] < 1_500


def test_an_explicit_limit_counts_such_answers_too(drive: Any) -> None:
    d = drive(max_identical_tool_results=3)
    assert [d.tool(args={"q": n}, says="Server busy").word for n in range(3)] == ["allow", "allow", "stop"]
