"""Caps and loops on the wire, and calls that only the provider sees."""

import asyncio
from decimal import Decimal
from typing import Any

import pytest
from google.adk.agents import LlmAgent, ParallelAgent
from google.adk.agents.context_cache_config import ContextCacheConfig
from google.adk.apps import App
from google.adk.apps.app import EventsCompactionConfig
from google.adk.apps.llm_event_summarizer import LlmEventSummarizer
from google.adk.models.llm_request import LlmRequest
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools.agent_tool import AgentTool
from google.genai import types

import runguard
from runguard import Budget, Threshold
from runguard.adk import RunGuardPlugin
from runguard.testing import assert_calls_answered, assert_stopped
from tests.kit.gemini_models import Models, assert_usable, modes
from tests.kit.gemini_server import Answer, GeminiServer, Request, call, text, usage
from tests.kit.money import agent, figures
from tests.kit.tools import step
from tests.kit.topologies import MAKES_NO_CACHES
from tests.kit.wire import CALL_USD, FLASH, guard, play, price

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


async def test_one_cap_over_sessions_that_share_a_user(server: GeminiServer, gemini: Models) -> None:
    server.script(Answer(delay_s=0.01))
    plugin, model = guard(budgets=[Budget(usd=CALL_USD * 6, per="user")]), gemini()
    root = agent("a", model)
    runner = Runner(app=App(name="app", root_agent=root, plugins=[plugin]), session_service=InMemorySessionService())
    results = await asyncio.gather(*(play(root, runner=runner, session_id=f"s{n}") for n in range(20)))
    assert len(server.requests) == 6
    assert sum(bool(result.trips) for result in results) == 14
    assert figures(plugin) == (6, 0, CALL_USD * 6)


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


@pytest.mark.skipif(MAKES_NO_CACHES, reason="this ADK cannot create a context cache")
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


async def test_one_line_guards_every_runner(server: GeminiServer, gemini: Models) -> None:
    server.answer_by(lambda number, _: Answer([call("step", q=number)]))
    runguard.install(max_usd=CALL_USD * 4, prices={"gemini-2.5-flash": FLASH}, tokens=lambda request: 1_000)
    result = await play(agent("a", gemini(), tools=[step]))
    assert_stopped(result, "budget")
    assert len(server.requests) == 4


# ---- A switch to a cheaper model with ADK's Gemini class, over real HTTP


def work(q: int) -> dict[str, int]:
    """Works."""
    return {"done": q}


@pytest.mark.skipif(MAKES_NO_CACHES, reason="this ADK cannot create a context cache")
async def test_gemini_is_asked_for_the_cheaper_model_and_never_with_the_cache_of_the_other(
    server: GeminiServer, gemini: Models
) -> None:
    """The sixth call is the last one of the large model's share of the budget; its context cache stays behind."""

    def answer(number: int, request: Request) -> Answer:
        cached = 1_000 if "cachedContent" in request.body else 0
        parts = [call("work", q=number)] if number % 4 else [text("fine")]
        return Answer(parts, usage=usage(6_000, 250, cached=cached))

    server.answer_by(answer)
    plugin = RunGuardPlugin(budgets=[Budget(usd="0.02", per="user", thresholds=[Threshold(0.6, model=LITE)])])
    root = LlmAgent(
        name="worker",
        model=gemini(),
        instruction="x" * 30_000,
        tools=[work],
        generate_content_config=types.GenerateContentConfig(max_output_tokens=250),
    )
    app = App(
        name="wire",
        root_agent=root,
        plugins=[plugin],
        context_cache_config=ContextCacheConfig(min_tokens=0, ttl_seconds=600),
    )
    runner = Runner(app=app, session_service=InMemorySessionService(), auto_create_session=True)
    for _ in range(3):
        await _turn(runner)
    asked = [(request.path.split("/")[-1].split(":")[0], "cachedContent" in request.body) for request in server.calls]
    models = [model for model, _ in asked]
    switched = models.index(LITE)
    assert models == ["gemini-2.5-flash"] * switched + [LITE] * (12 - switched)
    assert any(is_cached for _, is_cached in asked[:switched]), "the first model had a cache"
    made = [request.body["model"] for request in server.requests if request.path == "/v1beta/cachedContents"]
    first_cached = next((n for n, (_, is_cached) in enumerate(asked[switched:]) if is_cached), None)
    assert first_cached is None or f"models/{LITE}" in made, "a cache is sent to the model that made it"
    calls = {name: figures["calls"] for name, figures in plugin.spend()["by_model"].items()}
    assert calls == {"gemini-2.5-flash": switched, LITE: 12 - switched}


LITE = "gemini-2.5-flash-lite"


async def _turn(runner: Any) -> None:
    message = types.Content(role="user", parts=[types.Part(text="go")])
    async for _ in runner.run_async(user_id="u", session_id="s", new_message=message):
        pass
