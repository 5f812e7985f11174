"""A stored session shows what changed in the state: replay does not take such work for talk."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

from google.adk.agents import LlmAgent, LoopAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.events import Event
from google.adk.sessions.sqlite_session_service import SqliteSessionService
from google.adk.workflow import Workflow

from runguard.policy import Policy
from runguard.replay import open_sources, replay
from runguard.testing import ScriptedModel, run, text

LOW: dict[str, Any] = {"rules": {"talk": {"nudge": 3, "stop": 6}, "no_news": False}}


def speaker(name: str, **options: Any) -> LlmAgent:
    return LlmAgent(name=name, model=ScriptedModel(lambda n, _: text(f"{name} agrees, {n}")), **options)


def count(callback_context: CallbackContext) -> None:
    callback_context.state["round"] = callback_context.state.get("round", 0) + 1


def mark(callback_context: CallbackContext) -> None:
    callback_context.state["seen"] = True


async def rules_of(root: Any, path: Path) -> set[str]:
    await run(root, "go", session_service=SqliteSessionService(str(path)))
    (source,) = open_sources(str(path))
    (batch,) = replay([source], [Policy.validated(LOW, "")])
    assert batch.faults.count == 0, batch.faults.first
    ((result,),) = batch.results
    return {verdict.rule for verdict in result.verdicts}


def pair(**options: Any) -> LoopAgent:
    return LoopAgent(name="loop", sub_agents=[speaker("a", **options), speaker("b")], max_iterations=10)


async def test_texts_between_new_values_are_not_talk(tmp_path: Path) -> None:
    assert await rules_of(pair(after_agent_callback=count), tmp_path / "s.db") == set()


async def test_texts_without_a_change_or_with_an_old_value_are_talk(tmp_path: Path) -> None:
    assert await rules_of(pair(), tmp_path / "a.db") == {"talk"}
    assert await rules_of(pair(after_agent_callback=mark), tmp_path / "b.db") == {"talk"}


async def test_words_under_an_output_key_are_still_words(tmp_path: Path) -> None:
    assert await rules_of(pair(output_key="draft"), tmp_path / "s.db") == {"talk"}


async def test_new_outputs_of_a_node_are_steps(tmp_path: Path) -> None:
    items = iter(range(12))

    def feed(node_input: Any) -> Any:
        item = next(items, None)
        return Event(route="end" if item is None else "judge", output=f"item {item}")

    def end(node_input: Any) -> str:
        return "done"

    judge = speaker("judge")
    edges = [("START", feed), (feed, {"judge": judge, "end": end}), (judge, feed)]
    assert await rules_of(Workflow(name="wf", edges=edges), tmp_path / "s.db") == set()
