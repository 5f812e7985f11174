"""``runguard spend`` over every kind of store, filled by real ADK runs."""

import asyncio
import csv
import io
from decimal import Decimal
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig

from runguard import Budget, ToolRule
from runguard.adk import RunGuardPlugin
from runguard.ledger import ledger as daily_sums
from runguard.ledger.remote import StoreLedger
from runguard.testing import ScriptedModel, call, run, text
from tests.kit.commands import runguard, told
from tests.kit.stores import Place

PRICES = {"scripted-1": {"input": "0.37", "output": "1.11"}}


def spent(store: str, user: str, team: str, calls: int = 2) -> RunGuardPlugin:
    """Runs of one user, with a budget for the app and one for the user."""
    model = ScriptedModel([text("done")], prompt_tokens=1_003, output_tokens=7)
    agent = LlmAgent(name="writer", model=model)
    budgets = [Budget(usd=50, per="app"), Budget(usd=50, per="user")]
    plugin = RunGuardPlugin(budgets=budgets, prices=PRICES, store=store)
    config = RunConfig(custom_metadata={"runguard": {"labels": {"team": team}}})
    for _ in range(calls):
        asyncio.run(run(agent, plugins=[plugin], app_name="docs", user_id=user, run_config=config))
    assert plugin.flush(30)
    return plugin


def accounts(store: str) -> dict[str, Decimal]:
    rows = told("status", "--store", store, "--all")["budgets"]
    return {row["scope"]: Decimal(row["spent"]) for row in rows if row["unit"] == "usd"}


def by(group: str, store: str, *more: str) -> dict[str, Decimal]:
    return {row[group]: Decimal(row["usd"]) for row in told("spend", "--store", store, "--by", group, *more)["rows"]}


def test_sums_equal_the_accounts_before_and_after_a_purge(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    store = place.url
    spent(store, "alice", "search", 3)
    plugin = spent(store, "=bob", "ads")
    one = Decimal("0.37") * 1_003 / 10**6 + Decimal("1.11") * 7 / 10**6
    before = told("spend", "--store", store, "--by", "user,label:team,model")
    assert [
        (row["user"], row["label:team"], row["model"], row["calls"], Decimal(row["usd"])) for row in before["rows"]
    ] == [
        ("alice", "search", "scripted-1", 3, 3 * one),
        ("=bob", "ads", "scripted-1", 2, 2 * one),
    ]
    assert accounts(store) == {"app:docs": 5 * one, "user:docs/alice": 3 * one, "user:docs/=bob": 2 * one}
    assert by("app", store) == {"docs": 5 * one}

    ledger: Any = plugin.guard.accounts.ledger
    assert isinstance(ledger, StoreLedger)
    monkeypatch.setattr(daily_sums, "SETTLED_S", -60.0)
    ledger.call(daily_sums.sum_up)
    ledger.call(lambda session: session.purge(-60))
    assert ledger.call(lambda session: session.tail("call", 5)) == []
    assert told("spend", "--store", store, "--by", "user,label:team,model") == before
    spent(store, "alice", "search", 1)
    assert by("app", store) == {"docs": 6 * one} == {"docs": accounts(store)["app:docs"]}


def test_the_price_of_a_tool_is_on_the_bill_and_in_the_accounts(file_place: str) -> None:
    def search(query: str) -> str:
        """Search the web."""
        return f"nothing about {query}"

    model = ScriptedModel([call("search", query="a"), text("done")], prompt_tokens=100, output_tokens=10)
    agent = LlmAgent(name="writer", model=model, tools=[search])
    rules = {"search": ToolRule(price="0.008")}
    plugin = RunGuardPlugin(budgets=[Budget(usd=50, per="app")], prices=PRICES, tools=rules, store=file_place)
    asyncio.run(run(agent, plugins=[plugin], app_name="docs"))
    assert plugin.flush(30)
    rows = told("spend", "--store", file_place, "--by", "tool")["rows"]
    assert [(row["tool"], row["calls"], row["tool_calls"]) for row in rows] == [("search", 0, 1), ("", 2, 0)]
    assert Decimal(rows[0]["usd"]) == Decimal("0.008")
    assert by("app", file_place)["docs"] == accounts(file_place)["app:docs"]


def test_csv_quotes_names_that_a_spreadsheet_would_run(file_place: str) -> None:
    spent(file_place, "=bob", "a,b")
    ran = runguard("spend", "--store", file_place, "--by", "user,label:team", "--csv")
    assert ran.exit_code == 0
    head, row = csv.reader(io.StringIO(ran.stdout))
    figures = ["calls", "tool_calls", "input_tokens", "output_tokens", "usd", "unpriced", "estimated"]
    assert head == ["user", "label:team", *figures]
    assert row[:5] == ["'=bob", "a,b", "2", "0", "2006"]


def test_for_people(file_place: str) -> None:
    spent(file_place, "alice", "search")
    spent(file_place, "bob", "search")
    shown = runguard("spend", "--store", file_place, "--by", "user").stdout
    assert all(words in shown for words in ("alice", "bob", "total", "4,012", "(UTC)"))


def test_nothing_outside_of_the_days_is_counted(file_place: str) -> None:
    spent(file_place, "alice", "search")
    ran = told("spend", "--store", file_place, "--since", "2020-01-01", "--until", "2020-12-31")
    assert (ran["rows"], ran["total"]["calls"], ran["total"]["usd"]) == ([], 0, "0")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--by", "usr"], "cannot group by 'usr'; did you mean 'user'?"),
        (["--by", "label:"], "cannot group by 'label:'"),
        (["--since", "90m"], "'90m' is not a day; sums are kept by day: use 30d, 4w or 2026-11-01"),
        (["--since", "2026-11-02", "--until", "2026-11-01"], "--since 2026-11-02 is after --until 2026-11-01"),
        (["--csv", "--json"], "give --csv or --json, not both"),
    ],
)
def test_a_mistake_is_one_message(file_place: str, args: list[str], message: str) -> None:
    spent(file_place, "alice", "search", 1)
    ran = runguard("spend", "--store", file_place, *args)
    assert ran.exit_code == 2
    assert message in ran.output


@pytest.fixture
def file_place(tmp_path: Any) -> str:
    return f"sqlite:///{tmp_path}/spend.db"
