"""Programs that nobody can edit, behind ``runguard run``, against scripted models: JavaScript agents and coding agents.

They are skipped where the programs are missing. ``RUNGUARD_NODE_MODULES`` names a folder in which
``npm install`` has been run with ``tests/gateway/package.json``, which pins the programs.
"""

import json
import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import runguard as package
from tests.kit.anthropic_server import AnthropicServer
from tests.kit.commands import PROGRAM
from tests.kit.gateways import TOOL
from tests.kit.gemini_server import Answer, GeminiServer, call
from tests.kit.openai_server import OpenAIServer
from tests.kit.sse_server import Asked, Reply

NODE, MODULES = shutil.which("node"), os.environ.get("RUNGUARD_NODE_MODULES", "")
STOPPED = "I stopped because a step kept failing in the same way."


def run(*arguments: Any, cwd: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    source = str(Path(package.__file__).parents[1])
    env = {"PATH": os.environ["PATH"], "HOME": str(cwd), "PYTHONPATH": source, **environment}
    command = [*PROGRAM, "run", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env=env, cwd=cwd, stdin=subprocess.DEVNULL
    )


@pytest.mark.skipif(not NODE or not MODULES, reason="needs node, and RUNGUARD_NODE_MODULES with the clients")
@pytest.mark.parametrize("client", ["openai", "anthropic", "gemini"])
@pytest.mark.parametrize("mode", ["whole", "stream"])
def test_a_javascript_agent_is_stopped(
    client: str,
    mode: str,
    openai_server: OpenAIServer,
    anthropic_server: AnthropicServer,
    gemini_server: GeminiServer,
    tmp_path: Path,
) -> None:
    openai_server.answer_by(lambda n, _: Reply(text="", call=(TOOL, {"page": n})))
    anthropic_server.answer_by(lambda n, _: Reply(text="", call=(TOOL, {"page": n})))
    gemini_server.answer_by(lambda n, _: Answer([call(TOOL, page=n)]))
    servers: dict[str, Any] = {"openai": openai_server, "anthropic": anthropic_server, "gemini": gemini_server}
    agent = Path(__file__).parent / "agent.mjs"
    ran = run(
        *("--", NODE, agent, client, mode, MODULES),
        cwd=tmp_path,
        OPENAI_BASE_URL=f"{openai_server.url}/v1",
        ANTHROPIC_BASE_URL=anthropic_server.url,
        GOOGLE_GEMINI_BASE_URL=gemini_server.url,
    )
    assert ran.stdout == f"7 {STOPPED}\n", ran.stderr
    assert len(servers[client].billed) == 6


def claude() -> str:
    """Claude Code, from npm or from the package of its SDK for Python; "" where it is not installed."""
    found = Path(MODULES) / "node_modules" / ".bin" / "claude"
    if MODULES and found.exists():
        return str(found)
    sdk = find_spec("claude_agent_sdk")
    bundled = Path(sdk.origin).parent / "_bundled" / "claude" if sdk is not None and sdk.origin else None
    return str(bundled) if bundled is not None and bundled.exists() else shutil.which("claude") or ""


@pytest.mark.skipif(not claude(), reason="needs Claude Code, from npm or from claude-agent-sdk")
@pytest.mark.timeout(120)
def test_claude_code_ends_with_success_after_six_calls(anthropic_server: AnthropicServer, tmp_path: Path) -> None:
    def script(n: int, request: Asked) -> Reply:
        if not any(tool.get("name") == "Bash" for tool in request.body.get("tools") or ()):
            return Reply(text="a title")
        failing = f"""echo '{{"status": "partial_parse_error", "data": null}}' # attempt {n}"""
        return Reply(text="", call=("Bash", {"command": failing, "description": "parse"}))

    anthropic_server.answer_by(script)
    ran = run(
        *("--json", "--", claude(), "-p", "Parse the file.", "--output-format", "json", "--allowedTools", "Bash"),
        cwd=tmp_path,
        ANTHROPIC_BASE_URL=anthropic_server.url,
        ANTHROPIC_API_KEY="a-dummy-key",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        IS_SANDBOX="1",
    )
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert (result["subtype"], result["is_error"]) == ("success", False)
    assert result["result"].startswith(STOPPED)
    with_tools = [one for one in anthropic_server.requests if one.body.get("tools")]
    assert len(with_tools) == 6
    found = json.loads(ran.stderr)
    assert [stop["rule"] for stop in found["stops"]] == ["stall"]


CODEX = Path(MODULES) / "node_modules" / ".bin" / "codex"


@pytest.mark.skipif(not MODULES or not CODEX.exists(), reason="needs RUNGUARD_NODE_MODULES with Codex")
@pytest.mark.timeout(120)
def test_codex_ends_with_the_stop_after_six_calls(openai_server: OpenAIServer, tmp_path: Path) -> None:
    """It reads no variable: ``runguard run`` tells it the address with an argument."""

    def script(n: int, _: Asked) -> Reply:
        failing = f"""echo '{{"status": "partial_parse_error", "data": null}}' # attempt {n}"""
        return Reply(text="", call=("exec_command", {"cmd": failing}))

    openai_server.answer_by(script)
    ran = run(
        *("--json", "--", CODEX, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        "Parse the file.",
        cwd=tmp_path,
        OPENAI_BASE_URL=f"{openai_server.url}/v1",
        CODEX_API_KEY="a-dummy-key",
        CODEX_HOME=str(tmp_path),
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(STOPPED)
    assert len(openai_server.billed) == 6
    assert '"rule": "stall"' in ran.stderr
