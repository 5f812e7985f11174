"""What operators use beside a run works on every adapter: the command line, replay, alerts, large answers."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from runguard.cli.main import main
from runguard.testing.conformance import MODEL, AgentSpec, Harness, Reply
from runguard.view.store import StoreView

PRICES: Any = {MODEL: {"input": 1, "output": 2}}
LIMITS: Any = {MODEL: {"max_output_tokens": 1_000}}


def command(*arguments: str, codes: tuple[int, ...] = (0,)) -> Any:
    ran = CliRunner().invoke(main, [*arguments, "--json"])
    assert ran.exit_code in codes, ran.output
    return json.loads(ran.stdout)


def stubborn(n: int, _: str) -> Reply:
    return Reply(calls=[("parse", {"hint": f"attempt {n}"})])


def failing(hint: str) -> str:
    return '{"status": "partial_parse_error"}'


async def test_the_command_line_and_replay_read_what_an_adapter_recorded(harness: Harness, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/guard.db"
    whom = {} if harness.name == "Google ADK" else {"app": "docs", "user": "alice"}  # there the Runner says whom
    guard = harness.guard(store=store, prices=PRICES, models=LIMITS, max_usd=1, **whom)
    session = harness.session(AgentSpec(stubborn, "worker", {"parse": failing}), guard)
    await session.turn("go")
    assert guard.guard.flush(30)

    [trip] = command("trips", "--store", store)["trips"]
    assert (trip["rule"], trip["tool"]) == ("stall", "parse")
    user = trip["user_id"]
    assert {"app": trip["app"], "user": user} == whom or not whom
    story = command("trips", "show", "last", "--store", store)
    assert story["source"] == "steps"
    assert [row["name"] for row in story["rows"] if row["kind"] == "tool"].count("parse") >= 5
    spent = command("spend", "--store", store, "--by", "user,agent")
    assert [(row["user"], row["agent"], row["calls"]) for row in spent["rows"]] == [(user, "worker", 6)]
    assert Decimal(spent["total"]["usd"]) == guard.spend()["usd"]
    assert command("status", "--store", store, codes=(0, 1))["spend"]["total"]["calls"] == 6

    replayed = command("replay", store)
    [run] = replayed["runs"]
    assert run["model_calls"] == 6
    assert "stall" in json.dumps(run["verdicts"])
    view = StoreView(store)
    assert [trip["rule"] for trip in view.trips()] == ["stall"]
    view.close()


async def test_an_answer_that_is_too_large_is_left_out(harness: Harness) -> None:
    seen: list[str] = []

    def script(n: int, newest: str) -> Reply:
        seen.append(newest)
        return Reply(calls=[("read", {"page": 1})]) if n == 1 else Reply("done")

    guard = harness.guard(max_tool_result_chars=1_000)
    session = harness.session(AgentSpec(script, "worker", {"read": lambda page: "word " * 10_000}), guard)
    result = await session.turn("go")
    assert result.text == "done"
    assert result.open_calls == []
    assert len(seen[-1]) < 2_000, "the model gets a note instead of the answer"
    assert "too large" in seen[-1]


async def test_a_stop_sends_one_alert(harness: Harness) -> None:
    alerts: list[Any] = []
    guard = harness.guard(alerts={"call": alerts.append})
    session = harness.session(AgentSpec(stubborn, "worker", {"parse": failing}), guard)
    await session.turn("go")
    assert guard.guard.flush(30)
    assert [alert.kind for alert in alerts] == ["trip"]
