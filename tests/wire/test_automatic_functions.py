"""google-genai calls functions by itself and asks again: several paid requests in one call, of which the answer tells
the last one's usage.

The provider's own bill is what the books are held against.
"""

import asyncio
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from google.genai import Client, types

import runguard
from runguard import Budget
from tests.kit.gemini_server import Answer, GeminiServer, Refusal, Request, call, text, usage
from tests.kit.money import figures
from tests.kit.wire import CALL_USD, price

from .test_guarded_wire import KINDS, MODEL, PRICES, Wrapped, assert_clear, kinds

unary = pytest.mark.parametrize("kind", [kind for kind in KINDS if "stream" not in kind])
streams = pytest.mark.parametrize("kind", [kind for kind in KINDS if "stream" in kind])


def look_up(q: int) -> dict[str, int]:
    """Looks something up."""
    return {"found": q}


def automatic(max_output: int | None = 250, **automatic: Any) -> types.GenerateContentConfig:
    how = types.AutomaticFunctionCallingConfig(**automatic) if automatic else None
    return types.GenerateContentConfig(max_output_tokens=max_output, tools=[look_up], automatic_function_calling=how)


def growing(rounds: int, last: str = "done", **first: Any) -> Any:
    """A model that wants a function called so many times,
    whose prompts grow; each answer is billed at its own usage.
    """

    def decide(number: int, request: Request) -> Answer:
        used = usage(1_000 + 40 * (number - 1), 30 + number)
        return Answer([call("look_up", q=number)], usage=used) if number <= rounds else Answer([text(last)], usage=used)

    return decide


def billed(server: GeminiServer) -> Decimal:
    return sum((price(used) for used in server.billed), Decimal(0))


@unary
@pytest.mark.parametrize("rounds", [0, 1, 3, 9])
async def test_every_request_of_a_call_is_booked(server: GeminiServer, client: Client, kind: str, rounds: int) -> None:
    server.answer_by(growing(rounds))
    wrapped = Wrapped(client, kind, budget={"max_usd": 1})
    (said,) = await wrapped.ask(config=automatic())
    assert said.text == "done"
    assert len(server.calls) == rounds + 1
    calls, estimated, usd = figures(wrapped)
    assert (calls, estimated) == (rounds + 1, int(rounds > 0))
    assert usd == price(server.billed[-1]) * (rounds + 1), "as if each had been as long as the last"
    assert usd >= billed(server)
    assert_clear(wrapped)


@streams
@pytest.mark.parametrize("history", [False, True], ids=["history", "no history"])
@pytest.mark.parametrize("chunks", [1, 3])
async def test_streams_tell_every_request_and_are_exact(
    server: GeminiServer, client: Client, kind: str, history: bool, chunks: int
) -> None:
    def decide(number: int, request: Request) -> Answer:
        used = usage(1_000 + 40 * number, 30 * number)
        return Answer(
            [text("one two three"), *([call("look_up", q=number)] if number <= 3 else [])], usage=used, chunks=chunks
        )

    server.answer_by(decide)
    wrapped = Wrapped(client, kind, budget={"max_usd": 1})
    await wrapped.ask(config=automatic(ignore_call_history=history))
    assert len(server.calls) == 4
    assert figures(wrapped) == (4, 0, billed(server))
    assert_clear(wrapped)


@streams
async def test_a_stream_that_breaks_in_a_later_request_keeps_what_the_earlier_told(
    server: GeminiServer, client: Client, kind: str
) -> None:
    server.script(
        Answer([call("look_up", q=1)], usage=usage(1_000, 40)),
        Answer([text("x" * 400)], usage=usage(1_100, 100), chunks=4, usage_on="last", cut_after=2),
    )
    wrapped = Wrapped(client, kind, budget={"max_usd": 1})
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the transport says
        await wrapped.ask(config=automatic())
    assert figures(wrapped) == (2, 1, price(usage(1_000, 40)) + price(usage(1_000, 50)))
    assert_clear(wrapped)


@kinds
async def test_a_call_leaves_only_if_all_its_requests_can_be_paid(
    server: GeminiServer, client: Client, kind: str
) -> None:
    """Four requests were $0.0037 where a budget of $0.0015 had let one call through."""
    server.answer_by(lambda number, _: Answer([call("look_up", q=number)] if number < 4 else [text("done")]))
    wrapped = Wrapped(client, kind, budget={"max_usd": "0.0015"})
    with pytest.raises(runguard.BudgetExceededError):
        await wrapped.ask(config=automatic())
    assert not server.calls
    assert_clear(wrapped)


@kinds
@pytest.mark.parametrize("most", [1, 2, 4])
async def test_what_is_held_covers_as_many_requests_as_are_allowed(
    server: GeminiServer, client: Client, kind: str, most: int
) -> None:
    """A model that never stops asking, with prompts that grow by an answer and a function's result of the same length
    each time.
    """
    server.answer_by(
        lambda number, _: Answer([call("look_up", q=number)], usage=usage(1_000 + 500 * (number - 1), 250))
    )
    held = sum((price(usage(1_000 + 500 * before, 250)) for before in range(most)), Decimal(0))
    short = Wrapped(client, kind, budget={"max_usd": held - Decimal("0.000000001")})
    with pytest.raises(runguard.BudgetExceededError):
        await short.ask(config=automatic(maximum_remote_calls=most))
    assert not server.calls
    wrapped = Wrapped(client, kind, budget={"max_usd": held})
    await wrapped.ask(config=automatic(maximum_remote_calls=most))
    assert len(server.calls) == most
    assert billed(server) == held, "nothing was billed that had not been reserved"
    assert figures(wrapped)[0] == most
    assert figures(wrapped)[2] >= held
    assert_clear(wrapped)


@unary
@pytest.mark.parametrize("how", [{"disable": True}, {"maximum_remote_calls": 0}])
async def test_without_it_a_call_is_one_request_and_exact(
    server: GeminiServer, client: Client, kind: str, how: dict[str, Any]
) -> None:
    server.script(Answer([call("look_up", q=1)]))
    wrapped = Wrapped(client, kind, budget={"max_usd": CALL_USD})
    await wrapped.ask(config=automatic(**how))
    assert (len(server.calls), figures(wrapped)) == (1, (1, 0, CALL_USD))


@unary
async def test_rounds_that_the_contents_end_with_were_paid_before(
    server: GeminiServer, client: Client, kind: str
) -> None:
    server.answer_by(growing(1))
    wrapped = Wrapped(client, kind, budget={"max_usd": 1})
    asked = types.Content(role="model", parts=[types.Part.from_function_call(name="look_up", args={"q": 0})])
    answered = types.Content(
        role="user", parts=[types.Part.from_function_response(name="look_up", response={"found": 0})]
    )
    await wrapped.ask([types.UserContent("go"), asked, answered], config=automatic())
    assert len(server.calls) == 2
    assert figures(wrapped)[:2] == (2, 1)


@unary
async def test_a_history_that_is_not_told_counts_as_the_longest(
    server: GeminiServer, client: Client, kind: str
) -> None:
    server.answer_by(growing(2))
    wrapped = Wrapped(client, kind, budget={"max_usd": 1})
    await wrapped.ask(config=automatic(ignore_call_history=True, maximum_remote_calls=5))
    assert len(server.calls) == 3
    assert figures(wrapped) == (5, 1, price(server.billed[-1]) * 5)


@unary
async def test_what_the_model_wrote_into_its_calls_is_in_the_estimate(
    server: GeminiServer, client: Client, kind: str
) -> None:
    """A long call and a short last word: what was said in the call is seen, what was thought is not, and the limit is
    the most.
    """
    server.script(
        Answer([{"functionCall": {"name": "look_up", "args": {"q": 1, "why": "x" * 3_000}}}], usage=usage(1_000, 800)),
        Answer(usage=usage(2_000, 5, cached=900)),
    )
    wrapped = Wrapped(client, kind, budget={"max_usd": 1})
    await wrapped.ask(config=automatic(2_000))
    calls, estimated, usd = figures(wrapped)
    assert (calls, estimated) == (2, 1)
    assert billed(server) <= usd <= price(usage(2_000, 2_000)) + price(usage(2_000, 5))


@unary
async def test_a_refusal_may_have_come_after_requests_that_were_answered(
    server: GeminiServer, client: Client, kind: str
) -> None:
    server.script(Answer([call("look_up", q=1)]), Refusal(429))
    wrapped = Wrapped(client, kind, budget={"max_usd": 1})
    with pytest.raises(Exception, match="429"):
        await wrapped.ask(config=automatic())
    assert len(server.calls) == 2
    calls, estimated, usd = figures(wrapped)
    assert (calls, estimated) == (1, 1)
    assert usd >= billed(server)
    assert_clear(wrapped)


@kinds
async def test_a_chat_tells_its_requests_too(server: GeminiServer, client: Client, kind: str) -> None:
    """Its history holds the rounds of earlier messages, which were paid with them."""
    server.answer_by(lambda number, _: Answer([call("look_up", q=number)] if number % 3 else [text("done")]))
    chat: Any = (client.aio if "async" in kind else client).chats.create(model=MODEL, config=automatic())
    method = chat.send_message_stream if "stream" in kind else chat.send_message
    send: Any = (runguard.guard_async if "async" in kind else runguard.guard)(
        method, budget={"max_usd": CALL_USD * 6}, prices=PRICES
    )

    async def say() -> None:
        if kind == "unary":
            await asyncio.to_thread(send, "go")
        elif kind == "stream":
            await asyncio.to_thread(lambda: list(send("go")))
        else:
            answer = await send("go")
            _ = [chunk async for chunk in answer] if kind == "async stream" else answer

    for turn in (1, 2):
        await say()
        assert len(server.calls) == turn * 3
        assert figures(send) == (turn * 3, 0 if "stream" in kind else turn, CALL_USD * turn * 3)
    with pytest.raises(runguard.BudgetExceededError):
        await say()
    assert len(server.calls) == 6


async def test_calls_and_tokens_are_limited_too(server: GeminiServer, client: Client) -> None:
    server.answer_by(growing(3))
    wrapped = Wrapped(client, "unary", budget={"max_calls": 3})
    await wrapped.ask(config=automatic())
    with pytest.raises(runguard.BudgetExceededError):
        await wrapped.ask(config=automatic())
    assert len(server.calls) == 4, "how many requests a call becomes is known afterwards"
    tokens = Wrapped(client, "unary", budget={"max_tokens": 2 * 1_250 + 500 - 1})
    with pytest.raises(runguard.BudgetExceededError):
        await tokens.ask(config=automatic(maximum_remote_calls=2))
    assert len(server.calls) == 4


@streams
async def test_a_later_request_that_told_nothing_at_all_is_marked(
    server: GeminiServer, client: Client, kind: str
) -> None:
    server.script(
        Answer([call("look_up", q=1)], usage=usage(1_000, 40)),
        Answer([text("")], usage=usage(1_100, 100), chunks=2, usage_on="last", cut_after=1),
    )
    wrapped = Wrapped(client, kind, budget={"max_usd": 1})
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the transport says
        await wrapped.ask(config=automatic())
    assert figures(wrapped) == (2, 1, price(usage(1_000, 40)) + price(usage(1_000, 0)))
    assert_clear(wrapped)


async def test_guards_around_each_other_count_each_request_once(
    server: GeminiServer, client: Client, tmp_path: Path
) -> None:
    """Also on a store that they share, where the outermost owns the call."""
    server.answer_by(growing(2))
    store = f"sqlite:///{tmp_path / 'books.db'}"
    shared: dict[str, Any] = {
        "store": store,
        "budget": [Budget(usd=1, per="user", window="1d")],
        "prices": PRICES,
        "tokens": lambda **_: 1_000,
    }
    inner = runguard.guard(client.models.generate_content, **shared)
    outer: Any = runguard.guard(inner, **shared)

    def ask() -> Any:
        with runguard.run(user="alice", app="chat", budget={"max_usd": 1}, prices=PRICES) as here:
            outer(model=MODEL, contents="go", config=automatic())
            return here.caller.spend() if here.caller is not None else None

    assert (await asyncio.to_thread(ask))["calls"] == 3
    assert len(server.calls) == 3
    outer.flush()
    status = next(status for status in outer.budgets("user:chat/alice") if status.unit == "usd")
    assert status.spent == price(server.billed[-1]) * 3
