"""What the guard does after a fault of its own, by policy."""

from typing import Any

from runguard.core.events import RunInfo
from runguard.engine.guard import Guard
from runguard.ledger.ledger import StoreError, StoreOutage
from runguard.policy import Policy
from tests.kit.examples import each_row


def guard_of(**policy: Any) -> Guard:
    guard = Guard(Policy.validated(policy, ""))
    guard.start(RunInfo("run", "app", "user", "session", at=guard.clock()))
    return guard


@each_row(
    ("policy", "error", "goes_on"),
    [
        ({"on_guard_error": "allow"}, ValueError("x"), True),
        ({"on_guard_error": "block"}, ValueError("x"), False),
        ({"on_guard_error": "block", "mode": "shadow"}, ValueError("x"), True),
        ({"on_guard_error": "allow", "on_outage": "closed"}, StoreOutage("away"), False),
        ({"on_guard_error": "block", "on_outage": "open"}, StoreOutage("away"), True),
        ({"on_guard_error": "allow", "on_outage": "closed"}, StoreError("damaged"), False),
    ],
)
def test_a_fault_of_the_store_follows_on_outage_and_any_other_on_guard_error(
    policy: dict[str, Any], error: Exception, goes_on: bool
) -> None:
    guard = guard_of(**policy)
    trip = guard.fault("here", error, "run", "agent")
    assert (trip is None) is goes_on
    assert guard.guard_errors == 1
    assert [each.rule for each in guard.trips] == ([] if goes_on else ["guard_error"])


def test_a_run_that_is_stopped_keeps_its_first_reason() -> None:
    guard = guard_of(on_guard_error="block")
    first = guard.fault("here", ValueError("x"), "run")
    assert first is not None
    assert guard.fault("there", KeyError("y"), "run") is first
    assert len(guard.trips) == 1


def test_a_call_of_a_run_that_could_not_begin_is_refused_all_the_same() -> None:
    guard = guard_of(on_guard_error="block")
    assert guard.fault("here", ValueError("x"), "unknown") is None
    trip = guard.give_up("here", ValueError("x"), "unknown")
    assert trip is not None
    assert (trip.rule, "here: ValueError" in trip.message) == ("guard_error", True)
    assert list(guard.trips) == [trip]
    assert guard_of(on_guard_error="allow").give_up("here", ValueError("x"), "unknown") is None


def test_a_fault_while_stopping_is_counted_and_raises_nothing() -> None:
    guard = guard_of(on_guard_error="block")
    guard.runs["run"].lanes.clear()
    assert guard.fault("here", ValueError("x"), "run") is None
    assert guard.guard_errors == 2


def test_a_clock_that_breaks_does_not_let_a_call_through() -> None:
    def broken() -> float:
        raise OSError("no clock")

    guard = Guard(Policy.validated({"on_guard_error": "block", "clock": broken}, ""))
    trip = guard.give_up("here", ValueError("x"), "unknown")
    assert trip is not None
    assert (trip.rule, guard.guard_errors) == ("guard_error", 2)
