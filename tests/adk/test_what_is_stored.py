"""What a run says, asks and is answered is in no store, no trip and no alert."""

import asyncio
from pathlib import Path
from typing import Any

from google.adk.agents import LlmAgent

from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, call, run

CARD, KEY = "4000 1234 5678 9010", "sk-proj-0123456789abcdef"


def look_up(card: str) -> dict[str, str]:
    """Look up a customer by card."""
    return {"owner": "Alice Example", "link": f"https://bank.example/{KEY}"}


def test_no_prompt_argument_or_answer_outlives_the_run(tmp_path: Path) -> None:
    alerts: list[Any] = []
    plugin = RunGuardPlugin(store=f"sqlite:///{tmp_path}/guard.db", alerts=alerts.append)
    agent = LlmAgent(name="clerk", model=ScriptedModel([call("look_up", card=CARD)]), tools=[look_up])
    result = asyncio.run(run(agent, f"Whose card is {CARD}?", plugins=[plugin]))
    assert plugin.flush(5)
    (trip,) = result.trips
    assert alerts
    kept = b"".join(path.read_bytes() for path in tmp_path.glob("guard.db*"))
    assert b"look_up" in kept
    for content in (CARD, KEY, "Alice Example", "Whose card"):
        assert content.encode() not in kept
        assert content not in str(trip.to_dict())
        assert content not in str(alerts)
