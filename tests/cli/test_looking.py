"""``status`` and ``trips`` over every kind of store, filled by real ADK runs."""

import asyncio
import csv
import io
import sqlite3
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig

from runguard import Budget, ToolRule
from runguard.adk import RunGuardPlugin
from runguard.cli.dashboard.server import Looks
from runguard.cli.store_commands import _rate_limits
from runguard.core.events import ModelCall, RunInfo
from runguard.engine.guard import Guard
from runguard.ledger import ledger as daily_sums
from runguard.ledger.remote import StoreLedger
from runguard.ledger.sqlite import SqliteStore
from runguard.policy import Policy
from runguard.pricing.rates import Usage
from runguard.testing import ScriptedModel, call, run, text
from runguard.view.store import StoreView
from tests.kit.commands import guarded, looping, runguard, told
from tests.kit.money import agent
from tests.kit.stores import Place


def test_status_tells_budgets_spend_and_who_spends(filled: str) -> None:
    ran = told("status", "--store", filled, "--by", "user")
    assert (ran["ok"], ran["mode"], ran["stops"], ran["running"], ran["breakers"], ran["unreadable"]) == (
        True,
        "enforce",
        [],
        [],
        [],
        0,
    )
    budgets = {(row["scope"], row["unit"]): row for row in ran["budgets"]}
    assert {scope for scope, _ in budgets} == {"user:docs/alice", "user:docs/bob", "app:docs"}
    alice = budgets["user:docs/alice", "usd"]
    assert (alice["limit"], alice["window"], alice["reserved"], alice["closed"]) == ("100", "1d", "0", False)
    spend = ran["spend"]
    assert [row["name"] for row in spend["totals"]] == ["bob", "alice"], "the dearest first"
    assert spend["total"]["calls"] == 4 + 12
    assert alice["spent"] == next(row["usd"] for row in spend["totals"] if row["name"] == "alice")


def test_status_for_people(filled: str) -> None:
    ran = runguard("status", "--store", filled)
    assert ran.exit_code == 0
    assert all(
        words in ran.stdout
        for words in (
            "running now: 0",
            "budgets: 5",
            "user:docs/alice",
            "resets in",
            "1,000,000 tokens",
            "16 model calls",
            "docs",
        )
    )
    assert "user:docs/alice" not in runguard("status", "--store", filled, "--scope", "app:").stdout


@pytest.mark.parametrize(
    ("scope", "calls", "filtered"),
    [
        ("user:docs/alice", 4, True),
        ("user:docs/", 16, True),
        ("user:docs/nobody", 0, True),
        ("app:docs", 16, True),
        ("app:other", 0, True),
        ("model:gemini-2.5-flash", 16, True),
        ("tool:", 0, True),
        ("session:docs/", 16, False),
    ],
)
def test_status_of_a_scope_tells_what_was_spent_in_it(filled: str, scope: str, calls: int, filtered: bool) -> None:
    spend = told("status", "--store", filled, "--scope", scope)["spend"]
    assert (spend["total"]["calls"], spend["scope"]) == (calls, scope if filtered else "")
    said = runguard("status", "--store", filled, "--scope", scope).stdout
    assert (f"spent in {scope} since" in said) is filtered


def test_status_of_a_scope_that_cannot_be(filled: str) -> None:
    ran = runguard("status", "--store", filled, "--scope", "usr:docs/alice")
    assert (ran.exit_code, ran.stderr) == (2, "--scope usr:docs/alice: no such scope; did you mean 'user'?\n")


def test_trips_are_listed_newest_first_and_shadow_ones_are_marked(filled: str) -> None:
    ran = told("trips", "--store", filled)
    assert [(trip["rule"], trip["user_id"], trip["shadow"]) for trip in ran["trips"]] == [
        ("unpriced", "carol", False),
        ("repetition", "bob", True),
        ("repetition", "alice", False),
    ]
    lines = runguard("trips", "--store", filled).stdout.splitlines()
    assert ["shadow: not enforced" in line for line in lines if "repetition" in line] == [True, False]


@pytest.mark.parametrize(
    ("options", "users"),
    [
        (["--rule", "repetition"], ["bob", "alice"]),
        (["--user", "carol"], ["carol"]),
        (["--since", "1h"], ["carol", "bob", "alice"]),
        (["--since", "2099-01-01"], []),
        (["--rule", "repetition", "--user", "carol"], []),
        (["--limit", "1"], ["carol"]),
    ],
    ids=" ".join,
)
def test_trips_can_be_filtered(file_store: str, options: list[str], users: list[str]) -> None:
    assert [trip["user_id"] for trip in told("trips", "--store", file_store, *options)["trips"]] == users


def test_a_filter_that_fits_nothing_names_what_there_is(file_store: str) -> None:
    assert (
        "none of 3 trips matches; their rules are repetition, unpriced"
        in runguard("trips", "--store", file_store, "--rule", "bugdet").stdout
    )


def test_one_trip_with_evidence_story_and_how_to_continue(filled: str) -> None:
    (alice,) = told("trips", "--store", filled, "--user", "alice")["trips"]
    for name in (alice["id"], alice["id"][:7]):
        story = told("trips", "show", name, "--store", filled)
        assert (story["trip"]["id"], story["trip"]["rule"]) == (alice["id"], "repetition")
        assert [row["name"] for row in story["rows"] if row["kind"] == "model"] == ["gemini-2.5-flash"] * 4
        assert story["repeats"][0]["name"] == "look"
        assert story["do"] == [alice["resume"]]
    shown = runguard("trips", "show", alice["id"], "--store", filled).stdout
    assert alice["message"] in shown
    assert all(
        words in shown
        for words in (
            "evidence",
            alice["evidence"][0]["call"],
            "what repeated",
            "model call gemini-2.5-flash",
            "how to continue",
            "projection",
        )
    )
    assert "shadow" not in shown


def test_the_last_one_and_a_shadow_one(file_store: str) -> None:
    assert told("trips", "--store", file_store, "show", "last")["trip"]["user_id"] == "carol"
    (bob,) = told("trips", "--store", file_store, "--user", "bob")["trips"]
    shown = runguard("trips", "show", bob["id"], "--store", file_store).stdout
    assert "not enforced" in shown
    assert (
        shown.index("same call and answer 3 times") < shown.index("stop by repetition of look") < shown.index(" later ")
    ), "how it came to it, not what followed"
    assert "same call and answer 7 times" not in shown


def test_an_unknown_trip_names_the_known_ones(file_store: str) -> None:
    known = [trip["id"] for trip in told("trips", "--store", file_store)["trips"]]
    ran = runguard("trips", "show", "zzz", "--store", file_store)
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert ran.stderr == f"'zzz': no such trip. The last ones are {', '.join(known)}; `runguard trips` lists them\n"
    assert told("trips", "show", "zzz", "--store", file_store, code=2)["ok"] is False


async def test_a_budget_trip_names_the_command_that_raises_it(tmp_path: Any) -> None:
    store = f"sqlite:///{tmp_path}/small.db"
    plugin = RunGuardPlugin(store=store, store_timeout=30, budgets=[Budget(calls=2, per="user", window="1d")])
    await run(looping(), plugins=[plugin], app_name="docs", user_id="alice")
    assert plugin.flush(10)
    assert (
        told("trips", "show", "last", "--store", store)["do"][-1]
        == f"runguard extend user:docs/alice --store {store} --calls 2"
    )
    ran = runguard("status", "--store", store)
    assert ran.exit_code == 1, "a budget that is used up wants attention"
    assert "100%" in ran.stdout


def test_an_empty_store_says_so(file_store: str, tmp_path: Any) -> None:
    empty = f"sqlite:///{tmp_path}/empty.db"
    SqliteStore(empty).connect(1).close()
    assert "no budget beyond single runs" in runguard("status", "--store", empty).stdout
    assert "no trip yet" in runguard("trips", "--store", empty).stdout
    assert (
        "no scope of a budget starts with user:x;"
        in runguard("status", "--store", file_store, "--scope", "user:x").stdout
    )
    assert "no trip yet" in runguard("trips", "show", "last", "--store", empty).stderr


def test_records_that_cannot_be_read_are_counted(file_store: str) -> None:
    with sqlite3.connect(file_store.removeprefix("sqlite:///")) as database:
        database.execute(
            "UPDATE records SET text = "
            "'{broken' WHERE kind = 'trip' AND seq = (SELECT min(seq) FROM records WHERE kind = 'trip')"
        )
    ran = told("trips", "--store", file_store)
    assert (ran["count"], ran["unreadable"]) == (2, 1)
    assert "1 records could not be read" in runguard("trips", "--store", file_store).stdout


@pytest.mark.parametrize(
    "damage",
    [b'\xff\xfe{"rule": "budget", "message": "secret"}', b'{"x": "secret"}', b'{"rule": "budget", "tokens": "many"}'],
)
def test_a_damaged_trip_is_counted_or_shown_as_far_as_it_goes(file_store: str, damage: bytes) -> None:
    with sqlite3.connect(file_store.removeprefix("sqlite:///")) as database:
        database.execute(
            "UPDATE records SET text = CAST(? AS TEXT) WHERE seq = (SELECT max(seq) FROM records WHERE kind = 'trip')",
            (damage,),
        )
    is_trip = b"tokens" in damage
    ran = told("trips", "--store", file_store)
    assert (ran["count"], ran["unreadable"]) == ((3, 0) if is_trip else (2, 1))
    for command in (["trips"], ["trips", "show", "last"]):
        shown = runguard(*command, "--store", file_store)
        assert (shown.exit_code, "secret" in shown.output) == (0, False)


def test_names_are_text(tmp_path: Any) -> None:
    """What looks like markup of the screen library, or would move a terminal's cursor, is shown as it is."""
    store, evil = f"sqlite:///{tmp_path}/hostile.db", "[red]x[/]\x1b[2J\x9b31m\nstopped: all\u202e"

    async def hostile() -> None:
        plugin = guarded(store)
        await run(looping(), plugins=[plugin], app_name="docs", user_id=evil)
        assert plugin.flush(10)
        plugin.stop("user:docs/eve", actor=evil, reason=evil)

    asyncio.run(hostile())
    shown = "[red]x[/]\\x1b[2J\\x9b31m\\nstopped: all\\u202e"
    for arguments in (["trips"], ["trips", "show", "last"], ["status", "--by", "user"], ["resume", "user:docs/eve"]):
        ran = runguard(*arguments, "--store", store)
        assert shown in ran.output, arguments
        assert not {"\x1b", "\x9b", "\u202e"} & set(ran.output), arguments
        assert not [line for line in ran.output.splitlines() if line.startswith("stopped: all")], "no line is forged"
    assert "\x9b" not in runguard("trips", "--store", store, "--json").output
    assert told("trips", "--store", store)["trips"][0]["user_id"] == evil


async def test_a_running_run_is_seen_with_what_it_has_reserved(place: Place) -> None:
    filled = place.url
    plugin = guarded(filled)
    task = asyncio.create_task(run(looping(latency_s=60), plugins=[plugin], app_name="docs", user_id="dora"))
    try:
        async with asyncio.timeout(40):
            while not (ran := told("status", "--store", filled))["running"]:  # noqa: ASYNC110 - another process would look just so
                await asyncio.sleep(0.1)
        scoped = {
            scope: len(told("status", "--store", filled, "--scope", scope)["running"])
            for scope in (
                "user:docs/dora",
                "user:",
                "session:docs/",
                "app:docs",
                "user:docs/eve",
                "app:other",
                "model:",
            )
        }
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert list(scoped.values()) == [1, 1, 1, 1, 0, 0, 1], scoped
    (row,) = ran["running"]
    assert (row["app"], row["user"], row["in_flight"]) == ("docs", "dora", 1)
    assert next(b for b in ran["budgets"] if (b["scope"], b["unit"]) == ("user:docs/dora", "usd"))["reserved"] != "0"


# ---- Waiting calls in ``runguard status`` and on the dashboard


async def test_a_waiting_run_is_shown(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'guard.db'}"
    limit = Budget(calls=1, per="model", window="1h", on_exhausted="wait")
    plugin = RunGuardPlugin(store=store, budgets=[limit], max_wait_seconds=3_600)
    await run(agent("a", ScriptedModel([text("done")])), plugins=[plugin])
    task = asyncio.create_task(run(agent("a", ScriptedModel([text("done")])), plugins=[plugin], session_id="s2"))
    view = StoreView(store)
    try:
        async with asyncio.timeout(40):
            while not any(row.waiting for row in await asyncio.to_thread(view.running)):  # noqa: ASYNC110 - as another process looks
                await asyncio.sleep(0.05)
        (row,) = told("status", "--store", store, code=1)["running"]
        assert row["waiting"] == 1
        assert "1 waiting" in runguard("status", "--store", store).output
        (shown,) = Looks(view).overview("app", "1h")["running"]
        assert shown["waiting"] == 1
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        view.close()


def test_a_rate_limit_that_is_used_up_needs_no_attention() -> None:
    waits = Budget(calls=1, per="model", window="1m", on_exhausted="wait")
    assert _rate_limits(Policy.validated({"budgets": [waits, Budget(usd=1, per="user", window="1d")]}, "")) == {
        ("model", "1m")
    }
    both = [waits, Budget(usd=1, per="model", window="1m")]
    assert _rate_limits(Policy.validated({"budgets": both}, "")) == set()


# ---- ``runguard spend`` over every kind of store, filled by real ADK runs


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


# ---- ``runguard store purge`` deletes what is old and keeps what calls cost


DAY = 86_400


@pytest.fixture
async def store(tmp_path: Path) -> str:
    """A store with two runs. The first one is ten days old."""
    path = tmp_path / "guard.db"
    guard = Guard(
        Policy.validated({"store": f"sqlite:///{path}", "prices": {"made-up": {"input": 1_000, "output": 0}}}, "")
    )
    for name in ("old", "new"):
        guard.start(RunInfo(name, "docs", "alice", name, at=guard.clock()))
        event = ModelCall(name, "", "writer", guard.clock(), "made-up", 1_000, max_output_tokens=10)
        assert not guard.check(event)
        assert not await guard.reserve(event)
        guard.settle(event.charge, Usage(1_000, 0))
        guard.end(name)
        assert await asyncio.to_thread(guard.flush, 30)
        if name == "old":
            with closing(sqlite3.connect(path)) as db, db:
                db.execute("UPDATE records SET at = at - ?", (10 * DAY,))
    return f"sqlite:///{path}"


def records(store: str) -> set[str]:
    with closing(sqlite3.connect(store.removeprefix("sqlite:///"))) as db:
        return {ref for (ref,) in db.execute("SELECT ref FROM records WHERE kind = 'call'")}


def test_old_records_go_and_the_bill_stays(store: str) -> None:
    before = told("spend", "--store", store, "--since", "30d", "--by", "user")["rows"]
    assert records(store) == {"old", "new"}
    assert told("store", "purge", "--older-than", "7d", "--store", store)["older_than_seconds"] == 7 * DAY
    assert records(store) == {"new"}
    assert told("spend", "--store", store, "--since", "30d", "--by", "user")["rows"] == before
    assert [(row["user"], row["calls"], row["usd"]) for row in before] == [("alice", 2, "2")]


def test_the_last_minute_is_kept(store: str) -> None:
    told("store", "purge", "--older-than", "1s", "--store", store)
    assert records(store) == {"new"}


def test_wrong_ages_are_refused(store: str) -> None:
    assert "not a time" in runguard("store", "purge", "--older-than", "soon", "--store", store).stderr
    assert "in the future" in runguard("store", "purge", "--older-than", "2100-01-01", "--store", store).stderr
    assert records(store) == {"old", "new"}
