"""Limits from what real runs have written: a session database, and a store of RunGuard's."""

import pytest

pytest.importorskip("google.adk")

from google.adk.agents import LlmAgent
from google.adk.sessions.sqlite_session_service import SqliteSessionService

from runguard.adk import RunGuardPlugin
from runguard.calibrate import Proposal, calibrate
from runguard.policy import Policy
from runguard.replay import open_sources, replay
from runguard.testing import ScriptedModel, call, run, text


def look(n: int) -> dict[str, int]:
    """Something new each time."""
    return {"seen": n}


def limit(made: Proposal, setting: str) -> tuple[float, float | None]:
    found = next(limit for limit in made.settings.limits if limit.setting == setting)
    assert found.quantile is not None
    return found.quantile.value, found.value


async def test_limits_of_real_runs(tmp_path):
    service = SqliteSessionService(str(tmp_path / "sessions.db"))
    plugin = RunGuardPlugin(store=f"sqlite:///{tmp_path}/guard.db", mode="shadow")
    for number in range(75):
        turns = number % 3 + 1  # so many calls of the tool, then an answer
        model = ScriptedModel(lambda n, _, turns=turns: call("look", n=n) if n <= turns else text("done"))
        await run(LlmAgent(name="clerk", model=model, tools=[look]), plugins=[plugin], session_service=service, session_id=f"s{number}")
    assert plugin.flush()

    for source in ("sessions.db", "guard.db"):
        made = calibrate(tmp_path / source, model="gpt-4o")
        assert made.faults.count == 0
        assert (made.settings.basis.kind, made.settings.basis.recordings, made.settings.basis.runs) == ("unlabelled", 75, 75)
        assert limit(made, "max_model_calls") == (4, 10)
        assert limit(made, "max_tool_calls") == (3, 8)
        assert limit(made, "max_tokens")[0] == 5_000
        assert made.changes["max_seconds"] > 0
        stopped = [
            result.id
            for batch in replay(open_sources(str(tmp_path / source)), [Policy.validated({"max_model_calls": 3}, "")])
            for (result,) in batch.results
            if result.first("stop")
        ]
        assert len(stopped) == 25  # they are read as they ran
    assert calibrate(tmp_path / "sessions.db", model="gpt-4o").changes["max_usd"] > 0
