"""One turn of an agent is one run: before and after a pause, in blocks of ``runguard.run()``, and in other threads."""

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import runguard
from runguard import Budget, PolicyError
from runguard.calls.ending import EndingConditions
from runguard.calls.model_calls import ModelRequest, Permission
from runguard.calls.run import AgentRun, Whom
from runguard.calls.tool_calls import ToolUse, current_place
from runguard.core.decision import Trip
from runguard.core.events import Outcome
from runguard.engine.guard import Guard
from runguard.policy.settings import Policy
from runguard.pricing.rates import Usage
from runguard.termination import MaxIterationsTermination
from tests.kit.examples import each_row

PRICES = {"m": {"input": 0.0, "output": 1.0}}  # dollars per million tokens
ANN: dict[str, Any] = {"app": "shop", "user": "ann", "session": "chat-7"}


def guard_with(**settings: Any) -> Guard:
    return Guard(Policy.build(**{"prices": PRICES, "models": {"m": {"max_output_tokens": 1_000}}, **settings}))


async def model_call(run: AgentRun, *, tools: tuple[ToolUse, ...] = (), output: int = 100) -> Permission | None:
    """One paid call; None: it was refused."""
    reply = await run.ask(lambda: ModelRequest.of("m", "hello"))
    if not isinstance(reply, Permission):
        return None
    reply.settle(Usage(10, output), model="m", calls=tools)
    return reply


async def calls_until_stopped(run: AgentRun, most: int = 20) -> int:
    for number in range(most):
        if await model_call(run) is None:
            return number
    return most


# ---- A turn that waits for a human's approval.


async def test_a_turn_that_was_approved_ten_times_is_one_run() -> None:
    guard = guard_with(max_model_calls=8)
    made = 0
    run = AgentRun.start(guard, "agent", **ANN)
    for turn in range(12):
        if await model_call(run, tools=(ToolUse(f"call-{turn}", "delete"),)) is None:
            break
        made += 1
        assert run.is_unfinished
        run.pause([f"call-{turn}"])
        assert not guard.runs, "a paused run is not open"
        run = await AgentRun.resume(guard, "agent", [f"call-{turn}"], **ANN)
    run.end()
    assert made == 8
    assert len(guard.trips) == 1
    assert not guard.runs
    assert guard.pauses.waiting == 0


async def test_a_paused_turn_goes_on_in_another_worker_of_the_store(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'guard.db'}"
    first, second = (guard_with(max_model_calls=3, store=store) for _ in range(2))
    run = AgentRun.start(first, "agent", **ANN)
    await model_call(run, tools=(ToolUse("a", "delete"),))
    await model_call(run, tools=(ToolUse("b", "delete"),))
    run.pause(["a", "b"])
    assert first.flush(5)
    other = await AgentRun.resume(second, "agent", ["b"], **ANN)
    assert other.id == run.id
    assert await calls_until_stopped(other) == 1
    other.end()


async def test_a_user_never_goes_on_with_the_run_of_another_one() -> None:
    guard = guard_with(max_model_calls=3)
    run = AgentRun.start(guard, "agent", **ANN)
    run.pause(["call-1"])
    bobs = await AgentRun.resume(guard, "agent", ["call-1"], **{**ANN, "user": "bob"})
    assert bobs.id != run.id
    anns = await AgentRun.resume(guard, "agent", ["call-1"], **ANN)
    assert anns.id == run.id
    bobs.end()
    anns.end()
    assert not guard.runs


async def test_a_new_turn_forgets_the_one_that_waited() -> None:
    guard = guard_with(max_model_calls=3)
    AgentRun.start(guard, "agent", **ANN).pause(["thread"])
    AgentRun.start(guard, "agent", keys=["thread"], **ANN).end()
    assert guard.pauses.waiting == 0


def test_a_turn_resumes_without_an_event_loop(tmp_path: Path) -> None:
    guard = guard_with(max_model_calls=3, store=f"sqlite:///{tmp_path / 'guard.db'}")
    run = AgentRun.start(guard, "agent", **ANN)
    run.pause(["call-1"])
    again = AgentRun.resume_now(guard, "agent", ["call-1"], **ANN)
    assert again.id == run.id
    again.end()


async def test_a_store_that_is_away_refuses_a_resumed_turn() -> None:
    guard = guard_with(max_model_calls=3, store="redis://127.0.0.1:9", store_timeout=0.1)
    run = await AgentRun.resume(guard, "agent", ["call-1"], **ANN)
    assert await model_call(run) is None
    run.end()


async def test_a_termination_condition_counts_on_after_a_pause() -> None:
    guard = guard_with()
    run = AgentRun.start(guard, "agent", condition=MaxIterationsTermination(2), **ANN)
    await model_call(run, tools=(ToolUse("a", "look"),))
    run.pause(["a"])
    run = await AgentRun.resume(guard, "agent", ["a"], condition=MaxIterationsTermination(2), **ANN)
    assert isinstance(run.ending, EndingConditions)
    run.tools.saw(ToolUse("a", "look"), {"seen": 1})
    assert await model_call(run) is None
    run.end()


async def test_two_that_resume_the_same_turn_at_once_share_its_run() -> None:
    guard = guard_with(max_model_calls=4)
    run = AgentRun.start(guard, "agent", **ANN)
    run.pause(["a"])
    one, two = [await AgentRun.resume(guard, "agent", ["a"], **ANN) for _ in range(2)]
    assert one.id == run.id
    one.end()
    assert await model_call(two) is not None or two.id != run.id
    two.end()
    assert not guard.runs


# ---- Tool calls that wait.


async def test_a_tool_call_that_waits_for_an_approval_costs_nothing_and_counts_for_nothing() -> None:
    guard = guard_with(max_usd=1, max_tool_calls=2, tools={"delete": {"price": "0.4", "max_calls": 2, "once": True}})
    run = AgentRun.start(guard, "agent", **ANN)
    for name in ("a", "b", "c", "d"):
        use = ToolUse(name, "delete", {"row": 1})
        await model_call(run, tools=(use,))
        assert await run.tools.check(use) is None
        run.tools.deferred(use)
    use = ToolUse("e", "delete", {"row": 1})
    await model_call(run, tools=(use,))
    assert await run.tools.check(use) is None
    run.tools.answered(use, "deleted")
    run.end()
    assert guard.accounts.spend()["tools_usd"] == Decimal("0.4")
    assert guard.accounts.spend()["reserved_usd"] == 0
    assert not guard.trips


async def test_a_tool_that_is_seen_only_afterwards_stops_the_run_beyond_its_limit() -> None:
    guard = guard_with(tools={"search": {"max_calls": 2}})
    run = AgentRun.start(guard, "agent", **ANN)
    made = 0
    for number in range(10):
        use = ToolUse(f"call-{number}", "search", {"q": number})
        if await model_call(run, tools=(use,)) is None:
            break
        made += 1
        run.tools.saw(use, {"hit": number})
    run.end()
    assert made == 3, "two calls are allowed; the third was made before it could be seen"
    assert [trip.rule for trip in guard.trips] == ["tool_limit"]


async def test_a_tool_that_something_else_answered_for_costs_nothing() -> None:
    guard = guard_with(max_usd=1, tools={"search": {"price": "0.4"}})
    run = AgentRun.start(guard, "agent", **ANN)
    use = ToolUse("a", "search")
    await model_call(run, tools=(use,))
    assert run.tools.unchecked == {"a": use}
    assert await run.tools.check(use) is None
    assert not run.tools.unchecked
    run.tools.skipped(use)
    run.end()
    assert guard.accounts.spend()["tools_usd"] == guard.accounts.spend()["reserved_usd"] == 0


async def test_a_call_that_was_deferred_can_be_answered_elsewhere() -> None:
    guard = guard_with(max_usd=1, tools={"search": {"price": "0.4"}})
    run = AgentRun.start(guard, "agent", **ANN)
    use = ToolUse("a", "search")
    await model_call(run, tools=(use,))
    await run.tools.check(use)
    run.tools.deferred(use)
    assert run.tools.unchecked == {"a": use}
    run.tools.saw(use, "found")
    run.end()
    assert guard.accounts.spend()["tools_usd"] == Decimal("0.4")


async def test_a_call_that_was_never_executed_is_seen_and_costs_nothing() -> None:
    guard = guard_with(max_usd=1, tools={"delete": {"price": "0.4"}})
    run = AgentRun.start(guard, "agent", **ANN)
    rejected, executed = ToolUse("a", "delete", {"row": 1}), ToolUse("b", "delete", {"row": 2})
    await model_call(run, tools=(rejected, executed))
    assert run.tools.asked == ["a", "b"]
    assert run.tools.waiting == {"a": (rejected, False), "b": (executed, False)}
    run.tools.saw(rejected, "not approved", executed=False)
    assert guard.accounts.spend()["tools_usd"] == 0
    assert run.tools.waiting == {"b": (executed, False)}
    assert await run.tools.check(executed) is None
    assert run.tools.waiting == {"b": (executed, True)}
    run.tools.answered(executed, "deleted")
    assert not run.tools.waiting
    run.end()
    assert guard.accounts.spend()["tools_usd"] == Decimal("0.4")


async def test_a_call_that_no_tool_executed_is_shown_to_the_rules_and_costs_nothing() -> None:
    guard = guard_with(max_usd=1, tools={"search": {"price": "0.1"}})
    run = AgentRun.start(guard, "agent", **ANN)
    for number in range(10):
        use = ToolUse(f"call-{number}", "search", {"q": f"{number} o'clock"})
        if await model_call(run, tools=(use,)) is None:
            break
        run.tools.saw(use, "q: Input should be a valid integer", Outcome.ERROR, executed=False)
    run.end()
    assert [trip.rule for trip in guard.trips] == ["stall"]
    assert guard.accounts.spend()["tools_usd"] == 0


# ---- Sizes of requests.


@pytest.mark.parametrize(
    ("following", "least", "most"),
    [
        ({"prompt": "x" * 300, "hidden": 50_010}, 50_010, 50_200),  # what an adapter has learned of counts once
        ({"prompt": "x" * 600}, 50_000 + 100, math.inf),
    ],
)
async def test_the_next_reservation_knows_how_long_the_last_prompt_really_was(
    following: dict[str, Any], least: int, most: float
) -> None:
    guard = guard_with(max_tokens=1_000_000)
    run = AgentRun.start(guard, "agent", **ANN)
    first = await run.ask(lambda: ModelRequest.of("m", "x" * 300))
    assert isinstance(first, Permission)
    first.settle(Usage(50_000, 10), model="m")
    second = await run.ask(lambda: ModelRequest.of("m", **following))
    assert isinstance(second, Permission)
    assert least <= second.request.input_tokens <= most
    if "hidden" in following:
        assert least <= second.request.likely_tokens <= most
    second.release()
    run.end()


@pytest.mark.parametrize("is_async", [False, True])
def test_the_user_s_own_counter_sizes_requests(is_async: bool) -> None:
    seen: list[object] = []

    def count(request: object) -> int:
        seen.append(request)
        return 12_345

    async def count_later(request: object) -> int:
        await asyncio.sleep(0)
        return count(request)

    guard = guard_with(max_tokens=1_000_000, tokens=count_later if is_async else count)
    run = AgentRun.start(guard, "agent", **ANN)
    reply = run.ask_now(lambda: ModelRequest.of("m", "short", counts={"messages": []}))
    assert isinstance(reply, Permission)
    assert reply.request.input_tokens == 12_345
    assert seen == [{"messages": []}]
    reply.release()
    run.end()


# ---- Several models that may answer.

TWO_PRICES = {"cheap": {"input": 0.0, "output": 1.0}, "dear": {"input": 0.0, "output": 100.0}}
TWO_LIMITS = {name: {"max_output_tokens": 1_000} for name in ("cheap", "dear", "unknown")}


async def reserved_for(*models: str, **settings: Any) -> tuple[Any, Guard]:
    """Ask for one call that any of the models may answer. The last one does."""
    guard = guard_with(prices=TWO_PRICES, models=TWO_LIMITS, **{"max_usd": 1, **settings})
    run = AgentRun.start(guard, "agent", **ANN)
    first, *others = models
    reply = await run.ask(lambda: ModelRequest.of(first, "hello", others=others))
    if isinstance(reply, Permission):
        reply.settle(Usage(10, 500), model=models[-1])
    run.end()
    return reply, guard


async def test_the_most_expensive_of_the_models_that_may_answer_is_reserved() -> None:
    for first, answering, usd in (("cheap", "dear", "0.05"), ("dear", "cheap", "0.0005")):
        reply, guard = await reserved_for(first, answering)
        assert reply.charges[0].held == 100_000_000, "a thousand tokens of the dear one, in nano-dollars"
        assert guard.accounts.spend()["usd"] == Decimal(usd)


async def test_one_model_without_a_price_among_them_is_refused_as_on_its_own() -> None:
    assert isinstance((await reserved_for("cheap", "unknown"))[0], Trip)
    reply, _ = await reserved_for("cheap", "unknown", on_unpriced="tokens")
    assert reply.charges[0].held == 1_000_000


@pytest.mark.parametrize("known", [Usage(10, 200), None])
async def test_what_an_attempt_really_took_replaces_its_estimate(known: Usage | None) -> None:
    guard = guard_with(max_usd=1)
    run = AgentRun.start(guard, "agent", **ANN)
    reply = await run.ask(lambda: ModelRequest.of("m", "hello"))
    assert isinstance(reply, Permission)
    reply.fail(None)
    assert guard.accounts.spend()["estimated_calls"] == 1
    reply.correct(known)
    run.end()
    spend = guard.accounts.spend()
    assert (spend["calls"], spend["estimated_calls"]) == (1, 0)
    assert spend["usd"] == (Decimal("0.0002") if known else 0)


# ---- For whom.


@pytest.mark.parametrize("end", [lambda one: one.settle(Usage(10, 100)), lambda one: one.fail(OSError("cut"))])
async def test_a_call_whose_bill_fails_is_an_estimate_and_keeps_nothing_held(
    end: Callable[[Permission], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = guard_with(max_usd=1)
    run = AgentRun.start(guard, "agent", **ANN)
    permission = await run.ask(lambda: ModelRequest.of("m", "hello"))
    assert isinstance(permission, Permission)

    def broken(*_: Any) -> Any:
        raise ArithmeticError

    with monkeypatch.context() as patch:
        patch.setattr("runguard.calls.model_calls._completed", broken)
        patch.setattr("runguard.calls.model_calls.was_unbilled", broken)
        end(permission)
    assert guard.guard_errors == 1
    assert guard.accounts.budgets(f"run:{run.id}")[0].reserved == 0
    run.end()
    assert run.spent.usd == Decimal("0.001")  # the longest answer


async def test_a_block_names_the_user_of_each_request() -> None:
    guard = guard_with(budgets=[Budget(usd=1, per="user")])
    whom = Whom(app="shop")
    for user in ("ann", "bob"):
        with runguard.run(user=user, session="s", labels={"team": "search"}) as block:
            run = AgentRun.start(guard, "agent", **whom.of(guard, None))
            await model_call(run, output=500)
            run.end()
        assert block.usd == Decimal("0.0005")
        assert (block.tokens, block.calls, block.trips) == (510, 1, [])
    scopes = {status.scope for status in guard.accounts.budgets()}
    assert scopes == {"user:shop/ann", "user:shop/bob"}
    assert guard.accounts.spend("user:shop/ann")["usd"] == Decimal("0.0005")


def test_a_function_names_the_user_from_what_the_framework_gives() -> None:
    guard = guard_with(budgets=[Budget(usd=1, per="user")])
    whom = Whom(app="shop", user=lambda runtime: runtime["identity"])
    assert whom.of(guard, {"identity": "ann"}, session="t1")["user"] == "ann"
    with pytest.raises(PolicyError, match="user= raised KeyError"):
        whom.of(guard, {})
    with pytest.raises(PolicyError, match="user= gave 7"):
        whom.of(guard, {"identity": 7})
    with runguard.run(user="bob"):
        assert whom.of(guard, {"identity": "ann"})["user"] == "bob"


async def test_nobody_is_asked_whose_agent_joins_the_run_around_it() -> None:
    guard = guard_with(budgets=[Budget(usd=1, per="user")])
    whom = Whom(user=lambda given: given["identity"])
    run = AgentRun.start(guard, "outer", **whom.of(guard, {"identity": "ann"}))
    use = ToolUse("a", "delegate")
    await model_call(run, tools=(use,))
    with run.tools.inside(use):
        inner = AgentRun.start(guard, "inner", **whom.of(guard, None))
    assert inner.id == run.id
    inner.end()
    run.end()


@each_row("wrong", [{"user": 123}, {"user": None}, {"app": None}, {"session": 7}, {"app": lambda _: ""}])
def test_a_wrong_name_is_refused_at_construction(wrong: dict[str, Any]) -> None:
    with pytest.raises(PolicyError):
        Whom(**wrong)


async def test_all_agents_in_a_block_are_one_run_and_those_at_once_do_not_look_like_a_loop() -> None:
    guard = guard_with(max_model_calls=3)
    with runguard.run(user="ann") as block:
        runs = [AgentRun.start(guard, "agent", **Whom().of(guard, None)) for _ in range(2)]
        assert {run.id for run in runs} == {block.id}
        assert len({layer.lane for run in runs for layer in run.layers}) == 2
        made = [await calls_until_stopped(run) for run in runs]
        for run in runs:
            run.end()
        assert sum(made) == 3
        assert [trip.rule for trip in block.trips] == ["model_calls"]
        assert guard.runs, "the block ends its run"
    assert not guard.runs


async def test_the_limits_of_a_block_hold_for_agents_in_it() -> None:
    guard = guard_with()
    with runguard.run(budget={"max_calls": 2}, prices=PRICES) as block:
        run = AgentRun.start(guard, "agent", **Whom().of(guard, None))
        assert await calls_until_stopped(run) == 2
        run.end()
        assert block.calls == 2, "each call counts once on the bill"
        assert block.usd == Decimal("0.0002")


async def test_a_turn_that_pauses_in_one_block_goes_on_in_the_next() -> None:
    guard = guard_with(max_model_calls=3)
    with runguard.run(user="ann", session="s"):
        run = AgentRun.start(guard, "agent", **Whom().of(guard, None))
        await model_call(run, tools=(ToolUse("a", "delete"),))
        await model_call(run, tools=(ToolUse("a", "delete"),))
        run.pause(["a"])
    assert not guard.runs
    with runguard.run(user="ann", session="s") as block:
        again = await AgentRun.resume(guard, "agent", ["a"], **Whom().of(guard, None))
        assert again.id == run.id
        assert await calls_until_stopped(again) == 1
        again.end()
        assert block.calls == 3
    assert not guard.runs


async def test_a_guard_around_another_one_holds_too() -> None:
    outer, inner = guard_with(max_model_calls=2), guard_with(max_model_calls=10)
    around = AgentRun.start(outer, "first", **ANN)
    run = AgentRun.start(inner, "second", around=around, **ANN)
    assert await calls_until_stopped(run) == 2
    run.end()
    assert outer.runs, "its own agent ends it"
    around.end()
    assert not outer.runs
    assert not inner.runs


async def test_a_guard_around_another_one_holds_after_a_pause_too() -> None:
    outer, inner = guard_with(max_model_calls=3), guard_with(max_model_calls=10)
    for keys in ([], ["call-1"], ["call-1"]):
        around = await AgentRun.resume(outer, "first", keys, **ANN)
        run = await AgentRun.resume(inner, "second", keys, around=around, **ANN)
        assert await model_call(run, tools=(ToolUse("call-1", "delete"),)) is not None
        if len(outer.trips) + len(inner.trips) == 0:
            run.pause(["call-1"])
            around.pause(["call-1"])
    around = await AgentRun.resume(outer, "first", ["call-1"], **ANN)
    run = await AgentRun.resume(inner, "second", ["call-1"], around=around, **ANN)
    assert await model_call(run) is None
    run.end()
    around.end()
    assert [len(outer.trips), len(inner.trips)] == [1, 0]


# ---- Threads.


async def test_agents_in_threads_and_pools_of_a_tool_belong_to_its_run() -> None:
    guard = guard_with(max_model_calls=4)
    run = AgentRun.start(guard, "outer", **ANN)
    use = ToolUse("a", "delegate")
    await model_call(run, tools=(use,))

    def inner(_: int = 0) -> int:
        made = AgentRun.start(guard, "inner", **ANN)
        count = asyncio.run(calls_until_stopped(made))
        made.end()
        return count

    counts: list[int] = []
    with run.tools.inside(use), ThreadPoolExecutor(2) as pool:
        counts += pool.map(inner, range(2))
        thread = threading.Thread(target=lambda: counts.append(inner()))
        thread.start()
        thread.join()
    run.end()
    assert sum(counts) == 3, "one call was the outer agent's own"
    assert len(guard.trips) == 1


def test_a_pool_that_began_inside_a_tool_takes_no_run_into_later_jobs() -> None:
    guard = guard_with()
    run = AgentRun.start(guard, "outer", **ANN)
    pool = ThreadPoolExecutor(1)
    with run.tools.inside(ToolUse("a", "delegate")):
        assert pool.submit(lambda: bool(current_place().layers)).result()
    assert not pool.submit(lambda: bool(current_place().layers)).result()
    pool.shutdown()
    run.end()


# ---- A ledger that the guards of one process share.


async def test_guards_that_are_built_per_request_share_a_named_store() -> None:
    spent = 0
    for _ in range(5):
        guard = guard_with(budgets=[Budget(usd="0.0003", per="user")], store="memory://per-request")
        run = AgentRun.start(guard, "agent", **ANN)
        spent += await model_call(run, output=100) is not None
        run.end()
        for each in guard.trips:
            assert isinstance(each, Trip)
    assert spent <= 3


async def test_the_kill_switch_of_one_guard_stops_the_others_of_its_store() -> None:
    one, two = (guard_with(store="memory://switch") for _ in range(2))
    run = AgentRun.start(two, "agent", **ANN)
    one.operator_stops.throw("user:shop/ann", "ops", "drill")
    assert await model_call(run) is None
    run.end()
    one.operator_stops.release("user:shop/ann")
    again = AgentRun.start(two, "agent", **ANN)
    assert await model_call(again) is not None
    again.end()


async def test_a_guard_of_a_named_store_resumes_what_another_one_has_paused() -> None:
    one, two = (guard_with(max_model_calls=3, store="memory://pauses") for _ in range(2))
    run = AgentRun.start(one, "agent", **ANN)
    await model_call(run, tools=(ToolUse("a", "x"),))
    run.pause(["a"])
    again = await AgentRun.resume(two, "agent", ["a"], **ANN)
    assert again.id == run.id
    assert await calls_until_stopped(again) == 2
    again.end()
    assert not one.runs
    assert not two.runs


@pytest.mark.parametrize("url", ["memory://", "memory://a/b", "memory://a b"])
def test_a_named_store_needs_a_plain_name(url: str) -> None:
    with pytest.raises(PolicyError, match="memory://shop"):
        Policy.build(store=url)


def test_many_guards_with_the_same_budgets_are_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "runguard"):
        for _ in range(45):
            guard_with(budgets=[Budget(usd=3, per="user", window="1d")]).check_store()
    assert [record.message.split(":")[0] for record in caplog.records] == ["runguard.many_guards"]


@pytest.fixture(autouse=True)
def no_run_is_left_around() -> Iterator[None]:
    yield
    assert not current_place().layers
