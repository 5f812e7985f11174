"""The guard under ADK's own commands: ``adk run``, ``adk api_server``, ``adk web``, from agent.py and from
--extra_plugins.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

AGENT = '''
from google.adk.agents import LlmAgent
from runguard.testing import ScriptedModel, call
{install}

def step(q: int) -> dict:
    """One step."""
    return {{"step": q}}

root_agent = LlmAgent(name="walker", model=ScriptedModel(lambda n, _: call("step", q=n)), tools=[step])
'''
INSTALL = "import runguard\nrunguard.install(max_model_calls=4)"
ADK = [sys.executable, "-m", "google.adk.cli"]


def agents_folder(folder: Path, install: str = "") -> Path:
    (folder / "walker").mkdir()
    (folder / "walker" / "__init__.py").write_text("from . import agent\n")
    (folder / "walker" / "agent.py").write_text(AGENT.format(install=install))
    return folder


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONWARNINGS": "ignore", **extra}


@contextmanager
def server(command: str, folder: Path, *options: str, **extra: str) -> Iterator[str]:
    """An ADK server on a free loopback port, ended afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [*ADK, command, "--port", str(port), "--session_service_uri", "memory://", *options, str(folder)]
    process = subprocess.Popen(
        arguments, cwd=folder, env=environment(**extra), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(300):
            try:
                with urllib.request.urlopen(f"{url}/list-apps", timeout=1):
                    break
            except (urllib.error.URLError, OSError):
                if process.poll() is not None:
                    assert process.stdout is not None
                    pytest.fail(f"the server ended: {process.stdout.read().decode()[-2000:]}")
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def post(url: str, data: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(data).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.loads(answer.read())


def ask(url: str) -> list[dict[str, Any]]:
    post(f"{url}/apps/walker/users/u/sessions/s", {})
    message = {"role": "user", "parts": [{"text": "go"}]}
    events: list[dict[str, Any]] = post(
        f"{url}/run", {"appName": "walker", "userId": "u", "sessionId": "s", "newMessage": message}
    )
    return events


def trip_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    stop = events[-1]
    assert stop["errorCode"] == "RUNGUARD_STOP"
    trip: dict[str, Any] = stop["customMetadata"]["runguard"]
    return trip


@pytest.mark.parametrize("command", ["api_server", "web"])
def test_install_in_agent_py_guards_the_server(command: str, tmp_path: Path) -> None:
    with server(command, agents_folder(tmp_path, INSTALL)) as url:
        trip = trip_of(ask(url))
    assert (trip["rule"], trip["model_calls"], trip["app"], trip["user_id"]) == ("model_calls", 4, "walker", "u")


def test_extra_plugins_with_a_bad_policy_stops_every_run(tmp_path: Path) -> None:
    """ADK only logs a plugin that cannot be built and would serve unguarded."""
    (tmp_path / "runguard.toml").write_text("max_model_cals = 3\n")
    with server("api_server", agents_folder(tmp_path), "--extra_plugins", "runguard.adk.RunGuardPlugin") as url:
        trip = trip_of(ask(url))
    assert (trip["rule"], trip["model_calls"]) == ("policy_error", 0)
    assert "did you mean 'max_model_calls'?" in trip["message"]
