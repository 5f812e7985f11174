"""Calls whose arguments did not arrive: the model hears why at the second one."""

import pytest

from runguard.core.decision import Action, text_for_model
from runguard.core.events import Answer, ModelResult, Outcome, ToolResults
from runguard.core.rules.failures import TruncatedCalls, lacks_arguments
from tests.kit.examples import each_row

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
