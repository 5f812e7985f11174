"""Whatever a policy holds: functions, budgets of every kind, numbers at its bounds, and texts of every script."""

import pickle
import tomllib
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runguard.calibrate import Limit, Proposal, calibrate
from runguard.calibrate.proposal import Measuring, changed, value_of
from runguard.core.money import Budget, Threshold
from runguard.policy import Policy, ToolRule
from runguard.replay import open_sources, replay
from runguard.replay.player import harmless, workers_for
from runguard.replay.steps import RecordedRun, Wrote
from tests.kit.recordings import sized, write

HEADS = {"look": lambda value: value}
BUDGETS: tuple[Budget, ...] = (
    Budget(tokens=5_000, calls=3, per="session", window="1h"),
    Budget(
        usd=Decimal("2.50"),
        per="user",
        window="1d",
        tz="Europe/Berlin",
        thresholds=[Threshold(0.5, action="nudge"), Threshold(0.9, recurring=True)],
    ),
)
FUNCTIONS: dict[str, dict[str, Any]] = {
    "failed": {"tools": {"look": ToolRule(failed=lambda value: value is not None)}},
    "normalizer": {"tool_result_normalizer": HEADS},
    "amount": {"budgets": (Budget(usd=lambda scope: 5, calls=90), Budget(tokens=lambda scope: None))},
    "callback": {
        "budgets": (Budget(calls=90, thresholds=[Threshold(0.5, print), Threshold(0.8, lambda budget: None)]),)
    },
}


def runs(many: int = 75, **facts: Any) -> list[dict[str, Any]]:
    return [sized(f"run-{n}", prompt=100, **facts) for n in range(many)]


def limit(made: Proposal, setting: str) -> Limit:
    return next(limit for limit in made.limits if limit.setting == setting)


def reloaded(made: Proposal) -> Policy:
    return Policy.validated(tomllib.loads(made.to_toml()), "")


@pytest.mark.parametrize(
    "code",
    [{}, {"on_trip": lambda trip: None, "clock": lambda: 0.0, "store": "redis://host", "alerts": print}],
    ids=["plain", "with code"],
)
def test_a_policy_reaches_another_process_as_it_is(code: dict[str, Any]) -> None:
    policy = harmless(
        Policy.validated(
            {
                "budgets": BUDGETS,
                "mode": "shadow",
                "rules": {"empty": False},
                "tools": {"look": ToolRule(once=True)},
                **code,
            },
            "",
        )
    )
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert (policy.budgets, policy.mode) == (BUDGETS, "shadow")
    assert workers_for([policy], 4) == 4


@pytest.mark.parametrize("given", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_that_no_other_process_can_find_keep_the_work_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Any
) -> None:
    monkeypatch.setattr("runguard.replay.sources._PART", 10_000)
    recorded = write(tmp_path / "runs.jsonl", *runs())
    assert len([piece for source in open_sources(str(recorded)) for piece in source.pieces()]) > 2
    policy = Policy.validated(given, "")
    # nobody is called back about a recorded run, so a callback need not be found
    assert workers_for([harmless(policy)], 4) == (4 if given is FUNCTIONS["callback"] else 1)
    assert sum(len(batch.results) for batch in replay(open_sources(str(recorded)), [policy], workers=4)) == 75
    assert reloaded(calibrate(write(tmp_path / "none.jsonl"), policy)).tool_rule("look") in (None, ToolRule())


def test_functions_of_the_script_itself_keep_the_work_here(monkeypatch: pytest.MonkeyPatch) -> None:
    import __main__

    def mine(value: Any) -> bool:
        return True

    mine.__module__, mine.__qualname__ = "__main__", "mine"
    monkeypatch.setattr(__main__, "mine", mine, raising=False)
    policy = Policy.validated({"tools": {"look": ToolRule(failed=mine)}}, "")
    pickle.dumps(policy)  # by its name, which another process need not know
    assert workers_for([policy], 2) == 1


def test_functions_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runguard.replay.sources._PART", 10_000)
    recorded = write(
        tmp_path / "runs.jsonl", *(sized(f"run-{n}", prompt=100, calls=8 if n < 3 else 1) for n in range(75))
    )
    results = [
        result
        for batch in replay(open_sources(str(recorded)), [Policy.validated({}, "")])
        for (result,) in batch.results
    ]
    assert not any(result.first("stop") for result in results)
    policy = Policy.validated({**FUNCTIONS["failed"], **FUNCTIONS["normalizer"], **FUNCTIONS["amount"]}, "")
    made = calibrate(recorded, policy, workers=4)
    assert made.faults.count == 0
    assert made.now["success"].stopped == 3  # nothing but failures
    assert reloaded(made).max_tokens == 275


def test_the_cheaper_model_of_a_threshold_is_carried_into_the_file(tmp_path: Path) -> None:
    cheaper = Threshold(percent=0.8, model="gpt-4o-mini", agents=("clerk",))
    policy = Policy.validated({"budgets": (Budget(usd=5, per="app", thresholds=[cheaper]),)}, "")
    (again,) = reloaded(calibrate(write(tmp_path / "runs.jsonl"), policy)).budgets
    assert [(each.model, tuple(each.agents)) for each in again.thresholds] == [("gpt-4o-mini", ("clerk",))]


def test_budgets_are_carried_into_the_file_and_what_only_code_can_say_is_named(tmp_path: Path) -> None:
    recorded = write(tmp_path / "runs.jsonl")
    again = reloaded(calibrate(recorded, Policy.validated({"budgets": BUDGETS}, ""))).budgets
    assert [(budget.to_dict(), budget.thresholds) for budget in again] == [
        (budget.to_dict(), budget.thresholds) for budget in BUDGETS
    ]
    code = {
        "tools": {"l*": ToolRule(once=True, failed=lambda value: True)},
        "budgets": FUNCTIONS["amount"]["budgets"],
        "max_delegation_depth": None,
    }
    made = calibrate(recorded, Policy.validated(code, ""))
    assert (
        "# Not copied, because only code can express it: tools.l*.failed, max_delegation_depth = None, "
        "budgets[0].usd, budgets[1].tokens." in made.to_toml()
    )
    kept = reloaded(made)
    assert (kept.tools, kept.budgets) == ({"l*": ToolRule(once=True)}, (Budget(calls=90),))
    called = reloaded(calibrate(recorded, Policy.validated(FUNCTIONS["callback"], "")))
    assert called.budgets == (Budget(calls=90, thresholds=[Threshold(0.5), Threshold(0.8)]),)


def test_a_change_leaves_the_rest_of_a_policy_alone() -> None:
    policy = Policy.validated(
        {"rules": {"stall": False, "empty": {"nudge": 3}}, "budgets": BUDGETS, "tool_result_normalizer": HEADS}, ""
    )
    other = changed(policy, {"max_usd": 0.5, "max_tool_calls": None, "rules": {"empty": {"stop": 9}}})
    assert (other.max_usd, other.max_tool_calls, other.rules) == (
        Decimal("0.5"),
        None,
        {"stall": False, "empty": {"stop": 9}},
    )
    assert other.model_copy(update={"max_usd": None, "max_tool_calls": 1000, "rules": policy.rules}) == policy


# ---- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [10**15, 10**25])
def test_a_limit_beyond_what_a_policy_takes_is_refused_with_the_reason(tmp_path: Path, tokens: int) -> None:
    recorded = [sized(f"run-{n}", prompt=tokens) for n in range(75)]
    for run in recorded:
        run["steps"][0]["ts"] = 1
        for step in run["steps"][1:]:
            step["ts"] = 1_700_000_000
    made = calibrate(write(tmp_path / "runs.jsonl", *recorded))
    for setting, told in {"max_tokens": "tokens", "max_usd": "dollars", "max_seconds": "seconds"}.items():
        refused = limit(made, setting)
        assert refused.value is None
        assert refused.why_not.startswith("2.5 x P95 is ")
        assert refused.why_not.endswith(f"more than a policy allows: are the recorded {told} right?")
    assert set(made.changes) == {"max_model_calls", "max_tool_calls"}
    assert reloaded(made).max_model_calls == 3


def test_a_number_that_no_float_holds_spoils_its_own_recording_alone(tmp_path: Path) -> None:
    made = calibrate(write(tmp_path / "runs.jsonl", *runs(), sized("absurd", prompt=10**400, model="in-house")))
    assert (made.faults.count, "absurd" in made.faults.first[0]) == (1, True)
    assert limit(made, "max_tokens").value == 275


# ---- sizes of answers that nobody told ------------------------------------------------------------------------------


def largest_in_journal(*chars: int) -> float:
    entries: list[dict[str, Any]] = [{"k": "start", "t": 1.0, "app": "a", "user": "u", "session": "s"}]
    for n, size in enumerate(chars):
        name = f"{n:032x}"
        entries.append(
            {"k": "call", "t": 2.0, "l": "", "a": "a", "tool": "look", "call": name, "id": str(n), "b": str(n)}
        )
        answer = {"tool": "look", "call": name, "id": str(n), "as": "ok", "answer": n, "chars": size}
        entries.append({"k": "answers", "t": 2.0, "l": "", "a": "a", "b": str(n), "of": [answer]})
    steps = iter([Wrote(entry["t"], entry) for entry in entries])
    measured = Measuring(Policy.validated({}, ""))(RecordedRun("r", steps))
    assert measured.usages.tool_calls == len(chars)
    return measured.usages.largest_answer


def test_of_a_journal_only_sizes_that_were_measured_count() -> None:
    assert largest_in_journal(0, 700, 0, 300) == 700
    assert largest_in_journal(0, 0) != largest_in_journal(0, 0)  # not a number: not known


# ---- the file -------------------------------------------------------------------------------------------------------


@given(
    st.recursive(
        st.text() | st.booleans() | st.integers(-(2**53), 2**53),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=6,
    )
)
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read_back(value: Any) -> None:
    assert tomllib.loads(f"it = {value_of(value)}")["it"] == value


def test_texts_beyond_the_first_plane_are_carried_over(tmp_path: Path) -> None:
    policy = Policy.validated(
        {"stop_text": "Sorry \U0001f600 \x7f\x00\u2028", "tools": {"t\U0001f600": ToolRule(polling=True)}}, ""
    )
    again = reloaded(calibrate(write(tmp_path / "runs.jsonl"), policy))
    assert (again.stop_text, again.tools) == (policy.stop_text, policy.tools)
