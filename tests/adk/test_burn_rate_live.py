"""Alerts on budgets that are spent too fast to last, on real ADK with a clock moved by hand."""

from collections.abc import Iterable
from typing import Any

import pytest

from runguard import Budget
from runguard.adk import RunGuardPlugin
from runguard.alerts import Alert
from runguard.errors import PolicyError
from runguard.testing import FakeClock, ScriptedModel, call, text
from tests.kit.adk_runs import play
from tests.kit.rule_agents import Tool, agent

PRICES = {"scripted-1": {"input": 10, "output": 0}}
DAY = 86_400.0
MIDNIGHT = 20_000 * DAY


class App:
    """One plugin over many runs. A call costs 10 cents."""

    def __init__(self, **policy: Any) -> None:
        self.clock, self.alerts = FakeClock(MIDNIGHT), list[Alert]()
        budgets = [Budget(usd=10, per="app", window="1d", thresholds=[], burn_alert=True)]
        values = {"prices": PRICES, "budgets": budgets, "clock": self.clock, "alerts": self.alerts.append, **policy}
        self.plugin = RunGuardPlugin(**values)

    async def spend(self, hour: float, calls: int) -> None:
        self.clock.now = MIDNIGHT + hour * 3_600
        script = [*[call("step", q=n) for n in range(calls - 1)], text("done")]
        model = ScriptedModel(script, prompt_tokens=10_000, output_tokens=0)
        result = await play(agent(model, Tool("step", lambda n: {"step": n})), plugins=[self.plugin])
        assert result.texts == ["done"]

    async def spend_each_hour(self, hours: Iterable[int], calls: int) -> None:
        for hour in hours:
            await self.spend(hour, calls)

    def kinds(self) -> list[str]:
        assert self.plugin.flush(10)
        return [alert.kind for alert in self.alerts if not alert.resolved]


async def test_a_budget_that_will_not_last_is_reported_once_per_period(caplog: pytest.LogCaptureFixture) -> None:
    app = App()
    await app.spend(10, 22)
    assert app.kinds() == []  # the slow window does not burn yet
    await app.spend(11, 22)
    assert app.kinds() == ["burn_rate"]
    facts: dict[str, Any] = dict(app.alerts[0].facts)
    assert (facts["scope"], facts["unit"], facts["window"], facts["estimated"]) == ("app:app", "usd", "1d", True)
    assert facts["used_up_at"] < facts["ends"] == MIDNIGHT + DAY
    assert facts["fast"] > facts["slow"] > 1
    assert "will be used up in about" in app.alerts[0].text
    assert [line for line in caplog.messages if "will be used up in about" in line and line.startswith("runguard.warn")]
    await app.spend_each_hour((12, 13), 22)
    assert app.kinds() == ["burn_rate"]
    app.plugin.extend("app:app", usd=5)
    await app.spend(14, 22)
    assert app.kinds() == ["burn_rate"] * 2  # more was granted, and that will not last either
    await app.spend_each_hour((34, 35), 22)
    assert app.kinds() == ["burn_rate"] * 3  # the next day


async def test_a_steady_day_and_a_burst_that_is_over_are_not_reported() -> None:
    steady = App()
    await steady.spend_each_hour(range(24), 4)  # 9.60 of 10 dollars
    assert steady.kinds() == []
    burst = App()
    await burst.spend(9, 15)
    await burst.spend_each_hour(range(10, 24), 1)
    assert burst.kinds() == []


async def test_in_shadow_mode_it_is_reported_too() -> None:
    app = App(mode="shadow")
    await app.spend_each_hour((10, 11), 22)
    assert app.kinds() == ["burn_rate"]


def test_the_setting_needs_a_window() -> None:
    with pytest.raises(PolicyError, match="without a window"):
        Budget(usd=10, per="app", burn_alert=True)
    with pytest.raises(PolicyError, match="burn_alert"):
        Budget(usd=10, per="app", window="1d", burn_alert="yes")  # type: ignore[arg-type]
    assert Budget.of({"usd": 10, "window": "1d", "per": "app", "burn_alert": True}).to_dict()["burn_alert"] is True
