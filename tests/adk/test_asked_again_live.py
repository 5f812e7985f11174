"""An explicit limit of ``stall`` also raises the limit of a tool that asks to try again."""

from typing import Any

import pytest
from google.adk.agents import LlmAgent

from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, call, run, text


def fetch(url: str) -> dict[str, str]:
    return {"status": "retry later"}


@pytest.mark.parametrize(
    ("rules", "calls"),
    [({}, 20), ({"stall": {"stop": 30}}, 30), ({"stall": {"stop": 3}}, 20), ({"stall": False}, 41)],
    ids=["default", "raised", "lower", "off"],
)
async def test_the_advice_of_the_stop_works(rules: Any, calls: int) -> None:
    model = ScriptedModel(lambda n, _: call("fetch", url=f"https://example.com/{n}") if n <= 40 else text("done"))
    plugin = RunGuardPlugin(rules=rules)
    await run(LlmAgent(name="a", model=model, tools=[fetch]), plugins=[plugin])
    assert model.calls == calls
    assert [trip.rule for trip in plugin.trips] == (["stall"] if calls < 41 else [])
