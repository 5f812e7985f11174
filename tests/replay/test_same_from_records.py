"""A run live under the plugin with a store, and the same run replayed from the store's own journal: every decision of
every rule, in order.
"""

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

from google.adk.agents import LlmAgent, ParallelAgent
from google.adk.sessions import InMemorySessionService

from runguard.policy import Policy
from runguard.replay import open_sources, replay
from runguard.replay.output import explain
from runguard.replay.player import Judge
from runguard.replay.steps import Faults
from runguard.testing import ScriptedModel, call, run, text
from tests.kit import topologies
from tests.kit.topologies import NESTED, OLDER_TASKS, TOPOLOGIES, spread, task_back

from .test_same_as_live import STEADY, STRICT, Listening, constant, failing, ping_pong, team_of

PRICE = {"scripted-1": {"input": 10, "output": 40}}
ALL: dict[str, Any] = {
    **STRICT,
    "max_delegation_depth": 1,
    "max_fan_out": 2,
    "max_usd": 0.05,
    "prices": PRICE,
    "max_context_tokens": 1_000,
    "max_tool_result_chars": 11,
    "tools": {"step": {"max_calls": 1}},
}
SEEN: set[str] = set()
RAN: set[tuple[str, str]] = set()


async def live(root: Any, store: Path, **policy: Any) -> Listening:
    plugin = Listening(store=f"sqlite:///{store}", store_timeout=30, **policy)
    async with asyncio.timeout(30):
        await run(root, "go", plugins=[plugin])
    assert plugin.flush(10)
    assert plugin.snapshot()["guard_errors"] == 0
    return plugin


def replayed(store: Path, *, to_the_end: bool, **policy: Any) -> tuple[list[tuple[Any, ...]], Any]:
    (batch,) = replay(open_sources(str(store)), [Policy.validated(policy, "")], to_the_end=to_the_end)
    assert batch.faults.count == 0, batch.faults.first
    ((result,),) = batch.results
    assert not result.more
    return [(v.lane, v.action, v.rule, v.observed, v.limit, v.tool) for v in result.verdicts], result


def compared(told: list[tuple[Any, ...]]) -> tuple[list[tuple[Any, ...]], bool]:
    """Everything but money in its order; and whether a budget stopped. Which of several branches a store answers
    first, and when it has booked what reaches a share of a budget, is the store's business."""
    return [entry for entry in told if entry[2] != "budget"], any(entry[1:3] == ("stop", "budget") for entry in told)


def heard(plugin: Listening) -> list[tuple[Any, ...]]:
    found = [(lane, d.action.word, d.finding) for lane, d in plugin.heard if d.finding is not None]
    return [(lane, word, f.rule, float(f.observed), float(f.limit), f.tool) for lane, word, f in found]


CASES = [case.values for case in spread("endless", "stuck", topologies=[*TOPOLOGIES, ping_pong])]
CASES += [(topology, "failing") for topology in TOPOLOGIES if topology.__name__ in ("single", "parallel")]
# it fails there, with or without a guard
CASES += [(topology, "endless") for topology in NESTED if not (topology is task_back and OLDER_TASKS)]


@pytest.mark.parametrize(
    ("topology", "version"), CASES, ids=[f"{topology.__name__}-{version}" for topology, version in CASES]
)
async def test_replay_of_the_journal_decides_as_live(
    topology: Any, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version != "endless":
        failing.__name__ = "step"
        monkeypatch.setattr(topologies, "step", failing)
    store, team = tmp_path / "guard.db", team_of(version)
    policy = {**ALL, "mode": "shadow"}
    plugin = await live(topology(team), store, **policy)
    mine, result = replayed(store, to_the_end=True, **policy)
    assert compared(mine) == compared(heard(plugin))
    assert result.model_calls == team.calls
    SEEN.update(rule for _, _, rule, *_ in mine)
    RAN.add((topology.__name__, version))


@pytest.mark.parametrize(
    "policy", [{}, {"max_model_calls": 3}, {"max_usd": 0.05, "prices": PRICE}], ids=["loops", "limit", "money"]
)
@pytest.mark.parametrize(
    "topology", [t for t in [*TOPOLOGIES, ping_pong] if t.__name__ in STEADY], ids=lambda topology: topology.__name__
)
async def test_what_an_enforcing_guard_did_is_decided_again(
    topology: Any, policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constant.__name__ = "step"
    monkeypatch.setattr(topologies, "step", constant)
    store = tmp_path / "guard.db"
    plugin = await live(topology(team_of("stuck")), store, **policy)
    mine, _ = replayed(store, to_the_end=False, **policy)
    assert {told[2] for told in mine if told[1] == "stop"} == {trip.rule for trip in plugin.trips}
    if "budget" not in {trip.rule for trip in plugin.trips}:
        assert mine == heard(plugin)


async def test_growth_over_the_turns_of_a_session_is_found_again(tmp_path: Path) -> None:
    store, service = tmp_path / "guard.db", InMemorySessionService()
    plugin = Listening(
        store=f"sqlite:///{store}", store_timeout=30, mode="shadow", max_event_cost_ratio=2, cost_baseline_events=2
    )
    agent = LlmAgent(
        name="worker", model=ScriptedModel(lambda n, _: text(f"answer {n}"), prompt_tokens=lambda n: 1_000 * n)
    )
    for _ in range(7):
        await run(agent, "go", plugins=[plugin], session_service=service)
    assert plugin.flush(10)
    (batch,) = replay(
        open_sources(str(store)),
        [Policy.validated({"max_event_cost_ratio": 2, "cost_baseline_events": 2}, "")],
        to_the_end=True,
    )
    found = [(v.rule, v.observed) for (result,) in batch.results for v in result.verdicts]
    assert sorted(found) == sorted((rule, observed) for _, _, rule, observed, *_ in heard(plugin))
    assert found  # (3,000 + 4,000) is more than twice (1,000 + 2,000)


async def test_too_many_model_calls_at_once_are_found_again(tmp_path: Path) -> None:
    model = ScriptedModel(lambda n, _: text("done"), latency_s=0.05)
    crowd = ParallelAgent(name="crowd", sub_agents=[LlmAgent(name=f"part_{n}", model=model) for n in range(6)])
    policy = {"max_concurrent_agents": 2, "on_surplus": "refuse"}
    plugin = await live(crowd, tmp_path / "guard.db", mode="shadow", **policy)
    mine, _ = replayed(tmp_path / "guard.db", to_the_end=True, **policy)
    assert mine == heard(plugin)
    assert ("stop", "fan_out") in {(action, rule) for _, action, rule, *_ in mine}
    assert replayed(tmp_path / "guard.db", to_the_end=True, **{**policy, "max_concurrent_agents": 6})[0] == []


async def test_another_policy_judges_the_same_events(tmp_path: Path) -> None:
    def look(at: str) -> dict[str, str]:
        """Look."""
        return {"error": "secret words of an answer"}

    model = ScriptedModel(
        lambda n, _: call("look", at="secret words of a call") if n < 9 else text("secret words at the end")
    )
    await live(
        LlmAgent(name="worker", model=model, tools=[look]),
        tmp_path / "guard.db",
        mode="shadow",
        rules={"repetition": False, "stall": False},
    )
    mine, result = replayed(tmp_path / "guard.db", to_the_end=False, rules={"repetition": {"stop": 3}})
    assert ("", "stop", "repetition", 3.0, 3.0, "look") in mine
    assert (result.model_calls, result.tool_calls, result.saved.model_calls) == (9, 8, 6)
    assert replayed(tmp_path / "guard.db", to_the_end=False, tools={"look": {"exempt": True}})[0] == []
    with sqlite3.connect(tmp_path / "guard.db") as db:
        kept = [row[0] for row in db.execute("SELECT text FROM records WHERE kind = 'steps'")]
    assert kept
    assert not any("secret" in text for text in kept)


async def test_entries_that_cannot_be_read_are_counted_and_skipped(tmp_path: Path) -> None:
    store = tmp_path / "guard.db"
    await live(LlmAgent(name="worker", model=ScriptedModel([text("done")])), store)
    broken = [
        {"k": "ask"},
        {"k": "answers", "t": 1, "of": [{"tool": "x"}]},
        {"k": "lane"},
        {"k": "paid", "n": "x"},
        {"k": "unheard of", "t": 1},
    ]
    with sqlite3.connect(store) as db:
        (ref,) = db.execute("SELECT ref FROM records WHERE kind = 'steps'").fetchone()
        for record in (json.dumps(broken), "[3]", "{"):
            db.execute("INSERT INTO records (at, kind, ref, text) VALUES (9e9, 'steps', ?, ?)", (ref, record))
    (batch,) = replay(open_sources(str(store)), [Policy.validated({}, "")])
    assert batch.faults.count == 7  # four entries, two records, and a piece without its number
    ((result,),) = batch.results
    assert result.model_calls == 1


def test_every_rule_of_a_run_was_told() -> None:
    """Runs last: the comparison above is worth something only where rules fire."""
    if len(RAN) < len(CASES):
        pytest.skip("not all of the comparison ran in this process")
    whole = {"model_calls", "tool_calls", "tool_limit", "depth", "fan_out", "budget", "context", "result_size"}
    assert {"repetition", "no_news", "stall", "handoff", "growth", *whole} <= SEEN


async def test_an_explanation_of_a_journal_tells_nesting_and_fan_out(tmp_path: Path) -> None:
    store = tmp_path / "guard.db"
    branches = [LlmAgent(name=f"b{n}", model=ScriptedModel([text("done")])) for n in range(3)]
    await live(ParallelAgent(name="all", sub_agents=branches), store, max_fan_out=2, mode="shadow")
    (source,) = open_sources(str(store))
    (recorded,) = [run for piece in source.pieces() for run in piece.runs(Faults(), "")]
    told = explain(recorded, Judge(Policy.validated({"max_fan_out": 2}, ""), to_the_end=True))
    near = {each.rule: each for each in told.rules}
    assert (near["fan_out"].rungs, near["fan_out"].why) == ({"stop": 2.0}, "reached its stop")
    assert near["fan_out"].peak is not None
    assert near["fan_out"].peak.observed == 3
    assert near["depth"].why == "0; 5 are allowed"
    assert set(told.not_recorded) == {"breaker", "kill_switch"}
