"""Runs to replay, made here."""

from pathlib import Path
from typing import Any

import pytest

from runguard.policy import Policy

FIXTURES = Path(__file__).parent / "recorded"
EARLY = {"rules": {"repetition": {"nudge": 3, "block": 4, "stop": 5}}}  # short recordings are enough to see every rung


def early(**settings: Any) -> Policy:
    return Policy.validated({**EARLY, **settings}, "")


@pytest.fixture(autouse=True)
def no_policy_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RUNGUARD_MODE", "RUNGUARD_POLICY", "RUNGUARD_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def looping(name: str = "loop", times: int = 8, **facts: Any) -> dict[str, Any]:
    """One agent makes the same call with the same answer, again and again."""
    steps: list[dict[str, Any]] = [{"kind": "message", "agent": "user", "text": "go", "ts": 1_000}]
    for turn in range(times):
        steps.append(
            {
                "kind": "model",
                "agent": "a",
                "text": "",
                "input_tokens": 1_000 + 100 * turn,
                "output_tokens": 50,
                "ts": 1_010 + turn,
            }
        )
        steps.append(
            {
                "kind": "tool_call",
                "agent": "a",
                "tool": "look",
                "args": {"at": "it"},
                "call_id": f"c{turn}",
                "ts": 1_010 + turn,
            }
        )
        steps.append(
            {
                "kind": "tool_result",
                "agent": "a",
                "tool": "look",
                "result": {"seen": 1},
                "call_id": f"c{turn}",
                "ts": 1_010 + turn,
            }
        )
    return {"id": name, "source": "test", "model": "gpt-4o", "success": False, "steps": steps, **facts}


def working(name: str = "work", times: int = 8, **facts: Any) -> dict[str, Any]:
    """The same, with a new argument and a new answer each time."""
    run = looping(name, times, **facts)
    for number, step in enumerate(run["steps"]):
        if step["kind"] == "tool_call":
            step["args"] = {"at": number}
        elif step["kind"] == "tool_result":
            step["result"] = {"seen": number}
    run["success"] = facts.get("success", True)
    return run
