"""Commands of a README, started as they are written."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE_S = 50


def command(start: str) -> list[str]:
    """The one command of the README that starts so, without the variables before it."""
    commands = re.findall(r"```bash\n(.*?)\n```", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (found,) = [line for line in commands if line.startswith(start)]
    return [word for word in shlex.split(found) if not re.fullmatch(r"[A-Z_]+=.*", word)]


def environment(**extra: str) -> dict[str, str]:
    """The commands of this environment first, no key of any provider, no policy of whoever runs the tests."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.endswith("_API_KEY") and not name.startswith("RUNGUARD_")
    }
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONWARNINGS": "ignore",
        **extra,
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@dataclass(frozen=True)
class Server:
    """A command, its port, and the path at which it answers once it is up."""

    arguments: list[str]
    port: int
    path: str
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def answers_at(self) -> str:
        return f"{self.url}{self.path}"


@contextmanager
def serving(folder: Path, *servers: Server) -> Iterator[None]:
    """Server processes that all answer, ended afterwards."""
    with ExitStack() as running:
        waiting = [(server, running.enter_context(_process(folder, server))) for server in servers]
        end = time.monotonic() + PATIENCE_S
        for server, (process, log) in waiting:
            while not _answers(server.answers_at):
                assert process.poll() is None, f"the server ended: {log.read_text()[-2000:]}"
                assert time.monotonic() < end, f"the server does not answer: {log.read_text()[-2000:]}"
                time.sleep(0.1)
        yield


@contextmanager
def _process(folder: Path, server: Server) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    log = folder / f"{server.port}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            server.arguments, cwd=folder, env=environment(**server.variables), stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield process, log
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        return ask(url)[0] < 500
    except (urllib.error.URLError, OSError):
        return False


def ask(url: str, data: Any = None) -> tuple[int, Any, Any]:
    """Status, JSON and headers of the answer; a POST where there is data."""
    body = None if data is None else json.dumps(data).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, _json(answer.read()), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _json(error.read()), error.headers


def _json(body: bytes) -> Any:
    return json.loads(body) if body.startswith((b"{", b"[")) else body.decode()
