"""What Gemini bills is booked, also after refusals, broken connections and broken streams."""

import asyncio
import random
import time
from decimal import Decimal
from typing import Any

import pytest
from google.adk.agents import LlmAgent, ParallelAgent
from google.adk.sessions import InMemorySessionService
from google.genai import Client, types
from google.genai.errors import APIError

import runguard
from runguard.testing import assert_stopped
from tests.kit.gemini_models import Models, assert_usable, modes, transports
from tests.kit.gemini_server import USAGE, Answer, GeminiServer, Refusal, Request, call, text, usage
from tests.kit.money import agent, assert_nothing_reserved, figures
from tests.kit.tools import step
from tests.kit.wire import CALL_USD, FLASH, forgive, guard, play, price

from .test_guarded_wire import Stack, Wrapped, assert_clear

ONCE = types.HttpRetryOptions(attempts=1)  # without it, the client tries again after a broken connection by itself


THRICE = types.HttpRetryOptions(attempts=3, initial_delay=0.001, max_delay=0.002, jitter=0)


# ---- what is booked is what the provider bills ----------------------------------------------------------------------


@modes
@pytest.mark.parametrize(
    ("used", "usd"),
    [
        (usage(1_000, 250), "0.000925"),
        (usage(10_003, 301, thoughts=511, cached=4_001), "0.00395063"),
        (usage(1, 0), "0.0000003"),
        (usage(7_000, 9, thoughts=1, tool_use=333), "0.0022249"),
        (usage(5_000, 10, audio=2_000, cached=1_500, cached_audio=500), "0.002205"),
        (usage(1_000), "0.0003"),
    ],
    ids=["plain", "cached and thinking", "one token", "tool use", "audio", "nothing said"],
)
async def test_a_call_is_booked_at_its_list_price_to_the_nano_dollar(
    server: GeminiServer, gemini: Models, used: dict[str, Any], usd: str, mode: str
) -> None:
    """Without prices of our own: the price list knows the model."""
    server.script(Answer([text("It is done.")], usage=used, chunks=3))
    plugin = guard(max_usd=1, prices={})
    result = await play(agent("a", gemini()), plugins=[plugin], mode=mode)
    assert result.texts[-1] == "It is done."
    (request,) = server.requests
    assert (request.verb, request.query) == (
        ("generateContent", {}) if mode == "unary" else ("streamGenerateContent", {"alt": ["sse"]})
    )
    assert figures(plugin) == (1, 0, Decimal(usd))
    assert price(used) == Decimal(usd), "the test's own arithmetic"
    spent = plugin.spend()["by_model"]["gemini-2.5-flash"]
    assert spent["input_tokens"] == used["promptTokenCount"] + used.get("toolUsePromptTokenCount", 0)
    assert spent["output_tokens"] == used.get("candidatesTokenCount", 0) + used.get("thoughtsTokenCount", 0)
    assert (spent["cached_tokens"], spent["thinking_tokens"]) == (
        used.get("cachedContentTokenCount", 0),
        used.get("thoughtsTokenCount", 0),
    )


async def test_a_fraction_of_a_nano_dollar_is_rounded_up_once_per_call(server: GeminiServer, gemini: Models) -> None:
    server.script(Answer(usage=usage(3, 1, cached=1)))
    plugin = guard(max_usd=1, prices={"gemini-2.5-flash": {"input": "0.0333", "output": "0.0001", "cached": "0.0111"}})
    await play(agent("a", gemini()), plugins=[plugin])
    assert figures(plugin)[2] == Decimal("0.000000078"), "2 × 33.3 + 11.1 + 0.1 = 77.8 nano-dollars"


@pytest.mark.parametrize("usage_on", ["all", "last", "prompt first", "not last", "alone"])
@pytest.mark.parametrize("chunks", [2, 7])
async def test_usage_that_a_stream_tells_again_and_again_counts_once(
    server: GeminiServer, gemini: Models, usage_on: str, chunks: int
) -> None:
    used = usage(3_000, 700, thoughts=40, cached=1_024)
    server.script(Answer([text("one two three four five six seven")], usage=used, chunks=chunks, usage_on=usage_on))
    plugin = guard(max_usd=1)
    result = await play(agent("a", gemini(), max_output=900), plugins=[plugin], mode="sse")
    assert result.texts[-1] == "one two three four five six seven"
    assert len(result.texts) == chunks + 1, "it came in pieces"
    assert server.calls[0].max_output == 900
    assert figures(plugin) == (1, 0, price(used))
    assert plugin.spend()["tokens"] == 3_740


@modes
async def test_an_answer_without_usage_is_an_estimate_and_marked(
    server: GeminiServer, gemini: Models, mode: str
) -> None:
    server.script(Answer([text("x" * 400)], usage=None, chunks=4))
    plugin = guard(max_usd=1)
    await play(agent("a", gemini()), plugins=[plugin], mode=mode)
    assert figures(plugin) == (1, 1, price(usage(1_000, 100))), (
        "its prompt as it was counted, and four letters to a token"
    )


@modes
async def test_a_blocked_prompt_is_paid(server: GeminiServer, gemini: Models, mode: str) -> None:
    server.script(Answer(usage=usage(1_000), blocked="PROHIBITED_CONTENT"))
    plugin = guard(max_usd=1)
    result = await play(agent("a", gemini()), plugins=[plugin], mode=mode)
    assert result.events[-1].error_code == "PROHIBITED_CONTENT"
    assert figures(plugin) == (1, 0, Decimal("0.0003"))


@modes
async def test_the_model_that_answered_is_the_one_that_is_billed(
    server: GeminiServer, gemini: Models, mode: str
) -> None:
    server.script(Answer(model_version="gemini-2.5-flash", chunks=2))
    plugin = guard(max_usd=1, prices={"gemini-2.5-flash": FLASH, "gemini-flash-latest": {"input": 100, "output": 100}})
    await play(agent("a", gemini(model="gemini-flash-latest")), plugins=[plugin], mode=mode)
    (request,) = server.requests
    assert request.path.startswith("/v1beta/models/gemini-flash-latest:")
    assert figures(plugin) == (1, 0, CALL_USD)
    assert list(plugin.spend()["by_model"]) == ["gemini-2.5-flash"]


@modes
@pytest.mark.parametrize("seed", range(3))
async def test_both_sides_books_agree(server: GeminiServer, gemini: Models, seed: int, mode: str) -> None:
    """Agents side by side and tools, refusals among the answers, usage by chance: the provider's bill is ours."""
    chance = random.Random(seed)

    def decide(number: int, request: Request) -> Answer | Refusal:
        roll = random.Random(seed * 1_000 + number)
        if roll.random() < 0.2:
            return Refusal(roll.choice([400, 429, 500, 503]), delay_s=roll.random() / 100)
        prompt = roll.randrange(1, 1_000)
        used = usage(
            prompt,
            roll.randrange(0, 200),
            thoughts=roll.randrange(0, 50),
            cached=roll.randrange(0, prompt + 1),
            tool_use=roll.randrange(0, 2),
        )
        parts = [call("step", q=number), call("step", q=-number)] if roll.random() < 0.6 else [text("so be it")]
        where = roll.choice(["all", "last", "prompt first", "not last", "alone"])
        return Answer(parts, usage=used, chunks=roll.randrange(1, 5), usage_on=where, delay_s=roll.random() / 100)

    server.answer_by(decide)
    plugin = guard(max_usd=1, max_model_calls=200)
    model = gemini()

    def worker(name: str) -> LlmAgent:
        return agent(name, model, tools=[step], on_model_error_callback=forgive)

    for turn in range(3):
        team = ParallelAgent(name="team", sub_agents=[worker(f"w{n}") for n in range(chance.randrange(1, 5))])
        await play(team, plugins=[plugin], session_id=f"s{turn}", mode=mode)
        assert_nothing_reserved(plugin)
    assert figures(plugin) == (len(server.calls), 0, sum(map(price, server.billed), Decimal(0)))
    assert 0 < len(server.billed) < len(server.calls), "some were refused"


# ---- what the provider refused --------------------------------------------------------------------------------------


@modes
@transports
@pytest.mark.parametrize("status", [400, 429, 500])
async def test_a_call_that_the_provider_refused_costs_nothing(
    server: GeminiServer, gemini: Models, status: int, mode: str, transport: str
) -> None:
    server.script(Refusal(status))
    plugin, service = guard(max_usd="0.002"), InMemorySessionService()
    root = agent("a", gemini(transport))
    result = await play(root, plugins=[plugin], session_service=service, mode=mode, catch=True)
    assert isinstance(result.error, APIError)
    assert result.error.code == status
    assert (len(server.requests), server.billed) == (1, [])
    assert figures(plugin) == (1, 0, Decimal(0))
    assert plugin.trips == []
    await assert_usable(plugin, root, service, server, mode=mode)


@modes
@transports
async def test_attempts_of_the_client_are_one_call_billed_once(
    server: GeminiServer, gemini: Models, mode: str, transport: str
) -> None:
    """The client itself tries again: a logical call, three requests, one bill."""
    server.script(Refusal(429), Refusal(500), Answer())
    plugin = guard(max_usd="0.00185", max_model_calls=2)
    result = await play(agent("a", gemini(transport, retry_options=THRICE)), plugins=[plugin], mode=mode)
    assert result.texts[-1] == "fine"
    assert (len(server.calls), server.billed) == (3, [USAGE])
    assert figures(plugin) == (1, 0, CALL_USD)


@modes
async def test_attempts_of_the_client_that_all_fail_cost_nothing(
    server: GeminiServer, gemini: Models, mode: str
) -> None:
    server.script(Refusal(429))
    plugin, service = guard(max_usd="0.002"), InMemorySessionService()
    root = agent("a", gemini(retry_options=THRICE))
    result = await play(root, plugins=[plugin], session_service=service, mode=mode, catch=True)
    assert getattr(result.error, "code", None) == 429
    assert (len(server.calls), figures(plugin)) == (3, (1, 0, Decimal(0)))
    await assert_usable(plugin, root, service, server, mode=mode)


async def test_what_a_refused_call_held_is_there_for_its_siblings(server: GeminiServer, gemini: Models) -> None:
    """Money for one call, ten that want it; the provider refuses the first nine that arrive."""
    server.answer_by(lambda number, _: Refusal(429) if number < 10 else Answer([text("at last")]))
    plugin = guard(max_usd=CALL_USD)
    model = gemini()

    team = ParallelAgent(
        name="team", sub_agents=[agent(f"w{n}", model, on_model_error_callback=forgive) for n in range(10)]
    )
    result = await play(team, plugins=[plugin])
    assert sorted(result.texts) == ["at last", *["later"] * 9]
    assert (len(server.calls), server.max_in_flight) == (10, 1)
    assert figures(plugin) == (10, 0, CALL_USD)
    assert plugin.trips == []


# ---- lines that break -----------------------------------------------------------------------------------------------


@transports
@pytest.mark.parametrize("way", ["cut", "error"])
async def test_a_stream_that_breaks_is_an_estimate_of_what_was_heard(
    server: GeminiServer, gemini: Models, way: str, transport: str
) -> None:
    ends: dict[str, Any] = {"cut_after": 3} if way == "cut" else {"fails_after": 3}
    server.script(Answer([text("x" * 400)], chunks=4, usage_on="last", **ends))
    plugin, service = guard(max_usd=1), InMemorySessionService()
    root = agent("a", gemini(transport))
    result = await play(root, plugins=[plugin], session_service=service, mode="sse", catch=True)
    assert result.error is not None
    assert result.texts == ["x" * 100] * 3
    assert figures(plugin) == (1, 1, price(usage(1_000, 75))), "three hundred letters, four to a token; and marked"
    await assert_usable(plugin, root, service, server, mode="sse")


@transports
@pytest.mark.parametrize(("heard", "told"), [(3, 300), (4, 400)], ids=["in the middle", "at its very end"])
async def test_a_stream_that_breaks_costs_at_least_what_it_told(
    server: GeminiServer, gemini: Models, heard: int, told: int, transport: str
) -> None:
    server.script(Answer([text("x" * 400)], usage=usage(1_000, 400), chunks=4, cut_after=heard))
    plugin, service = guard(max_usd=1), InMemorySessionService()
    root = agent("a", gemini(transport))
    result = await play(root, plugins=[plugin], session_service=service, mode="sse", catch=True)
    assert result.error is not None
    calls, _, usd = figures(plugin)
    assert (calls, usd) == (1, price(usage(1_000, told)))
    await assert_usable(plugin, root, service, server, mode="sse")


@modes
@transports
async def test_a_line_that_breaks_before_the_answer_is_an_estimate(
    server: GeminiServer, gemini: Models, mode: str, transport: str
) -> None:
    """The provider may have worked on it and bills then: its prompt, and where nobody could hear it, as much as it may
    say.
    """
    server.script(Answer(cut_after=0))
    plugin, service = guard(max_usd=1), InMemorySessionService()
    root = agent("a", gemini(transport, retry_options=ONCE))
    result = await play(root, plugins=[plugin], session_service=service, mode=mode, catch=True)
    assert result.error is not None
    assert (len(server.calls), server.billed) == (1, [USAGE])
    assert figures(plugin) == (1, 1, CALL_USD if mode == "unary" else Decimal("0.0003"))
    await assert_usable(plugin, root, service, server, mode=mode)


@transports
async def test_an_answer_that_comes_too_late_is_an_estimate(
    server: GeminiServer, gemini: Models, transport: str
) -> None:
    server.script(Answer(delay_s=30))
    plugin, service = guard(max_usd=1), InMemorySessionService()
    impatient = types.GenerateContentConfig(max_output_tokens=250, http_options=types.HttpOptions(timeout=400))
    root = LlmAgent(name="a", model=gemini(transport), generate_content_config=impatient)
    began = time.monotonic()
    result = await play(root, plugins=[plugin], session_service=service, catch=True)
    assert "Timeout" in type(result.error).__name__
    assert time.monotonic() - began < 15
    assert figures(plugin) == (1, 1, CALL_USD)
    await assert_usable(plugin, agent("a", gemini(transport)), service, server)


@modes
async def test_a_turn_that_its_user_leaves_is_an_estimate(server: GeminiServer, gemini: Models, mode: str) -> None:
    server.script(Answer(delay_s=30))
    plugin, service = guard(max_usd=1), InMemorySessionService()
    root = agent("a", gemini())
    playing = asyncio.create_task(play(root, plugins=[plugin], session_service=service, mode=mode))
    await asyncio.to_thread(server.wait_for, 1)
    assert plugin.spend()["reserved_usd"] == CALL_USD
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    calls, estimated, usd = figures(plugin)
    assert (calls, estimated) == (1, 1)
    assert Decimal("0.0003") <= usd <= CALL_USD
    await assert_usable(plugin, root, service, server, mode=mode)


@modes
async def test_the_kill_switch_ends_a_call_on_the_wire(server: GeminiServer, gemini: Models, mode: str) -> None:
    server.script(Answer(delay_s=30))
    plugin, service = guard(max_usd=1), InMemorySessionService()
    root = agent("a", gemini())
    began = time.monotonic()
    playing = asyncio.create_task(play(root, plugins=[plugin], session_service=service, mode=mode))
    await asyncio.to_thread(server.wait_for, 1)
    plugin.stop("user:app/u1", actor="ops", reason="enough")
    result = await playing
    assert time.monotonic() - began < 15, "it did not wait for the answer"
    assert assert_stopped(result, "kill_switch").rule == "kill_switch"
    assert figures(plugin)[:2] == (1, 1)
    refused = await play(root, "again", plugins=[plugin], session_service=service, mode=mode)
    assert_stopped(refused, "kill_switch")
    assert len(server.calls) == 1, "and no further call leaves"
    plugin.resume("user:app/u1")
    await assert_usable(plugin, root, service, server, mode=mode)


# ---- What only the wire brings to light: streams that break after they told something, several answers to one call,
# guards that refuse further in


@transports
@pytest.mark.parametrize(("usage_on", "least"), [("prompt first", 75), ("all", 300)])
async def test_a_stream_that_breaks_after_it_told_something_costs_what_was_heard(
    server: GeminiServer, gemini: Models, usage_on: str, least: int, transport: str
) -> None:
    """Its usage so far is no final word: at least what was told, at least what was heard; and the latter is marked."""
    server.script(Answer([text("x" * 400)], usage=usage(1_000, 400), chunks=4, usage_on=usage_on, cut_after=3))
    plugin = guard(max_usd=1)
    result = await play(agent("a", gemini(transport)), plugins=[plugin], mode="sse", catch=True)
    assert result.error is not None
    assert figures(plugin) == (1, int(usage_on != "all"), price(usage(1_000, least)))


@pytest.mark.parametrize("kind", ["stream", "async stream"])
@pytest.mark.parametrize(("usage_on", "least"), [("prompt first", 75), ("all", 300)])
async def test_what_a_stream_of_the_client_told_before_it_broke_is_booked(
    server: GeminiServer, client: Client, kind: str, usage_on: str, least: int
) -> None:
    """The prompt was ten times what was reckoned: the provider's own count wins."""
    server.script(Answer([text("x" * 400)], usage=usage(10_000, 400), chunks=4, usage_on=usage_on, cut_after=3))
    wrapped = Wrapped(client, kind, budget={"max_usd": 1})
    with pytest.raises(Exception) as broke:  # noqa: PT011 - whatever the transport says
        await wrapped.ask()
    assert not isinstance(broke.value, runguard.RunGuardError)
    assert figures(wrapped) == (1, int(usage_on != "all"), price(usage(10_000, least)))
    assert_clear(wrapped)


@modes
@pytest.mark.parametrize(("cap", "asked"), [("0.0103", [1_000]), ("0.0102", []), ("0.02", [1_000])])
async def test_every_candidate_is_paid_and_reserved(
    server: GeminiServer, gemini: Models, cap: str, asked: list[int], mode: str
) -> None:
    """Four answers of a thousand tokens to one call: what all of them can take is held, or the call does not leave."""
    server.script(
        Answer(usage=lambda request: usage(1_000, (request.max_output or 0) * request.config["candidateCount"]))
    )
    plugin = guard(max_usd=cap)
    config = types.GenerateContentConfig(max_output_tokens=1_000, candidate_count=4)
    await play(LlmAgent(name="a", model=gemini(), generate_content_config=config), plugins=[plugin], mode=mode)
    assert [request.max_output for request in server.requests] == asked
    assert figures(plugin) == (len(asked), 0, Decimal("0.0103") * len(asked))


@modes
async def test_the_rest_is_shared_among_candidates(server: GeminiServer, gemini: Models, mode: str) -> None:
    def greedy(request: Request) -> dict[str, Any]:
        return usage(1_000, (request.max_output or 0) * request.config["candidateCount"])

    server.script(Answer(usage=greedy))
    plugin = guard(max_usd="0.0203")
    config = types.GenerateContentConfig(candidate_count=4)
    await play(LlmAgent(name="a", model=gemini(), generate_content_config=config), plugins=[plugin], mode=mode)
    assert [request.max_output for request in server.requests] == [2_000]
    assert figures(plugin)[2] == Decimal("0.0203")


@modes
async def test_a_call_that_a_guard_further_in_refused_costs_the_layers_around_it_nothing(
    server: GeminiServer, mode: str
) -> None:
    server.answer_by(lambda number, _: Answer([call("step", q=number)]))
    stack = Stack(server, mode, "client", CALL_USD * 3)
    result = await stack.play(tools=[step])
    assert isinstance(result.error, runguard.BudgetExceededError)
    assert len(server.requests) == 3
    assert [figures(layer) for layer in stack.layers] == [(3, 0, CALL_USD * 3)] * 3
    assert_clear(*stack.layers)
