"""What a store shows of running runs whose model was switched or whose prompt cache is lost."""

from pathlib import Path
from typing import Any

import pytest
from google.adk.models.llm_response import LlmResponse
from google.genai import types

from runguard import Budget, Threshold
from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, call, text
from runguard.view.store import StoreView
from runguard.view.story import notes_of
from tests.kit.adk_runs import play
from tests.kit.rule_agents import Tool, agent


class Cached(ScriptedModel):
    """Two models of one class; the cache of the second one works for its first call."""

    @classmethod
    def supported_models(cls) -> list[str]:
        return ["big-1", "small-1"]


def _answer(n: int, request: Any) -> LlmResponse:
    usage = types.GenerateContentResponseUsageMetadata(
        prompt_token_count=10_000 + n, candidates_token_count=10, cached_content_token_count=9_000 if n == 3 else 0
    )
    part = call("work", q=n) if n < 7 else text("done")
    return LlmResponse(content=types.Content(role="model", parts=[part]), usage_metadata=usage)


async def test_status_and_dashboard_show_the_notes_of_a_run(tmp_path: Path) -> None:
    seen: list[tuple[str, ...]] = []
    plugin = RunGuardPlugin(
        store=f"sqlite:///{tmp_path}/guard.db",
        budgets=[Budget(usd=10, per="app", thresholds=[Threshold(0.01, model="small-1")])],
        prices={"big-1": {"input": 10, "output": 10}, "small-1": {"input": 1, "output": 1, "cached": "0.1"}},
        models={name: {"context_window": 100_000, "max_output_tokens": 100} for name in ("big-1", "small-1")},
    )

    def work(n: int) -> dict[str, int]:
        plugin.flush(10)
        (run,) = plugin.snapshot()["runs"]
        seen.append(notes_of(run))
        return {"done": n}

    await play(agent(Cached(_answer, model="big-1"), Tool("work", work)), plugins=[plugin])  # type: ignore[misc]
    switched, lost = seen[-1]
    assert switched == "worker on small-1 instead of big-1: 1% of the budget of app:app is spent"
    assert lost.startswith("prompt cache: agent worker: 18,000 prompt tokens of its last 2 calls to small-1")
    assert seen[0] == ()
    assert plugin.flush(10)
    assert StoreView(f"sqlite:///{tmp_path}/guard.db").running() == []


@pytest.mark.parametrize("facts", [{}, {"switched": 3, "prompt_cache": []}, {"switched": {"a": 1}}])
def test_facts_of_another_form_are_no_notes(facts: dict[str, Any]) -> None:
    assert notes_of(facts) == ()
