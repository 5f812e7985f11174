"""What tools cost: caps hold for every order of events, and nothing stays reserved."""

import asyncio
import logging
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runguard import Budget, PolicyError, ToolRule
from runguard.core.decision import Action, Decision
from runguard.core.events import ROOT_LANE, Answer, ModelCall, Outcome, RunInfo, ToolCall, ToolResults
from runguard.engine.guard import Guard
from runguard.policy import Policy
from runguard.pricing.rates import Usage


class Till:
    """One guard and one run whose tools are called by hand."""

    def __init__(self, **policy: Any) -> None:
        self.guard = Guard(Policy.validated({"max_wait_seconds": 0, **policy}, "keywords"))
        self.run = self.guard.start(RunInfo("run", "app", "ann", "s1", at=self.guard.clock()))
        self._count = 0

    async def call(self, tool: str, args: object = None, batch: str = "") -> tuple[str, Decision]:
        self._count += 1
        call_id = f"c{self._count}"
        event = ToolCall(
            "run", ROOT_LANE, "agent", self.guard.clock(), tool, call_id.encode(), batch or call_id, call_id
        )
        self.guard.check(event)
        return call_id, await self.guard.reserve_tool(self.run, event, args)

    @property
    def spend(self) -> dict[str, Any]:
        return self.guard.accounts.spend()


def priced(price: Any, **more: Any) -> dict[str, ToolRule]:
    return {"search": ToolRule(price=price, **more)}


_STEP = st.tuples(st.sampled_from(["call", "answer", "raise", "release"]), st.integers(0, 7), st.integers(0, 1_500))


@given(st.lists(_STEP, max_size=60), st.integers(1_000, 6_000), st.sampled_from([None, 700]))
def test_the_cap_holds_whatever_happens_in_which_order(steps: list[Any], cap: int, fixed: int | None) -> None:
    nano = Decimal("1e-9")
    price: Any = fixed * nano if fixed else lambda args, answer: answer * nano
    rule = priced(price) if fixed else priced(price, price_bound=1_500 * nano)
    till = Till(budgets=[Budget(usd=cap * nano, per="user", window="1d")], tools=rule)

    async def play() -> int:
        open_calls: list[str] = []
        paid = 0
        for what, which, amount in steps:
            if what == "call":
                call_id, decision = await till.call("search", batch="b")
                if decision.action < Action.BLOCK:
                    open_calls.append(call_id)
            elif open_calls:
                call_id = open_calls.pop(which % len(open_calls))
                if what == "release":
                    till.guard.release_tool(till.run, call_id)
                else:
                    till.guard.settle_tool(till.run, call_id, None, amount)
                    paid += fixed or amount
            for status in till.guard.accounts.budgets():
                assert status.spent + status.reserved <= cap * nano
                assert status.spent == paid * nano == till.spend["usd"]
        for call_id in open_calls:
            till.guard.release_tool(till.run, call_id)
        return paid

    paid = asyncio.run(play())
    assert [(status.spent, status.reserved) for status in till.guard.accounts.budgets()] in ([], [(paid * nano, 0)])
    assert (till.spend["usd"], till.spend["reserved_usd"]) == (paid * nano, 0)


async def test_a_waiting_tool_gets_what_another_gives_back() -> None:
    till = Till(max_usd=1, tools=priced(1), max_wait_seconds=30)
    first, _ = await till.call("search")
    second = asyncio.create_task(till.call("search"))
    await asyncio.sleep(0.01)
    assert not second.done()
    till.guard.release_tool(till.run, first)
    assert not (await second)[1]


async def test_an_answer_settles_what_is_still_open() -> None:
    till = Till(tools=priced(1))
    ids = [(await till.call("search"))[0] for _ in range(3)]
    outcomes = [None, Outcome.REFUSED, Outcome.ERROR]
    answers = [Answer("search", b"x", 1, i, outcome) for i, outcome in zip(ids, outcomes, strict=True)]
    till.guard.after(ToolResults("run", ROOT_LANE, "agent", 2.0, "b", answers))
    assert (till.spend["usd"], till.spend["reserved_usd"]) == (2, 0)


async def test_the_end_of_the_run_pays_what_never_answered() -> None:
    till = Till(tools=priced(lambda args, answer: 1, price_bound=2))
    await till.call("search")
    till.guard.end("run")
    assert (till.spend["usd"], till.spend["estimated_calls"], till.spend["reserved_usd"]) == (2, 1, 0)


@pytest.mark.parametrize("value", [-1, float("nan"), "much", None, True])
async def test_a_price_that_is_none_is_booked_at_its_bound(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    till = Till(tools=priced(lambda args, answer: value, price_bound=2))
    call_id, _ = await till.call("search")
    with caplog.at_level(logging.WARNING):
        till.guard.settle_tool(till.run, call_id, None, None)
    assert (till.spend["usd"], till.spend["estimated_calls"]) == (2, 1)
    assert "runguard.tool_price_failed" in caplog.text


@pytest.mark.parametrize("exit_type", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
async def test_a_price_function_that_ends_the_program_pays_its_bound_first(exit_type: type[BaseException]) -> None:
    def leave(args: object, answer: object) -> int:
        raise exit_type

    till = Till(tools=priced(leave, price_bound=2), max_usd=5)
    call_id, _ = await till.call("search")
    with pytest.raises(exit_type):
        till.guard.settle_tool(till.run, call_id, None, None)
    assert (till.spend["usd"], till.spend["estimated_calls"], till.spend["reserved_usd"]) == (2, 1, 0)
    with pytest.raises(exit_type):
        till.guard.tool_prices.book_unseen(till.run, ROOT_LANE, "agent", Answer("search", b"x", 1, "unseen"))
    assert (till.spend["usd"], till.spend["estimated_calls"], till.spend["reserved_usd"]) == (4, 2, 0)


@pytest.mark.parametrize("exit_type", [SystemExit, KeyboardInterrupt])
async def test_a_bound_that_ends_the_program_leaves_no_call_unbooked(exit_type: type[BaseException]) -> None:
    def leave(args: object) -> int:
        raise exit_type

    till = Till(tools=priced(lambda args, answer: 1, price_bound=leave))
    with pytest.raises(exit_type):
        till.guard.tool_prices.book_unseen(till.run, ROOT_LANE, "agent", Answer("search", b"x", 1, "unseen"))
    till.guard.end("run")
    assert (till.spend["paid_tool_calls"], till.spend["estimated_calls"]) == (1, 1)


async def test_a_bound_that_fails_refuses_where_dollars_are_limited() -> None:
    rule = priced(lambda args, answer: 1, price_bound=lambda args: args["pages"])
    limited = Till(tools=rule, max_usd=5)
    _, decision = await limited.call("search", {})
    assert (decision.action, decision.finding.rule if decision.finding else "") == (Action.BLOCK, "unpriced")
    assert "not known what 'search' would cost" in decision.for_model
    free = Till(tools=rule)
    call_id, decision = await free.call("search", {})
    assert not decision
    free.guard.settle_tool(free.run, call_id, {}, None)
    assert free.spend["usd"] == 1


async def test_more_than_the_bound_is_an_overrun() -> None:
    till = Till(tools=priced(lambda args, answer: 3, price_bound=1), max_usd=2)
    call_id, _ = await till.call("search")
    till.guard.settle_tool(till.run, call_id, None, None)
    (status,) = till.guard.accounts.budgets()
    assert (status.spent, status.overrun, status.closed) == (3, 1, True)


async def test_the_kill_switch_stops_at_a_paid_tool() -> None:
    till = Till(tools=priced(1), max_usd=5)
    till.guard.operator_stops.throw("user:app/ann", "ops", None)
    _, decision = await till.call("search")
    assert decision.action is Action.STOP


def test_what_does_not_fit_together_is_rejected() -> None:
    with pytest.raises(PolicyError, match="add price_bound"):
        ToolRule(price=lambda args, answer: 1)
    with pytest.raises(PolicyError, match="price_bound needs a price"):
        ToolRule(price=1, price_bound=2)
    with pytest.raises(PolicyError, match="price = -1"):
        ToolRule(price=-1)
    assert ToolRule(price=0).price == 0
    digests = {Policy.validated({"tools": {"a": rule}}, "keywords").digest for rule in (ToolRule(price=1), ToolRule())}
    assert len(digests) == 2


async def test_usage_of_models_stays_apart() -> None:
    till = Till(tools=priced(1), prices={"m": {"input": 1_000, "output": 0}})
    call_id, _ = await till.call("search")
    till.guard.settle_tool(till.run, call_id, None, None)
    event = ModelCall("run", ROOT_LANE, "agent", 1.0, "m", tool="search")
    await till.guard.reserve(event, slot=False)
    till.guard.settle(event.charge, Usage(1_000, 0))
    search = till.spend["by_tool"]["search"]
    assert (search["usd"], search["tools_usd"], search["calls"], search["paid_tool_calls"]) == (2, 1, 1, 1)
    assert till.guard.runs["run"].snapshot(2.0)["tools_usd"] == {"search": 1}
