"""BudgetMonitor compared with a model, and from many threads."""

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from runguard.core.money import ThresholdAction
from runguard.engine.token_budget import BudgetMonitor
from tests.kit.monitors import response
from tests.kit.waiting import at_once

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
