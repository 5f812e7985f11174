"""Settings that cannot be meant are rejected with one line that says what is accepted: as keywords, in a file and in
calls.
"""

import getpass
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

import runguard
from runguard import Budget, BudgetMonitor, BudgetPolicy, ModelLimits, PolicyError, Price, Threshold, ToolRule, guard
from runguard.policy import Policy
from runguard.policy.settings import declared_rule
from tests.kit.examples import each_row


def fault(**keywords: Any) -> str:
    """The one line about the one fault."""
    with pytest.raises(PolicyError) as error:
        guard(lambda: None, **keywords)
    head, _, line = str(error.value).partition(" is not valid: ")
    assert head == "the policy (keywords)"
    assert "\n" not in line
    return line


@each_row(
    ("keywords", "line"),
    [
        (
            {"max_usd": 10**30},
            (
                "max_usd = (a number of 30 digits): the largest accepted value is 1,000,000,000 dollars; leave it "
                "out for no limit"
            ),
        ),
        (
            {"max_usd": 10**5000},
            (
                "max_usd = (a number of 4983 digits): the largest accepted value is 1,000,000,000 dollars; leave "
                "it out for no limit"
            ),
        ),
        (
            {"max_usd": "1e30"},
            "max_usd = '1e30': the largest accepted value is 1,000,000,000 dollars; leave it out for no limit",
        ),
        ({"max_usd": -5}, "max_usd = -5: must be greater than 0"),
        ({"max_usd": 0}, "max_usd = 0: must be greater than 0"),
        ({"mode": None}, "mode = None: input should be 'enforce', 'shadow' or 'off'"),
        ({"max_seconds": 0.0009}, "max_seconds = 0.0009: input should be greater than or equal to 0.001"),
        ({"max_seconds": 0}, "max_seconds = 0: input should be greater than or equal to 0.001"),
    ],
)
def test_keywords(keywords: dict[str, Any], line: str) -> None:
    assert fault(**keywords) == line


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_usd = 1e30", "max_usd = 1e+30: the largest accepted value is 1,000,000,000 dollars"),
        ("max_usd = -5", "max_usd = -5: must be greater than 0"),
        ("max_seconds = 0.0001", "max_seconds = 0.0001: input should be greater than or equal to 0.001"),
        ("[[budgets]]\nusd = 5\nthresholds = [0.5, 0.8, 0.5]", "thresholds: 0.5 twice"),
        ("[[budgets]]\nusd = 5\nthresholds = [0.5, {percent = 0.5}]", "thresholds: 0.5 twice"),
        (
            "[tools.slow]\nmax_seconds = 0.0001",
            "tools.slow.max_seconds = 0.0001: input should be greater than or equal to 0.001",
        ),
    ],
)
def test_in_a_file(text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runguard.toml").write_text(text)
    with pytest.raises(PolicyError) as error:
        Policy.build()
    assert says in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_tool_declares_no_shorter_time_either() -> None:
    with pytest.raises(PolicyError, match=r"greater than or equal to 0\.001"):
        declared_rule(max_seconds=0.0001)
    assert Policy.validated({"max_seconds": 0.001}, "").max_seconds == 0.001


def test_equal_thresholds_are_rejected_and_those_that_differ_are_not() -> None:
    with pytest.raises(PolicyError, match=r"thresholds: 0\.9 twice"):
        Budget(usd=1, thresholds=[Threshold(0.9, action="stop"), Threshold(0.9, action="stop")])
    assert (
        len(
            Budget(
                usd=1, thresholds=[Threshold(0.9, print), Threshold(0.9, action="nudge"), Threshold(0.9, repr)]
            ).thresholds
        )
        == 3
    )


@each_row(
    ("more", "says"),
    [({"usd": -5}, "usd = -5"), ({"tokens": -5}, "tokens = -5"), ({"calls": 0}, "calls = 0"), ({"usd": 0}, "usd = 0")],
)
def test_an_extension_must_be_greater_than_0(more: dict[str, Any], says: str) -> None:
    call = guard(lambda: None, budget={"max_usd": 1, "max_tokens": 5, "max_calls": 5})
    with pytest.raises(PolicyError) as error:
        call.extend(**more)
    assert str(error.value) == f"{says}: must be greater than 0"


@each_row("actor", ["", " ", "\n", 5])
def test_a_stop_names_who_stops(actor: Any) -> None:
    call = guard(lambda: None)
    with pytest.raises(PolicyError, match=r"^actor: say who stops, such as actor='ops'$"):
        call.stop("all", actor=actor, reason="x")
    assert call.stops() == []


def test_without_an_actor_the_user_of_this_system_stops() -> None:
    call = guard(lambda: None)
    call.stop("all")
    (stop,) = call.stops()
    assert stop.actor == getpass.getuser()


@pytest.mark.parametrize("reason", ["", "  ", None])
def test_a_stop_needs_no_reason(reason: Any) -> None:
    call = guard(lambda: {"usd": 0.1}, budget={"max_usd": 1})
    call.stop("all", actor="ops", reason=reason)
    (stop,) = call.stops()
    assert (stop.actor, stop.reason) == ("ops", "")
    with pytest.raises(runguard.RunStoppedError, match=r"all, stopped by ops, in "):
        call()
    with pytest.raises(PolicyError, match=r"^reason: give a text, not a list$"):
        call.stop("all", actor="ops", reason=["x"])  # type: ignore[arg-type]


@each_row("labels", [{"team": ["a", "b"]}, {"team": None}, {"team": {"a": 1}}, {5: "x"}, "team"])
def test_a_label_is_a_text(labels: Any) -> None:
    with pytest.raises(PolicyError, match=r"^labels: give a mapping of texts to texts"), runguard.run(labels=labels):
        pass


@each_row("value", [["a", "b"], ("a",), {"a": 1}, None, b"a", object()])
def test_a_label_of_a_runner_call_is_a_text(value: Any) -> None:
    from runguard.adk.events import run_options

    _, _, _, wrong = run_options({"labels": {"te\nam": value}})
    assert wrong.startswith("RunConfig.custom_metadata['runguard']: labels.te\\nam = ")
    assert wrong.endswith(": give a text for each label")
    assert run_options({"labels": {"team": "a", "size": 5}})[0] == {"team": "a", "size": "5"}


@each_row(
    ("make", "line"),
    [
        (lambda: ToolRule(poling=True), "ToolRule.poling: no such setting; did you mean 'polling'?"),
        (lambda: ToolRule(polling="yes"), "ToolRule.polling = 'yes': input should be a valid boolean"),
        (
            lambda: ToolRule(exempt=True, paging=True),
            "ToolRule: exempt already takes the tool out of the rules that polling and paging tune; keep one of them",
        ),
        (lambda: Budget(usdd=5), "Budget.usdd: no such setting; did you mean 'usd'?"),  # type: ignore[call-arg]
        (lambda: Budget(5), "Budget takes no settings without a name; write Budget(usd=…)"),  # type: ignore[call-arg]
        (lambda: Threshold(percnt=0.5), "Threshold.percnt: no such setting; did you mean 'percent'?"),  # type: ignore[call-arg]
        (lambda: Threshold(), "Threshold.percent: missing"),  # type: ignore[call-arg]
        (lambda: ModelLimits(context=9), "ModelLimits.context: no such setting; did you mean 'context_window'?"),
        (lambda: Price(input=1, output=2, cahced=1), "Price.cahced: no such setting; did you mean 'cached'?"),
        (lambda: BudgetPolicy(max_token=3), "BudgetPolicy.max_token: no such setting; did you mean 'max_tokens'?"),  # type: ignore[call-arg]
        (lambda: BudgetMonitor(max_token=3), "BudgetMonitor.max_token: no such setting; did you mean 'max_tokens'?"),  # type: ignore[call-arg]
        (lambda: Policy(max_usdd=3), "Policy.max_usdd: no such setting; did you mean 'max_usd'?"),
    ],
)
def test_parts_of_a_policy(make: Callable[[], Any], line: str) -> None:
    with pytest.raises(PolicyError) as error:
        make()
    assert str(error.value) == line


@each_row(
    ("keywords", "line"),
    [
        ({"rules": {"stal": {"stop": 3}}}, "rules.stal: no such rule; did you mean 'stall'?"),
        ({"rules": {"stall": {"stp": 3}}}, "rules.stall.stp: no such rung; did you mean 'stop'?"),
        ({"tools": {"look": {"poling": True}}}, "tools.look.poling: no such setting; did you mean 'polling'?"),
        ({"budgets": [{"usdd": 3}]}, "budgets.0.usdd: no such setting of a budget; did you mean 'usd'?"),
        (
            {"budgets": [{"usd": 3, "thresholds": [{"percnt": 0.5}]}]},
            "budgets.0.thresholds: Threshold.percnt: no such setting; did you mean 'percent'?",
        ),
        (
            {"alerts": [{"weebhook": "https://example.org"}]},
            "alerts[0].weebhook: no such setting; did you mean 'webhook'?",
        ),
        ({"models": {"m": {"context": 3}}}, "models.m.context: no such setting; did you mean 'context_window'?"),
    ],
)
def test_names_inside_a_policy(keywords: dict[str, Any], line: str) -> None:
    with pytest.raises(PolicyError) as error:
        Policy.build(**keywords)
    assert str(error.value) == f"the policy (keywords) is not valid: {line}"


def test_the_signature_of_a_part_shows_its_settings() -> None:
    names = ["usd", "tokens", "calls", "per", "window", "tz", "thresholds", "on_exhausted", "burn_alert"]
    assert list(signature(Budget).parameters) == names
    assert list(signature(ToolRule).parameters)[:2] == ["polling", "paging"]
