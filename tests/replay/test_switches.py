"""What replay says about switches to a cheaper model, and what a store keeps of them."""

import json
import sqlite3
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

from runguard import Budget, Threshold
from runguard.adk import RunGuardPlugin
from runguard.policy import Policy
from runguard.pricing.rates import Usage
from runguard.replay import open_sources, replay
from runguard.replay.player import Judge
from runguard.replay.steps import Asked, RecordedRun, Turn
from runguard.testing import ScriptedModel, call, text
from tests.kit.adk_runs import play
from tests.kit.rule_agents import Tool, agent

PRICES = {"big-1": {"input": 10, "output": 40}, "small-1": {"input": 1, "output": 4}}
MODELS = {name: {"context_window": 100_000, "max_output_tokens": 250} for name in PRICES}
SETTINGS: dict[str, Any] = {
    "prices": PRICES,
    "models": MODELS,
    "budgets": [Budget(usd="0.10", thresholds=[Threshold(0.5, model="small-1")])],
}


class Pair(ScriptedModel):
    @classmethod
    def supported_models(cls) -> list[str]:
        return ["big-1", "small-1"]


def test_replay_reports_the_switch_and_an_estimate_of_what_it_saves() -> None:
    """Three calls of $0.02 reach half of the budget; the two calls before the stop would have cost $0.002 each."""
    steps: list[Any] = [Turn(1.0, "r")]
    steps += [Asked(2.0 + n, "a", model="big-1", usage=Usage(1_000, 250)) for n in range(5)]
    result = Judge(Policy.validated({**SETTINGS, "min_output_tokens": 250}, "")).play(
        RecordedRun("r", steps=iter(steps))
    )
    (verdict,) = [v for v in result.verdicts if v.rule == "downgrade"]
    assert (verdict.action, verdict.turn) == ("warn", 3)
    assert "agent a would be switched from big-1 to small-1" in verdict.detail
    assert result.switched.model_calls == 2
    assert result.to_dict()["switched"]["saved_usd"] == "0.036"


async def test_a_store_names_the_model_that_answered_and_the_one_that_was_asked(tmp_path: Path) -> None:
    file = tmp_path / "guard.db"
    model = Pair(lambda n, _: call("work", q=n) if n < 6 else text("done"), model="big-1")  # type: ignore[misc]
    plugin = RunGuardPlugin(store=f"sqlite:///{file}", tokens=lambda request: 1_000, **SETTINGS)
    # a settlement reaches the store in the background
    await play(agent(model, Tool("work", lambda n: {"done": n, "is_written": plugin.flush(10)})), plugins=[plugin])
    assert plugin.flush(10)
    with closing(sqlite3.connect(file)) as db:
        rows = [json.loads(data) for (data,) in db.execute("select text from records where kind = 'call'")]
    assert [(row["model"], row.get("instead_of")) for row in rows] == [
        *[("big-1", None)] * 3,
        *[("small-1", "big-1")] * 3,
    ]
    (batch,) = replay(open_sources(str(file)), [Policy.validated(SETTINGS, "")])
    ((result,),) = batch.results
    assert result.usd == plugin.spend()["usd"] == Decimal("0.066")
    assert result.switched.model_calls == 0, "these calls went to the cheaper model"
