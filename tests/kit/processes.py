"""Worker processes for tests: each is asked over a socket to make calls under a guard (``shared_worker.py``)."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Process:
    """A worker in a process of its own."""

    def __init__(self, door: str) -> None:
        self._line = socket.socket(socket.AF_UNIX)
        self._line.settimeout(40)
        self._line.connect(door)
        self._answers = self._line.makefile("rb")
        self.pid = int(self._answers.readline())

    def tell(self, what: str, **facts: Any) -> None:
        self._line.sendall(json.dumps({"do": what, **facts}).encode() + b"\n")

    def hear(self) -> Any:
        answer = json.loads(self._answers.readline())
        assert "raised" not in answer, answer["raised"]
        return answer["is"]

    def do(self, what: str, **facts: Any) -> Any:
        self.tell(what, **facts)
        return self.hear()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._answers.close()
        self._line.close()


@contextlib.contextmanager
def mother_process(door: str) -> Iterator[None]:
    """The process that forks workers. They connect at the socket ``door``."""
    command = [sys.executable, "-m", "tests.kit.shared_worker", door]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield
        finally:
            process.kill()
