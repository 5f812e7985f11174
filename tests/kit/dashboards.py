"""The real command as a process of its own, and what a real browser sees of it."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@dataclass
class Served:
    """A dashboard that runs."""

    process: "subprocess.Popen[str]"
    url: str  # with its token
    store: str

    @property
    def origin(self) -> str:
        return self.url.partition("/?")[0]

    @property
    def port(self) -> int:
        return int(self.origin.rpartition(":")[2])

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-c", "from runguard.cli.main import main; main()", "dashboard", *arguments]


def serve(store: str, *arguments: str) -> Served:
    process = subprocess.Popen(
        command("--store", store, "--no-open", "--json", *(arguments or ("--port", "auto"))),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        assert process.stderr is not None
        raise AssertionError(f"the dashboard did not start: {process.stderr.read()}")
    return Served(process, json.loads(line)["url"], store)


@dataclass
class Seen:
    """A page, and what the browser had to say about it."""

    page: Any
    asked: list[str] = field(default_factory=list)  # every address it asked for
    complaints: list[str] = field(default_factory=list)  # on its console, policy violations among them

    def quiet(self) -> None:
        assert self.complaints == []


def watched(page: Any) -> Seen:
    seen = Seen(page)
    page.set_default_timeout(30_000)
    page.on("request", lambda request: seen.asked.append(request.url))
    page.on(
        "console",
        lambda message: seen.complaints.append(message.text) if message.type in ("error", "warning") else None,
    )
    page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    return seen
