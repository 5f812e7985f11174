"""Rate limits that wait, and providers that ask to wait, on every adapter."""

import asyncio
from typing import Any

from runguard import Budget
from runguard.testing.conformance import AgentSpec, Harness, Reply


class BusyError(Exception):
    """As clients raise it for an answer with status 429."""

    status_code = 429
    headers: Any = {"retry-after": "0.3"}  # noqa: RUF012 - a constant


async def test_calls_wait_for_room_and_finish(harness: Harness) -> None:
    guard = harness.guard(budgets=[Budget(calls=3, per="model", window="1s", on_exhausted="wait")], max_wait_seconds=30)
    sessions = [harness.session(AgentSpec(lambda n, _: Reply("done")), guard) for _ in range(7)]
    results = await asyncio.gather(*(session.turn("go") for session in sessions))
    assert [result.text for result in results] == ["done"] * 7
    assert guard.trips == []


async def test_one_probe_goes_first_when_the_provider_asks_to_wait(harness: Harness) -> None:
    order: list[str] = []

    def script(n: int, _: str) -> Reply:
        order.append("refused" if not order else "asked")
        return Reply(error=BusyError("busy")) if len(order) == 1 else Reply("done")

    guard = harness.guard(on_rate_limit="wait", max_wait_seconds=30)
    first = await harness.session(AgentSpec(script), guard).turn("go")
    assert first.error is not None
    assert len(guard.snapshot()["provider_waits"]) == 1
    sessions = [harness.session(AgentSpec(script), guard) for _ in range(3)]
    results = await asyncio.gather(*(session.turn("go") for session in sessions))
    assert [result.text for result in results] == ["done"] * 3
    assert order == ["refused", *["asked"] * 3]
    assert guard.snapshot()["provider_waits"] == {}
