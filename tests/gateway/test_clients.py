"""Agents on the real clients of the providers, streamed and not: a loop ends with an answer, a healthy run is whole."""

from decimal import Decimal
from typing import Any

import pytest

from runguard.gateway.formats import without_hosts_words
from tests.kit.anthropic_server import AnthropicServer
from tests.kit.examples import each_row
from tests.kit.gateways import (
    CALL_USD,
    FAILED,
    MODEL,
    TOOL,
    Loop,
    a_gateway,
    anthropic_loop,
    chat_loop,
    gemini_loop,
    responses_loop,
    served,
)
from tests.kit.gemini_server import Answer, GeminiServer, Request, call, text
from tests.kit.openai_server import OpenAIServer
from tests.kit.sse_server import Asked, Reply

CALLS = 6  # what a tool that fails in the same way may take
HEALTHY = 5


class Providers:
    """One server for each provider, and the loops that talk to them."""

    def __init__(self, anthropic: AnthropicServer, openai: OpenAIServer, gemini: GeminiServer) -> None:
        self.servers: dict[str, Any] = {"anthropic": anthropic, "chat": openai, "responses": openai, "gemini": gemini}

    def script(self, name: str, *, calls: int) -> Any:
        """The server of a format, whose model asks for its tool so many times. Arguments change, so that only the
        answers show the loop.
        """
        server = self.servers[name]

        def by_sse(n: int, _: Asked) -> Reply:
            return Reply(text="", call=(TOOL, {"page": n})) if n <= calls else Reply(text="done")

        def by_gemini(n: int, _: Request) -> Answer:
            return Answer([call(TOOL, page=n)]) if n <= calls else Answer([text("done")])

        server.answer_by(by_gemini if name == "gemini" else by_sse)
        return server


@pytest.fixture
def providers(anthropic_server: AnthropicServer, openai_server: OpenAIServer, gemini_server: GeminiServer) -> Providers:
    return Providers(anthropic_server, openai_server, gemini_server)


LOOPS: dict[str, Loop] = {
    "anthropic": anthropic_loop,
    "chat": chat_loop,
    "responses": responses_loop,
    "gemini": gemini_loop,
}
every_format = pytest.mark.parametrize("name", LOOPS)
streamed_or_not = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@every_format
@streamed_or_not
def test_a_loop_ends_with_an_answer_of_the_gateway(providers: Providers, name: str, stream: bool) -> None:
    server = providers.script(name, calls=40)
    gateway = a_gateway(server.url)
    with served(gateway) as url:
        turns, said = LOOPS[name](url, stream=stream)
        assert len(server.billed) == CALLS
        assert turns == CALLS + 1
        assert said == "I stopped because a step kept failing in the same way."
        (trip,) = gateway.trips
        assert (trip.rule, trip.model_calls, trip.tool_calls) == ("stall", CALLS, CALLS)
        assert Decimal(gateway.spend()["usd"]) == CALLS * Decimal(str(CALL_USD))


@every_format
@streamed_or_not
def test_a_healthy_run_passes_unchanged(providers: Providers, name: str, stream: bool) -> None:
    server = providers.script(name, calls=HEALTHY)
    gateway = a_gateway(server.url, max_usd=1)
    with served(gateway) as url:
        turns, said = LOOPS[name](url, stream=stream, tool=lambda n: f'{{"status": "ok", "page": {n}}}')
        assert (turns, said) == (HEALTHY + 1, "done")
        assert not gateway.trips
        assert Decimal(gateway.spend()["usd"]) == (HEALTHY + 1) * Decimal(str(CALL_USD))
        assert gateway.guard.accounts.spend(None)["calls"] == HEALTHY + 1


@every_format
@streamed_or_not
def test_a_budget_refuses_before_the_call_is_sent(providers: Providers, name: str, stream: bool) -> None:
    server = providers.script(name, calls=40)
    gateway = a_gateway(server.url, max_usd=0.015, tells_reason=True)
    with served(gateway) as url:
        _, said = LOOPS[name](url, stream=stream, tool=lambda n: f'{{"status": "ok", "page": {n}}}')
        assert 1 <= len(server.billed) <= 4
        assert len(server.billed) * CALL_USD <= 0.015
        assert said.startswith("I stopped because this request reached a safety limit.\n\nRunGuard stopped by budget")


def test_a_conversation_that_the_provider_keeps_is_one_run(openai_server: OpenAIServer, providers: Providers) -> None:
    providers.script("responses", calls=40)
    gateway = a_gateway(openai_server.url)
    with served(gateway) as url:
        turns, _ = responses_loop(url, stored=True)
        assert turns == CALLS + 1
        assert [trip.model_calls for trip in gateway.trips] == [CALLS]


def test_what_the_host_adds_to_an_answer_hides_no_failure(
    anthropic_server: AnthropicServer, providers: Providers
) -> None:
    providers.script("anthropic", calls=40)
    gateway = a_gateway(anthropic_server.url)

    def reminded(n: int) -> str:
        return f"{FAILED}\n\n<system-reminder>\nReminder {n}: the todo list is empty.\n</system-reminder>"

    with served(gateway) as url:
        turns, _ = anthropic_loop(url, tool=reminded)
        assert turns == CALLS + 1


def in_a_head(n: int, said: str, code: int = 0) -> str:
    """What Codex makes of the output of a command."""
    return (
        f"Chunk ID: {n:06x}\nWall time: {n / 7:.4f} seconds\nProcess exited with code {code}\n"
        f"Original token count: {n}\nOutput:\n{said}\n"
    )


@pytest.mark.parametrize(("said", "code"), [(FAILED, 0), ("make: *** [all] Error 2", 2)])
def test_what_codex_writes_above_an_output_hides_no_failure(
    openai_server: OpenAIServer, providers: Providers, said: str, code: int
) -> None:
    providers.script("responses", calls=40)
    with served(a_gateway(openai_server.url)) as url:
        assert responses_loop(url, tool=lambda n: in_a_head(n, said, code))[0] == CALLS + 1


def test_what_codex_writes_above_an_output_is_no_failure(openai_server: OpenAIServer, providers: Providers) -> None:
    providers.script("responses", calls=HEALTHY)
    with served(a_gateway(openai_server.url)) as url:
        assert responses_loop(url, tool=lambda n: in_a_head(n, f"page {n}")) == (HEALTHY + 1, "done")


@each_row(
    ("text", "kept"),
    [
        (in_a_head(1, "fine"), "fine"),
        (in_a_head(1, "bad", code=1), "Process exited with code 1\nbad"),
        ("Exit code: 0\nWall time: 0.1 seconds\nTotal output lines: 3\nOutput:\na", "a"),
        ("Exit code: 3\nWall time: 0.1 seconds\nOutput:\na", "Exit code: 3\na"),
        ("Script completed\nWall time 0.1 seconds\nOutput:\n", ""),
        ("Script failed\nWall time 0.1 seconds\nOutput:\nx", "Script failed\nx"),
        ("Wall time: 1 seconds\nProcess running with session ID 7\nOutput:\n", "Process running with session ID 7"),
        ("Process the files.\nThen say\nOutput:\nno", "Process the files.\nThen say\nOutput:\nno"),
    ],
)
def test_the_head_of_an_output_keeps_how_it_ended(text: str, kept: str) -> None:
    assert without_hosts_words(text) == kept


@every_format
def test_the_next_message_of_the_user_works_after_a_stop(providers: Providers, name: str) -> None:
    if name in ("responses", "gemini"):
        pytest.skip("the loop of this client keeps no history between turns")
    server = providers.script(name, calls=40)
    gateway = a_gateway(server.url)
    with served(gateway) as url:
        history: list[Any] = []
        LOOPS[name](url, history=history)
        turns, _ = LOOPS[name](url, history=history, prompt="Try once more.")
        assert turns == CALLS + 1
        assert len(server.billed) == 2 * CALLS
        first, second = gateway.trips
        assert first.run_id != second.run_id
        assert first.session_id == second.session_id


def test_a_key_is_never_kept(openai_server: OpenAIServer, caplog: pytest.LogCaptureFixture) -> None:
    gateway = a_gateway(openai_server.url, max_model_calls=1)
    with served(gateway) as url:
        chat_loop(url)
        assert openai_server.requests[0].headers["authorization"] == "Bearer a-dummy-key"
        assert "a-dummy-key" not in caplog.text
        runs = gateway.snapshot()["runs"]
        assert all(run["user"].startswith("key-") for run in runs)
        assert "dummy" not in str(runs)
    assert openai_server.requests[0].body["model"] == MODEL
