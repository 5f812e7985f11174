"""Money on the wire: the real model class and the real client against a server that keeps the provider's books."""

import asyncio
import random
import time
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from google.adk.agents import LlmAgent, ParallelAgent
from google.adk.agents.context_cache_config import ContextCacheConfig
from google.adk.apps import App
from google.adk.apps.app import EventsCompactionConfig
from google.adk.apps.llm_event_summarizer import LlmEventSummarizer
from google.adk.models import Gemini
from google.adk.models.llm_request import LlmRequest
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools.agent_tool import AgentTool
from google.genai import types
from google.genai.errors import APIError

import runguard
from runguard import Budget
from runguard.adk import RunGuardPlugin
from runguard.testing import assert_calls_answered, assert_stopped

from .gemini_server import USAGE, Answer, GeminiServer, Refusal, Request, call, text, usage
from .helpers import CALL_USD, FLASH, agent, assert_nothing_reserved, figures, forgive, guard, play, price, step

Models = Callable[..., Gemini]
modes = pytest.mark.parametrize("mode", ["unary", "sse"])
transports = pytest.mark.parametrize("transport", ["default", "httpx"])
ONCE = types.HttpRetryOptions(attempts=1)  # without it, the client tries again after a broken connection by itself
THRICE = types.HttpRetryOptions(attempts=3, initial_delay=0.001, max_delay=0.002, jitter=0)


async def assert_usable(
    plugin: RunGuardPlugin, root: Any, service: InMemorySessionService, server: GeminiServer, **options: Any
) -> None:
    """Nothing is held any more; the provider accepts the session as it is, and the user's next turn costs one call."""
    assert_nothing_reserved(plugin)
    calls, estimated, usd = figures(plugin)
    arrived = len(server.requests)
    server.script(Answer([text("here I am")]))
    result = await play(root, "and now?", plugins=[plugin], session_service=service, **options)
    assert (result.texts[-1], result.trips) == ("here I am", [])
    assert len(server.requests) == arrived + 1
    assert figures(plugin) == (calls + 1, estimated, usd + CALL_USD)
    assert_nothing_reserved(plugin)


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
    assert_nothing_reserved(plugin)


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
    assert_nothing_reserved(plugin)


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
    assert_nothing_reserved(plugin)


@modes
async def test_a_blocked_prompt_is_paid(server: GeminiServer, gemini: Models, mode: str) -> None:
    server.script(Answer(usage=usage(1_000), blocked="PROHIBITED_CONTENT"))
    plugin = guard(max_usd=1)
    result = await play(agent("a", gemini()), plugins=[plugin], mode=mode)
    assert result.events[-1].error_code == "PROHIBITED_CONTENT"
    assert figures(plugin) == (1, 0, Decimal("0.0003"))
    assert_nothing_reserved(plugin)


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
    assert_nothing_reserved(plugin)


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
    assert_nothing_reserved(plugin)


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
    assert_nothing_reserved(plugin)


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


# ---- caps -----------------------------------------------------------------------------------------------------------


@modes
@pytest.mark.parametrize("calls", [1, 7])
async def test_no_request_leaves_beyond_the_budget(server: GeminiServer, gemini: Models, calls: int, mode: str) -> None:
    server.answer_by(lambda number, _: Answer([call("step", q=number)]))
    plugin, service = guard(max_usd=CALL_USD * calls), InMemorySessionService()
    root = agent("a", gemini(), tools=[step])
    result = await play(root, plugins=[plugin], session_service=service, mode=mode)
    assert len(server.requests) == calls
    trip = assert_stopped(result, "budget")
    assert (trip.spent_usd, trip.limit) == (CALL_USD * calls, CALL_USD * calls)
    assert figures(plugin) == (calls, 0, CALL_USD * calls)
    assert assert_calls_answered(result.session) == calls
    await assert_usable(plugin, root, service, server, mode=mode)


@modes
@pytest.mark.parametrize("short", [Decimal("1E-9"), CALL_USD / 2])
async def test_one_nano_dollar_short_is_too_short(
    server: GeminiServer, gemini: Models, short: Decimal, mode: str
) -> None:
    server.answer_by(lambda number, _: Answer([call("step", q=number)]))
    plugin = guard(max_usd=CALL_USD * 3 - short)
    await play(agent("a", gemini(), tools=[step]), plugins=[plugin], mode=mode)
    assert len(server.requests) == 2
    assert figures(plugin) == (2, 0, CALL_USD * 2)
    assert_nothing_reserved(plugin)


@modes
async def test_the_lowered_answer_arrives_and_a_greedy_provider_takes_no_more(
    server: GeminiServer, gemini: Models, mode: str
) -> None:
    """The rest pays for no whole answer: the request says how much it may be, and a provider that takes all of it stays
    within the cap.
    """

    def greedy(request: Request) -> dict[str, Any]:
        assert request.max_output is not None
        return usage(1_000, request.max_output if request.number > 1 else 100)

    server.answer_by(lambda number, _: Answer([call("step", q=number)], usage=greedy))
    plugin = guard(max_usd="0.01")
    result = await play(agent("a", gemini(), max_output=None, tools=[step]), plugins=[plugin], mode=mode)
    # (0.01 - 0.0003) / 0.0000025, and then what 0.00055 leaves of it.
    assert [request.max_output for request in server.requests] == [3_880, 3_660]
    assert figures(plugin) == (2, 0, Decimal("0.01"))
    assert_stopped(result, "budget")
    assert_nothing_reserved(plugin)


@modes
async def test_what_the_agent_asked_for_arrives_as_it_is(server: GeminiServer, gemini: Models, mode: str) -> None:
    plugin = guard(max_usd=1)
    await play(agent("a", gemini(), max_output=777), plugins=[plugin], mode=mode)
    await play(agent("b", gemini(), max_output=None), plugins=[guard(max_usd=None)], mode=mode)
    assert [request.config for request in server.requests] == [{"maxOutputTokens": 777}, {}]


@modes
async def test_a_model_without_a_price_is_never_asked(server: GeminiServer, gemini: Models, mode: str) -> None:
    plugin = guard(max_usd=1)
    result = await play(agent("a", gemini(model="gemini-0-nobody-knows")), plugins=[plugin], mode=mode)
    assert_stopped(result)
    assert server.requests == []
    assert figures(plugin) == (0, 0, Decimal(0))


@modes
@pytest.mark.parametrize(("cap", "calls"), [("0.00925", 10), ("0.0100", 10), ("0.000925", 1)])
async def test_branches_that_race_for_a_budget_stay_within_it(
    server: GeminiServer, gemini: Models, cap: str, calls: int, mode: str
) -> None:
    server.script(Answer(delay_s=0.02, chunks=2))
    plugin = guard(max_usd=cap)
    model = gemini()
    team = ParallelAgent(name="team", sub_agents=[agent(f"w{n}", model) for n in range(30)])
    result = await play(team, plugins=[plugin], mode=mode)
    assert (len(server.requests), len(server.billed)) == (calls, calls)
    assert server.max_in_flight > 1 or calls == 1, "they did race"
    assert figures(plugin) == (calls, 0, CALL_USD * calls)
    assert sum(event.error_code == "RUNGUARD_STOP" for event in result.session.events) == 30 - calls
    assert_nothing_reserved(plugin)


async def test_one_cap_over_sessions_that_share_a_user(server: GeminiServer, gemini: Models) -> None:
    server.script(Answer(delay_s=0.01))
    plugin, model = guard(budgets=[Budget(usd=CALL_USD * 6, per="user")]), gemini()
    root = agent("a", model)
    runner = Runner(app=App(name="app", root_agent=root, plugins=[plugin]), session_service=InMemorySessionService())
    results = await asyncio.gather(*(play(root, runner=runner, session_id=f"s{n}") for n in range(20)))
    assert len(server.requests) == 6
    assert sum(bool(result.trips) for result in results) == 14
    assert figures(plugin) == (6, 0, CALL_USD * 6)
    assert_nothing_reserved(plugin)


# ---- loops ----------------------------------------------------------------------------------------------------------


@modes
async def test_a_call_repeated_on_the_wire_is_stopped(server: GeminiServer, gemini: Models, mode: str) -> None:
    """Nudged at four, refused at eight, stopped at nine; and the provider accepts what is left of the session."""
    server.script(Answer([text("Let me see."), call("look", where="here")], chunks=2))

    def look(where: str) -> dict[str, str]:
        """Look somewhere."""
        return {"found": "nothing new"}

    plugin, service = guard(max_usd=1), InMemorySessionService()
    root = agent("a", gemini(), tools=[look])
    result = await play(root, plugins=[plugin], session_service=service, mode=mode)
    trip = assert_stopped(result, "repetition")
    assert (trip.tool, trip.observed) == ("look", 9)
    assert len(server.requests) == 9
    answers = [
        part["functionResponse"]["response"]
        for content in server.requests[-1].body["contents"]
        for part in content["parts"]
        if "functionResponse" in part
    ]
    assert ["runguard_notice" in answer for answer in answers] == [n == 3 for n in range(8)]
    assert answers[7]["status"] == "not_executed", "the eighth was refused, and the model was told"
    assert figures(plugin) == (9, 0, CALL_USD * 9)
    await assert_usable(plugin, root, service, server, mode=mode)


@modes
async def test_a_limit_on_calls_is_a_limit_on_requests(server: GeminiServer, gemini: Models, mode: str) -> None:
    server.answer_by(lambda number, _: Answer([call("step", q=number), call("step", q=-number)]))
    plugin, service = guard(max_model_calls=4), InMemorySessionService()
    root = agent("a", gemini(), tools=[step])
    result = await play(root, plugins=[plugin], session_service=service, mode=mode)
    assert_stopped(result, "model_calls")
    assert len(server.requests) == 4
    assert assert_calls_answered(result.session) == 8
    await assert_usable(plugin, root, service, server, mode=mode)


# ---- calls that nobody sees but the provider ------------------------------------------------------------------------


@modes
async def test_agents_called_as_tools_are_on_the_same_bill(server: GeminiServer, gemini: Models, mode: str) -> None:
    """The cheap inner model works in two steps each time; the outer one asks it for ever."""
    made = {"outer": 0, "inner": 0}

    def decide(number: int, request: Request) -> Answer:
        name = "inner" if "flash-lite" in request.path else "outer"
        made[name] += 1
        if name == "outer":
            return Answer([call("inner", request=f"part {made[name]}")])
        return Answer([call("step", q=number)]) if made[name] % 2 else Answer([text(f"part {made[name]}")])

    server.answer_by(decide)
    lite = {"input": "0.10", "output": "0.40"}
    plugin = guard(max_usd="0.0038", prices={"gemini-2.5-flash": FLASH, "gemini-2.5-flash-lite": lite})
    inner = agent("inner", gemini(model="gemini-2.5-flash-lite"), tools=[step])
    result = await play(agent("outer", gemini(), tools=[AgentTool(inner)]), plugins=[plugin], mode=mode)
    # 0.000925 and two times 0.0002 a round: two rounds, a third outer call, and of its two inner ones the rest pays for
    # one.
    assert len(server.requests) == made["outer"] + made["inner"]
    assert figures(plugin) == (
        made["outer"] + made["inner"],
        0,
        CALL_USD * made["outer"] + Decimal("0.0002") * made["inner"],
    )
    assert (made, figures(plugin)[2]) == ({"outer": 3, "inner": 5}, Decimal("0.003775"))
    assert plugin.spend()["by_tool"]["inner"]["calls"] == made["inner"]
    assert_stopped(result, "budget")
    assert_calls_answered(result.session)
    assert_nothing_reserved(plugin)


@pytest.mark.parametrize(
    ("policy", "asked"),
    [
        ({"max_usd": 1}, ["agent", "summary", "agent", "summary"]),
        ({"max_usd": "0.01"}, ["agent", "summary", "agent", "summary"]),
        ({"max_usd": CALL_USD}, ["agent", "agent"]),
        ({"max_model_calls": 1}, ["agent", "agent"]),
        ({"budgets": [Budget(usd=CALL_USD * 2, per="session")]}, ["agent", "agent"]),
    ],
    ids=["enough", "little", "for one call", "one call", "for two calls"],
)
async def test_the_summaries_of_a_compaction_are_billed_and_limited(
    server: GeminiServer, gemini: Models, policy: dict[str, Any], asked: list[str]
) -> None:
    def of(request: Request) -> str:
        return "summary" if "summarize" in str(request.body["contents"][0]["parts"][0]["text"]) else "agent"

    server.answer_by(lambda _, request: Answer([text("in short" if of(request) == "summary" else "at length")]))
    plugin, model = guard(**policy), gemini()
    compaction = EventsCompactionConfig(summarizer=LlmEventSummarizer(llm=model), compaction_interval=1, overlap_size=0)
    root = agent("a", model)
    app = App(name="app", root_agent=root, plugins=[plugin], events_compaction_config=compaction)
    runner = Runner(app=app, session_service=InMemorySessionService())
    for message in ("go", "more"):
        result = await play(root, message, runner=runner)
        assert (result.texts[0], result.trips) == ("at length", [])
    assert [of(request) for request in server.requests] == asked
    if policy == {"max_usd": "0.01"}:
        assert [request.max_output for request in server.requests] == [250, 3_510, 250, 3_510], (
            "what is left after the answer pays for as much"
        )
    assert figures(plugin) == (len(asked), 0, CALL_USD * len(asked))
    assert_nothing_reserved(plugin)


async def test_a_context_cache_changes_the_price_and_not_the_count(server: GeminiServer, gemini: Models) -> None:
    """The cache is made by a request of its own, which is no call to a model; what it holds is billed as cached from
    then on.
    """
    server.tokens = 6_000
    server.answer_by(
        lambda number, request: Answer(
            usage=usage(6_000 + number, 250, cached=6_000 if "cachedContent" in request.body else 0)
        )
    )
    plugin = guard(max_usd=1, tokens=None)
    root = agent("a", gemini(), instruction="Be thorough. " * 2_000)
    app = App(
        name="app",
        root_agent=root,
        plugins=[plugin],
        context_cache_config=ContextCacheConfig(min_tokens=0, ttl_seconds=600),
    )
    runner = Runner(app=app, session_service=InMemorySessionService())
    for message in ("one", "two", "three"):
        await play(root, message, runner=runner)
    assert len(server.calls) == 3
    cached = sum("cachedContent" in request.body for request in server.calls)
    assert 1 <= cached < 3
    assert [request.path for request in server.requests if not request.number] == ["/v1beta/cachedContents"]
    assert figures(plugin) == (3, 0, sum(map(price, server.billed), Decimal(0)))
    assert plugin.spend()["cached_tokens"] == 6_000 * cached
    assert_nothing_reserved(plugin)


async def test_the_providers_own_counter_decides_what_is_reserved(server: GeminiServer, gemini: Models) -> None:
    """``countTokens`` is asked before each call, is no call itself, and its answer is what the cap is held against."""
    model = gemini()

    async def count(request: LlmRequest) -> int:
        counted = await model.api_client.aio.models.count_tokens(model=request.model or "", contents=request.contents)
        return counted.total_tokens or 0

    server.answer_by(lambda number, _: Answer([call("step", q=number)]))
    plugin = guard(max_usd=CALL_USD * 3, tokens=count)
    await play(agent("a", model, tools=[step]), plugins=[plugin])
    assert [request.verb for request in server.requests] == ["countTokens", "generateContent"] * 3 + ["countTokens"]
    assert figures(plugin) == (3, 0, CALL_USD * 3)
    assert_nothing_reserved(plugin)


async def test_one_line_guards_every_runner(server: GeminiServer, gemini: Models) -> None:
    server.answer_by(lambda number, _: Answer([call("step", q=number)]))
    runguard.install(max_usd=CALL_USD * 4, prices={"gemini-2.5-flash": FLASH}, tokens=lambda request: 1_000)
    result = await play(agent("a", gemini(), tools=[step]))
    assert_stopped(result, "budget")
    assert len(server.requests) == 4
