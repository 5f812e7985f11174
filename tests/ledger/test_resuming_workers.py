"""A run that pauses on one worker and goes on another: what it has used goes with it, through every kind of store."""

import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.tools import FunctionTool

from runguard import Budget, ToolRule
from runguard.adk import RunGuardPlugin
from runguard.ledger import remote
from runguard.ledger.ledger import StoreOutage
from runguard.policy import Policy
from runguard.replay import open_sources, replay
from runguard.testing import FakeClock, ScriptedModel, assert_stopped, call, text
from tests.kit.desks import PRICES, Desk, asking
from tests.kit.stores import Place

Make = Callable[..., RunGuardPlugin]


@pytest.fixture
def worker(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes workers that share nothing but the store."""
    made: list[RunGuardPlugin] = []

    monkeypatch.setattr(remote, "_ASKERS", 1)  # a server for tests does not take many connections

    def make(**policy: Any) -> RunGuardPlugin:
        monkeypatch.setattr(remote, "_open", {})
        made.append(RunGuardPlugin(store=place.url, store_timeout=10, min_output_tokens=1, **policy))
        return made[-1]

    yield make
    for plugin in made:
        assert plugin.flush(10)
        assert plugin.snapshot()["guard_errors"] == 0
        ledger: Any = plugin.guard.accounts.ledger
        ledger.tell(lambda session: session.close())
        ledger.call(lambda session: session.close())
        assert plugin.flush(10)


async def alternate(desk: Desk, plugins: list[RunGuardPlugin], times: int) -> list[Any]:
    """Each answer reaches another worker."""
    events = await desk.say(plugins[0])
    for turn in range(1, times):
        events = await desk.answer(plugins[turn % len(plugins)])
    return events


async def test_model_calls_are_counted_across_workers(worker: Make) -> None:
    model, desk = asking()
    plugins = [worker(max_model_calls=5) for _ in range(3)]
    trip = assert_stopped(await alternate(desk, plugins, 7), "model_calls")
    assert (model.calls, trip.model_calls, trip.tokens) == (5, 5, 6_250)
    for plugin in plugins:
        assert assert_stopped(await desk.answer(plugin)).id == trip.id, "stopped on every worker"
    assert sum(len(plugin.trips) for plugin in plugins) == 1


async def test_money_is_counted_across_workers(worker: Make) -> None:
    model, desk = asking()
    plugins = [worker(max_usd=0.04, prices=PRICES) for _ in range(2)]
    trip = assert_stopped(await alternate(desk, plugins, 9), "budget")
    assert model.calls <= 4
    assert trip.spent_usd == Decimal("0.01") * model.calls
    assert sum(plugin.spend()["usd"] for plugin in plugins) == trip.spent_usd, "each worker tells what it spent itself"


@pytest.mark.parametrize(
    ("policy", "rule"),
    [({"max_tool_calls": 5}, "tool_calls"), ({"tools": {"look": ToolRule(max_calls=3)}}, "tool_limit")],
)
async def test_tool_calls_are_counted_across_workers(worker: Make, policy: dict[str, Any], rule: str) -> None:
    _, desk = asking(lambda n, _: [call("look", n=n), call("ask", question=str(n))])
    assert_stopped(await alternate(desk, [worker(**policy), worker(**policy)], 7), rule)


async def test_working_time_is_counted_across_workers(worker: Make) -> None:
    clock = FakeClock()

    def work(n: int, _: Any) -> Any:
        clock.advance(60)
        return call("ask", question=str(n))

    model, desk = asking(work)
    one, two = worker(max_seconds=150, clock=clock), worker(max_seconds=150, clock=clock)
    await desk.say(one)
    clock.advance(100_000)
    await desk.answer(two)
    clock.advance(100_000)
    trip = assert_stopped(await desk.answer(one), "deadline")
    assert (trip.observed, model.calls) == (180, 3)


async def test_limits_that_were_named_with_the_run_go_with_it(worker: Make) -> None:
    from google.adk.agents.run_config import RunConfig

    model, desk = asking()
    plugins = [worker(prices=PRICES, budgets=[Budget(usd=0.02, per="label:team")]) for _ in range(2)]
    await desk.say(plugins[0], run_config=RunConfig(custom_metadata={"runguard": {"labels": {"team": "search"}}}))
    for turn in range(1, 5):
        events = await desk.answer(plugins[turn % 2])
    assert assert_stopped(events, "budget").scope_id == "label:team=search"
    assert model.calls <= 2


async def test_what_was_confirmed_is_done_once_on_the_other_worker(worker: Make) -> None:
    paid: list[int] = []

    def pay(invoice: int) -> dict[str, int]:
        paid.append(invoice)
        return {"paid": invoice}

    model = ScriptedModel(lambda n, _: call("pay", invoice=n) if n < 3 else text("done"))
    desk = Desk(LlmAgent(name="clerk", model=model, tools=[FunctionTool(pay, require_confirmation=True)]))
    plugins = [worker(tools={"pay": ToolRule(writes=True, once=True)}) for _ in range(2)]
    await desk.say(plugins[0])
    for turn in range(1, 3):
        await desk.answer(plugins[turn % 2], {"confirmed": True})
    assert (paid, model.calls) == ([1, 2], 3)


async def test_an_extension_by_any_worker_lets_the_run_go_on(worker: Make) -> None:
    model, desk = asking(lambda n, _: call("look", n=n))
    one, two, three = (worker(max_usd=0.02, prices=PRICES) for _ in range(3))
    trip = assert_stopped(await desk.say(one), "budget")
    made = model.calls
    assert assert_stopped(await desk.again(two)).id == trip.id
    assert model.calls == made
    two.extend(trip.scope_id, usd="0.02")
    later = assert_stopped(await desk.again(three), "budget")
    assert made < model.calls <= 4
    assert later.limit == Decimal("0.04")


async def test_a_store_that_is_away_at_the_resume_stops_the_run(worker: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model, desk = asking()
    one, two = worker(max_model_calls=3), worker(max_model_calls=3)
    await desk.say(one)
    await desk.answer(one)
    with monkeypatch.context() as away:
        away.setattr(type(two.guard.accounts.ledger), "ask", _away)
        assert assert_stopped(await desk.answer(two), "guard_error").unit == "outages"
    assert model.calls == 2
    await desk.answer(two)
    assert_stopped(await desk.answer(two), "model_calls")
    assert model.calls == 3, "what it had used before is still known"


async def test_a_store_that_is_away_at_the_resume_can_be_gone_without(
    worker: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, desk = asking()
    one, two = worker(max_model_calls=3), worker(max_model_calls=3, on_outage="open")
    await desk.say(one)
    with monkeypatch.context() as away:
        away.setattr(type(two.guard.accounts.ledger), "ask", _away)
        await desk.answer(two)
    assert (model.calls, two.trips) == (2, [])
    assert "resumed_unsure" in caplog.text


async def _away(*_: Any, **__: Any) -> None:
    raise StoreOutage("away for a moment")


async def test_a_damaged_record_is_an_outage(worker: Make, place: Place) -> None:
    model, desk = asking()
    await desk.say(worker(max_model_calls=3))
    session = place.connect()
    (told,) = session.about("run", desk.invocation)
    record = json.loads(told[1])
    record["carried"]["counted"] = "many"
    session.append("run", desk.invocation, json.dumps(record))
    session.close()
    assert assert_stopped(await desk.answer(worker(max_model_calls=3)), "guard_error").unit == "outages"
    assert model.calls == 1


async def test_the_store_tells_of_one_run(worker: Make, place: Place) -> None:
    _, desk = asking(lambda n, _: [call("look", n=n), call("ask", question=str(n))] if n < 5 else text("done"))
    plugins = [worker(prices=PRICES) for _ in range(2)]
    await alternate(desk, plugins, 5)
    for plugin in plugins:
        assert plugin.flush(10)
    session = place.connect()
    record = json.loads(session.about("run", desk.invocation)[-1][1])
    assert (record["model_calls"], record["tool_calls"], record["spend"]["calls"]) == (5, 8, 5)
    assert Decimal(record["spent_usd"]) == Decimal("0.05")
    assert session.running(60) == [], "a paused run does not run"
    session.close()
    for path in (place.url,) if place.kind != "sqlite" else (place.url.removeprefix("sqlite:///"),):
        (batch,) = replay(open_sources(path), [Policy.validated({"prices": PRICES, "max_model_calls": 4}, "")])
        assert batch.faults.count == 0, batch.faults.first
        ((result,),) = batch.results
        assert (result.runs, result.model_calls, result.tool_calls) == (1, 5, 8)
        assert [(verdict.rule, verdict.observed) for verdict in result.verdicts if verdict.action == "stop"] == [
            ("model_calls", 5)
        ]
