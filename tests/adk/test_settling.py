"""A call is settled exactly once, however it ends."""

import asyncio
import gc
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from decimal import Decimal
from typing import Any

import pytest
from google.adk.agents import LoopAgent, ParallelAgent, SequentialAgent
from google.adk.agents.run_config import RunConfig
from google.adk.apps import App
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.genai import types

from runguard import Budget
from runguard.testing import ScriptedModel, call, text
from tests.kit.adk_runs import play
from tests.kit.money import CALL_TOKENS, CALL_USD, SSE, agent, figures, guard
from tests.kit.settling import (
    PROMPT_USD,
    Chunks,
    Meddler,
    RefusedError,
    assert_usable,
    recover,
    said,
    stream,
)
from tests.kit.tools import step
from tests.kit.waiting import forever, until_async

HELLO = types.Content(role="user", parts=[types.Part(text="go")])


# ---- a call that never left -----------------------------------------------------------------------------------------


def fail() -> None:
    raise ValueError("not today")


def from_a_cache() -> LlmResponse:
    return said("from the cache")


@pytest.mark.parametrize(
    "shape",
    [
        lambda a: a,
        lambda a: SequentialAgent(name="seq", sub_agents=[a]),
        lambda a: ParallelAgent(name="par", sub_agents=[a]),
    ],
)
@pytest.mark.parametrize("where", ["plugin", "agent"])
@pytest.mark.parametrize("act", [from_a_cache, fail])
async def test_a_call_that_is_answered_from_a_cache_or_fails_before_it_left_costs_nothing(
    act: Callable[[], LlmResponse | None], where: str, shape: Callable[[Any], Any]
) -> None:
    model, service = ScriptedModel([text("fine")]), InMemorySessionService()
    plugin = guard(max_model_calls=2, max_usd="0.10", budgets=[Budget(calls=1, per="session")])
    meddler = Meddler(act)

    def once(callback_context: Any, llm_request: LlmRequest) -> LlmResponse | None:
        act, meddler.act = meddler.act, None
        return act() if act is not None else None

    behind = [meddler] if where == "plugin" else []
    callbacks: dict[str, Any] = {} if behind else {"before_model_callback": once}
    root = shape(agent("a", model, **callbacks))
    result = await play(root, plugins=[plugin, *behind], session_service=service, catch=True)
    assert result.texts == ([] if act is fail else ["from the cache"])
    assert ("not today" in repr(result.error)) is (act is fail)
    assert (model.calls, figures(plugin)) == (0, (0, 0, Decimal(0)))
    # The one call that the session may make is still there.
    await assert_usable(plugin, root, service, plugins=behind)


async def test_answers_from_a_cache_use_up_neither_calls_nor_money() -> None:
    """Forty cached answers and two real ones, with money and calls for exactly two."""

    def cached(callback_context: Any, llm_request: LlmRequest) -> LlmResponse | None:
        cached.asked += 1  # type: ignore[attr-defined]
        return said(f"cached {cached.asked}") if cached.asked % 21 else None  # type: ignore[attr-defined]

    cached.asked = 0  # type: ignore[attr-defined]
    model, plugin = ScriptedModel([text("paid")]), guard(max_model_calls=2, max_usd="0.04")
    loop = LoopAgent(name="loop", max_iterations=42, sub_agents=[agent("a", model, before_model_callback=cached)])
    result = await play(loop, plugins=[plugin])
    assert (model.calls, plugin.trips, figures(plugin)) == (2, [], (2, 0, Decimal("0.04")))
    assert len(result.texts) == 42


async def test_a_call_over_the_frameworks_own_limit_costs_nothing() -> None:
    model = ScriptedModel([call("step", q=1), text("fine")])
    plugin, service = guard(max_model_calls=100), InMemorySessionService()
    root = agent("a", model, tools=[step])
    result = await play(
        root, plugins=[plugin], session_service=service, catch=True, run_config=RunConfig(max_llm_calls=1)
    )
    assert type(result.error).__name__ == "LlmCallsLimitExceededError"
    assert (model.calls, figures(plugin)) == (1, (1, 0, CALL_USD))
    await assert_usable(plugin, root, service)


async def test_a_call_cancelled_before_it_left_costs_nothing() -> None:
    model, plugin, service = ScriptedModel([text("fine")]), guard(max_usd="0.10"), InMemorySessionService()
    waiting = asyncio.Event()
    first = True

    async def think(callback_context: Any, llm_request: LlmRequest) -> None:
        nonlocal first
        if first:
            first = False
            waiting.set()
            await forever()

    root = agent("a", model, before_model_callback=think)
    playing = asyncio.create_task(play(root, plugins=[plugin], session_service=service))
    await waiting.wait()
    assert plugin.spend()["reserved_usd"] == CALL_USD
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert (model.calls, figures(plugin)) == (0, (0, 0, Decimal(0)))
    await assert_usable(plugin, root, service)


async def test_a_call_cancelled_while_it_waits_for_money_holds_nothing() -> None:
    """One call holds all there is, another waits for it and is cancelled."""
    model = Chunks(forever)
    plugin = guard(budgets=[Budget(usd="0.02", per="user")])
    runner = Runner(
        app=App(name="app", root_agent=agent("a", model), plugins=[plugin]), session_service=InMemorySessionService()
    )
    one, two = (asyncio.create_task(play(runner.agent, runner=runner, session_id=name)) for name in ("s1", "s2"))
    await until_async(
        lambda: model.calls and any(run["session"] == "s2" and run["model_calls"] for run in plugin.snapshot()["runs"])
    )
    (status,) = plugin.budgets("user:app/u1")
    assert (status.reserved, status.spent) == (CALL_USD, 0)
    two.cancel()
    with pytest.raises(asyncio.CancelledError):
        await two
    (status,) = plugin.budgets("user:app/u1")
    assert status.reserved == CALL_USD, "of the one that is still on its way"
    one.cancel()
    with pytest.raises(asyncio.CancelledError):
        await one
    assert (model.calls, figures(plugin)) == (1, (1, 1, CALL_USD))


# ---- a call that left -----------------------------------------------------------------------------------------------


class Recovery(BasePlugin):
    async def on_model_error_callback(
        self, *, callback_context: Any, llm_request: LlmRequest, error: Exception
    ) -> LlmResponse:
        return said("never mind")


@pytest.mark.parametrize("recovers", ["nobody", "agent", "plugin"])
@pytest.mark.parametrize(
    ("error", "booked"),
    [
        # it may have worked on it: its prompt, and as much as it may have said
        (ConnectionError("the line broke"), (1, 1, CALL_USD)),
        (RefusedError(503), (1, 0, Decimal(0))),
        (RefusedError(429), (1, 0, Decimal(0))),
        (RefusedError(200), (1, 1, CALL_USD)),  # no status of an error: nothing says that it was not billed
    ],
    ids=str,
)
async def test_a_call_that_failed_is_booked_as_what_it_can_have_cost(
    error: Exception, booked: tuple[int, int, Decimal], recovers: str
) -> None:
    model, plugin, service = Chunks(error), guard(max_usd="0.10"), InMemorySessionService()
    callbacks: dict[str, Any] = {"on_model_error_callback": recover} if recovers == "agent" else {}
    root = agent("a", model, **callbacks)
    behind = [Recovery(name="recovery")] if recovers == "plugin" else []
    result = await play(root, plugins=[plugin, *behind], session_service=service, catch=True)
    assert (result.error is None) is (recovers != "nobody")
    assert result.texts == ([] if recovers == "nobody" else ["never mind"])
    assert (model.calls, figures(plugin)) == (1, booked)
    await assert_usable(plugin, root, service, plugins=behind)


@pytest.mark.parametrize(
    "shape", [lambda a: a, lambda a: LoopAgent(name="loop", max_iterations=1, sub_agents=[a])], ids=["agent", "loop"]
)
async def test_a_run_cancelled_during_its_call_is_booked_at_an_estimate(shape: Callable[[Any], Any]) -> None:
    on_its_way = asyncio.Event()

    async def hang() -> None:
        on_its_way.set()
        await forever()

    model, plugin, service = Chunks(hang), guard(max_usd="0.10"), InMemorySessionService()
    root = shape(agent("a", model))
    playing = asyncio.create_task(play(root, plugins=[plugin], session_service=service))
    await on_its_way.wait()
    assert plugin.spend()["reserved_usd"] == CALL_USD
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert (model.calls, figures(plugin)) == (1, (1, 1, CALL_USD))
    await assert_usable(plugin, root, service)


async def _leave(events: AsyncGenerator[Any, None], how: str) -> None:
    async for _ in events:
        break
    if how == "aclose later":
        await asyncio.sleep(0.01)
    if how != "thrown away":
        with suppress(BaseExceptionGroup):  # older versions of ADK report the closing of a ParallelAgent as an error
            await events.aclose()
        return
    del events
    for _ in range(3):
        gc.collect(1)
        await asyncio.sleep(0.01)  # the loop closes what was thrown away, agents below need turns of their own for it


@pytest.mark.parametrize(
    "shape", [lambda a: a, lambda a: ParallelAgent(name="par", sub_agents=[a])], ids=["agent", "parallel"]
)
@pytest.mark.parametrize("how", ["aclose", "aclose later", "thrown away"])
async def test_a_stream_that_nobody_reads_to_its_end_is_booked(how: str, shape: Callable[[Any], Any]) -> None:
    """Left after the first chunk of a streamed answer, whose usage is told."""
    model = Chunks(
        said("a", (1_000, 100), partial=True), said("b", (1_000, 200), partial=True), said("ab", (1_000, 250))
    )
    plugin, service = guard(max_usd="0.10"), InMemorySessionService()
    root = shape(agent("a", model))
    runner = Runner(app=App(name="app", root_agent=root, plugins=[plugin]), session_service=service)
    await service.create_session(app_name="app", user_id="u1", session_id="s1")
    await _leave(runner.run_async(user_id="u1", session_id="s1", new_message=HELLO, run_config=SSE), how)
    calls, estimated, usd = figures(plugin)
    assert (calls, estimated) == (1, 0)
    assert usd in (Decimal("0.014"), Decimal("0.018"), CALL_USD), (
        "as much as was told until the end, never more than once"
    )
    await assert_usable(plugin, root, service)


@pytest.mark.parametrize("how", ["aclose", "thrown away"])
async def test_a_run_left_before_its_next_call_owes_nothing_for_it(how: str) -> None:
    model = ScriptedModel([call("step", q=1), text("fine")])
    plugin, service = guard(max_usd="0.10"), InMemorySessionService()
    root = agent("a", model, tools=[step])
    runner = Runner(app=App(name="app", root_agent=root, plugins=[plugin]), session_service=service)
    await service.create_session(app_name="app", user_id="u1", session_id="s1")
    await _leave(runner.run_async(user_id="u1", session_id="s1", new_message=HELLO), how)
    assert plugin.spend()["usd"] == model.calls * CALL_USD


# ---- streamed answers -----------------------------------------------------------------------------------------------


async def test_a_stream_cut_off_after_its_usage_was_told_is_booked_at_that_usage() -> None:
    plugin, _, root, service = await stream(
        said("a", (1_000, 100), partial=True), said("b", (1_000, 150), partial=True), ConnectionError("cut")
    )
    assert figures(plugin) == (1, 0, PROMPT_USD + Decimal("0.006"))
    await assert_usable(plugin, root, service)


async def test_a_stream_cut_off_before_its_usage_was_told_is_booked_at_its_prompt_and_the_words_that_came() -> None:
    plugin, _, root, service = await stream(
        said("x" * 200, partial=True), said("y" * 200, partial=True), ConnectionError("cut")
    )
    assert figures(plugin) == (1, 1, PROMPT_USD + Decimal("0.004")), "400 letters are about 100 tokens"
    await assert_usable(plugin, root, service)


async def test_a_stream_refused_with_a_status_after_words_came_is_not_taken_for_free() -> None:
    plugin, _, root, service = await stream(said("x" * 400, partial=True), RefusedError(500))
    assert figures(plugin) == (1, 1, PROMPT_USD + Decimal("0.004"))
    await assert_usable(plugin, root, service)


@pytest.mark.parametrize(
    "responses",
    [
        [said("a", (1_000, 50), partial=True), said("b", (1_000, 150), partial=True), said("ab", (1_000, 250))],
        [said("a", (1_000, 250), partial=True), said("ab")],  # told before the end only
        [said("ab", (1_000, 100)), said("ab", (1_000, 250))],  # two whole responses of one call
        [said("ab"), said("", (1_000, 250))],  # the usage comes behind the answer
        [said("ab", (1_000, 250)), said("")],
    ],
    ids=["growing", "before the end", "twice", "behind", "before"],
)
async def test_the_usage_of_a_call_is_the_last_one_told(responses: list[LlmResponse]) -> None:
    plugin, _, root, service = await stream(*responses)
    assert figures(plugin) == (1, 0, CALL_USD)
    assert plugin.spend()["tokens"] == CALL_TOKENS
    await assert_usable(plugin, root, service)
