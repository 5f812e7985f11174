"""A stopped run is resumed: which stops are over, and that an unknown cap keeps the run stopped."""

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runguard import Budget
from runguard.core.decision import Action, Decision, Finding
from runguard.core.events import ROOT_LANE, ModelCall, RunInfo
from runguard.engine import resume
from runguard.engine.charges import OUTAGES
from runguard.engine.guard import Guard
from runguard.engine.resume import retire, review_stops
from runguard.ledger.ledger import StoreError
from runguard.policy import Policy
from tests.kit.driver import Driver

USER_BUDGET = Budget(usd="0.002", per="user")


async def stopped_by_money(**policy: Any) -> Guard:
    guard = Guard(Policy(prices={"m": {"input": 1, "output": 4}}, telemetry=False, **policy))
    guard.start(RunInfo("run", "app", "u", "s"))
    event = ModelCall("run", ROOT_LANE, "agent", 1.0, "m", input_tokens=1_000, max_output_tokens=500)
    assert (await guard.reserve(event)).action is Action.STOP
    return guard


def stops(guard: Guard) -> list[str]:
    return [trip.rule for trip in guard.runs["run"].stops_in_force()]


async def test_a_budget_that_was_extended_lets_the_run_go_on() -> None:
    guard = await stopped_by_money(budgets=[USER_BUDGET])
    await review_stops(guard, guard.runs["run"])
    assert stops(guard) == ["budget"]
    guard.accounts.extend("user:app/u", usd=1)
    await review_stops(guard, guard.runs["run"])
    assert stops(guard) == []


async def test_a_cap_that_cannot_be_read_keeps_the_run_stopped(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = await stopped_by_money(budgets=[USER_BUDGET])
    guard.accounts.extend("user:app/u", usd=1)

    def broken(*_: Any) -> None:
        raise RuntimeError("a cap function that fails")

    monkeypatch.setattr(guard.accounts.finder, "of_call", broken)
    with caplog.at_level(logging.WARNING, "runguard"):
        await review_stops(guard, guard.runs["run"])
    assert stops(guard) == ["budget"]
    assert "runguard.still_stopped" in caplog.text


async def test_an_outage_is_over_and_a_loop_is_not() -> None:
    guard = Guard(Policy(telemetry=False))
    run = guard.start(RunInfo("run", "app", "u", "s"))
    event = ModelCall("run", ROOT_LANE, "agent", 1.0, "m")
    guard.stop(run, event, Finding("budget", Action.STOP, 1, 0, OUTAGES, "run"))
    await review_stops(guard, run)
    assert stops(guard) == []
    guard.stop(run, event, Finding("repetition", Action.STOP, 6, 5, "equal calls", "run"))
    await review_stops(guard, run)
    assert stops(guard) == ["repetition"]


# ---- A policy is loaded again while the process goes on: what the new guard takes over from the old one


def successor(before: Guard, **policy: Any) -> Guard:
    heir = Guard(Policy(telemetry=False, **policy), heir_of=before)
    retire(before, heir)
    return heir


async def test_stops_of_an_operator_hold_under_another_store(tmp_path: Path) -> None:
    before = Guard(Policy(telemetry=False))
    before.operator_stops.throw("user:app/u", "ops", "a bad day")
    heir = successor(before, store=f"sqlite:///{tmp_path}/guard.db")
    assert heir.accounts.switch.of(["user:app/u"]) is not None
    heir.start(RunInfo("run", "app", "u", "s"))
    decision = await heir.reserve(ModelCall("run", ROOT_LANE, "agent", heir.clock(), "m"))
    assert decision.trip is not None
    assert decision.trip.rule == "kill_switch"


def test_the_same_receivers_keep_their_alarms() -> None:
    sent: list[object] = []
    before = Guard(Policy(telemetry=False, alerts=sent.append))
    assert successor(before, alerts=sent.append, max_usd=1).alarms is before.alarms is not None
    assert successor(before, alerts=lambda event: None).alarms is not before.alarms


# ---- A run that pauses: nothing about its limits and loops changes by it, in this process; and what it has used
# survives a trip through a record


LIMITS: dict[str, Any] = {
    "max_model_calls": 9,
    "max_tool_calls": 12,
    "max_seconds": 40.0,
    "max_nudges": 3,
    "tools": {"fetch": {"max_calls": 4}, "poll": {"polling": True}},
    "rules": {"polling": {"nudge": 5, "stop": 12}, "no_news": {"nudge": 2, "stop": 6}, "empty": {"nudge": 3}},
    "prices": {"model-1": {"input": 10, "output": 10}},
    "max_usd": 0.002,
}
TOOLS = st.sampled_from(["look", "fetch", "poll"])
STEPS = st.one_of(
    st.tuples(st.just("model"), st.integers(1, 30)),
    st.tuples(st.just("tool"), TOOLS, st.integers(1, 2), st.sampled_from(["same", "other", [], {"error": "broken"}])),
    st.tuples(st.just("work"), st.integers(1, 5)),
    st.tuples(st.just("hand_off"), st.sampled_from("ab"), st.sampled_from("ab")),
)
PAUSE = st.tuples(st.just("pause"), st.integers(0, 10_000))


def told(decision: Decision) -> tuple[Any, ...]:
    found = decision.finding
    return (
        decision.action.word,
        found and (found.rule, round(float(found.observed), 6), float(found.limit)),
        decision.for_model,
    )


def play(driver: Any, steps: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """What the guard says to each step; a pause is none."""
    said: list[tuple[Any, ...]] = []
    for kind, *facts in steps:
        if kind == "pause":
            assert driver.guard.pauses.keep("run", waits=True) is None
            driver.now += facts[0]
            driver.guard.pauses.resume(RunInfo("run", at=driver.now))
        elif kind == "work":
            driver.now += facts[0]
        elif kind == "model":
            said.append(told(driver.model()))
            driver.bill(facts[0], 1, model="model-1")
            said.append(told(driver.model_result(facts[0])))
        elif kind == "tool":
            tool, n, says = facts
            step = driver.tool(tool, {"n": n}, says)
            said += [told(step.before[0]), told(step.after)]
        else:
            said.append(told(driver.hand_off(*facts)))
    said.append(tuple(driver.guard.runs["run"].snapshot(driver.now).items()))
    return said


@given(steps=st.lists(st.one_of(STEPS, PAUSE), max_size=40))
def test_pauses_change_no_decision(steps: list[tuple[Any, ...]]) -> None:
    with_pauses, without = Driver(**LIMITS), Driver(**LIMITS)
    assert play(with_pauses, steps) == play(without, [step for step in steps if step[0] != "pause"])
    assert with_pauses.guard.accounts.spend() == without.guard.accounts.spend()


def record_of(driver: Any) -> Any:
    """What a store would hand to another worker."""
    run = driver.guard.runs["run"]
    run.pauses += 1
    return json.loads(json.dumps({**run.snapshot(driver.now), resume.CARRIED: resume.dump_run(run)}, default=str))


@given(steps=st.lists(STEPS, max_size=40), away=st.integers(0, 10_000))
def test_what_was_used_survives_a_record(steps: list[tuple[Any, ...]], away: int) -> None:
    here, there = Driver(**LIMITS), Driver(**LIMITS)
    play(here, steps)
    record = record_of(here)
    there.now = here.now + away
    run = there.guard.runs["run"]
    resume.load_run(run, record, there.now)
    assert resume.dump_run(run) == resume.dump_run(here.guard.runs["run"])
    mine, theirs = run.snapshot(there.now), here.guard.runs["run"].snapshot(here.now)
    assert {**mine, "growth": {}} == {**theirs, "growth": {}}, "what loop rules remember stays where it was seen"


@given(
    damage=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3)
    ),
    data=st.data(),
)
def test_a_damaged_record_is_an_error_of_the_store(damage: Any, data: st.DataObject) -> None:
    here = Driver(**LIMITS)
    play(here, [("model", 3), ("tool", "fetch", 1, "same")])
    record = record_of(here)
    place = data.draw(st.sampled_from([record, record[resume.CARRIED]]))
    place[data.draw(st.sampled_from(sorted(place)))] = damage
    run = Driver(**LIMITS).guard.runs["run"]
    with contextlib.suppress(StoreError):  # and nothing else
        resume.load_run(run, record, 2_000.0)
    assert min(run.spend.model_calls, run.spend.tool_calls, run.nudges, run.model_calls.count) >= 0  # type: ignore[union-attr]


@given(
    orders=st.lists(st.tuples(st.sampled_from(["keep", "end", "resume", "discard"]), st.integers(0, 6)), max_size=40)
)
def test_the_number_kept_is_bounded(orders: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume, "WAITING_KEPT", 3)
        patch.setattr(resume, "ENDED_KEPT", 2)
        guard = Guard(Policy.validated({"max_usd": 1, "clock": lambda: 0.0}, ""))
        kept: dict[str, list[str]] = {"keep": [], "end": []}
        for order, number in orders:
            info = RunInfo(f"run {number}", at=0.0)
            known = any(info.run in shelf for shelf in kept.values())
            if order in kept:
                if known:
                    continue
                guard.start(info)
                guard.pauses.keep(info.run, waits=order == "keep")
                kept[order].append(info.run)
                del kept[order][: -3 if order == "keep" else -2]
                continue
            if order == "resume":
                assert (guard.pauses.resume(info) is not None) == known
                guard.end(info.run)
            else:
                guard.pauses.discard(info)
            kept = {shelf: [run for run in runs if run != info.run] for shelf, runs in kept.items()}
        everyone = [*kept["keep"], *kept["end"]]
        assert guard.pauses.waiting == len(kept["keep"])
        assert set(guard.accounts.spending.costs_by_run) == set(everyone), "nothing is left of the others"
        assert [name for name in (f"run {number}" for number in range(7)) if guard.pauses.find(name)] == sorted(
            everyone
        )


def test_a_newer_count_here_is_not_lowered_by_an_older_record(drive: Any) -> None:
    driver = drive(max_model_calls=5)
    driver.model()
    driver.guard.pauses.keep("run", waits=True)
    old = record_of_kept(driver)
    driver.guard.pauses.resume(RunInfo("run", at=driver.now))
    driver.model()
    driver.guard.pauses.keep("run", waits=True)
    run = driver.guard.pauses.resume(RunInfo("run", at=driver.now), old)
    assert run.spend.model_calls == 2


def record_of_kept(driver: Any) -> Any:
    run = driver.guard.pauses.find("run")
    return json.loads(json.dumps({**run.snapshot(driver.now), resume.CARRIED: resume.dump_run(run)}, default=str))
