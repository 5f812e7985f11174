"""Prompts that grow with the history of a session: the warning, and the limit that holds across turns."""

import logging
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent, ParallelAgent
from google.adk.apps import App
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService

from runguard.adk import RunGuardPlugin
from runguard.alerts import Alert
from runguard.core.events import RunInfo
from runguard.engine import runs as session_growth
from runguard.engine.guard import Guard
from runguard.engine.runs import SessionGrowths
from runguard.ledger.ledger import StoreOutage
from runguard.ledger.sqlite import SqliteSession
from runguard.policy import Policy
from runguard.testing import ScriptedModel, call, text
from tests.kit.adk_runs import play


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
