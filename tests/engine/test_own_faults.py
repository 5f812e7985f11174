"""What the guard does after a fault of its own, by policy."""

from decimal import Decimal
from typing import Any

import pytest

from runguard import Budget
from runguard.core.events import ModelCall, RunInfo
from runguard.engine.guard import Guard
from runguard.ledger.ledger import StoreError, StoreOutage
from runguard.policy import Policy
from runguard.pricing.rates import Usage
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


# ---- A fault while a call is closed: it raises nothing, the fault is counted, and nothing stays reserved


PRICES = {"m": {"input": 1, "output": 4}}


def broken(*_: Any, **__: Any) -> None:
    raise RuntimeError("broken on purpose")


def opened(**policy: Any) -> Guard:
    guard = Guard(Policy(prices=PRICES, telemetry=False, max_usd=1, **policy))
    guard.start(RunInfo("run", "app", "u", "s"))
    return guard


async def charged(guard: Guard) -> Any:
    event = ModelCall("run", "", "agent", 1.0, "m", input_tokens=1_000, max_output_tokens=500)
    assert not await guard.reserve(event)
    return event.charge


def reserved(guard: Guard) -> Decimal:
    return sum((Decimal(status.reserved) for status in guard.accounts.budgets()), Decimal(0))


async def test_a_release_that_breaks_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = opened()
    charge = await charged(guard)
    monkeypatch.setattr(guard.accounts, "release", broken)
    guard.release(charge)
    assert guard.guard_errors == 1


async def test_a_journal_that_breaks_does_not_keep_a_reservation() -> None:
    guard = opened()
    charge = await charged(guard)
    journal: Any = type("Journal", (), {"add": broken})()
    guard.runs["run"].journal = journal
    guard.release(charge)
    assert (guard.guard_errors, reserved(guard)) == (1, Decimal(0))


async def test_an_estimate_that_breaks_books_what_was_held(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = opened()
    charge = await charged(guard)
    held = reserved(guard)
    monkeypatch.setattr(guard.accounts.expectations, "guess", broken)
    guard.abandon(charge, 10)
    assert (guard.guard_errors, reserved(guard)) == (1, Decimal(0))
    assert guard.accounts.spend()["usd"] == held > 0


async def test_a_settlement_that_breaks_books_what_was_held(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = opened()
    charge = await charged(guard)
    monkeypatch.setattr(guard.accounts, "settle", broken)
    guard.settle(charge, Usage(1_000, 500))
    assert (guard.guard_errors, reserved(guard)) == (1, Decimal(0))
    assert guard.accounts.spend()["usd"] == Decimal("0.003")


async def test_a_wait_of_the_provider_that_cannot_be_read_does_not_keep_a_call_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guard = opened()
    charge = await charged(guard)
    guard.sink.on("failed", "the test", broken)
    guard.abandon(charge, error=ValueError("429"), refused=True)
    assert (guard.guard_errors, reserved(guard), guard.accounts.spend()["usd"]) == (1, Decimal(0), 0)


async def test_a_late_report_of_a_run_that_began_anew_counts_for_the_budget_only() -> None:
    guard = Guard(Policy(prices=PRICES, telemetry=False, budgets=[Budget(usd=1, per="user")]))
    guard.start(RunInfo("run", "app", "u", "s"))
    charge = await charged(guard)
    guard.start(RunInfo("run", "app", "u", "s"))
    guard.settle(charge, Usage(1_000, 500))
    assert guard.runs["run"].spend.prompt_tokens == 0
    assert [status.spent for status in guard.accounts.budgets()] == [Decimal("0.003")]
