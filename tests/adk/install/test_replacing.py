"""``install()`` from the same file:
an edited ``agent.py`` that is loaded again replaces the policy and loses nothing.
"""

import asyncio
import gc
import importlib.util
import logging
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.runners import InMemoryRunner, Runner
from google.adk.tools.agent_tool import AgentTool

import runguard
from runguard.adk import RunGuardPlugin, patching
from runguard.errors import PolicyError
from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, run, text

PRICES = {"scripted-1": {"input": 10, "output": 40}}


class File:
    """An agent's file. ``load`` writes a policy into it and loads it, as a server does after an edit."""

    def __init__(self, path: Path, store: str | None) -> None:
        self.path, self.fixed = path, {"prices": PRICES, **({"store": store} if store else {})}

    def load(self, **policy: Any) -> RunGuardPlugin:
        settings = {**self.fixed, **policy}
        lines = "\n" * len(self.path.read_text().splitlines() if self.path.exists() else [])  # another line each time
        self.path.write_text(
            f"{lines}import runguard\nfrom runguard import Budget, Threshold, ToolRule\nplugin = "
            f"runguard.install(**{settings!r})\n"
        )
        spec = importlib.util.spec_from_file_location("edited_agent", self.path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        plugin: RunGuardPlugin = module.plugin
        return plugin


@pytest.fixture(params=["memory", "sqlite"])
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> File:
    monkeypatch.setattr("sys.dont_write_bytecode", True)  # two edits in one second have equal time stamps
    return File(tmp_path / "agent.py", f"sqlite:///{tmp_path}/guard.db" if request.param == "sqlite" else None)


def step(q: int) -> dict[str, Any]:
    return {"step": q}


def endless(*tools: Any, name: str = "a") -> tuple[LlmAgent, ScriptedModel]:
    model = ScriptedModel(lambda n, _: call("step", q=n))
    return LlmAgent(name=name, description="walks", model=model, tools=[step, *tools]), model


def reserved(plugin: RunGuardPlugin) -> int:
    assert plugin.flush(5)
    return int(plugin.spend()["reserved_usd"]) + sum(int(status.reserved) for status in plugin.budgets())


class Gate:
    """A tool call that waits until the test lets it go on."""

    def __init__(self) -> None:
        self.reached, self.opened = asyncio.Event(), asyncio.Event()

    async def wait_here(self, q: int) -> dict[str, Any]:
        self.reached.set()
        await self.opened.wait()
        return {"waited": q}


def gated(gate: Gate, then: Callable[[int], Any], *tools: Any) -> tuple[LlmAgent, ScriptedModel]:
    """An agent that waits at the gate in its first tool call and then goes on as told."""
    model = ScriptedModel(lambda n, _: call("wait_here", q=1) if n == 1 else then(n))
    return LlmAgent(name="slow", model=model, tools=[gate.wait_here, step, *tools]), model


async def test_an_edited_file_replaces_the_policy_and_keeps_ledger_trips_and_stops(
    file: File, caplog: pytest.LogCaptureFixture
) -> None:
    first = file.load(max_model_calls=3)
    agent, model = endless()
    runner = InMemoryRunner(agent=agent, app_name="app")
    assert_stopped(await run(None, runner=runner), "model_calls")
    first.stop("user:app/mallory", actor="ops", reason="abuse")
    spent, trips = first.spend()["usd"], first.trips
    assert first.flush(5)
    with caplog.at_level(logging.WARNING, "runguard"):
        second = file.load(max_model_calls=5)
    assert second is first
    (line,) = [record.getMessage() for record in caplog.records if "policy_replaced" in record.getMessage()]
    assert line.count(f"{file.path}:") == 2
    assert (second.spend()["usd"], second.trips, [stop.scope for stop in second.stops()]) == (
        spent,
        trips,
        ["user:app/mallory"],
    )
    assert spent > 0
    model._calls = 0
    assert_stopped(await run(None, runner=runner, session_id="s2"), "model_calls")
    assert model.calls == 5, "the new limit"
    assert_stopped(await run(endless()[0], user_id="mallory"), "kill_switch")
    assert [trip.rule for trip in second.trips] == ["model_calls", "model_calls", "kill_switch"]
    assert first.trips == second.trips, "who kept the first plugin sees the same"
    assert runner.plugin_manager.plugins == [second]
    assert reserved(second) == 0


async def test_what_was_spent_counts_against_the_new_cap(file: File) -> None:
    first = file.load(budgets=[runguard.Budget(calls=4, per="user")])
    assert_stopped(await run(endless()[0]), "budget")
    assert first.flush(5)
    file.load(budgets=[runguard.Budget(calls=6, per="user")])
    agent, model = endless()
    assert_stopped(await run(agent, session_id="s2"), "budget")
    assert model.calls == 2


async def test_a_run_in_flight_finishes_under_the_policy_it_began_with(file: File) -> None:
    gate = Gate()
    first = file.load(max_model_calls=6)
    agent, model = gated(gate, lambda n: call("step", q=n))
    runner = InMemoryRunner(agent=agent, app_name="app")
    async with asyncio.timeout(40):
        running = asyncio.create_task(run(None, runner=runner))
        await gate.reached.wait()
        second = file.load(max_model_calls=2)
        assert [each["model_calls"] for each in second.snapshot()["runs"]] == [1], "the run in flight is seen"
        other, other_model = endless()
        assert_stopped(await run(other), "model_calls")
        gate.opened.set()
        assert_stopped(await running, "model_calls")
    assert (model.calls, other_model.calls) == (6, 2)
    assert [trip.limit for trip in second.trips] == [2, 6]
    assert (first.guard.runs, second.guard.runs, second.snapshot()["runs"]) == ({}, {}, [])
    assert_stopped(await run(None, runner=runner, session_id="s2"), "model_calls")
    assert model.calls == 8, "the next run of the same Runner has the new limit"
    assert runner.plugin_manager.plugins == [second]
    assert second.snapshot()["guard_errors"] == first.snapshot()["guard_errors"] == 0
    assert reserved(second) == 0


async def test_two_runs_of_one_runner_have_a_policy_each(file: File) -> None:
    gate = Gate()
    file.load(max_model_calls=6)
    agent, model = gated(gate, lambda n: call("step", q=n))
    runner = InMemoryRunner(agent=agent, app_name="app")
    async with asyncio.timeout(40):
        running = asyncio.create_task(run(None, runner=runner))
        await gate.reached.wait()
        second = file.load(max_model_calls=2)
        assert_stopped(await run(None, runner=runner, session_id="s2"), "model_calls")
        assert model.calls == 3
        gate.opened.set()
        assert_stopped(await running, "model_calls")
    assert model.calls == 8
    assert [trip.limit for trip in second.trips] == [2, 6]
    assert second.spend()["calls"] == 8
    assert reserved(second) == 0


@pytest.mark.parametrize("include_plugins", [True, False])
async def test_a_child_of_a_run_in_flight_belongs_to_that_run(file: File, include_plugins: bool) -> None:
    gate = Gate()
    file.load(max_model_calls=9)
    child, child_model = endless(name="child")
    agent, model = gated(
        gate, lambda n: call("child", request=f"{n}"), AgentTool(child, include_plugins=include_plugins)
    )
    async with asyncio.timeout(40):
        running = asyncio.create_task(run(agent))
        await gate.reached.wait()
        second = file.load(max_model_calls=3)
        gate.opened.set()
        recording = await running
    assert_stopped(recording, "model_calls")
    assert_calls_answered(recording.session)
    assert model.calls + child_model.calls == 9
    assert len(second.trips) == 1
    assert reserved(second) == 0


async def test_a_run_in_flight_obeys_the_new_cap_of_a_shared_budget(file: File) -> None:
    gate = Gate()
    file.load(budgets=[runguard.Budget(calls=50, per="user")])
    agent, model = gated(gate, lambda n: call("step", q=n))
    async with asyncio.timeout(40):
        running = asyncio.create_task(run(agent))
        await gate.reached.wait()
        second = file.load(budgets=[runguard.Budget(calls=4, per="user")])
        gate.opened.set()
        assert_stopped(await running, "budget")
    assert model.calls == 4
    assert second.flush(5)
    other, other_model = endless()
    assert_stopped(await run(other, session_id="s2"), "budget")
    assert other_model.calls == 0


async def test_a_stop_reaches_runs_in_flight_under_the_old_policy(file: File) -> None:
    gate = Gate()
    file.load(max_model_calls=50)
    agent, model = gated(gate, lambda n: call("step", q=n))
    async with asyncio.timeout(40):
        running = asyncio.create_task(run(agent))
        await gate.reached.wait()
        second = file.load(max_model_calls=40)
        second.stop("all", actor="ops")
        gate.opened.set()
        assert_stopped(await running, "kill_switch")
    assert model.calls == 1


async def test_a_side_effect_is_not_made_again_after_an_edit(file: File) -> None:
    sent: list[int] = []

    def send(n: int) -> str:
        sent.append(n)
        return "sent"

    def agent() -> LlmAgent:
        return LlmAgent(name="a", model=ScriptedModel([call("send", n=1), text("done")]), tools=[send])

    runner: Runner = InMemoryRunner(agent=agent(), app_name="app")
    first = file.load(tools={"send": runguard.ToolRule(once=True)})
    await run(None, runner=runner)
    assert first.flush(5)
    file.load(tools={"send": runguard.ToolRule(once=True)}, max_model_calls=20)
    runner = Runner(agent=agent(), app_name="app", session_service=runner.session_service)
    await run(None, "again", runner=runner)
    assert sent == [1]


def test_another_file_still_raises(file: File, tmp_path: Path) -> None:
    first = file.load(max_model_calls=3)
    other = File(tmp_path / "other.py", None)
    with pytest.raises(runguard.InstallError) as caught:
        other.load(max_model_calls=4)
    assert str(file.path) in str(caught.value)
    assert str(other.path) in str(caught.value)
    assert patching.IN_USE.installed is first


def test_code_without_a_file_raises() -> None:
    code = compile("import runguard\nrunguard.install(max_model_calls=n)", "<string>", "exec")
    exec(code, {"n": 3})
    with pytest.raises(runguard.InstallError):
        exec(code, {"n": 4})


async def test_an_invalid_edit_changes_nothing(file: File) -> None:
    first = file.load(max_model_calls=3)
    with pytest.raises(PolicyError):
        file.load(max_model_calls=-1)
    assert patching.IN_USE.installed is first
    agent, model = endless()
    assert_stopped(await run(agent), "model_calls")
    assert model.calls == 3


async def test_many_edits_leave_nothing_behind(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runguard.background._IDLE_S", 0.05)  # threads that have nothing to do end by themselves
    agent, _ = endless()
    runner = InMemoryRunner(agent=agent, app_name="app")
    file.load(max_model_calls=3, alerts={"log": True})
    assert_stopped(await run(None, runner=runner), "model_calls")
    wrapped: Any = Runner.run_async
    threads = threading.active_count()
    old: list[weakref.ref[Any]] = []
    for n in range(20):
        plugin = file.load(max_model_calls=2 + n % 2, alerts={"log": True, "timeout_seconds": 1 + n})
        old += [weakref.ref(plugin.guard), weakref.ref(plugin.guard.alarms)]
        assert_stopped(await run(None, runner=runner, session_id=f"s{n}"), "model_calls")
        assert plugin.flush(5)
        assert runner.plugin_manager.plugins == [plugin]
    assert not hasattr(wrapped.__wrapped__, "__wrapped__"), "wrapped once"
    assert Runner.run_async is wrapped
    for thread in threading.enumerate():
        if thread.name.startswith(("runguard-alerts", "runguard-outbox")):
            thread.join(20)
    assert threading.active_count() <= threads
    gc.collect(1)
    assert sum(ref() is not None for ref in old[:-2]) == 0, "old guards and senders of alerts are gone"
    assert len(plugin.trips) == 21
