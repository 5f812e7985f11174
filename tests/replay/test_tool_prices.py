"""Prices of tools in replay: the policy's own, or what the store says was booked."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from runguard import ToolRule
from runguard.adk import RunGuardPlugin
from runguard.policy import Policy
from runguard.replay import open_sources, replay
from runguard.testing import ScriptedModel, call, text
from tests.kit.adk_runs import play
from tests.kit.rule_agents import Tool, agent

FREE = {"scripted-1": {"input": 0, "output": 0}}


async def _recorded(store: str, rule: ToolRule | None, times: int = 4) -> RunGuardPlugin:
    search = Tool("search", lambda n: {"credits": n})
    plugin = RunGuardPlugin(store=store, tools={"search": rule} if rule else {}, prices=FREE)
    script = [*[call("search", q=n) for n in range(times)], text("done")]
    await play(agent(ScriptedModel(script), search), plugins=[plugin])
    assert plugin.flush(10)
    return plugin


def _replayed(path: Path, **policy: Any) -> Any:
    (batch,) = replay(open_sources(str(path)), [Policy.validated({"prices": FREE, **policy}, "")])
    assert batch.faults.count == 0, batch.faults.first
    ((result,),) = batch.results
    return result


PER_CREDIT = ToolRule(price=lambda args, answer: answer["credits"] * 0.01, price_bound="0.04")
FIXED = ToolRule(price="0.02")


@pytest.mark.parametrize(("rule", "usd"), [(PER_CREDIT, "0.1"), (FIXED, "0.08"), (None, "0")])
async def test_what_was_booked_is_replayed(tmp_path: Path, rule: ToolRule | None, usd: str) -> None:
    plugin = await _recorded(f"sqlite:///{tmp_path}/guard.db", rule)
    assert plugin.spend()["usd"] == Decimal(usd)
    result = _replayed(tmp_path / "guard.db")
    assert (result.usd, result.model_calls, result.tool_calls) == (Decimal(usd), 5, 4)


@pytest.mark.parametrize("rule", [PER_CREDIT, FIXED, None])
async def test_another_price_and_another_cap_are_judged(tmp_path: Path, rule: ToolRule | None) -> None:
    await _recorded(f"sqlite:///{tmp_path}/guard.db", rule)
    result = _replayed(tmp_path / "guard.db", tools={"search": {"price": "0.5"}}, max_usd=1)
    assert result.usd == 2
    first = result.first("block")
    assert (first.rule, first.tool, first.step > 0) == ("budget", "search", True)
    stop = result.first("stop")
    assert (stop.rule, stop.after.nano) == ("budget", 500_000_000)


async def test_a_cap_meets_the_recorded_bound_of_a_function(tmp_path: Path) -> None:
    await _recorded(f"sqlite:///{tmp_path}/guard.db", PER_CREDIT)
    assert _replayed(tmp_path / "guard.db", max_usd="0.10").first("block") is None  # 0.06 and 0.04 fit
    assert _replayed(tmp_path / "guard.db", max_usd="0.09").first("block").tool == "search"
