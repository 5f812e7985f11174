"""``stop``, ``resume`` and ``extend`` over every kind of store, felt by real ADK runs of another process."""

import asyncio
import getpass
import json
import os
import subprocess
import threading
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from runguard import Budget
from runguard.adk import RunGuardPlugin
from runguard.testing import assert_stopped, run
from runguard.view.story import hint
from tests.kit.agents import scripted
from tests.kit.commands import guarded, looping, process, runguard, told
from tests.kit.examples import each_row
from tests.kit.stores import Place
from tests.kit.waiting import until_async


def elsewhere(*arguments: str) -> Any:
    """By another process where a file is shared; a server knows connections alone, and a second one is made here as
    well.
    """
    if not arguments[-1].startswith("sqlite:"):
        return told(*arguments)
    ran = process(*arguments, "--json")
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


async def test_a_stop_ends_a_run_that_is_under_way_and_resume_lets_it_run_again(place: Place) -> None:
    filled = place.url
    plugin, agent = guarded(filled), looping(latency_s=60)
    task = asyncio.create_task(run(agent, plugins=[plugin], app_name="docs", user_id="dora"))
    await until_async(lambda: scripted(agent).calls)
    await asyncio.to_thread(
        elsewhere, "stop", "user:docs/dora", "--reason", "a bad day", "--actor", "ops", "--store", filled
    )
    recording = await asyncio.wait_for(task, 30)
    trip = assert_stopped(recording, "kill_switch")
    assert "stopped by ops: a bad day" in trip.message
    listed = runguard("trips", "--store", filled, "--rule", "kill_switch").stdout
    assert "user:docs/dora was stopped by ops: a bad day" in " ".join(listed.split())
    status = told("status", "--store", filled, code=1)
    assert [(stop["scope"], stop["actor"], stop["reason"]) for stop in status["stops"]] == [
        ("user:docs/dora", "ops", "a bad day")
    ]

    refused = looping()
    assert_stopped(
        await run(refused, plugins=[plugin], app_name="docs", user_id="dora", session_id="s2"), "kill_switch"
    )
    assert refused.model.calls == 0  # type: ignore[union-attr]
    resumed = runguard("resume", "user:docs/dora", "--store", filled)
    assert (resumed.exit_code, resumed.stdout) == (0, "resumed: user:docs/dora, stopped by ops: a bad day\n")
    going = looping(turns=2)
    recording = await run(going, plugins=[plugin], app_name="docs", user_id="dora", session_id="s3")
    assert recording.texts == ["done"]


def test_a_stop_names_whoever_throws_it_and_what_it_replaces(file_store: str) -> None:
    assert told("stop", "all", "--reason", "x", "--store", file_store)["actor"] == getpass.getuser()
    again = told("stop", "all", "--reason", "y", "--actor", "ops", "--store", file_store)
    assert again["notes"] == [f"it was already stopped by {getpass.getuser()}: x"]
    ran = runguard("stop", "user:docs/alcie", "--reason", "typo", "--store", file_store)
    assert "the store has no budget and no active run of user:docs/alcie; did you mean 'user:docs/alice'" in ran.stdout
    assert ran.stdout.endswith(f"lift it with: runguard resume user:docs/alcie --store {file_store}\n")
    for no_reason in ([], ["--reason", ""], ["--reason", " "]):
        ran = runguard("stop", "app:docs", *no_reason, "--actor", "ops", "--store", file_store)
        assert (ran.exit_code, ran.stdout.splitlines()[0]) == (0, "stopped: app:docs, by ops")
    refused = runguard("stop", "all", "--reason", "x", "--actor", " ", "--store", file_store)
    assert (refused.exit_code, refused.stderr) == (2, "--actor: must not be empty\n")


def test_names_on_the_command_line_are_echoed_as_text(file_store: str) -> None:
    scope = "user:docs/x\x1b[2J'; touch PWNED #\u202e"
    ran = runguard("stop", scope, "--reason", "one\nstopped: all, by root", "--actor", "ops", "--store", file_store)
    lines = ran.stdout.splitlines()
    assert lines[0] == "stopped: user:docs/x\\x1b[2J'; touch PWNED #\\u202e, by ops: one\\nstopped: all, by root"
    hint = lines[-1].partition("lift it with: runguard ")[2]
    read_back = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {hint}"],
        capture_output=True,
        text=True,
        check=True,
        env={"LC_ALL": "C.UTF-8", **os.environ},
    )
    assert read_back.stdout.split("\0")[:-1] == ["resume", scope, "--store", file_store], (
        "one word for the shell, and the same"
    )
    assert runguard("resume", scope, "--store", file_store).stdout.startswith("resumed: user:docs/x\\x1b[2J'; touch")


@each_row(
    ("store", "shown"),
    [
        ("redis://cache:6379/0", " --store redis://cache:6379/0"),
        ("redis://:hunter2@cache:6379/0", " --store URL"),
        ("postgresql://host/db?password=hunter2", " --store URL"),
        ("sqlite:///a b.db", " --store 'sqlite:///a b.db'"),
        (None, ""),
    ],
)
def test_a_hint_names_the_store_without_passwords(store: str | None, shown: str) -> None:
    assert hint("resume", "all", store) == f"runguard resume all{shown}"


def test_resume_of_what_is_not_stopped(file_store: str) -> None:
    runguard("stop", "app:docs", "--reason", "x", "--actor", "ops", "--store", file_store)
    ran = runguard("resume", "user:docs/alice", "--store", file_store)
    assert ran.exit_code == 1
    assert ran.stderr == "user:docs/alice is not stopped\n"
    assert ran.stdout == "  still stopped: app:docs, by ops: x\n"
    assert told("resume", "user:docs/alice", "--store", file_store, code=1)["stop"] is None
    taken = told("resume", "app:docs", "--store", file_store)
    assert (taken["ok"], taken["stop"]["reason"], taken["stops"]) == (True, "x", [])


@pytest.mark.parametrize(
    ("command", "words"),
    [(["stop", "--reason", "x"], "cannot be stopped"), (["resume"], "cannot be resumed")],
    ids=["stop", "resume"],
)
def test_a_scope_that_names_nobody_is_refused_before_anything_is_asked(command: list[str], words: str) -> None:
    ran = runguard(*command, "user:alice", "--store", "redis://127.0.0.1:1/0")
    assert ran.exit_code == 2
    assert (
        ran.stderr == f"'user:alice' {words}; give one of all, app:…, user:app/user, session:app/user/session, run:…\n"
    )


async def test_an_extension_lets_the_next_run_of_another_process_go_on(place: Place) -> None:
    filled = place.url
    plugin = RunGuardPlugin(
        store=filled,
        store_timeout=10,
        budgets=[Budget(calls=2, per="session"), Budget(usd=1, per="session", window="1d")],
    )
    who: dict[str, Any] = {"app_name": "docs", "user_id": "dora", "session_id": "long"}
    assert assert_stopped(await run(looping(), plugins=[plugin], **who), "budget").scope_id == "session:docs/dora/long"
    plugin.flush(20)
    answer = await asyncio.to_thread(
        elsewhere, "extend", "session:docs/dora/long", "--calls", "5", "--usd", "2.50", "--store", filled
    )
    rows = {(row["unit"], row["window"]): row for row in answer["budgets"]}
    assert rows["calls", None]["granted"] == 5
    assert Decimal(rows["usd", "1d"]["granted"]) == Decimal("2.5")
    after = looping(turns=3)
    assert (await run(after, plugins=[plugin], **who)).texts == ["done"]
    assert after.model.calls == 3  # type: ignore[union-attr]


def test_extending_in_words(file_store: str) -> None:
    ran = runguard("extend", "user:docs/alice", "--usd", "5", "--store", file_store)
    assert ran.exit_code == 0
    assert ran.stdout.startswith("extended: user:docs/alice\n")
    assert "$105.00" in ran.stdout
    assert "$5.00 extension" in ran.stdout


def test_a_scope_without_spend_is_extended_by_the_policy_file(file_store: str) -> None:
    Path("runguard.toml").write_text(f'store = "{file_store}"\n[[budgets]]\nusd = 5\nper = "user"\nwindow = "1d"\n')
    answer = told("extend", "user:docs/alcie", "--usd", "2")
    (row,) = answer["budgets"]
    assert (row["limit"], row["granted"], row["spent"]) == ("5", "2", "0")
    (note,) = answer["notes"]
    assert note.endswith("no active run of user:docs/alcie; did you mean 'user:docs/alice'?"), "it may be mistyped"
    assert told("extend", "user:docs/alcie", "--usd", "2")["notes"] == [], "now it is known"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["user:docs/alcie", "--usd", "5"],
            "user:docs/alcie: no budget of that scope; did you mean 'user:docs/alice'?",
        ),
        (
            ["user:docs/alice", "--tokens", "5"],
            "user:docs/alice: its budgets limit calls and usd; pass --calls or --usd",
        ),
        (
            ["nonsense", "--usd", "5"],
            "nonsense: no budget of that scope; known: app:docs, user:docs/alice, user:docs/bob",
        ),
        (["user:docs/alice"], "nothing to add: pass --usd, --tokens or --calls"),
        (["user:docs/alice", "--usd", "much"], "--usd much: must be a number of dollars greater than 0, such as 2.50"),
        (["user:docs/alice", "--usd", "-5"], "--usd -5: must be greater than 0"),
        (
            ["user:docs/alice", "--usd", "1e30"],
            "--usd = '1e30': the largest accepted value is 1,000,000,000 dollars; leave it out for no limit",
        ),
        (["user:docs/alice", "--usd", "0"], "--usd 0: must be a number of dollars greater than 0, such as 2.50"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_extensions_that_cannot_be_meant(file_store: str, arguments: list[str], message: str) -> None:
    ran = runguard("extend", *arguments, "--store", file_store)
    assert (ran.exit_code, ran.stdout, ran.stderr) == (2, "", message + "\n")
    assert told("extend", *arguments, "--store", file_store, code=2) == {"ok": False, "error": message}


def test_the_kill_switch_works_beside_a_broken_policy(file_store: str) -> None:
    """A secret that is set only where the service runs must not keep anybody from stopping it."""
    Path("runguard.toml").write_text('[alerts]\nslack_webhook = "env:NOT_SET_HERE"\n')
    ran = runguard("stop", "all", "--reason", "x", "--store", file_store)
    assert ran.exit_code == 0
    assert ran.stderr.startswith("note: ignoring the local policy; its alerts will not be sent: the policy (")
    assert "NOT_SET_HERE" in ran.stderr
    assert runguard("stop", "all", "--reason", "x").exit_code == 2, "without --store nobody knows which store is meant"


def test_alerts_of_the_policy_are_told(file_store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real receiver on loopback hears of the stop before the command ends."""
    heard: list[Any] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/"
        Path("runguard.toml").write_text(f'store = "{file_store}"\n[alerts]\nwebhook = "{url}"\nallow_private = true\n')
        assert told("stop", "user:docs/alice", "--reason", "a bad day", "--actor", "ops")["notes"] == []
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert "ops stopped user:docs/alice: a bad day" in json.dumps(heard)


def test_a_subcommand_takes_the_store_of_its_command(file_store: str) -> None:
    ran = runguard("store", "--store", file_store, "--json", "repair")
    assert json.loads(ran.stdout)["store"] == told("store", "repair", "--store", file_store)["store"]
    last = runguard("trips", "--store", file_store, "--json", "show", "last")
    assert json.loads(last.stdout) == told("trips", "show", "last", "--store", file_store)
