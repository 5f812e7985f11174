"""Workers that share one store."""

import asyncio
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Self

import pytest

from runguard.adk import RunGuardPlugin
from runguard.testing import Recording, ScriptedModel, run
from tests.kit.money import PRICES
from tests.kit.shared_worker import agent, steps
from tests.kit.stores import Place
from tests.kit.tools import step
from tests.kit.waiting import until_async

CALL = Decimal("0.02")


ALICE = "user:app/alice"


SOON = 3.0  # generous: what must happen within a deadline, or within two beats of the heart


DEADLINE = 0.5  # of the store, where it goes away


@pytest.fixture(scope="session", autouse=True)
def awake() -> None:
    """The first run of a process imports half of ADK: seconds that no test should measure."""
    asyncio.run(run(agent(steps(2), tools=[step]), plugins=[RunGuardPlugin(prices=PRICES)]))


Make = Callable[..., RunGuardPlugin]


def thousand(_: Any) -> int:
    return 1_000


def ledger(plugin: RunGuardPlugin) -> Any:
    return plugin.guard.accounts.ledger


async def play(
    plugin: RunGuardPlugin,
    model: Any = None,
    *,
    user: str = "alice",
    session: str = "s",
    seconds: float = 20,
    **options: Any,
) -> Recording:
    """One bounded turn."""
    root = agent(model or steps(1), tools=options.pop("tools", [step]))
    async with asyncio.timeout(seconds):
        return await run(root, plugins=[plugin], user_id=user, session_id=session, **options)


def balance(place: Place, scope: str = ALICE) -> tuple[Decimal, Decimal, int]:
    """Spent, held and calls of a scope, as somebody sees them who only knows the store."""
    session = place.connect()
    try:
        found = next(iter(session.read(scope)), None)
    finally:
        session.close()
    if found is None:
        return Decimal(0), Decimal(0), 0
    return Decimal(found.spent[0]) / 10**9, Decimal(found.held[0]) / 10**9, found.spent[2]


async def _in_flight(model: ScriptedModel, calls: int = 1) -> None:
    await until_async(lambda: model._in_flight >= calls)


class Ticks:
    """Whether an event loop goes on while others wait: the longest time it was away, beyond what a thread of this busy
    machine was.
    """

    def __init__(self) -> None:
        self._in_loop = self._in_thread = 0.0
        self._over = threading.Event()

    @property
    def longest(self) -> float:
        return self._in_loop - self._in_thread

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._tick())
        self._thread = threading.Thread(target=self._tick_beside)
        self._thread.start()
        return self

    async def _tick(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.01)
            now = time.monotonic()
            self._in_loop, last = max(self._in_loop, now - last), now

    def _tick_beside(self) -> None:
        last = time.monotonic()
        while not self._over.wait(0.01):
            now = time.monotonic()
            self._in_thread, last = max(self._in_thread, now - last), now

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        self._over.set()
        self._thread.join()


def outage_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("runguard.store_outage")]


def no_secret(text: str) -> bool:
    return not any(secret in text for secret in ("s3cret", "Pa55", "hunter2"))


on_a_file = pytest.mark.parametrize("place", ["sqlite"], indirect=True)
