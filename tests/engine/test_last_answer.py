"""The call that is held for a last answer: caps hold for every order of events, and it is granted once."""

import asyncio
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runguard import Budget, PolicyError
from runguard.core.decision import Action
from runguard.core.events import ROOT_LANE, ModelCall, RunInfo
from runguard.engine.guard import Guard
from runguard.policy import Policy
from runguard.pricing.rates import Usage

TOKEN = Decimal("0.000001")  # what one token costs


class Office:
    """One guard, several runs that share a user's budget, and calls made by hand."""

    def __init__(self, cap: int, **policy: Any) -> None:
        budgets = [Budget(usd=cap * TOKEN, per="user", window="1d")]
        values = {
            "budgets": budgets,
            "prices": {"m": {"input": 1, "output": 1}},
            "final_answer": True,
            "min_output_tokens": 100,
            "max_wait_seconds": 0,
            **policy,
        }
        self.guard = Guard(Policy.validated(values, "keywords"), gives_last_answers=True)
        self.calls: list[ModelCall] = []
        self.answers: dict[str, int] = {}

    def begin(self, name: str) -> None:
        if name not in self.guard.runs:
            self.guard.start(RunInfo(name, "app", "ann", name, at=self.guard.clock()))

    async def ask(self, name: str, tokens: int) -> None:
        self.begin(name)
        event = ModelCall(name, ROOT_LANE, "agent", self.guard.clock(), "m", tokens, max_output_tokens=200)
        decision = self.guard.check(event)
        if decision.action is not Action.STOP:
            decision = await self.guard.reserve(event, slot=False)
        if decision.action is not Action.STOP:
            self.calls.append(event)
            return
        run, last = self.guard.runs[name], self.guard.last_call
        assert last is not None
        request = ModelCall(name, ROOT_LANE, "agent", self.guard.clock(), "m", tokens)
        if last.may_answer(run, run.lanes[ROOT_LANE], request, decision.trip):
            charge = await last.take(run, request)
            if charge is not None:
                self.answers[name] = self.answers.get(name, 0) + 1
                self.calls.append(request)

    def finish(self, which: int, share: int) -> None:
        event = self.calls.pop(which % len(self.calls))
        charge = event.charge
        self.guard.settle(charge, Usage(event.input_tokens * share // 100, charge.max_output * share // 100))

    @property
    def status(self) -> Any:
        (status,) = self.guard.accounts.budgets()
        return status


_STEP = st.tuples(st.sampled_from(["ask", "ask", "settle", "end"]), st.integers(0, 3), st.integers(0, 100))


@given(st.lists(_STEP, min_size=1, max_size=60), st.integers(1_500, 20_000))
def test_the_cap_holds_whatever_happens_in_which_order(steps: list[Any], cap: int) -> None:
    office = Office(cap)

    async def play() -> None:
        for what, which, amount in steps:
            name = f"run{which}"
            if what == "ask":
                await office.ask(name, amount * 10 + 1)
                assert office.status.spent + office.status.reserved <= cap * TOKEN
            elif what == "settle" and office.calls:
                office.finish(which, amount)
            elif what == "end" and not any(event.run == name for event in office.calls):
                office.guard.end(name)
                office.answers.pop(name, None)
            assert all(times == 1 for times in office.answers.values())
        while office.calls:
            office.finish(0, 100)
        for name in list(office.guard.runs):
            office.guard.end(name)

    asyncio.run(play())
    for status in office.guard.accounts.budgets():
        assert status.spent <= cap * TOKEN
        assert status.reserved == 0
    assert office.guard.accounts.standing == {}


async def test_the_hold_is_there_from_the_first_call() -> None:
    office = Office(10_000)
    await office.ask("run", 500)
    # 500 and 200 of the call, and a last call of twice the prompt, a margin and 100 of an answer
    assert office.status.reserved == (500 + 200 + 2 * 500 + 1_024 + 100) * TOKEN


async def test_a_run_that_pauses_gives_its_hold_back_and_takes_it_again() -> None:
    office = Office(10_000)
    await office.ask("run", 500)
    office.finish(0, 100)
    office.guard.pauses.keep("run", waits=True)
    assert office.status.reserved == 0
    office.guard.pauses.resume(RunInfo("run", "app", "ann", "run", at=office.guard.clock()))
    await office.ask("run", 500)
    assert office.status.reserved > (500 + 200) * TOKEN


async def test_an_empty_instruction_is_rejected() -> None:
    with pytest.raises(PolicyError, match="final_answer"):
        Office(1_000, final_answer="")
