"""BudgetMonitor: thresholds, counting, responses, stop and nudge."""

import gc
import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from runguard.core.money import Threshold
from runguard.engine.token_budget import BudgetMonitor, CompressionTriggered
from tests.kit.examples import each_row
from tests.kit.monitors import WRONG_COUNTS, response

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
    for strange in (None, object(), SimpleNamespace(usage_metadata=3), Broken()):
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
    gc.collect()
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
