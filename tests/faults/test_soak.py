"""Long and wide work: nothing grows with the number of calls, and nothing is left behind.

``RUNGUARD_FAULTS=long`` makes it longer and wider, ``make soak`` lets it run for an hour.
"""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent, ParallelAgent
from google.adk.apps import App
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools import LongRunningFunctionTool
from google.genai import types

from runguard.adk import RunGuardPlugin
from runguard.core.events import RunInfo
from runguard.engine.guard import Guard
from runguard.policy import Policy
from runguard.testing import ScriptedModel, call, text

from .leftovers import Held, descriptors, look, traced
from .soak import LIMITS, work

# bytes: a store has a piece of the journal and a few rows on their way, more or fewer of them
SLACK = {"memory": 16_384, "sqlite": 65_536}


@pytest.fixture(autouse=True)
def _full_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of runs that are over are kept in a bounded number. Here it is reached early."""
    monkeypatch.setattr("runguard.engine.spending._HISTORY_KEPT", 8)


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory" if request.param == "memory" else f"sqlite:///{tmp_path / 'guard.db'}?synchronous=normal"


def step(n: int) -> dict[str, int]:
    return {"n": n}


# ---- one long run ---------------------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
async def test_a_long_run_does_not_grow(store: str, is_long: bool) -> None:
    steps = 10_000 if is_long else 3_000 if store == "memory" else 1_400
    guard = Guard(Policy.validated({**LIMITS, "store": store, "rules": {"same_call": False}}, ""))
    before = look().objects["Lane"]  # other tests of this process may have left some
    guard.start(RunInfo("run", "app", "user", "session", at=guard.clock()))
    with traced():
        await work(guard, "run", 1, steps // 2)
        assert guard.flush(60)
        halfway = look()
        await work(guard, "run", steps // 2, steps)
        assert guard.flush(60)
        end = look()
    grown = {kind: more for kind, more in end.more_than(halfway).items() if more > 50}
    assert grown == {}, "bounded in number"
    assert end.memory - halfway.memory < SLACK[store.partition(":")[0]], (
        f"{(end.memory - halfway.memory) / (steps / 2):.1f} bytes a step"
    )
    assert guard.runs["run"].spend.model_calls == steps - 1
    guard.end("run")
    assert guard.flush(60)
    assert look().objects["Lane"] <= before


# ---- wide runs on ADK -----------------------------------------------------------------------------------------------


class House:
    """One guarded app that serves many sessions."""

    def __init__(self, root: Any, plugin: RunGuardPlugin) -> None:
        self.service = InMemorySessionService()
        self.runner = Runner(app=App(name="app", root_agent=root, plugins=[plugin]), session_service=self.service)

    async def run(self, user: str, session: str) -> list[Any]:
        """One turn; the session is deleted afterwards, so that only the guard can keep something of it."""
        names: dict[str, Any] = {"app_name": "app", "user_id": user, "session_id": session}
        await self.service.create_session(**names)
        message = types.Content(role="user", parts=[types.Part(text="go")])
        events = [event async for event in self.runner.run_async(user_id=user, session_id=session, new_message=message)]
        await self.service.delete_session(**names)
        return events


async def _settled(plugin: RunGuardPlugin) -> Held:
    """The process when everything handed over has left."""
    assert await asyncio.to_thread(plugin.flush, 30)
    for _ in range(5):
        await asyncio.sleep(0)
    return look()


def assert_nothing_left(plugin: RunGuardPlugin, before: Held, after: Held) -> None:
    more = after.more_than(before)
    for kind in ("Fact", "Line", "StoredAccount"):
        assert more.pop(kind, 0) <= 1, "the thread that writes to a store holds its last fact until the next one comes"
    assert more == {}
    assert after.threads <= before.threads
    assert after.tasks <= before.tasks
    assert after.descriptors <= before.descriptors
    assert after.variables == before.variables
    guard = plugin.guard
    registry = plugin.invocations
    assert (guard.runs, registry.known, registry.writing, guard.accounts.spending.costs_by_run) == ({}, {}, {}, {})
    assert (plugin.trips, plugin.snapshot()["guard_errors"]) == ([], 0)
    assert all(status.reserved == 0 for status in plugin.budgets())


@pytest.mark.timeout(900)
async def test_eight_model_calls_at_once_leave_nothing_behind(store: str, is_long: bool) -> None:
    plugin = RunGuardPlugin(store=store, store_timeout=30, **LIMITS)
    models = [ScriptedModel(lambda n, _: call("step", n=n) if n % 3 else text("done")) for _ in range(8)]
    branches = [LlmAgent(name=f"branch_{number}", model=model, tools=[step]) for number, model in enumerate(models)]
    house = House(ParallelAgent(name="all", sub_agents=branches), plugin)
    rounds = 60 if is_long else 5
    for _ in range(5):
        await house.run("u1", "s1")
    before = await _settled(plugin)
    for _ in range(rounds):
        assert not any(event.error_code for event in await house.run("u1", "s1"))
    after = await _settled(plugin)
    assert sum(model.calls for model in models) == 8 * 3 * (rounds + 5)
    assert_nothing_left(plugin, before, after)


@pytest.mark.timeout(1_800)
async def test_many_runs_at_once_leave_nothing_behind(store: str, is_long: bool) -> None:
    plugin = RunGuardPlugin(store=store, store_timeout=60, max_wait_seconds=120, **LIMITS)
    agent = LlmAgent(name="worker", model=ScriptedModel(lambda n, _: text("done"), latency_s=0.01))
    house, many = House(agent, plugin), 1_000 if is_long else 50

    async def crowd() -> None:
        results = await asyncio.gather(*(house.run(f"u{number % 50}", f"s{number}") for number in range(many)))
        assert all(len(events) == 1 and events[0].error_code is None for events in results)

    await crowd()
    held = [await _settled(plugin)]
    # on a busy machine a later crowd may need more threads for the store than the one before: then another one follows
    while len(held) < 4 and (len(held) == 1 or held[-1].more_than(held[-2])):
        await crowd()
        held.append(await _settled(plugin))
    assert plugin.spend()["calls"] == len(held) * many
    assert_nothing_left(plugin, *held[-2:])


@pytest.mark.timeout(900)
async def test_runs_that_pause_leave_a_bounded_number_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runguard.engine.resume.WAITING_KEPT", 5)
    monkeypatch.setattr("runguard.engine.runs.SESSIONS_KEPT", 5)
    monkeypatch.setattr("runguard.engine.runs._SESSIONS_CARRIED", 5)

    def ask(question: str) -> None:
        """A person answers later."""

    others = look().objects["Run"]  # other tests of this process may have left some
    plugin = RunGuardPlugin(**LIMITS)
    model = ScriptedModel(lambda n, _: call("ask", question=str(n)))
    house = House(LlmAgent(name="clerk", model=model, tools=[LongRunningFunctionTool(ask)]), plugin)
    for number in range(10):
        await house.run("u1", f"s{number}")
    before = await _settled(plugin)
    for number in (*range(10, 40), 9):  # the variables name the session whose events were read last
        await house.run("u1", f"s{number}")
    after = await _settled(plugin)
    assert plugin.snapshot()["paused"] == 5
    assert after.objects["Run"] <= others + 5
    assert after.more_than(before) == {}
    assert (after.threads, after.tasks, after.descriptors, after.variables) == (
        before.threads,
        before.tasks,
        before.descriptors,
        before.variables,
    )


def test_descriptors_can_be_counted() -> None:
    first, second = os.pipe()
    held = descriptors()
    os.close(first)
    os.close(second)
    assert descriptors() == held - 2
