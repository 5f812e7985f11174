"""Commands of the command line, and stores that real ADK runs have filled."""

import asyncio
import json
import os
import pty
import subprocess
import sys
import threading
from typing import Any

from click.testing import CliRunner, Result
from google.adk.agents import LlmAgent

from runguard import Budget
from runguard.adk import RunGuardPlugin
from runguard.cli.main import main
from runguard.testing import ScriptedModel, call, run, text

PROGRAM = [sys.executable, "-c", "from runguard.cli.main import main; main(prog_name='runguard')"]


def runguard(*arguments: Any, **environment: str) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], env=environment)


def told(*arguments: Any, code: int = 0, beside: str = "") -> Any:
    """What a command says with --json; ``beside``: on stderr."""
    ran = runguard(*arguments, "--json")
    assert ran.exit_code == code, ran.output
    assert ran.stderr == beside
    return json.loads(ran.stdout)


def process(*arguments: Any, **options: Any) -> "subprocess.CompletedProcess[str]":
    """The command as a process of its own."""
    return subprocess.run(
        [*PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=50, check=False, **options
    )


def on_a_terminal(*arguments: Any, **environment: str) -> str:
    """What the real process writes to a terminal, of 80 columns unless COLUMNS says otherwise."""
    ours, theirs = pty.openpty()
    pieces: list[bytes] = []

    def read() -> None:
        while True:
            try:
                piece = os.read(ours, 65_536)
            except OSError:  # its other end is closed
                return
            if not piece:
                return
            pieces.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    kept = {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS")
    }
    subprocess.run(
        [*PROGRAM, *map(str, arguments)],
        stdout=theirs,
        timeout=50,
        check=False,
        env={**kept, "TERM": "xterm-256color", "COLUMNS": "80", **environment},
    )
    os.close(theirs)
    reader.join(10)
    os.close(ours)
    return b"".join(pieces).decode()


def look(at: str) -> dict[str, int]:
    """Always the same."""
    return {"seen": 1}


def looping(turns: int = 12, model: str = "gemini-2.5-flash", **options: Any) -> LlmAgent:
    """An agent that makes the same call again and again."""
    script = ScriptedModel(lambda n, _: call("look", at="it") if n < turns else text("done"), model=model, **options)
    return LlmAgent(name="extractor", model=script, tools=[look])


def guarded(store: str, **policy: Any) -> RunGuardPlugin:
    """A policy that does not change with the defaults; its budgets are wide enough for reservations that a busy store
    settles late.
    """
    budgets = [
        Budget(usd=100, per="user", window="1d"),
        Budget(tokens=1_000_000, per="app", window="1h"),
        Budget(calls=500, per="user"),
    ]
    return RunGuardPlugin(store=store, store_timeout=10, budgets=budgets, rules={"repetition": {"stop": 4}}, **policy)


async def fill(store: str) -> None:
    """alice was stopped, bob would have been, carol's model has no price."""
    enforcing, watching = guarded(store), guarded(store, mode="shadow")
    await run(looping(), plugins=[enforcing], app_name="docs", user_id="alice", session_id="s1")
    await run(looping(), plugins=[watching], app_name="docs", user_id="bob", session_id="s2")
    await run(looping(model="acme-1"), plugins=[enforcing], app_name="docs", user_id="carol", session_id="s3")
    assert enforcing.flush(20)
    assert watching.flush(20)


def fill_once(store: str) -> None:
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("RUNGUARD_")}
    asyncio.run(fill(store))
    os.environ.update(kept)
