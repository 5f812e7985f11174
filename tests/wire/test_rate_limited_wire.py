"""A provider on the wire that answers 429 or 503 and says how long to wait, through the clients that users have."""

import asyncio
import time
from collections.abc import Callable

import pytest
from google.adk.models import Gemini
from google.genai.errors import APIError

from runguard import guard_async
from tests.kit.gemini_server import Answer, GeminiServer, Refusal, Request
from tests.kit.money import agent
from tests.kit.wire import guard, play

Models = Callable[..., Gemini]


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
