"""Metrics and spans of decisions, budgets and the guard's own time."""

import gc
import weakref
from pathlib import Path

import pytest

from runguard.core.decision import ALLOW, Action, Decision, Finding, Money
from runguard.core.events import ModelCall
from runguard.core.money import Budget
from runguard.pricing.book import Price
from runguard.pricing.rates import Usage
from runguard.reporting.telemetry import Telemetry
from tests.kit.driver import Driver
from tests.kit.optional import present
from tests.kit.telemetry import INFO, Sdk, loop, report, stop_of

pytest.importorskip("opentelemetry.sdk")


PRICES = {"model-1": Price(input=1, output=1)}  # a dollar per million tokens


CANARIES = ("run-canary", "user-canary", "session-canary", "label-canary", "trip")


# ---- decisions ------------------------------------------------------------------------------------------------------


def test_every_decision_but_allow_is_counted_by_rule_agent_and_tool(drive: type[Driver], sdk: Sdk) -> None:
    d = drive()
    made = loop(d, Telemetry.of(d.guard))
    assert [decision.action.word for decision in made] == ["nudge", "block", "stop"]
    counted = {facts["runguard.decision"]: (facts, point.value) for facts, point in sdk.points("runguard.decisions")}
    assert {word: number for word, (_, number) in counted.items()} == {"nudge": 1, "block": 1, "stop": 1}
    assert counted["stop"][0] == {
        "runguard.decision": "stop",
        "runguard.rule": "repetition",
        "runguard.enforced": True,
        "gen_ai.agent.name": "writer",
        "gen_ai.tool.name": "parse",
    }


def test_allow_is_not_reported(drive: type[Driver], sdk: Sdk) -> None:
    d = drive()
    with sdk.tracer.start_as_current_span("call"):
        report(Telemetry.of(d.guard), ALLOW)
    assert sdk.points("runguard.decisions") == []
    assert sdk.events() == []
    assert sdk.spans.get_finished_spans()[0].events == ()


def test_a_decision_is_an_event_on_the_span_of_whoever_asked(drive: type[Driver], sdk: Sdk) -> None:
    d = drive()
    told = Telemetry.of(d.guard)
    with sdk.tracer.start_as_current_span("execute_tool"):
        loop(d, told)
    (span,) = sdk.spans.get_finished_spans()
    assert [event.name for event in span.events] == ["runguard.decision"] * 3
    (trip,) = d.guard.trips
    assert dict(present(span.events[-1].attributes)) == {
        "runguard.decision": "stop",
        "runguard.rule": "repetition",
        "runguard.enforced": True,
        "runguard.observed": 9.0,
        "runguard.limit": 9.0,
        "runguard.unit": trip.unit,
        "runguard.scope.kind": "run",
        "runguard.trip.id": trip.id,
        "runguard.run.id": "run-canary",
        "gen_ai.agent.name": "writer",
        "gen_ai.tool.name": "parse",
        "gen_ai.conversation.id": "session-canary",
    }


def test_a_decision_is_a_log_event_that_knows_its_span(drive: type[Driver], sdk: Sdk) -> None:
    d = drive()
    told = Telemetry.of(d.guard)
    with sdk.tracer.start_as_current_span("execute_tool") as span:
        loop(d, told)
    assert told is not None
    told.flush()
    records = [data.log_record for data in sdk.records.get_finished_logs()]
    assert [record.event_name for record in records] == ["runguard.decision"] * 3
    assert [record.severity_text for record in records] == ["INFO", "INFO", "WARN"]
    assert {record.span_id for record in records} == {span.get_span_context().span_id}
    assert all(record.body is None for record in records)
    (in_span,) = [dict(present(event.attributes)) for event in sdk.spans.get_finished_spans()[0].events][-1:]
    assert dict(present(records[-1].attributes)) == in_span


def test_without_a_span_the_log_event_is_there(drive: type[Driver], sdk: Sdk) -> None:
    d = drive()
    report(Telemetry.of(d.guard), stop_of(), model="model-1")
    (event,) = sdk.events()
    assert (event["runguard.rule"], event["gen_ai.request.model"]) == ("stall", "model-1")


def test_a_budget_is_named_by_kind_and_never_by_whose_it_is(drive: type[Driver], sdk: Sdk) -> None:
    d = drive()
    money = Money("user", "user:shop/user-canary", None, None)
    finding = Finding(
        "budget",
        Action.WARN,
        4,
        5,
        "usd",
        "run",
        detail="80% of the budget of user:shop/user-canary is spent",
        money=money,
    )
    with sdk.tracer.start_as_current_span("call"):
        report(Telemetry.of(d.guard), Decision(Action.WARN, finding))
    (event,) = sdk.events()
    assert event["runguard.scope.kind"] == "user"
    assert sdk.records.get_finished_logs()[0].log_record.severity_text == "WARN"
    assert "user-canary" not in str(event) + str(sdk.spans.get_finished_spans()[0].events[0].attributes)


def test_in_shadow_mode_decisions_are_marked_as_not_enforced(drive: type[Driver], sdk: Sdk) -> None:
    d = drive(mode="shadow")
    loop(d, Telemetry.of(d.guard))
    assert {facts["runguard.enforced"] for facts, _ in sdk.points("runguard.decisions")} == {False}
    assert {event["runguard.enforced"] for event in sdk.events()} == {False}


def test_a_stop_in_force_that_is_told_again_speaks_for_its_trip(drive: type[Driver], sdk: Sdk) -> None:
    d = drive()
    trip = next(decision.trip for decision in loop(d, Telemetry.of(d.guard)) if decision.trip is not None)
    report(Telemetry.of(d.guard), Decision(Action.STOP, None, trip))
    event = sdk.events()[-1]
    assert (event["runguard.rule"], event["runguard.trip.id"], event["gen_ai.tool.name"]) == (
        "repetition",
        trip.id,
        "parse",
    )


def test_no_argument_result_or_user_is_in_any_event(drive: type[Driver], sdk: Sdk) -> None:
    d = drive()
    with sdk.tracer.start_as_current_span("call"):
        loop(d, Telemetry.of(d.guard))
    said = str(sdk.events()) + str(
        [dict(present(event.attributes)) for event in sdk.spans.get_finished_spans()[0].events]
    )
    assert "session-canary" in said
    for canary in ("argument-canary", "result-canary", "user-canary", "label-canary"):
        assert canary not in said


def test_names_that_a_model_makes_up_do_not_make_series_without_end(drive: type[Driver], sdk: Sdk) -> None:
    d = drive()
    told = Telemetry.of(d.guard)
    for number in range(300):
        report(told, stop_of(tool=f"made up {number}"), agent=f"agent {number}" + "x" * 500)
    points = sdk.points("runguard.decisions")
    assert sum(point.value for _, point in points) == 300
    for name in ("gen_ai.tool.name", "gen_ai.agent.name"):
        names = {facts[name] for facts, _ in points}
        assert len(names) == 201
        assert "(others)" in names
        assert max(map(len, names)) <= 128


# ---- budgets --------------------------------------------------------------------------------------------------------


async def test_gauges_follow_a_call_from_reserve_to_settle(drive: type[Driver], sdk: Sdk) -> None:
    d = drive(budgets=[Budget(usd=10, per="app")], prices=PRICES)
    told = Telemetry.of(d.guard)
    d.start("r1", app="shop", user="ann", session="s1")
    call = ModelCall("r1", "", "writer", d.now, "model-1", 1_000_000, max_output_tokens=1_000_000)
    assert d.guard.check(call).action is Action.ALLOW
    assert (await d.guard.reserve(call)).action is Action.ALLOW
    assert sdk.gauges("app") == {"limit": {"app:shop": 10}, "used": {"app:shop": 0}, "reserved": {"app:shop": 2}}
    d.guard.settle(call.charge, Usage(1_000_000, 500_000))
    assert sdk.gauges("app") == {"limit": {"app:shop": 10}, "used": {"app:shop": 1.5}, "reserved": {"app:shop": 0}}
    d.guard.accounts.extend("app:shop", usd=5)
    assert sdk.gauges("app")["limit"] == {"app:shop": 15}
    assert told is not None


async def test_budgets_of_users_sessions_runs_and_labels_are_summed_per_kind(drive: type[Driver], sdk: Sdk) -> None:
    kinds = ("user", "session", "run", "label:team", "user+model")
    d = drive(budgets=[Budget(tokens=100, usd=1, per=per) for per in kinds], prices=PRICES)
    told = Telemetry.of(d.guard)
    for number in range(3):
        d.start(
            f"r{number}", app="shop", user=f"user {number}", session=f"s{number}", labels={"team": f"team {number}"}
        )
        d.bill(10, 5, run=f"r{number}", model="model-1")
    for kind in ("user", "session", "run", "label", "user+model"):
        assert sdk.gauges(kind, "tokens") == {"limit": {"": 300}, "used": {"": 45}, "reserved": {"": 0}}, kind
    assert told is not None


def test_apps_agents_models_and_tools_are_named_and_bounded(drive: type[Driver], sdk: Sdk) -> None:
    d = drive(budgets=[Budget(tokens=10, per=per, window="1d") for per in ("agent", "model", "app+model")])
    told = Telemetry.of(d.guard)
    d.start("r1", app="shop", user="ann", session="s1")
    d.bill(1, 1, run="r1", model="model-1", agent="writer")
    assert sdk.gauges("agent", "tokens")["used"] == {"agent:shop/writer": 2}
    assert sdk.gauges("model", "tokens")["used"] == {"model:model-1": 2}
    assert sdk.gauges("app+model", "tokens")["used"] == {"app+model:shop+model-1": 2}
    assert {facts["runguard.window"] for facts, _ in sdk.points("runguard.budget.limit")} == {"1d"}
    for number in range(300):
        d.bill(1, 1, run="r1", model="model-1", agent=f"made up {number}")
    used = sdk.gauges("agent", "tokens")["used"]
    assert len(used) <= 201
    assert sum(used.values()) == 602
    assert told is not None


def test_a_budget_without_a_window_says_so_and_one_that_is_over_is_gone(drive: type[Driver], sdk: Sdk) -> None:
    d = drive(budgets=[Budget(tokens=100, per="app"), Budget(tokens=50, per="app", window="1m")])
    told = Telemetry.of(d.guard)
    d.start("r1", app="shop", user="ann", session="s1")
    d.bill(10, 5, run="r1")
    assert {facts["runguard.window"]: point.value for facts, point in sdk.points("runguard.budget.limit")} == {
        "none": 100,
        "1m": 50,
    }
    d.now += 120
    assert {facts["runguard.window"] for facts, _ in sdk.points("runguard.budget.limit")} == {"none"}
    assert told is not None


def test_guards_of_one_process_share_the_instruments(drive: type[Driver], sdk: Sdk) -> None:
    drivers = [drive(budgets=[Budget(tokens=100, per="app")]) for _ in range(2)]
    told = [Telemetry.of(d.guard) for d in drivers]
    for d in drivers:
        d.start("r1", app="shop", user="ann", session="s1")
        d.bill(10, 5, run="r1")
    assert sdk.gauges("app", "tokens") == {
        "limit": {"app:shop": 200},
        "used": {"app:shop": 30},
        "reserved": {"app:shop": 0},
    }
    assert len(told) == 2


def test_guards_with_the_same_store_do_not_count_its_accounts_twice(
    drive: type[Driver], sdk: Sdk, tmp_path: Path
) -> None:
    store = f"sqlite:///{tmp_path}/guard.db"
    drivers = [drive(budgets=[Budget(tokens=100, per="app")], store=store) for _ in range(2)]
    told = [Telemetry.of(d.guard) for d in drivers]
    for number, d in enumerate(drivers):
        d.start(f"r{number}", app="shop", user="ann", session="s1")
        d.bill(10, 5, run=f"r{number}")
        assert d.guard.accounts.ledger.flush(10)
    assert sdk.gauges("app", "tokens") == {
        "limit": {"app:shop": 100},
        "used": {"app:shop": 30},
        "reserved": {"app:shop": 0},
    }
    assert len(told) == 2


def test_of_two_budgets_on_the_same_scope_the_one_that_ends_first_is_shown(drive: type[Driver], sdk: Sdk) -> None:
    d = drive(budgets=[Budget(tokens=100, per="agent"), Budget(tokens=40, per="agent:wri*")])
    told = Telemetry.of(d.guard)
    d.start("r1", app="shop", user="ann", session="s1")
    d.bill(10, 5, run="r1", agent="writer")
    shown = sdk.gauges("agent", "tokens")
    assert (shown["limit"], shown["used"]) == ({"agent:shop/writer": 40}, {"agent:shop/writer": 15})
    assert told is not None


def test_a_guard_can_be_collected_and_takes_its_gauges_along(drive: type[Driver], sdk: Sdk) -> None:
    d = drive(budgets=[Budget(tokens=100, per="app")])
    d.guard.telemetry = Telemetry.of(d.guard)  # as the conductor keeps it
    d.start("r1", app="shop", user="ann", session="s1")
    d.bill(10, 5, run="r1")
    assert sdk.gauges("app", "tokens")
    gone = weakref.ref(d.guard)
    del d
    gc.collect()
    assert gone() is None
    assert sdk.gauges("app", "tokens") == {}


def test_no_id_of_a_user_session_run_or_label_is_in_any_metric(drive: type[Driver], sdk: Sdk) -> None:
    kinds = ("run", "session", "user", "label:team", "run+agent", "user+model", "app", "tool")
    d = drive(budgets=[Budget(tokens=1_000, per=per) for per in kinds])
    told = Telemetry.of(d.guard)
    loop(d, told)
    d.bill(10, 5, run=INFO.run, model="model-1")
    assert told is not None
    told.took(5e-6)
    data = sdk.reader.get_metrics_data()
    attributes = [
        dict(present(p.attributes))
        for r in present(data).resource_metrics
        for s in r.scope_metrics
        for m in s.metrics
        for p in m.data.data_points
    ]
    assert len(attributes) > 20
    assert not [(canary, facts) for facts in attributes for canary in CANARIES if canary in str(facts)]


# ---- the guard's own time -------------------------------------------------------------------------------------------


def test_the_guards_time_is_recorded_when_a_reader_collects(drive: type[Driver], sdk: Sdk) -> None:
    d = drive()
    told = Telemetry.of(d.guard)
    for seconds in (0.5e-6, 3e-6, 3e-6, 2.0):
        assert told is not None
        told.took(seconds)
    ((facts, point),) = sdk.points("runguard.guard.duration")
    assert facts == {}
    assert (point.count, point.sum) == (4, pytest.approx(2.0000065))
    assert point.explicit_bounds[:3] == (1e-6, 2e-6, 5e-6)
    assert (point.bucket_counts[0], point.bucket_counts[2], point.bucket_counts[-1]) == (1, 2, 1)
    assert len(sdk.wires.durations) == 0


def test_flush_records_at_once(drive: type[Driver], sdk: Sdk) -> None:
    told = Telemetry.of(drive().guard)
    assert told is not None
    told.took(1e-6)
    assert told.flush() is True
    assert len(sdk.wires.durations) == 0


def test_nobody_who_collects_means_a_bounded_buffer(drive: type[Driver], sdk: Sdk) -> None:
    told = Telemetry.of(drive().guard)
    for _ in range(5_000):
        assert told is not None
        told.took(1e-6)
    ((_, point),) = sdk.points("runguard.guard.duration")
    assert point.count == 1_024
