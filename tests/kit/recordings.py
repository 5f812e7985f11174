"""Recorded runs, made here or kept in tests/replay/recorded."""

import json
import sqlite3
from pathlib import Path
from typing import Any

from runguard.core.decision import Rungs
from runguard.policy import Policy
from runguard.policy.settings import RULES

FIXTURES = Path(__file__).parents[1] / "replay" / "recorded"
EARLY = {"rules": {"repetition": {"nudge": 3, "block": 4, "stop": 5}}}  # short recordings are enough to see every rung


def early(**settings: Any) -> Policy:
    return Policy.validated({**EARLY, **settings}, "")


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


def write(path: Path, *runs: Any) -> Path:
    path.write_text("".join((run if isinstance(run, str) else json.dumps(run)) + "\n" for run in runs))
    return path


def sized(name: str, prompt: int, calls: int = 1, **facts: Any) -> dict[str, Any]:
    """One run: so many model calls, each with that prompt and ten tokens of answer, one tool call and one second after
    the other.
    """
    run = working(name, calls, **facts)
    for step in run["steps"]:
        if step["kind"] == "model":
            step |= {"input_tokens": prompt, "output_tokens": 10}
    return run


def repeating(name: str, times: int, then: int = 2, **facts: Any) -> dict[str, Any]:
    """The same call and answer so many times, then work that costs something."""
    run, rest = looping(name, times, **facts), working(name, then)
    for number, step in enumerate(rest["steps"][1:]):
        step = {**step, "ts": 2_000 + number}
        if "call_id" in step:
            step["call_id"] = f"then-{step['call_id']}"
        if step["kind"] == "model":
            step["input_tokens"] = 50_000
        run["steps"].append(step)
    return run


def rungs_of(rule: str) -> Rungs:
    return RULES[rule][0]


def adk_database(path: Path, events: list[Any]) -> Path:
    """Write a session database of ADK with one session."""
    with sqlite3.connect(path) as db:
        db.execute(
            "CREATE TABLE sessions (app_name TEXT, user_id TEXT, id TEXT, state TEXT, create_time REAL, "
            "update_time REAL)"
        )
        db.execute(
            "CREATE TABLE events (id TEXT, app_name TEXT, user_id TEXT, session_id TEXT, invocation_id TEXT, "
            "timestamp REAL, event_data TEXT)"
        )
        db.execute("INSERT INTO sessions VALUES ('shop', 'u1', 's1', '{}', 1, 2)")
        for number, entry in enumerate(events):
            data = entry if isinstance(entry, str) else json.dumps(entry)
            db.execute("INSERT INTO events VALUES (?, 'shop', 'u1', 's1', 'i1', ?, ?)", (f"e{number}", 1.0, data))
    return path
