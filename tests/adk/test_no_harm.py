"""Beside the guard everything goes on as before: other plugins, callbacks, the order of things, waiting in line,
pausing and resuming.
"""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions import InMemorySessionService
from google.adk.tools.agent_tool import AgentTool
from google.genai import types

import runguard
from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, run, text
from tests.kit.adk_runs import observe, play, prompts, told
from tests.kit.topologies import TOPOLOGIES, Team, spread, step, workflow_parallel_worker

Topology = Callable[[Team], Any]
everywhere = pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology.__name__)


class Witness(BasePlugin):
    """Writes down every hook it is called in."""

    def __init__(self) -> None:
        super().__init__(name="witness")
        self.seen: list[tuple[str, str]] = []

    async def before_run_callback(self, *, invocation_context: Any) -> None:
        self.seen.append(("before_run", invocation_context.agent.name if invocation_context.agent else ""))

    async def after_run_callback(self, *, invocation_context: Any) -> None:
        self.seen.append(("after_run", ""))

    async def before_agent_callback(self, *, agent: Any, callback_context: Any) -> None:
        self.seen.append(("before_agent", agent.name))

    async def after_agent_callback(self, *, agent: Any, callback_context: Any) -> None:
        self.seen.append(("after_agent", agent.name))

    async def before_model_callback(self, *, callback_context: Any, llm_request: Any) -> None:
        self.seen.append(("before_model", callback_context.agent_name))

    async def after_model_callback(self, *, callback_context: Any, llm_response: Any) -> None:
        self.seen.append(("after_model", callback_context.agent_name))

    async def before_tool_callback(self, *, tool: Any, tool_args: Any, tool_context: Any) -> None:
        self.seen.append(("before_tool", f"{tool.name}{sorted(tool_args.items())}"))

    async def after_tool_callback(self, *, tool: Any, tool_args: Any, tool_context: Any, result: Any) -> None:
        self.seen.append(("after_tool", f"{tool.name}{result}"))

    async def on_event_callback(self, *, invocation_context: Any, event: Any) -> None:
        self.seen.append(("on_event", event.author))


@pytest.mark.parametrize(("topology", "first"), spread(True, False))
async def test_other_plugins_see_the_same_hooks_in_the_same_order(topology: Topology, first: bool) -> None:
    alone, beside = Witness(), Witness()
    await play(topology(Team(endless=False)), plugins=[alone])
    plugin = RunGuardPlugin(max_seconds=60)
    await play(topology(Team(endless=False)), plugins=[plugin, beside] if first else [beside, plugin])
    assert sorted(beside.seen) == sorted(alone.seen)
    for agent in {author for _, author in alone.seen}:  # strands that run side by side have no order between them
        assert [hook for hook, author in beside.seen if author == agent] == [
            hook for hook, author in alone.seen if author == agent
        ]


async def test_an_agents_own_callbacks_keep_their_order_and_their_say() -> None:
    async def story(*plugins: BasePlugin) -> tuple[list[str], list[Any], list[Any]]:
        seen: list[str] = []

        def note(name: str, answer: Any = None) -> Callable[..., Any]:
            def callback(**kwargs: Any) -> Any:
                seen.append(name)
                return answer(kwargs) if answer else None

            return callback

        model = ScriptedModel([call("step", n=1), call("step", n=2), text("done")])
        agent = LlmAgent(
            name="worker",
            model=model,
            tools=[step],
            before_agent_callback=lambda callback_context: seen.append("before_agent"),
            after_agent_callback=lambda callback_context: types.Content(
                role="model", parts=[types.Part(text="one more thing")]
            ),
            before_model_callback=[note("before_model 1"), note("before_model 2")],
            after_model_callback=note("after_model"),
            before_tool_callback=note(
                "before_tool", lambda kwargs: {"from": "cache"} if kwargs["args"]["n"] == 2 else None
            ),
            after_tool_callback=note("after_tool", lambda kwargs: {**kwargs["tool_response"], "seen": True}),
        )
        result = await play(agent, plugins=list(plugins))
        return seen, told(result.events), prompts(model.requests)

    assert await story(RunGuardPlugin()) == await story()


# ---- waiting in line ------------------------------------------------------------------------------------------------


@everywhere
async def test_one_model_call_at_a_time_never_deadlocks(topology: Topology) -> None:
    """A queue holds model calls, never agents: whoever waits for another agent holds nothing."""
    bare, team = Team(endless=False), Team(endless=False)
    plugin = RunGuardPlugin(max_concurrent_agents=1, on_surplus="queue")
    without, result = await play(topology(bare)), await play(topology(team), plugins=[plugin])
    assert sorted(result.texts) == sorted(without.texts)
    assert team.calls == bare.calls
    assert max(model.max_in_flight for model in team.models.values()) == 1
    assert plugin.trips == []


@everywhere
async def test_a_limit_holds_while_calls_wait_in_line(topology: Topology) -> None:
    team, plugin = Team(endless=True), RunGuardPlugin(max_concurrent_agents=1, on_surplus="queue", max_model_calls=5)
    result = await play(topology(team), plugins=[plugin])
    assert team.calls == 5
    assert_stopped(result, "model_calls")
    assert len(plugin.trips) == 1


# ---- the session ----------------------------------------------------------------------------------------------------


@everywhere
async def test_the_last_word_of_a_stopped_run_is_the_stop(topology: Topology) -> None:
    if topology is workflow_parallel_worker:
        pytest.skip("answers of workers that were on their way may follow the stop of another")
    plugin = RunGuardPlugin(max_model_calls=4)
    result = await play(topology(Team(endless=True)), plugins=[plugin])
    last = result.events[-1]
    assert last.is_final_response()
    assert runguard.trip(last) == plugin.trips[0]


# ---- pausing --------------------------------------------------------------------------------------------------------


async def test_a_task_that_waits_for_the_user_begins_each_turn_afresh() -> None:
    """ADK may go on under the same invocation id: counters belong to the turn, not to the id."""
    finish = call("finish_task", result="booked")
    asks = ScriptedModel(
        [
            call("step", n=1),
            call("step", n=2),
            text("which day?"),
            call("step", n=3),
            call("step", n=4),
            text("which hour?"),
            finish,
        ]
    )
    clerk = LlmAgent(name="clerk", description="books", model=asks, mode="task", tools=[step])
    lead = ScriptedModel([call("clerk", request="book"), text("all booked")])
    root = LlmAgent(name="lead", model=lead, sub_agents=[clerk])
    plugin, service = RunGuardPlugin(max_model_calls=4), InMemorySessionService()
    turns = [
        await play(root, message, plugins=[plugin], session_service=service)
        for message in ("book it", "monday", "noon")
    ]
    assert [turn.texts for turn in turns] == [["which day?"], ["which hour?"], ["all booked"]]
    assert plugin.trips == []
    assert plugin.snapshot()["runs"] == []
    assert_calls_answered(turns[-1].session)


async def test_a_users_message_re_arms() -> None:
    model = ScriptedModel(lambda n, _: text("done") if n % 3 == 0 else call("step", n=1))
    root, plugin, service = (
        LlmAgent(name="worker", model=model, tools=[step]),
        RunGuardPlugin(),
        InMemorySessionService(),
    )
    for _ in range(6):
        result = await play(root, plugins=[plugin], session_service=service)
        assert result.texts == ["done"]
    assert "runguard" not in str(told(result.session.events))


# ---- runners inside tools -------------------------------------------------------------------------------------------


async def test_a_hidden_agent_tool_is_named_as_a_blind_spot(caplog: pytest.LogCaptureFixture) -> None:
    inner = LlmAgent(name="hidden", description="hidden", model=ScriptedModel([text("done")]))
    root = LlmAgent(
        name="outer",
        model=ScriptedModel([call("hidden", request="go"), text("done")]),
        tools=[AgentTool(inner, include_plugins=False)],
    )
    with caplog.at_level("WARNING", logger="runguard"):
        result = await play(root, plugins=[RunGuardPlugin()])
    assert result.texts == ["done"]
    assert "blind_spot" in caplog.text
    assert "hidden" in caplog.text


@pytest.mark.skipif(
    "tool_thread_pool_config" not in RunConfig.model_fields, reason="this ADK has no thread pool for tools"
)
async def test_tools_in_a_thread_pool_are_counted_like_others() -> None:
    from google.adk.agents.run_config import ToolThreadPoolConfig

    pool = RunConfig(tool_thread_pool_config=ToolThreadPoolConfig(max_workers=4))
    model = ScriptedModel(lambda n, _: [call("step", n=4 * n + k) for k in range(4)])
    seen = await observe(
        LlmAgent(name="worker", model=model, tools=[step]), play_with={"run_config": pool}, max_tool_calls=10
    )
    trip = assert_stopped(seen.result, "tool_calls")
    assert (trip.tool_calls, model.calls) == (10, 3)
    assert assert_calls_answered(seen.result.session) == 12


# ---- the account across agents called as tools ----------------------------------------------------------------------


def _asks_inner(times: int, inner_model: ScriptedModel, tool: Any) -> LlmAgent:
    inner = LlmAgent(name="inner", description="inner", model=inner_model, tools=[tool])
    ask = [call("inner", request=f"part {n}") for n in range(times)]
    return LlmAgent(name="outer", model=ScriptedModel([*ask, text("done")]), tools=[AgentTool(inner)])


async def test_an_agent_that_loads_the_same_thing_in_every_call_is_healthy() -> None:
    def load(n: int) -> dict[str, str]:
        return {"document": "text"}

    model = ScriptedModel(lambda n, _: call("load", n=1) if n % 2 else text(f"part {n} is done"))
    seen = await observe(_asks_inner(12, model, load))
    assert seen.decisions == []
    assert seen.result.texts == ["done"]


# ---- What a run says, asks and is answered is in no store, no trip and no alert


CARD, KEY = "4000 1234 5678 9010", "sk-proj-0123456789abcdef"


def look_up(card: str) -> dict[str, str]:
    """Look up a customer by card."""
    return {"owner": "Alice Example", "link": f"https://bank.example/{KEY}"}


def test_no_prompt_argument_or_answer_outlives_the_run(tmp_path: Path) -> None:
    alerts: list[Any] = []
    plugin = RunGuardPlugin(store=f"sqlite:///{tmp_path}/guard.db", alerts=alerts.append)
    agent = LlmAgent(name="clerk", model=ScriptedModel([call("look_up", card=CARD)]), tools=[look_up])
    result = asyncio.run(run(agent, f"Whose card is {CARD}?", plugins=[plugin]))
    assert plugin.flush(5)
    (trip,) = result.trips
    assert alerts
    kept = b"".join(path.read_bytes() for path in tmp_path.glob("guard.db*"))
    assert b"look_up" in kept
    for content in (CARD, KEY, "Alice Example", "Whose card"):
        assert content.encode() not in kept
        assert content not in str(trip.to_dict())
        assert content not in str(alerts)


# ---- What starting a guard imports. How long it takes is measured by ``benchmarks/startup.py``


SCRIPT = """
import sys
from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.runners import Runner
before = set(sys.modules)
from runguard.adk import RunGuardPlugin
RunGuardPlugin(max_usd=1)
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
print(*sorted(name for name in set(sys.modules) - before if name.startswith("google.adk.workflow")))
"""
HEAVY = {
    "click",
    "cryptography",
    "fastapi",
    "genai_prices",
    "httpx",
    "psycopg",
    "redis",
    "requests",
    "rich",
    "sqlite3",
    "starlette",
}


def test_a_guard_imports_nothing_heavy_beside_adk() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    packages, workflow = done.stdout.split("\n")[:2]
    assert not HEAVY & set(packages.split())
    assert workflow == "", "ADK's workflow code loads its web server"
