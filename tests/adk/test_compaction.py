"""The model calls with which ADK compacts a session."""

import logging
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.apps.app import EventsCompactionConfig
from google.adk.apps.llm_event_summarizer import LlmEventSummarizer
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService

from runguard import Budget
from runguard.adk import RunGuardPlugin
from runguard.alerts import Alert
from runguard.testing import ScriptedModel, assert_stopped, call, text
from tests.kit.adk_runs import play
from tests.kit.contents import parts
from tests.kit.money import CALL_USD, agent
from tests.kit.outside_calls import PRICES, SMALL_USD, booked, small, two_prices


def _compacting(plugin: RunGuardPlugin, summarizer: ScriptedModel, **config: Any) -> tuple[Runner, ScriptedModel]:
    model = ScriptedModel([text("x")])
    compaction = EventsCompactionConfig(
        summarizer=LlmEventSummarizer(llm=summarizer), **{"compaction_interval": 1, "overlap_size": 0, **config}
    )
    app = App(name="app", root_agent=agent("a", model), plugins=[plugin], events_compaction_config=compaction)
    return Runner(app=app, session_service=InMemorySessionService()), model


def _summaries(session: Any) -> list[str]:
    return [
        event.actions.compaction.compacted_content.parts[0].text for event in session.events if event.actions.compaction
    ]


async def test_the_summary_of_a_sliding_window_is_billed_to_the_run_it_follows() -> None:
    plugin, summarizer = two_prices(max_usd=1), small("in short")
    runner, model = _compacting(plugin, summarizer)
    result = await play(runner.agent, runner=runner)
    assert (model.calls, summarizer.calls) == (1, 1)
    assert _summaries(result.session) == ["in short"]
    assert booked(plugin) == (2, CALL_USD + SMALL_USD)
    spent = plugin.spend(f"run:{result.events[0].invocation_id}")
    assert {name: figures["usd"] for name, figures in spent["by_model"].items()} == {
        "scripted-1": CALL_USD,
        "small-1": SMALL_USD,
    }
    assert plugin.trips == []


async def test_the_summary_at_a_token_threshold_is_billed_to_the_run_it_is_made_in() -> None:
    plugin, summarizer = two_prices(max_usd=1), small("in short")
    runner, model = _compacting(plugin, summarizer, compaction_interval=99, token_threshold=500, event_retention_size=0)
    await play(runner.agent, runner=runner)
    before = summarizer.calls
    second = await play(runner.agent, "and?", runner=runner)
    assert model.calls == 2
    assert summarizer.calls > 0
    assert "in short" in _summaries(second.session)
    assert booked(plugin) == (2 + summarizer.calls, 2 * CALL_USD + summarizer.calls * SMALL_USD)
    spent = plugin.spend(f"run:{second.events[0].invocation_id}")
    assert spent["usd"] == CALL_USD + (summarizer.calls - before) * SMALL_USD


@pytest.mark.parametrize(
    "policy", [{"max_usd": "0.02"}, {"max_model_calls": 1}, {"budgets": [Budget(usd="0.02", per="session")]}], ids=str
)
async def test_a_refused_summary_harms_nothing(policy: dict[str, Any]) -> None:
    """The answer was paid and stays; no summary is made of our words; the session goes on."""
    plugin, summarizer = two_prices(**policy), small("in short")
    runner, model = _compacting(plugin, summarizer)
    first = await play(runner.agent, runner=runner)
    assert (model.calls, summarizer.calls) == (1, 0)
    assert first.texts[0] == "x"
    assert _summaries(first.session) == []
    assert booked(plugin) == (1, CALL_USD)
    assert (plugin.trips, first.trips) == ([], []), "nothing that the user asked for was stopped"
    if "budgets" in policy:
        plugin.extend("session:app/u1/s1", usd="0.02")
    second = await play(runner.agent, "and?", runner=runner)
    assert "x" in second.texts
    assert model.calls == 2
    sent = [part.text for content in model.requests[-1].contents for part in parts(content)]
    assert sent == ["go", "x", "and?"], "our refusal is no part of the conversation"


async def _turns(runner: Runner, count: int, **options: Any) -> None:
    for turn in range(count):
        await play(runner.agent, f"turn {turn}", runner=runner, **options)


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        ({"max_usd": "0.02"}, "budget"),
        ({"max_model_calls": 1}, "model_calls"),
        ({"prices": {"scripted-1": PRICES["scripted-1"]}, "max_usd": 1}, "unpriced"),
        ({"mode": "shadow", "max_model_calls": 1}, "model_calls"),
    ],
    ids=str,
)
async def test_a_refused_summary_is_reported_once(
    policy: dict[str, Any], rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    """ADK asks for it again after every run: one warning and one alert, not one per attempt."""
    alerts: list[Alert] = []
    plugin, summarizer = two_prices(alerts=alerts.append, **policy), small("in short")
    runner, _ = _compacting(plugin, summarizer)
    with caplog.at_level(logging.INFO, "runguard"):
        await _turns(runner, 4)
    assert plugin.flush()
    enforced = plugin.snapshot()["mode"] == "enforce"
    assert summarizer.calls == (0 if enforced else 4)
    (line,) = [record for record in caplog.records if "compact" in record.getMessage()]
    assert line.levelno == logging.WARNING
    assert line.getMessage().startswith("runguard.compaction_refused: the history of session app/u1/s1 w")
    (alert,) = [alert for alert in alerts if alert.kind != "threshold"]
    assert (alert.kind, alert.facts["rule"], alert.facts["session"]) == ("compaction", rule, "s1")
    assert (alert.severity, alert.facts["enforced"]) == ("warning" if enforced else "info", enforced)
    assert [trip for trip in plugin.trips if trip.enforced] == []


async def test_each_session_whose_summary_is_refused_gets_a_warning_and_the_app_one_alert(
    caplog: pytest.LogCaptureFixture,
) -> None:
    alerts: list[Alert] = []
    plugin = two_prices(max_model_calls=1, alerts=alerts.append)
    runner, _ = _compacting(plugin, small("in short"))
    with caplog.at_level(logging.WARNING, "runguard"):
        for session in ("s1", "s2", "s3"):
            await _turns(runner, 2, session_id=session)
    assert plugin.flush()
    assert sum("runguard.compaction_refused" in record.getMessage() for record in caplog.records) == 3
    assert [alert.kind for alert in alerts] == ["compaction"]


async def test_a_summary_that_is_refused_within_a_run_is_reported_as_the_stop_of_that_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    alerts: list[Alert] = []
    plugin, summarizer = (
        two_prices(budgets=[Budget(usd="0.021", per="session")], alerts=alerts.append),
        small("in short"),
    )
    runner, _ = _compacting(plugin, summarizer, compaction_interval=99, token_threshold=500, event_retention_size=0)
    with caplog.at_level(logging.WARNING, "runguard"):
        await _turns(runner, 2)
    assert plugin.flush()
    assert summarizer.calls == 0
    names = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert [name for name in names if name.startswith("runguard.") and name != "runguard.warn"] == [
        "runguard.compaction_refused",
        "runguard.trip",
    ]
    assert [alert.kind for alert in alerts if alert.kind != "threshold"] == ["compaction", "trip"]


# ---- An agent whose history ADK compacts within a run reads its files again: that is no loop


FILES = 12


def read(path: str) -> str:
    """Reads a file."""
    return f"{path}: " + " ".join(f"{path}{n}" for n in range(100))


def reader(rounds: int, *, compacts_after: int | None) -> tuple[Runner, ScriptedModel, ScriptedModel]:
    """Reads twelve files, round after round. ``compacts_after``: model calls after which the prompt is reported as too
    long.
    """
    steps = [call("read", path=f"f{n}") for _ in range(rounds) for n in range(FILES)]

    def tokens(number: int) -> int:
        return 50_000 if compacts_after and number % compacts_after == 0 else 1_000

    model = ScriptedModel([*steps, text("done")], prompt_tokens=tokens)
    summarizer = ScriptedModel([text("twelve files were read")])
    config = EventsCompactionConfig(  # the interval, which older versions require, is never reached
        summarizer=LlmEventSummarizer(llm=summarizer),
        token_threshold=40_000,
        event_retention_size=1,
        compaction_interval=100,
        overlap_size=0,
    )
    plugins: list[Any] = [RunGuardPlugin()]
    root = LlmAgent(name="worker", model=model, tools=[read])
    app = App(name="app", root_agent=root, plugins=plugins, events_compaction_config=config)
    return Runner(app=app, session_service=InMemorySessionService()), model, summarizer


@pytest.mark.parametrize("rounds", [2, 4])
async def test_files_read_again_after_each_compaction_are_no_loop(rounds: int) -> None:
    runner, _, summarizer = reader(rounds, compacts_after=FILES)
    result = await play(runner.agent, runner=runner)
    assert summarizer.calls == rounds
    assert result.trips == []
    assert result.texts == ["done"]


async def test_the_same_reading_without_a_compaction_is_ended() -> None:
    runner, model, summarizer = reader(4, compacts_after=None)
    result = await play(runner.agent, runner=runner)
    assert summarizer.calls == 0
    assert_stopped(result, "no_news")
    assert model.calls == FILES + 10
