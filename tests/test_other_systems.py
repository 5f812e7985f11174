"""Systems without ``flock`` and ``fork``, such as Windows. Elsewhere the tests hide both.

The tests use nothing that only some systems have, so that they run everywhere.
"""

import subprocess
import sys
from pathlib import Path

import pytest

BARE = """
import os, sys
sys.modules["fcntl"] = None
for name in ("fork", "forkpty", "register_at_fork", "uname"):
    if hasattr(os, name):
        delattr(os, name)
"""
SPEND = f"""{BARE}
from runguard import Budget, RunStoppedError, guard, run
call = guard(lambda: {{"usd": 0.01}}, budget=Budget(usd="0.50", per="app"), store=sys.argv[1])
made = 0
with run(app="shop"):
    for _ in range(40):
        try:
            call()
            made += 1
        except RunStoppedError:
            break
assert call.flush(20)
print(made)
"""
THREADS = f"""{BARE}
import threading
from runguard import Budget, RunStoppedError, guard, run
from runguard.ledger import sqlite
assert sqlite.fcntl is None
assert sqlite.writer_queue(None, 1.0) is None
call = guard(lambda: {{"usd": 0.01}}, budget=Budget(usd="0.50", per="app"), store=sys.argv[1])
made = []
def spend():
    with run(app="shop"):
        for _ in range(20):
            try:
                call()
                made.append(1)
            except RunStoppedError:
                break
threads = [threading.Thread(target=spend) for _ in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert call.flush(20)
(status,) = call.budgets("app:shop")
print(len(made), status.spent, status.reserved)
"""
RUN = f"""{BARE}
import asyncio
from google.adk.agents import LlmAgent
from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, run
heard = []
def look() -> dict[str, int]: return {{"seen": 1}}
plugin = RunGuardPlugin(max_model_calls=3, store=sys.argv[1], alerts=heard.append)
agent = LlmAgent(name="a", model=ScriptedModel(lambda n, _: call("look")), tools=[look])
played = asyncio.run(run(agent, plugins=[plugin]))
assert_stopped(played, "model_calls")
assert_calls_answered(played.session)
assert plugin.flush(20)
print(len(plugin.trips), len(heard))
"""


def python(script: str, store: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, store], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def said(process: "subprocess.Popen[str]") -> list[str]:
    out, errors = process.communicate(timeout=50)
    assert process.returncode == 0, errors
    return out.split()


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{(tmp_path / 'guard.db').as_posix()}"


def test_processes_without_file_locks_share_a_budget_to_the_cent(store: str) -> None:
    workers = [python(SPEND, store) for _ in range(3)]
    assert sum(int(said(worker)[0]) for worker in workers) == 50


def test_threads_without_file_locks_share_a_budget_to_the_cent(store: str) -> None:
    made, spent, reserved = said(python(THREADS, store))
    assert (int(made), float(spent), float(reserved)) == (50, 0.5, 0)


def test_an_agent_is_stopped_and_its_alert_is_sent_without_fork(store: str) -> None:
    assert said(python(RUN, store)) == ["1", "1"]
