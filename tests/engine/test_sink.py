"""Decisions and trips leave the guard through one sink, one module writes ``stopped``, and no method is replaced."""

import logging
from typing import Any

import pytest

from runguard.core.decision import Action
from runguard.engine.decide import Decided
from runguard.engine.guard import Guard
from runguard.policy import Policy
from tests.kit.driver import Driver

RULES: dict[str, Any] = {"rules": {"repetition": {"nudge": 2, "block": 4, "stop": 5}}}
LOOP = ["nudge", "block", "stop"]


def play_a_loop(driver: Driver, times: int = 6) -> None:
    for _ in range(times):
        driver.tool("parse", {"page": 1}, "the same")


def test_a_subscriber_receives_every_decision_once_with_its_event_and_lane() -> None:
    driver = Driver(**RULES)
    made: list[Any] = []
    driver.guard.sink.on_decided("the test", made.append)
    play_a_loop(driver)
    assert [each.decision.action.word for each in made] == LOOP
    assert [each.finding.rule for each in made] == ["repetition"] * 3
    assert {(each.run.info.run, each.lane.key, each.event.agent) for each in made} == {("run", "", "agent")}


def test_a_trip_arrives_before_the_decision_that_carries_it() -> None:
    driver = Driver(**RULES)
    order: list[Any] = []
    driver.guard.sink.on_trip("the test", lambda trip, finding: order.append((trip.id, finding.rule)))
    driver.guard.sink.on_decided("the test", lambda made: order.append(made.decision.trip and made.decision.trip.id))
    play_a_loop(driver)
    assert order == [None, None, (driver.guard.trips[0].id, "repetition"), driver.guard.trips[0].id]


def test_findings_that_decide_nothing_can_be_watched() -> None:
    driver = Driver(**RULES, max_nudges=0)
    seen: list[Any] = []
    made: list[Any] = []
    driver.guard.sink.on_found("the test", lambda finding, event: seen.append((finding.action, finding.rule)))
    driver.guard.sink.on_decided("the test", made.append)
    play_a_loop(driver, 2)
    assert seen == [(Action.NUDGE, "repetition")]
    assert made == []


@pytest.mark.parametrize("topic", ["on_decided", "on_trip", "on_found"])
def test_a_subscriber_that_raises_is_a_counted_fault_and_prevents_nothing(topic: str, caplog: Any) -> None:
    def broken(*facts: Any) -> None:
        raise ValueError("a bug")

    driver = Driver(**RULES)
    decisions: list[Decided] = []
    trips: list[Any] = []
    found: list[Any] = []
    sink = driver.guard.sink
    getattr(sink, topic)("a broken subscriber", broken)
    sink.on_decided("the test", decisions.append)
    sink.on_trip("the test", lambda trip, finding: trips.append(trip))
    sink.on_found("the test", lambda finding, event: found.append(finding))
    with caplog.at_level(logging.ERROR, "runguard"):
        play_a_loop(driver)
    assert [each.decision.action.word for each in decisions] == LOOP
    assert trips == list(driver.guard.trips)
    assert driver.guard.runs["run"].stopped == trips[0]
    assert driver.guard.guard_errors == len({"on_decided": decisions, "on_trip": trips, "on_found": found}[topic]) > 0
    assert "a broken subscriber failed with ValueError" in caplog.text


def test_a_guard_that_does_not_report_still_publishes(caplog: Any) -> None:
    made: list[Any] = []
    called: list[Any] = []
    policy = Policy.validated(
        {**RULES, "on_trip": called.append, "on_decision": called.append, "clock": lambda: 0.0}, "keywords"
    )
    driver = Driver()
    driver.guard = guard = Guard(policy, reports=False)
    guard.sink.on_decided("the test", made.append)
    driver.start("run")
    with caplog.at_level(logging.INFO, "runguard"):
        play_a_loop(driver)
    assert guard.flush(5)
    assert [each.decision.action.word for each in made] == LOOP
    assert [trip.rule for trip in guard.trips] == ["repetition"]
    assert (called, caplog.records) == ([], [])


# ---- one writer of ``stopped`` --------------------------------------------------------------------------------------


# ---- no method is replaced ------------------------------------------------------------------------------------------


class Timer:
    """Takes the place of telemetry."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.took = self.seconds.append


def test_the_guard_times_as_many_calls_as_telemetry_asks_for() -> None:
    driver, timer = Driver(**RULES), Timer()
    driver.guard.telemetry = timer  # type: ignore[assignment]
    driver.guard.time_next(3)
    play_a_loop(driver, 4)
    assert len(timer.seconds) == 3
    driver.guard.time_next(2)
    driver.model()
    assert len(timer.seconds) == 4
    assert all(seconds >= 0 for seconds in timer.seconds)
