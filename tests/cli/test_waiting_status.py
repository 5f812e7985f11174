"""Waiting calls in ``runguard status`` and on the dashboard."""

import asyncio
from pathlib import Path

from runguard import Budget
from runguard.adk import RunGuardPlugin
from runguard.cli.dashboard.server import Looks
from runguard.cli.store_commands import _rate_limits
from runguard.policy import Policy
from runguard.testing import ScriptedModel, run, text
from runguard.view.store import StoreView
from tests.kit.commands import runguard, told
from tests.kit.money import agent


async def test_a_waiting_run_is_shown(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'guard.db'}"
    limit = Budget(calls=1, per="model", window="1h", on_exhausted="wait")
    plugin = RunGuardPlugin(store=store, budgets=[limit], max_wait_seconds=3_600)
    await run(agent("a", ScriptedModel([text("done")])), plugins=[plugin])
    task = asyncio.create_task(run(agent("a", ScriptedModel([text("done")])), plugins=[plugin], session_id="s2"))
    view = StoreView(store)
    try:
        async with asyncio.timeout(40):
            while not any(row.waiting for row in await asyncio.to_thread(view.running)):  # noqa: ASYNC110 - as another process looks
                await asyncio.sleep(0.05)
        (row,) = told("status", "--store", store, code=1)["running"]
        assert row["waiting"] == 1
        assert "1 waiting" in runguard("status", "--store", store).output
        (shown,) = Looks(view).overview("app", "1h")["running"]
        assert shown["waiting"] == 1
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        view.close()


def test_a_rate_limit_that_is_used_up_needs_no_attention() -> None:
    waits = Budget(calls=1, per="model", window="1m", on_exhausted="wait")
    assert _rate_limits(Policy.validated({"budgets": [waits, Budget(usd=1, per="user", window="1d")]}, "")) == {
        ("model", "1m")
    }
    both = [waits, Budget(usd=1, per="model", window="1m")]
    assert _rate_limits(Policy.validated({"budgets": both}, "")) == set()
