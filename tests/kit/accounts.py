"""Accounts, calls and clocks for the tests of accounting."""

import asyncio
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from runguard.core.decision import Action, Decision
from runguard.core.events import ROOT_LANE, ModelCall, RunInfo
from runguard.core.money import Budget, BudgetStatus
from runguard.engine.charges import Charge
from runguard.engine.guard import Guard
from runguard.policy import Policy
from runguard.pricing.rates import Usage
from tests.kit.waiting import PATIENCE_S

PRICES = {"m": {"input": 1, "output": 1}, "dear": {"input": 10, "output": 10}}


CALL = Decimal("0.001")  # what 1,000 tokens cost


@dataclass
class Asked:
    """What came of asking for leave to make a call."""

    decision: Decision
    event: ModelCall
    charge: Charge = field(init=False)

    def __post_init__(self) -> None:
        self.charge = self.event.charge

    @property
    def leave(self) -> bool:
        return self.charge is not None

    @property
    def output(self) -> int:
        """The output limit it was given leave for."""
        return self.charge.max_output


class Shop:
    """One guard with a clock moved by hand, and runs that ask, pay and go."""

    def __init__(self, *budgets: Budget, **policy: Any) -> None:
        self.now = 1_000_000.0
        values = {
            "prices": PRICES,
            "budgets": budgets,
            "clock": lambda: self.now,
            "min_output_tokens": 100,
            "max_wait_seconds": PATIENCE_S,
            **policy,
        }
        self.guard = Guard(Policy.validated(values, "keywords"))
        self.accounts = self.guard.accounts
        self.open("run")

    def open(self, run: str, app: str = "app", user: str = "ann", session: str = "s1", **info: Any) -> None:
        self.guard.start(RunInfo(run, app, user, session, at=self.now, **info))

    async def ask(
        self, output: int | None = 1_000, *, input_tokens: int = 0, run: str = "run", agent: str = "agent", **call: Any
    ) -> Asked:
        event = ModelCall(
            run,
            call.pop("lane", ROOT_LANE),
            agent,
            self.now,
            call.pop("model", "m"),
            input_tokens,
            max_output_tokens=output,
            **call,
        )
        before = self.guard.check(event)
        if before.action is Action.STOP and before.enforced:
            return Asked(before, event)
        return Asked(await self.guard.reserve(event, slot=False), event)

    async def asks_and_waits(self, *args: Any, **kwargs: Any) -> "asyncio.Task[Asked]":
        """Somebody who cannot be served yet."""
        task = asyncio.create_task(self.ask(*args, **kwargs))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
        return task

    def pay(self, asked: Asked, output: int = 1_000, **how: Any) -> None:
        self.guard.settle(asked.charge, Usage(asked.charge.input, output), **how)

    async def buy(self, output: int = 1_000, **call: Any) -> Asked:
        asked = await self.ask(output, **call)
        assert asked.leave, asked.decision
        self.pay(asked, output)
        return asked

    def status(self, scope: str = "user:app/ann", unit: str = "usd") -> BudgetStatus:
        (found,) = [status for status in self.accounts.budgets(scope) if status.unit == unit]
        return found

    def stand(self, scope: str = "user:app/ann", unit: str = "usd") -> tuple[Any, Any]:
        status = self.status(scope, unit)
        return status.spent, status.reserved

    @property
    def nothing_is_held(self) -> bool:
        return (
            all(status.reserved == 0 for status in self.accounts.budgets())
            and self.accounts.spend()["reserved_usd"] == 0
        )


async def soon(task: "asyncio.Task[Asked]") -> Asked:
    return await asyncio.wait_for(task, PATIENCE_S / 2)


def user_budget(calls_worth: Any, **more: Any) -> Budget:
    return Budget(usd=CALL * calls_worth, per="user", **more)
