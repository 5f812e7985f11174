"""A recorded session with replies of remote agents: replay books what the live guard booked."""

import json
from decimal import Decimal
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("a2a.server")

from google.adk.agents import SequentialAgent
from google.adk.models import LlmResponse
from google.genai import types

from runguard.adk import RunGuardPlugin
from runguard.policy import Policy
from runguard.replay import open_sources, replay
from runguard.testing import ScriptedModel, call, run, text
from tests.kit.a2a_servers import a2a_server, remote, serving
from tests.kit.rule_agents import agent
from tests.kit.topologies import step

# ADK leaves the connections of its A2A client open.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
STREAMS = tuple(map(int, version("google-adk").split(".")[:2])) >= (2, 13)
PRICES: dict[str, Any] = {"far-model": {"input": 100, "output": 0}}


def far(script: Any) -> Any:
    return agent(ScriptedModel(script), step, name="far")


def steps(calls: int) -> Any:
    return lambda n, _: call("step", n=n) if n < calls else text("done")


async def bills(root: Any, tmp_path: Path, **settings: Any) -> tuple[Any, Any]:
    """What the live guard booked, and what replay books for the stored session."""
    plugin = RunGuardPlugin(prices=PRICES, **settings)
    recording = await run(root, plugins=[plugin], message="go")
    path = tmp_path / "session.json"
    path.write_text(recording.session.model_dump_json(), encoding="utf-8")
    (batch,) = replay(open_sources(str(path)), [Policy.validated({"prices": PRICES, **settings}, "")])
    assert batch.faults.count == 0, batch.faults.first
    ((result,),) = batch.results
    spent = plugin.spend()
    live = {
        "calls": spent["calls"],
        "usd": spent["usd"],
        "unpriced": spent["unpriced_calls"],
        "tokens": spent["tokens"],
    }
    usd = Decimal(result.nano) / 10**9
    again = {"calls": result.model_calls, "usd": usd, "unpriced": result.unpriced, "tokens": result.tokens}
    return live, again


@pytest.mark.parametrize("options", [{}, {"use_legacy": False}], ids=["legacy", "new"])
@pytest.mark.parametrize("settings", [{}, {"remote_agents": {"*": {"model": "far-model"}}, "max_usd": 5}])
async def test_a_reply_of_several_model_calls_is_one_call(
    options: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    with a2a_server(far(steps(3))) as card:
        live, again = await bills(remote(card, **options), tmp_path, **settings)
    assert live == again
    assert live["calls"] == 1
    assert live["tokens"] >= 1_250


async def test_two_remote_agents(tmp_path: Path) -> None:
    with a2a_server(far(steps(2))) as card:
        root = SequentialAgent(name="all", sub_agents=[remote(card, "one"), remote(card, "two")])
        live, again = await bills(root, tmp_path, remote_agents={"one": {"model": "far-model"}})
    assert live == again
    assert (live["calls"], live["unpriced"]) == (2, 1)


async def test_a_reply_without_usage_is_not_estimated(tmp_path: Path) -> None:
    silent = LlmResponse(content=types.Content(role="model", parts=[types.Part(text="done")]))
    with a2a_server(far([silent])) as card:
        live, again = await bills(remote(card), tmp_path)
    assert live == again == {"calls": 1, "usd": Decimal(0), "unpriced": 1, "tokens": 0}


async def test_a_server_that_goes_away_midway(tmp_path: Path) -> None:
    """What it reported until then is booked, and that something is missing."""
    stop: list[Any] = []

    def script(n: int, _: Any) -> Any:
        if n == 2:
            stop[0].should_exit = stop[0].force_exit = True
            return LlmResponse(error_code="GONE", error_message="killed")
        return call("step", n=n)

    with serving(far(script)) as (card, server):
        stop.append(server)
        live, again = await bills(remote(card), tmp_path, remote_agents={"*": {"model": "far-model"}})
    assert live == again
    assert live["calls"] >= 1


async def test_a_cap_stops_before_the_second_remote_call(tmp_path: Path) -> None:
    with a2a_server(far(steps(1))) as card:
        root = SequentialAgent(name="all", sub_agents=[remote(card, "one"), remote(card, "two")])
        recording = await run(root, plugins=[RunGuardPlugin()], message="go")
    path = tmp_path / "session.json"
    path.write_text(json.dumps(json.loads(recording.session.model_dump_json(by_alias=True))), encoding="utf-8")
    (batch,) = replay(open_sources(str(path)), [Policy.validated({"max_tokens": 1_250}, "")])
    ((result,),) = batch.results
    stop = result.first("stop")
    assert stop is not None
    assert (stop.rule, stop.agent) == ("budget", "two")


async def decisions(root: Any, tmp_path: Path, **settings: Any) -> tuple[list[str], list[str]]:
    """The stops of the live guard in shadow mode, and those of replay."""
    plugin = RunGuardPlugin(prices=PRICES, mode="shadow", **settings)
    recording = await run(root, plugins=[plugin], message="go")
    path = tmp_path / "session.json"
    path.write_text(recording.session.model_dump_json(), encoding="utf-8")
    (batch,) = replay(open_sources(str(path)), [Policy.validated({"prices": PRICES, **settings}, "")])
    assert batch.faults.count == 0, batch.faults.first
    ((result,),) = batch.results
    return [trip.rule for trip in plugin.trips], [one.rule for one in result.verdicts if one.action == "stop"]


@pytest.mark.skipif(not STREAMS, reason="ADK 2.3 receives only the figures of the last model call")
@pytest.mark.parametrize("options", [{}, {"use_legacy": False}], ids=["legacy", "new"])
@pytest.mark.parametrize("settings", [{"max_usd": "0.25"}, {"max_tokens": 3_000}, {"max_usd": "0.6"}])
async def test_a_budget_stops_a_remote_agent_at_work_in_both(
    options: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    rule = {"remote_agents": {"*": {"model": "far-model"}}}
    with a2a_server(far(steps(5))) as card:
        live, again = await decisions(remote(card, **options), tmp_path, **settings, **rule)
    assert live == again == (["budget"] if settings != {"max_usd": "0.6"} else [])


@pytest.mark.skipif(not STREAMS, reason="ADK 2.3 receives only the figures of the last model call")
async def test_a_stopped_remote_agent_is_booked_the_same(tmp_path: Path) -> None:
    """What was reported before the stop is booked, and that something is missing."""
    with a2a_server(far(steps(50))) as card:
        rule = {"*": {"model": "far-model"}}
        live, again = await bills(remote(card), tmp_path, max_usd="0.25", remote_agents=rule)
    assert live == again == {"calls": 2, "usd": Decimal("0.3"), "unpriced": 1, "tokens": 3 * 1_250}


async def test_the_deadline_stops_a_remote_agent_at_work_in_both(tmp_path: Path) -> None:
    slow = agent(ScriptedModel(steps(50), latency_s=0.2), step, name="far")
    with a2a_server(slow) as card:
        plugin = RunGuardPlugin(max_seconds=1)
        recording = await run(remote(card), plugins=[plugin], message="go")
    path = tmp_path / "session.json"
    path.write_text(recording.session.model_dump_json(), encoding="utf-8")
    (batch,) = replay(open_sources(str(path)), [Policy.validated({"max_seconds": 1}, "")])
    ((result,),) = batch.results
    stops = [one.rule for one in result.verdicts if one.action == "stop"]
    assert [trip.rule for trip in plugin.trips] == stops == ["deadline"]
