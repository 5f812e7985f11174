"""Guards that share one budget through a store, each with a ledger of its own,
as workers in different processes have.
"""

import asyncio
from collections.abc import Callable
from typing import Any
from unittest import mock

from runguard import Budget
from runguard.adk import RunGuardPlugin
from runguard.ledger import remote
from runguard.ledger.ledger import Balance, StoreSession
from runguard.testing import ScriptedModel, run, text
from tests.kit.money import PRICES
from tests.kit.shared_worker import agent

CALL_NANO = 20_000_000  # of one call: 1,000 prompt and 250 output tokens
ALICE = "user:app/alice"


class Member:
    """One worker. ``made`` counts the calls that reached its model: the truth that the books are compared with."""

    def __init__(self, url: str, cap: int, **policy: Any) -> None:
        self.model = ScriptedModel([text("done")])
        settings = {
            "prices": PRICES,
            "tokens": lambda _: 2_000,
            "store": url,
            "budgets": [Budget(calls=cap, per="user")],
            "on_guard_error": "allow",
        }
        with mock.patch.dict(remote._open, clear=True):
            self.plugin = RunGuardPlugin(**{**settings, "max_wait_seconds": 0.2, **policy})

    @property
    def made(self) -> int:
        return self.model.calls

    async def turn(self) -> str:
        """One run of one call; the rule that stopped it, or nothing."""
        async with asyncio.timeout(30):
            result = await run(agent(self.model), plugins=[self.plugin], user_id="alice")
        assert result.error is None
        return result.trips[0].rule if result.trips else ""


class Crew:
    """Several members that work at the same time."""

    def __init__(self, url: str, cap: int, members: int = 3, **policy: Any) -> None:
        self.cap = cap
        self.members = [Member(url, cap, **policy) for _ in range(members)]

    @property
    def made(self) -> int:
        return sum(member.made for member in self.members)

    async def work(self, go_on: Callable[[], bool], lanes: int = 2) -> None:
        """Every member makes call after call, in several lanes, as long as it is told to.

        No fault may be visible as one of the guard's own.
        """

        async def lane(member: Member) -> None:
            while go_on():
                await member.turn()
                assert self.made <= self.cap, "more calls than the cap"

        async with asyncio.TaskGroup() as group:
            for member in self.members:
                for _ in range(lanes):
                    group.create_task(lane(member))

    async def recover(self, seconds: float = 30.0) -> None:
        """The faults are over. Everything is booked, and what is left of the budget can be spent, to the last call."""
        for member in self.members:
            assert await asyncio.to_thread(member.plugin.flush, seconds), (
                f"a settlement was lost or is not booked: {member.plugin.snapshot()}"
            )
        async with asyncio.timeout(seconds):
            for member in self.members:
                while (why := await member.turn()) != "budget":
                    if why:
                        await asyncio.sleep(0.05)  # the ledger rests for a moment after an outage
        for member in self.members:
            assert await asyncio.to_thread(member.plugin.flush, seconds)
            assert member.plugin.guard.guard_errors == 0, "a fault of the store is not one of the guard's"


def account(session: StoreSession) -> Balance:
    """The account as somebody sees it who only knows the store."""
    try:
        (found,) = session.read(ALICE)
    finally:
        session.close()
    return found
