"""One invocation is one run, however often it pauses: its limits hold across pauses, restarts of the stream and
workers.
"""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from fastapi.openapi.models import OAuth2, OAuthFlowAuthorizationCode, OAuthFlows
from google.adk.agents import LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.agents.run_config import RunConfig
from google.adk.auth.auth_credential import AuthCredential, AuthCredentialTypes, OAuth2Auth
from google.adk.auth.auth_tool import AuthConfig
from google.adk.models import LlmResponse
from google.adk.tools import FunctionTool
from google.adk.tools.tool_context import ToolContext
from google.adk.workflow import Workflow
from google.genai import types

from runguard import Budget, ToolRule
from runguard.adk import ADKCostBreaker, GuardedLlm, RunGuardPlugin
from runguard.engine import resume as paused
from runguard.testing import FakeClock, ScriptedModel, assert_stopped, call, text, transfer
from tests.kit.desks import PRICES, Desk, asking
from tests.kit.topologies import ADK


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory" if request.param == "memory" else f"sqlite:///{tmp_path / 'guard.db'}"


# ---- limits ---------------------------------------------------------------------------------------------------------


async def test_money_is_counted_over_all_pauses(store: str) -> None:
    model, desk = asking()
    plugin = RunGuardPlugin(store=store, max_usd=0.08, prices=PRICES, min_output_tokens=1)
    await desk.say(plugin)
    for _ in range(12):
        events = await desk.answer(plugin)
        plugin.flush()
    assert_stopped(events, "budget")
    assert plugin.spend()["usd"] <= Decimal("0.08")
    assert 1 < model.calls <= 8


@pytest.mark.parametrize(
    ("policy", "look", "rule"),
    [
        ({"max_tool_calls": 5}, lambda n: n, "tool_calls"),
        ({"tools": {"look": ToolRule(max_calls=3)}}, lambda n: n, "tool_limit"),
        ({"rules": {"no_news": {"stop": 4}}}, lambda n: 1, "no_news"),
    ],
    ids=["tool calls", "calls of a tool", "a loop"],
)
async def test_tool_calls_are_counted_over_all_pauses(
    store: str, policy: dict[str, Any], look: Callable[[int], int], rule: str
) -> None:
    model, desk = asking(lambda n, _: [call("look", n=look(n)), call("ask", question=str(look(n)))])
    plugin = RunGuardPlugin(store=store, **policy)
    await desk.say(plugin)
    for _ in range(6):
        events = await desk.answer(plugin)
    assert_stopped(events, rule)
    assert len(plugin.trips) == 1
    assert model.calls == 6 or rule != "no_news"


async def test_a_pause_takes_no_time(store: str) -> None:
    """A minute of work in every part: the third is over the limit, however long the pauses are."""
    clock = FakeClock()

    def work(n: int, _: Any) -> types.Part:
        clock.advance(60)
        return call("ask", question=str(n))

    model, desk = asking(work)
    plugin = RunGuardPlugin(store=store, max_seconds=150, clock=clock)
    await desk.say(plugin)
    clock.advance(100_000)
    await desk.answer(plugin)
    assert plugin.trips == []
    clock.advance(100_000)
    trip = assert_stopped(await desk.answer(plugin), "deadline")
    assert (trip.observed, model.calls) == (180, 3)


async def test_polling_does_not_count_a_pause() -> None:
    clock = FakeClock()
    model, desk = asking(lambda n, _: [call("look", n=1), call("ask", question=str(n))])
    plugin = RunGuardPlugin(clock=clock, tools={"look": ToolRule(polling=True)})
    await desk.say(plugin)
    for _ in range(4):
        clock.advance(100_000)
        await desk.answer(plugin)
    assert (plugin.trips, model.calls) == ([], 5)


async def test_limits_named_with_the_run_hold_after_a_pause(store: str) -> None:
    model, desk = asking()
    plugin = RunGuardPlugin(store=store, prices=PRICES, min_output_tokens=1)
    await desk.say(plugin, run_config=RunConfig(custom_metadata={"runguard": {"max_usd": 0.03}}))
    for _ in range(5):
        events = await desk.answer(plugin)
        plugin.flush()
    assert assert_stopped(events, "budget").limit == Decimal("0.03")
    assert model.calls <= 3


async def test_without_a_resumable_app_an_answer_resumes_all_the_same() -> None:
    model, desk = asking()
    desk.resumable = False
    plugin = RunGuardPlugin(max_model_calls=4)
    await desk.say(plugin)
    for _ in range(6):
        events = await desk.answer(plugin)
    assert_stopped(events, "model_calls")
    assert model.calls == 4


# ---- what else resumes ----------------------------------------------------------------------------------------------


async def test_a_run_that_broke_off_goes_on_with_its_counts(store: str) -> None:
    model, desk = asking(lambda n, _: RuntimeError("away") if n % 2 == 0 else call("look", n=n))
    plugin = RunGuardPlugin(store=store, max_model_calls=5)
    with pytest.raises(RuntimeError):
        await desk.say(plugin)
    with pytest.raises(RuntimeError):
        await desk.again(plugin)
    assert_stopped(await desk.again(plugin), "model_calls")
    assert model.calls == 5


async def test_a_run_that_the_caller_left_goes_on_with_its_counts() -> None:
    model, desk = asking(lambda n, _: call("look", n=n))
    plugin = RunGuardPlugin(max_model_calls=5)
    for _ in range(2):
        runner = desk.runner(plugin)
        await desk.make_session()
        message = None if desk.invocation else types.Content(role="user", parts=[types.Part(text="go")])
        async with aclosing(
            runner.run_async(user_id="u1", session_id="s1", new_message=message, invocation_id=desk.invocation or None)
        ) as events:
            async for event in events:
                desk.invocation = event.invocation_id
                if event.get_function_responses():
                    break
    made = model.calls
    assert_stopped(await desk.again(plugin), "model_calls")
    assert (made, model.calls) == (2, 5)


async def test_confirmations_pause_a_run_and_what_was_confirmed_is_done_once(store: str) -> None:
    paid: list[int] = []

    def pay(invoice: int) -> dict[str, int]:
        paid.append(invoice)
        return {"paid": invoice}

    model = ScriptedModel(lambda n, _: call("pay", invoice=n))
    desk = Desk(LlmAgent(name="clerk", model=model, tools=[FunctionTool(pay, require_confirmation=True)]))
    plugin = RunGuardPlugin(store=store, max_model_calls=3, tools={"pay": ToolRule(writes=True, once=True)})
    await desk.say(plugin)
    for _ in range(4):
        events = await desk.answer(plugin, {"confirmed": True})
    assert_stopped(events, "model_calls")
    assert (paid, model.calls) == ([1, 2, 3], 3)


async def test_a_sign_in_pauses_a_run() -> None:
    def mail(to: str, tool_context: ToolContext) -> dict[str, str] | None:
        scheme = OAuth2(
            flows=OAuthFlows(
                authorizationCode=OAuthFlowAuthorizationCode(
                    authorizationUrl="https://a.test", tokenUrl="https://t.test", scopes={}
                )
            )
        )
        secret = AuthCredential(
            auth_type=AuthCredentialTypes.OAUTH2, oauth2=OAuth2Auth(client_id="id", client_secret="secret")
        )
        tool_context.request_credential(AuthConfig(auth_scheme=scheme, raw_auth_credential=secret))
        return {"status": "waits for a sign-in"}

    model = ScriptedModel(lambda n, _: call("mail", to=str(n)))
    desk = Desk(LlmAgent(name="clerk", model=model, tools=[mail]))
    plugin = RunGuardPlugin(max_model_calls=2)
    await desk.say(plugin)
    assert (model.calls, plugin.snapshot()["paused"]) == (1, 1)
    for _ in range(3):
        assert desk.open_call is not None
        events = await desk.answer(plugin, (desk.open_call.args or {})["authConfig"])
    assert_stopped(events, "model_calls")
    assert model.calls == 2


async def test_two_resumes_at_once_share_one_account() -> None:
    model, desk = asking(lambda n, _: call("ask", question="?") if n == 1 else call("look", n=n), latency_s=0.01)
    plugin = RunGuardPlugin(max_model_calls=9)
    await desk.say(plugin)
    first, second = await asyncio.gather(desk.answer(plugin), desk.answer(plugin))
    assert_stopped(first, "model_calls")
    assert_stopped(second, "model_calls")
    assert (model.calls, len(plugin.trips), plugin.snapshot()["runs"]) == (9, 1, [])


# After an error of its last node these releases put the nodes of a Workflow in a wrong order when they resume it.
LOSES_ITS_PLACE = (2, 6) <= ADK <= (2, 8)


def _workflow(agent: LlmAgent) -> Any:
    first = LlmAgent(name="first", model=ScriptedModel([text("first")]))
    return Workflow(name="flow", edges=[("START", first, agent)])


TEAMS: dict[str, Callable[[LlmAgent], Any]] = {
    "sequence": lambda agent: SequentialAgent(
        name="sequence", sub_agents=[agent, LlmAgent(name="last", model=ScriptedModel([text("last")]))]
    ),
    "loop": lambda agent: LoopAgent(name="loop", sub_agents=[agent]),
    "parallel": lambda agent: ParallelAgent(
        name="parallel", sub_agents=[agent, LlmAgent(name="beside", model=ScriptedModel([text("beside")]))]
    ),
    "transfer": lambda agent: LlmAgent(
        name="lead", model=ScriptedModel([transfer("clerk"), text("end")]), sub_agents=[agent]
    ),
    "workflow": _workflow,
}


@pytest.mark.parametrize("team", TEAMS)
async def test_the_same_in_every_topology(team: str) -> None:
    _, desk = asking()
    desk.root = TEAMS[team](desk.root)
    plugin = RunGuardPlugin(max_usd=0.05, prices=PRICES, min_output_tokens=1)
    events = await desk.say(plugin)
    for _ in range(5 if team == "workflow" and LOSES_ITS_PLACE else 8):
        events += await desk.answer(plugin)
    assert_stopped(events, "budget")
    assert plugin.spend()["usd"] <= Decimal("0.05")
    assert len({trip.run_id for trip in plugin.trips}) == 1


@pytest.mark.skipif(not LOSES_ITS_PLACE, reason="this ADK replays a Workflow that ended with an error")
async def test_adk_cannot_replay_a_workflow_that_ended_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without RunGuard, too: that is why the test above answers a stopped Workflow only once on these releases."""
    from google.adk.workflow.utils._replay_sequence_barrier import ReplaySequenceBarrier

    monkeypatch.setattr(ReplaySequenceBarrier.__init__, "__defaults__", (0.1,))  # seconds; ADK waits 15
    thought = types.Content(role="model", parts=[types.Part(text="hm", thought=True)])
    failed = LlmResponse(error_code="FAILED", content=thought)
    _, desk = asking(lambda n, _: call("ask", question="?") if n == 1 else failed)
    desk.root = _workflow(desk.root)
    await desk.say(None)
    await desk.answer(None)
    await desk.answer(None)
    with pytest.raises(RuntimeError, match="Replay divergence"):
        await desk.answer(None)


# ---- a stopped run --------------------------------------------------------------------------------------------------


async def test_a_stopped_run_stays_stopped_until_it_is_extended(store: str) -> None:
    model, desk = asking(lambda n, _: call("look", n=n))
    plugin = RunGuardPlugin(store=store, max_usd=0.03, prices=PRICES, min_output_tokens=1)
    trip = assert_stopped(await desk.say(plugin), "budget")
    plugin.flush()
    made = model.calls
    for _ in range(3):
        again = await desk.again(plugin)
        assert assert_stopped(again, "budget").id == trip.id
    assert (model.calls, len(plugin.trips)) == (made, 1)
    plugin.extend(trip.scope_id, usd="0.02")
    second = assert_stopped(await desk.again(plugin), "budget")
    plugin.flush()
    assert made < model.calls <= 5
    assert second.id != trip.id
    assert plugin.spend()["usd"] <= Decimal("0.05")


async def test_an_extended_user_lets_a_stopped_run_go_on(store: str) -> None:
    model, desk = asking(lambda n, _: call("look", n=n) if n < 6 else text("done"))
    plugin = RunGuardPlugin(
        store=store, budgets=[Budget(usd=0.03, per="user", window="1d")], prices=PRICES, min_output_tokens=1
    )
    trip = assert_stopped(await desk.say(plugin), "budget")
    plugin.flush()
    assert assert_stopped(await desk.again(plugin)).id == trip.id
    plugin.extend("user:app/u1", usd=1)
    events = await desk.again(plugin)
    assert [event.error_code for event in events if event.error_code] == []
    assert model.calls == 6


async def test_a_new_message_begins_a_new_run_after_a_stop(store: str) -> None:
    model, desk = asking(lambda n, _: call("look", n=n))
    plugin = RunGuardPlugin(store=store, max_model_calls=3)
    assert_stopped(await desk.say(plugin), "model_calls")
    assert_stopped(await desk.again(plugin), "model_calls")
    assert model.calls == 3
    assert_stopped(await desk.say(plugin, "once more"), "model_calls")
    assert (model.calls, len(plugin.trips)) == (6, 2)


async def test_a_run_that_the_switch_has_stopped_goes_on_when_it_is_released(store: str) -> None:
    model, desk = asking()
    plugin = RunGuardPlugin(store=store)
    await desk.say(plugin)
    await asyncio.to_thread(plugin.stop, "user:app/u1", actor="ops", reason="look")
    for _ in range(2):
        assert_stopped(await desk.answer(plugin), "kill_switch")
    assert (model.calls, len(plugin.trips)) == (1, 1)
    await asyncio.to_thread(plugin.resume, "user:app/u1")
    await desk.answer(plugin)
    assert model.calls == 2


async def test_a_message_to_a_paused_task_is_a_new_run_with_every_store(store: str) -> None:
    """ADK may take the same invocation id for it."""
    clerk = LlmAgent(
        name="clerk", description="books", model=ScriptedModel(lambda n, _: text(f"which day? {n}")), mode="task"
    )
    desk = Desk(
        LlmAgent(name="lead", model=ScriptedModel([call("clerk", request="book")]), sub_agents=[clerk]), resumable=False
    )
    plugin = RunGuardPlugin(store=store, max_usd=0.04, prices=PRICES, min_output_tokens=1)
    for day in range(6):
        events = await desk.say(plugin, f"day {day}")
        assert [event.error_code for event in events if event.error_code] == []
    assert plugin.trips == []


# ---- in memory ------------------------------------------------------------------------------------------------------


async def test_paused_runs_in_memory_are_bounded_and_told_when_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(paused, "WAITING_KEPT", 3)
    plugin = RunGuardPlugin(max_usd=1, prices=PRICES)
    desks = [asking()[1] for _ in range(5)]
    with caplog.at_level("INFO", logger="runguard"):
        for desk in desks:
            await desk.say(plugin)
    dropped = [record for record in caplog.records if "paused_dropped" in record.getMessage()]
    assert len(dropped) == 2
    assert all(desk.invocation in record.getMessage() for desk, record in zip(desks, dropped, strict=False))
    assert plugin.snapshot()["paused"] == 3
    assert {status.scope for status in plugin.budgets()} == {f"run:{desk.invocation}" for desk in desks[2:]}
    assert plugin.spend()["calls"] == 5, "what was spent is not forgotten"


async def test_an_id_cannot_break_a_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(paused, "WAITING_KEPT", 0)
    plugin = RunGuardPlugin()
    _, desk = asking()
    with caplog.at_level("INFO", logger="runguard"):
        await desk.say(plugin, invocation_id="e-1\nforged: line\x1b[2J")
    (dropped,) = [record.getMessage() for record in caplog.records if "paused_dropped" in record.getMessage()]
    assert "forged" in dropped
    assert dropped.isprintable()


async def test_another_session_cannot_go_on_with_a_run() -> None:
    """A client may send any invocation id."""
    plugin = RunGuardPlugin(max_model_calls=3)
    model, desk = asking()
    await desk.say(plugin)
    _, theirs = asking(lambda n, _: text("done"))
    theirs.user, theirs.session = "eve", "s2"
    for _ in range(2):
        await theirs.say(plugin, invocation_id=desk.invocation)
    await desk.answer(plugin)
    assert (model.calls, plugin.trips) == (2, [])


# ---- other guards ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [{"max_usd": 0.03, "prices": PRICES, "min_output_tokens": 1}, {"max_model_calls": 3}],
    ids=["money", "calls"],
)
async def test_a_guarded_model_counts_over_all_pauses(store: str, policy: dict[str, Any]) -> None:
    inner, desk = asking()
    guarded = GuardedLlm(inner, store=store, on_stop="stop", **policy)
    desk.root.model = guarded
    await desk.say(None)
    for _ in range(6):
        events = await desk.answer(None)
        guarded.flush()
    assert_stopped(events, "budget" if "max_usd" in policy else "model_calls")
    assert (inner.calls, len(guarded.trips), guarded.snapshot()["runs"]) == (3, 1, [])
    await desk.say(None, "a new message")
    assert inner.calls == 4


async def test_a_breaker_on_agents_counts_over_all_pauses() -> None:
    model, desk = asking()
    breaker = ADKCostBreaker(max_model_calls=3, on_stop="stop")
    breaker.install_on_agent(desk.root)
    await desk.say(None)
    for _ in range(6):
        events = await desk.answer(None)
    assert_stopped(events, "model_calls")
    assert (model.calls, len(breaker.trips)) == (3, 1)


async def test_two_guarded_models_of_one_app_have_accounts_of_their_own(store: str) -> None:
    """As before there were pauses."""
    models = [ScriptedModel([text("done")]) for _ in range(2)]
    guarded = [
        GuardedLlm(model, store=store, max_usd=0.01, prices=PRICES, min_output_tokens=1, on_stop="stop")
        for model in models
    ]
    agents = [LlmAgent(name=f"agent_{number}", model=model) for number, model in enumerate(guarded)]
    await Desk(SequentialAgent(name="both", sub_agents=agents)).say(None)
    assert [model.calls for model in models] == [1, 1]
