"""What hundreds of thousands of finished sessions leave behind: in memory, and in the file of a SQLite store.

    python benchmarks/sessions.py [--sessions 300000] [--stored 10000] [--json]

Every session is one run of a user's turn: two model calls and a tool call, under a budget for the run, its session, its
user and the whole app. Then it ends. All of it goes through the guard, as an adapter drives it; no framework, no model.

- memory: resident memory of a process of its own at 10 %, 50 % and 100 %, and what the guard still keeps.
- SQLite: rate, bytes per session, what retention (here: of everything that is over) leaves of the file, whether the
  next sessions need more
  than it has by then, and what the file is after a VACUUM. While it is purged, another process reserves as fast as it
  can: how long it waited.
"""

import argparse
import asyncio
import gc
import json
import logging
import multiprocessing
import os
import sqlite3
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from runguard import Budget
from runguard.core.events import ROOT_LANE, Answer, ModelCall, ModelResult, RunInfo, ToolCall, ToolResults
from runguard.engine.guard import Guard
from runguard.ledger.ledger import Line, StoreOutage
from runguard.ledger.memory import store_of
from runguard.policy import Policy
from runguard.pricing.rates import Usage

USERS = 1_000
SHARES = (0.1, 0.5, 1.0)
FACTS_AT_ONCE = 2_000  # sessions between two waits for the writer
MODEL, PRICES = "scripted-1", {"scripted-1": {"input": 10, "output": 40}}
BUDGETS = [
    Budget(usd=5, per="session"),
    Budget(usd=10**6, per="user", window="1d"),
    Budget(usd=10**6, calls=10**9, per="app", window="1d"),
]
SPAWN = multiprocessing.get_context("spawn")
logging.getLogger("runguard").setLevel(logging.ERROR)


def a_guard(url: str) -> Guard:
    return Guard(
        Policy.validated({"store": url, "prices": PRICES, "max_usd": 1, "budgets": BUDGETS, "store_timeout": 30}, "")
    )


async def session(guard: Guard, number: int) -> None:
    """One user's turn, from its begin to its end."""
    run = f"run-{number}"
    guard.start(RunInfo(run, "app", f"user-{number % USERS}", f"session-{number}", at=guard.clock()))
    for step in range(2):
        event = ModelCall(run, ROOT_LANE, "agent", guard.clock(), MODEL, 1_000, 0, 250)
        guard.check(event)
        await guard.reserve(event, slot=False)
        assert event.charge is not None
        guard.settle(event.charge, Usage(1_000, 250))
        guard.after(ModelResult(run, ROOT_LANE, "agent", guard.clock()))
        if step == 0:
            call = guard.tools.fingerprint("search", {"q": number})
            guard.check(ToolCall(run, ROOT_LANE, "agent", guard.clock(), "search", call, "batch", "1"))
            guard.after(
                ToolResults(
                    run, ROOT_LANE, "agent", guard.clock(), "batch", [Answer("search", call, {"found": number}, "1")]
                )
            )
    guard.end(run)


def resident_mb() -> float:
    """Of this process, now."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def kept(guard: Guard) -> dict[str, int]:
    known, spending = guard.accounts.ledger.known(), guard.accounts.spending
    return {
        "runs": len(guard.runs),
        "accounts": len(known),
        "costs_by_run": len(spending.costs_by_run),
        "scopes with figures": len(spending.history),
    }


# ---- in memory ------------------------------------------------------------------------------------------------------


async def in_memory(sessions: int) -> dict[str, Any]:
    guard = a_guard("memory")
    await session(guard, -1)
    figures: dict[str, Any] = {"sessions": sessions, "resident_mb": {"0%": round(resident_mb(), 1)}, "kept": {}}
    began, done = time.monotonic(), 0
    for share in SHARES:
        while done < sessions * share:
            await session(guard, done)
            done += 1
        figures["resident_mb"][f"{share:.0%}"] = round(resident_mb(), 1)
        figures["kept"][f"{share:.0%}"] = kept(guard)
    figures["seconds"] = round(time.monotonic() - began, 1)
    figures["per_second"] = round(sessions / figures["seconds"])
    return figures


# ---- in a file ------------------------------------------------------------------------------------------------------


class File:
    """A database file as the system sees it, its log written back."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def ask(self, *statements: str) -> Any:
        db = sqlite3.connect(self.path, timeout=30, isolation_level=None)
        try:
            for statement in statements:
                row = db.execute(statement).fetchone()
            return row[0] if row else None
        finally:
            db.close()

    def look(self) -> dict[str, Any]:
        self.ask("PRAGMA wal_checkpoint(TRUNCATE)")
        tables = ("accounts", "holds", "records", "runs")
        rows = {table: self.ask(f"SELECT count(*) FROM {table}") for table in tables}
        free = self.ask("PRAGMA freelist_count") * self.ask("PRAGMA page_size")
        return {"file_mb": round(self.path.stat().st_size / 1e6, 1), "free_mb": round(free / 1e6, 1), "rows": rows}


def bystander(url: str, over: Any, longest: Any, outages: Any) -> None:
    """Another worker with the default deadline of a store."""
    line, store, number = Line("app:other#", "app:other", None, None, None, (10**15, 10**15, 10**15)), store_of(url), 0
    worker = store.connect(1.0)
    while not over.is_set():
        began, number = time.monotonic(), number + 1
        try:
            worker.reserve(f"other-{number}", 900.0, [line], (1, 1, 1))
        except StoreOutage:
            outages.value += 1
        longest.value = max(longest.value, time.monotonic() - began)
        time.sleep(0.005)


async def many(guard: Guard, begin: int, count: int) -> float:
    began = time.monotonic()
    for number in range(begin, begin + count):
        await session(guard, number)
        if number % FACTS_AT_ONCE == 0:
            await asyncio.to_thread(guard.accounts.ledger.flush, 60)
    assert await asyncio.to_thread(guard.accounts.ledger.flush, 60)
    return time.monotonic() - began


def purge(url: str) -> dict[str, float]:
    """Retention, beside a worker that goes on."""
    over, longest, outages = SPAWN.Event(), SPAWN.Value("d", 0.0), SPAWN.Value("i", 0)
    other = SPAWN.Process(target=bystander, args=(url, over, longest, outages), daemon=True)
    other.start()
    end = time.monotonic() + 30
    while not longest.value and time.monotonic() < end:  # until it works
        time.sleep(0.05)
    time.sleep(0.5)
    usual, longest.value = longest.value, 0.0
    keeper = store_of(url).connect(60.0)
    began = time.monotonic()
    keeper.purge(0.0)
    took = time.monotonic() - began
    time.sleep(0.2)
    over.set()
    other.join(30)
    keeper.close()
    return {
        "purge_s": round(took, 2),
        "others_waited_s": round(longest.value, 2),
        "usually_s": round(usual, 2),
        "others_outages": outages.value,
    }


async def in_a_file(sessions: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="runguard-sessions-") as folder:
        file = File(Path(folder) / "guard.db")
        url = f"sqlite:///{file.path}?synchronous=normal"
        guard = a_guard(url)
        before = resident_mb()
        took = await many(guard, 0, sessions)
        figures: dict[str, Any] = {"sessions": sessions, "per_second": round(sessions / took), "full": file.look()}
        figures["bytes_per_session"] = round(figures["full"]["file_mb"] * 1e6 / sessions)
        figures["purge"] = await asyncio.to_thread(purge, url)
        figures["purged"] = file.look()
        await many(guard, sessions, sessions)
        figures["full again"] = file.look()
        figures["resident_mb"] = {"before": round(before, 1), "after": round(resident_mb(), 1)}
        figures["purge again"] = await asyncio.to_thread(purge, url)
        figures["purged again"] = file.look()
        file.ask("VACUUM")
        figures["after a vacuum"] = file.look()
    return figures


# ---- the table ------------------------------------------------------------------------------------------------------


def measured(what: str, sessions: int) -> dict[str, Any]:
    return asyncio.run((in_memory if what == "memory" else in_a_file)(sessions))


def apart(what: str, sessions: int) -> dict[str, Any]:
    """In a process of its own."""
    with ProcessPoolExecutor(1, SPAWN) as pool:
        return pool.submit(measured, what, sessions).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sessions", type=int, default=300_000, help="in memory; a million takes seven minutes of one free core"
    )
    parser.add_argument("--stored", type=int, default=10_000, help="in a file, twice")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results: dict[str, Any] = {"cores": os.cpu_count(), "load_before": round(os.getloadavg()[0], 1)}
    for what, sessions in (("memory", options.sessions), ("sqlite", options.stored)):
        if sessions:
            results[what] = apart(what, sessions)
            if not options.json:
                print(f"\n{what}")
                for name, figure in results[what].items():
                    print(f"  {name:18}{figure}", flush=True)
    if options.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
