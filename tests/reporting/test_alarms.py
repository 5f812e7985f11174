"""What people are told of a guard's work: each thing once, over all that share a store, and when it is over."""

import json
import sqlite3
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import runguard
from runguard import Budget, BudgetExceededError, RunStoppedError, UnpricedModelError, guard, run
from runguard.alerts import Alert
from runguard.calls.function_calls import Caller
from runguard.calls.functions import _settings
from runguard.reporting import delivery
from runguard.testing import FakeClock
from tests.kit.alert_servers import Server
from tests.kit.commands import runguard as runguard_command

TRIPS = ("trip",)


class Heard:
    """A receiver that remembers."""

    def __init__(self) -> None:
        self.alerts: list[Alert] = []

    def __call__(self, alert: Alert) -> None:
        self.alerts.append(alert)

    def of(self, *kinds: str, resolved: bool = False) -> list[Alert]:
        return [alert for alert in self.alerts if alert.kind in kinds and alert.resolved is resolved]


def caller(heard: Heard, **keywords: Any) -> Caller:
    return Caller("model", _settings({"alerts": heard, **keywords}))


def paid(usd: float = 0.1) -> dict[str, float]:
    return {"usd": usd}


def spend_all(call: Any, times: int = 30, **who: Any) -> None:
    """Calls as long as there is money, and some more."""
    with run(**who):
        for _ in range(times):
            try:
                call()
            except RunStoppedError:
                continue


def settled(call: Any) -> None:
    assert call.flush(5)


def url(tmp_path: Path, store: str) -> str:
    return "memory" if store == "memory" else f"sqlite:///{tmp_path}/guard.db"


# ---- budgets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_a_spent_budget_is_told_once_for_its_period(tmp_path: Path, store: str) -> None:
    heard, clock = Heard(), FakeClock(86_400.0 * 20_000)
    moved: dict[str, Any] = {"clock": clock} if store == "memory" else {}
    call = guard(paid, budget=Budget(usd=1, per="user", window="1d"), alerts=heard, store=url(tmp_path, store), **moved)
    for session in ("s1", "s2", "s3"):
        spend_all(call, user="alice", session=session, app="chat")
    settled(call)
    (told,) = heard.of(*TRIPS)
    assert told.severity == "critical"
    assert told.facts["scope"] == "user:chat/alice"
    assert "$1.00 of $1.00 of user:chat/alice are spent" in told.text
    assert [alert.text.partition("is spent: ")[2] for alert in heard.of("threshold")] == [
        "$0.50 of $1.00",
        "$0.80 of $1.00",
        "$1.00 of $1.00",
    ]
    assert [alert.facts["percent"] for alert in heard.of("threshold")] == [0.5, 0.8, 0.95]
    spend_all(call, user="bob", session="s", app="chat")
    settled(call)
    assert [alert.facts["scope"] for alert in heard.of(*TRIPS)] == ["user:chat/alice", "user:chat/bob"]
    if store == "memory":
        clock.advance(86_400)
        spend_all(call, user="alice", session="s4", app="chat")
        settled(call)
        assert [alert.facts["scope"] for alert in heard.of(*TRIPS)] == [
            "user:chat/alice",
            "user:chat/bob",
            "user:chat/alice",
        ]


def test_an_alert_to_slack_names_user_and_model_and_the_command_that_shows_the_trip(
    tmp_path: Path, serve: Callable[..., Server]
) -> None:
    server = serve()
    settings = {"slack_webhook": server.url("/services/T/B/X"), "allow_private": True}
    call = guard(
        lambda model: {"usd": 0.5},
        budget=Budget(usd=1, per="user"),
        alerts=settings,
        store=url(tmp_path, "sqlite"),
        name="clerk",
    )
    spend_all(partial(call, model="gpt-5-mini"), 3, user="alice", app="chat")
    settled(call)
    (trip,) = call.trips
    (message,) = [text for _, _, body, _ in server.requests if "stopped" in (text := json.loads(body)["text"])]
    assert "of user alice" in message
    assert "on gpt-5-mini" in message
    assert message.endswith(f"Details: runguard trips show {trip.id}")
    facts = next(
        text
        for _, _, body, _ in server.requests
        if "rule: " in (text := json.loads(body)["blocks"][1]["elements"][0]["text"])
    )
    assert "user: alice\n" in facts
    assert "null" not in facts, "a fact that is not known is left out"
    shown = runguard_command("trips", "show", trip.id, "--store", url(tmp_path, "sqlite"))
    assert shown.exit_code == 0, shown.output


def test_an_alert_about_a_store_in_memory_names_no_command_that_cannot_work() -> None:
    heard = Heard()
    call = guard(paid, budget={"max_usd": 0.2}, alerts=heard)
    spend_all(call, 5)
    settled(call)
    (told,) = heard.of(*TRIPS)
    assert "trips show" not in told.text


def test_a_stop_whose_numbers_say_nothing_is_told_in_words() -> None:
    heard = Heard()
    call = guard(
        lambda model: {"input_tokens": 1, "output_tokens": 1}, budget={"max_usd": 1}, alerts=heard, name="clerk"
    )
    call(model="nobody-sells-this")
    with pytest.raises(UnpricedModelError):
        call(model="nobody-sells-this")
    settled(call)
    (told,) = heard.of(*TRIPS)
    assert told.text == "RunGuard stopped clerk: unpriced, the price of a call is not known"


def test_workers_that_share_a_store_tell_it_once(tmp_path: Path) -> None:
    heard, store = Heard(), url(tmp_path, "sqlite")
    workers = [guard(paid, budget=Budget(usd=1, per="user"), alerts=heard, store=store) for _ in range(4)]
    for worker in workers:
        spend_all(worker, user="alice", app="chat")
        settled(worker)
    assert len(heard.of(*TRIPS)) == 1
    assert len(heard.of("threshold")) == 3


def test_an_extension_closes_the_incident_and_the_next_stop_opens_one(tmp_path: Path) -> None:
    for store in ("memory", "sqlite"):
        heard = Heard()
        call = guard(paid, budget=Budget(usd=1, per="user"), alerts=heard, store=url(tmp_path, store))
        spend_all(call, user="alice", app="chat")
        call.extend("user:chat/alice", usd=1)
        settled(call)
        (over,) = heard.of("trip", resolved=True)
        assert over.text == "the budget of user:chat/alice is now $2.00"
        (told,) = heard.of("trip")
        assert over.key == told.key
        spend_all(call, user="alice", app="chat")
        settled(call)
        assert len(heard.of("trip")) == 2


@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_a_loop_in_many_runs_is_told_once_an_hour_and_the_others_are_counted_and_listed(
    tmp_path: Path, store: str
) -> None:
    heard, clock = Heard(), FakeClock()
    call = guard(
        lambda: {"usd": 0.01, "sig": "search"},
        loop={"repeats": 3},
        alerts=heard,
        clock=clock,
        name="agent",
        store=url(tmp_path, store),
    )
    for n in range(20):
        spend_all(call, 5, user=f"user{n}", app="chat")
    settled(call)
    assert len(call.trips) == 20
    told, others = heard.of(*TRIPS)
    assert (told.facts["rule"], told.facts["tool"], told.facts["user"]) == ("cycle", "search", "user0")
    assert told.key == others.key, "one incident"
    assert others.text.startswith("RunGuard stopped 19 more runs of agent: cycle of tool search: user1 (run ")
    assert [f"user{n} (run {trip.run_id})" in others.text for n, trip in enumerate(call.trips)] == [
        1 <= n <= 10 for n in range(20)
    ]
    last = f". The last one: runguard trips show {call.trips[-1].id}" if store == "sqlite" else ""
    assert others.text.endswith(f" and 9 more{last}")
    assert (others.facts["runs"], others.facts["last_trip"]) == (19, call.trips[-1].id)
    clock.advance(3_600)
    spend_all(call, 5, app="chat")
    settled(call)
    assert len(heard.of(*TRIPS)) == 3


def test_the_others_are_told_after_a_minute_and_then_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_GATHER_S", 0.1)
    heard, started = list[tuple[float, Alert]](), time.monotonic()
    call = guard(
        lambda: {"usd": 0.01, "sig": "search"},
        loop={"repeats": 3},
        alerts=lambda alert: heard.append((time.monotonic(), alert)),
        clock=FakeClock(),
    )
    while len(heard) < 4 and time.monotonic() < started + 20:
        spend_all(call, 4)
        time.sleep(0.005)
    pauses = [later[0] - before[0] for before, later in pairwise(heard)]
    assert [pause > 0.09 * 2**n for n, pause in enumerate(pauses[:3])] == [True] * 3
    settled(call)
    assert 1 + sum(int(str(alert.facts["runs"])) for _, alert in heard[1:]) == len(call.trips), "each is counted once"


def test_what_was_said_and_answered_is_in_no_alert() -> None:
    heard, secret = Heard(), "canary-7f3a"
    call = guard(
        lambda prompt: {"usd": 0.01, "sig": "search", "result": secret, "response": {"text": secret}},
        loop={"repeats": 2},
        budget={"max_usd": 1},
        alerts=heard,
    )
    for _ in range(4):
        try:
            call(secret)
        except RunStoppedError:
            continue
    settled(call)
    assert heard.alerts
    assert secret not in repr(heard.alerts)


def test_a_shadow_only_informs() -> None:
    heard = Heard()
    call = guard(paid, budget={"max_usd": 0.2}, alerts=heard, mode="shadow")
    spend_all(call, 5)
    settled(call)
    assert [(alert.severity, alert.facts["enforced"]) for alert in heard.of(*TRIPS)] == [("info", False)]
    assert "would have stopped" in heard.of(*TRIPS)[0].text


def test_nothing_is_told_when_it_is_off() -> None:
    heard = Heard()
    call = guard(paid, budget={"max_usd": 0.2}, alerts=heard, mode="off")
    spend_all(call, 5)
    assert heard.alerts == []


# ---- everything else ------------------------------------------------------------------------------------------------


def test_a_store_that_goes_away_is_told_once_and_when_it_is_back(tmp_path: Path) -> None:
    heard = Heard()
    call = guard(paid, budget={"max_usd": 100}, alerts=heard, store=f"sqlite:///{tmp_path}/guard.db", store_timeout=1)
    call()
    lock = sqlite3.connect(tmp_path / "guard.db", isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    for _ in range(3):
        with pytest.raises(runguard.GuardFailedError):
            call()
    lock.execute("ROLLBACK")
    lock.close()
    end = time.monotonic() + 10
    while call.spend()["calls"] < 2 and time.monotonic() < end:  # a store that was away is left alone for a moment
        try:
            call()
        except runguard.GuardFailedError:
            time.sleep(0.1)
    settled(call)
    assert [alert.severity for alert in heard.of("outage")] == ["critical"]
    assert len(heard.of("outage", resolved=True)) == 1


def test_a_breaker_is_told_when_it_opens_and_when_it_closes() -> None:
    heard, clock, broken = Heard(), FakeClock(), [True]

    def model() -> dict[str, float]:
        if broken[0]:
            raise ConnectionError("away")
        return paid()

    call = guard(model, breaker={"failures": 3, "reset_seconds": 60}, alerts=heard, clock=clock, name="gemini")
    for _ in range(5):
        with pytest.raises((ConnectionError, runguard.CircuitOpenError)):
            call()
    broken[0] = False
    clock.advance(61)
    call()
    settled(call)
    assert [alert.facts["tool"] for alert in heard.of("breaker")] == ["gemini"]
    assert len(heard.of("breaker", resolved=True)) == 1


def test_the_kill_switch_is_told_by_the_one_who_throws_it() -> None:
    heard = Heard()
    own = caller(heard)
    own.guard.operator_stops.throw("user:chat/alice", "ops", "runaway")
    own.guard.operator_stops.throw("user:chat/alice", "ops", "runaway")
    own.guard.operator_stops.release("user:chat/alice")
    assert own.guard.flush(5)
    assert [alert.facts["reason"] for alert in heard.of("kill_switch")] == ["runaway"]
    assert len(heard.of("kill_switch", resolved=True)) == 1


def test_a_receiver_that_fails_changes_nothing_and_is_counted() -> None:
    def broken(alert: Alert) -> None:
        raise RuntimeError("no")

    call = guard(paid, budget={"max_usd": 0.2}, alerts=broken, name="f")
    for _ in range(2):
        call()
    with pytest.raises(BudgetExceededError):
        call()
    settled(call)
    assert call.snapshot()["alerts"]["call"]["failed"] >= 1


def test_a_mistake_in_the_receivers_is_told_at_construction() -> None:
    with pytest.raises(runguard.PolicyError, match=r"alerts\.slack_webhok.*slack_webhook"):
        guard(paid, alerts={"slack_webhok": "https://hooks.slack.com/services/x"})
    with pytest.raises(runguard.PolicyError, match="NO_SUCH_VARIABLE"):
        guard(paid, alerts={"slack_webhook": "env:NO_SUCH_VARIABLE"})
