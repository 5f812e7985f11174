"""BudgetMonitor: policies, also as data, and nine known defects of such monitors."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runguard.core.money import Threshold
from runguard.engine.token_budget import BudgetMonitor, BudgetPolicy
from tests.kit.examples import each_row
from tests.kit.monitors import WRONG_COUNTS, handled, handler, response


class Handlers:
    @staticmethod
    def static(monitor: BudgetMonitor) -> None:
        handled.append(monitor.current_tokens)

    def method(self, monitor: BudgetMonitor) -> None:
        handled.append(monitor.current_tokens)


# ---- policies -------------------------------------------------------------------------------------------------------


def test_each_monitor_of_a_policy_counts_for_itself() -> None:
    policy = BudgetPolicy(100).with_threshold(0.9).with_threshold(0.5)
    first, second = policy.build_monitor(), policy.build_monitor()
    first.record_usage(60)
    assert (first.current_tokens, first.thresholds_fired()) == (60, 1)
    assert (second.current_tokens, second.thresholds_fired(), second.max_tokens) == (0, 0, 100)
    assert [t.percent for t in second.thresholds] == [0.5, 0.9]


@pytest.mark.parametrize("thresholds", [(0.5,), ("x",), (None,)])
def test_a_policy_takes_thresholds_only(thresholds: Any) -> None:
    with pytest.raises(ValueError, match="thresholds"):
        BudgetPolicy(100, thresholds)


# ---- the nine defects that a budget of this kind is known for -------------------------------------------------------


def test_defect_1_a_lower_threshold_added_later_fires_and_the_higher_one_not_again() -> None:
    fired = []
    monitor = BudgetMonitor(100).on_threshold(0.8, lambda m: fired.append("high"))
    monitor.record_usage(85)
    monitor.on_threshold(0.5, lambda m: fired.append("low"))
    monitor.record_usage(1)
    monitor.record_usage(1)
    assert fired == ["high", "low"]


def test_defect_2_a_callback_can_abort() -> None:
    monitor = BudgetMonitor(100).on_threshold(0.5, lambda m: m.stop("too expensive"))
    monitor.record_usage(60)
    assert (monitor.stopped, monitor.stop_reason) == (True, "too expensive")


@each_row("wrong", [0, *WRONG_COUNTS])
@each_row("make", [BudgetMonitor, BudgetPolicy])
def test_defect_3_a_budget_that_cannot_fire_is_refused(make: Any, wrong: Any) -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        make(wrong)


@each_row(
    ("usage", "tokens"),
    [
        ({"prompt": 100, "candidates": 10, "thoughts": 5_000, "total": 5_110}, 5_110),
        ({"prompt": 100, "candidates": 10, "thoughts": 5_000}, 5_110),
        ({"prompt": 100, "tool_use_prompt": 40, "candidates": 10, "total": 150}, 150),
        ({"prompt": 100, "tool_use_prompt": 40, "candidates": 10}, 150),
        ({"prompt": 100, "cached_content": 80, "candidates": 10, "total": 110}, 110),
        ({"prompt": 100, "cached_content": 80, "candidates": 10}, 110),
        ({"prompt": 100, "candidates": 60, "thoughts": 50, "total": 160}, 160),
    ],
)
def test_defect_4_thoughts_tool_prompts_and_the_cache_are_counted_right(usage: dict[str, Any], tokens: int) -> None:
    monitor = BudgetMonitor()
    monitor.record_response(response(**usage))
    assert monitor.current_tokens == tokens


@each_row("told", ["every chunk", "the last chunk", "the whole", "twice"])
def test_defect_5_a_streamed_call_counts_once(told: str) -> None:
    monitor, context = BudgetMonitor(), SimpleNamespace(actions=SimpleNamespace())
    silent = SimpleNamespace(usage_metadata=None, partial=True)
    whole = SimpleNamespace(usage_metadata=None, partial=False)
    stream = {
        "every chunk": [response(100, 3, partial=True), response(100, 7, partial=True), response(100, 10)],
        "the last chunk": [silent, response(100, 10, partial=True), whole],
        "the whole": [silent, silent, response(100, 10)],
        "twice": [response(100, 3, partial=True), response(100, 10), response(100, 10)],
    }[told]
    for chunk in stream:
        monitor.after_model_hook()(callback_context=context, llm_response=chunk)
    assert (monitor.current_tokens, monitor.turn_count) == (110, 1)


def test_defect_6_sessions_have_monitors_of_their_own() -> None:
    """One policy, two users; that a plugin keeps them apart on ADK is tested there."""
    policy = BudgetPolicy(100).with_threshold(0.5, action="stop")
    alice, bob = policy.build_monitor(), policy.build_monitor()
    alice.record_usage(90)
    assert (alice.stopped, bob.stopped) == (True, False)


def test_defect_7_the_hook_lets_later_callbacks_run() -> None:
    assert BudgetMonitor().after_model_hook()(callback_context=None, llm_response=response(1, 1)) is None


def test_defect_8_the_count_needs_no_model_name() -> None:
    monitor = BudgetMonitor()
    monitor.record_response(
        SimpleNamespace(usage_metadata=response(1, 1).usage_metadata, model_version="some-model-001")
    )
    assert monitor.current_tokens == 2


def test_defect_9_a_policy_can_be_shipped_as_data() -> None:
    policy = (
        BudgetPolicy(100)
        .with_threshold(0.8, handler)
        .with_threshold(0.9, Handlers.static, recurring=True)
        .with_threshold(1.0, action="stop")
    )
    data = json.loads(json.dumps(policy.to_dict()))
    assert data["thresholds"][0] == {
        "percent": 0.8,
        "callback": f"{handler.__module__}:handler",
        "recurring": False,
        "action": "warn",
    }
    assert BudgetPolicy.from_dict(data) == policy
    handled.clear()
    BudgetPolicy.from_dict(data).build_monitor().record_usage(95)
    assert handled == [95, 95]


# ---- policies as data -----------------------------------------------------------------------------------------------


def test_little_data_will_do() -> None:
    assert BudgetPolicy.from_dict({}) == BudgetPolicy()
    assert BudgetPolicy.from_dict({"max_tokens": 5, "thresholds": None}) == BudgetPolicy(5)
    assert BudgetPolicy.from_dict({"thresholds": [{"percent": 0.5}]}) == BudgetPolicy().with_threshold(0.5)


def a_closure() -> Callable[[BudgetMonitor], None]:
    def inner(monitor: BudgetMonitor) -> None:
        return None

    return inner


class Callback:
    def __call__(self, monitor: BudgetMonitor) -> None:
        return None


@each_row(
    "callback",
    [lambda m: None, a_closure(), Handlers().method, [].append, Callback()],
)
def test_a_function_without_an_import_path_is_refused_as_data(callback: Any) -> None:
    with pytest.raises(ValueError, match=r"import path|cannot be written|cannot be imported"):
        BudgetPolicy().with_threshold(0.5, callback).to_dict()


def test_a_function_of_the_script_itself_is_refused_as_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "__module__", "__main__")
    with pytest.raises(ValueError, match="script itself"):
        BudgetPolicy().with_threshold(0.5, handler).to_dict()


@each_row(
    ("data", "words"),
    [
        ([], "mapping"),
        ({"max_token": 5}, "max_token"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"thresholds": {"percent": 0.5}}, "must be a list"),
        ({"thresholds": [0.5]}, r"thresholds\[0\].*mapping"),
        ({"thresholds": [{"percent": 0.5}, {"action": "stop"}]}, r"thresholds\[1\].*percent"),
        ({"thresholds": [{"percent": 0.5, "colour": 1}]}, "colour"),
        ({"thresholds": [{"percent": 0.5, "callback": "print"}]}, "package.module:function"),
        ({"thresholds": [{"percent": 0.5, "callback": 3}]}, "package.module:function"),
        ({"thresholds": [{"percent": 0.5, "callback": "no_such_module_here:f"}]}, "cannot be imported"),
        ({"thresholds": [{"percent": 0.5, "callback": "json:no_such_function"}]}, "cannot be imported"),
        ({"thresholds": [{"percent": 0.5, "callback": "json:__name__"}]}, "not callable"),
        ({"thresholds": [{"percent": 50}]}, "percent"),
    ],
)
def test_wrong_data_says_what_is_wrong(data: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BudgetPolicy.from_dict(data)


thresholds = st.builds(
    Threshold,
    percent=st.floats(0, 1, exclude_min=True),
    callback=st.sampled_from([None, handler, Handlers.static]),
    recurring=st.booleans(),
    action=st.sampled_from(["warn", "nudge", "stop"]),
)


@given(
    st.builds(BudgetPolicy, max_tokens=st.integers(1, 10**12), thresholds=st.lists(thresholds, max_size=4).map(tuple))
)
def test_every_policy_survives_the_way_through_data(policy: Any) -> None:
    assert BudgetPolicy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy
