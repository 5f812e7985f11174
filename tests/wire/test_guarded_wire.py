"""The provider's own client behind ``guard``, a model behind ``GuardedLlm``, and everything at once: each call on the
wire is counted once.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import ParallelAgent
from google.adk.models import Gemini
from google.genai import Client, types
from google.genai.errors import APIError
from pydantic import Field

import runguard
from runguard import Budget, guard_async
from runguard.adk import GuardedLlm, RunGuardPlugin
from runguard.testing import assert_stopped
from tests.kit.gemini_server import Answer, GeminiServer, Refusal, Request, call, text, usage
from tests.kit.money import agent, figures
from tests.kit.tools import step
from tests.kit.wire import CALL_USD, FLASH, guard, play, price

Models = Callable[..., Gemini]
MODEL = "gemini-2.5-flash"
PRICES = {MODEL: FLASH}
SHORT = types.GenerateContentConfig(max_output_tokens=250)
KINDS = ["unary", "stream", "async unary", "async stream"]
kinds = pytest.mark.parametrize("kind", KINDS)
modes = pytest.mark.parametrize("mode", ["unary", "sse"])


def thousand(*args: Any, **kwargs: Any) -> int:
    """How large every prompt is here."""
    return 1_000


class Wrapped:
    """One of the client's four ways to ask, guarded; asked for whole answers whichever it is."""

    def __init__(self, client: Client, kind: str, **keywords: Any) -> None:
        models: Any = client.aio.models if "async" in kind else client.models
        method = models.generate_content_stream if "stream" in kind else models.generate_content
        wrap = runguard.guard_async if "async" in kind else runguard.guard
        self.kind = kind
        self.guarded: Any = wrap(method, **{"prices": PRICES, "tokens": thousand, **keywords})

    async def ask(self, contents: Any = "go", config: Any = SHORT) -> list[Any]:
        """The answer, or its chunks. What is not async runs beside the event loop, as a program without one would."""
        if self.kind == "unary":
            return [await asyncio.to_thread(self.guarded, model=MODEL, contents=contents, config=config)]
        if self.kind == "stream":
            return await asyncio.to_thread(lambda: list(self.guarded(model=MODEL, contents=contents, config=config)))
        answer = await self.guarded(model=MODEL, contents=contents, config=config)
        return [chunk async for chunk in answer] if self.kind == "async stream" else [answer]

    def spend(self) -> Any:
        return self.guarded.spend()


def assert_clear(*guards: Any) -> None:
    for one in guards:
        assert one.spend()["reserved_usd"] == 0


# ---- the client's own methods ---------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize(
    "used",
    [
        usage(10_003, 301, thoughts=511, cached=4_001, tool_use=333),
        usage(5_000, 10, audio=2_000, cached=1_500, cached_audio=500),
    ],
)
async def test_a_call_of_the_client_is_booked_at_its_list_price(
    server: GeminiServer, client: Client, kind: str, used: dict[str, Any]
) -> None:
    server.script(Answer([text("one two three")], usage=used, chunks=3))
    wrapped = Wrapped(client, kind, budget={"max_usd": 1}, prices={})
    said = await wrapped.ask()
    assert "".join(chunk.text for chunk in said) == "one two three"
    assert len(said) == (3 if "stream" in kind else 1)
    (request,) = server.requests
    assert (request.verb, request.max_output) == (
        "streamGenerateContent" if "stream" in kind else "generateContent",
        250,
    )
    assert figures(wrapped) == (1, 0, price(used))
    assert_clear(wrapped)


@pytest.mark.parametrize("kind", ["stream", "async stream"])
@pytest.mark.parametrize("usage_on", ["all", "last", "prompt first", "not last", "alone"])
async def test_usage_on_every_chunk_counts_once(server: GeminiServer, client: Client, kind: str, usage_on: str) -> None:
    used = usage(3_000, 200, thoughts=40, cached=1_024)
    server.script(Answer([text("one two three four five")], usage=used, chunks=5, usage_on=usage_on))
    wrapped = Wrapped(client, kind, budget={"max_usd": 1})
    await wrapped.ask()
    assert figures(wrapped) == (1, 0, price(used))
    assert_clear(wrapped)


@kinds
async def test_no_request_of_the_client_leaves_beyond_the_budget(
    server: GeminiServer, client: Client, kind: str
) -> None:
    wrapped = Wrapped(client, kind, budget={"max_usd": CALL_USD * 3})
    for _ in range(3):
        await wrapped.ask()
    for _ in range(2):
        with pytest.raises(runguard.BudgetExceededError):
            await wrapped.ask()
    assert len(server.requests) == 3
    assert figures(wrapped) == (3, 0, CALL_USD * 3)
    assert_clear(wrapped)


@kinds
@pytest.mark.parametrize("status", [400, 429, 500])
async def test_what_the_provider_refused_costs_nothing(
    server: GeminiServer, client: Client, kind: str, status: int
) -> None:
    server.script(Refusal(status), Answer())
    wrapped = Wrapped(client, kind, budget={"max_usd": CALL_USD})
    with pytest.raises(APIError) as refused:
        await wrapped.ask()
    assert refused.value.code == status
    assert figures(wrapped) == (1, 0, Decimal(0))
    assert_clear(wrapped)
    await wrapped.ask()
    assert (len(server.requests), figures(wrapped)) == (2, (2, 0, CALL_USD)), "and what it held pays for the next"


async def test_attempts_of_the_client_are_one_call(server: GeminiServer, client: Client) -> None:
    server.script(Refusal(503), Refusal(429), Answer())
    patient = types.HttpOptions(
        retry_options=types.HttpRetryOptions(attempts=3, initial_delay=0.001, max_delay=0.002, jitter=0)
    )
    wrapped = Wrapped(client, "unary", budget={"max_usd": CALL_USD, "max_calls": 1})
    await wrapped.ask(config=types.GenerateContentConfig(max_output_tokens=250, http_options=patient))
    assert (len(server.calls), figures(wrapped)) == (3, (1, 0, CALL_USD))


@pytest.mark.parametrize("kind", ["stream", "async stream"])
@pytest.mark.parametrize("ends", [{"cut_after": 3}, {"fails_after": 3}], ids=["cut", "error"])
async def test_a_stream_that_breaks_is_an_estimate(
    server: GeminiServer, client: Client, kind: str, ends: dict[str, Any]
) -> None:
    server.script(Answer([text("x" * 400)], chunks=4, usage_on="last", **ends))
    wrapped = Wrapped(client, kind, budget={"max_usd": 1})
    with pytest.raises(Exception) as broke:  # noqa: PT011 - whatever the transport says
        await wrapped.ask()
    assert not isinstance(broke.value, runguard.RunGuardError)
    assert figures(wrapped) == (1, 1, price(usage(1_000, 75)))
    assert_clear(wrapped)


async def test_a_stream_that_nobody_reads_is_not_asked_for(server: GeminiServer, client: Client) -> None:
    """The client sends a request when the first chunk is wanted: whoever drops the stream before has spent nothing."""
    wrapped = Wrapped(client, "stream", budget={"max_usd": CALL_USD})
    stream = wrapped.guarded(model=MODEL, contents="go", config=SHORT)
    assert wrapped.spend()["reserved_usd"] == CALL_USD
    stream.close()
    assert (server.requests, figures(wrapped)) == ([], (0, 0, Decimal(0)))
    assert_clear(wrapped)
    assert len(await wrapped.ask()) == 1


@pytest.mark.parametrize(
    ("kind", "limited"),
    [("async unary", True), ("async unary", False), ("async stream", True), ("unary", True), ("unary", False)],
)
async def test_calls_that_race_for_a_budget_stay_within_it(
    server: GeminiServer, client: Client, kind: str, limited: bool
) -> None:
    """Whether the worst case of a call is known or has to be learned from the first."""
    server.script(Answer(delay_s=0.01))
    config = SHORT if limited else None
    wrapped = Wrapped(client, kind, budget={"max_usd": CALL_USD * 5 + Decimal("0.0001")})
    if kind == "unary":
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(12) as pool:
            asking = [
                loop.run_in_executor(pool, lambda: wrapped.guarded(model=MODEL, contents="go", config=config))
                for _ in range(12)
            ]
            answers = await asyncio.gather(*asking, return_exceptions=True)
    else:
        answers = await asyncio.gather(*(wrapped.ask(config=config) for _ in range(12)), return_exceptions=True)
    assert sum(isinstance(answer, runguard.BudgetExceededError) for answer in answers) == 7
    assert (len(server.requests), figures(wrapped)) == (5, (5, 0, CALL_USD * 5))
    assert (server.max_in_flight > 1) is limited, "calls of unknown cost start one by one"
    assert_clear(wrapped)


@kinds
async def test_a_loop_of_the_same_function_call_is_stopped(server: GeminiServer, client: Client, kind: str) -> None:
    """A program's own loop: it sends back what its tool said, and the model asks for the same again."""
    server.script(Answer([call("look", where="here")]))
    wrapped = Wrapped(client, kind, loop={"repeats": 3})
    history = [types.Content(role="user", parts=[types.Part(text="go")])]

    async def work() -> None:
        while len(history) < 40:
            (answer,) = await wrapped.ask(contents=list(history))
            found = types.Part.from_function_response(name="look", response={"found": "nothing"})
            history.extend([answer.candidates[0].content, types.Content(role="user", parts=[found])])

    with pytest.raises(runguard.LoopDetectedError):
        await work()
    assert len(server.requests) == 3


async def test_a_chat_of_the_client(server: GeminiServer, client: Client) -> None:
    chat = client.chats.create(model=MODEL, config=SHORT)
    send = runguard.guard(chat.send_message, budget={"max_usd": CALL_USD * 2}, prices=PRICES)
    assert [send(word).text for word in ("one", "two")] == ["fine", "fine"]
    with pytest.raises(runguard.BudgetExceededError):
        send("three")
    assert [len(request.body["contents"]) for request in server.requests] == [1, 3]
    assert figures(send) == (2, 0, CALL_USD * 2)


# ---- a guarded model ------------------------------------------------------------------------------------------------


def guarded(model: Any, **policy: Any) -> GuardedLlm:
    return GuardedLlm(model, **{"prices": PRICES, "tokens": thousand, **policy})


@modes
async def test_a_guarded_model_books_what_the_provider_bills(
    server: GeminiServer, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """By its name alone, as an agent's ``model=``."""
    monkeypatch.setenv("GOOGLE_GEMINI_BASE_URL", server.url)
    used = usage(10_003, 301, thoughts=511, cached=4_001)
    server.script(Answer([text("one two three")], usage=used, chunks=3))
    model = GuardedLlm("gemini-2.5-flash", max_usd=1)
    result = await play(agent("a", model), mode=mode)
    assert result.texts[-1] == "one two three"
    assert (len(server.requests), figures(model)) == (1, (1, 0, price(used)))
    assert_clear(model)
    assert isinstance(model.inner, Gemini)
    await model.inner.api_client.aio.aclose()


@modes
@pytest.mark.parametrize("on_stop", ["raise", "stop"])
async def test_no_request_of_a_guarded_model_leaves_beyond_the_budget(
    server: GeminiServer, gemini: Models, mode: str, on_stop: str
) -> None:
    server.answer_by(lambda number, _: Answer([call("step", q=number)]))
    model = guarded(gemini(), max_usd=CALL_USD * 4, on_stop=on_stop)
    result = await play(agent("a", model, tools=[step]), mode=mode, catch=True)
    if on_stop == "raise":
        assert isinstance(result.error, runguard.BudgetExceededError)
    else:
        assert (result.error, assert_stopped(result, "budget").spent_usd) == (None, CALL_USD * 4)
    assert (len(server.requests), figures(model)) == (4, (4, 0, CALL_USD * 4))
    assert_clear(model)


@modes
async def test_a_guarded_model_asks_for_no_more_than_the_rest_can_pay(
    server: GeminiServer, gemini: Models, mode: str
) -> None:
    model = guarded(gemini(), max_usd="0.01")
    await play(agent("a", model, max_output=None), mode=mode)
    assert [request.max_output for request in server.requests] == [3_880]


@modes
@pytest.mark.parametrize("status", [429, 500])
async def test_a_guarded_model_that_the_provider_refuses_costs_nothing(
    server: GeminiServer, gemini: Models, mode: str, status: int
) -> None:
    server.script(Refusal(status))
    model = guarded(gemini(), max_usd=CALL_USD)
    result = await play(agent("a", model), mode=mode, catch=True)
    assert getattr(result.error, "code", None) == status
    assert (len(server.requests), figures(model)) == (1, (1, 0, Decimal(0)))
    assert_clear(model)


@modes
async def test_a_guarded_model_stops_a_call_repeated_on_the_wire(
    server: GeminiServer, gemini: Models, mode: str
) -> None:
    server.script(Answer([call("look", where="here")]))

    def look(where: str) -> dict[str, str]:
        """Look somewhere."""
        return {"found": "nothing new"}

    model = guarded(gemini(), max_usd=1)
    result = await play(agent("a", model, tools=[look]), mode=mode, catch=True)
    assert isinstance(result.error, runguard.LoopDetectedError)
    assert (result.error.pattern, result.error.repeats, len(server.requests)) == (("look",), 9, 9)
    assert figures(model) == (9, 0, CALL_USD * 9)


@modes
async def test_branches_that_share_a_guarded_model_stay_within_its_budget(
    server: GeminiServer, gemini: Models, mode: str
) -> None:
    server.script(Answer(delay_s=0.02))
    model = guarded(gemini(), max_usd=CALL_USD * 6, on_stop="stop")
    team = ParallelAgent(name="team", sub_agents=[agent(f"w{n}", model) for n in range(15)])
    await play(team, mode=mode, catch=True)
    assert (len(server.requests), figures(model)) == (6, (6, 0, CALL_USD * 6))
    assert server.max_in_flight > 1
    assert_clear(model)


# ---- all at once ----------------------------------------------------------------------------------------------------


class WrappedGemini(Gemini):
    """A model whose client's methods are guarded."""

    keywords: dict[str, Any] = Field(default_factory=dict)

    @cached_property
    def api_client(self) -> Client:
        client = Client(http_options=types.HttpOptions(base_url=self.base_url))
        models: Any = client.aio.models
        models.generate_content = runguard.guard_async(models.generate_content, **self.keywords)
        models.generate_content_stream = runguard.guard_async(models.generate_content_stream, **self.keywords)
        return client

    def method(self, mode: str) -> Any:
        models = self.api_client.aio.models
        return models.generate_content if mode == "unary" else models.generate_content_stream


class Stack:
    """Plugin, guarded model and guarded client around each call; ``tight`` is the one with the small budget."""

    def __init__(self, server: GeminiServer, mode: str, tight: str = "", cap: Any = 1, **shared: Any) -> None:
        def caps(layer: str) -> dict[str, Any]:
            return {"prices": PRICES, "tokens": thousand, "max_usd": cap if layer == tight else 1, **shared}

        self.mode = mode
        self.wrapped = WrappedGemini(model=MODEL, base_url=server.url, keywords=caps("client"))
        self.model = GuardedLlm(self.wrapped, **caps("model"))
        self.plugin = RunGuardPlugin(**caps("plugin"))
        self.client = self.wrapped.method(mode)

    async def play(self, **options: Any) -> Any:
        try:
            return await play(agent("a", self.model, **options), plugins=[self.plugin], mode=self.mode, catch=True)
        finally:
            await self.wrapped.api_client.aio.aclose()

    @property
    def layers(self) -> list[Any]:
        return [self.plugin, self.model, self.client]


@modes
async def test_a_call_through_all_layers_is_one_call_for_each(server: GeminiServer, mode: str) -> None:
    used = usage(3_000, 200, thoughts=40, cached=1_024)
    server.script(Answer([text("one two three")], usage=used, chunks=3))
    stack = Stack(server, mode)
    result = await stack.play()
    assert result.texts[-1] == "one two three"
    assert len(server.requests) == 1
    assert [figures(layer) for layer in stack.layers] == [(1, 0, price(used))] * 3
    assert_clear(*stack.layers)


@modes
async def test_on_an_account_that_all_layers_share_a_call_is_booked_once(
    server: GeminiServer, tmp_path: Path, mode: str
) -> None:
    """One store, one budget per model: three guards that know the same account."""
    server.answer_by(lambda number, _: Answer([call("step", q=number)] if number < 4 else [text("done")]))
    stack = Stack(
        server,
        mode,
        store=f"sqlite:///{tmp_path}/guard.db",
        store_timeout=30,
        budgets=[Budget(usd=1, per="model", window="1d")],
    )
    result = await stack.play(tools=[step])
    assert result.texts[-1] == "done"
    assert stack.plugin.flush()
    assert len(server.requests) == 4
    for layer in (stack.plugin, stack.model):
        (status,) = layer.budgets(f"model:{MODEL}")
        assert (status.spent, status.reserved) == (CALL_USD * 4, 0)
    assert_clear(*stack.layers)


@modes
@pytest.mark.parametrize("tight", ["plugin", "model", "client"])
async def test_the_tightest_layer_decides_before_a_request_leaves(server: GeminiServer, mode: str, tight: str) -> None:
    server.answer_by(lambda number, _: Answer([call("step", q=number)]))
    stack = Stack(server, mode, tight, CALL_USD * 3)
    result = await stack.play(tools=[step])
    assert len(server.requests) == 3
    if tight == "plugin":
        assert_stopped(result, "budget")
    else:
        assert isinstance(result.error, runguard.BudgetExceededError)
    assert figures({"plugin": stack.plugin, "model": stack.model, "client": stack.client}[tight]) == (
        3,
        0,
        CALL_USD * 3,
    )
    assert_clear(*stack.layers)


@modes
async def test_a_refusal_of_the_provider_is_free_for_every_layer(server: GeminiServer, mode: str) -> None:
    server.script(Refusal(429))
    stack = Stack(server, mode)
    result = await stack.play()
    assert getattr(result.error, "code", None) == 429
    assert len(server.requests) == 1
    assert [figures(layer) for layer in stack.layers] == [(1, 0, Decimal(0))] * 3
    assert_clear(*stack.layers)


# ---- A provider on the wire that answers 429 or 503 and says how long to wait, through the clients that users have


class Busy:
    """Refuses the first call. While it works on the second, it counts who else comes."""

    def __init__(self, server: GeminiServer, status: int) -> None:
        self.server, self.status, self.beside_the_probe = server, status, -1
        server.answer_by(self.decide)

    def decide(self, number: int, request: Request) -> Answer | Refusal:
        if number == 1:
            return Refusal(self.status, "0.2s")
        if number == 2:
            time.sleep(0.3)  # time in which the others could come
            self.beside_the_probe = len(self.server.requests) - 2
        return Answer()


@pytest.mark.parametrize("status", [429, 503])
async def test_agents_wait_for_one_probe(server: GeminiServer, gemini: Models, status: int) -> None:
    busy = Busy(server, status)
    plugin, model = guard(on_rate_limit="wait"), gemini()
    refused = await play(agent("a", model), plugins=[plugin], catch=True)
    assert isinstance(refused.error, APIError)
    assert list(plugin.snapshot()["provider_waits"]) == ["gemini-2.5-flash"]
    runs = (play(agent("a", model), plugins=[plugin], session_id=f"s{n}") for n in range(4))
    results = await asyncio.gather(*runs)
    assert [result.texts for result in results] == [["fine"]] * 4
    assert (busy.beside_the_probe, len(server.requests)) == (0, 5)
    assert plugin.snapshot()["provider_waits"] == {}
    assert plugin.trips == []


async def test_by_default_calls_do_not_wait(server: GeminiServer, gemini: Models) -> None:
    busy = Busy(server, 429)
    plugin, model = guard(), gemini()
    await play(agent("a", model), plugins=[plugin], catch=True)
    await asyncio.gather(*(play(agent("a", model), plugins=[plugin], session_id=f"s{n}") for n in range(4)))
    assert busy.beside_the_probe > 0
    assert plugin.snapshot()["provider_waits"] == {}


async def test_a_guarded_client_waits_for_one_probe(server: GeminiServer, gemini: Models) -> None:
    busy = Busy(server, 429)
    ask = guard_async(gemini().api_client.aio.models.generate_content, on_rate_limit="wait")
    with pytest.raises(APIError):
        await ask(model="gemini-2.5-flash", contents="go")
    await asyncio.gather(*(ask(model="gemini-2.5-flash", contents="go") for _ in range(4)))
    assert (busy.beside_the_probe, len(server.requests)) == (0, 5)
