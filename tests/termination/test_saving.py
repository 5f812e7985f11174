"""Conditions saved as data and loaded again."""

import asyncio
import copy
import gc
import json
import logging
import threading
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runguard.errors import PolicyError, RunGuardError
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
    TerminationResult,
    TextMentionTermination,
    TimeoutTermination,
)
from tests.kit.conditions import (
    NAN,
    AsyncCallable,
    Holder,
    OwnTermination,
    answer,
    call,
    does,
    each,
    event,
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


# ---- Conditions that wait for a signal, call a function or apply the rules


# ---- signals and functions ------------------------------------------------------------------------------------------


def test_a_signal_ends_every_run_under_way_and_none_that_begins_later() -> None:
    button = ExternalTermination()
    condition = button | MaxIterationsTermination(100)
    one, two = condition.for_run(), condition.for_run()
    assert not one.check()
    button.set()
    later = condition.for_run()
    assert one.check() == TerminationResult(True, "External termination requested")
    assert two.check([say("x")])
    assert not later.check()
    assert not later.check([say("x")])
    button.set()
    assert later.check()


def test_a_signal_is_seen_by_the_instance_itself_and_gone_after_reset() -> None:
    button = ExternalTermination()
    button.set()
    assert not button.terminated  # as with AutoGen: known when it is asked
    assert button.check()
    button.reset()
    assert not button.check()


def test_a_copy_can_give_the_signal_for_all() -> None:
    button = ExternalTermination()
    one, two = button.for_run(), button.for_run()
    one.set()
    assert two.check()


def test_autogen_defect_whoever_subscribes_is_told_at_once_from_any_thread() -> None:
    button = ExternalTermination()
    run = ((button | TextMentionTermination("x")) & MaxIterationsTermination(1)).for_run()
    told: list[str] = []
    unsubscribe = run.on_set(lambda: told.append(threading.current_thread().name))
    thread = threading.Thread(target=button.set, name="operator")
    thread.start()
    thread.join()
    assert told == ["operator"]
    unsubscribe()
    unsubscribe()
    button.set()
    assert told == ["operator"]


def test_a_subscriber_that_fails_keeps_nobody_from_being_told(caplog: pytest.LogCaptureFixture) -> None:
    button, told = ExternalTermination(), []
    button.on_set(lambda: 1 / 0)
    button.on_set(lambda: told.append(1))
    with caplog.at_level(logging.ERROR, "runguard"):
        button.set()
    assert told == [1]
    assert "on_set_failed" in caplog.text


def test_a_subscriber_may_unsubscribe_and_set_again() -> None:
    button = ExternalTermination()
    calls: list[int] = []

    def once() -> None:
        calls.append(1)
        unsubscribe()
        button.set()

    unsubscribe = button.on_set(once)
    button.set()
    assert calls == [1]


def test_conditions_without_a_signal_take_subscribers_and_never_call() -> None:
    MaxIterationsTermination(1).on_set(lambda: pytest.fail("no signal here"))()


def test_a_deep_copy_keeps_the_signal() -> None:
    button = ExternalTermination()
    twin = copy.deepcopy(button | MaxIterationsTermination(3))
    button.set()
    assert twin.check()


def test_many_threads_lose_no_signal() -> None:
    button = ExternalTermination()
    told: list[int] = []
    button.on_set(lambda: told.append(1))

    def press() -> None:
        for _ in range(50):
            button.set()

    threads = [threading.Thread(target=press) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 400
    assert button._signal.given == 400


@each_row("value", [1, "yes", [1], None, False, object()])
def test_only_true_itself_counts(value: Any) -> None:
    assert not FunctionalTermination(lambda events: value).check([say("x")])
    assert FunctionalTermination(lambda events: True).check([say("x")])


def test_a_function_sees_the_new_events_and_is_not_asked_without_any() -> None:
    seen: list[int] = []

    def look(events: Sequence[Any]) -> bool:
        seen.append(len(events))
        return False

    condition = FunctionalTermination(look)
    for delta in ([say("x")], [], [say("x"), say("y")]):
        condition.check(delta)
    assert seen == [1, 2]


async def _slow_true(events: Sequence[Any]) -> bool:
    await asyncio.sleep(0)
    return True


@pytest.mark.parametrize(
    "func",
    [_slow_true, AsyncCallable(), lambda events: _slow_true(events), partial(_slow_true)],
    ids=["def", "object", "lambda", "partial"],
)
async def test_async_functions_are_awaited_and_check_says_so(func: Any) -> None:
    condition = FunctionalTermination(func) | MaxIterationsTermination(100)
    with pytest.raises(RunGuardError, match="await condition"):
        condition.check([say("x")])
    assert not condition.terminated
    assert await condition([say("x")]) == TerminationResult(True, "Functional termination condition met")


def test_what_check_cannot_await_is_closed(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(RunGuardError, match="await"):
        FunctionalTermination(lambda events: _slow_true(events)).check([say("x")])
    gc.collect()
    assert [str(warning.message) for warning in recwarn if "never awaited" in str(warning.message)] == []


def test_check_on_an_async_function_leaves_its_neighbours_uncounted() -> None:
    count = MaxIterationsTermination(2)
    condition = count | FunctionalTermination(_slow_true)
    for _ in range(3):
        with pytest.raises(RunGuardError, match="await"):
            condition.check([say("x")])
    assert not count.check([say("x")])


async def test_a_function_that_raises_is_logged_once_and_means_no(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(events: Sequence[Any]) -> bool:
        raise KeyError("mine")

    def dividing(events: Sequence[Any]) -> bool:
        return bool(1 / 0)

    functions: list[tuple[Callable[[Sequence[Any]], Any], bool]] = [(dividing, False), (broken, True)]
    for func, ask_async in functions:
        caplog.clear()
        condition = FunctionalTermination(func) | MaxIterationsTermination(3)
        with caplog.at_level(logging.ERROR, "runguard"):
            results = [await condition([say("x")]) if ask_async else condition.check([say("x")]) for _ in range(3)]
        assert [bool(result) for result in results] == [False, False, True]
        assert caplog.text.count("runguard.termination_failed") == 1
        assert "KeyError" in caplog.text or "ZeroDivisionError" in caplog.text


async def test_a_cancellation_inside_a_function_is_no_fault() -> None:
    async def cancelled(events: Sequence[Any]) -> bool:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await FunctionalTermination(cancelled)([say("x")])


# ---- rules ----------------------------------------------------------------------------------------------------------


def test_repetition_fires_where_the_guard_would_stop() -> None:
    assert fires_at(RuleTermination("repetition"), *each(rounds(12))) == 18  # the ninth answer
    condition = RuleTermination("repetition", stop=3)
    assert fires_at(condition, *each(rounds(9))) == 6
    assert condition.reason == "Rule repetition of tool 't': 3 identical calls and answers, limit 3"


def test_the_answer_fires_and_never_the_call_which_would_stay_unanswered() -> None:
    for rungs in ({"stop": 2}, {"block": 2}, {}):
        events = rounds(9)
        at = fires_at(RuleTermination("repetition", **rungs), *each(events))
        assert at is not None
        assert at % 2 == 0


def test_other_arguments_are_no_repetition() -> None:
    assert fires_at(RuleTermination("repetition", stop=3), rounds(9, page=lambda n: n)) is None


@each_row(
    ("rule", "rungs", "events", "at"),
    [
        ("stall", {}, rounds(9, response={"error": "bad format"}, page=lambda n: n), 12),
        ("stall", {"stop": 2}, rounds(9, response={"error": "bad format"}, page=lambda n: n), 4),
        (
            "tool_failures",
            {"stop": 3},
            [e for n in range(5) for e in rounds(1, response={"error": f"fault {'abcde'[n]} x"}, page=n, start=n)],
            6,
        ),
        ("empty", {"stop": 3}, rounds(5, response={"result": []}, page=lambda n: n), 6),
        (
            "same_call",
            {"stop": 4},
            [e for n in range(6) for e in rounds(1, response={"value": "abcdef"[n]}, start=n)],
            8,
        ),
        ("no_news", {"stop": 3}, rounds(9), 10),
        ("cycle", {"stop": 3}, [e for n in range(8) for e in rounds(1, tool="ab"[n % 2], start=n)], 12),
        ("handoff", {"stop": 3}, [does(transfer_to_agent="b") for _ in range(5)], 3),
    ],
)
def test_every_rule_that_events_can_show_is_a_condition(rule: str, rungs: dict[str, Any], events: Any, at: int) -> None:
    condition = RuleTermination(rule, **rungs)
    assert fires_at(condition, *each(events)) == at
    assert f"Rule {rule}" in (condition.reason or "")


def test_no_progress_is_any_of_them() -> None:
    assert fires_at(NoProgressTermination(), *each(rounds(12))) == 18
    failing = rounds(12, response={"error": "bad format"}, page=lambda n: n)
    assert fires_at(NoProgressTermination(), *each(failing)) == 12
    assert fires_at(NoProgressTermination(), *each([does(transfer_to_agent="b") for _ in range(9)])) == 6
    working = [e for n in range(60) for e in rounds(1, response={"line": f"text {'x' * n}"}, page=n, start=n)]
    assert fires_at(NoProgressTermination(), working) is None


def test_hand_offs_of_an_agent_called_inside_of_its_own_call_are_counted_together() -> None:
    events, branch = [], ""
    for n in range(1, 8):
        asked = call("helper", n, request="room")
        asked.branch = branch
        branch = f"{branch}.helper@c{n}".lstrip(".")
        passed = does(transfer_to_agent="lead")
        passed.branch = branch
        events += [asked, passed]
    assert fires_at(RuleTermination("handoff"), *each(events)) == 12


def test_branches_are_lanes_of_their_own() -> None:
    left, right = rounds(2, branch="p.left"), rounds(2, branch="p.right", start=10)
    interleaved = [e for pair in zip(left, right, strict=True) for e in pair]
    assert fires_at(RuleTermination("repetition", stop=3), interleaved) is None
    assert fires_at(RuleTermination("repetition", stop=2), interleaved) == 1


def test_calls_of_one_response_are_one_observation() -> None:
    ask = event(
        *(SimpleNamespace(function_call=SimpleNamespace(name="t", args={}, id=f"c{n}")) for n in range(4)), id="e"
    )
    told = event(
        *(SimpleNamespace(function_response=SimpleNamespace(name="t", response={"v": 1}, id=f"c{n}")) for n in range(4))
    )
    assert fires_at(RuleTermination("repetition", stop=2), [ask, told]) is None
    one_by_one = [answer("t", n, {"v": 1}) for n in range(4)]
    assert fires_at(RuleTermination("repetition", stop=2), [ask, *one_by_one]) is None


def test_calls_without_ids_are_paired_by_name() -> None:
    def nameless(e: Any) -> Any:
        for part in e.content.parts:
            (getattr(part, "function_call", None) or part.function_response).id = None
        return e

    assert fires_at(RuleTermination("repetition", stop=3), *each([nameless(e) for e in rounds(4)])) == 6
    left, right = rounds(2, branch="left"), rounds(2, branch="right", page=lambda n: n)
    interleaved = [nameless(e) for pair in zip(left, right, strict=True) for e in pair]
    assert fires_at(RuleTermination("repetition", stop=2), interleaved) == 1


def test_steering_tools_chunks_and_answers_without_a_call_are_no_work() -> None:
    for tool in ("transfer_to_agent", "exit_loop", "adk_request_credential"):
        assert fires_at(NoProgressTermination(), rounds(20, tool=tool)) is None
    assert fires_at(NoProgressTermination(), [answer("t", n, {"v": 1}) for n in range(20)]) is None
    chunks = [*rounds(20)]
    for one in chunks:
        one.partial = True
    assert fires_at(NoProgressTermination(), chunks) is None


def test_new_words_at_the_end_of_a_turn_are_news() -> None:
    events = [e for n in range(6) for e in (*rounds(2, start=2 * n), say(f"draft {n} {'x' * n}"))]
    assert fires_at(RuleTermination("no_news", stop=3), events) is None
    assert (
        fires_at(RuleTermination("no_news", stop=3), [e for e in events if not e.content.parts[0].__dict__.get("text")])
        == 1
    )


def test_a_rule_writes_no_log_of_stops_and_heeds_no_policy_from_outside(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "runguard.toml").write_text('mode = "off"\n[rules]\nrepetition = false\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNGUARD_MODE", "off")
    with caplog.at_level(logging.INFO, "runguard"):
        assert fires_at(RuleTermination("repetition", stop=3), rounds(5)) == 1
    assert caplog.text == ""


def test_a_rule_begins_anew_after_reset_and_for_each_run() -> None:
    condition = RuleTermination("repetition", stop=3)
    assert fires_at(condition, rounds(2)) is None
    assert fires_at(condition.for_run(), rounds(2)) is None
    condition.reset()
    assert fires_at(condition, rounds(2)) is None
    assert fires_at(condition, rounds(1)) == 1
