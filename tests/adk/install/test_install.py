"""``runguard.install()``: one line, every Runner, undone exactly."""

import asyncio
import logging
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import InMemoryRunner, Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools.agent_tool import AgentTool
from google.genai import types

import runguard
from runguard.adk import RunGuardPlugin, patching
from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, run, text


def step(q: int) -> dict[str, Any]:
    return {"step": q}


def endless(name: str = "a") -> tuple[LlmAgent, ScriptedModel]:
    model = ScriptedModel(lambda n, _: call("step", q=n))
    return LlmAgent(name=name, description="walks", model=model, tools=[step]), model


async def test_runners_built_before_and_after_are_guarded() -> None:
    early_agent, early_model = endless()
    early = InMemoryRunner(agent=early_agent, app_name="app")
    plugin = runguard.install(max_model_calls=3)
    assert_stopped(await run(None, runner=early), "model_calls")
    late_agent, late_model = endless()
    assert_stopped(await run(late_agent), "model_calls")
    assert (early_model.calls, late_model.calls, len(plugin.trips)) == (3, 3, 2)


async def test_an_equal_second_install_is_the_first_one() -> None:
    on_trip = print
    plugin = runguard.install(max_model_calls=3, on_trip=on_trip)
    assert runguard.install(max_model_calls=3, on_trip=on_trip) is plugin
    agent, model = endless()
    recording = await run(agent)
    assert model.calls == 3
    assert len(plugin.trips) == 1
    assert sum(event.error_code is not None for event in recording.events) == 1


def test_a_lambda_defined_again_is_the_same_lambda() -> None:
    plugins = [runguard.install(on_trip=lambda reason: reason) for _ in range(2)]
    assert plugins[0] is plugins[1]


def test_a_different_second_install_from_another_file_names_both_places() -> None:
    runguard.install(max_model_calls=3)
    elsewhere = compile("import runguard\nrunguard.install(max_model_calls=4)", "/elsewhere/agent.py", "exec")
    with pytest.raises(runguard.InstallError) as caught:
        exec(elsewhere)
    assert "test_install.py:" in str(caught.value)
    assert "/elsewhere/agent.py:2" in str(caught.value)
    assert "uninstall" in str(caught.value)


async def test_uninstall_restores_runner_and_runs() -> None:
    untouched = {name: vars(Runner)[name] for name in ("run_async", "run", "run_live")}
    assert not hasattr(Runner.run_async, "__wrapped__")
    agent, model = endless()
    runner = InMemoryRunner(agent=agent, app_name="app")
    plugin = runguard.install(max_model_calls=3)
    assert_stopped(await run(None, runner=runner))
    assert plugin in runner.plugin_manager.plugins
    runguard.uninstall()
    assert {name: vars(Runner)[name] for name in untouched} == untouched
    assert plugin not in runner.plugin_manager.plugins
    model._calls = 0
    model._script = [text("free")]
    assert (await run(None, runner=runner, session_id="s2")).texts == ["free"]


async def test_uninstall_passes_through_where_others_patched_on_top(monkeypatch: pytest.MonkeyPatch) -> None:
    runguard.install(max_model_calls=3)
    ours = Runner.run_async
    seen = []

    def theirs(self: Runner, **options: Any) -> Any:
        seen.append(self)
        return ours(self, **options)

    monkeypatch.setattr(Runner, "run_async", theirs)
    runguard.uninstall()
    assert Runner.run_async is theirs
    model = ScriptedModel([call("step", q=1), call("step", q=2), call("step", q=3), call("step", q=4), text("free")])
    recording = await run(LlmAgent(name="a", model=model, tools=[step]))
    assert recording.texts == ["free"]
    assert seen
    monkeypatch.undo()
    patching.unwrap_adk_if_unused()


async def test_a_child_without_plugins_is_guarded_too() -> None:
    plugin = runguard.install(max_model_calls=5)
    inner, inner_model = endless("inner")
    outer_model = ScriptedModel(lambda n, _: call("inner", request=f"part {n}"))
    outer = LlmAgent(name="outer", model=outer_model, tools=[AgentTool(inner, include_plugins=False)])
    recording = await run(outer)
    assert_stopped(recording, "model_calls")
    assert_calls_answered(recording.session)
    assert inner_model.calls + outer_model.calls == 5
    assert len(plugin.trips) == 1
    assert plugin.snapshot()["runs"] == []


async def test_an_apps_own_guard_wins() -> None:
    installed = runguard.install(max_model_calls=2)
    agent, model = endless()
    own = RunGuardPlugin(max_model_calls=4)
    assert_stopped(await run(agent, plugins=[own]))
    assert model.calls == 4
    assert len(own.trips) == 1
    assert installed.trips == []


class Caching(BasePlugin):
    async def before_model_callback(self, **_: Any) -> LlmResponse | None:
        return LlmResponse(content=types.Content(role="model", parts=[types.Part(text="from the cache")]))


async def test_a_plugin_with_another_policy_than_install_says_once_which_applies(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runguard.install(max_model_calls=3, max_usd=1, on_unpriced="tokens", store="memory://secret")
    own = RunGuardPlugin(max_model_calls=8, max_usd=1, on_unpriced="tokens")
    for _ in range(2):
        agent, model = endless()
        assert_stopped(await run(agent, plugins=[own]), "model_calls")
        assert model.calls == 8
    (line,) = [each.getMessage() for each in caplog.records if "two_policies" in each.getMessage()]
    assert "so the policy of install() at " in line
    assert f"{__file__}:" in line
    assert "max_model_calls=8 applies, not 3; store differs. " in line
    assert "max_usd" not in line
    assert "secret" not in line


async def test_a_plugin_with_the_policy_of_install_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    runguard.install(max_model_calls=3)
    agent, model = endless()
    assert_stopped(await run(agent, plugins=[RunGuardPlugin(max_model_calls=3)]), "model_calls")
    assert model.calls == 3
    assert "two_policies" not in caplog.text


async def test_the_installed_guard_is_first_and_a_cached_answer_is_no_call() -> None:
    plugin = runguard.install(max_model_calls=1)
    agent, model = endless()
    app = App(name="app", root_agent=agent, plugins=[Caching(name="cache")])
    runner = Runner(app=app, session_service=InMemorySessionService())
    for turn in range(3):
        assert (await run(None, f"turn {turn}", runner=runner)).texts == ["from the cache"]
    assert runner.plugin_manager.plugins[0] is plugin
    assert model.calls == 0
    assert plugin.trips == []


async def test_a_guard_behind_another_plugin_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    agent = LlmAgent(name="a", model=ScriptedModel([text("hi")]))
    app = App(name="app", root_agent=agent, plugins=[BasePlugin(name="first"), RunGuardPlugin()])
    runner = Runner(app=app, session_service=InMemorySessionService())
    with caplog.at_level(logging.WARNING, "runguard"):
        for turn in range(2):
            await run(None, f"turn {turn}", runner=runner)
    assert sum("runguard.order" in record.getMessage() for record in caplog.records) == 1


def test_the_synchronous_runner_is_guarded() -> None:
    runguard.install(max_model_calls=3)
    agent, model = endless()
    runner = InMemoryRunner(agent=agent, app_name="app")
    asyncio.run(runner.session_service.create_session(app_name="app", user_id="u", session_id="s"))
    message = types.Content(role="user", parts=[types.Part(text="go")])
    events = list(runner.run(user_id="u", session_id="s", new_message=message))
    assert_stopped(events, "model_calls")
    assert model.calls == 3


async def test_a_runner_without_a_guard_is_left_alone() -> None:
    """A guard of one App changes nothing for another App's Runner."""
    keep = RunGuardPlugin(max_model_calls=1)
    model = ScriptedModel([call("step", q=1), text("done")])
    recording = await run(LlmAgent(name="a", model=model, tools=[step]))
    assert recording.texts == ["done"]
    assert model.calls == 2
    assert keep.trips == []
