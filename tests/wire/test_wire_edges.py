"""What only the wire brings to light: streams that break after they told something, several answers to one call, guards
that refuse further in.
"""

from decimal import Decimal
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.genai import Client, types

import runguard
from tests.kit.gemini_models import Models, modes, transports
from tests.kit.gemini_server import Answer, GeminiServer, Request, call, text, usage
from tests.kit.money import agent, assert_nothing_reserved, figures
from tests.kit.tools import step
from tests.kit.wire import CALL_USD, guard, play, price

from .test_guarded_wire import Stack, Wrapped, assert_clear


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
    assert_nothing_reserved(plugin)


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
    assert_nothing_reserved(plugin)


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
