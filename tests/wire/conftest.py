"""A server per test, models whose clients are closed, and a clean process."""

import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.adk.models import Gemini
from google.genai import Client, types

import runguard
from tests.kit.gemini_server import KEY, GeminiServer
from tests.kit.money import looked_through

MODEL = "gemini-2.5-flash"
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the network when it is imported

# ADK tries these imports again and again while it runs; where the package behind is missing, each try compiles the
# module anew.
for package, module in {"anthropic": "anthropic_llm", "litellm": "lite_llm"}.items():
    if find_spec(package) is None:
        sys.modules.setdefault(f"google.adk.models.{module}", None)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch, one_certificate: Path) -> Iterator[None]:
    """No test sees the environment's project or proxy, nor another test's installed guard, and no guard that it makes
    keeps money reserved.
    """
    for name in (
        "GEMINI_API_KEY",
        "GOOGLE_CLOUD_PROJECT",
        "GOOGLE_CLOUD_LOCATION",
    ):
        monkeypatch.delenv(name, raising=False)
    for name in (
        "GOOGLE_GENAI_USE_VERTEXAI",
        "GOOGLE_GENAI_USE_ENTERPRISE",
        "GOOGLE_GENAI_API_VERSION",
        "GOOGLE_GEMINI_BASE_URL",
        "GOOGLE_GENAI_HTTP_CLIENT",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(one_certificate))
    monkeypatch.setenv("GOOGLE_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with looked_through():
        yield
    runguard.uninstall()


@pytest.fixture
def server() -> Iterator[GeminiServer]:
    running = GeminiServer()
    yield running
    running.close()


class HttpxGemini(Gemini):
    """The same model over httpx where aiohttp, the default, is installed too."""

    @cached_property
    def api_client(self) -> Client:
        over_httpx = {"transport": httpx.AsyncHTTPTransport(verify=False)}
        return Client(
            http_options=types.HttpOptions(
                base_url=self.base_url, retry_options=self.retry_options, async_client_args=over_httpx
            )
        )


@pytest.fixture
async def gemini(server: GeminiServer) -> AsyncIterator[Callable[..., Gemini]]:
    """Makes real models that talk to the server."""
    made: list[Gemini] = []

    def make(transport: str = "default", **options: Any) -> Gemini:
        kind = HttpxGemini if transport == "httpx" else Gemini
        made.append(kind(**{"model": MODEL, "base_url": server.url, **options}))
        return made[-1]

    yield make
    for model in made:
        await model.api_client.aio.aclose()
        model.api_client.close()


@pytest.fixture
async def client(server: GeminiServer) -> AsyncIterator[Client]:
    """A client of the provider that talks to the server, without any framework."""
    made = Client(http_options=types.HttpOptions(base_url=server.url))
    yield made
    await made.aio.aclose()
    made.close()
