"""Conditions saved as data and loaded again."""

import json
from collections.abc import Sequence
from decimal import Decimal
from functools import partial
from typing import Any

import pytest

from runguard.errors import PolicyError
from runguard.termination import (
    CostTermination,
    ExternalTermination,
    FunctionalTermination,
    MaxIterationsTermination,
    MaxMessageTermination,
    NoProgressTermination,
    RuleTermination,
    StateTermination,
    TerminationCondition,
    TextMentionTermination,
    TimeoutTermination,
)
from tests.kit.conditions import (
    NAN,
    AsyncCallable,
    Holder,
    OwnTermination,
    does,
    each,
    fires_at,
    rounds,
    say,
    top_level_function,
)
from tests.kit.examples import each_row


def test_saved_conditions_are_plain_and_versioned() -> None:
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


def test_autogen_defect_sources_survive_saving() -> None:
    condition = TextMentionTermination("x", sources="critic")
    loaded = TextMentionTermination.from_dict(condition.to_dict())
    assert not loaded.check([say("x", author="writer")])
    assert loaded.check([say("x", author="critic")])


def test_autogen_defect_functions_are_saved_by_the_name_they_are_imported_by() -> None:
    saved = FunctionalTermination(top_level_function).to_dict()
    assert saved["func"] == f"{top_level_function.__module__}:top_level_function"
    assert TerminationCondition.from_dict(saved).check([say("x", author="boss")])


def local_function() -> Any:
    def inner(events: Sequence[Any]) -> bool:
        return True

    return inner


@each_row(
    "func", [lambda events: True, local_function(), Holder().method, partial(top_level_function), AsyncCallable()]
)
def test_functions_that_cannot_be_imported_cannot_be_saved(func: Any) -> None:
    condition = FunctionalTermination(func)
    with pytest.raises(PolicyError, match=r"func = .*cannot be saved"):
        (condition | MaxIterationsTermination(1)).to_dict()


def test_prices_and_amounts_survive_saving_exactly() -> None:
    prices: dict[str, Any] = {
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


@each_row("value", [(1, 2), NAN, {1: 2}, object(), {1}])
def test_values_that_json_would_change_cannot_be_saved(value: Any) -> None:
    with pytest.raises(PolicyError, match="value = "):
        StateTermination("k", value).to_dict()


@each_row("value", [None, False, 0, "", [1], {"a": None}])
def test_values_that_mean_nothing_elsewhere_are_kept(value: Any) -> None:
    loaded = TerminationCondition.from_dict(StateTermination("k", value).to_dict())
    assert loaded.check([does(state_delta={"k": value})])
    assert "value" not in StateTermination("k").to_dict()


@pytest.mark.parametrize("name", ["RuleTermination", "NoProgressTermination"])
def test_rules_are_saved_with_their_rungs(name: str) -> None:
    condition = RuleTermination("stall", nudge=2, stop=4) if name == "RuleTermination" else NoProgressTermination()
    loaded = TerminationCondition.from_dict(json.loads(json.dumps(condition.to_dict())))
    assert type(loaded).__name__ == name
    assert repr(loaded) == repr(condition)
    failing = rounds(12, response={"error": "bad format"}, page=lambda n: n)
    assert fires_at(loaded, *each(failing)) == fires_at(condition, *each(failing)) is not None


def test_the_names_that_autogen_uses_can_be_loaded() -> None:
    loaded = TerminationCondition.from_dict({"version": 1, "type": "TokenUsageTermination", "max_total_token": 5})
    assert loaded.to_dict() == {"version": 1, "type": "TokenUsageTermination", "max_total": 5}


def test_conditions_of_your_own_are_saved_by_where_they_are() -> None:
    saved = (OwnTermination("boss") | MaxIterationsTermination(9)).to_dict()
    assert saved["conditions"][0] == {"type": f"{OwnTermination.__module__}:OwnTermination", "author": "boss"}
    assert fires_at(TerminationCondition.from_dict(saved), [say("x", author="boss")] * 2) == 1


def _or(*conditions: Any) -> dict[str, Any]:
    return {"version": 1, "type": "OrTerminationCondition", "conditions": list(conditions)}


@each_row(
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
        (_or(), r"conditions = \[\]: must be a list"),
        (_or("x"), "conditions.0 = 'x': must be a mapping"),
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
            "func = 'json:nothing': the module has no such name",
        ),
        (_or({"type": "FunctionalTermination", "func": "json"}), "conditions.0.func = 'json': give 'module:name'"),
        ({"version": 1, "type": "json:JSONDecoder"}, "type = 'json:JSONDecoder': is not a termination condition"),
        ([], "condition = \\[\\]: must be a mapping"),
    ],
)
def test_faults_in_saved_conditions_are_told_with_their_path_and_the_nearest_name(data: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        TerminationCondition.from_dict(data)


def test_loading_another_kind_than_asked_for_is_told() -> None:
    with pytest.raises(PolicyError, match="is no TimeoutTermination"):
        TimeoutTermination.from_dict(ExternalTermination().to_dict())


def test_nesting_without_end_is_refused() -> None:
    data: dict[str, Any] = {"type": "ExternalTermination"}
    for _ in range(5_000):
        data = {"type": "OrTerminationCondition", "conditions": [data]}
    with pytest.raises(PolicyError, match="nested too deeply"):
        TerminationCondition.from_dict({"version": 1, **data})


def test_each_name_of_the_package_is_there() -> None:
    from runguard import termination

    assert all(getattr(termination, name) for name in termination.__all__)
    assert termination.__all__ == sorted(termination.__all__)
