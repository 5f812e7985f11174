"""Providers on this machine, and a clean process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.anthropic_server import AnthropicServer
from tests.kit.gateways import RawUpstream
from tests.kit.gemini_server import GeminiServer
from tests.kit.openai_server import OpenAIServer


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch, one_certificate: Path) -> None:
    """No test sees a proxy, a policy file or an address of the environment."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "GOOGLE_GEMINI_BASE_URL", "RUNGUARD_STORE", "RUNGUARD_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(one_certificate))
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")


@pytest.fixture
def anthropic_server() -> Iterator[AnthropicServer]:
    server = AnthropicServer()
    yield server
    server.close()


@pytest.fixture
def openai_server() -> Iterator[OpenAIServer]:
    server = OpenAIServer()
    yield server
    server.close()


@pytest.fixture
def gemini_server() -> Iterator[GeminiServer]:
    server = GeminiServer()
    yield server
    server.close()


@pytest.fixture
def upstream() -> Iterator[RawUpstream]:
    server = RawUpstream()
    yield server
    server.close()
