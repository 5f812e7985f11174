"""Remote A2A agents on real servers on loopback: what is booked, what is sent, what a stop over there means here."""

import asyncio
import os
import threading
from collections.abc import Callable
from decimal import Decimal
from importlib.metadata import version
from typing import Any

import pytest

pytest.importorskip("a2a.server")

import httpx
from google.adk.agents import LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.models import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.genai import types
from starlette.authentication import AuthCredentials, AuthenticationBackend, AuthenticationError, SimpleUser

from runguard import Budget, RunStoppedError
from runguard.adk import RunGuardPlugin
from runguard.testing import Recording, ScriptedModel, assert_stopped, call, run, text
from tests.kit.a2a_servers import a2a_server, remote, serving
from tests.kit.fresh import FreshProcess
from tests.kit.topologies import step

# ADK 2.3 asks for the whole reply at once, and its servers report only the last model call of a task there.
STREAMS = tuple(map(int, version("google-adk").split(".")[:2])) >= (2, 13)
only_streams = pytest.mark.skipif(not STREAMS, reason="ADK 2.3 receives only the figures of the last model call")
PRICES: dict[str, Any] = {"far-model": {"input": 100, "output": 0}}  # a call of 1,000 tokens costs ten cents
CALL = 1_250  # tokens of one scripted model call


def far_agent(script: Any, name: str = "far", **options: Any) -> LlmAgent:
    model = script if isinstance(script, ScriptedModel) else ScriptedModel(script, **options)
    return LlmAgent(name=name, description="answers", model=model, tools=[step])


def steps(calls: int) -> Any:
    """A script with so many model calls."""
    return lambda n, _: call("step", n=n) if n < calls else text("done")


async def play(root: Any, plugin: RunGuardPlugin, **options: Any) -> Recording:
    return await asyncio.wait_for(run(root, plugins=[plugin], message="go", **options), 40)


def run_a_remote_agent(say: Callable[[str], None], card: str) -> None:
    plugin = RunGuardPlugin(max_seconds=1)
    say(assert_stopped(asyncio.run(play(remote(card), plugin))).rule)


async def test_the_first_remote_agent_of_a_process_is_ended_too() -> None:
    """ADK reads the method of an agent before it calls the first hook for it."""
    with a2a_server(far_tool(pause)) as card, FreshProcess(run_a_remote_agent, card) as process:
        assert await asyncio.to_thread(process.told) == "deadline"


async def test_a_reply_is_booked_once() -> None:
    with a2a_server(far_agent(steps(1))) as card:
        plugin = RunGuardPlugin()
        await play(remote(card), plugin)
    spent = plugin.spend()
    assert (spent["calls"], spent["tokens"], spent["unpriced_calls"]) == (1, CALL, 1)
    assert spent["by_agent"]["remote"]["tokens"] == CALL


@pytest.mark.parametrize("legacy", [pytest.param(True, marks=only_streams), False], ids=["legacy", "new"])
async def test_every_model_call_of_the_reply_is_booked_though_all_report_the_same(legacy: bool) -> None:
    """The new integration reports each model call beside its artifact."""
    options: dict[str, Any] = {} if legacy else {"use_legacy": False}
    with a2a_server(far_agent(steps(4))) as card:
        plugin = RunGuardPlugin()
        await play(remote(card, **options), plugin)
    assert plugin.spend()["tokens"] == 4 * CALL


async def test_the_second_call_is_refused_when_the_first_used_up_the_budget() -> None:
    model = ScriptedModel(steps(1))
    with a2a_server(far_agent(model)) as card:
        plugin = RunGuardPlugin(max_tokens=CALL)
        twice = SequentialAgent(name="twice", sub_agents=[remote(card, "one"), remote(card, "two")])
        recording = await play(twice, plugin)
    assert model.calls == 1
    assert assert_stopped(recording.events).rule == "budget"


async def test_a_loop_over_a_remote_agent_that_says_the_same_is_stopped_like_a_local_one() -> None:
    far = ScriptedModel(lambda n, _: text("I am working on it."))
    near = ScriptedModel(lambda n, _: text("I am working on it."))
    with a2a_server(far_agent(far)) as card:
        loop = LoopAgent(name="loop", sub_agents=[remote(card)])
        trip = assert_stopped(await play(loop, RunGuardPlugin()), "no_news")
    local = LoopAgent(name="loop", sub_agents=[LlmAgent(name="remote", model=near)])
    assert assert_stopped(await play(local, RunGuardPlugin()), "no_news").observed == trip.observed == 14
    assert trip.model_calls <= near.calls < 20, "ADK does not send them all: nobody has said anything since"


async def test_a_loop_over_a_remote_agent_that_says_something_new_is_left_alone() -> None:
    writer = LlmAgent(name="writer", model=ScriptedModel(lambda n, _: text(f"Chapter {n} is a draft.")))
    with a2a_server(far_agent(lambda n, _: text(f"Chapter {n} needs work."))) as card:
        plugin = RunGuardPlugin()
        await play(LoopAgent(name="loop", sub_agents=[writer, remote(card)], max_iterations=16), plugin)
    assert plugin.trips == []


async def test_a_reply_without_usage_is_marked_and_not_estimated() -> None:
    silent = LlmResponse(content=types.Content(role="model", parts=[types.Part(text="done")]))
    with a2a_server(far_agent([silent])) as card:
        plugin = RunGuardPlugin(prices=PRICES, max_usd=1, remote_agents={"remote": {"model": "far-model"}})
        recording = await play(remote(card), plugin)
    spent = plugin.spend()
    assert (spent["tokens"], spent["usd"], spent["estimated_calls"]) == (0, 0, 0)
    assert spent["by_model"]["unreported"]["unpriced_calls"] == 1
    assert not plugin.trips
    assert any(
        part.text == "done" for event in recording.events for part in (event.content or types.Content()).parts or []
    )


async def test_a_server_that_is_not_there_is_marked_too() -> None:
    plugin = RunGuardPlugin(max_tokens=10_000)
    await play(remote("http://127.0.0.1:9/.well-known/agent-card.json"), plugin)
    assert plugin.spend()["by_model"]["unreported"]["calls"] == 1
    assert plugin.spend()["reserved_usd"] == 0


# ---- the budget that is sent ----------------------------------------------------------------------------------------


def near(**settings: Any) -> RunGuardPlugin:
    rule = {"model": "far-model", "send_budget": True}
    return RunGuardPlugin(prices=PRICES, remote_agents={"*": rule}, **settings)


def far(**settings: Any) -> RunGuardPlugin:
    return RunGuardPlugin(
        prices={**PRICES, "scripted-1": PRICES["far-model"]},
        models={"scripted-1": {"max_output_tokens": 10}},
        **settings,
    )


async def test_a_guarded_server_lowers_its_limit_to_the_budget_that_was_sent() -> None:
    model = ScriptedModel(lambda n, _: call("step", n=n), prompt_tokens=1_000)
    with a2a_server(far_agent(model), far(max_usd=50, trust_remote_budget=True)) as card:
        plugin = near(max_usd="0.35")
        recording = await play(remote(card), plugin)
    assert model.calls == 3
    assert plugin.trips[-1].rule == "remote_stop"
    assert assert_stopped(recording.events).id == plugin.trips[-1].id
    if STREAMS:
        assert plugin.spend()["usd"] == Decimal("0.3")


async def test_a_sent_budget_never_raises_a_limit() -> None:
    model = ScriptedModel(lambda n, _: call("step", n=n), prompt_tokens=1_000)
    with a2a_server(far_agent(model), far(max_usd="0.25", trust_remote_budget=True)) as card:
        await play(remote(card), near(max_usd=50))
    assert model.calls == 2


async def test_without_trust_the_server_uses_its_own_limit() -> None:
    model = ScriptedModel(steps(6), prompt_tokens=1_000)
    server = far(max_usd=50)
    with a2a_server(far_agent(model), server) as card:
        plugin = near(max_usd="0.35")
        await play(remote(card), plugin)
    assert not server.trips
    assert [trip.rule for trip in plugin.trips] == (["budget"] if STREAMS else [])  # its own, by the reports


async def test_a_server_without_runguard_ignores_the_budget() -> None:
    with a2a_server(far_agent(steps(2))) as card:
        plugin = near(max_usd=1, max_tokens=100_000)
        recording = await play(remote(card), plugin)
    assert not plugin.trips
    assert recording.events


async def test_only_what_the_user_sends_is_sent_without_the_option() -> None:
    sent: list[Any] = []
    with a2a_server(far_agent(steps(1)), _Spy(sent)) as card:
        provider: dict[str, Any] = {"a2a_request_meta_provider": lambda _context, _message: {"tenant": "acme"}}
        await play(remote(card, **provider), RunGuardPlugin(max_tokens=10_000))
        await play(remote(card, **provider), near(max_tokens=10_000))
        await play(remote(card), near(max_tokens=10_000))
    budget = {"v": 1, "max_tokens": 10_000}
    assert sent == [{"tenant": "acme"}, {"tenant": "acme", "runguard": budget}, {"runguard": budget}]


async def test_an_agent_that_is_used_again_sends_what_is_left_then() -> None:
    sent: list[Any] = []
    with a2a_server(far_agent(steps(1)), _Spy(sent)) as card:
        agent, plugin = remote(card), near(budgets=[Budget(tokens=10_000, per="app")])
        await play(agent, plugin)
        await play(agent, plugin)
    assert [one["runguard"]["max_tokens"] for one in sent] == [10_000, 10_000 - CALL]


async def test_remote_agents_in_parallel_do_not_get_the_same_money_twice() -> None:
    model = ScriptedModel(lambda n, _: call("step", n=n), prompt_tokens=1_000)
    with a2a_server(far_agent(model), far(max_usd=50, trust_remote_budget=True)) as card:
        plugin = RunGuardPlugin(
            max_usd="1.00",
            prices=PRICES,
            remote_agents={"*": {"model": "far-model", "send_budget": True, "max_usd": "0.20"}},
        )
        branches = [remote(card, f"remote_{n}") for n in range(8)]
        await play(ParallelAgent(name="all", sub_agents=branches), plugin)
    assert model.calls <= 10
    assert plugin.spend()["usd"] <= Decimal(1)


async def test_two_hops_hold_the_cap_in_total() -> None:
    """This run calls a server that calls a second one. Both spend what was sent from here, and all of it is booked."""
    last_model = ScriptedModel(lambda n, _: call("step", n=n), prompt_tokens=1_000)
    limits: dict[str, Any] = {"max_usd": 50, "trust_remote_budget": True}
    with a2a_server(far_agent(last_model, "last"), far(**limits)) as last_card:
        middle_model = ScriptedModel([call("step", n=1), call("transfer_to_agent", agent_name="onward")])
        onward = remote(last_card, "onward")
        middle = LlmAgent(name="middle", model=middle_model, tools=[step], sub_agents=[onward])
        guard = far(**limits, remote_agents={"onward": {"model": "far-model", "send_budget": True}})
        with a2a_server(middle, guard) as card:
            plugin = near(max_usd="1.05")
            await play(remote(card), plugin)
    assert (middle_model.calls, last_model.calls) == (2, 8)
    assert plugin.trips[-1].rule == "remote_stop"
    if STREAMS:
        assert plugin.spend()["usd"] == Decimal(1)


@only_streams
async def test_two_hops_without_guards_report_everything() -> None:
    last_model = ScriptedModel(steps(3))
    with a2a_server(far_agent(last_model, "last")) as last_card:
        middle_model = ScriptedModel([call("step", n=1), call("transfer_to_agent", agent_name="onward")])
        onward = remote(last_card, "onward")
        middle = LlmAgent(name="middle", model=middle_model, tools=[step], sub_agents=[onward])
        with a2a_server(middle) as card:
            plugin = RunGuardPlugin()
            await play(remote(card), plugin)
    assert (middle_model.calls, last_model.calls) == (2, 3)
    assert plugin.spend()["tokens"] == 5 * CALL


# ---- a stop on the far side, and a far side that goes away ----------------------------------------------------------


async def test_a_stop_on_the_far_side_is_a_trip_here() -> None:
    with a2a_server(far_agent(lambda n, _: call("step", n=1)), RunGuardPlugin(max_model_calls=2)) as card:
        plugin = RunGuardPlugin()
        coordinator = ScriptedModel([text("never asked")])
        both = SequentialAgent(name="both", sub_agents=[remote(card), LlmAgent(name="next", model=coordinator)])
        recording = await play(both, plugin)
    assert coordinator.calls == 0
    trip = assert_stopped(recording.events)
    assert (trip.rule, [one.rule for one in plugin.trips]) == ("remote_stop", ["remote_stop"])
    assert "model_calls" in trip.message
    assert recording.events


async def test_a_stop_on_the_far_side_raises_where_that_was_asked_for() -> None:
    with (
        a2a_server(far_agent(lambda n, _: call("step", n=1)), RunGuardPlugin(max_model_calls=2)) as card,
        pytest.raises(RunStoppedError),
    ):
        await play(remote(card), RunGuardPlugin(on_stop="raise"))


# ---- a remote agent that goes on ------------------------------------------------------------------------------------


async def no_requests(server: Any) -> bool:
    """Whether no connection to the server waits for the rest of a reply any more."""
    for _ in range(100):
        cycles = [connection.cycle for connection in list(server.server_state.connections)]
        if all(cycle is None or cycle.response_complete for cycle in cycles):
            return True
        await asyncio.sleep(0.05)
    return False


class _Look(BasePlugin):
    """Not a guard: a plugin that looks at each event, after the guard."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__(name="look")
        self._look = look

    async def on_event_callback(self, *, invocation_context: Any, event: Any) -> None:
        self._look()


def said(recording: Recording) -> set[str | None]:
    return {part.text for event in recording.events for part in (event.content or types.Content()).parts or []}


async def pause(n: int) -> str:
    """Take a moment."""
    await asyncio.sleep(0.05)
    return f"part {n} of the work"


async def hang(n: int) -> str:
    """Take very long."""
    await asyncio.sleep(60)
    return f"part {n} of the work"


def far_tool(tool: Any) -> LlmAgent:
    """An agent that calls a tool for ever."""
    return LlmAgent(name="far", model=ScriptedModel(lambda n, _: call(tool.__name__, n=n)), tools=[tool])


@only_streams
@pytest.mark.parametrize("options", [{}, {"use_legacy": False}], ids=["legacy", "new"])
async def test_reports_beyond_the_budget_end_the_stream(options: dict[str, Any]) -> None:
    model = ScriptedModel(steps(200), prompt_tokens=10_000)  # a dollar each
    with serving(far_agent(model)) as (card, server):
        plugin = RunGuardPlugin(max_usd=1, prices=PRICES, remote_agents={"*": {"model": "far-model"}})
        recording = await play(remote(card, **options), plugin)
        assert await no_requests(server)
    assert [trip.rule for trip in plugin.trips] == ["budget"]
    assert recording.events[-1].error_code == "RUNGUARD_STOP"
    assert [event.error_code for event in recording.events].count("RUNGUARD_STOP") == 1
    spent = plugin.spend()
    assert spent["usd"] == Decimal(2)
    assert spent["by_model"]["unreported"]["calls"] == 1
    assert spent["reserved_usd"] == 0


@only_streams
async def test_each_report_is_booked_while_the_agent_works() -> None:
    seen: list[int] = []
    with a2a_server(far_agent(steps(4))) as card:
        plugin = RunGuardPlugin()
        look = _Look(lambda: seen.append(plugin.spend()["tokens"]))
        await run(remote(card), plugins=[plugin, look], message="go")
    assert {CALL, 2 * CALL, 3 * CALL} <= set(seen)
    assert plugin.spend()["tokens"] == 4 * CALL
    assert plugin.spend()["calls"] == 1


@pytest.mark.skipif(STREAMS, reason="ADK 2.13 receives the figures before the end of the reply")
async def test_a_reply_that_has_ended_is_not_stopped() -> None:
    with a2a_server(far_agent(steps(1))) as card:
        plugin = RunGuardPlugin(max_tokens=CALL - 1)
        recording = await play(remote(card), plugin)
    assert not plugin.trips
    assert "done" in said(recording)


@pytest.mark.parametrize("tool", [pause, hang])
async def test_the_deadline_ends_a_remote_agent_at_work(tool: Any) -> None:
    with serving(far_tool(tool)) as (card, server):
        plugin = RunGuardPlugin(max_seconds=1)
        recording = await asyncio.wait_for(run(remote(card), plugins=[plugin], message="go"), 10)
        assert await no_requests(server)
    assert assert_stopped(recording.events).rule == "deadline"
    assert recording.events[-1].error_code == "RUNGUARD_STOP"
    assert plugin.spend()["by_model"]["unreported"]["calls"] == 1


@pytest.mark.parametrize("tool", [pause, hang])
async def test_the_kill_switch_ends_a_remote_agent_at_work(tool: Any) -> None:
    with serving(far_tool(tool)) as (card, server):
        plugin = RunGuardPlugin()
        playing = asyncio.create_task(play(remote(card), plugin))
        await asyncio.sleep(1)
        await asyncio.to_thread(plugin.stop, "all", actor="ops")
        recording = await asyncio.wait_for(playing, 5)
        assert await no_requests(server)
    assert assert_stopped(recording.events).rule == "kill_switch"


@only_streams
async def test_in_shadow_mode_a_remote_agent_goes_on() -> None:
    with a2a_server(far_agent(steps(6))) as card:
        plugin = RunGuardPlugin(mode="shadow", max_tokens=2 * CALL)
        recording = await play(remote(card), plugin)
    assert plugin.spend()["tokens"] == 6 * CALL
    assert [(trip.rule, trip.enforced) for trip in plugin.trips] == [("budget", False)]
    assert not any(event.error_code for event in recording.events)


@only_streams
async def test_a_stop_of_one_branch_keeps_its_siblings() -> None:
    """A budget of each agent stops the branch that breaks it. The other branches give their answers."""
    with serving(far_tool(pause)) as (card, server):
        with a2a_server(far_agent(steps(2))) as quick:
            plugin = RunGuardPlugin(budgets=[Budget(tokens=4 * CALL, per="agent")])
            slow = LlmAgent(
                name="slow",
                model=ScriptedModel([call("pause", n=1), call("pause", n=2), text("written")]),
                tools=[pause],
            )
            branches = [remote(card, "greedy"), remote(quick, "modest"), slow]
            recording = await play(ParallelAgent(name="all", sub_agents=branches), plugin)
        assert await no_requests(server)
    stopped = [event.author for event in recording.events if event.error_code]
    assert stopped == ["greedy"]
    assert {"done", "written"} <= said(recording)
    assert [trip.rule for trip in plugin.trips] == ["budget"]


@only_streams
async def test_a_stop_of_the_run_keeps_the_paid_call_beside_it() -> None:
    with a2a_server(far_tool(pause)) as card:
        plugin = RunGuardPlugin(max_tokens=6 * CALL, models={"*": {"max_output_tokens": 100}})
        beside = LlmAgent(name="beside", model=ScriptedModel([text("paid for")], latency_s=1.5))
        recording = await play(ParallelAgent(name="all", sub_agents=[remote(card), beside]), plugin)
    assert "paid for" in said(recording)
    assert assert_stopped(recording.events).rule == "budget"


@only_streams
async def test_a_reservation_stays_while_the_remote_agent_works() -> None:
    """The far side may spend what was sent, so nobody else can."""
    held: list[Decimal] = []
    with a2a_server(far_agent(steps(3), prompt_tokens=1_000)) as card:
        plugin = near(max_usd=1)
        look = _Look(lambda: held.append(plugin.spend()["reserved_usd"]))
        await run(remote(card), plugins=[plugin, look], message="go")
    assert held[:3] == [Decimal(1)] * 3
    assert plugin.spend()["usd"] == Decimal("0.3")


def serve_until_the_third_call(say: Callable[[str], None]) -> None:
    def script(n: int, request: Any) -> types.Part:
        if n == 3:
            os._exit(9)
        return call("step", n=n)

    with a2a_server(far_agent(script)) as card:
        say(card)
        threading.Event().wait()


async def test_a_far_side_that_is_killed_midway_leaves_nothing_reserved() -> None:
    with FreshProcess(serve_until_the_third_call) as server:
        card = await asyncio.to_thread(server.told)
        plugin = near(max_usd=1)
        after = ScriptedModel([text("goes on")], model="far-model")
        await play(SequentialAgent(name="both", sub_agents=[remote(card), LlmAgent(name="next", model=after)]), plugin)
    spent = plugin.spend()
    assert after.calls == 1
    assert spent["by_model"]["unreported"]["calls"] == 1
    assert spent["reserved_usd"] == 0
    assert spent["tokens"] == ((2 if STREAMS else 0) + 1) * CALL


class _Spy:
    """Not a guard: a plugin that keeps the metadata of each request."""

    def __new__(cls, sent: list[Any]) -> Any:
        class Spy(BasePlugin):
            async def before_run_callback(self, *, invocation_context: Any) -> None:
                metadata = invocation_context.run_config.custom_metadata or {}
                sent.append(metadata.get("a2a_metadata"))

        return Spy(name="spy")


# ---- the users of a server ------------------------------------------------------------------------------------------


class Tokens(AuthenticationBackend):
    """Knows two users by their tokens."""

    async def authenticate(self, conn: Any) -> tuple[AuthCredentials, SimpleUser] | None:
        users = {"Bearer token-of-alice": "alice", "Bearer token-of-bob": "bob"}
        name = users.get(conn.headers.get("authorization", ""))
        if name is None:
            raise AuthenticationError("unknown token")
        return AuthCredentials(["authenticated"]), SimpleUser(name)


def caller(card: str, **headers: str) -> Any:
    return remote(card, httpx_client=httpx.AsyncClient(headers=headers))


async def test_a_server_without_authentication_has_one_user_per_context() -> None:
    """Whatever a client says about itself."""
    model = ScriptedModel([text("done")])
    server = RunGuardPlugin(budgets=[Budget(tokens=CALL, per="user")], models={"*": {"max_output_tokens": 250}})
    claim: dict[str, Any] = {"a2a_request_meta_provider": lambda _context, _message: {"user_id": "alice"}}
    with a2a_server(far_agent(model), server) as card:
        for _ in range(2):
            await play(remote(card, **claim), RunGuardPlugin())
    assert model.calls == 2
    scopes = {budget.scope for budget in server.budgets()}
    assert len(scopes) == 2
    assert all(scope.startswith("user:far/A2A_USER_") for scope in scopes)


async def test_a_server_with_authentication_has_one_account_per_user() -> None:
    model = ScriptedModel([text("done")])
    server = RunGuardPlugin(budgets=[Budget(tokens=CALL, per="user")], models={"*": {"max_output_tokens": 250}})
    with serving(far_agent(model), server, users=Tokens()) as (card, _):
        for name in ("alice", "alice", "bob", "mallory"):
            await play(caller(card, authorization=f"Bearer token-of-{name}"), RunGuardPlugin())
    assert model.calls == 2
    assert {budget.scope for budget in server.budgets()} == {"user:far/alice", "user:far/bob"}
