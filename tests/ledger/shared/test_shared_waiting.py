"""A rate limit that waits, over several processes of one store."""

import asyncio
from collections.abc import Callable
from typing import Any

from runguard.testing import run
from tests.kit.processes import Process
from tests.kit.shared_stores import Make, ledger
from tests.kit.shared_worker import agent, steps
from tests.kit.stores import Place
from tests.kit.tools import step
from tests.kit.waiting import until

MODEL = "model:scripted-1"


def rate(calls: int, window: str) -> dict[str, Any]:
    return {"calls": calls, "per": "model", "window": window, "on_exhausted": "wait"}


def test_two_processes_hold_one_limit_and_both_finish(place: Place, process: Callable[[], Process]) -> None:
    workers = [process(), process()]
    for worker in workers:
        worker.do("open", url=place.url, budgets=[rate(4, "1s")], max_wait_seconds=30)
    for worker in workers:
        for session in ("s1", "s2"):
            worker.do("run", session=session, calls=3, wait=False)
    results = [worker.do("join", session=session) for worker in workers for session in ("s1", "s2")]
    assert [(result["calls"], result["trips"], result["texts"]) for result in results] == [(3, [], ["done"])] * 4
    assert all(worker.do("flush", seconds=10) for worker in workers)
    connection = place.connect()
    try:
        windows = [balance.spent[2] for balance in connection.read(MODEL)]
    finally:
        connection.close()
    assert sum(windows) == 12
    assert max(windows) <= 4


async def test_a_cancelled_call_leaves_no_reservation_and_the_next_one_goes(place: Place, worker: Make) -> None:
    plugin = worker(budgets=[rate(2, "1h")], max_wait_seconds=3_600)

    def start(session: str, calls: int) -> "asyncio.Task[Any]":
        job = run(agent(steps(calls), tools=[step]), plugins=[plugin], session_id=session)
        return asyncio.create_task(job)

    await start("s1", 2)
    first = start("s2", 1)
    await asyncio.to_thread(until, lambda: any(one["waiting"] for one in plugin.snapshot()["runs"]))
    second = start("s3", 1)
    first.cancel()
    await asyncio.to_thread(plugin.extend, MODEL, calls=1)
    assert (await second).texts == ["done"]
    assert ledger(plugin).flush(10)
    (status,) = await asyncio.to_thread(plugin.budgets, MODEL)
    assert (status.spent, status.reserved) == (3, 0)
