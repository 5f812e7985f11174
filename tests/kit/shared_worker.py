"""Worker processes for the tests of shared accounts. One mother imports ADK once and forks a fresh worker for every
connection to her socket.

Each line on a connection is a command, each answer a line: ``{"do": "open", "url": …}``, ``{"do": "run", …}``, ``{"do":
"stop", …}`` and so on.
"""

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg  # noqa: F401 - what takes long to import is there before the first fork
import redis  # noqa: F401
from google.adk.agents import LlmAgent
from google.adk.sessions import InMemorySessionService

from runguard import Budget, Threshold
from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, call, run, text
from tests.kit import money
from tests.kit.money import PRICES
from tests.kit.tools import step

for package, module in {"anthropic": "anthropic_llm", "litellm": "lite_llm"}.items():
    # ADK tries these imports again and again while it runs, and each try compiles the module anew
    if find_spec(package) is None:
        sys.modules.setdefault(f"google.adk.models.{module}", None)  # type: ignore[arg-type]
if find_spec("a2a") is None:
    sys.modules.setdefault("google.adk.agents.remote_a2a_agent", None)  # type: ignore[arg-type]


def agent(model: Any, name: str = "worker", **options: Any) -> LlmAgent:
    return money.agent(name, model, **options)


def steps(calls: int, latency: float = 0.0) -> ScriptedModel:
    """A model that works with the tool and answers with its last call."""
    return ScriptedModel(lambda n, _: call("step", q=n) if n % calls else text("done"), latency_s=latency)


class Worker:
    def __init__(self) -> None:
        self.plugin: RunGuardPlugin | None = None
        self.sessions = InMemorySessionService()
        self.tasks: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self.models: dict[str, ScriptedModel] = {}

    async def do(self, what: str, **facts: Any) -> Any:
        own: Callable[..., Any] | None = getattr(self, f"do_{what}", None)
        if own is not None:
            return await own(**facts)
        scope = facts.pop("scope", None)
        method = getattr(self.plugin, what)  # on a thread: these wait for the store
        return await asyncio.to_thread(lambda: method(scope, **facts) if scope is not None else method(**facts))

    async def do_open(
        self,
        url: str,
        fired: str = "",
        percents: tuple[float, ...] = (),
        usd: str = "",
        window: str | None = None,
        budgets: tuple[dict[str, Any], ...] = (),
        **policy: Any,
    ) -> str:
        """Thresholds that fire are written to a file, so that a killed worker's are known too."""

        def note(percent: float) -> Callable[[Any], None]:
            def tell(status: Any) -> None:
                with Path(fired).open("a") as book:
                    book.write(f"{status.scope} {percent} {status.spent}\n")

            return tell

        thresholds = [Threshold(percent, note(percent)) for percent in percents]
        limits = [Budget(usd=usd, per="user", window=window, thresholds=thresholds)] if usd else []
        limits += [Budget.of(budget) for budget in budgets]
        self.plugin = RunGuardPlugin(
            prices=PRICES, tokens=lambda request: 1_000, store=url, budgets=limits, store_timeout=5, **policy
        )
        return self.plugin.guard.accounts.ledger.worker

    async def do_run(
        self, user: str = "alice", session: str = "s", calls: int = 5, latency: float = 0.0, wait: bool = True
    ) -> Any:
        model = steps(calls, latency)
        self.models[session] = model
        task = asyncio.create_task(self._run(model, user, session))
        self.tasks[session] = task
        return await task if wait else None

    async def _run(self, model: ScriptedModel, user: str, session: str) -> dict[str, Any]:
        assert self.plugin is not None
        before = model.calls
        root = agent(model, tools=[step])
        result = await run(
            root, plugins=[self.plugin], user_id=user, session_id=session, session_service=self.sessions, catch=True
        )
        trips = [(trip.rule, trip.scope, trip.scope_id) for trip in result.trips]
        last = result.events[-1] if result.events else None
        code = last.error_code if last is not None else None
        return {
            "calls": model.calls - before,
            "trips": trips,
            "texts": result.texts,
            "error": repr(result.error or ""),
            "last": code,
        }

    async def do_join(self, session: str) -> Any:
        return await self.tasks.pop(session)

    async def do_made(self, session: str) -> int:
        """Model calls made so far by a run that is under way."""
        return self.models[session].calls

    async def do_fork(self, calls: int) -> dict[str, Any]:
        """Fork while the ledger is in use: parent and child then work at the same time."""
        assert self.plugin is not None
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            report: dict[str, Any] = {"error": "no answer"}
            try:
                with contextlib.suppress(Exception):
                    vars(asyncio.get_running_loop())["_selector"].close()  # the parent's, which must not be shared
                asyncio._set_running_loop(None)
                report = asyncio.run(self._run(steps(calls), "alice", "of the child"))
                report["flushed"] = self.plugin.flush(10)
                report["worker"], report["pid"] = self.plugin.guard.accounts.ledger.worker, os.getpid()
            except BaseException as error:
                report = {"error": repr(error)}
            finally:
                os.write(write, json.dumps(report).encode())
                os._exit(0)
        os.close(write)
        mine, theirs = await asyncio.gather(
            self._run(steps(calls), "alice", "of the parent"), asyncio.to_thread(_all_of, read)
        )
        return {"parent": mine, "child": json.loads(theirs)}


def _all_of(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as pipe:
        return pipe.read()


async def serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection, limit=1 << 24)
    worker = Worker()
    writer.write(b"%d\n" % os.getpid())
    while line := await reader.readline():
        command = json.loads(line)
        try:
            answer = {"is": await worker.do(command.pop("do"), **command)}
        except Exception as error:
            answer = {"raised": f"{type(error).__name__}: {error}"}
        writer.write(json.dumps(answer, default=str).encode() + b"\n")
        await writer.drain()


def mother(path: str) -> None:
    # what the first run imports is there for all workers
    asyncio.run(run(agent(steps(2), tools=[step]), plugins=[RunGuardPlugin(prices=PRICES)]))
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()  # no worker walks, and so copies, what is imported
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(path)
        door.listen()
        print("ready", flush=True)
        while True:
            connection, _ = door.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                door.close()
                asyncio.run(serve(connection))
                os._exit(0)
            connection.close()


if __name__ == "__main__":
    mother(sys.argv[1])
