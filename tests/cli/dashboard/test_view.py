"""What a look at a store answers, on every kind of store, after real runs."""

import json
import sqlite3
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from runguard import Budget
from runguard.cli.main import main
from runguard.core.breaker import Permit
from runguard.errors import PolicyError
from runguard.ledger.ledger import Line, StoreError
from runguard.ledger.sqlite import SqliteStore
from runguard.view import StoreView
from runguard.view.story import plain
from tests.kit.guarded_runs import Alive, guard, healthy, runaway
from tests.kit.waiting import eventually


@pytest.fixture
def view(place: Any) -> Iterator[StoreView]:
    made = StoreView(place.url)
    yield made
    made.close()


def test_after_real_runs_every_question_has_its_answer(place: Any, view: StoreView) -> None:
    plugin = guard(place.url, max_usd=2)
    stopped = runaway(plugin, user_id="alice")
    healthy(plugin, user_id="bob", agent="writer")
    (budget_of_bob,) = [row for row in view.budgets() if row.scope == "user:app/bob"]
    assert (
        budget_of_bob.unit,
        budget_of_bob.limit,
        budget_of_bob.spent,
        budget_of_bob.reserved,
        budget_of_bob.window,
    ) == ("usd", 1, Decimal("0.012"), 0, "1d")
    assert budget_of_bob.share == pytest.approx(0.012)
    assert [row.scope for row in view.budgets()] == ["user:app/alice", "user:app/bob"], (
        "budgets of ended runs are not listed"
    )
    assert len(view.budgets(ended_runs=True)) == 4

    (trip,) = view.trips()
    assert (trip["id"], trip["rule"], trip["shadow"]) == (stopped.trips[0].id, stopped.trips[0].rule, False)
    assert view.trip(trip["id"]) == trip
    assert view.trip("another") is None
    assert view.story("another") is None

    now = view.now()
    by_user = view.spend(now - 900, now + 1, "user")
    assert [(figures.name, figures.calls, figures.usd) for figures in by_user.totals] == [
        ("alice", trip["model_calls"], Decimal("0.004") * trip["model_calls"]),
        ("bob", 3, Decimal("0.012")),
    ]
    assert sum(map(sum, by_user.usd)) == pytest.approx(float(by_user.total.usd))
    assert sum(map(sum, by_user.tokens)) == by_user.total.tokens == by_user.total.calls * 1_250
    assert [figures.name for figures in view.spend(now - 900, by="agent").totals] == ["researcher", "writer"]
    assert [figures.name for figures in view.spend(now - 900, by="app").totals] == ["app"]
    assert [figures.name for figures in view.spend(now - 900, by="model").totals] == ["scripted-1"]
    assert view.spend(now - 900, now - 800).total.calls == 0
    with pytest.raises(ValueError, match="app, agent, model, user"):
        view.spend(0, by="moon")
    assert json.loads(json.dumps(plain(by_user)))["total"]["usd"] == f"{by_user.total.usd:f}"

    story = view.story(trip["id"])
    assert story is not None
    assert story.usd == Decimal("0.004") * trip["model_calls"]
    assert story.later_usd == 0
    assert len([row for row in story.rows if row.kind == "model"]) == trip["model_calls"]
    assert story.projection is not None
    assert story.projection.more_usd == Decimal("0.004") * (500 - trip["model_calls"])
    assert story.projection.total_usd == 2
    assert story.repeats[0].name == "parse_document"
    assert view.unreadable.total == 0


def test_a_cap_of_0_is_shown_as_a_limit_of_0_and_not_as_used_up(place: Any, view: StoreView) -> None:
    plugin = guard(place.url, budgets=[Budget(usd=lambda scope: 0, per="user")])
    trip = healthy(plugin, user_id="alice").trips[0]
    assert plugin.flush(10)
    (row,) = [row for row in view.budgets() if row.scope == "user:app/alice"]
    assert (row.limit, row.spent, row.share, row.closed) == (0, 0, 0.0, False)
    story = view.story(trip.id)
    assert story is not None
    assert story.why[0] == "user:app/alice had spent $0.00 and reserved $0.00 of its $0.00."
    assert story.command == "", "as much again as nothing is nothing"
    ran = CliRunner().invoke(main, ["status", "--store", place.url])
    assert (ran.exit_code, "user:app/alice" in ran.stdout) == (0, True)
    assert [status.limit for status in plugin.extend("user:app/alice", usd=1)] == [1]
    assert healthy(plugin, user_id="alice").trips == []
    (row,) = [row for row in view.budgets() if row.scope == "user:app/alice"]
    assert (row.limit, row.granted, row.spent) == (0, 1, Decimal("0.012"))


def test_a_run_is_shown_while_it_runs(place: Any, view: StoreView) -> None:
    plugin = guard(place.url, max_usd=2)
    with Alive(plugin, user_id="carol"):
        assert eventually(lambda: view.running() and view.running()[0].spent_usd)
        (row,) = view.running()
        assert (row.user, row.app, row.stopped, row.spent_usd) == ("carol", "app", None, Decimal("0.004"))
        assert row.silent_s < 10
        assert any(budget.scope == f"run:{row.run}" for budget in view.budgets())
        assert [figures.name for figures in view.spend(view.now() - 60, by="user").totals] == ["carol"], (
            "before its end is recorded"
        )
    assert view.running() == []


def test_stops_and_breakers_in_force_are_told(place: Any, view: StoreView) -> None:
    plugin = guard(place.url)
    assert (view.stops(), view.breakers()) == ([], [])
    plugin.guard.operator_stops.throw("user:app/alice", "ann", "looking into it")
    for number in range(5):
        plugin.guard.breakers.report("fetch", Permit(0), False, 0.0, f"run {number}")
    plugin.guard.breakers.report("send", Permit(0), False, 0.0, "run 1")
    assert plugin.flush(10)
    (stop,) = view.stops()
    assert (stop.scope, stop.actor, stop.reason) == ("user:app/alice", "ann", "looking into it")
    assert [(row.tool, row.state, row.failures, row.runs) for row in view.breakers()] == [
        ("fetch", "open", 0, 0),
        ("send", "closed", 1, 1),
    ]


def test_a_shadow_stop_is_marked_and_what_came_after_it_is_told_apart(place: Any, view: StoreView) -> None:
    plugin = guard(place.url, mode="shadow")
    runaway(plugin, user_id="alice")
    trip = view.trips()[-1]
    assert trip["shadow"] is True
    story = view.story(trip["id"])
    assert story is not None
    assert story.usd is not None
    assert story.later_usd > 0
    assert story.usd + story.later_usd == Decimal("0.004") * 60


def test_what_cannot_be_read_is_counted_and_the_rest_is_shown(place: Any, view: StoreView) -> None:
    plugin = guard(place.url)
    runaway(plugin, user_id="alice")
    run_id = view.trips()[0]["run_id"]
    session = place.connect()
    for kind in ("call", "trip", "steps"):
        for text in ("{", "[]" if kind != "steps" else "{}", '"x"', "null"):
            session.append(kind, run_id, text)
    session.append(
        "call", run_id, '{"usd": "NaN", "input": -5, "output": 1e99, "agent": 7, "app": ["x"], "estimated": "yes"}'
    )
    session.append("call", run_id, '{"usd": true}')
    session.beat("broken", "w", "not json")
    session.beat("strange", "w", '{"seconds": "long", "spent_usd": "1e999", "model_calls": null}')
    session.close()
    assert len(view.trips()) == 1
    assert view.unreadable.counts["trip"] == 4
    assert view.spend(0, by="agent").total.unpriced == 2
    assert view.unreadable.counts["call"] == 4
    assert {row.run for row in view.running()} == {"broken", "strange"}
    story = view.story(view.trips()[0]["id"])
    assert story is not None
    assert view.unreadable.counts["story"] == 8
    assert story.unpriced == 2
    assert story.projection is None, "the last calls have no price"


def test_a_control_document_that_cannot_be_read_is_no_stop_and_no_error(place: Any, view: StoreView) -> None:
    session = place.connect()
    session.put("control", 0, "[1, 2")
    session.close()
    assert (view.stops(), view.breakers()) == ([], [])
    assert view.unreadable.counts["control"] == 1


def test_calls_are_read_once_and_a_correction_replaces_what_it_corrects(
    place: Any, view: StoreView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runguard.view.store._FIRST_LOOK", 8)
    session = place.connect()
    told = {"agent": "a", "model": "m", "app": "x", "user": "u", "input": 10, "output": 5}
    for number in range(30):
        session.append("call", "r", json.dumps({**told, "id": f"{number}", "usd": "0.01"}))
    assert view.spend(0).total.calls == 30
    session.append("call", "r", json.dumps({**told, "id": "7", "usd": "0.05", "estimated": True}))
    session.append("call", "r", json.dumps({**told, "id": "30", "usd": None}))
    total = view.spend(0).total
    assert (total.calls, total.usd, total.unpriced, total.estimated) == (31, Decimal("0.34"), 1, 1)
    for number in range(60):
        session.append("call", "other", json.dumps({**told, "id": f"{number}", "user": "v", "usd": "0.001"}))
    assert [(figures.name, figures.calls) for figures in view.spend(0, by="user").totals] == [("u", 31), ("v", 60)]
    assert view.spend(0, by="user").totals == StoreView(place.url).spend(0, by="user").totals
    session.close()


def test_the_dearest_names_stand_for_themselves_and_the_rest_together(place: Any, view: StoreView) -> None:
    session = place.connect()
    for number in range(12):
        session.append(
            "call", "r", json.dumps({"id": f"{number}", "app": f"app {number:02}", "usd": f"{number}", "input": 1})
        )
    session.append("call", "r", json.dumps({"id": "x", "app": "others", "usd": "100"}))
    session.close()
    now = view.now()
    spend = view.spend(now - 60, now + 1, "app")
    assert spend.names == ("others", "app 11", "app 10", "app 09", "app 08", "app 07", "app 06", "others")
    assert [sum(row) for row in spend.usd] == [100, 11, 10, 9, 8, 7, 6, 15]
    assert len(spend.totals) == 13


def test_only_so_many_calls_are_read_and_that_is_said(
    place: Any, view: StoreView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runguard.view.store.CALLS_KEPT", 30)
    monkeypatch.setattr("runguard.view.store._FIRST_LOOK", 8)
    session = place.connect()
    for number in range(40):
        session.append("call", "r", json.dumps({"id": f"{number}", "app": "x", "usd": "1"}))
    spend = view.spend(0)
    assert (spend.total.calls, spend.capped_at) == (30, 30)
    session.append("call", "r", json.dumps({"id": "new", "app": "y", "usd": "1"}))
    session.close()
    spend = view.spend(0)
    assert (spend.total.calls, spend.capped_at) == (30, 30)
    assert [figures.name for figures in spend.totals] == ["x", "y"]
    assert view.spend(view.now()).capped_at is None


# ---- files ----------------------------------------------------------------------------------------------------------


def test_a_store_that_is_not_there_is_told_and_not_made(tmp_path: Path) -> None:
    view = StoreView(f"sqlite:///{tmp_path}/none.db")
    with pytest.raises(StoreError, match="no such store"):
        view.budgets()
    assert list(tmp_path.iterdir()) == []
    guard(f"sqlite:///{tmp_path}/none.db").guard.check_store()
    assert view.budgets() == []
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(StoreError, match="no such store"):
        view.budgets()


def test_memory_cannot_be_looked_at() -> None:
    with pytest.raises(PolicyError, match="ends with its process"):
        StoreView("memory")


def test_a_look_at_a_file_changes_nothing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/guard.db"
    plugin = guard(url)
    runaway(plugin)
    session = SqliteStore(url).connect(5)
    session.reserve("lost", 0.001, [Line("k", "app:x", None, None, None, (1_000, 1_000, 1_000))], (7, 7, 1))
    session.close()
    with sqlite3.connect(tmp_path / "guard.db") as db:
        db.execute("DROP INDEX records_about")  # a file from before there was one
    db.close()
    for beside in tmp_path.glob("guard.db-[qn]*"):
        beside.unlink()
    view = StoreView(url)
    assert view.story(view.trips()[0]["id"]) is not None
    assert [row.reserved for row in view.budgets() if row.scope == "app:x" and row.unit == "calls"] == [1], (
        "its time is up, and nobody charged it"
    )
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        view._open().append("call", "r", "{}")
    view.close()
    assert not list(tmp_path.glob("guard.db-[qn]*")), "it stands in no line of writers"
    with sqlite3.connect(tmp_path / "guard.db") as db:
        assert db.execute("SELECT state FROM holds WHERE id = 'lost'").fetchall() == [("open",)]
        assert db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'records_about'").fetchone() == (0,)
    db.close()


def test_a_file_that_was_replaced_is_looked_at_anew(tmp_path: Path) -> None:
    for name in ("one", "two"):
        session = SqliteStore(f"sqlite:///{tmp_path}/{name}.db").connect(5)
        session.append("trip", name, json.dumps({"id": name, "rule": "budget"}))
        session.close()
    view = StoreView(f"sqlite:///{tmp_path}/one.db")
    assert [trip["id"] for trip in view.trips()] == ["one"]
    (tmp_path / "two.db").replace(tmp_path / "one.db")
    assert [trip["id"] for trip in view.trips()] == ["two"]
    view.close()
    (tmp_path / "empty.db").touch()
    with pytest.raises(StoreError, match="the store is empty"):
        StoreView(f"sqlite:///{tmp_path}/empty.db").trips()


# ---- stops that are not about repetition ----------------------------------------------------------------------------


def test_a_budgets_stop_is_told_in_dollars_and_costs_what_its_own_run_cost(place: Any, view: StoreView) -> None:
    plugin = guard(place.url, budgets=[Budget(usd=0.03, per="user", window="1d")])
    healthy(plugin, 1, user_id="a b")
    healthy(plugin, 9, user_id="a b")
    (trip,) = view.trips()
    story = view.story(trip["id"])
    assert story is not None
    assert story.why[0] == "user:app/a b had spent $0.02 and reserved $0.00 of its $0.03."
    assert story.command.startswith("runguard extend 'user:app/a b' ")
    assert story.command.endswith(" --usd 0.03")
    refused = [row for row in story.rows if row.kind == "model"][-1]
    assert (refused.outcome, refused.usd) == ("refused", Decimal(0))
    (decision,) = (row for row in story.rows if row.decision == "stop")
    assert decision.outcome.endswith("with this call, limit $0.03")
    assert trip["spent_usd"] != "0.012"
    assert story.usd == view.costs([trip])[trip["id"]] == Decimal("0.012"), "not what the budget's scope has spent"


def test_an_operators_stop_is_told_with_who_and_why(place: Any, view: StoreView) -> None:
    plugin = guard(place.url)
    plugin.guard.operator_stops.throw("user:app/alice", "root", "looking; in depth")
    healthy(plugin, user_id="alice")
    (trip,) = view.trips()
    story = view.story(trip["id"])
    assert story is not None
    assert (story.why, story.repeats) == (("user:app/alice was stopped by root: looking; in depth",), ())
    assert story.command.startswith("runguard resume user:app/alice")
    assert [(row.outcome, row.usd) for row in story.rows if row.kind == "model"] == [("refused", Decimal(0))]
    assert (story.rows[-1].decision, story.rows[-1].outcome) == ("stop", "")
    assert story.usd == view.costs([trip])[trip["id"]] == 0


def test_without_a_journal_a_story_has_the_model_calls(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/guard.db"
    runaway(guard(url, journal=False))
    view = StoreView(url)
    (trip,) = view.trips()
    story = view.story(trip["id"])
    view.close()
    assert story is not None
    assert (story.source, len(story.rows), story.usd) == (
        "calls",
        trip["model_calls"],
        Decimal("0.004") * trip["model_calls"],
    )
