"""Prices of tools on every store: two workers share one budget."""

import asyncio
from decimal import Decimal
from typing import Any

from runguard import Budget, ToolRule
from runguard.testing import ScriptedModel, call, run, text
from runguard.view import StoreView
from tests.kit.rule_agents import agent
from tests.kit.shared_stores import Make
from tests.kit.stores import Place

FREE = {"scripted-1": {"input": 0, "output": 0}}


async def test_two_workers_never_pass_the_cap(place: Place, worker: Make) -> None:
    done: list[int] = []

    async def scrape(q: int) -> dict[str, int]:
        """Scrapes."""
        done.append(q)
        await asyncio.sleep(0.001)
        return {"page": q}

    limits: dict[str, Any] = {
        "budgets": [Budget(usd="0.05", per="user", window="1d")],
        "tools": {"scrape": ToolRule(price="0.01")},
        "prices": FREE,
    }
    workers = [worker(**limits), worker(**limits)]

    async def work(n: int) -> None:
        script = [call("scrape", q=n), text("done")]
        await run(agent(ScriptedModel(script), scrape), plugins=[workers[n % 2]], user_id="alice", session_id=f"s{n}")

    await asyncio.gather(*(work(n) for n in range(10)))
    assert all(each.flush(10) for each in workers)
    assert len(done) == 5
    assert sum((each.spend()["tools_usd"] for each in workers), Decimal(0)) == Decimal("0.05")
    view = StoreView(place.url)
    spend = view.spend(0, by="tool")
    named = {row.name: (row.usd, row.tool_calls, row.calls) for row in spend.totals}
    assert named["scrape"] == (Decimal("0.05"), 5, 0)
    assert spend.total.usd == Decimal("0.05")
    (status,) = workers[0].budgets()
    assert (status.spent, status.reserved) == (Decimal("0.05"), 0)
