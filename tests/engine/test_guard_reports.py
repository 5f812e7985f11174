"""Callbacks, texts, errors and faults of the guard itself."""

import asyncio
import pickle
import threading
import time
from typing import Any

import pytest

from runguard.core import errors
from runguard.core.decision import Action, Decision, Finding, Trip, text_for_model, text_for_operator, text_for_user
from runguard.policy.settings import RULES
from tests.kit.driver import Driver
from tests.kit.examples import each_row
from tests.kit.guards import (
    LADDER,
    allow_stays_allow,  # noqa: F401 - an autouse fixture
    loop,
)

# ---- callbacks ------------------------------------------------------------------------------------------------------


def test_callbacks_run_on_another_thread(drive: type[Driver]) -> None:
    seen: list[tuple[str, Any]] = []
    d = drive(
        on_trip=lambda trip: seen.append((threading.current_thread().name, trip)),
        on_decision=lambda decision: seen.append((threading.current_thread().name, decision)),
    )
    loop(d)
    assert d.guard.outbox.flush()
    assert threading.current_thread().name not in {name for name, _ in seen}
    assert [value for _, value in seen if isinstance(value, Trip)] == list(d.guard.trips)
    assert [value.action.word for _, value in seen if isinstance(value, Decision)] == ["nudge", "block", "stop"]


def test_a_callback_may_be_async(drive: type[Driver]) -> None:
    seen: list[Trip] = []

    async def on_trip(trip: Trip) -> None:
        await asyncio.sleep(0)
        seen.append(trip)

    d = drive(on_trip=on_trip)
    loop(d)
    assert d.guard.outbox.flush()
    assert seen == list(d.guard.trips)


@pytest.mark.parametrize("error", [ValueError("boom"), KeyError(), asyncio.CancelledError(), SystemExit(1)], ids=repr)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_callback_that_raises_harms_nothing_and_the_next_one_is_called(drive: type[Driver], error: Any) -> None:
    trips: list[Trip] = []

    def on_decision(_: Decision) -> None:
        raise error

    d = drive(on_decision=on_decision, on_trip=trips.append)
    assert loop(d) == LADDER
    assert d.guard.outbox.flush()
    assert trips == list(d.guard.trips)
    assert d.guard.snapshot()["callbacks_failed"] == 3


def test_a_callback_that_hangs_holds_up_nothing_and_what_does_not_fit_is_dropped_and_counted(
    drive: type[Driver],
) -> None:
    release = threading.Event()
    d = drive(on_trip=lambda _: release.wait(30), max_model_calls=1)
    try:
        began = time.monotonic()
        for n in range(1_100):
            d.start(f"r{n}")
            d.model(run=f"r{n}")
            assert d.model(run=f"r{n}").action is Action.STOP
        assert time.monotonic() - began < 40
        assert not d.guard.outbox.flush(0.01)
        assert 0 < d.guard.snapshot()["callbacks_dropped"] <= 100
    finally:
        release.set()


def test_a_sticky_stop_is_told_once(drive: type[Driver]) -> None:
    said: list[Decision] = []
    d = drive(max_model_calls=1, on_decision=said.append)
    for _ in range(10):
        d.model()
    assert d.guard.outbox.flush()
    assert len(said) == 1


# ---- texts ----------------------------------------------------------------------------------------------------------


@each_row("rule", [*RULES, "once", "breaker", "depth", "tool_limit", "fan_out", "result_size"])
@each_row("action", [Action.NUDGE, Action.BLOCK, Action.STOP])
def test_the_model_is_told_what_not_to_do_and_is_not_invited_to_vary_its_arguments(rule: Any, action: Any) -> None:
    said = text_for_model(Finding(rule, action, 5, 4, "calls", tool="look")).lower()
    assert said
    assert "{" not in said
    assert not any(
        words in said
        for words in ("different argument", "other argument", "try again", "runguard", "circuit breaker", "policy")
    )


@each_row("rule", [*RULES, "model_calls", "tool_calls", "deadline", "fan_out", "depth", "policy_error", "guard_error"])
def test_the_end_user_reads_a_plain_sentence(rule: Any) -> None:
    said = text_for_user(rule)
    assert said.endswith(".")
    assert not any(word in said.lower() for word in ("$", "usd", "token", "runguard", rule if "_" in rule else "\0"))


def test_the_operator_reads_rule_value_limit_and_path() -> None:
    finding = Finding("stall", Action.STOP, 6, 6, "equal failures", tool="parse")
    said = text_for_operator(
        finding, path=("root", "child"), model_calls=7, tool_calls=6, tokens=800, spent=", $0.02", enforced=True
    )
    parts = (
        "stopped by stall",
        "'parse'",
        "6 equal failures, limit 6",
        "root",
        "child",
        "7 model calls, 6 tool calls, 800 tokens, $0.02",
    )
    assert all(part in said for part in parts)
    assert sorted(parts, key=said.index) == list(parts)


def test_a_text_of_the_users_own_replaces_the_built_in_one(drive: type[Driver]) -> None:
    d = drive(stop_text="Please call us.")
    loop(d)
    assert d.guard.stop_text(d.guard.trips[0]) == "Please call us."


# ---- errors ---------------------------------------------------------------------------------------------------------


ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, BaseException)]


@each_row("kind", ERRORS)
def test_all_errors_are_runtime_errors_of_one_tree(kind: Any) -> None:
    assert issubclass(kind, errors.RunGuardError)
    assert issubclass(kind, RuntimeError)


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling(drive: type[Driver], kind: Any) -> None:
    d = drive()
    loop(d)
    (first,) = d.guard.trips
    stopped = issubclass(kind, errors.RunStoppedError)
    error = kind(first) if stopped else kind("what is wrong")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    if stopped:
        assert again.trip == first


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ("repetition", errors.LoopDetectedError),
        ("no_news", errors.LoopDetectedError),
        ("stall", errors.LoopDetectedError),
        ("handoff", errors.LoopDetectedError),
        ("deadline", errors.DeadlineExceededError),
        ("model_calls", errors.LimitExceededError),
        ("fan_out", errors.LimitExceededError),
        ("growth", errors.CostGrowthError),
        ("policy_error", errors.GuardFailedError),
        ("guard_error", errors.GuardFailedError),
    ],
)
def test_the_error_fits_the_rule(drive: type[Driver], rule: str, kind: Any) -> None:
    trip = drive().guard.fail("run", rule, "because")
    assert trip is not None
    error = errors.RunStoppedError.of(trip)
    assert type(error) is kind
    assert str(error) == trip.message
    assert (error.observed, error.limit) == (trip.observed, trip.limit)


def test_a_loop_error_shows_the_pattern(drive: type[Driver]) -> None:
    d = drive(rules={"repetition": False})
    for n in range(20):
        d.tool(f"tool {n % 2}")
    error = errors.RunStoppedError.of(d.guard.trips[0])
    assert isinstance(error, errors.LoopDetectedError)
    assert error.repeats == 14
    assert set(error.pattern) <= {"tool 0", "tool 1"}


# ---- the guard's own faults -----------------------------------------------------------------------------------------


def test_a_run_can_be_stopped_for_the_guards_own_sake(drive: type[Driver]) -> None:
    d = drive()
    first = d.guard.fail("run", "policy_error", "max_model_cals: no such setting")
    assert first is not None
    assert "max_model_cals" in first.message
    assert d.model().trip is first
    assert d.guard.fail("run", "guard_error", "again") is first
    assert d.guard.fail("unknown", "guard_error", "x") is None


def test_a_call_that_never_left_is_unspent(drive: type[Driver]) -> None:
    d = drive(max_model_calls=2)
    for _ in range(10):
        assert d.model().action is Action.ALLOW
        d.guard.unspent("run")
    assert [d.model().action.word for _ in range(3)] == ["allow", "allow", "stop"]
    d.guard.unspent("unknown")
