"""Every model call is closed: one that never left is given back, one that left is booked at its last usage or at a
marked estimate.
"""

import asyncio
import gc
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress
from decimal import Decimal
from typing import Any

import pytest
from google.adk.agents import LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.agents.run_config import RunConfig
from google.adk.apps import App
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.workflow import RetryConfig
from google.genai import types

from runguard import Budget
from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, assert_calls_answered, call, text

from .helpers import play
from .test_money_scenarios import CALL_TOKENS, CALL_USD, SSE, agent, assert_nothing_reserved, guard, step

HELLO = types.Content(role="user", parts=[types.Part(text="go")])
PROMPT_USD = Decimal("0.01")


class RefusedError(Exception):
    """The provider answered with a status: it has billed nothing."""

    def __init__(self, code: int) -> None:
        super().__init__(f"status {code}")
        self.code = code


def said(
    words: str, usage: tuple[int, int] | None = None, *, partial: bool = False, model: str | None = None
) -> LlmResponse:
    """A response or a chunk, with prompt and output tokens where told."""
    told = usage and types.GenerateContentResponseUsageMetadata(
        prompt_token_count=usage[0], candidates_token_count=usage[1], total_token_count=sum(usage)
    )
    content = types.Content(role="model", parts=[types.Part(text=words)])
    return LlmResponse(content=content, usage_metadata=told or None, partial=partial, model_version=model)


class Chunks(ScriptedModel):
    """Its first call answers with just these responses;

    an exception among them is raised, a function called. Later calls say "fine".
    """

    def __init__(self, *first: Any, **options: Any) -> None:
        super().__init__([text("fine")], **options)
        self._first = first

    _first: Any = ()

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        first, self._first = self._first, ()
        if not first:
            async for response in super().generate_content_async(llm_request, stream):
                yield response
            return
        self._calls += 1
        for entry in first:
            await asyncio.sleep(0)
            if isinstance(entry, BaseException):
                raise entry
            if callable(entry):
                await entry()
                continue
            yield entry


async def for_ever() -> None:
    await asyncio.Event().wait()


def figures(plugin: RunGuardPlugin) -> tuple[int, int, Decimal]:
    """Calls, how many of them are estimates, and dollars."""
    spent = plugin.spend()
    return spent["calls"], spent["estimated_calls"], spent["usd"]


async def assert_usable(plugin: RunGuardPlugin, root: Any, service: InMemorySessionService, **options: Any) -> None:
    """Nothing is held any more, and the user's next turn finds a whole session and costs one call."""
    assert_nothing_reserved(plugin)
    calls, estimated, usd = figures(plugin)
    result = await play(
        root, "and now?", plugins=[plugin, *options.pop("plugins", ())], session_service=service, **options
    )
    assert result.texts[-1] == "fine"
    assert result.trips == []
    assert figures(plugin) == (calls + 1, estimated, usd + CALL_USD)
    assert_calls_answered(result.session)
    assert_nothing_reserved(plugin)


# ---- a call that never left -----------------------------------------------------------------------------------------


class Meddler(BasePlugin):
    """A plugin behind ours that does something instead of the first call."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__(name="meddler")
        self.act: Callable[[], Any] | None = act

    async def before_model_callback(self, *, callback_context: Any, llm_request: LlmRequest) -> LlmResponse | None:
        act, self.act = self.act, None
        return act() if act is not None else None


def fail() -> None:
    raise ValueError("not today")


@pytest.mark.parametrize(
    "shape",
    [
        lambda a: a,
        lambda a: SequentialAgent(name="seq", sub_agents=[a]),
        lambda a: ParallelAgent(name="par", sub_agents=[a]),
    ],
)
@pytest.mark.parametrize("where", ["plugin", "agent"])
async def test_a_call_answered_from_a_cache_costs_nothing(where: str, shape: Callable[[Any], Any]) -> None:
    model, plugin, service = (
        ScriptedModel([text("fine")]),
        guard(max_model_calls=2, budgets=[Budget(calls=1, per="session")]),
        InMemorySessionService(),
    )
    cache = Meddler(lambda: said("from the cache"))

    def once(callback_context: Any, llm_request: LlmRequest) -> LlmResponse | None:
        act, cache.act = cache.act, None
        return act() if act is not None else None

    behind = [cache] if where == "plugin" else []
    root = shape(agent("a", model, **({} if behind else {"before_model_callback": once})))
    result = await play(root, plugins=[plugin, *behind], session_service=service)
    assert result.texts == ["from the cache"]
    assert (model.calls, figures(plugin)) == (0, (0, 0, 0))
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
    assert_nothing_reserved(plugin)


@pytest.mark.parametrize("where", ["plugin", "agent"])
async def test_a_call_that_failed_before_it_left_costs_nothing(where: str) -> None:
    model, plugin, service = ScriptedModel([text("fine")]), guard(max_usd="0.10"), InMemorySessionService()
    meddler = Meddler(fail)

    def once(callback_context: Any, llm_request: LlmRequest) -> None:
        act, meddler.act = meddler.act, None
        if act is not None:
            act()

    behind = [meddler] if where == "plugin" else []
    root = agent("a", model, **({} if behind else {"before_model_callback": once}))
    result = await play(root, plugins=[plugin, *behind], session_service=service, catch=True)
    assert "not today" in str(result.error)
    assert (model.calls, figures(plugin)) == (0, (0, 0, 0))
    await assert_usable(plugin, root, service, plugins=behind)


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
            await for_ever()

    root = agent("a", model, before_model_callback=think)
    playing = asyncio.create_task(play(root, plugins=[plugin], session_service=service))
    await waiting.wait()
    assert plugin.spend()["reserved_usd"] == CALL_USD
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert (model.calls, figures(plugin)) == (0, (0, 0, 0))
    await assert_usable(plugin, root, service)


async def test_a_call_cancelled_while_it_waits_for_money_holds_nothing() -> None:
    """One call holds all there is, another waits for it and is cancelled."""
    model = Chunks(for_ever)
    plugin = guard(budgets=[Budget(usd="0.02", per="user")])
    runner = Runner(
        app=App(name="app", root_agent=agent("a", model), plugins=[plugin]), session_service=InMemorySessionService()
    )
    one, two = (asyncio.create_task(play(runner.agent, runner=runner, session_id=name)) for name in ("s1", "s2"))
    while not (model.calls and any(run["session"] == "s2" and run["model_calls"] for run in plugin.snapshot()["runs"])):  # noqa: ASYNC110 - nobody is told that a call waits
        await asyncio.sleep(0.001)
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
    assert_nothing_reserved(plugin)


# ---- a call that left -----------------------------------------------------------------------------------------------


def recover(callback_context: Any, llm_request: LlmRequest, error: Exception) -> LlmResponse:
    return said("never mind")


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
    root = agent("a", model, **({"on_model_error_callback": recover} if recovers == "agent" else {}))
    behind = [Recovery(name="recovery")] if recovers == "plugin" else []
    result = await play(root, plugins=[plugin, *behind], session_service=service, catch=True)
    assert (result.error is None) is (recovers != "nobody")
    assert result.texts == ([] if recovers == "nobody" else ["never mind"])
    assert (model.calls, figures(plugin)) == (1, booked)
    await assert_usable(plugin, root, service, plugins=behind)


async def test_a_status_on_the_errors_response_counts_too() -> None:
    class HttpError(Exception):
        class response:  # noqa: N801 - as httpx names it
            status_code = 502

    model, plugin = Chunks(HttpError()), guard()
    await play(agent("a", model), plugins=[plugin], catch=True)
    assert figures(plugin) == (1, 0, 0)


async def test_every_attempt_of_a_retried_agent_is_a_call_of_its_own() -> None:
    answers = iter([ConnectionError("one"), RefusedError(503)])
    model = ScriptedModel(lambda n, _: next(answers, text("fine")))
    plugin, service = guard(max_usd="0.10"), InMemorySessionService()
    root = agent("a", model, retry_config=RetryConfig(max_attempts=3, initial_delay=0.001, jitter=0.0))
    result = await play(root, plugins=[plugin], session_service=service)
    assert result.texts == ["fine"]
    assert (model.calls, figures(plugin)) == (3, (3, 1, 2 * CALL_USD))
    await assert_usable(plugin, root, service)


async def test_retries_end_at_the_budget() -> None:
    model = ScriptedModel(lambda n, _: ConnectionError("again"))
    plugin = guard(max_usd="0.04")
    root = agent("a", model, retry_config=RetryConfig(max_attempts=10, initial_delay=0.001, jitter=0.0))
    result = await play(root, plugins=[plugin], catch=True)
    assert (model.calls, figures(plugin)) == (2, (2, 2, Decimal("0.04")))
    assert result.error is None
    assert [trip.rule for trip in plugin.trips] == ["budget"]
    assert_nothing_reserved(plugin)


@pytest.mark.parametrize(
    "shape", [lambda a: a, lambda a: LoopAgent(name="loop", max_iterations=1, sub_agents=[a])], ids=["agent", "loop"]
)
async def test_a_run_cancelled_during_its_call_is_booked_at_an_estimate(shape: Callable[[Any], Any]) -> None:
    on_its_way = asyncio.Event()

    async def hang() -> None:
        on_its_way.set()
        await for_ever()

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
        gc.collect()
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
    assert_nothing_reserved(plugin)


# ---- streamed answers -----------------------------------------------------------------------------------------------


async def stream(*first: Any, **policy: Any) -> tuple[RunGuardPlugin, Chunks, LlmAgent, InMemorySessionService]:
    model, plugin, service = Chunks(*first), guard(**{"max_usd": "0.10", **policy}), InMemorySessionService()
    root = agent("a", model)
    await play(root, plugins=[plugin], session_service=service, run_config=SSE, catch=True)
    assert model.calls == 1
    return plugin, model, root, service


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


# ---- what tokens cost -----------------------------------------------------------------------------------------------

DEAR = {"input": 10, "output": 40, "cached": 1, "audio": 100, "cached_audio": 50, "audio_output": 400}


def detail(modality: str, tokens: int) -> list[types.ModalityTokenCount]:
    return [types.ModalityTokenCount(modality=types.MediaModality(modality), token_count=tokens)]


def usage(**counts: Any) -> types.GenerateContentResponseUsageMetadata:
    return types.GenerateContentResponseUsageMetadata(**counts)


@pytest.mark.parametrize(
    ("told", "usd"),
    [
        # thinking is output, whether the model counts it among the candidates or beside them
        (
            usage(
                prompt_token_count=1_000, candidates_token_count=100, thoughts_token_count=150, total_token_count=1_250
            ),
            "0.02",
        ),
        (
            usage(
                prompt_token_count=1_000, candidates_token_count=250, thoughts_token_count=150, total_token_count=1_250
            ),
            "0.02",
        ),
        (usage(prompt_token_count=1_000, candidates_token_count=100, thoughts_token_count=150), "0.02"),
        # of the prompt, 600 were read from a cache
        (
            usage(
                prompt_token_count=1_000,
                cached_content_token_count=600,
                candidates_token_count=250,
                total_token_count=1_250,
            ),
            "0.0146",
        ),
        # the prompts of built-in tools are input beside the prompt
        (
            usage(
                prompt_token_count=1_000,
                tool_use_prompt_token_count=500,
                candidates_token_count=250,
                total_token_count=1_750,
            ),
            "0.025",
        ),
        # of the prompt, 400 were heard; of the answer, 50 spoken
        (
            usage(
                prompt_token_count=1_000,
                prompt_tokens_details=detail("AUDIO", 400),
                candidates_token_count=250,
                total_token_count=1_250,
            ),
            "0.056",
        ),
        (
            usage(
                prompt_token_count=1_000,
                candidates_token_count=250,
                candidates_tokens_details=detail("AUDIO", 50),
                total_token_count=1_250,
            ),
            "0.038",
        ),
        (
            usage(
                prompt_token_count=1_000,
                prompt_tokens_details=detail("AUDIO", 400),
                cached_content_token_count=300,
                cache_tokens_details=detail("AUDIO", 300),
                candidates_token_count=250,
                total_token_count=1_250,
            ),
            "0.041",
        ),
    ],
    ids=[
        "thoughts apart",
        "thoughts within",
        "no total",
        "cached",
        "tool use",
        "audio in",
        "audio out",
        "cached audio",
    ],
)
async def test_each_kind_of_token_has_its_own_price(told: Any, usd: str) -> None:
    content = types.Content(role="model", parts=[types.Part(text="x")])
    model = Chunks(LlmResponse(content=content, usage_metadata=told))
    plugin, service = guard(prices={"scripted-1": DEAR}, max_usd=5), InMemorySessionService()
    root = agent("a", model)
    await play(root, plugins=[plugin], session_service=service)
    assert figures(plugin) == (1, 0, Decimal(usd))
    await assert_usable(plugin, root, service)


async def test_an_answer_without_usage_is_estimated_and_marked() -> None:
    plugin, service = guard(max_usd="0.10"), InMemorySessionService()
    model = Chunks(said("x" * 400))
    root = agent("a", model)
    decided = await play(root, plugins=[plugin], session_service=service)
    assert decided.texts == ["x" * 400]
    assert figures(plugin) == (1, 1, PROMPT_USD + Decimal("0.004"))
    await assert_usable(plugin, root, service)


async def test_a_trip_says_when_what_was_spent_is_partly_an_estimate() -> None:
    model = ScriptedModel(lambda n, _: call("step", q=n), usage_on="none")
    plugin = guard(max_usd="0.03")
    await play(agent("a", model, tools=[step]), plugins=[plugin])
    (trip,) = plugin.trips
    assert trip.estimated
    assert "about $" in trip.message


@pytest.mark.parametrize(
    ("answering", "usd", "estimated"),
    [("small-1", "0.002", 0), ("scripted-1", "0.02", 0), ("nobody-knows-1", "0.02", 1)],
)
async def test_the_model_that_answered_is_paid(answering: str, usd: str, estimated: int) -> None:
    """Without a price for the one that answered, that of the one that was asked stands, marked as an estimate."""
    prices = {"scripted-1": {"input": 10, "output": 40}, "small-1": {"input": 1, "output": 4}}
    plugin = guard(prices=prices, max_usd="0.10")
    await play(agent("a", Chunks(said("x", (1_000, 250), model=answering))), plugins=[plugin])
    assert figures(plugin) == (1, estimated, Decimal(usd))
    assert list(plugin.spend()["by_model"]) == [answering]
    assert_nothing_reserved(plugin)


def _branches(models: Iterable[Any]) -> ParallelAgent:
    return ParallelAgent(name="par", sub_agents=[agent(f"p{n}", model) for n, model in enumerate(models)])


async def test_branches_that_end_in_every_way_at_once_leave_nothing_behind() -> None:
    """An answer, one without usage, a refusal, an estimate of what broke and an answer from a cache, side by side."""
    plugin, service = guard(max_usd="0.10"), InMemorySessionService()
    models = [
        ScriptedModel([text("fine")]),
        Chunks(said("x" * 400)),
        Chunks(RefusedError(503)),
        Chunks(ConnectionError("broke")),
        ScriptedModel([text("fine")]),
    ]
    root = _branches(models)
    for branch in root.sub_agents[2:4]:
        branch.on_model_error_callback = recover
    cache = Meddler(lambda: said("cached"))

    def once(callback_context: Any, llm_request: LlmRequest) -> LlmResponse | None:
        act, cache.act = cache.act, None
        return act() if act is not None else None

    root.sub_agents[4].before_model_callback = once
    result = await play(root, plugins=[plugin], session_service=service)
    assert sorted(result.texts) == sorted(["fine", "x" * 400, "never mind", "never mind", "cached"])
    assert figures(plugin) == (4, 2, CALL_USD + Decimal("0.014") + CALL_USD)
    assert_nothing_reserved(plugin)
    again = await play(root, "and now?", plugins=[plugin], session_service=service)
    assert again.texts == ["fine"] * 5
    assert figures(plugin) == (9, 2, Decimal("0.154"))
