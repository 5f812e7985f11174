"""The long soak: memory, threads, descriptors and the store's file stay flat over hours of work.

``python -m tests.faults.soak [--minutes 60] [--sessions 1000000] [--steps 100000]`` plays three parts and prints what
the process held on the way: many sessions, one long run, and an ADK app on SQLite until the time is over. The exit code
is 1 if anything grew. ``make test`` plays short forms in ``test_soak.py`` and ``test_soak_figures.py``.
"""

import argparse
import asyncio
import gc
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, Final
from unittest import mock

from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.genai import types

from runguard import Budget
from runguard.adk import RunGuardPlugin
from runguard.core.events import ROOT_LANE, Answer, ModelCall, ModelResult, RunInfo, ToolCall, ToolResults
from runguard.engine.guard import Guard
from runguard.ledger import memory, remote
from runguard.ledger import write_queue as fact_writer
from runguard.policy import Policy
from runguard.pricing.rates import Usage
from runguard.testing import ScriptedModel, call, text

from .leftovers import descriptors

LIMITS: Final[dict[str, Any]] = {
    "max_usd": 100_000,
    "max_model_calls": 1_000_000,
    "max_tool_calls": 1_000_000,
    "budgets": [Budget(usd=100_000, per="user", window="1d"), Budget(calls=100_000_000, per="app")],
    "prices": {"scripted-1": {"input": 1, "output": 1}},
}
_LOOKS: Final = 40  # at the process, in each part
_MORE_MEMORY: Final = 6 * 1024**2  # bytes that the last quarter may take more than the second one
_MORE_FILE: Final = 1024**2
_KEPT_S: Final = 60.0  # of records: the shortest time that a store keeps them
_PACE_S: Final = (
    0.25  # a turn of the app begins this long after the one before: the file is as large as its last minute
)


@dataclass(frozen=True)
class Look:
    """What the process holds at one moment."""

    done: int
    memory: int  # resident bytes
    threads: int
    descriptors: int
    file: int  # bytes of the store


@dataclass
class Part:
    """One part of a soak: its looks, and what grew."""

    name: str
    store: Path | None = None
    looks: list[Look] = field(default_factory=list)

    def look(self, done: int) -> None:
        gc.collect()
        self.looks.append(Look(done, resident(), threading.active_count(), descriptors(), file_size(self.store)))

    def grown(self) -> list[str]:
        """Compare the last quarter with the second one: caches are full by then."""
        quarter = len(self.looks) // 4
        before, after = self.looks[quarter : 2 * quarter], self.looks[-quarter:]
        found = []
        for name, slack in (("memory", _MORE_MEMORY), ("threads", 0), ("descriptors", 0), ("file", _MORE_FILE)):
            least, now = (median(getattr(one, name) for one in some) for some in (before, after))
            if now > least + slack:
                found.append(f"{name}: {least:,.0f} -> {now:,.0f}")
        return found

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.looks[-1].done:,} in all; " + ("; ".join(self.grown()) or "nothing grew")]
        lines += [
            f"  {one.done:>12,}  {one.memory / 1024**2:8.1f} MB  {one.threads:3} threads  "
            f"{one.descriptors:3} descriptors  {one.file / 1024**2:8.2f} MB file"
            for one in self.looks[:: max(len(self.looks) // 8, 1)]
        ]
        return "\n".join(lines)


def resident() -> int:
    """Bytes of memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def file_size(path: Path | None) -> int:
    """Bytes of a SQLite file without its log, which SQLite writes again from its start."""
    return path.stat().st_size if path is not None and path.exists() else 0


# ---- the parts ------------------------------------------------------------------------------------------------------


async def work(guard: Guard, run: str, first: int, last: int) -> None:
    """Report steps of a healthy run as an adapter does: a model call, two tool calls, their answers.

    Every second step runs in a lane of its own, so that what lanes share is full before the first look.
    """
    for n in range(first, last):
        now, lane = guard.clock(), ROOT_LANE
        if n % 2:
            lane = f"/helper@{n}"
            guard.open_lane(guard.runs[run], lane, ROOT_LANE, concurrent=n % 20 == 1)
        event = ModelCall(run, lane, f"agent {n % 40}", now, "scripted-1", 100, max_output_tokens=100)
        assert not guard.check(event)
        if not guard.reserve_now(event):
            assert not await guard.reserve(event)
        guard.settle(event.charge, Usage(100, 10))
        guard.after(ModelResult(run, lane, event.agent, now, 100, 10))
        answers = []
        for part in range(2):
            fingerprint = guard.tools.fingerprint("fetch", {"page": n, "part": part})
            guard.check(ToolCall(run, lane, event.agent, now, "fetch", fingerprint, f"batch {n}", f"call {n}.{part}"))
            value = {"text": f"page {n}, part {part}"}
            answers.append(Answer("fetch", fingerprint, value, f"call {n}.{part}", event_id=f"event {n}"))
        guard.after(ToolResults(run, lane, event.agent, now, f"batch {n}", answers))
        if lane:
            guard.close_lane(guard.runs[run], lane)


async def many_sessions(count: int) -> Part:
    """Sessions of one step each, in memory. There are a thousand users, because the budget of each has to be kept.

    Of the budgets of sessions so few are kept that there are as many before the second quarter.
    """
    part = Part("sessions")
    guard = Guard(Policy.validated({**LIMITS, "budgets": [*LIMITS["budgets"], Budget(usd=1, per="session")]}, ""))
    with mock.patch.object(memory, "_PACKED_KEPT", count // 8):
        for done in range(1, count + 1):
            run = f"run {done}"
            guard.start(RunInfo(run, "app", f"user {done % 1_000}", f"session {done}", at=guard.clock()))
            await work(guard, run, 0, 1)
            guard.end(run)
            if done % max(count // _LOOKS, 1) == 0:
                part.look(done)
    assert guard.runs == {}
    return part


async def one_long_run(steps: int) -> Part:
    part = Part("steps of one run")
    guard = Guard(Policy.validated({**LIMITS, "rules": {"same_call": False}}, ""))
    guard.start(RunInfo("run", "app", "user", "session", at=guard.clock()))
    size = max(steps // _LOOKS, 1)
    for first in range(0, steps, size):
        await work(guard, "run", first, min(first + size, steps))
        part.look(min(first + size, steps))
    assert guard.runs["run"].spend.model_calls == steps
    guard.end("run")
    return part


async def one_app(seconds: float, path: Path) -> Part:
    """Turns of an ADK agent on a SQLite store, until the time is over. Each session is deleted after its turn."""
    part = Part("turns of an ADK app", path)
    # Records are kept for a minute instead of a month, and deleted every ten seconds instead of every hour.
    fact_writer._PURGE_S = 10.0  # type: ignore[misc]
    plugin = RunGuardPlugin(store=f"sqlite:///{path}", retention_days=_KEPT_S / 86_400, **LIMITS)

    def step(n: int) -> dict[str, int]:
        return {"n": n}

    agent = LlmAgent(
        name="worker", model=ScriptedModel(lambda n, _: call("step", n=n) if n % 2 else text("done")), tools=[step]
    )
    service = InMemorySessionService()
    runner = Runner(app=App(name="app", root_agent=agent, plugins=[plugin]), session_service=service)
    began, next_look, done = monotonic(), 0.0, 0
    while monotonic() < began + seconds:
        await asyncio.sleep(began + done * _PACE_S - monotonic())
        names: Any = {"app_name": "app", "user_id": f"u{done % 50}", "session_id": f"s{done}"}
        await service.create_session(**names)
        message = types.Content(role="user", parts=[types.Part(text="go")])
        turn = runner.run_async(user_id=names["user_id"], session_id=names["session_id"], new_message=message)
        assert not any([event.error_code async for event in turn])
        await service.delete_session(**names)
        done += 1
        if monotonic() >= next_look:
            assert await asyncio.to_thread(plugin.flush, 30)
            part.look(done)
            next_look = monotonic() + seconds / _LOOKS
    assert (plugin.trips, plugin.snapshot()["guard_errors"]) == ([], 0)
    await runner.close()
    for ledger in list(remote._ledgers):  # before its file is deleted
        ledger.close()
    return part


def main() -> int:
    parser = argparse.ArgumentParser(description="Work for a long time and look whether anything grows.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--sessions", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=100_000)
    asked = parser.parse_args()
    began = monotonic()
    grown = False
    with tempfile.TemporaryDirectory(prefix="runguard-soak-") as folder:
        parts: list[Callable[[], Any]] = [
            lambda: one_long_run(asked.steps),
            lambda: many_sessions(asked.sessions),
            lambda: one_app(max(asked.minutes * 60 - (monotonic() - began), 5 * _KEPT_S), Path(folder) / "guard.db"),
        ]
        for play in parts:
            part = asyncio.run(play())
            grown = grown or bool(part.grown())
            print(part, f"\n  after {(monotonic() - began) / 60:.1f} minutes", flush=True)
    return int(grown)


if __name__ == "__main__":
    sys.exit(main())
