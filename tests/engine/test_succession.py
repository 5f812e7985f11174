"""A policy is loaded again while the process goes on: what the new guard takes over from the old one."""

from pathlib import Path
from typing import Any

from runguard.core.events import ROOT_LANE, ModelCall, RunInfo
from runguard.engine.guard import Guard
from runguard.engine.resume import retire
from runguard.policy import Policy


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
