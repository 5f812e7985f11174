"""Prompts that grow with the history of a session: the warning, and the limit that holds across turns."""

import logging
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent, ParallelAgent
from google.adk.apps import App
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService

from runguard import Budget
from runguard.adk import RunGuardPlugin
from runguard.alerts import Alert
from runguard.core.events import RunInfo
from runguard.engine import runs as session_growth
from runguard.engine.guard import Guard
from runguard.engine.runs import SessionGrowths
from runguard.errors import PolicyError
from runguard.ledger.ledger import StoreOutage
from runguard.ledger.sqlite import SqliteSession
from runguard.policy import Policy
from runguard.testing import FakeClock, ScriptedModel, call, text
from tests.kit.adk_runs import play
from tests.kit.rule_agents import Tool, agent


def look_up(key: int) -> dict[str, int]:
    """Look something up."""
    return {"value": key}


def runner_of(agent: Any, plugin: RunGuardPlugin) -> Runner:
    return Runner(app=App(name="app", root_agent=agent, plugins=[plugin]), session_service=InMemorySessionService())


# ---- the warning ----------------------------------------------------------------------------------------------------


async def test_growth_is_logged_as_a_warning_and_sent_to_alerts_once_per_session(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[Alert] = []
    plugin = RunGuardPlugin(alerts=heard.append)
    model = ScriptedModel(
        lambda n, _: call("look_up", key=n) if n % 30 else text("done"), prompt_tokens=lambda n: 1_000 * (1 + n % 30)
    )
    runner = runner_of(LlmAgent(name="researcher", model=model, tools=[look_up]), plugin)
    with caplog.at_level(logging.INFO, logger="runguard"):
        for turn in range(2):
            await play(None, f"turn {turn}", runner=runner)
    assert model.calls == 60
    lines = [record for record in caplog.records if "growth" in record.getMessage()]
    assert [record.levelname for record in lines] == ["WARNING"]
    assert "researcher" in lines[0].getMessage()
    assert plugin.flush()
    (alert,) = [alert for alert in heard if alert.kind == "growth"]
    assert (alert.severity, alert.facts["session"], alert.facts["agent"]) == ("warning", "s1", "researcher")
    assert plugin.trips == []


async def test_each_session_is_warned_of_by_itself() -> None:
    heard: list[Alert] = []
    plugin = RunGuardPlugin(alerts=heard.append)
    for session in ("s1", "s2"):
        model = ScriptedModel(
            lambda n, _: call("look_up", key=n) if n < 20 else text("done"), prompt_tokens=lambda n: 1_000 * n
        )
        await play(LlmAgent(name="researcher", model=model, tools=[look_up]), plugins=[plugin], session_id=session)
    assert plugin.flush()
    assert [alert.facts["session"] for alert in heard if alert.kind == "growth"] == ["s1", "s2"]


# ---- across turns ---------------------------------------------------------------------------------------------------


def research(n: int) -> int:
    """Prompt tokens of the n-th call in a session whose history grows: three times the first five at the 22nd."""
    return 1_100 + 200 * n


class Chat:
    """A session in which every user message costs one model call, with the whole history in its prompt."""

    def __init__(self, *plugins: RunGuardPlugin, agent: Any = None, model: ScriptedModel | None = None) -> None:
        self.model = model or ScriptedModel(lambda n, _: text(f"answer {n}"), prompt_tokens=research)
        self.agent = agent or LlmAgent(name="researcher", model=self.model)
        service = InMemorySessionService()
        apps = [App(name="app", root_agent=self.agent, plugins=[plugin]) for plugin in plugins] or [
            App(name="app", root_agent=self.agent)
        ]
        self.runners = [Runner(app=app, session_service=service) for app in apps]
        self.plugins = plugins

    async def turns(self, count: int, session: str = "s1") -> list[Any]:
        """The runners take turns, as workers behind a load balancer do."""
        played = []
        for turn in range(count):
            played.append(
                await play(
                    None,
                    f"question {turn}",
                    runner=self.runners[turn % len(self.runners)],
                    session_id=session,
                    catch=True,
                )
            )
            for plugin in self.plugins:
                assert plugin.flush()
        return played


async def test_the_default_only_warns_across_turns(caplog: pytest.LogCaptureFixture) -> None:
    plugin = RunGuardPlugin()
    chat = Chat(plugin)
    await chat.turns(40)
    assert (chat.model.calls, plugin.trips) == (40, [])
    assert len([record for record in caplog.records if "runguard.warn: growth" in record.getMessage()]) == 1


async def test_workers_that_share_a_store_go_on_with_the_same_baseline(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/guard.db"
    chat = Chat(*(RunGuardPlugin(max_event_cost_ratio=3.0, store=store) for _ in range(4)))
    await chat.turns(40)
    assert chat.model.calls == 22


async def test_without_an_answer_of_the_store_a_run_has_no_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "max_event_cost_ratio": 3.0,
        "store": f"sqlite:///{tmp_path}/guard.db",
        "on_outage": "open",
        "rules": {"resubmission": False},  # it reads the same records, and waits until they can be read
    }
    chat = Chat(*(RunGuardPlugin(**settings) for _ in range(2)))

    def away(*_: Any, **__: Any) -> Any:
        raise StoreOutage("away")

    monkeypatch.setattr(SqliteSession, "about", away)
    turns = await chat.turns(30)
    assert chat.model.calls == 30, "each worker has seen fifteen calls, too few for the ratio"
    assert [turn.error for turn in turns] == [None] * 30


async def test_a_session_goes_on_after_its_history_was_cut() -> None:
    chat = Chat(
        RunGuardPlugin(max_event_cost_ratio=3.0),
        model=ScriptedModel(lambda n, _: text("word " * 200), prompt_tokens=lambda n: 1_000 if n > 22 else research(n)),
    )
    turns = await chat.turns(24)
    assert (chat.model.calls, len(turns[-1].trips)) == (22, 1)
    service = chat.runners[0].session_service
    assert isinstance(service, InMemorySessionService)
    service.sessions["app"]["u1"]["s1"].events.clear()
    turns = await chat.turns(12)
    assert (chat.model.calls, turns[-1].trips) == (34, [])


async def test_branches_and_agents_keep_baselines_of_their_own() -> None:
    models = [ScriptedModel([text("done")], prompt_tokens=size) for size in (500, 50_000)]
    root = ParallelAgent(
        name="both", sub_agents=[LlmAgent(name=f"a{n}", model=model) for n, model in enumerate(models)]
    )
    plugin = RunGuardPlugin(max_event_cost_ratio=3.0)
    chat = Chat(plugin, agent=root)
    await chat.turns(12)
    assert ([model.calls for model in models], plugin.trips) == ([12, 12], [])


def test_what_is_kept_of_sessions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_growth, "SESSIONS_KEPT", 10)
    growths = SessionGrowths(Policy.validated({}, ""), Guard(Policy.validated({}, "")).accounts.ledger)
    first = growths.of(RunInfo("run", session="s0"))
    for number in range(50):
        growths.of(RunInfo("run", session=f"s{number}"))
    assert len(growths._sessions) == 10
    assert growths.of(RunInfo("run", session="s0")) is not first


# ---- Forecasts of runs and budgets on real ADK, as ``snapshot()`` shows them


PRICES = {"scripted-1": {"input": 10, "output": 0, "tiers": [{"above": 200_000, "input": 20, "output": 0}]}}
MODELS = {"scripted-1": {"context_window": 1_000_000, "max_output_tokens": 1_000}}
CALLS = 20


def grows(number: int) -> int:
    return 10_000 + 2_000 * number


async def forecast(prompts: Any, **policy: Any) -> tuple[dict[str, Any], RunGuardPlugin]:
    """The run's facts in the snapshot that its tool takes in the middle of it."""
    seen: list[dict[str, Any]] = []

    def look(n: int) -> dict[str, int]:
        seen.append(plugin.snapshot()["runs"][0])
        return {"step": n}

    model = ScriptedModel(
        [*[call("look", q=n) for n in range(CALLS)], text("done")], prompt_tokens=prompts, output_tokens=0
    )
    plugin = RunGuardPlugin(prices=PRICES, models=MODELS, **policy)
    result = await play(agent(model, Tool("look", look)), plugins=[plugin])
    assert result.texts == ["done"]
    assert [one["forecast"] for one in seen[:11]] == [None] * 11
    assert all(one["forecast"] is not None for one in seen[11:])
    return seen[-1], plugin


async def test_a_growing_run_sees_its_cap_its_window_and_a_higher_price_ahead() -> None:
    run, _ = await forecast(grows, max_usd=20)
    found = run["forecast"]
    assert (found["calls"], found["estimated"]) == (CALLS, True)
    spent = sum(grows(n) for n in range(1, CALLS + 1)) * Decimal("0.00001")
    assert run["spent_usd"] == spent
    cap, room, fits = found["cap"], 20 - spent, 0
    while room >= (price := grows(CALLS + 1 + fits) * Decimal("0.00001")):
        room, fits = room - price, fits + 1
    assert (cap["unit"], cap["limit"], cap["calls_left"]) == ("usd", 20, fits)
    assert cap["usd"] == 20 - spent - room
    last = grows(CALLS)
    assert found["tier"] == {
        "agent": "worker",
        "model": "scripted-1",
        "unit": "tokens",
        "limit": 200_000,
        "calls_left": (200_000 - last) // 2_000,
        "usd": sum(grows(n) for n in range(CALLS + 1, CALLS + 1 + (200_000 - last) // 2_000)) * Decimal("0.00001"),
    }
    assert found["window"]["calls_left"] == (1_000_000 - last) // 2_000


async def test_a_run_with_flat_prompts_has_a_cap_but_no_window_ahead() -> None:
    run, _ = await forecast(10_000, max_model_calls=30)
    found = run["forecast"]
    assert (found["window"], found["tier"]) == (None, None)
    assert (found["cap"]["unit"], found["cap"]["calls_left"], found["cap"]["usd"]) == ("calls", 10, Decimal(1))


async def test_a_run_that_compacts_its_history_goes_on_at_its_mean() -> None:
    run, _ = await forecast(lambda n: 10_000 + 10_000 * (n % 10), max_usd=20)
    found = run["forecast"]
    assert (found["window"], found["tier"]) == (None, None)
    assert found["cap"]["calls_left"] == (20 - run["spent_usd"]) * CALLS // run["spent_usd"]


async def test_a_days_budget_is_forecast_from_its_spending_so_far() -> None:
    clock = FakeClock()
    clock.now = 1_000_000 * 86_400 + 6 * 3_600.0  # six o'clock
    budgets = [Budget(usd=5, per="app", window="1d")]
    _, plugin = await forecast(10_000, budgets=budgets, clock=clock)
    (found,) = plugin.snapshot()["forecasts"]
    spent = Decimal("0.1") * (CALLS + 1)
    assert (found["scope"], found["window"], found["unit"], found["estimated"]) == ("app:app", "1d", "usd", True)
    assert found["calls"] == CALLS + 1
    assert found["used_up_at"] == clock.now + float((5 - spent) / spent) * 6 * 3_600
    clock.advance(12 * 3_600)
    (later,) = plugin.snapshot()["forecasts"]
    assert (later["used_up_at"], later["share_at_end"]) == (None, round(float(spent) / 5 * 24 / 18, 4))


# ---- Alerts on budgets that are spent too fast to last, on real ADK with a clock moved by hand


PRICES_BURN_RATE_LIVE = {"scripted-1": {"input": 10, "output": 0}}
DAY = 86_400.0
MIDNIGHT = 20_000 * DAY


class BurningApp:
    """One plugin over many runs. A call costs 10 cents."""

    def __init__(self, **policy: Any) -> None:
        self.clock, self.alerts = FakeClock(MIDNIGHT), list[Alert]()
        budgets = [Budget(usd=10, per="app", window="1d", thresholds=[], burn_alert=True)]
        values = {
            "prices": PRICES_BURN_RATE_LIVE,
            "budgets": budgets,
            "clock": self.clock,
            "alerts": self.alerts.append,
            **policy,
        }
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
    app = BurningApp()
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
    steady = BurningApp()
    await steady.spend_each_hour(range(24), 4)  # 9.60 of 10 dollars
    assert steady.kinds() == []
    burst = BurningApp()
    await burst.spend(9, 15)
    await burst.spend_each_hour(range(10, 24), 1)
    assert burst.kinds() == []


async def test_in_shadow_mode_it_is_reported_too() -> None:
    app = BurningApp(mode="shadow")
    await app.spend_each_hour((10, 11), 22)
    assert app.kinds() == ["burn_rate"]


def test_the_setting_needs_a_window() -> None:
    with pytest.raises(PolicyError, match="without a window"):
        Budget(usd=10, per="app", burn_alert=True)
    with pytest.raises(PolicyError, match="burn_alert"):
        Budget(usd=10, per="app", window="1d", burn_alert="yes")  # type: ignore[arg-type]
    assert Budget.of({"usd": 10, "window": "1d", "per": "app", "burn_alert": True}).to_dict()["burn_alert"] is True
