"""Ways to reach the Gemini server of the tests."""

from collections.abc import Callable
from typing import Any

import pytest
from google.adk.models import Gemini
from google.adk.sessions import InMemorySessionService

from runguard.adk import RunGuardPlugin
from tests.kit.gemini_server import Answer, GeminiServer, text
from tests.kit.money import assert_nothing_reserved, figures
from tests.kit.wire import CALL_USD, play

Models = Callable[..., Gemini]


modes = pytest.mark.parametrize("mode", ["unary", "sse"])


transports = pytest.mark.parametrize("transport", ["default", "httpx"])


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
