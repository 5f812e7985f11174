"""Limits from what real runs have written: a session database, and a store of RunGuard's."""

from pathlib import Path

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
    found = next(limit for limit in made.limits if limit.setting == setting)
    assert found.quantile is not None
    return found.quantile.value, found.value


async def test_limits_of_real_runs(tmp_path: Path) -> None:
    service = SqliteSessionService(str(tmp_path / "sessions.db"))
    plugin = RunGuardPlugin(store=f"sqlite:///{tmp_path}/guard.db", store_timeout=30, mode="shadow")
    for number in range(75):
        turns = 1 if number % 3 else 2  # so many calls of the tool, then an answer
        model = ScriptedModel(lambda n, _, turns=turns: call("look", n=n) if n <= turns else text("done"))
        await run(
            LlmAgent(name="clerk", model=model, tools=[look]),
            plugins=[plugin],
            session_service=service,
            session_id=f"s{number}",
        )
    assert plugin.flush()

    proposals = {source: calibrate(tmp_path / source, model="gpt-4o") for source in ("sessions.db", "guard.db")}
    for source, made in proposals.items():
        assert made.faults.count == 0
        assert (made.basis.kind, made.basis.recordings, made.basis.runs) == (
            "unlabelled",
            75,
            75,
        )
        assert limit(made, "max_model_calls") == (3, 8)
        assert limit(made, "max_tool_calls") == (2, 5)
        assert limit(made, "max_tokens")[0] == 3_750
        assert made.changes["max_seconds"] > 0
        stopped = [
            result.id
            for batch in replay(open_sources(str(tmp_path / source)), [Policy.validated({"max_model_calls": 2}, "")])
            for (result,) in batch.results
            if result.first("stop")
        ]
        assert len(stopped) == 25  # they are read as they ran
    sessions, store = proposals.values()
    assert sessions.changes["max_usd"] > 0
    assert limit(sessions, "max_tool_result_chars") == (8, None)  # small ones need no limit
    assert "max_tool_result_chars" not in store.changes  # a journal keeps no answers: nothing was measured
    untold = next(limit for limit in store.limits if limit.setting == "max_tool_result_chars")
    assert untold.why_not.startswith("0 unlabelled recordings contain the characters of a tool answer, 72 are needed")
