"""``status`` and ``trips`` over every kind of store, filled by real ADK runs."""

import asyncio
import sqlite3
from typing import Any

import pytest

from runguard import Budget
from runguard.adk import RunGuardPlugin
from runguard.ledger.sqlite import SqliteStore
from runguard.testing import run
from tests.kit.commands import guarded, looping, runguard, told
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
