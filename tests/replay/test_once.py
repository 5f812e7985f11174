"""``once`` in recordings: raw arguments from a session, the live identity from RunGuard's own store."""

from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent

from runguard.adk import RunGuardPlugin
from runguard.policy import Policy
from runguard.replay import open_sources, replay
from runguard.replay.player import Judge
from runguard.replay.sources import run_of
from runguard.replay.steps import Faults
from runguard.testing import ScriptedModel, call, run, text
from tests.kit.recordings import early

ONCE: dict[str, Any] = {"tools": {"pay": {"once": True}}}


def found(*calls: tuple[dict[str, Any], Any]) -> int:
    """How many calls of a recorded session ``once`` would have refused."""
    steps: list[dict[str, Any]] = [{"kind": "message", "agent": "user", "text": "go", "ts": 1}]
    for number, (args, result) in enumerate(calls):
        steps.append({"kind": "model", "agent": "a", "text": "", "input_tokens": 10, "output_tokens": 5, "ts": number})
        steps.append(
            {"kind": "tool_call", "agent": "a", "tool": "pay", "args": args, "call_id": f"c{number}", "ts": number}
        )
        steps.append(
            {
                "kind": "tool_result",
                "agent": "a",
                "tool": "pay",
                "result": result,
                "call_id": f"c{number}",
                "ts": number,
            }
        )
    recorded = {"id": "r", "source": "test", "model": "gpt-4o", "success": True, "steps": steps}
    result = Judge(early(**ONCE), to_the_end=True).play(run_of(recorded, "here", Faults()))
    return sum(verdict.rule == "once" for verdict in result.verdicts)


def test_a_session_is_judged_by_its_raw_arguments() -> None:
    paid = {"paid": True}
    assert found(({"invoice": "A1"}, paid), ({"invoice": "A1\u200b"}, paid)) == 1
    assert found(({"invoice": "A1"}, paid), ({"invoice": "A1", "x": 1}, paid)) == 0
    assert found(({"invoice": "A1", "amount": 5}, paid), ({"invoice": "A1", "amount": "5"}, paid)) == 0
    assert found(({"invoice": "A1"}, {"error": "no connection"}), ({"invoice": "A1"}, paid)) == 0


def pay(invoice: str, amount: int = 5) -> dict[str, Any]:
    return {"error": "no connection"} if amount == 7 else {"paid": True}


@pytest.mark.parametrize(
    ("asked", "rules"),
    [
        ([{"x": 1}, {"amount": "5"}], ["once"]),
        ([{"amount": 7}, {"amount": 7}], []),
        ([{"amount": 6}, {"amount": 8}], []),
    ],
)
async def test_a_store_is_judged_by_the_identity_that_was_compared_live(
    tmp_path: Path, asked: list[dict[str, Any]], rules: list[str]
) -> None:
    plugin = RunGuardPlugin(store=f"sqlite:///{tmp_path}/guard.db", mode="shadow", store_timeout=30, **ONCE)
    script = [*(call("pay", invoice="A1", **args) for args in asked), text("done")]
    await run(LlmAgent(name="a", model=ScriptedModel(script), tools=[pay]), plugins=[plugin])
    assert plugin.flush(10)
    (batch,) = replay(open_sources(str(tmp_path / "guard.db")), [Policy.validated(ONCE, "")], to_the_end=True)
    ((result,),) = batch.results
    assert [verdict.rule for verdict in result.verdicts] == rules


async def test_a_store_that_knew_no_once_is_judged_by_its_calls(tmp_path: Path) -> None:
    plugin = RunGuardPlugin(store=f"sqlite:///{tmp_path}/guard.db", store_timeout=30)
    script = [call("pay", invoice="A1"), call("pay", invoice="A1"), call("pay", invoice="A2"), text("done")]
    await run(LlmAgent(name="a", model=ScriptedModel(script), tools=[pay]), plugins=[plugin])
    assert plugin.flush(10)
    (batch,) = replay(open_sources(str(tmp_path / "guard.db")), [Policy.validated(ONCE, "")], to_the_end=True)
    ((result,),) = batch.results
    assert [verdict.rule for verdict in result.verdicts] == ["once"]
