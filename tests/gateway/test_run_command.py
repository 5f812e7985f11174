"""``runguard run``: one program behind a gateway of its own."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import runguard as package
from runguard.cli.main import main
from runguard.gateway.launch import VARIABLES, command_behind, environment_behind, run_program, upstreams_of
from tests.gateway.programs import agent, plain_agent
from tests.kit.anthropic_server import AnthropicServer
from tests.kit.commands import PROGRAM
from tests.kit.gateways import TOOL
from tests.kit.gemini_server import Answer, GeminiServer, call
from tests.kit.openai_server import OpenAIServer
from tests.kit.sse_server import Reply

pytestmark = pytest.mark.timeout(180)  # processes that import much
PATHS = os.pathsep.join([str(Path(package.__file__).parents[1]), str(Path(__file__).parents[2])])
PRICES = '[prices."a-model"]\ninput = 1\noutput = 10\n'


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.toml"
    path.write_text(PRICES)
    return path


def run(*arguments: Any, **environment: str) -> "subprocess.CompletedProcess[str]":
    """The command as a process of its own, in an environment without keys."""
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONPATH": PATHS, **environment}
    command = [*PROGRAM, "run", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, env=env)


@dataclass
class Ran:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run_here(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[..., Ran]]:
    """The command in this process: only the program is one of its own."""
    for name in [name for name in os.environ if name.endswith("_API_KEY")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", PATHS)
    monkeypatch.chdir(tmp_path)  # no policy file of the checkout is found
    log = logging.getLogger("runguard")
    handlers = list(log.handlers)

    def run(*arguments: Any, **environment: str) -> Ran:
        done = CliRunner().invoke(main, ["run", *map(str, arguments)], env=environment)
        out, err = capfd.readouterr()
        return Ran(done.exit_code, out + done.stdout, err + done.stderr)

    yield run
    log.handlers[:] = handlers


def looping(server: Any) -> None:
    server.answer_by(lambda n, _: Reply(text="", call=(TOOL, {"page": n})))


def test_the_demonstration_needs_no_network_and_stops_after_six_calls(run_here: Callable[..., Ran]) -> None:
    ran = run_here("--demo")
    assert ran.returncode == 0
    assert ran.stdout.count(" failed\n") == 6
    assert "; 6 model calls, 6 tool calls, " in ran.stdout
    assert "agent: turn 7: I stopped because a step kept failing in the same way." in ran.stdout
    assert ran.stderr.startswith("runguard: 6 model calls, $0.0015")
    assert (
        "stopped by stall of tool 'parse_document' (6 equal failures, limit 6); 1 call refused, about $" in ran.stderr
    )
    assert ran.stderr.count("\n") == 1


def test_a_python_agent_is_stopped_and_keeps_its_exit_code(
    run_here: Callable[..., Ran], openai_server: OpenAIServer, policy: Path
) -> None:
    looping(openai_server)
    program = [sys.executable, "-c", agent(stream=True, code=3)]
    ran = run_here("--policy", policy, "--", *program, OPENAI_BASE_URL=f"{openai_server.url}/v1")
    assert (ran.returncode, ran.stdout) == (3, "7 I stopped because a step kept failing in the same way.\n")
    assert len(openai_server.billed) == 6


def test_every_known_client_is_pointed_at_the_gateway(
    run_here: Callable[..., Ran], anthropic_server: AnthropicServer, gemini_server: GeminiServer, policy: Path
) -> None:
    looping(anthropic_server)
    gemini_server.answer_by(lambda n, _: Answer([call(TOOL, page=n)]))
    one = run_here(
        *("--policy", policy, "--", sys.executable, "-c", agent("anthropic_loop", "ANTHROPIC_BASE_URL")),
        ANTHROPIC_BASE_URL=anthropic_server.url,
    )
    two = run_here(
        *("--policy", policy, "--upstream", f"gemini={gemini_server.url}", "--"),
        *(sys.executable, "-c", agent("gemini_loop", "GOOGLE_GEMINI_BASE_URL")),
    )
    for ran in (one, two):
        assert ran.stdout == "7 I stopped because a step kept failing in the same way.\n", ran.stderr
    assert len(anthropic_server.billed) == len(gemini_server.billed) == 6


def test_the_budget_is_that_of_the_whole_program(
    run_here: Callable[..., Ran], openai_server: OpenAIServer, policy: Path
) -> None:
    """Ten conversations, each a run of its own."""
    program = [sys.executable, "-c", plain_agent(conversations=10)]
    address = f"{openai_server.url}/v1"
    ran = run_here("--policy", policy, "--max-calls", 4, "--json", "--", *program, OPENAI_BASE_URL=address)
    assert ran.stdout.splitlines() == ["fine"] * 4 + ["I stopped because this request reached a safety limit."] * 6
    found = json.loads(ran.stderr)
    assert (found["exit_code"], found["model_calls"], found["refused_calls"]) == (0, 4, 6)
    assert found["usd"] == "0.014"
    assert found["saved_usd"] == "0.021"
    assert len(openai_server.billed) == 4
    assert found["stops"][0]["user_id"]
    assert found["stops"][0]["session_id"].startswith("run-")


def test_a_model_without_a_price_is_named_and_not_called_free(
    run_here: Callable[..., Ran], openai_server: OpenAIServer
) -> None:
    looping(openai_server)
    program = [sys.executable, "-c", plain_agent()]
    address = f"{openai_server.url}/v1"
    refused = run_here("--max-usd", 1, "--", *program, OPENAI_BASE_URL=address)
    assert not openai_server.billed
    assert "stopped by unpriced ('a-model' has no price: limit tokens or calls, or add" in refused.stderr
    ran = run_here("--max-calls", 2, "--", *program, OPENAI_BASE_URL=address)
    assert ran.stderr.startswith("runguard: 2 model calls, $0 and 2 without a price; stopped by budget (3 calls")
    assert "saved" not in ran.stderr


def test_an_answer_that_the_provider_breaks_off_prints_nothing_on_the_programs_screen(
    openai_server: OpenAIServer, policy: Path
) -> None:
    openai_server.script(Reply(text="one two three", cut_after=2))
    source = """
import os, httpx
asked = {"model": "a-model", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
key = {"authorization": "Bearer a-dummy-key"}
try:
    httpx.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json=asked, headers=key)
except httpx.RemoteProtocolError:
    print("broken")
"""
    program = [sys.executable, "-c", source]
    ran = run("--policy", policy, "--max-usd", 1, "--", *program, OPENAI_BASE_URL=f"{openai_server.url}/v1")
    assert ran.stdout == "broken\n"
    assert re.fullmatch(r"runguard: 1 model call, \$0\.0\d+\n", ran.stderr), ran.stderr


def test_a_program_that_goes_around_the_gateway_is_named(run_here: Callable[..., Ran]) -> None:
    ran = run_here("--", sys.executable, "-c", "print('hi')")
    assert (ran.returncode, ran.stdout) == (0, "hi\n")
    assert ran.stderr.startswith("runguard: no request seen, so nothing was guarded.")
    assert "OPENAI_BASE_URL, ANTHROPIC_BASE_URL, GOOGLE_GEMINI_BASE_URL" in ran.stderr


def test_the_exit_code_says_what_a_shell_would_say(run_here: Callable[..., Ran], tmp_path: Path) -> None:
    plain = tmp_path / "plain.txt"
    plain.write_text("no program")
    missing = run_here("--", "no-such-program-here")
    assert missing.returncode == 127
    assert "no such program" in missing.stderr
    assert run_here("--", plain).returncode == 126
    killed = run_here("--", sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.returncode == 128 + signal.SIGKILL
    assert run_here("--upstream", "cohere=http://127.0.0.1:1", "--", "true").returncode == 2
    refused = run_here("--max-usd", "-1", "--", "true")
    assert refused.returncode == 2
    assert "--max-usd -1: must be greater than 0" in refused.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_the_program_which_says_how_it_ends(number: signal.Signals) -> None:
    source = f"""
import signal, sys, time
signal.signal({int(number)}, lambda *_: sys.exit(7))
print("ready", flush=True)
time.sleep(30)
"""
    paths = str(Path(package.__file__).parents[1])
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": paths}
    command = [*PROGRAM, "run", "--", sys.executable, "-c", source]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    ) as ran:
        assert ran.stdout is not None
        assert ran.stdout.readline() == b"ready\n"
        ran.send_signal(number)
        _, said = ran.communicate(timeout=20)
    assert ran.returncode == 7
    assert said.startswith(b"runguard: no request seen")


def test_addresses_come_from_the_environment_and_proxies_are_left_out() -> None:
    before = {"OPENAI_BASE_URL": "http://a/v1", "NO_PROXY": "x", "ANTHROPIC_API_BASE": "http://b"}
    assert upstreams_of(before, {"gemini": "http://c"}) == {
        "openai": "http://a/v1",
        "anthropic": "http://b",
        "gemini": "http://c",
    }
    changed = environment_behind(1234, "secret", before)
    assert changed["NO_PROXY"] == "x,127.0.0.1,localhost"
    assert changed["no_proxy"] == "127.0.0.1,localhost"
    for names, path in VARIABLES.values():
        assert {changed[name] for name in names} == {f"http://127.0.0.1:1234/token/secret{path}"}


def test_a_program_that_reads_no_variable_gets_the_address_as_an_argument() -> None:
    environment = environment_behind(1234, "secret", {})
    address = 'openai_base_url="http://127.0.0.1:1234/token/secret/openai/v1"'
    changed = command_behind(["/usr/bin/codex", "exec", "fix {it}"], environment)
    assert changed[:3] == ["/usr/bin/codex", "-c", address]
    assert changed[-2:] == ["exec", "fix {it}"]
    own: list[list[str]] = [["codex", "-c", "openai_base_url=x"], ["claude", "-p", "codex"], ["codex-like"]]
    for command in own:
        assert command_behind(command, environment) == command


def test_a_signal_that_comes_before_the_program_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    started = subprocess.Popen

    def slow(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return started(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", slow)
    code, _ = run_program([sys.executable, "-c", "import time; time.sleep(20)"], dict(os.environ))
    assert code == 128 + signal.SIGTERM


def test_the_dashboard_is_served_while_the_program_runs(run_here: Callable[..., Ran]) -> None:
    source = """
import sys, time, urllib.request
time.sleep(0.1)
"""
    ran = run_here("--dashboard", "--", sys.executable, "-c", source)
    assert ran.returncode == 0
    assert ran.stderr.startswith("runguard: dashboard at http://127.0.0.1:")


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    blocker = tmp_path / "sitecustomize.py"
    blocker.write_text("import sys\nsys.modules['httpx'] = None\n")
    paths = os.pathsep.join([str(tmp_path), str(Path(package.__file__).parents[1])])
    ran = run("--", "true", PYTHONPATH=paths)
    assert ran.returncode == 2
    assert ran.stderr == "the gateway needs httpx, which is not installed: pip install 'runguard-agents[gateway]'\n"
