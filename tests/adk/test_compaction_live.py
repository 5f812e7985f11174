"""An agent whose history ADK compacts within a run reads its files again: that is no loop."""

from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.apps.app import EventsCompactionConfig
from google.adk.apps.llm_event_summarizer import LlmEventSummarizer
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService

from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, assert_stopped, call, text
from tests.kit.adk_runs import play

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
