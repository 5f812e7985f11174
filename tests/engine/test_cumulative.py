"""BudgetMonitor: thresholds, counting, responses, stop and nudge."""

import gc
import json
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from runguard.core.money import Threshold, ThresholdAction
from runguard.engine.token_budget import BudgetMonitor, BudgetPolicy, CompressionTriggered
from tests.kit.examples import each_row
from tests.kit.monitors import WRONG_COUNTS, handled, handler, response
from tests.kit.waiting import at_once

# ---- thresholds -----------------------------------------------------------------------------------------------------


@each_row("percent", [0, 0.0, -0.1, 1.0001, 2, float("nan"), float("inf"), True, False, "0.5", None])
def test_a_percent_that_is_no_fraction_is_refused(percent: Any) -> None:
    with pytest.raises(ValueError, match="percent"):
        Threshold(percent)


@each_row(
    ("field", "value"),
    [("callback", "print"), ("callback", 3), ("recurring", "false"), ("action", "abort"), ("action", None)],
)
def test_other_fields_are_checked_too(field: str, value: int | str | None) -> None:
    fields: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=field):
        Threshold(0.5, **fields)


# ---- firing ---------------------------------------------------------------------------------------------------------


def test_it_fires_at_its_share_and_not_before() -> None:
    fired = []
    monitor = BudgetMonitor(100).on_threshold(0.8, lambda m: fired.append(m.current_tokens))
    monitor.record_usage(79)
    assert fired == []
    monitor.record_usage(output_tokens=1)
    assert fired == [80]


def test_a_recurring_one_fires_on_every_record_above() -> None:
    fired = []
    monitor = BudgetMonitor(100).on_threshold(0.5, lambda m: fired.append(m.current_tokens), recurring=True)
    for _ in range(4):
        monitor.record_usage(30)
    assert fired == [60, 90, 120]
    assert monitor.thresholds_fired() == 1


def test_several_fire_in_ascending_order_however_they_were_added() -> None:
    fired = []
    monitor = BudgetMonitor(100)
    for percent in (0.9, 0.2, 0.5):
        assert monitor.on_threshold(percent, partial(lambda p, m: fired.append(p), percent)) is monitor
    assert [t.percent for t in monitor.thresholds] == [0.2, 0.5, 0.9]
    monitor.record_usage(95)
    assert fired == [0.2, 0.5, 0.9]


def test_a_callback_that_makes_room_keeps_higher_ones_from_firing() -> None:
    fired: list[Any] = []
    monitor = (
        BudgetMonitor(100).on_threshold(0.8, lambda m: m.adjust(10)).on_threshold(0.95, fired.append, action="stop")
    )
    monitor.record_usage(99)
    assert (fired, monitor.stopped, monitor.current_tokens) == ([], False, 10)


def test_only_thresholds_are_added() -> None:
    with pytest.raises(TypeError):
        BudgetMonitor().add_threshold(0.5)  # type: ignore[arg-type]


# ---- counting -------------------------------------------------------------------------------------------------------


@each_row("wrong", [value for value in WRONG_COUNTS if value is not None])
@each_row("argument", ["input_tokens", "output_tokens"])
def test_usage_that_cannot_be_meant_is_refused(argument: str, wrong: Any) -> None:
    monitor = BudgetMonitor()
    with pytest.raises(ValueError, match=argument):
        monitor.record_usage(**{argument: wrong})
    assert (monitor.current_tokens, monitor.turn_count) == (0, 0)


def test_numbers_after_some_turns() -> None:
    monitor = BudgetMonitor(1_000).on_threshold(0.3).on_threshold(0.9)
    monitor.record_usage(100, 33)
    monitor.record_usage(200, 1)
    assert monitor.summary() == {
        "max_tokens": 1_000,
        "current_tokens": 334,
        "utilization": 0.334,
        "turns": 2,
        "avg_per_turn": 167.0,
        "remaining": 666,
        "est_turns_remaining": 3,
        "thresholds_fired": 1,
    }
    assert json.dumps(monitor.summary())
    assert repr(monitor) == "BudgetMonitor(334 of 1000 tokens, 33%)"


def test_what_goes_beyond_is_counted_but_not_shown_as_a_share() -> None:
    monitor = BudgetMonitor(100)
    monitor.record_usage(250)
    assert (monitor.current_tokens, monitor.remaining, monitor.utilization, monitor.estimated_turns_remaining) == (
        250,
        0,
        1.0,
        0,
    )


def test_adjust_sets_the_count_and_rearms_what_lies_above() -> None:
    fired = []
    monitor = BudgetMonitor(100)
    for percent in (0.3, 0.5, 0.8):
        monitor.on_threshold(percent, partial(lambda p, m: fired.append(p), percent))
    monitor.record_usage(90)
    monitor.adjust(50)
    assert (monitor.current_tokens, monitor.turn_count, monitor.avg_tokens_per_turn, monitor.thresholds_fired()) == (
        50,
        1,
        90.0,
        2,
    )
    monitor.record_usage(40)
    assert fired == [0.3, 0.5, 0.8, 0.8], "0.5 is not above 50 of 100, so it stays fired"


@each_row("wrong", WRONG_COUNTS)
def test_a_count_that_cannot_be_meant_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="new_count"):
        BudgetMonitor().adjust(wrong)


def test_reset_starts_a_new_cycle() -> None:
    monitor = BudgetMonitor(100).on_threshold(0.5, action="stop").on_threshold(0.6, action="nudge")
    monitor.record_usage(90)
    monitor.reset()
    assert (monitor.current_tokens, monitor.turn_count, monitor.avg_tokens_per_turn, monitor.thresholds_fired()) == (
        0,
        0,
        0.0,
        0,
    )
    assert not monitor.stopped
    assert not monitor.take_nudge()


# ---- responses ------------------------------------------------------------------------------------------------------


def test_chunks_with_a_name_of_their_call_are_one_call() -> None:
    monitor, calls = BudgetMonitor(), [SimpleNamespace(), SimpleNamespace()]
    for output in (1, 5, 10):  # two streams at once
        for call in calls:
            monitor.record_response(response(100, output, partial=True), call)
    for call in calls:
        monitor.record_response(response(100, 10), call)
        monitor.record_response(response(100, 10), call)
    assert (monitor.current_tokens, monitor.turn_count) == (220, 2)


def test_chunks_without_a_name_belong_to_the_next_whole_response() -> None:
    monitor = BudgetMonitor()
    for _ in range(2):
        for output in (1, 5):
            monitor.record_response(response(100, output, partial=True))
        monitor.record_response(SimpleNamespace(usage_metadata=None))
    assert (monitor.current_tokens, monitor.turn_count) == (210, 2)


def test_a_stream_that_breaks_off_has_been_paid() -> None:
    monitor = BudgetMonitor()
    monitor.record_response(response(100, 5, partial=True), SimpleNamespace())
    assert (monitor.current_tokens, monitor.turn_count) == (105, 1)


def test_calls_are_told_apart_after_their_names_are_gone() -> None:
    monitor = BudgetMonitor()
    for _ in range(500):
        monitor.record_response(response(1, 1), SimpleNamespace())  # the next one may get the same address
        gc.collect(0)
    assert monitor.turn_count == 500


def test_only_so_many_calls_are_kept() -> None:
    monitor, names = BudgetMonitor(), [SimpleNamespace() for _ in range(1_000)]
    for name in names:
        monitor.record_response(response(1, 1), name)
    assert len(monitor._calls._ended) <= 64
    assert not monitor._calls._streams


def test_a_name_that_cannot_be_referred_to_weakly_will_do() -> None:
    monitor, name = BudgetMonitor(), (1, 2)
    for _ in range(2):
        monitor.record_response(response(100, 5), name)
    assert monitor.turn_count == 1


@pytest.mark.parametrize("wrong", [-1, True, 1.5, "many"])
def test_a_report_with_a_figure_that_is_no_count_is_ignored_logged_and_estimated(
    wrong: float | str, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = BudgetMonitor()
    monitor.after_model_hook()(callback_context=None, llm_response=response(wrong, 7))
    assert (monitor.current_tokens, monitor.turn_count, monitor.estimated_turns) == (2, 1, 1)  # "words"
    assert "runguard.usage_ignored: prompt_token_count: not a count of tokens" in caplog.text


@pytest.mark.parametrize("report", [None, {}, {"prompt": 0, "candidates": 0, "total": 0}])
def test_a_response_without_usage_is_estimated(report: dict[str, Any] | None, caplog: pytest.LogCaptureFixture) -> None:
    monitor = BudgetMonitor()
    silent = SimpleNamespace(
        usage_metadata=report and response(**report).usage_metadata, partial=False, content="word " * 40
    )
    monitor.record_response(silent, prompt_tokens=lambda: 1_000)
    assert (monitor.current_tokens, monitor.turn_count, monitor.estimated_turns) == (1_050, 1, 1)
    assert caplog.text.count("runguard.no_usage") == 1


def test_the_last_prompt_that_was_reported_stands_in_for_one_that_was_not() -> None:
    monitor = BudgetMonitor()
    monitor.record_response(response(1_000, 10))
    monitor.record_response(SimpleNamespace(usage_metadata=None, partial=False, content="word " * 40))
    assert (monitor.current_tokens, monitor.estimated_turns) == (2_060, 1)


def test_output_alone_is_completed_by_the_prompt() -> None:
    monitor = BudgetMonitor()
    monitor.record_response(response(0, 7, total=7), prompt_tokens=lambda: 1_000)
    assert (monitor.current_tokens, monitor.estimated_turns) == (1_007, 1)


def test_a_last_chunk_of_zeros_takes_nothing_back() -> None:
    monitor, call = BudgetMonitor(), SimpleNamespace()
    monitor.record_response(response(4_000, 1_000, total=5_000, partial=True), call)
    monitor.record_response(response(0, 0, total=0), call)
    assert (monitor.current_tokens, monitor.turn_count, monitor.estimated_turns) == (5_000, 1, 0)


def test_a_report_replaces_an_estimate() -> None:
    monitor, call = BudgetMonitor(), SimpleNamespace()
    monitor.record_response(SimpleNamespace(usage_metadata=None, partial=False, content="word " * 40), call)
    assert (monitor.current_tokens, monitor.estimated_turns) == (50, 1)
    monitor.record_response(response(20, 10), call)
    assert (monitor.current_tokens, monitor.turn_count, monitor.estimated_turns) == (30, 1, 0)


def test_a_total_that_is_none_is_not_believed() -> None:
    monitor = BudgetMonitor()
    monitor.record_response(response(100, 20, total=0))
    assert monitor.current_tokens == 120


def test_no_response_breaks_the_hook() -> None:
    class Broken:
        @property
        def usage_metadata(self) -> None:
            raise LookupError("not mine")

    hook = BudgetMonitor().after_model_hook()
    for strange in (None, object(), SimpleNamespace(usage_metadata=3), Broken(), response(1, 1)):
        assert hook(callback_context=None, llm_response=strange) is None


# ---- stop and nudge -------------------------------------------------------------------------------------------------


def test_a_stopping_threshold_stops_and_says_why() -> None:
    monitor = BudgetMonitor(1_000).on_threshold(0.8, action="stop")
    monitor.record_usage(799)
    assert (monitor.stopped, monitor.stop_reason) == (False, "")
    monitor.record_usage(1)
    assert (monitor.stopped, monitor.stop_reason, monitor.stop_limit) == (True, "80% of 1000 tokens reached", 800)


def test_a_stop_by_hand_holds_until_resumed_or_reset() -> None:
    monitor = BudgetMonitor()
    for lift in (monitor.resume, monitor.reset):
        monitor.stop("enough")
        monitor.adjust(0)
        assert (monitor.stopped, monitor.stop_reason) == (True, "enough")
        lift()
        assert not monitor.stopped
    monitor.stop()
    assert monitor.stop_reason


def test_adjusting_below_the_threshold_lifts_its_stop() -> None:
    monitor = BudgetMonitor(100).on_threshold(0.8, action="stop").on_threshold(0.9, action="stop")
    monitor.record_usage(95)
    monitor.adjust(85)
    assert bool(monitor.stopped), "0.8 still holds"
    monitor.adjust(79)
    assert not monitor.stopped
    monitor.record_usage(1)
    assert monitor.stopped


@pytest.mark.parametrize("recurring", [False, True])
def test_resuming_holds_unless_the_stop_recurs(recurring: bool) -> None:
    monitor = BudgetMonitor(100).on_threshold(0.8, action="stop", recurring=recurring)
    monitor.record_usage(80)
    monitor.resume()
    assert not monitor.stopped
    monitor.record_usage(1)
    assert monitor.stopped is recurring


def test_a_nudge_is_given_out_once() -> None:
    monitor = BudgetMonitor(100).on_threshold(0.5, action="nudge")
    assert monitor.take_nudge() == ""
    monitor.record_usage(60)
    assert monitor.take_nudge().startswith("60% of the token budget")
    monitor.record_usage(10)
    assert monitor.take_nudge() == ""


# ---- callbacks and buses --------------------------------------------------------------------------------------------


def test_a_failing_callback_is_counted_and_logged_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    fired: list[Any] = []

    def fall(monitor: BudgetMonitor) -> None:
        raise LookupError("not mine")

    monitor = BudgetMonitor(100).on_threshold(0.5, fall).on_threshold(0.6, fired.append)
    monitor.record_usage(70)
    assert (fired, monitor.callback_errors) == ([monitor], 1)
    assert "LookupError" in caplog.text


def test_an_async_callback_is_an_error_and_not_silence(recwarn: pytest.WarningsRecorder) -> None:
    async def later(monitor: BudgetMonitor) -> None:
        return None

    monitor = BudgetMonitor(100).on_threshold(0.5, later)
    monitor.record_usage(70)
    gc.collect(1)
    assert monitor.callback_errors == 1
    assert not [warning for warning in recwarn if "never awaited" in str(warning.message)]


def test_a_callback_may_do_anything_with_the_monitor() -> None:
    """The lock is not held while it runs."""
    monitor = BudgetMonitor(100)

    def busy(m: BudgetMonitor) -> None:
        m.on_threshold(0.99)
        m.stop("busy")
        m.resume()
        m.summary()
        m.reset()
        m.record_usage(1)

    monitor.on_threshold(0.5, busy)
    monitor.record_usage(60)
    assert (monitor.current_tokens, monitor.callback_errors) == (1, 0)


@pytest.mark.parametrize("as_object", [True, False])
def test_a_bus_hears_every_threshold_that_fires(as_object: bool) -> None:
    heard: list[Any] = []
    order: list[Any] = []
    bus = SimpleNamespace(emit=heard.append) if as_object else heard.append
    monitor = BudgetMonitor(1_000).on_threshold(0.5, lambda m: order.append(len(heard))).on_threshold(0.755)
    assert monitor.with_bus(bus) is monitor
    monitor.record_usage(600)
    monitor.record_usage(200)
    monitor.record_usage(1)
    assert heard == [
        CompressionTriggered(token_count=600, threshold=500),
        CompressionTriggered(token_count=800, threshold=755),
    ]
    assert order == [1], "the bus hears it before the callback"


def test_a_failing_bus_is_counted_and_the_callback_runs() -> None:
    fired: list[Any] = []

    def fall(event: Any) -> None:
        raise LookupError("not mine")

    monitor = BudgetMonitor(100).with_bus(fall).on_threshold(0.5, fired.append)
    monitor.record_usage(60)
    assert (fired, monitor.callback_errors) == ([monitor], 1)


@pytest.mark.parametrize("bus", [None, 3, SimpleNamespace(emit="no")])
def test_something_else_is_no_bus(bus: SimpleNamespace | int | None) -> None:
    with pytest.raises(TypeError):
        BudgetMonitor().with_bus(bus)


# ---- BudgetMonitor: policies, also as data, and nine known defects of such monitors


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


# ---- defects that a budget of this kind is known for; others are tested on ADK ---------------------------------------


def test_defect_1_a_lower_threshold_added_later_fires_and_the_higher_one_not_again() -> None:
    fired = []
    monitor = BudgetMonitor(100).on_threshold(0.8, lambda m: fired.append("high"))
    monitor.record_usage(85)
    monitor.on_threshold(0.5, lambda m: fired.append("low"))
    monitor.record_usage(1)
    monitor.record_usage(1)
    assert fired == ["high", "low"]


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


# ---- BudgetMonitor compared with a model, and from many threads


# ---- against a model ------------------------------------------------------------------------------------------------


class MonitorAgainstItsModel(RuleBasedStateMachine):
    """The model keeps plain facts: the tokens, what each turn cost, and for each threshold whether it has fired and how
    often.
    """

    @initialize(limit=st.integers(1, 50))
    def begin(self, limit: int) -> None:
        self.limit, self.tokens, self.stopped_by_hand = limit, 0, False
        self.turns: list[int] = []
        self.monitor = BudgetMonitor(limit)
        self.known: list[dict[str, Any]] = []  # percent, recurring, action; fired, stopping, expected calls, seen calls
        self.open = None

    def share(self) -> float:
        return min(self.tokens / self.limit, 1)

    def expect(self, *, whole: bool = True, told: set[int] | None = None) -> None:
        for entry in self.known:
            if self.share() < entry["percent"]:
                continue
            if entry["recurring"]:
                if not whole or (told is not None and id(entry) in told):
                    continue
                if told is not None:
                    told.add(id(entry))
            elif entry["fired"]:
                continue
            entry["fired"] = True
            entry["stopping"] |= entry["action"] == "stop"
            entry["expected"] += 1

    @rule(percent=st.floats(0.01, 1), recurring=st.booleans(), action=st.sampled_from(["warn", "nudge", "stop"]))
    def add(self, percent: float, recurring: bool, action: ThresholdAction) -> None:
        entry: dict[str, Any] = {
            "percent": percent,
            "recurring": recurring,
            "action": action,
            "fired": False,
            "stopping": False,
            "expected": 0,
            "seen": 0,
        }

        def seen(monitor: BudgetMonitor) -> None:
            entry["seen"] += 1

        self.monitor.on_threshold(percent, seen, recurring=recurring, action=action)
        self.known.append(entry)

    @rule(given=st.integers(0, 20), output=st.integers(0, 20))
    def record(self, given: int, output: int) -> None:
        self.monitor.record_usage(given, output)
        self.tokens += given + output
        self.turns.append(given + output)
        self.expect()

    @rule(outputs=st.lists(st.integers(0, 20), min_size=1, max_size=4), wholes=st.integers(0, 2))
    def stream(self, outputs: list[int], wholes: int) -> None:
        """Chunks with growing usage, then one or two whole responses with the last of it, or none if it breaks off."""
        call, counted = SimpleNamespace(), 0
        told: set[int] = set()
        outputs = sorted(outputs)
        self.turns.append(0)
        for number, output in enumerate([*outputs, *[outputs[-1]] * wholes]):
            whole = number >= len(outputs)
            self.monitor.record_response(response(1, output, total=1 + output, partial=not whole), call)
            self.tokens += 1 + output - counted
            self.turns[-1] = counted = 1 + output
            self.expect(whole=whole, told=told)

    @rule(count=st.integers(0, 60))
    def adjust(self, count: int) -> None:
        self.monitor.adjust(count)
        self.tokens = count
        for entry in self.known:
            if entry["percent"] > self.share():
                entry["fired"] = entry["stopping"] = False

    @rule()
    def reset(self) -> None:
        self.monitor.reset()
        self.tokens, self.turns, self.stopped_by_hand = 0, [], False
        for entry in self.known:
            entry["fired"] = entry["stopping"] = False

    @rule()
    def stop(self) -> None:
        self.monitor.stop("by hand")
        self.stopped_by_hand = True

    @rule()
    def resume(self) -> None:
        self.monitor.resume()
        self.stopped_by_hand = False
        for entry in self.known:
            entry["stopping"] = False

    @invariant()
    def they_agree(self) -> None:
        monitor = self.monitor
        assert [entry["seen"] for entry in self.known] == [entry["expected"] for entry in self.known]
        assert (monitor.current_tokens, monitor.turn_count) == (self.tokens, len(self.turns))
        assert monitor.remaining == max(self.limit - self.tokens, 0)
        assert monitor.utilization == self.share()
        assert monitor.avg_tokens_per_turn == (sum(self.turns) / len(self.turns) if self.turns else 0)
        assert monitor.thresholds_fired() == sum(entry["fired"] for entry in self.known)
        assert monitor.stopped == (self.stopped_by_hand or any(entry["stopping"] for entry in self.known))
        assert [t.percent for t in monitor.thresholds] == sorted(entry["percent"] for entry in self.known)
        assert monitor.callback_errors == 0


TestMonitorAgainstItsModel = MonitorAgainstItsModel.TestCase


# ---- threads --------------------------------------------------------------------------------------------------------


def test_under_threads_nothing_is_lost_and_each_threshold_fires_once() -> None:
    fired: list[int] = []
    lock = threading.Lock()
    monitor = BudgetMonitor(8_000)

    def note(percent: int) -> None:
        with lock:
            fired.append(percent)

    for step in range(1, 101):
        monitor.on_threshold(step / 100, partial(lambda p, m: note(p), step))

    def work(_: int) -> None:
        for _ in range(500):
            monitor.record_usage(1, 1)

    at_once(work, 8)
    assert (monitor.current_tokens, monitor.turn_count) == (8_000, 4_000)
    assert sorted(fired) == list(range(1, 101))


def test_everything_at_once_ends_and_breaks_nothing() -> None:
    monitor = BudgetMonitor(100).on_threshold(0.5, lambda m: m.adjust(0)).on_threshold(0.9, action="stop")
    moves: list[Callable[[], object]] = [
        lambda: monitor.record_usage(3),
        lambda: monitor.record_response(response(2, 1), SimpleNamespace()),
        lambda: monitor.on_threshold(0.7),
        monitor.summary,
        monitor.resume,
        monitor.take_nudge,
        monitor.reset,
        lambda: monitor.stop("x"),
    ]
    at_once(lambda index: [moves[index]() for _ in range(200)], 8)
    assert monitor.callback_errors == 0
