"""Servers that load the app first and fork their workers then: a plugin made before the fork guards in every worker."""

import subprocess
import sys

SCRIPT = """
import asyncio, os
from google.adk.agents import LlmAgent
from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, assert_stopped, call, run

heard = []
plugin = RunGuardPlugin(max_model_calls=2, on_trip=heard.append)

def look(n: int) -> dict:
    return {"n": n}

def work() -> None:
    agent = LlmAgent(name="a", model=ScriptedModel(lambda n, _: call("look", n=n)), tools=[look])
    assert_stopped(asyncio.run(run(agent, "go", plugins=[plugin])), "model_calls")
    assert plugin.flush(20) and len(heard) == 1, heard

workers = []
for _ in range(2):
    pid = os.fork()  # at once: nothing of the plugin may still be under way
    if pid == 0:
        work()
        os._exit(0)
    workers.append(pid)
work()
assert [os.waitpid(pid, 0)[1] for pid in workers] == [0, 0]
"""


def test_a_plugin_made_before_a_fork_guards_in_every_worker() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
